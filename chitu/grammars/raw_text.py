"""What a schema allows of a string, as terminals of llguidance's Lark: tagged calls have strings as raw text. Pure.

Tags that end a value, or begin another one, are in no text, except one with a bound above and no other. Bounds of its
length make counters, whose states the engine keeps, so long texts are counted in pieces: the engine then has the states
of one piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chitu.errors import InvalidRequest
from chitu.grammars.marks import quoted, token_in
from chitu.grammars.patterns import FORMATS, searched, terminal
from chitu.grammars.schema import ONE_OF, missing_target, target_of

MAX_FOLLOWED = 500
"""References that are followed for one value."""
MAX_ALTERNATIVES = 64
"""Kinds of text that one string may be."""
COUNTED_CHARS = 600
"""Longest string whose characters are counted one by one."""
PIECE_CHARS = 256
"""Characters of a piece of a longer one."""
MAX_RUN = 8
"""Most equal characters, such as line ends, at the end of a piece."""
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
"""Keywords that are not enforced, of those that constrain any value."""


class Text(NamedTuple):
    """One kind of text that a string may be."""

    words: tuple[str, ...] | None = None
    """All that it may be; None: anything."""
    terminals: tuple[str, ...] = ()
    """Terminals of Lark that it matches, all of them."""
    least: int = 0
    most: int | None = None
    """Bounds of its length."""
    is_null: bool = False
    """It is JSON's null."""

    def both(self, other: Text) -> Text | None:
        """Return what is of both kinds; None: nothing is."""
        if self.is_null is not other.is_null:
            return None
        words = self.words
        if words is None or other.words is None:
            words = other.words if words is None else words
        else:
            words = tuple(word for word in words if word in other.words)
        least, most = (
            max(self.least, other.least),
            min((m for m in (self.most, other.most) if m is not None), default=None),
        )
        if words is not None:
            words = tuple(word for word in words if least <= len(word) and (most is None or len(word) <= most))
        if words == () or (most is not None and least > most):
            return None
        return Text(words, tuple(dict.fromkeys((*self.terminals, *other.terminals))), least, most, self.is_null)


NULL = Text(is_null=True)


class Trail:
    """References that lead to a part of a schema. All of one value are counted, since each may lead to two more."""

    def __init__(self, references: tuple[str, ...] = (), count: Iterator[int] | None = None) -> None:
        self._references = references
        self._count = count if count is not None else itertools.count(1)

    def follow(self, reference: Any, root: Any, path: str) -> tuple[Any, str, Trail]:
        """Return what a reference leads to, its place, and the trail there. Raise InvalidRequest if it leads to
        nothing, or in a circle."""
        target = target_of(reference, root)
        if target is None:
            raise InvalidRequest(missing_target(reference), f"{path}.$ref")
        if reference in self._references or next(self._count) > MAX_FOLLOWED:
            raise InvalidRequest("$ref: it refers to itself, or to too much", f"{path}.$ref")
        return target, reference[1:].replace("/", "."), Trail((*self._references, reference), self._count)


def texts_of(schema: Any, root: Any, path: str, trail: Trail | None = None) -> list[Text]:
    """Return the kinds of text, and null, that a schema within `root` allows; empty: no string. Raise InvalidRequest
    with the place for what cannot be enforced of a text. `path`: the schema's own place."""
    trail = trail or Trail()
    if not isinstance(schema, Mapping):
        return [] if schema is False else [Text(), NULL]
    for key in _NEVER:
        if key in schema:
            raise InvalidRequest(f"{key} cannot be enforced", f"{path}.{key}")
    given = schema.get("type")
    types = ("string", "null") if given is None else (given,) if isinstance(given, str) else tuple(given)
    own = Text(least=schema.get("minLength", 0), most=schema.get("maxLength"))
    regexes = [FORMATS[schema["format"]]] if "format" in schema else []
    if "pattern" in schema:
        try:
            regexes.append(searched(schema["pattern"]))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"pattern: {error}", f"{path}.pattern") from None
    own = own._replace(terminals=tuple(map(terminal, regexes)))
    found = [kind for kind, name in ((own, "string"), (NULL, "null")) if name in types]
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            words = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
            found = _of_both(found, [Text(words)] * bool(words) + [NULL] * (None in values), path)
    if (reference := schema.get("$ref")) is not None:
        target, place, behind = trail.follow(reference, root, path)
        found = _of_both(found, texts_of(target, root, place, behind), path)
    for i, each in enumerate(schema.get("allOf") or ()):
        found = _of_both(found, texts_of(each, root, f"{path}.allOf[{i}]", trail), path)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            each_of = [texts_of(each, root, f"{path}.{key}[{i}]", trail) for i, each in enumerate(schema[key])]
            if key == "oneOf" and not _are_apart(each_of):
                raise InvalidRequest(ONE_OF, f"{path}.oneOf")
            found = _of_both(found, [text for texts in each_of for text in texts], path)
    return found


def _of_both(left: Sequence[Text], right: Sequence[Text], path: str) -> list[Text]:
    left, right = _merged(left), _merged(right)
    made = _merged([both for one, other in itertools.product(left, right) if (both := one.both(other)) is not None])
    if len(made) > MAX_ALTERNATIVES:
        raise InvalidRequest(f"more than {MAX_ALTERNATIVES} kinds of text", path)
    return made


def _merged(texts: Sequence[Text]) -> list[Text]:
    """Return equal kinds once, and all that are words alone as one."""
    words = [word for text in texts if text.words and not text.terminals for word in text.words]
    others = dict.fromkeys(text for text in texts if not text.words or text.terminals)
    return [*([Text(tuple(dict.fromkeys(words)))] if words else []), *others]


def _are_apart(each_of: Sequence[Sequence[Text]]) -> bool:
    """Return whether no text is of two of these."""
    words: set[str] = set()
    others: list[Text] = []
    for texts in each_of:
        own = {word for text in texts if text.words and not text.terminals for word in text.words}
        rest = [text for text in texts if not text.words or text.terminals]
        if not words.isdisjoint(own) or any(one.both(other) for one, other in itertools.product(rest, others)):
            return False
        words |= own
        others += rest
        if len(others) > MAX_ALTERNATIVES:
            return False
    return not words or not any(Text(tuple(words)).both(other) for other in others)


class RawText:
    """Rules of the raw texts of one grammar, each with `end` behind it."""

    def __init__(self, prefix: str, begin: str, end: str, added_tokens: Mapping[str, int]) -> None:
        """`begin`: what precedes the name of an argument."""
        self._ahead, self._token = token_in(end, added_tokens)
        """If the end has an added token: what precedes it in the end, and the rest as a part of a rule. A terminal has
        no tokens, so such an end is spelled, or begins behind the terminal of the text."""
        self.rules: list[str] = []
        self.places: list[tuple[str, str]] = []
        """Terminals, each with the place of its schema."""
        self._prefix, self._end = prefix, end
        self._names: dict[str, str] = {}
        tags = " | ".join(quoted(tag) for tag in dict.fromkeys((end.strip(), begin.strip())) if tag)
        self._no_tag = f"~(/(?s:.*)/ ({tags}) /(?s:.*)/)"
        """Terminal of texts that have no tag in them with which a value ends or another one begins."""
        bare = end.lstrip()
        tag = begin.lstrip()
        mark, behind = _character(bare[0]), _character(f"{bare} "[1])
        behind += _character(f"{tag} "[1]) if tag.startswith(bare[0]) else ""
        self._no_end = f"(?:[^{mark}]|{mark}[^{mark}{behind}])*"
        """Expression of texts in which nothing begins as these tags do."""
        self._before_end = "".join(map(_character, dict.fromkeys(end[: len(end) - len(bare) + 1])))
        """The characters up to the first one of that tag."""

    def free(self) -> str:
        """Return the rule of any text and its end."""
        return self._ended(f"({_any(0, None)} & {self._no_tag})")

    def rule_of(self, text: Text, path: str) -> str:
        """Return what the text and its end are, as a part of a rule. Raise InvalidRequest for bounds that cannot be
        enforced."""
        words = " | ".join(map(quoted, ("null",) if text.is_null else text.words or ()))
        if words and not text.terminals:
            return self._ended(f"({words})")
        if words:
            return self._ended(f"(({words}) & {' & '.join(text.terminals)})", path)
        if text.terminals and (text.least or text.most is not None):
            # Lengths and the whole end in one expression would take the engine too long.
            body = " & ".join((*text.terminals, _any(text.least, text.most), f"/{self._no_end}/"))
            return self._ended(f"({body})", path)
        if text.terminals or (text.least and text.most is None):
            body = " & ".join(text.terminals) or _any(text.least, None)
            return self._ended(f"({body} & {self._no_tag})", path)
        if text.most is not None:
            return self._counted(text.least, text.most, path)
        return self.free()

    def _counted(self, least: int, most: int, path: str) -> str:
        if most <= COUNTED_CHARS:
            return self._ended(f"{self._first(least)}{_any(0, most - least)}", is_lazy=True)
        if least >= PIECE_CHARS:
            raise InvalidRequest(
                f"minLength of {least} cannot be enforced beside a maxLength of {most}", f"{path}.minLength"
            )
        # A piece ends where the end has not begun, so it may have some characters more. Its last ones may be as the
        # first of the end, which then are the last of the text or not.
        begun, *more = map(_character, self._end)
        run = f"{begun}{{1,{MAX_RUN}}}"
        count, rest = divmod(most - (PIECE_CHARS - 1 + MAX_RUN), PIECE_CHARS - 1 + MAX_RUN + len(more))

        def other(least: int) -> str:
            """Return what is as the end, but not all of it; behind its first character are `least` or more of it."""
            differs = "|".join(f"{''.join(more[:i])}[^{begun}{more[i]}]" for i in range(least, len(more)))
            return f"(?:{differs})"

        def piece(head: str, left: int) -> str:
            ends = [f"(?s:.{{{left}}})(?:[^{begun}]|{run}{other(0)})"]
            ends += [f"(?s:.{{{left - i}}}){begun}{other(i)}" for i in range(1, min(len(more), left))]
            return self._rule(f"{head}/{'|'.join(ends)}/", is_lazy=False)

        def last(head: str, left: int) -> str:
            return self._ended(f"{head}({_any(0, left)} | {_any(left, left)} /{run}/)", is_lazy=True)

        any_piece, left = piece("", PIECE_CHARS - 1), PIECE_CHARS - 1
        any_last, very_last = last("", left), last("", left + rest)
        if not least:
            return f"({_times(any_piece, 0, count - 1)} {any_last} | {_times(any_piece, count, count)} {very_last})"
        head = self._first(least)
        first, only = piece(head, left - least), last(head, left - least)
        some = f" | {first} {_times(any_piece, 0, count - 2)} {any_last}" if count > 1 else ""
        return f"({only}{some} | {first} {_times(any_piece, count - 1, count - 1)} {very_last})"

    def _first(self, least: int) -> str:
        """Return the first characters of a text of at least so many: in them, the end cannot have begun."""
        if not least:
            return ""
        return f"({_any(least, least)} & /{self._no_end}[^{self._before_end}]/) "

    def _ended(self, body: str, path: str = "", is_lazy: bool = False) -> str:
        """Return a text and its end, as a part of a rule. `path`: the place of its schema, if that may be at fault."""
        whole = f"{body} {quoted(self._end)}"
        if path:
            self.places.append((path, whole))
        spelled = self._rule(whole, is_lazy)
        if not self._token:
            return spelled
        ahead = f"{body} {quoted(self._ahead)}" if self._ahead else body
        return f"({spelled} | {self._rule(ahead, False)} {self._token})"

    def _rule(self, body: str, is_lazy: bool) -> str:
        """Return the name of the rule that is this; equal ones are one."""
        name = self._names.get(f"{is_lazy}{body}")
        if name is None:
            number = len(self._names)
            name = f"{self._prefix}_t{number}" if is_lazy else f"{self._prefix}_T{number}".upper()
            self._names[f"{is_lazy}{body}"] = name
            self.rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name


def _any(least: int, most: int | None) -> str:
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"


def _times(rule: str, least: int, most: int) -> str:
    return f"{rule}{{{least},{most}}}" if most else ""


def _character(character: str) -> str:
    """Return a character as it stands in a class, and outside of one."""
    return rf"\x{{{ord(character):x}}}"


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the types that a schema within `root` names; empty: it names none."""
    return _types_of(schema, root, set())


def _types_of(schema: Any, root: Any, seen: set[int]) -> set[str]:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return set()
    seen.add(id(schema))
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {each for each in given or () if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or ():
            types |= _types_of(each, root, seen)
    types |= _types_of(target_of(schema.get("$ref"), root), root, seen)
    if not types:
        values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
        types = {"string" if isinstance(value, str) else "other" for value in values}
    return types


def is_raw_text(schema: Any, root: Any) -> bool:
    """Return whether a tagged value is a string, of which the text is all, and not JSON."""
    types = types_of(schema, root)
    return not types or "string" in types
