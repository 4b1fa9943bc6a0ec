"""Calls whose arguments are tagged texts: Qwen3-Coder, GLM-4.5, MiniMax-M2."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.assets import TINY_MODEL_DIR
from chitu.grammars import GrammarCompiler
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.message_parser import MessageFormat, MessagePlan
from chitu.http.messages.tagged_calls import (
    MAX_ENDS,
    CompactGLMParser,
    GLMParser,
    MiniMaxParser,
    QwenCoderParser,
    TaggedParser,
)
from chitu.tokenizer import Tokenizer
from chitu.tokenizer.chat_template import ChatTemplate

TINY = Tokenizer.load(TINY_MODEL_DIR)
WRITE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mode": {"enum": ["new", "old"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "options": {"$ref": "#/$defs/Options"},
        "count": {"type": "integer"},
        "dry": {"type": "boolean"},
    },
    "required": ["path", "count"],
    "additionalProperties": False,
    "$defs": {"Options": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}},
}
NAMES = {"write": WRITE, "look": None}
PARSERS: list[type[TaggedParser]] = [QwenCoderParser, GLMParser, CompactGLMParser, MiniMaxParser]
# The forms in which the models' own chat templates write calls; the rest of them is of no matter here.
VALUE = "{{ value if value is string else value | tojson(ensure_ascii=False) }}"
ARGUMENTS = "{% for key, value in call.function.arguments | items %}"
TEMPLATES: dict[type[TaggedParser], str] = {
    QwenCoderParser: "{% for call in calls %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    f"{ARGUMENTS}<parameter={{{{ key }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>"
    "{% endfor %}",
    GLMParser: "{% for call in calls %}\n<tool_call>{{ call.function.name }}\n"
    f"{ARGUMENTS}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{{% endfor %}}</tool_call>"
    "{% endfor %}",
    CompactGLMParser: "{% for call in calls %}<tool_call>{{ call.function.name }}"
    f"{ARGUMENTS}<arg_key>{{{{ key }}}}</arg_key><arg_value>{VALUE}</arg_value>{{% endfor %}}</tool_call>"
    "{% endfor %}",
    MiniMaxParser: "<minimax:tool_call>\n{% for call in calls %}"
    '<invoke name="{{ call.function.name }}">\n'
    f'{ARGUMENTS}<parameter name="{{{{ key }}}}">{VALUE}</parameter>\n{{% endfor %}}</invoke>\n'
    "{% endfor %}</minimax:tool_call>",
}


def plan(calls: type[TaggedParser], parallel: bool = True) -> MessagePlan:
    return MessagePlan(None, False, True, calls, NAMES, parallel)


def read(how: MessagePlan, text: str, sizes: list[int], is_whole: bool = True) -> tuple[str, list[tuple[str, str]]]:
    parser, at, found = how.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(parser.push(text[at : at + size]))
        at += size
    message = joined([*found, parser.finish(is_whole)])
    if isinstance(message, str):
        return message, []
    return message.content, [(call.name, call.arguments) for call in message.calls]


def rendered(calls: type[TaggedParser], given: list[tuple[str, dict[str, Any]]]) -> str:
    template = ChatTemplate({"default": "{% set calls = messages[0].tool_calls %}" + TEMPLATES[calls]}, {})
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in given]
    return template.render([{"role": "assistant", "content": "", "tool_calls": made}], None, False, {})


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["{}", "</parameter>", "a\n</parameter>\nb", "</function>", "1", "true", '"x"', "<tool_call>", "[1, 2", "\\n\t{"]
)
SAFE = TEXTS.filter(lambda text: text.strip() != "null")
VALUES = st.fixed_dictionaries(
    {"path": SAFE, "count": st.integers()},
    optional={
        "text": st.none() | SAFE,
        "mode": st.sampled_from(["new", "old"]),
        "lines": st.lists(st.integers(), max_size=3),
        "options": st.dictionaries(st.just("a"), TEXTS),
        "dry": st.booleans(),
    },
)
SOME = st.lists(st.one_of(VALUES.map(lambda value: ("write", value)), st.just(("look", {}))), min_size=1, max_size=3)


@pytest.mark.parametrize("calls", PARSERS)
@given(given_calls=SOME, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9), end=st.integers(0, 500))
def test_what_the_template_writes_is_read_as_these_calls_however_it_is_cut(
    calls: type[TaggedParser], given_calls: list[tuple[str, dict[str, Any]]], sizes: list[int], end: int
) -> None:
    text = rendered(calls, given_calls)
    for how in ([len(text) + 1], sizes):
        content, found = read(plan(calls), "Well." + text, how)
        assert content == "Well.", (content, text)
        assert [(name, json.loads(arguments)) for name, arguments in found] == given_calls, text
    cut = text[:end]  # by `max_tokens`
    whole, streamed = read(plan(calls), cut, [len(cut) + 1], False), read(plan(calls), cut, sizes, False)
    assert whole == streamed
    for name, arguments in whole[1]:
        assert name in NAMES and isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("calls", PARSERS)
def test_the_format_is_that_of_the_template_that_writes_it(calls: type[TaggedParser]) -> None:
    assert MessageFormat.of(TEMPLATES[calls]).calls is calls
    begin, end = calls.written("look")
    for text in (begin + end, "Hi.\n" + begin + end, begin + calls.close):  # the last one without the mark's end
        content, found = read(plan(calls), text, [3])
        assert found == [("look", "{}")] and content in ("", "Hi."), text
    assert read(plan(calls), begin, [3]) == ("", [("look", "{}")]) if not issubclass(calls, GLMParser) else True


@pytest.mark.parametrize("calls", PARSERS)
def test_what_is_no_call_is_content(calls: type[TaggedParser]) -> None:
    begin, end = calls.written("write")
    other = calls.written("none")
    for text in (
        other[0] + other[1],
        calls.marks[0] + " and so on",
        f"{begin}<b>bold</b>{end}",
        begin + "x" * 3000,
        begin + "x" + calls.close * (MAX_ENDS + 9),
    ):
        for size in (1, 7, len(text)):
            content, found = read(plan(calls), text, [size])
            assert (content.strip(), found) == (text.strip(), []), text[:80]


def test_values_are_what_the_schema_says_and_what_the_model_plainly_means() -> None:
    def values(**given: str) -> Any:
        fields = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        begin, end = QwenCoderParser.written("write")
        _, [(_, arguments)] = read(plan(QwenCoderParser), begin + fields + end, [5])
        return json.loads(arguments)

    assert values(path="1", count="1", dry="True", lines="[1,]", options="{'a'", text="null", new="7") == {
        **{"path": "1", "count": 1, "dry": True, "lines": [1], "options": "{'a'", "text": None, "new": "7"},
    }
    assert values(path="\n a\n\n", count="many") == {"path": "\n a\n\n", "count": "many"}
    assert values(count="1, 2") == {"count": "1, 2"}


@pytest.mark.parametrize("calls", PARSERS)
@pytest.mark.parametrize("is_required", [False, True])
def test_an_enforced_call_follows_its_schema_and_is_read_as_it_was_written(
    calls: type[TaggedParser], is_required: bool
) -> None:
    tools = [{"function": {"name": "write", "parameters": WRITE}}, {"function": {"name": "look"}}]
    grammar = grammar_of_calls(calls, tools, ["p"] * len(tools), True, is_required)
    matcher_of = GrammarCompiler(TINY, TINY.vocab_size).compile(grammar).matcher

    def allows(text: str) -> bool:
        matcher = matcher_of()
        for token in TINY.encode(text, add_special_tokens=False):
            if not matcher.mask()[token // 32] >> (token % 32) & 1:
                return False
            matcher.consume([token])
        return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)

    def call(name: str, **given: str) -> str:
        form, (begin, end) = calls.fields, calls.written(name)
        assert form is not None
        return begin + "".join(f"{form.begin}{k}{form.middle}{v}{form.end}" for k, v in given.items()) + end

    right = [
        (call("write", path="a\nb </x>", count="3"), ("write", {"path": "a\nb </x>", "count": 3})),
        (
            call("write", path="", text="null", mode="old", lines="[1,2]", options='{"a": "b"}', count="3", dry="true"),
            ("write", {**{"path": "", "text": None, "mode": "old"}, "lines": [1, 2], "options": {"a": "b"}}),
        ),
        (call("look", **{"any.thing": "it is"}), ("look", {"any.thing": "it is"})),
    ]
    for text, (name, expected) in right:
        assert allows(text), text
        content, [(found, arguments)] = read(plan(calls), text, [4])
        assert content == "" and found == name and expected.items() <= json.loads(arguments).items()
    assert allows(right[0][0] + (calls.separator or "") + right[2][0])
    for text in (
        call("write", path="a"),
        call("write", count="3", path="a"),
        call("write", path="a", count="three"),
        call("write", path="a", mode="other", count="3"),
        call("write", path="a", count="3", more="x"),
        call("none"),
    ):
        assert not allows(text), text
    assert allows("Free text, <b>.") is not is_required


@pytest.mark.parametrize("calls", PARSERS)
def test_a_long_call_is_read_in_one_pass(calls: type[TaggedParser]) -> None:
    form, (begin, end) = calls.fields, calls.written("write")
    assert form is not None
    value = "x" * 100_000
    text = f"{begin}{form.begin}path{form.middle}{value}{form.end}{form.begin}count{form.middle}1{form.end}{end}"
    parser = plan(calls).parser()
    shown = [parser.push(text[at : at + 2]) for at in range(0, len(text), 2)]
    message = joined([*shown, parser.finish()])
    assert isinstance(message, MessageDelta) and json.loads(message.calls[0].arguments)["path"] == value
