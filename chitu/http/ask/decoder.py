"""Decoding of a body's bytes into its struct, in which no field is ignored silently. Pure.

A body that has only served fields, as nearly all have, is decoded once. Any other is checked against the table
(`fields.py`), at every depth: a refused field is an error that names it, and a field without effect is dropped. An
unknown field is named in the answer's head and dropped, or an error if `router.unknown_fields` says so; either names
the nearest known field. JSON is read strictly: half of an escaped surrogate pair, or bytes that are not UTF-8, as
clients send that cut texts by bytes or by UTF-16's units, are an error that names their field. Two spellings are taken
as other servers take them: a byte order mark ahead of the body, and a whole number as a float.
"""

from __future__ import annotations

import difflib
import re
import types
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import CONTENT, LARGE_BODY_BYTES, REFUSED, SERVED
from chitu.http.ask.fields import Field, Unserved, fields_of, in_struct, is_neutral, struct_fields

WARNING_HEADER = b"x-chitu-warning"
MAX_FIELD_BYTES = 64 << 10
"""Bytes of JSON, in a large body, of each field that holds neither text nor tokens."""
MAX_TOOLS_BYTES = 1 << 20
"""Bytes of JSON of `tools`, in a large body."""
MAX_TOLD = 8
"""Unknown fields that the warnings of an answer name."""
MAX_HINTS = 256
"""Unknown fields of which a decoder knows what may be meant: clients send the same ones again."""
MAX_MENDED = 8
"""Fields of one body that hold a whole number as a float."""
MAX_NEUTRAL_BYTES = 64
"""Bytes of JSON. No neutral value of a refused field is longer."""
NAMED_CHARS = 100
"""Characters of a name of a field or entry that an error repeats."""
_PARAM = re.compile(r"`\$\.?([^`]*)`")
_TOO_LONG = re.compile(r"Expected `(\w+)` of length <= (\d+)")
_OUT_OF_RANGE = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+)")
_RANGES = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_NO_WHOLE = re.compile(r"Expected `int\b[^`]*`, got `float` - at `\$(?:\.|.*\.)(\w+)`")
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
        return _twin(kind)
    inner = tuple(map(_lenient, get_args(kind)))
    if all(twin is own for twin, own in zip(inner, get_args(kind), strict=True)):
        return kind
    origin = get_origin(kind)
    if origin is Annotated:
        return Annotated[inner]
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]


@cache
def _twin(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct that drops unknown fields, also in the structs in it."""
    fields = ((field.name, field.type, field.default) for field in struct_fields(struct))
    twins = [(name, twin, value) for name, own, value in fields if (twin := _lenient(own)) is not own]
    return msgspec.defstruct(struct.__name__, twins, bases=(struct,), forbid_unknown_fields=False, kw_only=True)


def _metadata(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())


class BodyDecoder(Generic[_BodyT]):
    """Decoder of the bodies of one route."""

    def __init__(self, body: type[_BodyT], route: str, table: BodyTable) -> None:
        """`table`: that of all bodies, in which an unknown field is looked for."""
        self._route = route
        self._table = table
        self._fields = table.fields[route]
        self._own = frozenset(field.name for field in in_struct(body))
        """Fields that the struct and the objects in it have."""
        self._objects = frozenset(name[: name.rindex(".")] for name in self._own if "." in name)
        """Places of the objects in it."""
        self._sized = [field.name for field in struct_fields(body) if CONTENT not in _metadata(field.type)]
        self._strict = msgspec.json.Decoder(body)
        as_open = msgspec.defstruct(body.__name__, [], bases=(body,), forbid_unknown_fields=False)
        self._open: msgspec.json.Decoder[_BodyT] = msgspec.json.Decoder(as_open)
        """Decoder that drops unknown fields, except in nested objects."""
        self._lenient: msgspec.json.Decoder[_BodyT] = msgspec.json.Decoder(_lenient(body))
        known = self._known_at("")
        self._known = _outline(known, forbid_unknown=True)
        self._outlines = {"": _outline(known, forbid_unknown=False)}
        self._hint = lru_cache(MAX_HINTS)(self._find_hint)

    def decode(self, raw: bytes | bytearray, warnings: list[str] | None = None) -> _BodyT:
        """Return a body as its struct. Raise InvalidRequest with the field's name if a type or length is wrong, if the
        field is refused or unknown, or if the JSON is broken. If `warnings` is given, unknown fields are no errors: it
        gets a sentence about each of the first ones, and their number."""
        if raw.startswith(BOM_UTF8):
            raw = raw[len(BOM_UTF8) :]  # some editors and libraries put it ahead
        try:
            if len(raw) > LARGE_BODY_BYTES:
                self._check_field_sizes(self._outlined(raw, warnings))
            for _ in range(MAX_MENDED):
                try:
                    return self._decode(raw, warnings)
                except msgspec.ValidationError as error:
                    mended = _with_whole_number(raw, error)
                    if mended is None:
                        raise
                    raw = mended
            return self._decode(raw, warnings)
        except msgspec.ValidationError as error:
            raise _invalid(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise cut_character(raw) or InvalidRequest(f"the body is not valid JSON: {error}") from error

    def _known_at(self, place: str) -> list[str]:
        """Return the names of the fields, served or not, of the objects at a place."""
        prefix = place and place + "."
        known = [name.removeprefix(prefix) for name in self._fields if name.startswith(prefix)]
        return [name for name in known if "." not in name]

    def _outlined(self, raw: bytes | bytearray, warnings: list[str] | None) -> msgspec.Struct:
        """Return the body's fields as JSON. If unknown ones are errors, judges only the first, so a million of them
        cost nothing."""
        if warnings is not None:
            return self._outlines[""].decode(raw)
        try:
            return self._known.decode(raw)
        except msgspec.ValidationError as error:
            path = _unknown_in(error)
            if path is None:
                raise
            raise self._unknown(path) from None

    def _check_field_sizes(self, outline: msgspec.Struct) -> None:
        """Raise InvalidRequest for too large a field: objects cost many times their JSON, and decoding cannot be
        interrupted."""
        for name in self._sized:
            num_bytes = len(getattr(outline, name))
            most = MAX_TOOLS_BYTES if name == "tools" else MAX_FIELD_BYTES
            if num_bytes > most:
                raise InvalidRequest(f"{name}: {num_bytes} bytes of JSON; at most {most} are accepted", name)

    def _decode(self, raw: bytes | bytearray, warnings: list[str] | None) -> _BodyT:
        try:
            return self._strict.decode(raw)
        except msgspec.ValidationError as error:
            path = _unknown_in(error)
            if path is None:
                raise
            if warnings is None and _INDEX.sub("[]", path) not in self._fields:
                raise self._unknown(path) from None
        try:
            body, is_deep = self._open.decode(raw), False
        except msgspec.ValidationError as error:
            if _unknown_in(error) is None:
                raise
            body, is_deep = self._lenient.decode(raw), True
        self._judge(raw, warnings, is_deep)
        return body

    # ------------------------------------------------------------------------------------ fields that no struct has

    def _judge(self, raw: bytes | bytearray, warnings: list[str] | None, is_deep: bool) -> None:
        """Reject a body with a field that is refused, or unknown unless `warnings` is given, which gets sentences about
        them. `is_deep`: also objects in the body have more than their structs."""
        unknown: dict[str, str] = {}
        for path, place, value in self._more_fields(raw, "", "", is_deep):
            field = self._fields.get(place)
            if field is None:
                if warnings is None:
                    raise self._unknown(path)
                unknown.setdefault(place, path)
            elif field.effect == REFUSED:
                is_short = len(value) <= MAX_NEUTRAL_BYTES
                if not (is_short and is_neutral(field, msgspec.json.decode(value))):
                    raise _refusal(field, path)
        if warnings is None or not unknown:
            return
        warnings += [self._told(path) for path in list(unknown.values())[:MAX_TOLD]]
        if len(unknown) > MAX_TOLD:
            warnings.append(f"and {len(unknown) - MAX_TOLD} more fields that {self._route} does not have")

    def _more_fields(
        self, raw: bytes | bytearray | msgspec.Raw, path: str, place: str, is_deep: bool
    ) -> Iterator[tuple[str, str, bytes]]:
        """Yield path, place and JSON of each field of an object that its struct does not have; if `is_deep`, also of
        the objects in it."""
        for name, value in self._members(raw, place).items():
            here, known = f"{path}.{name}".removeprefix("."), f"{place}.{name}".removeprefix(".")
            if known not in self._own or "." in name or "[" in name:
                # No name of a client is taken for the path of a field.
                yield here, known if "." not in name and "[" not in name else f"{place}.{name!r}", bytes(value)
            elif is_deep:
                yield from self._more_in_value(value, here, known)

    def _more_in_value(self, value: msgspec.Raw, path: str, place: str) -> Iterator[tuple[str, str, bytes]]:
        start = bytes(memoryview(value)[:1])
        if start == b"{" and place in self._objects:
            yield from self._more_fields(value, path, place, True)
        elif start == b"[" and f"{place}[]" in self._objects:
            for i, each in enumerate(msgspec.json.decode(value, type=list[msgspec.Raw])):
                yield from self._more_in_value(each, f"{path}[{i}]", f"{place}[]")

    def _members(self, raw: bytes | bytearray | msgspec.Raw, place: str) -> dict[str, msgspec.Raw]:
        """Return the fields of an object as JSON. If many bytes of a large one are of unknown fields: one of these, in
        place of all, because a million names cost many times their JSON."""
        if len(raw) > MAX_FIELD_BYTES:
            if place not in self._outlines:
                self._outlines[place] = _outline(self._known_at(place), forbid_unknown=False)
            outline = self._outlines[place].decode(raw)
            known = {name: getattr(outline, name) for name in outline.__struct_fields__}
            known = {name: value for name, value in known.items() if len(value)}
            if len(raw) - sum(map(len, known.values())) > MAX_FIELD_BYTES:
                name = _first_unknown(raw, known)
                return known if name is None else {**known, name: msgspec.Raw(b"null")}
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])

    def _unknown(self, path: str) -> InvalidRequest:
        return InvalidRequest(self._told(path), path[:NAMED_CHARS])

    def _told(self, path: str) -> str:
        """Return the sentence about an unknown field."""
        return (
            f"{path[:NAMED_CHARS]}: {self._route} has no such field{self._hint(_INDEX.sub('[]', path)[:NAMED_CHARS])}"
        )

    def _find_hint(self, place: str) -> str:
        """Return what may be meant by an unknown field."""
        prefix = place[: place.rindex(".") + 1] if "." in place else ""
        elsewhere = [
            route
            for route, fields in self._table.fields.items()
            if (other := fields.get(place)) is not None and other.effect == SERVED
        ]
        if elsewhere:
            return f"; {elsewhere[0]} has it"
        siblings = [
            name.removeprefix(prefix)
            for name, known in self._fields.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix) and known.effect != REFUSED
        ]
        nearest = difflib.get_close_matches(place.removeprefix(prefix).lower(), siblings, 1)
        return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


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


def _first_unknown(raw: bytes | bytearray | msgspec.Raw, known: Mapping[str, msgspec.Raw]) -> str | None:
    """Return the first name in an object that is none of these."""
    try:
        _outline([*known], forbid_unknown=True).decode(raw)
    except msgspec.ValidationError as error:
        return _unknown_in(error)
    return None


def _with_whole_number(raw: bytes | bytearray, error: msgspec.ValidationError) -> bytes | None:
    """Return the body with a whole number where it has one as a float, as some clients write it; None if that is not
    the error, or the number is not whole."""
    found = _NO_WHOLE.match(str(error))
    if found is None:
        return None
    name = re.escape(msgspec.json.encode(found[1]))
    number = re.compile(rb'(%b\s*:\s*-?\d+)\.0+(?=[\s,}])|"(?:[^"\\]++|\\.)*+"' % name, re.DOTALL)
    mended = number.sub(lambda match: match[1] or match[0], raw)
    return None if mended == raw else bytes(mended)


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
