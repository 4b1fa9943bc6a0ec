"""The config.json and generation_config.json of a GGUF file, from its metadata. No torch.

Every key of the architecture is used or refused by name, as those of a config.json are: what llama.cpp computes by an
unknown key cannot be known. What the metadata lacks, because llama.cpp has it in its code, is what the published
checkpoints of the architecture have. The aim is the config of the checkpoint that the file was made of, also where
transformers leaves out what a file says (factors of the rope).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_keys import KINDS, REQUIRED, Kind
from chitu.models.gguf import GgufHeader, TensorPlace, shown
from chitu.models.gguf_names import ROPE_FACTORS, architecture_of

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LOW_FACTOR, HIGH_FACTOR = 1.0, 4.0
"""Of the rope of every published Llama 3."""
FACTOR_ERROR = 1e-4
NO_EFFECT = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "vocab_size")
"""Keys that say nothing of the computation, or what tensors say too. A scaling that needs one reads it."""
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>",
)  # fmt: skip
"""Special tokens at which llama.cpp ends a text, whatever the metadata say."""
HARMONY_ENDS, HARMONY_MIDDLE = ("<|return|>", "<|call|>"), "<|end|>"
"""Beside the first two, `<|end|>` ends a message and not the text."""
_OF_LAYER, _OF_EXPERTS = re.compile(r"blk\.(\d{1,6})\."), re.compile(r"_exps\.(weight|bias)$")
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Keys of `general.sampling` that files have of late -> those of generation_config.json."""
CONTROL = 3
"""Type of a special token."""


class _Metadata:
    """The keys of the architecture; `finish` refuses those that nothing asked for."""

    def __init__(self, headers: Sequence[GgufHeader]) -> None:
        header = headers[0]
        self.architecture, self.where = architecture_of(header), f"model.path: {header.file}"
        self.all = header.metadata
        self.tensors: dict[str, tuple[GgufHeader, TensorPlace]] = {
            name: (each, place) for each in headers for name, place in each.tensors.items()
        }
        self._prefix = f"{self.architecture}."
        self._left = {key for key in self.all if key.startswith(self._prefix)}

    def take(self, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """Return the value of a key, as the shortest number of its float32 if it is one."""
        name = self._prefix + key
        self._left.discard(name)
        value = _value(self.all, name, kind, default, self.where)
        return _shortest(value) if isinstance(value, float) else value

    def only(self, key: str, *values: Any) -> None:
        """Refuse a key, if it is there, unless it has one of these values."""
        self._left.discard(self._prefix + key)
        value = self.all.get(self._prefix + key, values[0])
        if value not in values:
            raise UnsupportedModel(
                f"{self.where}: {self._prefix}{key} {shown(value)} is not supported (only {values[0]!r})"
            )

    def has(self, key: str) -> bool:
        return self._prefix + key in self.all

    def finish(self) -> None:
        left = sorted(self._left - {self._prefix + key for key in NO_EFFECT})
        if left:
            raise UnsupportedModel(
                f"{self.where}: the key {left[0]!r} is not known here"
                + (f", nor are {len(left) - 1} others" if len(left) > 1 else "")
            )


def _value(metadata: Mapping[str, Any], key: str, kind: Kind, default: Any, where: str) -> Any:
    value = metadata.get(key, default)
    words, is_right = KINDS[kind]
    if key in metadata and not is_right(value):
        raise ConfigError(f"{where}: {key} is {shown(value)}, not {words}")
    if key not in metadata and default == REQUIRED:
        raise ConfigError(f"{where} lacks {key!r}")
    return value


def _shortest(value: float) -> float:
    """Return the shortest decimal number that has the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value))) if math.isfinite(value) and float(np.float32(value)) == value else value


def config_of(headers: Sequence[GgufHeader]) -> dict[str, Any]:
    """Return the config.json of a model's files. Raises ConfigError for keys that are missing or contradict each other,
    UnsupportedModel for what is not known here."""
    data = _Metadata(headers)
    config = {**_common(data), **_FAMILIES[data.architecture](data)}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if hidden % heads and not data.has("attention.key_length"):
        raise ConfigError(f"{data.where}: attention.head_count is {heads}, which does not divide {hidden}")
    config.setdefault("head_dim", _head_dim(data, config))
    if "rope_parameters" not in config:
        config["rope_parameters"] = _rope(data, config["head_dim"])
    data.finish()
    _require_whole(data, config)
    return config


def _require_whole(data: _Metadata, config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless there are tensors of each layer and expert that the config counts."""
    layers = {int(found[1]) for name in data.tensors if (found := _OF_LAYER.match(name))}
    if len(layers) != config["num_hidden_layers"] or max(layers) != len(layers) - 1:
        raise ConfigError(
            f"{data.where}: block_count is {config['num_hidden_layers']}, but there are tensors of {len(layers)} layers"
        )
    wanted = config.get("num_experts", config.get("num_local_experts"))
    for name, (_, place) in data.tensors.items():
        if wanted is not None and _OF_EXPERTS.search(name) and place.shape[0] != wanted:
            raise ConfigError(f"{data.where}: expert_count is {wanted}, but {name!r} has {place.shape[0]} experts")


def _common(data: _Metadata) -> dict[str, Any]:
    """Return what every architecture has."""
    if EMBEDDING not in data.tensors or len(data.tensors[EMBEDDING][1].shape) != 2:
        raise ConfigError(f"{data.where} has no matrix {EMBEDDING!r}")
    data.only("attention.causal", True)
    data.only("pooling_type", 0)
    matrices = [place.dtype for _, place in data.tensors.values() if len(place.shape) > 1]
    config: dict[str, Any] = {
        "dtype": "float32" if all(dtype == "F32" for dtype in matrices) else "bfloat16",
        "vocab_size": data.tensors[EMBEDDING][1].shape[0],
        "hidden_size": data.take("embedding_length", "count"),
        "num_hidden_layers": data.take("block_count", "count"),
        "num_attention_heads": data.take("attention.head_count", "count"),
        "max_position_embeddings": data.take("context_length", "count"),
        "rms_norm_eps": data.take("attention.layer_norm_rms_epsilon", "positive"),
        "tie_word_embeddings": HEAD not in data.tensors,
    }
    columns = data.tensors[EMBEDDING][1].shape[1]
    if columns != config["hidden_size"]:
        raise ConfigError(f"{data.where}: embedding_length is {config['hidden_size']}, by {EMBEDDING} it is {columns}")
    config["num_key_value_heads"] = data.take("attention.head_count_kv", "count", config["num_attention_heads"])
    for key, ours in (("bos", "bos"), ("eos", "eos")):
        name = f"tokenizer.ggml.{key}_token_id"
        if name in data.all:
            config[f"{ours}_token_id"] = _value(data.all, name, "natural", REQUIRED, data.where)
    return config


def _head_dim(data: _Metadata, config: Mapping[str, Any]) -> int:
    whole: int = data.take("attention.key_length", "count", config["hidden_size"] // config["num_attention_heads"])
    alike = ("attention.value_length", "rope.dimension_count")
    for key in (*alike, *(f"{key}_swa" for key in ("attention.key_length", *alike))):
        value = data.take(key, "count", whole)
        if value != whole:
            raise UnsupportedModel(
                f"{data.where}: {key} is {value}, but attention.key_length (by default embedding_length / head_count) "
                f"is {whole}: not supported"
            )
    return whole


def _has_bias(data: _Metadata, part: str) -> bool:
    return f"blk.0.{part}.bias" in data.tensors


def _dense(data: _Metadata) -> dict[str, Any]:
    for key in ("expert_count", "expert_used_count"):
        data.only(key, 0)
    return {"intermediate_size": data.take("feed_forward_length", "count")}


def _llama(data: _Metadata) -> dict[str, Any]:
    data.only("tensor_data_layout", "Meta AI original pth")
    if data.take("expert_count", "natural", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            "sliding_window": None,
            "intermediate_size": data.take("feed_forward_length", "count"),
            "num_local_experts": data.take("expert_count", "count"),
            "num_experts_per_tok": data.take("expert_used_count", "count"),
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": _has_bias(data, "attn_q"),
        "mlp_bias": _has_bias(data, "ffn_gate"),
        **_dense(data),
    }


def _qwen2(data: _Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **_dense(data)}


def _qwen3(data: _Metadata) -> dict[str, Any]:
    bias = _has_bias(data, "attn_q")
    ours = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": bias}
    return {**ours, **_dense(data)}


def _qwen3moe(data: _Metadata) -> dict[str, Any]:
    data.only("expert_gating_func", 1)
    data.only("expert_weights_scale", 1.0, 0.0)
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        data.only(key, 0)
    inner = data.take("expert_feed_forward_length", "count")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "attention_bias": _has_bias(data, "attn_q"),
        "intermediate_size": data.take("feed_forward_length", "count", inner),
        "moe_intermediate_size": inner,
        "num_experts": data.take("expert_count", "count"),
        "num_experts_per_tok": data.take("expert_used_count", "count"),
        "norm_topk_prob": data.take("expert_weights_norm", "flag", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(data: _Metadata, layers_of_27b: int, pattern: int) -> dict[str, Any]:
    heads, layers = data.take("attention.head_count", "count"), data.take("block_count", "count")
    hidden, head_dim = data.take("embedding_length", "count"), data.take("attention.key_length", "count")
    softcaps = {
        ours: data.take(theirs, "positive", None)
        for ours, theirs in (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        )
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": _has_bias(data, "attn_q"),
        "sliding_window": data.take("attention.sliding_window", "count"),
        "layer_types": _layer_types(data, layers, pattern),
        "query_pre_attn_scalar": hidden // heads if layers == layers_of_27b else head_dim,
        **softcaps,
        **_dense(data),
    }


def _layer_types(data: _Metadata, layers: int, pattern: int) -> list[str]:
    """Return which layers have a window: all but each `pattern`-th, or as the metadata have it, by layer or as one."""
    key = "attention.sliding_window_pattern"
    given = data.all.get(f"{data.architecture}.{key}")
    if isinstance(given, list):
        data.only(key, given)
        if len(given) != layers or not all(isinstance(each, bool | int) for each in given):
            raise ConfigError(f"{data.where}: {key} has {len(given)} values for {layers} layers")
        windows = [bool(each) for each in given]
    else:
        every = data.take(key, "count", pattern)
        windows = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in windows]


def _gemma2(data: _Metadata) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_gemma(data, 46, 2)}


def _gemma3(data: _Metadata) -> dict[str, Any]:
    local = data.take("rope.freq_base_swa", "positive", 10000.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_gemma(data, 62, 6),
        "rope_parameters": {
            "full_attention": _rope(data, data.take("attention.key_length", "count")),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(data: _Metadata) -> dict[str, Any]:
    """Return those of Phi-4. The ropes of others are in tensors, which have no names here."""
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": data.take("attention.sliding_window", "natural", 0) or None,
        "original_max_position_embeddings": data.take(
            "rope.scaling.original_context_length", "count", data.take("context_length", "count")
        ),
        "pad_token_id": None,  # the default of the config class is a token that smaller vocabularies lack
        **_dense(data),
    }


def _gpt_oss(data: _Metadata) -> dict[str, Any]:
    data.only("expert_gating_func", 3)
    inner = data.take("expert_feed_forward_length", "count")
    head_dim = data.take("attention.key_length", "count")
    data.only("feed_forward_length", inner)
    rope = _rope(data, head_dim)
    if rope["rope_type"] == "yarn":  # not in the metadata, and unlike the default
        rope["truncate"] = False
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "attention_bias": _has_bias(data, "attn_q"),
        "intermediate_size": inner,
        "num_local_experts": data.take("expert_count", "count"),
        "num_experts_per_tok": data.take("expert_used_count", "count"),
        "sliding_window": data.take("attention.sliding_window", "count"),
        "layer_types": _layer_types(data, data.take("block_count", "count"), 2),
        "swiglu_limit": 7.0,
        "rope_parameters": rope,
    }


_FAMILIES: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "gemma2": _gemma2, "gemma3": _gemma3,
    "phi3": _phi3, "gpt-oss": _gpt_oss,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- rope


def _rope(data: _Metadata, head_dim: int) -> dict[str, Any]:
    """Return the `rope_parameters`."""
    theta = data.take("rope.freq_base", "positive", 10000.0)
    kind = data.take("rope.scaling.type", "text", "none")
    factor = data.take("rope.scaling.factor", "number", data.take("rope.scale_linear", "number", 1.0)) or 1.0
    if kind == "none" and factor != 1 and not data.has("rope.scaling.type"):
        kind = "linear"  # what llama.cpp takes for older files
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        data.only(key, 1.0)
    data.only("rope.scaling.yarn_log_multiplier", 0.0)
    data.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    fast = data.take("rope.scaling.yarn_beta_fast", "positive", 32.0)
    slow = data.take("rope.scaling.yarn_beta_slow", "positive", 1.0)
    plain = {"rope_type": "default", "rope_theta": theta}
    if ROPE_FACTORS in data.tensors:
        if kind != "none":
            raise UnsupportedModel(
                f"{data.where}: {ROPE_FACTORS} beside rope.scaling.type {shown(kind)} is not supported"
            )
        return {**plain, **_llama3(data, theta, head_dim)}
    if kind == "none":
        return plain
    if kind == "linear":
        return {**plain, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = data.take("rope.scaling.original_context_length", "count")
        betas = {"beta_fast": fast, "beta_slow": slow}
        return {
            **plain,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **({} if (fast, slow) == (32.0, 1.0) else betas),
        }
    raise UnsupportedModel(
        f"{data.where}: rope.scaling.type {shown(kind)} is not supported (known: none, linear, yarn)"
    )


def _llama3(data: _Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters that give the factors which the file has instead of them: the divisor of each frequency."""
    stored = _numbers(data, ROPE_FACTORS)
    if stored.shape != (head_dim // 2,):
        raise ConfigError(f"{data.where}: {ROPE_FACTORS} has {len(stored)} numbers for heads of {head_dim}")
    factor = _shortest(float(stored.max(initial=0)))
    wavelengths = 2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
    between = (stored > 1) & (stored < factor)
    if factor == 1 and bool((stored == 1).all()):
        return {}
    if factor > 1 and between.any():
        smooth = (1 / stored[between] - 1 / factor) / (1 - 1 / factor)
        original = wavelengths[between] * (LOW_FACTOR + smooth * (HIGH_FACTOR - LOW_FACTOR))
        tokens = round(float(np.median(original)))
        if np.allclose(_factors(wavelengths, factor, tokens), stored, rtol=FACTOR_ERROR, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW_FACTOR,
                "high_freq_factor": HIGH_FACTOR,
                "original_max_position_embeddings": tokens,
            }
    raise UnsupportedModel(f"{data.where}: the factors in {ROPE_FACTORS} are not those of a Llama 3: not supported")


def _factors(wavelengths: np.ndarray[Any, Any], factor: float, original: int) -> np.ndarray[Any, Any]:
    smooth = (original / wavelengths - LOW_FACTOR) / (HIGH_FACTOR - LOW_FACTOR)
    between = 1 / ((1 - smooth) / factor + smooth)
    short, long = wavelengths < original / HIGH_FACTOR, wavelengths > original / LOW_FACTOR
    found: np.ndarray[Any, Any] = np.where(short, 1.0, np.where(long, factor, between))
    return found


def _numbers(data: _Metadata, name: str) -> np.ndarray[Any, Any]:
    """Return a small tensor of float32 from its file."""
    header, place = data.tensors[name]
    if place.dtype != "F32" or len(place.shape) != 1:
        raise ConfigError(f"{data.where}: {name} is {place.dtype} of shape {place.shape}, not a list of float32")
    found: np.ndarray[Any, Any] = np.fromfile(header.file, "<f4", place.shape[0], offset=place.offset).astype(float)
    if not np.isfinite(found).all() or len(found) < place.shape[0]:
        raise ConfigError(f"{data.where}: {name} has numbers that are not finite")
    return found


# ------------------------------------------------------------------------------------------------------- end of a text


def generation_of(header: GgufHeader) -> dict[str, Any]:
    """Return the generation_config.json: how the model is meant to be sampled, if the file says so, and the tokens that
    end a text. The metadata have those of a text, of a turn and of a message apart, and often only one of them."""
    data, where = header.metadata, f"model.path: {header.file}"
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = [_value(data, name, "natural", REQUIRED, where) for name in names if name in data]
    tokens, types = data.get("tokenizer.ggml.tokens"), data.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        named = enumerate(zip(tokens, types, strict=False))
        special = {token: index for index, (token, kind) in named if kind == CONTROL and isinstance(token, str)}
        ends = [special[text] for text in END_TEXTS if text in special]
        if all(text in special for text in HARMONY_ENDS) and HARMONY_MIDDLE in special:
            ends.remove(special[HARMONY_MIDDLE])
        found += ends
    given = {name: f"general.sampling.{key}" for key, name in SAMPLING.items() if f"general.sampling.{key}" in data}
    sampling = {name: _value(data, key, "number", REQUIRED, where) for name, key in given.items()}
    sampling = {name: _shortest(value) if isinstance(value, float) else value for name, value in sampling.items()}
    return {**sampling, "eos_token_id": list(dict.fromkeys(found))} if found else sampling
