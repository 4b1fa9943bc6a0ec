"""Models that transformers' modules compute: the self-check while loading finds what would change their logits, and
what cannot be served is refused with its reason."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_table import Checkpoint, make_checkpoint, prompts
from completions import complete_all
from nursery import WITH_TRANSFORMERS
from support.checkpoints import ROWS

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.engine.build import load_model
from chitu.errors import ConfigError, UnsupportedModel
from chitu.launch.local import LocalCluster
from chitu.models.config import model_hash, read_model_spec
from chitu.models.generic.attention import PagedAttention
from chitu.models.generic.check import check
from chitu.models.generic.library import is_too_old
from chitu.models.generic.model import GenericModel
from chitu.ops.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("one_thread")
ROW = {row.name: row for row in ROWS}
CPU = torch.device("cpu")


class Faulty(PagedAttention):
    """Attention with something wrong in what a layer asks for."""

    def __init__(self, num_layers: int, **changes: Any) -> None:
        super().__init__(num_layers)
        self._changes = changes

    def __call__(self, *arguments: Any, **asked: Any) -> Any:
        for name, change in self._changes.items():
            if asked.get(name) is not None:
                asked[name] = change(asked[name])
        return super().__call__(*arguments, **asked)


def with_batches(model: GenericModel, change: Callable[[Any], dict[str, Any]]) -> Any:
    """Return the model, whose batches are changed from now on."""
    right = model.forward

    def forward(token_ids_T: torch.Tensor, batch: Any, cache: Any, on_layer: Any = None) -> torch.Tensor:
        return right(token_ids_T, dataclasses.replace(batch, **change(batch)), cache, on_layer)

    model.forward = forward  # type: ignore[method-assign]
    return model


def load(name: str, folder: Path) -> tuple[Any, GenericModel]:
    make_checkpoint(ROW[name]._replace(form=""), folder)
    change(folder, quantization_config=None)
    spec = read_model_spec(folder, code="transformers")
    model = load_model(folder, "float32", code="transformers")
    assert isinstance(model, GenericModel)
    return spec, model


ATTENTION_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a window of one more": ("gemma-3-1b-it", {"sliding_window": lambda window: window + 1}),
    "a window of one less": ("Mistral-7B-v0.1", {"sliding_window": lambda window: window - 1}),
    "no window": ("Olmo-3-32B-Think", {"sliding_window": lambda _: None}),
    "no sinks": ("gpt-oss-20b", {"s_aux": lambda _: None}),
    "another scale": ("Seed-OSS-36B-Instruct", {"scaling": lambda scale: scale * 1.5}),
}


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_the_self_check_finds_wrong_attention(fault: str, tmp_path: Path) -> None:
    name, changes = ATTENTION_FAULTS[fault]
    spec, model = load(name, tmp_path)
    wrong = Faulty(spec.num_layers, **changes)
    transformers.AttentionInterface.register(wrong.name, wrong)
    model.attention = wrong
    model.parts.decoder.set_attn_implementation(wrong.name)
    with pytest.raises(UnsupportedModel, match=r"logits that are .* of the largest away from those of transformers"):
        check(model, spec, CPU)


def test_the_self_check_finds_a_dropped_soft_cap(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=24, attn_logit_softcapping=1.0, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.12)
    model.save_pretrained(tmp_path)
    spec, built = read_model_spec(tmp_path), load_model(tmp_path, "float32")
    assert isinstance(built, GenericModel)
    wrong = Faulty(spec.num_layers, softcap=lambda _: None)
    transformers.AttentionInterface.register(wrong.name, wrong)
    built.attention = wrong
    built.parts.decoder.set_attn_implementation(wrong.name)
    with pytest.raises(UnsupportedModel, match="of the largest away"):
        check(built, spec, CPU)


BATCH_FAULTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    # Only where a decode reads, not where it was written.
    "pages of another sequence": lambda b: {"page_table": b.page_table.roll(1, 0)} if b.decode_slots else {},
    "a stale page": lambda b: {"page_table": b.page_table[:, :1].expand_as(b.page_table).contiguous()},
    "positions of a neighbour": lambda b: {"positions_T": (b.positions_T - 1).clamp(min=0)},
}


@pytest.mark.parametrize("fault", BATCH_FAULTS)
def test_the_self_check_finds_wrong_batches(fault: str, tmp_path: Path) -> None:
    spec, model = load("Mixtral-8x7B-v0.1", tmp_path)
    with pytest.raises(UnsupportedModel, match="of the largest away"):
        check(with_batches(model, BATCH_FAULTS[fault]), spec, CPU)


def test_the_self_check_exceeds_windows_and_says_what_it_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, model = load("gpt-oss-20b", tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if "was checked in" in record.getMessage()]
    assert float(line.split("largest error ")[1].split()[0]) < 1e-5
    assert {part.sliding_window for part in model.parts.decoder.modules() if hasattr(part, "sliding_window")} == {
        24,
        None,
    }


def test_a_hash_has_the_version_of_the_code_that_computes(tmp_path: Path) -> None:
    make_checkpoint(ROW["Qwen3-0.6B"], tmp_path)
    assert model_hash(tmp_path, "own") == model_hash(tmp_path) != model_hash(tmp_path, "transformers")
    assert read_model_spec(tmp_path).code == "own"
    assert read_model_spec(tmp_path, code="transformers").code == "transformers"


def test_an_older_library_is_named_before_anything_is_imported(tmp_path: Path) -> None:
    make_checkpoint(ROW["Mixtral-8x7B-v0.1"], tmp_path / "m")
    old = tmp_path / "packages" / "transformers-4.57.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n")
    code = f"import sys; from chitu.models.config import read_model_spec; read_model_spec({str(tmp_path / 'm')!r})"
    environment = {**os.environ, "PYTHONPATH": str(old.parent)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "it needs transformers 5.23 or newer, which computes" in run.stderr
    assert [is_too_old(each) for each in ("4.57.1", "5.22.9", "5.23.0", "5.23.0.dev0", "6.0")] == [True] * 2 + [
        False
    ] * 3


def test_what_the_library_cannot_use_is_one_sentence(tmp_path: Path) -> None:
    make_checkpoint(ROW["Mixtral-8x7B-v0.1"], tmp_path)
    for keys in ({"hidden_act": True}, {"rms_norm_eps": "small"}, {"hidden_act": "no such"}):
        change(tmp_path, **keys)
        with pytest.raises(ConfigError, match=r"config\.json: transformers cannot use it: [^\n]+$"):
            load_model(tmp_path, "float32")
        change(tmp_path, hidden_act="silu", rms_norm_eps=1e-5)


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def test_what_the_modules_do_not_use_or_do_not_get_is_refused(tmp_path: Path) -> None:
    make_checkpoint(ROW["Mixtral-8x7B-v0.1"], tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    change(tmp_path, num_hidden_layers=layers - 1)
    with pytest.raises(UnsupportedModel, match=rf"does not use: model\.layers\.{layers - 1}\."):
        load_model(tmp_path, "float32")
    change(tmp_path, num_hidden_layers=layers + 1)
    with pytest.raises(ConfigError, match=rf"has no tensor .*model\.layers\.{layers}\."):
        load_model(tmp_path, "float32")
    change(tmp_path, num_hidden_layers=layers, hidden_size=60)
    with pytest.raises(ConfigError, match="has shape"):
        load_model(tmp_path, "float32")
    change(tmp_path, model_type="mistral")
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM has the model_type 'mixtral', not 'mistral'"):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_of_fewer_bits_passes_the_check_and_keeps_what_needs_32(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(ROW["GLM-4.5"], tmp_path)
    model = load_model(tmp_path, dtype)
    assert isinstance(model, GenericModel)
    tensors = {**dict(model.parts.decoder.named_parameters()), **dict(model.parts.decoder.named_buffers())}
    kept = {name.rpartition(".")[2] for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert kept == {"e_score_correction_bias", "inv_freq", "original_inv_freq"}, kept


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkpoint, LocalCluster]]:
    """Yield a real P and D of the text part of a model with images, whose attention has windows."""
    folder = tmp_path_factory.mktemp("gemma")
    checkpoint = make_checkpoint(ROW["gemma-3-27b-it"], folder)
    for file in TINY_MODEL_DIR.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    settings = [f"model.path={folder}", "model.served_name=m", "cache.num_pages=400", "scheduler.chunk_size=40"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready(300)
        yield checkpoint, cluster


def test_a_real_pd_pair_gives_the_tokens_of_transformers(served: tuple[Checkpoint, LocalCluster]) -> None:
    checkpoint, cluster = served
    asked = prompts()
    options = [{"max_tokens": 6, "temperature": 0, "ignore_eos": True}] * len(asked)
    for prompt, answer in zip(asked, complete_all(cluster.url, asked, options), strict=True):
        theirs = checkpoint.logits(prompt, answer.token_ids)
        assert theirs.argmax(-1).tolist() == answer.token_ids


class Alone:
    """One of two ranks, whose sums nobody joins."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x_RC: torch.Tensor, widths: Any) -> torch.Tensor:
        return x_RC

    def broadcast(self, x: torch.Tensor) -> Any: ...


def test_a_rank_has_its_heads_and_columns_or_the_model_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(ROW["Mixtral-8x7B-v0.1"], tmp_path / "cut")
    # With torch's operations, the modules keep their weights.
    whole, part = (load_model(tmp_path / "cut", "float32", ops=TorchOps(), shard=shard) for shard in (None, Alone()))
    assert isinstance(whole, GenericModel) and isinstance(part, GenericModel)
    sizes = [sum(each.numel() for each in model.parts.decoder.layers.parameters()) for model in (whole, part)]
    assert 0.5 < sizes[1] / sizes[0] < 0.53, sizes  # norms and routers are whole
    for name, reason in (("OLMo-2-1124-13B-Instruct", "with tp_size 1 only"), ("phi-4", "with tp_size 1 only")):
        make_checkpoint(ROW[name], tmp_path / name)
        with pytest.raises(ConfigError, match=reason):
            load_model(tmp_path / name, "float32", shard=Alone())
