"""An instance of several tensor-parallel ranks whose ranks are threads of the test, so without gloo."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from engine_checkpoints import PAGE_SIZE, Engine, GreedySampler

from chitu.engine.build import load_model
from chitu.engine.image_features import image_table
from chitu.engine.memory_budget import kv_layout
from chitu.engine.model_runner import ModelRunner
from chitu.engine.process_watch import ProcessWatch
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import Recording
from chitu.engine.tp_executor import TensorParallelExecutor, run_follower
from chitu.kv_cache.pool import KVPool
from chitu.models.adapters import hashes_of, read_adapters
from chitu.models.config import model_hash, read_model_spec
from chitu.models.draft_layer import with_draft_layer
from chitu.models.window_state import with_window_state
from chitu.ops.interface import Ops


class Meeting:
    """State that the ranks of one instance share: a table for tensors, a barrier, and a queue to each follower."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.table: list[torch.Tensor] = [torch.empty(0)] * size
        self.orders: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(size)]
        self.calls: list[list[tuple[object, ...]]] = [[] for _ in range(size)]
        """Collective calls of each rank within steps, with the shape of what it brings."""

    def gather(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.table[rank] = x.clone()
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        return found


class ThreadRank:
    """`Shard`, `Broadcast` and `Listener` of one rank."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def _note(self, *call: object) -> None:
        self.meeting.calls[self.rank].append(call)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._note("all_reduce", x.shape)
        return x.copy_(torch.stack(self.meeting.gather(self.rank, x)).sum(0))

    def broadcast(self, x: torch.Tensor) -> Callable[[], None]:
        self._note("broadcast", x.shape)
        found = self.meeting.gather(self.rank, x)[0]

        def wait() -> None:
            x.copy_(found)

        return wait

    def gather_columns(self, x_RC: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        self._note("gather", len(x_RC), tuple(widths))
        parts = self.meeting.gather(self.rank, x_RC)
        assert [part.shape[1] for part in parts] == list(widths)
        return None if self.rank else torch.cat(parts, dim=1)

    def send(self, data: bytes) -> None:
        for orders in self.meeting.orders[1:]:
            orders.put(data)

    def receive(self) -> bytes:
        return self.meeting.orders[self.rank].get(timeout=30)

    def barrier(self) -> None:
        self.meeting.barrier.wait()

    def close(self) -> None: ...


class NoLifeline:
    def close(self) -> None: ...


class Ranks:
    """An instance of `size` ranks: the main rank's executor for the caller, its followers in threads."""

    def __init__(
        self,
        path: Path,
        size: int,
        num_pages: int = 128,
        *,
        sampling: bool = True,
        sampler: Sampler | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
        window_state: bool = False,
        drafts: bool = False,
        mtp_tokens: int = 1,
        num_slots: int = 8,
        max_model_len: int = 1024,
        ops: Callable[[], Ops] | None = None,
        recording: Recording | None = None,
        main: Callable[[ModelRunner], Any] = lambda runner: runner,
        rank: Callable[[Meeting, int], ThreadRank] = ThreadRank,
        image_rows: int = 0,
    ) -> None:
        """Load the model on every rank. `sampler` replaces argmax on the main rank. `main` puts something around its
        runner, `rank` makes each rank, and `ops` the operations of each. All else: as of `Engine`."""
        self._mtp_tokens, self._num_slots, self._max_model_len = mtp_tokens, num_slots, max_model_len
        self._ops, self._recording = ops, recording
        self._window_state, self._image_rows = window_state, image_rows
        self.spec = with_draft_layer(with_window_state(read_model_spec(path, 1024), window_state), drafts)
        self._adapters = read_adapters(adapters, self.spec, path)
        self.chosen: Mapping[int, int] = {}
        self.pools: list[KVPool] = []
        self.meeting = Meeting(size)
        ranks = [rank(self.meeting, number) for number in range(size)]
        chosen = (sampler or GreedySampler()) if sampling else None
        self.runners = [self._runner(path, each, num_pages, None if each.rank else chosen) for each in ranks]
        self._num_state_slots = self.pools[0].num_state_slots
        self.runner = TensorParallelExecutor(main(self.runners[0]), ranks[0], ProcessWatch([]))
        self._pool = ThreadPoolExecutor(size)
        self.followers = [
            self._pool.submit(self._follow, *pair) for pair in zip(self.runners[1:], ranks[1:], strict=True)
        ]
        self._free = list(range(num_pages))[::-1]

    def _follow(self, runner: ModelRunner, rank: ThreadRank) -> None:
        try:
            run_follower(runner, rank, NoLifeline())
        except BaseException:
            self.meeting.barrier.abort()
            raise

    def _runner(self, path: Path, rank: ThreadRank, num_pages: int, sampler: Sampler | None) -> ModelRunner:
        model = load_model(
            path,
            "float32",
            max_model_len=self._max_model_len,
            ops=self._ops() if self._ops is not None else None,
            shard=rank,
            adapters=self._adapters,
            window_state=self._window_state,
            drafts=self.spec.has_draft_layer,
            images=self._image_rows > 0,
        )
        layout = kv_layout(self.spec, PAGE_SIZE, "float32", rank.size, model_hash(path), "float32")
        layout = msgspec.structs.replace(layout, adapters=hashes_of(self._adapters))
        num_aux, recording = 0 if rank.rank else 8, self._recording
        pool = KVPool(layout, num_pages, num_aux, has_scratch=recording is not None, num_state_slots=9)
        self.pools.append(pool)
        sizes = self._num_slots, self._max_model_len
        images = image_table(model, self._image_rows, pool.device)
        return ModelRunner(
            self.spec, model, pool, *sizes, sampler, recording, mtp_tokens=self._mtp_tokens, images=images
        )

    pages = Engine.pages
    admit = Engine.admit
    state_slot = Engine.state_slot

    def close(self) -> None:
        """End the instance from the main rank; raise the error of a follower that failed."""
        self.runner.close()
        for follower in self.followers:
            follower.result(timeout=30)
        self._pool.shutdown()
