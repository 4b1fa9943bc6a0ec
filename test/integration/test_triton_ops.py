"""The Triton kernels under Triton's interpreter, on a CPU: the same source that a GPU runs equals the reference twin.

The interpreter cannot show that every kernel compiles for the GPU; a separate process shows that.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ops_batch import MAX_PAGES, NUM_PAGES, PAGE_SIZE, random_batch
from support.reference_ops import ReferenceOps

from chitu.ops.interface import Batch, HeadSpec, RotaryTable, Span, tiles_of

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.attention import FLOAT32_TILE, decode_attention, num_splits_for, prefill_attention
from chitu.ops.kernels.blocks import BlockCopier, cut, word_bytes_of
from chitu.ops.kernels.router import counters
from chitu.ops.kernels.small_linear import HOPPER_BYTES, MAX_ROWS, SMALLEST_BYTES, STAGES, tiles_for
from chitu.ops.triton_ops import TritonOps

pytestmark = pytest.mark.engine

REFERENCE = ReferenceOps()
OPS = TritonOps(num_multiprocessors=132)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality within a few roundings of the dtype."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * eps + 1e-5, atol=16 * eps + 1e-5)


@pytest.mark.parametrize(
    ("heads", "dtype", "seed"),
    [
        ((8, 4, 64), torch.float32, 0),
        ((7, 1, 128), torch.float32, 1),  # a group of query heads that is not a power of two
        ((4, 2, 16), torch.float32, 2),
        ((6, 2, 80), torch.float16, 3),  # nor is the head
    ],
    ids=str,
)
def test_attention_equals_the_reference(heads, dtype, seed):
    num_heads, kv_heads, head_dim = heads
    spec, batch = HeadSpec(num_heads, kv_heads, head_dim, 1e-6), random_batch(seed)
    torch.manual_seed(seed)
    k, v = torch.randn(2, NUM_PAGES, kv_heads, PAGE_SIZE, head_dim, dtype=dtype)
    q = torch.randn(len(batch.slots_T), num_heads, head_dim, dtype=dtype)
    close(OPS.attention(q, spec, batch, k, v), REFERENCE.attention(q, spec, batch, k, v))


@pytest.mark.parametrize(("splits", "kv_heads"), [(1, 2), (2, 2), (8, 2), (64, 1)])
def test_a_sequence_of_any_length_may_be_cut_into_any_number_of_splits(splits, kv_heads):
    """Includes sequences shorter than the number of splits: splits without a key add nothing."""
    heads, dim = 2 * kv_heads, 32
    torch.manual_seed(splits)
    table = torch.randperm(NUM_PAGES)[: 6 * MAX_PAGES].view(6, MAX_PAGES)
    positions = torch.tensor([0, 63, 64, 130, MAX_PAGES * PAGE_SIZE - 1])
    slots = torch.tensor([4, 0, 5, 2, 1])
    k, v = torch.randn(2, NUM_PAGES, kv_heads, PAGE_SIZE, dim)
    q, out = torch.randn(5, heads, dim), torch.full((5, heads, dim), float("nan"))
    arrived = counters(q.device, 5 * kv_heads)
    decode_attention(q, k, v, slots, positions, table, out, splits, arrived)
    assert not arrived.any(), "or the next launch would join too early"
    none = torch.zeros(0, 4, dtype=torch.int64)
    batch = Batch(slots, positions, table, (), none, none, 0, tuple(slots.tolist()), 224)
    close(out.view(5, -1), REFERENCE.attention(q, HeadSpec(heads, kv_heads, dim, 1e-6), batch, k, v))


def test_attention_never_reads_past_the_end_of_a_sequence():
    spec, batch = HeadSpec(4, 2, 64, 1e-6), random_batch(2)
    torch.manual_seed(0)
    k, v = torch.randn(2, NUM_PAGES, 2, PAGE_SIZE, 64)
    q = torch.randn(len(batch.slots_T), 4, 64)
    expected = OPS.attention(q, spec, batch, k, v)
    visible = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.bool)
    for slot, position in zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True):
        for p in range(position + 1):
            visible[batch.page_table[slot, p // PAGE_SIZE], p % PAGE_SIZE] = True
    for region in (k, v):
        region.transpose(1, 2)[~visible] = float("nan")
    torch.testing.assert_close(OPS.attention(q, spec, batch, k, v), expected)


def test_narrow_tiles_of_float32_equal_the_reference():
    """As on a GPU, a tile of the batch is two programs, of which the second may have no row."""
    heads, kv_heads, dim, lengths = 2, 1, 16, [1, 32, 33, 70]
    table = torch.randperm(NUM_PAGES)[: 4 * MAX_PAGES].view(4, MAX_PAGES)
    starts = [0, 5, 0, 20]
    spans = tuple(Span(sum(lengths[:i]), length, i, starts[i]) for i, length in enumerate(lengths))
    tiles = torch.tensor([*tiles_of(spans), (0, 0, 0, 0)])
    batch = Batch(
        slots_T=torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)),
        positions_T=torch.cat([span.start + torch.arange(span.length) for span in spans]),
        page_table=table,
        spans=spans,
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans]),
        tiles_Y4=tiles,
        decode_row=sum(lengths),
        decode_slots=(),
        max_decode_len=0,
    )
    torch.manual_seed(0)
    k, v = torch.randn(2, NUM_PAGES, kv_heads, PAGE_SIZE, dim)
    q = torch.randn(sum(lengths), heads, dim)
    out = torch.full_like(q, float("nan"))
    prefill_attention(q, k, v, tiles, table, out, FLOAT32_TILE)
    expected = REFERENCE.attention(q, HeadSpec(heads, kv_heads, dim, 1e-6), batch, k, v)
    close(out.view(len(q), -1), expected)


def test_splits_fill_the_device_and_hold_for_the_life_of_a_graph():
    assert num_splits_for(1, 8, 4096, 132) == 32, "two blocks of keys at least"
    assert num_splits_for(1, 8, 1 << 20, 132) == 64, "with a bound"
    assert num_splits_for(256, 8, 4096, 132) == 1, "the batch alone fills it"


@pytest.mark.parametrize(("heads", "qk_norm"), [((4, 2, 32), True), ((9, 3, 16), False), ((2, 1, 48), True)], ids=str)
def test_rotation_and_pages_equal_the_reference(heads, qk_norm):
    num_heads, kv_heads, dim = heads
    torch.manual_seed(dim)
    batch = random_batch(2)
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if qk_norm else (None, None)
    spec = HeadSpec(num_heads, kv_heads, dim, 1e-6, *norms)
    angles = torch.rand(MAX_PAGES * PAGE_SIZE, dim // 2) * 6
    rotary = RotaryTable(angles.cos(), angles.sin())
    qkv = torch.randn(len(batch.slots_T), (num_heads + 2 * kv_heads) * dim)
    pools = torch.zeros(4, NUM_PAGES, kv_heads, PAGE_SIZE, dim).unbind()
    expected = REFERENCE.rope_append(qkv, spec, rotary, batch, pools[0], pools[1])
    close(OPS.rope_append(qkv, spec, rotary, batch, pools[2], pools[3]), expected)
    close(pools[2], pools[0])
    assert torch.equal(pools[3], pools[1])


@pytest.mark.parametrize("rows", [1, 3, 17, MAX_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_the_reference(rows, biased):
    """One row, few, more than a tensor core's sixteen, and so many that torch takes over."""
    inner, out = 150, 70
    torch.manual_seed(rows)
    x, weight, residual = torch.randn(rows, inner), torch.randn(out, inner), torch.randn(rows, out)
    norm, bias = torch.rand(inner) + 0.5, torch.randn(out) if biased else None
    loose = {"rtol": 1e-4, "atol": 1e-4}
    plain, fast = REFERENCE.prepare(weight, bias), OPS.prepare(weight, bias)
    torch.testing.assert_close(OPS.linear(x, fast), REFERENCE.linear(x, plain), **loose)
    expected = REFERENCE.linear_add(x, plain, residual.clone())
    torch.testing.assert_close(OPS.linear_add(x, fast, residual), expected, **loose)
    found, expected = OPS.norm_linear(x, norm, 1e-6, fast), REFERENCE.norm_linear(x, norm, 1e-6, plain)
    torch.testing.assert_close(found, expected, **loose)
    plain, fast = REFERENCE.prepare_gate_up(weight, bias), OPS.prepare_gate_up(weight, bias)
    torch.testing.assert_close(OPS.gate_up(x, fast), REFERENCE.gate_up(x, plain), **loose)
    found, expected = OPS.norm_gate_up(x, norm, 1e-6, fast), REFERENCE.norm_gate_up(x, norm, 1e-6, plain)
    torch.testing.assert_close(found, expected, **loose)


def test_a_row_alone_equals_the_same_row_in_a_larger_batch_of_its_size_class():
    torch.manual_seed(0)
    x, weight = torch.randn(16, 96), OPS.prepare(torch.randn(40, 96), None)
    assert torch.equal(OPS.linear(x[:2], weight), OPS.linear(x, weight)[:2])


def test_norms_equal_the_reference():
    for rows, width in ((1, 64), (3, 50)):
        x, weight = torch.randn(rows, width) * 3, torch.rand(width)
        close(OPS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


def test_a_strided_input_is_read_as_it_looks():
    x, weight = torch.randn(64, 7).T, torch.randn(40, 64)
    expected = REFERENCE.linear(x, REFERENCE.prepare(weight, None))
    torch.testing.assert_close(OPS.linear(x, OPS.prepare(weight, None)), expected, rtol=1e-4, atol=1e-4)
    close(OPS.rms_norm(x, weight[0], 1e-6), REFERENCE.rms_norm(x, weight[0], 1e-6))


@pytest.mark.parametrize("unit", [16, 4, 1])
def test_scattered_pieces_are_copied_whatever_their_alignment(unit):
    """One launch copies them; the bytes between the pieces stay as they are."""
    torch.manual_seed(unit)
    source, target = (
        torch.randint(0, 256, (4, 20_000), dtype=torch.uint8),
        torch.full((4, 20_000), 7, dtype=torch.uint8),
    )
    starts, lengths = np.array([unit * 3, 0, unit * 100, unit * 7]), np.array([unit, 9_000 // unit * unit, unit * 5, 0])
    rows = np.arange(4) * 20_000
    expected = target.clone()
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        expected[row, start : start + length] = source[row, start : start + length]
    assert source.data_ptr() % 16 == target.data_ptr() % 16 == 0
    copier = BlockCopier(torch.device("cpu"))
    copier.copy(source.data_ptr() + rows + starts, target.data_ptr() + rows + starts, lengths)
    assert torch.equal(target, expected)


def test_a_long_copy_is_cut_into_pieces_that_make_it_up_again():
    pieces = cut(np.array([1000, 5000]), np.array([0, 9000]), np.array([250, 100]), piece_bytes=100)
    assert pieces.tolist() == [[1000, 1100, 1200, 5000], [0, 100, 200, 9000], [100, 100, 50, 100]]
    assert [
        word_bytes_of(np.array(numbers)) for numbers in ([[16], [32], [48]], [[16], [8], [4]], [[1], [16], [16]])
    ] == [8, 4, 1]


def variants_of(tmp_path, family):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    argv = [sys.executable, Path(__file__).parent / "kernel_variants.py", tmp_path, family]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_step_of_any_number_of_rows_compiles_nothing_that_the_warm_up_has_not(tmp_path):
    """A kernel takes a second to compile, and all requests of the instance wait for it."""
    found = variants_of(tmp_path, "qwen3")
    assert not found["added"]
    products, classes_of_rows = 5, 4
    assert found["started"]["_small_linear"] == products * classes_of_rows


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_nor_do_weights_that_stay_small(form, tmp_path):
    found = variants_of(tmp_path, form)
    assert not found["added"] and found["started"]["_widen"] and found["started"]["_small_linear"] == 5 * 4


def has_only_large_tiles(added):
    """Return whether all that later steps add is the sorting of pairs by tiles, and the two products of the largest
    ones: of 192 rows for 8 experts, more than the warm-up has here."""
    return added.keys() <= {"_sort_pairs", "_grouped_product"} and added.get("_grouped_product", 0) <= 2


def test_nor_do_windows_and_sinks(tmp_path):
    found = variants_of(tmp_path, "gpt_oss")
    assert has_only_large_tiles(found["added"]) and found["started"]["_decode_split"] > 1


def test_nor_does_the_layer_that_drafts(tmp_path):
    found = variants_of(tmp_path, "drafts")
    assert has_only_large_tiles(found["added"]) and found["started"]["_latent_attend"] > 3


@pytest.mark.timeout(320)  # a minute and a half of a core, which other processes share
def test_every_kernel_compiles_for_the_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_kernels.py"
    argv = [sys.executable, script, "--count", "_copy_pieces"]
    found = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    kernels = json.loads(found.stdout)
    sources = (Path(__file__).parents[2] / "chitu" / "ops" / "kernels").glob("*.py")
    # A function that returns a value is called by kernels; a launched kernel returns none.
    jitted = [part for source in sources for part in re.split(r"@triton\.jit.*\n", source.read_text())[1:]]
    bodies = [part.split("\n\n\n")[0] for part in jitted]
    defined = {body.split("(")[0].removeprefix("def ") for body in bodies if "\n    return " not in body}
    assert {kernel["name"] for kernel in kernels} == defined, "a kernel is missing in compile_kernels.py"
    assert all(kernel["shared_bytes"] <= 227 << 10 for kernel in kernels), kernels
    assert not [kernel for kernel in kernels if kernel["stack_bytes"]], "registers are spilled"
    (wide,) = [kernel for kernel in kernels if kernel["constants"].get("WORD_BYTES") == 8]
    assert wide["instructions"]["LDG.E.128"] and wide["instructions"]["STG.E.128"], "two words at once"


NEWER = ("_decode_split", "_prefill_tiles", "_route", "_grouped_product")
KEPT = ("_small_linear", "_grouped_product", "_widen")


@pytest.fixture(scope="module")
def for_sm_100():
    """Return what `compile_kernels.py` says of these kernels, compiled in one process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_kernels.py"
    argv = [sys.executable, script, "--arch", "100", "--only", *dict.fromkeys(NEWER + KEPT)]
    found = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.by_hand
@pytest.mark.timeout(320)
@pytest.mark.parametrize("kernel", NEWER)
def test_kernels_of_windows_sinks_and_mixtures_compile_for_sm_100(kernel, for_sm_100):
    kernels = [each for each in for_sm_100 if each["name"] == kernel]
    assert kernels and max(each["stack_bytes"] for each in kernels) <= 48, "the sums of the largest tile, at their end"
    assert all(each["shared_bytes"] <= 227 << 10 for each in kernels), kernels


@pytest.mark.by_hand
@pytest.mark.timeout(320)
@pytest.mark.parametrize("kernel", KEPT)
def test_kernels_of_weights_that_stay_small_compile_for_sm_100(kernel, for_sm_100):
    kernels = [each for each in for_sm_100 if each["name"] == kernel]
    kept = [each for each in kernels if each["types"]["weight_ptr"] in ("*fp8e4nv", "*u8", "*i8")]
    assert {each["types"]["weight_ptr"] for each in kept} == {"*fp8e4nv", "*u8", "*i8"}
    assert not [each for each in kept if each["stack_bytes"] or each["shared_bytes"] > 227 << 10], kept


@pytest.mark.parametrize("shared_bytes", [SMALLEST_BYTES, HOPPER_BYTES])
def test_tiles_of_products_fit_into_shared_memory(shared_bytes):
    for rows, num_out, has_norm, is_gated in itertools.product(
        range(2, MAX_ROWS + 1), (64, 1024, 4096, 6144, 151936), (False, True), (False, True)
    ):
        found = tiles_for(rows, num_out, has_norm=has_norm, is_gated=is_gated, shared_bytes=shared_bytes)
        assert found.rows >= rows
        loaded = 2 * found.width * (found.rows + (1 + is_gated) * found.out)
        assert STAGES * loaded <= shared_bytes, (rows, num_out, has_norm, is_gated)
