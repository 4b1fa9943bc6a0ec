"""The load that an instance reports: queues, pages, work done, and how fast its queue moves.

Owned by `PDScheduler`; `report` makes the snapshot that heartbeats carry. Step thread only, except `snapshot`, which
any thread may read: it is replaced as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from chitu.cache_manager import PagedKVCacheManager
from chitu.instance.decode_manager import DecodeManager
from chitu.instance.scheduling.backlog import BacklogMeter
from chitu.instance.scheduling.resources import AuxSlots
from chitu.instance.scheduling.sequences import Sequences
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.protocol import LoadReport
from chitu.protocol.sequence_states import SequenceState as S
from chitu.types import Role


@dataclass(slots=True, frozen=True)
class LoadSources:
    role: Role
    sequences: Sequences
    decode: DecodeManager
    cache: PagedKVCacheManager
    tokens: TokenManager
    aux: AuxSlots
    num_aux_slots: int
    tiers: PrefixTiers | None = None


class InstanceLoad:
    def __init__(self, sources: LoadSources, now_s: float) -> None:
        self._sources = sources
        self._backlog = BacklogMeter(now_s)
        self.steps = 0
        self.prompt_tokens = 0
        """Prompt tokens computed since the start."""
        self.bytes_moved = self.bytes_saved = 0
        self.snapshot = self._report()

    def note_backlog(self, now_s: float, is_full: bool) -> None:
        """Update the backlog meter. Called once a turn, when the step is planned. D's queue moves by admissions, that
        of other roles by prompt tokens. After a step that `is_full` more work waits."""
        sources = self._sources
        is_waiting = bool(sources.sequences.of(S.WAITING))
        if sources.role is Role.DECODE:
            waits, work = is_waiting, sources.decode.admissions
        else:
            waits, work = is_full or is_waiting, self.prompt_tokens
        self._backlog.update(now_s, work, waits)

    def report(self) -> None:
        """Replace `snapshot` with the current load."""
        self.snapshot = self._report()

    def _report(self) -> LoadReport:
        sources = self._sources
        sequences, cache, tokens = sources.sequences, sources.cache, sources.tokens
        tiers = sources.tiers
        to_compute = sequences.queue(S.WAITING, S.COMPUTING) if sources.role is not Role.DECODE else []
        hits = tiers.hit_tokens if tiers is not None else {}
        return LoadReport(
            waiting=sequences.num_choices(S.WAITING),
            unannounced=sum(s.state is S.WAITING and not s.announced for s in to_compute),
            transferring=sequences.num_choices(S.INFLIGHT, S.TRANSFER, S.LOGITS, S.STARTED, S.LANDED),
            landed=sequences.num_choices(S.LANDED),
            running=sequences.num_choices(S.COMPUTING) + len(sequences.of(S.RUNNING)),
            retracted=len(sequences.of(S.RETRACTED)),
            closing=len(sequences.of(S.CLOSING)) + len(sequences.of(S.LEAVING)),
            waiting_tokens=sum(s.remaining_prompt for s in to_compute),
            pages_total=cache.num_pages,
            pages_free=cache.num_free_pages,
            pages_used=cache.num_used_pages,
            pages_quarantined=cache.num_quarantined_pages,
            pages_cached=cache.num_cached_pages,
            cached_tokens=cache.hit_tokens,
            evictions=cache.evictions,
            host_tokens=hits.get("host", 0),
            disk_tokens=hits.get("disk", 0),
            store_tokens=hits.get("store", 0),
            host_evictions=tiers.host_evictions if tiers is not None else 0,
            bad_pages=tiers.bad_pages if tiers is not None else 0,
            aux_total=sources.num_aux_slots,
            aux_free=sources.aux.num_free,
            steps=self.steps,
            tokens=self.prompt_tokens if sources.role is Role.PREFILL else tokens.tokens_sent,
            tokens_dropped=tokens.tokens_dropped,
            bytes_moved=self.bytes_moved,
            bytes_saved=self.bytes_saved,
            retractions=sources.decode.retractions,
            backlog_s=self._backlog.seconds,
            backlog_work=self._backlog.work,
        )
