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
from chitu.http.answer.formats import COMMENT, DONE, AnswerHead, Delta, FinishedChoice, UsageCount, UsageReply, to_json
from chitu.http.answer.proof import Proof
from chitu.http.answer.token_logprobs import PromptLogprobs
from chitu.http.ask.parsed import OutputOptions
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


def _proof(proof: Proof | None) -> bytes:
    return b"" if proof is None else b',"chitu":' + to_json(proof)


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
    return to_json(fields)[1:-1]


class _Format(abc.ABC):
    """Id, model and time of one response; the events that both routes share."""

    done = DONE
    sign_of_life = COMMENT
    object_name = ""
    chunk_name = ""
    repeats_prompt_logprobs = False
    """Whether each choice has its prompt's logprobs. The choices of a chat have one prompt, so the answer has them."""

    def __init__(self, head: AnswerHead, options: OutputOptions) -> None:
        self._head = {"id": head.id, "object": "", "created": head.created_s, "model": head.model}
        # With include_usage every chunk except the last has `usage: null` (OpenAI).
        self._close = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._openings: dict[int, bytes] = {}
        self._has_ids = options.return_token_ids
        self._is_plain = not self._has_ids and options.logprobs is None

    @cached_property
    def _start(self) -> bytes:
        return b"data: " + to_json({**self._head, "object": self.chunk_name})[:-1] + b',"choices":['

    @cached_property
    def _delta_end(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}' + self._close

    def _end(self, delta: Delta) -> bytes:
        """Return the part of an event after its text."""
        reason = to_json(delta.reason) if delta.reason else b"null"
        ids = b',"token_ids":' + to_json(delta.token_ids) if self._has_ids else b""
        return b',"logprobs":' + delta.logprobs + b',"finish_reason":' + reason + ids + b"}" + self._close

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        told = b"" if usage is None else b',"usage":' + to_json(usage.reply())
        return self._start + b"]" + told + _proof(proof) + b"}\n\n"

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes:
        """Return an event of a choice with the usage added to it."""
        return event.removesuffix(self._close) + b'],"usage":' + to_json(usage.reply()) + b"}\n\n"

    def error(self, error: ChituError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    @abc.abstractmethod
    def _choice(self, index: int, choice: FinishedChoice) -> CompletionChoice | ChatChoice:
        """Return one entry of `choices` of an unstreamed response, without logprobs: a null stands for them at its
        end."""

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        shared = None
        start = to_json({**self._head, "object": self.object_name})[:-1] + b',"choices":['
        for i, choice in enumerate(choices):
            yield start + to_json(self._choice(i, choice)).removesuffix(b"null}")
            yield from choice.logprobs
            if self.repeats_prompt_logprobs:
                yield from _prompt_logprobs(choice.prompt_logprobs)
            elif i == 0:
                shared = choice.prompt_logprobs
            start = b"},"
        yield b'}],"usage":' + to_json(usage.reply())
        yield from _prompt_logprobs(shared)
        yield _proof(proof) + b"}"


def _prompt_logprobs(given: PromptLogprobs | None) -> Iterator[bytes]:
    if given is not None:
        yield b',"prompt_logprobs":'
        yield from given.pieces()


class CompletionFormat(_Format):
    object_name = "text_completion"
    chunk_name = "text_completion"
    repeats_prompt_logprobs = True

    def _text_of(self, index: int) -> bytes:
        head = self._openings.get(index)
        if head is None:
            head = self._openings[index] = self._start + b'{"index":%d,"text":' % index
        return head

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        start = (self._openings.get(index) or self._text_of(index)) + to_json(delta.text)
        return start + (self._delta_end if self._is_plain else self._end(delta))

    def last(self, index: int, delta: Delta) -> bytes:
        return self._text_of(index) + to_json(delta.text) + self._end(delta)

    def _choice(self, index: int, choice: FinishedChoice) -> CompletionChoice:
        assert isinstance(choice.text, str)
        token_ids = msgspec.UNSET if choice.token_ids is None else choice.token_ids
        reason: Any = choice.finish_reason
        return CompletionChoice(index=index, text=choice.text, finish_reason=reason, token_ids=token_ids, logprobs=None)


class ChatFormat(_Format):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _delta_of(self, index: int) -> bytes:
        head = self._openings.get(index)
        if head is None:
            head = self._openings[index] = self._start + b'{"index":%d,"delta":{' % index
        return head

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        """Return the chunk that names the role, sent before a choice's first text."""
        return self._delta_of(index) + b'"role":"assistant","content":""}' + self._delta_end

    def delta(self, index: int, delta: Delta) -> bytes:
        text = delta.text
        parts = b'"content":' + to_json(text) if isinstance(text, str) else _parts(text)
        return self._delta_of(index) + parts + b"}" + (self._delta_end if self._is_plain else self._end(delta))

    def last(self, index: int, delta: Delta) -> bytes:
        content = _parts(delta.text if isinstance(delta.text, MessageDelta) else MessageDelta(delta.text))
        return self._delta_of(index) + content + b"}" + self._end(delta)

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
