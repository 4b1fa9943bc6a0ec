"""What a reader of some project's recipes returns."""

from __future__ import annotations

from typing import NamedTuple

from chitu.tools.recipes.options import SideWords


class ReadRecipe(NamedTuple):
    name: str
    model: str
    """As the recipe names it."""
    bits: str
    """Its word for the weights' precision; empty if it does not say."""
    card: str
    """In lower case, such as `h200`; empty if the recipe does not say."""
    cards_of_host: int
    engine: str
    sides: dict[str, SideWords]
    """By `prefill`, `decode`, `aggregated`."""
    unknown: list[str]
    """Keys outside the engine's options that this reader does not know."""
    left_out: list[str]
    """What it knows, and nothing here corresponds to."""
