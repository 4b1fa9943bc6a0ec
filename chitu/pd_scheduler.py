"""`PDScheduler` (S3): the step loop of an instance. A step reads as take events, schedule, run, post-process.

Runs on the step thread; `submit`, `cancel_all` and `end_all` may be called by any thread, everything else by the step
thread alone. It owns no socket and no tensor: tokens leave by the `TokenManager`, P's failures by `report_failure`,
computing is behind `Executor`, peers are behind the transfer roles. So a whole P or D runs in a test without a port or
torch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from chitu import log
from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.decode_manager import DecodeManager
from chitu.engine.executor import Executor, StepPlan, StepResult
from chitu.errors import (
    Capacity,
    ChituError,
    DecodeLost,
    Internal,
    InvalidRequest,
    PrefillLost,
    QueueTimeout,
    RequestCancelled,
    RequestTimeout,
)
from chitu.kv_transfer.events import DecodeReceiverLike, PrefillSenderLike, TransferEvent, TransferEventKind
from chitu.lifecycle import SEQUENCE_AWAITS, waited_text
from chitu.messages import (
    CancelRequest,
    DecodeRequest,
    Finish,
    LoadReport,
    PrefillRequest,
    SchedulerMessage,
    UnifiedRequest,
)
from chitu.prefill_manager import AuxSlots, PrefillManager
from chitu.scheduling.backlog import BacklogMeter
from chitu.scheduling.prefill import Chunk
from chitu.scheduling.sequence import Sequence
from chitu.scheduling.slots import SlotPool
from chitu.token_manager import TokenManager

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PDSchedulerParts:
    """What a scheduler is composed of. P has a sender, D a receiver, a unified instance neither."""

    config: SchedulerConfig
    deadlines: DeadlineConfig
    executor: Executor
    cache: PagedKVCacheManager
    tokens: TokenManager
    report_failure: Callable[[bytes, ChituError], None]
    """Tells the router that P failed a room."""
    clock: Clock
    name: str = "this instance"
    """As its errors call it."""
    request_timeout_s: float = math.inf
    aux: AuxSlots | None = None
    num_aux_slots: int = 0
    sender: PrefillSenderLike | None = None
    receiver: DecodeReceiverLike | None = None


@dataclass(slots=True, frozen=True)
class _WorkerGone:
    """An API process of the router has ended."""

    incarnation: int


class PDScheduler:
    """One instance's requests, from their arrival to the moment that their last page is free again."""

    def __init__(self, parts: PDSchedulerParts) -> None:
        self._parts = parts
        self._executor = parts.executor
        self._cache = parts.cache
        self._tokens = parts.tokens
        self._clock = parts.clock
        self._slots = SlotPool(parts.executor.info.num_slots)
        self._eos = frozenset(parts.executor.info.eos_token_ids)
        self._decode = DecodeManager(parts.config, parts.cache, self._slots, parts.clock, parts.receiver, parts.aux)
        is_prefill = parts.sender is not None  # D has a prefill manager too, which stays empty
        self._prefill = PrefillManager(
            parts.config,
            parts.cache,
            self._slots,
            parts.clock,
            parts.sender,
            parts.aux if is_prefill else None,
            None if is_prefill else self._may_start,
        )
        self._inbox: deque[SchedulerMessage | _WorkerGone | float | None] = deque()
        self._gone_workers: deque[int] = deque(maxlen=64)
        """Newest last: their last requests may still be on the way."""
        self._next_expire_s = 0.0
        self._arrivals = 0
        self._steps = 0
        self.turns = 0
        """Of `step`, idle ones too; any thread may read it."""
        self._prompt_tokens = 0
        self._bytes_moved = 0
        self._is_checked = True
        self._backlog = BacklogMeter(parts.clock.monotonic())
        self._load = self._load_report()

    # ------------------------------------------------------------------------------------------------------ any thread

    def submit(self, message: SchedulerMessage) -> None:
        """Queue a message of the router for the next step."""
        self._inbox.append(message)

    def cancel_all(self) -> None:
        """The router that sent the present requests is gone: nobody reads their tokens. Another one is there."""
        self._inbox.append(None)

    def cancel_worker(self, incarnation: int) -> None:
        """An API process of the router is gone (`router.workers`): nobody reads the tokens of its requests."""
        self._inbox.append(_WorkerGone(incarnation))

    def end_all(self, silence_s: float) -> None:
        """The router was silent for so long that it counts as gone: end every request, with an error for it."""
        self._inbox.append(silence_s)

    @property
    def load(self) -> LoadReport:
        """Snapshot after the newest step, with what came in since: a step may take seconds."""
        new = [m for m in tuple(self._inbox) if isinstance(m, (PrefillRequest, DecodeRequest, UnifiedRequest))]
        if not new:
            return self._load
        tokens = sum(len(message.token_ids) // 4 for message in new if not isinstance(message, DecodeRequest))
        return msgspec.structs.replace(
            self._load, waiting=self._load.waiting + len(new), waiting_tokens=self._load.waiting_tokens + tokens
        )

    # ----------------------------------------------------------------------------------------------------- the step

    def step(self) -> bool:
        """One turn; False where there was nothing to compute, and the caller may wait for the next event."""
        self.turns += 1
        self._take_messages()
        self._take_transfer_events()
        self._expire()
        plan, chunks = self._schedule()
        worked = self._has_work(plan)
        if worked:
            on_layer = self._parts.sender.on_layer_done if self._parts.sender is not None and chunks else None
            result = self._executor.execute(plan, on_layer)
            self._postprocess(plan, chunks, result)
            self._steps += 1
        self._tokens.flush(self._clock.monotonic())
        if worked:
            self._is_checked = False
        elif not self._is_checked and self.is_idle:
            self._check_idle()
        self._load = self._load_report()
        return worked

    def close(self) -> None:
        """After the last step."""
        self._tokens.close()

    @property
    def is_idle(self) -> bool:
        """No request is left, not even one that only waits for a peer to let go of its pages."""
        return not self._inbox and not len(self._prefill) and not len(self._decode)

    def _check_idle(self) -> None:
        """Without requests every page must be free. A leak is a bug, but no reason to lose what still works."""
        self._is_checked = True
        try:
            self._cache.check_idle()
        except Internal as error:
            logger.error("page accounting: %s", error.message)

    def _schedule(self) -> tuple[StepPlan, list[Chunk]]:
        plan = StepPlan()
        self._decode.schedule(plan)
        chunks = self._prefill.schedule(plan)
        self._note_backlog(chunks)
        plan.release.extend(self._slots.take_releases())
        return plan, chunks

    def _note_backlog(self, chunks: list[Chunk]) -> None:
        """D's queue moves by admissions, the others' by prompt tokens; after a full step more waits."""
        if self._parts.receiver is not None:
            waits, work = bool(self._decode.waiting), self._decode.admissions
        else:
            is_full = sum(chunk.length for chunk in chunks) >= self._parts.config.max_batched_tokens
            waits, work = is_full or bool(self._prefill.waiting), self._prompt_tokens
        self._backlog.update(self._clock.monotonic(), work, waits)

    @staticmethod
    def _has_work(plan: StepPlan) -> bool:
        return any(getattr(plan, name) for name in plan.__struct_fields__)

    def _postprocess(self, plan: StepPlan, chunks: list[Chunk], result: StepResult) -> None:
        self._execute_decode(plan)
        self._prefill.after_step(chunks)
        self._prompt_tokens += sum(chunk.length for chunk in chunks)
        for slot, token in zip(result.slots, result.tokens, strict=True):
            sequence = self._slots.owner[slot]
            assert sequence is not None
            self._emit(sequence, token)

    def _execute_decode(self, plan: StepPlan) -> None:
        """Account for the decode half of the step that just ran."""
        self._decode.after_decode(plan.decode)

    def _emit(self, sequence: Sequence, token: int) -> None:
        if not sequence.emitted:
            sequence.first_token_s = self._clock.monotonic()
        sequence.emitted.append(token)
        self._tokens.push(sequence.room, token, sequence.router_worker)
        reason = sequence.finish_reason(token)
        if reason:
            self._finish(sequence, reason)
        else:
            self._decode.after_token(sequence)

    def _finish(self, sequence: Sequence, reason: str, error: ChituError | None = None) -> None:
        self._tokens.finish(
            Finish(
                sequence.room,
                reason,
                error.code if error else "",
                error.message if error else "",
                sequence.kv_bytes,
                sequence.stage_times(self._clock.monotonic()),
            ),
            sequence.router_worker,
        )
        if error is None:
            self._decode.finish(sequence)

    # ------------------------------------------------------------------------------------------------------- arrivals

    def _take_messages(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                self._cancel_all_now()
            elif isinstance(message, float):
                self._end_without_router(message)
            elif isinstance(message, CancelRequest):
                self._cancel(message.room)
            elif isinstance(message, _WorkerGone):
                self._cancel_worker_now(message.incarnation)
            elif self._is_here(message.room):  # a refusal would end the first one at the router, which knows rooms only
                logger.warning("request %s came twice", message.request_id)
            elif message.router_worker in self._gone_workers:
                logger.warning("request %s came from an API process that is gone", message.request_id)
            elif isinstance(message, PrefillRequest):
                self._process_prefill_request(message)
            elif not self._can_answer(message):
                pass
            elif isinstance(message, DecodeRequest):
                self._process_decode_request(message)
            else:
                self._process_unified_request(message)

    def _can_answer(self, message: DecodeRequest | UnifiedRequest) -> bool:
        """Whether tokens have a way back to the API process that asks; the router hears it where not."""
        if message.router_worker:
            try:
                self._tokens.expect(message.router_worker, message.reply_port)
            except ChituError as error:
                logger.warning("request %s came from where no tokens can go: %s", message.request_id, error.message)
                self._parts.report_failure(message.room, error)
                return False
        return True

    def _is_here(self, room: bytes) -> bool:
        """Also where it is over, but a peer may still touch its pages."""
        closing = room in self._prefill.closing or room in self._decode.closing
        return closing or bool(self._prefill.find(room) or self._decode.find(room))

    def _new_sequence(self, message: PrefillRequest | DecodeRequest | UnifiedRequest) -> Sequence:
        self._arrivals += 1
        sampling = None if isinstance(message, PrefillRequest) else message.sampling
        stop_ids: frozenset[int] = frozenset()
        if sampling is not None:
            stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        return Sequence(
            message.room,
            message.request_id,
            self._arrivals,
            self._clock.monotonic(),
            message.token_ids,
            sampling,
            0 if isinstance(message, PrefillRequest) else message.num_emitted,
            message.router_worker,
            stop_ids=stop_ids,
        )

    def _refusal(self, sequence: Sequence) -> ChituError | None:
        """Why a request can never run here, found before it takes anything."""
        info = self._executor.info
        if not sequence.prompt or len(sequence.prompt) % 4:
            return InvalidRequest("the prompt has no tokens")
        if not 0 <= sequence.num_continued < sequence.prompt_len:
            return InvalidRequest(f"{sequence.num_continued} of {sequence.prompt_len} tokens are said to be output")
        if sequence.sampling is not None and sequence.num_continued >= sequence.sampling.max_tokens:
            return InvalidRequest(f"{sequence.num_continued} tokens are out already, all that were asked for")
        total = sequence.final_len
        if total > info.max_model_len:
            return InvalidRequest(f"{total} tokens wanted, the context holds {info.max_model_len}")
        if self._cache.pages_for(total) > self._cache.num_pages:
            return Capacity(
                f"{total} tokens need {self._cache.pages_for(total)} pages, this instance has {self._cache.num_pages}"
            )
        waiting = len(self._prefill.waiting) + len(self._decode.waiting)
        if waiting >= self._parts.config.max_waiting_requests:
            return Capacity(f"{waiting} requests wait here already (scheduler.max_waiting_requests)")
        return None

    def _process_prefill_request(self, message: PrefillRequest) -> None:
        sequence = self._new_sequence(message)
        refusal = self._refusal(sequence)
        if self._parts.sender is None:
            refusal = InvalidRequest("this instance does not prefill for others")
        if refusal:
            self._parts.report_failure(message.room, refusal)
            return
        logger.info(log.PROCESSING_PREFILL, message.request_id)
        assert self._parts.sender is not None
        self._prefill.add(sequence)
        self._parts.sender.add_request(
            message.room,
            message.request_id,
            sequence.prompt_len,
            message.decode_rank,
            message.decode_incarnation,
        )

    def _process_decode_request(self, message: DecodeRequest) -> None:
        sequence = self._new_sequence(message)
        sequence.prefill_rank = message.prefill_rank
        sequence.prefill_incarnation = message.prefill_incarnation
        refusal = self._refusal(sequence)
        if self._parts.receiver is None:
            refusal = InvalidRequest("this instance does not decode for others")
        if refusal:
            self._finish(sequence, "error", refusal)
            return
        logger.info(log.PROCESSING_DECODE, message.request_id)
        self._decode.add(sequence)

    def _process_unified_request(self, message: UnifiedRequest) -> None:
        sequence = self._new_sequence(message)
        refusal = self._refusal(sequence)
        if self._parts.sender is not None or self._parts.receiver is not None:
            refusal = InvalidRequest("this instance serves half requests only")
        if refusal:
            self._finish(sequence, "error", refusal)
            return
        sequence.announced = True
        self._prefill.add(sequence)

    def _may_start(self, sequence: Sequence) -> bool:
        """A unified instance's admission: like D's, with the prompts that are being computed counted in."""
        return not self._decode.retracted and self._decode.has_room(
            sequence, sequence.prompt_len, self._prefill.computing.values()
        )

    # ----------------------------------------------------------------------------------------------- transfers, ends

    def _take_transfer_events(self) -> None:
        if self._parts.sender is not None:
            for event in self._parts.sender.poll():
                if event.kind is TransferEventKind.FAILED:
                    self._report_failed(event)
                self._bytes_moved += event.kv_bytes
                self._prefill.on_event(event)
        if self._parts.receiver is not None:
            for event in self._parts.receiver.poll():
                if event.kind is TransferEventKind.FAILED:
                    self._report_failed(event)
                self._bytes_moved += event.kv_bytes
                self._decode.on_event(event)

    def _report_failed(self, event: TransferEvent) -> None:
        assert event.error is not None
        if self._parts.sender is not None:
            if self._prefill.find(event.room) is not None and not isinstance(event.error, RequestCancelled):
                self._parts.report_failure(event.room, event.error)
            return
        sequence = self._decode.find(event.room)
        if sequence is not None:
            logger.warning("request %s failed: %s", sequence.request_id, event.error)
            self._finish(sequence, "error", event.error)

    def _cancel(self, room: bytes) -> None:
        gone = RequestCancelled("the router cancelled the request")
        if (sequence := self._prefill.find(room)) is not None:
            self._prefill.cancel(sequence, gone)
        elif (sequence := self._decode.find(room)) is not None:
            self._decode.cancel(sequence, gone)

    def _cancel_all_now(self) -> None:
        for sequence in self._open():
            self._cancel(sequence.room)
        self._tokens.restart()

    def _cancel_worker_now(self, incarnation: int) -> None:
        self._gone_workers.append(incarnation)
        for sequence in self._open():
            if sequence.router_worker == incarnation:
                self._cancel(sequence.room)
        self._tokens.forget(incarnation)

    def _open(self) -> list[Sequence]:
        """Every request that is not over for its client."""
        prefill, decode = self._prefill, self._decode
        queues = [prefill.waiting, prefill.computing, prefill.inflight]
        queues += [decode.waiting, decode.transfer, decode.running, decode.retracted]
        return [sequence for queue in queues for sequence in queue.values()]

    def _expire(self) -> None:
        """Nobody waits for pages longer than `queue_s`, and nothing lasts longer than a request may: the router cancels
        it before, unless that word is lost or the router is. The states between have the transfer layer's deadlines."""
        now_s = self._clock.monotonic()
        oldest_s = now_s - self._parts.deadlines.queue_s
        for queue in (self._prefill.waiting, self._decode.waiting):
            for sequence in [s for s in queue.values() if s.arrival_s < oldest_s]:
                what = SEQUENCE_AWAITS[sequence.state]
                self._give_up(sequence, QueueTimeout(self._waited(sequence, now_s - sequence.arrival_s, what)))
        if now_s >= self._next_expire_s:
            self._next_expire_s = now_s + 1.0
            oldest_s = now_s - self._parts.request_timeout_s
            for sequence in [s for s in self._open() if s.arrival_s < oldest_s]:
                what = f"{SEQUENCE_AWAITS[sequence.state]} (router.request_timeout_s, from its arrival)"
                self._give_up(sequence, RequestTimeout(self._waited(sequence, now_s - sequence.arrival_s, what)))

    def _end_without_router(self, silence_s: float) -> None:
        """The router may come back (a stopped process, a cut line), so each request ends with a word that reaches it
        then."""
        lost = DecodeLost if self._parts.sender is None else PrefillLost
        for sequence in self._open():
            self._give_up(sequence, lost(self._waited(sequence, silence_s, "a sign of the router")))

    def _waited(self, sequence: Sequence, waited_s: float, what: str) -> str:
        return waited_text(self._parts.name, waited_s, sequence.state, what)

    def _give_up(self, sequence: Sequence, error: ChituError) -> None:
        """End an open request here, and say so."""
        logger.warning("request %s failed: %s", sequence.request_id, error.message)
        if self._parts.sender is not None:
            self._parts.report_failure(sequence.room, error)
            self._prefill.cancel(sequence, error)
        else:
            self._finish(sequence, "error", error)
            (self._prefill if self._prefill.find(sequence.room) else self._decode).cancel(sequence, error)

    def _load_report(self) -> LoadReport:
        prefill, decode, cache = self._prefill, self._decode, self._cache
        return LoadReport(
            waiting=len(prefill.waiting) + len(decode.waiting),
            unannounced=sum(not s.announced for s in prefill.waiting.values()),
            transferring=len(prefill.inflight) + len(decode.transfer),
            landed=sum(s.kv_ready for s in decode.transfer.values()),
            running=len(prefill.computing) + len(decode.running),
            retracted=len(decode.retracted),
            closing=len(prefill.closing) + len(decode.closing),
            waiting_tokens=sum(s.remaining_prompt for q in (prefill.waiting, prefill.computing) for s in q.values()),
            pages_total=cache.num_pages,
            pages_free=cache.num_free_pages,
            pages_used=cache.num_used_pages,
            pages_quarantined=cache.num_quarantined_pages,
            aux_total=self._parts.num_aux_slots,
            aux_free=self._parts.aux.num_free if self._parts.aux is not None else 0,
            steps=self._steps,
            tokens=self._prompt_tokens if self._parts.sender is not None else self._tokens.tokens_sent,
            tokens_dropped=self._tokens.tokens_dropped,
            bytes_moved=self._bytes_moved,
            retractions=decode.retractions,
            backlog_s=self._backlog.seconds,
            backlog_work=self._backlog.work,
        )
