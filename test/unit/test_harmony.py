"""Messages of gpt-oss: channels."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.assets import TINY_MODEL_DIR
from chitu.grammars import GrammarCompiler
from chitu.grammars.marks import behind_reasoning
from chitu.grammars.tool_calls import tool_calls_lark
from chitu.http.ask.bodies import ChatBody
from chitu.http.ask.served_model import ServedModel
from chitu.http.ask.turns import ChatTurns
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import MAX_HEAD_CHARS
from chitu.http.messages.harmony import ANALYSIS, CALL, END, FINAL, MESSAGE, NEXT, HarmonyParser
from chitu.http.messages.message_parser import HARMONY, MessageFormat, MessagePlan
from chitu.http.table import BODIES
from chitu.protocol import Grammar, ToolCalls
from chitu.tokenizer import Tokenizer
from chitu.tokenizer.chat_template import ChatTemplate

TINY = Tokenizer.load(TINY_MODEL_DIR)
NAMES = ("add", "a.look")
PLAN = MessagePlan(HARMONY, False, True, HarmonyParser, NAMES, True)
Read = tuple[str, str, list[tuple[str, str]]]
# The form in which the model's own chat template writes an answer; the rest of it is of no matter here.
TEMPLATE = (
    "{% for message in messages %}{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ message.thinking }}<|end|>{% endif %}{% for call in message.tool_calls %}<|start|>assistant to="
    "{{ 'functions.' + call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}"
    "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>{% endfor %}"
    "{% endfor %}"
)


def read(text: str, sizes: list[int], plan: MessagePlan = PLAN, is_whole: bool = True) -> Read:
    parser, at, found = plan.parser(), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        found.append(parser.push(text[at : at + size]))
        at += size
    message = joined([*found, parser.finish(is_whole)])
    if isinstance(message, str):
        return message, "", []
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def call(name: str, arguments: str, order: int = 0) -> str:
    heads = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json",
        f" to=functions.{name}<|channel|>commentary json",
        f"<|channel|>commentary to=functions.{name}",
        f"<|channel|>analysis to=functions.{name} code",
    )
    return f"{heads[order]}{MESSAGE}{arguments}"


THOUGHT = f"{ANALYSIS}I add.{END}{NEXT}"
ADD = '{"a": "}{\\"<|end|>", "b": [1, {"c": null}]}'
ANSWERS: list[tuple[str, Read]] = [
    (f"{THOUGHT}{FINAL}It is 4.", ("It is 4.", "I add.", [])),
    (f"{FINAL}It is 4.{END}", ("It is 4.", "", [])),
    (f"{FINAL}An {END} in text.", ("An \n\nin text.", "", [])),
    (f"{THOUGHT}{call('add', ADD)}", ("", "I add.", [("add", ADD)])),
    (f"{THOUGHT}{call('add', ADD, 1)}{CALL}", ("", "I add.", [("add", ADD)])),
    (f"{THOUGHT}{call('a.look', '{}', 2)}", ("", "I add.", [("a.look", "{}")])),
    (call("add", "", 3), ("", "", [("add", "{}")])),
    (call("add", CALL), ("", "", [("add", "{}")])),
    (
        f"{THOUGHT}<|channel|>commentary{MESSAGE}First.{END}{NEXT}{ANALYSIS}So.{END}{NEXT}{call('add', ADD)}",
        ("First.", "I add.\n\nSo.", [("add", ADD)]),
    ),
    (
        f"{call('add', ADD)}{CALL}{NEXT}{call('a.look', '{}')}{CALL}{NEXT}{FINAL}Yes.",
        ("Yes.", "", [("add", ADD), ("a.look", "{}")]),
    ),
    (f"<|channel|>commentary{MESSAGE}One.{END}{NEXT}{FINAL}Two.", ("One.\n\nTwo.", "", [])),
    ("No channel: {}", ("No channel: {}", "", [])),
    ("to be", ("to be", "", [])),
    ("to", ("to", "", [])),
    (f"{ANALYSIS}I ad", ("", "I ad", [])),
    ("<|channel|>fin", ("", "", [])),
    ("", ("", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_an_answer_is_read_by_its_channels_however_it_is_cut(text: str, expected: Read) -> None:
    for size in (1, 2, 3, 7, len(text) + 1):
        assert read(text, [size]) == expected
    content, reasoning, calls = expected
    assert read(text, [3], PLAN._replace(shows_reasoning=False)) == (content, "", calls)
    content, none, calls = read(text, [3], PLAN._replace(reasoning=None))
    assert none == "" and all(part in content for part in reasoning.split("\n\n")) and calls == expected[2]


def test_what_is_no_call_of_an_offered_tool_is_content_without_its_head() -> None:
    for text, content in (
        (call("none", "{}"), "{}"),
        (f"<|channel|>commentary to=python code{MESSAGE}print(1)", "print(1)"),
        (call("add", "{1}"), "{1}"),
        (call("add", '{"a": '), '{"a": '),
        (call("add", "[1]"), "[1]"),
        ("<|channel|>" + "x" * 2 * MAX_HEAD_CHARS + MESSAGE, "x" * 2 * MAX_HEAD_CHARS),
        ("<|channel|>" + "x" * (MAX_HEAD_CHARS - 30) + MESSAGE + "Yes.", "x" * (MAX_HEAD_CHARS - 30) + "Yes."),
    ):
        for size in (1, 9, len(text)):
            assert read(text, [size]) == (content, "", []), text[:60]


ROME = '{"city": "Rome"}'
GARBLED: list[tuple[str, Read]] = [
    (f"{ANALYSIS}hm{END}{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{NEXT}{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{END}assistant{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm<|call|>{NEXT}{FINAL}Hi<|return|>", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm<|return|>{NEXT}{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{END}\n\n{NEXT}\n{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{END}Hi there", ("Hi there", "hm", [])),
    (f"{ANALYSIS}hm{END}{NEXT}{MESSAGE}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{END}{NEXT}<|channel|>finalHi there", ("Hi there", "hm", [])),
    (f"{ANALYSIS}hm{END}comment{NEXT}{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{END}We need to<|start|>assistant{FINAL}Hi", ("Hi", "hm", [])),
    (f"{ANALYSIS}hm{END}{NEXT} Hi there", ("Hi there", "hm", [])),
    (f"{ANALYSIS}hm{END}{NEXT}", ("", "hm", [])),
    (f"{ANALYSIS}hm{END}{'Hi. ' * 200}", ("Hi. " * 200, "hm", [])),
    (f"<|start|>functions.get_w to=assistant<|channel|>commentary{MESSAGE}{{}}", ("{}", "", [])),
    (f"<|start|>functions.get_w<|channel|>commentary{MESSAGE}{{}}", ("{}", "", [])),
    (f"analysis{MESSAGE}hm{END}{NEXT}final{MESSAGE}Hi", ("Hi", "hm", [])),
    (f"<|channel|><|channel|>final{MESSAGE}{MESSAGE}Hi", ("Hi", "", [])),
    (f"<|channel|>final <|constrain|>json{MESSAGE}{{}}", ("{}", "", [])),
    *(
        (f"{head}{MESSAGE}{ROME}{behind}", ("", "", [("get_w", ROME)]))
        for behind in ("", CALL, END)
        for head in (
            "<|channel|>commentary to=functions.get_wjson",
            "<|channel|>commentary to=functions.get_w.json",
            "<|channel|>commentary to=functions.get_w<|constrain|>json",
            "<|channel|>commentary to=functions.get_w json<|constrain|>",
            "<|channel|>commentary to=functions.get_w<|channel|>commentary json",
            "<|channel|>commentary to=get_w code",
            "<|channel|>commentary to= functions.get_w",
            "<|channel|>commentary to=function.get_w",
            "<|channel|>commentary to=functions_get_w",
            "<|channel|>commentary functions.get_w <|constrain|>json",
            "<|channel|>analysis to=functions.get_w",
            "<|channel|>final to=functions.get_w",
            " to=functions.get_w<|channel|>commentary",
            "to=functions.get_w<|channel|>analysis <|constrain|>json",
            f"{NEXT} to=functions.get_w<|channel|>commentary",
            "assistant<|channel|>commentary to=functions.get_w",
            "commentary to=functions.get_w json",
            "<|start|><|channel|>commentary to=functions.get_w",
        )
    ),
    (f"<|channel|>commentary to=functions.get_w <|constrain|>json{ROME}{CALL}", ("", "", [("get_w", ROME)])),
    (f"<|channel|>commentary to=functions.get_w{MESSAGE}{ROME[:-1]}{CALL}", ("", "", [("get_w", ROME)])),
    (f"<|channel|>commentary to=functions.get_w{MESSAGE}{ROME}}}{CALL}", ("", "", [("get_w", ROME)])),
    (f"<|channel|>commentary to=functions.get{MESSAGE}{ROME}{CALL}", (ROME, "", [])),
    (f"<|channel|>commentary to=functions.get_w_all{MESSAGE}{ROME}{CALL}", (ROME, "", [])),
]


@pytest.mark.parametrize(("text", "expected"), GARBLED)
def test_an_answer_with_missing_marks_or_garbled_heads_is_what_it_plainly_means(text: str, expected: Read) -> None:
    for size in (1, 2, 3, 7, len(text) + 1):
        assert read(text, [size], PLAN._replace(names=("get_w", "look"))) == expected


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["{}", '"}', "\\", "a\nb\t", END, CALL, NEXT, MESSAGE, ANALYSIS, "<|", " to=functions.add"]
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
THOUGHTS = TEXTS.filter(lambda text: not any(mark in text for mark in (END, "<|")))


@given(
    thought=THOUGHTS,
    given_calls=st.lists(st.tuples(st.sampled_from(NAMES), VALUES, st.integers(0, 3)), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    end=st.integers(0, 600),
    noise=st.lists(TEXTS, max_size=6),
)
def test_a_stream_of_calls_is_the_whole_answer_however_it_is_cut(
    thought: str, given_calls: list[tuple[str, dict[str, Any], int]], sizes: list[int], end: int, noise: list[str]
) -> None:
    text = ANALYSIS + thought + END + NEXT
    text += (CALL + NEXT).join(call(name, json.dumps(value), order) for name, value, order in given_calls)
    for how in ([len(text)], sizes):
        content, reasoning, calls = read(text, how)
        assert (content, reasoning) == ("", thought)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [(n, v) for n, v, _ in given_calls]
    for cut in (text[:end], text[end:], "".join(noise), FINAL + "".join(noise) + text):
        for is_whole in (True, False):
            assert read(cut, sizes, is_whole=is_whole) == read(cut, [len(cut) + 1], is_whole=is_whole), cut


def test_what_the_template_writes_is_read_and_reasoning_is_sent_back_as_thinking() -> None:
    assert MessageFormat.of(TEMPLATE) == (HarmonyParser, HARMONY)
    template = ChatTemplate({"default": TEMPLATE}, {})
    made = ChatTurns(template.render, template.source, template.variables)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": "ö"}}}]
    turn = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm."}
    text = made.prompt([turn], None, {}, False)
    assert read(text.removeprefix(NEXT), [5]) == ("", "Hm.", [("add", '{"a": "ö"}')])
    text = made.prompt([{**turn, "content": "Well."}], None, {}, False)
    assert "Hm." in text and "Well." in text, "in two turns, since the model's own template refuses both in one"
    answer = made.prompt([{"role": "assistant", "content": "4.", "reasoning_content": "Hm."}], None, {}, False)
    assert read(answer.removeprefix(NEXT).removesuffix("<|return|>"), [5]) == ("4.", "Hm.", [])


def allows_of(grammar: Grammar) -> Any:
    matcher_of = GrammarCompiler(TINY, TINY.vocab_size).compile(grammar).matcher

    def allows(text: str) -> bool:
        matcher = matcher_of()
        for token in TINY.encode(text, add_special_tokens=False):
            if not matcher.mask()[token // 32] >> (token % 32) & 1:
                return False
            matcher.consume([token])
        return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)

    return allows


TOOLS = [
    {"function": {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}},
    {"function": {"name": "a.look"}},
]


@pytest.mark.parametrize("is_required", [False, True])
def test_an_enforced_call_follows_its_schema_behind_the_reasoning(is_required: bool) -> None:
    reasoning = PLAN.reasoning_ahead("<|start|>assistant")
    assert reasoning is not None and not reasoning.is_open
    grammar = grammar_of_calls(HarmonyParser, TOOLS, ["p"] * 2, True, is_required)
    allows = allows_of(msgspec.structs.replace(grammar, reasoning=msgspec.structs.replace(reasoning, head="")))
    for ahead in ("", THOUGHT):
        for right in (call("add", '{"x": 3}'), call("a.look", '{"of": ["any", 1]}')):
            assert allows(ahead + right), right
            assert len(read(ahead + right, [4])[2]) == 1
        for wrong in (call("add", '{"x": "3"}'), call("none", "{}"), call("add", '{"x": 3}') + call("a.look", "{}")):
            assert not allows(ahead + wrong), wrong
        assert allows(f"{ahead}{FINAL}Free text {{.") is not is_required
        assert not allows(ahead + "Free text without its channel.")


def test_an_answer_in_json_is_on_its_channel() -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
    allows = allows_of(Grammar("json_schema", schema, PLAN.reasoning_ahead("<|start|>assistant")))
    for ahead in ("", THOUGHT):
        assert allows(f'{ahead}{FINAL}{{"x": 3}}')
        assert read(f'{ahead}{FINAL}{{"x": 3}}', [4])[0] == '{"x": 3}'
        assert not allows(f'{ahead}{{"x": 3}}') and not allows(f'{ahead}{FINAL}{{"x": ""}}')


def test_marks_are_written_as_their_tokens() -> None:
    ids = {mark: 40 + i for i, mark in enumerate(HarmonyParser.needed)}
    grammar = grammar_of_calls(HarmonyParser, TOOLS, ["p"] * 2, True, False)
    lark = tool_calls_lark(msgspec.json.decode(grammar.text, type=ToolCalls), ids, {})
    reasoning = PLAN.reasoning_ahead("<|start|>assistant")
    assert reasoning is not None
    whole = behind_reasoning(lark, reasoning, ids, [3])
    for mark in HarmonyParser.needed:
        assert (f"<[{ids[mark]}]>" in whole) or mark == CALL, mark
    [ahead, _] = json.loads(whole)["grammars"]
    assert f"<[{ids[END]}]>" in ahead["lark_grammar"] and '"assistant"' in ahead["lark_grammar"]


def test_a_long_answer_is_read_in_one_pass() -> None:
    long = "x<" * 100_000
    content, reasoning, [(_, arguments)] = read(
        f"{ANALYSIS}{long}{END}{NEXT}{call('add', json.dumps({'a': long}))}", [2]
    )
    assert content == "" and reasoning == long and json.loads(arguments)["a"] == long
    assert isinstance(PLAN.parser().push(ANALYSIS + "a"), MessageDelta)


def test_channels_are_read_without_tools_too_unless_the_reasoning_is_to_stay() -> None:
    model = SimpleNamespace(
        message_format=MessageFormat.of(TEMPLATE),
        tokenizer=SimpleNamespace(template_variables={"tools"}, special_token_ids={"<|channel|>": 7}),
        turns=SimpleNamespace(takes_several_calls=True),
    )

    def made(tools: list[Any] | None = None, **fields: Any) -> MessagePlan | None:
        body = BODIES.decoder(ChatBody).decode(
            json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
        )
        return ServedModel.message_plan(cast(ServedModel, model), body, "<|start|>assistant", tools)

    bare, offered = made(), made(TOOLS)
    assert bare is not None and read(THOUGHT + FINAL + "Yes.", [3], bare) == ("Yes.", "I add.", [])
    assert read(call("add", "{}"), [3], bare)[2] == []
    assert offered is not None and read(call("add", "{}"), [3], offered)[2] == [("add", "{}")]
    assert not ServedModel.may_skip_special(cast(ServedModel, model), bare)
    assert made(separate_reasoning=False) is None
    hidden = made(include_reasoning=False)
    assert hidden is not None and read(THOUGHT + FINAL + "Yes.", [3], hidden) == ("Yes.", "", [])
