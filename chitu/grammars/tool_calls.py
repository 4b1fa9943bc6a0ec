"""`ToolCalls` as a grammar in llguidance's Lark. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.grammars.marks import FREE_TEXT, quoted, text_up_to, with_marks
from chitu.grammars.raw_text import is_raw_text, types_of
from chitu.grammars.schema import enforceable, standalone
from chitu.grammars.tagged_fields import FieldRules
from chitu.protocol import ToolCalls

__all__ = ["OTHER_ANSWER", "begins_as_json", "is_raw_text", "json_value", "tool_calls_lark", "types_of"]
OTHER_ANSWER = "other_answer"
"""Name of the grammar of an answer without calls that is in Lark itself."""
_ARGUMENTS = "\x00"


def tool_calls_lark(
    calls: ToolCalls,
    added_tokens: Mapping[str, int],
    json_options: Mapping[str, Any],
    answer: str = "",
    places: list[tuple[str, str]] | None = None,
) -> str:
    """Return the grammar. `added_tokens`: ids by name. `json_options`: llguidance's options, which override those in
    the schemas. `answer`: the rule of an answer without calls, if the calls have one. `places` gets terminals,
    each with the index of its call and the place within its schema. Raise InvalidRequest if a call does not begin with
    the trigger, or for a schema that cannot be enforced, with its place."""
    if not calls.calls or not calls.trigger:
        raise InvalidRequest("tool_calls: there is no call, or nothing that begins one")
    token = added_tokens.get(calls.trigger)
    trigger = with_marks(calls.trigger, added_tokens) if token is None else f"<[{token}]>"
    is_json = bool(answer) and begins_as_json(calls, added_tokens)
    rules: list[str] = []
    for i, call in enumerate(calls.calls):
        ahead = calls.trigger + calls.open
        if not call.begin.startswith(ahead):
            raise InvalidRequest(f"tool_calls: {call.begin[:40]!r} does not begin with {ahead[:40]!r}")
        begin = with_marks(call.begin.removeprefix(ahead), added_tokens)
        if call.index_end:
            begin += f" INDEX {with_marks(call.index_end, added_tokens)}"
        end = with_marks(call.end, added_tokens)
        schema = msgspec.json.decode(call.schema, type=dict[str, Any] | bool)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if call.fields is not None:
            fields = FieldRules(f"call_{i}", schema, call.fields, json_options, added_tokens)
            try:
                rules += fields.lark(begin, end)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, f"{i}{error.param or ''}") from None
            if places is not None:
                places += [(f"{i}{path}", body) for path, body in fields.places]
            continue
        schema = enforceable(schema)
        if is_json:
            schema, begin, end = _whole_call(call.begin, call.end, schema), "", ""
        rules.append(f"call_{i}: {begin} {json_value(schema, json_options)} {end}")
    if any(call.index_end for call in calls.calls):
        rules.append("INDEX: /[0-9]{1,6}/")
    call_of_any = " | ".join(f"call_{i}" for i in range(len(calls.calls)))
    separator = quoted(calls.separator)
    if calls.close:
        rules.append(f"one_call: {call_of_any}")
        more = f" ({separator} one_call)*" if calls.is_parallel else ""
        opened = f"{with_marks(calls.open, added_tokens)} " if calls.open else ""
        call_of_any = f"{opened}one_call{more} {with_marks(calls.close, added_tokens)}"
    rules += [f"call: {call_of_any}", f"one: {'' if is_json else trigger} call"]
    if calls.is_required or answer:
        start = f"one ({separator} one)*" if calls.is_parallel and not calls.close else "one"
        if answer:
            head = f"{with_marks(calls.text_begin, added_tokens)} " if calls.text_begin else ""
            start += f" | {head}{answer.partition(':')[0]}"
            rules.append(answer)
    elif calls.text_begin:
        rules.append(FREE_TEXT)
        start = f"one | {with_marks(calls.text_begin, added_tokens)} TEXT"
    elif calls.is_leading:
        first = f"\\x{{{ord(calls.trigger[0]):x}}}"
        rules.append(rf"OTHER: /\s*([^\s{first}](.|\n)*)?/")
        start = f"one ({separator} one)* | OTHER" if calls.is_parallel and not calls.close else "one | OTHER"
    else:
        rules += [FREE_TEXT, *text_up_to(calls.trigger, added_tokens)]
        start = "(led call)* TEXT" if calls.is_parallel else "led call | TEXT"
    return "%llguidance {}\n" + "\n".join([f"start: {start}", *rules]) + "\n"


def begins_as_json(calls: ToolCalls, added_tokens: Mapping[str, int]) -> bool:
    """Return whether a call is a JSON object, which an answer in JSON may begin like."""
    return calls.trigger == "{" and calls.trigger not in added_tokens and not calls.close


def json_value(schema: dict[str, Any], json_options: Mapping[str, Any]) -> str:
    """Return a JSON value of an enforceable schema, as a part of a rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': dict(json_options)})}"


def _whole_call(begin: str, end: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the object that a call is. The engine tells two objects apart only if both are JSON."""
    arguments = standalone(schema, schema)
    shared = arguments.pop("$defs", {})
    try:
        keys = json.loads(f"{begin}{json.dumps(_ARGUMENTS)}{end}")
    except ValueError as error:
        raise InvalidRequest(f"tool_calls: {begin[:40]!r} does not begin a JSON object") from error
    properties = {key: arguments if value == _ARGUMENTS else {"const": value} for key, value in keys.items()}
    made = {"type": "object", "properties": properties, "required": [*keys], "additionalProperties": False}
    return {**made, "$defs": shared} if shared else made
