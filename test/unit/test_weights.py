"""Changes of weights by the real machines of router and instances, joined by a queue that orders events at random:
whoever dies at whichever step, one version serves afterwards, and no answer has tokens of two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from support.clock import FakeClock

from chitu.config.schema import DeadlineConfig
from chitu.engine.weights_loader import AdapterFolder, GivenBack, ReadWeights
from chitu.errors import WeightsChanged, WeightsRefused
from chitu.instance.weights import RETRY_S, WeightsKeeper
from chitu.pd_coordination import PDCoordination
from chitu.protocol import PROTOCOL_VERSION, ClusterView, Heartbeat, InstanceInfo, Join, KVLayout, LoadReport
from chitu.protocol.weights import SleepLevel, Weights, WeightsOrder, WeightsReport
from chitu.router.candidates import Candidates
from chitu.router.weights import ClusterWeights, WeightsChange
from chitu.types import Role

LAYOUT = KVLayout.uniform("start", 2, 2, 16, 16, "float32", 100)
NAMES = ((Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 1))
FOLDERS = {"/new": "hash of new", "/newer": "hash of newer"}
"""Hashes by path, as a loader finds them."""


@dataclass
class FakeLoader:
    """Reads a folder within two polls."""

    folders: dict[str, str] = field(default_factory=lambda: {**FOLDERS, "": "hash of the first"})
    path: str = ""
    polls: int = 0
    serves: str = ""
    asleep: int = 0

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self.path, self.polls = path, 0

    def poll(self) -> ReadWeights | None:
        self.polls += 1
        if self.polls < 2:
            return None
        found = self.folders.get(self.path)
        return ReadWeights(found) if found else ReadWeights(error=f"{self.path} does not exist")

    def change(self) -> None:
        assert self.polls >= 2 and self.path in self.folders
        self.serves, self.asleep = self.path, 0

    def unload(self, number: int) -> None:
        raise AssertionError("there is no adapter")

    def drop(self) -> None:
        self.path = ""

    def begin_again(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        assert self.asleep == 2
        self.begin(path)

    def why_no_sleep(self, level: SleepLevel) -> str:
        return ""

    def sleep(self, level: SleepLevel) -> GivenBack:
        self.asleep = level
        return GivenBack(100 * level)


@dataclass(eq=False)
class Request:
    """One answer: P takes part once, D for each token."""

    weights: int
    pair: tuple[Instance, Instance]
    versions: set[int] = field(default_factory=set)
    left: int = 3


class Instance:
    def __init__(self, world: World, role: Role, rank: int) -> None:
        world.incarnations += 1
        self.loader = FakeLoader()
        self.keeper = WeightsKeeper(self.loader, world.clock)
        self.record = InstanceInfo(role, rank, world.incarnations, "127.0.0.1", 1, 2, LAYOUT, 512)
        self.view: ClusterView | None = None
        self.arrived: list[Request] = []
        self.running: list[Request] = []
        self.ignores_stamp = False

    @property
    def info(self) -> InstanceInfo:
        return msgspec.structs.replace(self.record, weights=self.keeper.serves)

    def turn(self, world: World) -> None:
        """Take what arrived, change if possible, compute a token of each request."""
        for request in self.arrived:
            if request.weights == self.keeper.accepts or self.ignores_stamp:
                self.running.append(request)
            elif request in world.requests:  # refused: the router retries, or ends it
                world.requests.remove(request)
        self.arrived.clear()
        if not self.keeper.is_settled:
            weights = self.keeper.turn()
            if weights is not None and (weights.is_mixed or not self.running):
                self.keeper.change(weights)
        for request in list(self.running):
            request.versions.add(self.keeper.serves.number)
            request.left -= self is request.pair[1]
            if self is request.pair[0]:
                self.running.remove(request)
            elif request.left == 0:
                self.running.remove(request)
                if request in world.requests:
                    world.requests.remove(request)
                    world.answered.append(request)


class World:
    """A router and its instances. `step` runs one event, at random."""

    make: type[Instance] = Instance

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.incarnations = 0
        self.requests: list[Request] = []
        """In flight on the router."""
        self.answered: list[Request] = []
        self.routers = 0
        self.change: WeightsChange | None = None
        self.start_router()
        self.instances = [self.make(self, *name) for name in NAMES]
        self.settle()

    # ------------------------------------------------------------------------------------------------------- membership

    def on_change(self) -> None: ...

    def on_joined(self, instance: InstanceInfo) -> None: ...

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        gone = [r for r in self.requests if any(one.record.incarnation == instance.incarnation for one in r.pair)]
        self.requests = [request for request in self.requests if request not in gone]
        for request in gone:
            for one in request.pair:
                one.running = [each for each in one.running if each is not request]

    def start_router(self) -> None:
        """Start a router that knows nothing. Instances drop what its predecessor had sent."""
        self.routers += 1
        self.core = PDCoordination(self.clock, DeadlineConfig(lease_s=1000.0), self.routers, self)
        self.requests.clear()
        self.change = None
        for instance in getattr(self, "instances", ()):
            instance.view = None

    # ----------------------------------------------------------------------------------------------------------- events

    def deliver_view(self, instance: Instance) -> None:
        self.core.next_change()
        if instance.view is None or instance.view.router_incarnation != self.core.view.router_incarnation:
            instance.running.clear()
            instance.arrived.clear()
        instance.view = self.core.view
        instance.keeper.set_order(instance.view.weights)
        if all(member.incarnation != instance.record.incarnation for member in instance.view.instances):
            self.core.on_message(Join(PROTOCOL_VERSION, instance.info))

    def beat(self, instance: Instance) -> None:
        record = instance.record
        self.core.on_heartbeat(
            Heartbeat(
                *(record.role, record.engine_rank, record.incarnation, LoadReport()), weights=instance.keeper.report
            )
        )

    def send_request(self) -> None:
        found = Candidates.in_view(self.core.view)
        if self.core.view.weights.holds or not found.has_pair:
            return
        pair = found.prefill[0], self.random.choice(found.decode)
        both = [next((i for i in self.instances if i.record.incarnation == p.incarnation), None) for p in pair]
        if both[0] is not None and both[1] is not None:
            assert len({one.weights.number for one in pair}) == 1, "candidates of two versions"
            request = Request(pair[1].weights.number, (both[0], both[1]))
            self.requests.append(request)
            for one in request.pair:
                one.arrived.append(request)

    def drive(self) -> None:
        """Do what `cluster/weights.py` does."""
        is_draining = self.change is not None and self.change.phase == "drain"
        if self.change is not None and is_draining and self.core.view.weights.holds and not self.requests:
            self.core.weights.on_drained(self.change)
        self.core.publish_weights()

    def begin(self, path: str = "/new", is_mixed: bool = False) -> WeightsChange:
        self.change = self.core.weights.begin(path, is_mixed)
        self.core.publish_weights()
        return self.change

    def step(self) -> None:
        instance = self.random.choice(self.instances)
        event = self.random.randrange(6)
        if event < 2:
            instance.turn(self)
        elif event == 2:
            self.deliver_view(instance)
        elif event == 3:
            self.beat(instance)
        elif event == 4:
            self.drive()
        else:
            self.send_request()

    def settle(self) -> None:
        """Let everything that is on its way arrive, without new requests."""
        for _ in range(12):
            self.clock.advance(RETRY_S)
            for instance in self.instances:
                self.deliver_view(instance)
                instance.turn(self)
                self.beat(instance)
            self.drive()

    def kill(self, victim: int) -> None:
        """Kill the router (-1), or an instance, which starts again with the weights of the command line."""
        if victim < 0:
            self.start_router()
            return
        old = self.instances[victim]
        self.core.on_death(old.record.role, old.record.engine_rank, old.record.incarnation)
        self.instances[victim] = self.make(self, *NAMES[victim])

    def check(self) -> None:
        """Check what holds at every moment."""
        mixed = [request.versions for request in self.answered if len(request.versions) > 1]
        assert not mixed, f"tokens of several versions in one answer: {mixed}"

    def served(self) -> set[Weights]:
        return {instance.keeper.serves for instance in self.instances}


@pytest.mark.parametrize("victim", [-1, 0, 1])
def test_whoever_dies_at_any_step_of_a_change_one_version_serves_afterwards(victim: int) -> None:
    seen: set[tuple[str, str]] = set()
    for seed in range(6):
        for at in range(0, 180, 4):
            world = World(seed)
            change = world.begin()
            for number in range(190):
                if number == at:
                    phase = change.phase
                    world.kill(victim)
                world.step()
                world.check()
            world.settle()
            (serves,) = world.served()
            assert serves == world.core.weights.serve
            assert serves.path in ("", "/new") and (serves.path == "/new") == (serves.number > 0)
            assert serves.path == "/new" or not change.is_committed or victim < 0
            assert all(instance.loader.serves == serves.path for instance in world.instances)
            assert not world.core.weights.order.holds and world.core.weights.order.prepare is None
            world.send_request()
            assert world.requests, "nobody takes requests"
            world.settle()
            world.check()
            assert world.answered[-1].versions == {serves.number}
            seen.add((phase, serves.path))
    # The deaths were in every phase, and the change came through in each in which it can.
    assert {phase for phase, _ in seen} >= {"prepare", "drain", "commit", "done"}
    assert {path for _, path in seen} == ({"", "/new"} if victim < 0 else {"/new"})


def test_a_change_without_a_death_comes_through_and_requests_before_and_after_have_their_own_version() -> None:
    world = World(1)
    for _ in range(60):
        world.step()
    assert world.answered and {frozenset(request.versions) for request in world.answered} == {frozenset({0})}
    change = world.begin()
    for _ in range(400):
        world.step()
        world.check()
    assert change.phase == "done" and change.wanted == Weights(1, "hash of new", "/new")
    assert {request.weights for request in world.answered} == {0, 1}


def test_an_instance_that_ignores_the_stamp_of_a_request_is_seen() -> None:
    """The check above would find what it is there for."""

    def run(seed: int) -> None:
        world = World(seed)
        world.begin("/new", is_mixed=True)  # changes without a drain; as if the drain had missed a router
        for instance in world.instances:
            instance.ignores_stamp = True
        for _ in range(200):
            world.step()
        world.check()

    with pytest.raises(AssertionError, match="tokens of several versions"):
        for seed in range(20):
            run(seed)


def test_a_folder_that_one_instance_cannot_read_or_reads_otherwise_changes_nothing() -> None:
    for folders, says in (
        ({}, "D1: /new does not exist"),
        ({"/new": "other"}, "/new is not the same folder everywhere: P0 reads hash of new, D1 reads other"),
    ):
        world = World(2)
        world.instances[2].loader.folders = dict(folders)
        change = world.begin()
        world.settle()
        assert change.phase == "failed" and change.error is not None and str(change.error) == says
        assert isinstance(change.error, WeightsRefused) and world.served() == {Weights()}
        assert all(instance.loader.path == "" for instance in world.instances), "it still has what it read"
        again = world.begin("/newer")
        world.instances[2].loader.folders = dict(FOLDERS)
        world.settle()
        assert again.phase == "done" and world.served() == {Weights(2, "hash of newer", "/newer")}


def test_only_one_change_runs_and_one_that_takes_too_long_is_taken_back() -> None:
    world = World(3)
    world.send_request()
    change = world.begin()
    with pytest.raises(WeightsRefused, match="a change to /new is under way"):
        world.core.weights.begin("/newer", False)
    for instance in world.instances:
        for _ in range(3):
            world.deliver_view(instance)
            instance.turn(world) if instance.record.role is Role.PREFILL else instance.keeper.turn()
            world.beat(instance)
    assert change.phase == "drain" and world.core.weights.order.holds
    world.core.weights.give_up(change, "not done within 1 s")
    world.settle()
    assert change.phase == "failed" and world.served() == {Weights()} and not world.core.weights.order.holds


def test_an_instance_that_cannot_read_what_the_cluster_serves_gets_no_request_and_says_why() -> None:
    world = World(4)
    world.begin()
    world.settle()
    world.kill(1)
    world.instances[1].loader.folders = {"/new": "written over"}
    world.settle()
    says = "D0 (/new has the model_hash written over, and the cluster serves hash of new)"
    assert world.core.weights.missing() == [says]
    assert [info.engine_rank for info in Candidates.in_view(world.core.view).decode] == [1]
    world.instances[1].loader.folders = dict(FOLDERS)
    world.settle()
    assert world.core.weights.missing() == [] and len(Candidates.in_view(world.core.view).decode) == 2


@pytest.mark.parametrize("is_mixed", [False, True])
def test_an_instance_that_cannot_read_what_the_cluster_serves_takes_part_in_the_next_change(is_mixed: bool) -> None:
    """A trainer's memory has the newest weights alone, and an instance that starts again is behind."""
    world = World(5)
    world.begin()
    world.settle()
    world.kill(2)
    world.instances[2].loader.folders = {"/newer": "hash of newer"}
    world.settle()
    assert world.core.weights.missing() == ["D1 (/new does not exist)"]
    failing = world.begin("/nowhere", is_mixed)
    world.settle()
    assert failing.phase == "failed" and world.core.weights.missing() == ["D1 (/new does not exist)"]
    change = world.begin("/newer", is_mixed)
    for _ in range(400):
        world.step()
        world.check() if not is_mixed else None
    world.settle()
    assert change.phase == "done" and {serves.path for serves in world.served()} == {"/newer"}
    assert world.core.weights.missing() == [] and all(i.loader.serves == "/newer" for i in world.instances)


def test_an_instance_never_goes_back_to_older_weights_and_takes_no_request_for_those_it_leaves() -> None:
    """A new router may first hear of an instance that has older ones than this."""
    keeper = WeightsKeeper(loader := FakeLoader(), FakeClock())
    for number, (path, model_hash) in enumerate(FOLDERS.items(), 1):
        serve = Weights(number, model_hash, path)
        keeper.set_order(WeightsOrder(serve))
        assert keeper.turn() is None and keeper.accepts == -1
        assert keeper.turn() == serve
        keeper.change(serve)
        assert keeper.turn() is None and keeper.is_settled and (keeper.accepts, loader.serves) == (number, path)
    loader.drop()
    keeper.set_order(WeightsOrder(Weights(1, "hash of new", "/new")))
    assert [keeper.turn() for _ in range(4)] == [None] * 4
    assert (keeper.serves.number, keeper.accepts, keeper.is_settled, loader.path) == (2, 2, True, "")


def test_a_paused_cluster_holds_requests_and_freezes_only_if_running_ones_are_kept() -> None:
    weights = ClusterWeights()
    assert weights.order == WeightsOrder()
    weights.pause = "finish"
    assert (weights.order.holds, weights.order.freezes) == (True, False)
    weights.pause = "keep"
    assert (weights.order.holds, weights.order.freezes) == (True, True)
    weights.on_info(InstanceInfo(Role.UNIFIED, 0, 1, "127.0.0.1", 1, 0, LAYOUT, 512))
    with pytest.raises(WeightsRefused, match="running requests are stopped"):
        weights.begin("/new", False)
    change = weights.begin("/new", True)
    info = InstanceInfo(Role.UNIFIED, 0, 1, "127.0.0.1", 1, 0, LAYOUT, 512)
    weights.on_report(info, WeightsReport(prepared=Weights(1, "hash", "/new", True)))
    assert change.phase == "commit" and weights.serve == Weights(1, "hash", "/new", True)


def test_errors_of_weights_have_codes() -> None:
    codes: Sequence[str] = [WeightsRefused.code, WeightsChanged.code]
    assert codes == ["weights_refused", "weights_changed"] and WeightsChanged("x").retryable


def test_a_mixed_change_names_the_last_change_that_was_not() -> None:
    world = World(5)
    found, first = list[tuple[int, int, bool, bool]](), Weights(1)
    for path, is_mixed in (("/new", True), ("/newer", False), ("/new", True), ("/newer", True), ("/new", False)):
        world.begin(path, is_mixed)
        world.settle()
        (weights,) = world.served()
        first = first if found else weights
        found.append((weights.number, weights.unmixed, weights.goes_on_from(first), weights.goes_on_from(Weights())))
    assert found == [
        (1, 0, True, True),
        (2, 0, False, False),
        (3, 2, False, False),
        (4, 2, False, False),
        (5, 0, False, False),
    ]


def test_weights_of_another_router_with_the_same_number_are_read_and_wait_for_what_runs() -> None:
    """Two routers may commit changes of one number at once. The larger hash is the newer one, everywhere."""
    loader = FakeLoader()
    keeper = WeightsKeeper(loader, FakeClock())

    def serve(weights: Weights) -> None:
        keeper.set_order(WeightsOrder(weights))
        (found,) = [each for each in [keeper.turn() for _ in range(4)] if each is not None][:1]
        assert found == weights
        keeper.change(found)

    one, other = Weights(1, "hash of new", "/new"), Weights(1, "hash of newer", "/newer")
    assert other.age > one.age and not other.goes_on_from(one) and one.goes_on_from(one)
    serve(one)
    serve(other)
    assert (keeper.serves, loader.serves) == (other, "/newer")


def test_a_change_waits_while_the_members_read_that_of_another_router() -> None:
    weights = ClusterWeights()
    info = InstanceInfo(Role.UNIFIED, 0, 1, "127.0.0.1", 1, 0, LAYOUT, 512)
    weights.on_info(info)
    change = weights.begin("/a", False)
    weights.on_report(info, WeightsReport(prepared=Weights(1, "hash a", "/a")))
    assert change.phase == "drain"
    weights.on_report(info, WeightsReport(prepared=Weights(1, "hash b", "/b"), holds=True, is_drained=True))
    weights.on_drained(change)
    assert change.phase == "drain", "two changes of one number"
    weights.on_info(msgspec.structs.replace(info, weights=Weights(1, "hash b", "/b")))
    assert change.phase == "failed" and weights.serve.path == "/b"
    again = weights.begin("/a", False)
    weights.on_report(info, WeightsReport(prepared=Weights(2, "hash a", "/a"), holds=True, is_drained=True))
    weights.on_drained(again)
    assert again.phase == "commit"
