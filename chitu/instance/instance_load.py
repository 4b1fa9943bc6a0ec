"""The load that an instance reports: queues, pages, work done, and how fast its queue moves.

Owned by `PDScheduler`; `report` makes the snapshot that heartbeats carry. Step thread only, except `snapshot`, which
any thread may read: it is replaced as a whole.
"""

from __future__ import annotations

from chitu.instance.decode_manager import DecodeManager
from chitu.instance.scheduler_parts import PDSchedulerParts
from chitu.instance.scheduling.backlog import BacklogMeter
from chitu.instance.scheduling.sequences import Sequences
from chitu.protocol import LoadReport
from chitu.protocol.sequence_states import SequenceState as S
from chitu.types import Role


class InstanceLoad:
    def __init__(self, parts: PDSchedulerParts, sequences: Sequences, decode: DecodeManager) -> None:
        self._parts = parts
        self._sequences = sequences
        self._decode = decode
        self._backlog = BacklogMeter(parts.clock.monotonic())
        self.steps = 0
        self.prompt_tokens = 0
        """Prompt tokens computed since the start."""
        self.bytes_moved = self.bytes_saved = 0
        self.unsound = 0
        self.report()

    def note_backlog(self, now_s: float, is_full: bool) -> None:
        """Update the backlog meter. Called once a turn, when the step is planned. D's queue moves by admissions, that
        of other roles by prompt tokens. After a step that `is_full` more work waits."""
        is_waiting = bool(self._sequences.of(S.WAITING))
        if self._parts.role is Role.DECODE:
            waits, work = is_waiting, self._decode.admissions
        else:
            waits, work = is_full or is_waiting, self.prompt_tokens
        self._backlog.update(now_s, work, waits)

    def report(self) -> None:
        """Replace `snapshot` with the current load."""
        parts, sequences = self._parts, self._sequences
        cache, tokens, tiers = parts.cache, parts.tokens, parts.tiers
        to_compute = sequences.queue(S.WAITING, S.COMPUTING) if parts.role is not Role.DECODE else []
        hits = tiers.hit_tokens if tiers is not None else {}
        self.snapshot = LoadReport(
            waiting=sequences.num_choices(S.WAITING),
            unannounced=sum(s.state is S.WAITING and not s.announced for s in to_compute),
            transferring=sequences.num_choices(S.INFLIGHT, S.TRANSFER, S.LOGITS, S.STARTED, S.LANDED),
            landed=sequences.num_choices(S.LANDED),
            running=sequences.num_choices(S.COMPUTING) + len(sequences.of(S.RUNNING)),
            retracted=len(sequences.of(S.RETRACTED)),
            closing=len(sequences.of(S.CLOSING)) + len(sequences.of(S.LEAVING)),
            waiting_tokens=sum(s.remaining_prompt for s in to_compute),
            pages_total=cache.num_pages,
            pages_free=cache.allocator.num_free,
            pages_used=cache.allocator.num_used,
            pages_quarantined=cache.allocator.num_quarantined,
            pages_cached=cache.allocator.num_cached,
            cached_tokens=cache.hit_tokens,
            evictions=cache.evictions,
            host_tokens=hits.get("host", 0),
            disk_tokens=hits.get("disk", 0),
            store_tokens=hits.get("store", 0),
            host_evictions=tiers.host_evictions if tiers is not None else 0,
            bad_pages=tiers.bad_pages if tiers is not None else 0,
            aux_total=parts.aux.num_slots,
            aux_free=parts.aux.num_free,
            steps=self.steps,
            tokens=self.prompt_tokens if parts.role is Role.PREFILL else tokens.tokens_sent,
            tokens_dropped=tokens.tokens_dropped,
            bytes_moved=self.bytes_moved,
            bytes_saved=self.bytes_saved,
            unsound=self.unsound,
            retractions=self._decode.retractions,
            backlog_s=self._backlog.seconds,
            backlog_work=self._backlog.work,
        )
