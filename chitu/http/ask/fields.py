"""What becomes of each field that clients send: behind the decoder, the OpenAPI document and docs/api.md. Pure.

Fields that a route reads are those of its struct (`bodies.py`). The table `UNSERVED` of its API has the others: refused
ones with the neutral values that ask for nothing, and those without effect, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from chitu.http.ask.bodies import REFUSED, SERVED, Effect
from chitu.http.ask.other_servers import NEUTRAL_OF_OTHER_NAMES, OTHER_NAMES, Row

TEXT_ONLY = "this server serves text, and images if the model has vision"


class Field(NamedTuple):
    name: str
    """Name in the body. A field of a nested object has its path, with `[]` for every entry of a list."""
    effect: Effect
    note: str = ""
    """One line of Markdown: meaning of a served field, the reason of another, or the alternative to it."""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, with which a refused field asks for nothing and is accepted."""


Unserved = tuple[tuple[tuple[str, ...], Effect, tuple[Row, ...]], ...]
"""Routes, what they do with the fields, and these fields."""


@cache
def in_struct(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of a body's struct and of the objects in it, with what their metadata says."""
    found: list[Field] = []
    for field in struct_fields(struct):
        told: dict[str, Any] = {}
        for meta in getattr(field.type, "__metadata__", ()):
            told |= {"note": meta.description or told.get("note", ""), **(meta.extra or {})}
        found.append(Field(field.encode_name, told.get("effect", SERVED), told.get("note", "")))
        for nested, dots in _structs_in(field.type, ""):
            prefix = f"{field.encode_name}{dots}."
            found += [each._replace(name=prefix + each.name) for each in in_struct(nested)]
    return tuple(found)


@cache
def struct_fields(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return what `msgspec.structs.fields` finds out anew at each call, from the texts of annotations: the same objects
    are in the bodies of many routes, and each process for bodies reads all."""
    return msgspec.structs.fields(struct)


def _structs_in(kind: Any, dots: str) -> Iterator[tuple[type[msgspec.Struct], str]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, dots
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    for each in inner:
        yield from _structs_in(each, dots + "[]" if get_origin(kind) is list else dots)


def fields_of(struct: type[msgspec.Struct], route: str, unserved: Unserved) -> dict[str, Field]:
    """Return the fields of a route, whose body the struct is, by name."""
    fields = {field.name: field for field in in_struct(struct)}
    for routes, effect, rows in unserved:
        if route in routes:
            fields |= {row[0]: Field(row[0], effect, *row[1:]) for row in rows}
    for name, meant in OTHER_NAMES.items():
        here = next((each for each in meant if each.split(".")[0] in struct.__struct_fields__), None)
        if here is not None and name not in fields:
            fields[name] = Field(name, REFUSED, f"see `{here}`", NEUTRAL_OF_OTHER_NAMES.get(name, ()))
    return fields


def is_neutral(field: Field, value: Any) -> bool:
    """Return whether a refused field asks for nothing with this value. As in JSON, 0 is not false."""
    return value is None or any(
        isinstance(value, bool) == isinstance(known, bool) and value == known for known in field.neutral
    )
