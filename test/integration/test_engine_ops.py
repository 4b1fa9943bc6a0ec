"""Every fast operation equals its reference twin, over random shapes, lengths, page orders and mixes of work."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from ops_batch import MAX_PAGES, NUM_PAGES, PAGE_SIZE, random_batch
from support.reference_ops import ReferenceOps

from chitu.ops.interface import HeadSpec, Ops, RotaryTable
from chitu.ops.native import WITHOUT_AVX512, NativeOps, load_library
from chitu.ops.select import select_ops
from chitu.ops.torch_ops import TorchOps

REFERENCE = ReferenceOps()


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


@pytest.fixture(params=["torch", "native"])
def ops(request) -> Ops:
    if request.param == "torch":
        return TorchOps()
    library = load_library()
    if library is None:
        pytest.skip("no C compiler here")
    return NativeOps(library)


@pytest.mark.parametrize("heads", [(8, 4, 64), (4, 4, 32), (7, 1, 128), (4, 2, 16)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_attention_equals_the_reference(ops, heads, seed):
    num_heads, kv_heads, head_dim = heads
    spec = HeadSpec(num_heads, kv_heads, head_dim, 1e-6)
    batch = random_batch(seed)
    torch.manual_seed(seed)
    k, v = torch.randn(2, NUM_PAGES, kv_heads, PAGE_SIZE, head_dim)
    q = torch.randn(len(batch.slots_T), num_heads, head_dim) * 2
    expected = REFERENCE.attention(q, spec, batch, k, v)
    torch.testing.assert_close(ops.attention(q, spec, batch, k, v), expected, rtol=2e-5, atol=2e-5)


def test_attention_never_reads_past_the_end_of_a_sequence(ops):
    spec = HeadSpec(4, 2, 64, 1e-6)
    for seed in range(4):
        batch = random_batch(seed)
        torch.manual_seed(seed)
        k, v = torch.randn(2, NUM_PAGES, 2, PAGE_SIZE, 64)
        q = torch.randn(len(batch.slots_T), 4, 64)
        expected = ops.attention(q, spec, batch, k, v).clone()
        visible = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.bool)
        for slot, position in zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True):
            for p in range(position + 1):
                visible[batch.page_table[slot, p // PAGE_SIZE], p % PAGE_SIZE] = True
        for region in (k, v):
            region.transpose(1, 2)[~visible] = float("nan")
        torch.testing.assert_close(ops.attention(q, spec, batch, k, v), expected)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rotation_and_pages_equal_the_reference(ops, qk_norm, seed):
    torch.manual_seed(seed)
    batch = random_batch(seed)
    norms = (torch.rand(32) + 0.5, torch.rand(32) + 0.5) if qk_norm else (None, None)
    spec = HeadSpec(4, 2, 32, 1e-6, *norms)
    angles = torch.rand(MAX_PAGES * PAGE_SIZE, 16) * 6
    rotary = RotaryTable(angles.cos(), angles.sin())
    qkv = torch.randn(len(batch.slots_T), 8 * 32)
    pools = torch.zeros(4, NUM_PAGES, 2, PAGE_SIZE, 32).unbind()
    expected = REFERENCE.rope_append(qkv, spec, rotary, batch, pools[0], pools[1])
    found = ops.rope_append(qkv, spec, rotary, batch, pools[2], pools[3])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pools[2], pools[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(pools[3], pools[1])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13, 16, 37, 200])
@pytest.mark.parametrize(("inner", "out"), [(64, 96), (33, 50), (112, 500)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_the_reference(ops, rows, inner, out, biased):
    torch.manual_seed(rows + out)
    x, weight, residual = torch.randn(rows, inner), torch.randn(out, inner), torch.randn(rows, out)
    bias = torch.randn(out) if biased else None
    close = {"rtol": 1e-4, "atol": 1e-4}
    plain, fast = REFERENCE.prepare(weight, bias), ops.prepare(weight, bias)
    assert (fast.out_features, fast.in_features) == (out, inner)
    torch.testing.assert_close(ops.linear(x, fast), REFERENCE.linear(x, plain), **close)
    expected = REFERENCE.linear_add(x, plain, residual.clone())
    torch.testing.assert_close(ops.linear_add(x, fast, residual.clone()), expected, **close)
    plain, fast = REFERENCE.prepare_gate_up(weight, bias), ops.prepare_gate_up(weight, bias)
    torch.testing.assert_close(ops.gate_up(x, fast), REFERENCE.gate_up(x, plain), **close)
    torch.testing.assert_close(ops.gate_and_up(x, fast), REFERENCE.gate_and_up(x, plain), **close)
    norm = torch.rand(inner) + 0.5
    expected = REFERENCE.norm_gate_up(x, norm, 1e-6, plain)
    torch.testing.assert_close(ops.norm_gate_up(x, norm, 1e-6, fast), expected, **close)
    plain, fast = REFERENCE.prepare(weight, bias), ops.prepare(weight, bias)
    expected = REFERENCE.norm_linear(x, norm, 1e-6, plain)
    torch.testing.assert_close(ops.norm_linear(x, norm, 1e-6, fast), expected, **close)


def test_norms_equal_the_reference(ops):
    for rows, width in ((1, 64), (5, 50), (100, 512)):
        x, weight = torch.randn(rows, width) * 3, torch.rand(width)
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-5
        )


def test_a_strided_input_is_read_as_it_looks(ops):
    x, weight = torch.randn(64, 7).T, torch.randn(40, 64)
    expected = REFERENCE.linear(x, REFERENCE.prepare(weight, None))
    torch.testing.assert_close(ops.linear(x, ops.prepare(weight, None)), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ops.rms_norm(x, weight[0], 1e-6), REFERENCE.rms_norm(x, weight[0], 1e-6))


def test_a_large_gate_does_not_overflow(ops):
    weight = torch.eye(2).repeat(2, 1) * 200.0
    x = torch.tensor([[1.0, -1.0]])
    found = ops.gate_up(x, ops.prepare_gate_up(weight, None))
    torch.testing.assert_close(found, torch.tensor([[40000.0, 0.0]]))


def test_several_threads_give_the_same_bits(ops):
    batch = random_batch(3)
    spec = HeadSpec(4, 2, 64, 1e-6)
    k, v = torch.randn(2, NUM_PAGES, 2, PAGE_SIZE, 64)
    q, x, weight = torch.randn(len(batch.slots_T), 4, 64), torch.randn(40, 64), torch.randn(100, 64)
    fast = ops.prepare(weight, None)
    one = ops.attention(q, spec, batch, k, v).clone(), ops.linear(x, fast).clone()
    torch.set_num_threads(2)
    two = ops.attention(q, spec, batch, k, v).clone(), ops.linear(x, fast).clone()
    if ops.name == "native":
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    else:
        torch.testing.assert_close(two, one)


def test_without_a_compiler_torch_takes_over(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library() is None
    assert select_ops(torch.device("cpu"), torch.float32).name == "torch"


@pytest.mark.parametrize("works_without", [True, False])
def test_a_cpu_that_lacks_what_it_reports_gets_other_kernels(tmp_path, monkeypatch, caplog, works_without):
    if load_library() is None:
        pytest.skip("no C compiler here")
    trap = tmp_path / "trap.c"
    trap.write_text("__attribute__((constructor)) static void trap(void) { __builtin_trap(); }\n")
    cc = f'{shutil.which("cc")} "$@" -O0'  # what does not optimise compiles in a fraction of the time
    cure = f'case "$*" in *{WITHOUT_AVX512}*) exec {cc};; esac' if works_without else ""
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{cure}\nexec {cc} {trap}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=":")
    library = load_library(tmp_path / "cache")
    assert ("ended the trial" in caplog.text) and (library is not None) is works_without
    assert ("the CPU lacks what it reports" in caplog.text) is not works_without
    if library is not None:
        x, weight = torch.randn(3, 64), torch.randn(40, 64)
        torch.testing.assert_close(NativeOps(library).linear(x, NativeOps(library).prepare(weight, None)), x @ weight.T)


def test_a_cache_folder_that_cannot_be_written_is_no_failure(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_library(blocked) is None


def test_a_build_that_takes_too_long_is_remembered_for_a_day(tmp_path, monkeypatch, caplog):
    runs, cache = tmp_path / "runs", tmp_path / "cache"
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho >> {runs}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert load_library(cache, timeout_s=1.0) is None
    (slow,) = cache.iterdir()
    for _ in range(2):
        assert load_library(cache, timeout_s=1.0) is None
    assert len(runs.read_text()) == 1 and f"to try again, remove {slow}" in caplog.text
    os.utime(slow, (0, 0))
    assert load_library(cache, timeout_s=1.0) is None
    assert len(runs.read_text()) == 2
    slow.unlink()
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    assert load_library(cache) is not None


def test_only_float32_on_cpu_takes_the_kernels():
    assert select_ops(torch.device("cpu"), torch.bfloat16).name == "torch"
