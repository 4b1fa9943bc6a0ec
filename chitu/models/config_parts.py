"""What rotary positions, latent attention, its index and experts read from the keys of a config.json. No torch.

*Rotary positions*: a config has `rope_parameters`, or the older `rope_theta` and `rope_scaling`, or both if they agree:
`transformers` takes one dictionary whole and drops the other, and which one depends on its version. A key of another
rope type is refused, because it would be ignored silently.

*Experts*: how many, how they are routed, which layers have them. Qwen3-MoE and DeepSeek-V2/V3 have different keys and
different routing rules. What neither this project nor `transformers` computes is refused here, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_keys import DICTIONARIES, TOP_LEVEL, FindIdle, Key, Keys, NotByOwnCode
from chitu.ops.routing_rule import ClampedGate, RoutingRule

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


def read_rope(
    values: Mapping[str, Any], max_positions: int, where: str, find_idle: FindIdle, theta: float | None = None
) -> RopeSpec:
    """Return the spec. `values`: of the whole config; `find_idle` as in `Keys.read`; `theta`: the default of an
    architecture that must say which rope it has. Raises ConfigError or UnsupportedModel, with the key's name."""
    names = [name for name in DICTIONARIES if values[name]] or [DICTIONARIES[0]]
    if theta is not None and not values[names[0]]:
        raise NotByOwnCode("rope_parameters", f"{where}: without {names[0]} this architecture is not supported")
    specs = [_read(values, name, max_positions, where, find_idle, theta) for name in names]
    if specs[0] != specs[-1]:
        raise ConfigError(
            f"{where}: rope_parameters and rope_scaling contradict each other; keep one of them (rope_parameters, with "
            "rope_theta in it, if transformers 5 wrote the file)"
        )
    return specs[0]


def _read(
    values: Mapping[str, Any], name: str, max_positions: int, where: str, find_idle: FindIdle, theta: float | None
) -> RopeSpec:
    given = dict(values[name] or {})
    for key in TOP_LEVEL:
        value = values[key]
        if value is not None and given.setdefault(key, value) != value:
            raise ConfigError(f"{where}: {key} is {value!r}, but {name}.{key} is {given[key]!r}; keep one of them")
    if theta is not None:
        given.setdefault("rope_theta", theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: {name}.rope_type is {kind!r}, not a text")
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise NotByOwnCode("rope_parameters", f"{where}: {name}.rope_type {kind!r} is not supported (known: {known})")
    keys = Keys(
        used={**_ANY, **ROPE_TYPES[kind]},
        only={"partial_rotary_factor": (1.0,)},
        no_effect=frozenset({"finetuned"}),  # a mark in configs of models that were fine-tuned with it
        aliases={"type": "rope_type"},
    )
    rope = keys.read(given, f"{where}: {name} (rope_type {kind!r})", find_idle)
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


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Sizes of the index by which rows of sparse attention choose positions. A token has `head_dim` numbers more in the
    cache of a layer with an index."""

    num_heads: int
    head_dim: int
    top_k: int
    """Positions that a row attends to at most."""
    is_interleaved: bool
    """As for the latent, of the index."""
    layers: frozenset[int]
    """Layers with an index. The others attend to what the layer before them does."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of latent attention. The cache holds `kv_rank + rope_dim` numbers a token, for any number of heads."""

    q_rank: int | None
    """Rank of the projection of q; None if one matrix projects q."""
    kv_rank: int
    rope_dim: int
    """Size of the rotated part of a head; all heads share that of the key."""
    nope_dim: int
    """Size of the part of a head that is not rotated."""
    value_dim: int
    is_interleaved: bool
    """Whether the checkpoint stores the two coordinates of a rotation side by side, not half a head apart."""
    softmax_scale: float
    index: IndexSpec | None = None
    """None if rows attend to all positions."""


def read_latent_spec(values: Mapping[str, Any], rope: RopeSpec, where: str) -> LatentSpec:
    """Return the spec. `values`: those of the whole config. Raises ConfigError if a key contradicts the other keys."""
    nope_dim, rope_dim = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    for key, wanted, by in (
        ("head_dim", rope_dim, "qk_rope_head_dim"),
        ("qk_head_dim", nope_dim + rope_dim, "qk_nope_head_dim and qk_rope_head_dim"),
        ("num_key_value_heads", values["num_attention_heads"], "num_attention_heads"),
    ):
        if values[key] not in (None, wanted):
            raise ConfigError(f"{where}: {key} is {values[key]}, by {by} it is {wanted}")
    return LatentSpec(
        q_rank=values["q_lora_rank"],
        kv_rank=values["kv_lora_rank"],
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=values["v_head_dim"],
        is_interleaved=bool(values.get("rope_interleave", True)),
        softmax_scale=float((nope_dim + rope_dim) ** -0.5) * rope.score_factor,
        index=_index_spec(values, where) if "index_topk" in values else None,
    )


def _index_spec(values: Mapping[str, Any], where: str) -> IndexSpec:
    num_layers, head_dim = values["num_hidden_layers"], values["index_head_dim"]
    if head_dim < values["qk_rope_head_dim"]:
        raise ConfigError(f"{where}: index_head_dim ({head_dim}) is below qk_rope_head_dim")
    is_glm = "indexer_types" in values
    kinds = values["indexer_types"] if is_glm else None
    if kinds is None and is_glm and values["index_topk_pattern"] is not None:
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in values["index_topk_pattern"]]
    if kinds is None:
        every, offset = (values["index_topk_freq"], values["index_skip_topk_offset"]) if is_glm else (1, 0)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
    if len(kinds) != num_layers or not {"full", "shared"}.issuperset(kinds) or kinds[0] != "full":
        raise ConfigError(
            f"{where}: indexer_types is {kinds}, not 'full' or 'shared' for each of {num_layers} layers, 'full' first"
        )
    return IndexSpec(
        num_heads=values["index_n_heads"],
        head_dim=head_dim,
        top_k=values["index_topk"],
        is_interleaved=is_glm,
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "full"),
    )


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
    gate: ClampedGate | None = None
    """Gate of the experts; None: silu."""
    is_joined: bool = False
    """Whether a layer's experts are in one tensor and have biases, as its router has (`joined_experts.py`)."""


def read_expert_spec(values: Mapping[str, Any], architecture: str, where: str) -> ExpertSpec | None:
    """Return the spec, or None without experts. `values`: of the whole config. Raises ConfigError, UnsupportedModel."""
    reader = {
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "DeepseekV2ForCausalLM": _v2,
        "DeepseekV3ForCausalLM": _v3,
        "Glm4MoeLiteForCausalLM": _v3_by_layer,
        "DeepseekV32ForCausalLM": _v3_by_layer,
        "GlmMoeDsaForCausalLM": _v3_by_layer,
        "GptOssForCausalLM": _gpt_oss,
    }.get(architecture)
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


def _gpt_oss(values: Mapping[str, Any], where: str) -> ExpertSpec:
    return ExpertSpec(
        num_experts=values["num_local_experts"],
        rule=RoutingRule(values["num_experts_per_tok"]),  # a softmax over the chosen logits is that over all, normed
        intermediate_size=values["intermediate_size"],
        layers=frozenset(range(values["num_hidden_layers"])),
        gate=ClampedGate(float(values["swiglu_alpha"]), float(values["swiglu_limit"])),
        is_joined=True,
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


def _v3_by_layer(values: Mapping[str, Any], where: str) -> ExpertSpec:
    num_layers = values["num_hidden_layers"]
    kinds = values["mlp_layer_types"]
    if kinds is None:
        num_dense = min(values.get("first_k_dense_replace", 1), num_layers)
        kinds = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if len(kinds) != num_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise ConfigError(
            f"{where}: mlp_layer_types is {kinds}, not 'dense' or 'sparse' for each of {num_layers} layers"
        )
    spec = _v3({"first_k_dense_replace": 1, **values}, where)
    return replace(spec, layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse"))


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
