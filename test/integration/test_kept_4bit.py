"""Weights that the GPU's kernels keep in 4 bits, under Triton's interpreter: products equal those of the numbers that
the weights stand for, and logits of whole checkpoints those of dequantised ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_checkpoints import Engine, generate, logits_of, make_prompt, write_checkpoint
from safetensors.torch import load_file
from support.quantised_weights import FORMS, quantise_folder
from support.reference_ops import ReferenceOps
from thread_ranks import Meeting, ThreadRank

from chitu.engine.build import load_model
from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import read_model_spec
from chitu.models.layers import DecoderModel, MixtureMLP
from chitu.models.tensors import copy_numbers, tensors_of, why_unlike
from chitu.ops.interface import Ops, Routes
from chitu.ops.kept import Form, KeptBlocks, below, dequantised

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops import triton_ops
from chitu.ops.kernels.small_linear import HOPPER_BYTES, MAX_ROWS, SMALLEST_BYTES, scaled_tiles, tiles_for
from chitu.ops.kernels.widen import widened
from chitu.ops.scaled_weights import ScaledStack, ScaledWeight, Scales, scaled_stack, scaled_weight
from chitu.ops.torch_ops import PlainWeight, TorchOps
from chitu.ops.triton_ops import CardExperts, TritonOps

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

REFERENCE = ReferenceOps()
OPS = TritonOps(num_multiprocessors=132, has_e4m3=False)
"""Of an Ampere, too: only FP8 asks for more."""
LOOSE = {"rtol": 1e-4, "atol": 1e-4}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(float(number) for number in range(-8, 8))
KINDS: dict[str, tuple[Form, int, bool, torch.dtype]] = {
    "nvfp4": ("e2m1", 16, False, torch.float16),
    "mxfp4": ("e2m1", 32, False, torch.float32),
    "awq": ("int4", 128, True, torch.float32),
    "int4 of odd groups": ("int4", 48, True, torch.float32),
    "int4 by half": ("int4", 64, False, torch.float16),
    "int4 per channel": ("int4", 1000, False, torch.float32),
}
"""Form, inputs with a common scale, whether zero points are added, and the dtype of the scales."""


def weight_of(kind: str, out: int, inner: int, dtype: torch.dtype = torch.float32) -> KeptBlocks:
    """Return a random weight whose neighbouring scales differ by up to a factor of a hundred."""
    form, run, has_added, scale_dtype = KINDS[kind]
    codes, shape = torch.randint(0, 16, (out, inner), dtype=torch.uint8), (out, -(-inner // run))
    scales = 10 ** (2 * torch.rand(shape)) / 100
    if has_added:
        scales = scales.bfloat16().float()  # so that products with codes are exact
    added = torch.randint(-7, 8, shape) * scales if has_added else None
    over = torch.rand(out) + 0.5 if kind == "nvfp4" else None
    return KeptBlocks(form, codes, scales.to(scale_dtype), run, added, E2M1 if form == "e2m1" else INT4, dtype, over)


def plain(weight: KeptBlocks) -> torch.Tensor:
    """Return the numbers that a weight stands for, by its table and a loop over the inputs."""
    numbers = torch.tensor(weight.table, dtype=torch.float64)[weight.codes_OI.long()]
    for c in range(numbers.shape[1]):
        numbers[:, c] *= weight.scales_OR[:, c // weight.run].double()
        if weight.over_O is not None:
            numbers[:, c] *= weight.over_O.double()
        if weight.added_OR is not None:
            numbers[:, c] += weight.added_OR[:, c // weight.run].double()
    return numbers.float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, MAX_ROWS + 1])
def test_products_equal_those_of_the_numbers(rows, kind):
    """One row, few, and so many that torch takes over. Of an odd number of inputs, which leaves half a byte."""
    inner, out = 139, 40
    torch.manual_seed(rows)
    weight, bias = weight_of(kind, out, inner), torch.randn(out) if rows % 2 else None
    x, residual, norm = torch.randn(rows, inner), torch.randn(rows, out), torch.rand(inner) + 0.5
    fast, slow = OPS.prepare(weight, bias), REFERENCE.prepare(plain(weight), bias)
    assert isinstance(fast, ScaledWeight) and fast.weight.nbytes == out * 70 and fast.in_features == inner
    torch.testing.assert_close(OPS.linear(x, fast), REFERENCE.linear(x, slow), **LOOSE)
    expected = REFERENCE.linear_add(x, slow, residual.clone())
    torch.testing.assert_close(OPS.linear_add(x, fast, residual), expected, **LOOSE)
    found, expected = OPS.norm_gate_up(x, norm, 1e-6, fast), REFERENCE.norm_gate_up(x, norm, 1e-6, slow)
    torch.testing.assert_close(found, expected, **LOOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_has_the_numbers_of_one_that_was_dequantised_when_it_was_read(kind, dtype):
    """To the bit, wherever it is read: for many rows, for a row of an embedding, and in registers for few rows, where a
    row of the identity shows each number."""
    torch.manual_seed(3)
    weight = weight_of(kind, 40, 90, dtype)
    kept, expected = OPS.prepare(weight, None), dequantised(weight)
    assert isinstance(kept, ScaledWeight)
    assert torch.equal(widened(kept.weight, kept.scales, 90, dtype), expected)
    assert torch.equal(OPS.rows_of(kept, torch.tensor([3, 0, 39])), expected[[3, 0, 39]])
    one_hot = torch.eye(90, dtype=dtype)
    found = torch.cat([OPS.linear(one_hot[at : at + 45], kept) for at in (0, 45)])
    assert torch.equal(found.T, expected)


@pytest.mark.parametrize("kinds", [("nvfp4", "mxfp4"), ("awq", "int4 by half")], ids=str)
@pytest.mark.parametrize("rows", [2, 90])
def test_a_mixture_of_kept_experts_equals_that_of_the_numbers(rows, kinds):
    hidden, inner, experts = 96, 80, 5
    torch.manual_seed(rows)
    gate_up = [weight_of(kinds[0], 2 * inner, hidden) for _ in range(experts)]
    down = [weight_of(kinds[1], hidden, inner) for _ in range(experts)]
    x = torch.randn(rows, hidden) / 10
    routes = Routes(torch.randint(0, experts, (rows, 2)), torch.rand(rows, 2))
    numbers = [torch.stack([plain(each) for each in part]) for part in (gate_up, down)]
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(*numbers))
    kept = OPS.prepare_experts(gate_up, down)
    assert isinstance(kept, CardExperts) and isinstance(kept.down_EDI, ScaledStack) and kept.num_experts == experts
    torch.testing.assert_close(OPS.mixture(x, routes, kept), expected, rtol=1e-4, atol=1e-3)
    mixed = OPS.prepare_experts(gate_up, numbers[1])
    torch.testing.assert_close(OPS.mixture(x, routes, mixed), expected, rtol=1e-4, atol=1e-3)


def test_experts_of_several_forms_are_dequantised():
    torch.manual_seed(1)
    down = [weight_of("awq", 64, 64) for _ in range(2)]
    parts = [weight_of("nvfp4", 64, 64), weight_of("mxfp4", 64, 64)]
    experts = OPS.prepare_experts(parts, down)
    assert isinstance(experts, CardExperts) and isinstance(experts.gate_up_EGD, torch.Tensor)
    assert torch.equal(experts.gate_up_EGD, torch.stack([dequantised(each) for each in parts]))


def test_joined_matrices_keep_the_scales_and_zero_points_of_each():
    torch.manual_seed(5)
    parts = [weight_of("awq", out, 96) for out in (40, 24, 24)]
    joined, x = below(parts), torch.randn(3, 96)
    assert isinstance(joined, KeptBlocks)
    expected = torch.cat([x @ plain(each).T for each in parts], dim=1)
    torch.testing.assert_close(OPS.linear(x, OPS.prepare(joined, None)), expected, **LOOSE)


def test_joined_matrices_of_4_and_8_bits_have_the_dtype_of_the_model():
    few = weight_of("int4 by half", 8, 64, torch.float16)
    many = few._replace(form="int8", table=())
    joined = below([few, many])
    assert isinstance(joined, KeptBlocks) and joined.form == "int8"
    assert not OPS.keeps("int8", 64, 64) and not OPS.keeps("table4", 64, 64) and not OPS.keeps("e4m3", 64, 64)
    found = OPS.prepare(joined, None)
    assert isinstance(found, PlainWeight)
    assert torch.equal(found.weight, torch.cat([dequantised(few), dequantised(many)]))


def config_of(form: str) -> dict[str, object]:
    return FORMS[form](np.random.default_rng(0), 8, 32).config


CHECKPOINTS = {
    "qwen3 in NVFP4": ("qwen3", "nvfp4", "nvfp4"),
    "qwen3 in MXFP4": ("qwen3", "mxfp4_packed", "mxfp4"),
    "qwen3 in INT4": ("qwen3", "int4_packed", "int4"),
    "qwen3 in INT4 with zero points": ("qwen3", "int4_zeros", "int4 zeros"),
    "qwen3 in AWQ": ("qwen3", "awq", "awq"),
    "qwen3 in GPTQ": ("qwen3", "gptq", "gptq"),
    "qwen3_moe in NVFP4": ("qwen3_moe", "nvfp4", "nvfp4"),
    "qwen3_moe in INT4": ("qwen3_moe", "int4_packed", "int4"),
    "qwen3_moe in AWQ": ("qwen3_moe", "awq", "awq"),
    "deepseek_v3 in NVFP4": ("deepseek_v3", "nvfp4", "nvfp4"),
}
"""Family, form and its config."""
IN_CI = (
    "qwen3 in NVFP4",
    "qwen3 in INT4 with zero points",
    "qwen3 in GPTQ",
    "qwen3_moe in AWQ",
    "deepseek_v3 in NVFP4",
)
"""Every kind of code, of scale and of model. The tests below read the other forms, too."""


def folders_of(folder: Path, name: str, num_layers: int = 1) -> tuple[Path, Path, list[str]]:
    """Write a checkpoint in 4 bits, and one with the numbers that it stands for; return both, and what is quantised."""
    family, form, config = CHECKPOINTS[name]
    write_checkpoint(folder / "plain", family, num_layers=num_layers)
    small, large = folder / "small", folder / "large"
    return small, large, quantise_folder(folder / "plain", small, large, form, config_of(config))


def kept_of(model: object) -> int:
    """Return the numbers of a model that are kept in 4 bits."""
    return sum(2 * each.numel() for _, each in tensors_of(model) if each.dtype in (torch.uint8, torch.int8))


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.by_hand) for name in CHECKPOINTS]
)
def test_a_checkpoint_that_is_kept_has_the_logits_of_the_dequantised_one(name, tmp_path):
    """Within the sums' own rounding in float32, and in float16 too, since weights are rounded alike."""
    small, large, names = folders_of(tmp_path, name, 2 if "deepseek" in name else 1)
    model = load_model(small, max_model_len=64, ops=OPS)
    assert isinstance(model, DecoderModel)
    count = sum(load_file(large / "model.safetensors")[each].numel() for each in names)
    assert kept_of(model) > (0.6 if "deepseek" in name else 0.99) * count, "latent attention keeps its output alone"
    exact = logits_of(large, ops=OPS)
    torch.testing.assert_close(logits_of(small, ops=OPS), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    wide = load_model(small, max_model_len=64, ops=OPS, weights="dequantise")
    assert kept_of(wide) == 0
    if name in ("qwen3 in NVFP4", "qwen3_moe in AWQ"):
        off = [logits_of(each, ops=OPS, dtype="float16").float() - exact for each in (small, large)]
        assert 0 < float(off[0].square().mean()) <= 1.1 * float(off[1].square().mean())


def swapped(codes: torch.Tensor) -> torch.Tensor:
    bytes_OI = codes.view(torch.uint8)
    return (bytes_OI << 4 | bytes_OI >> 4).view(codes.dtype)


FAULTS: dict[str, Callable[..., dict[str, object]]] = {
    "nibbles swapped": lambda codes, factors, added: {"weight": swapped(codes)},
    "integers read as floats": lambda codes, factors, added: {"weight": codes.view(torch.uint8)},
    "the scale of the block beside": lambda codes, factors, added: {"factors": factors.roll(1, -1)},
    "the scale of the output below": lambda codes, factors, added: {"factors": factors.roll(1, -2)},
    "zero points forgotten": lambda codes, factors, added: {"added": None},
    "the zero point of the block beside": lambda codes, factors, added: {"added": added.roll(1, -1)},
}


def with_fault(weight: ScaledWeight | ScaledStack, fault: str) -> ScaledWeight | ScaledStack:
    end = "_EOR" if isinstance(weight, ScaledStack) else "_OR"
    changed = FAULTS[fault](weight.weight, weight.scales.factors, weight.scales.added)
    return replace(weight, **{name if name == "weight" else name + end: each for name, each in changed.items()})


@pytest.mark.parametrize("name", ["qwen3 in INT4 with zero points", "qwen3_moe in AWQ"])
def test_a_fault_in_how_codes_are_read_is_seen_in_the_logits(name, tmp_path, monkeypatch):
    """The comparisons above can fail: of dense matrices and, alone, of experts, with every other
    fault."""
    small, large, _ = folders_of(tmp_path, name)
    exact = logits_of(large, ops=OPS)
    for fault in list(FAULTS)[:: 2 if "moe" in name else 1]:
        if "moe" in name:
            monkeypatch.setattr(triton_ops, "scaled_stack", lambda *w: with_fault(scaled_stack(*w), fault))  # noqa: B023
        else:
            monkeypatch.setattr(triton_ops, "scaled_weight", lambda *w: with_fault(scaled_weight(*w), fault))  # noqa: B023
        off = (logits_of(small, ops=OPS) - exact).abs().mean() / exact.abs().mean()
        assert off > (0.02 if "moe" in name else 0.2), (fault, off)


@pytest.mark.parametrize("shared_bytes", [SMALLEST_BYTES, HOPPER_BYTES])
def test_tiles_of_kept_weights_fit_into_shared_memory(shared_bytes):
    for rows in (1, 2, 17, 33, MAX_ROWS):
        for num_out in (64, 1024, 6144, 151936):
            for has_norm, is_gated in ((False, False), (True, False), (True, True)):
                which = {"has_norm": has_norm, "is_gated": is_gated, "shared_bytes": shared_bytes}
                for run, runs in ((16, 64), (48, 20), (128, 8), (1024, 1)):
                    scales = Scales(torch.empty(1, runs), run)
                    found = scaled_tiles(tiles_for(rows, num_out, **which), scales, shared_bytes, is_gated, packed=True)
                    stage = found.width * (2 * found.rows + (1 + is_gated) * found.out // 2)
                    assert found.stages * stage <= shared_bytes and found.width >= 32
                    assert rows == 1 or found.width <= 128, "wider ones spill registers"


@pytest.mark.parametrize("name", ["qwen3 in NVFP4", "qwen3 in AWQ", "qwen3_moe in INT4"])
def test_the_plan_counts_what_the_card_will_hold(name, tmp_path):
    small, large, _ = folders_of(tmp_path, name)
    spec = read_model_spec(small)
    count, wide = check_checkpoint(small, spec), check_checkpoint(small, spec, keeps=False)
    model = load_model(small, "float16", max_model_len=16, ops=OPS)
    own = {each.data_ptr(): each.nbytes for _, each in tensors_of(model)}
    assert "NVFP4" not in name or count.card_bytes < 0.7 * count.card_numbers, "scales of 2 bytes"
    assert count.bytes_on_card(2) <= sum(own.values()) < 1.1 * count.bytes_on_card(2), "the router is float32"
    assert wide.bytes_on_card(2) == 2 * count.numbers and wide.card_bytes == 0
    assert check_checkpoint(large, read_model_spec(large)).bytes_on_card(2) == 2 * count.numbers


def test_a_prompt_of_many_rows_and_decodes_give_the_tokens_of_dequantised_weights(tmp_path):
    small, large, _ = folders_of(tmp_path, "qwen3 in NVFP4")

    def tokens(folder: Path, ops: Ops) -> list[list[int]]:
        engine = Engine(folder, ops=ops, max_model_len=128, num_slots=1, num_pages=16)
        return generate(engine, [make_prompt(MAX_ROWS + 6)], 3, chunk_size=MAX_ROWS + 6)

    assert tokens(small, OPS) == tokens(large, TorchOps())


def test_weights_are_changed_in_place_and_not_by_those_of_another_form(tmp_path):
    folders = {name: folders_of(tmp_path / name, f"qwen3 in {name}") for name in ("INT4", "AWQ", "MXFP4")}
    first, like, other = (load_model(folders[name][0], max_model_len=64, ops=OPS) for name in ("INT4", "INT4", "AWQ"))
    assert why_unlike(first, like) == "" and why_unlike(first, other)
    floats = load_model(folders["MXFP4"][0], max_model_len=64, ops=OPS)
    assert "uint8" in why_unlike(first, floats) and "float32" in why_unlike(
        first, load_model(folders["INT4"][1], max_model_len=64, ops=OPS)
    )
    exact = [(place, each.clone()) for place, each in tensors_of(like)]
    with torch.inference_mode():
        for _, each in tensors_of(first):
            each.zero_()
        copy_numbers(first, like)
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(tensors_of(first), exact, strict=True))


@pytest.mark.parametrize("name", ["qwen3 in NVFP4", "qwen3 in AWQ"])
def test_two_ranks_have_the_numbers_of_one_with_the_scales_of_their_blocks(name, tmp_path):
    """Where a rank's inputs begin within a block, that part is dequantised."""
    small, large, _ = folders_of(tmp_path, name)
    tensors, meeting = load_file(large / "model.safetensors"), Meeting(2)
    models = [load_model(small, max_model_len=64, ops=OPS, shard=ThreadRank(meeting, rank)) for rank in range(2)]
    layers = [model.layers[0] for model in models if isinstance(model, DecoderModel)]
    outputs, downs = [each.attention.output for each in layers], [each.mlp.down for each in layers]
    assert all(isinstance(each, ScaledWeight) for each in outputs) and isinstance(downs[1], PlainWeight)
    for part, found in (("self_attn.o_proj", outputs), ("mlp.down_proj", downs)):
        whole = torch.cat([OPS.rows_of(each, torch.arange(each.out_features)) for each in found], dim=1)
        assert torch.equal(whole, tensors[f"model.layers.0.{part}.weight"])
    rows = [OPS.rows_of(w, torch.arange(w.out_features)).chunk(2) for w in (each.mlp.gate_up for each in layers)]
    for at, part in enumerate(("gate", "up")):
        whole = torch.cat([each[at] for each in rows])
        assert torch.equal(whole, tensors[f"model.layers.0.mlp.{part}_proj.weight"])


def test_a_rank_keeps_its_own_experts_small(tmp_path):
    small, large, _ = folders_of(tmp_path, "qwen3_moe in INT4")
    tensors, own = load_file(large / "model.safetensors"), range(2, 5)
    spread = SimpleNamespace(own=lambda num_experts: own)
    model = load_model(small, max_model_len=64, ops=OPS, spread=spread)  # type: ignore[arg-type]
    assert isinstance(model, DecoderModel)
    mlp = model.layers[0].mlp
    assert isinstance(mlp, MixtureMLP) and isinstance(mlp.experts, CardExperts)
    assert isinstance(mlp.experts.gate_up_EGD, ScaledStack) and isinstance(mlp.experts.down_EDI, ScaledStack)
    name, x = "model.layers.0.mlp.experts.{}.{}_proj.weight", torch.randn(4, 64)
    gate_up = torch.stack([torch.cat([tensors[name.format(e, part)] for part in ("gate", "up")]) for e in own])
    down = torch.stack([tensors[name.format(e, "down")] for e in own])
    routes = Routes(torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]]), torch.rand(4, 2))
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(gate_up, down))
    torch.testing.assert_close(OPS.mixture(x, routes, mlp.experts), expected, **LOOSE)
