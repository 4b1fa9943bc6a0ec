"""The process groups of a torchrun (torch.distributed): which ranks compute together, and how they talk.

Rank r of a torchrun is TP rank r % `tp_size` of data rank r // `tp_size`. The ranks of one data rank are an instance:
they share a model, and one of them, the main rank, orders the steps. Ranks of equal TP rank stand at the same place in
the members of a group. A *control* group is gloo everywhere: its ranks may start at very different times, and a
follower waits in it for as long as its instance is idle, so it has practically no timeout. A rank that dies closes its
sockets, which ends every wait at once. A *compute* group has the sums and gathers inside a step, NCCL between GPUs and
gloo on CPU; there no rank waits longer than `COMPUTE_TIMEOUT`. The ranks of an instance are processes of one host, and
their gloo is bound to its loopback interface. The members of a group may be on several hosts: they meet as
`rendezvous.py` says, the groups that reach across hosts are bound to the interface that leads to the first host, and a
`HostWatch` ends the parts of all hosts together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.engine.host_watch import HostWatch
from chitu.engine.process_watch import end_now
from chitu.engine.rendezvous import Claim, meet
from chitu.errors import ConfigError
from chitu.net.interfaces import interface_towards

COMPUTE_TIMEOUT = timedelta(seconds=60)
"""Timeout of a collective, from the first to the last rank that reaches it."""
CONTROL_TIMEOUT = timedelta(days=365)
FRAME_BYTES = 4096
"""Size of a broadcast. Data that does not fit follows in a second one."""
LENGTH_BYTES = 8
LOOPBACK = "lo"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
STORE_TIMEOUT = timedelta(seconds=60)
CONNECT_S = 60.0
"""Time in which ranks that have met connect to each other: one that dies then would be waited for without end."""


class RankGroup:
    """A `Shard`. Its calls are collective: every rank makes the same calls in the same order.

    `groups_of_rank` makes it. `compute`: None if the ranks have no sums and gathers. `turns`: like a control group with
    the timeout of a compute group, in which members that share experts agree on their steps; None if they share none.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        control: dist.ProcessGroup,
        compute: dist.ProcessGroup | None = None,
        turns: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.watch: HostWatch | None = None
        """Of the members' ranks: what ends them with those of other hosts. One process of each host has it."""
        self._control = control
        self.compute = compute
        self.turns = turns
        self._frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)

    @property
    def is_main(self) -> bool:
        return self.rank == MAIN_RANK

    # ----------------------------------------------------------------------------------------------------- in a step

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.compute)
        return x

    def gather_columns(self, x_RC: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        widest = max(widths)
        if x_RC.shape[1] < widest:  # a gather needs the same shape from every rank
            x_RC = torch.nn.functional.pad(x_RC, (0, widest - x_RC.shape[1]))
        x_RC = x_RC.contiguous()
        if not self.is_main:
            dist.gather(x_RC, group=self.compute, group_dst=MAIN_RANK)
            return None
        parts = [torch.empty_like(x_RC) for _ in widths]
        dist.gather(x_RC, parts, group=self.compute, group_dst=MAIN_RANK)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor) -> Callable[[], None]:
        work = dist.broadcast(x, group=self.compute, group_src=MAIN_RANK, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    # ------------------------------------------------------------------------------------------------------- control

    def send(self, data: bytes) -> None:
        """Send `data` of any length from the main rank to the `receive` of every other. One message up to 4 KiB."""
        frame = self._frame.numpy()
        frame[:LENGTH_BYTES] = bytearray(len(data).to_bytes(LENGTH_BYTES, "little"))
        head = data[: FRAME_BYTES - LENGTH_BYTES]
        frame[LENGTH_BYTES : LENGTH_BYTES + len(head)] = bytearray(head)
        self._broadcast(self._frame)
        if len(head) < len(data):
            rest = torch.frombuffer(bytearray(data[len(head) :]), dtype=torch.uint8)
            self._broadcast(rest)

    def receive(self) -> bytes:
        """Return the data of the main rank's next `send`. Waits without a timeout. RuntimeError if a rank has died."""
        self._broadcast(self._frame)
        frame = self._frame.numpy()
        length = int.from_bytes(frame[:LENGTH_BYTES].tobytes(), "little")
        head = frame[LENGTH_BYTES : min(FRAME_BYTES, LENGTH_BYTES + length)].tobytes()
        if len(head) == length:
            return head
        rest = torch.empty(length - len(head), dtype=torch.uint8)
        self._broadcast(rest)
        return head + rest.numpy().tobytes()

    def collect(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, by rank. For start-up: it takes two rounds."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._control)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._control)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def smallest(self, value: int) -> int:
        """Return the smallest `value` of all ranks."""
        found = torch.tensor([value])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._control)
        return int(found)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.smallest(0)

    def begin_sum(self, value: int) -> Callable[[], int | None]:
        """Begin the sum of the `value` of every rank without waiting. Return what gives it, or None as long as not
        every rank has begun it. That raises RuntimeError if a rank has died before."""
        total = torch.tensor([value])
        work = dist.all_reduce(total, group=self._control, async_op=True)

        def found() -> int | None:
            if not work.is_completed():
                return None
            work.wait()
            return int(total)

        return found

    def _broadcast(self, frame: torch.Tensor) -> None:
        dist.broadcast(frame, group=self._control, group_src=MAIN_RANK)

    def close(self) -> None:
        dist.destroy_process_group()


class RankGroups(NamedTuple):
    """The groups that a rank is in."""

    tp: RankGroup | None
    """The ranks of its instance; None if there is only one."""
    members: RankGroup | None
    """The ranks of equal TP rank in all members of its group, by data rank; None if it has no other member. They have
    a compute group if the members share experts."""


class Meeting(NamedTuple):
    """How the ranks of a group on several hosts meet."""

    hosts: tuple[str, ...]
    port: int
    """Of the store of the first host's torchrun."""
    claim: Claim
    lease_s: float
    """Longest silence of a host."""


def groups_of_rank(
    dp_size: int,
    tp_size: int,
    data_rank: int,
    tp_rank: int,
    device: torch.device,
    *,
    share_experts: bool = False,
    meeting: Meeting | None = None,
) -> RankGroups:
    """Make the groups of a rank. Collective: every rank of the group calls it once. `meeting`: None if all are of one
    torchrun, whose environment variables hold the rendezvous address. Raises ConfigError if the ranks of several hosts
    do not form a group."""
    size = dp_size * tp_size
    if size == 1:
        return RankGroups(None, None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = data_rank * tp_size + tp_rank
    # Otherwise gloo listens on the interface of the host's name.
    store, is_given = None, GLOO_INTERFACE in os.environ
    if meeting is None:
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK)
    else:
        interface, store = _interface(meeting), _met(meeting, rank, size)
        os.environ.setdefault(GLOO_INTERFACE, interface)
        os.environ.setdefault(NCCL_INTERFACE, f"={interface}")
    backend = "nccl" if device.type == "cuda" else "gloo"
    instances = [list(range(first, first + tp_size)) for first in range(0, size, tp_size)]
    places = [list(range(first, size, tp_size)) for first in range(tp_size)]
    tp = members = None
    with _connecting() if meeting is not None else nullcontext():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONTROL_TIMEOUT)
        if tp_size > 1:
            with nullcontext() if is_given else _on_loopback():
                control = _own(instances, data_rank, "gloo", CONTROL_TIMEOUT)
                tp = RankGroup(tp_rank, tp_size, control, _own(instances, data_rank, backend, COMPUTE_TIMEOUT))
        if dp_size > 1:
            control, shared = _own(places, tp_rank, "gloo", CONTROL_TIMEOUT), []
            if share_experts:
                shared = [_own(places, tp_rank, each, COMPUTE_TIMEOUT) for each in (backend, "gloo")]
            members = RankGroup(data_rank, dp_size, control, *shared)
            if meeting is not None:
                members.watch = _watch(meeting, rank, size)
    return RankGroups(tp, members)


def _interface(meeting: Meeting) -> str:
    first = meeting.hosts[0]
    if found := os.environ.get(GLOO_INTERFACE) or interface_towards(first):
        return found
    raise ConfigError(f"{meeting.claim.name}: no network interface leads to {first}, the first host of its group")


def _met(meeting: Meeting, rank: int, size: int) -> Store:
    """Meet the other ranks, and return a store that only these use."""
    store = TCPStore(meeting.hosts[0], meeting.port, is_master=False, timeout=STORE_TIMEOUT)
    number = meet(PrefixStore("meeting", store), rank, size, size // len(meeting.hosts), meeting.claim)
    return PrefixStore(number, store)


def _watch(meeting: Meeting, rank: int, size: int) -> HostWatch | None:
    """Return the watch of this host, if this rank is its first."""
    ranks_per_host = size // len(meeting.hosts)
    group = dist.new_group(list(range(0, size, ranks_per_host)), timeout=CONTROL_TIMEOUT, backend="gloo")
    if rank % ranks_per_host:
        return None
    return HostWatch(group, meeting.hosts, rank // ranks_per_host, meeting.lease_s)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have gloo use the loopback interface for groups that are made meanwhile."""
    interface, os.environ[GLOO_INTERFACE] = os.environ[GLOO_INTERFACE], LOOPBACK
    try:
        yield
    finally:
        os.environ[GLOO_INTERFACE] = interface


@contextmanager
def _connecting() -> Iterator[None]:
    """End this process if the block takes longer than `CONNECT_S`."""
    text = "the ranks of the group have met, but have not connected within %g s; ending"
    timer = threading.Timer(CONNECT_S, end_now, (text, CONNECT_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _own(groups: Sequence[list[int]], own: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make all of these groups, as every rank has to, and return this rank's own."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in groups]
    return made[own]
