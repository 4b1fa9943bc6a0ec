"""`PDScheduler`: the step loop of an instance. A turn takes events, schedules, launches and reads.

With `overlap` a turn launches a step and then reads the one before it, so the device has the next step as soon as it
finishes one. Without it, a turn reads the step that it launched. At most one launched step is unread between two turns.

With a lane for prompts the chunks of a step compute beside it and the steps after it. They are accounted for when they
are read: as soon as a turn finds them done, or when there is nothing else to compute.

Runs on the step thread. Any thread may call the methods under "any thread"; the step thread alone calls the rest. It
owns no socket and no tensor: tokens leave by the `TokenManager`, P's failures by `report_failure`, computing is behind
`Executor`, peers are behind the role. So a whole P or D runs in a test without a port or torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from chitu.engine.executor import LayerCallback, StepHandle, StepPlan, StepResult, StepSizes, is_sound
from chitu.engine.waves import NO_OFFER, offer_of
from chitu.errors import Internal, InvalidRequest, RoleChanged
from chitu.instance.core import InstanceCore
from chitu.instance.pace import StepWork
from chitu.instance.prefill import Chunk
from chitu.instance.requests import RequestArrivals, RequestEnds
from chitu.instance.roles import InstanceRole, Step
from chitu.instance.sequences import OPEN_STATES, Sequence, SequenceState
from chitu.instance.step_faults import StepFaults
from chitu.protocol import LoadReport, SchedulerMessage
from chitu.protocol.weights import SleepLevel, Weights
from chitu.types import Ready

logger = logging.getLogger(__name__)

CHECK_AFTER_S = 0.05
"""Time without requests after which the accounting of pages is checked."""


@dataclass(slots=True, frozen=True)
class _BesideStep:
    """Chunks in the lane of prompts."""

    handle: StepHandle
    step: Step
    planned_s: float
    work: StepWork | None


@dataclass(slots=True, frozen=True)
class _LaunchedStep:
    """A step whose tokens are not read yet."""

    handle: StepHandle
    chunks: list[Chunk]
    chunk_slots: list[int]
    slots: list[int]
    """Slots that sample, in the order of the result."""
    sequences: list[Sequence]
    """Sequences in `slots` when the step was launched."""
    planned_s: float
    work: StepWork | None
    """What it has to do, if it is measured."""
    others: SequenceOf[StepSizes]
    """What the other members of a group compute in it."""
    num_decoding: int
    drafted: dict[int, int]
    """Tokens of drafts, by slot."""
    has_first: bool
    """Whether it draws a first token, or completes a prompt."""


class PDScheduler:
    """The requests of one instance, from arrival until their last page is free again."""

    def __init__(self, core: InstanceCore, role: InstanceRole) -> None:
        self._core = core
        self._role = role
        self._load = role.load
        self._executor = core.engine.executor
        self._lockstep = core.engine.lockstep
        self._cache = core.engine.cache
        self._tokens = core.tokens
        self._clock = core.clock
        self._inbox = core.inbox
        self._sequences = core.sequences
        self._resources = core.sequences.resources
        self._images = core.sequences.resources.images
        self._trace = core.trace
        self._ends = RequestEnds(core, role)
        self._faults = StepFaults(core, role, self._ends)
        self._arrivals = RequestArrivals(core, role, self._ends)
        self.weights = core.weights
        """Any thread may give it an order, and read its report."""
        self._frozen_since_s: float | None = None
        self._pending: _LaunchedStep | None = None
        self._beside: _BesideStep | None = None
        self._launched: _LaunchedStep | None = None
        """The step of the present turn, between `begin` and `end`."""
        self._has_lent = False
        """Whether the present turn only lent experts to other members of the group."""
        self._offered: Weights | None = None
        """Weights to which this member of a group may change, once all others may."""
        self._steps_before = 0
        self._planned_s = self._read_s = 0.0
        """When the newest step was planned, and when the newest one that is done was read."""
        self.turns = 0
        """Calls of `step`, including idle ones, and layers computed in a step with prompt tokens and blocks of the
        vision tower, which may take long; any thread may read it."""
        self._is_checked = True
        self._idle_since_s: float | None = None
        core.engine.report_blocks(self._note_block)

    # ------------------------------------------------------------------------------------------------------ any thread

    def submit(self, message: SchedulerMessage) -> None:
        """Queue a message of the router for the next step."""
        self._inbox.put(message)

    def cancel_all(self, router: int = 0) -> None:
        """Cancel every request of a router: a new one has replaced it, so their tokens have no reader."""
        self._inbox.put(partial(self._arrivals.cancel_all, router))

    def flush_cache(self) -> None:
        """Forget the cached prefixes."""
        self._inbox.put(self._arrivals.flush_cache)

    def end_all(self, silence_s: float, router: int = 0) -> None:
        """End every request of a router with an error, because it was silent beyond its limit."""
        self._inbox.put(partial(self._ends.end_without_router, router, silence_s))

    def give_back(self, error: RoleChanged) -> None:
        """End every request with an error after which another instance continues it."""
        self._inbox.put(partial(self._arrivals.end_all, error))

    @property
    def load(self) -> LoadReport:
        """Load after the newest step, plus the requests that arrived since: a step may take seconds."""
        count, tokens = self._inbox.waiting()
        load = self._load.snapshot
        if not count:
            return load
        new_tokens = round(tokens * (1 - load.cached_share))
        return msgspec.structs.replace(
            load, waiting=load.waiting + count, unread=count, waiting_tokens=load.waiting_tokens + new_tokens
        )

    # ----------------------------------------------------------------------------------------------------- the step

    def step(self) -> bool:
        """Run one turn. Return False if nothing was computed or read, so the caller may wait for the next event."""
        self.begin()
        return self.end()

    def begin(self) -> StepHandle | None:
        """Begin a turn: take what has come, and launch the next step. Return the step that `end` waits for, if any."""
        self.turns += 1
        self._steps_before = self._load.steps
        for command in self._inbox.take():
            self._arrivals.take(command)
        self._take_transfer_events()
        if not self.weights.is_settled:
            self._turn_weights()
        if self.weights.adapters.is_leaving:
            self.weights.note_requests(
                Counter([sequence.adapter for sequence in self._sequences.queue(*SequenceState)])
            )
        self._launched, self._has_lent = None, False
        if self.weights.freezes:
            if self._frozen_since_s is None:
                self._frozen_since_s = self._clock.monotonic()
        else:
            self._begin_step()
        if self._launched is None and self._lockstep is not None and self._lockstep.must_step:
            self._sync_step()  # steps are read in the order of their launches
            self._lockstep.lend()
            self._has_lent = True
        waited = self._pending if self._launched is None or self._core.settings.overlap else self._launched
        return waited.handle if waited is not None else None

    def end(self) -> bool:
        """End a turn: read a step, and send what it sampled. Return as `step` does."""
        launched, self._launched = self._launched, None
        self._sync_step()
        if launched is None:
            self._sync_beside()  # there is nothing else to compute
        else:
            self._pending = launched
            if not self._core.settings.overlap:
                self._sync_step()
        self._tokens.flush(self._clock.monotonic())
        self.weights.note_drained(self.is_done)
        worked = launched is not None or (self._load.steps > self._steps_before and self._frozen_since_s is None)
        if worked:
            self._is_checked, self._idle_since_s = False, None
        elif not self._is_checked and self._frozen_since_s is None and self.is_idle:
            self._check_idle_soon()
        self._load.report()
        return worked or self._has_lent

    def _begin_step(self) -> None:
        if self._frozen_since_s is not None:
            self._ends.note_frozen(self._clock.monotonic() - self._frozen_since_s)
            self._frozen_since_s = None
        self._ends.expire()
        if self._images.asked or self._images.pulls:
            self._take_images()
        if self._beside is not None and self._beside.handle.is_done():
            self._sync_beside()
        if self._faults.must_check and self._offered is None:  # which takes several steps
            self._sync_all()
            self._faults.check_device()
        if self._pending is not None and self._pending.drafted:
            self._sync_step()  # the next step begins where its drafts end
        if self._pending is not None and self._pending.has_first and self._pending.handle.is_done():
            self._sync_step()  # a first token does not wait until the next step is planned
            self._tokens.flush(self._clock.monotonic())
        step = self._schedule()
        if step.has_work:
            self._launched = self._launch(step)

    def _note_block(self) -> None:
        """Note that a step which encodes images has come to the next block of the vision tower."""
        self.turns += 1
        self._role.note_block()

    def _take_images(self) -> None:
        """Take the images that were prepared, and end the requests whose images were not."""
        for sequence, error in self._images.take():
            if sequence.is_open:
                self._ends.fail(sequence, error)

    def _turn_weights(self) -> None:
        """Read the weights that the cluster wants, and change to them once no request runs here, or at once if the
        change is mixed. Sleep once nothing at all is left here."""
        weights = self._due_weights()
        if level := self.weights.sleep_due:
            self._sleep(level)
            return
        if weights is None:
            return
        self._sync_all()
        keeps_base, is_awake = self.weights.keeps_base(weights), not self.weights.serves.sleep
        fingerprint = self.weights.change(weights)
        if keeps_base and is_awake:
            return  # what is cached is as it was, and what runs keeps its adapter
        if not keeps_base:  # else what disk, store and host memory have is of the same weights
            self._arrivals.flush_cache()
            self._cache.use_fingerprint(fingerprint)
        self._images.forget()
        self._core.engine.report_blocks(self._note_block)  # of another model, perhaps
        if not self.is_done:
            for sequence in self._sequences.open:
                if sequence.output.num_sent < len(sequence.emitted) and sequence.output.group > 1:
                    self._ends.send_tokens(sequence)
            self._tokens.flush(self._clock.monotonic())  # what was computed so far is still of the old ones
            self._tokens.note_weights(weights.model_hash)

    def _sleep(self, level: SleepLevel) -> None:
        """Give memory back, unless a peer may still access pages here: then it is due in a later turn."""
        if not self.is_idle:
            self.weights.is_settled = False
            return
        self._cache.flush()
        self._images.forget()
        self.weights.sleep(level)
        self.weights.is_settled = False

    def _due_weights(self) -> Weights | None:
        """Return the weights to change to now. A member of a group offers to, and changes together with all others: to
        what it has offered, whatever the cluster wants by then."""
        lockstep = self._lockstep
        if self._offered is None or lockstep is None or not lockstep.is_agreed:
            weights = self.weights.turn()
            if weights is not None and not (weights.goes_on_from(self.weights.serves) or self.is_done):
                weights = None
            if lockstep is None:
                return weights
            self._offered = weights
            self._sync_step()  # an offer may be a step
            lockstep.offer(offer_of(weights.age) if weights is not None else NO_OFFER)
            if not lockstep.is_agreed:
                return None
        offered, self._offered = self._offered, None
        lockstep.offer(NO_OFFER)
        return offered

    def close(self) -> None:
        """Read the step in flight, so that nothing computes any longer. After all turns."""
        self._sync_all()
        if not self._is_checked and self.is_idle:
            self._check_idle()
        self._images.forget()
        self._tokens.flush(self._clock.monotonic())

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, not even one that only waits for a peer to release its pages, or an image that an
        E may still write."""
        return self.is_done and not len(self._sequences) and not self._images.is_lending

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do here: a request that is left is over and waits for a peer."""
        over = len(self._sequences.of(SequenceState.CLOSING)) + len(self._sequences.of(SequenceState.LEAVING))
        is_read = self._pending is None and self._beside is None
        return not (self._inbox or len(self._arrivals)) and len(self._sequences) == over and is_read

    def _check_idle_soon(self) -> None:
        """Check once nothing has come for a while: it takes a millisecond, which the next request would wait."""
        now_s = self._clock.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= CHECK_AFTER_S:
            self._check_idle()

    def _check_idle(self) -> None:
        """Check that every page is free or cached, and every state row free. A leak is a bug, but it is only logged:
        the instance still works."""
        self._is_checked = True
        try:
            self._cache.check_idle()
            self._resources.states.check_idle()
            self._images.store.check_idle()
        except Internal as error:
            logger.error("accounting of pages and rows: %s", error.message)

    def _schedule(self) -> Step:
        plan = StepPlan()
        step = self._role.schedule(plan)
        while step is None:
            if self._pending is None:
                self._sync_beside()
            self._sync_step()
            step = self._role.schedule(plan)
        is_full = sum(chunk.length for chunk in step.chunks) >= step.most_tokens
        self._planned_s = self._clock.monotonic()
        self._load.note_backlog(self._planned_s, is_full)
        plan.release.extend(self._resources.slots.take_releases())
        self._images.end_plan(plan)
        return step

    # ------------------------------------------------------------------------------------------------- launch and read

    def _launch(self, step: Step) -> _LaunchedStep:
        """Launch a step, and account for it as if it were done. If the launch raises, the sequences at fault fail and
        the step goes on with the rest."""
        self._resources.launched()
        handle: StepHandle
        try:
            if step.is_beside:
                step, handle = self._launch_beside(step)
            else:
                handle = self._executor.launch(step.plan, self._on_layer(self._pending) if step.chunks else None)
        except Internal:
            raise
        except Exception as error:
            self._sync_step()  # the step before was launched without an error
            self._sync_beside()
            step, handle = self._faults.repeat(step, error)
        work = self._load.pace.work_of(step.chunks, step.decoding, step.drafts)
        if step.plan.encode or step.plan.turn or step.plan.save_images or step.plan.load_images:
            work = None  # how long it takes says nothing of its rows
        return self._account(step, handle, self._planned_s, work)

    def _launch_beside(self, step: Step) -> tuple[Step, StepHandle]:
        """Launch a step with its chunks in the lane of prompts, and return the rest of it."""
        assert self._core.engine.lane is not None
        handle, beside = self._core.engine.lane.launch_beside(step.plan, self._on_layer(None))
        self._resources.launched_beside()
        chunks = Step(StepPlan(prefill=step.plan.prefill), [], step.chunks, [], step.most_tokens)
        self._beside = _BesideStep(beside, chunks, self._planned_s, self._load.pace.work_of(step.chunks, [], {}))
        return replace(step, chunks=[], is_beside=False), handle

    def _account(self, step: Step, handle: StepHandle, planned_s: float, work: StepWork | None) -> _LaunchedStep:
        """Account for a launched step as if it were done."""
        chunks = step.chunks
        drafted = {sequence.slot: len(tokens) for sequence, tokens in step.drafts.items()}
        has_first = bool(step.first_tokens) or any(chunk.is_last for chunk in chunks)
        sequences = self._role.after_launch(step)
        slots = [sequence.slot for sequence in sequences]
        chunk_slots = [chunk.sequence.slot for chunk in chunks]
        of_group = self._core.engine.others
        launched = _LaunchedStep(
            handle,
            chunks,
            chunk_slots,
            slots,
            sequences,
            planned_s,
            work,
            of_group,
            len(step.decoding),
            drafted,
            has_first,
        )
        num_prompt_tokens = sum(chunk.length for chunk in chunks)
        self._load.prompt_tokens += num_prompt_tokens
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step %d launched: %d prompt tokens in %d chunks, %d first tokens, %d decoding; %d of %d pages free",
                self._load.steps,
                num_prompt_tokens,
                len(chunks),
                len(step.first_tokens),
                len(step.decoding),
                self._cache.allocator.num_free,
                self._cache.num_pages,
            )
        return launched

    def _on_layer(self, before: _LaunchedStep | None) -> LayerCallback:
        """Return what is called after each layer of a step with prompt tokens: the role's callback, if it has one. As
        launching a long step takes time, it also reads the step before once that is done, so the logits rows of P leave
        early."""
        layer_done = self._role.layer_done

        def on_layer(layer: int, ready: Ready | None = None, first_layer: int | None = None) -> None:
            self.turns += 1
            if layer_done is None:
                return
            layer_done(layer, ready, first_layer)
            if before is not None and self._pending is before and before.handle.is_done():
                self._sync_step()

        return on_layer

    def _sync_step(self) -> None:
        """Read the step in flight, if any; afterwards none is."""
        step, self._pending = self._pending, None
        if step is None:
            return
        result = step.handle.result()
        before_s, self._read_s = self._read_s, self._clock.monotonic()
        if step.work is not None:
            self._load.pace.note(step.work, self._read_s - max(step.planned_s, before_s), step.others)
        self._take_result(step, result)

    def _sync_beside(self) -> None:
        """Read the chunks in the lane of prompts, if any; afterwards none are there. If they raised, the sequences at
        fault fail and the rest is computed again."""
        beside, self._beside = self._beside, None
        if beside is None:
            return
        handle, step = beside.handle, beside.step
        try:
            result = handle.result()
        except Internal:
            raise
        except Exception as error:
            self._sync_step()
            step, handle = self._faults.repeat(step, error)
            result = handle.result()
        if beside.work is not None:
            self._load.pace.note(beside.work, self._clock.monotonic() - beside.planned_s)
        launched = self._account(step, handle, beside.planned_s, beside.work)
        self._take_result(launched, result, is_beside=True)

    def _sync_all(self) -> None:
        """Read what is in flight in both lanes."""
        self._sync_step()
        self._sync_beside()

    def _take_result(self, step: _LaunchedStep, result: StepResult, is_beside: bool = False) -> None:
        """Take what a step has computed, which the device touches no longer."""
        sequences = self._drawn(step, result)
        damaged = self._role.take_rows(sequences, result.rows) if result.rows else []
        if step.num_decoding and self._core.drafts.is_on:
            accepted = len(result.slots) - len(step.slots)
            self._load.pace.note_drafts(step.num_decoding, sum(step.drafted.values()), accepted)
        self._resources.read(is_beside)
        self._load.steps += 1
        if not is_sound(result):
            self._end_unsound(step, result, damaged)
        if not self._role.samples and any(chunk.is_last and chunk.sequence.is_open for chunk in step.chunks):
            self._faults.note_sound()
        if self._executor.info.guesses:
            for slot, sequence in zip(step.slots, step.sequences, strict=True):
                sequence.guess = result.drafts.get(slot, [])
        if not self._role.samples:
            self._send_early(sequences, result.tokens)
        self._role.after_read(step.chunks, step.chunk_slots, result.prompt_logprobs)
        if self._role.samples:
            self._emit_all(sequences, result, damaged)
        if step.chunks:  # what a peer and the clients wait for has left
            if self._role.samples:
                self._tokens.flush(self._clock.monotonic())
            self._role.keep(step.chunks)

    def _emit_all(self, sequences: list[Sequence], result: StepResult, damaged: list[Sequence]) -> None:
        logprobs, failures = result.logprobs, result.failures
        for place, (sequence, token) in enumerate(zip(sequences, result.tokens, strict=True)):
            if sequence.state not in OPEN_STATES or sequence in damaged:
                continue  # a surplus row or token: the request ended after the launch, or with the token before
            if failures and (reason := failures.get(result.slots[place])) and sequence not in sequences[place + 1 :]:
                self._ends.fail(sequence, InvalidRequest(reason))
            else:
                self._emit(sequence, token, logprobs.get(place) if logprobs else None)

    def _drawn(self, step: _LaunchedStep, result: StepResult) -> list[Sequence]:
        """Return the sequences of a step's tokens, and account for those that it drew of drafts."""
        if not step.drafted and result.slots == step.slots:
            return step.sequences
        counts = Counter(result.slots)
        if [slot for slot in step.slots for _ in range(counts[slot])] != result.slots or any(
            not 0 <= counts[slot] - 1 <= step.drafted.get(slot, 0) for slot in step.slots
        ):
            raise Internal(
                f"a step sampled slots {result.slots}, its plan says {step.slots} with drafts of {step.drafted}"
            )
        sequences = []
        for slot, sequence in zip(step.slots, step.sequences, strict=True):
            if slot in step.drafted:
                self._role.note_draft(sequence, step.drafted[slot], counts[slot] - 1)
            sequences += [sequence] * counts[slot]
        return sequences

    def _end_unsound(self, step: _LaunchedStep, result: StepResult, damaged: list[Sequence]) -> None:
        """End the sequences whose numbers are not finite, before anything of the step is cached. Those of a damaged row
        say nothing of who computed it."""
        slots = {slot for slot, token in zip(result.slots, result.tokens, strict=True) if token < 0}.union(
            result.unsound
        )
        chunks = zip(step.chunks, step.chunk_slots, strict=True)
        self._faults.end_unsound([chunk.sequence for chunk, slot in chunks if slot in slots])
        sampled = zip(step.sequences, step.slots, strict=True)
        self._faults.end_unsound([each for each, slot in sampled if slot in slots and each not in damaged])
        self._load.unsound = self._faults.num_unsound

    def _send_early(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Send the first tokens that P drew at once, before anything else is done with the step. A prompt that has to
        be computed again, because it gave way, sends none again."""
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.state not in OPEN_STATES:
                continue
            sequence.prompt.early = None
            if sequence.prompt.cached_tokens:
                self._tokens.note_cached(sequence.room, sequence.prompt.cached_tokens, sequence.head.router)
            self._tokens.push_early(sequence.room, token, sequence.head.router)
        if sequences:
            self._tokens.flush(self._clock.monotonic())

    def _emit(self, sequence: Sequence, token: int, logprobs: bytes | None) -> None:
        if not sequence.emitted:
            sequence.times.first_token_s = self._clock.monotonic()
            if sequence.prompt.cached_tokens:
                self._tokens.note_cached(sequence.room, sequence.prompt.cached_tokens, sequence.head.router)
            self._role.note_first_token(sequence)
            source = sequence.source or sequence
            if source.prompt.lines is not None:
                self._tokens.push_prompt(source.room, source.prompt.lines, sequence.head.router)
                source.prompt.lines = None
        sequence.emitted.append(token)
        reason = sequence.finish_reason(token)
        if sequence.output.group == 1:
            self._tokens.push(sequence.room, token, sequence.head.router, logprobs)
        elif not reason and self._is_group_due(sequence):
            self._ends.send_tokens(sequence)
        if self._trace.rooms:
            self._trace.note_token(sequence, token, reason)
        if reason:
            self._faults.note_sound()
            self._ends.finish(sequence, reason)

    def _is_group_due(self, sequence: Sequence) -> bool:
        """Return whether tokens may wait no longer. Those of all requests leave in the same steps, so that few steps
        send a message."""
        num_emitted, most = len(sequence.emitted), sequence.output.group
        return num_emitted == 1 or not self._load.steps % most or num_emitted - sequence.output.num_sent >= most

    # ------------------------------------------------------------------------------------------------------- transfers

    def _take_transfer_events(self) -> None:
        for event in self._role.poll():
            if event.error is not None:
                self._ends.transfer_failed(event.room, event.error)
            self._load.bytes_moved += event.kv_bytes
            self._load.bytes_saved += event.saved_bytes
            self._role.on_event(event)
