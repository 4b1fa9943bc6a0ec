"""config.json is read without torch; what the engine cannot compute is refused by name before any weight is read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import RopeSpec, model_hash, read_model_spec, weight_files, weights_digest

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
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
"""Configs as model repositories publish them, with small sizes."""
V3 = PUBLISHED["DeepSeek-V3-bf16"]
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN3_MOE = PUBLISHED["Qwen3-30B-A3B"]
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
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


def write_config(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(config: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in keys}


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
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "512"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 256}, "256"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named, tmp_path):
    with pytest.raises(UnsupportedModel, match=named):
        read_model_spec(write(tmp_path, **changes))


def test_a_sliding_window_that_no_request_can_fill_is_no_window(tmp_path):
    write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=512, num_key_value_heads=2)
    assert read_model_spec(tmp_path, max_model_len=512).architecture == "MistralForCausalLM"
    with pytest.raises(UnsupportedModel):
        read_model_spec(tmp_path, max_model_len=513)
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    write(tmp_path, **qwen2, use_sliding_window=False, sliding_window=256)
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


def test_another_training_of_the_same_architecture_has_another_hash(tmp_path):
    header = {"a": {"dtype": "BF16", "shape": [1 << 20], "data_offsets": [0, 2 << 20]}}
    weights = np.arange(1 << 20, dtype=np.uint16)
    write_weights(tmp_path / "model.safetensors", header, weights.tobytes())
    first = model_hash(write(tmp_path))
    for part in (slice(0, 1 << 17), slice(7 << 17, None)):  # an eighth of the weights, as a tensor or two has
        trained = weights.copy()
        trained[part] ^= 1
        write_weights(tmp_path / "model.safetensors", header, trained.tobytes())
        assert first != model_hash(tmp_path)
    write_weights(tmp_path / "model.safetensors", header, weights.tobytes())
    assert first == model_hash(tmp_path)


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


@pytest.mark.parametrize("name", ["../x.safetensors", "{folder}/x.safetensors", "sub/x.safetensors"])
def test_an_index_cannot_point_outside_its_folder(name, tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "real").write_bytes(b"")
    for place in (tmp_path, folder / "sub"):
        (place / "x.safetensors").symlink_to(tmp_path / "real")
    index = {"weight_map": {"a": name.format(folder=tmp_path)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside"):
        weight_files(folder)


def test_a_weight_file_that_links_to_itself_is_missing(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "loop.safetensors"}}))
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(ConfigError, match=r"loop\.safetensors is missing"):
        weight_files(tmp_path)


def test_reading_a_spec_imports_no_torch():
    code = "import sys, chitu.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name, tmp_path):
    asked = 4096 if "max_model_len=4096" in name else None
    spec = read_model_spec(write_config(tmp_path, PUBLISHED[name]), asked)
    assert spec.dtype in ("bfloat16", "float16")
    assert spec.eos_token_ids
    lengthened = 131072 if "README" in name else PUBLISHED[name]["max_position_embeddings"]
    assert spec.max_model_len == (asked or lengthened)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA, "rope_tetha": 5e5}, "'rope_tetha' is not known .*'rope_theta'"),
        ({**LLAMA, "dual_chunk_attention_config": {}}, "'dual_chunk_attention_config' is not known"),
        ({**LLAMA, "gradient_checkpointing": True}, "is not known; remove"),
        ({**LLAMA, "text_config": {}}, "text_config is of a model of more than text"),
        ({**LLAMA, "model_type": "mistral"}, "LlamaForCausalLM has the model_type 'llama', not 'mistral'"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        ({**LLAMA, "rms_norm_eps": None}, "rms_norm_eps is None"),
        ({**LLAMA, "dtype": "float16"}, "dtype is 'float16', but torch_dtype"),
        ({**LLAMA, "sliding_window": 512}, "sliding_window 512"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling .* lacks 'factor'"),
        ({**LLAMA, "rope_scaling": {"factor": 4.0}}, "rope_scaling .*'default'.*'factor' is not known"),
        ({**LLAMA, "rope_scaling": {**YARN, "rope_type": "linear"}}, "rope_type is 'linear', but type"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta is 500000.0"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({**V3, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({**V3, "head_dim": 64}, "head_dim is 64"),
        ({**V3, "topk_method": "greedy"}, "topk_method 'greedy'"),
    ],
)
def test_a_key_that_is_unknown_or_wrong_is_refused_by_name(config, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        read_model_spec(write_config(tmp_path, config))


def test_missing_keys_of_deepseek_v3_have_the_defaults_of_its_class(tmp_path):
    config = without(V3, "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts")
    experts = read_model_spec(write_config(tmp_path, {**config, "n_routed_experts": 32})).experts
    assert experts is not None
    assert (experts.rule.num_groups, experts.rule.top_groups, experts.rule.scale) == (8, 4, 2.5)
    assert (experts.rule.is_normalised, experts.shared_intermediate_size) == (True, 40)


def test_a_mistral_that_names_no_window_has_that_of_its_class(tmp_path):
    long = {**MISTRAL, "max_position_embeddings": 8192}
    with pytest.raises(UnsupportedModel, match=r"sliding_window is 4096 .*model\.max_model_len=4096"):
        read_model_spec(write_config(tmp_path, long))
    assert read_model_spec(tmp_path, 4096).max_model_len == 4096
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        read_model_spec(write_config(tmp_path, {**long, "use_sliding_window": False}))
    assert read_model_spec(write_config(tmp_path, {**long, "sliding_window": None})).max_model_len == 8192


def test_two_spellings_of_rope_beside_each_other_must_say_the_same(tmp_path):
    default = {"rope_type": "default", "rope_theta": 500000.0}
    yarn = {**YARN, "rope_theta": 500000.0}
    alone = read_model_spec(write(tmp_path, rope_scaling=YARN))
    assert read_model_spec(write(tmp_path, rope_scaling=YARN, rope_parameters=yarn)) == alone
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling contradict each other"):
        read_model_spec(write(tmp_path, rope_scaling=YARN, rope_parameters=default))
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling contradict each other"):
        read_model_spec(write(tmp_path, rope_theta=None, rope_scaling=YARN, rope_parameters=yarn))


def test_original_positions_beside_rope_scaling_count(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0}
    spec = read_model_spec(write(tmp_path, rope_scaling=scaling, original_max_position_embeddings=512))
    assert spec.rope.original_max_position_embeddings == 512
    with pytest.raises(ConfigError, match="original_max_position_embeddings is 512, but"):
        read_model_spec(write(tmp_path, rope_scaling=YARN, original_max_position_embeddings=512))


def test_an_attn_factor_is_refused_with_the_values_of_both_readings(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    with pytest.raises(UnsupportedModel, match=r"attn_factor 0\.878.* remove it .*, or write attention_factor 1 "):
        read_model_spec(write(tmp_path, rope_scaling={**scaling, "attn_factor": 0.8782488562869419}))
    alone = read_model_spec(write(tmp_path, rope_scaling=scaling))
    assert read_model_spec(write(tmp_path, rope_scaling={**scaling, "attn_factor": 1.0})) == alone
    exact = read_model_spec(write(tmp_path, rope_scaling={**scaling, "attention_factor": 1.0}))
    assert exact.rope.attention_factor == 1.0 != alone.rope.attention_factor


def test_no_more_tokens_are_promised_than_the_model_reaches(tmp_path):
    write(tmp_path)
    assert read_model_spec(tmp_path, 1024).max_model_len == read_model_spec(tmp_path).max_model_len == 1024
    with pytest.raises(ConfigError, match=r"model\.max_model_len is 1025, but the model reaches 1024"):
        read_model_spec(tmp_path, 1025)
    write(tmp_path, rope_scaling=YARN)
    assert read_model_spec(tmp_path).max_model_len == 4096
    assert read_model_spec(tmp_path, 2048).max_model_len == 2048
    with pytest.raises(ConfigError, match="4097"):
        read_model_spec(tmp_path, 4097)


def test_a_broken_generation_config_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        read_model_spec(tmp_path)


def test_weights_are_those_that_transformers_reads(tmp_path):
    for name in ("model.safetensors", "model_backup.safetensors", "consolidated.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(b"")
    index = {"weight_map": {"a": "other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert [file.name for file in weight_files(tmp_path)] == ["other.safetensors"]
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter_config"):
        weight_files(tmp_path)


def test_other_weights_of_the_same_shapes_have_another_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for part in (b"1", b"2"):
            (tmp_path / name / f"model-{part.decode()}.safetensors").write_bytes(part * 1000)
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b")
    (tmp_path / "b" / "model-2.safetensors").write_bytes(b"2" * 999 + b"3")
    assert weights_digest(tmp_path / "a") != weights_digest(tmp_path / "b")
