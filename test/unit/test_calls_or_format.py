"""Tools and a format for the answer in one request: a call, or an answer that follows the format, in all three APIs."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from test_jobs import World, copy_of_tiny

from chitu.assets import TINY_MODEL_DIR
from chitu.errors import InvalidRequest
from chitu.grammars import CompiledGrammar, GrammarCompiler
from chitu.http.ask.parsed import ParsedRequest
from chitu.http.messages.call_formats import HermesParser, LlamaParser
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.harmony import ANALYSIS, END, NEXT, HarmonyParser
from chitu.http.messages.pythonic_calls import PythonicParser
from chitu.http.messages.section_calls import DeepSeekParser, KimiParser
from chitu.http.messages.tagged_calls import QwenCoderParser
from chitu.protocol import Grammar
from chitu.tokenizer import Tokenizer

TINY = Tokenizer.load(TINY_MODEL_DIR)

APIS = ("chat", "responses", "messages")
TEMPLATES: dict[type[CallParser], str] = {
    HermesParser: '<tool_call> "arguments" </think>',
    QwenCoderParser: "<tool_call> <function= </think>",
    HarmonyParser: "<|channel|> functions.",
    LlamaParser: '<|start_header_id|> "parameters"',
    PythonicParser: "<|start_header_id|> name + '('",
    KimiParser: "<|tool_calls_section_begin|>",
    DeepSeekParser: "<｜tool▁calls▁begin｜>",
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"$ref": "#/$defs/N"}},
    "required": ["name", "n"],
    "additionalProperties": False,
    "$defs": {"N": {"type": "integer"}},
}
RIGHT, WRONG = '{"name": "Rome", "n": 3}', '{"name": "Rome", "n": "3"}'
FORMAT_FIELDS = {"chat": "response_format.json_schema.schema", "responses": "text.format.schema"}


def asked(world: World, api: str, schema: Any, strict: bool | None, choice: Any = None, **more: Any) -> ParsedRequest:
    function = {"name": "get_w", "strict": strict}
    body: dict[str, Any]
    if api == "chat":
        tool = {"type": "function", "function": {**function, "parameters": CITY}}
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body["tool_choice"] = {"type": "function", "function": {"name": "get_w"}} if choice == "named" else choice
    elif api == "responses":
        body = {"input": "a", "tools": [{"type": "function", **function, "parameters": CITY}]}
        body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        body["tool_choice"] = {"type": "function", "name": "get_w"} if choice == "named" else choice
    else:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        body["tools"] = [{**function, "input_schema": CITY}]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        kinds = {"named": {"type": "tool", "name": "get_w"}, "required": {"type": "any"}, "none": {"type": "none"}}
        body["tool_choice"] = kinds.get(choice)
    given = {key: value for key, value in {"model": "m", **body, **more}.items() if value is not None}
    return world.parsed(api, json.dumps(given).encode())


@functools.cache
def world_of(calls: type[CallParser]) -> World:
    template = f"{{#- {TEMPLATES[calls]} -#}}{{% if tools %}}{{% endif %}}{{{{ messages[-1].content }}}}"
    with tempfile.TemporaryDirectory() as folder:
        (copy_of_tiny(Path(folder)) / "chat_template.jinja").write_text(template)
        world = World(path=Path(folder))
    assert world.model.message_format.calls is calls
    return world


COMPILER = GrammarCompiler(TINY, TINY.vocab_size)


@functools.lru_cache(maxsize=4)
def compiled(grammar: Grammar) -> CompiledGrammar:
    return COMPILER.compile(grammar)


def allows(parsed: ParsedRequest, text: str) -> bool:
    grammar = parsed.samplings[0].grammar
    assert grammar is not None
    matcher = compiled(grammar).matcher()
    for token in TINY.encode(text, add_special_tokens=False):
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.consume([token])
    return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)


def read(parsed: ParsedRequest, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    assert parsed.plan is not None
    parser = parsed.plan.parser()
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    message = joined([*pieces, parser.finish()])
    if isinstance(message, str):
        return message, []
    assert isinstance(message, MessageDelta)
    return message.content or "", [(call.name, json.loads(call.arguments)) for call in message.calls]


def call_of(calls: type[CallParser], arguments: dict[str, Any]) -> str:
    begin, end = calls.written("get_w")
    begin += f"0{calls.index_end}" if calls.index_end else ""
    end += calls.end_mark if calls.has_section else ""
    if calls.fields is None:
        return begin + json.dumps(arguments) + end
    form = calls.fields
    told = []
    for key, value in arguments.items():
        is_raw = isinstance(value, str) and not form.separator
        told.append(f"{form.begin}{key}{form.middle}{value if is_raw else json.dumps(value)}{form.end}")
    return begin + form.separator.join(told) + end


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("calls", TEMPLATES)
def test_an_answer_is_a_call_or_follows_the_format(calls: type[CallParser], api: str, strict: bool | None) -> None:
    world = world_of(calls)
    parsed = asked(world, api, ANSWER, strict)
    assert not parsed.warnings
    thoughts = f"{ANALYSIS}Hm. {{{END}{NEXT}" if calls is HarmonyParser else "<think>\nHm. {</think>\n\n"
    for ahead in ("", thoughts) if calls in (HermesParser, QwenCoderParser, HarmonyParser) else ("",):
        answer, call = f"{calls.text_begin}{RIGHT}", call_of(calls, {"city": "Rome"})
        for text, found in ((answer, (RIGHT, [])), (call, ("", [("get_w", {"city": "Rome"})]))):
            assert allows(parsed, ahead + text), text
            assert read(parsed, ahead + text, 3) == read(parsed, ahead + text, 1000) == found
        for wrong in (f"{calls.text_begin}{WRONG}", f"{calls.text_begin}Rome.", call[:-1], answer + call, "", "a"):
            assert not allows(parsed, ahead + wrong), wrong
        other = call_of(calls, {"town": "Rome"})
        assert allows(parsed, ahead + other) is not bool(strict), "any object, unless the tool is strict"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("calls", [HermesParser, QwenCoderParser, HarmonyParser, LlamaParser])
def test_where_a_call_is_required_the_format_has_no_effect_and_where_none_may_be_made_it_is_all(
    calls: type[CallParser], api: str
) -> None:
    world = world_of(calls)
    call, answer = call_of(calls, {"city": "Rome"}), f"{calls.text_begin}{RIGHT}"
    for choice in ("required", "named"):
        parsed = asked(world, api, ANSWER, None, choice)
        assert allows(parsed, call) and not allows(parsed, answer)
        field = FORMAT_FIELDS.get(api, "output_config.format.schema")
        assert parsed.warnings == [f"{field}: no effect, since tool_choice has the answer be a call"]
    parsed = asked(world, api, ANSWER, None, "none")
    assert allows(parsed, answer) and not allows(parsed, call) and not parsed.warnings


@pytest.mark.parametrize("api", APIS)
def test_a_fault_in_the_format_or_in_a_tool_has_its_own_place(api: str) -> None:
    world = world_of(QwenCoderParser)
    field = FORMAT_FIELDS.get(api, "output_config.format.schema")
    with pytest.raises(InvalidRequest) as raised:
        asked(world, api, {"type": "object", "properties": {"x": {"not": {}}}}, True)
    assert raised.value.param == f"{field}.properties.x" and raised.value.message.startswith(f"{field}.properties.x:")
    with pytest.raises(InvalidRequest) as raised:
        asked(world, api, {"type": "object", "properties": {"x": {"$ref": "#/$defs/no"}}}, None)
    assert (raised.value.param or "").startswith(field)


FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"any": [1]}', "[1]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}}}, RIGHT, WRONG),
    ({"structured_outputs": {"json": ANSWER}}, RIGHT, WRONG),
    ({"structured_outputs": {"regex": "[a-c]{2}"}}, "ab", "abc"),
    ({"guided_regex": "^[^x]*/$"}, "a < b/", "ax/"),
    ({"guided_choice": ["yes", "<no>"]}, "<no>", "no"),
    ({"guided_grammar": 'start: "a" B\nB: /[0-9]+/'}, "a12", "a"),
    ({"guided_grammar": 'root ::= "a" [0-9]+'}, "a12", "a"),
    ({"guided_json": json.dumps(ANSWER)}, RIGHT, WRONG),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), FORMATS, ids=lambda value: next(iter(value), ""))
@pytest.mark.parametrize("calls", TEMPLATES)
def test_every_field_of_a_format_goes_with_tools(
    calls: type[CallParser], fields: dict[str, Any], right: str, wrong: str
) -> None:
    world = world_of(calls)
    tool = {"type": "function", "function": {"name": "get_w", "parameters": CITY}}
    parsed = world.chat("a", tools=[tool], **fields)
    assert allows(parsed, call_of(calls, {"city": "Rome"}))
    assert allows(parsed, calls.text_begin + right) and not allows(parsed, calls.text_begin + wrong)
    assert not allows(parsed, calls.text_begin + right + call_of(calls, {"city": "Rome"}))


def test_a_format_that_begins_as_the_models_calls_is_refused_with_its_field() -> None:
    tool = {"type": "function", "function": {"name": "get_w", "parameters": CITY}}
    for calls, fields in (
        (LlamaParser, {"guided_regex": r"\{.*\}"}),
        (LlamaParser, {"guided_grammar": 'start: "{" /[a-z]+/ "}"'}),
        (PythonicParser, {"guided_json": {"type": "array"}}),
        (HermesParser, {"guided_grammar": "start: /(.|\\n)*/"}),
    ):
        with pytest.raises(InvalidRequest, match="as calls of this model do") as raised:
            world_of(calls).chat("a", tools=[tool], **fields)
        assert raised.value.param == next(iter(fields))


def test_several_calls_stand_where_the_format_of_calls_has_them() -> None:
    world = world_of(HermesParser)
    call = call_of(HermesParser, {"city": "Rome"})
    assert allows(asked(world, "chat", ANSWER, None), f"{call}\n{call}")
    assert not allows(asked(world, "chat", ANSWER, None, parallel_tool_calls=False), f"{call}\n{call}")
