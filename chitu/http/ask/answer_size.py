"""The size of an answer: prompts times choices times tokens times candidates, bounded before anything is computed.
Pure; part of `BodyWork`.

A stream is counted like a whole answer: if its client reads slowly, all of it waits here.
"""

from __future__ import annotations

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import ChatBody, GenerationBody
from chitu.http.ask.parsed import OutputOptions

MAX_ANSWER_BYTES = 64 << 20
"""Largest answer, in bytes of JSON."""
ENTRY_BYTES = 72
"""One token, or one candidate for it, in a list of logprobs."""
TEXT_BYTES = 4
"""A generated token in the text."""
ID_BYTES = 8
"""A generated token in `token_ids`."""


class AnswerSize:
    """Size of one request's answer, as far as its prompts are added."""

    def __init__(self, body: GenerationBody, options: OutputOptions, num_prompts: int) -> None:
        self._body = body
        self._options = options
        self._num_prompts = num_prompts
        self._copies = 1 if isinstance(body, ChatBody) else options.num_returned or options.n
        """How often the answer has what belongs to a prompt."""
        self._repeats_logprobs = options.echo and options.logprobs is not None
        counts = (options.prompt_logprobs, options.logprobs if self._repeats_logprobs else None)
        self._prompt_token_bytes = sum([ENTRY_BYTES * (1 + count) for count in counts if count is not None])
        # `best_of` ranks by logprobs, even if the client does not want them.
        candidates = 0 if options.logprobs is None and options.num_returned else options.logprobs
        self._token_bytes = (
            TEXT_BYTES
            + (ID_BYTES if options.return_token_ids else 0)
            + (ENTRY_BYTES * (1 + candidates) if candidates is not None else 0)
        )
        self._of_prompts = self._of_tokens = 0
        self._most_tokens = self._num_prompt_tokens = 0

    def most_tokens(self, num_tokens: int) -> int:
        """Return how many tokens each choice may have after a prompt of `num_tokens`; at least one."""
        left = MAX_ANSWER_BYTES - self._copies * num_tokens * self._prompt_token_bytes
        return max(1, left // (self._options.n * self._token_bytes))

    def add(self, num_tokens: int, max_tokens: int, echo: str) -> None:
        """Add a prompt, its choices of up to `max_tokens`, and its text `echo` that they repeat. Raise InvalidRequest,
        which names what makes the answer large, if it may become too large."""
        echoed = len(msgspec.json.encode(echo)) if echo else 0
        self._of_prompts += self._copies * (num_tokens * self._prompt_token_bytes + echoed)
        self._of_tokens += self._options.n * max_tokens * self._token_bytes
        self._num_prompt_tokens += num_tokens
        self._most_tokens = max(self._most_tokens, max_tokens)
        num_bytes = self._of_prompts + self._of_tokens
        if num_bytes > MAX_ANSWER_BYTES:
            factors = self._factors()
            told = ", ".join([f"{count:,} {what} ({name})" for name, count, what in factors])
            raise InvalidRequest(
                f"the answer may have {num_bytes:,} bytes or more, and at most {MAX_ANSWER_BYTES:,} are given: it "
                f"multiplies {told}; ask for less of one of these",
                factors[0][0],
            )

    def _factors(self) -> list[tuple[str, int, str]]:
        """Return the fields that make the answer large, each with its number and what it counts."""
        body, options, factors = self._body, self._options, []
        of_prompts = self._of_prompts > self._of_tokens
        choices = self._copies if of_prompts else options.n
        if choices > 1:
            name = "best_of" if options.num_returned and choices == options.n else "n"
            factors.append((name, choices, "choices"))
        if self._num_prompts > 1:
            factors.append(("prompt", self._num_prompts, "prompts"))
        if of_prompts and options.prompt_logprobs is not None:
            factors.append(("prompt_logprobs", options.prompt_logprobs, "candidates"))
        if options.logprobs is not None and (self._repeats_logprobs or not of_prompts):
            name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
            factors.append((name, options.logprobs, "candidates"))
        if of_prompts:
            name = "messages" if isinstance(body, ChatBody) else "echo" if options.echo else "prompt"
            factors.append((name, self._num_prompt_tokens, "prompt tokens"))
        else:
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            factors.append((name, self._most_tokens, "tokens of an answer"))
        return factors
