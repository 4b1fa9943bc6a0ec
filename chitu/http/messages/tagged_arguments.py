"""Names and values of tagged arguments, read as they are written and as they are plainly meant. Pure.

A value is raw text and ends at its own tag; further tags in it must be in pairs. `exact` takes only calls in which each
value has its end tag and nothing stands between the arguments. `meant` reads a call in which tags are missing, twice
there, or misspelled: a value ends at the next opening tag, too. A call whose value would have swallowed a tag is none.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

MIN_LIKENESS = 0.7
"""Of a misspelled word and the right one, as difflib counts it."""
MAX_TAIL = 8
"""Tags behind a value that are not part of it."""
_ANY = re.compile(r"</?([A-Za-z_:]{3,24})(?=[>=\s])")
_LEADING = re.compile(r"(?:\s*</?[A-Za-z_:]{3,24}>)*\s*")
_TAIL = re.compile(r"(?:<([A-Za-z_:]{3,24})>|</([A-Za-z_:]{3,24})>?|/([A-Za-z_:]{3,24})>|\b([A-Za-z_:]{3,24})>)\Z")
_CUT = re.compile(r"[</][</>\w:]*\Z")
"""What may be left of an end tag."""
_NAMED = re.compile(
    r"""(?:(<)\s{0,4}|\b)([A-Za-z_:]{3,24})(\s?=\s?|\s{1,4}name\s?=\s?|[ \t])["']?([\w.-]+)["']?\s{0,4}(?:>|(?=\n))"""
)
_KEY, _KEY_END, _VALUE = r"<\s*a\w*k\w*\s*>", r"</\s*a\w*k\w*\s*>", r"<\s*a\w*v\w*\s*>"
_VALUE_END = re.compile(rf"{_VALUE}\Z")
_KEYED = re.compile(
    rf"(?<![^<>\s])(?:{_KEY}\s*)*([^<>\s]{{1,128}})\s{{0,4}}(?:(?:{_KEY}|{_KEY_END}|{_VALUE})\s*)*(?:{_KEY}|{_KEY_END}|{_VALUE})"
)

_LEFT = re.compile(r"""\s*(?:["'<]|/?\w*>)""")
"""What is left of a tag ahead of a value."""

Pairs = list[tuple[str, str]]


class Opening(NamedTuple):
    begin: int
    end: int
    name: str
    is_exact: bool


class Tags(NamedTuple):
    """Tags of a format."""

    opening: re.Pattern[str]
    """What precedes a value; the group `name` is the argument's."""
    closing: str
    """What follows it."""
    words: tuple[str, ...]
    """Words in the tags of a call; the first is that of an opening tag."""
    in_lines: bool = False
    """A line end on each side of a value is none of it."""
    is_keyed: bool = False
    """The name is a text between tags."""

    def exact(self, text: str) -> Pairs | None:
        """Return the arguments of which all of a text consists; None if it does not."""
        pairs: Pairs = []
        at = _skip(text, 0)
        while at < len(text):
            opened = self.opening.match(text, at)
            found = self._value(text, opened.end()) if opened is not None else None
            if opened is None or found is None:
                return None
            pairs.append((opened["name"].strip(), self._bare(text[opened.end() : found[0]], True)))
            at = found[1]
        return pairs

    def _value(self, text: str, begin: int) -> tuple[int, int] | None:
        """Return where the value that begins there ends, and what follows it."""
        depth, at, inner = 1, begin, _opener(self.closing)
        opened = inner.search(text, at)
        while (end := text.find(self.closing, at)) >= 0:
            while opened is not None and opened.start() < end:
                depth += 1
                opened = inner.search(text, opened.end())
            at = end + len(self.closing)
            depth -= 1
            if not depth:
                behind = _skip(text, at)
                while text.startswith(self.closing, behind):  # it is written twice
                    behind = _skip(text, behind + len(self.closing))
                return (end, behind) if behind == len(text) or self.opening.match(text, behind) else None
        return None

    def _is_like(self, word: str) -> bool:
        return any(_likeness(word, right) >= MIN_LIKENESS for right in self.words)

    def meant(self, text: str, known: Collection[str]) -> Pairs | None:
        """Return the arguments that a text plainly means; None if there are none. `known`: the tool's properties."""
        openings = list(self._openings(text, known))
        if not openings:
            return [] if self._is_nothing(text) else None
        if not self._is_nothing(text[: openings[0].begin]):
            return None
        pairs: Pairs = []
        for i, opening in enumerate(openings):
            end = openings[i + 1].begin if i + 1 < len(openings) else len(text)
            value, is_closed = self._without_tail(text[opening.end : end])
            if self.closing in value or any(self._is_like(found[1]) for found in _ANY.finditer(value)):
                return None
            if self.closing not in text[opening.end : end] and self._is_cut(value.rstrip()):
                return None
            if not opening.is_exact and self._has_begun(text[opening.begin : opening.end], value):
                return None
            pairs.append((opening.name, self._bare(value, is_closed)))
        return pairs

    def _is_nothing(self, text: str) -> bool:
        """Return whether a text has only tags, right or misspelled, that begin or end no value."""
        return (
            self.closing not in text
            and _LEADING.fullmatch(text) is not None
            and all(self._is_like(found[1]) for found in _ANY.finditer(text))
        )

    def _has_begun(self, opening: str, value: str) -> bool:
        """Return whether a value begins with what is left of the opening tag ahead of it."""
        if _LEFT.match(value):
            return True
        if not self.is_keyed:
            return False
        if _VALUE_END.search(opening) is None:
            return "<" in value or ">" in value
        word = opening.rpartition("<")[2].strip("> ")
        return any(
            right.startswith(word) and value.startswith(right[len(word) :]) for right in self.words if word != right
        )

    def _openings(self, text: str, known: Collection[str]) -> Iterator[Opening]:
        """Yield what begins arguments: tags of known properties, and those of others where no value is open."""
        is_first = True
        for each in self._candidates(text):
            before = text[: each.begin]
            is_behind = is_first or before.rstrip().endswith(self.closing)
            is_bare = not known and each.is_exact and (not self.in_lines or before.endswith("\n"))
            if each.name in known or (is_behind and each.is_exact) or is_bare:
                is_first = False
                yield each

    def _candidates(self, text: str) -> Iterator[Opening]:
        for found in (_KEYED if self.is_keyed else _NAMED).finditer(text):
            exact = self.opening.match(text, found.start())
            if exact is not None:
                yield Opening(exact.start(), max(exact.end(), found.end() * self.is_keyed), exact["name"].strip(), True)
            elif self.is_keyed:
                is_open = _VALUE_END.search(found[0]) is not None
                yield Opening(found.start(), found.end() if is_open else _skip(text, found.end()), found[1], False)
            elif (found[1] or "=" in found[3]) and _likeness(found[2], self.words[0]) >= MIN_LIKENESS:
                end = found.end() + text.startswith("\n", found.end()) if self.in_lines else found.end()
                yield Opening(found.start(), end, found[4], False)

    def _without_tail(self, text: str) -> tuple[str, bool]:
        """Return a value without the tags at its end, right or misspelled, and whether there are any."""
        is_closed = False
        for _ in range(MAX_TAIL):
            bare = text.rstrip()
            if bare.endswith(self.closing):
                text, is_closed = bare.removesuffix(self.closing), True
                continue
            found = _TAIL.search(bare)
            if found is None or not self._is_like(found[found.lastindex or 0]):
                break
            text, is_closed = bare[: found.start()], is_closed or "/" in found[0]
        return text, is_closed

    def _is_cut(self, value: str) -> bool:
        """Return whether a value ends with what is left of its end tag."""
        found = _CUT.search(value[-64:])
        if found is None or found[0].endswith(">"):
            return False
        letters = re.sub(r"\W", "", found[0])
        return any(word.startswith(letters) for word in self.words)

    def _bare(self, value: str, is_closed: bool) -> str:
        if is_closed:
            return value.removesuffix("\n") if self.in_lines else value
        return value.rstrip("\n") if self.in_lines else value.rstrip()


@functools.cache
def _opener(closing: str) -> re.Pattern[str]:
    """Return the pattern of what an end tag is the pair of."""
    return re.compile(rf"<{re.escape(closing[2:-1])}\b[^<>\n]*(?<!/)>")


@functools.lru_cache(4096)
def _likeness(word: str, right: str) -> float:
    word = word.lower()
    return 1.0 if word == right else difflib.SequenceMatcher(None, word, right).ratio()


def _skip(text: str, at: int) -> int:
    """Return the position of the next character that is no space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
