"""Calls in Python: `[f(a=1)]`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.assets import TINY_MODEL_DIR
from chitu.grammars import GrammarCompiler
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.call_objects import joined
from chitu.http.messages.call_parser import MAX_HEAD_CHARS
from chitu.http.messages.message_parser import MessageFormat, MessagePlan
from chitu.http.messages.pythonic_calls import PythonicParser
from chitu.tokenizer import Tokenizer
from chitu.tokenizer.chat_template import ChatTemplate

TINY = Tokenizer.load(TINY_MODEL_DIR)
NAMES = ("add", "look.at", "a")
PLAN = MessagePlan(None, False, True, PythonicParser, NAMES, True)
Read = tuple[str, list[tuple[str, str]]]
# The form in which such templates write a call; the rest of them is of no matter here.
TEMPLATE = (
    "{% for message in messages %}{{ '<|header_start|>' + message.role + '<|header_end|>\n\n' + message.content }}"
    "{% for call in message.tool_calls %}{{ '[' if loop.first else ', ' }}{{ call.function.name + '(' }}"
    "{% for key in call.function.arguments %}{{ key + '=' + call.function.arguments[key] | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ ')' }}{{ ']' if loop.last else '' }}{% endfor %}{% endfor %}"
)


def read(text: str, sizes: list[int], is_whole: bool = True, plan: MessagePlan = PLAN) -> Read:
    parser, at, found = plan.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(parser.push(text[at : at + size]))
        at += size
    message = joined([*found, parser.finish(is_whole)])
    return (message, []) if isinstance(message, str) else (message.content, [c[3:] + c[1:2] for c in message.calls])


CALLS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("[add(a=1)]", "", [("add", '{"a": 1}')]),
    ("[add(a=1), look.at()]", "", [("add", '{"a": 1}'), ("look.at", "{}")]),
    ("<|python_start|>[add(a=1)]<|python_end|>", "", [("add", '{"a": 1}')]),
    ("<|python_tag|> [ a () ]", "", [("a", "{}")]),
    ("Well. <|python_start|>[a()]<|python_end|> Done.", "Well. Done.", [("a", "{}")]),
    (
        """[add(a='it\\'s "x" )]', b=[True, None, (1, 2.5)], c={'k': False,}, d="\\x41\\U0001f600\\d",)]""",
        "",
        [
            (
                "add",
                '{"a": "it\'s \\"x\\" )]", "b": [true, null, [1, 2.5]], "c": {"k": false}, '
                '"d": "A\N{GRINNING FACE}\\\\d"}',
            )
        ],
    ),
    ("[add(a='x\ny', b=\"\t\")]", "", [("add", '{"a": "x\\ny", "b": "\\t"}')]),
    ('[add(a={"x": true}, b=null)]', "", [("add", '{"a": {"x": true}, "b": null}')]),
    ("[add(a=1), none(b=2)]", ", none(b=2)]", [("add", '{"a": 1}')]),
    ("[add(a=1)", "", [("add", '{"a": 1}')]),
]
TEXTS_ONLY = [
    *(
        "[add](http://x)",
        "[1, 2]",
        "[adding(a=1)]",
        "[none()]",
        "[add(1)]",
        "[add(a=b)]",
        "[add(a=f(x=1))]",
        "[add(a=1",
    ),
    *(
        "add(a=1)",
        "I call [add(a=1)]",
        "[add",
        "[",
        " ",
        "[add(a={1, 2})]",
        "[add(a='x' 'y')]",
        "[[add()]]",
        "[add(**a)]",
    ),
    "[" + " " * MAX_HEAD_CHARS + "add()]",
]


@pytest.mark.parametrize(("text", "content", "expected"), CALLS)
def test_calls_are_read_however_the_text_is_cut(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    for size in (1, 2, 5, len(text)):
        assert read(text, [size]) == (content, expected)


@pytest.mark.parametrize("text", TEXTS_ONLY)
def test_what_is_no_call_is_content_as_it_was_written(text: str) -> None:
    for size in (1, 4, len(text)):
        assert read(text, [size]) == (text, [])


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["{}", "'", '"', "\\", "a\nb\t", ")]", "[add()]", "<|python_end|>", ", a=1", "=", "\x00\x1f\x7f\x9f", "\U000e0001"]
)
VALUES = st.dictionaries(
    st.sampled_from(["a", "b_2", "größe", "True"]),
    st.recursive(
        TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def listed(calls: list[tuple[str, dict[str, Any]]], write: Callable[[Any], str], separator: str) -> str:
    made = (f"{name}({separator.join(f'{key}={write(v)}' for key, v in given.items())})" for name, given in calls)
    return f"[{', '.join(made)}]"


@given(
    given_calls=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=3),
    write=st.sampled_from([repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)]),
    separator=st.sampled_from([", ", ",", ",\n  "]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    end=st.integers(0, 600),
    noise=st.lists(TEXTS | st.sampled_from(["[add(", "a=", ")", "]", ", look.at("]), max_size=6).map("".join),
)
def test_a_stream_of_calls_is_the_whole_answer_however_it_is_cut(
    given_calls: list[tuple[str, dict[str, Any]]],
    write: Callable[[Any], str],
    separator: str,
    sizes: list[int],
    end: int,
    noise: str,
) -> None:
    text = listed(given_calls, write, separator)
    for how in ([len(text)], sizes):
        content, calls = read(text, how)
        assert content == "" and [(name, json.loads(given)) for name, given in calls] == given_calls, text
    for cut in (text[:end], text[end:], noise, noise + text):
        for is_whole in (True, False):
            whole = read(cut, [len(cut) + 1], is_whole)
            assert read(cut, sizes, is_whole) == whole, cut
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])


def test_what_the_template_writes_is_read_as_these_calls() -> None:
    assert MessageFormat.of(TEMPLATE) == (PythonicParser, None)
    calls = [
        {"function": {"name": "add", "arguments": {"a": 'ö"', "b": [1]}}},
        {"function": {"name": "a", "arguments": {}}},
    ]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = ChatTemplate({"default": TEMPLATE}, {}).render(turns, None, False, {}).rpartition("\n\n")[2]
    assert read(text, [3]) == ("", [("add", '{"a": "ö\\"", "b": [1]}'), ("a", "{}")])
    begin, end = PythonicParser.written("add")
    assert text.startswith(begin) and text.endswith(PythonicParser.end_mark) and end == ")"


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_an_enforced_call_follows_its_schema_and_is_read_as_it_was_written(
    is_required: bool, is_parallel: bool
) -> None:
    parameters = {
        "properties": {
            "o": {"enum": ["x", "y"]},
            "x": {"type": "integer"},
            "t": {"type": "string"},
            "l": {"type": "array"},
        },
        "required": ["x"],
    }
    tools = [
        {"function": {"name": "add", "parameters": parameters}},
        {"function": {"name": "look.at"}},
        {"function": {"name": "a", "parameters": {"additionalProperties": False}}},
    ]
    grammar = grammar_of_calls(PythonicParser, tools, ["p"] * len(tools), is_parallel, is_required)
    matcher_of = GrammarCompiler(TINY, TINY.vocab_size).compile(grammar).matcher

    def allows(text: str) -> bool:
        matcher = matcher_of()
        for token in TINY.encode(text, add_special_tokens=False):
            if not matcher.mask()[token // 32] >> (token % 32) & 1:
                return False
            matcher.consume([token])
        return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)

    for text, arguments in (
        ("[add(x=3)]", {"x": 3}),
        ('[add(o="y", x=3)]', {"o": "y", "x": 3}),
        ('[add(x=-3, t="a\\")]", l=[1,{"k":true}])]', {"x": -3, "t": 'a")]', "l": [1, {"k": True}]}),
        ("[add(x=3, l=[])]", {"x": 3, "l": []}),
        ('[look.at(any.thing="it", b=[1])]', {"any.thing": "it", "b": [1]}),
        ("[look.at()]", {}),
        ("[a()]", {}),
    ):
        assert allows(text), text
        content, [(_, found)] = read(text, [3])
        assert content == "" and json.loads(found) == arguments
    assert allows("[add(x=3), a()]") is is_parallel
    for text in ("[]", '[add(x="3")]', "[add()]", "[add(, x=3)]", '[add(o="z", x=3)]', '[add(x=3, o="y")]', "[none()]"):
        assert not allows(text), text
    for text in ("[a(x=1)]", "[a()] [a()]", "[a()], a()", '[add(x=3 t="")]', "[add(x=3, )]"):
        assert not allows(text), text
    assert allows("Free text, [with] (it).") is not is_required


def test_a_long_call_is_read_in_one_pass() -> None:
    long = "x'\"(" * 50_000
    content, [(_, arguments)] = read(listed([("add", {"a": long})], repr, ""), [2])
    assert content == "" and json.loads(arguments)["a"] == long
    deep = f"[add(a={'[' * 50_000}{']' * 50_000})]"
    assert read(deep, [4096]) == (deep, [])
    assert read("[add(a=1)] more", [2], plan=PLAN._replace(is_parallel=False)) == ("", [("add", '{"a": 1}')])
