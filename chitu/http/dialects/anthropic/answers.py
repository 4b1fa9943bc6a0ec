"""Bodies and server-sent events of `/v1/messages`, as bytes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from chitu.errors import ChituError
from chitu.http.answer.formats import (
    COMMENT,
    AnswerHead,
    Delta,
    DraftsReply,
    FinishedChoice,
    ItemsFormat,
    UsageCount,
    to_json,
)
from chitu.http.answer.proof import Proof
from chitu.http.dialects.anthropic.errors import error_json
from chitu.http.messages.call_objects import CallDelta

SIGNATURE = "chitu"
"""`signature` of every thinking block. Nothing is signed: what a client sends back is taken as it is. It is not empty,
because clients take a block without a signature for one of another API."""
_DELTAS = {"message": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
_CALL_DELTA = ("input_json_delta", "partial_json")
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_-]")
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokensReply(msgspec.Struct):
    thinking_tokens: int


class MessagesUsageReply(msgspec.Struct):
    input_tokens: int
    """Prompt tokens that were not cached."""
    cache_creation_input_tokens: int
    """Always 0: nothing extra is paid for what the cache keeps."""
    cache_read_input_tokens: int
    """Prompt tokens that were cached."""
    output_tokens: int
    output_tokens_details: ThinkingTokensReply
    speculation: dict[str, DraftsReply] | msgspec.UnsetType = msgspec.UNSET
    """As of a chat."""


class MessagesReply(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types thinking, text and tool_use."""
    stop_reason: StopReason | None
    """Null only in the first event."""
    stop_sequence: str | None
    usage: MessagesUsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET


class CountTokensReply(msgspec.Struct):
    input_tokens: int


class MessagesFormat(ItemsFormat):
    def __init__(self, head: AnswerHead, fills_context: bool) -> None:
        """`fills_context`: see `ParsedRequest`."""
        super().__init__()
        self._whole = MessagesReply(
            id=head.id,
            type="message",
            role="assistant",
            model=head.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(UsageCount(0, 0, 0)),
        )
        self._at_length: StopReason = "model_context_window_exceeded" if fills_context else "max_tokens"
        self._is_open = False

    @property
    def sign_of_life(self) -> bytes:  # type: ignore[override]
        return _PING if self._is_open else COMMENT

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        (choice,) = choices
        self._take(choice.text)
        self._close("completed")
        whole = self._whole
        self._end(choice.finish_reason, choice.stop_text)
        whole.content, whole.usage = self._output, _usage(usage)
        if proof is not None:
            whole.chitu = proof
        yield to_json(whole)

    # --------------------------------------------------------------------------------------------------------- streamed

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        self._is_open = True
        self._whole.usage = _usage(UsageCount(prompt_tokens, 0, cached_tokens))
        return _event("message_start", message=self._whole)

    def last(self, index: int, delta: Delta) -> bytes:
        events = self._take(delta.text) + self._close("completed")
        self._end(delta.reason, delta.stop_text)
        return events

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        assert usage is not None  # this route's answers always have it
        delta = {"stop_reason": self._whole.stop_reason, "stop_sequence": self._whole.stop_sequence}
        more = {} if proof is None else {"chitu": proof}
        return _event("message_delta", delta=delta, usage=_usage(usage), **more) + _event("message_stop")

    def error(self, error: ChituError) -> bytes:
        return b"event: error\ndata: " + error_json(error) + b"\n\n"

    # ------------------------------------------------------------------------------------------------------- the blocks

    def _end(self, reason: str, stop_text: str) -> None:
        whole = self._whole
        if reason == "length":
            whole.stop_reason = self._at_length
        elif reason == "tool_calls":
            whole.stop_reason = "tool_use"
        elif stop_text:
            whole.stop_reason, whole.stop_sequence = "stop_sequence", stop_text
        else:
            whole.stop_reason = "end_turn"

    def _open(self, kind: str, call: CallDelta | None) -> bytes:
        block: dict[str, Any]
        if call is not None:
            block = {"type": "tool_use", "id": self._id_of(call), "name": call.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._output.append(block)
        return _event("content_block_start", index=len(self._output) - 1, content_block=block)

    def _id_of(self, call: CallDelta) -> str:
        """Return the call's id with the characters that this API permits; no other call of the answer has it."""
        permitted = _NOT_IN_ID.sub("_", call.id)
        while any(block.get("id") == permitted for block in self._output):
            permitted += "_"
        return permitted

    def _filled(self, kind: str, text: str) -> bytes:
        name, field = _DELTAS.get(kind, _CALL_DELTA)
        return self._delta({"type": name, field: text})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=len(self._output) - 1, delta=delta)

    def _close(self, status: str) -> bytes:
        if not self._kind:
            return b""
        block, text, events = self._output[-1], "".join(self._text), b""
        if self._kind == "message":
            block["text"] = text
        elif self._kind == "reasoning":
            block["thinking"], block["signature"] = text, SIGNATURE
            events = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        else:
            block["input"] = msgspec.Raw(text.encode())  # always an object (`CallParser`)
        self._kind = ""
        return events + _event("content_block_stop", index=len(self._output) - 1)


def _usage(usage: UsageCount) -> MessagesUsageReply:
    return MessagesUsageReply(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokensReply(usage.reasoning_tokens),
        speculation=usage.speculation,
    )


def _event(kind: str, /, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"
