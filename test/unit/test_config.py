"""Configuration: files, overrides, checks, and values that are derived from a topology."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from chitu.config.cluster_key import with_api_keys, with_cluster_key
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
from chitu.config.topology import (
    api_host,
    api_url,
    find_instance,
    has_tiers,
    host_names,
    inside_address,
    instances,
    listening_host,
    on_one_host,
    own_api_port,
    routers,
    threads_of,
    with_port,
)
from chitu.config.topology_checks import check, missing_roles, open_api, problems, warn_without_key
from chitu.errors import ConfigError
from chitu.launch.router_client import RouterClient
from chitu.types import Role

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


# ----------------------------------------------------------------------------------------------------------------------
# Checks of a whole topology; all of them run before a model loads.


REAL_HOSTS = [
    "dp_config.router.host=10.0.0.1",
    "dp_config.router.prefill_schedulers.0.host=10.0.0.2",
    "dp_config.router.prefill_schedulers.1.host=10.0.0.2",
    "dp_config.router.decode_schedulers.0.host=10.0.0.1",
    "dp_config.router.decode_schedulers.1.host=10.0.0.1",
    "dp_config.router.decode_schedulers.2.host=10.0.0.1",
]


def two_nodes(*overrides: str) -> Topology:
    return load_topology("pd_disagg_2p3d_multi_node.yaml", [*REAL_HOSTS, *overrides])


DECODE_HOST = "dp_config.router.decode_schedulers.0.host"


def found(topology: Topology, master_addr: str | None = None) -> list[str]:
    return list(problems(topology, master_addr, need_model=False))


def test_instances_are_named_by_role_and_rank() -> None:
    assert [instance.name for instance in instances(two_nodes())] == ["P0", "P1", "D0", "D1", "D2"]
    assert [instance.name for instance in instances(load_topology("unified_local"))] == ["U0"]


def test_the_two_node_example_has_the_ports_and_hosts_of_the_design() -> None:
    topology = two_nodes()
    router = topology.dp_config.router
    assert (router.port, router.stats_port, router.token_port) == (21003, 29600, 29700)
    pd = router.pd_disaggregation
    assert (pd.coordination_port, pd.metadata_sync_port, pd.bootstrap_port) == (29800, 29801, 8080)
    assert [instance.port for instance in router.prefill_schedulers] == [29620, 29621]
    assert [instance.port for instance in router.decode_schedulers] == [29630, 29631, 29632]
    assert host_names(topology) == ["10.0.0.1", "10.0.0.2"]
    assert found(topology, "10.0.0.1") == []


@pytest.mark.parametrize("name", packaged_topologies())
def test_every_packaged_topology_is_right_on_one_host(name: str) -> None:
    assert found(on_one_host(load_topology(name))) == []


def test_on_one_host_other_machines_become_this_one_and_loopback_addresses_stay() -> None:
    overrides = [*REAL_HOSTS, "dp_config.router.prefill_schedulers.0.host=127.0.1.7"]
    moved = on_one_host(load_topology("pd_disagg_2p3d_multi_node", overrides))
    hosts = {instance.name: instance.config.host for instance in instances(moved)}
    assert hosts.pop("P0") == "127.0.1.7"
    assert {*hosts.values(), moved.dp_config.router.host} == {"127.0.0.1"}


def test_placeholder_hosts_are_refused_by_key() -> None:
    (sentence,) = found(load_topology("pd_disagg_2p3d_multi_node"))
    assert all(override.split("=")[0] in sentence for override in REAL_HOSTS)


def test_a_port_clash_names_both_keys() -> None:
    assert found(two_nodes("dp_config.router.decode_schedulers.1.port=29700")) == [
        "dp_config.router.decode_schedulers.1.port and dp_config.router.token_port are both port 29700 on 10.0.0.1: "
        "give one of them another port, or 0"
    ]


def test_the_same_port_on_two_hosts_and_port_zero_are_no_clash() -> None:
    assert found(two_nodes("dp_config.router.prefill_schedulers.0.port=29700")) == []
    assert found(load_topology(None)) == []


@pytest.mark.parametrize("loopback", ["127.0.0.1", "localhost", "127.1.2.3", "::1"])
def test_loopback_addresses_are_refused_where_there_are_several_hosts(loopback: str) -> None:
    (only,) = found(two_nodes(), loopback)
    assert only.startswith(f"PD_MASTER_ADDR is the loopback address {loopback}")
    assert any(
        sentence.startswith("dp_config.router.host is the loopback address")
        for sentence in found(two_nodes(f"dp_config.router.host={loopback}"))
    )
    assert found(load_topology(None), loopback) == []


def test_all_names_of_loopback_are_one_host() -> None:
    topology = load_topology(
        None, ["dp_config.router.host=localhost", "dp_config.router.decode_schedulers.0.port=21003"]
    )
    (clash,) = found(topology)
    assert "21003 on 127.0.0.1" in clash


CPU_PAIR = "dp_config.router.prefill_schedulers.0.devices=cpu dp_config.router.decode_schedulers.0.devices=cpu"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (f"{CPU_PAIR} dp_config.router.decode_schedulers.0.tp_size=2", "give one device per rank"),
        ("dp_config.router.decode_schedulers.0.devices=[cpu,cpu]", "names 2 devices"),
        ("dp_config.router.decode_schedulers.0.devices=[gpu]", "has 'gpu': a device is 'cpu' or 'cuda:N'"),
        ("scheduler.chunk_size=4096", "no chunk would ever fit a step"),
        ("dp_config.router.pd_disaggregation.deadlines.lease_s=0.7", "less than two heartbeats"),
        ("dp_config.router.breaker.open_s=61", "open_s is 61, more than dp_config.router.breaker.max_open_s (60)"),
        ("dp_config.router.cors_origins=[https://a.example/]", "cors_origins has 'https://a.example/', which no"),
        ("dp_config.router.cors_origins=['*',a.example]", "cors_origins has 'a.example', which no"),
        ("dp_config.router.cors_origins=[https://A.example]", "cors_origins has 'https://A.example', which no"),
        ("dp_config.router.images.max_file_mb=64", "files of at most 63 MiB"),
        ("dp_config.router.max_total_body_bytes=2097151", "less than one body of dp_config.router.max_body_bytes"),
        ("dp_config.router.images.hosts=[https://a.example]", "images.hosts has 'https://a.example', which is no host"),
        ("dp_config.router.images.hosts=[a.example/b]", "images.hosts has 'a.example/b', which is no host"),
        ("dp_config.router.host=0.0.0.0", "no address that others can reach"),
        ('cache.host_bytes=1 cache.disk.path=""', "cache.disk.path is empty: give a folder"),
        ('dp_config.router.kept_requests.dir=""', "kept_requests.dir is empty: give a folder"),
        ('trace.dir=""', "trace.dir is empty: give a folder"),
        (f"{CPU_PAIR} dp_config.router.pd_disaggregation.transport=cuda_ipc", "no P or D has a CUDA device"),
        (f"{CPU_PAIR} dp_config.router.decode_schedulers.0.devices=[cuda:0]", "need the same kind of device"),
    ],
)
def test_what_cannot_work_is_refused(override: str, part: str) -> None:
    assert any(part in sentence for sentence in found(load_topology(None, override.split())))


def test_adapters_need_names_of_their_own_and_folders(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    def of(name: str, folder: Path) -> list[str]:
        adapters = f"model.adapters={{{json.dumps(name)}: {json.dumps(str(folder))}}}"
        topology = load_topology(None, [f"model.path={tmp_path}", "model.served_name=base", adapters])
        return [sentence for sentence in problems(topology) if "model.adapters" in sentence]

    assert of("sql", tmp_path) == []
    assert of("base", tmp_path) == ["model.adapters: 'base' is the name of the model alone"]
    assert "must be 1 to 100 printable characters" in of(" sql", tmp_path)[0]
    assert "it has no adapter_config.json" in of("sql", tmp_path / "none")[0]


def test_origins_as_browsers_send_them_are_no_problem() -> None:
    origins = "['*', 'null', 'http://localhost:3000', 'http://[::1]:80', 'chrome-extension://abc']"
    assert found(load_topology(None, [f"dp_config.router.cors_origins={origins}"])) == []


def test_devices_that_a_launcher_still_has_to_choose_are_no_problem() -> None:
    default = load_topology(None, ["dp_config.router.decode_schedulers.0.tp_size=2"])
    assert found(default) == []
    words = load_topology(
        None, [f"dp_config.router.{role}_schedulers.0.devices=auto" for role in ("prefill", "decode")]
    )
    assert instances(words) == instances(load_topology(None)), "the default, with and without brackets"
    assert load_topology(None, CPU_PAIR.split()).dp_config.router.decode_schedulers[0].devices == ("cpu",)


@pytest.mark.parametrize(
    ("empty", "missing"),
    [
        (("prefill", "decode"), (Role.PREFILL, Role.DECODE)),
        (("decode",), (Role.DECODE,)),
        (("prefill",), (Role.PREFILL,)),
        ((), ()),
    ],
)
def test_roles_may_be_absent_and_join_later(empty: tuple[str, ...], missing: tuple[Role, ...]) -> None:
    topology = load_topology(None, [f"dp_config.router.{name}_schedulers=[]" for name in empty])
    assert (found(topology), missing_roles(topology)) == ([], missing)
    assert missing_roles(load_topology("unified_local")) == ()


def test_shared_memory_between_hosts_is_refused() -> None:
    assert any(
        "transport is shm" in text for text in found(two_nodes("dp_config.router.pd_disaggregation.transport=shm"))
    )


def test_gpu_memory_needs_a_transport_for_it() -> None:
    section = "dp_config.router.pd_disaggregation"
    devices = [f"dp_config.router.{kind}_schedulers.0.devices=[cuda:0]" for kind in ("prefill", "decode")]
    for transport in ("auto", "cuda_ipc", "mooncake", "nixl"):
        assert found(load_topology(None, [*devices, f"{section}.transport={transport}"])) == []
    assert found(load_topology(None, [*devices, f"{section}.transport=shm"])) == [], "staged, by host memory"
    shm = [*devices, f"{section}.transport=shm"]
    (sentence,) = found(load_topology(None, [*shm, f"{section}.transfer=direct"]))
    assert "maps host memory" in sentence and "transfer auto or staged" in sentence
    of_two = ["dp_config.router.decode_schedulers.0.devices=[cuda:0,cuda:1]"]
    sentences = found(load_topology(None, [*shm, *of_two, "dp_config.router.decode_schedulers.0.tp_size=2"]))
    assert any("tp_size above 1" in text for text in sentences)


def test_a_pool_that_cannot_hold_one_request_is_refused() -> None:
    overrides = ["cache.num_pages=4", "cache.page_size=16"]
    assert found(load_topology(None, [*overrides, "model.max_model_len=64"])) == []
    (only,) = found(load_topology(None, [*overrides, "model.max_model_len=65"]))
    assert only.startswith("cache.num_pages is 4")


def test_host_memory_for_a_prefix_cache_that_cannot_be_is_refused() -> None:
    for key in ("cache.disk.path", "cache.store.master"):
        (only,) = found(load_topology(None, [f"{key}=somewhere:1"]))
        assert only.startswith(key) and "cache.host_bytes is 0" in only
    memory = "cache.host_bytes=1000000"
    (only,) = found(load_topology(None, [memory, "cache.prefix_cache=false"]))
    assert "cache.host_bytes" in only and "cache.prefix_cache" in only


def test_d_has_tiers_where_p_finds_what_it_leaves_there() -> None:
    def with_tiers(*overrides: str) -> list[str]:
        topology = load_topology("pd_disagg_1p1d_local", list(overrides))
        return [instance.name for instance in instances(topology) if has_tiers(topology, instance)]

    memory, disk = "cache.host_bytes=1000000", "cache.disk.path=somewhere"
    assert with_tiers() == []
    assert with_tiers(memory) == ["P0"]
    assert with_tiers(memory, disk) == with_tiers(memory, "cache.store.master=somewhere:1") == ["P0", "D0"]


def test_the_model_folder_is_checked_first_thing(tmp_path: Path) -> None:
    def sentence(path: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check(load_topology(None, [f"model.path={path}"]))
        return caught.value.message

    assert sentence("''").startswith("model.path is empty")
    assert "there is no such folder" in sentence(str(tmp_path / "none"))
    assert "no config.json" in sentence(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check(load_topology(None, [f"model.path={tmp_path}"]))


def test_heads_that_the_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 2}')
    key = "dp_config.router.decode_schedulers.0"

    def sentences(tp_size: int) -> list[str]:
        devices = ",".join(["cpu"] * tp_size)
        overrides = [f"{key}.tp_size={tp_size}", f"{key}.devices=[{devices}]", f"model.path={tmp_path}"]
        return list(problems(load_topology(None, overrides)))

    assert sentences(2) == sentences(4) == sentences(8) == []
    assert sentences(3) == [f"{key}.tp_size is 3: 8 attention heads cannot be split evenly over 3 ranks"]
    (tmp_path / "config.json").write_text("no JSON: the loader says what is wrong with it")
    assert sentences(3) == []


def test_scheduler_base_port_is_the_port_of_the_process_that_reads_it() -> None:
    topology = two_nodes("dp_config.scheduler_base_port=29640")
    assert find_instance(topology, Role.DECODE, 1).config.port == 29640
    assert find_instance(two_nodes(), Role.DECODE, 1).config.port == 29631
    with pytest.raises(ConfigError, match="no instance D9; it has P0, P1, D0, D1, D2"):
        find_instance(topology, Role.DECODE, 9)


def test_threads_are_shared_by_the_instances_of_a_host() -> None:
    topology = two_nodes("dp_config.router.decode_schedulers.2.threads=7")
    threads = {instance.name: threads_of(topology, instance, cores=9) for instance in instances(topology)}
    assert threads == {"P0": 4, "P1": 4, "D0": 3, "D1": 3, "D2": 7}
    assert {threads_of(topology, instance, cores=1) for instance in instances(topology)[:2]} == {1}
    ranks = two_nodes(
        "dp_config.router.decode_schedulers.2.threads=7", "dp_config.router.decode_schedulers.2.tp_size=2"
    )
    assert threads_of(ranks, instances(ranks)[4], cores=9) == 3, "each rank's part"


@pytest.mark.parametrize(
    ("overrides", "listens", "asked", "warns"),
    [
        ([], "127.0.0.1", "127.0.0.1", False),
        (["dp_config.router.http_host=0.0.0.0"], "0.0.0.0", "127.0.0.1", True),
        (["dp_config.router.http_host='::'"], "::", "127.0.0.1", True),
        (["dp_config.router.http_host=10.0.0.7"], "10.0.0.7", "10.0.0.7", True),
        (["dp_config.router.http_host=127.0.0.2"], "127.0.0.2", "127.0.0.2", False),
    ],
)
def test_the_api_alone_can_listen_elsewhere_and_without_keys_that_is_warned_of(
    overrides: list[str], listens: str, asked: str, warns: bool
) -> None:
    topology = load_topology(None, overrides)
    assert found(topology) == []
    router = topology.dp_config.router
    assert (router.host, listening_host(router), api_host(router)) == ("127.0.0.1", listens, asked)
    assert (open_api(topology) is not None) == warns
    assert open_api(with_api_keys(topology, ("a-key",))) is None


@pytest.mark.parametrize(("name", "values"), [("api_key_salts", "ab"), ("api_key_min_priorities", ("-1", "0"))])
@pytest.mark.parametrize(
    ("keys", "entries", "is_wrong"), [(0, 0, 0), (0, 2, 0), (2, 0, 0), (2, 2, 0), (2, 1, 1), (1, 2, 1)]
)
def test_each_api_key_has_an_entry_or_none_has(
    name: str, values: Sequence[str], keys: int, entries: int, is_wrong: bool
) -> None:
    topology = load_topology(None, [f"dp_config.router.{name}=[{','.join(values[:entries])}]"])
    problems = found(with_api_keys(topology, ("a-key", "b-key")[:keys]))
    assert [problem for problem in problems if name in problem] == problems and len(problems) == is_wrong


@pytest.mark.parametrize("setting", ["min_priority=1", "api_key_min_priorities=[0,5]", "min_priority=-3000000000"])
def test_a_bound_of_priorities_that_would_refuse_the_default_is_refused_itself(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        load_topology(None, [f"dp_config.router.{setting}"])


def test_all_addresses_are_no_address_of_a_host_and_on_one_host_too() -> None:
    first = found(on_one_host(load_topology(None, ["dp_config.router.host=0.0.0.0"])))[0]
    assert "dp_config.router.http_host=0.0.0.0" in first
    (only,) = found(load_topology(None, ["dp_config.router.http_host=''"]))
    assert "http_host is empty" in only


def test_several_hosts_without_a_key_are_warned_of_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    warn_without_key(load_topology(None))
    warn_without_key(with_cluster_key(two_nodes(), "0123456789abcdef"))
    assert not caplog.records
    warn_without_key(two_nodes())
    assert "NO CLUSTER KEY on 2 hosts" in caplog.text


def test_the_hosts_of_a_cluster_have_addresses_of_one_family() -> None:
    hosts = ("dp_config.router.host", "dp_config.router.prefill_schedulers.0.host", DECODE_HOST)

    def at(*addresses: str) -> Topology:
        return load_topology(None, [f"{key}='{address}'" for key, address in zip(hosts, addresses, strict=True)])

    assert found(at("fd00::1", "fd00::2", "fd00::1")) == []
    (mixed,) = found(at("fd00::1", "10.0.0.2", "fd00::1"))
    assert "prefill_schedulers.0.host is 10.0.0.2" in mixed and mixed.endswith("give all of one family")
    assert "fe80::1%eth0: give an address that is the same on every machine" in found(at(*["fe80::1%eth0"] * 3))[0]
    assert found(at("fd00::1", "node-b", "fd00::1")) == [], "a name may have either"


@pytest.mark.parametrize(
    ("host", "listens", "shown"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:80"),
        ("::1", "::1", "[::1]:80"),
        ("fd00::1", "::", "[fd00::1]:80"),
        ("10.0.0.1", "0.0.0.0", "10.0.0.1:80"),
        ("node-a", "0.0.0.0", "node-a:80"),
    ],
)
def test_a_process_listens_in_the_family_of_its_host(host: str, listens: str, shown: str) -> None:
    assert (inside_address(host), with_port(host, 80)) == (listens, shown)
    assert RouterClient(api_url(host, 21003)).url == f"http://{shown[:-2]}21003"


@pytest.mark.parametrize("key", ["", "key\n", " key"])
def test_an_api_key_that_no_client_can_send_is_refused_without_showing_it(key: str) -> None:
    (problem,) = found(with_api_keys(load_topology(None), ("sound", key)))
    assert (
        problem.startswith("dp_config.router.api_keys.1 is empty or has a space at an end") and "sound" not in problem
    )


# Several routers.


def test_routers_of_one_host_share_the_port_of_the_api_alone() -> None:
    ports = ["dp_config.router.stats_port=29600", "dp_config.router.pd_disaggregation.coordination_port=29800"]
    topology = load_topology(None, ["dp_config.router.hosts=[10.0.0.1, 10.0.0.2, 10.0.0.1]", *ports])
    assert topology.dp_config.router.host == "10.0.0.1"
    first, other, second = routers(topology)
    base = topology.dp_config.router
    assert [each.host for each in (first, other, second)] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert [each.stats_port - base.stats_port for each in (first, other, second)] == [0, 0, 2]
    assert second.pd_disaggregation.coordination_port == base.pd_disaggregation.coordination_port + 2
    assert [own_api_port(base, index) - base.port for index in range(3)] == [1, 0, 2]


def test_the_key_of_api_processes_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(
        ConfigError, match=r"dp_config.router.workers is gone: name complete routers in dp_config\.router"
    ):
        load_topology(None, ["dp_config.router.workers=2"])
