"""Traits of each model family: the points in which families differ beyond their configs. No torch.

A new family needs a function here, its line in the table, and a table in `config_keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chitu.errors import UnsupportedModel
from chitu.models.config import ModelSpec


@dataclass(frozen=True, slots=True)
class Traits:
    """Points in which the families differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    """Whether each head has a logit that takes weight from the positions and gives nothing."""


def llama(spec: ModelSpec) -> Traits:
    """Describe Llama 2 and 3, and Mistral without a sliding window: no head norms, biases only if in the config."""
    return Traits(qkv_bias=spec.attention_bias, output_bias=spec.attention_bias)


def qwen2(spec: ModelSpec) -> Traits:
    """Describe Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection, whatever is in the config."""
    return Traits(qkv_bias=True)


def qwen3(spec: ModelSpec) -> Traits:
    """Describe Qwen3 (dense): RMS norms on the heads of q and k, before the rotation."""
    return Traits(qkv_bias=spec.attention_bias, output_bias=spec.attention_bias, qk_norm=True)


def qwen3_moe(spec: ModelSpec) -> Traits:
    """Describe Qwen3-MoE: attention as in Qwen3, a mixture of experts in place of the MLP (in some layers or all)."""
    return qwen3(spec)


def deepseek(spec: ModelSpec) -> Traits:
    """Describe DeepSeek-V2, -V3, Kimi-K2 and GLM-4.7-Flash: latent attention, and experts with shared ones."""
    return Traits()


def gpt_oss(spec: ModelSpec) -> Traits:
    """Describe gpt-oss: sinks, windows in every second layer, and experts with biases and a gate of their own."""
    return Traits(qkv_bias=spec.attention_bias, output_bias=spec.attention_bias, sinks=True)


_FAMILY_TRAITS: dict[str, Callable[[ModelSpec], Traits]] = {
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def traits_of(spec: ModelSpec) -> Traits:
    """Return the traits of the model's family. Raises UnsupportedModel for a family without code."""
    try:
        return _FAMILY_TRAITS[spec.family](spec)
    except KeyError as error:
        raise UnsupportedModel(f"architecture {spec.architecture!r} is not supported") from error
