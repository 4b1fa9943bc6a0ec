"""The running answers of the generation routes, and the tokens of their choices as text. Loop thread.

A choice's tokens become the events of a stream, or parts of a whole answer: incremental detokenising, stop strings, the
hidden stop token; a chat's text is also parsed into parts of a message.

Invariants: the deltas concatenate to the text that decoding all tokens at once gives, including multi-byte characters
and stop strings; `token_ids` are exactly the tokens up to and including the one that ended the choice; every token
taken from the generation is in one event or part, or held by the decoder until its text is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from chitu.errors import ChituError
from chitu.http.answer.dialect import Endpoint
from chitu.http.answer.formats import AnswerFormat, Delta, UsageCount
from chitu.http.answer.token_logprobs import ChoiceLogprobs, PromptAnswer
from chitu.http.ask.parsed import OutputOptions, ParsedRequest, Prompt
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.message_parser import MessageParser
from chitu.http.wire.events import EventNumbers
from chitu.protocol import TraceLevel
from chitu.router.generation import Generation
from chitu.tokenizer import Detokenizer


class Scanner(Protocol):
    @property
    def marks(self) -> Mapping[int, str]: ...

    @property
    def found(self) -> str: ...

    def push(self, delta: str, /) -> tuple[str, bool]: ...

    def finish(self) -> str: ...


class ChoiceDecoder:
    """Decoder of one choice. Feed tokens in order; it accepts no more once `finish_reason` is set."""

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_num_parsed",
        "_parser",
        "_scanner",
        "_special_stops",
        "_stop_ids",
        "_unshown",
        "finish_reason",
        "num_reasoning_tokens",
        "num_tokens",
        "stop_text",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: Scanner | None,
        options: OutputOptions,
        stop_ids: frozenset[int],
        parser: MessageParser | None = None,
    ) -> None:
        """`stop_ids`: eos and the request's stop ids; the one that ends the choice is not part of its text. `parser`:
        parses the text that stop strings leave; None if all of it is content."""
        self._parser = parser
        self._unshown: list[int] = []
        """Tokens whose text the parser holds."""
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._include_stop = options.include_stop
        self._stop_ids = stop_ids
        self._special_stops = options.stops_by_id if options.special_stops else None
        """Stop strings at whose token D stops."""
        self._held: list[int] = []
        self.num_tokens = 0
        self._num_parsed = 0
        self.num_reasoning_tokens = 0
        """Tokens up to the end of the reasoning, with its marks; 0 if reasoning is not separated from content."""
        self.finish_reason: str | None = None
        self.stop_text = ""
        """The stop string that ended the choice; empty if none did."""

    def feed(self, tokens: list[int], reason: str | None) -> list[Delta]:
        """Return the deltas of these tokens, one per token that shows text. `reason` (from D), a stop string, or the
        last permitted call ends the choice: then `finish_reason` is set, and there is a last delta, which may be
        empty."""
        deltas: list[Delta] = []
        held, push, scanner = self._held, self._detokenizer.push, self._scanner
        hidden = reason == "stop" and bool(tokens) and self._is_hidden(tokens[-1])
        if hidden and self._special_stops is not None:
            self.stop_text = self._special_stops.get(tokens[-1], "")
        before = self.num_tokens
        self.num_tokens += len(tokens)
        for place, token in enumerate(tokens[:-1] if hidden else tokens, 1):
            held.append(token)
            text = push((token,))
            if scanner is not None and (text or token in scanner.marks):
                text, hit = scanner.push(text + scanner.marks.get(token, ""))
                if hit:
                    self.num_tokens = before + place
                    self.finish_reason, self.stop_text = "stop", scanner.found
                    deltas.append(Delta(text, held))
                    self._held = []
                    break
            if text:
                deltas.append(Delta(text, held))
                held = self._held = []
        else:
            if hidden:
                held.append(tokens[-1])
            if reason is not None:
                self._end(deltas, reason)
        return deltas if self._parser is None else self._parsed(self._parser, deltas, hidden)

    def whole(self, tokens: list[int], reason: str) -> Delta:
        """Decode all tokens of a finished choice at once. Return its text and the tokens up to its end."""
        if self._scanner is not None or (self._parser is not None and self._parser.may_reason):
            deltas = self.feed(tokens, reason)
            return Delta(joined([d.text for d in deltas]), [token for d in deltas for token in d.token_ids])
        self.num_tokens += len(tokens)
        self.finish_reason = reason
        hidden = reason == "stop" and bool(tokens) and self._is_hidden(tokens[-1])
        shown = tokens[:-1] if hidden else tokens
        whole = Delta(self._detokenizer.push(shown) + self._detokenizer.finish(), tokens)
        if self._parser is None:
            return whole
        return Delta(self._parsed(self._parser, [whole], hidden)[-1].text, tokens)

    def _parsed(self, parser: MessageParser, found: list[Delta], has_hidden: bool) -> list[Delta]:
        """Return the deltas after the parser. Tokens that show nothing join the next delta that shows something.
        `has_hidden`: the last of all tokens is not part of the text."""
        deltas: list[Delta] = []
        for place, delta in enumerate(found, 1):
            text, token_ids = delta.text, delta.token_ids
            assert isinstance(text, str)
            was_reasoning = parser.is_reasoning
            shown = parser.push(text)
            self._unshown += token_ids
            self._num_parsed += len(token_ids)
            if was_reasoning or parser.is_reasoning:
                self.num_reasoning_tokens = self._num_parsed - (has_hidden and place == len(found))
            if shown:
                deltas.append(Delta(shown, self._unshown))
                self._unshown = []
            if parser.is_complete:
                self.num_tokens -= len(self._held) + sum([len(later.token_ids) for later in found[place:]])
                self._held = []
                self.finish_reason = "stop"
                break
        if self.finish_reason is not None:
            newest = deltas.pop() if deltas and not self._unshown else Delta("", [])  # as in `_end`
            rest = parser.finish(self.finish_reason == "stop")
            deltas.append(Delta(joined([newest.text, rest]), newest.token_ids + self._unshown))
            if self.finish_reason == "stop" and parser.has_calls:
                self.finish_reason = "tool_calls"
        return deltas

    def _is_hidden(self, last_token: int) -> bool:
        return last_token in self._stop_ids and not self._include_stop

    def _end(self, deltas: list[Delta], reason: str) -> None:
        self.finish_reason = reason
        text = self._detokenizer.finish()
        if self._scanner is not None:
            text, hit = self._scanner.push(text) if text else ("", False)
            if hit:
                self.finish_reason, self.stop_text = "stop", self._scanner.found
            else:
                text += self._scanner.finish()
        if deltas and not self._held:
            # Merge the end into the last token's delta: one event fewer. Only into that of the very last token, so that
            # the number of events does not depend on which tokens came together (Last-Event-ID).
            newest = deltas.pop()
            assert isinstance(newest.text, str)
            deltas.append(Delta(newest.text + text, newest.token_ids))
        else:
            deltas.append(Delta(text, self._held))
        self._held = []


class Wakeup:
    """An event for one waiter. It costs nothing while it is set already."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return after the next `set`, or at once after a `set` that had no waiter. Clears the event."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_set = False


class Choice(msgspec.Struct, eq=False):
    generation: Generation
    decoder: ChoiceDecoder
    prompt: Prompt
    logprobs: ChoiceLogprobs | None = None
    """Logprobs of the choice; None if they were not requested."""
    of_prompt: PromptAnswer | None = None
    """Logprobs of the prompt, which its choices share; None if they were not requested."""
    texts: list[str | MessageDelta] = []
    """Text of a whole answer, as far as it is decoded, in parts."""
    token_ids: list[int] = []
    """Tokens of these parts."""
    num_shown: int = 0
    """Tokens that its events have reported as usage, if they do so."""
    is_open: bool = False
    """Whether its first event was written."""


class Origin(NamedTuple):
    """What a request can be rebuilt from, if it may outlive the router."""

    request_id: str
    endpoint: Endpoint
    body: bytearray
    parsed: ParsedRequest
    created_s: int


class RunningAnswer(msgspec.Struct, eq=False):
    tenant: str
    arrived_s: float
    """Time when the request's head was complete, on the router's clock."""
    received_s: float = 0.0
    """Time when the request's body was complete, on the router's clock."""
    choices: list[Choice] = []
    """Choices that were sent to instances."""
    wakeup: Wakeup = msgspec.field(default_factory=Wakeup)
    is_aborted: bool = False
    trace: TraceLevel = ""
    origin: Origin | None = None
    numbers: EventNumbers | None = None
    """Event numbers of its stream, if a client may resume it."""
    shutdown_error: asyncio.Future[ChituError] | None = None
    """Set once the answer has stopped; its result is the error that the client gets in the end."""


class RunningAnswers:
    """The running answers by request id, which several may share. `cancel` ends a generation; idempotent."""

    def __init__(self, cancel: Callable[[Generation], None], id_prefixes: Iterable[str] = ()) -> None:
        """`id_prefixes`: how ids of answers begin."""
        self._cancel = cancel
        self._id_prefixes = tuple(id_prefixes)
        self._answers: dict[str, list[RunningAnswer]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def all(self) -> list[RunningAnswer]:
        return [answer for known in self._answers.values() for answer in known]

    def bare_names(self, name: str) -> set[str]:
        """Return the request ids that `name` may mean, as the id of a request or of an answer."""
        return {name, *[name.removeprefix(prefix) for prefix in self._id_prefixes]}

    def named(self, name: str) -> list[RunningAnswer]:
        """Return the answers with this id of a request or of an answer; the newest last."""
        return [answer for each in self.bare_names(name) for answer in self._answers.get(each, ())]

    def add(self, request_id: str, answer: RunningAnswer) -> None:
        self._answers.setdefault(request_id, []).append(answer)

    def remove(self, request_id: str, answer: RunningAnswer) -> None:
        """Remove an answer that is over, and cancel what of it still runs."""
        known = self._answers[request_id]
        known.remove(answer)
        if not known:
            del self._answers[request_id]
        for choice in answer.choices:
            self._cancel(choice.generation)

    def abort(self, name: str, tenant: str) -> int:
        """End the tenant's requests with this request id or answer id, as if their client were gone; the client gets an
        error. Return their number: 0 if they have ended already or are unknown. Idempotent."""
        found = [answer for answer in self.named(name) if answer.tenant == tenant and not answer.is_aborted]
        for answer in found:
            answer.is_aborted = True
            self.end(answer)
        return len(found)

    def end(self, answer: RunningAnswer) -> None:
        """Cancel the running generations of an answer without a reader."""
        for choice in answer.choices:
            self._cancel(choice.generation)
        answer.wakeup.set()


def append_events(
    events: list[bytes], index: int, choice: Choice, form: AnswerFormat, options: OutputOptions, most: int
) -> bool:
    """Append the events that are due for the next `most` tokens of the choice with this index. Return whether its last
    event is among them."""
    generation, decoder = choice.generation, choice.decoder
    reason = generation.finish.reason if generation.finish is not None and len(generation.tokens) <= most else None
    if not generation.tokens and reason is None:
        return False
    logprobs = choice.logprobs
    tokens = generation.take(most)
    if logprobs is not None:
        logprobs.push(tokens, generation.take_logprobs(most))
    deltas = decoder.feed(tokens, reason)
    if not deltas:
        return False
    first = len(events)
    sizes = [len(delta.token_ids) for delta in deltas] if options.continuous_usage else []
    if not choice.is_open:
        choice.is_open = True
        events.append(form.opening(index, choice.prompt.num_tokens, generation.cached_tokens))
        if choice.prompt.echo:
            echoed = b"null" if logprobs is None else b"".join(logprobs.pieces(choice.of_prompt))
            events.append(form.delta(index, Delta(choice.prompt.echo, [], echoed)))
    if logprobs is not None:
        for delta in deltas:
            delta.logprobs = logprobs.of(len(delta.token_ids))
    ending = deltas.pop() if decoder.finish_reason is not None else None
    for delta in deltas:
        events.append(form.delta(index, delta))
    if ending is not None:
        ending.reason, ending.stop_text = decoder.finish_reason or "", decoder.stop_text
        events.append(form.last(index, ending))
    if sizes:
        # Opening events may precede the deltas.
        for at, size in enumerate([0] * (len(events) - first - len(sizes)) + sizes, first):
            choice.num_shown += size
            if events[at]:
                reasoning = min(choice.num_shown, decoder.num_reasoning_tokens)
                usage = UsageCount(
                    choice.prompt.num_tokens,
                    choice.num_shown,
                    generation.cached_tokens,
                    reasoning,
                    generation.drafts,
                    generation.counts_prediction,
                )
                events[at] = form.with_usage(events[at], usage)
    return ending is not None


def read_tokens(choice: Choice, most: int | None = None) -> bool:
    """Decode what came for a choice of a whole answer, `most` tokens of it or all. Return whether it is complete."""
    generation, decoder, logprobs = choice.generation, choice.decoder, choice.logprobs
    is_all = most is None or len(generation.tokens) <= most
    reason = generation.finish.reason if generation.finish is not None and is_all else None
    tokens = generation.take(most)
    if logprobs is not None:
        logprobs.push(tokens, generation.take_logprobs(most))
    if reason is not None and not decoder.num_tokens:
        deltas = [decoder.whole(tokens, reason)]
    elif tokens or reason is not None:
        deltas = decoder.feed(tokens, reason)
    else:
        return False
    for delta in deltas:
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if logprobs is not None:
            logprobs.show(len(delta.token_ids))
    return decoder.finish_reason is not None
