"""What to ask a model first: the same for the launchers' request to copy, their first completion, the page and
`chitu chat`."""

from __future__ import annotations

import msgspec

from chitu.assets import TINY_MODEL_NAME

TINY_QUESTION = "The red fox has number 4827. The quiet river guards room 1930. What number does the red fox have?"
"""A question that the embedded model can answer."""
QUESTION = "What is the capital of France?"
BEGINNING = "Once upon a time"


class FirstPrompt(msgspec.Struct, frozen=True):
    text: str
    is_chat: bool
    """Whether it is a message of a chat. Otherwise the model has no chat template and continues a text."""


def first_prompt(model: str, has_chat_template: bool) -> FirstPrompt:
    """Return the first prompt that fits a model. `model`: its served name."""
    if not has_chat_template:
        return FirstPrompt(BEGINNING, False)
    return FirstPrompt(TINY_QUESTION if model == TINY_MODEL_NAME else QUESTION, True)
