"""`ToolCalls` as a grammar in llguidance's Lark. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.grammars.marks import FREE_TEXT, quoted, text_up_to, with_mark
from chitu.grammars.schema import enforceable
from chitu.protocol import ToolCalls


def tool_calls_lark(calls: ToolCalls, added_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """Return the grammar. `added_tokens`: ids by name. `json_options`: llguidance's options, which override those in
    the schemas. Raise InvalidRequest if a call does not begin with the trigger."""
    if not calls.calls or not calls.trigger:
        raise InvalidRequest("tool_calls: there is no call, or nothing that begins one")
    token = added_tokens.get(calls.trigger)
    trigger = quoted(calls.trigger) if token is None else f"<[{token}]>"
    rules = []
    for i, call in enumerate(calls.calls):
        if not call.begin.startswith(calls.trigger):
            raise InvalidRequest(f"tool_calls: {call.begin[:40]!r} does not begin with {calls.trigger[:40]!r}")
        begin = with_mark(call.begin.removeprefix(calls.trigger), added_tokens)
        schema = msgspec.json.decode(call.schema, type=dict[str, Any] | bool)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        text = json.dumps({**enforceable(schema), "x-guidance": dict(json_options)})
        rules.append(f"call_{i}: {begin} %json {text} {with_mark(call.end, added_tokens)}")
    call_of_any = " | ".join(f"call_{i}" for i in range(len(rules)))
    rules += [f"call: {call_of_any}", f"one: {trigger} call"]
    separator = quoted(calls.separator)
    if calls.is_required:
        start = f"one ({separator} one)*" if calls.is_parallel else "one"
    elif calls.is_leading:
        first = f"\\x{{{ord(calls.trigger[0]):x}}}"
        rules.append(rf"OTHER: /\s*([^\s{first}](.|\n)*)?/")
        start = f"one ({separator} one)* | OTHER" if calls.is_parallel else "one | OTHER"
    else:
        rules += [FREE_TEXT, *text_up_to(calls.trigger, added_tokens)]
        start = "(led call)* TEXT" if calls.is_parallel else "led call | TEXT"
    return "%llguidance {}\n" + "\n".join([f"start: {start}", *rules]) + "\n"
