"""Configuration: files, overrides, and values that are derived from a topology."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from chitu.config.devices import overlaps_steps
from chitu.config.key_paths import known_keys
from chitu.config.load import (
    dump_topology,
    load_topology,
    packaged_topologies,
    parse_topology,
    pd_master_addr,
    progress_file,
    router_host,
    torchrun_rank,
)
from chitu.config.schema import DPConfig, InstanceConfig, RouterConfig, SchedulerConfig, Topology
from chitu.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------------------
# Reading a topology: overrides, and a one-sentence error for every mistake.


def message_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_topology(None, list(overrides))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_stdout_as_the_place_of_logs_needs_no_quotes() -> None:
    assert load_topology(None, ["log.dir=-"]).log.dir == load_topology(None, ['log.dir="-"']).log.dir == "-"


@pytest.mark.parametrize("name", packaged_topologies())
def test_packaged_topologies_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    topology = load_topology(name)
    (tmp_path / "copy.yaml").write_text(dump_topology(topology))
    assert load_topology(str(tmp_path / "copy.yaml")) == topology


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)


@given(
    st.builds(
        RouterConfig,
        host=TEXTS,
        api_keys=st.lists(TEXTS, max_size=3).map(tuple),
        decode_schedulers=st.lists(st.builds(InstanceConfig, host=TEXTS), max_size=2).map(tuple),
    )
)
def test_any_texts_survive_a_round_trip(router: RouterConfig) -> None:
    topology = Topology(dp_config=DPConfig(router=router))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_topology(topology))
        file.flush()
        assert load_topology(file.name) == topology


def test_no_path_is_the_local_1p1d() -> None:
    topology = load_topology(None)
    assert topology == load_topology("pd_disagg_1p1d_local")
    assert len(topology.dp_config.router.prefill_schedulers) == 1
    assert len(topology.dp_config.router.decode_schedulers) == 1


def test_overrides_reach_sections_lists_and_words_that_yaml_1_1_takes_for_booleans() -> None:
    topology = load_topology(
        None,
        [
            "scheduler.chunk_size=64",
            "model.path=/models/a b=c",
            "model.adapters.sql=/adapters/sql",
            "dp_config.router.decode_schedulers.0.port=29630",
            "dp_config.router.decode_schedulers.1.devices=[cuda:1]",
            "dp_config.router.pd_disaggregation.ib_device=off",
            "dp_config.router.pd_disaggregation.deadlines.queue_s=5",
            "dp_config.router.unified_schedulers.0={port: 7}",
            "scheduler.threads=null",
        ],
    )
    router = topology.dp_config.router
    assert topology.scheduler.chunk_size == 64
    assert topology.model.path == "/models/a b=c"
    assert topology.model.adapters == {"sql": "/adapters/sql"}
    assert [instance.port for instance in router.decode_schedulers] == [29630, 0]
    assert router.decode_schedulers[1].devices == ("cuda:1",)
    assert router.pd_disaggregation.ib_device == ("off",)
    assert router.pd_disaggregation.deadlines.queue_s == 5.0
    assert router.unified_schedulers[0].port == 7
    assert topology.scheduler.threads is None


def test_on_and_off_are_booleans_and_words_whatever_wrote_the_file(tmp_path: Path) -> None:
    file = tmp_path / "written_by_a_tool.yaml"
    router = {"pd_disaggregation": {"verify_kv": False}, "retry": {"continue_streams": "off"}}
    file.write_text(yaml.safe_dump({"scheduler": {"overlap": True}, "dp_config": {"router": router}}))
    topology = load_topology(str(file))
    assert topology.dp_config.router.pd_disaggregation.verify_kv == "off"
    assert topology.scheduler.overlap == "on"
    assert topology.dp_config.router.retry.continue_streams is False
    assert load_topology(str(file), ["scheduler.overlap=false"]).scheduler.overlap == "off"
    # `verify_kv` has no value `on`; if a name is wanted, `off` is a name like any other.
    assert "not True" in message_of("dp_config.router.pd_disaggregation.verify_kv=true")
    assert "ib_device must be a list" in message_of("dp_config.router.pd_disaggregation.ib_device=true")


@pytest.mark.parametrize("number", ["1e3", "1.e+3", "10.0E2", "1000", "+.1e4"])
def test_a_number_may_have_an_exponent(number: str, tmp_path: Path) -> None:
    topology = load_topology(None, [f"dp_config.router.request_timeout_s={number}", "model.served_name='1e3'"])
    assert (topology.dp_config.router.request_timeout_s, topology.model.served_name) == (1000.0, "1e3")
    (tmp_path / "written.yaml").write_text(dump_topology(topology))
    assert load_topology(str(tmp_path / "written.yaml")) == topology


@pytest.mark.parametrize(
    "key", [key for key in known_keys() if key.endswith(("_s", "_ms", "fraction")) and "schedulers" not in key]
)
def test_no_time_and_no_rate_is_infinite(key: str) -> None:
    assert message_of(f"{key}=.inf").startswith(f"{key} must be a number <= ")


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("dp_config.router.prot=1", "dp_config.router.prot", "dp_config.router.port"),
        ("model={pth: x}", "model.pth", "model.path"),
        ("chunk_size=1", "chunk_size", "scheduler.chunk_size"),
        ("dp_config.router.pd_separation.transport=shm", "pd_separation", "dp_config.router.pd_disaggregation"),
        ("dp_config.router.decode_schedulers.0.prot=1", "decode_schedulers.0.prot", "decode_schedulers.0.port"),
        ("router.stats_port=1", "router", "dp_config.router"),
        ("dp_config.router.decode_schedulers.0.tp=2", "0.tp", "dp_config.router.decode_schedulers.0.tp_size"),
        ("tp=2", "tp", "dp_config.router.prefill_schedulers.0.tp_size"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(override: str, key: str, nearest: str) -> None:
    message = message_of(override)
    assert message.startswith("unknown key")
    assert key in message
    assert f"did you mean '{nearest}" in message or nearest in message.split("did you mean")[1]


def test_an_unknown_key_is_compared_with_names_and_not_with_where_they_are() -> None:
    assert "order'; known here: host, port" in message_of("dp_config.router.prefill_schedulers.0.order=1")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("dp_config.router.port=70000", "dp_config.router.port must be an integer <= 65535, not 70000"),
        ("dp_config.router.port=abc", "dp_config.router.port must be an integer, not 'abc'"),
        ("scheduler.chunk_size=0", "scheduler.chunk_size must be an integer >= 1, not 0"),
        ("cache.memory_fraction=2", "cache.memory_fraction must be a number <= 1.0, not 2"),
        ("model.path=3", "model.path must be a text, not 3"),
        ("cache=3", "cache must be a section, not 3"),
        ("dp_config.router.decode_schedulers=3", "dp_config.router.decode_schedulers must be a list, not 3"),
        (
            "dp_config.router.decode_schedulers.0.port=-1",
            "dp_config.router.decode_schedulers.0.port must be an integer >= 0, not -1",
        ),
        (
            "dp_config.router.policy=round",
            "dp_config.router.policy must be one of least_loaded, power_of_two, prefix_affinity, round_robin, "
            "not 'round'; did you mean 'round_robin'?",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(override: str, sentence: str) -> None:
    assert message_of(override) == sentence


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("nonsense", "must look like key.path=value"),
        ("=1", "must look like key.path=value"),
        ("model.path={", "no valid YAML"),
        ("dp_config.router.decode_schedulers.7.port=1", "the next index is 1"),
        ("dp_config.router.decode_schedulers.x.port=1", "must be an index"),
        ("model.path.x=1", "'model.path' is a value"),
    ],
)
def test_a_wrong_override_says_why(override: str, part: str) -> None:
    assert part in message_of(override)


def test_a_wrong_file_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as unlike:
        load_topology("nofile.yaml")
    assert "did you mean" not in unlike.value.message
    with pytest.raises(ConfigError, match=r"unified_locl.*did you mean 'unified_local.yaml'"):
        load_topology("unified_locl.yaml")
    for text, part in [("a: [", "line"), ("- 1", "mapping"), ("model: {path: a}\nmodel: {path: b}", "given twice")]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=part):
            load_topology(str(tmp_path / "bad.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    assert load_topology(str(tmp_path / "empty.yaml")) == Topology()


def test_every_key_of_the_schema_can_be_overridden_by_its_own_path() -> None:
    for key in known_keys():
        try:
            load_topology(None, [f"{key}=null"])
        except ConfigError as error:
            assert "unknown key" not in error.message


@pytest.mark.parametrize("text", [",", " , ,", " "])
def test_api_keys_of_unset_variables_do_not_open_the_api(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHITU_API_KEYS", text)
    with pytest.raises(ConfigError, match="has no API key"):
        load_topology(None)
    monkeypatch.setenv("CHITU_API_KEYS", " one,, two")
    assert load_topology(None).dp_config.router.api_keys == ("one", "two")


def test_pd_master_addr_wins_over_master_addr(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = load_topology(None)
    for name in ("PD_MASTER_ADDR", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert router_host(topology) == topology.dp_config.router.host
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    assert router_host(topology) == "10.0.0.2"
    monkeypatch.setenv("PD_MASTER_ADDR", "10.0.0.1")
    assert router_host(topology) == "10.0.0.1"
    assert pd_master_addr() == "10.0.0.1"


def test_the_master_addr_that_torchrun_sets_says_nothing_about_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PD_MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert pd_master_addr() is None


def test_torchrun_variables_are_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CHITU_PROGRESS_FILE"):
        monkeypatch.delenv(name, raising=False)
    by_hand = torchrun_rank()
    assert (by_hand.rank, by_hand.world_size) == (0, 1)
    assert progress_file() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (torchrun_rank().rank, torchrun_rank().world_size) == (3, 4)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigError, match="RANK must be an integer"):
        torchrun_rank()


# ----------------------------------------------------------------------------------------------------------------------
# `scheduler.overlap` by key, device and TP size.


@pytest.mark.parametrize(
    ("key", "devices", "expected"),
    [
        ("auto", ("cpu",), False),
        ("auto", ("cuda:1",), True),
        ("on", ("cpu",), True),
        ("off", ("cuda:0",), False),
        ("auto", ("cuda:0", "cuda:1"), True),
        ("auto", ("cpu", "cpu"), False),
        ("on", ("cpu", "cpu"), True),
    ],
)
def test_steps_overlap_where_the_device_computes_by_itself(
    key: Literal["auto", "on", "off"], devices: tuple[str, ...], expected: bool
) -> None:
    instance = InstanceConfig(devices=devices, tp_size=len(devices))
    assert overlaps_steps(SchedulerConfig(overlap=key), instance) is expected


# ----------------------------------------------------------------------------------------------------------------------
# Step sizes that the topology leaves open follow the devices; sizes that it sets stay.


P, D, U = (f"dp_config.router.{role}_schedulers.0.devices=[{{}}]" for role in ("prefill", "decode", "unified"))


def sizes(name: str, *overrides: str) -> tuple[int, int]:
    scheduler = load_topology(name, overrides).scheduler
    return scheduler.max_batched_tokens, scheduler.chunk_size


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("pd_disagg_1p1d_local", (), (2048, 512)),
        ("pd_disagg_1p1d_local", (P.format("cuda:0"), D.format("cuda:0")), (8192, 8192)),
        ("pd_disagg_1p1d_local", (P.format("cuda:0,cuda:1"),), (8192, 8192)),
        ("pd_disagg_1p1d_local", (D.format("cuda:0"),), (2048, 512)),
        ("unified_local", (U.format("cuda:0"),), (2048, 2048)),
        ("unified_local", (U.format("cuda:0"), "scheduler.chunk_size=100"), (2048, 100)),
        ("unified_local", (U.format("cuda:0"), "scheduler.max_batched_tokens=300"), (300, 300)),
        ("unified_local", (U.format("cuda:0"), "scheduler.chunk_size=4096"), (4096, 4096)),
        (
            "unified_local",
            (U.format("cuda:0"), "scheduler.chunk_size=2048", "scheduler.max_batched_tokens=2048"),
            (2048, 2048),
        ),
    ],
)
def test_what_is_left_open_follows_the_devices(name, overrides, expected):
    assert sizes(name, *overrides) == expected


def test_a_topology_that_was_written_down_stays_as_it_is(tmp_path):
    first = load_topology("pd_disagg_1p1d_local", [P.format("cuda:0")])
    file = tmp_path / "t.yaml"
    file.write_text(dump_topology(first))
    assert load_topology(str(file)) == first
    assert parse_topology({}).scheduler.chunk_size == 512
