"""A step that raised, or computed numbers that are not finite: which sequences caused it, and how all others continue.

Owned by `PDScheduler`, step thread only, and only while no step is in flight. The executor forgets the slots of that
step, and its sequences are admitted again with the KV that they had before it. Their KV is in the pages alone, and
computing a token again writes the same KV to the same place. Then the step is repeated, and split in half if it raises
again, until the sequences that raise alone are known. They fail; each other sequence gets its token once. P's layers
that were sent already are not sent again. Their transfer may overlap the second write, which `verify_kv` can take for
damage; that costs another attempt.

A recurrent state is not written twice but moved on, and a step that raised may have moved some layers' states on and
others' not. So with state each sequence is repeated alone, after its state was computed anew from its first token. Not
behind images, whose features may be gone: such a request goes on elsewhere.

Images that the vision tower computes, in this step or in turns, are encoded first, each alone and in one piece. One
that raises ends the requests that wait for it.

Invariant: a broken device ends the process. So if nothing at all could be computed, one token that no request needs is
tried, as after a request whose logits are not finite: NaN and infinity have no token, and their KV must not be cached.
Requests in a row that all end so end the process, too: weights may overflow in longer prompts alone.
Two errors are not caught: those that the device reports only when a step is read (CUDA errors are sticky), and
`Internal` (a broken invariant, which no sequence causes). With tensor parallelism no error is caught: a rank that
raised has left the other ranks within a reduction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from chitu.engine.executor import Admit, DoneStep, EncodeImage, LoadImage, PrefillChunk, StepPlan, StepResult, is_sound
from chitu.errors import Capacity, DecodeLost, Internal, StepFailed
from chitu.instance.core import InstanceCore
from chitu.instance.decode import admit
from chitu.instance.requests import RequestEnds
from chitu.instance.roles import InstanceRole, Step
from chitu.instance.sequences import OPEN_STATES, Sequence, SequenceState
from chitu.log import about
from chitu.protocol import SamplingParams, pack_i32

logger = logging.getLogger(__name__)

_NOBODY = b"nobody"
"""Room of the tokens that no request needs."""
MAX_UNSOUND_IN_A_ROW = 8
"""After so many requests whose logits are not finite, without one that is computed to its end between, the instance
tries a prompt of its own."""
PROBE_TOKENS = 16
"""Tokens of that prompt, evenly spread over the vocabulary."""


@dataclass(slots=True)
class _Part:
    """The part of a step that belongs to one sequence, without its admission."""

    sequence: Sequence
    plan: StepPlan = field(default_factory=StepPlan)


@dataclass(slots=True)
class _Outcome:
    tokens: dict[int, int] = field(default_factory=dict)
    """Tokens by slot. The logprobs and failures are by slot, too."""
    logprobs: dict[int, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[int, bytes] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    unsound: list[int] = field(default_factory=list)
    rows: dict[int, bytes] = field(default_factory=dict)
    done: set[Sequence] = field(default_factory=set)
    raised: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that raise alone, with their errors."""


class StepFaults:
    def __init__(self, core: InstanceCore, role: InstanceRole, ends: RequestEnds) -> None:
        self._name = core.settings.name
        self._executor = core.engine.executor
        self._sequences = core.sequences
        self._resources = core.sequences.resources
        self._role = role
        self._ends = ends
        self._chunk_size = core.settings.config.chunk_size
        self.num_unsound = 0
        """Requests since the start that ended because their logits were not finite."""
        self._is_in_doubt = False
        """Whether such a request ended since the device was last known to compute finite numbers."""
        self._in_a_row: set[bytes] = set()
        """Rooms of such requests since the last sound one; all choices of a prompt have one room here."""

    def end_unsound(self, sequences: Iterable[Sequence]) -> None:
        """End those of the sequences that are open: their logits are not finite. Nothing of them is cached."""
        for sequence in sequences:
            if sequence.state not in OPEN_STATES:
                continue
            self._is_in_doubt = True
            self.num_unsound += len(sequence.choices)
            if not sequence.from_peer or sequence.emitted:
                self._in_a_row.add((sequence.source or sequence).room)
            for each in (sequence, *sequence.choices):
                each.holds.keys = None
            text = f"{self._name} computed logits of this request that are not finite (NaN or infinite)"
            logger.error(
                "request %s: logits behind %d tokens are not finite: damaged weights, an overflow, or a broken device",
                sequence.head.request_id,
                sequence.kv_len,
                extra=about(sequence.head.request_id),
            )
            self._ends.fail(sequence, StepFailed(text))

    def note_sound(self) -> None:
        """Note that a request was computed to its end here: the requests before it failed on their own account."""
        self._in_a_row.clear()

    @property
    def must_check(self) -> bool:
        """Whether a request ended because its logits were not finite, and what `check_device` needs is free."""
        if not self._is_in_doubt:
            return False
        slots, cache, aux = self._resources.slots, self._resources.cache, self._resources.aux
        has_rows = (self._role.samples or aux.num_free) and self._resources.states.num_free >= self._resources.has_state
        return bool(slots.num_free and cache.num_available_pages and has_rows)

    def check_device(self) -> None:
        """Compute prompts that no request has. Raise Internal, which ends the process, if no logits of two single
        tokens are finite, or, behind `MAX_UNSOUND_IN_A_ROW` such requests, those of a prompt of several tokens are not:
        prompts with a damaged token end no process."""
        slots, cache, aux = self._resources.slots, self._resources.cache, self._resources.aux
        self._is_in_doubt = False
        vocab_size = self._executor.info.vocab_size
        prompts = [[0], [vocab_size // 2]]  # a single token's embedding may be damaged
        if len(self._in_a_row) >= MAX_UNSOUND_IN_A_ROW:
            length = min(PROBE_TOKENS, cache.page_size, self._executor.info.max_model_len - 1)
            prompts.append([vocab_size * place // length for place in range(length)])
        slot, aux_slot = slots.next_free, -1 if self._role.samples else self._resources.take_aux()
        state_slot = self._resources.states.take() if self._resources.has_state else -1
        pages = tuple(cache.reserve(_NOBODY, 1))
        sampling = SamplingParams(max_tokens=1, temperature=0.0) if self._role.samples else None
        results = []
        for prompt in prompts:
            chunk = PrefillChunk(slot, 0, len(prompt), sample=sampling is not None, aux_slot=aux_slot)
            admit = Admit(slot, pack_i32(prompt), len(prompt), 0, pages, sampling, state_slot)
            plan = StepPlan(release=slots.take_releases(), admit=[admit], prefill=[chunk])
            results.append(is_sound(self._executor.launch(plan).result()))
            self._executor.launch(StepPlan(release=[slot])).result()
        if aux_slot >= 0:
            aux.free(aux_slot)
        if state_slot >= 0:
            self._resources.states.free(state_slot)
        cache.remove_task(_NOBODY)
        if not any(results[:2]):
            raise Internal(f"{self._name} computes no finite logits any more, not even for a prompt of one token")
        if len(results) > 2:
            if not results[2]:
                raise Internal(
                    f"{self._name} computed no finite logits for {len(self._in_a_row)} requests in a row, nor for a "
                    "prompt of its own: damaged weights, an overflow of model.dtype, or a broken device"
                )
            self._in_a_row.clear()

    def repeat(self, step: Step, error: Exception) -> tuple[Step, DoneStep]:
        """Compute and return what is left of a step whose launch raised `error`. Raise that if nothing can be."""
        plan = step.plan
        of_slots = plan.offload, plan.admit, plan.append, plan.place, plan.prefill, plan.first_tokens
        slots = {record.slot for records in of_slots for record in records}.union(plan.release, plan.decode)
        self._forget(slots)
        num_lost = self._end_unsaved(plan) + self._end_stateless(slots)
        self._resources.states.drop_all(only_pending=True)  # of this step: all others are read
        outcome = _Outcome()
        self._encode(plan, outcome)
        unseen = {sequence for sequence, _ in outcome.raised}
        parts = [part for part in self._parts(step) if part.sequence not in unseen]
        logger.error("a step of %d requests raised an error; repeating it", len(parts), exc_info=error)
        if parts:
            self._run(parts, outcome)
        if not outcome.done:
            if not outcome.raised and not num_lost:
                raise error
            for sequence, _ in outcome.raised[:1]:
                self._require_sound(sequence, error)
        for sequence, its_error in outcome.raised:
            logger.error(
                "request %s alone raises the error",
                sequence.head.request_id,
                exc_info=its_error,
                extra=about(sequence.head.request_id),
            )
            text = f"{self._name} cannot compute this request ({type(its_error).__name__})"
            self._ends.fail(sequence, StepFailed(text))
        self._sequences.drop_all_but_retracted(self._executor.saved_keys)
        return self._remainder(step, outcome)

    def _forget(self, slots: set[int]) -> None:
        self._executor.forget(slots)
        for slot in slots:
            if (sequence := self._resources.slots.owner[slot]) is not None:
                sequence.holds.admitted = False

    def _end_unsaved(self, plan: StepPlan) -> int:
        """Fail the sequences that lost their KV: it was not yet in host memory, and its pages have other owners. They
        can continue on another instance. Return how many there are."""
        lost = {offload.key for offload in plan.offload} - self._executor.saved_keys
        candidates = self._sequences.queue(SequenceState.RETRACTED, SequenceState.RUNNING)
        sequences = [sequence for sequence in candidates if sequence.holds.offload_key in lost]
        for sequence in sequences:
            self._ends.fail(sequence, DecodeLost(f"{self._name} could not save the KV of this request"))
        return len(sequences)

    def _end_stateless(self, slots: set[int]) -> int:
        """Fail the sequences in these slots whose state cannot be computed anew: behind images. Return how many."""
        if not self._resources.has_state:
            return 0
        found = [self._resources.slots.owner[slot] for slot in slots]
        lost = [each for each in found if each is not None and each.is_open and each.images is not None]
        lost = [each for each in lost if each.images is not None and each.images.parts[0].start < each.kv_len]
        for sequence in lost:
            text = f"{self._name} cannot compute the state of this request anew behind its images"
            self._ends.fail(sequence, self._role.lost(text))
        return len(lost)

    def _encode(self, plan: StepPlan, outcome: _Outcome) -> None:
        """Load the images of the plan, and encode those of the vision tower, each alone. Those that raise are nobody's
        any more."""
        images, host = self._resources.images, self._resources.images.store.host
        host.forget_numbers({save.number for save in plan.save_images})  # the step may have raised before them
        if plan.drop_images:
            self._executor.launch(StepPlan(drop_images=plan.drop_images)).result()
        parts: list[tuple[LoadImage | EncodeImage, StepPlan]] = []
        parts += [(load, StepPlan(load_images=[load])) for load in plan.load_images]
        parts += [(encode, StepPlan(encode=[encode])) for encode in images.to_repeat()]
        for part, alone in parts:
            try:
                self._executor.launch(alone).result()
            except Internal:
                raise
            except Exception as error:
                known = [sequence for sequence, _ in outcome.raised]
                failed = images.fail_encoding(part)
                host.forget_numbers({load.number for load in alone.load_images})
                outcome.raised += [(sequence, error) for sequence in failed if sequence not in known]

    def _parts(self, step: Step) -> list[_Part]:
        """Return the parts of the step, one for each sequence that is still open."""
        plan, saved, owner = step.plan, self._executor.saved_keys, self._resources.slots.owner
        parts: dict[int, _Part] = {}

        def part_of(slot: int) -> StepPlan:
            sequence = owner[slot]
            if sequence is None or sequence.state not in OPEN_STATES:
                return StepPlan()
            return parts.setdefault(slot, _Part(sequence)).plan

        for record in plan.admit:
            part_of(record.slot)
        for place in plan.place:
            part_of(place.slot)  # its admission has the rows
        for copy in plan.copy:
            part_of(copy.slot).copy.append(copy)
        for copy_state in plan.copy_state:
            part_of(copy_state.slot).copy_state.append(copy_state)
        for restore in plan.restore:
            if restore.key in saved:  # else the KV is in the pages again
                part_of(restore.slot).restore.append(restore)
        for first in plan.first_tokens:
            part_of(first.slot).first_tokens.append(first)
        for chunk in plan.prefill:
            part_of(chunk.slot).prefill.append(chunk)
        for slot in plan.decode:
            part_of(slot).decode.append(slot)
        return list(parts.values())

    def _run(self, parts: list[_Part], outcome: _Outcome) -> None:
        if self._resources.has_state and len(parts) > 1:
            for part in parts:
                self._run([part], outcome)
            return
        plan, saved = StepPlan(), self._executor.saved_keys
        for part in parts:
            restored = [restore for restore in part.plan.restore if restore.key in saved]
            admit(part.sequence, self._resources.cache, plan)
            plan.restore.extend(restored)
            plan.copy.extend(part.plan.copy)
            plan.copy_state.extend(part.plan.copy_state)
            plan.first_tokens.extend(part.plan.first_tokens)
            plan.prefill.extend(part.plan.prefill)
            plan.decode.extend(part.plan.decode)
        try:
            for part in parts:
                if self._resources.has_state and not plan.restore:
                    self._rebuild_state(part, plan)
            result = self._executor.launch(plan).result()
        except Internal:
            raise
        except Exception as error:
            self._forget({part.sequence.slot for part in parts})
            if len(parts) == 1:
                outcome.raised.append((parts[0].sequence, error))
                return
            half = len(parts) // 2
            self._run(parts[:half], outcome)
            self._run(parts[half:], outcome)
            return
        outcome.tokens.update(zip(result.slots, result.tokens, strict=True))
        outcome.prompt_logprobs.update(result.prompt_logprobs)
        outcome.failures.update(result.failures)
        outcome.unsound.extend(result.unsound)
        outcome.rows.update(result.rows)
        outcome.logprobs.update({result.slots[place]: packed for place, packed in result.logprobs.items()})
        for part in parts:
            part.sequence.holds.admitted = True
            outcome.done.add(part.sequence)

    def _rebuild_state(self, part: _Part, plan: StepPlan) -> None:
        """Compute the tokens of a sequence anew that its part of the step continues, and take its admission out of the
        plan. Its KV is written again where it is."""
        sequence, size = part.sequence, self._chunk_size
        if not sequence.kv_len or part.plan.copy_state or not (part.plan.prefill or part.plan.decode):
            return  # its state is zeroed or copied again, or was not touched
        admissions = [msgspec.structs.replace(plan.admit.pop(), kv_len=0)]
        for start in range(0, sequence.kv_len, size):
            chunk = PrefillChunk(sequence.slot, start, min(size, sequence.kv_len - start))
            self._executor.launch(StepPlan(admit=admissions, prefill=[chunk])).result()
            admissions = []

    def _require_sound(self, sequence: Sequence, error: Exception) -> None:
        """Compute a token in place of `sequence`, which is over. Raise `error` if not even that works."""
        sampling = None if sequence.sampling is None else SamplingParams(max_tokens=1, temperature=0.0)
        cache, states = self._resources.cache, self._resources.states
        if self._resources.has_state and sequence.holds.state_slot < 0 and not states.num_free:
            return  # as below
        try:
            cache.reserve(sequence.room, sequence.kv_len + 1)
        except Capacity:
            return  # ending `sequence` frees pages; the next step that raises tries again
        # Use the page that its next token goes to: no other sequence reads it. Full pages may be cached and shared.
        next_page = sequence.kv_len // cache.page_size
        pages = cache.get_page_indices(sequence.room)[next_page : next_page + 1]
        if self._resources.has_state and sequence.holds.state_slot < 0:
            self._resources.take_state(sequence)  # freed with the sequence
        admit = Admit(sequence.slot, pack_i32([0]), 1, 0, tuple(pages), sampling, sequence.holds.state_slot)
        chunk = PrefillChunk(sequence.slot, 0, 1, sample=sampling is not None)
        try:
            self._executor.launch(StepPlan(admit=[admit], prefill=[chunk])).result()
        except Exception as second:
            raise error from second
        self._executor.forget({sequence.slot})

    def _remainder(self, step: Step, outcome: _Outcome) -> tuple[Step, DoneStep]:
        first_tokens = [sequence for sequence in step.first_tokens if sequence in outcome.done]
        chunks = [chunk for chunk in step.chunks if chunk.sequence in outcome.done]
        decoding = [sequence for sequence in step.decoding if sequence in outcome.done]
        order = [*first_tokens, *(chunk.sequence for chunk in chunks), *decoding]
        slots = [sequence.slot for sequence in order if sequence.slot in outcome.tokens]
        logprobs = {place: outcome.logprobs[slot] for place, slot in enumerate(slots) if slot in outcome.logprobs}
        tokens = [outcome.tokens[slot] for slot in slots]
        result = StepResult(slots, tokens, logprobs, outcome.prompt_logprobs, outcome.failures, outcome.unsound)
        result.rows = outcome.rows
        done = DoneStep(result)
        return Step(step.plan, first_tokens, chunks, decoding, step.most_tokens), done  # repeated without drafts
