"""Triton kernels on the device against torch in float32 on the same inputs, with the shapes of real models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_batches import PAGE, batch_on
from gpu_errors import relative_error

from chitu.ops.fp8_pages import scales_of, take_pages, values_of
from chitu.ops.interface import HeadSpec, RotaryTable
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import fp8_head_bytes

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.blocks import BlockCopier
from chitu.ops.kernels.small_linear import MAX_ROWS
from chitu.ops.triton_ops import TritonOps

pytestmark = pytest.mark.engine

SHAPES = [(16, 8, 128), (32, 8, 128), (28, 4, 128), (9, 3, 64)]
TWIN = TorchOps()


def shapes_of(card) -> list[tuple[int, int, int]]:
    return [(4, 2, 32)] if card.is_twin else SHAPES


@pytest.mark.parametrize(("seed", "dtype"), [(0, None), (1, None), (2, torch.float32)], ids=str)
def test_attention_of_spans_and_decodes(card, seed, dtype):
    """Runs in the card's dtype and in float32, which has smaller tiles."""
    ops = TritonOps(card.num_multiprocessors)
    for heads, kv_heads, dim in shapes_of(card):
        spec = HeadSpec(heads, kv_heads, dim, 1e-6)
        batch, num_pages = batch_on(card, seed)
        torch.manual_seed(seed)
        k, v = torch.randn(2, num_pages, kv_heads, PAGE, dim, device=card.device).to(dtype or card.dtype)
        q = torch.randn(len(batch.slots_T), heads, dim, device=card.device).to(k.dtype)
        expected = TWIN.attention(q.float(), spec, batch, k.float(), v.float())
        found = ops.attention(q, spec, batch, k, v)
        assert relative_error(found[: batch.decode_row], expected[: batch.decode_row]) < 0.005
        assert relative_error(found[batch.decode_row :], expected[batch.decode_row :]) < 0.005


def test_attention_never_reads_what_is_not_a_sequences_own(card):
    """Everything behind the end of a sequence is NaN: reading one number of it would spoil a row."""
    ops = TritonOps(card.num_multiprocessors)
    heads, kv_heads, dim = shapes_of(card)[0]
    batch, num_pages = batch_on(card, 2)
    k, v = torch.full((2, num_pages, kv_heads, PAGE, dim), float("nan"), device=card.device, dtype=card.dtype)
    ends = {}
    for slot, position in zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True):
        ends[slot] = max(position + 1, ends.get(slot, 0))
    for slot, end in ends.items():
        own = torch.arange(end, device=card.device)
        pages = batch.page_table[slot, own // PAGE]
        for region in (k, v):
            region[pages, :, own % PAGE] = torch.randn(end, kv_heads, dim, device=card.device).to(card.dtype)
    q = torch.randn(len(batch.slots_T), heads, dim, device=card.device).to(card.dtype)
    assert not ops.attention(q, HeadSpec(heads, kv_heads, dim, 1e-6), batch, k, v).isnan().any()


def test_rotation_norms_and_pages(card):
    ops = TritonOps(card.num_multiprocessors)
    for heads, kv_heads, dim in shapes_of(card):
        batch, num_pages = batch_on(card, 3)
        torch.manual_seed(dim)
        norms = (torch.rand(2, dim, device=card.device) + 0.5).to(card.dtype)
        spec = HeadSpec(heads, kv_heads, dim, 1e-6, norms[0], norms[1])
        wide = HeadSpec(heads, kv_heads, dim, 1e-6, norms[0].float(), norms[1].float())
        angles = torch.rand(int(batch.positions_T.max()) + 1, dim // 2, device=card.device) * 6
        rotary = RotaryTable(angles.cos(), angles.sin())
        qkv = torch.randn(len(batch.slots_T), (heads + 2 * kv_heads) * dim, device=card.device).to(card.dtype)
        shape = (num_pages, kv_heads, PAGE, dim)
        own = torch.zeros(2, *shape, device=card.device, dtype=card.dtype)
        right = torch.zeros(2, *shape, device=card.device)
        expected = TWIN.rope_append(qkv.float(), wide, rotary, batch, right[0], right[1])
        found = ops.rope_append(qkv, spec, rotary, batch, own[0], own[1])
        assert relative_error(found, expected) < 0.005
        assert relative_error(own[0], right[0]) < 0.005
        assert torch.equal(own[1].float(), right[1]), "values are copied as they are"


def test_attention_from_the_projection_is_that_of_two_launches_each_time(card):
    """The last split joins what the others stored: a stale number would show in one of many runs."""
    ops = TritonOps(card.num_multiprocessors)
    for heads, kv_heads, dim in shapes_of(card):
        batch, num_pages = batch_on(card, 1)
        torch.manual_seed(dim)
        norms = (torch.rand(2, dim, device=card.device) + 0.5).to(card.dtype)
        spec = HeadSpec(heads, kv_heads, dim, 1e-6, norms[0], norms[1])
        angles = torch.rand(int(batch.positions_T.max()) + 1, dim // 2, device=card.device) * 6
        rotary = RotaryTable(angles.cos(), angles.sin())
        qkv = torch.randn(len(batch.slots_T), (heads + 2 * kv_heads) * dim, device=card.device).to(card.dtype)
        k, v = torch.randn(2, num_pages, kv_heads, PAGE, dim, device=card.device).to(card.dtype)
        right_k, right_v = k.clone(), v.clone()
        expected = ops.attention(
            ops.rope_append(qkv, spec, rotary, batch, right_k, right_v), spec, batch, right_k, right_v
        )
        first = ops.append_attention(qkv, spec, rotary, batch, k, v)
        assert relative_error(first, expected.float()) < 0.005
        assert relative_error(k, right_k.float()) < 0.001 and torch.equal(v, right_v)
        for _ in range(card.size(200, 1)):
            assert torch.equal(ops.append_attention(qkv, spec, rotary, batch, k, v), first)


def test_pages_of_e4m3_and_attention_over_them(card):
    """Values become the same bytes as in torch. So do keys, except where the rotation's last bit decides."""
    ops = TritonOps(card.num_multiprocessors)
    for heads, kv_heads, dim in shapes_of(card):
        batch, num_pages = batch_on(card, 4, longest=card.size(6000, 40))
        torch.manual_seed(dim)
        spec = HeadSpec(heads, kv_heads, dim, 1e-6)
        angles = torch.rand(int(batch.positions_T.max()) + 1, dim // 2, device=card.device) * 6
        rotary = RotaryTable(angles.cos(), angles.sin())
        width = (heads + 2 * kv_heads) * dim
        raw = torch.zeros(4, num_pages, kv_heads, fp8_head_bytes(PAGE, dim), dtype=torch.uint8, device=card.device)
        k, v, right_k, right_v = (values_of(pages, PAGE, dim) for pages in raw)
        longest = len(rotary.cos)
        rows = torch.arange(longest, device=card.device)
        for slot in range(batch.page_table.shape[0]):
            own = replace(batch, slots_T=torch.full_like(rows, slot), positions_T=rows)
            qkv = (torch.randn(longest, width, device=card.device) * 3).to(card.dtype)
            ops.rope_append(qkv, spec, rotary, own, k, v)
            TWIN.rope_append(qkv.float(), spec, rotary, own, right_k, right_v)
        assert torch.equal(raw[1], raw[3])
        assert (raw[0] != raw[2]).float().mean() < 0.004  # a GPU rotates with fused products, the twin does not
        everything = torch.arange(num_pages, device=card.device)
        found, expected = (take_pages(pages, everything, torch.float32) for pages in (k, right_k))
        assert relative_error(found, expected) < 0.002
        assert (scales_of(k) > 0).any() and not scales_of(k).isnan().any()
        q = torch.randn(len(batch.slots_T), heads, dim, device=card.device).to(card.dtype)
        expected = TWIN.attention(q.float(), spec, batch, k, v)
        found = ops.attention(q, spec, batch, k, v)
        assert relative_error(found[: batch.decode_row], expected[: batch.decode_row]) < 0.005
        assert relative_error(found[batch.decode_row :], expected[batch.decode_row :]) < 0.005


@pytest.mark.parametrize("rows", [1, 8, 17, MAX_ROWS, MAX_ROWS + 1])
def test_products(card, rows):
    """Runs with the norm before the product, with and without a gate."""
    ops = TritonOps(card.num_multiprocessors)
    inner, out = card.size(4096, 96), card.size(12288, 80)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inner), torch.randn(out, inner) * inner**-0.5
    norm, residual = torch.rand(inner) + 0.5, torch.randn(rows, out)
    x, weight, norm, residual = (tensor.to(card.device, card.dtype) for tensor in (x, weight, norm, residual))
    plain, wide = ops.prepare(weight, None), TWIN.prepare(weight.float(), None)
    expected = TWIN.norm_linear(x.float(), norm.float(), 1e-6, wide)
    assert relative_error(ops.norm_linear(x, norm, 1e-6, plain), expected) < 0.01
    expected = TWIN.linear_add(x.float(), wide, residual.float().clone())
    assert relative_error(ops.linear_add(x, plain, residual.clone()), expected) < 0.01
    gated, wide = ops.prepare_gate_up(weight, None), TWIN.prepare_gate_up(weight.float(), None)
    expected = TWIN.norm_gate_up(x.float(), norm.float(), 1e-6, wide)
    assert relative_error(ops.norm_gate_up(x, norm, 1e-6, gated), expected) < 0.01


def test_scattered_pieces_arrive_and_nothing_else_changes(card):
    rng = np.random.default_rng(0)
    size, count = card.size(64 << 20, 1 << 16), card.size(900, 20)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=card.device)
    target = torch.zeros_like(source)
    starts = np.sort(rng.choice(size // 4096, count, replace=size // 4096 < count)) * 4096
    lengths = rng.integers(0, 4096 // 16, count) * 16
    expected = target.clone()
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        expected[start : start + length] = source[start : start + length]
    copier = BlockCopier(str(card.device))
    copier.copy(source.data_ptr() + starts, target.data_ptr() + starts, lengths)
    assert torch.equal(target, expected)
