"""Enforced calls whose arguments are tagged texts: which arguments a schema allows, compared with a validator, and the
place of what cannot be enforced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_jobs import World, copy_of_tiny

from chitu.assets import TINY_MODEL_DIR
from chitu.errors import InvalidRequest
from chitu.grammars import CompiledGrammar, GrammarCompiler
from chitu.grammars.patterns import FORMATS, searched, terminal
from chitu.grammars.raw_text import is_raw_text
from chitu.grammars.schema import ENFORCED_FORMATS
from chitu.grammars.tagged_fields import argument_schema
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.call_objects import MessageDelta, joined
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.dsml_calls import DSMLParser
from chitu.http.messages.message_parser import MessagePlan
from chitu.http.messages.pythonic_calls import PythonicParser
from chitu.http.messages.seed_calls import SeedParser
from chitu.http.messages.tagged_calls import CompactGLMParser, GLMParser, MiniMaxParser, QwenCoderParser
from chitu.protocol import Grammar
from chitu.tokenizer import Tokenizer

TINY = Tokenizer.load(TINY_MODEL_DIR)
COMPILER = GrammarCompiler(TINY, TINY.vocab_size)
PARSERS: list[type[CallParser]] = [
    QwenCoderParser,
    GLMParser,
    CompactGLMParser,
    MiniMaxParser,
    PythonicParser,
    SeedParser,
    DSMLParser,
]
IN_CI = (0, 1, 3)
"""Distances between the places of a schema and a parser, modulo their number, that CI has: any two parsers meet at some
schema."""


def spread(schemas: list[Any]) -> pytest.MarkDecorator:
    """Return parameters of each parser with each schema. In CI each schema meets three parsers: what it allows, and how
    a parser writes an argument, are parts of the grammar that hardly know each other."""
    return pytest.mark.parametrize(
        ("calls", "schema"),
        [
            pytest.param(
                calls,
                schema,
                id=f"{calls.__name__}-{json.dumps(schema)[:60]}",
                marks=() if (number - place) % len(PARSERS) in IN_CI else pytest.mark.by_hand,
            )
            for place, calls in enumerate(PARSERS)
            for number, schema in enumerate(schemas)
        ],
    )


def compiled(calls: type[CallParser], schema: Any, is_required: bool = True) -> CompiledGrammar:
    tools = [{"function": {"name": "f", "parameters": schema}}]
    return COMPILER.compile(grammar_of_calls(calls, tools, ["p"], True, is_required))


def allows(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    for token in TINY.encode(text, add_special_tokens=False):
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.consume([token])
    return any(bool(matcher.mask()[eos // 32] >> (eos % 32) & 1) for eos in TINY.eos_token_ids)


def call_of(calls: type[CallParser], arguments: dict[str, Any]) -> str:
    """Return the call as the model writes it."""
    form, (begin, end) = calls.fields, calls.written("f")
    assert form is not None
    told = []
    for name, value in arguments.items():
        is_raw = isinstance(value, str) and not form.separator
        middle = form.middle if is_raw else form.json_middle or form.middle
        told.append(f"{form.begin}{name}{middle}{value if is_raw else json.dumps(value, ensure_ascii=False)}{form.end}")
    return (
        begin + form.separator.join(told) + end + ((calls.section_end or calls.end_mark) if calls.has_section else "")
    )


def read(calls: type[CallParser], schema: Any, text: str) -> Any:
    parser = MessagePlan(None, False, True, calls, {"f": schema}, True, True).parser()
    message = joined([parser.push(text), parser.finish()])
    assert isinstance(message, MessageDelta), message
    return json.loads(message.calls[0].arguments)


def of(x: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x}, "required": ["x"], "additionalProperties": False, **more}


DEFS = {
    "C": {"enum": ["a", "b"]},
    "D": {"type": "string", "pattern": "^[0-9]{3}$"},
    "Tree": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
        "required": ["v"],
        "additionalProperties": False,
    },
}
STRINGS = [
    "",
    "a",
    "b",
    "c",
    "123",
    "12",
    "1234",
    "x123",
    "a/b",
    "a<b",
    "é",
    "ab\ncd",
    "abcdefghijk",
    "null",
    "foo.txt",
]
STRINGS += ["2024-02-29", "2024-02-30", "10:00:00Z", "2024-01-01T00:00:00Z", "joe@x.de", "1.2.3.4", "::1", "http://a/b"]
STRINGS += ["123e4567-e89b-12d3-a456-426614174000", "P1D", "auto", "none", "aaa", "-"]
OTHERS: list[Any] = [None, 1, 2.5, True, [1], ["a"], {}, {"v": 1}, {"v": 1, "sub": [{"v": 2}]}, {"v": "1"}, {"a": 1}]
PROPERTIES: list[Any] = [
    {"type": "string", "pattern": "^[0-9]{3}$"},
    {"type": "string", "pattern": "[0-9]{3}"},
    {"type": "string", "pattern": "^(a|b)$|/"},
    {"pattern": r"\.txt$", "type": "string"},
    {"type": "string", "minLength": 1},
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 3},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-z0-9]*$"},
    {"type": "string", "pattern": "a", "allOf": [{"pattern": "b"}, {"maxLength": 20}]},
    *({"type": "string", "format": name} for name in sorted(ENFORCED_FORMATS)),
    {"type": "string", "format": "password"},
    {"const": "auto"},
    {"enum": ["a", "123", ""]},
    {"type": "string", "enum": ["a", "123", 7], "pattern": "[0-9]"},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": ["string", "null"], "minLength": 2},
    {"$ref": "#/$defs/C"},
    {"$ref": "#/$defs/D"},
    {"$ref": "#/$defs/Tree"},
    {"$ref": "#/$defs/Tree/properties/sub"},
    {"anyOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}, {"type": "null"}]},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^x"}]},
    {"oneOf": [{"const": "a"}, {"const": "b"}, {"enum": ["auto", "none"]}]},
    {"allOf": [{"type": "string"}, {"minLength": 2}, {"enum": ["a", "ab\ncd", "123"]}]},
    {"type": "integer", "minimum": 1},
    {"type": "array", "items": {"$ref": "#/$defs/C"}},
    {"type": "object", "patternProperties": {"^v$": {"type": "integer"}}, "additionalProperties": False},
    {"type": ["integer", "null"]},
    {"enum": [1, True, None]},
]


@spread(PROPERTIES)
def test_an_argument_is_allowed_as_its_schema_says(calls: type[CallParser], schema: Any) -> None:
    whole = of(schema, **{"$defs": DEFS})
    validator = jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
    grammar = compiled(calls, whole)
    is_raw = is_raw_text(argument_schema("x", whole), whole)
    for value in STRINGS + OTHERS:
        text = call_of(calls, {"x": value})
        arguments = read(calls, whole, text)
        if isinstance(value, str) and "<" in value[: schema.get("minLength", 0)] and "maxLength" in schema:
            continue  # such a text begins with so many other characters
        if calls is DSMLParser and isinstance(value, str) is not is_raw:  # the head says what the value is
            assert allows(grammar, text) is (value is None and validator.is_valid({"x": None})), text
            continue
        assert allows(grammar, text) is validator.is_valid(arguments), (value, arguments, text)
        if is_raw or calls is PythonicParser or not isinstance(value, str):
            assert arguments == {"x": value} or (is_raw and (value == "null" or not isinstance(value, str)))


WHOLE: list[Any] = [
    {"properties": {"tree": {"$ref": "#/$defs/Tree"}, "x": {"$ref": "#/properties/tree"}}},
    {"properties": {"tree": {"type": "string", "pattern": "^a"}, "x": {"$ref": "#/properties/tree"}}},
    {"properties": {"x": {"$ref": "#/properties/a~1b"}, "a/b": {"type": "integer"}}, "required": ["x"]},
    {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {
        "anyOf": [
            of({"type": "integer"}),
            of({"enum": [True]}),
            {**of({}), "properties": {"a": {"type": "string"}}, "required": ["a"]},
        ]
    },
    {
        "properties": {"a": {"type": "string"}},
        "allOf": [{"required": ["a"]}, {"properties": {"b": {"type": "integer"}}}],
    },
    {"$ref": "#/$defs/Args"},
    {
        "properties": {"a": {"type": "string"}},
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False,
    },
    {
        "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string", "maxLength": 2}},
        "additionalProperties": False,
    },
    {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"additionalProperties": {"type": "string", "minLength": 2}},
    {"required": ["a"], "additionalProperties": {"type": "integer"}},
    {"properties": {"a": {}, "b": {}}, "minProperties": 1},
    {"properties": {"a": {}, "b": {}}, "maxProperties": 2},
    {"additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {
        "oneOf": [
            {"properties": {"k": {"const": "s"}, "v": {"type": "string"}}, "required": ["k"], "type": "object"},
            {"properties": {"k": {"const": "t"}, "v": {"enum": ["u"]}}, "required": ["k"], "type": "object"},
        ]
    },
    {"const": {"a": "s", "b": 1}},
    {"enum": [{"a": "s"}, {"a": "t", "b": [1]}]},
    {"properties": {"a": {"type": "string"}, "b": False}, "additionalProperties": False},
]
MORE_DEFS = {**DEFS, "Args": {"properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]}}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"a": "s"},
    {"a": ""},
    {"b": "s"},
    {"a": "s", "b": "t"},
    {"a": "s", "b": 1},
    {"x": 1},
    {"x": True},
    {"x": "abc"},
    {"tree": {"v": 1}},
    {"x": {"v": 1}},
    {"tree": {"v": 1}, "x": {"v": 1, "sub": []}},
    {"x": {"v": "a"}},
    {"tree": "abc"},
    {"tree": "abc", "x": "bc"},
    {"tree": "abc", "x": "ac"},
    {"x": 3, "a/b": 3},
    {"x": "3"},
    {"n_a": 1},
    {"n_a": "1"},
    {"s_": "ab"},
    {"s_": "abc"},
    {"a": "s", "n_1": 2},
    {"a": "s", "c": 2},
    {"c": 2},
    {"c": 2, "d": 3},
    {"c": 2, "d": 3, "e": 4},
    {"c": "zz"},
    {"a": 5},
    {"k": "s"},
    {"k": "s", "v": "any"},
    {"k": "t", "v": "any"},
    {"k": "t", "v": "u"},
    {"k": "x"},
    {"a": "t", "b": [1]},
]


def listed(schema: Any) -> set[str]:
    """Return the names that a schema has of its own."""
    if isinstance(schema, list):
        return set().union(*map(listed, schema))
    if not isinstance(schema, dict):
        return set()
    names = {*schema.get("properties", ()), *schema.get("required", ())}
    return names.union(*(listed(schema.get(key)) for key in ("anyOf", "allOf", "oneOf")))


@spread(WHOLE)
def test_all_arguments_are_allowed_as_their_schema_says(calls: type[CallParser], schema: Any) -> None:
    whole = {"type": "object", **schema, "$defs": MORE_DEFS}
    validator = jsonschema_rs.Draft202012Validator(whole)
    grammar, num_right = compiled(calls, whole), 0
    for arguments in ARGUMENTS:
        if calls is PythonicParser and "a/b" in arguments:
            continue  # no name in Python
        text = call_of(calls, arguments)
        is_valid, is_allowed = validator.is_valid(arguments), allows(grammar, text)
        if is_allowed:
            num_right += 1
            assert validator.is_valid(read(calls, whole, text)), text
        if is_valid and not is_allowed:
            # Not listed, where others are: a call has only what its tool names. Or JSON where the text is a string.
            said = json.dumps(whole)
            is_odd = any(
                name not in listed(whole) and "atternProp" not in said and '"additionalProperties": {' not in said
                for name in arguments
            )
            is_text = any(
                not isinstance(value, str) and is_raw_text(argument_schema(name, whole), whole)
                for name, value in arguments.items()
            )
            assert is_odd or is_text or "$ref" in schema, (arguments, text)
    assert num_right, "some call is possible"


PLACES: list[tuple[Any, str]] = [
    (of({"type": "string", "pattern": "("}), "properties.x.pattern"),
    (of({"type": "string", "pattern": "(?=a)b"}), "properties.x.pattern"),
    (of({"type": "string", "pattern": "a^b"}), "properties.x.pattern"),
    (of({"type": "string", "pattern": r"\bword\b"}), "properties.x.pattern"),
    (of({"type": "string", "not": {"const": "a"}}), "properties.x.not"),
    (of({"anyOf": [{"type": "string", "pattern": "("}, {"type": "null"}]}), "properties.x.anyOf[0].pattern"),
    (of({"$ref": "#/$defs/no"}), "properties.x.$ref"),
    (of({"$ref": "http://a/b"}), "properties.x.$ref"),
    (
        of({"$ref": "#/$defs/S"}, **{"$defs": {"S": {"type": "string", "if": {}, "then": {"maxLength": 1}}}}),
        "$defs.S.if",
    ),
    (of({"$ref": "#/$defs/S"}, **{"$defs": {"S": {"$ref": "#/$defs/S"}}}), "$defs.S.$ref"),
    (of({"type": "string", "minLength": 300, "maxLength": 5000}), "properties.x.minLength"),
    (of({"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 2}]}), "properties.x.oneOf"),
    (of({"type": "array", "uniqueItems": True}), "properties.x"),
    (of({"type": "integer"}, **{"not": {"required": ["x"]}}), "not"),
    (of({}, dependentRequired={"x": ["y"]}), "dependentRequired"),
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties"),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
    ({"type": "object", "patternProperties": {"(": {}}}, "patternProperties"),
    (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        "propertyNames",
    ),
]


@pytest.mark.parametrize(("schema", "place"), PLACES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_what_cannot_be_enforced_is_refused_with_tool_and_place(
    api: str, schema: Any, place: str, world: World
) -> None:
    asked: dict[str, Any] = {"model": "m", "tool_choice": "required", "input": "a"}
    tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": schema}
    param = f"tools[1].parameters.{place}"
    if api == "chat":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        asked, param = (
            {**asked, "messages": [{"role": "user", "content": "a"}]},
            f"tools[1].function.parameters.{place}",
        )
        del asked["input"]
    if api == "messages":
        tool, param = {"name": "f", "input_schema": schema}, f"tools[1].input_schema.{place}"
        asked = {
            **asked,
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1,
            "tool_choice": {"type": "any"},
        }
        del asked["input"]
    other = json.loads(json.dumps(tool).replace('"f"', '"g"'))
    other = {**other, **{key: {} for key in ("parameters", "input_schema") if key in other}}
    if "function" in other:
        other["function"]["parameters"] = {}
    if api == "messages":
        other["input_schema"] = {"type": "object"}
    with pytest.raises(InvalidRequest) as raised:
        world.parsed(api, json.dumps({**asked, "tools": [other, tool]}).encode())
    assert raised.value.param == param and raised.value.message.startswith(f"{param}: "), raised.value.message
    assert "'f'" in raised.value.message


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = copy_of_tiny(tmp_path_factory.mktemp("qwen"))
    template = "{#- <tool_call> <function= -#}{% if tools %}{% endif %}{{ messages[-1].content }}"
    (folder / "chat_template.jinja").write_text(template)
    return World(path=Path(folder))


@pytest.mark.parametrize("most", [601, pytest.param(3000, marks=pytest.mark.by_hand)])
@pytest.mark.parametrize("least", [0, 20])
@pytest.mark.parametrize("calls", [QwenCoderParser, GLMParser])
def test_long_texts_have_their_bounds_and_do_not_wear_the_grammar_out(
    calls: type[CallParser], least: int, most: int
) -> None:
    schema = of({"type": "string", "minLength": least, "maxLength": most})
    grammar = compiled(calls, schema)
    line = "if a < b and c </d>:\n\n    return <x>\n"
    sizes = {0, 20, 255, 256, 257, 258, 513, 602, 2690, 3001, most * 9 // 10}
    for size in sorted(size for size in sizes if size < 3500):
        for shift in (0, 20):
            start = "x" * min(size, least)
            text = (start + line[shift:] + line * (1 + size // len(line)))[: max(0, size - 2)]
            text += "ab"[: size - len(text)]
            is_allowed = allows(grammar, call_of(calls, {"x": text}))
            assert is_allowed or not least <= size <= most * 9 // 10, (size, shift)
            assert not is_allowed or least <= size <= most, (size, shift)


def test_a_schema_that_grows_with_each_reference_is_refused_at_once_and_long_lists_are_not() -> None:
    doubling: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    doubling["d60"] = {"type": "string"}
    for schema in (of({"$ref": "#/$defs/d0"}), {"type": "object", "$ref": "#/$defs/d0"}):
        with pytest.raises(InvalidRequest, match="too much"):
            compiled(QwenCoderParser, {**schema, "$defs": doubling})
        assert argument_schema("x", {"$defs": doubling, **schema}) is not None
    for key in ("anyOf", "oneOf"):
        grammar = compiled(QwenCoderParser, of({key: [{"const": f"w{i}", "title": "x"} for i in range(800)]}))
        for word, is_right in (("w0", True), ("w799", True), ("w800", False)):
            assert allows(grammar, call_of(QwenCoderParser, {"x": word})) is is_right


def test_a_value_never_has_the_text_in_it_that_ends_it_or_begins_another_one() -> None:
    bounds: list[dict[str, Any]] = [{}, {"pattern": "a"}, {"minLength": 3}, {"pattern": "a", "maxLength": 90}]
    for calls in (QwenCoderParser, GLMParser, CompactGLMParser, MiniMaxParser):
        form = calls.fields
        for more in (*bounds, {"maxLength": 90}, {"maxLength": 900}):
            schema = {"type": "object", "properties": {"x": {"type": "string", **more}, "y": {"type": "string"}}}
            grammar = compiled(calls, schema)
            assert allows(grammar, call_of(calls, {"x": "a < b </c>"})) is ("pattern" not in more or len(more) == 1)
            for tag in (form.end, form.end.strip(), f"{form.begin}y{form.middle}") if more in bounds else (form.end,):
                twice = call_of(calls, {"x": f"a b{tag}c"})
                assert not allows(grammar, twice), twice


PATTERNS = [
    "a",
    "^a",
    "a$",
    "^a$",
    "^(a|b)$",
    "^a|b$",
    "(^a|b)c?",
    "(^a|b$)",
    "[0-9]{3}",
    r"^\d+$",
    "^[^/]+$",
    "[/]",
    "a|",
]
PATTERNS += [
    "^https?://",
    "^.*$",
    r"^[\w.-]+$",
    r"\.txt$",
    "^[a-z]+?b*?$",
    "(?i)^a$",
    "^$",
    "",
    r"^[\]]$",
    r"^\S+$",
    "^(|a)$",
]
PATTERNS += [
    r"^\x61$",
    r"^\u0061$",
    "^(^a)$",
    "^(a$|b)",
    "(a|^b$)",
    "^(?<n>a)(?P<m>b)?$",
    r"^[\d_]+$",
    r"^[^\d]$",
    r"^\/$",
]


@given(st.text(st.sampled_from("ab01/.<>x \né_"), max_size=6))
def test_a_pattern_is_searched_as_in_a_schema_of_json(text: str) -> None:
    for pattern in PATTERNS:
        raw, of_json = _both(pattern)
        assert allows(raw, text) == allows(of_json, json.dumps(text, ensure_ascii=False)), pattern


_KNOWN: dict[str, tuple[CompiledGrammar, CompiledGrammar]] = {}


def _both(pattern: str) -> tuple[CompiledGrammar, CompiledGrammar]:
    if pattern not in _KNOWN:
        of_json = Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))
        raw = Grammar("lark", f"start: T\nT: {terminal(searched(pattern))}\n")
        _KNOWN[pattern] = COMPILER.compile(raw), COMPILER.compile(of_json)
    return _KNOWN[pattern]


def test_anchors_where_they_cannot_hold_are_refused() -> None:
    for pattern in (
        "a^b",
        "a$b",
        "(^a)*",
        "x(^a|b)",
        "(a$)b",
        r"\bA",
        "(?=a)",
        "(?!a)",
        "(?<=a)b",
        "(",
        "a)",
        "[a",
        "a\\",
    ):
        with pytest.raises(ValueError):
            searched(pattern)


def test_formats_are_those_of_the_engine() -> None:
    assert set(FORMATS) == set(ENFORCED_FORMATS)
    good = {
        **{"date": ["2024-02-29", "1999-12-31"], "time": ["10:00:60Z", "23:59:59.123+02:00"]},
        **{"date-time": ["2024-01-30T00:00:00Z"], "duration": ["P1Y2M3D", "PT1H", "P3W", "P1DT2M3S"]},
        **{"email": ["a.b+c@x.y", "a@localhost"], "hostname": ["a-b.c", "x"], "ipv4": ["1.2.3.4", "255.255.255.0"]},
        "ipv6": ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3::8"],
        "uri": [
            "http://a/b?c#d",
            "mailto:a@b",
            "urn:x:y",
            "http://[::1]:80/",
            "https://u@h.x/%20",
            "file:///a",
            "a:/b",
        ],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    }
    bad = {
        **{"date": ["2024-02-30", "2024-13-01", "24-01-01", "2024-04-31"], "time": ["24:00:00Z", "10:00"]},
        **{"date-time": ["2024-01-30"], "duration": ["P", "1D", "PT", "P1W2D"], "email": ["a", "a@", "@b", "a b@c"]},
        **{"hostname": ["-a", "a-", "a..b", ""], "ipv4": ["256.1.1.1", "1.2.3", "01.2.3.4"]},
        **{"ipv6": ["1", "1::2::3", "12345::", ":::"], "uri": ["a", "//x", "http://a b", "1a:b"]},
        "uuid": ["123e4567e89b12d3a456426614174000"],
    }
    for name in FORMATS:
        raw = COMPILER.compile(Grammar("lark", f"start: T\nT: {terminal(FORMATS[name])}\n"))
        of_json = COMPILER.compile(Grammar("json_schema", json.dumps({"type": "string", "format": name})))
        for text in good[name] + bad[name]:
            assert allows(raw, text) is allows(of_json, json.dumps(text)) is (text in good[name]), (name, text)
