"""`PDScheduler` (S3): the step loop of an instance. A step reads as take events, schedule, run, post-process.

Runs on the step thread; `submit`, `cancel_all` and `end_all` may be called by any thread, everything else by the step
thread alone. It owns no socket and no tensor: tokens leave by the `TokenManager`, P's failures by `report_failure`,
computing is behind `Executor`, peers are behind the transfer roles. So a whole P or D runs in a test without a port or
torch.
"""

from __future__ import annotations

import logging

import msgspec

from chitu.decode_manager import DecodeManager
from chitu.engine.executor import StepPlan, StepResult
from chitu.errors import Internal
from chitu.instance_load import InstanceLoad, LoadSources
from chitu.kv_transfer.events import TransferEvent, TransferEventKind
from chitu.messages import LoadReport, SchedulerMessage
from chitu.prefill_manager import PrefillManager
from chitu.request_arrivals import RequestArrivals
from chitu.request_ends import EndRules, RequestEnds
from chitu.scheduler_parts import PDSchedulerParts as PDSchedulerParts
from chitu.scheduling.inbox import Inbox, RouterReplaced, RouterSilent, WorkerGone
from chitu.scheduling.prefill import Chunk
from chitu.scheduling.sequence import Sequence
from chitu.scheduling.slots import SlotPool
from chitu.types import Role

logger = logging.getLogger(__name__)


class PDScheduler:
    """One instance's requests, from their arrival to the moment that their last page is free again."""

    def __init__(self, parts: PDSchedulerParts) -> None:
        self._parts = parts
        self._executor = parts.executor
        self._cache = parts.cache
        self._tokens = parts.tokens
        self._clock = parts.clock
        role = parts.role
        self._slots = SlotPool(parts.executor.info.num_slots)
        self._decode = DecodeManager(parts.config, parts.cache, self._slots, parts.clock, parts.receiver, parts.aux)
        self._prefill = PrefillManager(
            parts.config,
            parts.cache,
            self._slots,
            parts.clock,
            parts.sender,
            parts.aux if role is Role.PREFILL else None,
            None if role is Role.PREFILL else self._may_start,
        )
        rules = EndRules(parts.name, role is Role.PREFILL, parts.deadlines.queue_s, parts.request_timeout_s)
        self._ends = RequestEnds(rules, self._prefill, self._decode, parts.tokens, parts.report_failure, parts.clock)
        sources = LoadSources(
            role, self._prefill, self._decode, parts.cache, parts.tokens, parts.aux, parts.num_aux_slots
        )
        self._arrivals = RequestArrivals(parts, self._prefill, self._decode, self._ends)
        self._load = InstanceLoad(sources, parts.clock.monotonic())
        self._inbox = Inbox()
        self.turns = 0
        """Of `step`, idle ones too; any thread may read it."""
        self._is_checked = True

    # ------------------------------------------------------------------------------------------------------ any thread

    def submit(self, message: SchedulerMessage) -> None:
        """Queue a message of the router for the next step."""
        self._inbox.put(message)

    def cancel_all(self) -> None:
        """The router that sent the present requests is gone: nobody reads their tokens. Another one is there."""
        self._inbox.put(RouterReplaced())

    def cancel_worker(self, incarnation: int) -> None:
        """An API process of the router is gone (`router.workers`): nobody reads the tokens of its requests."""
        self._inbox.put(WorkerGone(incarnation))

    def end_all(self, silence_s: float) -> None:
        """The router was silent for so long that it counts as gone: end every request, with an error for it."""
        self._inbox.put(RouterSilent(silence_s))

    @property
    def load(self) -> LoadReport:
        """Snapshot after the newest step, with what came in since: a step may take seconds."""
        count, tokens = self._inbox.waiting()
        load = self._load.snapshot
        if not count:
            return load
        return msgspec.structs.replace(load, waiting=load.waiting + count, waiting_tokens=load.waiting_tokens + tokens)

    # ----------------------------------------------------------------------------------------------------- the step

    def step(self) -> bool:
        """One turn; False where there was nothing to compute, and the caller may wait for the next event."""
        self.turns += 1
        for word in self._inbox.take():
            self._arrivals.take(word)
        self._take_transfer_events()
        self._ends.expire()
        plan, chunks = self._schedule()
        worked = self._has_work(plan)
        if worked:
            on_layer = self._parts.sender.on_layer_done if self._parts.sender is not None and chunks else None
            result = self._executor.execute(plan, on_layer)
            self._postprocess(plan, chunks, result)
            self._load.steps += 1
        self._tokens.flush(self._clock.monotonic())
        if worked:
            self._is_checked = False
        elif not self._is_checked and self.is_idle:
            self._check_idle()
        self._load.report()
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
        is_full = sum(chunk.length for chunk in chunks) >= self._parts.config.max_batched_tokens
        self._load.note_backlog(self._clock.monotonic(), is_full)
        plan.release.extend(self._slots.take_releases())
        return plan, chunks

    def _may_start(self, sequence: Sequence) -> bool:
        """A unified instance's admission: like D's, with the prompts that are being computed counted in."""
        return not self._decode.retracted and self._decode.has_room(
            sequence, sequence.prompt_len, self._prefill.computing.values()
        )

    @staticmethod
    def _has_work(plan: StepPlan) -> bool:
        return any(getattr(plan, name) for name in plan.__struct_fields__)

    def _postprocess(self, plan: StepPlan, chunks: list[Chunk], result: StepResult) -> None:
        self._execute_decode(plan)
        self._prefill.after_step(chunks)
        self._load.prompt_tokens += sum(chunk.length for chunk in chunks)
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
            self._ends.finish(sequence, reason)
        else:
            self._decode.after_token(sequence)

    def _take_transfer_events(self) -> None:
        if self._parts.sender is not None:
            for event in self._parts.sender.poll():
                self._take_transfer_event(event)
                self._prefill.on_event(event)
        if self._parts.receiver is not None:
            for event in self._parts.receiver.poll():
                self._take_transfer_event(event)
                self._decode.on_event(event)

    def _take_transfer_event(self, event: TransferEvent) -> None:
        if event.kind is TransferEventKind.FAILED:
            self._ends.transfer_failed(event)
        self._load.bytes_moved += event.kv_bytes
