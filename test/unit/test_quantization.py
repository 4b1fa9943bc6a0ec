"""Every published form of a `quantization_config` is read, refused by its usual name, or contradicts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.logical_tensors import logical_tensors
from chitu.models.quantization import Quantization, WeightFormat, read_quantization

BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}


def groups(packing: str, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors, as its programs write it."""
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**WEIGHTS, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": packing,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V3": (BLOCK_FP8, "block FP8"),
    "DeepSeek-V3.1": ({**BLOCK_FP8, "scale_fmt": "ue8m0"}, "block FP8"),
    "Qwen3-32B-FP8": ({**BLOCK_FP8, "modules_to_not_convert": ["lm_head"]}, "block FP8"),
    "MiniMax-M2": ({**BLOCK_FP8, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate"]}, "block FP8"),
    "Mistral FP8": ({"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}, "FP8"),
    "Llama-3.1-405B-FP8": (
        {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"},
        "FP8 per channel",
    ),
    "Llama-3.3-70B-FP8-dynamic": (
        groups("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None),
        "FP8 per channel",
    ),
    "W8A8": (groups("int-quantized", num_bits=8, strategy="channel", group_size=None), "INT8"),
    "Kimi-K2-Thinking": (groups("pack-quantized"), "INT4 (pack-quantized)"),
    "NVFP4 of compressed-tensors": (
        groups("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        "NVFP4",
    ),
    "Llama-3.3-70B modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {}, "producer": {}, "ignore": ["lm_head"]},
        "FP8 per tensor",
    ),
    "gpt-oss": ({"modules_to_not_convert": ["model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}, "MXFP4"),
    "Qwen3-32B-AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "AWQ (4 bits)",
    ),
    "Qwen2.5-GPTQ": (
        {
            "bits": 4,
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "model_file_base_name": "model",
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
        },
        "GPTQ (4 bits)",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_form_is_read(name: str, tmp_path: Path) -> None:
    config, words = PUBLISHED[name]
    found = read_quantization(config, tmp_path, "config.json")
    assert found is not None and found.words == words


def test_modelopt_has_a_file_of_its_own_which_config_json_overrides(tmp_path: Path) -> None:
    assert read_quantization(None, tmp_path, "here") is read_quantization({}, tmp_path, "here") is None
    file = tmp_path / "hf_quant_config.json"
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    found = read_quantization(None, tmp_path, "here")
    assert found == Quantization("modelopt", (WeightFormat("NVFP4"),))
    assert read_quantization(BLOCK_FP8, tmp_path, "here").method == "fp8"
    mixed = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
    }
    file.write_text(json.dumps({"quantization": mixed}))
    assert read_quantization(None, tmp_path, "here").words == "mixed precision, FP8 per tensor, NVFP4"
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert read_quantization(None, tmp_path, "here") is None, "only the KV cache is quantised"
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json cannot be read"):
        read_quantization(None, tmp_path, "here")


REFUSED = {
    "bitsandbytes (4 bits)": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes (8 bits)": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "AMD Quark": {"quant_method": "quark"},
    "the method 'new'": {"quant_method": "new", "anything": 1},
    "the method None": {"bits": 4},
    "GPTQ with 3 bits": {"quant_method": "gptq", "bits": 3},
    "GPTQ in the form 'marlin'": {"quant_method": "gptq", "checkpoint_format": "marlin"},
    "AWQ with 8 bits": {"quant_method": "awq", "bits": 8},
    "version 'gemv'": {"quant_method": "awq", "version": "gemv"},
    "modelopt's NVFP4_AWQ": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
    "modelopt's W4A8_AWQ": {"quant_algo": "W4A8_AWQ"},
    "format 'marlin-24'": groups("marlin-24"),
    "3 bits of type int": groups("pack-quantized", num_bits=3),
    "stored sparsely": {**groups("int-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "rotations": {**groups("pack-quantized"), "transform_config": {"config_groups": {"u": {}}}},
    "dynamic {'-:.*': {}}": {"quant_method": "gptq", "dynamic": {"-:.*": {}}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_read_is_refused_by_its_usual_name(words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_quantization(REFUSED[words], tmp_path, "config.json")
    assert words in caught.value.message and caught.value.message.startswith("config.json: quantization_config")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**BLOCK_FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({**BLOCK_FP8, "block_size": 128}, "the key 'block_size' is not known"),
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4'"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "group_size": 12.5}, "group_size is 12.5"),
        ({"quant_method": "compressed-tensors", "format": "dense", "config_groups": {"g": 1}}, "config_groups.g is 1"),
        ("fp8", "is 'fp8', not an object"),
    ],
)
def test_a_broken_config_is_one_sentence(config: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        read_quantization(config, tmp_path, "here")


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def fp8(scales: tuple[int, ...], shape: tuple[int, ...] = (300, 200)) -> dict[str, Header]:
    return {"a.weight": Header("F8_E4M3", shape), "a.weight_scale_inv": Header("F32", scales)}


def spec_of(config: dict[str, Any]) -> Quantization:
    found = read_quantization(config, Path("/nowhere"), "here")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("scales", "block"),
    [
        ((3, 2), (128, 128)),
        ((), (300, 200)),
        ((1,), (300, 200)),
        ((300, 1), (1, 200)),
        ((300,), (1, 200)),
        ((3, 4), None),
    ],
)
def test_the_shape_of_the_scales_says_what_has_one(scales: tuple[int, ...], block: tuple[int, int] | None) -> None:
    config = BLOCK_FP8 if len(scales) == 2 and scales[1] > 1 else {**BLOCK_FP8, "weight_block_size": None}
    if block is None:
        with pytest.raises(
            ConfigError, match=r"scales of 'a.weight' have shape \(3, 4\), which does not fit \(300, 200\)"
        ):
            logical_tensors(fp8(scales), spec_of(config), "here")
        return
    logical = logical_tensors(fp8(scales), spec_of(config), "here")
    assert logical.shapes == {"a.weight": (300, 200)} and logical.packed["a.weight"].block == block
    assert logical.count() == 60_000


def test_only_what_no_weight_needs_is_left_out() -> None:
    idle = {f"a.{end}": Header("F32", ()) for end in ("input_scale", "k_scale", "v_scale")}
    logical = logical_tensors({**fp8((3, 2)), **idle, "b.weight": Header("BF16", (3,))}, spec_of(BLOCK_FP8), "here")
    assert set(logical.shapes) == {"a.weight", "b.weight"}
    for name in ("b.weight_scale_inv", "a.pre_quant_scale", "a.qzeros"):
        with pytest.raises(UnsupportedModel, match=f"'{name}' belongs to quantised weights"):
            logical_tensors({**fp8((3, 2)), name: Header("F32", (1,))}, spec_of(BLOCK_FP8), "here")
    with pytest.raises(UnsupportedModel, match=r"'b.weight' is stored in 8 bits \(F8_E4M3\) and has no scale"):
        logical_tensors({**fp8((3, 2)), "b.weight": Header("F8_E4M3", (3, 3))}, spec_of(BLOCK_FP8), "here")
    with pytest.raises(UnsupportedModel, match=r"config.json has no quantization_config"):
        logical_tensors(fp8((3, 2)), None, "here")


def test_modules_have_the_bits_of_their_group() -> None:
    config = groups("mixed-precision")
    first = config["config_groups"]["group_0"]
    config["config_groups"] = {
        "a": {**first, "targets": [r"re:.*\.down_proj$"], "weights": {**WEIGHTS, "num_bits": 8}},
        "b": {**first, "targets": ["model.layers.0.mlp.up_proj"], "weights": {**WEIGHTS, "num_bits": 2}},
        "c": {**first, "targets": ["Linear"]},
    }
    spec = spec_of(config)
    modules = ("model.layers.3.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert [spec.format_of(module).bits for module in modules] == [8, 2, 4]


def test_reading_a_quantization_imports_no_torch() -> None:
    code = "import sys, chitu.models.quantization; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
