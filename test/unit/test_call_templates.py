"""Calls of tools as the templates of models write them: what a template writes is read as the same call, and what is
sent back is in the prompt in its form."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from call_texts import ADD, ARGUMENTS, NAMES, THINK, TINY, parts, plan, read
from draws import often
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from chitu.errors import InvalidRequest
from chitu.grammars import GrammarCompiler
from chitu.http.ask.bodies import ChatBody
from chitu.http.ask.chat import chat_messages, chosen_tools, reasoning_variables
from chitu.http.ask.turns import ChatTurns
from chitu.http.messages.call_formats import (
    HermesParser,
    Llama4Parser,
    LlamaParser,
    MistralParser,
    NamedMistralParser,
    grammar_of_calls,
)
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.message_parser import (
    MessageFormat,
)
from chitu.http.table import BODIES
from chitu.protocol import MAX_GRAMMAR_CHARS, ToolCalls
from chitu.tokenizer.chat_template import ChatTemplate

TEMPLATES = Path(__file__).with_name("chat_templates")


def template(name: str) -> ChatTemplate:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"})


def turns_of(made: ChatTemplate) -> ChatTurns:
    return ChatTurns(made.render, made.source, made.variables, MessageFormat.of(made.source).calls)


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True},
}
KNOWN: dict[str, Any] = {
    "qwen3": HermesParser,
    "llama3": LlamaParser,
    "llama4": Llama4Parser,
    "mistral": MistralParser,
    "mistral_named": NamedMistralParser,
}


def body(**fields: Any) -> ChatBody:
    return BODIES.decoder(ChatBody).decode(
        json.dumps({"messages": [{"role": "user", "content": "2+2?"}], **fields}).encode()
    )


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_template_writes_of_a_call_is_read_as_that_call(name: str) -> None:
    made = template(name)
    form = MessageFormat.of(made.source)
    assert form.calls is KNOWN[name] and (form.reasoning is THINK) == (name == "qwen3")
    arguments = '{"a": 2, "b": "\\"ö<"}'
    call = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": arguments}}
    given = body(
        messages=[
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call12345", "content": [{"type": "text", "text": "FOUR"}]},
        ],
        tools=[TOOL],
    )
    tools = chosen_tools(given)
    messages = chat_messages(given.messages)
    text = made.render(messages, tools, True, {})
    assert '"description": "Adds."' in text and "strict" not in text and "FOUR" in text
    before = made.render(messages[:1], tools, True, {})
    answer = made.render(messages[:2], tools, False, {})[len(before) :]
    how = plan(form.calls, marks=form.reasoning)
    answer = answer.replace("<|im_end|>\n", "").replace("<|eot_id|>", "").replace("<|eot|>", "").replace("</s>", "")
    assert form.calls.written("add")[0] + "{" in answer, "an enforced call is one as the model knows it"
    content, reasoning, calls = read(how, answer)
    assert content == "" and reasoning == ("Hm." if name == "qwen3" else "")
    assert [(called, json.loads(written)) for called, written in calls] == [("add", json.loads(arguments))]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3), st.sampled_from(["", "A."])
)
@settings(max_examples=often(20))
def test_the_template_in_transformers_is_rendered_as_there_and_read_as_what_it_wrote(
    given_calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    source = official_llama4()
    given_calls = json.loads(json.dumps(given_calls, ensure_ascii=False).encode(errors="replace"))  # half of a pair
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in given_calls]
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "FOUR"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    ours = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    [theirs], _ = render_jinja_template([turns], tools=tools, chat_template=source, bos_token="<s>")
    assert ours.render(turns, tools, False, {}) == theirs
    before = len(ours.render(turns[:1], tools, True, {}))
    answer = ours.render(turns[:2], tools, False, {})[before:].removesuffix("<|eot|>")
    found, _, read_calls = read(plan(MessageFormat.of(source).calls), answer, 3)
    assert found == content and [[name, json.loads(given)] for name, given in read_calls] == given_calls


@functools.cache
def official_llama4() -> str:
    """Return Llama 4's chat template, the only one with calls that transformers has. Its module imports torch."""
    path = Path(transformers.__path__[0], "models", "llama4", "processing_llama4.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "chat_template":
            return str(ast.literal_eval(node.value))
    raise AssertionError(path)


def test_one_call_is_made_where_the_template_takes_no_more_of_an_answer_that_is_sent_back() -> None:
    several = {name: turns_of(template(name)).takes_several_calls for name in KNOWN}
    assert several == {name: name != "llama3" for name in KNOWN}
    assert turns_of(ChatTemplate({}, {})).takes_several_calls, "nothing is known of it"


def test_a_call_that_is_sent_back_is_in_the_prompt_in_the_templates_form() -> None:
    call = {"function": {"name": "add", "arguments": '{"a":"ö"}'}, "id": "call12345", "type": "function"}

    def prompt(made: ChatTemplate, content: str | None, tools: list[Any] | None = None) -> str:
        turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        return turns_of(made).prompt(chat_messages(body(messages=turns).messages), tools, {})

    deepseek = template("deepseek_r1")
    as_text = '<｜tool▁sep｜>add\n```json\n{"a": "ö"}\n```<｜tool▁call▁end｜>'
    assert as_text in prompt(deepseek, None) and as_text in prompt(deepseek, "")
    simple = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with_tools = (
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        "{{ messages[0].content + messages[1].content + (messages[1].tool_calls | tojson) }}"
    )
    named = ChatTemplate({"default": simple, "tool_use": with_tools}, {})
    assert '"arguments": {"a": "ö"}' in prompt(named, "Well.", [TOOL])
    assert as_text in prompt(deepseek, "Well.") and "Well." in prompt(deepseek, "Well."), "in a turn of its own"
    with pytest.raises(InvalidRequest, match="would leave it out") as raised:
        prompt(named, "Well.")
    assert raised.value.param == "messages[1].tool_calls", "a template without calls"
    broken = ChatTemplate({"default": "{{ raise_exception('no user') }}"}, {})
    with pytest.raises(InvalidRequest, match="no user"):
        prompt(broken, None)


def test_arguments_that_are_no_object_reach_the_template_as_text() -> None:
    for arguments, expected in (("", {}), ("{}", {}), ('{"a', '{"a'), ("[1]", "[1]"), (None, {})):
        call = {"function": {"name": "add", "arguments": arguments}}
        given = body(messages=[{"role": "assistant", "tool_calls": [call]}])
        assert chat_messages(given.messages)[0]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("calls", KNOWN.values())
def test_an_enforced_call_is_read_as_one(calls: type[CallParser]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in sorted(NAMES)]
    grammar = grammar_of_calls(calls, tools, ["p"] * len(tools), True, True)
    record = msgspec.json.decode(grammar.text, type=ToolCalls)
    assert (
        grammar.kind == "tool_calls"
        and record.is_required
        and [*map(bytes, (c.schema for c in record.calls))] == [b'{"type":"object"}'] * len(tools)
    )
    assert all(call.begin.startswith(record.trigger) for call in record.calls)
    written = [call.begin + ADD + call.end for call in record.calls]
    text = record.separator.join(written if record.is_parallel else written[:1])
    expected = [(name, ADD) for name in sorted(NAMES)][: len(written) if record.is_parallel else 1]
    assert read(plan(calls), text, 3) == ("", "", expected)
    assert not msgspec.json.decode(
        grammar_of_calls(calls, tools, ["p"] * len(tools), False, True).text, type=ToolCalls
    ).is_parallel


@pytest.mark.parametrize("calls", KNOWN.values())
def test_calls_of_strict_tools_follow_their_schemas_in_free_text_and_are_read_so(calls: type[CallParser]) -> None:
    parameters = {"properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    tools = [{"function": {"name": "add", "parameters": parameters}}, {"function": {"name": "look"}}]
    grammar = grammar_of_calls(calls, tools, ["p"] * len(tools), True, False)
    matcher_of = GrammarCompiler(TINY, TINY.vocab_size).compile(grammar).matcher

    def allows(text: str) -> bool:
        matcher = matcher_of()
        for token in TINY.encode(text, add_special_tokens=False):
            bits = matcher.mask()
            if not bits[token // 32] >> (token % 32) & 1:
                return False
            matcher.consume([token])
        return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)

    def call(name: str, arguments: str) -> str:
        begin, end = calls.written(name)
        return f"{begin}{arguments}{end}"

    assert allows("") and allows("Free [text], with a brace {.")
    for text in (call("add", '{"x": 3}'), call("look", '{"of": ["any", 1]}')):
        assert allows(text), text
        assert len(read(plan(calls), text, 3)[2]) == 1, text
    for text in (call("add", '{"x": "3"}'), call("add", "{}"), call("none", "{}")):
        assert not allows(text), text
    before, behind = ("", "") if calls.is_leading else ("Well. ", " Done.")
    assert allows(before + call("add", '{"x": 3}') + behind)


def test_what_cannot_be_enforced_is_refused() -> None:
    for parameters in ({"type": "array"}, {"enum": ["x" * MAX_GRAMMAR_CHARS]}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(InvalidRequest) as raised:
            grammar_of_calls(HermesParser, [tool], ["tools[3].function.parameters"], True, True)
        assert raised.value.param == ("tools" if "enum" in parameters else "tools[3].function.parameters.type")


def test_mistrals_ids_are_what_its_template_takes() -> None:
    calls = joined(parts(plan(MistralParser), "[TOOL_CALLS]add{}", 4))
    assert isinstance(calls, MessageDelta) and len(calls.calls[0].id) == 9 and calls.calls[0].id.isalnum()


def test_a_choice_of_tools_is_served_or_refused_by_name() -> None:
    assert chosen_tools(body(tools=[TOOL], tool_choice="none"))[:3] == (None, [], False)
    assert chosen_tools(body(tool_choice="auto")).offered is None
    loose = {**TOOL, "function": {**TOOL["function"], "strict": False}}
    assert [len(tools or ()) for tools in chosen_tools(body(tools=[loose]))[:2]] == [1, 0]
    two = [TOOL, {"type": "function", "function": {"name": "other"}}]
    offered, enforced, is_required, _ = chosen_tools(body(tools=two, tool_choice="required"))
    assert is_required and offered == enforced and len(enforced) == 2
    named = {"type": "function", "function": {"name": "other"}}
    offered, enforced, is_required, _ = chosen_tools(body(tools=two, tool_choice=named))
    assert is_required and offered is not None and enforced == offered[1:]
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    for choice in ({}, {"tool_choice": "auto"}):
        offered, enforced, is_required, _ = chosen_tools(body(tools=[strict, two[1]], **choice))
        assert offered is not None and enforced == [offered[0], {"function": {"name": "other"}}] and not is_required
    assert not chosen_tools(body(tools=[strict], tool_choice="none")).enforced
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "requird"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice.type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tools[0].type"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            chosen_tools(body(**fields))
        assert raised.value.param == param


def test_an_effort_of_reasoning_is_a_variable_of_the_template() -> None:
    known = template("qwen3").variables
    assert reasoning_variables(None, known) == {}
    assert reasoning_variables("none", known) == {"enable_thinking": False}
    assert reasoning_variables("high", known) == {"enable_thinking": True}
    assert reasoning_variables("low", {"reasoning_effort"}) == {"reasoning_effort": "low"}
    assert reasoning_variables("none", {"tools"}) == {}
    for effort, names in (("high", {"tools"}), ("much", known)):
        with pytest.raises(InvalidRequest) as raised:
            reasoning_variables(effort, names)
        assert raised.value.param == "reasoning_effort"
