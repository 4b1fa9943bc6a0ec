"""A JSON schema as llguidance takes it, and the place of what it does not take. Pure.

JSON Schema makes most formats annotations, and some keywords have values that constrain nothing; llguidance refuses
both, so they are left out. What is left constrains, and an error about it names the place within the schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ENFORCED_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""Values of `format` that llguidance enforces; a test compares."""
NAMED_CHARS = 80
"""Characters of a property's name that an error repeats."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value has schemas under names of its own."""
_DATA = ("enum", "const", "default", "examples", "example")
"""Keywords whose value is no schema."""
_OF_DYNAMIC_REF = ("$dynamicAnchor", "$recursiveAnchor")
_OF_ANY_TEXT = {"type", "title", "description", "$comment", "default", "deprecated", "example", "examples"}
_DRAFTS = ("http://json-schema.org/", "https://json-schema.org/")
_NO_URI = re.compile(r"""\A#|[\s<>"{}|\\^`]""")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]\Z")


class SchemaFault(NamedTuple):
    path: str
    """Place within the schema, such as `.properties.a`; empty for the schema itself."""
    problem: str


def enforceable(schema: Any) -> Any:
    """Return a schema without the keywords that constrain nothing."""
    if isinstance(schema, list):
        return [enforceable(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in _DATA
        else {name: enforceable(inner) for name, inner in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else enforceable(value)
        for key, value in schema.items()
        if not _constrains_nothing(key, value, schema)
    }


def _constrains_nothing(key: str, value: Any, schema: dict[str, Any]) -> bool:
    is_empty = isinstance(value, dict) and not value
    match key:
        case "format":
            return value is None or (isinstance(value, str) and value not in ENFORCED_FORMATS)
        case "$schema":  # of OpenAPI, for instance
            return isinstance(value, str) and not value.startswith(_DRAFTS)
        case "$id" | "id":
            return isinstance(value, str) and _NO_URI.search(value) is not None
        case "uniqueItems":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or is_empty
        case "propertyNames":  # the names of an object are texts
            named = enforceable(value)
            if not isinstance(named, dict):
                return named is True
            return bool(named.get("type", "string") == "string" and named.keys() <= _OF_ANY_TEXT)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return is_empty
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
    return key in _OF_DYNAMIC_REF


def find_fault(schema: Any, problem_of: Callable[[Any], str], may_try: Callable[[], bool]) -> SchemaFault | None:
    """Return the smallest part of a schema that is refused for the same reason as the whole; None if the whole is not
    refused. `problem_of` returns the reason, or an empty text. Once `may_try` is false, the search ends where it is."""
    problem = problem_of(schema)
    if not problem or not isinstance(schema, dict):
        return SchemaFault("", problem) if problem else None
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    part, path, seen = schema, "", {id(schema)}
    while True:
        for step, inner in _parts(part, schema):
            if (
                seen.isdisjoint(_with_target(inner, schema))
                and may_try()
                and problem_of({**shared, **inner}) == problem
            ):
                seen.add(id(inner))
                part, path = inner, step if step.startswith("#") else path + step
                break
        else:
            return SchemaFault(path.replace("#", ""), problem)


def _with_target(part: dict[str, Any], root: dict[str, Any]) -> set[int]:
    """Return the ids of a schema and of what it refers to."""
    return {id(part), *(id(inner) for step, inner in _parts(part, root) if step.startswith("#"))}


def _parts(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the schemas directly within a schema, with the step to each. That of a reference begins with `#`."""
    for key, value in schema.items():
        if key in _DATA or key in ("$defs", "definitions"):
            continue
        if key == "$ref" and isinstance(value, str) and value.startswith("#/"):
            target: Any = root
            for name in value[2:].split("/"):
                target = target.get(name) if isinstance(target, dict) else None
            if isinstance(target, dict):
                yield "#" + value[1:].replace("/", "."), target
        elif key in _MAPS and isinstance(value, dict):
            yield from (
                (f".{key}.{name[:NAMED_CHARS]}", inner) for name, inner in value.items() if isinstance(inner, dict)
            )
        elif isinstance(value, list):
            yield from ((f".{key}[{i}]", inner) for i, inner in enumerate(value) if isinstance(inner, dict))
        elif isinstance(value, dict):
            yield f".{key}", value


def in_plain_words(problem: str) -> str:
    """Return llguidance's reason in words of JSON Schema."""
    if found := _UNIMPLEMENTED.match(problem):
        return f"{found[1].replace(chr(34), '')} cannot be enforced"
    if problem.startswith("oneOf constraints"):
        return "oneOf cannot be enforced where two of its schemas may allow the same value; use anyOf"
    if problem.startswith("Pointer "):
        return f"$ref: {problem[len('Pointer ') :]} in this schema"
    if problem.startswith("Resource "):
        return f"$ref: {problem.split(' is not present')[0][len('Resource ') :]} is not part of this schema"
    return problem
