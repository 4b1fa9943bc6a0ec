"""Groups on several hosts: their parts in a topology, who may meet as a group, and what the doctor says of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from chitu.config.devices import GPU_ELSEWHERE
from chitu.config.load import load_topology, lws_hosts
from chitu.config.schema import Topology
from chitu.config.topology import bound_ports, groups, host_names, instances, instances_on, on_one_host, parts
from chitu.config.topology_checks import problems
from chitu.engine.memory_budget import GIB
from chitu.engine.rendezvous import Claim, meet
from chitu.errors import ConfigError
from chitu.launch.host import NodeOptions, _node
from chitu.launch.join import grown
from chitu.launch.plan import Entries, host_overrides, launch_problems, plan, plan_text, specs_on, with_hosts
from chitu.launch.preflight import Bind, Level, ModelFacts
from chitu.net.interfaces import interface_towards
from chitu.process.node_devices import Device, NodeDevices
from chitu.process.placement import assign_devices, environment_of, with_shares
from chitu.tools.doctor import check_cluster, check_node
from chitu.tools.node_facts import NodeFacts
from chitu.types import Role

ROUTER = "dp_config.router"
GROUP = "{hosts: [10.0.0.2, 10.0.0.3], dp_size: 4, tp_size: 2, port: 300, rendezvous_port: 400, devices: [%s]}"
CPUS = ", ".join(["cpu"] * 8)


def topology_of(*words: str) -> Topology:
    router = ["host=10.0.0.1", "prefill_schedulers=[{host: 10.0.0.1, devices: [cpu]}]"]
    return load_topology("pd_disagg_1p1d_multi_node", [f"{ROUTER}.{word}" for word in (*router, *words)])


def on_two(entry: str = GROUP % CPUS) -> Topology:
    return topology_of(f"decode_schedulers=[{entry}]")


# ----------------------------------------------------------------------------------------------------------- topology


def test_each_host_has_whole_members_in_their_order() -> None:
    topology = on_two()
    found = [(i.name, i.config.host, i.config.port, i.place) for i in instances(topology) if i.role is Role.DECODE]
    assert found == [
        ("D0", "10.0.0.2", 300, 0),
        ("D1", "10.0.0.2", 301, 1),
        ("D2", "10.0.0.3", 302, 0),
        ("D3", "10.0.0.3", 303, 1),
    ]
    assert host_names(topology) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [(p.name, p.config.host, p.config.num_devices, p.node_rank) for p in parts(topology)[1:]] == [
        ("D0-D1", "10.0.0.2", 4, 0),
        ("D2-D3", "10.0.0.3", 4, 1),
    ]
    assert (f"{ROUTER}.decode_schedulers.0.rendezvous_port", "10.0.0.2", 400) in [*bound_ports(topology)]
    assert not [*problems(topology, need_model=False)] and not [*launch_problems(topology)]


def test_each_host_gets_a_torchrun_that_meets_the_others_at_the_first() -> None:
    topology = on_two()
    specs = plan(topology, "t.yaml", [], 8, Entries(python="python"))
    first, second = (spec for spec in specs if spec.name.startswith("D"))
    assert [(s.name, s.host, s.num_members, s.is_part) for s in (first, second)] == [
        ("D0-D1", "10.0.0.2", 2, True),
        ("D2-D3", "10.0.0.3", 2, True),
    ]
    for node_rank, spec in enumerate((first, second)):
        words = {"--nnodes=2", f"--node-rank={node_rank}", "--master-addr=10.0.0.2", "--master-port=400"}
        assert words < {*spec.argv} and "--nproc-per-node=4" in spec.argv and "--standalone" not in spec.argv
        assert spec.argv[spec.argv.index("--rank") + 1] == "0", "all ranks are counted from the first member"
    assert [spec.name for spec in specs_on(topology, specs, 2)] == ["D2-D3"]
    text = plan_text(topology, specs, 8, ["chitu", "node"])
    assert f"D2-D3 on 10.0.0.3: dp 2 x tp 2, devices {'cpu,' * 3}cpu, part 1 of a group of 4 on 2 hosts" in text
    assert "10.0.0.3             chitu node --node-index 2" in text


def test_one_member_a_host_needs_torchrun_too_and_a_group_on_one_host_is_as_ever() -> None:
    lone = on_two("{hosts: [10.0.0.2, 10.0.0.3], dp_size: 2, rendezvous_port: 400, devices: [cpu, cpu]}")
    specs = plan(lone, "t.yaml", [], 8, Entries(torchrun=False))
    assert ["torch.distributed.run" in spec.argv for spec in specs if spec.name in ("D0", "D1")] == [True, True]
    together = on_one_host(on_two())
    assert [part.name for part in parts(together)] == ["P0", "D0-D3"] and parts(together) == groups(together)
    (spec,) = (s for s in plan(together, "t.yaml", [], 8) if s.name == "D0-D3")
    assert "--standalone" in spec.argv and not spec.is_part
    assert parts(topology_of("decode_schedulers=[{hosts: [10.0.0.2]}]"))[1].config.host == "10.0.0.2"


def test_machines_replace_hosts_by_their_index() -> None:
    moved = with_hosts(on_two(), ["r", "a", "b"])
    assert host_names(moved) == ["r", "a", "b"] and groups(moved)[1].config.hosts == ("a", "b")
    assert f"{ROUTER}.decode_schedulers.0.hosts=[a,b]" in host_overrides(on_two(), ["r", "a", "b"])
    like = grown(on_two(), [], Role.DECODE, 4, "10.0.0.9")
    assert not any(part.is_part for part in parts(like)) and instances_on(like, "10.0.0.9")[0].name == "D4"


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("{hosts: [a, b], dp_size: 3, rendezvous_port: 400}", "dp_size is 3, which 2 hosts cannot share evenly"),
        ("{hosts: [a, b], dp_size: 1, tp_size: 2, rendezvous_port: 400}", "dp_size is 1, which 2 hosts"),
        ("{hosts: [a, b], dp_size: 2}", "rendezvous_port is 0, but the processes of 2 hosts have to find each other"),
        ("{hosts: [a, a], dp_size: 2, rendezvous_port: 400}", "hosts names a twice"),
        ("{hosts: [a, 127.0.0.1], dp_size: 2, rendezvous_port: 4}", "hosts.1 is the loopback address"),
        ("{hosts: [a, b.example], dp_size: 2, rendezvous_port: 4}", "b.example are still placeholders"),
        ("{hosts: [a, b], dp_size: 2, port: 400, rendezvous_port: 400}", "are both port 400 on a"),
    ],
)
def test_what_cannot_work_on_hosts_is_refused_by_name(entry: str, found: str) -> None:
    assert found in "\n".join(problems(on_two(entry), need_model=False))


def test_each_host_places_its_own_part_on_its_own_gpus() -> None:
    node = NodeDevices(tuple(Device(str(k), f"GPU-{k}", "H") for k in range(3)), "a test")
    topology = topology_of(
        "prefill_schedulers=[{host: 10.0.0.3}]",
        "decode_schedulers=[{hosts: [10.0.0.2, 10.0.0.3], dp_size: 2, tp_size: 2, rendezvous_port: 400}]",
    )
    shared = with_shares(topology, assign_devices(topology, instances_on(topology, "10.0.0.3"), node))
    assert groups(shared)[1].config.devices == (GPU_ELSEWHERE, GPU_ELSEWHERE, "cuda:1", "cuda:2")
    part = parts(shared)[2]
    assert part.name == "D1" and environment_of(part, node)["CUDA_VISIBLE_DEVICES"] == "1,2"


# ------------------------------------------------------------------------------------------------------------ meeting


class Ranks:
    """Ranks that meet, as threads."""

    def __init__(self, size: int = 4, per_host: int = 2) -> None:
        self.store, self.size, self.per_host = HashStore(), size, per_host
        self.found: dict[str, str | ConfigError] = {}
        self.turns = 0
        """Turns of rank 0."""
        self._threads: list[threading.Thread] = []

    def claim(self, rank: int, **fields: Any) -> Claim:
        fields = {"torchrun": f"of host {rank // self.per_host}", "facts": {"the model": "m"}} | fields
        return Claim(f"D{rank}", **fields)

    def come(self, rank: int, claim: Claim | None = None, wait_s: float = 20.0) -> None:
        claim = claim or self.claim(rank)

        def pause(pause_s: float) -> None:
            self.turns += rank == 0
            threading.Event().wait(pause_s / 10)

        def run() -> None:
            try:
                self.found[claim.token] = meet(self.store, rank, self.size, self.per_host, claim, wait_s, pause)
            except ConfigError as error:
                self.found[claim.token] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> list[str | ConfigError]:
        for thread in self._threads:
            thread.join(20)
        return [*self.found.values()]


def said(found: object) -> str:
    assert isinstance(found, ConfigError), found
    return found.message


def test_all_ranks_get_the_number_of_one_group_which_is_another_one_each_time() -> None:
    numbers = []
    for _ in range(2):
        ranks = Ranks()
        for rank in (2, 0, 3, 1):
            ranks.come(rank)
        (number,) = {*map(str, ranks.join())}
        numbers.append(number)
    assert len(ranks.found) == 4 and numbers[0] != numbers[1]


def test_a_rank_that_died_after_it_said_who_it_is_stands_in_nobodys_way() -> None:
    ranks = Ranks(4, 1)
    ranks.store.set("claim/3", msgspec.json.encode(ranks.claim(3, torchrun="of an earlier start")).decode())
    for rank in range(3):
        ranks.come(rank)
    wait(lambda: ranks.store.check(["claim/1", "claim/2"]))
    first = ranks.turns
    wait(lambda: ranks.turns > first + 3)
    assert not ranks.found, "nobody goes on without an answer"
    ranks.come(3)
    assert len({*map(str, ranks.join())}) == 1 and len(ranks.found) == 4


def test_an_old_rank_in_a_new_rendezvous_is_refused_before_and_after_the_group_begins() -> None:
    ranks, old = Ranks(), [Ranks().claim(rank, torchrun="of an earlier start") for rank in (2, 3)]
    ranks.come(2, old[0])
    ranks.come(3, old[1])
    wait(lambda: ranks.store.check(["claim/2", "claim/3"]))
    for rank in range(4):
        ranks.come(rank)
    ranks.join()
    assert "another process has taken its place in the group" in said(ranks.found[old[0].token])
    assert len({number for number in ranks.found.values() if isinstance(number, str)}) == 1
    late = ranks.claim(3, torchrun="of an earlier start")
    ranks.come(3, late)
    ranks.join()
    assert "its group has begun without this process" in said(ranks.found[late.token])


def test_ranks_of_two_torchruns_on_one_host_are_no_part() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.come(rank, wait_s=0.5)
    ranks.come(3, ranks.claim(3, torchrun="of an earlier start"), wait_s=0.5)
    assert all("have not come within 0.5 s" in said(found) for found in ranks.join())


def test_parts_that_are_unlike_refuse_each_other_by_name() -> None:
    ranks = Ranks(2, 1)
    ranks.come(0)
    ranks.come(1, ranks.claim(1, facts={"the model": "n"}))
    sentence = "D1 has the model n, and D0 has m: all hosts of a group need the same"
    assert [said(found) for found in ranks.join()] == [sentence] * 2


def wait(condition: Callable[[], bool]) -> None:
    pause, end_s = threading.Event(), time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        pause.wait(0.01)


def test_the_interface_is_that_of_the_route() -> None:
    assert interface_towards("127.0.0.1") == "lo" and interface_towards("nowhere.invalid") == ""


# ------------------------------------------------------------------------------------------------------------- doctor

A, B = "10.0.0.2", "10.0.0.3"
UNIFIED = "unified_schedulers=[{hosts: [10.0.0.2, 10.0.0.3], dp_size: 2, rendezvous_port: 400}]"


def facts(host: str, names: Sequence[str] = ("H200",), **fields: Any) -> NodeFacts:
    cards = tuple(Device(str(k), f"GPU-{k}", name, 141 * GIB) for k, name in enumerate(names))
    fields = {"model": ModelFacts("/m", hash="a" * 32), "libraries": {"torch": "2.13.0"}, **fields}
    return NodeFacts(host=host, devices=NodeDevices(cards, "a test"), **fields)


@pytest.mark.parametrize(
    ("other", "level", "says"),
    [
        (facts(B), Level.OK, "1 x H200 (141 GiB) on each of 2 hosts"),
        (facts(B, ("A100",)), Level.WARNING, "unlike cards: 1 x H200 (141 GiB) on 10.0.0.2; 1 x A100 (141 GiB)"),
        (facts(B, ()), Level.ERROR, "unlike cards: 1 x H200 (141 GiB) on 10.0.0.2; CPUs on 10.0.0.3"),
        (facts(B, model=ModelFacts("/m", hash="b" * 32)), Level.ERROR, "different models"),
        (facts(B, libraries={"torch": "2.12.0"}), Level.ERROR, "versions differ"),
        (facts(B, unreachable=(f"{A}:400: timed out",)), Level.ERROR, f"{B} does not reach {A}:400: timed out"),
    ],
)
def test_the_doctor_compares_the_hosts_of_a_group(other: NodeFacts, level: Level, says: str) -> None:
    topology = topology_of("prefill_schedulers=[]", "decode_schedulers=[]", f"host={A}", UNIFIED)
    assert (level, True) in [(f.level, says in f.says) for f in check_cluster(topology, [facts(A), other])]


def test_the_doctor_finds_a_rendezvous_port_that_is_taken() -> None:
    key = f"{ROUTER}.unified_schedulers.0.rendezvous_port"
    topology = topology_of("prefill_schedulers=[]", "decode_schedulers=[]", f"host={A}", UNIFIED)
    node = facts(A, binds=(Bind(key, "0.0.0.0", 400, "Address already in use"),))
    assert any(f"{key}: cannot listen on 0.0.0.0:400" in f.says for f in check_node(topology, None, node))


# --------------------------------------------------------------------------------------------------- LeaderWorkerSet


def test_pods_of_a_leader_worker_set_are_the_hosts_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "set-0.set.namespace")
    assert lws_hosts() is None, "a group of one pod is one host"
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    assert lws_hosts() == ("set-0.set.namespace", "set-0-1.set.namespace")
    with pytest.raises(ConfigError, match=r"has 3 hosts .*, but 2 are given \(set-0.set.namespace, set-0-1.set"):
        _node(on_two(), (), NodeOptions(None, 1), print, None)
    with pytest.raises(ConfigError, match="but 1 are given"):
        _node(on_two(), (), NodeOptions(("a",), 1), print, None)
    alone = on_one_host(on_two())
    with pytest.raises(ConfigError, match="node index 1: the topology has 1 hosts"):
        _node(alone, (), NodeOptions(None, 1), print, None)
