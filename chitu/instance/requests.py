"""Arrivals and ends of the requests of an instance, and their reports to the router.

`RequestArrivals` makes requests sequences, or refuses them before they hold anything. `RequestEnds` has every way in
which one ends: its last token, a failed transfer, a cancellation, a deadline, a router that is gone. Both are owned by
`PDScheduler`, step thread only. An end is reported once: with the tokens, or on P by `FailureReports`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from chitu import log
from chitu.errors import (
    Capacity,
    ChituError,
    InvalidRequest,
    QueueTimeout,
    RequestCancelled,
    RequestTimeout,
    RoleChanged,
    WeightsChanged,
)
from chitu.grammars import CompiledGrammar
from chitu.instance.adapters import LoadedAdapter
from chitu.instance.core import InstanceCore
from chitu.instance.images import wrong_images
from chitu.instance.roles import InstanceRole
from chitu.instance.sequences import (
    OPEN_STATES,
    SEQUENCE_AWAITS,
    Holdings,
    Output,
    PromptProgress,
    Sequence,
    SequenceState,
    SequenceTimes,
    StepCommand,
    queue_order,
)
from chitu.kv_cache.tiers.pages import PageLoad
from chitu.log import about
from chitu.protocol import (
    MAX_BAD_WORD_TOKENS,
    MAX_FORKS,
    MAX_LOGPROBS,
    MAX_POOLED_IDS,
    MAX_SAMPLING_ENTRIES,
    CancelRequest,
    DecodeRequest,
    Finish,
    Fork,
    PrefillRequest,
    PromptOutput,
    RequestFailed,
    RequestHead,
    RequestMessage,
    RequestOptions,
    SampledRequest,
    SamplingParams,
    UnifiedRequest,
    page_marks,
)
from chitu.types import Role, waited_text

logger = logging.getLogger(__name__)

_KINDS = {PrefillRequest: Role.PREFILL, DecodeRequest: Role.DECODE, UnifiedRequest: Role.UNIFIED}
"""Names of the kinds of requests, for errors."""
PRIORITY_SHARE = 0.25
"""Share of `deadlines.queue_s` by which a priority moves a request at most (`queue_order`). So against order of arrival
no request waits longer than for half of that deadline."""
NO_ADAPTER = LoadedAdapter(0, "")
"""Number and hash of the model alone."""
REPEATS = 3
"""Repeats of a report: more than the heartbeats during a reconnect; later ones wait in the new connection's queue."""
KEPT = 4096
"""Most failures kept for repeats; beyond it the oldest are not repeated."""


class RequestEnds:
    def __init__(self, core: InstanceCore, role: InstanceRole) -> None:
        self._settings = core.settings
        self._role = role
        self._finished_pages = core.engine.finished_pages
        self._trace = core.trace
        self._sequences = core.sequences
        self._tokens = core.tokens
        self._report_failure = core.report_failure
        self._clock = core.clock
        self._next_expire_s = 0.0
        self._frozen_s = 0.0

    def note_frozen(self, seconds: float) -> None:
        """Note that nothing could run for this long. Requests have as much time more, until the next such time."""
        self._frozen_s = seconds

    # -------------------------------------------------------------------------------------------- reports to the router

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a request whose newest token was the last one."""
        self._report(sequence, reason, None)
        self._role.finish(sequence)

    def refuse(self, sequence: Sequence, error: ChituError) -> None:
        """Report the error of a request that holds nothing, or whose pages the caller handles."""
        if sequence.sampling is None:  # P's half of it
            self._report_failure(sequence.room, error)
            self._note_end(sequence, "error", error)
            return
        for each in sequence.choices:
            self._report(each, "error", error)

    def transfer_failed(self, room: bytes, error: ChituError) -> None:
        """Report a FAILED of the transfer layer to the router. The role also gets it, and handles the pages."""
        sequence = self._sequences.find(room)
        if sequence is None:
            return
        if sequence.sampling is not None:
            logger.warning(
                "request %s failed: %s", sequence.head.request_id, error, extra=about(sequence.head.request_id)
            )
        elif isinstance(error, RequestCancelled):
            self._note_end(sequence, "error", error)
            return
        self.refuse(sequence, error)

    def send_tokens(self, sequence: Sequence) -> None:
        """Send the tokens of a request with a `token_group` that were not sent yet."""
        tokens = sequence.emitted[sequence.output.num_sent :].tolist()
        sequence.output.num_sent = len(sequence.emitted)
        self._tokens.push_group(sequence.room, tokens, sequence.head.router)

    def _report(self, sequence: Sequence, reason: str, error: ChituError | None) -> None:
        if sequence.output.group > 1 and sequence.emitted:
            self.send_tokens(sequence)
        self._tokens.finish(
            Finish(
                sequence.room,
                reason,
                error.code if error else "",
                error.message if error else "",
                sequence.output.kv_bytes,
                sequence.times.stages(self._clock.monotonic()),
                self._finished_pages.sums_of(sequence) if self._finished_pages is not None and error is None else b"",
                sequence.output.transfer_sums,
                sequence.drafting.report() if sequence.drafting is not None else (),
            ),
            sequence.head.router,
        )
        self._note_end(sequence, reason, error)

    def _note_end(self, sequence: Sequence, reason: str, error: ChituError | None) -> None:
        if self._trace.rooms:
            self._trace.note_end(sequence, reason, error)

    def fail(self, sequence: Sequence, error: ChituError) -> None:
        """End an open request with an error, and report it to the router."""
        logger.warning(
            "request %s failed: %s", sequence.head.request_id, error.message, extra=about(sequence.head.request_id)
        )
        choices = sequence.choices
        self.refuse(sequence, error)
        for each in choices:
            self._drop(each, error)

    def _drop(self, sequence: Sequence, error: ChituError) -> None:
        """End a sequence. If it is the last fork that waits for a prompt, end the prompt, too."""
        self._role.cancel(sequence, error)
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

    def cancel_all(self, router: int) -> None:
        for sequence in self._sequences.open:
            if sequence.head.router == router:
                self.cancel(sequence.room)
        self._tokens.restart(router)

    def end_all(self, error: ChituError) -> None:
        """End every request with this error."""
        for sequence in self._sequences.open:
            self.fail(sequence, error)

    def end_without_router(self, router: int, silence_s: float) -> None:
        """End the requests of a router with an error. It may come back (a suspended process, a broken connection), and
        then receives these errors."""
        for sequence in [each for each in self._sequences.open if each.head.router == router]:
            self.fail(sequence, self._role.lost(self._waited(sequence, silence_s, "a message of the router")))

    # ----------------------------------------------------------------------------------------------- ends by the clock

    def expire(self) -> None:
        """Fail requests that wait for pages longer than `queue_s` or exceed the request timeout. The router cancels the
        latter itself, unless it or the cancellation is lost. The states between have the transfer layer's deadlines."""
        now_s = self._clock.monotonic()
        oldest_s = now_s - self._settings.deadlines.queue_s - self._frozen_s
        for sequence in self._sequences.queue(SequenceState.WAITING):
            arrival_s = sequence.times.arrival_s
            if arrival_s < oldest_s:
                what = SEQUENCE_AWAITS[sequence.state]
                self.fail(sequence, QueueTimeout(self._waited(sequence, now_s - arrival_s, what)))
        if now_s >= self._next_expire_s:
            self._next_expire_s = now_s + 1.0
            oldest_s = now_s - self._settings.request_timeout_s - self._frozen_s
            for sequence in [s for s in self._sequences.open if s.times.arrival_s < oldest_s]:
                what = f"{SEQUENCE_AWAITS[sequence.state]} (router.request_timeout_s, from its arrival)"
                self.fail(sequence, RequestTimeout(self._waited(sequence, now_s - sequence.times.arrival_s, what)))

    def _waited(self, sequence: Sequence, waited_s: float, what: str) -> str:
        return waited_text(self._settings.name, waited_s, sequence.state, what)


class RequestArrivals:
    def __init__(self, core: InstanceCore, role: InstanceRole, ends: RequestEnds) -> None:
        self._core = core
        self._role = role
        self._sequences = core.sequences
        self._ends = ends
        self._cache = core.engine.cache
        self._resources = core.sequences.resources
        self._grammars = core.engine.grammars
        self._weights = core.weights
        self._info = core.engine.executor.info
        self._eos = frozenset(self._info.eos_token_ids)
        self._count = 0
        self._uncompiled: dict[bytes, SampledRequest] = {}
        """Requests whose grammar is being compiled, by room. They hold nothing yet."""

    def __len__(self) -> int:
        return len(self._uncompiled)

    def take(self, command: StepCommand) -> None:
        if callable(command):
            command()
        elif not isinstance(command, CancelRequest):
            self._take_request(command)
        elif not self._cancel_uncompiled(command.room):
            self._ends.cancel(command.room)

    def cancel_all(self, router: int) -> None:
        for message in [message for message in self._uncompiled.values() if message.head.router == router]:
            del self._uncompiled[message.head.room]
            self._end_trace(message)
        self._ends.cancel_all(router)

    def end_all(self, error: ChituError) -> None:
        """End every request with this error, also those whose grammar is being compiled."""
        uncompiled, self._uncompiled = self._uncompiled, {}
        for message in uncompiled.values():
            self._ends.refuse(self._sequence(message), error)
            self._end_trace(message)
        self._ends.end_all(error)

    def flush_cache(self) -> None:
        """Forget the cached prefixes and features, and stop all loads from the tiers; the rest of those prompts is
        computed."""
        self._cache.flush()
        self._resources.images.store.drop_all()
        self._core.engine.tiers.flush()
        for sequence in self._sequences.queue(SequenceState.COMPUTING):
            holds = sequence.holds
            if holds.load is not None:
                holds.load.stop()
                holds.load = PageLoad.none()

    def _take_request(self, message: RequestMessage) -> None:
        self._admit(message)
        if message.head.options.trace and message.head.room not in self._uncompiled:
            self._end_trace(message)

    def _end_trace(self, message: RequestMessage) -> None:
        """End the traced rooms of a request of which no sequence was made; `Sequences` ends the others."""
        for room in _rooms_of(message):
            if room not in self._sequences:
                self._core.trace.end(room)

    def _admit(self, message: RequestMessage) -> None:
        rooms = _rooms_of(message)
        if len(set(rooms)) < len(rooms) or any(
            room in self._uncompiled or room in self._sequences for room in rooms
        ):  # not refused: the router knows rooms only, and would end the first request
            request_id = message.head.request_id
            logger.warning("duplicate request %s", request_id, extra=log.about(request_id))
        elif isinstance(message, PrefillRequest):
            if message.early is None or self._can_answer(message):
                self._arrive(message)
        elif self._can_answer(message) and self._is_compiled(message):
            self._arrive(message)

    def _can_answer(self, message: RequestMessage) -> bool:
        """Return whether tokens can be sent to the router that asks."""
        if self._core.tokens.expect(message.head.router, message.stamp.link):
            return True
        request_id = message.head.request_id
        logger.warning("ignored request %s: its link was replaced", request_id, extra=log.about(request_id))
        return False

    def _is_compiled(self, message: SampledRequest) -> bool:
        """Return whether the request's grammar is compiled. If not, compile it, then take the request again."""
        grammar, grammars = message.sampling.grammar, self._grammars
        if grammar is None or grammars is None or grammars.find(grammar) is not None:
            return True
        try:
            future = grammars.submit(grammar)
        except ChituError as error:
            self._ends.refuse(self._sequence(message), error)
            return False
        room = message.head.room
        self._uncompiled[room] = message
        future.add_done_callback(lambda _future: self._core.inbox.put(partial(self._take_compiled, room)))
        return False

    def _take_compiled(self, room: bytes) -> None:
        """Take a request whose grammar is compiled, or failed to; the grammar store has the outcome."""
        message = self._uncompiled.pop(room, None)
        if message is not None:
            self._take_request(message)

    def _cancel_uncompiled(self, room: bytes) -> bool:
        """Cancel a request whose grammar is being compiled, or a fork of one. Return False if the room is neither."""
        for first, message in self._uncompiled.items():
            forks = tuple(fork for fork in message.forks if fork.room != room)
            if first == room or (message.forks and not forks):
                del self._uncompiled[first]
                self._end_trace(message)
                return True
            if len(forks) < len(message.forks):
                self._uncompiled[first] = msgspec.structs.replace(message, forks=forks)
                self._core.trace.end(room)
                return True
        return False

    def _arrive(self, message: RequestMessage) -> None:
        """Make the request a sequence that waits, or refuse it, which is reported to the router."""
        sequence, head = self._sequence(message), message.head
        if not isinstance(message, self._role.takes):
            kind = _KINDS[type(message)].value
            self._ends.refuse(sequence, RoleChanged(f"this instance serves no {kind} requests"))
        elif head.weights != self._weights.accepts:
            self._ends.refuse(sequence, self._other_weights(head.weights))
        elif head.options.adapter and (other := self._other_adapter(head.options)):
            self._ends.refuse(sequence, other)
        elif refusal := self._refusal(sequence) or self._image_refusal(message):
            self._ends.refuse(sequence, refusal)
        else:
            self._role.arrive(sequence, message)

    def _other_weights(self, wanted: int) -> WeightsChanged:
        serves, is_leaving = self._weights.serves.number, self._weights.accepts < 0
        change = ", and changes to newer ones" if is_leaving else ""
        return WeightsChanged(
            f"{self._core.settings.name} serves weights {serves}{change}; the request is for {wanted}"
        )

    def _other_adapter(self, options: RequestOptions) -> ChituError | None:
        """Return why a request cannot have its LoRA adapter here; None if it can."""
        found, table = self._weights.adapters.find(options.adapter), self._weights.adapters
        if found is not None and options.adapter_hash in ("", found.hash):
            return None
        if options.adapter_hash:
            has = "none" if found is None else found.hash
            return WeightsChanged(
                f"{self._core.settings.name} has of the LoRA adapter {options.adapter!r} {has}; the request is for "
                f"{options.adapter_hash}"
            )
        known = ", ".join(table.names) or "none"
        return InvalidRequest(f"this instance has no LoRA adapter {options.adapter!r} (model.adapters: {known})")

    # ------------------------------------------------------------------------------------------ sequences and refusals

    def _image_refusal(self, message: RequestMessage) -> ChituError | None:
        """Return why no prompt with these images can run here; None if it can."""
        head = message.head
        if not head.images:
            return None
        if wrong := _wrong_images(head):
            return InvalidRequest(wrong)
        if isinstance(message, DecodeRequest):
            return None  # P computes it
        if not (num_rows := self._info.image_rows):
            return InvalidRequest("this instance has no vision")
        largest = max([image.num_rows for image in head.images])
        if largest > num_rows:
            return Capacity(f"an image of {largest} rows, this instance has {num_rows} (cache.image_rows)")
        longest, most = max([image.end - image.start for image in head.images]), self._core.settings.config
        if self._info.whole_images and longest > most.max_batched_tokens:
            return Capacity(
                f"an image of {longest} tokens, which are computed in one step, and a step of this instance has "
                f"{most.max_batched_tokens} (scheduler.max_batched_tokens)"
            )
        return None

    def _sequence(self, message: RequestMessage) -> Sequence:
        self._count += 1
        head, options = message.head, message.head.options
        arrival_s = self._core.clock.monotonic()
        most_s = PRIORITY_SHARE * self._core.settings.deadlines.queue_s
        sampling = message.sampling if isinstance(message, SampledRequest) else None
        asked = message.sampling.prompt_output if isinstance(message, SampledRequest) else message.output
        stop_ids: frozenset[int] = frozenset()
        if sampling is not None:
            stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        adapter, adapter_hash = self._weights.adapters.find(options.adapter) or NO_ADAPTER
        salt, images = options.cache_salt, () if head.images and _wrong_images(head) else head.images
        keys = None
        if salt is not None:
            keys = self._cache.page_keys(salt, adapter_hash, page_marks(images), options.adapter)
        sequence = Sequence(
            head,
            queue_order(arrival_s, self._count, options.priority, most_s),
            SequenceTimes(arrival_s),
            sampling,
            adapter,
            stop_ids,
            images=self._resources.images.images_of(images),
            prompt=PromptProgress(PromptOutput() if head.num_emitted else asked, early=self._early_of(message)),
            holds=Holdings(keys),
        )
        if isinstance(message, SampledRequest):
            sequence.output.group = message.token_group
            sequence.prediction = message.prediction
            sequence.forks = [
                self._fork(sequence, message.sampling, fork, message.prediction) for fork in message.forks
            ]
        return sequence

    def _early_of(self, message: RequestMessage) -> SamplingParams | None:
        """Return by what P draws the first token of the request, too; None if it does not."""
        return message.early if isinstance(message, PrefillRequest) and self._info.samples else None

    def _fork(self, source: Sequence, sampling: SamplingParams, fork: Fork, prediction: bytes) -> Sequence:
        return Sequence(
            msgspec.structs.replace(source.head, room=fork.room, request_id=fork.request_id),
            source.order,
            SequenceTimes(source.times.arrival_s),
            msgspec.structs.replace(sampling, seed=fork.seed),
            source.adapter,
            source.stop_ids,
            images=None if source.images is None else self._resources.images.images_of(source.images.parts),
            output=Output(group=source.output.group),
            source=source,
            prediction=prediction,
        )

    def _refusal(self, sequence: Sequence) -> ChituError | None:
        """Return why a request can never run here, or not behind those already waiting; None if it can."""
        if not sequence.head.token_ids or len(sequence.head.token_ids) % 4:
            return InvalidRequest("the prompt has no tokens")
        if len(sequence.prediction) % 4 or len(sequence.prediction) > 4 * self._info.max_model_len:
            return InvalidRequest(f"a prediction of {len(sequence.prediction)} bytes is none of tokens of a context")
        asked = sequence.prompt.asked
        wrong = _wrong_ids("the prompt", np.frombuffer(sequence.head.token_ids, "<i4"), self._info.vocab_size)
        wrong = wrong or _wrong_logprobs(asked.logprobs)
        wrong = wrong or _wrong_ids("pooled_ids", asked.pooled_ids[:MAX_POOLED_IDS], self._info.vocab_size)
        if len(asked.pooled_ids) > MAX_POOLED_IDS:
            wrong = f"{len(asked.pooled_ids)} pooled ids; at most {MAX_POOLED_IDS} are accepted"
        sampling = sequence.sampling or sequence.prompt.early
        if sampling is not None:
            wrong = wrong or wrong_sampling(sampling, self._info.vocab_size)
        if wrong:
            return InvalidRequest(wrong)
        if sequence.sampling is not None and sequence.sampling.grammar is not None:
            found = self._grammars and self._grammars.find(sequence.sampling.grammar)
            if not isinstance(found, CompiledGrammar):
                return found or InvalidRequest("this instance follows no grammars")
            for each in (sequence, *sequence.forks):
                each.output.grammar = found
        if not 0 <= sequence.head.num_emitted < sequence.prompt_len:
            return InvalidRequest(f"{sequence.head.num_emitted} of {sequence.prompt_len} tokens are marked as output")
        if sequence.sampling is not None and sequence.head.num_emitted >= sequence.sampling.max_tokens:
            return InvalidRequest(f"{sequence.head.num_emitted} tokens are output already, the requested number")
        total, choices = sequence.choices[0].final_len, len(sequence.choices)
        if sequence.forks and (sequence.head.num_emitted or choices > MAX_FORKS):
            return InvalidRequest(
                f"{choices} forks behind {sequence.head.num_emitted} tokens; at most {MAX_FORKS} behind 0"
            )
        if total > self._info.max_model_len:
            return InvalidRequest(f"{total} tokens requested, but the context is {self._info.max_model_len}")
        cache = self._cache
        if cache.pages_for(total) > cache.num_pages:
            return Capacity(f"{total} tokens need {cache.pages_for(total)} pages, this instance has {cache.num_pages}")
        num_states, num_state_slots = self._resources.states_wanted(sequence), self._resources.states.num_slots
        if num_states > num_state_slots:
            return Capacity(
                f"{choices} choices at once need {num_states} state rows, this instance has {num_state_slots} "
                "(cache.num_state_slots)"
            )
        if sequence.forks:
            num_slots = self._info.num_slots
            num_pages = cache.pages_for(sequence.prompt_len)
            num_pages += choices * cache.pages_for(sequence.prompt_len % cache.page_size)
            if choices > num_slots or num_pages > cache.num_pages:
                return Capacity(
                    f"{choices} choices at once need {choices} slots and {num_pages} pages, this instance has "
                    f"{num_slots} and {cache.num_pages}"
                )
        num_waiting = self._sequences.num_choices(SequenceState.WAITING)
        if num_waiting and num_waiting + choices > self._core.settings.config.max_waiting_requests:
            return Capacity(f"{num_waiting} requests are queued already (scheduler.max_waiting_requests)")
        return None


def _wrong_images(head: RequestHead) -> str:
    """Return why a prompt cannot have its images; empty if it can."""
    if head.encoders and len(head.encoders) != len(head.images):
        return f"{len(head.encoders)} E are named for {len(head.images)} images"
    return wrong_images(head.images, len(head.token_ids) // 4 - head.num_emitted)


def _rooms_of(message: RequestMessage) -> list[bytes]:
    forks = message.forks if isinstance(message, SampledRequest) else ()
    return [message.head.room, *(fork.room for fork in forks)]


def _wrong_ids(what: str, ids: ArrayLike, vocab_size: int) -> str:
    """Return why the model cannot take these ids, each of which indexes a tensor; empty if it can."""
    values = np.asarray(ids)
    for token in (int(values.min()), int(values.max())) if values.size else ():
        if not 0 <= token < vocab_size:
            return f"{what}: {token} is no token id of this model (0 to {vocab_size - 1})"
    return ""


def _wrong_logprobs(count: int | None) -> str:
    return "" if count is None or 0 <= count <= MAX_LOGPROBS else f"{count} logprobs; 0 to {MAX_LOGPROBS} are given"


def wrong_sampling(sampling: SamplingParams, vocab_size: int) -> str:
    """Return why these parameters would fail, or cost without bound, within a step; empty if they would not. The router
    has checked all of them before."""
    for name, value in msgspec.structs.asdict(sampling).items():
        if isinstance(value, float):
            if not math.isfinite(value):
                return f"{name} is not a finite number"
        elif isinstance(value, dict | tuple):
            if len(value) > MAX_SAMPLING_ENTRIES[name]:
                return f"{name} of {len(value)} entries; at most {MAX_SAMPLING_ENTRIES[name]} are accepted"
            if isinstance(value, dict) and not all(map(math.isfinite, value.values())):
                return f"{name} has a value that is not a finite number"
            if name == "bad_words":
                if not all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in value):
                    return f"a bad word has no tokens, or more than {MAX_BAD_WORD_TOKENS}"
                value = tuple(chain.from_iterable(value))
            if wrong := _wrong_ids(name, tuple(value), vocab_size):
                return wrong
    return _wrong_logprobs(sampling.logprobs) or _wrong_logprobs(sampling.prompt_logprobs)


class FailureReports:
    """Failures that P reports to the router: at once, and again with the next heartbeats.

    P has no token stream, so its failures go to the stats port. Messages there have no sequence numbers, and a
    connection that breaks loses those in flight. The router identifies failures by room, so a repeated report costs
    nothing. Without one D's deadline ends the request. The step thread calls `add`, the heartbeat thread `repeats`."""

    def __init__(self, send: Callable[[RequestFailed], None]) -> None:
        """Report by `send`, which runs on the thread that calls `add`."""
        self._send = send
        self._told: deque[tuple[RequestFailed, int]] = deque(maxlen=KEPT)
        """Failures to report again, and how often."""

    def add(self, failed: RequestFailed) -> None:
        self._send(failed)
        self._told.append((failed, REPEATS))

    def repeats(self) -> list[RequestFailed]:
        """Return the failures to report again with this heartbeat."""
        due = [self._told.popleft() for _ in range(len(self._told))]
        self._told.extend((failed, left - 1) for failed, left in due if left > 1)
        return [failed for failed, _ in due]
