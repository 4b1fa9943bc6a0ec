"""Calls in a section between marks: Kimi-K2 and DeepSeek."""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.assets import TINY_MODEL_DIR
from chitu.grammars import GrammarCompiler
from chitu.grammars.marks import with_marks
from chitu.grammars.tool_calls import tool_calls_lark
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import MAX_HEAD_CHARS
from chitu.http.messages.message_parser import MessageFormat, MessagePlan
from chitu.http.messages.section_calls import (
    KIMI_BEGIN,
    DeepSeekParser,
    FencedDeepSeekParser,
    KimiParser,
    SectionParser,
)
from chitu.protocol import ToolCalls
from chitu.tokenizer import Tokenizer
from chitu.tokenizer.chat_template import ChatTemplate

TINY = Tokenizer.load(TINY_MODEL_DIR)
NAMES = ("add", "functions.look", "function")
PARSERS: list[type[SectionParser]] = [KimiParser, DeepSeekParser, FencedDeepSeekParser]
JSON = "{{ call.function.arguments | tojson }}"
# The forms in which the models' own chat templates write calls; the rest of them is of no matter here.
TEMPLATES: dict[type[SectionParser], str] = {
    KimiParser: "<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>{{ call.id }}"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|>{{% endfor %}}<|tool_calls_section_end|>",
    DeepSeekParser: "<｜tool▁calls▁begin｜>{% for call in calls %}<｜tool▁call▁begin｜>{{ call.function.name }}"
    f"<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>{{% endfor %}}<｜tool▁calls▁end｜>",
    FencedDeepSeekParser: "<｜tool▁calls▁begin｜>{% for call in calls %}{{ '' if loop.first else '\n' }}"
    "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}{{ '\n```json\n' }}"
    f"{JSON}{{{{ '\n```' }}}}<｜tool▁call▁end｜>{{% endfor %}}<｜tool▁calls▁end｜>",
}


def plan(calls: type[SectionParser], parallel: bool = True) -> MessagePlan:
    return MessagePlan(None, False, True, calls, NAMES, parallel)


def message_of(how: MessagePlan, text: str, sizes: list[int], is_whole: bool = True) -> MessageDelta:
    parser, at, found = how.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(parser.push(text[at : at + size]))
        at += size
    message = joined([*found, parser.finish(is_whole)])
    return MessageDelta(message) if isinstance(message, str) else message


def read(how: MessagePlan, text: str, sizes: list[int], is_whole: bool = True) -> tuple[str, list[tuple[str, str]]]:
    message = message_of(how, text, sizes, is_whole)
    return message.content, [(call.name, call.arguments) for call in message.calls]


def rendered(calls: type[SectionParser], given: list[tuple[str, dict[str, Any]]]) -> str:
    template = ChatTemplate({"default": "{% set calls = messages[0].tool_calls %}" + TEMPLATES[calls]}, {})
    made = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(given)
    ]
    return template.render([{"role": "assistant", "content": "", "tool_calls": made}], None, False, {})


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["{}", '"}', "\\", "a\nb\t", "```", *(mark for calls in PARSERS for mark in calls.needed)]
)
VALUES = st.dictionaries(
    TEXTS,
    st.recursive(
        TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
SOME = st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=3)


def raw_breaks(text: str) -> str:
    """Return JSON in which line breaks are not escaped."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\\n", lambda found: found[1] + "\n", text)


@pytest.mark.parametrize("calls", PARSERS)
@given(
    given_calls=SOME,
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    end=st.integers(0, 900),
    is_raw=st.booleans(),
)
def test_what_the_template_writes_is_read_as_these_calls_however_it_is_cut(
    calls: type[SectionParser],
    given_calls: list[tuple[str, dict[str, Any]]],
    sizes: list[int],
    end: int,
    is_raw: bool,
) -> None:
    text = rendered(calls, given_calls)
    text = raw_breaks(text) if is_raw else text
    for how in ([len(text) + 9], sizes):
        content, found = read(plan(calls), "Well." + text, how)
        assert content == "Well.", (content, text)
        assert [(name, json.loads(arguments)) for name, arguments in found] == given_calls, text
    for cut in (text[:end], text[end:]):  # by `max_tokens`, or nonsense
        whole, streamed = read(plan(calls), cut, [len(cut) + 1], False), read(plan(calls), cut, sizes, False)
        assert whole == streamed
        for name, arguments in whole[1]:
            assert name in NAMES and isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("calls", PARSERS)
def test_what_the_model_plainly_means_is_a_call(calls: type[SectionParser]) -> None:
    assert MessageFormat.of(TEMPLATES[calls]).calls is calls
    begin, end = calls.written("add")
    begin += f"0{calls.index_end}" if calls.index_end else ""
    one = [("add", '{"a": 1}')]
    for text, expected in (
        (begin + '{"a": 1}' + end + calls.end_mark, one),
        (begin + ' {"a": 1} ' + end, one),
        (begin + '{"a": 1}', one),  # the marks at the end were left out
        (begin + '{"a": 1}}' + end + calls.end_mark, one),
        (begin + '"{\\"a\\": 1}"' + end + calls.end_mark, one),
        (begin + end + calls.end_mark, [("add", "{}")]) if calls is not FencedDeepSeekParser else ("", []),
        (
            begin.replace(calls.head_begins, f"\n{calls.head_begins}\n") + '{"a": 1}\n' + end + "\n" + calls.end_mark,
            one,
        ),
    ):
        for size in (1, 5, 999):
            assert read(plan(calls), text, [size]) == ("", expected), text
    behind = begin + '{"a": 1}' + end + calls.end_mark + " Done."
    assert read(plan(calls), behind, [4]) == ("Done.", one)
    assert read(plan(calls, parallel=False), behind, [4]) == ("", one)


@pytest.mark.parametrize("calls", PARSERS)
def test_what_is_no_call_is_content(calls: type[SectionParser]) -> None:
    begin, end = calls.written("none")
    right = calls.written("add")[0] + (f"0{calls.index_end}" if calls.index_end else "")
    for text in (
        begin + "0" + calls.index_end + "{}" + end,
        calls.trigger + " and so on",
        calls.trigger + calls.head_begins + "x" * 2 * MAX_HEAD_CHARS,
        right + "text" + end,
        right + "[1]" + end,
        calls.head_begins + "add",
    ):
        expected = functools.reduce(lambda left, mark: left.replace(mark, ""), calls.needed, text)
        for size in (1, 7, len(text)):
            assert read(plan(calls), text, [size]) == (expected, []), text[:80]


def test_the_ids_of_kimi_are_those_that_it_wrote_and_differ() -> None:
    written = "".join(
        f"<|tool_call_begin|>{label}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for label in ("functions.add:7", "functions.add:7", "add:2", "functions.add:a", "functions.functions.look:1")
    )
    for text in ("<|tool_calls_section_begin|>" + written, "<|tool_calls_section_begin|>" + written[:-230]):
        message = message_of(plan(KimiParser), text, [6])
        assert [call.id for call in message.calls][:2] == ["functions.add:7", "functions.add:8"]
    message = message_of(plan(KimiParser), KIMI_BEGIN + written.replace("functions.add:a", "functions.add"), [6])
    assert [call.id.rpartition(":")[2] for call in message.calls] == ["7", "8", "2", "3", "1"]
    assert [call.name for call in message.calls] == ["add"] * 4 + ["functions.look"]


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("functions_add_1", "add"),
        ("add:0", "add"),
        ("functions.add", "add"),
        ("functions.add:0:1", "add"),
        ("functions:add:call_3", "add"),
        ("function.add-2", "add"),
        ("Functions.Add:0", "add"),
        ("tools.get_it:0", "get-it"),
        ("functions.get_it_2:0", "get_it_2"),
        ("functions. add:0", "add"),
        ("functions add:0", "add"),
        ("call_abc123", ""),
        ("functions.adder:0", ""),
        ("functions.add_all:0", ""),
    ],
)
def test_an_id_of_kimi_that_is_a_little_off_names_its_tool(label: str, name: str) -> None:
    how = MessagePlan(None, False, True, KimiParser, ("add", "get-it", "get_it_2", "look"), True)
    one = f"{KIMI_BEGIN}<|tool_call_begin|>{label}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    for size in (1, 3, 999):
        assert read(how, one, [size]) == (("", [(name, "{}")]) if name else (label + "{}", []))


def test_an_id_of_kimi_that_names_nothing_is_of_the_only_tool_if_the_arguments_fit() -> None:
    only = {"add": {"properties": {"a": {}, "b": {}}, "required": ["a"]}}
    begin = f"{KIMI_BEGIN}<|tool_call_begin|>call_abc123<|tool_call_argument_begin|>"
    for names, arguments, is_call in (
        (only, '{"a": 1}', True),
        (only, '{"a": 1, "b": 2}', True),
        (only, '{"a": 1, "c": 2}', False),
        (only, '{"b": 1}', False),
        (only, "", False),
        ({"look": None}, "", True),
        ({**only, "look": None}, '{"a": 1}', False),
    ):
        how = MessagePlan(None, False, True, KimiParser, names, True)
        for size in (1, 3, 999):
            content, found = read(how, begin + arguments + "<|tool_call_end|>", [size])
            expected = [(next(iter(names)), arguments or "{}")]
            assert (content, found) == (("", expected) if is_call else ("call_abc123" + arguments, []))


@pytest.mark.parametrize("calls", PARSERS)
@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_an_enforced_call_follows_its_schema_and_is_read_as_it_was_written(
    calls: type[SectionParser], is_required: bool, is_parallel: bool
) -> None:
    parameters = {"properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    tools = [{"function": {"name": "add", "parameters": parameters}}, {"function": {"name": "functions.look"}}]
    grammar = grammar_of_calls(calls, tools, ["p"] * len(tools), is_parallel, is_required)
    matcher_of = GrammarCompiler(TINY, TINY.vocab_size).compile(grammar).matcher

    def allows(text: str) -> bool:
        matcher = matcher_of()
        for token in TINY.encode(text, add_special_tokens=False):
            if not matcher.mask()[token // 32] >> (token % 32) & 1:
                return False
            matcher.consume([token])
        return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)

    def call(name: str, arguments: str, index: str = "12") -> str:
        begin, end = calls.written(name)
        index = index + calls.index_end if calls.index_end else ""
        return begin.removeprefix(calls.trigger) + index + arguments + end

    def section(*written: str) -> str:
        return calls.trigger + (calls.separator or "").join(written) + calls.end_mark

    add, look = call("add", '{"x": 3}'), call("functions.look", '{"of": ["any", 1]}')
    assert allows(section(add)) and allows(section(look)) and allows(section(add, look)) is is_parallel
    found = read(plan(calls), section(add, look), [4])
    assert found == ("", [("add", '{"x": 3}'), ("functions.look", '{"of": ["any", 1]}')])
    for text in (section(), section(call("add", '{"x": "3"}')), section(call("none", "{}")), calls.trigger + add):
        assert not allows(text), text
    assert allows("Free text, <b>.") is not is_required
    assert allows("Well. " + section(add)) is not is_required
    assert allows(section(add) + section(look)) is (is_parallel and not is_required)
    if calls.index_end:
        assert not allows(section(call("add", '{"x": 3}', "a"))) and not allows(section(call("add", '{"x": 3}', "")))


@pytest.mark.parametrize("calls", PARSERS)
def test_marks_are_written_as_their_tokens(calls: type[SectionParser]) -> None:
    ids = {mark: 40 + i for i, mark in enumerate(calls.needed)}
    grammar = grammar_of_calls(calls, [{"function": {"name": "add"}}], ["p"], True, True)
    lark = tool_calls_lark(msgspec.json.decode(grammar.text, type=ToolCalls), ids, {})
    assert all(f"<[{token}]>" in lark for token in ids.values())
    assert with_marks("a<m>b<mm><m>", {"<m>": 1, "<mm>": 2, "": 3}) == (
        '"a" ("<m>" | <[1]>) "b" ("<mm>" | <[2]>) ("<m>" | <[1]>)'
    )


@pytest.mark.parametrize("calls", PARSERS)
def test_a_long_call_is_read_in_one_pass(calls: type[SectionParser]) -> None:
    text = rendered(calls, [("add", {"a": "x" * 100_000})])
    content, [(_, arguments)] = read(plan(calls), text, [2])
    assert content == "" and len(json.loads(arguments)["a"]) == 100_000
