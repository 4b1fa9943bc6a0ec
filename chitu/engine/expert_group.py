"""Experts that are spread over the ranks of a group: rows of each rank go through the experts of all ranks.

Expert rank e = data rank x TP size + TP rank holds its share of the experts of each layer, whole. Rows move among the
ranks of *equal TP rank*, one of each member; the sum over TP ranks that follows every mixture adds the rest. Routes
travel with the rows: a product of another shape may break a near-tie otherwise, and a row would lose an expert or get
one twice.

Two exchanges do the same. *gather* sends all rows to all ranks, padded to the longest, and gets sums back: fixed shapes
and two calls. *all_to_all* sends a row only to ranks that have one of its experts, and counts first: fewer bytes and
three calls. Steps with prompt tokens take the latter. Padding is never computed, whatever it holds.

A recorded step is a gather in which all ranks have the rows of one bucket. What its rows are is known on the device
alone: pairs of other ranks, and those of rows that only pad the bucket, are of nobody here (`Ops.mixture`).

Shapes: T rows of this rank, G rows that it got, A experts of a row, D hidden size. Called by the layers, on the step
thread. Invariant: all ranks make the same calls in the same order, those of a step behind `begin` with equal sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from chitu.config.tensor_parallel import share_of
from chitu.engine.executor import StepSizes
from chitu.errors import Internal
from chitu.models.layers import Compute
from chitu.ops.interface import Routes

Way = Literal["auto", "gather", "all_to_all"]


class Links(Protocol):
    """Calls among the ranks of equal TP rank, by data rank. Every rank makes them in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x_RC: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, which have equally many, `[size R, C]`."""
        ...

    def reduce_scatter(self, x_RC: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of `R / size` rows, summed over the ranks."""
        ...

    def all_to_all(self, x_RC: torch.Tensor, sends: Sequence[int], takes: Sequence[int]) -> torch.Tensor:
        """Send `sends[i]` rows to rank i, in order; return `takes[i]` rows of each rank i."""
        ...


class GroupLinks:
    """`Links` of a process group, whose ranks stand in the order of data ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, x_RC: torch.Tensor) -> torch.Tensor:
        out = x_RC.new_empty(self.size * x_RC.shape[0], x_RC.shape[1])
        dist.all_gather(list(out.chunk(self.size)), x_RC.contiguous(), group=self._group)
        return out

    def reduce_scatter(self, x_RC: torch.Tensor) -> torch.Tensor:
        out = x_RC.new_empty(x_RC.shape[0] // self.size, x_RC.shape[1])
        dist.reduce_scatter(out, list(x_RC.contiguous().chunk(self.size)), group=self._group)
        return out

    def all_to_all(self, x_RC: torch.Tensor, sends: Sequence[int], takes: Sequence[int]) -> torch.Tensor:
        out = x_RC.new_empty(sum(takes), x_RC.shape[1])
        dist.all_to_all_single(out, x_RC.contiguous(), list(takes), list(sends), group=self._group)
        return out


class ExpertGroup:
    """A `Spread`. `links`: None if its instance is the only member, whose TP ranks have whole experts."""

    def __init__(self, links: Links | None, tp_rank: int = 0, tp_size: int = 1, way: Way = "auto") -> None:
        self._links = links
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._way = way
        self._rank, self._size = (links.rank, links.size) if links is not None else (0, 1)
        self._sizes: Sequence[StepSizes] = ()
        self._real_T: torch.Tensor | None = None

    @property
    def has_members(self) -> bool:
        """Whether rows move to other members."""
        return self._links is not None

    def own(self, num_experts: int) -> range:
        return self._held_by(self._rank, num_experts)

    def _held_by(self, data_rank: int, num_experts: int) -> range:
        """Return the experts of the rank of this TP rank in a member."""
        return share_of(num_experts, self._size * self._tp_size, data_rank * self._tp_size + self._tp_rank)

    def begin(self, sizes: Sequence[StepSizes]) -> None:
        """Begin a step in which the members compute rows of these sizes."""
        self._sizes = sizes

    @contextmanager
    def recorded(self, real_T: torch.Tensor) -> Iterator[None]:
        """Compute a forward for a recording, in which all members have as many rows. `real_T`: bool, those that do not
        pad."""
        self._real_T = real_T
        try:
            yield
        finally:
            self._real_T = None

    def own_part(self, x_TD: torch.Tensor, routes: Routes, num_experts: int, compute: Compute) -> torch.Tensor:
        own = self.own(num_experts)
        place_TA = routes.experts_TA - own.start
        if self._real_T is not None:
            is_own_TA = (place_TA >= 0) & (place_TA < len(own))
            place_TA = place_TA.masked_fill(~is_own_TA, len(own))
            return compute(x_TD, Routes(place_TA, routes.weights_TA.masked_fill(~is_own_TA, 0)))
        row_P, at_P = ((place_TA >= 0) & (place_TA < len(own))).nonzero(as_tuple=True)
        if not row_P.shape[0]:
            return torch.zeros_like(x_TD)
        pairs = Routes(place_TA[row_P, at_P].unsqueeze(1), routes.weights_TA[row_P, at_P].unsqueeze(1))
        return _added(compute(x_TD[row_P].contiguous(), pairs), row_P, x_TD)

    def mixture(self, x_TD: torch.Tensor, routes: Routes, num_experts: int, compute: Compute) -> torch.Tensor:
        if self._real_T is not None:
            nobody_TA = routes.experts_TA.masked_fill(~self._real_T.unsqueeze(1), num_experts)
            routes = Routes(nobody_TA, routes.weights_TA)
        if self._links is None:
            return self.own_part(x_TD, routes, num_experts, compute)
        if self._real_T is not None:
            got = _unpacked(self._links.all_gather(_packed(x_TD, routes)), x_TD.shape[1], routes)
            return self._links.reduce_scatter(self.own_part(*got, num_experts, compute))
        if len(self._sizes) != self._size or self._sizes[self._rank].rows != x_TD.shape[0]:
            raise Internal(f"{x_TD.shape[0]} rows of member {self._rank} in a step of a group with {self._sizes}")
        has_prompts = any(each.prompt_rows for each in self._sizes)
        if self._way == "gather" or (self._way == "auto" and not has_prompts):
            return self._by_gather(self._links, x_TD, routes, num_experts, compute)
        return self._by_all_to_all(self._links, x_TD, routes, num_experts, compute)

    def _by_gather(
        self, links: Links, x_TD: torch.Tensor, routes: Routes, num_experts: int, compute: Compute
    ) -> torch.Tensor:
        rows = [each.rows for each in self._sizes]
        most, num_rows = max(rows), x_TD.shape[0]
        packed_TC = _packed(x_TD, routes)
        mine = packed_TC.new_zeros(most, packed_TC.shape[1])
        mine[:num_rows] = packed_TC
        all_RC = links.all_gather(mine)
        real = torch.cat([torch.arange(most * rank, most * rank + count) for rank, count in enumerate(rows)])
        real = real.to(x_TD.device)
        got = _unpacked(all_RC[real], x_TD.shape[1], routes)
        sums_RD = x_TD.new_zeros(all_RC.shape[0], x_TD.shape[1])
        sums_RD[real] = self.own_part(*got, num_experts, compute)
        return links.reduce_scatter(sums_RD)[:num_rows].clone()

    def _by_all_to_all(
        self, links: Links, x_TD: torch.Tensor, routes: Routes, num_experts: int, compute: Compute
    ) -> torch.Tensor:
        owner_E = torch.full((num_experts,), -1)
        for rank in range(self._size):
            held = self._held_by(rank, num_experts)
            owner_E[held.start : held.stop] = rank
        ranks = torch.arange(self._size, device=x_TD.device)
        goes_TR = (owner_E.to(x_TD.device)[routes.experts_TA].unsqueeze(-1) == ranks).any(1)
        row_S = goes_TR.t().nonzero()[:, 1]  # by rank, then by row
        sends = goes_TR.sum(0)
        ones = [1] * self._size
        takes = links.all_to_all(sends.unsqueeze(1), ones, ones).flatten().tolist()
        counts = sends.tolist()
        got_GC = links.all_to_all(_packed(x_TD, routes)[row_S], counts, takes)
        sums_GD = self.own_part(*_unpacked(got_GC, x_TD.shape[1], routes), num_experts, compute)
        back_SD = links.all_to_all(sums_GD, takes, counts)
        return _added(back_SD, row_S, x_TD)


def _packed(x_TD: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return each row with its routes behind it, as bits of the rows' dtype."""
    ids, weights = routes.experts_TA.to(torch.int32), routes.weights_TA.float()
    return torch.cat([x_TD, ids.view(x_TD.dtype), weights.view(x_TD.dtype)], dim=1)


def _unpacked(packed_GC: torch.Tensor, width: int, like: Routes) -> tuple[torch.Tensor, Routes]:
    """Return rows of `width` and their routes, which have the form of `like`."""
    x_GD, behind = packed_GC[:, :width], packed_GC[:, width:]
    half = behind.shape[1] // 2
    ids, weights = behind[:, :half].contiguous().view(torch.int32), behind[:, half:].contiguous().view(torch.float32)
    return x_GD, Routes(ids.to(like.experts_TA.dtype), weights.to(like.weights_TA.dtype))


def _added(y_PD: torch.Tensor, row_P: torch.Tensor, like_TD: torch.Tensor) -> torch.Tensor:
    """Return `[T, D]` of the form of `like_TD`: the sums of the rows with equal `row_P`, added in float32."""
    sums_TD = torch.zeros(like_TD.shape, dtype=torch.float32, device=like_TD.device)
    return sums_TD.index_add_(0, row_P, y_PD.float()).to(like_TD.dtype)
