"""What the headers of a checkpoint say before any process starts: each fault by name, as loading would find it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import HF_QUANT, PUBLISHED, ROWS, write_row_config

from chitu.cli import main
from chitu.config.load import load_topology
from chitu.errors import ConfigError, UnsupportedModel
from chitu.launch.preflight import look_at_model, require_preflight
from chitu.models.checkpoint import check_checkpoint, damaged_tensor, read_entries, tensor_shapes
from chitu.models.config import RopeSpec, model_hash, read_model_spec, weight_files, weights_digest
from chitu.models.families import traits_of
from chitu.tools.make_model import FAMILIES, make_model
from chitu.tools.node_facts import gather

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("families") / request.param, family=request.param)


def test_the_names_and_shapes_are_those_that_each_family_takes(family: Path) -> None:
    """Loading takes each tensor once and refuses the rest, so what can be loaded is what a model takes."""
    spec = read_model_spec(family)
    found = {name: entry.shape for name, entry in read_entries(weight_files(family)).items()}
    assert dict(tensor_shapes(spec, traits_of(spec))) == found
    assert check_checkpoint(family, spec).numbers > 0 and not damaged_tensor(family)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "llama", family="llama")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a checkpoint's only weight file."""
    (file,) = weight_files(folder)
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def renamed(new: Callable[[str], str]) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        named = {new(name) if name != "__metadata__" else name: value for name, value in header.items()}
        header.clear()
        header.update(named)

    return change


def weights_of(folder: Path) -> Path:
    return weight_files(folder)[0]


def cut(folder: Path, size: Callable[[int], int]) -> None:
    data = weights_of(folder).read_bytes()
    weights_of(folder).write_bytes(data[: size(len(data))])


def set_key(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, renamed(lambda each: each.replace(name, f"{name}_x")))


def as_shards(folder: Path) -> None:
    weights_of(folder).rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def with_dtype(dtype: str) -> Callable[[Path], None]:
    def change(header: dict[str, Any]) -> None:
        assert header["model.norm.weight"]["dtype"] == "F32"
        header["model.norm.weight"]["dtype"] = dtype

    return lambda folder: rewrite(folder, change)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "half": (lambda f: cut(f, lambda size: size // 2), "is cut off: its tensors need .* download it again"),
    "a byte less": (lambda f: cut(f, lambda size: size - 1), "is cut off"),
    "half a header": (lambda f: cut(f, lambda size: 100), "is cut off: it ends within its header"),
    "empty": (lambda f: cut(f, lambda size: 0), "is no safetensors file"),
    "a byte more": (lambda f: weights_of(f).write_bytes(weights_of(f).read_bytes() + b"x"), "is damaged"),
    "html": (lambda f: weights_of(f).write_text("<!DOCTYPE html>" * 20), "is no safetensors file"),
    "pointer": (lambda f: weights_of(f).write_text(POINTER), "is a Git LFS pointer.*git lfs pull"),
    "pointer to a tokenizer": (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json is a Git LFS"),
    "pointer to a config": (lambda f: (f / "config.json").write_text(POINTER), "config.json is a Git LFS pointer"),
    "pointer to an index": (
        lambda f: (as_shards(f), (f / "model.safetensors.index.json").write_text(POINTER)),
        "index.json is a Git LFS pointer",
    ),
    "a shard": (as_shards, "00002-of-00002.safetensors is missing"),
    "half a tokenizer": (
        lambda f: (f / "tokenizer.json").write_text((f / "tokenizer.json").read_text()[:500]),
        "tokenizer.json is damaged.*download it again",
    ),
    "half a tokenizer's config": (
        lambda f: (f / "tokenizer_config.json").write_bytes((f / "tokenizer_config.json").read_bytes()[:20]),
        "tokenizer_config.json is not JSON",
    ),
    "half a list of tokens": (
        lambda f: (f / "special_tokens_map.json").write_text('{"bos_token": '),
        "special_tokens_map.json is not JSON",
    ),
    "a broken template": (
        lambda f: (f / "chat_template.jinja").write_text("{% for x %}"),
        "chat template does not compile",
    ),
    "a template of bytes": (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff\xfe"), "jinja is not UTF-8"),
    "no head": (lose("lm_head.weight"), "no tensor 'lm_head.weight': only the head is missing"),
    "one missing": (lose("model.layers.1.mlp.up_proj.weight"), r"no tensor 'model.layers.1.mlp.up_proj.weight'$"),
    "another prefix": (
        lambda f: rewrite(f, renamed(lambda name: f"language_model.{name}")),
        "its tensors have 'language_model.' before their names",
    ),
    "one too many": (
        lambda f: set_key(f, num_hidden_layers=1),
        "tensors that this model does not use: model.layers.1.input_layernorm.weight",
    ),
    "another shape": (lambda f: set_key(f, intermediate_size=96), r"'model.layers.0.mlp.gate_proj.weight' has shape"),
    "awq without its tensors": (
        lambda f: set_key(f, quantization_config={"quant_method": "awq", "bits": 4}),
        r"quantization_config says AWQ \(4 bits\), but no tensor is quantised",
    ),
    "bitsandbytes": (
        lambda f: set_key(f, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        r"weights quantised by bitsandbytes \(4 bits\) are not supported \(known: FP8,",
    ),
    "qweight": (
        lambda f: rewrite(f, renamed(lambda name: name.replace("0.mlp.up_proj.weight", "0.mlp.up_proj.qweight"))),
        "up_proj.qweight' belongs to quantised weights, but config.json has no quantization_config",
    ),
    "integers": (with_dtype("I32"), "quantised weights are not supported.*'model.norm.weight' of dtype I32"),
    "unknown dtype": (with_dtype("F4"), "dtype F4, which is not known here"),
    "offsets": (with_dtype("F16"), "is damaged: the header's offsets of tensor 'model.norm.weight'"),
    "window": (lambda f: set_key(f, sliding_window=64), "sliding_window"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_before_a_process_starts(
    fault: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, text = FAULTS[fault]
    spoil(model)
    topology = load_topology(None, [f"model.path={model}"])
    spec, found = look_at_model(topology)
    assert spec is None and found.error
    with pytest.raises(ConfigError, match=text):
        require_preflight(topology, "127.0.0.1", True, lambda _: None, names=[])
    assert gather(topology, "127.0.0.1").model.error == found.error, "chitu doctor"
    assert main(["plan", "--model", str(model)]) == 2
    assert found.error in capsys.readouterr().err


def test_a_number_that_is_not_finite_is_found_by_the_name_of_its_tensor(model: Path) -> None:
    entries = read_entries(weight_files(model))
    name = "model.layers.1.mlp.down_proj.weight"
    for place in (0, entries[name].num_bytes // 2, entries[name].num_bytes - 4):
        data = bytearray(weights_of(model).read_bytes())
        data[entries[name].offset + place : entries[name].offset + place + 4] = struct.pack("<f", float("nan"))
        (model / "other.bin").write_bytes(weights_of(model).read_bytes())
        weights_of(model).write_bytes(data)
        assert damaged_tensor(model) == name
        assert f"tensor '{name}' has numbers that are not finite" in (
            gather(load_topology(None, [f"model.path={model}"]), "127.0.0.1").model.error
        )
        (model / "other.bin").replace(weights_of(model))
    assert not damaged_tensor(model)


# ----------------------------------------------------------------------------------------------------------------------
# config.json is read without torch; what the engine cannot compute is refused by name before any weight is read.


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


def test_the_router_reads_every_model_without_torch_and_transformers_in_120_mb(tmp_path):
    """Importing the configs of transformers would take 500 MB."""
    for number, row in enumerate(ROWS):
        (tmp_path / str(number)).mkdir()
        write_row_config(row, tmp_path / str(number))
    code = """
import pathlib, sys, chitu.serve.api_server
from chitu.errors import ConfigError
from chitu.models.config import read_model_spec
read = 0
for folder in pathlib.Path(sys.argv[1]).iterdir():
    try:
        read += read_model_spec(folder).vocab_size == 500
    except ConfigError:
        pass
status = pathlib.Path("/proc/self/status").read_text()
print(read, "torch" in sys.modules, "transformers" in sys.modules, status.split("VmRSS:")[1].split()[0])
"""
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    read, torch, transformers, rss_kib = said.stdout.split()
    assert int(read) == sum(not row.refused for row in ROWS)
    assert (torch, transformers) == ("False", "False")
    assert int(rss_kib) < 120_000


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {row.name for row in ROWS if row.refused}))
def test_a_published_config_is_read(name, tmp_path, caplog):
    spec = read_model_spec(write_config(tmp_path, PUBLISHED[name]))
    assert spec.dtype in ("bfloat16", "float16", "float32")
    assert not caplog.records, "every key of it is known"
    text = PUBLISHED[name].get("text_config", PUBLISHED[name])
    assert spec.eos_token_ids or "eos_token_id" not in PUBLISHED[name]
    rope = text.get("rope_scaling") or {}
    is_yarn = rope.get("type", rope.get("rope_type")) == "yarn"
    yarn = int(rope["factor"] * rope["original_max_position_embeddings"]) if is_yarn else 0
    assert spec.max_model_len == max(yarn, text.get("max_position_embeddings", text.get("model_max_length", 0)))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.refused and row.form not in HF_QUANT], ids=lambda row: row.name
)
def test_what_a_published_config_needs_and_is_not_there_is_named(row, tmp_path):
    write_row_config(row, tmp_path)
    with pytest.raises(ConfigError, match=row.refused) as refused:
        read_model_spec(tmp_path)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA, "mtp_layer_types": []}, "'mtp_layer_types' is not known .*'layer_types'"),
        ({**LLAMA, "is_causal": False}, "'is_causal' is not known; remove"),
        ({**LLAMA, "text_config": {}}, "text_config belongs to a multimodal model"),
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
        ({**V3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size is"),
        ({**V3, "quantization_config": {"quant_method": "fp8", "fmt": "e3m4"}}, "quantization_config: fmt 'e3m4'"),
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
