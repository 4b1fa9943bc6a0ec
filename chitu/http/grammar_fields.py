"""From the fields of a body that shape the answer's text to its `Grammar`. Pure; called by `jobs.py`, once a request.

`response_format` is OpenAI's, `structured_outputs` and `guided_*` are vLLM's. They say the same, so one of them may be
given. Every error names its field. What a grammar holds is looked at where it is compiled (`grammars/compiler.py`).
"""

from __future__ import annotations

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.request_bodies import GenerationBody, StructuredOutputs
from chitu.protocol import MAX_GRAMMAR_CHARS, Grammar, GrammarKind


def grammar_of(body: GenerationBody, calls: tuple[Grammar, str] | None = None) -> tuple[Grammar, str] | None:
    """What the answer must follow, and the field that says so; None where it is free. `calls`: the same of tools.
    InvalidRequest for two of them, and for one that cannot be served."""
    found: list[tuple[Grammar, str]] = [] if calls is None else [calls]

    def note(kind: GrammarKind, text: str, param: str) -> None:
        if found:
            raise InvalidRequest(f"{param} and {found[0][1]} both say what the answer looks like; give one", param)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"{param}: {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken", param)
        found.append((Grammar(kind, text), param))

    def note_one_of(outputs: StructuredOutputs, name: str) -> None:
        if not _is_left_out(outputs.json):
            note("json_schema", _schema(outputs.json, f"{name}json"), f"{name}json")
        if outputs.json_object:
            note("json_object", "", f"{name}json_object")
        if outputs.regex is not None:
            note("regex", outputs.regex, f"{name}regex")
        if outputs.choice is not None:
            note("choice", msgspec.json.encode(outputs.choice).decode(), f"{name}choice")
        if outputs.grammar is not None:
            note("lark", outputs.grammar, f"{name}grammar")

    wanted = body.response_format
    if wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise InvalidRequest("response_format.json_schema is required", "response_format.json_schema")
        param = "response_format.json_schema.schema"
        note("json_schema", _schema(wanted.json_schema.schema, param), param)
    elif wanted is not None and wanted.type == "json_object":
        note("json_object", "", "response_format")
    if body.structured_outputs is not None:
        note_one_of(body.structured_outputs, "structured_outputs.")
        if not found:
            raise InvalidRequest(
                "structured_outputs must have one of json, json_object, regex, choice and grammar",
                "structured_outputs",
            )
    guided = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    note_one_of(guided, "guided_")
    if found and body.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos does not go with {found[0][1]}, which says where the answer ends", "ignore_eos"
        )
    return found[0] if found else None


def _is_left_out(value: msgspec.Raw | msgspec.UnsetType) -> bool:
    return value is msgspec.UNSET or bytes(value) == b"null"


def _schema(value: msgspec.Raw | msgspec.UnsetType, param: str) -> str:
    """The schema as JSON, given as an object or as a text that holds one."""
    if _is_left_out(value):
        raise InvalidRequest(f"{param} is required", param)
    assert value is not msgspec.UNSET
    given = bytes(value)
    try:
        text = msgspec.json.decode(given, type=str) if given[:1] == b'"' else given.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param) from error
    if not text.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be a JSON schema: an object, or a text that holds one", param)
    return text
