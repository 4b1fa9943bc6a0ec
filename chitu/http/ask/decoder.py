"""Decoding of a body's bytes into its struct, in which no field is ignored silently. Pure.

A body that has only served fields, as nearly all have, is decoded once. Any other is checked against the table
(`fields.py`): a refused field is an error that names it, and a field without effect is dropped. An unknown field
is an error that names the nearest known field, or a warning in the answer's head if `router.unknown_fields` says so.
JSON is read strictly: half of an escaped surrogate pair, or bytes that are not UTF-8, as clients send that cut texts by
bytes or by UTF-16's units, are an error that names their field.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import CONTENT, LARGE_BODY_BYTES, REFUSED, SERVED
from chitu.http.ask.fields import OTHER_NAMES, Field, Unserved, fields_of, is_neutral

WARNING_HEADER = b"x-chitu-warning"
MAX_FIELD_BYTES = 64 << 10
"""Bytes of JSON, in a large body, of each field that holds neither text nor tokens."""
MAX_TOOLS_BYTES = 256 << 10
"""Bytes of JSON of `tools`, in a large body."""
MAX_NEUTRAL_BYTES = 64
"""Bytes of JSON. No neutral value of a refused field is longer."""
NAMED_CHARS = 100
"""Characters of a name of a field or entry that an error repeats."""
_PARAM = re.compile(r"`\$\.?([^`]*)`")
_TOO_LONG = re.compile(r"Expected `(\w+)` of length <= (\d+)")
_OUT_OF_RANGE = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+)")
_RANGES = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_NOT_SERVED = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?([^`]*)`)?\Z", re.DOTALL)
_INDEX = re.compile(r"\[\d+\]")
_HALF = re.compile(
    r"(?:[^\\\udc80-\udcff]++|\\(?!u[dD][89a-fA-F]).|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+(\\u[dD]|[\udc80-\udcff])",
    re.DOTALL,
)
"""A text up to its first half of a surrogate pair that is escaped, or its first byte that is not UTF-8."""
_LEXEMES = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\],:]', re.DOTALL)

_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_Outline = msgspec.json.Decoder[msgspec.Struct]


def _outline(names: list[str], forbid_unknown: bool) -> _Outline:
    """Return a decoder that leaves these fields as undecoded JSON."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Outline", fields, forbid_unknown_fields=forbid_unknown))


def _lenient(kind: Any) -> Any:
    """Return the type with every struct in it replaced by one that drops unknown fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = ((field.name, field.type, field.default) for field in msgspec.structs.fields(kind))
        twins = [(name, twin, value) for name, own, value in fields if (twin := _lenient(own)) is not own]
        return msgspec.defstruct(kind.__name__, twins, bases=(kind,), forbid_unknown_fields=False, kw_only=True)
    inner = tuple(map(_lenient, get_args(kind)))
    if all(twin is own for twin, own in zip(inner, get_args(kind), strict=True)):
        return kind
    origin = get_origin(kind)
    if origin is Annotated:
        return Annotated[inner]
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]


def _metadata(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())


class BodyDecoder(Generic[_BodyT]):
    """Decoder of the bodies of one route."""

    def __init__(self, body: type[_BodyT], route: str, table: BodyTable) -> None:
        """`table`: that of all bodies, in which an unknown field is looked for."""
        self._route = route
        self._table = table
        self._fields = table.fields[route]
        known = [name for name in self._fields if "." not in name]
        self._refused = [name for name in known if self._fields[name].effect == REFUSED]
        self._sized = [field.name for field in msgspec.structs.fields(body) if CONTENT not in _metadata(field.type)]
        self._strict = msgspec.json.Decoder(body)
        as_open = msgspec.defstruct(body.__name__, [], bases=(body,), forbid_unknown_fields=False)
        self._open: msgspec.json.Decoder[_BodyT] = msgspec.json.Decoder(as_open)
        """Decoder that drops unknown fields, except in nested objects."""
        self._lenient: msgspec.json.Decoder[_BodyT] = msgspec.json.Decoder(_lenient(body))
        self._known = _outline(known, forbid_unknown=True)
        self._known_of_more = _outline(known, forbid_unknown=False)

    def decode(self, raw: bytes | bytearray, warnings: list[str] | None = None) -> _BodyT:
        """Return a body as its struct. Raise InvalidRequest with the field's name if a type or length is wrong, if the
        field is refused or unknown, or if the JSON is broken. If `warnings` is given, unknown fields are no errors: it
        gets a sentence about the first one of the body, and about the first one of the objects in it."""
        try:
            outline = None
            if len(raw) > LARGE_BODY_BYTES:
                outline = self._outlined(raw, warnings)
                self._check_field_sizes(outline)
            try:
                return self._strict.decode(raw)
            except msgspec.ValidationError as error:
                if _unknown_in(error) is None:
                    raise
                return self._decode_with_unserved_fields(raw, outline or self._outlined(raw, warnings), warnings)
        except msgspec.ValidationError as error:
            raise _invalid(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise cut_character(raw) or InvalidRequest(f"the body is not valid JSON: {error}") from error

    def _outlined(self, raw: bytes | bytearray, warnings: list[str] | None) -> msgspec.Struct:
        """Return the body's fields as JSON. Judges only the first unknown field, so a million of them cost nothing."""
        try:
            return self._known.decode(raw)
        except msgspec.ValidationError as error:
            path = _unknown_in(error)
            if path is None:
                raise
            self._judge(path, warnings)
            return self._known_of_more.decode(raw)

    def _check_field_sizes(self, outline: msgspec.Struct) -> None:
        """Raise InvalidRequest for too large a field: objects cost many times their JSON, and decoding cannot be
        interrupted."""
        for name in self._sized:
            num_bytes = len(getattr(outline, name))
            most = MAX_TOOLS_BYTES if name == "tools" else MAX_FIELD_BYTES
            if num_bytes > most:
                raise InvalidRequest(f"{name}: {num_bytes} bytes of JSON; at most {most} are accepted", name)

    def _decode_with_unserved_fields(
        self, raw: bytes | bytearray, outline: msgspec.Struct, warnings: list[str] | None
    ) -> _BodyT:
        """Decode a body that has more than served fields."""
        for name in self._refused:
            value = bytes(getattr(outline, name))
            is_short = len(value) <= MAX_NEUTRAL_BYTES
            if value and not (is_short and is_neutral(self._fields[name], msgspec.json.decode(value))):
                raise _refusal(self._fields[name], name)
        try:
            return self._open.decode(raw)
        except msgspec.ValidationError as error:
            path = _unknown_in(error)
            if path is None:
                raise
            self._judge(path, warnings)
            return self._lenient.decode(raw)

    def _judge(self, path: str, warnings: list[str] | None) -> None:
        """Reject a field that the struct at its place does not have, or add a warning about it."""
        place = _INDEX.sub("[]", path)
        field = self._fields.get(place)
        if field is not None:
            raise _refusal(field, path)
        prefix = place[: place.rindex(".") + 1] if "." in place else ""
        siblings = [
            name.removeprefix(prefix)
            for name, known in self._fields.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix) and known.effect != REFUSED
        ]
        name = place.removeprefix(prefix)
        nearest = difflib.get_close_matches(name[:NAMED_CHARS].lower(), siblings, 1)
        elsewhere = [
            route
            for route, fields in self._table.fields.items()
            if (other := fields.get(place)) is not None and other.effect == SERVED
        ]
        meant = [here for here in OTHER_NAMES.get(place, ()) if here.split(".")[0] in self._fields]
        if not meant and not elsewhere:
            meant = [prefix + near for near in nearest]
        hint = f"; did you mean {meant[0]}?" if meant else f"; {elsewhere[0]} has it" if elsewhere else ""
        text = f"{path[:NAMED_CHARS]}: {self._route} has no such field{hint}"
        if warnings is None:
            raise InvalidRequest(text, path[:NAMED_CHARS])
        warnings.append(text)


class BodyTable:
    """Bodies that clients and operators send, by route: what becomes of their fields, and their decoders."""

    def __init__(self, bodies: Mapping[str, type[msgspec.Struct]], unserved: Unserved) -> None:
        self.bodies = bodies
        self.fields = {route: fields_of(body, route, unserved) for route, body in bodies.items()}
        """Fields of each route by name."""
        self._decoders: dict[type[msgspec.Struct], BodyDecoder[Any]] = {
            body: BodyDecoder(body, route, self) for route, body in bodies.items()
        }

    def decoder(self, body: type[_BodyT]) -> BodyDecoder[_BodyT]:
        return self._decoders[body]


def _unknown_in(error: msgspec.ValidationError) -> str | None:
    """Return the path of the unknown field that the error is about; None if it is another error."""
    found = _UNKNOWN.match(str(error))
    return found and (f"{found[2]}.{found[1]}" if found[2] else found[1])


def _refusal(field: Field, path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is not supported yet; leave it out{f' ({field.note})' if field.note else ''}", path)


def _invalid(text: str) -> InvalidRequest:
    """Return an error with msgspec's message and the field that it names."""
    what, found = text.split(" - at ")[0], _PARAM.search(text)
    param = found.group(1) if found else ""
    if length := _TOO_LONG.match(what):
        unit = "characters" if length.group(1) == "str" else "entries"
        what = f"at most {length.group(2)} {unit} are accepted"
    elif bound := _OUT_OF_RANGE.match(what):
        what = f"must be {_RANGES[bound.group(1)]} {bound.group(2).removesuffix('.0')}"
    elif missing := _MISSING.match(what):
        param = f"{param}.{missing.group(1)}".removeprefix(".")
        return InvalidRequest(f"{param} is required", param)
    elif value := _NOT_SERVED.match(what):
        what = f"{value.group(1)[:NAMED_CHARS]} is not supported"
    return InvalidRequest(f"{param or 'the body'}: {what}", param or None)


def warning_header(warnings: list[str]) -> tuple[bytes, bytes]:
    """Return the header for the warnings. Escapes them to printable ASCII, because they contain text of clients."""
    return WARNING_HEADER, "; ".join(warnings).encode("unicode_escape")


# ------------------------------------------------------------------------------------------------------- cut characters


def cut_character(raw: bytes | bytearray, field: str = "") -> InvalidRequest | None:
    """Return the error of JSON with a part of a character; None if it has none. `field`: name of the field whose value
    this is, if it is not the whole body."""
    text = raw.decode(errors="surrogateescape")
    found = _HALF.match(text)
    if found is None:
        return None
    at = found.start(1)
    param = (field + _place_of(text, at)).removeprefix(".") or None
    if text[at] == "\\":
        what = "half of a surrogate pair: a character was cut in two"
    else:
        what = "a byte that is not UTF-8: a character was cut in two, or the text has another encoding"
    return InvalidRequest(f"{param or 'the body'} has {what} (at character {at} of its JSON)", param)


def _place_of(text: str, at: int) -> str:
    """Return the path of the value in which a position of JSON is. Follows brackets and strings up to it."""
    path: list[str | int] = []
    key = ""
    for found in _LEXEMES.finditer(text, 0, at):
        part = found[0]
        if part in ("{", "["):
            path.append("" if part == "{" else 0)
        elif part in ("}", "]"):
            if path:
                path.pop()
        elif part == "," and path:
            place = path[-1]
            path[-1] = place + 1 if isinstance(place, int) else ""
        elif part == ":" and path:
            path[-1] = key
        elif part.startswith('"'):
            key = part[1:-1]
    shown = [f"[{place}]" if isinstance(place, int) else f".{place[:NAMED_CHARS]}" for place in path if place != ""]
    return "".join(shown)
