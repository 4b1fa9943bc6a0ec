"""Commands of a script of faults: what an `Op` does to a `Cluster`. Commands of the router are methods of the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_node import PAGE_BYTES
from support.fake_transport import Fault, FaultKind

if TYPE_CHECKING:
    from cluster import Cluster
    from cluster_process import Process


@dataclass(frozen=True)
class Op:
    """One line of a script; `a` and `b` select among existing objects, whatever their size."""

    kind: str
    a: int = 0
    b: int = 0


def play(world: Cluster, script: list[Op]) -> None:
    for op in script:
        if op.kind in OPS:
            OPS[op.kind](world, op.a, op.b)
        else:
            getattr(world, f"op_{op.kind}")(op.a, op.b)
        world.check()


# ------------------------------------------------------------------------------------------------------------ time


def run(world: Cluster, a: int, b: int) -> None:
    world.turns(1 + a % 8)


def pass_time(world: Cluster, a: int, b: int) -> None:
    """Advance the clock without a turn for any process."""
    world.advance((0.1, 0.3, 1.0, 3.1)[a % 4])


# --------------------------------------------------------------------------------- the network between P and D


def lose(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.frames.pop(a % len(world.frames))


def double(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.frames.insert(b % (len(world.frames) + 1), world.frames[a % len(world.frames)])


def delay(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.frames.append(world.frames.pop(a % len(world.frames)))


def hasten(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.deliver(a % len(world.frames))


def fault(world: Cluster, a: int, b: int) -> None:
    world.fabric.inject(Fault((FaultKind.LATE, FaultKind.DROP)[a % 2]))


def flip(world: Cluster, a: int, b: int) -> None:
    """Flip a bit of a write, if all KV is verified."""
    if world.writes.verify_kv == "all":
        world.num_flips += 1
        world.fabric.inject(Fault(FaultKind.CORRUPT, byte=b % PAGE_BYTES))


def interrupt(world: Cluster, a: int, b: int) -> None:
    """Make the next write, gather or scatter take long, and cancel a request meanwhile."""
    world.interruptions.append(a)


def land(world: Cluster, a: int, b: int) -> None:
    world.fabric.release_late_writes()


# --------------------------------------------------------------------------------------------------- processes


def kill(world: Cluster, a: int, b: int) -> None:
    if len(world.processes) > 2:
        world.kill(_one_of(world, a))


def start(world: Cluster, a: int, b: int) -> None:
    if world.missing:
        world.start(a % len(world.missing))


def replace(world: Cluster, a: int, b: int) -> None:
    """Kill a process and start it again before the death is noticed."""
    world.kill(_one_of(world, a))
    world.start(len(world.missing) - 1)


def tell(world: Cluster, a: int, b: int) -> None:
    """Let launchers report to the router which processes have ended."""
    world.tell_deaths()


def freeze(world: Cluster, a: int, b: int) -> None:
    process = _one_of(world, a)
    process.is_frozen = not process.is_frozen


def slow(world: Cluster, a: int, b: int) -> None:
    process = _one_of(world, a)
    process.is_slow = not process.is_slow


def deafen(world: Cluster, a: int, b: int) -> None:
    process = _one_of(world, a)
    process.is_deaf = not process.is_deaf


def _one_of(world: Cluster, a: int) -> Process:
    return world.processes[a % len(world.processes)]


OPS: dict[str, Callable[[Cluster, int, int], None]] = {
    "run": run,
    "pass": pass_time,
    "lose": lose,
    "double": double,
    "delay": delay,
    "hasten": hasten,
    "fault": fault,
    "flip": flip,
    "interrupt": interrupt,
    "land": land,
    "kill": kill,
    "start": start,
    "replace": replace,
    "tell": tell,
    "freeze": freeze,
    "slow": slow,
    "deafen": deafen,
}
