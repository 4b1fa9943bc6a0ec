"""Weights that the C kernels keep small: results have the bits of those of the float32 weights that they stand for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_table import make_checkpoint
from engine_checkpoints import logits_of, write_checkpoint
from safetensors.torch import load_file, save_file
from support.checkpoints import Row
from support.gguf_files import convert
from test_gguf_served import folder_of

from chitu.engine.build import load_model
from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import read_model_spec
from chitu.models.layers import DecoderModel
from chitu.models.tensors import tensors_of, why_unlike
from chitu.models.weights import Keeps, WeightSource
from chitu.ops.kept import KeptBlocks, Matrix, below, dequantised, in_16_bits
from chitu.ops.native import NativeOps, load_library, pack, packed, unpack
from chitu.ops.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
KINDS = ("e4m3", "int8", "int8 added", "table4", "table4 added", "table4 float32", "bfloat16", "float16")


class Float32Ops(NativeOps):
    keeps_small = False


@pytest.fixture
def ops() -> NativeOps:
    library = load_library()
    if library is None or not NativeOps(library).keeps_small:
        pytest.skip("no C compiler here, or a CPU without conversion of float16")
    return NativeOps(library)


def weight_of(kind: str, out: int, inner: int, run: int) -> Matrix:
    """Return a random weight; every code is in it."""
    form, _, more = kind.partition(" ")
    if form in ("bfloat16", "float16"):
        return torch.randn(out, inner).to(getattr(torch, form)).float()
    codes = torch.arange(out * inner).view(out, inner).mul(7).remainder(256).to(torch.uint8)
    shape = out, -(-inner // run)
    if form == "e4m3":
        codes[codes & 0x7F == 0x7F] = 1  # a denormal in place of NaN
        return KeptBlocks("e4m3", codes, torch.rand(shape) * 0.1, run)
    dtype = torch.float32 if more == "float32" else torch.float16
    scales = (torch.rand(shape) * 0.1 - 0.02).to(dtype)
    scales[0] = 6e-8  # a denormal in float16
    added = torch.randn(shape).to(dtype) if more == "added" else None
    if form == "int8":
        return KeptBlocks("int8", codes, scales, run, added)
    return KeptBlocks("table4", codes & 0xF, scales, run, added, TABLE)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13, 37, 200])
@pytest.mark.parametrize(
    ("inner", "out", "run"), [(64, 96, 64), (200, 50, 48), (112, 500, 128), (128, 64, 1), (70, 34, 13), (96, 40, 32)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_weights_kept_small_have_the_bits_of_float32_ones(ops, rows, inner, out, run, kind):
    torch.manual_seed(rows)
    small = weight_of(kind, out, inner, run)
    large = dequantised(small)
    bias = torch.randn(out) if rows % 2 else None
    x, residual = torch.randn(rows, inner), torch.randn(rows, out)
    for gate_up, multiply in (
        (False, ops.linear),
        (False, lambda x, weight: ops.linear_add(x, weight, residual.clone())),
        (True, ops.gate_up),
        (True, ops.gate_and_up),
    ):
        kept, plain = pack(small, bias, gate_up), pack(large, bias, gate_up, small=False)
        assert kept.codes is not None and plain.codes is None and kept.out_features == plain.out_features
        assert bits_equal(multiply(x, kept).clone(), multiply(x, plain))
    wrong = large.clone()
    wrong[-1, -1] += 1
    assert not bits_equal(ops.linear(x, pack(small, bias)).clone(), ops.linear(x, pack(wrong, bias, small=False)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_kept_weight_are_those_of_the_float32_one(ops, kind):
    small = weight_of(kind, 100, 70, 13)
    large, rows = dequantised(small), torch.tensor([99, 0, 16, 15, 31, 32, 99])
    kept = ops.prepare(small, None)
    assert bits_equal(ops.rows_of(kept, rows), large[rows]) and bits_equal(unpack(kept), large)
    both = ops.prepare_gate_up(small, None)
    assert bits_equal(unpack(both, 0), large[:50]) and bits_equal(unpack(both, 1), large[50:])
    assert bits_equal(TorchOps().rows_of(TorchOps().prepare(small, None), rows), large[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_weight_is_as_small_as_its_codes(ops, kind):
    kept = pack(weight_of(kind, 128, 256, 32), None)
    form, _, more = kind.partition(" ")
    factors = {"e4m3": 4, "bfloat16": 0, "float16": 0}.get(form, {"": 2, "added": 4, "float32": 4}[more])
    numbers = {"e4m3": 1.0, "int8": 1.0, "table4": 0.5, "bfloat16": 2.0, "float16": 2.0}[form]
    assert kept.num_bytes == 128 * 256 * (numbers + factors / 32)


def test_only_what_16_bits_hold_exactly_is_kept_in_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.randn(200, 30).to(dtype)
        found = in_16_bits(numbers.float())
        assert found is not None and found.dtype == dtype and torch.equal(found, numbers)
        almost = numbers.float()
        almost.view(torch.int32)[-1, -1] ^= 1
        assert in_16_bits(almost) is None
    wide = torch.tensor([[1e-30, 1.0]])
    assert in_16_bits(wide) is None, "float16 has no number so small, bfloat16 none so exact"
    assert in_16_bits(torch.tensor([[float("nan")]])) is None


def test_parts_of_different_forms_stay_small_if_one_form_has_the_numbers_of_all():
    """Files of ggml mix forms: v often has more bits than q and k, and the three are one weight."""
    first, whole = weight_of("int8", 4, 70, 32), tuple(map(float, range(-8, 8)))
    same = below([first, weight_of("int8", 6, 70, 32)])
    assert isinstance(same, KeptBlocks) and same.scales_OR.dtype == torch.float16
    fourth = weight_of("table4 added", 6, 70, 16)
    assert isinstance(fourth, KeptBlocks)
    others = [fourth._replace(table=whole), weight_of("int8 added", 6, 70, 32), weight_of("int8", 6, 70, 16)]
    for other, is_small in [*((each, True) for each in others), *((weight_of(k, 6, 70, 32), False) for k in KINDS[:1])]:
        for parts in ([first, other], [other, first]):
            mixed = below(parts)
            assert isinstance(mixed, KeptBlocks) is is_small
            assert torch.equal(dequantised(mixed), torch.cat([dequantised(each) for each in parts]))
    assert isinstance(below([first, fourth]), torch.Tensor), "a table with halves is no int8"
    assert isinstance(below([first, weight_of("int8", 6, 70, 24)]), torch.Tensor), "runs that do not divide"
    assert isinstance(below([first, torch.randn(2, 70)]), torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama2", "qwen3_moe", "deepseek_v3"])
def test_a_checkpoint_in_16_bits_stays_so_and_has_the_logits_of_float32(ops, family, dtype, tmp_path):
    small = tmp_path / "small"
    write_checkpoint(small, family, num_layers=2)
    tensors = {name: each.to(dtype) for name, each in load_file(small / "model.safetensors").items()}
    save_file(tensors, small / "model.safetensors")
    model = load_model(small, max_model_len=64)
    assert isinstance(model, DecoderModel)
    weights = [model.embedding, model.head, *(layer.attention.output for layer in model.layers)]
    assert all(packed(each).codes is not None for each in weights)
    assert bits_equal(logits_of(small), logits_of(small, ops=Float32Ops(load_library())))


def test_weights_of_another_form_take_the_place_of_those_that_serve(ops, tmp_path):
    """Whether a matrix stays in 16 bits depends on its numbers, so a trainer's next weights may have another form."""
    write_checkpoint(tmp_path / "next", "llama2", num_layers=2)
    shutil.copytree(tmp_path / "next", tmp_path / "first")
    tensors = {name: each.bfloat16() for name, each in load_file(tmp_path / "next/model.safetensors").items()}
    save_file(tensors, tmp_path / "first/model.safetensors")
    first, then = (load_model(tmp_path / name, max_model_len=64) for name in ("first", "next"))
    assert packed(first.head).codes is not None and packed(then.head).codes is None
    assert why_unlike(first, then) == "" and why_unlike(then, first) == ""
    write_checkpoint(tmp_path / "other", "llama_biases", num_layers=2)
    assert "a weight" in why_unlike(first, load_model(tmp_path / "other", max_model_len=64))
    assert sum(each.nbytes for _, each in tensors_of(first)) < 0.6 * sum(each.nbytes for _, each in tensors_of(then))


def test_the_plan_counts_what_memory_then_has(ops, tmp_path):
    write_checkpoint(tmp_path, "llama2", num_layers=2)
    wide = check_checkpoint(tmp_path, read_model_spec(tmp_path))
    assert wide.cpu_bytes == 4 * wide.numbers
    tensors = {name: each.bfloat16() for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    count = check_checkpoint(tmp_path, read_model_spec(tmp_path))
    model = load_model(tmp_path, max_model_len=1)
    held = sum(each.nbytes for _, each in tensors_of(model))
    assert count.numbers == wide.numbers and count.cpu_bytes <= held < 1.2 * count.cpu_bytes, "panels are padded"


FILES = (("Q8_0", {}), ("Q4_0", {}), ("Q4_0", {"attn_v": "Q8_0", "token_embd": "Q8_0"}), ("F16", {}))
"""The type of matrices, and of some others."""


@pytest.mark.parametrize(("dtype", "rest"), FILES, ids=str)
@pytest.mark.parametrize("name", ["Llama-3.1-8B-Instruct", "Qwen3-30B-A3B"])
def test_a_gguf_file_stays_small_and_has_the_logits_of_float32(ops, name, dtype, rest, tmp_path):
    (tmp_path / "published").mkdir()
    make_checkpoint(Row(name), tmp_path / "published")
    folder = folder_of(convert(tmp_path / "published", tmp_path / "model.gguf", dtype, {"ffn_down": "F16", **rest}))
    spec = read_model_spec(folder)
    model = load_model(folder, max_model_len=64)
    assert isinstance(model, DecoderModel)
    weights = [model.embedding, model.head, *(layer.attention.qkv for layer in model.layers)]
    assert all(packed(each).codes is not None for each in weights)
    assert bits_equal(logits_of(folder), logits_of(folder, ops=Float32Ops(load_library())))
    plain = load_model(folder, max_model_len=64, ops=TorchOps())
    held, wide = (sum(each.nbytes for _, each in tensors_of(each)) for each in (model, plain))
    assert held < 0.6 * wide
    if not rest:  # q, k and v of two types take one form, which has all numbers of both
        assert held < 1.25 * check_checkpoint(folder, spec).cpu_bytes

    shape = {
        "q": (spec.num_heads * spec.head_dim, spec.hidden_size),
        "o": (spec.hidden_size, spec.num_heads * spec.head_dim),
    }
    half = shape["q"][0] // 2
    for part, cut in (("q", {"rows": range(half, 2 * half)}), ("o", {"columns": range(half, 2 * half)}), ("q", {})):
        tensor = f"model.layers.0.self_attn.{part}_proj.weight"
        with source_of(folder, keeps=lambda *_: True) as weights:
            small = weights.take_matrix(tensor, *shape[part], **cut)
        with source_of(folder, keeps=None) as weights:
            assert torch.equal(dequantised(small), weights.take(tensor, *shape[part], **cut))
        assert isinstance(small, KeptBlocks) is (dtype != "F16")


def source_of(folder: Path, keeps: Keeps | None) -> WeightSource:
    return WeightSource(folder, torch.float32, torch.device("cpu"), None, keeps=keeps)
