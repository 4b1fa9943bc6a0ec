"""The grammar that a body asks for. Pure; part of `BodyWork`.

`response_format`, `structured_outputs` and `guided_*` express the same, so a request may give one of them. Beside
tools it holds for an answer that makes no call. Compilation checks the grammar's text (`grammars/compiler.py`). Every
error names its field.
"""

from __future__ import annotations

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import GenerationBody, ResponseFormat, StructuredOutputs
from chitu.http.ask.decoder import cut_character
from chitu.protocol import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

_NOT_GUIDED = (msgspec.UNSET, None, None, None)


def grammar_of(body: GenerationBody, calls: tuple[Grammar, str] | None = None) -> tuple[Grammar, str] | None:
    """Return the grammar of the answer and the name of its field; None if the answer is free. `calls`: grammar and
    field of tool calls, which has the body's own in it. Raise InvalidRequest for two formats of an answer, and for one
    that cannot be served."""
    found = format_of(body) if calls is None else calls
    if found is not None and body.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos cannot be combined with {found[1]}, which determines where the answer ends", "ignore_eos"
        )
    return found


def format_of(body: GenerationBody) -> tuple[Grammar, str] | None:
    """Return the grammar of an answer that is no call, and the name of its field; None if it is free."""
    found = []
    if body.response_format is not None:
        found += _of_format(body.response_format)
    if body.structured_outputs is not None:
        found += _of_outputs(body.structured_outputs, "structured_outputs.")
        if not found:
            raise InvalidRequest(
                "structured_outputs must have one of json, json_object, regex, choice and grammar",
                "structured_outputs",
            )
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if guided != _NOT_GUIDED:
        json, regex, choice, grammar = guided
        found += _of_outputs(StructuredOutputs(json=json, regex=regex, choice=choice, grammar=grammar), "guided_")
    if len(found) > 1:
        (_, param), (_, other) = found[:2]
        raise InvalidRequest(f"{other} and {param} both define the format of the answer; give one", other)
    return found[0] if found else None


def _of_format(wanted: ResponseFormat) -> list[tuple[Grammar, str]]:
    param = "response_format.json_schema" if wanted.json_schema is not None else "response_format.schema"
    if wanted.json_schema is None and _is_left_out(wanted.schema):
        if wanted.type == "json_schema":
            raise InvalidRequest("response_format.json_schema is required", "response_format.json_schema")
        return [_grammar("json_object", "", "response_format")] if wanted.type == "json_object" else []
    if wanted.type == "text":
        raise InvalidRequest(f"{param} defines a JSON schema, but the type is 'text'; use json_schema", param)
    if wanted.json_schema is None:
        return [_grammar("json_schema", _schema(wanted.schema, param), param)]
    if not _is_left_out(wanted.schema):
        raise InvalidRequest("response_format.schema and response_format.json_schema are the same; give one", param)
    param = f"{param}.schema"
    return [_grammar("json_schema", _schema(wanted.json_schema.schema, param), param)]


def _of_outputs(outputs: StructuredOutputs, name: str) -> list[tuple[Grammar, str]]:
    found = []
    if not _is_left_out(outputs.json):
        found.append(_grammar("json_schema", _schema(outputs.json, f"{name}json"), f"{name}json"))
    if outputs.json_object:
        found.append(_grammar("json_object", "", f"{name}json_object"))
    if outputs.regex is not None:
        found.append(_grammar("regex", outputs.regex, f"{name}regex"))
    if outputs.choice is not None:
        found.append(_grammar("choice", msgspec.json.encode(outputs.choice).decode(), f"{name}choice"))
    if outputs.grammar is not None:
        found.append(_grammar("lark", outputs.grammar, f"{name}grammar"))
    return found


def _grammar(kind: GrammarKind, text: str, param: str) -> tuple[Grammar, str]:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param}: {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are accepted", param)
    return Grammar(kind, text), param


def _is_left_out(value: msgspec.Raw | msgspec.UnsetType) -> bool:
    return value is msgspec.UNSET or bytes(value) == b"null"


def _schema(value: msgspec.Raw | msgspec.UnsetType, param: str) -> str:
    """Return the schema as JSON. It is given as an object, or as a text that holds one."""
    if _is_left_out(value):
        raise InvalidRequest(f"{param} is required", param)
    assert value is not msgspec.UNSET
    given = bytes(value)
    try:
        text = msgspec.json.decode(given, type=str) if given[:1] == b'"' else given.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise cut_character(given, param) or InvalidRequest(f"{param} is not valid JSON: {error}", param) from error
    if not text.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be a JSON schema: an object, or a text that holds one", param)
    return text
