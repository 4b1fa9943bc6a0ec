"""A JSON schema as llguidance takes it, and the place of what it does not take. Pure.

JSON Schema makes most formats annotations, and some keywords have values that constrain nothing; llguidance refuses
both, so they are left out. What is left constrains, and an error about it names the place within the schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

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
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "$comment", "default", "deprecated", "example", "examples", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "contentSchema", "nullable"),
    )
)
_SIZES = frozenset(f"{bound}{of}" for bound in ("min", "max") for of in ("Length", "Items", "Properties", "Contains"))
_DRAFT = re.compile(r"(http://json-schema\.org/draft-0[467]|https://json-schema\.org/draft/20(19-09|20-12))/schema#?\Z")
"""The values of `$schema` that llguidance knows; a test compares."""
_NO_URI = re.compile(r"""\A#|[\s<>"{}|\\^`]""")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]\Z")


ONE_OF = "oneOf cannot be enforced where two of its schemas may allow the same value; use anyOf"


class SchemaFault(NamedTuple):
    path: str
    """Place within the schema, such as `.properties.a`; empty for the schema itself."""
    problem: str


def enforceable(schema: Any, root: Any = None) -> Any:
    """Return a schema without the keywords that constrain nothing, and with `anyOf` for a `oneOf` that means the same.
    `root`: the schema that its references are in, if it is a part of one."""
    root = schema if root is None else root
    if isinstance(schema, list):
        return [enforceable(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" not in schema and ("discriminator" in schema or _are_told_apart(schema.get("oneOf"), root)):
        schema = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    reduced = {
        key: value
        if key in _DATA
        else {name: enforceable(inner, root) for name, inner in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else int(value)  # JSON Schema has 2.0 as an integer
        if key in _SIZES and isinstance(value, float) and value.is_integer()
        else enforceable(value, root)
        for key, value in schema.items()
    }
    if reduced.get("nullable") is True and isinstance(reduced.get("type"), str):  # of OpenAPI
        reduced["type"] = list(dict.fromkeys((reduced["type"], "null")))
    for key in sorted(reduced, key=lambda key: key in ("if", "minContains")):  # these last, for they depend on others
        if _constrains_nothing(key, reduced[key], reduced):
            del reduced[key]
    return reduced


def _are_told_apart(schemas: Any, root: Any) -> bool:
    """Return whether these are schemas of objects with a required property whose value tells them apart. llguidance
    sees this only for texts, and where no reference is on the way."""
    if not isinstance(schemas, list):
        return False
    objects = [_target(schema, root) for schema in schemas]
    for each in objects:
        if not isinstance(each.get("required"), list) or each.get("type") != "object" or each.get("nullable"):
            return False
    for name in objects[0]["required"] if objects else ():
        values = [_values_of(each, name, root) if name in each["required"] else set() for each in objects]
        if all(values) and len(set().union(*values)) == sum(map(len, values)):
            return True
    return False


def _values_of(schema: dict[str, Any], name: Any, root: Any) -> set[tuple[bool, Any]]:
    """Return the scalars that a property may have, each with whether it is a boolean: Python has `True == 1`, JSON has
    not. None if it may have other values, too."""
    properties = schema.get("properties")
    value = _target(properties.get(name), root) if isinstance(properties, dict) and isinstance(name, str) else {}
    values = [value["const"]] if "const" in value else value.get("enum")
    if not isinstance(values, list) or any(isinstance(each, (list, dict)) for each in values):
        return set()
    return {(isinstance(each, bool), each) for each in values}


def _target(schema: Any, root: Any) -> dict[str, Any]:
    """Return what a schema refers to, or itself; empty if that is not in the root."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if reference is not None:
        schema = target_of(reference, root)
    return schema if isinstance(schema, dict) else {}


def target_of(reference: Any, root: Any) -> Any:
    """Return what a reference leads to; None if that is not in the root."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    found = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def missing_target(reference: Any) -> str:
    """Return why a reference leads to nothing."""
    if isinstance(reference, str) and reference.startswith("#"):
        return f"$ref: {reference[1:]!r} does not exist in this schema"
    return f"$ref: {str(reference)[:NAMED_CHARS]!r} is not part of this schema"


def standalone(part: Any, root: Any) -> Any:
    """Return a part of a schema with what it refers to in `$defs` of its own. A reference that leads to nothing stays
    as it is."""
    names: dict[str, str] = {}
    waiting: list[str] = []

    def copied(schema: Any) -> Any:
        if isinstance(schema, list):
            return [copied(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("$defs", "definitions"):
                continue
            if key == "$ref" and target_of(value, root) is not None:
                if value not in names:
                    names[value] = f"d{len(names)}"
                    waiting.append(value)
                made[key] = f"#/$defs/{names[value]}"
            elif key in _MAPS and isinstance(value, Mapping):
                made[key] = {name: copied(inner) for name, inner in value.items()}
            else:
                made[key] = value if key in _DATA else copied(value)
        return made

    made, shared = copied(part), {}
    while waiting:
        reference = waiting.pop()
        shared[names[reference]] = copied(target_of(reference, root))
    if not isinstance(made, dict):
        return made
    draft = {"$schema": root["$schema"]} if isinstance(root, Mapping) and "$schema" in root else {}
    return {**draft, **made, **({"$defs": shared} if shared else {})}


def _constrains_nothing(key: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a keyword has no effect in a schema whose values are reduced already."""
    match key:
        case "format":
            return value is None or (isinstance(value, str) and value not in ENFORCED_FORMATS)
        case "$schema":  # of OpenAPI, for instance
            return isinstance(value, str) and _DRAFT.match(value) is None
        case "$id" | "id":
            return isinstance(value, str) and _NO_URI.search(value) is not None
        case "uniqueItems":
            return value is False or value is None
        case "minLength" | "minItems" | "minProperties":
            return value == 0 and value is not False
        case "not":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return _allows_all(value)
        case "propertyNames":  # the names of an object are texts
            types = value.get("type") if isinstance(value, dict) else None
            if "string" in (types if isinstance(types, list) else [types]):
                value = {name: inner for name, inner in value.items() if name != "type"}
            return _allows_all(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(each == [] or _allows_all(each) for each in value.values())
        case "contains":
            least = schema.get("minContains")
            return least == 0 and least is not False and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema or _allows_all(value)
    return key in _OF_DYNAMIC_REF


def _allows_all(schema: Any) -> bool:
    """Return whether a reduced schema allows any value."""
    if not isinstance(schema, dict):
        return schema is True
    return all(key in _ANNOTATIONS or key.startswith("x-") for key in schema)


def find_fault(schema: Any, problem_of: Callable[[Any], str], may_try: Callable[[], bool]) -> SchemaFault | None:
    """Return the smallest part of a schema that is refused for the same reason as the whole; None if the whole is not
    refused. `problem_of` returns the reason, or an empty text. Once `may_try` is false, the search ends where it is."""
    problem = problem_of(schema) if isinstance(schema, dict) else ""
    if not problem:
        return None
    part, path, seen = schema, "", {id(schema)}
    while True:
        for step, inner in _parts(part, schema):
            if (
                seen.isdisjoint(_with_target(inner, schema))
                and may_try()
                and problem_of(standalone(inner, schema)) == problem
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
            if target := _target(schema, root):
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
        return ONE_OF
    if problem.startswith("Pointer "):
        return f"$ref: {problem[len('Pointer ') :]} in this schema"
    if problem.startswith("Resource "):
        return f"$ref: {problem.split(' is not present')[0][len('Resource ') :]} is not part of this schema"
    return problem
