"""Drafts by the grammar of a request: the tokens that spell what the grammar forces next, such as the name of the next
property in a JSON object. And another source's guesses, as far as the grammar allows them.

A grammar forces bytes, not tokens: the model may spell them by other tokens than the tokenizer would. So a forced text
is a guess like any other. The matcher here is one of the request's own, beside the one that masks its draws. Where it
meets a limit of time or memory, it allows nothing any more: the request goes on without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from chitu.grammars.compiler import Matcher
from chitu.instance.draft_source import DraftSource, Proposal

NAME = "grammar"


class GrammarDrafts:
    """A `DraftSource` of one request. `inner`: the source of other guesses. `prompt_len`: tokens that come before the
    answer."""

    def __init__(self, matcher: Matcher, inner: DraftSource, prompt_len: int) -> None:
        self._matcher = matcher
        self._inner = inner
        self._prompt_left = prompt_len

    def take(self, tokens: Sequence[int]) -> None:
        self._inner.take(tokens)
        answer = tokens[self._prompt_left :]
        self._prompt_left -= len(tokens) - len(answer)
        if len(answer):
            self._matcher.consume(list(answer))

    def propose(self, most: int) -> Proposal:
        forced = self._matcher.forced()[:most] if most > 0 else []
        tokens, name, sureness = self._inner.propose(most)
        allowed = tokens[: self._matcher.num_allowed(tokens)]
        if len(allowed) > len(forced):
            return Proposal(allowed, name, sureness)
        return Proposal(forced, NAME)
