"""Questions to a model: the messages so far, the body of the next request, and examples with a known answer. Pure."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

from chitu.assets.tiny_tasks import Example, facts_for, recall

CHAT_PATH = "/v1/chat/completions"
ANSWER_ROOM_TOKENS = 64
"""Tokens of the context that an example leaves for the answer."""
SHOWN_SENTENCES = 2
"""Sentences of a long list that are shown at its start."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    model: str | None = None
    """Name of the model; None: the model that the router serves."""
    system: str | None = None
    max_tokens: int | None = None
    """Limit of the answer; None: until the model ends or the context is full."""
    temperature: float = 0.0


@dataclass(slots=True)
class Conversation:
    options: ChatOptions
    turns: list[tuple[str, str]] = field(default_factory=list)
    """Questions with their answers as far as received; a question without any answer is not kept."""

    def body(self, question: str) -> dict[str, Any]:
        """Return the body of a chat request with this next question."""
        options = self.options
        messages = [{"role": "system", "content": options.system}] if options.system else []
        for asked, answered in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {"model": options.model, "messages": messages, "temperature": options.temperature}
        body["separate_reasoning"] = False  # reasoning is shown as the model writes it
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        return body

    def keep(self, question: str, answer: str) -> None:
        if answer:
            self.turns.append((question, answer))


def recall_example(rng: random.Random, prompt_tokens: int, max_model_len: int | None) -> Example:
    """Return a question over a list of about this many tokens (for chitu-tiny), or fewer if the context is shorter."""
    if max_model_len is not None:
        prompt_tokens = min(prompt_tokens, max_model_len - ANSWER_ROOM_TOKENS)
    return recall(rng, facts_for(prompt_tokens))


def is_right(example: Example, answer: str) -> bool:
    return example.value in answer


def verdict(example: Example, answer: str) -> str:
    """Return a tick, or a cross with the expected answer."""
    return f"✓ {example.value} is right" if is_right(example, answer) else f"✗ expected: {example.answer}"


def shortened(prompt: str) -> str:
    """Return a long list with the sentences in its middle replaced by their number. The question stays."""
    sentences = re.split(r"(?<=[.?!]) ", prompt)
    left_out = len(sentences) - SHOWN_SENTENCES - 2
    if left_out < 2:
        return prompt
    shown = [*sentences[:SHOWN_SENTENCES], f"... {left_out} more sentences ...", *sentences[-2:]]
    return " ".join(shown)


def printable(text: str) -> str:
    """Return the text of an untrusted model without the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)
