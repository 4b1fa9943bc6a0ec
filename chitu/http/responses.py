"""Request body of `/v1/responses`: served fields with their types and bounds. Pure.

All other fields that clients send are in `request_fields.py`, like those of the other routes.

Conversion of a body of `/v1/responses` into a chat body. Pure; part of `BodyWork`.

Nothing is stored, so `input` has all turns: messages, calls, their outputs and reasoning, as in an answer's `output`.
Adjacent items of the model form one assistant message.

Answers and server-sent events of `/v1/responses`, as bytes. Pure; an `AnswerFormat` beside those in `sse.py`.

A chat's message is a list of items here: reasoning, message, function calls, each opened, filled and closed by events
of its own. The last event is the whole answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from chitu.errors import ChituError, InvalidRequest
from chitu.http.bodies import (
    EFFORTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_ROLE_CHARS,
    MAX_TOOLS,
    TOOL_CHOICES,
    Body,
    CalledFunction,
    CallId,
    ChatBody,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    JsonSchemaFormat,
    MessageToolCall,
    ResponseFormat,
    Temperature,
    TemplateKwargs,
    TokenCount,
    Tool,
    ToolFunction,
    ToolName,
    TopP,
    Unread,
    documented,
    text_of_parts,
)
from chitu.http.messages.delta import CallDelta, MessageDelta
from chitu.http.proof import Proof
from chitu.http.sse import ID_PREFIXES, FinishedChoice, UsageCount

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
PART_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=list(PART_TYPES))]
    text: str | None = None
    # without effect
    annotations: Unread = msgspec.UNSET
    logprobs: Unread = msgspec.UNSET
    prompt_cache_breakpoint: Unread = msgspec.UNSET
    cache_control: Unread = msgspec.UNSET


_Parts = str | Annotated[list[InputPart], msgspec.Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """Item of any type; `request.py` checks which fields belong to which type."""

    type: Annotated[str, documented(enum=list(ITEM_TYPES))] | None = None
    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE_CHARS)] | None = None
    content: _Parts | None = None
    call_id: CallId | None = None
    name: ToolName | None = None
    arguments: str | None = None
    output: _Parts | None = None
    # without effect
    id: Unread = msgspec.UNSET
    status: Unread = msgspec.UNSET
    phase: Unread = msgspec.UNSET
    caller: Unread = msgspec.UNSET
    namespace: Unread = msgspec.UNSET
    summary: Unread = msgspec.UNSET
    encrypted_content: Unread = msgspec.UNSET
    metadata: Unread = msgspec.UNSET
    cache_control: Unread = msgspec.UNSET


class ResponsesTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # without effect
    cache_control: Unread = msgspec.UNSET


class ResponsesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Annotated[str, documented(enum=list(EFFORTS))] | None = None
    # without effect
    summary: Unread = msgspec.UNSET
    generate_summary: Unread = msgspec.UNSET


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: Annotated[msgspec.Raw | msgspec.UnsetType, documented(type="object")] = msgspec.UNSET
    # without effect
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    # without effect
    verbosity: Unread = msgspec.UNSET


class ResponsesBody(Body, kw_only=True):
    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponsesTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | Annotated[str, documented(enum=list(TOOL_CHOICES))] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    """Repeated in the answer."""
    chat_template_kwargs: TemplateKwargs | None = None
    return_proof: bool | None = None
    return_receipt: bool | None = None


_NAMES = (
    (re.compile(r"messages(?=\[|\.|\Z).*"), "input"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
)
"""Fields of a chat -> the fields of this route that they are made from."""


def error_for_responses(error: InvalidRequest) -> InvalidRequest:
    """Return an error of the chat with the name of this route's field."""
    param, message = error.param, error.message
    if param is not None:
        for pattern, name in _NAMES:
            if pattern.fullmatch(param) or pattern.match(param):
                own = pattern.sub(name, param)
                message, param = message.replace(param, own), own
                break
    return InvalidRequest(message, param)


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat body. Raise InvalidRequest for items and parts that are neither text nor calls."""
    if body.input is None or body.input == []:
        raise InvalidRequest("input is required: text, or a list of items", "input")
    messages = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    if isinstance(body.input, str):
        messages.append(ChatMessage("user", body.input))
    else:
        messages += _messages(body.input)
    chosen = body.tool_choice
    choice = ChosenTool(chosen.type, ChosenFunction(chosen.name)) if isinstance(chosen, ResponsesToolChoice) else chosen
    text = body.text.format if body.text is not None else None
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=[Tool(t.type, ToolFunction(t.name, t.description, t.parameters, t.strict)) for t in body.tools or ()],
        tool_choice=choice,
        response_format=_response_format(text) if text is not None else None,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        return_proof=body.return_proof,
        return_receipt=body.return_receipt,
    )


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type == "json_schema":
        return ResponseFormat(given.type, JsonSchemaFormat(given.schema))
    return ResponseFormat(given.type, schema=given.schema)


def _messages(items: list[InputItem]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.type or "message"
        if kind not in ITEM_TYPES:
            raise InvalidRequest(f"{where}.type: {kind[:40]!r} is not supported yet", f"{where}.type")
        if kind == "message":
            if item.role is None or item.content is None:
                raise InvalidRequest(f"{where}: a message has a role and content", where)
            text = _text(item.content, f"{where}.content")
            if item.role == "assistant":
                _of_model(messages, kind).content = text
            else:
                messages.append(ChatMessage(item.role, text))
        elif kind == "function_call":
            if item.name is None or item.call_id is None:
                raise InvalidRequest(f"{where}: a function_call has a name and a call_id", where)
            own = _of_model(messages, kind)
            call = MessageToolCall(CalledFunction(item.name, item.arguments), item.call_id)
            own.tool_calls = [*(own.tool_calls or ()), call]
        elif kind == "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidRequest(f"{where}: a function_call_output has a call_id and an output", where)
            text = _text(item.output, f"{where}.output")
            messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
        else:
            _of_model(messages, kind).reasoning_content = _text(item.content or "", f"{where}.content")
    # Templates have no message of reasoning alone.
    return [message for message in messages if message.content is not None or message.tool_calls]


def _of_model(messages: list[ChatMessage], kind: str) -> ChatMessage:
    """Return the assistant message that an item of this kind belongs to: the last one, or a new one."""
    last = messages[-1] if messages else None
    if (
        last is None
        or last.role != "assistant"
        or (kind == "message" and last.content is not None)
        or (kind == "reasoning" and last.tool_calls)
    ):
        last = ChatMessage("assistant")
        messages.append(last)
    return last


def _text(given: str | list[InputPart], where: str) -> str:
    if isinstance(given, str):
        return given
    return text_of_parts([(part.type, part.text) for part in given], PART_TYPES, where)


def echo_of(body: ResponsesBody) -> dict[str, Any]:
    """Return the request fields that the answer repeats."""
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "text": {"format": _format_of(body)},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    if given is None:
        return {"type": "text"}
    fields = {"name": given.name, "description": given.description, "strict": given.strict, "schema": given.schema}
    return {"type": given.type, **{name: value for name, value in fields.items() if value not in (None, msgspec.UNSET)}}


_json = msgspec.json.Encoder().encode


class ResponsesFormat:
    done = b""
    """Bytes after the last event: none."""

    def __init__(self, response_id: str, created_s: int, model: str, echo: dict[str, Any]) -> None:
        """`echo`: see `echo_of`."""
        self._id = response_id
        self._whole: dict[str, Any] = {
            "id": ID_PREFIXES[2] + response_id,
            "object": "response",
            "created_at": created_s,
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **echo,
            "output": [],
            "usage": None,
        }
        self._output: list[dict[str, Any]] = []
        """Items so far; the last one is open unless `_kind` is empty."""
        self._text: list[str] = []
        """Text of the open item."""
        self._kind = ""
        """Kind of the open item: `message`, `reasoning`, or the index of a call."""
        self._num_events = 0

    # ----------------------------------------------------------------------------------------------------- not streamed

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        (choice,) = choices
        self._take(choice.text)
        self._add_proof(proof)
        yield _json(self._ended(choice.finish_reason, usage))

    # --------------------------------------------------------------------------------------------------------- streamed

    def opening(self, index: int) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def delta(
        self, index: int, text: str | MessageDelta, token_ids: list[int] | None, logprobs: bytes | None = None
    ) -> bytes:
        return self._take(text)

    def last(
        self,
        index: int,
        text: str | MessageDelta,
        reason: str,
        token_ids: list[int] | None,
        logprobs: bytes = b"null",
    ) -> bytes:
        """Return the events of the last text. The answer itself follows with its usage."""
        self._whole["finish_reason"] = reason
        return self._take(text)

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        assert usage is not None  # this route's answers always have it
        self._add_proof(proof)
        reason = self._whole.pop("finish_reason")
        closing = self._close(_status(reason))
        self._ended(reason, usage)
        return closing + self._lifecycle(f"response.{self._whole['status']}")

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes:
        return event

    def error(self, error: ChituError) -> bytes:
        """Return the last events of an answer that has begun."""
        closing = self._close("incomplete")
        self._whole.update(status="failed", error={"code": error.code, "message": error.message}, output=self._output)
        return closing + self._lifecycle("response.failed")

    # -------------------------------------------------------------------------------------------------------- the items

    def _add_proof(self, proof: Proof | None) -> None:
        if proof is not None:
            self._whole["chitu"] = proof

    def _ended(self, reason: str, usage: UsageCount) -> dict[str, Any]:
        self._close(_status(reason))
        self._whole["status"] = _status(reason)
        if reason == "length":
            self._whole["incomplete_details"] = {"reason": "max_output_tokens"}
        self._whole["output"] = self._output
        self._whole["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return self._whole

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
            events += self._add(str(call.place), call.arguments, call)
        return events

    def _add(self, kind: str, text: str, call: CallDelta | None = None) -> bytes:
        events = b""
        if kind != self._kind:
            events = self._close("completed") + self._open(kind, call)
        if not text:
            return events
        self._text.append(text)
        name = "function_call_arguments" if call is not None else _TEXTS[kind][0]
        return events + self._event(
            f"response.{name}.delta", **self._place(kind), delta=text, **_LOGPROBS.get(kind, {})
        )

    def _open(self, kind: str, call: CallDelta | None) -> bytes:
        self._kind, self._text = kind, []
        number = len(self._output)
        item: dict[str, Any]
        if call is not None:
            item = {"id": f"fc_{self._id}_{number}", "type": "function_call", "call_id": call.id, "name": call.name}
            item["arguments"] = ""
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
        """Close the open item, if there is one."""
        if not self._kind:
            return b""
        item, kind, text = self._output[-1], self._kind, "".join(self._text)
        place = self._place(kind)
        self._kind = ""
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
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


_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}),
    "reasoning": ("reasoning_text", {}),
}
"""Kinds of items that have text parts -> the part's type and its further fields."""
_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}}


def _part(kind: str, text: str) -> dict[str, Any]:
    name, more = _TEXTS[kind]
    return {"type": name, "text": text, **more}


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"
