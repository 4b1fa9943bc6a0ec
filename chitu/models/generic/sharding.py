"""A rank's part of a generic model, by the plan of the library's config class (`base_model_tp_plan`).

Owns which tensors are cut, and the sums of the ranks' results. The plan says for each module how it is cut: `colwise`
(its outputs), `rowwise` (its inputs; the results are summed), and the same for the joined tensors of experts. Attention
is cut by heads, KV heads as everywhere (`config/tensor_parallel.py`). What a plan leaves whole is computed by every
rank: a model whose attention it does not cut is served on one rank only, since each rank holds only its heads' pages.
Head and embedding stay whole. Called while the model is built; its hooks run on the step thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of, share_of, why_not
from chitu.errors import ConfigError
from chitu.models.config import ModelSpec
from chitu.models.layers import Shard
from chitu.models.window_state import recurrent_of

CUT = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "moe_tp_experts")
WHOLE = ("replicated_with_grad_allreduce", "replicate")
QUERY, OUTPUT, KEYS = "q_proj", "o_proj", ("k_proj", "v_proj")
"""Names of the modules of attention; all that are cut have these."""

Pieces = tuple[int, tuple[range, ...]]
"""Dimension of a tensor, and the parts of it that a rank has."""


class Sharding:
    """The cuts of one rank."""

    def __init__(self, decoder: Any, prefix: str, spec: ModelSpec, shard: Shard) -> None:
        """Read the plan. `prefix`: of the decoder in the whole model. Raises ConfigError if there is no part for it."""
        reason = why_not(spec.num_heads, spec.num_kv_heads, shard.size)
        if reason:
            raise ConfigError(f"tp_size {shard.size}: {reason}")
        if len({(group.num_kv_heads, group.head_dims) for group in spec.groups}) > 1:
            raise ConfigError(
                f"tp_size {shard.size}: {spec.architecture} is served with tp_size 1 only: its layers have different "
                "heads"
            )
        if recurrent_of(spec.state):
            raise ConfigError(
                f"tp_size {shard.size}: {spec.architecture} is served with tp_size 1 only: no plan cuts its recurrent "
                "layers, and each rank would need their whole state"
            )
        self._decoder, self._prefix, self._spec, self._shard = decoder, prefix, spec, shard
        self.is_summing = True
        self._styles = self._plan()
        attention = {name.rpartition(".")[2] for name in self._styles if name.rpartition(".")[2] in (QUERY, *KEYS)}
        if attention != {QUERY, *KEYS} or not any(name.endswith(f".{OUTPUT}") for name in self._styles):
            raise ConfigError(
                f"tp_size {shard.size}: {spec.architecture} is served with tp_size 1 only: the plan of transformers "
                "does not cut its attention by heads"
            )

    def _plan(self) -> dict[str, str]:
        """Return the style of each module or tensor of the decoder that is cut. Modules of one parent are cut together
        or not at all."""
        plan = getattr(type(self._decoder.config), "base_model_tp_plan", None) or {}
        patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+") + "$"), style) for key, style in plan.items()]
        names = [name for name, _ in (*self._decoder.named_modules(), *self._decoder.named_parameters())]
        found = {name: style for name in names for pattern, style in patterns if pattern.match(name)}
        strange = {name.rpartition(".")[0] for name, style in found.items() if style not in (*CUT, *WHOLE)}
        return {
            name: style
            for name, style in found.items()
            if style in CUT and name.rpartition(".")[0] not in strange and name not in strange
        }

    def _share(self, total: int, unit: int = 1) -> range:
        own = share_of(total // unit, self._shard.size, self._shard.rank)
        return range(own.start * unit, own.stop * unit)

    def pieces(self, name: str, shape: torch.Size) -> Pieces | None:
        """Return the part of a tensor of the model that this rank has; None for all of it."""
        own = name.removeprefix(self._prefix)
        module, _, leaf = own.rpartition(".")
        if own in self._styles:  # joined weights of experts: [experts, outputs, inputs], or transposed
            style = self._styles[own]
            dim = len(shape) - (2 if "colwise" in style else 1)
            return dim, self._blocks(shape[dim], 2 if style.startswith("packed") else 1)
        style = self._styles.get(module, "")
        if style == "rowwise":
            unit = shape[1] // self._spec.num_heads if module.endswith(OUTPUT) and leaf == "weight" else 1
            return (1, (self._share(shape[1], unit),)) if leaf == "weight" else None
        if style == "colwise":
            return 0, (self._outputs(module, shape[0]),)
        if style == "packed_colwise":
            return 0, self._blocks(shape[0], 2)
        return None

    def _outputs(self, module: str, total: int) -> range:
        last = module.rpartition(".")[2]
        if last == QUERY:
            return self._share(total, total // self._spec.num_heads)
        if last in KEYS:
            width = total // self._spec.num_kv_heads
            heads = kv_heads_of(self._spec.num_kv_heads, self._shard.size, self._shard.rank)
            return range(heads.start * width, heads.stop * width)
        return self._share(total)

    def _blocks(self, total: int, count: int) -> tuple[range, ...]:
        size = total // count
        own = self._share(size)
        return tuple(range(index * size + own.start, index * size + own.stop) for index in range(count))

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the model."""
        pieces = self.pieces(name, tensor.shape)
        if pieces is None:
            return tensor
        dim, parts = pieces
        if not all(len(part) for part in parts):
            raise ConfigError(f"tp_size {self._shard.size}: {name!r} cannot be split over so many ranks")
        return torch.cat([tensor.narrow(dim, part.start, len(part)) for part in parts], dim).contiguous()

    def add_sums(self, on_sum: Callable[[], None]) -> None:
        """Let modules that are cut by their inputs give the sum over the ranks. `on_sum` is called after each."""
        for name, style in self._styles.items():
            module = dict(self._decoder.named_modules()).get(name)
            if module is None:
                continue
            if style == "rowwise":
                bias = module.bias
                module.bias = None  # added once, not once per rank
                module.register_forward_hook(self._summing(bias, on_sum))
            elif style == "moe_tp_experts":
                module.register_forward_hook(self._summing(None, on_sum))
            if name.endswith(f".{QUERY}"):
                owner = self._decoder.get_submodule(name.rpartition(".")[0])
                if hasattr(owner, "num_key_value_groups"):
                    size = self._shard.size
                    own = len(kv_heads_of(self._spec.num_kv_heads, size, self._shard.rank))
                    owner.num_key_value_groups = self._spec.num_heads // size // own

    def _summing(self, bias: torch.Tensor | None, on_sum: Callable[[], None]) -> Callable[..., torch.Tensor]:
        def after(_module: nn.Module, _given: object, out: torch.Tensor) -> torch.Tensor:
            if self.is_summing:
                out = self._shard.all_reduce(out.contiguous())
                on_sum()
            return out if bias is None else out + bias

        return after

    @property
    def is_main(self) -> bool:
        return self._shard.rank == MAIN_RANK

    @property
    def size(self) -> int:
        return self._shard.size
