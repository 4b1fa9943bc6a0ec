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
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from chitu.errors import ConfigError, Internal
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

    def on(self, device: torch.device) -> LowRank:
        """Return it in the memory of a device."""
        ups = tuple([up._replace(weight_OR=up.weight_OR.to(device)) for up in self.ups])
        return LowRank(self.down_RI.to(device), ups)


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


ReadAdapter = Sequence[LowRank | None]
"""What an adapter adds to each weight that can be adapted, in the order of the model (`adaptable`); on the host."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model, by their numbers."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    weights: Sequence[tuple[LinearWeight, Sequence[Cut]]]
    """`adaptable` of the model."""
    low_ranks: dict[int, LowRanks] = field(default_factory=dict)

    @property
    def has_any(self) -> bool:
        return bool(self.low_ranks)

    def linears(self, adapted: Sequence[AdapterRows]) -> AdaptedLinears:
        for number, _ in adapted:
            if number not in self.low_ranks:
                raise Internal(f"rows with LoRA adapter {number}, and loaded are {sorted(self.low_ranks)}")
        return AdaptedLinears(self.ops, [(self.low_ranks[number], rows) for number, rows in adapted])

    def read(self, spec: AdapterSpec) -> ReadAdapter:
        """Read this rank's part of an adapter into host memory. Any thread. Raises ConfigError as `AdapterFiles`
        does."""
        with torch.inference_mode(), AdapterFiles(spec, self.dtype, torch.device("cpu")) as files:
            return [files.read(cuts) for _, cuts in self.weights]

    def put(self, number: int, adapter: ReadAdapter) -> None:
        """Compute with what was read. No step is in flight."""
        pairs = zip(self.weights, adapter, strict=True)
        self.low_ranks[number] = {id(w): part.on(self.device) for (w, _), part in pairs if part is not None}

    def drop(self, number: int) -> None:
        """Give back the memory of an adapter, which no slot has."""
        self.low_ranks.pop(number, None)

    def take_over(self, other: Adapters) -> None:
        """Compute with the adapters of a model of the same kind, which this one replaces."""
        for number, low_ranks in other.low_ranks.items():
            places = zip(other.weights, self.weights, strict=True)
            found = [(id(mine), low_ranks.get(id(theirs))) for (theirs, _), (mine, _) in places]
            self.low_ranks[number] = {key: part for key, part in found if part is not None}


def adaptable(model: DecoderModel, query: range, key: range, inner: range) -> list[tuple[LinearWeight, Sequence[Cut]]]:
    """Return the weights to whose results adapters may add, with their projections. `query`, `key`, `inner`: this
    rank's rows of q, of k and v, and of the MLP."""
    weights: list[tuple[LinearWeight, Sequence[Cut]]] = []
    for index, layer in enumerate(model.layers):
        attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{index}"
        if isinstance(attention, AttentionLayer):
            rows = {"q_proj": query, "k_proj": key, "v_proj": key}
            weights.append((attention.qkv, [Cut(f"{prefix}.self_attn.{name}", rows[name]) for name in rows]))
            weights.append((attention.output, [Cut(f"{prefix}.self_attn.o_proj", columns=query)]))
        if isinstance(mlp, GatedMLP):
            weights.append((mlp.gate_up, [Cut(f"{prefix}.mlp.{name}", inner) for name in ("gate_proj", "up_proj")]))
            weights.append((mlp.down, [Cut(f"{prefix}.mlp.down_proj", columns=inner)]))
    return weights
