"""Which keys of a config.json are known, per architecture. No torch; called by `models/config.py`.

Owns the tables by which `models/config.py` reads a config completely. A key is used (`_USED`), accepted only with the
values that match what is computed here (`_ONLY`), or has no effect on the result, with the reason (`NO_EFFECT`). Any
other key is refused by name, unless the caller's rule says that transformers never reads it
(`generic/key_reads.py`). Defaults are those of the config classes of `transformers`. A test compares them and mutates
every key.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from chitu.errors import ConfigError, UnsupportedModel

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
"""Likeness, 0 to 1, from which on a known key is named as what was meant by one that is refused."""
TYPO_LIKENESS = 0.85
"""The same for one that is ignored."""
NO_EFFECT: dict[str, str] = {
    "names, versions and marks of the file's writer": """
        _name_or_path _commit_hash transformers_version model_type architectures auto_map tokenizer_class prefix
        name_or_path unsloth_version unsloth_fixed is_llama_config transformers.js_config""",
    "training": """
        initializer_range attention_dropout router_aux_loss_coef aux_loss_alpha seq_aux output_router_logits
        pretraining_tp ep_size gradient_checkpointing""",
    "transformers' own computation, or its outputs beside the logits": """
        use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss
        chunk_size_feed_forward _attn_implementation_autoset _flash_attn_2_enabled _attn_implementation_internal
        _experts_implementation_internal keys_to_ignore_at_inference tie_last_hidden_states""",
    "encoders, classifiers, earlier versions": """
        is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder decoder_start_token_id
        finetuning_task id2label label2id num_labels problem_type classifier_dropout hidden_dropout
        task_specific_params""",
    "sampling comes from the request or generation_config.json, special tokens from the tokenizer": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
        top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
        bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
        forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens bos_token_id pad_token_id sep_token_id mask_token_id""",
    "lengths of the tokenizer, or of training": "max_sequence_length model_max_length",
    "a window over some layers; windows are refused": "max_window_layers",
}
"""Reason -> keys that have no effect in any architecture."""
_WITHOUT_EFFECT = frozenset(key for keys in NO_EFFECT.values() for key in keys.split())
_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
_ONLY: dict[str, tuple[Any, ...]] = {
    "attn_implementation": _ATTENTIONS,  # how transformers computes the same
    "_attn_implementation": _ATTENTIONS,
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
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


FindIdle = Callable[[Mapping[str, str]], Collection[str]]
"""Returns those of the unknown keys that have no effect. Each comes with a word of what it may have been meant for."""


def _none(unknown: Mapping[str, str]) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Keys:
    """The known keys of one object."""

    used: Mapping[str, Key]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values with which a key is accepted; a missing key means the same."""
    no_effect: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative spelling -> the key."""

    def read(self, given: Mapping[str, Any], where: str, find_idle: FindIdle = _none) -> dict[str, Any]:
        """Return a value for every used key. `find_idle` says which unknown keys have no effect. ConfigError names any
        other one, UnsupportedModel a value that `only` lacks."""
        named = dict(given)
        for alias in self.aliases.keys() & named.keys():
            key, value = self.aliases[alias], named.pop(alias)
            is_open = key in self.used and self.used[key].nullable and None in (value, named.get(key, value))
            if named.get(key, value) != value and not is_open:
                raise ConfigError(f"{where}: {key} is {named[key]!r}, but {alias}, which means the same, is {value!r}")
            named[key] = value if named.get(key) is None else named[key]
        unknown = [key for key in named if key not in self.used and key not in self.only and key not in self.no_effect]
        if unknown:
            idle = find_idle({key: self._nearest(key, TYPO_LIKENESS) for key in unknown})
            if others := [key for key in unknown if key not in idle]:
                raise ConfigError(self._unknown(others[0], where))
        for key, value in named.items():
            if key in self.only and value not in self.only[key]:
                values = ", ".join(repr(each) for each in self.only[key])
                raise NotByOwnCode(key, f"{where}: {key} {value!r} is not supported (only {values})")
        return {key: value_of(named, key, wanted, where) for key, wanted in self.used.items()}

    def _nearest(self, key: str, likeness: float = LEAST_LIKENESS) -> str:
        """Return the known key that was probably meant, with some words; empty if there is none."""
        near = difflib.get_close_matches(key, [*self.used, *self.only, *self.aliases], n=1, cutoff=likeness)
        return f" (the nearest known one is {near[0]!r})" if near else ""

    def _unknown(self, key: str, where: str) -> str:
        if key in MULTIMODAL:
            return f"{where}: {key} belongs to a multimodal model, which is not supported; a text model has no such key"
        hint = self._nearest(key)
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
    rope_theta: float | None = None
    """Default of one whose rope is not the usual one if the config does not say it."""


def _architecture(
    module: str,
    model_type: str | tuple[str, ...],
    used: Mapping[str, Key],
    only: Mapping[str, tuple[Any, ...]],
    no_effect: frozenset[str] = frozenset(),
    rope_theta: float | None = None,
    **aliases: str,
) -> Architecture:
    keys = Keys({**_USED, **used}, {**_ONLY, **only}, _WITHOUT_EFFECT | no_effect, {**_DTYPE, **aliases})
    return Architecture(module, (model_type,) if isinstance(model_type, str) else model_type, keys, rope_theta)


class TextDecoder(NamedTuple):
    """The decoder within a model for images, which our own code computes alone."""

    model_type: str
    """Of the whole model. `text_config` describes the decoder as a model of its own."""
    prefix: str
    """Begin of the names of its tensors, before those that it has alone."""
    keys: Keys
    """Beside `text_config`. Those that are used may be in it, too, with the same value."""


TEXT_DECODERS = {
    "KimiK25ForConditionalGeneration": TextDecoder(
        "kimi_k25",
        "language_model.",
        Keys(
            {
                "text_config": Key("object"),
                "tie_word_embeddings": Key("flag", None, nullable=True),
                "eos_token_id": Key("tokens", None, nullable=True),
            },
            _ONLY,
            _WITHOUT_EFFECT
            | {"dtype", "torch_dtype", "vision_config", "ignore_index", "media_placeholder_token_id"}
            | {"use_unified_vision_chunk", "video_placeholder"},
        ),
    )
}
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
    "GptOssForCausalLM": _architecture(
        "gpt_oss",
        "gpt_oss",
        {
            "max_position_embeddings": Key("count", 131072),
            "num_key_value_heads": Key("count", 8),
            "head_dim": Key("count", 64),
            "rms_norm_eps": Key("number", 1e-5),
            "attention_bias": Key("flag", True),
            "sliding_window": Key("count", 128, nullable=True),
            "num_local_experts": Key("count", 128),
            "num_experts_per_tok": Key("count", 4),
            "swiglu_alpha": Key("number", 1.702),
            "swiglu_limit": Key("number", 7.0),
        },
        {"mlp_bias": (False,)},
        frozenset({"experts_per_token", "initial_context_length"}),  # other names of keys, which nothing reads
        rope_theta=150_000.0,
        num_experts="num_local_experts",
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
