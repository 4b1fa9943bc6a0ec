"""JSON schemas as grammars: annotations never refuse and constrain nothing; what cannot be enforced is named with its
place."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from grammar_texts import COMPILER, allows, is_answer

from chitu.errors import InvalidRequest
from chitu.grammars import CompiledGrammar
from chitu.grammars.schema import ENFORCED_FORMATS, enforceable
from chitu.http.messages.call_formats import grammar_of_calls
from chitu.http.messages.dsml_calls import DSMLParser
from chitu.protocol import Grammar, ToolCall, ToolCalls

ANNOTATED_FORMATS = [
    *(
        "password",
        "path",
        "binary",
        "byte",
        "base64",
        "regex",
        "uri-reference",
        "json-pointer",
        "relative-json-pointer",
    ),
    *("iri", "color", "markdown", "html", "url", "cuid", "ulid", "nanoid", "directory-path", "file-path", "multi-line"),
    *("phone", "idn-email", "idn-hostname", "uri-template", "int32", "unknown", "Email"),
]
ANNOTATIONS: dict[str, Any] = {
    **dict.fromkeys(("title", "description", "$comment", "contentEncoding", "contentMediaType"), "x"),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly", "nullable", "$recursiveAnchor"), True),
    **{key: {"format": "zz"} for key in ("default", "example", "contentSchema", "x-foo", "discriminator", "xml")},
    **{key: ["a"] for key in ("examples", "x-enum-varnames", "propertyOrdering")},
    **dict.fromkeys(("$schema", "$anchor", "$dynamicAnchor"), "http://spec.openapis.org/oas/3.1"),
    **dict.fromkeys(("$id", "id"), "not a URI"),
    "uniqueItems": False,
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), True),
    **{key: {} for key in ("dependentRequired", "dependentSchemas", "dependencies", "if", "then", "else")},
    **dict.fromkeys(("minContains", "maxContains"), 1),
    "propertyNames": {"type": "string", "description": "x"},
    "format": None,
}
NO_EFFECT: list[dict[str, Any]] = [
    *(
        {"$schema": uri}
        for uri in (
            "http://json-schema.org/schema#",
            "https://json-schema.org/schema",
            "https://json-schema.org/draft-07/schema#",
            "http://json-schema.org/draft/2020-12/schema",
            "http://json-schema.org/hyper-schema#",
        )
    ),
    {"dependentRequired": {"a": [], "b": []}},
    {"dependencies": {"a": [], "b": {"title": "x"}, "c": True}},
    {"dependentSchemas": {"a": {"format": "zz"}}},
    *({"contains": of, "minContains": 0} for of in ({}, True, {"type": "null"})),
    {"contains": True, "minContains": 0.0},
    {"not": False},
    *({"unevaluatedProperties": of} for of in ({"format": "zz"}, {"title": "x", "uniqueItems": None})),
    {"unevaluatedItems": {"minItems": 0.0}},
    *({"propertyNames": of} for of in ({"minLength": 0}, {"type": "string", "nullable": True}, {"format": "zz"})),
    {"if": {"required": ["a"]}, "then": {}, "else": True},
    {"if": {"required": ["a"]}, "then": {"description": "x", "propertyNames": {}}},
    {"uniqueItems": None},
]


def compiled(schema: Any) -> CompiledGrammar:
    return COMPILER.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "annotation",
    [{"format": name} for name in ANNOTATED_FORMATS]
    + [{name: value} for name, value in ANNOTATIONS.items()]
    + NO_EFFECT,
    ids=lambda annotation: "-".join(map(str, next(iter(annotation.items()))))[:40],
)
def test_an_annotation_never_refuses_and_constrains_nothing(annotation: dict[str, Any]) -> None:
    text = {"type": ["string", "null"], **annotation}
    assert allows(compiled(text), '"any <text>"') and allows(compiled(text), "null")
    schema = {
        **annotation,
        "type": "object",
        "properties": {"default": text, "format": {"anyOf": [text, {"type": "array", "items": text}]}},
        "additionalProperties": {"$ref": "#/$defs/enum"},
        "$defs": {"enum": text},
        "required": ["default"],
    }
    for value in ({"default": "x"}, {"default": "x", "format": ["y"], "z": None}):
        assert allows(compiled(schema), json.dumps(value, separators=(",", ":"))), value
    calls = ToolCalls((ToolCall("<", msgspec.Raw(json.dumps(schema).encode()), ">"),), "<", is_required=True)
    COMPILER.compile(Grammar("tool_calls", msgspec.json.encode(calls).decode()))


def test_formats_that_the_engine_knows_are_enforced_and_it_knows_no_other() -> None:
    for name in sorted(ENFORCED_FORMATS):
        assert not allows(compiled({"type": "string", "format": name}), '"%"'), name
    engine, tokens = COMPILER._engine, COMPILER._tokens
    for name in ANNOTATED_FORMATS:
        source = engine.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert name == "unknown" or f"Unknown format: {name}" in engine(tokens, source, log_level=0).get_error()


def test_drafts_that_the_engine_knows_stay() -> None:
    for uri in (
        *(f"http://json-schema.org/draft-0{number}/schema{end}" for number in (4, 6, 7) for end in ("", "#")),
        *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
    ):
        assert enforceable({"$schema": uri}) == {"$schema": uri} and allows(compiled({"$schema": uri}), "1")


def test_integral_floats_are_sizes() -> None:
    for least, most, values in (
        ("minLength", "maxLength", ('"a"', '"ab"', '"abc"')),
        ("minItems", "maxItems", ("[1]", "[1,1]", "[1,1,1]")),
    ):
        grammar = compiled({least: 2.0, most: 2.0})
        assert [allows(grammar, value) for value in values] == [False, True, False]
    kept = dict.fromkeys(("minProperties", "maxProperties", "maxContains"), 3.0)
    assert json.dumps(enforceable({**kept, "contains": {}})).count("3.0") == 0
    with pytest.raises(InvalidRequest, match="minLength"):
        compiled({"minLength": 1.5})


def test_nullable_beside_a_type_allows_null() -> None:
    for of in ({"type": "string"}, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}):
        assert allows(compiled({**of, "nullable": True}), "null")
        assert not allows(compiled({**of, "nullable": False}), "null") and not allows(compiled(of), "null")
    assert not allows(compiled({"type": "string", "enum": ["a"], "nullable": True}), "null"), "the enum holds, too"


def kind(*values: Any, **more: Any) -> dict[str, Any]:
    """Return a schema of objects that one of these values tells apart."""
    return {"type": "object", "properties": {"k": {"enum": list(values)}}, "required": ["k"], **more}


def test_any_scalar_tells_objects_apart() -> None:
    for a, b in ((1, 2), (1, True), (0, False), (None, False), ("1", 1), (1.5, 1)):
        schema = {"oneOf": [kind(a), {**kind(), "properties": {"k": {"const": b}}}]}
        assert all(allows(compiled(schema), json.dumps({"k": k}, separators=(",", ":"))) for k in (a, b))
        assert not allows(compiled(schema), '{"k":"x"}')
    for union in (
        [kind(1), kind(1.0)],
        [kind(True, 1), kind(2, True)],
        [kind([1]), kind([2])],
        [kind(1), kind(2, nullable=True)],
    ):
        assert "oneOf" in enforceable({"oneOf": union})


def test_a_union_whose_schemas_a_property_tells_apart_is_enforced() -> None:
    for a, b, more in (
        (kind("a"), kind("b"), {}),
        (kind("a", "c"), kind("b"), {}),
        (kind("a", required=[]), kind("b", required=[]), {"discriminator": {"propertyName": "k"}}),
    ):
        for union in ([a, b], [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]):
            schema = {"type": "array", "items": {"oneOf": union, **more}, "$defs": {"A": a, "B": b}}
            assert allows(compiled(schema), '[{"k":"a"},{"k":"b"}]') and not allows(compiled(schema), '[{"k":"x"}]')
    a = kind("a")
    for b in (
        kind("a", "b"),
        kind("b", required=[]),
        {**kind("b"), "properties": {}},
        {},
        True,
        kind("b", type="array"),
    ):
        assert enforceable({"oneOf": [a, b]}) == {"oneOf": [a, b]}


def test_data_are_no_schemas() -> None:
    kept = {"enum": [{"format": "password", "uniqueItems": False}], "properties": {"format": {"const": {"if": 1}}}}
    assert enforceable(kept) == kept


@pytest.mark.parametrize(
    ("schema", "place", "says"),
    [
        ({"not": {}}, "0", "not cannot be enforced"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "0.properties.a.items", "uniqueItems"),
        ({"properties": {"b": {}, "a": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}}, "0.properties.a", "use anyOf"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/X"}]}, "0.anyOf[1]", r"'/\$defs/X' does not exist"),
        ({"items": {"$ref": "http://a/b"}}, "0.items", "'http://a/b' is not part of this schema"),
        (
            {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"properties": {"y": {"contains": {}}}}}},
            "0.$defs.X.properties.y",
            "contains",
        ),
        ({"$ref": "#/$defs/X", "$defs": {"X": {"items": {"$ref": "#/$defs/X"}, "not": {}}}}, "0.$defs.X", "not"),
        ({"properties": {"a": {"pattern": "("}}}, "0.properties.a", "unclosed group"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "0", "Unsatisfiable"),
        ({"properties": {"a": {"format": 5}}}, "0.properties.a", "format"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_its_place(schema: Any, place: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        compiled(schema)
    assert raised.value.param == place and "option" not in raised.value.message
    if "$ref" in json.dumps(schema) or says == "Unsatisfiable":  # such a property is left out
        return
    texts = [json.dumps(schema) for schema in ({"type": "object"}, {"type": "object", "properties": {"x": schema}})]
    calls = ToolCalls(tuple(ToolCall(f"<{i}", msgspec.Raw(text.encode())) for i, text in enumerate(texts)), "<")
    with pytest.raises(InvalidRequest, match=says) as raised:
        COMPILER.compile(Grammar("tool_calls", msgspec.json.encode(calls).decode()))
    assert raised.value.param == f"1.properties.x{place[1:]}" and " at 3" not in raised.value.message


@pytest.mark.parametrize("is_spelled", [False, True])
def test_marks_of_arguments_are_the_tokens_that_models_write_or_spelled(is_spelled: bool) -> None:
    schema = {"properties": {"t": {"type": "string"}, "e": {"enum": ["a", "ab"]}, "x": {"type": "integer"}}}
    tools = [{"function": {"name": "f", "parameters": schema}}, {"function": {"name": "g"}}]
    grammar = grammar_of_calls(DSMLParser, tools, ["p", "p"], True, False)
    form, (begin, end), close = DSMLParser.fields, DSMLParser.written("f"), DSMLParser.section_end

    def argument(name: str, value: str, middle: str = form.middle) -> str:
        return f"{form.begin}{name}{middle}{value}{form.end}"

    right = argument("t", "a < b\n</ >") + argument("e", "ab") + argument("x", "3", form.json_middle)
    for text in (f"Well. <{begin}{right}{end}{close}", begin + argument("e", "a") + end + close, begin + end + close):
        assert is_answer(grammar, text, is_spelled), text
    for wrong in (argument("e", "b"), argument("x", "a", form.json_middle), argument("t", "a").removesuffix(form.end)):
        assert not is_answer(grammar, begin + wrong + end + close, is_spelled), wrong
    anything = DSMLParser.written("g")[0] + argument("any", "v") + end + close
    assert is_answer(grammar, anything, is_spelled)
