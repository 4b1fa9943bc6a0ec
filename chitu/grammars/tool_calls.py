"""`ToolCalls` as a grammar in llguidance's Lark. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.grammars.marks import FREE_TEXT, quoted, text_up_to, with_marks
from chitu.grammars.schema import enforceable
from chitu.protocol import ToolCalls, ToolFields

MAX_REFERENCES = 8
"""References within a schema that lead to a type."""


def tool_calls_lark(calls: ToolCalls, added_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """Return the grammar. `added_tokens`: ids by name. `json_options`: llguidance's options, which override those in
    the schemas. Raise InvalidRequest if a call does not begin with the trigger."""
    if not calls.calls or not calls.trigger:
        raise InvalidRequest("tool_calls: there is no call, or nothing that begins one")
    token = added_tokens.get(calls.trigger)
    trigger = with_marks(calls.trigger, added_tokens) if token is None else f"<[{token}]>"
    rules = []
    for i, call in enumerate(calls.calls):
        ahead = calls.trigger + calls.open
        if not call.begin.startswith(ahead):
            raise InvalidRequest(f"tool_calls: {call.begin[:40]!r} does not begin with {ahead[:40]!r}")
        begin = with_marks(call.begin.removeprefix(ahead), added_tokens)
        if call.index_end:
            begin += f" INDEX {with_marks(call.index_end, added_tokens)}"
        schema = msgspec.json.decode(call.schema, type=dict[str, Any] | bool)
        if call.fields is not None and isinstance(schema, dict):
            end = with_marks(call.end, added_tokens)
            rules += _fields_lark(f"call_{i}", begin, enforceable(schema), call.fields, end, json_options, added_tokens)
            continue
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        text = json.dumps({**enforceable(schema), "x-guidance": dict(json_options)})
        rules.append(f"call_{i}: {begin} %json {text} {with_marks(call.end, added_tokens)}")
    if any(call.index_end for call in calls.calls):
        rules.append("INDEX: /[0-9]{1,6}/")
    has_texts = any(call.fields is not None and not call.fields.separator for call in calls.calls)
    if has_texts or not (calls.is_required or (calls.is_leading and not calls.text_begin)):
        rules.append(FREE_TEXT)
    call_of_any = " | ".join(f"call_{i}" for i in range(len(calls.calls)))
    separator = quoted(calls.separator)
    if calls.close:
        rules.append(f"one_call: {call_of_any}")
        more = f" ({separator} one_call)*" if calls.is_parallel else ""
        opened = f"{with_marks(calls.open, added_tokens)} " if calls.open else ""
        call_of_any = f"{opened}one_call{more} {with_marks(calls.close, added_tokens)}"
    rules += [f"call: {call_of_any}", f"one: {trigger} call"]
    if calls.is_required:
        start = f"one ({separator} one)*" if calls.is_parallel and not calls.close else "one"
    elif calls.text_begin:
        start = f"one | {with_marks(calls.text_begin, added_tokens)} TEXT"
    elif calls.is_leading:
        first = f"\\x{{{ord(calls.trigger[0]):x}}}"
        rules.append(rf"OTHER: /\s*([^\s{first}](.|\n)*)?/")
        start = f"one ({separator} one)* | OTHER" if calls.is_parallel and not calls.close else "one | OTHER"
    else:
        rules += text_up_to(calls.trigger, added_tokens)
        start = "(led call)* TEXT" if calls.is_parallel else "led call | TEXT"
    return "%llguidance {}\n" + "\n".join([f"start: {start}", *rules]) + "\n"


def _fields_lark(
    rule: str,
    begin: str,
    schema: dict[str, Any],
    fields: ToolFields,
    end: str,
    json_options: Mapping[str, Any],
    added_tokens: Mapping[str, int],
) -> list[str]:
    """Return the rules of a call whose arguments are tagged texts: those of the schema's properties, in their order. A
    tool without properties has arguments of any name, unless its schema permits no others."""
    text, name, separator = f"{rule}_text", f"{rule.upper()}_NAME", fields.separator
    options = {"x-guidance": dict(json_options)}
    is_closed = schema.get("additionalProperties") is False
    if separator:
        rules = [f"{text}: %json {json.dumps(options)}"]
    else:
        rules = text_up_to(fields.end, added_tokens, text)
    behind, parts = with_marks(fields.end, added_tokens), []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    for i, (key, given) in enumerate((schema.get("properties") or {}).items()):
        head, value = with_marks(fields.begin + key + fields.middle, added_tokens), f"{rule}_{i}"
        words = given.get("enum") if isinstance(given, dict) and not separator else None
        if words and all(isinstance(word, str) for word in words):
            rules.append(f"{value}: {head} ({' | '.join(quoted(word) for word in words)}) {behind}")
        elif is_raw_text(given, schema) and not separator:
            rules.append(f"{value}: {head} {text}")
        else:
            if fields.json_middle:
                head = with_marks(fields.begin + key + fields.json_middle, added_tokens)
            told = json.dumps({**(given if isinstance(given, dict) else {}), **shared, **options})
            rules.append(f"{value}: {head} %json {told} {behind}")
        parts.append(value if key in required else f"{value}?")
    if separator and parts:
        rules += _separated(rule, parts, quoted(separator))
        parts = [f"{rule}_first_0"]
    elif not parts and not is_closed:
        rules.append(f"{name}: /[A-Za-z0-9_.-]+/")
        ahead, middle = with_marks(fields.begin, added_tokens), with_marks(fields.middle, added_tokens)
        rules.append(f"{rule}_any: {ahead} {name} {middle} {text}")
        several = f"({rule}_any ({quoted(separator)} {rule}_any)*)?" if separator else f"{rule}_any*"
        parts.append(several)
    return [*rules, f"{rule}: {' '.join([begin, *parts, end])}"]


def _separated(rule: str, parts: list[str], separator: str) -> list[str]:
    """Return rules of `parts` in their order (`?` behind one that may be missing) with a separator between them."""
    last = len(parts)
    rules = [f'{rule}_first_{last}: ""', f'{rule}_more_{last}: ""']
    for i, part in enumerate(parts):
        value, more = part.removesuffix("?"), f"{rule}_more_{i + 1}"
        is_optional = part != value
        rules.append(f"{rule}_first_{i}: {value} {more}" + (f" | {rule}_first_{i + 1}" if is_optional else ""))
        rules.append(f"{rule}_more_{i}: ({separator} {value}){'?' if is_optional else ''} {more}")
    return rules


def types_of(schema: Any, root: Any, references: int = MAX_REFERENCES) -> set[str]:
    """Return the types that a schema within `root` names; empty: it names none."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {each for each in given or () if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or () if references else ():
            types |= types_of(each, root, references - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and references:
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        types |= types_of(found, root, references - 1)
    if not types:
        values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
        types = {"string" if isinstance(value, str) else "other" for value in values}
    return types


def is_raw_text(schema: Any, root: Any) -> bool:
    """Return whether a tagged value is a string, of which the text is all, and not JSON."""
    types = types_of(schema, root)
    return not types or "string" in types
