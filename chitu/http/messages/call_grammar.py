"""Grammars of tool calls: of an answer that must be a call (`tool_choice`: `required`, or a function), and of calls
that the model may make if a tool is `strict`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.messages.call_parser import CallParser
from chitu.protocol import MAX_GRAMMAR_CHARS, Grammar, ToolCall, ToolCalls


def grammar_of_calls(
    parser: type[CallParser],
    tools: Sequence[dict[str, Any]],
    params: Sequence[str],
    is_parallel: bool,
    is_required: bool,
) -> Grammar:
    """Return the grammar of calls of `tools` (as the chat template takes them) in the format that the parser reads.
    `params`: names of the fields of their parameters.
    `is_parallel` permits several calls if the format does. Unless `is_required`, calls are optional, in free text.
    Raise InvalidRequest for parameters that are not an object, or too long a schema."""
    calls = []
    for tool, param in zip(tools, params, strict=True):
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or {})}
        if schema["type"] != "object":
            name = function["name"]
            param = f"{param}.type"
            raise InvalidRequest(f"{param} must be 'object', since calls of {name!r} are enforced", param)
        begin, end = parser.written(function["name"])
        calls.append(ToolCall(begin, msgspec.Raw(msgspec.json.encode(schema)), end))
    several = is_parallel and (parser.separator is not None or not is_required)
    is_leading = parser.is_leading and not is_required
    record = ToolCalls(tuple(calls), parser.trigger, is_required, several, parser.separator or "", is_leading)
    text = msgspec.json.encode(record).decode()
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"tools: {len(text)} characters of JSON; a call can be enforced of at most {MAX_GRAMMAR_CHARS}", "tools"
        )
    return Grammar("tool_calls", text)
