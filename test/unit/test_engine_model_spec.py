"""config.json is read without torch; what we do not compute is refused by name, before any weight is touched."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import RopeSpec, model_hash, read_model_spec, weight_files

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 500,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def write(folder: Path, **changes: object) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_weights(path: Path, header: dict[str, object], payload: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


def test_missing_fields_take_their_defaults(tmp_path):
    spec = read_model_spec(write(tmp_path))
    assert (spec.num_kv_heads, spec.head_dim, spec.dtype, spec.family) == (4, 16, "bfloat16", "llama")
    assert spec.rope == RopeSpec(theta=500000.0, original_max_position_embeddings=1024)
    assert not spec.tie_word_embeddings


def test_old_and_new_spelling_of_rope_mean_the_same(tmp_path):
    old = read_model_spec(write(tmp_path, rope_scaling=LLAMA3_SCALING))
    new = read_model_spec(
        write(tmp_path, rope_theta=None, rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0}, dtype="bfloat16")
    )
    assert old == new
    assert old.rope == RopeSpec("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)


def test_eos_ids_come_from_both_files_without_repeats(tmp_path):
    write(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_model_spec(tmp_path).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "512"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 256}, "256"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named, tmp_path):
    with pytest.raises(UnsupportedModel, match=named):
        read_model_spec(write(tmp_path, **changes))


def test_a_sliding_window_that_no_request_can_fill_is_no_window(tmp_path):
    write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=512)
    assert read_model_spec(tmp_path, max_model_len=512).architecture == "MistralForCausalLM"
    with pytest.raises(UnsupportedModel):
        read_model_spec(tmp_path, max_model_len=513)
    write(tmp_path, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=256)
    assert read_model_spec(tmp_path).family == "qwen2"


def test_a_broken_config_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        read_model_spec(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_model_spec(tmp_path)
    with pytest.raises(ConfigError, match="lacks 'vocab_size'"):
        read_model_spec(write(tmp_path, vocab_size=None))
    with pytest.raises(ConfigError, match="no multiple"):
        read_model_spec(write(tmp_path, num_key_value_heads=3))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_spec(tmp_path)


def test_the_hash_covers_config_and_weight_layout_but_not_the_library_version(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    write_weights(tmp_path / "model.safetensors", header, bytes(8))
    first = model_hash(write(tmp_path, transformers_version="4.57.0"))
    assert first == model_hash(write(tmp_path, transformers_version="5.23.0"))
    assert first != model_hash(write(tmp_path, rms_norm_eps=1e-5))
    write(tmp_path)
    header["a"]["shape"] = [1, 2]
    write_weights(tmp_path / "model.safetensors", header, bytes(8))
    assert first != model_hash(tmp_path)


def test_an_index_names_the_files_and_every_one_must_be_there(tmp_path):
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is missing"):
        weight_files(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    with pytest.raises(ConfigError, match="no safetensors file"):
        model_hash(write(tmp_path))


def test_an_index_cannot_point_outside_its_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ConfigError, match="outside"):
        weight_files(tmp_path)


def test_reading_a_spec_imports_no_torch():
    code = "import sys, chitu.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
