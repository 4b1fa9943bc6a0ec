"""The operations that a model needs from the device, over flattened tokens, and the batch that they work on.

A step's tokens, of all prefill chunks and all decoding sequences, are one list of T rows. Row t belongs to the sequence
in slot `slots_T[t]`, is at position `positions_T[t]`, and attends to the positions 0 up to its own, through the slot's
page table. Prefill (later chunks see earlier ones), decode and any mix of the two follow this one rule.

Implementations: `torch_ops.py` (any device, any dtype), `native.py` (CPU, float32, own kernels), `triton_ops.py`
(CUDA). The reference for tests is `support/reference_ops.py`. Called only by the step thread.

Shapes: T rows, D hidden, H query heads, K KV heads, N head_dim, P pages, S tokens a page, I MLP width, V vocabulary.
Of latent attention: L latent, R rotated part, C = L + R. Of experts: see `routing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from chitu.ops.kept import Form, Matrix, Weights
from chitu.ops.routing_rule import ClampedGate

if TYPE_CHECKING:
    from chitu.ops.routing import Router

TILE_ROWS = 64
"""Most rows of a tile, whose attention a kernel computes together."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of `length` consecutive rows from `row` on, of one slot, at positions `start`, `start + 1`, ..."""

    row: int
    length: int
    slot: int
    start: int
    state_slot: int = -1
    """Row of the slot's recurrent state (`KVPool.states`); -1 if the model has none."""


class AdapterRows(NamedTuple):
    """The rows of a forward that compute with one LoRA adapter."""

    adapter: int
    """Number of the adapter, from 1."""
    rows: slice | torch.Tensor
    """A slice if the rows are consecutive, else int64 on the device."""


class ImageRows(NamedTuple):
    """The rows of a forward that take an encoder's numbers in the place of their token's embedding."""

    rows_M: torch.Tensor
    """int64 on the device, ascending."""
    features_MD: torch.Tensor
    deeper: tuple[torch.Tensor, ...] = ()
    """Numbers `[M, D]` that are added behind layer 0, 1, ..."""
    ends_T: torch.Tensor | None = None
    """Last position that each row of the forward sees, int64 `[T]` on the device, in models whose rows of images see
    all of their image (Gemma 3); None: its own. Windows cut off what is before them, as ever."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward: first the prefill spans, then those that decode: of each sequence one, or with a draft
    several at consecutive positions. K and V of all rows are written before any row attends."""

    slots_T: torch.Tensor
    """Slot of each row, int64 on the device."""
    positions_T: torch.Tensor
    """Position of each row, int64 on the device."""
    page_table: torch.Tensor
    """Pages of each slot, int64 `[num_slots, max_pages]` on the device. Page i has positions `[i * S, (i + 1) * S)`."""
    spans: tuple[Span, ...]
    spans_X4: torch.Tensor
    """The spans as int64 `[spans, 4]` on the host: row, length, slot, start."""
    tiles_Y4: torch.Tensor
    """The spans cut into tiles of at most `TILE_ROWS` rows, int64 `[tiles, 4]` on the device: first row, rows, slot,
    position of the first row. A tile without rows is padding."""
    decode_row: int
    """First row that decodes; T if there is none."""
    decode_slots: tuple[int, ...]
    """Slot of each row that decodes."""
    max_decode_len: int
    """The longest KV length, new token included, of the decoding sequences."""
    decode_states: tuple[int, ...] = ()
    """State rows of `decode_slots`, in the same order; empty if the model has no recurrent state."""
    adapters: tuple[AdapterRows, ...] = ()
    """Each adapter once; empty if no row has one."""
    first_position: int = 0
    """Position from which rows attend, as a drafting layer has no entry before it; a row before it sees itself alone.
    Latent attention only."""
    rope_3T: torch.Tensor | None = None
    """Positions by which rows are rotated (time, height, width), int64 `[3, T]` on the device; None: `positions_T`."""
    images: ImageRows | None = None
    """Rows that are of images; None if all are tokens."""


def tiles_of(spans: Sequence[Span]) -> list[tuple[int, int, int, int]]:
    """Return the rows of `Batch.tiles_Y4`."""
    return [
        (span.row + offset, min(TILE_ROWS, span.length - offset), span.slot, span.start + offset)
        for span in spans
        for offset in range(0, span.length, TILE_ROWS)
    ]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin `[max_positions, N / 2]`, float32, for the half-split rotation of Llama."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Heads of an attention layer, the per-head norms of Qwen3 (None elsewhere), and what it adds to causal
    attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    q_norm_N: torch.Tensor | None = None
    k_norm_N: torch.Tensor | None = None
    window: int | None = None
    """Last positions that a row sees, its own included; None for all."""
    sinks_H: torch.Tensor | None = None
    """Logits, float32, that take weight from the positions and give nothing (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Return whether the layer's attention is causal and nothing else."""
        return self.window is None and self.sinks_H is None


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads of latent attention (`models/layers.py`). A cache row has `latent_dim` normed numbers, then `rope_dim`
    rotated ones. The pages are `[P, 1, S, C]`: one KV head with C = latent_dim + rope_dim."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    softmax_scale: float
    eps: float
    norm_L: torch.Tensor


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of each row (int64 `[T, A]`) and their weights (float32); see `routing.py`."""

    experts_TA: torch.Tensor
    weights_TA: torch.Tensor


class ExpertBiases(NamedTuple):
    """Biases of a layer's experts."""

    gate_up_EG: torch.Tensor
    """`[E, 2 I]`, of gates first."""
    down_ED: torch.Tensor | None
    """None on a rank that has a part of each expert, unless it is the one that adds them."""


class LinearWeight(Protocol):
    """A weight `[out, in]` and its bias, in the form of the implementation."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class ExpertWeights(Protocol):
    """The gated MLPs of a layer's experts, in the form of the implementation."""

    @property
    def num_experts(self) -> int: ...


def no_callback() -> None:
    """Do nothing, in place of a callback."""


class Ops(Protocol):
    """Operations of a device. Results are new tensors unless documented otherwise; the next call may reuse them."""

    @property
    def name(self) -> str: ...

    def keeps(self, form: Form, run: int, inputs: int) -> bool:
        """Return whether `prepare` keeps `KeptBlocks` of this form as small as they are, with a scale for each `run` of
        so many inputs. Sums are in float32 over numbers that are not rounded to the dtype of the rows, so on a CPU in
        float32 results have the bits of dequantised weights."""
        return False

    def beside(self) -> Ops:
        """Return these operations for another thread: two of its calls and of ours may run at the same time."""
        return self

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> LinearWeight:
        """Convert a `[out, in]` weight to the form that `linear` needs. The argument may be dropped afterwards."""
        ...

    def prepare_gate_up(self, weight: Matrix, bias: torch.Tensor | None) -> LinearWeight:
        """Convert a fused `[2 I, D]` weight, gate rows first, to the form that `gate_up` needs."""
        ...

    def rows_of(self, weight: LinearWeight, rows_T: torch.Tensor) -> torch.Tensor:
        """Return these rows `[T, in]` of a weight from `prepare`, a new tensor, as an embedding has them."""
        ...

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Return `x W^T + b`."""
        ...

    def linear_add(self, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor) -> torch.Tensor:
        """Compute `residual += x W^T + b` in place and return residual."""
        ...

    def gate_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Return `silu(gate) * up` `[T, I]` for a weight from `prepare_gate_up`."""
        ...

    def gate_and_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Return gate and up side by side, `[T, 2 I]`, for a weight from `prepare_gate_up`."""
        ...

    def norm_linear(self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight) -> torch.Tensor:
        """Return `linear(rms_norm(x))`. One launch on a device on which launches are costly."""
        return self.linear(self.rms_norm(x_TD, norm_D, eps), weight)

    def norm_logits(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `norm_linear(x)` as float32, in `out` if that is given. One launch on a device on which launches are
        costly."""
        logits_TV = self.norm_linear(x_TD, norm_D, eps, weight)
        return logits_TV.float() if out_TV is None else out_TV.copy_(logits_TV)

    def norm_gate_up(self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight) -> torch.Tensor:
        """Return `gate_up(rms_norm(x))`."""
        return self.gate_up(self.rms_norm(x_TD, norm_D, eps), weight)

    def prepare_experts(
        self,
        gate_up_EGD: Weights,
        down_EDI: Weights,
        biases: ExpertBiases | None = None,
        gate: ClampedGate | None = None,
    ) -> ExpertWeights:
        """Convert the experts' `[E, 2 I, D]` (gate rows first) and `[E, D, I]` to the form that `mixture` needs.
        `gate`: theirs, unless it is `silu(gate) * up`."""
        ...

    def route(self, x_TD: torch.Tensor, router: Router) -> Routes:
        """Return the experts of each row and their weights, new tensors, as `routing.route` does."""
        ...

    def mixture(self, x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
        """Return the weighted sum of the results of each row's experts, `[T, D]`, a new tensor. A pair of expert
        `num_experts` is of nobody here: it has weight 0, and no part in the sum, whatever is in the row."""
        ...

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMS norm over the last dimension, with statistics in float32."""
        ...

    def rope_append(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
    ) -> torch.Tensor:
        """Norm and rotate q and k of `[T, (H + 2 K) N]`, write k and v into the pages, and return q `[T, H, N]`."""
        ...

    def attention(
        self, q_THN: torch.Tensor, heads: HeadSpec, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor
    ) -> torch.Tensor:
        """Return the causal attention `[T, H N]` of every row over its slot's pages."""
        ...

    def append_attention(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
        written: Callable[[], None] = no_callback,
    ) -> torch.Tensor:
        """Do what `rope_append` and then `attention` do, and return `[T, H N]`. Call `written` once K and V of all
        spans are written. Decoding rows are one launch on a device on which launches are costly."""
        q_THN = self.rope_append(qkv_TC, heads, rotary, batch, k_PKSN, v_PKSN)
        written()
        return self.attention(q_THN, heads, batch, k_PKSN, v_PKSN)

    def latent_append(
        self, kv_TC: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch, pages_PKSC: torch.Tensor
    ) -> None:
        """Norm the latent of each row, rotate the rest, and write both into the pages. The rows may be strided."""
        ...

    def latent_query(
        self, q_THE: torch.Tensor, key_HNL: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch
    ) -> torch.Tensor:
        """Map queries `[T, H, N + R]` to `[T, H, L + R]`: multiply the first N numbers by the head's key weight, rotate
        the rest. The rows may be strided."""
        ...

    def latent_attention(
        self, q_THC: torch.Tensor, heads: LatentHeads, batch: Batch, pages_PKSC: torch.Tensor
    ) -> torch.Tensor:
        """Return the causal attention `[T, H, L]` of every row over its slot's pages, whose rows are the keys and whose
        latents are the values."""
        ...
