"""What the headers of a checkpoint say before any process starts: each fault by name, as loading would find it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chitu.cli import main
from chitu.config.load import load_topology
from chitu.errors import ConfigError
from chitu.launch.make_model import FAMILIES, make_model
from chitu.launch.node_facts import gather
from chitu.launch.preflight import look_at_model, require_preflight
from chitu.models.checkpoint import check_checkpoint, damaged_tensor, read_entries
from chitu.models.config import read_model_spec, weight_files
from chitu.models.registry import traits_of
from chitu.models.tensor_names import tensor_shapes

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("families") / request.param, family=request.param)


def test_the_names_and_shapes_are_those_that_each_family_takes(family: Path) -> None:
    """Loading takes each tensor once and refuses the rest, so what can be loaded is what a model takes."""
    spec = read_model_spec(family)
    found = {name: entry.shape for name, entry in read_entries(weight_files(family)).items()}
    assert dict(tensor_shapes(spec, traits_of(spec))) == found
    assert check_checkpoint(family, spec) > 0 and not damaged_tensor(family)


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
    "no prefix": (
        lambda f: rewrite(f, renamed(lambda name: name.removeprefix("model."))),
        "no tensor 'model.embed_tokens.weight': its tensors lack the prefix 'model.'",
    ),
    "another prefix": (
        lambda f: rewrite(f, renamed(lambda name: f"language_model.{name}")),
        "its tensors have 'language_model.' before their names",
    ),
    "one too many": (
        lambda f: set_key(f, num_hidden_layers=1),
        "tensors that this model does not use: model.layers.1.input_layernorm.weight",
    ),
    "another shape": (lambda f: set_key(f, intermediate_size=96), r"'model.layers.0.mlp.gate_proj.weight' has shape"),
    "awq": (lambda f: set_key(f, quantization_config={"quant_method": "awq", "bits": 4}), r"quantised weights \(awq\)"),
    "qweight": (
        lambda f: rewrite(f, renamed(lambda name: name.replace("0.mlp.up_proj.weight", "0.mlp.up_proj.qweight"))),
        "quantised weights are not supported.*up_proj.qweight",
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
