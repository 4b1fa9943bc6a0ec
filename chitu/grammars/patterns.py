"""Regular expressions of a JSON schema as llguidance's Lark takes them. Pure.

The keyword `pattern` looks for a match anywhere in a text, and a terminal of Lark matches all of one. The engine knows
no anchor within an expression, so anchors become the text that may, or may not, stand around a match.
"""

from __future__ import annotations

import re

ANY = "(?s:.*)"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}
"""ASCII, as in the engine's own `pattern`."""
_QUANTIFIER = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
"""With a lazy one, which matches the same texts, as a greedy one."""
_ESCAPES = {r"\b": r"\x08", "\\\n": r"\n", r"\<": "<", r"\>": ">"}
"""Escapes that the engine reads otherwise."""
_POSIX = re.compile(r"\[:\^?\w+:\]")
_GROUP = re.compile(r"\(\?(?:P?<[A-Za-z_]\w*>|[imsU-]*:)|\((?!\?)")
_FLAGS = re.compile(r"\(\?[imsU-]+\)")

_DAY = "(?:0[1-9]|[12][0-9])"
_DATE = f"[0-9]{{4}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-30|(?:0[13578]|1[02])-31)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_HEX = "[0-9A-Fa-f]"
_H16 = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    (
        f"(?:{_H16}:){{7}}{_H16}",
        f"(?:{_H16}:){{1,7}}:",
        *(f"(?:{_H16}:){{1,{7 - right}}}(?::{_H16}){{1,{right}}}" for right in range(1, 7)),
        f":(?::{_H16}){{1,7}}",
        "::",
    )
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+\-\/=?^_`{|}~]+"
_OF_PATH = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%{_HEX}{{2}})"
_OF_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%{_HEX}{{2}})"
_AUTHORITY = rf"(?:(?:{_OF_NAME}|:)*@)?(?:\[(?:{_IPV6})\]|{_OF_NAME}*)(?::[0-9]*)?"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"(?:{_DATE})[Tt]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:\/\/{_AUTHORITY}(?:\/{_OF_PATH}*)*|\/?{_OF_PATH}+(?:\/{_OF_PATH}*)*|\/)?"
        rf"(?:\?(?:{_OF_PATH}|[\/?])*)?(?:#(?:{_OF_PATH}|[\/?])*)?"
    ),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""Expressions that match all of a text of a `format`: of RFC 3339, 5321, 1123, 4291, 3986 and 4122."""


def terminal(regex: str) -> str:
    """Return a terminal of Lark for an expression that has no bare slash and no line end."""
    return f"/(?:{regex})/"


def searched(pattern: str) -> str:
    """Return an expression for all texts in which `pattern` has a match. Raise ValueError for an anchor that is neither
    at its beginning nor at its end, and for an expression that ends too early."""
    flags = _FLAGS.match(pattern)
    scanner = _Scanner(pattern, flags.end() if flags is not None else 0)
    found = scanner.alternatives()
    if scanner.at < len(pattern):
        raise ValueError("a bracket closes nothing")
    regex = _rendered(found, True, True)
    return f"{flags[0][:-1]}:{regex})" if flags is not None else regex


class _Group:
    """A group: how it begins, its alternatives, and the quantifier behind it."""

    def __init__(self, head: str, alternatives: list[list[_Part]]) -> None:
        self.head, self.alternatives, self.quantifier = head, alternatives, ""


_Part = str | _Group


class _Scanner:
    """Reader of an expression as alternatives of parts: anchors, groups, and characters with their quantifiers."""

    def __init__(self, pattern: str, at: int) -> None:
        self._text, self.at = pattern, at

    def alternatives(self) -> list[list[_Part]]:
        """Read up to the end of a group, or of all."""
        parts: list[_Part] = []
        found = [parts]
        while self.at < len(self._text) and self._text[self.at] != ")":
            if self._text[self.at] == "|":
                self.at += 1
                parts = []
                found.append(parts)
            else:
                parts.append(self._part())
        return found

    def _part(self) -> _Part:
        part: _Part
        character = self._text[self.at]
        if character in "^$":
            self.at += 1
            return character
        if character == "(":
            head = _GROUP.match(self._text, self.at)
            if head is None:
                raise ValueError(f"{self._text[self.at : self.at + 4]!r} cannot be enforced")
            self.at = head.end()
            part = _Group("(?:" if head[0].endswith(("(", ">")) else head[0], self.alternatives())
            if self.at == len(self._text):
                raise ValueError("a group is not closed")
            self.at += 1
        elif character == "[":
            part = self._class()
        elif character == "\\":
            part = self._escape(False)
        else:
            self.at += 1
            part = {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character)
        quantifier = _QUANTIFIER.match(self._text, self.at)
        if quantifier is None:
            return part
        self.at = quantifier.end()
        if isinstance(part, _Group):
            part.quantifier = quantifier[1]
            return part
        return part + quantifier[1]

    def _escape(self, is_in_class: bool) -> str:
        escaped = self._text[self.at : self.at + 2]
        self.at += 2
        if len(escaped) < 2:
            raise ValueError("it ends with a backslash")
        if escaped[1] in "bBAzZ" and not (is_in_class and escaped[1] == "b"):
            raise ValueError(f"{escaped} cannot be enforced")
        known = _CLASSES.get(escaped[1].lower())
        if known is None:
            return _ESCAPES.get(escaped, escaped)
        return known if is_in_class and escaped[1].islower() else f"[{'^' if escaped[1].isupper() else ''}{known}]"

    def _class(self) -> str:
        made = self._text[self.at]
        self.at += 1
        if self._text.startswith("^", self.at):
            made += "^"
            self.at += 1
        while not self._text.startswith("]", self.at):
            if self.at >= len(self._text):
                raise ValueError("a class of characters is not closed")
            if posix := _POSIX.match(self._text, self.at):
                made += posix[0]
                self.at = posix.end()
                continue
            character = self._text[self.at]
            if character == "\\":
                made += self._escape(True)
                continue
            self.at += 1
            # These are sets of the engine's, and plain characters of JSON Schema's expressions.
            made += f"\\{character}" if character in "[&~/" else {"\n": r"\n", "\r": r"\r"}.get(character, character)
        self.at += 1
        return f"{made}]"


def _rendered(alternatives: list[list[_Part]], opens: bool, closes: bool) -> str:
    """Return alternatives as an expression. `opens`: any text may be ahead of them, unless an anchor is; `closes`: the
    same behind them."""
    return "|".join(_sequence(parts, opens, closes) for parts in alternatives)


def _sequence(parts: list[_Part], opens: bool, closes: bool) -> str:
    while parts and parts[0] == "^":
        parts, opens = parts[1:], False
    while parts and parts[-1] == "$":
        parts, closes = parts[:-1], False
    made = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            if part in ("^", "$"):
                raise ValueError(f"{part} within it cannot be enforced")
            made.append(part)
            continue
        # A group with anchors has the text around it within it.
        is_first, is_last = i == 0 and not part.quantifier, i == len(parts) - 1 and not part.quantifier
        has_start, has_end = _anchors(part, "^"), _anchors(part, "$")
        if (has_start and not is_first) or (has_end and not is_last):
            raise ValueError(f"{'^' if has_start else '$'} within it cannot be enforced")
        inner = _rendered(part.alternatives, opens and has_start, closes and has_end)
        made.append(f"{part.head}{inner}){part.quantifier}")
        opens, closes = opens and not has_start, closes and not has_end
    return f"{ANY if opens else ''}{''.join(made)}{ANY if closes else ''}"


def _anchors(group: _Group, anchor: str) -> bool:
    return any(
        part == anchor or (isinstance(part, _Group) and _anchors(part, anchor))
        for parts in group.alternatives
        for part in parts
    )
