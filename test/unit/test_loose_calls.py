"""Hermes' calls without its mark: within `<tools>`, in a code fence, or alone."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.http.messages.call_formats import HermesParser
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.message_parser import MessagePlan

PLAN = MessagePlan(None, False, True, HermesParser, ("add", "look"), True)
ADD, LOOK = '{"name": "add", "arguments": {"a": "```"}}', '{"name": "look", "arguments": {}}'
BOTH = [("add", {"a": "```"}), ("look", {})]


def read(text: str, sizes: list[int], is_whole: bool = True, plan: MessagePlan = PLAN) -> tuple[str, list[Any]]:
    parser, at, found = plan.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(parser.push(text[at : at + size]))
        at += size
    message = joined([*found, parser.finish(is_whole)])
    message = MessageDelta(message) if isinstance(message, str) else message
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.calls]


CALLS: list[tuple[str, str, list[Any]]] = [
    (f"<tools>\n{ADD}\n</tools>", "", BOTH[:1]),
    (f"Well.\n<tools>{ADD}</tools>\n<tools>{LOOK}</tools> Done.", "Well.Done.", BOTH),
    (f"<tools>\n{ADD}\n{LOOK}\n</tools>", "", BOTH),
    (f"<tools>[{ADD}, {LOOK}]</tools>", "", BOTH),
    (f"<tools>\n{ADD}", "", BOTH[:1]),
    (f"<tools>\n{ADD}\n</tools>\n<tool_call>\n{LOOK}\n</tool_call>", "", BOTH),
    (f"```json\n{ADD}\n```", "", BOTH[:1]),
    (f"```\n{ADD}\n```\nThat adds.", "That adds.", BOTH[:1]),
    (f"I add.\n```json\n{ADD}\n```\n", "I add.", BOTH[:1]),
    (f"I add. ```json\n[{ADD},\n{LOOK}]\n```", "I add. ", BOTH),
    (f"I add.\n\n```json\n{ADD}\n{LOOK}```", "I add.\n", BOTH),
    (f"First\n```json\n{ADD}\n```\n\n```json\n{LOOK}\n```", "First", BOTH),
    (f"I add.\n```json\n{ADD}", "I add.", BOTH[:1]),
    (f"Code:\n```python\nadd()\n```\nSo:\n```json\n{ADD}\n```", "Code:\n```python\nadd()\n```\nSo:", BOTH[:1]),
    (ADD, "", BOTH[:1]),
    (f"{ADD}\n{LOOK}", "", BOTH),
]


@pytest.mark.parametrize(("text", "content", "expected"), CALLS)
def test_a_call_without_the_mark_of_its_format_is_one(text: str, content: str, expected: list[Any]) -> None:
    for size in (1, 2, 5, len(text)):
        assert read(text, [size]) == (content, expected), text
        assert read(text, [size], plan=PLAN._replace(is_parallel=False))[1] == expected[:1]


TOOL = '{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}'
NO_CALLS = [
    f"<tools>\n{TOOL}\n</tools>",
    '<tools>\n{"name": "add", "parameters": {"type": "object"}}\n</tools>',
    '<tools>{"name": "other", "arguments": {}}</tools>',
    f"You may write\n```json\n{ADD}\n```\nto add.",
    f"You may write\n```json\n{ADD}\n```\nor\n```json\n{LOOK}\n```\nto add.",
    'So\n```json\n{"name": "add"}\n```',
    'So\n```json\n{"name": "add", "arguments": {}, "result": 5}\n```',
    'So\n```json\n{"answer": [1]}\n```',
    f"So\n```json\n{ADD}, 5\n```",
    '{"name": "add"}',
    f"The object {ADD}",
    "```python\nprint(1)\n```",
    "``` ```",
    "So `` and `",
]


def bare(text: str) -> str:
    """Return text without marks, which content need not have."""
    return re.sub(r"</?tool(s|_call)>", "", text).strip()


@pytest.mark.parametrize("text", NO_CALLS)
def test_an_object_that_may_be_meant_for_a_reader_is_content(text: str) -> None:
    for size in (1, 2, 5, len(text)):
        content, found = read(text, [size])
        assert (bare(content), found) == (bare(text), []), text


def test_a_fence_that_was_cut_off_is_content() -> None:
    text = f"I add.\n```json\n{ADD}\n```"
    for end in range(len(text)):
        assert read(text[:end], [3], False) == (text[:end], [])


def test_while_calls_are_enforced_only_those_with_the_mark_are_some() -> None:
    for text, _, _ in CALLS[:3] + CALLS[6:9] + CALLS[-1:]:
        if "<tool_call>" not in text:
            content, found = read(text, [4], plan=PLAN._replace(is_enforced=True))
            assert (bare(content), found) == (bare(text), [])


def test_code_streams_at_once() -> None:
    parser, shown = PLAN.parser(), ""
    for text in ("So:\n", "```python\nx", " = 1\n", "```\n\n", '```json\n{"x"', ": 1}\n```"):
        shown += str(parser.push(text))
    assert shown == 'So:\n```python\nx = 1\n```\n\n```json\n{"x": 1}'
    assert parser.finish() == "\n```"


PIECES = ["<tools>", "</tools>", "```", "```json\n", "<tool_call>", "</tool_call>", ADD, LOOK, "[", "]", ",", "}", "x"]


@given(st.lists(st.sampled_from([*PIECES, "\n", " ", '{"name": "add", '])), st.integers(1, 9), st.booleans())
def test_the_cut_of_a_text_does_not_matter(pieces: list[str], cut: int, is_whole: bool) -> None:
    text = "".join(pieces)
    content, found = read(text, [len(text) + 1], is_whole)
    assert read(text, [cut], is_whole) == (content, found)
    assert found or bare(content) == bare(text)
