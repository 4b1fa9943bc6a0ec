"""Bodies and server-sent events of the generation routes, as bytes. Pure.

`CompletionFormat`, `ChatFormat` and `ResponsesFormat` are `AnswerFormat`s. A stream's constant parts are formatted
once; an event is then a join of a few bytes objects and one JSON string. A message of `/v1/responses` is a list of
items (reasoning, message, function calls), each opened, filled and closed by events of its own; its last event is the
whole answer. `EventNumbers` let a client resume after any event.

Answers of cold routes whose size grows with the cluster are written in pieces (`in_pieces`), between which the loop is
free.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
from fastapi.responses import Response, StreamingResponse

from chitu.errors import ChituError, InvalidRequest
from chitu.http.custom_tools import input_of
from chitu.http.messages.call_objects import CallDelta, MessageDelta
from chitu.http.proof import Proof
from chitu.http.replies import (
    CachedTokensReply,
    CalledFunctionReply,
    ChatChoice,
    ChatReplyMessage,
    CompletionChoice,
    IncompleteDetails,
    ReasoningTokensReply,
    ResponsesError,
    ResponsesReply,
    ResponsesUsageReply,
    ToolCallReply,
    UsageReply,
)
from chitu.http.token_logprobs import PromptLogprobs
from chitu.http.translation import encoded_reasoning
from chitu.net.http import Scope, error_body, header, query_value

WRITE_BYTES = 64 << 10
"""Pieces are joined until they have as many bytes. A shorter answer is written at once, with its length."""
BLANK = b"\n\n"
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n"
"""A line that readers of server-sent events skip."""
ID_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_")
"""Prefixes of a response id; the request id follows."""
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}),
    "reasoning": ("reasoning_text", {}),
}
"""Kinds of items that have text parts -> the part's type and its further fields."""
_ARGUMENTS = {
    "function_call": ("function_call_arguments", "fc", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "ctc", "input"),
}
"""Types of calls -> the name of their events, the prefix of their ids, and the field with their text."""
_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}}


async def joined(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of the pieces, each of which is taken in a turn of the loop of its own."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= WRITE_BYTES:
            yield bytes(held)
            held.clear()
        await asyncio.sleep(0)
    yield bytes(held)


async def in_pieces(pieces: Iterator[bytes], headers: Mapping[str, str]) -> Response:
    """Return the answer. Its pieces behind the first `WRITE_BYTES` are taken while it is written."""
    parts = joined(pieces)
    first = await anext(parts)
    if len(first) < WRITE_BYTES:
        return Response(first, headers=headers)

    async def all_parts() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    return StreamingResponse(all_parts(), headers=headers)


class EventNumbers:
    """Writes `id:` (1, 2, ...) ahead of each event, and drops the first `behind` events."""

    def __init__(self, behind: int = 0) -> None:
        self._behind = behind
        self._count = 0

    def apply(self, events: bytes) -> bytes:
        """Return the events with their numbers. `events` are whole; their JSON has no blank line."""
        numbered: list[bytes] = []
        for event in events.split(BLANK):
            if event:
                self._count += 1
                if self._count > self._behind:
                    numbered.append(b"id: %d\n%b\n\n" % (self._count, event))
        return b"".join(numbered)


def events_read(scope: Scope) -> int:
    """Return how many events the client has: the query `starting_after`, else the header Last-Event-ID. Raise
    InvalidRequest if it is not a number."""
    name, given = "starting_after", query_value(scope, "starting_after")
    if given is None:
        last = header(scope, b"last-event-id")
        if not last:
            return 0
        name, given = "Last-Event-ID", last.decode("latin-1")
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise InvalidRequest(f"{name}: {given[:40]!r} is not an event number", name)
    return int(given)


_json = msgspec.json.Encoder().encode


class UsageCount(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were cached."""
    reasoning_tokens: int = 0
    """Completion tokens that are reasoning."""

    def reply(self) -> UsageReply:
        cached, reasoning = CachedTokensReply(self.cached_tokens), ReasoningTokensReply(self.reasoning_tokens)
        total_tokens = self.prompt_tokens + self.completion_tokens
        return UsageReply(self.prompt_tokens, self.completion_tokens, total_tokens, cached, reasoning)


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
    """Bodies of one response: `CompletionFormat`, `ChatFormat`, `ResponsesFormat` or `MessagesFormat`. `logprobs` are
    JSON."""

    @property
    def done(self) -> bytes:
        """Bytes after the last event."""

    @property
    def sign_of_life(self) -> bytes:
        """What a stream gets in silence: a comment, without the blank line that ends an event, or an event."""

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        """Return the first event of a choice. The last two arguments are tokens of its prompt."""

    def delta(
        self, index: int, text: str | MessageDelta, token_ids: list[int] | None, logprobs: bytes | None = None
    ) -> bytes: ...

    def last(
        self,
        index: int,
        text: str | MessageDelta,
        reason: str,
        token_ids: list[int] | None,
        logprobs: bytes = b"null",
        stop_text: str = "",
    ) -> bytes: ...

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        """Return the event that follows the last one of the choices. At least one argument is not None."""

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes: ...

    def error(self, error: ChituError) -> bytes:
        """Return the last event of a stream that has begun."""


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


class ItemsFormat(abc.ABC):
    """A message as a list of items, each opened, filled and closed by events of its own, in the order in which the
    model writes them: what `/v1/responses` and `/v1/messages` share."""

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

    def delta(
        self, index: int, text: str | MessageDelta, token_ids: list[int] | None, logprobs: bytes | None = None
    ) -> bytes:
        return self._take(text)

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes:
        return event

    def _take(self, delta: str | MessageDelta) -> bytes:
        """Return a part of the message as events."""
        if isinstance(delta, str):
            return self._add("message", delta) if delta else b""
        events = b""
        if delta.reasoning:
            events += self._add("reasoning", delta.reasoning)
        if delta.content:
            events += self._add("message", delta.content)
        for call in delta.calls:
            events += self._add(str(call.place), self._text_of(call), call)
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


class ResponsesFormat(ItemsFormat):
    def __init__(
        self,
        response_id: str,
        created_s: int,
        model: str,
        echo: dict[str, Any],
        custom_tools: Collection[str] = (),
        encodes_reasoning: bool = False,
    ) -> None:
        """`echo`: see `echo_of`. The last two arguments: see `ParsedRequest`."""
        super().__init__()
        self._custom_tools = custom_tools
        self._encodes_reasoning = encodes_reasoning
        self._id = response_id
        self._whole = ResponsesReply(
            id=ID_PREFIXES[2] + response_id,
            object="response",
            created_at=created_s,
            model=model,
            status="in_progress",
            error=None,
            incomplete_details=None,
            **echo,
            output=[],
            usage=None,
        )
        self._num_events = 0

    # ----------------------------------------------------------------------------------------------------- not streamed

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        (choice,) = choices
        self._take(choice.text)
        self._add_proof(proof)
        yield _json(self._ended(choice.finish_reason, usage))

    # --------------------------------------------------------------------------------------------------------- streamed

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def last(
        self,
        index: int,
        text: str | MessageDelta,
        reason: str,
        token_ids: list[int] | None,
        logprobs: bytes = b"null",
        stop_text: str = "",
    ) -> bytes:
        """Return the events of the last text. The answer itself follows with its usage."""
        self._reason = reason
        return self._take(text)

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        assert usage is not None  # this route's answers always have it
        self._add_proof(proof)
        closing = self._close(_status(self._reason))
        whole = self._ended(self._reason, usage)
        return closing + self._lifecycle(f"response.{whole.status}")

    def error(self, error: ChituError) -> bytes:
        """Return the last events of an answer that has begun."""
        closing = self._close("incomplete")
        whole = self._whole
        whole.status, whole.error, whole.output = "failed", ResponsesError(error.code, error.message), self._output
        return closing + self._lifecycle("response.failed")

    # -------------------------------------------------------------------------------------------------------- the items

    def _add_proof(self, proof: Proof | None) -> None:
        if proof is not None:
            self._whole.chitu = proof

    def _ended(self, reason: str, usage: UsageCount) -> ResponsesReply:
        status, whole = _status(reason), self._whole
        self._close(status)
        whole.status, whole.output = status, self._output
        if reason == "length":
            whole.incomplete_details = IncompleteDetails("max_output_tokens")
        told = usage.reply()
        whole.usage = ResponsesUsageReply(
            told.prompt_tokens,
            told.prompt_tokens_details,
            told.completion_tokens,
            told.completion_tokens_details,
            told.total_tokens,
        )
        return whole

    def _text_of(self, call: CallDelta) -> str:
        # A call comes whole, so its text can be read.
        return input_of(call.arguments) if call.name in self._custom_tools else call.arguments

    def _filled(self, kind: str, text: str) -> bytes:
        name = _TEXTS[kind][0] if kind in _TEXTS else _ARGUMENTS[self._output[-1]["type"]][0]
        return self._event(f"response.{name}.delta", **self._place(kind), delta=text, **_LOGPROBS.get(kind, {}))

    def _open(self, kind: str, call: CallDelta | None) -> bytes:
        number = len(self._output)
        item: dict[str, Any]
        if call is not None:
            kind_of_call = "custom_tool_call" if call.name in self._custom_tools else "function_call"
            _, prefix, field = _ARGUMENTS[kind_of_call]
            item = {"id": f"{prefix}_{self._id}_{number}", "type": kind_of_call, "call_id": call.id, "name": call.name}
            item[field] = ""
        elif kind == "reasoning":
            item = {"id": f"rs_{self._id}_{number}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{self._id}_{number}", "type": "message", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        opened = self._event("response.output_item.added", output_index=number, item=item)
        if call is not None:
            return opened
        return opened + self._event("response.content_part.added", **self._place(kind), part=_part(kind, ""))

    def _close(self, status: str) -> bytes:
        if not self._kind:
            return b""
        item, kind, text = self._output[-1], self._kind, "".join(self._text)
        place = self._place(kind)
        self._kind = ""
        item["status"] = status
        if item["type"] in _ARGUMENTS:
            name, _, field = _ARGUMENTS[item["type"]]
            item[field] = text
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            events = self._event(f"response.{name}.done", **place, **named, **{field: text})
        else:
            if kind == "reasoning" and self._encodes_reasoning:
                item["encrypted_content"] = encoded_reasoning(text)
            item["content"] = [_part(kind, text)]
            events = self._event(f"response.{_TEXTS[kind][0]}.done", **place, text=text, **_LOGPROBS.get(kind, {}))
            events += self._event("response.content_part.done", **place, part=item["content"][0])
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, kind: str) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return {**place, "content_index": 0} if kind in _TEXTS else place

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, response=self._whole)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _json(event) + b"\n\n"


def _part(kind: str, text: str) -> dict[str, Any]:
    name, more = _TEXTS[kind]
    return {"type": name, "text": text, **more}


def _status(reason: str) -> Literal["incomplete", "completed"]:
    return "incomplete" if reason == "length" else "completed"
