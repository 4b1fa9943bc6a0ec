"""Request body of `/v1/responses`: served fields with their types and bounds. Pure.

All other fields that clients send are in `request_fields.py`, like those of the other routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from chitu.http.request_bodies import (
    EFFORTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_ROLE_CHARS,
    MAX_TOOLS,
    TOOL_CHOICES,
    Body,
    CallId,
    Temperature,
    TemplateKwargs,
    TokenCount,
    ToolName,
    TopP,
    Unread,
    documented,
)

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
