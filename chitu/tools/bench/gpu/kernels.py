"""Ceilings of the device, and decode attention against them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from chitu.ops.interface import HeadSpec, RotaryTable
from chitu.ops.kernels.attention import append_attention, num_splits_for
from chitu.ops.kernels.blocks import WORDS_AT_ONCE, _copy_pieces
from chitu.ops.kernels.router import counters
from chitu.tools.bench.gpu.card import PAGE_SIZE, Card, Row, at_least

BLOCK_BYTES = 64 << 10
ATTENTION_AIM = 0.95


def ceilings(card: Card) -> Iterator[Row]:
    """Measure a plain copy, a large matrix product and a copy of scattered blocks, and keep them in `card.ceilings`."""
    sizes, device = card.sizes, card.device
    source = torch.randint(-(2**30), 2**30, (sizes.copy_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    card.ceilings.copy_bytes_per_s = 2 * sizes.copy_bytes / card.seconds(lambda: target.copy_(source))
    yield Row("copy, read + written", card.ceilings.copy_bytes_per_s / 1e9, "GB/s")

    factors = torch.randn(2, sizes.matmul_size, sizes.matmul_size, device=device, dtype=card.dtype)
    card.ceilings.flops_per_s = 2 * sizes.matmul_size**3 / card.seconds(lambda: factors[0] @ factors[1])
    yield Row(f"matmul {sizes.matmul_size}, {sizes.dtype}", card.ceilings.flops_per_s / 1e12, "TFLOP/s")

    seconds, count = _scattered_seconds(card, source, target)
    card.ceilings.scattered_bytes_per_s = count * BLOCK_BYTES / seconds
    yield Row(f"{count} scattered blocks of 64 KiB, payload", card.ceilings.scattered_bytes_per_s / 1e9, "GB/s")


def _scattered_seconds(card: Card, source: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    """Time the kernel alone on 7 in 16 of the buffers' blocks (448 MiB of a GiB: the K and V of 4096 tokens)."""
    num_blocks = source.numel() * source.itemsize // BLOCK_BYTES
    count = num_blocks * 7 // 16
    pieces_3N = torch.stack(
        [
            source.data_ptr() + torch.randperm(num_blocks, device=card.device)[:count] * BLOCK_BYTES,
            target.data_ptr() + torch.randperm(num_blocks, device=card.device)[:count] * BLOCK_BYTES,
            torch.full((count,), BLOCK_BYTES // 8, device=card.device),
        ]
    )
    kernel: Any = _copy_pieces[(count, BLOCK_BYTES // 8 // WORDS_AT_ONCE)]
    seconds = card.seconds(lambda: kernel(pieces_3N, count, WORD_BYTES=8, BLOCK=WORDS_AT_ONCE, num_warps=4))
    return seconds, count


def attention(card: Card) -> Iterator[Row]:
    """Measure attention, from the fused projection, against a copy of K and V's bytes. Regions take turns, so the
    device's cache never hits."""
    sizes = card.sizes
    for batch in sizes.attention_batches:
        pages_each = -(-sizes.attention_context // PAGE_SIZE)
        shape = (batch * pages_each, sizes.kv_heads, PAGE_SIZE, sizes.head_dim)
        num_layers = max(1, 256 // batch // 2) if card.is_gpu else 1
        regions = [
            [torch.randn(shape, device=card.device, dtype=card.dtype) for _ in range(2)] for _ in range(num_layers)
        ]
        table = torch.randperm(batch * pages_each, device=card.device).view(batch, pages_each)
        slots = torch.arange(batch, device=card.device)
        positions = torch.full((batch,), sizes.attention_context - 1, device=card.device)
        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        qkv = torch.randn(batch, width, device=card.device, dtype=card.dtype)
        out = torch.empty(batch, sizes.heads, sizes.head_dim, device=card.device, dtype=card.dtype)
        norms = torch.ones(2, sizes.head_dim, device=card.device, dtype=card.dtype)
        heads = HeadSpec(sizes.heads, sizes.kv_heads, sizes.head_dim, 1e-6, norms[0], norms[1])
        angles = torch.zeros(sizes.attention_context, sizes.head_dim // 2, device=card.device)
        rotary, arrived = RotaryTable(angles.cos(), angles), counters(card.device, batch * sizes.kv_heads)
        multiprocessors = torch.cuda.get_device_properties(card.device).multi_processor_count if card.is_gpu else batch
        splits = num_splits_for(batch, sizes.kv_heads, sizes.attention_context, multiprocessors)

        rows = slots, positions, table, out, splits, arrived

        def body(regions=regions, qkv=qkv, heads=heads, rotary=rotary, rows=rows) -> None:  # type: ignore[no-untyped-def]
            for k, v in regions:
                append_attention(qkv, heads, rotary, k, v, *rows)

        seconds = card.seconds(card.recorder().record(body)) / num_layers
        nbytes = 2 * batch * sizes.attention_context * sizes.kv_heads * sizes.head_dim * qkv.itemsize
        what = f"decode attention, batch {batch}, context {sizes.attention_context}, {splits} splits"
        ratio = nbytes / seconds / card.ceilings.copy_bytes_per_s
        yield at_least(what, seconds * 1e6, "us", ratio, "copy bandwidth", ATTENTION_AIM)
        del regions
