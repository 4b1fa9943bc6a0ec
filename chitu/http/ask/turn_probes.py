"""The small chats by which the forms are found that a chat template takes, and the words in the place of their texts.
Pure; see `turns.py`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from chitu.http.ask import image_turns
from chitu.http.ask import turn_forms as forms
from chitu.http.ask.images import marked
from chitu.http.ask.turn_forms import Reform, Turn

WORD = re.compile(r"zq\d+x")
"""A word in the place of a text. No template has one."""
ARGUMENT = "argument"
"""Key of the place of an argument's name."""
TOOL = {
    "type": "function",
    "function": {
        "name": "tool_name",
        "description": "a",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}},
    },
}
THOUGHT = {"reasoning_content": "a"}


def turn_of(role: str, content: str = "a", **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def call_of(name: str = "a", call_id: str = "call00000", arguments: Any = None) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": "a"} if arguments is None else arguments}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}


def result_of(call_id: str = "call00000") -> Turn:
    return turn_of("tool", **({"tool_call_id": call_id} if call_id else {}))


S, U, A = turn_of("system"), turn_of("user"), turn_of("assistant")
CALLS = turn_of("assistant", "", tool_calls=[call_of()])
CALLS_BESIDE = {**CALLS, "content": "a"}
TWO_CALLS = turn_of("assistant", "", tool_calls=[call_of("a", "call00001"), call_of("b", "call00002")])
TWO_RESULTS = [result_of("call00001"), result_of("call00002")]
ONE, TWO = [U, CALLS, result_of()], [U, TWO_CALLS, *TWO_RESULTS]
"""Chats of a call, and of two in one turn."""
FOREIGN = turn_of("assistant", "", tool_calls=[call_of("a", "toolu_01.a-B")])
NAMELESS = turn_of("assistant", "", tool_calls=[call_of("a", "")])
CUT = turn_of("assistant", "", tool_calls=[call_of(arguments='{"a": "a')])


ASKED_IMAGE = [{**U, "content": f"a{marked(0)}a"}]
"""A chat with an image of the user."""
ASKED_VIDEO = [{**U, "content": f"a{marked(0, is_video=True)}a"}]
_SEEN = {**result_of(), "content": f"a{marked(0)}a{marked(1)}"}
READ_IMAGES, READ_IMAGES_UNCALLED = (
    ([U, before, _SEEN], [U, before, _SEEN, U], [U, before, _SEEN, A, U]) for before in (CALLS, A)
)
"""Chats with images in a result: of a call, and for templates that have no calls."""


class Form(NamedTuple):
    """Forms of one thing, of which a template takes the first, or another."""

    chats: tuple[list[Turn], ...]
    """Chats that show which."""
    others: tuple[Reform, ...]
    """Tried in this order if the chats do not arrive as they are."""
    in_order: bool = False
    """The texts must arrive in their order, too."""
    shows: str = ""
    """Key of a turn's text that must arrive as well; if it does in no form, none is needed."""


WRITTEN: tuple[Form, ...] = (
    Form(([U],), (forms.content_as_parts("user"),)),
    Form(([S, U],), (forms.content_as_parts("system"),)),
    Form(([U, A, U],), (forms.content_as_parts("assistant"),)),
    Form(
        ([U, CALLS, result_of()],),
        (
            *(forms.empty_as_null, forms.arguments_as_text, forms.content_as_parts("tool")),
            *(forms.after(forms.empty_as_null, forms.arguments_as_text),),
        ),
    ),
    Form(
        ([U, {**CALLS, **THOUGHT}, result_of()],),
        (forms.reasoning_as("thinking"), forms.reasoning_as("reasoning")),
        shows="reasoning_content",
    ),
)
"""Forms within a turn, which are given last."""
JOINS: tuple[Form, ...] = (
    Form(([U, A, A, U],), (forms.assistants_joined,)),
    Form(([U, CALLS, result_of(), U], [U, CALLS, result_of(), U, A, U]), (forms.users_in_results,)),
    Form(([U, U], [U, A, U, U, A, U]), (forms.users_joined,)),
)
"""Forms of turns in a row."""
ORDERS: tuple[Form, ...] = (
    Form(([U, A, S, U], [U, S], [U, A, U, S, A, U]), (forms.later_systems_as_users,), in_order=True),
    Form(([S, S, U],), (forms.leading_systems_joined,)),
    Form(([S, U], [S, U, A, U]), (forms.systems_in_users,)),
    Form(
        ([U, CALLS_BESIDE, result_of(), A, U], [U, CALLS_BESIDE, result_of()]),
        (forms.calls_behind_content, forms.calls_behind_content_and_user),
    ),
    Form(([U, TWO_CALLS, *TWO_RESULTS, A, U], [U, TWO_CALLS, *TWO_RESULTS]), (forms.one_call_a_turn,)),
)
"""Forms of the order of turns, in the order in which they are given; those of `JOINS` follow."""
SAFE = (
    *(forms.later_systems_as_users, forms.leading_systems_joined, forms.systems_in_users, forms.one_call_a_turn),
    *(form.others[0] for form in JOINS),
)
"""Orders that any template takes which takes one of them."""


def nine_digits(i: int, name: str) -> str:
    """Return an id as Mistral's templates demand it."""
    return f"{i:09d}"


def kimi_id(i: int, name: str) -> str:
    """Return an id as Kimi's models write it: they imitate others."""
    return f"functions.{name}:{i}"


NAMES: tuple[Form, ...] = (
    Form(([U, NAMELESS, result_of("")],), (forms.identified(nine_digits, only_missing=True),)),
    Form(([U, FOREIGN, result_of("toolu_01.a-B")],), (forms.identified(nine_digits),)),
)
CUT_CALL = Form(([U, CUT, result_of()],), (forms.arguments_as_objects,))
REASONING = Form(
    ([U, {**A, **THOUGHT}, U], [U, {**CALLS_BESIDE, **THOUGHT}, result_of()]),
    (
        *(forms.reasoning_beside(True, False), forms.reasoning_beside(False, True)),
        forms.reasoning_beside(True, True),
    ),
)


class Words(NamedTuple):
    """A chat with a word in the place of each text."""

    turns: list[Turn]
    places: list[tuple[int, str, str]]
    """Of each word: index of its turn, key of the turn, and the word."""


def in_words(turns: Sequence[Turn], has_images: bool = False) -> Words:
    """`has_images`: the content may have marks of images, which stay."""
    found: list[Turn] = []
    places: list[tuple[int, str, str]] = []
    names: dict[str, str] = {}

    def word(i: int, key: str) -> str:
        made = f"zq{len(places)}x"
        places.append((i, key, made))
        return made

    for i, turn in enumerate(turns):
        made = dict(turn)
        if has_images and turn["content"]:
            made["content"] = image_turns.in_words(turn["content"], functools.partial(word, i, "content"))
        elif turn["content"] and turn["content"].strip():
            made["content"] = word(i, "content")
        if turn.get("reasoning_content"):
            made["reasoning_content"] = word(i, "reasoning_content")
        if calls := turn.get("tool_calls"):
            made["tool_calls"] = [_call_in_words(call, functools.partial(word, i)) for call in calls]
            for call, new in zip(calls, made["tool_calls"], strict=True):
                names[call["function"]["name"]] = new["function"]["name"]
        if turn["role"] == "tool" and "name" in turn:
            made["name"] = names.get(turn["name"], turn["name"])
        found.append(made)
    return Words(found, places)


def _call_in_words(call: Mapping[str, Any], word: Callable[[str], str]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    name = word("tool_calls")
    if isinstance(given, str):
        arguments: Any = f'{{"a": "{word("tool_calls")}'
    else:
        arguments = {word(ARGUMENT): word("tool_calls")} if given else {}
    return {**call, "function": {"name": name, "arguments": arguments}}
