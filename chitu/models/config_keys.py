"""Which keys of a config.json are known, per architecture, and what rotary positions, latent attention and experts read
from theirs. No torch; called by `models/config.py`.

Owns the tables by which `models/config.py` reads a config completely. A key is used (`_USED`), accepted only with the
values that match what is computed here (`_ONLY`), or has no effect on the result, with the reason (`NO_EFFECT`). Any
other key is refused by name: transformers passes unknown keys on to its code, so their effect cannot be known. Defaults
are those of the config classes of `transformers`. A test compares them and mutates every key.

*Rotary positions*: a config has `rope_parameters`, or the older `rope_theta` and `rope_scaling`, or both if they agree:
`transformers` takes one dictionary whole and drops the other, and which one depends on its version. A key that the rope
type does not use is refused, because it would be ignored silently.

*Experts*: how many, how they are routed, which layers have them. Qwen3-MoE and DeepSeek-V2/V3 have different keys and
different routing rules. What neither this project nor `transformers` computes is refused here, by name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from chitu.errors import ConfigError, UnsupportedModel
from chitu.ops.routing_rule import RoutingRule

Kind = Literal[
    "count",
    "natural",
    "number",
    "positive",
    "flag",
    "text",
    "object",
    "layers",
    "names",
    "tokens",
    "patterns",
    "numbers",
]
REQUIRED: Final = "(required)"
"""Marks a key without default: sizes of tensors, which every published config has."""
MULTIMODAL = ("text_config", "vision_config", "audio_config", "language_config", "llm_config", "thinker_config")
LEAST_LIKENESS = 0.75
"""Likeness, 0 to 1, from which on a known key is named as what was meant."""
NO_EFFECT: dict[str, str] = {
    "names, versions and marks of the file's writer": """
        _name_or_path _commit_hash transformers_version model_type architectures auto_map tokenizer_class prefix
        unsloth_version unsloth_fixed is_llama_config transformers.js_config""",
    "training": """
        initializer_range attention_dropout router_aux_loss_coef aux_loss_alpha seq_aux output_router_logits
        pretraining_tp ep_size""",
    "transformers' own computation, or its outputs beside the logits": """
        use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss
        chunk_size_feed_forward _attn_implementation_autoset _flash_attn_2_enabled""",
    "encoders, classifiers, earlier versions": """
        is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder decoder_start_token_id
        finetuning_task id2label label2id num_labels problem_type classifier_dropout task_specific_params""",
    "sampling comes from the request, special tokens from the tokenizer": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
        top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
        bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
        forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens bos_token_id pad_token_id sep_token_id""",
    "lengths of the tokenizer, or of training": "max_sequence_length model_max_length",
    "a window over some layers; windows are refused": "max_window_layers",
}
"""Reason -> keys that have no effect in any architecture."""
_WITHOUT_EFFECT = frozenset(key for keys in NO_EFFECT.values() for key in keys.split())
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,)}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"sliding_window": (None,), "use_sliding_window": (False,)}
_LATENT_ONLY: dict[str, tuple[Any, ...]] = {"moe_layer_freq": (1,), "mlp_bias": (False,)}
_INDEXED_ONLY: dict[str, tuple[Any, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_DTYPE = {"torch_dtype": "dtype", "compression_config": "quantization_config"}
DICTIONARIES = ("rope_parameters", "rope_scaling")
TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that may also be at the top level of the config, with the same meaning as in the dictionaries."""


class NotByOwnCode(UnsupportedModel):
    """Our own code does not compute this value of `key`; the modules of transformers may (`model.code`)."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Key(NamedTuple):
    """A key that is used."""

    kind: Kind
    default: Any = REQUIRED
    nullable: bool = False


def _is_int(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


KINDS: dict[Kind, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number of at least 1", lambda value: _is_int(value, 1)),
    "natural": ("a whole number of at least 0", _is_int),
    "number": ("a number", _is_number),
    "positive": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "layers": ("a list of layers", lambda value: isinstance(value, list) and all(map(_is_int, value))),
    "names": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value)),
    "tokens": (
        "a token id or a list of them",
        lambda value: _is_int(value) or (isinstance(value, list) and all(map(_is_int, value))),
    ),
    "patterns": (
        "a text or a list of texts",
        lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value)),
    ),
    "numbers": (
        "a whole number or a list of them",
        lambda value: _is_int(value) or (isinstance(value, list) and all(map(_is_int, value))),
    ),
}


@dataclass(frozen=True, slots=True)
class Keys:
    """The known keys of one object."""

    used: Mapping[str, Key]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values with which a key is accepted; a missing key means the same."""
    no_effect: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative spelling -> the key."""

    def read(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a value for every used key. ConfigError or UnsupportedModel (for values of `only`) names the key."""
        named = dict(given)
        for alias in self.aliases.keys() & named.keys():
            key, value = self.aliases[alias], named.pop(alias)
            is_open = key in self.used and self.used[key].nullable and None in (value, named.get(key, value))
            if named.get(key, value) != value and not is_open:
                raise ConfigError(f"{where}: {key} is {named[key]!r}, but {alias}, which means the same, is {value!r}")
            named[key] = value if named.get(key) is None else named[key]
        for key, value in named.items():
            if key in self.only and value not in self.only[key]:
                values = ", ".join(repr(each) for each in self.only[key])
                raise NotByOwnCode(key, f"{where}: {key} {value!r} is not supported (only {values})")
            if key not in self.used and key not in self.only and key not in self.no_effect:
                raise ConfigError(self._unknown(key, where))
        return {key: value_of(named, key, wanted, where) for key, wanted in self.used.items()}

    def _unknown(self, key: str, where: str) -> str:
        if key in MULTIMODAL:
            return f"{where}: {key} belongs to a multimodal model, which is not supported; a text model has no such key"
        near = difflib.get_close_matches(key, [*self.used, *self.only, *self.aliases], n=1, cutoff=LEAST_LIKENESS)
        hint = f" (the nearest known one is {near[0]!r})" if near else ""
        return f"{where}: the key {key!r} is not known{hint}; remove it if the model computes the same without it"


def value_of(named: Mapping[str, Any], key: str, wanted: Key, where: str) -> Any:
    """Return the value of the key or its default. Raises ConfigError if it is missing or of the wrong kind."""
    if key not in named:
        if wanted.default == REQUIRED:
            raise ConfigError(f"{where} lacks {key!r}")
        return wanted.default
    value = named[key]
    words, is_right = KINDS[wanted.kind]
    if not (is_right(value) or (value is None and wanted.nullable)):
        raise ConfigError(f"{where}: {key} is {value!r}, not {words}")
    return value


_USED = {
    "vocab_size": Key("count"),
    "hidden_size": Key("count"),
    "intermediate_size": Key("count"),
    "num_hidden_layers": Key("count"),
    "num_attention_heads": Key("count"),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("flag", False),
    "layer_types": Key("names", None, nullable=True),
    "rope_parameters": Key("object", None, nullable=True),
    "rope_scaling": Key("object", None, nullable=True),
    "rope_theta": Key("positive", None),
    "partial_rotary_factor": Key("number", None),
    "original_max_position_embeddings": Key("count", None),
    "dtype": Key("text", None, nullable=True),
    "eos_token_id": Key("tokens", None, nullable=True),
    "quantization_config": Key("object", None, nullable=True),
}
_WINDOW = {"sliding_window": Key("count", 4096, nullable=True), "use_sliding_window": Key("flag", False)}
_OPTIONAL_HEAD_DIM = {"head_dim": Key("count", None, nullable=True)}
_LATENT = {
    "kv_lora_rank": Key("count"),
    "q_lora_rank": Key("count", nullable=True),
    "qk_rope_head_dim": Key("count"),
    "qk_nope_head_dim": Key("count"),
    "v_head_dim": Key("count"),
    "head_dim": Key("count", None),
    "qk_head_dim": Key("count", None),
    "attention_bias": Key("flag", False),
    "n_routed_experts": Key("count"),
    "moe_intermediate_size": Key("count"),
}
_INDEXED = {
    "q_lora_rank": Key("count"),
    "first_k_dense_replace": Key("natural", 3),
    "mlp_layer_types": Key("names", None, nullable=True),
    "n_shared_experts": Key("natural", 1),
    "num_experts_per_tok": Key("count", 8),
    "routed_scaling_factor": Key("number", 2.5),
    "norm_topk_prob": Key("flag", True),
    "num_nextn_predict_layers": Key("natural", 0),
    "index_topk": Key("count", 2048),
    "index_head_dim": Key("count", 128),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    module: str
    """Module of `chitu.models`."""
    model_types: tuple[str, ...]
    """Names by which transformers chooses its classes; those behind the first mean the same computation."""
    keys: Keys


def _architecture(
    module: str,
    model_type: str | tuple[str, ...],
    used: Mapping[str, Key],
    only: Mapping[str, tuple[Any, ...]],
    no_effect: frozenset[str] = frozenset(),
    **aliases: str,
) -> Architecture:
    keys = Keys({**_USED, **used}, {**_ONLY, **only}, _WITHOUT_EFFECT | no_effect, {**_DTYPE, **aliases})
    return Architecture(module, (model_type,) if isinstance(model_type, str) else model_type, keys)


ARCHITECTURES = {
    "LlamaForCausalLM": _architecture(
        "llama",
        "llama",
        {
            "max_position_embeddings": Key("count", 2048),
            "num_key_value_heads": Key("count", None, nullable=True),
            **_OPTIONAL_HEAD_DIM,
            "attention_bias": Key("flag", False),
            "mlp_bias": Key("flag", False),
        },
        _NO_WINDOW,
    ),
    "MistralForCausalLM": _architecture(
        "llama",
        "mistral",
        {
            "max_position_embeddings": Key("count", 131072),
            "num_key_value_heads": Key("count", 8),
            **_OPTIONAL_HEAD_DIM,
            "sliding_window": _WINDOW["sliding_window"],
        },
        _NO_BIAS,
        frozenset({"use_sliding_window"}),  # the window is whatever `sliding_window` is
    ),
    "Qwen2ForCausalLM": _architecture(
        "qwen2",
        "qwen2",
        {
            "max_position_embeddings": Key("count", 32768),
            "num_key_value_heads": Key("count", 32, nullable=True),
            **_OPTIONAL_HEAD_DIM,
            **_WINDOW,
        },
        {"mlp_bias": (False,)},
        frozenset({"attention_bias"}),  # q, k and v always have biases, the output projection never
    ),
    "Qwen3ForCausalLM": _architecture(
        "qwen3",
        "qwen3",
        {
            "max_position_embeddings": Key("count", 32768),
            "num_key_value_heads": Key("count", 32, nullable=True),
            "head_dim": Key("count", 128),
            "attention_bias": Key("flag", False),
            **_WINDOW,
        },
        {"mlp_bias": (False,)},
    ),
    "Qwen3MoeForCausalLM": _architecture(
        "qwen3_moe",
        "qwen3_moe",
        {
            "max_position_embeddings": Key("count", 32768),
            "num_key_value_heads": Key("count", 4),
            "head_dim": Key("count", None),
            "attention_bias": Key("flag", False),
            **_WINDOW,
            "num_experts": Key("count"),
            "moe_intermediate_size": Key("count"),
            "num_experts_per_tok": Key("count", 8),
            "norm_topk_prob": Key("flag", False),
            "decoder_sparse_step": Key("count", 1),
            "mlp_only_layers": Key("layers", None, nullable=True),
        },
        # The last three are in Qwen3-Coder; transformers does not read them.
        {
            "mlp_bias": (False,),
            "qkv_bias": (False,),
            "use_qk_norm": (True,),
            "shared_expert_intermediate_size": (0,),
        },
        num_local_experts="num_experts",
    ),
    "DeepseekV2ForCausalLM": _architecture(
        "deepseek",
        "deepseek_v2",
        {
            **_LATENT,
            "max_position_embeddings": Key("count", 2048),
            "num_key_value_heads": Key("count", None, nullable=True),
            "first_k_dense_replace": Key("natural", 0),
            "n_shared_experts": Key("natural", 2),
            "num_experts_per_tok": Key("count"),
            "routed_scaling_factor": Key("number", 1.0),
            "topk_method": Key("text", "greedy"),
            "n_group": Key("count", None, nullable=True),
            "topk_group": Key("count", None, nullable=True),
        },
        # norm_topk_prob true is refused: implementations of DeepSeek-V2 differ.
        {**_LATENT_ONLY, "norm_topk_prob": (False, None), "scoring_func": ("softmax",), "rope_interleave": (True,)},
        num_experts="n_routed_experts",
    ),
    "DeepseekV3ForCausalLM": _architecture(
        "deepseek",
        ("deepseek_v3", "kimi_k2"),
        {
            **_LATENT,
            "max_position_embeddings": Key("count", 4096),
            "num_key_value_heads": Key("count", 128, nullable=True),
            "first_k_dense_replace": Key("natural", 3),
            "n_shared_experts": Key("natural", 1),
            "num_experts_per_tok": Key("count", 8),
            "routed_scaling_factor": Key("number", 2.5),
            "norm_topk_prob": Key("flag", True, nullable=True),
            "n_group": Key("count", 8),
            "topk_group": Key("count", 4),
            "rope_interleave": Key("flag", True, nullable=True),
            # Unlike in transformers, layers behind the last one are refused unless the config declares them.
            "num_nextn_predict_layers": Key("natural", 0),
        },
        {**_LATENT_ONLY, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        num_local_experts="n_routed_experts",
        num_mtp_layers="num_nextn_predict_layers",
    ),
    "Glm4MoeLiteForCausalLM": _architecture(
        "deepseek",
        "glm4_moe_lite",
        {
            **_LATENT,
            "max_position_embeddings": Key("count", 202752),
            "num_key_value_heads": Key("count", 20, nullable=True),
            "rms_norm_eps": Key("number", 1e-5),
            "mlp_layer_types": Key("names", None, nullable=True),
            "n_shared_experts": Key("natural", 1),
            "num_experts_per_tok": Key("count", 4),
            "routed_scaling_factor": Key("number", 1.8),
            "norm_topk_prob": Key("flag", True),
            "n_group": Key("count", 1),
            "topk_group": Key("count", 1),
            "rope_interleave": Key("flag", True, nullable=True),
            "num_nextn_predict_layers": Key("natural", 0),
        },
        # transformers does not read first_k_dense_replace: without mlp_layer_types one layer has no experts.
        {
            **_LATENT_ONLY,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "first_k_dense_replace": (1,),
        },
        num_local_experts="n_routed_experts",
    ),
    "DeepseekV32ForCausalLM": _architecture(
        "deepseek",
        "deepseek_v32",
        {
            **_LATENT,
            **_INDEXED,
            "max_position_embeddings": Key("count", 163840),
            "num_key_value_heads": Key("count", 128, nullable=True),
            "index_n_heads": Key("count", 64),
            "n_group": Key("count", 8),
            "topk_group": Key("count", 4),
        },
        {**_LATENT_ONLY, **_INDEXED_ONLY, "rope_interleave": (True, None)},
        num_local_experts="n_routed_experts",
        num_experts="n_routed_experts",
    ),
    "GlmMoeDsaForCausalLM": _architecture(
        "deepseek",
        "glm_moe_dsa",
        {
            **_LATENT,
            **_INDEXED,
            "max_position_embeddings": Key("count", 202752),
            "num_key_value_heads": Key("count", 64, nullable=True),
            "rms_norm_eps": Key("number", 1e-5),
            "index_n_heads": Key("count", 32),
            "n_group": Key("count", 1),
            "topk_group": Key("count", 1),
            "indexer_types": Key("names", None, nullable=True),
            "index_topk_pattern": Key("text", None, nullable=True),
            "index_topk_freq": Key("count", 1),
            "index_skip_topk_offset": Key("natural", 2),
        },
        {
            **_LATENT_ONLY,
            **_INDEXED_ONLY,
            "rope_interleave": (True, None),
            "indexer_rope_interleave": (True, None),
        },
        num_local_experts="n_routed_experts",
        num_experts="n_routed_experts",
    ),
}
"""Name in config.json -> its module, model_type and keys."""


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


def read_expert_spec(values: Mapping[str, Any], architecture: str, where: str) -> ExpertSpec | None:
    """Return the spec, or None without experts. `values`: of the whole config. Raises ConfigError, UnsupportedModel."""
    reader = {
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "DeepseekV2ForCausalLM": _v2,
        "DeepseekV3ForCausalLM": _v3,
        "Glm4MoeLiteForCausalLM": _v3_by_layer,
        "DeepseekV32ForCausalLM": _v3_by_layer,
        "GlmMoeDsaForCausalLM": _v3_by_layer,
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
