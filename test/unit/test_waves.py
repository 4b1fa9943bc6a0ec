"""Waves of three members, every order of events: nobody waits for ever, no two waves overlap, and each ends for all at
once, whatever becomes of the bells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from chitu.engine.waves import Wave, offer_of

SIZE = 3


class CredulousWave(Wave):
    """Planted: a bell calls to the present wave, whatever its number is."""

    def hear(self, number: int) -> None:
        self._rung = self.number


class DeafWave(Wave):
    """Planted: a bell of the next wave is dropped."""

    def hear(self, number: int) -> None:
        if number == self.number:
            super().hear(number)


class HastyWave(Wave):
    """Planted: a member ends the wave when it has no rows itself (`steps_of` gives it no other view)."""


class SilentWave(Wave):
    """Planted: whoever begins a wave rings no bell."""

    def enter(self) -> bool:
        super().enter()
        return False


Kind = type[Wave]


@dataclass(frozen=True, order=True)
class Member:
    """State of a member: that of its `Wave`, and where it is in its turn."""

    number: int = 0
    is_on: bool = False
    rung: int = -1
    coming: int = 0
    """Steps with rows for which it will get requests."""
    work: int = 0
    """Steps with rows that it has to take."""
    rows: int = 0
    """Rows of the turn that it is in."""
    is_waiting: bool = False
    """Whether it waits for the others in a turn."""
    rings: int = -1
    """Wave for which it rings until the turn is over."""
    seen: int = -1
    """Rows of all members in the turn that is over, which this one has not read yet; -1 for none."""

    def wave(self, kind: Kind) -> Wave:
        wave = kind()
        wave.number, wave.is_on, wave._rung = self.number, self.is_on, self.rung
        return wave

    def after(self, wave: Wave, **changes: int) -> Member:
        return replace(self, number=wave.number, is_on=wave.is_on, rung=wave._rung, **changes)


@dataclass(frozen=True)
class World:
    members: tuple[Member, ...]
    bells: frozenset[tuple[int, int]] = frozenset()
    """On their way: to whom, and of which wave."""
    losses: int = 0
    doubles: int = 0
    """Bells that may still be lost, and doubled."""
    is_first: bool = True
    """Whether the next turn is the first one of a wave."""

    def with_member(self, at: int, member: Member, **changes: object) -> World:
        members = (*self.members[:at], member, *self.members[at + 1 :])
        return replace(self, members=members, **changes)  # type: ignore[arg-type]


def steps_of(world: World, kind: Kind, repeats: bool) -> Iterator[World]:
    """Yield what may happen next."""
    for at, member in enumerate(world.members):
        if member.coming:
            yield world.with_member(at, replace(member, coming=member.coming - 1, work=member.work + 1))
        if member.seen >= 0:  # it has read what all have said
            wave = member.wave(kind)
            wave.end_turn(bool(member.rows if kind is HastyWave else member.seen))
            yield world.with_member(at, member.after(wave, seen=-1, rows=0, rings=-1))
        elif not member.is_waiting:
            wave = member.wave(kind)
            if member.work or wave.must_turn:
                has_rung, rows = wave.enter(), int(member.work > 0)
                bells = {(other, member.number) for other in range(SIZE) if other != at} if has_rung else set()
                rings = member.number if has_rung else -1
                begun = member.after(wave, work=member.work - rows, rows=rows, is_waiting=True, rings=rings)
                yield world.with_member(at, begun, bells=world.bells | bells)
        elif repeats and member.rings >= 0:
            missing = {(other, member.rings) for other in range(SIZE) if other != at}
            if not missing <= world.bells:
                yield replace(world, bells=world.bells | missing)
    if all(member.is_waiting for member in world.members):
        assert len({member.number for member in world.members}) == 1, "two waves overlap"
        total = sum(member.rows for member in world.members)
        assert total or not world.is_first, "a wave began without rows"
        done = [replace(member, is_waiting=False, seen=total) for member in world.members]
        yield replace(world, members=tuple(done), is_first=not total)
    for to, number in world.bells:
        wave = world.members[to].wave(kind)
        wave.hear(number)
        heard = world.with_member(to, world.members[to].after(wave))
        yield replace(heard, bells=world.bells - {(to, number)})
        if world.doubles:
            yield replace(heard, doubles=world.doubles - 1)
        if world.losses:
            yield replace(world, bells=world.bells - {(to, number)}, losses=world.losses - 1)


def arranged(world: World) -> World:
    """Return the world with its members in order: it makes no difference which one is which."""
    bells = [sorted(number for to, number in world.bells if to == at) for at in range(SIZE)]
    order = sorted(range(SIZE), key=lambda at: (world.members[at], bells[at]))
    if order == list(range(SIZE)):
        return world
    members = tuple(world.members[at] for at in order)
    return replace(
        world, members=members, bells=frozenset((to, number) for to, at in enumerate(order) for number in bells[at])
    )


def explore(work: tuple[int, ...], kind: Kind = Wave, losses: int = 0, doubles: int = 0, repeats: bool = True) -> None:
    """Visit every state, and check that all members can get to rest from each."""
    first = arranged(World(tuple(Member(coming=count) for count in work), losses=losses, doubles=doubles))
    before: dict[World, list[World]] = {first: []}
    front = [first]
    while front:
        world = front.pop()
        for after in map(arranged, steps_of(world, kind, repeats)):
            if after not in before:
                before[after] = []
                front.append(after)
            before[after].append(world)
    front = [world for world in before if is_at_rest(world)]
    alive = set(front)
    while front:
        for world in before[front.pop()]:
            if world not in alive:
                alive.add(world)
                front.append(world)
    stuck = next((world for world in before if world not in alive), None)
    assert stuck is None, f"a member waits for ever: {stuck}"


def is_at_rest(world: World) -> bool:
    busy = any(
        member.is_waiting or member.seen >= 0 or member.coming or member.work or member.is_on
        for member in world.members
    )
    return not busy and not world.bells and len({member.number for member in world.members}) == 1


@pytest.mark.parametrize("work", [(2, 0, 0), (2, 1, 0), (1, 1, 1)], ids=str)
def test_every_wave_ends_for_all_when_bells_come_late_or_twice(work: tuple[int, ...]) -> None:
    explore(work, doubles=1, repeats=False)


@pytest.mark.parametrize("work", [(2, 0, 0), (1, 1, 0)], ids=str)
def test_lost_bells_ring_again(work: tuple[int, ...]) -> None:
    explore(work, losses=1)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (DeafWave, "waits for ever"),
        (HastyWave, "waits for ever|overlap"),
        (SilentWave, "waits for ever"),
        (CredulousWave, "a wave began without rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found(kind: Kind, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        explore((2, 1, 0), kind, repeats=False)


def test_a_bell_that_is_lost_and_rings_once_is_found() -> None:
    with pytest.raises(AssertionError, match="waits for ever"):
        explore((1, 0, 0), losses=1, repeats=False)


def test_a_bell_from_the_far_future_is_no_bell() -> None:
    wave = Wave()
    wave.hear(2)
    assert not wave.must_turn
    wave.hear(1)
    assert wave.must_turn, "the one who rang has seen the end of wave 0"


def test_offers_name_weights_alike_on_all_members() -> None:
    assert offer_of((3, "abc", "")) == offer_of((3, "abc", "")) != offer_of((3, "abd", ""))
    assert 0 < offer_of((0, "", "")) < 1 << 63
