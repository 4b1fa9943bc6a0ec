"""Changes of LoRA adapters by the real machines of router and instances, in the world of `test_weights.py`: whoever
dies at whichever step, one list serves afterwards, and every answer has the content that it began with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from router_world import pair, two_pairs
from test_weights import LAYOUT, NAMES, FakeLoader, Instance, Request, World

from chitu.engine.weights_loader import AdapterFolder, ReadWeights
from chitu.errors import ModelNotFound, WeightsChanged, WeightsRefused
from chitu.instance.adapters import AdapterTable
from chitu.instance.weights import RETRY_S, WeightsKeeper
from chitu.protocol import PROTOCOL_VERSION, ClusterView, InstanceInfo, Join
from chitu.protocol.weights import MAX_ADAPTERS, ServedAdapter, Weights, WeightsOrder, WeightsReport
from chitu.router.candidates import Candidates
from chitu.router.weights import ClusterWeights, WeightsChange
from chitu.types import Role

STARTED = (("sql", "of sql-1"),)
ADAPTED = msgspec.structs.replace(LAYOUT, adapters=STARTED)
CONTENTS = {f"/{name}-{number}": f"of {name}-{number}" for name in ("sql", "tone") for number in (1, 2)}
"""Hashes by folder."""


@dataclass
class AdapterShelf(FakeLoader):
    contents: dict[str, str] = field(default_factory=lambda: dict(CONTENTS))
    reading: Sequence[AdapterFolder] = ()
    loaded: dict[int, str] = field(default_factory=lambda: {1: "of sql-1"})
    """Hashes by number."""

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        super().begin(path)
        self.reading = adapters

    def poll(self) -> ReadWeights | None:
        read = super().poll() if self.path else self._wait()
        if read is None or read.error:
            return read
        for each in self.reading:
            if each.path not in self.contents:
                return ReadWeights(error=f"{each.path} does not exist")
        return msgspec.structs.replace(read, adapters=tuple([self.contents[each.path] for each in self.reading]))

    def _wait(self) -> ReadWeights | None:
        self.polls += 1
        return ReadWeights() if self.polls > 1 else None

    def change(self) -> None:
        if self.path:
            super().change()
        self.loaded |= {each.number: self.contents[each.path] for each in self.reading}

    def unload(self, number: int) -> None:
        del self.loaded[number]

    def drop(self) -> None:
        super().drop()
        self.reading = ()


@dataclass(eq=False)
class AdaptedRequest(Request):
    name: str = ""
    found: str = ""
    """Hash of the adapter that it is to have."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Number of the adapter by incarnation of the instance."""
    contents: set[str] = field(default_factory=set)


class AdaptedInstance(Instance):
    def __init__(self, world: World, role: Role, rank: int) -> None:
        super().__init__(world, role, rank)
        self.loader = self.shelf = AdapterShelf()
        self.keeper = WeightsKeeper(self.loader, world.clock, adapters=AdapterTable(STARTED))
        self.record = msgspec.structs.replace(self.record, layout=ADAPTED, protocol=PROTOCOL_VERSION)

    def turn(self, world: World) -> None:
        me = self.record.incarnation
        for request in list(self.arrived):
            assert isinstance(request, AdaptedRequest)
            held = self.keeper.adapters.find(request.name)
            if request.name and held is not None and (self.ignores_stamp or held.hash == request.found):
                request.numbers[me] = held.number
            elif request.name:  # it is refused
                self.arrived.remove(request)
                if request in world.requests:
                    world.requests.remove(request)
        super().turn(world)
        users: dict[int, int] = {}
        for request in self.running:
            assert isinstance(request, AdaptedRequest)
            if request.name and me in request.numbers:
                users[request.numbers[me]] = users.get(request.numbers[me], 0) + 1
                request.contents.add(self.shelf.loaded[request.numbers[me]])
        if self.keeper.adapters.is_leaving:
            self.keeper.note_requests(users)


class AdaptedWorld(World):
    make = AdaptedInstance

    def send_request(self) -> None:
        found = Candidates.in_view(self.core.view)
        if self.core.view.weights.holds or not found.has_pair:
            return
        chosen = found.prefill[0], self.random.choice(found.decode)
        both = [next((i for i in self.instances if i.record.incarnation == p.incarnation), None) for p in chosen]
        if both[0] is None or both[1] is None:
            return
        name, content = self.random.choice([("", ""), *chosen[1].adapters])
        request = AdaptedRequest(chosen[1].weights.number, (both[0], both[1]), name=name, found=content)
        request.left = self.random.choice((2, 3, 12))
        self.requests.append(request)
        for one in request.pair:
            one.arrived.append(request)

    def drive(self) -> None:
        """Do what `cluster/weights.py` does."""
        self.core.publish_weights()

    def load(self, unload: Sequence[str] = (), **folders: str) -> WeightsChange:
        self.change = self.core.weights.begin_adapters(folders, unload, {})
        self.core.publish_weights()
        return self.change

    def check(self) -> None:
        for request in self.answered:
            assert isinstance(request, AdaptedRequest)
            wanted = {request.found} if request.name else set()
            assert request.contents <= wanted, f"asked for {request.found!r}, computed with {request.contents}"

    def listed(self) -> set[tuple[tuple[str, str], ...]]:
        return {instance.info.adapters for instance in self.instances}

    def check_whole(self) -> None:
        """Check that all is at rest, with one list and nothing else in memory."""
        (serves,) = self.served()
        assert serves == self.core.weights.serve and not self.core.weights.leaving
        assert not self.core.weights.order.holds and self.core.weights.order.prepare is None
        (listed,) = self.listed()
        for instance in self.instances:
            assert isinstance(instance, AdaptedInstance)
            assert sorted(instance.shelf.loaded.values()) == sorted(found for _, found in listed)


@pytest.mark.parametrize("victim", [-1, 0, 1])
def test_whoever_dies_at_any_step_one_list_serves_and_answers_keep_their_content(victim: int) -> None:
    phases, lists = set(), set()
    for seed in range(4):
        for at in range(0, 260, 7):
            world = AdaptedWorld(seed)
            for _ in range(20):
                world.step()
            change = world.load(sql="/sql-2", tone="/tone-1")
            for number in range(270):
                if number == at:
                    phases.add(change.phase)
                    world.kill(victim)
                world.step()
                world.check()
            world.settle()
            world.check_whole()
            lists |= world.listed()
            assert change.is_committed or victim < 0
    assert phases >= {"prepare", "commit", "done"}
    after = (("sql", "of sql-2"), ("tone", "of tone-1"))
    assert lists == ({STARTED, after} if victim < 0 else {after})


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_under_requests_leave_every_answer_with_one_content(seed: int) -> None:
    world, names = AdaptedWorld(seed), set[str]()
    for _ in range(12):
        world.settle()
        listed = [each.name for each in world.core.weights.adapters()]
        unload = [name for name in listed if world.random.random() < 0.4]
        left = [name for name in ("sql", "tone") if name not in unload and world.random.random() < 0.6]
        folders = {name: f"/{name}-{world.random.choice((1, 2))}" for name in left}
        if folders or unload:
            world.load(unload, **folders)
        if world.random.random() < 0.3:
            world.kill(world.random.choice((-1, 0, 1, 2)))
        for _ in range(150):
            world.step()
            world.check()
        names |= {request.found for request in world.answered if isinstance(request, AdaptedRequest)}
    world.settle()
    world.check_whole()
    assert len(names) >= 3, "it was about nothing"


class InPlace(AdapterTable):
    """A table that gives another content the number of the one that it replaces."""

    def to_read(self, wanted: Sequence[ServedAdapter] | None) -> list[AdapterFolder]:
        old = {name: held.number for name, held in self._serving.items()}
        replace = msgspec.structs.replace
        return [replace(each, number=old.get(each.name, each.number)) for each in super().to_read(wanted)]


def test_another_content_in_the_place_of_the_old_one_is_seen() -> None:
    """The checks above would find what they are there for."""

    def run(seed: int) -> None:
        world = AdaptedWorld(seed)
        for instance in world.instances:
            instance.keeper.adapters.__class__ = InPlace
        world.load(sql="/sql-2")
        for _ in range(400):
            world.step()
            world.check()

    with pytest.raises(AssertionError, match=r"asked for 'of sql-1', computed with .*of sql-2"):
        for seed in range(20):
            run(seed)


def test_folders_that_one_instance_lacks_or_reads_otherwise_change_nothing() -> None:
    for contents, says in (
        ({}, "D1: /tone-1 does not exist"),
        (
            {"/tone-1": "other"},
            "the LoRA adapter tone in /tone-1 is not the same everywhere: P0 reads of tone-1, D1 reads other",
        ),
    ):
        world = AdaptedWorld(2)
        last = world.instances[2]
        assert isinstance(last, AdaptedInstance)
        last.shelf.contents = dict(contents)
        change = world.load(["sql"], tone="/tone-1")
        with pytest.raises(WeightsRefused, match="a change to LoRA adapters is under way"):
            world.core.weights.begin("/new", False)
        world.settle()
        assert change.phase == "failed" and str(change.error) == says
        assert world.listed() == {STARTED} and world.served() == {Weights()}
        last.shelf.contents = dict(CONTENTS)
        again = world.load(["sql"], tone="/tone-1")
        world.settle()
        world.check_whole()
        assert again.phase == "done" and world.listed() == {(("tone", "of tone-1"),)}


def test_other_weights_need_a_list_that_is_empty_and_who_comes_late_reads_both() -> None:
    world = AdaptedWorld(3)
    with pytest.raises(WeightsRefused, match=r"the LoRA adapters \(sql\) were trained for the weights that serve"):
        world.begin()
    world.load(["sql"])
    world.settle()
    change = world.begin()
    world.settle()
    world.core.weights.on_drained(change)
    world.settle()
    assert {serves.path for serves in world.served()} == {"/new"}
    world.load(tone="/tone-2")
    world.settle()
    world.check_whole()
    (serves,) = world.served()
    assert (serves.path, serves.number, serves.base_number, serves.unmixed) == ("/new", 3, 2, 2)
    world.kill(2)
    late = world.instances[2]
    assert isinstance(late, AdaptedInstance)
    late.shelf.contents = {"/tone-2": "written over"}
    world.settle()
    says = "D1 (the LoRA adapter tone in /tone-2 has the hash written over, and the cluster serves of tone-2)"
    assert world.core.weights.missing() == [says]
    late.shelf.contents = dict(CONTENTS)
    world.clock.advance(RETRY_S)
    world.settle()
    world.check_whole()
    assert late.loader.serves == "/new" and world.listed() == {(("tone", "of tone-2"),)}


def test_a_change_that_cannot_be_is_refused_by_name() -> None:
    weights, infos = ClusterWeights(), []
    for role, protocol in ((Role.PREFILL, PROTOCOL_VERSION), (Role.DECODE, 20)):
        infos.append(InstanceInfo(role, 0, 1, "127.0.0.1", 1, 0, ADAPTED, 512, protocol=protocol))
        weights.on_info(infos[-1])
    with pytest.raises(WeightsRefused, match=r"^D0: an older release"):
        weights.begin_adapters({"tone": "/tone-1"}, (), {})
    weights.on_lost(infos[1])
    with pytest.raises(ModelNotFound, match="there is no LoRA adapter 'poems'; there are sql"):
        weights.begin_adapters({}, ["poems"], {})
    many = {f"a{number}": "/tone-1" for number in range(MAX_ADAPTERS)}
    with pytest.raises(WeightsRefused, match=f"at most {MAX_ADAPTERS}"):
        weights.begin_adapters(many, (), {})
    change = weights.begin_adapters({"tone": "/tone-1"}, (), {"sql": "/sql-1"})
    listed = (ServedAdapter("sql", "/sql-1", "of sql-1"), ServedAdapter("tone", "/tone-1"))
    assert change.wanted == Weights(1, is_mixed=True, adapters=listed)
    read = (listed[0], ServedAdapter("tone", "/tone-1", "of tone-1"))
    prepared = msgspec.structs.replace(change.wanted, adapters=read)
    weights.on_report(infos[0], WeightsReport(prepared=prepared))
    assert change.phase == "commit" and weights.serve == prepared
    assert "is of an older release" in weights.why_unable(infos[1]) and not weights.why_unable(infos[0])


def test_an_older_release_joins_no_cluster_whose_adapters_have_changed() -> None:
    world = AdaptedWorld(4)
    world.load(["sql"])
    world.settle()
    old = InstanceInfo(Role.DECODE, 7, 99, "127.0.0.1", 1, 2, ADAPTED, 512, protocol=20)
    reply = world.core.on_message(Join(20, old))
    assert reply is not None and "which that release cannot follow" in getattr(reply, "message", "")
    assert len(world.core.view.instances) == len(NAMES)


def test_an_e_follows_a_change_without_reading_anything() -> None:
    keeper = WeightsKeeper(shelf := AdapterShelf(loaded={}), AdaptedWorld(1).clock)
    serve = Weights(1, is_mixed=True, adapters=(ServedAdapter("tone", "/tone-1", "of tone-1"),))
    keeper.set_order(WeightsOrder(serve))
    while keeper.turn() is None:
        continue
    assert keeper.keeps_base(serve)
    keeper.change(serve)
    assert keeper.serves == serve and not shelf.loaded


# ----------------------------------------------------------------------------------------------- requests on the router


def show(world: object, number: int, **contents: str) -> None:
    """Publish a view whose instances serve this list."""
    listed = tuple([ServedAdapter(name, "/x", found) for name, found in contents.items()])
    weights = Weights(number, is_mixed=True, adapters=listed)
    infos = [msgspec.structs.replace(info, weights=weights) for info in world.instances]  # type: ignore[attr-defined]
    world.router.on_view(ClusterView(1, 9, tuple(infos), weights=WeightsOrder(weights)))  # type: ignore[attr-defined]


def test_instances_are_told_the_content_and_a_request_without_tokens_takes_the_newest() -> None:
    world = pair()
    show(world, 1, sql="a")
    generation, room = world.add(adapter="sql")
    assert {m.head.options.adapter_hash for m in world.sent_to(room).values()} == {"a"}
    world.decode_fails(room, "weights_changed")
    show(world, 2, sql="b")
    world.router.tick()
    again = world.room(generation)
    assert {m.head.options.adapter_hash for m in world.sent_to(again).values()} == {"b"}
    world.emit(again, 1, 2, 3, 4, finish="length")
    assert generation.finish is not None and generation.adapter_hash == "b"


@pytest.mark.parametrize("now", ["", "b"])
def test_a_request_with_tokens_goes_on_with_its_content_or_ends(now: str) -> None:
    for keeps in (True, False):
        world = two_pairs()
        show(world, 1, sql="a", tone="t")
        generation, room = world.add(adapter="sql")
        world.emit(room, 1, 2)
        contents = {"sql": "a"} if keeps else {"sql": now} if now else {"tone": "t"}
        show(world, 2, **contents)
        rank = int(world.pair(generation)[-1])
        gone = next(info for info in world.instances if (info.role, info.engine_rank) == (Role.DECODE, rank))
        world.instances.remove(gone)
        show(world, 2, **contents)
        world.router.on_lost(gone, "killed", has_died=True)
        if keeps:
            world.emit(world.room(generation), 3, 4, finish="length")
            assert generation.take() == [1, 2, 3, 4]
        else:
            assert isinstance(generation.error, WeightsChanged) and "LoRA adapter 'sql'" in str(generation.error)


def test_a_request_whose_adapter_was_unloaded_before_its_first_token_does_not_exist() -> None:
    world = pair()
    show(world, 1, sql="a")
    generation, room = world.add(adapter="sql")
    world.fails("P0", room, "weights_changed")
    show(world, 2)
    world.router.tick()
    assert isinstance(generation.error, ModelNotFound)
    with pytest.raises(ModelNotFound, match="does not exist any more"):
        world.add(adapter="sql")
    base, _ = world.add()
    assert not base.done
