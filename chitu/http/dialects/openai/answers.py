"""Bodies and server-sent events of `/v1/completions` and `/v1/chat/completions`, as bytes. Pure.

A stream's constant parts are formatted once; an event is then a join of a few bytes objects and one JSON string. Parts
of an answer that grow with it (choices, logprobs) are written between the fields of its struct as they are due.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import msgspec

from chitu.errors import ChituError
from chitu.http.answer.formats import COMMENT, DONE, ID_PREFIXES, FinishedChoice, UsageCount, _json
from chitu.http.answer.proof import Proof
from chitu.http.answer.replies import UsageReply
from chitu.http.answer.token_logprobs import PromptLogprobs
from chitu.http.messages.call_objects import CallDelta, MessageDelta
from chitu.net.http import error_body


class CompletionLogprobsReply(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprobReply(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobsReply = list[dict[str, PromptLogprobReply] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_token_ids`."""
    logprobs: CompletionLogprobsReply | None
    prompt_logprobs: PromptLogprobsReply | msgspec.UnsetType = msgspec.UNSET
    """Present with the request field of that name."""


class CompletionReply(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_proof`."""


class CalledFunctionReply(msgspec.Struct):
    name: str
    arguments: str


class ToolCallReply(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class ChatReplyMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """Null if the message has only reasoning or calls."""
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET


class TopLogprobReply(msgspec.Struct):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprobReply(msgspec.Struct):
    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TopLogprobReply]


class ChatLogprobsReply(msgspec.Struct):
    content: list[TokenLogprobReply]
    refusal: None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatReplyMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobsReply | None


class ChatReply(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsReply | msgspec.UnsetType = msgspec.UNSET


def _ids(token_ids: list[int] | None) -> bytes:
    return b"" if token_ids is None else b',"token_ids":' + _json(token_ids)


def _proof(proof: Proof | None) -> bytes:
    return b"" if proof is None else b',"chitu":' + _json(proof)


def _call(call: CallDelta) -> ToolCallReply:
    return ToolCallReply(call.id, "function", CalledFunctionReply(call.name, call.arguments))


def _call_part(call: CallDelta) -> dict[str, Any]:
    """Return a part of a call in a chunk. A later part has only its arguments."""
    if not call.id:
        return {"index": call.place, "function": {"arguments": call.arguments}}
    return {"index": call.place, **msgspec.structs.asdict(_call(call))}


def _parts(delta: MessageDelta) -> bytes:
    """Return the fields of a chunk's delta, without its braces."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [_call_part(call) for call in delta.calls]
    return _json(fields)[1:-1]


class _Format(abc.ABC):
    """Id, model and time of one response; the events that both routes share."""

    done = DONE
    sign_of_life = COMMENT
    object_name = ""
    chunk_name = ""
    id_prefix = ""
    repeats_prompt_logprobs = False
    """Whether each choice has its prompt's logprobs. The choices of a chat have one prompt, so the answer has them."""

    def __init__(self, response_id: str, created_s: int, model: str, include_usage: bool) -> None:
        self._head = {"id": self.id_prefix + response_id, "object": "", "created": created_s, "model": model}
        # With include_usage every chunk except the last has `usage: null` (OpenAI).
        self._close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._openings: dict[int, bytes] = {}

    @cached_property
    def _start(self) -> bytes:
        return b"data: " + _json({**self._head, "object": self.chunk_name})[:-1] + b',"choices":['

    @cached_property
    def _delta_end(self) -> bytes:
        return self._end(b"null", None, b"null")

    def _end(self, reason: bytes, token_ids: list[int] | None, logprobs: bytes) -> bytes:
        """Return the part of an event after its text."""
        return b',"logprobs":' + logprobs + b',"finish_reason":' + reason + _ids(token_ids) + b"}" + self._close

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        told = b"" if usage is None else b',"usage":' + _json(usage.reply())
        return self._start + b"]" + told + _proof(proof) + b"}\n\n"

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes:
        """Return an event of a choice with the usage added to it."""
        return event.removesuffix(self._close) + b'],"usage":' + _json(usage.reply()) + b"}\n\n"

    def error(self, error: ChituError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    @abc.abstractmethod
    def _choice(self, index: int, choice: FinishedChoice) -> CompletionChoice | ChatChoice:
        """Return one entry of `choices` of an unstreamed response, without logprobs: a null stands for them at its
        end."""

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        shared = None
        start = _json({**self._head, "object": self.object_name})[:-1] + b',"choices":['
        for i, choice in enumerate(choices):
            yield start + _json(self._choice(i, choice)).removesuffix(b"null}")
            yield from choice.logprobs
            if self.repeats_prompt_logprobs:
                yield from _prompt_logprobs(choice.prompt_logprobs)
            elif i == 0:
                shared = choice.prompt_logprobs
            start = b"},"
        yield b'}],"usage":' + _json(usage.reply())
        yield from _prompt_logprobs(shared)
        yield _proof(proof) + b"}"


def _prompt_logprobs(given: PromptLogprobs | None) -> Iterator[bytes]:
    if given is not None:
        yield b',"prompt_logprobs":'
        yield from given.pieces()


class CompletionFormat(_Format):
    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = ID_PREFIXES[0]
    repeats_prompt_logprobs = True

    def _text_of(self, index: int) -> bytes:
        head = self._openings.get(index)
        if head is None:
            head = self._openings[index] = self._start + b'{"index":%d,"text":' % index
        return head

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        return b""

    def delta(
        self, index: int, text: str | MessageDelta, token_ids: list[int] | None, logprobs: bytes | None = None
    ) -> bytes:
        if token_ids is None and logprobs is None:
            return (self._openings.get(index) or self._text_of(index)) + _json(text) + self._delta_end
        return self._text_of(index) + _json(text) + self._end(b"null", token_ids, logprobs or b"null")

    def last(
        self,
        index: int,
        text: str | MessageDelta,
        reason: str,
        token_ids: list[int] | None,
        logprobs: bytes = b"null",
        stop_text: str = "",
    ) -> bytes:
        return self._text_of(index) + _json(text) + self._end(_json(reason), token_ids, logprobs)

    def _choice(self, index: int, choice: FinishedChoice) -> CompletionChoice:
        assert isinstance(choice.text, str)
        token_ids = msgspec.UNSET if choice.token_ids is None else choice.token_ids
        reason: Any = choice.finish_reason
        return CompletionChoice(index=index, text=choice.text, finish_reason=reason, token_ids=token_ids, logprobs=None)


class ChatFormat(_Format):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = ID_PREFIXES[1]

    def _delta_of(self, index: int) -> bytes:
        head = self._openings.get(index)
        if head is None:
            head = self._openings[index] = self._start + b'{"index":%d,"delta":{' % index
        return head

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        """Return the chunk that names the role, sent before a choice's first text."""
        return self._delta_of(index) + b'"role":"assistant","content":""}' + self._delta_end

    def delta(
        self, index: int, text: str | MessageDelta, token_ids: list[int] | None, logprobs: bytes | None = None
    ) -> bytes:
        start = self._delta_of(index) + (b'"content":' + _json(text) if isinstance(text, str) else _parts(text)) + b"}"
        if token_ids is None and logprobs is None:
            return start + self._delta_end
        return start + self._end(b"null", token_ids, logprobs or b"null")

    def last(
        self,
        index: int,
        text: str | MessageDelta,
        reason: str,
        token_ids: list[int] | None,
        logprobs: bytes = b"null",
        stop_text: str = "",
    ) -> bytes:
        content = _parts(text if isinstance(text, MessageDelta) else MessageDelta(text))
        return self._delta_of(index) + content + b"}" + self._end(_json(reason), token_ids, logprobs)

    def _choice(self, index: int, choice: FinishedChoice) -> ChatChoice:
        text = choice.text if isinstance(choice.text, MessageDelta) else MessageDelta(choice.text)
        message = ChatReplyMessage(
            "assistant",
            text.content if text.content or isinstance(choice.text, str) else None,
            None,
            text.reasoning or msgspec.UNSET,
            [_call(call) for call in text.calls] or msgspec.UNSET,
        )
        token_ids = msgspec.UNSET if choice.token_ids is None else choice.token_ids
        reason: Any = choice.finish_reason
        return ChatChoice(index=index, message=message, finish_reason=reason, token_ids=token_ids, logprobs=None)
