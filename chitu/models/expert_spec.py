"""What config.json says about a mixture of experts: how many, who gets a token, which layers have them. No torch.

Called by `models/config.py`. Qwen3-MoE and DeepSeek-V2/V3 spell the same things differently and choose by other rules;
what neither this project nor `transformers` computes is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from chitu.errors import ConfigError, UnsupportedModel

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts in some layers; the others have the dense MLP of `intermediate_size`."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Of one expert."""
    layers: frozenset[int]
    """Those with experts."""
    scoring: Scoring = "softmax"
    is_normalised: bool = True
    """The weights of a token's experts are divided by their sum."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen from the best `top_groups` of `num_groups` neighbouring groups."""
    group_votes: int = 1
    """A group is as good as the sum of its best so many experts."""
    scale: float = 1.0
    """Of all weights."""
    has_choice_bias: bool = False
    """A bias per expert that counts for the choice but not for the weight (DeepSeek-V3)."""
    shared_intermediate_size: int = 0
    """Of an MLP that every token goes through beside its experts; 0: there is none."""


def read_expert_spec(config: dict[str, Any], family: str) -> ExpertSpec | None:
    """None for a family without experts. KeyError where a field is missing; ConfigError, UnsupportedModel."""
    reader = {"qwen3_moe": _qwen3_moe, "deepseek": _deepseek}.get(family)
    spec = reader(config) if reader is not None else None
    if spec is not None:
        _check(spec)
    return spec


def _qwen3_moe(config: dict[str, Any]) -> ExpertSpec:
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    layers = (layer for layer in range(int(config["num_hidden_layers"])) if layer not in dense)
    return ExpertSpec(
        num_experts=int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        layers=frozenset(layer for layer in layers if (layer + 1) % step == 0),
        is_normalised=bool(config.get("norm_topk_prob", False)),
    )


def _deepseek(config: dict[str, Any]) -> ExpertSpec:
    is_v3 = config["architectures"][0] == "DeepseekV3ForCausalLM"
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in (("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")):
        raise UnsupportedModel(f"topk_method {method!r} is not supported")
    is_normalised = bool(config.get("norm_topk_prob", is_v3))
    if is_normalised and not is_v3:
        raise UnsupportedModel("DeepSeek-V2 with norm_topk_prob is not supported")  # implementations differ
    if int(config.get("moe_layer_freq", 1)) != 1:
        raise UnsupportedModel(f"moe_layer_freq {config['moe_layer_freq']} is not supported (only 1)")
    width, is_grouped = int(config["moe_intermediate_size"]), method != "greedy"
    return ExpertSpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=width,
        layers=frozenset(range(int(config.get("first_k_dense_replace") or 0), int(config["num_hidden_layers"]))),
        scoring="sigmoid" if is_v3 else "softmax",
        is_normalised=is_normalised,
        num_groups=int(config.get("n_group") or 1) if is_grouped else 1,
        top_groups=int(config.get("topk_group") or 1) if is_grouped else 1,
        group_votes=2 if is_v3 else 1,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        has_choice_bias=is_v3,
        shared_intermediate_size=width * int(config.get("n_shared_experts") or 0),
    )


def _check(spec: ExpertSpec) -> None:
    if spec.num_experts % spec.num_groups or not 1 <= spec.top_groups <= spec.num_groups:
        raise ConfigError(f"{spec.num_experts} experts, the best {spec.top_groups} of {spec.num_groups} groups of them")
    among = spec.num_experts // spec.num_groups * spec.top_groups
    if not 1 <= spec.top_k <= among:
        raise ConfigError(f"{spec.top_k} experts a token, of {among}")
    if spec.num_groups > 1 and spec.num_experts // spec.num_groups < spec.group_votes:
        raise ConfigError(f"groups of {spec.num_experts // spec.num_groups} experts, judged by {spec.group_votes}")
