"""Latent attention: every implementation equals the reference, and absorbed weights equal expanded keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops_batch import MAX_PAGES, NUM_PAGES, PAGE_SIZE, random_batch
from support.reference_ops import ReferenceOps

from chitu.ops.interface import Batch, LatentHeads, Ops, RotaryTable
from chitu.ops.torch_ops import TorchOps

REFERENCE = ReferenceOps()
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


@pytest.fixture(params=["torch", "triton"])
def ops(request) -> Ops:
    if request.param == "torch":
        return TorchOps()
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    return TritonOps(132)


def latent_heads(num_heads: int, latent: int, rope: int) -> LatentHeads:
    return LatentHeads(num_heads, latent, rope, 0.17, 1e-6, torch.rand(latent) + 0.5)


def random_rotary(rope: int) -> RotaryTable:
    angles = torch.rand(MAX_PAGES * PAGE_SIZE, rope // 2) * 6
    return RotaryTable(angles.cos(), angles.sin())


def pages_of(width: int) -> torch.Tensor:
    return torch.randn(NUM_PAGES, 1, PAGE_SIZE, width)


@pytest.mark.parametrize(
    ("num_heads", "latent", "rope", "seed"),
    [(4, 32, 16, 0), (4, 32, 16, 2), (5, 40, 8, 2), (5, 40, 8, 11), (20, 64, 16, 2), (20, 64, 16, 11)],
    ids=str,
)
@pytest.mark.parametrize("first_position", [0, 1])
def test_attention_equals_the_reference(ops, num_heads, latent, rope, seed, first_position):
    torch.manual_seed(seed)
    heads, pages = latent_heads(num_heads, latent, rope), pages_of(latent + rope)
    batch = replace(random_batch(seed), first_position=first_position)
    q = torch.randn(len(batch.slots_T), num_heads, latent + rope)
    expected = REFERENCE.latent_attention(q, heads, batch, pages)
    torch.testing.assert_close(ops.latent_attention(q, heads, batch, pages), expected, **CLOSE)


def test_attention_never_reads_past_the_end_of_a_sequence(ops):
    torch.manual_seed(0)
    heads, batch, pages = latent_heads(4, 32, 16), random_batch(3), pages_of(48)
    q = torch.randn(len(batch.slots_T), 4, 48)
    expected = ops.latent_attention(q, heads, batch, pages)
    visible = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.bool)
    for slot, position in zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True):
        for p in range(position + 1):
            visible[batch.page_table[slot, p // PAGE_SIZE], p % PAGE_SIZE] = True
    pages[:, 0][~visible] = float("nan")
    torch.testing.assert_close(ops.latent_attention(q, heads, batch, pages), expected)


@pytest.mark.parametrize(("latent", "rope"), [(32, 16), (40, 12)], ids=str)
def test_rows_and_queries_equal_the_reference(ops, latent, rope):
    """Inputs are slices of wider rows, as a product of several weights at once returns them."""
    torch.manual_seed(latent)
    heads, batch, rotary = latent_heads(3, latent, rope), random_batch(2), random_rotary(rope)
    rows = len(batch.slots_T)
    kv = torch.randn(rows, 10 + latent + rope)[:, 10:]
    pools = torch.zeros(2, NUM_PAGES, 1, PAGE_SIZE, latent + rope).unbind()
    REFERENCE.latent_append(kv, heads, rotary, batch, pools[0])
    ops.latent_append(kv, heads, rotary, batch, pools[1])
    torch.testing.assert_close(pools[1], pools[0], **CLOSE)
    assert pools[0].count_nonzero() == rows * (latent + rope)
    q = torch.randn(rows, 3 * (24 + rope) + 7)[:, : 3 * (24 + rope)].view(rows, 3, -1)
    key = torch.randn(3, 24, latent) / 5
    expected = REFERENCE.latent_query(q, key, heads, rotary, batch)
    torch.testing.assert_close(ops.latent_query(q, key, heads, rotary, batch), expected, **CLOSE)


@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize("splits", [1, 2, 16])
def test_a_sequence_may_be_cut_into_any_number_of_splits(splits, first_position):
    """Includes sequences shorter than the number of splits, and more heads than one program takes."""
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.kernels import mla

    torch.manual_seed(splits)
    heads, pages = latent_heads(mla.MAX_QUERIES + 3, 32, 16), pages_of(48)
    table = torch.randperm(NUM_PAGES)[: 6 * MAX_PAGES].view(6, MAX_PAGES)
    positions, slots = torch.tensor([0, 31, 32, 100]), torch.tensor([4, 0, 5, 2])
    q, out = torch.randn(4, heads.num_heads, 48), torch.full((4, heads.num_heads, 32), float("nan"))
    mla.latent_decode(q, heads, pages, slots, positions, table, out, splits, first_position)
    none = torch.zeros(0, 4, dtype=torch.int64)
    batch = Batch(slots, positions, table, (), none, none, 0, tuple(slots.tolist()), 101)
    batch = replace(batch, first_position=first_position)
    torch.testing.assert_close(out, REFERENCE.latent_attention(q, heads, batch, pages), **CLOSE)


def test_absorbed_weights_equal_expanded_keys_and_values():
    """The identity that latent attention relies on: scores of q with keys made from the latent, and values made from
    it."""
    torch.manual_seed(5)
    num_heads, latent, rope, nope, value, length = 3, 32, 8, 12, 10, 21
    heads, rotary, pages = latent_heads(num_heads, latent, rope), random_rotary(rope), pages_of(latent + rope)
    key, values = torch.randn(num_heads, nope, latent), torch.randn(num_heads, latent, value)
    q = torch.randn(1, num_heads, nope + rope)
    none = torch.zeros(0, 4, dtype=torch.int64)
    table = torch.arange(NUM_PAGES).view(1, -1)
    batch = Batch(torch.tensor([0]), torch.tensor([length - 1]), table, (), none, none, 0, (0,), length)
    ops = TorchOps()
    found = ops.latent_attention(ops.latent_query(q, key, heads, rotary, batch), heads, batch, pages)
    found = torch.einsum("thl,hlv->thv", found, values)[0]
    rows = pages[:, 0].flatten(0, 1)[:length]
    first, second = q[0, :, nope:].chunk(2, dim=-1)
    cos, sin = rotary.cos[length - 1], rotary.sin[length - 1]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    for head in range(num_heads):
        keys = torch.cat((rows[:, :latent] @ key[head].T, rows[:, latent:]), dim=1)
        scores = keys @ torch.cat((q[0, head, :nope], rotated[head])) * heads.softmax_scale
        expected = scores.softmax(0) @ (rows[:, :latent] @ values[head])
        torch.testing.assert_close(found[head], expected, rtol=1e-4, atol=1e-4)
