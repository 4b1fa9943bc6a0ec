"""The roles of an instance: P, and D, which without a peer is a unified instance. Each is a composition of the managers
of prompts and of decoding and of one side of the transfer, and has all that the step loop does differently in it.

A role is made over an `InstanceCore`, which does not depend on it. Step thread only.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from chitu import log
from chitu.engine.executor import LayerCallback, StepPlan
from chitu.errors import ChituError, DecodeLost, Internal, PrefillLost
from chitu.instance.core import InstanceCore
from chitu.instance.decode import DecodeManager
from chitu.instance.early import EarlyAdmission
from chitu.instance.load import DecodeLoad, LoadMeter, PrefillLoad
from chitu.instance.prefill import Chunk, PrefillManager, by_urgency
from chitu.instance.sequences import AT_PEER_STATES, Sequence, SequenceEvent, SequenceState
from chitu.kv_cache.state_row import digest_of
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.kv_transfer.chunks import KVChunk
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.protocol import DecodeRequest, PrefillRequest, RequestMessage, UnifiedRequest
from chitu.protocol.account import PrefillTimes

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Step:
    """A plan and its sequences, in the plan's order."""

    plan: StepPlan
    first_tokens: list[Sequence]
    chunks: list[Chunk]
    decoding: list[Sequence]
    most_tokens: int
    """Most prompt tokens that it might have had."""
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Drafts of some of those that decode."""
    is_beside: bool = False
    """Whether the chunks compute in the lane of prompts."""

    @property
    def has_work(self) -> bool:
        plan = self.plan
        return bool(plan.decode or plan.prefill) or any(getattr(plan, name) for name in plan.__struct_fields__)


class InstanceRole(ABC):
    takes: tuple[type[RequestMessage], ...]
    """Kinds of requests that the instance takes."""
    lost: type[ChituError] = DecodeLost
    """Error of the requests that end because the router is gone."""
    samples = True
    """Whether the instance samples the tokens of its requests. If not, the logits rows of its prompts go to aux slots,
    and the first tokens that it draws itself are early ones."""
    layer_done: LayerCallback | None = None
    """Called after each layer of a step with chunks."""
    load: LoadMeter

    # ------------------------------------------------------------------------------------------------------- a request

    @abstractmethod
    def arrive(self, sequence: Sequence, message: RequestMessage) -> None:
        """Take a request of a kind in `takes` that may run here."""

    @abstractmethod
    def cancel(self, sequence: Sequence, error: ChituError) -> None:
        """End an open request early, and free what it holds, or have a peer release it."""

    @abstractmethod
    def finish(self, sequence: Sequence) -> None:
        """End a request that has all of its tokens."""

    def note_first_token(self, sequence: Sequence) -> None:
        """Note that the first token of a sequence is known (`first_token_s`)."""
        return

    # ---------------------------------------------------------------------------------------------------------- a step

    def note_block(self) -> None:
        """Note that a step which encodes images goes on."""
        return

    @abstractmethod
    def schedule(self, plan: StepPlan) -> Step | None:
        """Plan the next step. Return None if the step in flight has to be read first, because a request needs what
        others may have to give back; this then continues with the same plan."""

    @abstractmethod
    def after_launch(self, step: Step) -> list[Sequence]:
        """Account for a launched step as if it were done. Return the sequences that it samples, in plan order."""

    def after_read(self, chunks: list[Chunk], slots: list[int], prompt_logprobs: dict[int, bytes]) -> None:
        """Account for the chunks of a step that is done, as `PrefillManager.after_read` does."""
        return

    def keep(self, chunks: list[Chunk]) -> None:
        """Keep what these chunks computed, as `PrefillManager.keep` does."""
        return

    def take_rows(self, sequences: list[Sequence], rows: dict[int, bytes]) -> list[Sequence]:
        """Judge what a step found in the rows that it drew from, by slot. Return the open sequences whose row is
        damaged: they fail with the next transfer events."""
        return []

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Account for a draft of a step that is done, of which so many tokens were drawn."""
        raise Internal(f"{sequence.head.request_id} has a draft where nothing decodes")

    # ------------------------------------------------------------------------------------------------------- transfers

    def poll(self) -> list[TransferEvent]:
        """Return the new events of the transfer layer."""
        return []

    def on_event(self, event: TransferEvent) -> None:
        """Apply a transfer event. The caller reports FAILED to the router."""
        return


class PrefillRole(InstanceRole):
    """P computes prompts for D. A sequence ends here: its pages and aux slot come back with SUCCESS or RELEASED."""

    takes = (PrefillRequest,)
    lost = PrefillLost
    samples = False

    def __init__(self, core: InstanceCore, sender: PrefillSender) -> None:
        self._core = core
        self._sequences = core.sequences
        self._sender = sender
        self._resources = core.sequences.resources
        self._num_advances = 0
        """`ImageGate.num_advances`, as the sender knows it."""
        self._early = EarlyAdmission(core.sequences, sender)
        self.load = PrefillLoad(core)
        self._prefill = PrefillManager(core, self.load, self)
        self.layer_done = sender.feed.layer_done

    def arrive(self, sequence: Sequence, message: RequestMessage) -> None:
        assert isinstance(message, PrefillRequest)
        head, to = message.head, (message.decode_rank, message.decode_incarnation)
        logger.info(log.PROCESSING_PREFILL, head.request_id, extra=log.about(head.request_id))
        self._prefill.add(sequence)
        self._sender.add_request(head.room, head.request_id, sequence.prompt_len, *to)

    def cancel(self, sequence: Sequence, error: ChituError) -> None:
        self._sequences.close(sequence)
        self._sender.abort(sequence.room, error)

    def finish(self, sequence: Sequence) -> None:
        raise Internal(f"P decoded {sequence.head.request_id}")

    def schedule(self, plan: StepPlan) -> Step | None:
        self._early.needs_read = False
        waiting = self._sequences.queue(SequenceState.WAITING)
        if waiting:
            self._prefill.estimate_again()
        for sequence in by_urgency(waiting):
            if not self._early.may_start(sequence):
                break  # strictly in order, so small requests cannot starve a large one
            self._prefill.start(sequence, plan)
        if self._early.needs_read:
            return None
        most_tokens = self._core.settings.config.max_batched_tokens
        chunks = self._prefill.schedule(plan, most_tokens)
        if self._num_advances != self._resources.images.num_advances:
            self._num_advances = self._resources.images.num_advances
            self._sender.feed.note_advance()
        if chunks:
            pages_of = self._core.engine.cache.get_page_indices
            self._sender.feed.begin_step(
                [KVChunk(c.sequence.room, pages_of(c.sequence.room), c.start, c.start + c.length) for c in chunks]
            )
        return Step(plan, [], chunks, [], most_tokens)

    def note_block(self) -> None:
        self._sender.feed.note_advance()

    def after_launch(self, step: Step) -> list[Sequence]:
        self._prefill.after_launch(step.chunks)
        if step.chunks:
            self._sender.feed.end_step()
        return [chunk.sequence for chunk in step.chunks if chunk.is_last and chunk.sequence.prompt.early is not None]

    def after_read(self, chunks: list[Chunk], slots: list[int], prompt_logprobs: dict[int, bytes]) -> None:
        self._prefill.after_read(chunks, slots, prompt_logprobs)

    def keep(self, chunks: list[Chunk]) -> None:
        self._prefill.keep(chunks)

    def poll(self) -> list[TransferEvent]:
        return self._sender.poll()

    def on_event(self, event: TransferEvent) -> None:
        sequence = self._sequences.get(event.room)
        if sequence is None:
            return
        if event.kind is TransferEventKind.ANNOUNCED:
            sequence.prompt.announced = True
            return
        if event.kind is TransferEventKind.SUCCESS and self._core.trace.rooms and sequence.is_open:
            self._core.trace.note_end(sequence, "sent")
        self._sequences.close(sequence)
        if event.kind is not TransferEventKind.FAILED:
            self._sequences.free(sequence)

    def leaves_row(self, sequence: Sequence) -> bool:
        """Return True: D samples the first token (`PromptOwner`)."""
        return True

    def on_computed(self, sequence: Sequence) -> None:
        """Send the logits row and the state row of a prompt (`PromptOwner`)."""
        is_uncached = not self._core.engine.cache.accepts(sequence.holds.keys)
        rows = sequence.holds.aux_slot, sequence.prompt.lines, sequence.holds.state_slot
        self._sender.feed.send_rows(sequence.room, *rows, is_uncached)


class DecodeRole(InstanceRole):
    """D decodes the prompts that P writes to the pages which it announced. If it may, it also computes prompts itself,
    in the steps that decode: a unified instance, which has no receiver, all of them."""

    def __init__(self, core: InstanceCore, receiver: DecodeReceiver | None = None) -> None:
        self._core = core
        self._sequences = core.sequences
        self._resources = core.sequences.resources
        self._cache = core.engine.cache
        self._receiver = receiver
        self._has_lane = receiver is None and core.engine.lane is not None
        computes = receiver is None or core.settings.computes
        self.takes = () if receiver is None else (DecodeRequest,)
        if computes:
            self.takes += (UnifiedRequest,)
        self.load = LoadMeter(core) if computes else DecodeLoad(core)
        self._decode = DecodeManager(core, self.load)
        self._prefill = PrefillManager(core, self.load, self)

    def arrive(self, sequence: Sequence, message: RequestMessage) -> None:
        if isinstance(message, DecodeRequest):
            logger.info(log.PROCESSING_DECODE, message.head.request_id, extra=log.about(message.head.request_id))
            sequence.prompt.peer = message.prefill_rank, message.prefill_incarnation
            self._sequences.add(sequence)
        else:
            sequence.prompt.announced = True
            self._prefill.add(sequence)

    def cancel(self, sequence: Sequence, error: ChituError) -> None:
        if self._receiver is not None and sequence.state in AT_PEER_STATES:
            self._sequences.close(sequence)
            self._cache.quarantine(sequence.room)  # until P has stopped
            self._receiver.abort(sequence.room, error)
        else:
            self._decode.cancel(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._decode.finish(sequence)

    def note_first_token(self, sequence: Sequence) -> None:
        if sequence.from_peer:
            return
        times = sequence.times
        times.prefill = PrefillTimes.of(times.arrival_s, times.computing_since_s, times.first_token_s)
        if self._core.trace.rooms:
            self._core.trace.note_computed(sequence)

    def schedule(self, plan: StepPlan) -> Step | None:
        if self._resources.num_unread_steps and self._decode.would_draft():
            return None  # drafts follow the newest token
        if not self._decode.make_room(plan):
            return None
        self._admit(plan)
        first_tokens, decoding = self._decode.schedule(plan)
        drafts = self._decode.draft(plan, first_tokens, decoding)
        computing = self._sequences.of(SequenceState.COMPUTING)
        if not computing or self._resources.is_lane_busy:
            return Step(plan, first_tokens, [], decoding, 0 if computing else 1, drafts)
        if self._has_lane and (decoding or first_tokens):
            most_tokens = self._core.settings.config.max_batched_tokens
            chunks = self._prefill.schedule(plan, most_tokens)
            return Step(plan, first_tokens, chunks, decoding, most_tokens, drafts, bool(chunks))
        start, others = next(iter(computing.values())).kv_len, self._core.engine.others
        most_tokens = self.load.pace.most_prompt_tokens(decoding, start, drafts, others)
        return Step(plan, first_tokens, self._prefill.schedule(plan, most_tokens), decoding, most_tokens, drafts)

    def after_launch(self, step: Step) -> list[Sequence]:
        self._decode.after_launch(step.first_tokens, step.decoding)
        computed = self._prefill.after_launch(step.chunks)
        for sequence in computed:
            sequence.launched += 1
            self._sequences.take(sequence, SequenceEvent.START)
        return [*step.first_tokens, *computed, *step.decoding]

    def after_read(self, chunks: list[Chunk], slots: list[int], prompt_logprobs: dict[int, bytes]) -> None:
        self._prefill.after_read(chunks, slots, prompt_logprobs)

    def keep(self, chunks: list[Chunk]) -> None:
        self._prefill.keep(chunks)

    def take_rows(self, sequences: list[Sequence], rows: dict[int, bytes]) -> list[Sequence]:
        assert self._receiver is not None
        damaged = []
        for sequence in sequences:
            found = rows.get(sequence.slot) if sequence.is_open else None
            if found is None:
                continue
            cached_tokens = self._receiver.row_checked(sequence.room, sequence.holds.aux_slot, found)
            if cached_tokens is None:
                damaged.append(sequence)
            else:
                sequence.prompt.cached_tokens = cached_tokens
        return damaged

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self._decode.note_draft(sequence, drafted, accepted)

    def poll(self) -> list[TransferEvent]:
        return [] if self._receiver is None else self._receiver.poll()

    def on_event(self, event: TransferEvent) -> None:
        sequence = self._sequences.get(event.room)
        if sequence is None:
            return
        if event.kind is TransferEventKind.LOGITS_READY:
            sequence.prompt.cached_tokens = event.cached_tokens
            self._sequences.take(sequence, SequenceEvent.ROW_HERE)
        elif event.kind is TransferEventKind.SUCCESS:
            self._take_kv(sequence, event)
        elif event.kind is TransferEventKind.FAILED:
            for fork in list(sequence.forks):
                self._decode.end_fork(fork)
            self._sequences.close(sequence)
            self._cache.quarantine(sequence.room)
        elif event.kind is TransferEventKind.RELEASED:
            self._sequences.close(sequence)
            self._sequences.free(sequence)

    def leaves_row(self, sequence: Sequence) -> bool:
        """Return whether forks sample their first tokens from the row (`PromptOwner`)."""
        return bool(sequence.forks)

    def on_computed(self, sequence: Sequence) -> None:
        """Start the forks of a prompt (`PromptOwner`)."""
        self._decode.fork(sequence)

    def _admit(self, plan: StepPlan) -> None:
        """Reserve pages for the requests that wait, and announce them to P, or begin to compute the prompt; strictly in
        order, whoever computes it, and nothing while a retracted request waits."""
        waiting = self._sequences.queue(SequenceState.WAITING)
        if not waiting:
            return
        self._prefill.estimate_again()
        if self._sequences.of(SequenceState.RETRACTED) or not self._resources.slots.num_free:
            return
        computing = self._sequences.queue(SequenceState.COMPUTING, SequenceState.INFLIGHT)
        may_start = self._decode.open_admission(computing)
        for sequence in sorted(waiting, key=lambda s: s.order):
            if not sequence.needs_kv and sequence.from_peer:
                sequence.holds.keys = None  # its pages will hold no KV: nothing to find or to cache
            to_compute = 0 if sequence.from_peer else 1
            num_pages = self._cache.pages_for(sequence.prompt_len)
            num_shared = num_pages - self._cache.pages_wanted(sequence.holds.keys, sequence.head.token_ids, to_compute)
            takes_kv = sequence.needs_kv or not sequence.from_peer
            num_states = self._resources.states_wanted(sequence) if takes_kv else 0
            takes_row = sequence.from_peer or sequence.forks
            if takes_row and not self._resources.aux.num_free:
                return
            if not may_start(sequence, num_pages, num_shared, num_states):
                return
            if sequence.from_peer:
                self._announce(sequence, num_pages, num_states)
            else:
                self._prefill.start(sequence, plan)

    def _announce(self, sequence: Sequence, num_pages: int, num_states: int) -> None:
        """Reserve pages and announce them to P."""
        assert self._receiver is not None and sequence.prompt.peer is not None
        if not sequence.forks:
            self._resources.slots.take(sequence)
        sequence.holds.aux_slot = self._resources.take_aux()
        if num_states:
            self._resources.take_state(sequence)
        known = self._cache.begin(sequence.room, sequence.holds.keys, sequence.head.token_ids, to_compute=0)
        self._cache.reserve_for_transfer(sequence.room, sequence.prompt_len)
        self._sequences.hold_forks(sequence)
        sequence.capacity_tokens = num_pages * self._cache.page_size
        self._sequences.take(sequence, SequenceEvent.ANNOUNCE)
        sequence.times.announced_s = self._core.clock.monotonic()
        self.load.admissions += len(sequence.choices)
        self._receiver.announce(
            sequence.room,
            sequence.head.request_id,
            self._cache.get_page_indices(sequence.room) if sequence.needs_kv else (),
            sequence.holds.aux_slot,
            sequence.prompt_len,
            *sequence.prompt.peer,
            known // self._cache.page_size,
            sequence.sampling is not None and sequence.sampling.page_sums,
            sequence.holds.state_slot,
            digest_of(sequence.head.token_ids) if num_states else 0,
            self._core.engine.executor.info.checks_rows and sequence.draws_from_row,
        )

    def _take_kv(self, sequence: Sequence, event: TransferEvent) -> None:
        now_s = self._core.clock.monotonic()
        if self._core.trace.rooms and sequence.is_open:
            self._core.trace.note_restored(sequence, event, now_s)
        sequence.times.prefill, sequence.times.kv_landed_s = event.times, now_s
        sequence.output.kv_bytes, sequence.output.transfer_sums = event.kv_bytes, event.sums
        sequence.prompt.lines = event.prompt_logprobs
        if event.is_uncached:
            sequence.holds.keys = None
        pages = self._cache.get_page_indices(sequence.room)
        self._cache.insert_kv_cache_from_transfer(sequence.room, pages, sequence.prompt_len)
        self._cache.commit(
            sequence.room, sequence.holds.keys, sequence.head.token_ids, sequence.prompt_len, is_copy=True
        )
        if sequence.state is SequenceState.CLOSING:
            self._sequences.free(sequence)
        elif sequence.forks:
            self._decode.fork(sequence)
        else:
            self._decode.go_on(sequence, SequenceEvent.KV_HERE)
