"""Texts with calls of tools, and how tests read them."""

from __future__ import annotations

from hypothesis import strategies as st

from chitu.assets import TINY_MODEL_DIR
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.message_parser import (
    MARKS,
    MessagePlan,
    ReasoningMarks,
)
from chitu.tokenizer import Tokenizer

THINK = MARKS[0]
TINY = Tokenizer.load(TINY_MODEL_DIR)
NAMES = frozenset({"add", "look"})

Parser = type[CallParser] | None


def plan(
    calls: Parser,
    parallel: bool = True,
    marks: ReasoningMarks | None = None,
    inside: bool = False,
) -> MessagePlan:
    return MessagePlan(marks, inside, True, calls, NAMES, parallel)


def parts(how: MessagePlan, text: str, cut: int) -> list[str | MessageDelta]:
    parser = how.parser()
    shown = [parser.push(text[at : at + cut]) for at in range(0, len(text), cut)]
    return [*shown, parser.finish()]


def read(how: MessagePlan, text: str, cut: int = 1) -> tuple[str, str, list[tuple[str, str]]]:
    """Return content, reasoning, and calls by name and arguments; check their places and ids."""
    message = joined(parts(how, text, cut))
    if isinstance(message, str):
        return message, "", []
    assert [call.place for call in message.calls] == list(range(len(message.calls)))
    assert len({call.id for call in message.calls}) == len(message.calls)
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


ADD, LOOK = '{"a": "}{\\"\\\\", "b": [1, {"c": null}]}', "{}"
BOTH = [("add", ADD), ("look", LOOK)]


JSON_TEXTS = st.text(
    st.sampled_from("ab\n\t\r\x01\"\\{}[],:;é😀<>`'") | st.characters(codec="utf-8")
) | st.sampled_from(
    (
        "</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<|python_end|>",
        "```",
        '{"name": "look"}',
        "\ud83d",
    )
)
ARGUMENTS = st.dictionaries(
    JSON_TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | JSON_TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_TEXTS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
