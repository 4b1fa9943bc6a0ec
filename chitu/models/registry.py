"""Traits of each model family. A new family needs a file, a line here and a table in `config_keys.py`."""

from __future__ import annotations

from collections.abc import Callable

from chitu.errors import UnsupportedModel
from chitu.models import deepseek, llama, qwen2, qwen3, qwen3_moe
from chitu.models.config import ModelSpec
from chitu.models.traits import Traits

_FAMILY_TRAITS: dict[str, Callable[[ModelSpec], Traits]] = {
    "deepseek": deepseek.traits,
    "llama": llama.traits,
    "qwen2": qwen2.traits,
    "qwen3": qwen3.traits,
    "qwen3_moe": qwen3_moe.traits,
}


def traits_of(spec: ModelSpec) -> Traits:
    """Return the traits of the model's family. Raises UnsupportedModel for a family without code."""
    try:
        return _FAMILY_TRAITS[spec.family](spec)
    except KeyError as error:
        raise UnsupportedModel(f"architecture {spec.architecture!r} is not supported") from error
