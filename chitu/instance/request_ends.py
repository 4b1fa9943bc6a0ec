"""Every way in which a request ends on an instance: its last token, a failed transfer, a cancellation, a deadline, a
router that is gone.

Owned by `PDScheduler`, step thread only. It reports the end to the router (by the token message, or on P by
`report_failure`) and has the managers free what the request held.
"""

from __future__ import annotations

import logging

from chitu.errors import (
    ChituError,
    DecodeLost,
    PrefillLost,
    QueueTimeout,
    RequestCancelled,
    RequestTimeout,
)
from chitu.instance.decode_manager import DecodeManager
from chitu.instance.prefill_manager import PrefillManager
from chitu.instance.scheduler_parts import PDSchedulerParts
from chitu.instance.scheduler_trace import SchedulerTrace
from chitu.instance.scheduling.sequence import Sequence
from chitu.instance.scheduling.sequences import Sequences
from chitu.log import about
from chitu.protocol import Finish
from chitu.protocol.sequence_states import OPEN_STATES, SEQUENCE_AWAITS, SequenceState
from chitu.protocol.states import waited_text
from chitu.types import Role

logger = logging.getLogger(__name__)


_PROMPT_STATES = frozenset({SequenceState.WAITING, SequenceState.COMPUTING, SequenceState.INFLIGHT})
"""States of a prompt: the `PrefillManager` frees what it holds, if anything."""


class RequestEnds:
    def __init__(
        self,
        parts: PDSchedulerParts,
        sequences: Sequences,
        prefill: PrefillManager,
        decode: DecodeManager,
        trace: SchedulerTrace | None,
    ) -> None:
        self._parts = parts
        self._is_prefill = parts.role is Role.PREFILL
        self._finished_pages = parts.finished_pages
        self._trace = trace
        self._sequences = sequences
        self._prefill = prefill
        self._decode = decode
        self._tokens = parts.tokens
        self._report_failure = parts.report_failure
        self._clock = parts.clock
        self._next_expire_s = 0.0

    # -------------------------------------------------------------------------------------------- reports to the router

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a request whose newest token was the last one."""
        self._tell(sequence, reason, None)
        self._decode.finish(sequence)

    def refuse(self, sequence: Sequence, error: ChituError) -> None:
        """End a request that holds nothing yet, with an error."""
        if sequence.sampling is None:  # P's half of it
            self._report_failure(sequence.room, error)
            self._note_end(sequence, "error", error)
            return
        for each in sequence.choices:
            self._tell(each, "error", error)

    def transfer_failed(self, room: bytes, error: ChituError) -> None:
        """Report a FAILED of the transfer layer to the router. The managers also get it, and handle the pages."""
        if self._is_prefill:
            failed = self._sequences.find(room)
            if failed is not None:
                self._note_end(failed, "error", error)
                if not isinstance(error, RequestCancelled):
                    self._report_failure(room, error)
            return
        sequence = self._sequences.find(room)
        if sequence is not None:
            logger.warning("request %s failed: %s", sequence.request_id, error, extra=about(sequence.request_id))
            for each in sequence.choices:
                self._tell(each, "error", error)

    def _tell(self, sequence: Sequence, reason: str, error: ChituError | None) -> None:
        self._tokens.finish(
            Finish(
                sequence.room,
                reason,
                error.code if error else "",
                error.message if error else "",
                sequence.kv_bytes,
                sequence.stage_times(self._clock.monotonic()),
                self._finished_pages.sums_of(sequence) if self._finished_pages is not None and error is None else b"",
                sequence.transfer_sums,
            ),
            sequence.router_worker,
        )
        self._note_end(sequence, reason, error)

    def _note_end(self, sequence: Sequence, reason: str, error: ChituError | None) -> None:
        if self._trace is not None and self._trace.rooms:
            self._trace.note_end(sequence, reason, error)

    def fail(self, sequence: Sequence, error: ChituError) -> None:
        """End an open request with an error, and report it to the router."""
        logger.warning("request %s failed: %s", sequence.request_id, error.message, extra=about(sequence.request_id))
        if self._is_prefill:
            self._report_failure(sequence.room, error)
            self._note_end(sequence, "error", error)
            self._prefill.cancel(sequence, error)
        else:
            for each in sequence.choices:
                self._tell(each, "error", error)
                self._drop(each, error)

    def _drop(self, sequence: Sequence, error: ChituError) -> None:
        """End a sequence. If it is the last fork that waits for a prompt, end the prompt, too."""
        if sequence.state in _PROMPT_STATES:
            self._prefill.cancel(sequence, error)
        else:
            self._decode.cancel(sequence, error)
        source = sequence.source
        if source is not None and not source.forks and source.state in OPEN_STATES:
            self._drop(source, error)

    # ---------------------------------------------------------------------------------------------- ends by the router

    def cancel(self, room: bytes) -> None:
        """Cancel a request without a report: the router asked for it."""
        gone = RequestCancelled("the router cancelled the request")
        sequence = self._sequences.find(room)
        for each in sequence.choices if sequence is not None else ():
            self._note_end(each, "cancelled", None)
            self._drop(each, gone)

    def cancel_all(self) -> None:
        for sequence in self._sequences.open:
            self.cancel(sequence.room)
        self._tokens.restart()

    def cancel_worker(self, incarnation: int) -> None:
        for sequence in self._sequences.open:
            if sequence.router_worker == incarnation:
                self.cancel(sequence.room)
        self._tokens.forget(incarnation)

    def end_without_router(self, silence_s: float) -> None:
        """End every request with an error. The router may come back (a suspended process, a broken connection), and
        then receives these errors."""
        lost = PrefillLost if self._is_prefill else DecodeLost
        for sequence in self._sequences.open:
            self.fail(sequence, lost(self._waited(sequence, silence_s, "a sign of the router")))

    # ----------------------------------------------------------------------------------------------- ends by the clock

    def expire(self) -> None:
        """Fail requests that wait for pages longer than `queue_s` or exceed the request timeout. The router cancels the
        latter itself, unless it or the cancellation is lost. The states between have the transfer layer's deadlines."""
        now_s = self._clock.monotonic()
        oldest_s = now_s - self._parts.deadlines.queue_s
        for sequence in self._sequences.queue(SequenceState.WAITING):
            if sequence.arrival_s < oldest_s:
                what = SEQUENCE_AWAITS[sequence.state]
                self.fail(sequence, QueueTimeout(self._waited(sequence, now_s - sequence.arrival_s, what)))
        if now_s >= self._next_expire_s:
            self._next_expire_s = now_s + 1.0
            oldest_s = now_s - self._parts.request_timeout_s
            for sequence in [s for s in self._sequences.open if s.arrival_s < oldest_s]:
                what = f"{SEQUENCE_AWAITS[sequence.state]} (router.request_timeout_s, from its arrival)"
                self.fail(sequence, RequestTimeout(self._waited(sequence, now_s - sequence.arrival_s, what)))

    def _waited(self, sequence: Sequence, waited_s: float, what: str) -> str:
        return waited_text(self._parts.name, waited_s, sequence.state, what)
