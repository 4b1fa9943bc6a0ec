"""A grammar in Lark as one regular expression. Pure.

The argument of a call is a string in JSON, and llguidance follows a regular expression in one, but no grammar. Rules
that do not refer to themselves are a regular expression, and the grammars of agents' tools (a patch, a command) are
such. Strings and expressions keep the syntax of Rust's `regex`, which llguidance's Lark has, too.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from chitu.protocol import MAX_GRAMMAR_CHARS

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
    |(?P<import>%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\(\s*(?P<several>[\w\s,]+)\)))
    |(?P<range>"(?P<low>[^"\\])"\.\."(?P<high>[^"\\])")
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imsux]*)
    |(?P<head>[?!]?[A-Za-z_]\w*(?:\.-?\d+)?\s*:)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<alternative_name>->\s*\w+)
    |(?P<times>~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[()\[\]|?*+])""",
    re.VERBOSE,
)
_COMMON = {
    **{"CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"},
    **{"DIGIT": "[0-9]", "HEXDIGIT": "[0-9A-Fa-f]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+"},
    **{"DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "LETTER": "[A-Za-z]", "LCASE_LETTER": "[a-z]"},
    **{"UCASE_LETTER": "[A-Z]", "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][0-9A-Za-z_]*"},
}
"""Terminals of Lark's library `common`."""
_META = frozenset(r"\.+*?()|[]{}^$#&-~")
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}
_FLAGS = frozenset("ims")
_TIMES = frozenset("?*+")


class _Token(NamedTuple):
    kind: str
    text: str
    regex: str = ""
    """Of a terminal: the regular expression that it is."""


def regex_of_lark(grammar: str) -> str:
    """Return a regular expression, without anchors, for the texts of the grammar's rule `start`. Raise ValueError with
    the reason if there is none, as for a rule that refers to itself."""
    try:
        return _Expansion(_rules(_tokens(grammar))).of_rule("start")
    except RecursionError:
        raise ValueError("its groups are too deep within a call") from None


def literally(text: str) -> str:
    """Return the regular expression that matches this text alone."""
    return "".join([_CONTROL.get(c, "\\" + c if c in _META else c) for c in text])


def _tokens(grammar: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise ValueError(f"{grammar[at : at + 20]!r} is not supported within a call")
        at = found.end()
        tokens += _of_match(found)
    return tokens


def _of_match(found: re.Match[str]) -> list[_Token]:
    kind, text = str(found.lastgroup), found[0]
    if found["import"] is not None:
        names = [found["one"]] if found["one"] else re.split(r"[\s,]+", found["several"].strip())
        missing = [name for name in names if name not in _COMMON]
        if missing:
            raise ValueError(f"the terminal common.{missing[0]} is not supported within a call")
        return [_Token("import", found["alias"] or name, _COMMON[name]) for name in names]
    if found["range"] is not None:
        return [_Token("terminal", text, f"[{literally(found['low'])}-{literally(found['high'])}]")]
    if found["string"] is not None:
        try:
            value = str(ast.literal_eval(text.removesuffix("i")))
        except (SyntaxError, ValueError):
            raise ValueError(f"{text[:40]} is no string") from None
        return [_Token("terminal", text, f"(?i:{literally(value)})" if text.endswith("i") else literally(value))]
    if found["regex"] is not None:
        body, _, flags = text[1:].rpartition("/")
        if not _FLAGS.issuperset(flags):
            raise ValueError(f"the flags {flags!r} are not supported within a call")
        return [_Token("terminal", text, f"(?{flags}:{body.replace(chr(92) + '/', '/')})")]
    if found["head"] is not None:
        return [_Token("head", re.split(r"[.:\s]", text.lstrip("?!"))[0])]
    if found["times"] is not None:
        least = found["least"]
        if least is None:
            return [_Token("times", "".join(text.split()))]
        return [_Token("times", f"{{{least},{found['most']}}}" if found["most"] else f"{{{least}}}")]
    return [] if found["space"] is not None or found["alternative_name"] is not None else [_Token(kind, text)]


def _rules(tokens: list[_Token]) -> dict[str, list[_Token]]:
    rules: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for token in tokens:
        if token.kind == "import":
            rules[token.text] = [_Token("terminal", token.text, token.regex)]
        elif token.kind == "head":
            if token.text in rules:
                raise ValueError(f"the rule {token.text!r} is there twice")
            body = rules[token.text] = []
        elif body is None:
            raise ValueError(f"{token.text[:40]!r} belongs to no rule")
        else:
            body.append(token)
    return rules


class _Expansion:
    """Expands rules into one expression, and follows which of them are open."""

    def __init__(self, rules: dict[str, list[_Token]]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}
        self._open: list[str] = []

    def of_rule(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        if name in self._open:
            raise ValueError(f"the rule {name!r} refers to itself, which is not supported within a call")
        if name not in self._rules:
            raise ValueError(f"there is no rule {name!r}")
        self._open.append(name)
        tokens = list(reversed(self._rules[name]))
        found = self._alternatives(tokens)
        if tokens:
            raise ValueError(f"the rule {name!r} has {tokens[-1].text!r} out of place")
        self._open.pop()
        self._known[name] = found
        return found

    def _alternatives(self, tokens: list[_Token]) -> str:
        """Take alternatives from the end of `tokens`, which are in reverse; return a group."""
        parts, part = [], ""
        while tokens and tokens[-1].text not in (")", "]"):
            token = tokens.pop()
            if token.kind == "sign" and token.text == "|":
                parts.append(part)
                part = ""
                continue
            part += self._atom(token, tokens) + self._times(tokens)
            if len(part) > MAX_GRAMMAR_CHARS:
                raise ValueError(f"it is too large within a call, where at most {MAX_GRAMMAR_CHARS} characters are")
        return f"(?:{'|'.join([*parts, part])})"

    def _atom(self, token: _Token, tokens: list[_Token]) -> str:
        if token.kind == "terminal":
            return f"(?:{token.regex})"
        if token.kind == "name":
            return self.of_rule(token.text)
        closing = {"(": ")", "[": "]"}.get(token.text)
        if closing is None:
            raise ValueError(f"{token.text!r} is out of place")
        group = self._alternatives(tokens)
        if not tokens or tokens.pop().text != closing:
            raise ValueError(f"{token.text!r} is not closed")
        return group if closing == ")" else f"{group}?"

    def _times(self, tokens: list[_Token]) -> str:
        if (
            tokens
            and (tokens[-1].kind == "times" or tokens[-1].text in ("?", "*", "+"))
            and tokens[-1].kind != "terminal"
        ):
            return tokens.pop().text
        return ""
