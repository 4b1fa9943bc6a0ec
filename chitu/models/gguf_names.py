"""The tensors of a GGUF file by the names that Hugging Face gives them, and what llama.cpp's converter did to them.

Called by `checkpoint.py`. A tensor without a name here is refused: a model that left it out would compute something
else. `weights.py` undoes the changes while it reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.gguf import BLOCKS, GgufHeader, read_headers, shown

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with a factor for each frequency of the rope; `gguf_config.py` makes parameters of config.json of it."""
PLAIN = ("F32", "F16", "BF16")
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_GEMMA = {
    **_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_BARE = ("self_attn.sinks", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Names without `.weight` behind them; a bias has `_bias`."""


class RowOrder(NamedTuple):
    """How a tensor of the file differs from that of a Hugging Face checkpoint."""

    head_rows: int = 0
    """Rows of a head, of which the two halves are interleaved; 0: they are in order."""
    added: float = 0.0
    """What was added to each number."""
    is_transposed: bool = False
    pair: str = ""
    """Tensor whose rows alternate with those of this one, which has the first; empty: none."""
    target: str = ""
    """Name of the weight, if it is not that of the tensor."""
    is_second: bool = False
    """Whether it is the `pair` of another tensor."""


class GgufTensor(NamedTuple):
    """Place, type and shape of a tensor in a GGUF file."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    """As stored, rows first."""
    order: RowOrder = RowOrder()

    @property
    def num_bytes(self) -> int:
        numbers, num_bytes = BLOCKS[self.dtype]
        return math.prod(self.shape) // numbers * num_bytes

    @property
    def is_plain(self) -> bool:
        """Return whether it is stored as safetensors has it."""
        return self.dtype in PLAIN and self.order == RowOrder()


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an architecture's layers."""

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    """Stacks that Hugging Face has as one tensor an expert; `{}` is its number."""
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Stack -> another one, whose rows alternate with its own, and the name of both; or "" and the name of one."""
    turns_heads: bool = False
    """Whether the rows of q and k are interleaved, for ggml's rope."""
    adds_one: bool = False
    """Whether norms have 1 added."""


NAMES: Mapping[str, Names] = {
    "llama": Names(
        {**_ATTENTION, **_FFN_NORM, **_MLP, "ffn_gate_inp": "block_sparse_moe.gate"},
        {
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        },
        turns_heads=True,
    ),
    "qwen2": Names({**_ATTENTION, **_FFN_NORM, **_MLP}),
    "qwen3": Names({**_ATTENTION, **_QK_NORM, **_FFN_NORM, **_MLP}),
    "qwen3moe": Names(
        {**_ATTENTION, **_QK_NORM, **_FFN_NORM, **_MLP, "ffn_gate_inp": "mlp.gate"},
        {
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
    ),
    "gemma2": Names(_GEMMA, adds_one=True),
    "gemma3": Names({**_GEMMA, **_QK_NORM}, adds_one=True),
    "phi3": Names(
        {
            **_FFN_NORM,
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "gpt-oss": Names(
        {
            **_ATTENTION,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        pairs={
            "ffn_gate_exps": ("ffn_up_exps", "mlp.experts.gate_up_proj"),
            "ffn_up_exps": ("ffn_gate_exps", ""),
            "ffn_down_exps": ("", "mlp.experts.down_proj"),
        },
    ),
}
"""Architectures that are read."""


def architecture_of(header: GgufHeader) -> str:
    """Return the architecture by llama.cpp's name. UnsupportedModel if it is not read here, or the file is no model."""
    where, kind = f"model.path: {header.file}", header.metadata.get("general.type", "model")
    name = header.metadata.get("general.architecture")
    if kind != "model" or name == "clip":
        words = (
            "the part of a model for images or sound (mmproj)" if name == "clip" or kind == "mmproj" else shown(kind)
        )
        raise UnsupportedModel(f"{where} is no model but {words}: give the file of the model itself")
    if not isinstance(name, str) or name not in NAMES:
        raise UnsupportedModel(
            f"{where}: GGUF files of the architecture {shown(name)} are not supported (known: {', '.join(NAMES)}); "
            "take the folder with safetensors that it was made of"
        )
    return name


def read_gguf(files: Sequence[Path]) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors of a model's GGUF files with their names; of experts one by one where Hugging Face has them so.
    Raises ConfigError as `read_headers` does, UnsupportedModel for a tensor that is not known."""
    for header in read_headers(files):
        yield from named_tensors(header)


def named_tensors(header: GgufHeader) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors of one file with their names."""
    architecture = architecture_of(header)
    names = NAMES[architecture]
    for name, place in header.tensors.items():
        tensor = GgufTensor(header.file, place.offset, place.dtype, place.shape)
        layer = _LAYER.fullmatch(name)
        if name == ROPE_FACTORS:
            continue
        if name in _TOP:
            yield _TOP[name], _ordered(tensor, _TOP[name], "", names, header)
        elif layer is None:
            raise _unknown(name, header)
        else:
            yield from _of_layer(tensor, name, layer[1], layer[2], layer[3], names, header)


def _unknown(name: str, header: GgufHeader) -> UnsupportedModel:
    return UnsupportedModel(f"model.path: {header.file} has a tensor {name!r}, which is not known here")


def _of_layer(
    tensor: GgufTensor, name: str, layer: str, part: str, kind: str, names: Names, header: GgufHeader
) -> Iterator[tuple[str, GgufTensor]]:
    prefix = f"model.layers.{layer}"
    if part in names.experts:
        if len(tensor.shape) < 2:
            raise ConfigError(f"model.path: {header.file}: the tensor {name!r} of experts has shape {tensor.shape}")
        count, step = tensor.shape[0], tensor.num_bytes // tensor.shape[0]
        for expert in range(count):
            target = f"{prefix}.{names.experts[part].format(expert)}.{kind}"
            yield target, tensor._replace(offset=tensor.offset + expert * step, shape=tensor.shape[1:])
    elif part in names.pairs:
        other, of_both = names.pairs[part]
        order = RowOrder(
            is_transposed=kind == "weight",
            pair=f"blk.{layer}.{other}.{kind}" if other and of_both else "",
            target=_spelled(f"{prefix}.{of_both}", kind) if of_both else "",
            is_second=not of_both,
        )
        yield name, tensor._replace(order=order)
    elif part in names.layer:
        target = _spelled(f"{prefix}.{names.layer[part]}", kind)
        yield target, _ordered(tensor, target, part, names, header)
    else:
        raise _unknown(name, header)


def _spelled(stem: str, kind: str) -> str:
    if not stem.endswith(_BARE):
        return f"{stem}.{kind}"
    return stem if kind == "weight" else f"{stem}_bias"


def _ordered(tensor: GgufTensor, target: str, part: str, names: Names, header: GgufHeader) -> GgufTensor:
    """Return the tensor with what was done to it."""
    if names.adds_one and target.endswith("norm.weight"):
        if tensor.dtype not in PLAIN:
            raise UnsupportedModel(f"model.path: {header.file}: a quantised norm ({target}) is not supported")
        return tensor._replace(order=RowOrder(added=1.0))
    if names.turns_heads and part in ("attn_q", "attn_k"):
        heads = _heads(header.metadata, part)
        rows = tensor.shape[0] // heads if isinstance(heads, int) and heads > 0 else 0
        if not rows or rows % 2 or tensor.shape[0] % rows:
            raise ConfigError(
                f"model.path: {header.file} is damaged: {target} has {tensor.shape[0]} rows for {shown(heads)} heads"
            )
        return tensor._replace(order=RowOrder(head_rows=rows))
    return tensor


def _heads(metadata: Mapping[str, Any], part: str) -> Any:
    architecture = metadata["general.architecture"]
    every = metadata.get(f"{architecture}.attention.head_count")
    return metadata.get(f"{architecture}.attention.head_count_kv", every) if part == "attn_k" else every
