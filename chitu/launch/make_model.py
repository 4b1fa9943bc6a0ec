"""`make_model`: a small random model with its tokenizer, so that everything can be tried without a download.

Called by the `chitu make-model` command and by tests. Writes a Hugging Face checkpoint folder that transformers loads
as it is, without importing transformers or torch. The folder appears complete or not at all (written beside its place,
then renamed). The same arguments give the same weights.

The weights are scaled so that a random model is a useful one to test with: logits are spread (near-ties are rare, so
two implementations that differ by rounding choose the same token), the text depends on the whole context instead of
repeating one token, and special tokens hardly ever come out, so that greedy generation runs to its token limit.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from chitu.errors import ConfigError
from chitu.launch.tiny_tokenizer import BOS, CHAT_TEMPLATE, END_OF_TURN, EOS, PAD, SPECIAL_TOKENS, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names in config.json and in a safetensors header."""
LOGIT_STD = 3.0
"""Spread of the logits: the best two of 512 are then 0.9 apart on average, closer than 1e-4 once in 10000 tokens."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Sizes of the model; the defaults make a few MB."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int | None = None
    """`hidden_size / heads` where unset."""
    intermediate_size: int | None = None
    """3 x `hidden_size` where unset."""
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    tie: bool = False
    dtype: str = "float32"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """As in config.json, for instance Llama 3's `{"rope_type": "llama3", ...}`."""
    shards: int = 1
    """More than one: that many safetensors files with an index."""

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.heads

    @property
    def resolved_intermediate_size(self) -> int:
        return self.intermediate_size or 3 * self.hidden_size

    def check(self, family: str) -> None:
        """ConfigError where no such model can be made."""
        if family not in FAMILIES:
            raise ConfigError(f"model family {family!r} is none of {', '.join(FAMILIES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        smallest = min(
            self.layers, self.heads, self.kv_heads, self.hidden_size, self.max_position_embeddings, self.shards
        )
        if smallest < 1:
            raise ConfigError("every size of a model must be at least 1")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is no multiple of heads {self.heads}")
        if family == "qwen2" and self.resolved_head_dim * self.heads != self.hidden_size:
            raise ConfigError(f"qwen2 has head_dim hidden_size / heads, not {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.resolved_head_dim % 2:
            raise ConfigError(f"head_dim {self.resolved_head_dim} is odd, which RoPE cannot rotate")
        if self.vocab_size < 256 + len(SPECIAL_TOKENS):
            raise ConfigError(f"vocab_size {self.vocab_size} is less than {256 + len(SPECIAL_TOKENS)}")


def make_model(
    directory: str | Path, family: str = "qwen3", shape: ModelShape | None = None, *, seed: int = 0, **sizes: Any
) -> Path:
    """Write a checkpoint into a new (or empty) folder and return it.

    `sizes` are fields of `ModelShape` over those of `shape`. ConfigError where the folder holds something, or where the
    sizes do not fit each other.
    """
    shape = replace(shape or ModelShape(), **sizes)
    shape.check(family)
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(work, family, shape, seed)
        os.chmod(work, 0o755)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _write(folder: Path, family: str, shape: ModelShape, seed: int) -> None:
    write_settings(folder, family, shape, train_tokenizer(shape.vocab_size))
    _write_weights(folder, family, shape, list(range(len(SPECIAL_TOKENS))), seed)


def write_settings(folder: Path, family: str, shape: ModelShape, tokenizer: Tokenizer) -> None:
    """Every file of a checkpoint but its weights; the tokenizer is one of `train_tokenizer`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: token_id for token_id, token in enumerate(SPECIAL_TOKENS)}
    _write_json(folder / "config.json", _config(family, shape, ids))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": ids[BOS], "eos_token_id": [ids[END_OF_TURN], ids[EOS]], "pad_token_id": ids[PAD]},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END_OF_TURN,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(family: str, shape: ModelShape, ids: dict[str, int]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.resolved_intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "tie_word_embeddings": shape.tie,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[PAD],
    }
    if family != "qwen2":
        config["head_dim"] = shape.resolved_head_dim
    if family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": shape.layers}
    return config


Array = NDArray[np.float32]


def _tensors(family: str, shape: ModelShape, special_ids: list[int], seed: int) -> Iterator[tuple[str, Array]]:
    """Every tensor of the checkpoint by its Hugging Face name, in a fixed order.

    Matrices have gain 1 (std 1 / sqrt(inputs)), so a layer adds about as much to the residual stream as the embedding
    holds. Norm weights vary around 1, so that a norm that is left out shows.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, std: float) -> Array:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(std)
        return values

    def around(mean: float, size: int) -> Array:
        return (mean + 0.1 * rng.standard_normal(size, dtype=np.float32)).astype(np.float32)

    # With tied embeddings a token's own row pulls towards repeating it; stronger layers drown that.
    gain = 8.0 if shape.tie else 2.0
    hidden, head_dim, inner = shape.hidden_size, shape.resolved_head_dim, shape.resolved_intermediate_size
    query, key = shape.heads * head_dim, shape.kv_heads * head_dim
    # Rows of special tokens are short: a short row of the output matrix gives logits near 0, which are never the best.
    output_std = LOGIT_STD / math.sqrt(hidden)
    embedding = matrix(shape.vocab_size, hidden, output_std if shape.tie else 1.0)
    if shape.tie:
        embedding[special_ids] *= np.float32(0.1)
    yield "model.embed_tokens.weight", embedding
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", around(1.0, hidden)
        for name, size in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(size, hidden, 1 / math.sqrt(hidden))
            if family == "qwen2":
                yield f"{prefix}.self_attn.{name}_proj.bias", around(0.0, size)
        if family == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", around(1.0, head_dim)
            yield f"{prefix}.self_attn.k_norm.weight", around(1.0, head_dim)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, query, gain / math.sqrt(query))
        yield f"{prefix}.post_attention_layernorm.weight", around(1.0, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(inner, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.mlp.up_proj.weight", matrix(inner, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, inner, gain / math.sqrt(inner))
    yield "model.norm.weight", around(1.0, hidden)
    if not shape.tie:
        output = matrix(shape.vocab_size, hidden, output_std)
        output[special_ids] *= np.float32(0.1)
        yield "lm_head.weight", output


def _encode(values: Array, dtype: str) -> bytes:
    """Raw little-endian bytes in the checkpoint's dtype; bfloat16 rounds to nearest even."""
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return rounded.tobytes()


def _write_weights(folder: Path, family: str, shape: ModelShape, special_ids: list[int], seed: int) -> None:
    tensors = dict(_tensors(family, shape, special_ids, seed))
    if shape.shards == 1:
        _save_safetensors(folder / "model.safetensors", tensors, shape.dtype)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shape.shards):
        file = f"model-{shard + 1:05d}-of-{shape.shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard :: shape.shards]}
        _save_safetensors(folder / file, part, shape.dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.size for values in tensors.values()) * (4 if shape.dtype == "float32" else 2)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save_safetensors(path: Path, tensors: dict[str, Array], dtype: str) -> None:
    """The safetensors format: length of the header (u64), JSON header, tensors one after the other.

    Written here because the library's own writer knows bfloat16 only with torch.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    encoded = {name: _encode(values, dtype) for name, values in tensors.items()}
    offset = 0
    for name, data in encoded.items():
        end = offset + len(data)
        header[name] = {"dtype": DTYPES[dtype], "shape": tensors[name].shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in encoded.values():
            file.write(data)
