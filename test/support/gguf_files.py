"""GGUF files, written field by field after the published layout, and checkpoint folders turned into them as llama.cpp's
converter does it. Shares no code with `chitu.models`."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
ALIGNMENT = 32
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
"""Types that are written here."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt-oss",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


class Typed(NamedTuple):
    """A value whose type in the file is not that of its kind in Python."""

    kind: int
    value: Any


class Stored(NamedTuple):
    """A tensor as the file has it."""

    kind: int
    """ggml's number of its type."""
    shape: tuple[int, ...]
    """Rows first."""
    data: bytes


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """Return a value behind its type."""
    kind, raw = given if isinstance(given, Typed) else (_kind(given), given)
    return struct.pack("<I", kind) + _payload(kind, raw)


def _kind(given: Any) -> int:
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING, list: ARRAY}
    return kinds[type(given)]


def _payload(kind: int, raw: Any) -> bytes:
    if kind == STRING:
        return text(raw)
    if kind == ARRAY:
        inner = _kind(raw[0]) if raw else STRING
        inner = INT32 if inner == UINT32 else inner
        return struct.pack("<IQ", inner, len(raw)) + b"".join(_payload(inner, each) for each in raw)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q"}[kind], raw)


def header_of(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> bytes:
    """Return the header, padded."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + value(given) for key, given in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        dims = tuple(reversed(tensor.shape))
        parts.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.kind, offset))
        offset += padded(len(tensor.data))
    header = b"".join(parts)
    return header.ljust(padded(len(header)), b"\0")


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    data = b"".join(tensor.data.ljust(padded(len(tensor.data)), b"\0") for tensor in tensors.values())
    file.write_bytes(header_of(metadata, tensors, version) + data)
    return file


def stored(numbers: np.ndarray, dtype: str = "F32") -> Stored:
    """Return numbers in a type, rounded as usual."""
    return Stored(NUMBERS[dtype], numbers.shape, _ENCODERS[dtype](numbers.astype(np.float32)))


def _q8_0(numbers: np.ndarray) -> bytes:
    blocks = numbers.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    safe = np.where(scales == 0, 1, scales).astype(np.float32)[:, None]
    return _joined(scales, np.clip(np.round(blocks / safe), -127, 127).astype(np.int8))


def _q4_0(numbers: np.ndarray) -> bytes:
    blocks = numbers.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 7).astype(np.float16)
    safe = np.where(scales == 0, 1, scales).astype(np.float32)[:, None]
    halves = np.clip(np.round(blocks / safe) + 8, 0, 15).astype(np.uint8)
    return _joined(scales, halves[:, :16] | halves[:, 16:] << 4)


def _joined(scales: np.ndarray, numbers: np.ndarray) -> bytes:
    return np.concatenate([scales[:, None].view(np.uint8), numbers.view(np.uint8)], axis=1).tobytes()


_ENCODERS: Mapping[str, Callable[[np.ndarray], bytes]] = {
    "F32": lambda numbers: numbers.tobytes(),
    "F16": lambda numbers: numbers.astype(np.float16).tobytes(),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
}


# ---------------------------------------------------------------------------------------------------------- conversion


def rope_factors(config: Mapping[str, Any], head_dim: int) -> np.ndarray | None:
    """Return the divisors of the frequencies of a Llama 3, which its converter writes instead of the parameters."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    theta = config.get("rope_theta") or rope["rope_theta"]
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    found = []
    for index in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (index / head_dim)
        if length < old / high:
            found.append(1.0)
        elif length > old / low:
            found.append(rope["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter writes for a config.json."""
    arch = ARCHITECTURES[config["architectures"][0]]
    heads = config["num_attention_heads"]
    found: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": "A model",
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config.get("num_key_value_heads") or heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        f"{arch}.rope.freq_base": float(
            config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0
        ),
        "general.file_type": 0,
        "general.quantization_version": 2,
    }
    if head_dim := config.get("head_dim"):
        found |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
    if arch == "llama":
        found[f"{arch}.rope.dimension_count"] = config.get("head_dim") or config["hidden_size"] // heads
        found[f"{arch}.vocab_size"] = config["vocab_size"]
    rope = config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "yarn"):
        found |= {f"{arch}.rope.scaling.type": kind, f"{arch}.rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch == "phi3":
        found |= {
            "phi3.rope.dimension_count": config["hidden_size"] // heads,
            "phi3.attention.sliding_window": config["sliding_window"] or 0,
            "phi3.rope.scaling.original_context_length": config["original_max_position_embeddings"],
        }
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        found[f"{arch}.attention.sliding_window"] = config["sliding_window"]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if arch == "gemma2" and config.get(cap):
            found[f"{arch}.{cap}"] = config[cap]
    for key, names in {
        "expert_count": ("num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
    }.items():
        for name in names:
            if name in config:
                found[f"{arch}.{key}"] = config[name]
    if arch == "gpt-oss":
        found[f"{arch}.expert_feed_forward_length"] = config["intermediate_size"]
    return found


_NAMES = {
    r"model\.embed_tokens": "token_embd", r"model\.norm": "output_norm", r"lm_head": "output",
    r"input_layernorm": "attn_norm", r"self_attn\.q_proj": "attn_q", r"self_attn\.k_proj": "attn_k",
    r"self_attn\.v_proj": "attn_v", r"self_attn\.o_proj": "attn_output", r"self_attn\.q_norm": "attn_q_norm",
    r"self_attn\.k_norm": "attn_k_norm", r"mlp\.gate_proj": "ffn_gate", r"mlp\.up_proj": "ffn_up",
    r"mlp\.down_proj": "ffn_down", r"mlp\.gate_up_proj": "ffn_up", r"self_attn\.qkv_proj": "attn_qkv",
    r"(mlp|block_sparse_moe)\.(gate|router)": "ffn_gate_inp", r"pre_feedforward_layernorm": "ffn_norm",
    r"post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip


def tensors_of(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors as the converter names, turns and joins them."""
    arch = ARCHITECTURES[config["architectures"][0]]
    after_attention = "post_attention_norm" if arch in ("gemma2", "gemma3", "gpt-oss") else "ffn_norm"
    names = {**_NAMES, r"post_attention_layernorm": after_attention}
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, numbers in sorted(tensors.items()):
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stack = f"blk.{expert[1]}.ffn_{_EXPERT_PARTS[expert[3]]}_exps.weight"
            experts.setdefault(stack, {})[int(expert[2])] = numbers
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found |= _converted(name, numbers, names, arch, config)
    for stack, each in experts.items():
        found[stack] = np.stack([each[index] for index in range(len(each))])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factors = rope_factors(config, head_dim)
    return found if factors is None else {"rope_freqs.weight": factors, **found}


def _converted(
    name: str, numbers: np.ndarray, names: Mapping[str, str], arch: str, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    prefix, rest = (f"blk.{layer[1]}.", name[layer.end() :]) if layer is not None else ("", name)
    if arch == "gpt-oss" and (special := _of_gpt_oss(prefix, rest, numbers)):
        return special
    stem, _, kind = rest.rpartition(".")
    ours = next(short for pattern, short in names.items() if re.fullmatch(pattern, stem))
    if arch == "llama" and ours in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"]
        heads = heads if ours == "attn_q" else config.get("num_key_value_heads") or heads
        halves = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
        numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
    if arch.startswith("gemma") and ours.endswith("norm"):
        numbers = numbers + np.float32(1)
    return {f"{prefix}{ours}.{kind}": numbers}


def _of_gpt_oss(prefix: str, rest: str, numbers: np.ndarray) -> dict[str, np.ndarray]:
    if rest == "self_attn.sinks":
        return {f"{prefix}attn_sinks.weight": numbers}
    if not rest.startswith("mlp.experts."):
        return {}
    part, kind = rest.removeprefix("mlp.experts."), "bias" if rest.endswith("_bias") else "weight"
    rows = numbers if kind == "bias" else numbers.swapaxes(1, 2)
    if part.startswith("down_proj"):
        return {f"{prefix}ffn_down_exps.{kind}": rows}
    return {f"{prefix}ffn_gate_exps.{kind}": rows[:, ::2], f"{prefix}ffn_up_exps.{kind}": rows[:, 1::2]}


def vocabulary_of(folder: Path, pre: str = "qwen2") -> dict[str, Any]:
    """Return the keys of a folder's byte-level tokenizer, and of its special tokens and chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {**tokenizer["model"]["vocab"], **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}
    special = {each["content"] for each in tokenizer["added_tokens"] if each["special"]}
    added = {each["content"] for each in tokenizer["added_tokens"]} - special
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [CONTROL if token in special else USER_DEFINED if token in added else NORMAL for token in tokens]
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": "TemplateProcessing" in json.dumps(tokenizer["post_processor"]),
    }
    for name, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}.items():
        if settings.get(name) in ids:
            found[f"tokenizer.ggml.{key}_token_id"] = ids[settings[name]]
    template = folder / "chat_template.jinja"
    source = template.read_text() if template.is_file() else settings.get("chat_template")
    return {**found, "tokenizer.chat_template": source} if source else found


def convert(folder: Path, file: Path, dtype: str = "F32", rest: Mapping[str, str] = {}, **more: Any) -> Path:
    """Write a checkpoint folder as a GGUF file. `dtype`: of the matrices, but those in whose names a key of `rest` is;
    `more`: metadata beside the config's."""

    def dtype_of(name: str) -> str:
        return next((other for part, other in rest.items() if part in name), dtype)

    config = json.loads((folder / "config.json").read_text())
    loaded = load_file(folder / "model.safetensors")
    tensors = tensors_of({name: each.to(torch.float32).numpy() for name, each in loaded.items()}, config)
    metadata = metadata_of(config)
    if (folder / "tokenizer.json").is_file():
        metadata |= vocabulary_of(folder)
    return write_gguf(
        file,
        {**metadata, **more},
        {name: stored(each, dtype_of(name) if each.ndim > 1 else "F32") for name, each in tensors.items()},
    )
