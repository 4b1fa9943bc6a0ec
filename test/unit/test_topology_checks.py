"""Checks of a whole topology; all of them run before a model loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from chitu.config.cluster_key import with_api_keys, with_cluster_key
from chitu.config.load import (
    load_topology,
    packaged_topologies,
)
from chitu.config.schema import Topology
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
