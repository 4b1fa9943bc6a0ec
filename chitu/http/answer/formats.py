"""What the format of an answer is, and what formats of several APIs share: an answer's head, its usage, a message as a
list of items. Pure.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

from chitu.errors import ChituError
from chitu.http.answer.proof import Proof
from chitu.http.answer.token_logprobs import PromptLogprobs
from chitu.http.messages.call_objects import CallDelta, MessageDelta
from chitu.protocol.account import OF_PREDICTION, DraftCounts

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n"
"""A line that readers of server-sent events skip."""
to_json = msgspec.json.Encoder().encode


class AnswerHead(NamedTuple):
    """What an answer says of itself."""

    request_id: str
    created_s: int
    model: str
    id_prefix: str = ""

    @property
    def id(self) -> str:
        return self.id_prefix + self.request_id


class CachedTokensReply(msgspec.Struct):
    cached_tokens: int


class OutputTokensReply(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens drafted from the request's `prediction` that are in the answer. Present, as is the next one, if the
    request has one and D reported the end of each choice."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Those that are not. They are no completion tokens."""


class DraftsReply(msgspec.Struct):
    drafted: int
    accepted: int
    """Tokens of these that are in the answer."""


class UsageReply(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensReply
    completion_tokens_details: OutputTokensReply
    speculation: dict[str, DraftsReply] | msgspec.UnsetType = msgspec.UNSET
    """By source of the drafts; present if any token was drafted."""


class UsageCount(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were cached."""
    reasoning_tokens: int = 0
    """Completion tokens that are reasoning."""
    drafts: DraftCounts = ()
    counts_prediction: bool = False
    """Whether the request has a prediction, and all its drafts are known."""

    @property
    def speculation(self) -> dict[str, DraftsReply] | msgspec.UnsetType:
        """What was drafted, by source."""
        found = {source: DraftsReply(drafted, accepted) for source, drafted, accepted in self.drafts}
        return found or msgspec.UNSET

    def reply(self) -> UsageReply:
        total_tokens, speculation = self.prompt_tokens + self.completion_tokens, self.speculation
        cached, output = CachedTokensReply(self.cached_tokens), OutputTokensReply(self.reasoning_tokens)
        if self.counts_prediction:
            found = speculation.get(OF_PREDICTION) if speculation else None
            output.accepted_prediction_tokens = found.accepted if found else 0
            output.rejected_prediction_tokens = found.drafted - found.accepted if found else 0
        return UsageReply(self.prompt_tokens, self.completion_tokens, total_tokens, cached, output, speculation)


class Delta(msgspec.Struct):
    """Part of a choice's text, and the tokens that show it."""

    text: str | MessageDelta
    """Plain text is content."""
    token_ids: list[int]
    logprobs: bytes = b"null"
    """JSON."""
    reason: str = ""
    """Why the choice ends with it; empty if it does not."""
    stop_text: str = ""
    """The stop string that ended the choice; empty if none did."""


class FinishedChoice(msgspec.Struct, frozen=True):
    text: str | MessageDelta
    finish_reason: str
    token_ids: list[int] | None
    logprobs: Iterable[bytes] = (b"null",)
    """Logprobs as JSON, in pieces."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of its prompt; None if they were not requested."""
    stop_text: str = ""
    """The stop string that ended it; empty if none did."""
    pooled: bytes = b""
    """Pooled states of its prompt, if the request asks for them."""


class WholeFormat(Protocol):
    """Body of a response that is not streamed."""

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        """Yield the whole answer in pieces, at least one for each choice, which is taken when its pieces are due."""


class AnswerFormat(WholeFormat, Protocol):
    """Bodies and events of one answer."""

    @property
    def done(self) -> bytes:
        """Bytes after the last event."""

    @property
    def sign_of_life(self) -> bytes:
        """What a stream gets in silence: a comment, without the blank line that ends an event, or an event."""

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        """Return the first event of a choice. The last two arguments are tokens of its prompt."""

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def last(self, index: int, delta: Delta) -> bytes: ...

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        """Return the event that follows the last one of the choices. At least one argument is not None."""

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes: ...

    def error(self, error: ChituError) -> bytes:
        """Return the last event of a stream that has begun."""


class ItemsFormat(abc.ABC):
    """A message as a list of items, each opened, filled and closed by events of its own, in the order in which the
    model writes them."""

    done = b""
    """Bytes after the last event: none."""
    sign_of_life = COMMENT

    def __init__(self) -> None:
        self._output: list[dict[str, Any]] = []
        """Items so far; the last one is open unless `_kind` is empty."""
        self._text: list[str] = []
        """Text of the open item."""
        self._kind = ""
        """Kind of the open item: `message`, `reasoning`, or the index of a call."""
        self._reason = ""
        """Why the text ended, once it has."""

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._take(delta.text)

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes:
        return event

    def _take(self, delta: str | MessageDelta) -> bytes:
        """Return a part of the message as events."""
        if isinstance(delta, str):
            return self._add("message", delta) if delta else b""
        events = b""
        for piece in delta.pieces():
            if isinstance(piece, CallDelta):
                events += self._add(str(piece.place), self._text_of(piece), piece)
            elif isinstance(piece, MessageDelta):
                events += self._add("reasoning", piece.reasoning) if piece.reasoning else b""
            elif piece:
                events += self._add("message", piece)
        return events

    def _text_of(self, call: CallDelta) -> str:
        return call.arguments

    def _add(self, kind: str, text: str, call: CallDelta | None = None) -> bytes:
        events = b""
        if kind != self._kind:
            events = self._close("completed")
            self._kind, self._text = kind, []
            events += self._open(kind, call)
        if not text:
            return events
        self._text.append(text)
        return events + self._filled(kind, text)

    @abc.abstractmethod
    def _open(self, kind: str, call: CallDelta | None) -> bytes:
        """Append an item to `_output`. `call`: the first part of a call; None for the other kinds."""

    @abc.abstractmethod
    def _filled(self, kind: str, text: str) -> bytes:
        """Return the event of a part of the open item's text."""

    @abc.abstractmethod
    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one."""
