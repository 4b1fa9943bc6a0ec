"""The stage between messages and chat template (`ask/turns.py`): templates that refuse or drop what APIs send."""

from __future__ import annotations

from typing import Any

import pytest

from chitu.errors import InvalidRequest
from chitu.http.ask.turns import ChatTurns
from chitu.http.messages.call_formats import HermesParser
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.section_calls import KIMI_BEGIN
from chitu.tokenizer.chat_template import ChatTemplate

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CHATML = EACH + CALLS + END
ALTERNATING = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if not (m.role == 'tool' or m.tool_calls or (m.role == 'system' and loop.first)) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
)
MISTRAL = (
    ALTERNATING
    + "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    + "{% if c.id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    + "[{{ c.function.name }} {{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}{% else %}"
    + "{{ m.tool_call_id or '' }}{{ m.content }}{% endif %}"
    + END
)
FIRST_SYSTEM = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
QWEN35 = EACH.replace("<{{", FIRST_SYSTEM + "<{{") + CALLS.replace("| tojson", ".items() | list | tojson") + END
GPT_OSS = (
    "{% if messages[0].role == 'system' %}<developer>{{ messages[0].content }}{% endif %}{% set ns = namespace(f='') %}"
    "{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<analysis>{{ m.thinking }}{% endif %}"
    "{% set c = m.tool_calls[0] %}{% set ns.f = c.function.name %}<to={{ ns.f }}>{{ c.function.arguments | tojson }}"
    "{% elif m.thinking and not loop.last %}<analysis>{{ m.thinking }}{% else %}<final>{{ m.content }}{% endif %}"
    "{% elif m.role == 'tool' %}<{{ ns.f }}>{{ m.content }}{% elif m.role == 'user' %}<user>{{ m.content }}{% endif %}"
    + END
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}" + END
)
HOISTING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}" + END
)
NO_SYSTEM = EACH.replace("<{{", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<{{") + END
NO_CALLS = EACH + END
ONE_CALL = EACH + "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + CALLS + END
TRIMMING = EACH.replace("m.content", "m.content | trim") + "<|end|>" + END


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}


def result(text: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})}


def stage(source: str, calls: type[CallParser] | None = None) -> ChatTurns:
    template = ChatTemplate({"default": source}, {})
    return ChatTurns(template.render, template.source, template.variables, calls)


def prompt(source: str, *turns: dict[str, Any], tools: list[Any] | None = None, **more: Any) -> str:
    return stage(source).prompt(list(turns), tools, {}, **more)


F, G = call("f", {"a": "X"}, "toolu_1"), call("g", {"b": "Y"}, "toolu_2")
CRITIC = {"role": "critic", "content": "B"}
NOT_OF_CRITICS = "{% if m.role != 'critic' %}{{ m.content }}{% endif %}"
LATER = (user("u1"), model("a1"), system("s2"), user("u2"))


@pytest.mark.parametrize(
    ("source", "turns", "expected"),
    [
        # What a template takes stays as it is.
        (CHATML, (system("A"), system("B"), user("C"), system("D")), "<system>A<system>B<user>C<system>D<assistant>"),
        (CHATML, (user("A"), user("B"), model("C"), model("D")), "<user>A<user>B<assistant>C<assistant>D<assistant>"),
        # System turns: joined at the start, a user's turn at their place, within the user's, or not hoisted.
        (QWEN35, (system("A"), system("B"), user("C")), "<system>A\n\nB<user>C<assistant>"),
        (QWEN35, (system("A"), user("B"), system("C")), "<system>A<user>B<user>C<assistant>"),
        (QWEN35, LATER, "<user>u1<assistant>a1<user>s2<user>u2<assistant>"),
        (GPT_OSS, (system("A"), system("B"), user("C")), "<developer>A\n\nB<user>C<assistant>"),
        (GPT_OSS, LATER, "<user>u1<final>a1<user>s2<user>u2<assistant>"),
        (HOISTING, LATER, "<user>u1<assistant>a1<user>s2<user>u2<assistant>"),
        (MISTRAL, LATER, "<user>u1<assistant>a1<user>s2\n\nu2<assistant>"),
        (MISTRAL, (system("A"), user("B"), system("C")), "<system>A<user>B\n\nC<assistant>"),
        (NO_SYSTEM, (system("A"), system("B"), user("C")), "<user>A\n\nB\n\nC<assistant>"),
        (NO_SYSTEM, (system("A"),), "<user>A<assistant>"),
        # ChatTurns of one role in a row, text behind a result.
        (MISTRAL, (user("A"), user("B"), model("C"), model("D")), "<user>A\n\nB<assistant>C\n\nD<assistant>"),
        (
            MISTRAL,
            (user("A"), model("", F), result("R", "toolu_1"), user("B"), system("C")),
            '<user>A<assistant>[f 000000000 {"a": "X"}]<tool>000000000R\n\nB\n\nC<assistant>',
        ),
        # Calls beside content, several calls and their results.
        (
            MISTRAL,
            (user("A"), model("B", F), result("R", "toolu_1"), model("C"), user("D")),
            '<user>A<assistant>B<user><assistant>[f 000000000 {"a": "X"}]<tool>000000000R<assistant>C<user>D'
            "<assistant>",
        ),
        (
            GPT_OSS,
            (user("A"), model("", F, G), result("2", "toolu_2"), result("1", "toolu_1")),
            '<user>A<to=f>{"a": "X"}<f>1<to=g>{"b": "Y"}<g>2<assistant>',
        ),
        (
            ONE_CALL,
            (user("A"), model("", F, G)),
            '<user>A<assistant>[f {"a": "X"}]<assistant>[g {"b": "Y"}]<assistant>',
        ),
        (
            GPT_OSS,
            (user("A"), model("B", F, reasoning_content="R"), result("1", "toolu_1")),
            '<user>A<final>B<analysis>R<to=f>{"a": "X"}<f>1<assistant>',
        ),
        # Content that vanishes beside reasoning: without the reasoning.
        (GPT_OSS, (user("A"), model("B", reasoning_content="R"), user("C")), "<user>A<final>B<user>C<assistant>"),
        # Content in parts.
        (PARTS, (system("A"), user("B"), model("C"), user("D")), "<system>A<user>B<assistant>C<user>D<assistant>"),
        # Arguments that were cut off, for a template that wants an object.
        (
            QWEN35,
            (user("A"), model("", call("f", '{"city": "R'))),
            '<user>A<assistant>[f [["arguments", "{\\"city\\": \\"R"]]]<assistant>',
        ),
        (
            CHATML.replace("| tojson", "| string"),
            (user("A"), model("", F)),
            '<user>A<assistant>[f {"a": "X"}]<assistant>',
        ),
        (CHATML, (user("A"), model("", call("f", '{"c'))), '<user>A<assistant>[f "{\\"c"]<assistant>'),
    ],
)
def test_every_text_is_in_the_prompt_in_a_form_that_the_template_takes(
    source: str, turns: tuple[dict[str, Any], ...], expected: str
) -> None:
    assert prompt(source, *turns) == expected


@pytest.mark.parametrize(
    ("source", "turns", "param"),
    [
        (NO_CALLS, (user("A"), model("B"), user("C"), model("", F)), "messages[3].tool_calls"),
        ("{{ messages[-1].content }}", (user("A"), model("B"), user("C")), "messages[0].content"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            (user("A"), result("R")),
            "messages[1].content",
        ),
        (EACH.replace("{{ m.content }}", NOT_OF_CRITICS) + END, (user("A"), CRITIC), "messages[1].content"),
    ],
)
def test_what_would_vanish_is_refused_by_its_place(source: str, turns: tuple[dict[str, Any], ...], param: str) -> None:
    with pytest.raises(InvalidRequest, match="would leave it out of the prompt") as raised:
        prompt(source, *turns)
    assert raised.value.param == param


def test_what_a_template_refuses_in_every_form_is_refused_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="the chat template refused the messages: roles must alternate"):
        prompt(MISTRAL, model("A"), user("B"))


def test_a_longer_chat_begins_as_the_shorter_one_did() -> None:
    turns = [
        system("A"),
        user("B"),
        model("C", F, G, reasoning_content="R"),
        result("1", "toolu_1"),
        result("2", "toolu_2"),
    ]
    turns += [system("D"), model("E"), user("F")]
    for source in (CHATML, QWEN35, MISTRAL, GPT_OSS):
        made = stage(source)
        before = ""
        for end in (2, 5, 7, 8):
            text = made.prompt(turns[:end], None, {}, add_generation_prompt=False)
            assert text.startswith(before), source
            before = text


def test_ids_of_other_servers_are_those_that_the_template_and_the_model_know() -> None:
    kimi = CHATML.replace("[{{ c", "[{{ c.id }} {{ c").replace(
        "<{{ m.role }}>", "<{{ m.role }} {{ m.tool_call_id or '' }}>"
    )
    turns = (
        user("A"),
        model("", F, G),
        result("2", "toolu_2"),
        result("1", "toolu_1"),
        model("", F),
        result("3", "toolu_1"),
    )
    assert "toolu_1" in prompt(kimi, *turns)
    text = prompt("{#" + KIMI_BEGIN + "#}" + kimi, *turns)
    assert text == (
        '<user >A<assistant >[functions.f:0 f {"a": "X"}][functions.g:1 g {"b": "Y"}]'
        '<tool functions.g:1>2<tool functions.f:0>1<assistant >[functions.f:2 f {"a": "X"}]'
        "<tool functions.f:2>3<assistant>"
    )
    assert "000000000R" in prompt(MISTRAL, user("A"), model("", call("f", {})), result("R")), "no ids at all"


def test_calls_that_a_template_does_not_write_are_written_as_the_model_would() -> None:
    made = stage(NO_CALLS, HermesParser)
    text = made.prompt([user("A"), model("B", F, G), result("R")], None, {})
    begin, end = HermesParser.written("f")
    assert text.startswith("<user>A<assistant>B\n" + begin + '{"a":"X"}' + end + "\n") and text.endswith(
        "<tool>R<assistant>"
    )


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "parameters": {"type": "object"}},
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {"enum": ["x"]}, "c": True}}},
        {"name": "f", "parameters": {"properties": {"o": {"type": "object", "properties": {"i": {"type": "string"}}}}}},
    ],
)
def test_a_tool_without_descriptions_is_rendered_by_a_template_that_needs_them(function: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": function}]
    needy = (
        "{% macro each(p) %}{% for k, v in p.properties.items() %}{{ k + v.description + (v.type or '') }}"
        "{% if v.properties is defined %}{{ each(v) }}{% endif %}{% endfor %}{% endmacro %}"
        "{% for t in tools %}{{ t.function.name + t.function.description + each(t.function.parameters) }}{% endfor %}"
        + CHATML
    )
    assert prompt(needy, user("A"), tools=tools).startswith("f")
    plain = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}" + CHATML
    assert '"description"' not in prompt(plain, user("A"), tools=tools)[:20], "a template without that need shows none"


@pytest.mark.parametrize("source", [CHATML, MISTRAL, QWEN35, GPT_OSS, TRIMMING])
def test_a_prompt_that_continues_ends_with_the_last_message(source: str) -> None:
    text = prompt(source, user("A"), model("The answer is \n"), continues=True)
    assert text.endswith("The answer is \n") and "<assistant>" not in text.partition("The answer")[2]
    assert prompt(source, user("A"), model(""), continues=True).endswith(">")
    for last in (user("B"), model("", F)):
        with pytest.raises(InvalidRequest) as raised:
            prompt(source, user("A"), last, continues=True)
        assert raised.value.param == "messages[1]"


def test_shapes_that_clients_make_large_are_not_kept() -> None:
    made = stage(CHATML)
    for number in range(10, 20):
        made.prompt([user("A")], None, {"x": f"{number}" * 20_000})
        made.prompt([user("A"), model("", call("f", {}, f"{number}" * 9000))], None, {})
    assert made.num_kept == 0
    made.prompt([user("A")], None, {})
    assert made.num_kept == 1
