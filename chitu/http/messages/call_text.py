"""One call as a model writes it: a JSON object with the tool's name and its arguments, in any of the usual spellings.
Pure; called by `call_parser.py` on the loop thread.

Models imitate the tool list of their prompt and each other's formats, so the object may have `type`, may have both keys
within `function`, may have the arguments as a text that holds JSON, or may have none. They also write code into
strings: a raw line break there is no JSON, but means only one thing. Invariant: the arguments of a call are valid JSON,
an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

import msgspec

ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments."""
NAMES = ("name", "function")
"""Keys under which they write the name of the tool."""
_KEYS = ("type", "id", *NAMES, *ARGUMENTS)
_STRING = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)("?))?', re.DOTALL)
_UNQUOTED = {"type": re.compile(r"null"), "id": re.compile(r"null|\d+")}
"""Values that are no strings, under keys that name no tool."""
_NO_ARGUMENTS = re.compile(r"(?:null|\[\s*\])?")
_COLON, _COMMA = re.compile(r"\s*(:?)"), re.compile(r"\s*(,?)")
_NOT_JSON = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|,(?=\s*[}\]])|\b(?:True|False|None)\b', re.DOTALL)
"""Strings, and what Python permits between them but JSON does not."""
_IN_STRING = re.compile(
    r"""(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u(?![dD][89a-fA-F])[\da-fA-F]{4}|\\["\\/bfnrt])|(\\u[dD][\da-fA-F]{3})|"""
    r"""\\?([\x00-\x1f])|\\(.)""",
    re.DOTALL,
)
"""A valid escape, half of a surrogate pair, a control character, or a character that needs no escape."""
_PYTHON = {"True": "true", "False": "false", "None": "null", ",": ""}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Checks the syntax of all JSON but decodes one level, so numbers have no bounds."""
_text = msgspec.json.Decoder(str)


class Call(NamedTuple):
    name: str
    arguments: str
    """JSON, an object; as the model wrote it if that was JSON."""


def call_of(text: str, names: Collection[str]) -> Call | None:
    """Return the call that an object is; None if it is none of a tool with one of `names`."""
    if text.startswith("{{") and text.endswith("}}"):  # Qwen's template shows the form of a call so
        text = text[1:-1]
    outer = _fields_of(mended(text))
    if outer is None:
        return None
    inner = outer.get("function", b"")
    function = _fields_of(bytes(inner).decode())
    given = outer if function is None else {**outer, **function}
    name = next((name for key in NAMES if (name := _text_of(given.get(key, b""))) is not None), None)
    if name is None or name not in names:
        return None
    found = next((value for key in ARGUMENTS if not _is_null(value := given.get(key, b"null"))), None)
    if found is not None:
        arguments = arguments_of(bytes(found).decode())
        return None if arguments is None else Call(name, arguments)
    # An object with other keys is an answer that has a name, too.
    return Call(name, "{}") if given.keys() <= set(_KEYS) else None


def arguments_of(text: str) -> str | None:
    """Return arguments as JSON; None if they are no object. Models write an object, or a text that holds one."""
    if text.startswith('"'):
        text = (_text_of(text.encode()) or "").strip()
    text = "{}" if _NO_ARGUMENTS.fullmatch(text) else mended(text)
    return None if _fields_of(text) is None else text


def mended(text: str) -> str:
    """Return an object as JSON, if it is JSON but for raw control characters and needless escapes in strings, trailing
    commas, or Python's constants; else as it is."""
    if _fields_of(text) is not None:
        return text
    better = _NOT_JSON.sub(_mended_part, text)
    return text if _fields_of(better) is None else better


def _mended_part(found: re.Match[str]) -> str:
    part = found[0]
    return _IN_STRING.sub(_escaped, part) if part.startswith('"') else _PYTHON[part]


def _escaped(found: re.Match[str]) -> str:
    valid, half, control, other = found.groups()
    if valid is not None:
        return str(valid)
    if half is not None:
        return "\\ufffd"
    if control is not None:
        return json.dumps(control)[1:-1]
    return str(other) if other == "'" else f"\\\\{other}"


def _fields_of(text: str) -> dict[str, msgspec.Raw] | None:
    try:
        return _fields.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _text_of(value: bytes | msgspec.Raw) -> str | None:
    try:
        return _text.decode(value)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _is_null(value: bytes | msgspec.Raw) -> bool:
    return bytes(value) == b"null"


def may_be_call(text: str, names: Collection[str]) -> bool | None:
    """Return whether an object that begins so, with its bracket, may be a call; None: more of the text will tell."""
    at = 1
    while True:
        key = _STRING.match(text, at)
        assert key is not None  # all parts of these patterns are optional
        if key[1] is None:
            return None if key.end() == len(text) else False
        if not key[2]:
            return None if any(known.startswith(key[1]) for known in _KEYS) else False
        if key[1] not in _KEYS:
            return False
        colon = _COLON.match(text, key.end())
        assert colon is not None
        if not colon[1]:
            return None if colon.end() == len(text) else False
        if key[1] in ARGUMENTS:
            return True
        value = _STRING.match(text, colon.end())
        assert value is not None
        at = value.end()
        if value[1] is None:
            if at == len(text):
                return None
            if key[1] == "function" and text[at] == "{":
                at += 1  # the name is in this object
                continue
            unquoted = _UNQUOTED[key[1]].match(text, at) if key[1] in _UNQUOTED else None
            if unquoted is None:
                return None if key[1] in _UNQUOTED and "null".startswith(text[at:]) else False
            at = unquoted.end()
        else:
            expected = {"type": ("function",), "id": None}.get(key[1], names)
            if expected is not None and value[2] and _text_of(f'"{value[1]}"'.encode()) not in expected:
                return False
            if expected is not None and not value[2]:
                begun = value[1].partition("\\")[0]  # what an escape means is known at the end
                if not any(known.startswith(begun) for known in expected):
                    return False
            if not value[2]:
                return None
            if key[1] in NAMES:
                return True
        comma = _COMMA.match(text, at)
        assert comma is not None
        if not comma[1]:
            return None if comma.end() == len(text) else False
        at = comma.end()
