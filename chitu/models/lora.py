"""Computes with LoRA adapters: adds to the results of a model's products what the adapters of some rows add.

Rows of several adapters, and of none, are in one step. The product with the model's weight is one for all rows; behind
it, each adapter adds `scale * B (A x)` to its own rows. A fused weight (q, k and v; gate and up) has one product with
the As of all its projections, and one with the B of each, whose result goes to the projection's columns. A step without
such rows does not come here. Step thread only; holds no state of any request.

With tensor parallelism an adapter is cut as its weight is. Of a projection that is cut by output, B has this rank's
rows; of one that is cut by input, A has this rank's columns, and the sum over the ranks adds up `B (A x)`, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from chitu.errors import ConfigError
from chitu.models.adapters import DOWN, PREFIX, UP, AdapterSpec
from chitu.models.layers import AttentionLayer, DecoderModel, GatedMLP
from chitu.models.weights import TensorFiles
from chitu.ops.interface import AdapterRows, LinearWeight, Ops


class Up(NamedTuple):
    """B of one projection, times the scale."""

    ranks: slice
    """Its columns of the result of `LowRank.down_RI`."""
    columns: slice
    """Its columns of the weight's result."""
    weight_OR: torch.Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to the result of one weight."""

    down_RI: torch.Tensor
    """A of its projections, one below the other."""
    ups: tuple[Up, ...]

    def add(self, x_TI: torch.Tensor, out_TO: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Add `scale * B (A x)` to these rows of `out_TO`, in place."""
        low_NR = F.linear(x_TI[rows], self.down_RI)
        for up in self.ups:
            added_NO, part_TO = F.linear(low_NR[:, up.ranks], up.weight_OR), out_TO[:, up.columns]
            if isinstance(rows, slice):
                part_TO[rows] += added_NO
            else:
                part_TO.index_add_(0, rows, added_NO)


LowRanks = Mapping[int, LowRank]
"""What one adapter adds, by `id` of the weight: the model keeps its weights as long as it lives."""


@dataclass(frozen=True, slots=True)
class AdaptedLinears:
    """The products of a step in which some rows have adapters: a `Linears` in place of the operations' own."""

    ops: Ops
    adapted: Sequence[tuple[LowRanks, slice | torch.Tensor]]
    """Each adapter of the step, and its rows."""

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self._add(x_TI, weight, self.ops.linear(x_TI, weight))

    def linear_add(self, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor) -> torch.Tensor:
        return self._add(x_TI, weight, self.ops.linear_add(x_TI, weight, residual_TD))

    def norm_linear(self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight) -> torch.Tensor:
        if not self._is_adapted(weight):
            return self.ops.norm_linear(x_TD, norm_D, eps, weight)
        return self.linear(self.ops.rms_norm(x_TD, norm_D, eps), weight)

    def norm_gate_up(self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight) -> torch.Tensor:
        if not self._is_adapted(weight):
            return self.ops.norm_gate_up(x_TD, norm_D, eps, weight)
        normed_TD = self.ops.rms_norm(x_TD, norm_D, eps)
        gate_TI, up_TI = self._add(normed_TD, weight, self.ops.gate_and_up(normed_TD, weight)).chunk(2, dim=-1)
        return F.silu(gate_TI).mul_(up_TI)

    def _is_adapted(self, weight: LinearWeight) -> bool:
        return any(id(weight) in low_ranks for low_ranks, _ in self.adapted)

    def _add(self, x_TI: torch.Tensor, weight: LinearWeight, out_TO: torch.Tensor) -> torch.Tensor:
        for low_ranks, rows in self.adapted:
            low_rank = low_ranks.get(id(weight))
            if low_rank is not None:
                low_rank.add(x_TI, out_TO, rows)
        return out_TO


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model, by their numbers from 1."""

    ops: Ops
    low_ranks: Sequence[LowRanks]

    def linears(self, adapted: Sequence[AdapterRows]) -> AdaptedLinears:
        return AdaptedLinears(self.ops, [(self.low_ranks[number - 1], rows) for number, rows in adapted])


class Cut(NamedTuple):
    """This rank's part of a projection: its rows if it is cut by output, else its columns. Neither: all of it."""

    layer: str
    rows: range | None = None
    columns: range | None = None


class AdapterFiles:
    """The open weights of an adapter, to be used as a context manager."""

    def __init__(self, spec: AdapterSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype = spec, dtype
        self._files = TensorFiles([spec.weights], device)

    def __enter__(self) -> AdapterFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def read(self, cuts: Sequence[Cut]) -> LowRank | None:
        """Return what the adapter adds to a weight of these projections, one below the other; None if it adapts none of
        them. Raises ConfigError if it cannot be read or has numbers that are not finite."""
        spec, dtype = self._spec, self._dtype
        downs, ups, rank, column = list[torch.Tensor](), list[Up](), 0, 0
        for layer, rows, columns in cuts:
            adapted, width = spec.layers.get(layer), len(rows or ())
            if adapted is not None:
                down_RI = self._files.read(f"{PREFIX}{layer}{DOWN}", dtype, columns=columns)
                up_OR = self._files.read(f"{PREFIX}{layer}{UP}", torch.float32, rows=rows)
                up_OR = (up_OR * adapted.scale).to(dtype)
                if not bool(torch.isfinite(down_RI).all() & torch.isfinite(up_OR).all()):
                    raise ConfigError(f"{spec.key}: {spec.weights}: {layer} has numbers that are not finite in {dtype}")
                width = up_OR.shape[0]
                downs.append(down_RI)
                ups.append(Up(slice(rank, rank + adapted.rank), slice(column, column + width), up_OR))
                rank += adapted.rank
            column += width
        return LowRank(torch.cat(downs), tuple(ups)) if downs else None


def load_adapters(
    specs: Sequence[AdapterSpec],
    model: DecoderModel,
    query: range,
    key: range,
    inner: range,
    dtype: torch.dtype,
    device: torch.device,
) -> Adapters:
    """Read this rank's part of each adapter. `query`, `key`, `inner`: its rows of q, of k and v, and of the MLP. Raises
    ConfigError as `AdapterFiles` does."""
    weights: list[tuple[LinearWeight, list[Cut]]] = []
    for index, layer in enumerate(model.layers):
        attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{index}"
        if isinstance(attention, AttentionLayer):
            rows = {"q_proj": query, "k_proj": key, "v_proj": key}
            weights.append((attention.qkv, [Cut(f"{prefix}.self_attn.{name}", rows[name]) for name in rows]))
            weights.append((attention.output, [Cut(f"{prefix}.self_attn.o_proj", columns=query)]))
        if isinstance(mlp, GatedMLP):
            weights.append((mlp.gate_up, [Cut(f"{prefix}.mlp.{name}", inner) for name in ("gate_proj", "up_proj")]))
            weights.append((mlp.down, [Cut(f"{prefix}.mlp.down_proj", columns=inner)]))
    found = []
    for spec in specs:
        with AdapterFiles(spec, dtype, device) as files:
            read = ((id(weight), files.read(cuts)) for weight, cuts in weights)
            found.append({key: low_rank for key, low_rank in read if low_rank is not None})
    return Adapters(model.ops, found)
