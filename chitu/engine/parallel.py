"""Communication of the ranks of one tensor-parallel instance, through torch.distributed.

Owns two process groups. *compute*: sums and gathers inside a step; NCCL between GPUs, gloo on CPU. *control*: the
step's broadcast and the start-up, gloo everywhere. A follower waits in the control group for as long as the instance is
idle, so that group has practically no timeout; a rank that dies closes its sockets, which ends every wait at once.
Within a step no rank waits longer than `COMPUTE_TIMEOUT_S`. Used by the thread that builds the engine, then by the step
thread. All ranks are processes of one host, and gloo is bound to its loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from chitu.config.tensor_parallel import MAIN_RANK

COMPUTE_TIMEOUT_S = 60
"""Timeout of a collective, from the first to the last rank that reaches it."""
CONTROL_TIMEOUT = timedelta(days=365)
FRAME_BYTES = 4096
"""Size of a broadcast. Data that does not fit follows in a second one."""
LENGTH_BYTES = 8


class RankGroup:
    """A `Shard`. Its calls are collective: every rank makes the same calls in the same order.

    Every rank builds it at the same time, under torchrun (whose environment variables hold the rendezvous address).
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        # Otherwise gloo listens on the interface of the host's name. The ranks of an instance share one host.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # The default group is the control group, because ranks may start at very different times.
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=CONTROL_TIMEOUT)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._compute = dist.new_group(backend=backend, timeout=timedelta(seconds=COMPUTE_TIMEOUT_S))
        self._frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)

    @property
    def is_main(self) -> bool:
        return self.rank == MAIN_RANK

    # ----------------------------------------------------------------------------------------------------- in a step

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._compute)
        return x

    def gather_columns(self, x_RC: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        widest = max(widths)
        if x_RC.shape[1] < widest:  # a gather needs the same shape from every rank
            x_RC = torch.nn.functional.pad(x_RC, (0, widest - x_RC.shape[1]))
        x_RC = x_RC.contiguous()
        if not self.is_main:
            dist.gather(x_RC, dst=MAIN_RANK, group=self._compute)
            return None
        parts = [torch.empty_like(x_RC) for _ in widths]
        dist.gather(x_RC, parts, dst=MAIN_RANK, group=self._compute)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    # ------------------------------------------------------------------------------------------------------- control

    def send(self, data: bytes) -> None:
        """Send `data` of any length from the main rank to the `receive` of every other. One message up to 4 KiB."""
        frame = self._frame.numpy()
        frame[:LENGTH_BYTES] = bytearray(len(data).to_bytes(LENGTH_BYTES, "little"))
        head = data[: FRAME_BYTES - LENGTH_BYTES]
        frame[LENGTH_BYTES : LENGTH_BYTES + len(head)] = bytearray(head)
        dist.broadcast(self._frame, MAIN_RANK)
        if len(head) < len(data):
            rest = torch.frombuffer(bytearray(data[len(head) :]), dtype=torch.uint8)
            dist.broadcast(rest, MAIN_RANK)

    def receive(self) -> bytes:
        """Return the data of the main rank's next `send`. Waits without a timeout. RuntimeError if a rank has died."""
        dist.broadcast(self._frame, MAIN_RANK)
        frame = self._frame.numpy()
        length = int.from_bytes(frame[:LENGTH_BYTES].tobytes(), "little")
        head = frame[LENGTH_BYTES : min(FRAME_BYTES, LENGTH_BYTES + length)].tobytes()
        if len(head) == length:
            return head
        rest = torch.empty(length - len(head), dtype=torch.uint8)
        dist.broadcast(rest, MAIN_RANK)
        return head + rest.numpy().tobytes()

    def collect(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, by rank. For start-up: it takes two rounds."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def smallest(self, value: int) -> int:
        """Return the smallest `value` of all ranks."""
        found = torch.tensor([value])
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.smallest(0)

    def close(self) -> None:
        dist.destroy_process_group()
