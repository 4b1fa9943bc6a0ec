"""Random tensors of a checkpoint by their Hugging Face names, and a file of them. Called by `make_model.py`; no torch.

Matrices have gain 1 (std 1 / sqrt(inputs)), so a layer adds about as much to the residual stream as the embedding
holds. Norm weights vary around 1, so that an omitted norm changes the output. Invariant: the same arguments give the
same bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chitu.launch.model_shape import DTYPES, LATENT_FAMILIES, ModelShape

LOGIT_STD = 3.0
"""Spread of the logits: the best two of 512 are then 0.9 apart on average, closer than 1e-4 once in 10000 tokens."""
Array = NDArray[np.float32]


def tensors_of(family: str, shape: ModelShape, special_ids: list[int], seed: int) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of the checkpoint by its Hugging Face name, in a fixed order.

    Matrices have gain 1 (std 1 / sqrt(inputs)), so a layer adds about as much to the residual stream as the embedding
    holds. Norm weights vary around 1, so that an omitted norm changes the output.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, std: float) -> Array:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(std)
        return values

    def around(mean: float, size: int) -> Array:
        return (mean + 0.1 * rng.standard_normal(size, dtype=np.float32)).astype(np.float32)

    # With tied embeddings a token's own row favours repeating it; stronger layers outweigh that.
    gain = 8.0 if shape.tie else 2.0
    hidden, head_dim, inner = shape.hidden_size, shape.resolved_head_dim, shape.resolved_intermediate_size
    query, key = shape.heads * head_dim, shape.kv_heads * head_dim

    def plain_attention(prefix: str) -> Iterator[tuple[str, Array]]:
        for name, size in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(size, hidden, 1 / math.sqrt(hidden))
            if family == "qwen2":
                yield f"{prefix}.self_attn.{name}_proj.bias", around(0.0, size)
        if family in ("qwen3", "qwen3_moe"):
            yield f"{prefix}.self_attn.q_norm.weight", around(1.0, head_dim)
            yield f"{prefix}.self_attn.k_norm.weight", around(1.0, head_dim)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, query, gain / math.sqrt(query))

    def latent_attention(prefix: str) -> Iterator[tuple[str, Array]]:
        heads, latent, values = shape.heads, shape.kv_lora_rank, shape.heads * shape.v_head_dim
        q_size, q_rank = heads * (shape.nope_head_dim + shape.rope_head_dim), shape.q_lora_rank
        if q_rank is None:
            yield f"{prefix}.self_attn.q_proj.weight", matrix(q_size, hidden, 1 / math.sqrt(hidden))
        else:
            yield f"{prefix}.self_attn.q_a_proj.weight", matrix(q_rank, hidden, 1 / math.sqrt(hidden))
            yield f"{prefix}.self_attn.q_a_layernorm.weight", around(1.0, q_rank)
            yield f"{prefix}.self_attn.q_b_proj.weight", matrix(q_size, q_rank, 1 / math.sqrt(q_rank))
        rows = latent + shape.rope_head_dim
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", matrix(rows, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", around(1.0, latent)
        rows = heads * (shape.nope_head_dim + shape.v_head_dim)
        yield f"{prefix}.self_attn.kv_b_proj.weight", matrix(rows, latent, 1 / math.sqrt(latent))
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, values, gain / math.sqrt(values))

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, Array]]:
        yield f"{prefix}.gate_proj.weight", matrix(width, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.up_proj.weight", matrix(width, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.down_proj.weight", matrix(hidden, width, gain / math.sqrt(width))

    def experts(prefix: str) -> Iterator[tuple[str, Array]]:
        yield f"{prefix}.gate.weight", matrix(shape.experts, hidden, 2 / math.sqrt(hidden))
        if family == "deepseek_v3":
            yield f"{prefix}.gate.e_score_correction_bias", around(0.0, shape.experts)
        for index in range(shape.experts):
            yield from mlp(f"{prefix}.experts.{index}", shape.expert_size)
        if family in LATENT_FAMILIES:
            yield from mlp(f"{prefix}.shared_experts", shape.expert_size)

    # Rows of special tokens are scaled down, which gives logits near 0, so they are never the best.
    output_std = LOGIT_STD / math.sqrt(hidden)
    embedding = matrix(shape.vocab_size, hidden, output_std if shape.tie else 1.0)
    if shape.tie:
        embedding[special_ids] *= np.float32(0.1)
    yield "model.embed_tokens.weight", embedding
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", around(1.0, hidden)
        attention = latent_attention(prefix) if family in LATENT_FAMILIES else plain_attention(prefix)
        yield from attention
        yield f"{prefix}.post_attention_layernorm.weight", around(1.0, hidden)
        if layer in shape.expert_layers(family):
            yield from experts(f"{prefix}.mlp")
        else:
            yield from mlp(f"{prefix}.mlp", inner)
    yield "model.norm.weight", around(1.0, hidden)
    if not shape.tie:
        output = matrix(shape.vocab_size, hidden, output_std)
        output[special_ids] *= np.float32(0.1)
        yield "lm_head.weight", output


def _encode(values: Array, dtype: str) -> bytes:
    """Return raw little-endian bytes in the checkpoint's dtype. bfloat16 rounds to nearest even."""
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return rounded.tobytes()


def save_safetensors(path: Path, tensors: dict[str, Array], dtype: str) -> None:
    """Write the safetensors format: length of the header (u64), JSON header, tensors one after the other.

    The library's own writer supports bfloat16 only with torch.
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
