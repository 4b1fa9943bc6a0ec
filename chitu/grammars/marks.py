"""Rules of llguidance's Lark for marks in free text, and for a grammar after reasoning. Pure.

A tokenizer may have a mark as an added token. The engine keeps most added tokens, `special` or not, out of text. Models
write the mark as that token, but may also spell it, so the rules accept both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from chitu.protocol import Reasoning

FREE_TEXT = r"TEXT: /(.|\n)*/"
ANSWER = "answer"
GAP = r"gap: /\n{0,2}/"
"""Line ends that templates write after reasoning; the message parser drops them."""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def text_up_to(mark: str, added_tokens: Mapping[str, int], rule: str = "led") -> list[str]:
    """Return a rule of any text up to and including the first `mark`. Needs `FREE_TEXT`."""
    # A lazy lexeme ends with the first mark, where free text is over.
    spelled = f"{rule}_spelled"
    rules = [rf"{spelled}[lazy]: /(.|\n)*/ {quoted(mark)}"]
    # What precedes the token in the mark is within the text.
    _, behind = token_in(mark, added_tokens)
    return [*rules, f"{rule}: {spelled} | TEXT {behind}" if behind else f"{rule}: {spelled}"]


def with_marks(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return a rule for `text`. Marks in it may also be written as their tokens."""
    return " ".join(
        f"({quoted(part)} | <[{added_tokens[part]}]>)" if part in added_tokens else quoted(part)
        for part in _parts(text, added_tokens)
    )


def token_in(text: str, added_tokens: Mapping[str, int]) -> tuple[str, str]:
    """Return what precedes the first added token in a text, and a part of a rule of all from that token on; the text
    and nothing if it has none."""
    parts = _parts(text, added_tokens)
    at = next((i for i, part in enumerate(parts) if part in added_tokens), None)
    if at is None:
        return text, ""
    behind = "".join(parts[at + 1 :])
    rest = f" {with_marks(behind, added_tokens)}" if behind else ""
    return "".join(parts[:at]), f"<[{added_tokens[parts[at]]}]>{rest}"


def behind_tokens(text: str, added_tokens: Mapping[str, int]) -> tuple[str, str]:
    """Return all of a text up to its last added token, as a part of a rule, and what follows that token."""
    parts = _parts(text, added_tokens)
    at = max((i + 1 for i, part in enumerate(parts) if part in added_tokens), default=0)
    return with_marks("".join(parts[:at]), added_tokens) if at else "", "".join(parts[at:])


def _parts(text: str, added_tokens: Mapping[str, int]) -> list[str]:
    """Return a text, split at the added tokens that it has the names of."""
    names = sorted((name for name in added_tokens if name and name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return [part for part in parts if part] or [""]


def behind_reasoning(
    grammar: str, reasoning: Reasoning, added_tokens: Mapping[str, int], eos_ids: Collection[int]
) -> str:
    """Return `grammar` (Lark, or llguidance's JSON list of grammars) after reasoning: any tokens except an eos."""
    answer, *more = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    kept_out = {*eos_ids, added_tokens.get(reasoning.close)}
    others = ",".join(str(token) for token in sorted(added_tokens.values()) if token not in kept_out)
    behind, head = (f"{with_marks(text, added_tokens)} " if text else "" for text in (reasoning.behind, reasoning.head))
    thought = f"{f'(TEXT <[{others}]>)* ' if others else ''}led {behind or 'gap '}{head}@{ANSWER}"
    if not reasoning.is_open:
        token = added_tokens.get(reasoning.open)
        opened = with_marks(reasoning.open, added_tokens) if token is None else f"<[{token}]>"
        thought = f"{head}@{ANSWER} | {opened} {thought}"
    rules = [f"start: {thought}", *text_up_to(reasoning.close, added_tokens), FREE_TEXT, GAP]
    ahead = {"lark_grammar": "%llguidance {}\n" + "\n".join(rules) + "\n"}
    return json.dumps({"grammars": [ahead, {**answer, "name": ANSWER}, *more]})
