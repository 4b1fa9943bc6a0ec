"""Other forms of a chat's turns, which mean the same: of the order of roles, of calls and results, of content. Pure.

APIs accept turns in any order and form, a chat template only in those that its author thought of. `turns.py` finds out
which of these forms the template of a model needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Turn = dict[str, Any]
"""A message as chat templates take it."""
Reform = Callable[[list[Turn]], list[Turn]]
BREAK = "\n\n"
"""Between the texts of two turns that become one."""
_KINDS = {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}
"""Keywords of a schema by which its values are known."""


def unchanged(turns: list[Turn]) -> list[Turn]:
    return turns


def after(first: Reform, then: Reform) -> Reform:
    return lambda turns: then(first(turns))


# ------------------------------------------------------------------------------------------------------ order of roles


def later_systems_as_users(turns: list[Turn]) -> list[Turn]:
    """Return the turns with those of the system as the user's, except at the start."""
    start = _num_leading(turns)
    return [*turns[:start], *({**t, "role": "user"} if t["role"] == "system" else t for t in turns[start:])]


def leading_systems_joined(turns: list[Turn]) -> list[Turn]:
    start = _num_leading(turns)
    return [_joined(turns[:start]), *turns[start:]] if start > 1 else turns


def systems_in_users(turns: list[Turn]) -> list[Turn]:
    """Return the turns without one of the system: its text begins the user's turn behind it, or is one."""
    start = _num_leading(turns)
    if not start:
        return turns
    told = {**_joined(turns[:start]), "role": "user"}
    if len(turns) > start and turns[start]["role"] == "user":
        return [_joined([told, turns[start]]), *turns[start + 1 :]]
    return [told, *turns[start:]]


def users_joined(turns: list[Turn]) -> list[Turn]:
    return _rows_joined(turns, "user")


def assistants_joined(turns: list[Turn]) -> list[Turn]:
    return _rows_joined(turns, "assistant")


def users_in_results(turns: list[Turn]) -> list[Turn]:
    """Return the turns with the user's texts that follow a tool's result as a part of the result."""
    found: list[Turn] = []
    for turn in turns:
        if turn["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = {**found[-1], "content": _texts([found[-1], turn])}
        else:
            found.append(turn)
    return found


def _num_leading(turns: Sequence[Turn]) -> int:
    """Return the number of the system's turns at the start."""
    return next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))


def _rows_joined(turns: list[Turn], role: str) -> list[Turn]:
    found: list[Turn] = []
    for turn in turns:
        if found and turn["role"] == role == found[-1]["role"] and not (_calls(found[-1]) or _calls(turn)):
            found[-1] = _joined([found[-1], turn])
        else:
            found.append(turn)
    return found


def _calls(turn: Turn) -> Sequence[Any]:
    return turn.get("tool_calls") or ()


def _joined(turns: Sequence[Turn]) -> Turn:
    """Return turns of one role as one turn."""
    joined = {**turns[0], "content": _texts(turns)}
    if reasoning := [turn["reasoning_content"] for turn in turns if turn.get("reasoning_content")]:
        joined["reasoning_content"] = BREAK.join(reasoning)
    return joined


def _texts(turns: Sequence[Turn]) -> str:
    return BREAK.join([turn["content"] for turn in turns if turn["content"]])


# ---------------------------------------------------------------------------------------------------- calls and results


def calls_behind_content(turns: list[Turn]) -> list[Turn]:
    """Return the turns with calls in a turn of their own, behind that of the content beside them."""
    found: list[Turn] = []
    for turn in turns:
        if turn.get("tool_calls") and turn["content"]:
            found.append({"role": turn["role"], "content": turn["content"]})
            turn = {**turn, "content": ""}
        found.append(turn)
    return found


def calls_behind_content_and_user(turns: list[Turn]) -> list[Turn]:
    """Return the turns as `calls_behind_content` does, with an empty turn of the user between: some templates count the
    turns without calls."""
    found: list[Turn] = []
    for turn in calls_behind_content(turns):
        if turn.get("tool_calls") and found and found[-1]["role"] == turn["role"]:
            found.append({"role": "user", "content": ""})
        found.append(turn)
    return found


def one_call_a_turn(turns: list[Turn]) -> list[Turn]:
    """Return the turns with each call in a turn of its own, and its result behind it."""
    found: list[Turn] = []
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(turn)
            continue
        end = at
        while end < len(turns) and turns[end]["role"] == "tool":
            end += 1
        results, at = list(turns[at:end]), end
        for i, call in enumerate(calls):
            found.append({**turn, "tool_calls": [call]} if not i else _with_call(turn, call))
            own = _result_of(call, results)
            if own is not None:
                results.remove(own)
                found.append(own)
        found += results
    return found


def _with_call(turn: Turn, call: Any) -> Turn:
    return {"role": turn["role"], "content": "", "tool_calls": [call]}


def _result_of(call: Any, results: Sequence[Turn]) -> Turn | None:
    """Return the result of a call: that with its id; if they have none, the first."""
    by_id = (result for result in results if result.get("tool_call_id", "") == call.get("id", None))
    without = (result for result in results if not result.get("tool_call_id"))
    return next(by_id, None) or next(without, None)


def calls_as_text(write: Callable[[Sequence[Turn]], str]) -> Reform:
    """Return the form in which calls are the end of the content. `write` returns the text of a turn's functions."""

    def with_text(turn: Turn) -> Turn:
        written = write([call["function"] for call in turn["tool_calls"]])
        rest = {name: value for name, value in turn.items() if name != "tool_calls"}
        return {**rest, "content": f"{turn['content']}\n{written}" if turn["content"] else written}

    return lambda turns: [with_text(turn) if turn.get("tool_calls") else turn for turn in turns]


def identified(new_id: Callable[[int, str], str], only_missing: bool = False) -> Reform:
    """Return the form in which call number i (from 0) of a function has the id `new_id(i, name)`, and so its result."""

    def reform(turns: list[Turn]) -> list[Turn]:
        ids: dict[str, str] = {}
        waiting: list[str] = []
        found, count = [], 0
        for turn in turns:
            if calls := turn.get("tool_calls"):
                made = []
                for call in calls:
                    own = call.get("id") or ""
                    name = own if only_missing and own else new_id(count, call["function"]["name"])
                    count += 1
                    ids[own] = name
                    waiting.append(name)
                    made.append({**call, "id": name})
                turn = {**turn, "tool_calls": made}
            elif turn["role"] == "tool":
                own = turn.get("tool_call_id") or ""
                name = ids[own] if own in ids and own else waiting[0] if waiting and not own else own
                if name in waiting:
                    waiting.remove(name)
                turn = {**turn, "tool_call_id": name} if name else turn
            found.append(turn)
        return found

    return reform


def results_named(turns: list[Turn]) -> list[Turn]:
    """Return the turns with the name of the function in each result that has none."""
    names: dict[str, str] = {}
    waiting: list[str] = []
    found = []
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            names[call.get("id") or ""] = call["function"]["name"]
            waiting.append(call["function"]["name"])
        if turn["role"] == "tool" and "name" not in turn:
            own = turn.get("tool_call_id") or ""
            name = names.get(own) if own else next(iter(waiting), None)
            if name is not None:
                turn = {**turn, "name": name}
                if name in waiting:
                    waiting.remove(name)
        found.append(turn)
    return found


# ------------------------------------------------------------------------------------------------------- within a turn


def empty_as_null(turns: list[Turn]) -> list[Turn]:
    """Return the turns with null for an empty content beside calls."""
    return [{**turn, "content": turn["content"] or None} if turn.get("tool_calls") else turn for turn in turns]


def arguments_as_text(turns: list[Turn]) -> list[Turn]:
    return [_with_arguments(turn, text_of_arguments) for turn in turns]


def arguments_as_objects(turns: list[Turn]) -> list[Turn]:
    """Return the turns with arguments that are no JSON object, such as those of a call that was cut off, as the text in
    an object."""
    return [
        _with_arguments(turn, lambda given: {"arguments": given} if isinstance(given, str) else given) for turn in turns
    ]


def text_of_arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _with_arguments(turn: Turn, form: Callable[[Any], Any]) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    calls = [
        {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
        for call in turn["tool_calls"]
    ]
    return {**turn, "tool_calls": calls}


def reasoning_as(name: str) -> Reform:
    """Return the form with the reasoning of earlier turns under another name, too."""
    return lambda turns: [{**t, name: t["reasoning_content"]} if t.get("reasoning_content") else t for t in turns]


def reasoning_beside(content: bool, calls: bool) -> Reform:
    """Return the form without the reasoning of turns that have content, or content and calls."""

    def drops(turn: Turn) -> bool:
        has_calls = bool(turn.get("tool_calls"))
        return bool(turn.get("reasoning_content") and turn["content"]) and (calls if has_calls else content)

    def reform(turns: list[Turn]) -> list[Turn]:
        return [{k: v for k, v in t.items() if k != "reasoning_content"} if drops(t) else t for t in turns]

    return reform


def content_as_parts(role: str) -> Reform:
    """Return the form with the content of this role as a list of one part."""

    def reform(turns: list[Turn]) -> list[Turn]:
        return [
            {**turn, "content": [{"type": "text", "text": turn["content"]}]}
            if turn["role"] == role and isinstance(turn["content"], str)
            else turn
            for turn in turns
        ]

    return reform


# --------------------------------------------------------------------------------------------------------------- tools


def tools_in_system(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return the turns with the tools' functions, in JSON, in that of the system, which is the first."""
    has_system = bool(turns) and turns[0]["role"] == "system"
    system = turns[0] if has_system else {"role": "system", "content": ""}
    told = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**system, "tools": told}, *(turns[1:] if has_system else turns)]


def tools_filled(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with an empty text for each description that is missing, and a schema for each parameter."""
    found = []
    for tool in tools:
        function = tool["function"]
        parameters = _filled(function.get("parameters") or {"type": "object"})
        filled = {"name": function["name"], "description": function.get("description") or "", **function}
        found.append({**tool, "function": {**filled, "parameters": {"properties": {}, **parameters}}})
    return found


def _filled(schema: Any) -> Any:
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        return schema
    properties = {name: {"description": "", **_typed(each)} for name, each in schema.get("properties", {}).items()}
    return {"type": "object", **schema, **({"properties": properties} if properties else {})}


def _typed(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    if "properties" in schema:
        return dict(_filled(schema))
    return schema if _KINDS & schema.keys() else {"type": "string", **schema}
