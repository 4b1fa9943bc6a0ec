"""Reads a mixture of experts from config.json: how many, how they are routed, which layers have them. No torch.

Called by `models/config.py`. Qwen3-MoE and DeepSeek-V2/V3 have different keys and different routing rules. What neither
this project nor `transformers` computes is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chitu.errors import ConfigError, UnsupportedModel
from chitu.ops.routing_rule import RoutingRule


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts in some layers; the other layers have the model's dense MLP."""

    num_experts: int
    rule: RoutingRule
    """How each token gets its experts."""
    intermediate_size: int
    """Inner size of one expert."""
    layers: frozenset[int]
    """Layers with experts."""
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
        rule=RoutingRule(values["num_experts_per_tok"], is_normalised=values["norm_topk_prob"]),
        intermediate_size=values["moe_intermediate_size"],
        layers=frozenset(layer for layer in layers if (layer + 1) % step == 0),
    )


def _v2(values: Mapping[str, Any], where: str) -> ExpertSpec:
    method, groups = values["topk_method"], (values["n_group"], values["topk_group"])
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"{where}: topk_method {method!r} is not supported")
    if method == "greedy":
        groups = 1, 1
    elif None in groups:
        raise ConfigError(f"{where}: topk_method {method!r} needs n_group and topk_group")
    return _deepseek(values, groups, has_choice_bias=False, is_normalised=False)


def _v3(values: Mapping[str, Any], where: str) -> ExpertSpec:
    normalised, groups = bool(values["norm_topk_prob"]), (values["n_group"], values["topk_group"])
    return _deepseek(values, groups, has_choice_bias=True, scoring="sigmoid", is_normalised=normalised, group_votes=2)


def _deepseek(
    values: Mapping[str, Any], groups: tuple[int, int], *, has_choice_bias: bool, **of_version: Any
) -> ExpertSpec:
    width, scale = values["moe_intermediate_size"], float(values["routed_scaling_factor"])
    return ExpertSpec(
        num_experts=values["n_routed_experts"],
        rule=RoutingRule(values["num_experts_per_tok"], *groups, scale=scale, **of_version),
        intermediate_size=width,
        layers=frozenset(range(values["first_k_dense_replace"], values["num_hidden_layers"])),
        has_choice_bias=has_choice_bias,
        shared_intermediate_size=width * values["n_shared_experts"],
    )


def _check(spec: ExpertSpec, where: str) -> None:
    rule = spec.rule
    grouped = f"{spec.num_experts} experts (n_routed_experts) in {rule.num_groups} groups (n_group)"
    if spec.num_experts % rule.num_groups or not 1 <= rule.top_groups <= rule.num_groups:
        raise ConfigError(f"{where}: {grouped}, of which the best {rule.top_groups} (topk_group)")
    of_group = spec.num_experts // rule.num_groups
    if not 1 <= rule.top_k <= of_group * rule.top_groups:
        best = f", of the best {rule.top_groups} groups (topk_group)" if rule.num_groups > 1 else ""
        raise ConfigError(f"{where}: num_experts_per_tok is {rule.top_k}: {grouped}{best}")
    if rule.num_groups > 1 and of_group < rule.group_votes:
        raise ConfigError(f"{where}: {grouped}, each judged by {rule.group_votes} experts")
