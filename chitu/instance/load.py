"""The load that an instance reports: queues, pages, work done, and how fast its queue moves, which predicts waits.

Owned by the role, step thread only, except `snapshot`, which any thread may read: it is replaced as a whole. A rate
over all time would not measure capacity, because an instance without a queue works only as fast as requests arrive. So
`BacklogMeter` counts only the time in which work waited that a step could not take, and only the work done in it.
"""

from __future__ import annotations

from chitu.instance.core import InstanceCore
from chitu.instance.pace import StepPace
from chitu.instance.sequences import Sequence
from chitu.instance.sequences import SequenceState as S
from chitu.protocol import LoadReport

NEWEST = 16
"""About how many of the newest prompts `cached_share` covers."""


class BacklogMeter:
    """Time and work of a queue: `seconds` and `work` grow while something waits. The caller picks the unit of work."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self.work = 0
        self._last_s = now_s
        self._last_work = 0
        self._waits = False

    def update(self, now_s: float, total_work: int, waits: bool) -> None:
        """Note the work done since the start, and whether something `waits` from now on. Called once a turn."""
        if self._waits:
            self.seconds += now_s - self._last_s
            self.work += total_work - self._last_work
        self._last_s, self._last_work, self._waits = now_s, total_work, waits


class LoadMeter:
    """The work done by an instance, which its role and managers count, and its load: `report` makes the snapshot that
    heartbeats carry. This one is of a unified instance."""

    decodes = True
    """Whether requests decode here, so that those that wait may wait for prompts or for requests that decode."""

    def __init__(self, core: InstanceCore) -> None:
        self._engine = core.engine
        self._tokens = core.tokens
        self._sequences = core.sequences
        self._drafts = core.drafts
        self.pace = StepPace(core.settings.tpot_s, core.settings.config.max_batched_tokens)
        now_s = core.clock.monotonic()
        self._backlog = BacklogMeter(now_s)
        self._decode_backlog = BacklogMeter(now_s)
        """Unified: of the requests that wait for decoding ones to end."""
        self._has_room = True
        """Whether a new prompt would compute in the next step."""
        self._is_held_by_prefill = False
        self._newest_tokens = self._newest_cached = 0.0
        self.steps = 0
        self.admissions = 0
        """Requests that got pages since the start; a prompt with forks counts once for each."""
        self.prompt_tokens = 0
        """Prompt tokens computed since the start."""
        self.loaded_tokens = 0
        """Prompt tokens since the start that came from a tier, of which it was not known before that it had them."""
        self.retractions = 0
        self.bytes_moved = self.bytes_saved = 0
        self.unsound = 0
        self.report()

    @property
    def cached_share(self) -> float:
        """Share of the tokens of the newest prompts that were cached."""
        return self._newest_cached / self._newest_tokens if self._newest_tokens else 0.0

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Note how much of a prompt that is computed now was cached."""
        kept = 1 - 1 / NEWEST
        self._newest_tokens = self._newest_tokens * kept + num_tokens
        self._newest_cached = self._newest_cached * kept + num_cached

    def note_backlog(self, now_s: float, is_full: bool) -> None:
        """Update the backlog meters. Called once a turn, when the step is planned. The queue for steps moves by prompt
        tokens, that for what decoding holds by admissions. After a step that `is_full` more work waits."""
        is_waiting = bool(self._sequences.of(S.WAITING))
        for_decode = is_waiting and self._is_held_by_decoding()
        self._update(now_s, is_full, is_waiting, for_decode)
        self._has_room = not (is_full or is_waiting)
        self._is_held_by_prefill = self.decodes and is_waiting and not for_decode

    def _update(self, now_s: float, is_full: bool, is_waiting: bool, for_decode: bool) -> None:
        work = self.prompt_tokens + self.loaded_tokens
        self._backlog.update(now_s, work, is_full or (is_waiting and not for_decode))
        if self.decodes:
            self._decode_backlog.update(now_s, self.admissions, for_decode)

    def _is_held_by_decoding(self) -> bool:
        """Return whether most of what requests hold here, while others wait for it, waits for decoding, not for
        prompts that are computed or moved."""
        of = self._sequences.of
        if of(S.RETRACTED):
            return True
        num_prompts = len(of(S.COMPUTING)) + len(of(S.TRANSFER))  # these on unified instances, those on D
        return num_prompts <= sum([len(of(state)) for state in (S.LOGITS, S.STARTED, S.LANDED, S.RUNNING)])

    def _to_compute(self) -> list[Sequence]:
        """Return the prompts that are to be computed here."""
        return [s for s in self._sequences.queue(S.WAITING, S.COMPUTING) if not s.from_peer]

    def report(self) -> None:
        """Replace `snapshot` with the current load."""
        engine, sequences, tokens = self._engine, self._sequences, self._tokens
        images = sequences.resources.images
        cache, tiers = engine.cache, engine.tiers
        to_compute, hits = self._to_compute(), tiers.hit_tokens
        waiting_tokens = sum([s.tokens_to_compute for s in to_compute])
        waiting, computing = sequences.num_choices(S.WAITING), sequences.num_choices(S.COMPUTING)
        self.snapshot = LoadReport(
            waiting=waiting,
            held_by_prefill=waiting if self._is_held_by_prefill else 0,
            unannounced=sum(s.state is S.WAITING and not s.prompt.announced for s in to_compute),
            transferring=sequences.num_choices(S.INFLIGHT, S.TRANSFER, S.LOGITS, S.STARTED, S.LANDED),
            landed=sequences.num_choices(S.LANDED),
            running=computing + len(sequences.of(S.RUNNING)),
            computing=computing,
            retracted=len(sequences.of(S.RETRACTED)),
            closing=len(sequences.of(S.CLOSING)) + len(sequences.of(S.LEAVING)),
            waiting_tokens=waiting_tokens,
            joinable_tokens=waiting_tokens if self._has_room else 0,
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
            host_evictions=tiers.host_evictions,
            bad_pages=tiers.bad_pages,
            aux_total=engine.aux.num_slots,
            aux_free=engine.aux.num_free,
            states_total=engine.states.num_slots,
            states_free=engine.states.num_free,
            steps=self.steps,
            tokens=self._num_tokens,
            prompt_tokens=self.prompt_tokens,
            tokens_dropped=tokens.tokens_dropped,
            bytes_moved=self.bytes_moved,
            bytes_saved=self.bytes_saved,
            unsound=self.unsound,
            retractions=self.retractions,
            backlog_s=self._backlog.seconds,
            backlog_work=self._backlog.work,
            decode_backlog_s=self._decode_backlog.seconds,
            decode_backlog_work=self._decode_backlog.work,
            cached_share=self.cached_share,
            rates=self.pace.rates,
            drafts=dict(self._drafts.counts),
            images=images.num_encoded,
            image_rows=images.store.num_rows,
            image_rows_used=images.store.num_pinned,
            image_load=images.load,
        )

    @property
    def _num_tokens(self) -> int:
        """Tokens that the instance has made since the start."""
        return self._tokens.tokens_sent


class PrefillLoad(LoadMeter):
    decodes = False

    def _is_held_by_decoding(self) -> bool:
        """Return whether D has no room for most of the computed prompts."""
        computed = self._sequences.of(S.INFLIGHT).values()
        return 2 * sum([sequence.prompt.announced for sequence in computed]) < len(computed)

    @property
    def _num_tokens(self) -> int:
        return self.prompt_tokens


class DecodeLoad(LoadMeter):
    def _update(self, now_s: float, is_full: bool, is_waiting: bool, for_decode: bool) -> None:
        self._backlog.update(now_s, self.admissions, is_waiting)
