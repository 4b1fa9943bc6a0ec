"""The error of a body whose text has a part of a character, and the field that has it. Pure; part of `BodyWork`.

Clients that cut texts by bytes, or by UTF-16's units, send half of an escaped surrogate pair or bytes that are not
UTF-8. Neither is text. Called only for a body that could not be decoded.
"""

from __future__ import annotations

import re

from chitu.errors import InvalidRequest

NAMED_CHARS = 100
"""Characters of each name in a path."""
_HALF = re.compile(
    r"(?:[^\\\udc80-\udcff]++|\\(?!u[dD][89a-fA-F]).|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+(\\u[dD]|[\udc80-\udcff])",
    re.DOTALL,
)
"""A text up to its first half of a surrogate pair that is escaped, or its first byte that is not UTF-8."""
_LEXEMES = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\],:]', re.DOTALL)


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
