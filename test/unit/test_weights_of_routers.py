"""Pauses and changes of weights with two routers, by the real machines of routers and instances and a queue that orders
events at random: what one router is told, both do, and what it wants ends with it."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from support.clock import FakeClock
from test_weights import LAYOUT, NAMES, FakeLoader

from chitu.config.schema import DeadlineConfig
from chitu.errors import WeightsRefused
from chitu.instance.weights import RETRY_S, WeightsKeeper, join_orders
from chitu.pd_coordination import PDCoordination
from chitu.protocol import PROTOCOL_VERSION, Heartbeat, InstanceInfo, Join, LoadReport
from chitu.protocol.weights import Pause, PauseMode, Weights, WeightsOrder
from chitu.router.candidates import Candidates
from chitu.router.weights import WeightsChange
from chitu.types import Role


@dataclass(eq=False)
class Request:
    router: int
    weights: int = -1
    pair: tuple[Instance, ...] = ()
    versions: set[Weights] = field(default_factory=set)
    left: int = 3


class Instance:
    def __init__(self, world: World, role: Role, rank: int) -> None:
        self.world = world
        self.keeper = WeightsKeeper(FakeLoader(), world.clock)
        self.record = InstanceInfo(role, rank, 10 * (1 + rank) + (role is Role.DECODE), "h", 1, 2, LAYOUT, 512)
        self.orders = [WeightsOrder()] * 2
        self.running: list[Request] = []

    def deliver_view(self, router: int) -> None:
        core = self.world.cores[router]
        if router in self.world.alive:
            core.next_change()
            self.orders[router] = core.view.weights
        self.keeper.set_order(join_orders(self.orders, self.world.heard))

    def beat(self) -> None:
        record = self.record
        place = record.role, record.engine_rank, record.incarnation
        message = Heartbeat(*place, LoadReport(), weights=self.keeper.report, routers=tuple(self.world.alive))
        for router in self.world.alive:
            self.world.cores[router].on_heartbeat(message)

    def turn(self) -> None:
        self.keeper.note_drained(not self.running)
        if not self.keeper.is_settled:
            weights = self.keeper.turn()
            if weights is not None and not self.running:
                self.keeper.change(weights)
        if self.keeper.freezes:
            return
        for request in list(self.running):
            request.versions.add(self.keeper.serves)
            request.left -= self is request.pair[1]
            if self is request.pair[0] or request.left == 0:
                self.running.remove(request)
            if request.left == 0:
                self.world.answered.append(request)


class World:
    """Two routers, P0, D0 and D1."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.clock = random.Random(seed), FakeClock()
        self.alive, self.heard = [0, 1], {0, 1}
        self.answered: list[Request] = []
        self.waiting: list[Request] = []
        """Requests that their routers hold, or that an instance has refused."""
        self.lost = 0
        self.cores = [PDCoordination(self.clock, DeadlineConfig(lease_s=1e6), 70 + i, self, (), i, 2) for i in (0, 1)]
        self.instances = [Instance(self, *name) for name in NAMES]
        for core in self.cores:
            for instance in self.instances:
                core.on_message(Join(PROTOCOL_VERSION, instance.record))
        self.settle()

    def on_change(self) -> None: ...
    def on_joined(self, instance: InstanceInfo) -> None: ...
    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None: ...

    def kill(self, router: int) -> None:
        self.alive.remove(router)
        self.waiting = [request for request in self.waiting if request.router in self.alive]

    def end_lease(self) -> None:
        """Let the instances notice that a dead router is silent, and end its requests."""
        self.heard = set(self.alive)
        for instance in self.instances:
            instance.running = [request for request in instance.running if request.router in self.alive]

    def pause(self, router: int, mode: PauseMode) -> None:
        self.cores[router].weights.pause = mode
        self.cores[router].publish_weights()

    def is_held(self, router: int) -> bool:
        self.cores[router].next_change()
        return self.cores[router].routed_view.weights.holds

    def send(self, request: Request) -> None:
        """Send a request, or have it wait, as a router does."""
        if self.is_held(request.router):
            self.waiting.append(request)
            return
        view = self.cores[request.router].routed_view
        found = Candidates.in_view(view)
        assert found.has_pair, f"503 at router {request.router}: {found.why_unusable()}; {view.weights}"
        chosen = found.prefill[0], self.random.choice(found.decode)
        pair = tuple(i for c in chosen for i in self.instances if i.record.incarnation == c.incarnation)
        request.weights, request.pair = chosen[1].weights.number, pair
        if all(instance.keeper.accepts == request.weights for instance in pair):
            for instance in pair:
                instance.running.append(request)
        else:
            self.waiting.append(request)

    def drive(self, change: WeightsChange, router: int = 0) -> None:
        """Do what `cluster/weights.py` does."""
        if router not in self.alive:
            return
        core = self.cores[router]
        if change.phase == "drain" and core.view.weights.holds and core.weights.is_drained:
            core.weights.on_drained(change)
        core.publish_weights()

    def begin(self, router: int = 0, path: str = "/new") -> WeightsChange:
        change = self.cores[router].weights.begin(path, False)
        self.cores[router].publish_weights()
        return change

    def step(self, change: WeightsChange | None, router: int = 0) -> None:
        instance, event = self.random.choice(self.instances), self.random.randrange(6)
        if event == 0:
            instance.deliver_view(self.random.choice((0, 1)))
        elif event == 1:
            instance.beat()
        elif event < 4:
            instance.turn()
        elif event == 4 and change is not None:
            self.drive(change, router)
        else:
            waiting, self.waiting = self.waiting, []
            for request in [*waiting, Request(self.random.choice(self.alive))]:
                self.send(request)

    def settle(self, change: WeightsChange | None = None, changes_at: int = 0) -> None:
        for _ in range(12):
            self.clock.advance(RETRY_S)
            for instance in self.instances:
                for router in (0, 1):
                    instance.deliver_view(router)
                instance.turn()
                instance.beat()
            if change is not None:
                self.drive(change, changes_at)

    @property
    def frozen(self) -> list[bool]:
        return [instance.keeper.freezes for instance in self.instances]


@pytest.mark.parametrize("mode", ["keep", "finish"])
def test_a_pause_counts_at_both_routers_and_ends_with_the_silence_of_its_own(mode: PauseMode) -> None:
    world = World()
    world.pause(0, mode)
    world.settle()
    assert world.is_held(0) and world.is_held(1) and world.frozen == [mode == "keep"] * 3
    assert world.cores[1].weights.pause == mode
    world.kill(0)
    world.settle()
    assert world.is_held(1), "the lease of router 0 has not ended"
    world.end_lease()
    world.settle()
    assert not world.is_held(1) and world.frozen == [False] * 3 and world.cores[1].weights.pause == ""


@pytest.mark.parametrize("paused", [(0,), (1,), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("ending", [0, 1])
def test_any_router_ends_a_pause_of_any(paused: tuple[int, ...], ending: int) -> None:
    world = World()
    for router in paused:
        world.pause(router, "keep")
        world.settle()
    world.pause(ending, "")
    world.settle()
    assert world.frozen == [False] * 3 and not world.is_held(0) and not world.is_held(1)
    assert all(core.weights.pause == "" and core.weights.is_pause_known for core in world.cores)
    world.pause(1 - ending, "finish")
    world.settle()
    assert world.is_held(ending), "a later pause counts again"


def test_a_router_that_was_stopped_while_its_pause_was_ended_pauses_nothing_when_it_goes_on() -> None:
    world = World()
    world.pause(0, "keep")
    world.settle()
    world.alive, world.heard = [1], {1}
    world.settle()
    world.pause(1, "")
    world.settle()
    world.alive, world.heard = [0, 1], {0, 1}
    world.settle()
    assert world.frozen == [False] * 3 and not world.is_held(0) and not world.is_held(1)


def test_what_a_silent_router_prepares_is_dropped_and_what_it_serves_stays() -> None:
    world = World()
    world.begin()
    for instance in world.instances:
        instance.deliver_view(0)
        instance.turn()
    assert all(instance.keeper._reading is not None for instance in world.instances)
    world.kill(0)
    world.end_lease()
    world.settle()
    assert all(instance.keeper._reading is None for instance in world.instances), "a copy of the weights stays"
    serve, silent = Weights(3, "h", "/new"), WeightsOrder(Weights(3, "h", "/new"), holds=True, pause=Pause(1, "keep"))
    assert join_orders([silent, WeightsOrder()], {1}) == WeightsOrder(serve)
    assert join_orders([silent, WeightsOrder()], set()) == silent, "nobody is heard: all stays as it was"


def test_a_change_waits_for_the_requests_of_the_other_router_which_holds_new_ones_until_all_have_changed() -> None:
    world = World()
    running, late = Request(1, left=5), Request(1)
    world.send(running)
    change = world.begin()
    for instance in world.instances:
        for _ in range(3):
            instance.deliver_view(0)
            instance.keeper.note_drained(not instance.running)
            instance.keeper.turn()
            instance.beat()
    world.drive(change)
    world.cores[0].next_change()
    for instance in world.instances:
        instance.deliver_view(0)
        instance.keeper.turn()
        instance.beat()
    world.drive(change)
    assert change.phase == "drain" and running not in world.answered, "it did not wait"
    assert world.is_held(1), "the other router goes on"
    world.send(late)
    world.settle(change)
    assert change.phase == "done" and running.versions == {Weights()} and world.waiting == [late]
    world.waiting.clear()
    world.send(late)
    world.settle()
    assert late in world.answered and late.versions == {change.wanted}


def test_requests_at_two_routers_wait_through_a_change_at_one_and_none_finds_no_instance() -> None:
    """`send` fails where a router would answer 503. Router 0 dies at any step, or not at all."""
    deaths = 0
    for seed in range(60):
        world = World(seed)
        for _ in range(20):
            world.step(None)
        change, dies_at = world.begin(), world.random.choice([-1, *range(300)])
        for number in range(400):
            if number == dies_at and not change.is_over:
                world.kill(0)
                deaths += 1
            if number == dies_at + 40 and 0 not in world.alive:
                world.end_lease()
            world.step(change)
        world.end_lease()
        for _ in range(3):
            world.settle(change)
            waiting, world.waiting = world.waiting, []
            for request in waiting:
                world.send(request)
        assert not world.waiting, f"seed {seed}: {len(world.waiting)} requests wait for good"
        assert all(len(request.versions) == 1 for request in world.answered), seed
        assert len({instance.keeper.serves for instance in world.instances}) == 1, seed
        assert change.phase == "done" or 0 not in world.alive, (seed, change.phase)
    assert deaths > 20


def test_two_changes_at_once_at_two_routers_give_no_request_tokens_of_both() -> None:
    """Each router may begin one, or another one, at any step; one of them may die. No two have one number."""
    ends = Counter[str]()
    for seed in range(60):
        world = World(seed)
        changes, begun = dict[int, WeightsChange](), list[WeightsChange]()
        dies_at = world.random.choice([-1, world.random.randrange(400)])
        for number in range(500):
            if number == dies_at:
                world.kill(world.random.choice((0, 1)))
            if number == dies_at + 40:
                world.end_lease()
            router = world.random.choice(world.alive)
            if world.random.random() < 0.3 and (router not in changes or changes[router].is_over) and number < 400:
                with contextlib.suppress(WeightsRefused):
                    changes[router] = world.begin(router, world.random.choice(("/new", "/newer")))
                    begun.append(changes[router])
            world.step(changes.get(router), router)
        world.end_lease()
        for _ in range(4):
            for router, change in changes.items():
                world.settle(change, router)
            world.settle()
            waiting, world.waiting = world.waiting, []
            for request in waiting:
                world.send(request)
        assert not world.waiting, f"seed {seed}: {len(world.waiting)} requests wait for good"
        assert all(len(request.versions) == 1 for request in world.answered), seed
        assert len({instance.keeper.serves for instance in world.instances}) == 1, seed
        numbers = [each.wanted.number for each in begun if each.is_committed]
        assert len(numbers) == len({*numbers}), seed
        ends.update(each.phase for each in begun)
    assert min(ends["done"], ends["failed"]) > 50, ends


def test_requests_wait_while_all_that_could_serve_them_read_the_weights_and_not_if_they_cannot() -> None:
    """P0 is started again with the folder of its command line, which is not the one that serves."""
    world = World()
    change = world.begin()
    world.settle(change)
    core = world.cores[1]
    old = world.instances[0]
    new = world.instances[0] = Instance(world, Role.PREFILL, 0)
    new.record = msgspec.structs.replace(new.record, incarnation=99)
    for each in world.cores:
        each.on_death(Role.PREFILL, 0, old.record.incarnation)
        each.on_message(Join(PROTOCOL_VERSION, new.record))
    assert world.is_held(1), "503 while P0 reads"
    new.keeper._loader.folders = {}  # type: ignore[attr-defined]
    world.settle()
    assert core.weights.missing() == ["P0 (/new does not exist)"] and not world.is_held(1), "they would wait in vain"
    new.keeper._loader.folders = {"/new": "hash of new"}  # type: ignore[attr-defined]
    world.settle()
    assert not core.weights.missing() and not world.is_held(1)
