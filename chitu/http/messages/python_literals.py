"""Literals of Python as JSON. Pure.

Models that were trained on code write `{'a': True, 'b': (1, 2)}` for an object. Strings and brackets become those of
JSON here; constants and trailing commas stay for `mended` (`call_objects.py`). What is no literal becomes no JSON.
"""

from __future__ import annotations

import re

import msgspec

_TOKEN = re.compile(
    r"""('(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|([(\[{])|([)\]}])|(,)|(-?\b(?:[\w.]+(?=\s*:)))|(?:\b([\w.-]+)\s*=(?!=)\s*)""",
    re.DOTALL,
)
"""A string, a bracket that opens or closes, a comma, a bare key, or the name of an argument."""
_KEY = re.compile(r"-?\d+(?:\.\d+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_IN_STRING = re.compile(r"""\\(?:x([\da-fA-F]{2})|U([\da-fA-F]{8})|(.))|(")""", re.DOTALL)


def python_to_json(text: str, has_names: bool = True) -> str:
    """Return literals as JSON. `has_names`: they are arguments, `a=1, b='x'`, which become members of an object."""
    parts: list[str] = []
    opened: list[tuple[str, int, bool]] = []
    """Open brackets, with their places in `parts`, and whether a comma was read within them."""
    done = 0
    for found in _TOKEN.finditer(text):
        string, opening, closing, comma, key, name = found.groups()
        parts.append(text[done : found.start()])
        done = found.end()
        if string is not None:
            parts.append(f'"{_IN_STRING.sub(_in_json, string[1:-1])}"')
        elif opening is not None:
            opened.append((opening, len(parts), False))
            parts.append("[" if opening == "(" else opening)
        elif comma is not None:
            if opened:
                opened[-1] = (*opened[-1][:2], True)
            parts.append(comma)
        elif key is not None:  # the number or constant that it is, as text
            bare = key if _KEY.fullmatch(key) else _CONSTANTS.get(key)
            is_key = bare is not None and opened and opened[-1][0] == "{"
            parts.append(f'"{bare}"' if is_key else key)
        elif closing is not None:
            opener, at, is_several = opened.pop() if opened else ("", 0, True)
            is_empty = len(parts) == at + 2 and not parts[-1].strip()
            if closing == ")" and opener == "(" and not is_several and not is_empty:
                parts[at] = ""  # brackets of an expression
            else:
                parts.append("]" if closing == ")" else closing)
        else:
            parts.append(f"{msgspec.json.encode(name).decode()}: " if has_names and not opened else found[0])
    return "".join([*parts, text[done:]])


def _in_json(found: re.Match[str]) -> str:
    """Return a part of a Python string as JSON has it; escapes that both know stay."""
    code = found[1] or found[2]
    if code is not None:
        place = int(code, 16)
        is_known = place < 0x110000 and not 0xD800 <= place < 0xE000
        return msgspec.json.encode(chr(place)).decode()[1:-1] if is_known else "\\ufffd"
    return "'" if found[3] == "'" else '\\"' if found[4] else found[0]
