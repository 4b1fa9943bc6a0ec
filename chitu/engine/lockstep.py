"""The executor of a member of a group that shares experts: its steps are turns in the waves of the group (`waves.py`).

Wraps the executor of the member's own ranks. Before a step every member says how many rows it has in it; then those
with rows compute, and the others lend their experts (`StepPlan.sizes`, `DecoderModel.lend`). TP followers get the sizes
with the plan and take part in no agreement. A member that freezes, drains or has no request still takes its turns.

Weights change between two turns: a member that may change says so in its turns, and once all members may change to the
same weights, all do so before the next turn. The last one that may begins a wave for it.

Step thread, except for the listener (`DatagramBells`), which wakes the step thread. Invariant: every member calls
`agree` once a turn, and nothing else is collective among members but what the sizes of that turn announce. A member
that cannot go on ends its process, and the group with it.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist

from chitu.engine.executor import (
    DoneStep,
    Executor,
    ExecutorInfo,
    LayerCallback,
    Shapes,
    StepHandle,
    StepPlan,
    StepResult,
    StepSizes,
    run_warmup,
)
from chitu.engine.process_watch import explaining
from chitu.engine.waves import NO_OFFER, Wave
from chitu.errors import Internal
from chitu.net.threads import ServiceThread

logger = logging.getLogger(__name__)

RING_AGAIN_S = 0.05
"""Pause before the bells ring again for a wave to which not all have come."""
BELL_BYTES = 8
ADDRESS_BYTES = 64
"""Room for the address of a bell."""
NOTHING = StepPlan()


class Turn(NamedTuple):
    """What a member says in a turn."""

    wave: int
    prompt_rows: int
    decode_rows: int
    weights: int
    """Those to which it may change (`offer_of`)."""


class Agreement(Protocol):
    """A collective call of all members."""

    def turns(self, mine: Turn) -> list[Turn]:
        """Return what every member says, by data rank."""
        ...


class Bells(Protocol):
    def ring(self, wave: int) -> None:
        """Ring the bells of all other members until `silence`."""
        ...

    def silence(self) -> None: ...

    def close(self) -> None: ...


class RecordingExecutor(Executor, Protocol):
    def record(self, is_decoding: bool) -> None:
        """Record the steps that are recorded; those that decode only if `is_decoding`. Collective among all ranks that
        have a part in them."""
        ...


@dataclass(slots=True)
class TurnCounts:
    computed: int = 0
    lent: int = 0
    empty: int = 0
    """Turns in which no member had rows: each ended a wave."""


class LockstepExecutor:
    """An `Executor`, and the `Lockstep` of its instance. `inner` computes with the member's own ranks."""

    def __init__(
        self, inner: RecordingExecutor, shapes: Shapes, agreement: Agreement, bells: Bells, wave: Wave
    ) -> None:
        self._inner = inner
        self._shapes = shapes
        self._agreement = agreement
        self._bells = bells
        self._wave = wave
        self._offer = NO_OFFER
        self.is_agreed = False
        self.others: Sequence[StepSizes] = ()
        self.counts = TurnCounts()

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    @property
    def must_step(self) -> bool:
        return self._wave.must_turn

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepHandle:
        if not plan.rows.rows and not self._wave.must_turn:
            return self._inner.launch(plan, on_layer)  # no other member has a part in it
        return self._turn(plan, on_layer)

    def lend(self) -> None:
        self._turn(NOTHING).result()

    def _turn(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepHandle:
        with explaining():
            if self.is_agreed:
                raise Internal("all members of the group change their weights before the next turn")
            sizes = self._agree(plan.rows)
            if any(each.rows for each in sizes):
                plan = msgspec.structs.replace(plan, sizes=sizes)
            elif plan == NOTHING:
                return DoneStep(StepResult([], []))
            return self._inner.launch(plan, on_layer)

    def _agree(self, mine: StepSizes) -> list[StepSizes]:
        """Begin a turn, and return what each member computes in it."""
        wave = self._wave
        if wave.enter():
            self._bells.ring(wave.number)
        turns = self._agreement.turns(Turn(wave.number, mine.prompt_rows, mine.decode_rows, self._offer))
        self._bells.silence()
        if len({turn.wave for turn in turns}) > 1:
            raise Internal(f"the members of a group are in different waves: {turns}")
        self.is_agreed = self._offer != NO_OFFER and all(turn.weights == self._offer for turn in turns)
        sizes = [StepSizes(turn.prompt_rows, turn.decode_rows) for turn in turns]
        others = sizes.copy()
        others.remove(StepSizes(mine.prompt_rows, mine.decode_rows))
        self.others = others
        has_rows = any(each.rows for each in sizes)
        wave.end_turn(has_rows)
        self.counts.computed += mine.rows > 0
        self.counts.lent += has_rows and not mine.rows
        self.counts.empty += not has_rows
        return sizes

    def offer(self, weights: int) -> None:
        is_news, self._offer, self.is_agreed = weights not in (NO_OFFER, self._offer), weights, False
        if is_news:
            self.lend()

    def forget(self, slots: Collection[int]) -> None:
        with explaining():
            raise Internal("a step raised on one member of a group, and the others are in the middle of it")

    @property
    def saved_keys(self) -> frozenset[int]:
        return self._inner.saved_keys

    def warmup(self) -> None:
        """Record the steps, at the same place on all members, then run every shape once. Members that are done before
        others lend to them."""
        with explaining():
            self._inner.record(self._shapes.samples)
        run_warmup(self, self._shapes)

    def close(self) -> None:
        counts = self.counts
        logger.info("%d steps computed and %d lent, in %d waves", counts.computed, counts.lent, self._wave.number)
        self._bells.close()
        self._inner.close()


def _packed(address: bytes | str | tuple[Any, ...]) -> bytes:
    """Return the address of a socket as bytes: as it is, or `HOST PORT`."""
    if isinstance(address, tuple):
        return f"{address[0]} {address[1]}".encode()
    return address if isinstance(address, bytes) else address.encode()


def _unpacked(address: bytes) -> bytes | tuple[str, int]:
    if address.startswith(b"\0"):
        return address
    host, _, port = address.decode().rpartition(" ")
    return host, int(port)


class GroupAgreement:
    """`Agreement` of a process group on CPUs, whose ranks stand in the order of data ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._said = [torch.zeros(len(Turn._fields), dtype=torch.int64) for _ in range(dist.get_world_size(group))]

    def turns(self, mine: Turn) -> list[Turn]:
        dist.all_gather(self._said, torch.tensor(mine), group=self._group)
        return [Turn(*said.tolist()) for said in self._said]


def join_lockstep(
    inner: RecordingExecutor, shapes: Shapes, group: dist.ProcessGroup, wake: Callable[[], None], address: str = ""
) -> LockstepExecutor:
    """Return the executor of a member. Collective. `group`: the main ranks of all members, on CPUs; its timeout bounds
    how long a member may keep the others waiting. `wake` wakes the step thread. `address`: of this machine, at which
    members of other hosts reach it; empty: all are on one host."""
    wave, bells = Wave(), DatagramBells(address)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = [torch.zeros(ADDRESS_BYTES, dtype=torch.uint8) for _ in range(size)]
    mine = torch.frombuffer(bytearray(bells.address.ljust(ADDRESS_BYTES, b" ")), dtype=torch.uint8)
    dist.all_gather(found, mine, group=group)
    addresses = [each.numpy().tobytes().rstrip(b" ") for each in found]

    def hear(number: int) -> None:
        wave.hear(number)
        wake()

    bells.listen([address for at, address in enumerate(addresses) if at != rank], hear)
    return LockstepExecutor(inner, shapes, GroupAgreement(group), bells, wave)


class DatagramBells:
    """`Bells`: a datagram has the number of a wave. A lost one is sent again; one from elsewhere costs the group an
    empty turn at most. `address`: of this machine, for members on several hosts (UDP); empty: all are on one."""

    def __init__(self, address: str = "") -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        if address:
            self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
            self._socket.bind((address, 0))
        else:
            self._socket = socket.socket(socket.AF_UNIX, kind)
            self._socket.bind("")  # a free name without a file
        self.address = _packed(self._socket.getsockname())
        self._others: Sequence[bytes] = ()
        self._hear: Callable[[int], None] = lambda wave: None
        self._ringing: int | None = None
        self._is_closed = False

    def listen(self, others: Sequence[bytes], hear: Callable[[int], None]) -> None:
        """Start the thread that calls `hear` for each bell. `others`: addresses of the other members."""
        self._others, self._hear = others, hear
        ServiceThread("bell", self._listen).start()

    def ring(self, wave: int) -> None:
        self._ringing = wave
        self._send(wave, [*self._others, self.address])  # to its own listener, which rings again

    def silence(self) -> None:
        self._ringing = None

    def close(self) -> None:
        self._is_closed = True
        self._send(0, [self.address])

    def _send(self, wave: int, addresses: Sequence[bytes]) -> None:
        for address in addresses:
            try:
                self._socket.sendto(wave.to_bytes(BELL_BYTES, "little"), _unpacked(address))
            except OSError:
                continue  # it has bells enough that it has not read, or it has ended, which its watch reports

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._is_closed:
            ringing = self._ringing
            if not poll.poll(None if ringing is None else RING_AGAIN_S * 1000):
                if ringing is not None and ringing == self._ringing:
                    self._send(ringing, self._others)
                continue
            data, sender = self._socket.recvfrom(BELL_BYTES + 1)
            if len(data) == BELL_BYTES and _packed(sender) in self._others:
                self._hear(int.from_bytes(data, "little"))
        self._socket.close()
