"""Reads rotary position embeddings from config.json. No torch.

Called by `models/config.py`. A config has `rope_parameters`, or the older `rope_theta` and `rope_scaling`, or both if
they agree: `transformers` takes one dictionary whole and drops the other, and which one depends on its version. A key
that the rope type does not use is refused, because it would be ignored silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_keys import Key, Keys

DICTIONARIES = ("rope_parameters", "rope_scaling")
TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that may also be at the top level of the config, with the same meaning as in the dictionaries."""
_ANY = {"rope_type": Key("text", "default"), "rope_theta": Key("positive", 10_000.0)}
_FACTOR = {"factor": Key("positive")}
_ORIGINAL = {"original_max_position_embeddings": Key("count", None)}
ROPE_TYPES: dict[str, dict[str, Key]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": {**_FACTOR, **_ORIGINAL, "low_freq_factor": Key("positive"), "high_freq_factor": Key("positive")},
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        "attention_factor": Key("number", None, nullable=True),
        "attn_factor": Key("positive", 1.0),
        "beta_fast": Key("positive", None, nullable=True),
        "beta_slow": Key("positive", None, nullable=True),
        "mscale": Key("number", None, nullable=True),
        "mscale_all_dim": Key("number", None, nullable=True),
        "truncate": Key("flag", True),
    },
}
"""Rope type -> the keys that it uses besides `_ANY`."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Types other than `default` use `factor`; the fields below it name their types."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """Used, as is `high_freq_factor`, by llama3."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Used by llama3 and yarn."""
    beta_fast: float = 32.0
    """Used, as are the fields below, by yarn."""
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0
    """Factor of cos and sin."""
    score_factor: float = 1.0
    """Factor of the scores of latent attention."""

    def reach_tokens(self, max_positions: int) -> int:
        """Return the most tokens of a sequence. A config with yarn may still have the number before the extension."""
        if self.type != "yarn":
            return max_positions
        return max(max_positions, int(self.factor * self.original_max_position_embeddings))


def read_rope(values: Mapping[str, Any], max_positions: int, where: str) -> RopeSpec:
    """Return the spec. `values`: of the whole config. Raises ConfigError or UnsupportedModel, with the key's name."""
    names = [name for name in DICTIONARIES if values[name]] or [DICTIONARIES[0]]
    specs = [_read(values, name, max_positions, where) for name in names]
    if specs[0] != specs[-1]:
        raise ConfigError(
            f"{where}: rope_parameters and rope_scaling contradict each other; keep one of them (rope_parameters, with "
            "rope_theta in it, if transformers 5 wrote the file)"
        )
    return specs[0]


def _read(values: Mapping[str, Any], name: str, max_positions: int, where: str) -> RopeSpec:
    given = dict(values[name] or {})
    for key in TOP_LEVEL:
        value = values[key]
        if value is not None and given.setdefault(key, value) != value:
            raise ConfigError(f"{where}: {key} is {value!r}, but {name}.{key} is {given[key]!r}; keep one of them")
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{where}: {name}.rope_type {kind!r} is not supported (known: {', '.join(ROPE_TYPES)})")
    keys = Keys(
        used={**_ANY, **ROPE_TYPES[kind]},
        only={"partial_rotary_factor": (1.0,)},
        no_effect=frozenset({"finetuned"}),  # a mark in configs of models that were fine-tuned with it
        aliases={"type": "rope_type"},
    )
    rope = keys.read(given, f"{where}: {name} (rope_type {kind!r})")
    is_yarn, factor = kind == "yarn", float(rope.get("factor", 1.0))
    if is_yarn and rope["attn_factor"] != 1:
        raise UnsupportedModel(
            f"{where}: {name}.attn_factor {rope['attn_factor']} is not supported: transformers ignores it, while other "
            "engines multiply cos and sin by it; remove it for the tokens of transformers, or write attention_factor "
            f"{_attention_factor(rope) * rope['attn_factor']:.6g} instead of it for theirs"
        )
    all_dim = rope.get("mscale_all_dim")
    return RopeSpec(
        type=kind,
        theta=float(rope["rope_theta"]),
        factor=factor,
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=rope.get("original_max_position_embeddings") or max_positions,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        is_truncated=rope.get("truncate", True),
        attention_factor=_attention_factor(rope) if is_yarn else 1.0,
        score_factor=_mscale(factor, float(all_dim)) ** 2 if all_dim else 1.0,
    )


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(yarn: Mapping[str, Any]) -> float:
    """Return the factor of cos and sin."""
    if yarn["attention_factor"] is not None:
        return float(yarn["attention_factor"])
    factor, mscale, all_dim = float(yarn["factor"]), yarn["mscale"], yarn["mscale_all_dim"]
    if mscale and all_dim:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
    return _mscale(factor)
