"""The router's batches: which run here, their states, their ends. Owned by `ApiEndpoint`; loop thread, with the folder
(`store.py`) in other threads. `lines.py` does the work on the lines.

Every process looks into the folder once a second and takes what is not over and not locked. The lock of a batch ends
with its process, so another one goes on with it, behind the answers that are in its files. Each line takes the path of
a client's request (`wire/inner.py`), with the credential of the key that made the batch and the lowest priority.

Invariants: a batch runs in one process at a time; a batch that cannot go on ends as `failed`, and the router serves on;
once a batch is over each of its lines has one answer, unless it failed. No tenant waits for another's batches to end:
it has its share of runs and of lines in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import BinaryIO, NamedTuple

from chitu.errors import ChituError, UnknownFile
from chitu.http.batch.index import OVER, BatchFacts, BatchStatus, FileRecord
from chitu.http.batch.lines import (
    Answers,
    BatchLine,
    Counts,
    DamagedAnswers,
    LineError,
    LineLimits,
    OpenLines,
    Runner,
    answer_rest,
    check_lines,
)
from chitu.http.batch.store import BatchRecord, FileStore, as_full
from chitu.http.wire.exchange import HotRoute
from chitu.http.wire.inner import Reply, ask
from chitu.net.fair_share import Turns
from chitu.net.http import Headers

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between two looks into the folder, and of a running batch at what it was asked."""
CLEAN_S = 60.0
"""Interval between two removals of what is old."""
MAX_RUNS = 4
"""Batches that run at once in a process; later ones wait for their turn. Shares of tenants may add some."""
EXPIRED = "batch_expired", "the batch's completion_window ended before this line was answered"
CANCELLED = "batch_cancelled", "the batch was cancelled before this line was answered"


class _Running(NamedTuple):
    tenant: str
    task: asyncio.Task[None]


def next_tenant(waiting: Iterable[str], running: Collection[str]) -> str | None:
    """Return the tenant whose batch begins next, of those whose batches wait; None if none may. `running`: the tenants
    of the running ones, each as often as it has one. Whoever has the fewest comes next, and any may have its share of
    the places, also if others have taken them."""
    held = Counter(running)
    num_tenants = len({*waiting, *running})
    first = min(waiting, key=lambda tenant: held[tenant], default=None)
    if first is None or (len(running) >= MAX_RUNS and held[first] >= max(1, MAX_RUNS // num_tenants)):
        return None
    return first


class Batches:
    def __init__(
        self,
        store: FileStore,
        routes: Mapping[str, HotRoute],
        credential_of: Callable[[str, str], bytes | None],
        max_line_bytes: int,
        may_run: Callable[[], bool],
    ) -> None:
        """`routes`: those that a line may name. `credential_of`: the credential of a tenant and the name of its key
        (`Access`). `may_run`: whether requests can be served now."""
        self.store = store
        self.endpoints = tuple(routes)
        self._routes = routes
        self._credential_of = credential_of
        self._max_line_bytes = max_line_bytes
        self._may_run = may_run
        self._lines: Turns[str] = Turns(None, store.config.max_in_flight)
        self._running: dict[str, _Running] = {}
        self._counts: dict[str, Counts] = {}
        self._full: dict[str, str] = {}
        """Tenants that run batches whose outputs may not grow now, with the reason."""
        self._looking: asyncio.Task[None] | None = None
        self._next_look_s = self._next_clean_s = 0.0
        self._is_ending = False

    # -------------------------------------------------------------------------------------------------- what is running

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s or self._is_ending or self._looking is not None:
            return
        self._next_look_s = now_s + LOOK_S
        self._looking = asyncio.ensure_future(self._look(now_s))

    def look_soon(self) -> None:
        self._next_look_s = 0.0

    async def stop(self) -> None:
        """Send no more lines, end those that were sent, and release the batches for other processes."""
        self._is_ending = True
        tasks = [each.task for each in self._running.values()]
        tasks += [self._looking] if self._looking is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, now_s: float) -> None:
        try:
            if now_s >= self._next_clean_s:
                self._next_clean_s = now_s + CLEAN_S
                await asyncio.to_thread(self.store.remove_old, time.time())
            running = {each.tenant for each in self._running.values()}
            found = await asyncio.to_thread(self.store.open_batches, running)
            for tenant in found.full.keys() - self._full.keys():
                logger.warning("batches of a tenant wait for room in their folder: %s", found.full[tenant])
            self._full = found.full
            if self._may_run():
                await self._begin(found.by_tenant)
        except OSError as error:
            logger.error("cannot look for batches in their folder: %s", error)
        finally:
            self._looking = None

    async def _begin(self, by_tenant: dict[str, list[BatchFacts]]) -> None:
        """Begin what has a place and is not running elsewhere."""
        waiting = {
            tenant: deque(batch.id for batch in batches if batch.id not in self._running)
            for tenant, batches in by_tenant.items()
        }
        while True:
            tenants = [tenant for tenant, names in waiting.items() if names]
            tenant = next_tenant(tenants, [each.tenant for each in self._running.values()])
            if tenant is None:
                return
            name = waiting[tenant].popleft()
            lock = await asyncio.to_thread(self.store.claim, name)
            if lock is not None:
                self._running[name] = _Running(tenant, asyncio.ensure_future(self._run(name, lock)))

    async def _run(self, name: str, lock: BinaryIO) -> None:
        try:
            # Behind the lock: the process that had it may just have ended the batch.
            batch = await asyncio.to_thread(self.store.batch, name, None)
            if batch.status not in OVER:
                await _Run(self, batch).go()
        except UnknownFile:
            pass  # it was deleted meanwhile
        except Exception:
            logger.exception("batch %s: its run failed; it is tried again", name)
        finally:
            self._counts.pop(name, None)
            del self._running[name]
            lock.close()

    def counts(self, batch: BatchRecord) -> Counts:
        """Return how many lines are answered: now if it runs here, else as its record has it."""
        return self._counts.get(batch.id) or Counts(batch.completed, batch.failed)

    async def send(self, batch: BatchRecord, line: BatchLine) -> Reply:
        """Send a line in a turn of its tenant, once there is room for its answer."""
        credential = self._credential_of(batch.tenant, batch.key_name)
        headers: Headers = [(b"content-type", b"application/json")]
        if credential:
            headers.append((b"authorization", b"Bearer " + credential))

        async def asked() -> Reply | None:
            if batch.tenant in self._full:
                return None
            return await ask(self._routes[line.url], line.url, line.body, headers, os.urandom(16).hex())

        while (reply := await self._lines.do(batch.tenant, asked)) is None:
            await asyncio.sleep(LOOK_S)
        return reply

    def why_not(self, batch: BatchRecord) -> str:
        """Return why the lines of a batch may not be sent; empty if they may."""
        if self._credential_of(batch.tenant, batch.key_name) is None:
            return "the API key that made the batch is not one of this server's any more"
        return "" if batch.endpoint in self._routes else f"this server has no endpoint {batch.endpoint}"

    def limits(self, batch: BatchRecord) -> LineLimits:
        return LineLimits(self.store.config.max_lines, self._max_line_bytes, (batch.endpoint,))

    def note_counts(self, batch: BatchRecord, counts: Counts) -> None:
        self._counts[batch.id] = counts


class _Run:
    """A batch from its lock to its end."""

    def __init__(self, batches: Batches, batch: BatchRecord) -> None:
        self._batches = batches
        self._store = batches.store
        self._batch = batch
        self._input = self._store.path(batch.id, "input")
        self._limits = batches.limits(batch)

    async def go(self) -> None:
        batch = self._batch
        try:
            await asyncio.to_thread(self._store.reserve, batch.id)
            if why_not := self._batches.why_not(batch):
                await self._fail(LineError("invalid_batch", why_not))
            elif batch.status != "validating" or await self._is_valid():
                await self._answer_lines()
        except (OSError, ChituError, DamagedAnswers) as error:
            full = as_full(error) if isinstance(error, OSError) else error
            code = full.code if isinstance(full, ChituError) else "io_error"
            logger.error("batch %s fails: %s", batch.id, full)
            await self._fail(LineError(code, str(full) or repr(full)))

    async def _is_valid(self) -> bool:
        batch = self._batch
        checked = await asyncio.to_thread(check_lines, self._input, self._limits)
        if checked.errors:
            await self._fail(*checked.errors)
            return False
        batch.status, batch.in_progress_at, batch.total = "in_progress", int(time.time()), len(checked.ids)
        await asyncio.to_thread(self._store.write, batch)
        return True

    async def _answer_lines(self) -> None:
        """Send the lines until all are answered, the window ends, or the batch is cancelled."""
        batch = self._batch
        ended: BatchStatus = "completed"
        answers, lines = await self._open()
        try:
            runner = Runner(lambda line: self._batches.send(batch, line), answers, self._store.config.max_in_flight)
            running = asyncio.ensure_future(runner.run(lines))
            try:
                while not running.done():
                    await asyncio.wait({running}, timeout=LOOK_S)
                    if running.done():
                        running.result()
                    elif (at := await asyncio.to_thread(self._store.cancelled_at, batch.id)) is not None:
                        batch.cancelling_at, ended = at, "cancelled"
                        break
                    elif time.time() >= batch.expires_at:
                        ended = "expired"
                        break
                    else:
                        await self._note(answers.counts)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        finally:
            await answers.close()
            lines.close()
        if ended != "completed":
            answers, lines = await self._open()
            try:
                await answer_rest(lines, answers, *(CANCELLED if ended == "cancelled" else EXPIRED))
            finally:
                await answers.close()
                lines.close()
        batch.completed, batch.failed = answers.counts.completed, answers.counts.failed
        batch.status, batch.finalizing_at = "finalizing", int(time.time())
        await self._end(ended)

    async def _open(self) -> tuple[Answers, OpenLines]:
        batch = self._batch
        answers = Answers(self._store.path(batch.output_file_id, "data"), self._store.path(batch.error_file_id, "data"))
        try:
            await asyncio.to_thread(answers.open)
            lines = OpenLines(self._input, self._limits, answers.done)
            await asyncio.to_thread(lines.open)
        except BaseException:
            await answers.close()
            raise
        self._batches.note_counts(batch, answers.counts)
        return answers, lines

    async def _note(self, counts: Counts) -> None:
        """Write the counts for other processes. That the disk is full the answers tell."""
        batch = self._batch
        if (counts.completed, counts.failed) != (batch.completed, batch.failed):
            batch.completed, batch.failed = counts.completed, counts.failed
            with contextlib.suppress(OSError, ChituError):
                await asyncio.to_thread(self._store.write, batch)

    async def _fail(self, *errors: LineError) -> None:
        counts = self._batches.counts(self._batch)
        self._batch.errors, self._batch.completed, self._batch.failed = errors, counts.completed, counts.failed
        await self._end("failed")

    async def _end(self, status: BatchStatus) -> None:
        """Make files of the answers, and write how the batch ended: again and again, if the disk is full."""
        batch, now_s = self._batch, int(time.time())
        batch.status = status
        setattr(batch, f"{status}_at", now_s)
        await asyncio.to_thread(self._store.release, batch.id)
        while True:
            try:
                await asyncio.to_thread(self._write_end, now_s)
                return
            except (OSError, ChituError) as error:
                logger.error("batch %s is %s, but its record cannot be written: %s", batch.id, status, error)
                await asyncio.sleep(LOOK_S)

    def _write_end(self, now_s: int) -> None:
        batch = self._batch
        expires_at = now_s + math.ceil(batch.output_max_age_s)
        for name, kind in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
            path = self._store.path(name, "data")
            num_bytes = path.stat().st_size if path.exists() else 0
            if num_bytes:
                filename = f"{batch.id}_{kind}.jsonl"
                self._store.write(
                    FileRecord(name, batch.tenant, filename, "batch_output", num_bytes, now_s, expires_at)
                )
            else:
                path.unlink(missing_ok=True)
                setattr(batch, "output_file_id" if kind == "output" else "error_file_id", "")
        self._store.write(batch)
        self._store.path(batch.id, "input").unlink(missing_ok=True)
