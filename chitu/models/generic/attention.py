"""The attention of a generic model: the function that the attention modules of `transformers` call in place of theirs
(`AttentionInterface`), over the pages of the cache.

Owned by one model and called only by the step thread, within `step`. A module gives rotated q, k and v of all rows; k
and v go into the pages of its layer, then each row attends to the positions that its sequence, its window and its chunk
let it see. Windows are masks over full pages, of which only those are read that a row can see, or rings in the state
rows (`window_attention.py`). Nothing of another sequence's page is used: it may hold NaN, which no mask would stop.

Shapes as in `ops/interface.py`, and O numbers of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from chitu.errors import Internal, UnsupportedModel
from chitu.models.generic.window_attention import attend_in_rings
from chitu.models.model import KVViews
from chitu.models.window_state import KEYS, VALUES
from chitu.ops.fp8_pages import put_rows
from chitu.ops.interface import Batch, HeadSpec, Ops
from chitu.ops.masked_attention import AttentionKind, attend

KERNEL_WIDTHS = (16, 32, 64, 128)
"""Widths of heads for which the kernels of every device are used."""


@dataclass(slots=True)
class PagedStep:
    """The forward that is being computed."""

    batch: Batch
    cache: KVViews
    on_layer: Callable[[int], None] | None
    pages_T: torch.Tensor
    """Page of each row's position."""
    offsets_T: torch.Tensor
    num_written: int = 0
    """Layers whose k and v are in the pages."""
    num_announced: int = 0
    """Layers for which `on_layer` was called."""

    def announce(self, num_layers: int) -> None:
        """Call `on_layer` for the layers before this number, those without attention among them."""
        if self.on_layer is not None:
            for layer in range(self.num_announced, num_layers):
                self.on_layer(layer)
            self.num_announced = num_layers


class PagedAttention:
    """The attention function of one model."""

    def __init__(self, num_layers: int, is_alone: bool = True, ops: Ops | None = None) -> None:
        """`is_alone`: whether this rank has all heads. Otherwise a layer is written when all ranks have summed up.
        `ops`: compute the layers that ask for nothing but causal attention."""
        self._is_alone = is_alone
        self._ops = ops
        self.name = f"chitu_{id(self):x}"
        """Name by which the library's modules find it."""
        self._num_layers = num_layers
        self._step: PagedStep | None = None

    @contextmanager
    def step(self, batch: Batch, cache: KVViews, on_layer: Callable[[int], None] | None) -> Iterator[None]:
        """Let the modules that are called within it work on this batch."""
        size = next(pages.shape[2] for pages in cache.k if pages.numel())
        pages_T = batch.page_table[batch.slots_T, batch.positions_T // size]
        self._step = step = PagedStep(batch, cache, on_layer, pages_T, batch.positions_T % size)
        try:
            yield
            step.announce(self._num_layers)
        finally:
            self._step = None

    def on_sum(self) -> None:
        """Announce what is written: no rank joins a sum before its own part is."""
        if self._step is not None:
            self._step.announce(self._step.num_written)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with q, k, v `[1, heads, T, N]` and return `[1, T, H, O]`, as the interface wants it."""
        step, layer = self._step, module.layer_idx
        if step is None:
            raise Internal("attention outside a step")
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal:
            raise UnsupportedModel(f"layer {layer} attends to later positions, which is not supported")
        config = module.config
        kinds = getattr(config, "layer_types", None)
        is_chunked = kinds is not None and kinds[layer] == "chunked_attention"
        kind = AttentionKind(
            scale=scaling if scaling is not None else float(query.shape[-1] ** -0.5),
            window=sliding_window,
            chunk=config.attention_chunk_size if is_chunked else None,
            softcap=softcap,
            sinks_H=s_aux,
        )
        q_THN, k_TKN, v_TKO = (x[0].transpose(0, 1) for x in (query, key, value))
        keys_RKWN = step.cache.states.get((layer, KEYS))
        sees_whole = step.batch.images is not None and step.batch.images.ends_T is not None
        if keys_RKWN is not None:
            if sees_whole:
                raise UnsupportedModel("cache.window_state: rows of images attend to later ones: set it to false")
            values_RKWO = step.cache.states[layer, VALUES]
            k_TKN, v_TKO = _padded(k_TKN, keys_RKWN.shape[-1]), _padded(v_TKO, values_RKWO.shape[-1])
            out_THO = attend_in_rings(q_THN, k_TKN, v_TKO, step.batch, keys_RKWN, values_RKWO, kind)
            self._note_written(step, layer)
            return out_THO[..., : value.shape[-1]].unsqueeze(0), None
        k_PKSN, v_PKSN = step.cache.k[layer], step.cache.v[layer]
        put_rows(k_PKSN, step.pages_T, step.offsets_T, _padded(k_TKN, k_PKSN.shape[-1]))
        put_rows(v_PKSN, step.pages_T, step.offsets_T, _padded(v_TKO, v_PKSN.shape[-1]))
        self._note_written(step, layer)
        if self._ops is not None and not sees_whole and _is_plain(kind, q_THN, k_PKSN, v_PKSN):
            out_TC = _by_ops(self._ops, q_THN, step.batch, k_PKSN, v_PKSN, kind.scale)
            return out_TC.view(1, *q_THN.shape), None
        return attend(q_THN, step.batch, k_PKSN, v_PKSN, kind, value.shape[-1]).unsqueeze(0), None

    def _note_written(self, step: PagedStep, layer: int) -> None:
        step.num_written = layer + 1
        if self._is_alone:
            step.announce(step.num_written)


def _is_plain(kind: AttentionKind, q_THN: torch.Tensor, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor) -> bool:
    """Return whether an `Ops` computes the same: causal attention over heads of one width that kernels support. They
    have their own scale; another one is multiplied into q, exactly enough in float32 only."""
    width = q_THN.shape[-1]
    is_simple = kind.window is None and kind.chunk is None and kind.softcap is None and kind.sinks_H is None
    has_one_width = width == k_PKSN.shape[-1] == v_PKSN.shape[-1]
    is_usual = math.isclose(kind.scale, width**-0.5) or q_THN.dtype == torch.float32
    return is_simple and has_one_width and is_usual and width in KERNEL_WIDTHS


def _by_ops(
    ops: Ops, q_THN: torch.Tensor, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention `[T, H N]` by the operations of the device."""
    num_heads, width = q_THN.shape[1:]
    usual = width**-0.5
    q_THN = q_THN.contiguous() if math.isclose(scale, usual) else q_THN * (scale / usual)
    heads = HeadSpec(num_heads, k_PKSN.shape[1], width, eps=0.0)
    return ops.attention(q_THN.contiguous(), heads, batch, k_PKSN, v_PKSN)


def _padded(x_TKN: torch.Tensor, width: int) -> torch.Tensor:
    """Return the rows with zeros behind them, as wide as a page's."""
    return x_TKN if x_TKN.shape[-1] == width else F.pad(x_TKN, (0, width - x_TKN.shape[-1]))
