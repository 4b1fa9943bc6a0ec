"""Weights that the GPU's kernels keep in e4m3, under Triton's interpreter: products equal those of the numbers that the
weights stand for, and logits of whole checkpoints those of dequantised ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_checkpoints import Engine, generate, logits_of, make_prompt, write_checkpoint
from safetensors.torch import load_file, save_file
from support.quantised_weights import FORMS, float8, quantise_folder, write_folder
from support.reference_ops import ReferenceOps
from thread_ranks import Meeting, ThreadRank

from chitu.engine.build import load_model
from chitu.engine.memory_budget import reserve_bytes
from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import read_model_spec
from chitu.models.layers import DecoderModel
from chitu.models.quantization import read_quantization
from chitu.models.tensors import copy_numbers, tensors_of, why_unlike
from chitu.models.weights import WeightSource
from chitu.ops.interface import Ops, Routes
from chitu.ops.kept import KeptBlocks, below, dequantised
from chitu.ops.kept_on_cards import WIDE_NUMBERS

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.small_linear import HOPPER_BYTES, MAX_ROWS, SMALLEST_BYTES, scaled_tiles, tiles_for
from chitu.ops.kernels.widen import wide_linear, widened
from chitu.ops.scaled_weights import ScaledStack, ScaledWeight, Scales
from chitu.ops.torch_ops import PlainWeight, TorchOps
from chitu.ops.triton_ops import CardExperts, TritonOps

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

REFERENCE = ReferenceOps()
OPS = TritonOps(num_multiprocessors=132)
LOOSE = {"rtol": 1e-4, "atol": 1e-4}
RUNS = (64, 128, 32, 1000)
"""Inputs with a common scale: of blocks, and of all inputs (channel, tensor)."""


def weight_of(out: int, inner: int, run: int, dtype: torch.dtype = torch.float32) -> KeptBlocks:
    """Return a random weight whose neighbouring scales differ by up to a factor of a hundred."""
    codes = torch.randint(0, 256, (out, inner), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 1  # a denormal in place of NaN
    scales = 10 ** (2 * torch.rand(out, -(-inner // run))) / 10_000
    return KeptBlocks("e4m3", codes, scales, run, dtype=dtype)


def plain(weight: KeptBlocks) -> torch.Tensor:
    """Return the numbers that a weight stands for, by the table of e4m3 and a loop over the scales."""
    numbers = weight.codes_OI.view(torch.float8_e4m3fn).double()
    for c in range(numbers.shape[1]):
        numbers[:, c] *= weight.scales_OR[:, c // weight.run].double()
    return numbers.float()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rows", [1, 3, 17, MAX_ROWS + 1])
def test_products_equal_those_of_the_numbers(rows, run):
    """One row, few, more than a tensor core's sixteen, and so many that torch takes over."""
    inner, out = 200, 70
    torch.manual_seed(rows + run)
    weight, bias = weight_of(out, inner, run), torch.randn(out) if rows % 2 else None
    x, residual, norm = torch.randn(rows, inner), torch.randn(rows, out), torch.rand(inner) + 0.5
    fast, slow = OPS.prepare(weight, bias), REFERENCE.prepare(plain(weight), bias)
    assert isinstance(fast, ScaledWeight) and fast.weight.element_size() == 1
    torch.testing.assert_close(OPS.linear(x, fast), REFERENCE.linear(x, slow), **LOOSE)
    expected = REFERENCE.linear_add(x, slow, residual.clone())
    torch.testing.assert_close(OPS.linear_add(x, fast, residual), expected, **LOOSE)
    found, expected = OPS.norm_linear(x, norm, 1e-6, fast), REFERENCE.norm_linear(x, norm, 1e-6, slow)
    torch.testing.assert_close(found, expected, **LOOSE)
    fast, slow = OPS.prepare_gate_up(weight, bias), REFERENCE.prepare_gate_up(plain(weight), bias)
    torch.testing.assert_close(OPS.gate_up(x, fast), REFERENCE.gate_up(x, slow), **LOOSE)
    found, expected = OPS.norm_gate_up(x, norm, 1e-6, fast), REFERENCE.norm_gate_up(x, norm, 1e-6, slow)
    torch.testing.assert_close(found, expected, **LOOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_many_rows_multiply_the_weight_that_was_dequantised_when_it_was_read(dtype):
    """To the bit: it is widened piece by piece, each with the scales of its own outputs."""
    torch.manual_seed(3)
    weight, bias, x = weight_of(70, 200, 64, dtype), torch.randn(70, dtype=dtype), torch.randn(80, 200, dtype=dtype)
    kept = OPS.prepare(weight, bias)
    assert isinstance(kept, ScaledWeight)
    assert torch.equal(widened(kept.weight, kept.scales, kept.in_features, dtype), dequantised(weight))
    assert dequantised(weight).dtype == dtype
    expected = OPS.prepare(dequantised(weight), bias)
    found, residual = torch.empty(80, 70, dtype=dtype), torch.randn(80, 70, dtype=dtype)
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else LOOSE
    for at_once in (200 * 30, 1, 1 << 20):
        wide_linear(x, kept.weight, kept.scales, kept.bias, found, at_once=at_once)
        torch.testing.assert_close(found, OPS.linear(x, expected), **close)
        wide_linear(x, kept.weight, kept.scales, kept.bias, sums := residual.clone(), is_added=True, at_once=at_once)
        torch.testing.assert_close(sums, OPS.linear_add(x, expected, residual.clone()), **close)


@pytest.mark.parametrize("runs", [(32, 64), (1000, 32), (1000, 1000)], ids=str)
@pytest.mark.parametrize("rows", [2, 90])
def test_a_mixture_of_kept_experts_equals_that_of_the_numbers(rows, runs):
    hidden, inner, experts = 96, 80, 5
    torch.manual_seed(rows)
    gate_up = [weight_of(2 * inner, hidden, runs[0]) for _ in range(experts)]
    down = [weight_of(hidden, inner, runs[1]) for _ in range(experts)]
    x = torch.randn(rows, hidden)
    routes = Routes(torch.randint(0, experts, (rows, 2)), torch.rand(rows, 2))
    numbers = [torch.stack([plain(each) for each in part]) for part in (gate_up, down)]
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(*numbers))
    kept = OPS.prepare_experts(gate_up, down)
    assert isinstance(kept, CardExperts) and isinstance(kept.gate_up_EGD, ScaledStack)
    torch.testing.assert_close(OPS.mixture(x, routes, kept), expected, rtol=1e-4, atol=1e-3)
    # A rank may have a part of the experts' inputs that is not kept, and the rest is.
    mixed = OPS.prepare_experts(gate_up, numbers[1])
    torch.testing.assert_close(OPS.mixture(x, routes, mixed), expected, rtol=1e-4, atol=1e-3)


def test_joined_matrices_keep_the_scales_of_each():
    torch.manual_seed(5)
    parts = [weight_of(out, 96, 1000) for out in (40, 24, 24)]  # q, k and v with a scale each
    parts = [each._replace(scales_OR=torch.full_like(each.scales_OR, 10.0**-at)) for at, each in enumerate(parts)]
    joined, x = below(parts), torch.randn(3, 96)
    assert isinstance(joined, KeptBlocks)
    expected = torch.cat([x @ plain(each).T for each in parts], dim=1)
    torch.testing.assert_close(OPS.linear(x, OPS.prepare(joined, None)), expected, **LOOSE)


FAULTS = {
    "the scale of the block beside": lambda scales: scales.roll(1, 1),
    "the scale of the output below": lambda scales: scales.roll(1, 0),
    "scales transposed": lambda scales: scales.t().contiguous().view(scales.shape),
    "the second of two joined matrices has the scales of the first": lambda scales: torch.cat([scales[:48]] * 2),
    "one scale for all": lambda scales: scales[:, :1].expand_as(scales).contiguous(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_is_seen(fault):
    """The comparisons above can fail: each fault changes most numbers, for few rows and many, and of experts."""
    torch.manual_seed(7)
    parts = [weight_of(48, 128, 64) for _ in range(2)]
    right = below(parts)
    assert isinstance(right, KeptBlocks)
    wrong = right._replace(scales_OR=FAULTS[fault](right.scales_OR))
    for rows in (1, 5, MAX_ROWS + 1):
        x = torch.randn(rows, 128)
        found, expected = OPS.linear(x, OPS.prepare(wrong, None)), x @ plain(right).T
        assert (~torch.isclose(found, expected, **LOOSE)).float().mean() > 0.4
    routes = Routes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    down, x = weight_of(128, 48, 32), torch.randn(2, 128)
    found = OPS.mixture(x, routes, OPS.prepare_experts([wrong], [down]))
    numbers = [plain(each).unsqueeze(0) for each in (right, down)]
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(*numbers))
    assert (~torch.isclose(found, expected, **LOOSE)).float().mean() > 0.4


def blocks_of(size: int) -> dict[str, object]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [size, size]}


CHECKPOINTS = {
    "qwen3 in blocks": ("qwen3", "fp8_block", blocks_of(128)),
    "qwen3 in small blocks": ("qwen3", "fp8_block", blocks_of(32)),
    "qwen3 per channel": ("qwen3", "fp8_channel", FORMS["fp8 rows"](np.random.default_rng(0), 8, 32).config),
    "qwen3 per tensor": ("qwen3", "fp8_tensor", FORMS["fp8 tensor"](np.random.default_rng(0), 8, 32).config),
    "qwen3_moe in small blocks": ("qwen3_moe", "fp8_block", blocks_of(32)),
    "deepseek_v3 in small blocks": ("deepseek_v3", "fp8_block", blocks_of(32)),
}


def folders_of(folder: Path, name: str) -> tuple[Path, Path, list[str]]:
    """Write a checkpoint in FP8, and one with the numbers that it stands for; return both, and what is quantised."""
    family, form, config = CHECKPOINTS[name]
    write_checkpoint(folder / "plain", family, num_layers=1 if family == "qwen3" else 2)
    small, large = folder / "small", folder / "large"
    return small, large, quantise_folder(folder / "plain", small, large, form, config)


def kept_of(model: object) -> int:
    """Return the numbers of a model that are kept in e4m3."""
    return sum(each.numel() for _, each in tensors_of(model) if each.dtype == torch.float8_e4m3fn)


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "qwen3 in small blocks"])
def test_a_checkpoint_that_is_kept_has_the_logits_of_the_dequantised_one(name, tmp_path):
    """Without rounding within the sums' own in float32; in float16 no farther off than the dequantised weights are."""
    small, large, names = folders_of(tmp_path, name)
    model = load_model(small, max_model_len=64, ops=OPS)
    assert isinstance(model, DecoderModel)
    count = sum(load_file(large / "model.safetensors")[each].numel() for each in names)
    assert kept_of(model) > (0.6 if "deepseek" in name else 0.99) * count, "latent attention keeps its output alone"
    exact = logits_of(large, ops=OPS)
    torch.testing.assert_close(logits_of(small, ops=OPS), exact, rtol=1e-3, atol=1e-3)
    wide = load_model(small, max_model_len=64, ops=OPS, weights="dequantise")
    assert kept_of(wide) == 0 and kept_of(load_model(small, max_model_len=64, ops=TritonOps(4, has_e4m3=False))) == 0
    if name == "qwen3 in blocks":
        off = [(logits_of(each, ops=OPS, dtype="float16").float() - exact).square().mean() for each in (small, large)]
        assert off[0] <= 1.5 * off[1] and off[1] > 0


@pytest.mark.parametrize("name", ["qwen3 in small blocks", "qwen3_moe in small blocks"])
def test_a_checkpoint_with_a_wrong_scale_is_seen(name, tmp_path):
    small, large, names = folders_of(tmp_path, name)
    exact, tensors = logits_of(large, ops=OPS), load_file(small / "model.safetensors")
    for change in (lambda scales: scales.roll(1, 1), lambda scales: scales.t().contiguous().view(scales.shape))[
        "moe" in name :
    ]:
        wrong = dict(tensors)
        for each in names:
            if wrong[f"{each}_scale_inv"].numel() > 1:
                wrong[f"{each}_scale_inv"] = change(wrong[f"{each}_scale_inv"])
        save_file(wrong, small / "model.safetensors")
        assert (logits_of(small, ops=OPS) - exact).abs().mean() > 0.05 * exact.abs().mean()


def test_weights_kept_in_e4m3_are_changed_in_place(tmp_path):
    """As on a GPU, whose recorded steps read where the old ones are. A folder with another form is refused."""
    small, large, names = folders_of(tmp_path, "qwen3 in blocks")
    first = load_model(small, max_model_len=64, ops=OPS)
    tensors = load_file(small / "model.safetensors")
    for each in names:
        tensors[each], tensors[f"{each}_scale_inv"] = tensors[each].flip(0), tensors[f"{each}_scale_inv"] * 2
    (tmp_path / "next").mkdir()
    for file in small.glob("*.json"):
        (tmp_path / "next" / file.name).write_bytes(file.read_bytes())
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "next/model.safetensors")
    then = load_model(tmp_path / "next", max_model_len=64, ops=OPS)
    assert why_unlike(first, then) == "" and "float8" in why_unlike(first, load_model(large, max_model_len=64, ops=OPS))
    places = [each.data_ptr() for _, each in tensors_of(first)]
    with torch.inference_mode():
        copy_numbers(first, then)
    pairs = zip(tensors_of(first), tensors_of(then), strict=True)
    assert all(torch.equal(one.float(), two.float()) for (_, one), (_, two) in pairs)
    assert places == [each.data_ptr() for _, each in tensors_of(first)]


@pytest.mark.parametrize(
    ("columns", "run"), [(None, 128), (range(128, 300), 128), (range(192, 300), 64), (range(200, 300), 0)], ids=str
)
def test_columns_that_begin_within_a_block_are_kept_with_shorter_runs(columns, run, tmp_path):
    """So a rank's part of the inputs may begin at any multiple of 32; elsewhere it is dequantised: equal numbers."""
    encoded = float8(np.random.default_rng(5), 200, 300)
    folder = write_folder(tmp_path, {f"x.{end}": each for end, each in encoded.tensors.items()}, encoded.config)
    config = read_quantization(json.loads((folder / "config.json").read_text())["quantization_config"], folder, "x")
    with WeightSource(folder, torch.bfloat16, torch.device("cpu"), None, config, keeps=OPS.keeps) as weights:
        found = weights.take_matrix("x.weight", 200, 300, columns=columns, rows=range(7, 150))
    assert (found.run if isinstance(found, KeptBlocks) else 0) == run
    cut = encoded.weight[7:150, slice(columns.start, columns.stop) if columns else slice(None)]
    expected = torch.from_numpy(cut).float().bfloat16()
    assert torch.equal(dequantised(found), expected)
    if isinstance(found, KeptBlocks):
        kept = OPS.prepare(found, None)
        assert isinstance(kept, ScaledWeight)
        assert torch.equal(OPS.rows_of(kept, torch.tensor([3, 0, 142])), expected[[3, 0, 142]])


@pytest.mark.parametrize("shared_bytes", [SMALLEST_BYTES, HOPPER_BYTES])
def test_tiles_of_kept_weights_fit_into_shared_memory(shared_bytes):
    for rows in (1, 2, 17, 33, MAX_ROWS):
        for num_out in (64, 1024, 6144, 151936):
            for has_norm, is_gated in ((False, False), (True, False), (True, True)):
                which = {"has_norm": has_norm, "is_gated": is_gated, "shared_bytes": shared_bytes}
                for run, runs in ((128, 8), (32, 32), (96, 10), (1024, 1)):
                    scales = Scales(torch.empty(1, runs), run)
                    found = scaled_tiles(tiles_for(rows, num_out, **which), scales, shared_bytes, is_gated)
                    stage = found.width * (2 * found.rows + (1 + is_gated) * found.out)
                    assert found.stages * stage <= shared_bytes and found.width >= 32
                    assert runs == 1 or run % found.width == 0, "a block never crosses runs"


@pytest.mark.parametrize("name", ["qwen3 in blocks", "qwen3 per channel", "qwen3_moe in small blocks"])
def test_the_plan_counts_what_the_card_will_hold(name, tmp_path):
    small, large, _ = folders_of(tmp_path, name)
    spec = read_model_spec(small)
    count, wide = check_checkpoint(small, spec), check_checkpoint(small, spec, keeps=False)
    model = load_model(small, "float16", max_model_len=16, ops=OPS)
    own = {each.data_ptr(): each.nbytes for _, each in tensors_of(model)}
    assert count.bytes_on_card(2) <= sum(own.values()) < 1.1 * count.bytes_on_card(2), "the router is float32"
    assert wide.bytes_on_card(2) == 2 * count.numbers and wide.card_bytes == 0 and wide.cpu_bytes == 4 * count.numbers
    assert check_checkpoint(large, read_model_spec(large)).bytes_on_card(2) == 2 * count.numbers
    more = reserve_bytes(spec, 2, 64, 4, 128) - reserve_bytes(read_model_spec(large), 2, 64, 4, 128)
    assert more == 2 * WIDE_NUMBERS


def test_a_prompt_of_many_rows_and_decodes_give_the_tokens_of_dequantised_weights(tmp_path):
    small, large, _ = folders_of(tmp_path, "qwen3 in small blocks")

    def tokens(folder: Path, ops: Ops) -> list[list[int]]:
        engine = Engine(folder, ops=ops, max_model_len=128, num_slots=1, num_pages=16)
        return generate(engine, [make_prompt(MAX_ROWS + 6)], 3, chunk_size=MAX_ROWS + 6)

    assert tokens(small, OPS) == tokens(large, TorchOps())


def test_two_ranks_have_the_numbers_of_one_with_the_scales_of_their_blocks(tmp_path):
    """Where a rank's part begins within a block of the MLP, at no multiple of 32, its part is dequantised."""
    small, large, _ = folders_of(tmp_path, "qwen3 in small blocks")
    tensors, meeting = load_file(large / "model.safetensors"), Meeting(2)
    models = [load_model(small, max_model_len=64, ops=OPS, shard=ThreadRank(meeting, rank)) for rank in range(2)]
    layers = [model.layers[0] for model in models if isinstance(model, DecoderModel)]
    outputs, downs = [each.attention.output for each in layers], [each.mlp.down for each in layers]
    assert all(isinstance(each, ScaledWeight) for each in outputs) and isinstance(downs[1], PlainWeight)
    for name, parts in (("self_attn.o_proj", outputs), ("mlp.down_proj", downs)):
        whole = torch.cat([OPS.rows_of(each, torch.arange(each.out_features)) for each in parts], dim=1)
        assert torch.equal(whole, tensors[f"model.layers.0.{name}.weight"])
    joined = [each.mlp.gate_up for each in layers]
    rows = [OPS.rows_of(each, torch.arange(each.out_features)).chunk(2) for each in joined]
    for at, name in enumerate(("gate", "up")):
        whole = torch.cat([each[at] for each in rows])
        assert torch.equal(whole, tensors[f"model.layers.0.mlp.{name}_proj.weight"])
