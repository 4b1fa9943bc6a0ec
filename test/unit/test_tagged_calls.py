"""Calls whose arguments are tagged texts: Qwen3-Coder, GLM-4.5, MiniMax-M2."""

from __future__ import annotations

import itertools
import json
import re
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


def bare(text: str) -> str:
    """Return text without the tags of all formats; their names stay."""
    text = re.sub(r"</?(?:tool_call|minimax:tool_call|arg_key|arg_value)>|</(?:function|invoke|parameter)>", "", text)
    return re.sub(r'<(?:function=|invoke name=|parameter=|parameter name=)"?([^>"\n]*)"?>', r"\1", text)


def rendered(calls: type[TaggedParser], given: list[tuple[str, dict[str, Any]]]) -> str:
    template = ChatTemplate({"default": "{% set calls = messages[0].tool_calls %}" + TEMPLATES[calls]}, {})
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in given]
    return template.render([{"role": "assistant", "content": "", "tool_calls": made}], None, False, {})


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["{}", 'a <parameter name="b">c</parameter>', "</function>", "1", "true", '"x"', "<tool_call>", "[1, 2", "\\n\t{"]
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
            assert (content, found) == (bare(text).lstrip("\n" * text.startswith("\n")), []), text[:80]


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


QWEN_BODY = "<parameter=path>\nRome\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
GLM_BODY = "<arg_key>path</arg_key><arg_value>Rome</arg_value><arg_key>count</arg_key><arg_value>3</arg_value>"
MINIMAX_BODY = '<parameter name="path">Rome</parameter>\n<parameter name="count">3</parameter>\n'
QWEN_HEAD, QWEN_END = "<tool_call>\n<function=write>\n", "</function>\n</tool_call>"
GLM_HEAD, GLM_END = "<tool_call>write", "</tool_call>"
MINIMAX_HEAD, MINIMAX_END = '<minimax:tool_call>\n<invoke name="write">\n', "</invoke>\n</minimax:tool_call>"
LACKING = [
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("</parameter>\n", "", 1) + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.removesuffix("</parameter>\n") + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("</parameter>\n", "") + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("</parameter>", "<parameter>", 1) + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("</parameter>", "</paramter>") + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("<parameter=count>", "<parameter=count") + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("<parameter=count>", "<param=count>") + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("<parameter=count>", '<parameter name="count">') + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("</parameter>", "</parameter></parameter>") + QWEN_END),
    (QwenCoderParser, QWEN_HEAD.removeprefix("<tool_call>\n") + QWEN_BODY + QWEN_END),
    (QwenCoderParser, QWEN_HEAD.removeprefix("<tool_call>\n") + QWEN_BODY + "</function>"),
    (QwenCoderParser, QWEN_HEAD.replace("<function=write>", "<function=functions.write>") + QWEN_BODY + QWEN_END),
    (QwenCoderParser, QWEN_HEAD.replace("<function=write>", '<function name="write">') + QWEN_BODY + QWEN_END),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY + "</tool_call>"),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY + "</function>"),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY.removesuffix("\n</parameter>\n")),
    (QwenCoderParser, QWEN_HEAD + QWEN_BODY + QWEN_END + QWEN_END),
    (GLMParser, GLM_HEAD + GLM_BODY.replace("<arg_key>count", "count") + GLM_END),
    (GLMParser, GLM_HEAD + GLM_BODY.replace("path</arg_key>", "path") + GLM_END),
    (GLMParser, GLM_HEAD + GLM_BODY.replace("count</arg_key>", "count") + GLM_END),
    (GLMParser, GLM_HEAD + GLM_BODY.replace("<arg_value>", "", 1) + GLM_END),
    (GLMParser, GLM_HEAD + GLM_BODY.replace("</arg_value>", "", 1) + GLM_END),
    (GLMParser, GLM_HEAD + GLM_BODY.removesuffix("</arg_value>") + GLM_END),
    (GLMParser, GLM_HEAD + "\n" + GLM_BODY.removeprefix("<arg_key>") + GLM_END),
    (GLMParser, GLM_HEAD + GLM_BODY),
    (CompactGLMParser, GLM_HEAD + GLM_BODY.replace("<arg_value>", "<arg_value><arg_value>") + GLM_END),
    (MiniMaxParser, MINIMAX_HEAD + MINIMAX_BODY.replace("</parameter>", "", 1) + MINIMAX_END),
    (MiniMaxParser, MINIMAX_HEAD + MINIMAX_BODY.removesuffix("</parameter>\n") + MINIMAX_END),
    (MiniMaxParser, MINIMAX_HEAD.removeprefix("<minimax:tool_call>\n") + MINIMAX_BODY + MINIMAX_END),
    (MiniMaxParser, MINIMAX_HEAD + MINIMAX_BODY + "</minimax:tool_call>"),
    (MiniMaxParser, MINIMAX_HEAD + MINIMAX_BODY + "</invoke>"),
    (QwenCoderParser, '<tool_call>\n{"name": "write", "arguments": {"path": "Rome", "count": 3}}\n</tool_call>'),
    (GLMParser, '<tool_call>{"name": "write", "arguments": {"path": "Rome", "count": 3}}</tool_call>'),
]


@pytest.mark.parametrize(("calls", "text"), LACKING)
def test_a_call_with_a_tag_missing_or_misspelled_is_what_it_plainly_means(calls: type[TaggedParser], text: str) -> None:
    expected = {"path": "Rome", "count": 3}
    other = calls.written("look")
    for ahead, behind in (("", ""), ("Well.\n", "\n" + "".join(other))):
        for size in (1, 3, 7, 999):
            content, found = read(plan(calls), ahead + text + behind, [size])
            assert content == ahead.removesuffix("\n") or content == ahead, (text, content)
            assert [(name, json.loads(given)) for name, given in found] == [
                ("write", expected),
                *([("look", {})] if behind else []),
            ], text


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("<parameter=count>\n", "") + QWEN_END),
        (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("\n</parameter>", "", 1).replace("count", "other") + QWEN_END),
        (QwenCoderParser, QWEN_HEAD + QWEN_BODY.replace("<parameter=count>", "<count>") + QWEN_END),
        (QwenCoderParser, "<tool_call>\n" + QWEN_BODY + QWEN_END),
        (GLMParser, GLM_HEAD + GLM_BODY.replace("<arg_key>count</arg_key><arg_value>", "") + GLM_END),
        (GLMParser, GLM_HEAD + GLM_BODY.replace("<arg_key>count", "other") + GLM_END),
        (MiniMaxParser, MINIMAX_HEAD + MINIMAX_BODY.replace('<parameter name="count">', "") + MINIMAX_END),
    ],
)
def test_a_call_whose_argument_would_have_swallowed_a_tag_is_text_without_tags(
    calls: type[TaggedParser], text: str
) -> None:
    for size in (1, 3, 999):
        content, found = read(plan(calls), text, [size])
        assert not found and "Rome" in content and "3" in content and bare(content) == content
    begun = text[: text.index("Rome") + 2]  # cut off by `max_tokens`
    content, found = read(plan(calls), begun, [3], False)
    assert not found and content.endswith("Ro") and bare(content) == content


@pytest.mark.parametrize("kind", ["object", "array"])
def test_a_literal_of_python_is_an_object_or_array(kind: str) -> None:
    schema = {"type": "object", "properties": {"o": {"type": kind}}}
    how = plan(QwenCoderParser)._replace(names={"f": schema})
    for text, expected in (
        ("{'a': 1, 'b': 'x'}", {"a": 1, "b": "x"}),
        ("{'a': {'b': [True, None, ('x', \"it's\")]}}", {"a": {"b": [True, None, ["x", "it's"]]}}),
        ("('a', 1,)", ["a", 1]),
        ("{1: 'a', -2.5: {True: 'b: c'}}", {"1": "a", "-2.5": {"true": "b: c"}}),
        ("{a: 'b'}", "{a: 'b'}"),
        ("[('a'), ()]", ["a", []]),
        ("{'it\\'s': 'say \"x\"\\n'}", {"it's": 'say "x"\n'}),
        ("{'a': f()}", "{'a': f()}"),
        ("{'a', 'b'}", "{'a', 'b'}"),
        ("{'it's': 1}", "{'it's': 1}"),
        ("(" * 20_000 + ")" * 20_000, []),
        ("['a', " + "[" * 20_000 + "]" * 20_001, "['a', " + "[" * 20_000 + "]" * 20_001),
    ):
        body = f"<tool_call>\n<function=f>\n<parameter=o>\n{text}\n</parameter>\n</function>\n</tool_call>"
        _, [(_, arguments)] = read(how, body, [4096])
        assert json.loads(arguments) == {"o": expected}, text


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
