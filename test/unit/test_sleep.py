"""Sleep and wake by the real machines of two routers and three instances, and a queue that orders events at random:
nobody sleeps under a request, none is lost, and the last word counts whoever dies."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from test_weights import NAMES, FakeLoader
from test_weights_of_routers import Instance, Request, World

from chitu.config.schema import DeadlineConfig
from chitu.errors import Asleep, SleepRefused, WeightsRefused
from chitu.instance.weights import RETRY_S, WeightsKeeper
from chitu.pd_coordination import PDCoordination
from chitu.protocol import PROTOCOL_VERSION, Join, encode_for
from chitu.protocol.weights import Pause, SleepLevel, Weights, WeightsOrder, WeightsReport
from chitu.router.candidates import Candidates
from chitu.router.weights import ClusterWeights


def loader_of(keeper: WeightsKeeper) -> FakeLoader:
    loader = keeper._loader
    assert isinstance(loader, FakeLoader)
    return loader


class SleepingInstance(Instance):
    def turn(self) -> None:
        self.keeper.note_drained(not self.running)
        level = self.keeper.sleep_due
        if level and not self.running:
            self.keeper.sleep(level)
        super().turn()
        assert not (self.running and self.keeper.serves.sleep), "it sleeps under a request"


class SleepWorld(World):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        for instance in self.instances:
            instance.__class__ = SleepingInstance
            instance.record = msgspec.structs.replace(instance.record, protocol=PROTOCOL_VERSION)
            for core in self.cores:
                core.on_message(Join(PROTOCOL_VERSION, instance.record))

    def sleep(self, router: int = 0, level: SleepLevel = 2, *, stays: bool = False) -> Pause:
        said = self.cores[router].weights.begin_sleep(level, stays=stays)
        self.cores[router].publish_weights()
        return said

    def wake(self, router: int = 0) -> None:
        self.cores[router].weights.pause = ""
        self.cores[router].publish_weights()

    def wake_for_waiting(self) -> None:
        """Do what `Cluster.tick` does."""
        for router in self.alive:
            self.cores[router].weights.wake_for(sum(request.router == router for request in self.waiting))
            self.cores[router].publish_weights()

    def restart_router(self, router: int) -> None:
        """Start a router that knows nothing, with what the instances report."""
        core = self.cores[router] = PDCoordination(
            self.clock, DeadlineConfig(lease_s=1e6), 90 + router, self, (), router, 2
        )
        for instance in self.instances:
            info = msgspec.structs.replace(instance.record, weights=instance.keeper.serves)
            core.on_message(Join(PROTOCOL_VERSION, info))

    def settle_all(self) -> None:
        """Let everything happen that may, with requests that wait sent again."""
        for _ in range(6):
            self.settle()
            self.wake_for_waiting()
            waiting, self.waiting = self.waiting, []
            for request in waiting:
                self.send(request)
        self.settle()

    @property
    def levels(self) -> list[int]:
        return [instance.keeper.serves.sleep for instance in self.instances]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("wakes", [0, 1])
def test_all_sleep_once_nothing_runs_and_the_other_router_may_wake_them(level: SleepLevel, wakes: int) -> None:
    world = SleepWorld()
    running = Request(0, left=30)
    world.send(running)
    world.sleep(0, level)
    world.settle()
    assert world.levels == [0, 0, 0] and running not in world.answered, "one that is idle may still be needed"
    assert world.is_held(0) and world.is_held(1)
    world.settle()
    world.settle()
    assert running in world.answered and world.levels == [level] * 3
    assert {report.freed_bytes for _, report in world.cores[1].weights.sleeping().values()} == {100 * level}
    assert not Candidates.among(world.cores[0].view.instances, Weights()).usable, "they are taken for awake"
    world.wake(wakes)
    world.settle()
    assert world.levels == [0, 0, 0] and not world.is_held(0) and not world.is_held(1)
    assert [loader_of(i.keeper).asleep for i in world.instances] == [level if level == 1 else 0] * 3
    assert all(instance.keeper.accepts == 0 for instance in world.instances)


def test_requests_sleeps_and_wakes_in_any_order_lose_nothing() -> None:
    slept = [run_in_any_order(seed) for seed in range(40)]
    assert sum(level > 0 for level in slept) > 10, "they were kept awake"


def run_in_any_order(seed: int) -> int:
    """Return the deepest level that was seen."""
    world, seen, draw = SleepWorld(seed), 0, random.Random(seed)
    for number in range(400):
        world.step(None)
        if number % 40 == 20:
            if draw.random() < 0.6:
                world.sleep(draw.randrange(2), draw.choice((1, 2)))
            else:
                world.wake(draw.randrange(2))
        if number % 40 == 10:
            world.wake_for_waiting()
        seen = max(seen, *world.levels)
    world.settle_all()
    assert not world.waiting and all(not instance.running for instance in world.instances)
    assert all(request.versions == {Weights()} for request in world.answered)
    return seen


@pytest.mark.parametrize("dead", [(0,), (1,), (0, 1)])
def test_a_sleep_outlives_the_routers_that_knew_of_it(dead: Sequence[int]) -> None:
    world = SleepWorld()
    said = world.sleep(0)
    world.settle()
    assert world.levels == [2, 2, 2]
    for router in dead:
        world.restart_router(router)
    world.settle()
    assert world.levels == [2, 2, 2] and all(core.weights.word == said for core in world.cores)
    assert world.is_held(0) and world.is_held(1)
    again, before = SleepingInstance(world, *NAMES[1]), world.instances[1].record
    again.record = msgspec.structs.replace(before, incarnation=before.incarnation + 1000)
    world.instances[1] = again
    for core in world.cores:
        core.on_message(Join(PROTOCOL_VERSION, again.record))
    world.settle()
    assert world.levels == [2, 2, 2], "one that starts again does not learn of it"
    late = Request(1)
    world.send(late)
    world.settle_all()
    assert late in world.answered and world.levels == [0, 0, 0]


def test_an_old_report_puts_nobody_to_sleep_again() -> None:
    """Without the number the router would take the word of a member that it hears last."""
    world = SleepWorld()
    said = world.sleep(0)
    world.settle()
    world.wake(1)
    core = world.cores[0]
    late = world.instances[2]
    for instance in world.instances[:2]:
        instance.deliver_view(1)
        instance.turn()
        instance.beat()
    assert core.weights.word.sleep == 0 and late.keeper.report.pause == said
    late.beat()
    assert core.weights.order.pause.sleep == 0
    world.alive, world.heard = [0], {0}
    world.settle()
    assert world.levels == [0, 0, 0]


def test_a_sleep_after_a_sleep_goes_deeper_and_never_back() -> None:
    world = SleepWorld()
    for level, expected in ((1, 1), (2, 2), (1, 2)):
        world.sleep(0, level)
        world.settle()
        assert world.levels == [expected] * 3
    said = world.sleep(1, 1, stays=True)
    world.settle()
    world.restart_router(0)
    world.restart_router(1)
    world.settle()
    assert world.cores[0].weights.word == said, "the newest word is the one that is kept"
    assert not world.cores[0].weights.wake_for(3)


def test_what_cannot_be_done_asleep_is_refused_and_a_sleep_that_cannot_be() -> None:
    world = SleepWorld()
    core = world.cores[0].weights
    change = world.begin()
    with pytest.raises(SleepRefused, match="a change to /new is under way"):
        world.sleep()
    core.give_up(change, "enough")
    world.pause(0, "keep")
    with pytest.raises(SleepRefused, match="resume first"):
        world.sleep()
    world.pause(0, "")
    world.settle()
    world.sleep()
    world.settle()
    with pytest.raises(WeightsRefused, match="reads no weights before it wakes"):
        world.begin()
    with pytest.raises(WeightsRefused, match="the cluster sleeps: wake it first"):
        world.pause(1, "finish")
    with pytest.raises(SleepRefused, match="no instance that could sleep"):
        ClusterWeights().begin_sleep(1, stays=False)
    world.wake()
    world.settle()
    old = world.instances[2]
    core.on_info(msgspec.structs.replace(old.record, protocol=20))
    with pytest.raises(SleepRefused, match="D1: instances of an older release cannot sleep"):
        world.sleep()
    assert [SleepRefused.code, Asleep.code, Asleep.http_status] == ["sleep_refused", "asleep", 503]


def test_one_that_cannot_sleep_says_why() -> None:
    world = SleepWorld()
    loader = loader_of(world.instances[1].keeper)
    loader.why_no_sleep = lambda level: "it is on a GPU" if level == 2 else ""  # type: ignore[method-assign]
    world.sleep(0, 2)
    world.settle()
    found = world.cores[0].weights.sleeping()
    assert {name: report.no_sleep for name, (_, report) in found.items()}["D0"] == "it is on a GPU"
    assert world.levels[1] == 0
    world.sleep(0, 1)
    world.settle()
    assert world.levels[1] == 1 and not world.cores[0].weights.sleeping()["D0"][1].no_sleep


def test_an_instance_that_slept_through_a_change_wakes_with_the_new_weights() -> None:
    world = SleepWorld()
    world.sleep()
    world.settle()
    keeper = world.instances[0].keeper
    new = Weights(1, "hash of new", "/new")
    keeper.set_order(WeightsOrder(new))
    assert keeper.turn() is None and keeper.accepts == -1, "the word of before counts"
    keeper.set_order(WeightsOrder(new, pause=Pause(9)))
    assert keeper.turn() is None
    assert keeper.turn() == new and not keeper.keeps_base(new)
    keeper.change(new)
    assert keeper.serves == new and keeper.accepts == 1 and keeper.report.freed_bytes == 0


def test_one_whose_folder_is_gone_stays_out_and_tries_again() -> None:
    world = SleepWorld()
    world.sleep()
    world.settle()
    for instance in world.instances[:2]:
        loader_of(instance.keeper).folders = {}
    world.wake()
    world.settle()
    weights = world.cores[1].weights
    assert world.levels == [2, 2, 0]
    assert weights.missing() == ["D0 ( does not exist)", "P0 ( does not exist)"] and not weights.are_waking
    assert not world.cores[1].routed_view.weights.holds, "requests would wait for nothing"
    change = world.begin(1)
    for instance in world.instances:
        loader_of(instance.keeper).folders = {"/new": "hash of new"}
    for _ in range(3):
        world.settle()
        world.drive(change, 1)
    assert change.phase == "done" and world.levels == [0, 0, 0], "other weights end it, too"
    world.sleep()
    world.settle()
    world.wake()
    for instance in world.instances:
        loader_of(instance.keeper).folders = {"/new": "hash of another"}
    world.settle()
    assert (
        all("has the model_hash hash of another" in each for each in weights.missing()) and len(weights.missing()) == 3
    )
    for instance in world.instances:
        loader_of(instance.keeper).folders = {"/new": "hash of new"}
    world.clock.advance(RETRY_S)
    world.settle()
    assert world.levels == [0, 0, 0] and weights.missing() == []


def test_the_release_before_gets_a_pause_that_it_knows() -> None:
    order = WeightsOrder(Weights(1, "h", "/w", sleep=2), pause=Pause(3, "finish", 2, True), may_sleep=True)
    older = msgspec.msgpack.decode(encode_for(20, order))
    assert older["pause"] == {"number": 3, "mode": "finish"} and set(older["serve"]) == {"number", "model_hash", "path"}
    assert "may_sleep" not in older
    report = WeightsReport(freed_bytes=5, keeps="k", no_sleep="n")
    assert msgspec.msgpack.decode(encode_for(20, report)) == {"serves": {}, "pause": {}}
