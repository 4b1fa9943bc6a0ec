"""Decoding rows in one launch a layer: it gives the pages of `rope_append` and of the reference, bit by bit, and the
attention of the reference, with drafts, windows, sinks, pages of e4m3, and any number of splits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_checkpoints import VOCAB_SIZE, Engine, make_prompt, write_checkpoint
from ops_batch import MAX_PAGES, NUM_PAGES, PAGE_SIZE, random_batch
from support.operations import Operations
from support.reference_ops import ReferenceOps

from chitu.engine.executor import MAX_DRAFT, PrefillChunk, StepPlan
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, row_weights
from chitu.ops.fp8_pages import is_fp8, put_rows, scales_of, values_of
from chitu.ops.interface import Batch, HeadSpec, RotaryTable
from chitu.protocol import fp8_head_bytes

pytest.importorskip("triton", reason="triton is in the dev extra")
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

from chitu.ops.kernels.attention import OWN_ROWS, append_attention
from chitu.ops.kernels.greedy import GreedyKernels
from chitu.ops.kernels.router import counters
from chitu.ops.triton_ops import TritonOps

pytestmark = pytest.mark.engine

REFERENCE = ReferenceOps()
POSITIONS = MAX_PAGES * PAGE_SIZE
DRAFTED = ([4, 4, 4, 0, 5, 2, 2, 1, 1], [0, 1, 2, 63, 64, 129, 130, 15, 16])
"""Slots and positions of rows, some behind a draft's."""


def rotary_of(dim: int) -> RotaryTable:
    angles = torch.rand(POSITIONS, dim // 2) * 6
    return RotaryTable(angles.cos(), angles.sin())


def decoding(slots: list[int], positions: list[int]) -> Batch:
    table = torch.randperm(NUM_PAGES)[: 6 * MAX_PAGES].view(6, MAX_PAGES)
    none = torch.zeros(0, 4, dtype=torch.int64)
    rows = torch.tensor(slots), torch.tensor(positions)
    return Batch(*rows, table, (), none, none, 0, tuple(slots), max(positions) + 1)


def spec_of(heads: tuple[int, int, int], has_norms: bool = True) -> HeadSpec:
    norms = (torch.rand(heads[2]) + 0.5, torch.rand(heads[2]) + 0.5) if has_norms else (None, None)
    return HeadSpec(*heads, 1e-6, *norms)


def pools_of(spec: HeadSpec, dtype: torch.dtype, is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V with numbers everywhere; as e4m3, scales of neighbours differ widely."""
    shape = NUM_PAGES, spec.num_kv_heads, PAGE_SIZE, spec.head_dim
    rows = torch.randn(2, *shape)
    if not is_fp8:
        return rows[0].to(dtype), rows[1].to(dtype)
    rows *= 10 ** (2 * torch.rand(*rows.shape[:-1], 1)) / 30
    pages = []
    for region in rows:
        raw = torch.zeros(*shape[:2], fp8_head_bytes(PAGE_SIZE, spec.head_dim), dtype=torch.uint8)
        pages.append(values_of(raw, PAGE_SIZE, spec.head_dim))
        where = torch.arange(NUM_PAGES).repeat_interleave(PAGE_SIZE), torch.arange(PAGE_SIZE).repeat(NUM_PAGES)
        put_rows(pages[-1], *where, region.transpose(1, 2).flatten(0, 1))
    return pages[0], pages[1]


def copy_of(pages: torch.Tensor) -> torch.Tensor:
    """Return a copy, with the scales of e4m3 behind the numbers of each head."""
    if not is_fp8(pages):
        return pages.clone()
    raw = torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage()).clone()
    return values_of(raw.view(*pages.shape[:2], -1), *pages.shape[2:])


def bytes_of(pages: torch.Tensor) -> torch.Tensor:
    numbers = pages.reshape(-1).view(torch.uint8)
    return torch.cat((numbers, scales_of(pages).reshape(-1).view(torch.uint8))) if is_fp8(pages) else numbers


def one_launch(
    qkv: torch.Tensor, spec: HeadSpec, rotary: RotaryTable, batch: Batch, k: torch.Tensor, v: torch.Tensor, splits: int
) -> torch.Tensor:
    out = torch.full((len(qkv), spec.num_heads, spec.head_dim), float("nan"), dtype=qkv.dtype)
    arrived = counters(qkv.device, len(qkv) * spec.num_kv_heads)
    rows = batch.slots_T, batch.positions_T, batch.page_table
    append_attention(qkv, spec, rotary, k, v, *rows, out, splits, arrived)
    assert not arrived.any(), "or the next launch would join too early"
    return out.view(len(qkv), -1)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
@pytest.mark.parametrize(
    ("heads", "has_norms", "splits", "window", "has_sinks"),
    [
        ((4, 2, 64), True, 1, None, False),
        ((7, 1, 128), True, 8, None, False),  # a group that is no power of two
        ((6, 2, 48), False, 2, None, True),  # a head that is none
        ((4, 2, 32), False, 4, 20, True),
        ((4, 2, 32), True, 1, 2, False),  # a window that is shorter than a draft
    ],
    ids=str,
)
def test_a_launch_gives_the_pages_of_two_bit_by_bit_and_the_attention_of_the_reference(
    heads: tuple[int, int, int], has_norms: bool, splits: int, window: int | None, has_sinks: bool, kv_dtype: str
) -> None:
    torch.manual_seed(splits + heads[2])
    batch, sinks = decoding(*DRAFTED), torch.randn(heads[0]) if has_sinks else None
    spec = replace(spec_of(heads, has_norms), window=window, sinks_H=sinks)
    rotary, qkv = rotary_of(heads[2]), torch.randn(len(DRAFTED[0]), (heads[0] + 2 * heads[1]) * heads[2])
    k, v = pools_of(spec, torch.float32, kv_dtype == "fp8")
    right, twin = (copy_of(k), copy_of(v)), (copy_of(k), copy_of(v))
    found = one_launch(qkv, spec, rotary, batch, k, v, splits)
    q = TritonOps(132).rope_append(qkv, spec, rotary, batch, *right)
    assert torch.equal(bytes_of(k), bytes_of(right[0])) and torch.equal(bytes_of(v), bytes_of(right[1]))
    torch.testing.assert_close(found, REFERENCE.attention(q, spec, batch, k, v), rtol=1e-5, atol=2e-5)
    q = REFERENCE.rope_append(qkv, spec, rotary, batch, *twin)
    torch.testing.assert_close(q, TritonOps(132).rope_append(qkv, spec, rotary, batch, *right), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_rounded_as_in_two_launches(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, batch = (2, 1, 32), decoding(*DRAFTED)
    spec, rotary = spec_of(heads), rotary_of(32)
    norms = {"q_norm_N": spec.q_norm_N.to(dtype), "k_norm_N": spec.k_norm_N.to(dtype)}  # type: ignore[union-attr]
    spec, qkv = replace(spec, **norms), torch.randn(len(DRAFTED[0]), 4 * 32).to(dtype)  # type: ignore[arg-type]
    k, v = pools_of(spec, dtype, is_fp8=False)
    right = k.clone(), v.clone()
    found = one_launch(qkv, spec, rotary, batch, k, v, 2)
    q = TritonOps(132).rope_append(qkv, spec, rotary, batch, *right)
    assert torch.equal(k, right[0]) and torch.equal(v, right[1])
    if dtype == torch.bfloat16:  # of which the interpreter has no products
        return
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, REFERENCE.attention(q, spec, batch, k, v), rtol=4 * eps, atol=4 * eps)


def test_spans_beside_decodes_are_as_before() -> None:
    """Batches mix whole prompts, chunks and decodes. `written` is called once, behind the rows of spans."""
    torch.manual_seed(2)
    ops, batch, spec, rotary = (
        TritonOps(4, whole_prompt_tokens=64),
        random_batch(2),
        spec_of((2, 1, 16)),
        rotary_of(16),
    )
    assert batch.spans and batch.decode_slots
    qkv = torch.randn(len(batch.slots_T), 4 * 16)
    k, v = pools_of(spec, torch.float32, is_fp8=False)
    right, calls = (k.clone(), v.clone()), []
    found = ops.append_attention(qkv, spec, rotary, batch, k, v, lambda: calls.append(k.clone()))
    q = ops.rope_append(qkv, spec, rotary, batch, *right)
    assert torch.equal(k, right[0]) and torch.equal(v, right[1])
    torch.testing.assert_close(found, ops.attention(q, spec, batch, *right), rtol=1e-5, atol=1e-5)
    (written,) = calls
    for span in batch.spans:
        places = span.start + torch.arange(span.length)
        at = batch.page_table[span.slot, places // PAGE_SIZE], slice(None), places % PAGE_SIZE
        assert torch.equal(written[at], k[at])


def test_nothing_is_read_but_the_keys_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is NaN, and so are the places of the rows of the launch, which no program reads from pages. The last
    programs run first, so what an earlier one would have written is not there."""
    torch.manual_seed(5)
    batch, spec, rotary = decoding(*DRAFTED), spec_of((2, 1, 16)), rotary_of(16)
    k, v = pools_of(spec, torch.float32, is_fp8=False)
    qkv, pages = torch.randn(len(DRAFTED[0]), 4 * 16), (k.clone(), v.clone())
    expected = one_launch(qkv, spec, rotary, batch, *pages, 2)
    own = set(zip(*DRAFTED, strict=True))
    is_seen = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.bool)
    for slot, position in own:
        for p in range(position):
            is_seen[batch.page_table[slot, p // PAGE_SIZE], p % PAGE_SIZE] |= (slot, p) not in own
    for region in (k, v):
        region.transpose(1, 2)[~is_seen] = float("nan")
    monkeypatch.setattr(interpreter, "range", lambda *ends: reversed(range(*ends)), raising=False)
    assert torch.equal(one_launch(qkv, spec, rotary, batch, k, v, 2), expected)


def test_a_nan_of_a_row_stays_with_its_sequence_and_head() -> None:
    torch.manual_seed(6)
    batch, spec, rotary = decoding(*DRAFTED), spec_of((4, 2, 16)), rotary_of(16)
    qkv = torch.randn(len(DRAFTED[0]), 8 * 16)
    qkv[5, 5 * 16] = float("nan")  # of the second key of a row with one behind it
    is_bad = one_launch(qkv, spec, rotary, batch, *pools_of(spec, torch.float32, is_fp8=False), 2).view(-1, 4, 16)
    expected = torch.zeros(len(DRAFTED[0]), 4, 16, dtype=torch.bool)
    expected[5:7, 2:] = True
    assert torch.equal(is_bad.isnan(), expected)


def test_the_longest_draft_fits_a_launch() -> None:
    assert MAX_DRAFT + 1 <= OWN_ROWS
    torch.manual_seed(7)
    slots, positions = [3] * OWN_ROWS + [1], [*range(20, 20 + OWN_ROWS), 7]
    batch, spec, rotary = decoding(slots, positions), spec_of((2, 1, 16)), rotary_of(16)
    qkv = torch.randn(len(slots), 4 * 16)
    k, v = pools_of(spec, torch.float32, is_fp8=False)
    found = one_launch(qkv, spec, rotary, batch, k, v, 2)
    q = TritonOps(132).rope_append(qkv, spec, rotary, batch, k.clone(), v.clone())
    torch.testing.assert_close(found, REFERENCE.attention(q, spec, batch, k, v), rtol=1e-5, atol=2e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The count. A launch of a kernel is one operation; what the interpreter would do is not done.


def test_a_recorded_decode_of_28_layers_is_145_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five a layer, and five more: the gathers of ids and embeddings, the head, and two that end the decode."""
    write_checkpoint(tmp_path, "qwen3", num_layers=28)
    weights = torch.from_numpy(row_weights(AUX_HEADER_BYTES + 4 * VOCAB_SIZE))
    greedy = GreedyKernels(8, VOCAB_SIZE, AUX_HEADER_BYTES, weights)
    recording, operations = Recording(EagerRecorder(), decode_sizes=(1,), prefill_sizes=()), Operations()
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: operations.names.append(self.fn.__name__))
    sizes = {"num_pages": 8, "num_slots": 2, "max_model_len": 64}
    engine = Engine(tmp_path, ops=TritonOps(132), dtype="bfloat16", recording=recording, greedy=greedy, **sizes)
    prefill = [PrefillChunk(0, 0, 20, sample=True)]
    engine.runner.execute(StepPlan(admit=[engine.admit(0, make_prompt(20), 32)], prefill=prefill))
    engine.runner.execute(StepPlan(decode=[0]))
    operations.names.clear()
    with operations:
        engine.runner.execute(StepPlan(decode=[0]))
    layer = ["_small_linear", "_decode_split", "_small_linear", "_small_linear", "_small_linear"]
    assert operations.names == ["index", "index", *28 * layer, "_small_linear", "_scan", "_append"]
    assert len(operations.names) == 145
