"""Quantised weights are dequantised to the numbers that their published layouts mean, whole and in every part."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_checkpoints import FAMILIES, logits_of, write_checkpoint
from safetensors.torch import load_file, save_file
from support.quantised_weights import FORMS, Encoded, float8, gpt_oss_experts, quantise_folder, write_folder

from chitu.engine.build import load_model
from chitu.errors import UnsupportedModel
from chitu.models.checkpoint import check_checkpoint, count_weights, damaged_tensor
from chitu.models.config import read_model_spec
from chitu.models.dequantize import halves, integers, scales_of
from chitu.models.quantization import AWQ_LANES, read_quantization
from chitu.models.weights import Keeps, Rows, WeightSource
from chitu.ops.kept import KeptBlocks, dequantised
from chitu.ops.native import NativeOps, load_library

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

CPU = torch.device("cpu")
ROWS, COLUMNS = 40, 96
NAME = "x.weight"
PARTS = (None, range(0, 8), range(3, 17), range(17, 40), range(39, 40))
COLUMN_PARTS = (None, range(0, 32), range(5, 41), range(41, 96), range(95, 96))


def folder_of(path: Path, encoded: Encoded, module: str = "x") -> Path:
    return write_folder(path, {f"{module}.{end}": each for end, each in encoded.tensors.items()}, encoded.config)


def source_of(
    folder: Path, dtype: torch.dtype = torch.float32, piece_numbers: int = 1 << 20, keeps: Keeps | None = None
) -> WeightSource:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return WeightSource(folder, dtype, CPU, None, read_quantization(config, folder, "here"), piece_numbers, keeps)


def read(
    folder: Path, *shape: int, dtype: torch.dtype = torch.float32, piece_numbers: int = 1 << 20, **part: Any
) -> torch.Tensor:
    with source_of(folder, dtype, piece_numbers) as weights:
        assert weights.names == {NAME: shape}
        found = weights.take(NAME, *shape, **part)
        weights.finish()
    return found


def exactly(weight: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the formula's result, computed in float64, rounded as published: to float32, then to the dtype."""
    return torch.from_numpy(weight).to(torch.float32).to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("piece", [1, 500, 1 << 20])
def test_every_part_of_every_form_is_the_formula_without_an_error(form, piece, tmp_path):
    """Pieces are smaller than a row, smaller than a block, and the whole."""
    encoded = FORMS[form](np.random.default_rng(3), ROWS, COLUMNS)
    folder, expected = folder_of(tmp_path / "x", encoded), exactly(encoded.weight)
    parts = itertools.product(PARTS, COLUMN_PARTS) if piece > 1 else zip(PARTS, COLUMN_PARTS, strict=True)
    for rows, columns in parts:  # number by number takes long
        wanted = expected[rows.start : rows.stop] if rows else expected
        wanted = wanted[:, columns.start : columns.stop] if columns else wanted
        found = read(folder, ROWS, COLUMNS, rows=rows, columns=columns, piece_numbers=piece)
        assert torch.equal(found, wanted) and found.is_contiguous(), (rows, columns)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(read(folder, ROWS, COLUMNS, dtype=dtype), exactly(encoded.weight, dtype))


@pytest.mark.parametrize("block", [(1, 1), (3, 5), (16, 1), (1, 16), (12, 20), (200, 7)], ids=str)
def test_every_cut_of_small_blocks_is_exact(block, tmp_path):
    rows, columns = 12, 20
    encoded = float8(np.random.default_rng(1), rows, columns, block)
    folder, expected = folder_of(tmp_path / "x", encoded), exactly(encoded.weight)
    cuts = [range(*cut) for cut in itertools.combinations(range(0, 13, 3), 2)]
    column_cuts = [range(*cut) for cut in itertools.combinations(range(0, 21, 4), 2)]
    for own, part in itertools.product(cuts, column_cuts):
        found = read(folder, rows, columns, rows=own, columns=part)
        assert torch.equal(found, expected[own.start : own.stop, part.start : part.stop]), (own, part)


def test_bits_are_where_the_published_layouts_have_them():
    """Written by hand: the number of place k is k."""
    assert integers(torch.tensor([[0x76543210]], dtype=torch.int32), 4, tuple(range(8)), 1).tolist() == [[*range(8)]]
    assert integers(torch.tensor([[0x75316420]], dtype=torch.int32), 4, AWQ_LANES, 1).tolist() == [[*range(8)]]
    assert integers(torch.tensor([[0x03020100]], dtype=torch.int32), 8, tuple(range(4)), 0).tolist() == [
        [0], [1], [2], [3]
    ]  # fmt: skip
    assert integers(torch.tensor([[-1]], dtype=torch.int32), 4, tuple(range(8)), 1).tolist() == [[15] * 8]
    found = halves(torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8))
    assert found.tolist() == [[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]]
    assert scales_of(torch.tensor([127, 128, 120, 0], dtype=torch.uint8), None, False).tolist() == [
        1, 2, 2.0**-7, 2.0**-127
    ]  # fmt: skip


def swap_halves(data: torch.Tensor) -> torch.Tensor:
    return data >> 4 | data << 4


FAULTS = {
    "scales transposed": ("fp8 square", "weight_scale_inv", lambda x: x.t()),
    "scale of the block below": ("fp8 square", "weight_scale_inv", lambda x: x.roll(1, 0)),
    "scale of the block beside": ("fp8 square", "weight_scale_inv", lambda x: x.roll(1, 1)),
    "inverse scale": ("fp8 square", "weight_scale_inv", lambda x: 1 / x),
    "scale of the row below": ("fp8 rows", "weight_scale", lambda x: x.roll(1, 0)),
    "halves of a byte swapped": ("nvfp4", "weight", swap_halves),
    "inverse scale over all": ("nvfp4", "weight_scale_2", lambda x: 1 / x),
    "multiplied, not divided": ("nvfp4 compressed-tensors", "weight_global_scale", lambda x: 1 / x),
    "scales of the group beside": ("mxfp4", "weight_scale", lambda x: x.roll(1, 1)),
    "words in the order of AWQ": ("int4", "weight_packed", lambda x: x.roll(1, 1)),
    "zeros of the row below": ("int4 zeros", "weight_scale", lambda x: x.roll(1, 0)),
    "groups in order": ("gptq ordered", "g_idx", lambda x: x.sort().values),
    "zeros of the group beside": ("gptq", "qzeros", lambda x: x.roll(1, 0)),
    "rows of words shifted": ("gptq", "qweight", lambda x: x.roll(1, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layout_is_seen_by_the_formula(fault, tmp_path):
    """The comparison of the tests above can fail: each fault changes most numbers."""
    form, end, change = FAULTS[fault]
    own = {**FORMS, "fp8 square": lambda s, r, c: float8(s, r, c, (8, 16))}
    rows, columns = (40, 80) if form == "fp8 square" else (ROWS, COLUMNS)
    encoded = own[form](np.random.default_rng(3), rows, columns)
    encoded.tensors[end] = change(encoded.tensors[end])
    found = read(folder_of(tmp_path / "x", encoded), rows, columns)
    assert (found != exactly(encoded.weight)).float().mean() > 0.4


@pytest.mark.parametrize(("method", "version", "is_equal"), [("v1", "gptq", True), ("v1 read as v2", "gptq_v2", False)])
def test_the_version_of_gptq_counts(method, version, is_equal, tmp_path):
    encoded = FORMS["gptq"](np.random.default_rng(3), ROWS, COLUMNS)
    folder = folder_of(tmp_path / "x", encoded._replace(config={**encoded.config, "checkpoint_format": version}))
    assert torch.equal(read(folder, ROWS, COLUMNS), exactly(encoded.weight)) is is_equal


def test_experts_in_mxfp4_are_read_like_a_stack_of_matrices(tmp_path):
    encoded, weight = gpt_oss_experts(np.random.default_rng(5), 3, 24, 64)
    tensors = {f"experts.gate_up_proj_{end}": each for end, each in encoded.tensors.items()}
    folder = write_folder(tmp_path, {**tensors, "experts.gate_up_proj_bias": torch.ones(3, 24)}, encoded.config)
    for rows, columns in itertools.product((None, range(1, 3)), (None, range(5, 37))):
        with source_of(folder) as weights:
            assert weights.names["experts.gate_up_proj"] == (3, 64, 24)
            found = weights.take("experts.gate_up_proj", 3, 64, 24, rows=rows, columns=columns)
        wanted = exactly(weight)[rows.start : rows.stop] if rows else exactly(weight)
        assert torch.equal(found, wanted[:, columns.start : columns.stop] if columns else wanted), (rows, columns)


def test_a_stack_of_float8_matrices_has_scales_of_its_own(tmp_path):
    each = [float8(np.random.default_rng(n), 24, 32, (16, 16)) for n in range(3)]
    tensors = {
        f"experts.down_proj{end}": torch.stack([one.tensors[f"weight{end}"] for one in each])
        for end in ("", "_scale_inv")
    }
    with source_of(write_folder(tmp_path, tensors, each[0].config)) as weights:
        found = weights.take("experts.down_proj", 3, 24, 32, columns=range(3, 20))
    assert torch.equal(found, torch.stack([exactly(one.weight) for one in each])[:, 3:20])


def test_rows_of_several_matrices_are_stacked(tmp_path):
    one, two = (float8(np.random.default_rng(n), 24, 32, (16, 16)) for n in range(2))
    tensors = {f"{name}.{end}": each for name, form in (("q", one), ("k", two)) for end, each in form.tensors.items()}
    with source_of(write_folder(tmp_path, tensors, one.config)) as weights:
        found = weights.take_rows([Rows("q.weight", 24, range(5, 20)), Rows("k.weight", 24)], 32)
    assert torch.equal(found, torch.cat([exactly(one.weight)[5:20], exactly(two.weight)]))


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 24]}
OTHERS = ("fp8_channel", "fp8_tensor", "nvfp4", "awq", "gptq", "int4_packed", "int8")


def config_of(form: str) -> dict[str, Any]:
    makers = {
        "fp8_channel": "fp8 rows",
        "fp8_tensor": "fp8 tensor",
        "int4_packed": "int4",
        "int8": "int8 rows",
    }
    return FORMS[makers.get(form, form)](np.random.default_rng(0), 32, 32).config


KINDS = ("llama3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm_moe_dsa", "gpt_oss")
"""Families in CI. The others differ from one of them in what is not quantised: biases, norms, ropes, groups, and which
layers have experts."""


@pytest.mark.parametrize(
    "family", [name if name in KINDS else pytest.param(name, marks=pytest.mark.by_hand) for name in FAMILIES]
)
def test_each_family_in_8_bits_has_the_logits_of_its_dequantised_folder(family, tmp_path):
    write_checkpoint(tmp_path / "plain", family, num_layers=2)
    small, large = tmp_path / "quantised", tmp_path / "dequantised"
    names = quantise_folder(tmp_path / "plain", small, large, "fp8_block", BLOCKS)
    spec = read_model_spec(small)
    assert len(names) >= 8 and spec.quantization.words == "block FP8"
    counts = check_checkpoint(small, spec), check_checkpoint(large, read_model_spec(large))
    assert counts[0].numbers == counts[1].numbers == count_weights(large)
    saved = counts[1].cpu_bytes - counts[0].cpu_bytes
    least = 0.05 if family == "gpt_oss" else 0.3  # its joined experts are kept in MXFP4 alone, as published
    assert least * counts[0].numbers < saved / 3 < counts[0].numbers and counts[1].cpu_bytes == 4 * counts[1].numbers
    expected = logits_of(large)
    assert torch.equal(logits_of(small), expected)

    tensors = load_file(small / "model.safetensors")
    tensors[f"{names[0]}_scale_inv"][0, 0] *= 2
    save_file(tensors, small / "model.safetensors")
    assert not torch.equal(logits_of(small), expected), "one block counts"
    tensors[names[0]].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, small / "model.safetensors")
    assert damaged_tensor(small) == names[0]


def test_weights_stay_in_8_bits_where_the_operations_keep_such(tmp_path):
    """A NaN, columns that begin within a block and other numbers than e4m3 are dequantised instead."""
    library = load_library()
    if library is None or not NativeOps(library).keeps_small:
        pytest.skip("no C compiler here, or a CPU without conversion of float16")
    write_checkpoint(tmp_path / "plain", "qwen3_moe", num_layers=2)
    small, large = tmp_path / "quantised", tmp_path / "dequantised"
    quantise_folder(tmp_path / "plain", small, large, "fp8_block", BLOCKS)
    model = load_model(small, max_model_len=64)
    mixture = model.layers[0].mlp
    kept = [model.layers[0].attention.qkv, model.layers[0].attention.output, model.layers[1].mlp.gate_up]
    kept += [*mixture.experts.gate_up, *mixture.experts.down]
    assert all(weight.panels.dtype == torch.uint8 for weight in kept)

    config = json.loads((small / "config.json").read_text())["quantization_config"]
    name, shape = "model.layers.0.self_attn.o_proj.weight", (64, 128)
    quantization = read_quantization(config, small, "here")

    def taken(folder: Path, columns: range | None) -> torch.Tensor | KeptBlocks:
        with WeightSource(folder, torch.float32, CPU, None, quantization, keeps=lambda *_: True) as weights:
            return weights.take_matrix(name, *shape, columns=columns)

    expected = load_file(large / "model.safetensors")[name]
    for columns, is_kept in ((None, True), (range(24, 72), True), (range(64, 128), False)):
        found = taken(small, columns)
        assert isinstance(found, KeptBlocks) is is_kept
        part = expected[:, columns.start : columns.stop] if columns else expected
        assert torch.equal(dequantised(found), part)
    tensors = load_file(small / "model.safetensors")
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, small / "model.safetensors")
    found = taken(small, None)
    assert isinstance(found, torch.Tensor) and found.isnan().sum() == 1


@pytest.mark.parametrize("form", OTHERS)
def test_a_model_in_each_form_has_the_logits_of_its_dequantised_folder(form, tmp_path):
    write_checkpoint(tmp_path / "plain", "qwen3_moe", num_layers=2)
    small, large = tmp_path / "quantised", tmp_path / "dequantised"
    names = quantise_folder(tmp_path / "plain", small, large, form, config_of(form))
    assert len(names) > 10
    count = check_checkpoint(small, read_model_spec(small))
    assert count.numbers == count_weights(large) and count.cpu_bytes < 0.6 * 4 * count.numbers
    assert torch.equal(logits_of(small), logits_of(large))


NOT_KEPT = ("int8 rows zeros", "int4 ordered", "gptq ordered")


@pytest.mark.parametrize("form", FORMS)
def test_every_part_of_a_matrix_that_is_kept_small_has_its_numbers(form, tmp_path):
    encoded = FORMS[form](np.random.default_rng(5), ROWS, COLUMNS)
    folder, kept = folder_of(tmp_path, encoded), set()
    for rows, columns in itertools.product(PARTS, COLUMN_PARTS):
        with source_of(folder) as weights:
            expected = weights.take(NAME, ROWS, COLUMNS, rows=rows, columns=columns)
        with source_of(folder, keeps=lambda *_: True) as weights:
            found = weights.take_matrix(NAME, ROWS, COLUMNS, rows=rows, columns=columns)
            weights.finish()
        assert torch.equal(dequantised(found), expected)
        if isinstance(found, KeptBlocks):
            kept.add(columns)
            assert found.codes_OI.dtype == torch.uint8 and found.scales_OR.shape[0] == len(expected)
    assert kept >= {None, range(0, 32)} if form not in NOT_KEPT else not kept


def test_biases_of_gptq_are_left_out_only_if_they_are_zero(tmp_path):
    """Its programs give every layer a bias, also those of models that have none."""
    write_checkpoint(tmp_path / "plain", "llama2", num_layers=2)
    small = tmp_path / "quantised"
    quantise_folder(tmp_path / "plain", small, tmp_path / "dequantised", "gptq", config_of("gptq"))
    tensors = load_file(small / "model.safetensors")
    for value in (0.0, 0.5):
        save_file(
            {**tensors, "model.layers.1.mlp.up_proj.bias": torch.full((112,), value)}, small / "model.safetensors"
        )
        assert check_checkpoint(small, read_model_spec(small))
        if value:
            with pytest.raises(UnsupportedModel, match=r"does not use: model\.layers\.1\.mlp\.up_proj\.bias"):
                logits_of(small)
        else:
            assert torch.equal(logits_of(small), logits_of(tmp_path / "dequantised"))
