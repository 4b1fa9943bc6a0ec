"""Reads a mixture of experts from config.json: how many, how they are routed, which layers have them. No torch.

Called by `models/config.py`. Qwen3-MoE and DeepSeek-V2/V3 have different keys and different routing rules. What neither
this project nor `transformers` computes is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chitu.errors import ConfigError, UnsupportedModel

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts in some layers; the other layers have the model's dense MLP."""

    num_experts: int
    top_k: int
    """Number of experts of each token."""
    intermediate_size: int
    """Inner size of one expert."""
    layers: frozenset[int]
    """Layers with experts."""
    scoring: Scoring = "softmax"
    is_normalised: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    num_groups: int = 1
    top_groups: int = 1
    """Number of best groups, of `num_groups` groups of consecutive experts, from which experts are chosen."""
    group_votes: int = 1
    """Number of best experts whose scores add up to their group's score."""
    scale: float = 1.0
    """Factor of all weights."""
    has_choice_bias: bool = False
    """Whether each expert has a bias that counts for the choice but not for the weight (DeepSeek-V3)."""
    shared_intermediate_size: int = 0
    """Inner size of an MLP that every token passes besides its experts; 0 if there is none."""


def read_expert_spec(values: Mapping[str, Any], architecture: str, where: str) -> ExpertSpec | None:
    """Return the spec, or None without experts. `values`: of the whole config. Raises ConfigError, UnsupportedModel."""
    reader = {"Qwen3MoeForCausalLM": _qwen3_moe, "DeepseekV2ForCausalLM": _v2, "DeepseekV3ForCausalLM": _v3}.get(
        architecture
    )
    spec = reader(values, where) if reader is not None else None
    if spec is not None:
        _check(spec, where)
    return spec


def _qwen3_moe(values: Mapping[str, Any], where: str) -> ExpertSpec:
    step, dense = values["decoder_sparse_step"], set(values["mlp_only_layers"] or ())
    layers = (layer for layer in range(values["num_hidden_layers"]) if layer not in dense)
    return ExpertSpec(
        num_experts=values["num_experts"],
        top_k=values["num_experts_per_tok"],
        intermediate_size=values["moe_intermediate_size"],
        layers=frozenset(layer for layer in layers if (layer + 1) % step == 0),
        is_normalised=values["norm_topk_prob"],
    )


def _v2(values: Mapping[str, Any], where: str) -> ExpertSpec:
    method, groups = values["topk_method"], (values["n_group"], values["topk_group"])
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"{where}: topk_method {method!r} is not supported")
    if method == "greedy":
        groups = 1, 1
    elif None in groups:
        raise ConfigError(f"{where}: topk_method {method!r} needs n_group and topk_group")
    return _deepseek(values, groups, is_normalised=False)


def _v3(values: Mapping[str, Any], where: str) -> ExpertSpec:
    return _deepseek(
        values,
        (values["n_group"], values["topk_group"]),
        scoring="sigmoid",
        is_normalised=bool(values["norm_topk_prob"]),
        group_votes=2,
        has_choice_bias=True,
    )


def _deepseek(values: Mapping[str, Any], groups: tuple[int, int], **of_version: Any) -> ExpertSpec:
    width = values["moe_intermediate_size"]
    return ExpertSpec(
        num_experts=values["n_routed_experts"],
        top_k=values["num_experts_per_tok"],
        intermediate_size=width,
        layers=frozenset(range(values["first_k_dense_replace"], values["num_hidden_layers"])),
        num_groups=groups[0],
        top_groups=groups[1],
        scale=float(values["routed_scaling_factor"]),
        shared_intermediate_size=width * values["n_shared_experts"],
        **of_version,
    )


def _check(spec: ExpertSpec, where: str) -> None:
    grouped = f"{spec.num_experts} experts (n_routed_experts) in {spec.num_groups} groups (n_group)"
    if spec.num_experts % spec.num_groups or not 1 <= spec.top_groups <= spec.num_groups:
        raise ConfigError(f"{where}: {grouped}, of which the best {spec.top_groups} (topk_group)")
    of_group = spec.num_experts // spec.num_groups
    if not 1 <= spec.top_k <= of_group * spec.top_groups:
        best = f", of the best {spec.top_groups} groups (topk_group)" if spec.num_groups > 1 else ""
        raise ConfigError(f"{where}: num_experts_per_tok is {spec.top_k}: {grouped}{best}")
    if spec.num_groups > 1 and of_group < spec.group_votes:
        raise ConfigError(f"{where}: {grouped}, each judged by {spec.group_votes} experts")
