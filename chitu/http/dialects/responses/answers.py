"""Bodies and server-sent events of `/v1/responses`, as bytes. Pure.

A message is a list of items (reasoning, message, function calls), each opened, filled and closed by events of its own;
the last event is the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from chitu.errors import ChituError
from chitu.http.answer.formats import (
    AnswerHead,
    CachedTokensReply,
    Delta,
    DraftsReply,
    FinishedChoice,
    ItemsFormat,
    OutputTokensReply,
    UsageCount,
    to_json,
)
from chitu.http.answer.proof import Proof
from chitu.http.dialects.responses.chat import Repeated
from chitu.http.dialects.responses.custom_tools import input_of
from chitu.http.dialects.responses.items import encoded_reasoning
from chitu.http.dialects.responses.tools import SEARCH, CalledTool
from chitu.http.messages.call_objects import CallDelta

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
_SEARCH_CALL = f"{SEARCH}_call"

_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}}


class ResponsesUsageReply(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CachedTokensReply
    output_tokens: int
    output_tokens_details: OutputTokensReply
    total_tokens: int
    speculation: dict[str, DraftsReply] | msgspec.UnsetType = msgspec.UNSET
    """As of a chat."""


class ResponsesError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponsesReply(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """`in_progress` and `failed` are only in events."""
    error: ResponsesError | None
    incomplete_details: IncompleteDetails | None
    # fields of the request, repeated (`Repeated`)
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    max_output_tokens: int | None
    tool_choice: Any
    tools: list[Any]
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: Literal["disabled"]
    store: bool
    background: bool
    previous_response_id: None
    output: list[dict[str, Any]]
    """Items of the types reasoning, message and function_call."""
    usage: ResponsesUsageReply | None
    """Null only in events before the last one."""
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET


class ResponsesFormat(ItemsFormat):
    def __init__(self, head: AnswerHead, repeated: Repeated) -> None:
        super().__init__()
        self._tools = repeated.tools
        self._encodes_reasoning = repeated.encodes_reasoning
        self._id = head.request_id
        self._whole = ResponsesReply(
            id=head.id,
            object="response",
            created_at=head.created_s,
            model=head.model,
            status="in_progress",
            error=None,
            incomplete_details=None,
            **repeated.fields,
            output=[],
            usage=None,
        )
        self._num_events = 0

    # ----------------------------------------------------------------------------------------------------- not streamed

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        (choice,) = choices
        self._take(choice.text)
        self._add_proof(proof)
        yield to_json(self._ended(choice.finish_reason, usage))

    # --------------------------------------------------------------------------------------------------------- streamed

    def opening(self, index: int, prompt_tokens: int = 0, cached_tokens: int = 0) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def last(self, index: int, delta: Delta) -> bytes:
        """Return the events of the last text. The answer itself follows with its usage."""
        self._reason = delta.reason
        return self._take(delta.text)

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
            told.speculation,
        )
        return whole

    def _text_of(self, call: CallDelta) -> str:
        # A call comes whole, so its text can be read.
        return input_of(call.arguments) if self._called(call).kind == "custom" else call.arguments

    def _called(self, call: CallDelta) -> CalledTool:
        return self._tools.get(call.name) or CalledTool("function", call.name, "")

    def _filled(self, kind: str, text: str) -> bytes:
        type_of_call = self._output[-1]["type"]
        if type_of_call == _SEARCH_CALL:
            return b""  # its arguments are an object, which comes whole
        name = _TEXTS[kind][0] if kind in _TEXTS else _ARGUMENTS[type_of_call][0]
        return self._event(f"response.{name}.delta", **self._place(kind), delta=text, **_LOGPROBS.get(kind, {}))

    def _open(self, kind: str, call: CallDelta | None) -> bytes:
        number = len(self._output)
        item: dict[str, Any]
        if call is not None:
            item = self._opened_call(call, number)
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

    def _opened_call(self, call: CallDelta, number: int) -> dict[str, Any]:
        called = self._called(call)
        if called.kind == SEARCH:
            item = {"id": f"tsc_{self._id}_{number}", "type": _SEARCH_CALL, "call_id": call.id}
            return {**item, "execution": "client", "arguments": {}}
        type_of_call = "custom_tool_call" if called.kind == "custom" else "function_call"
        _, prefix, field = _ARGUMENTS[type_of_call]
        item = {"id": f"{prefix}_{self._id}_{number}", "type": type_of_call, "call_id": call.id, "name": called.name}
        if called.namespace:
            item["namespace"] = called.namespace
        return {**item, field: ""}

    def _close(self, status: str) -> bytes:
        if not self._kind:
            return b""
        item, kind, text = self._output[-1], self._kind, "".join(self._text)
        place = self._place(kind)
        self._kind = ""
        item["status"] = status
        if item["type"] == _SEARCH_CALL:
            item["arguments"], events = msgspec.Raw(text.encode()), b""  # always an object (`CallParser`)
        elif item["type"] in _ARGUMENTS:
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
        return b"event: " + kind.encode() + b"\ndata: " + to_json(event) + b"\n\n"


def _part(kind: str, text: str) -> dict[str, Any]:
    name, more = _TEXTS[kind]
    return {"type": name, "text": text, **more}


def _status(reason: str) -> Literal["incomplete", "completed"]:
    return "incomplete" if reason == "length" else "completed"
