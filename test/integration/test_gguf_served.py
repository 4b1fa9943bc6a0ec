"""Models from GGUF files: the logits of the checkpoint that they were made of, and `chitu serve --model FILE.gguf`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from checkpoint_table import TOLERANCE, divided, error_of, make_checkpoint, prompts, undivided
from support.checkpoints import PUBLISHED, Row
from support.gguf_files import convert

from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import read_model_spec
from chitu.models.gguf import read_headers
from chitu.models.gguf_config import config_of

pytestmark = pytest.mark.usefixtures("one_thread")
HAS_MODELS = transformers.__version__ >= "5"
GEMMA_2 = {
    **{key: value for key, value in PUBLISHED["gemma-3-1b-it"].items() if not key.startswith(("rope_", "sliding"))},
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 24,
    "rope_theta": 10000.0,
}
NAMES = (
    "Llama-3.1-8B-Instruct",
    "Qwen2.5-7B-Instruct",
    "Qwen3-30B-A3B",
    *(("phi-4", "Mixtral-8x7B-v0.1", "gemma-3-1b-it", "gpt-oss-20b") if HAS_MODELS else ()),
)
"""Every architecture that is read, but one that the list of published configs lacks."""


def folder_of(file: Path) -> Path:
    """Return a folder of a file without a tokenizer."""
    folder = file.parent / "made"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(read_headers([file]))))
    (folder / "model.gguf").symlink_to(file)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_the_logits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    checkpoint = make_checkpoint(Row(name), tmp_path / "published")
    folder = folder_of(convert(tmp_path / "published", tmp_path / "model.gguf"))
    assert check_checkpoint(folder, read_model_spec(folder)).numbers > 0
    assert error_of(checkpoint, undivided(folder, prompts(), 37)) < TOLERANCE


@pytest.mark.skipif(not HAS_MODELS, reason="needs the classes of transformers 5")
def test_gemma_2_has_the_logits_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "Gemma 2", GEMMA_2)
    (tmp_path / "published").mkdir()
    checkpoint = make_checkpoint(Row("Gemma 2"), tmp_path / "published")
    folder = folder_of(convert(tmp_path / "published", tmp_path / "model.gguf"))
    assert error_of(checkpoint, undivided(folder, prompts(), 37)) < TOLERANCE


@pytest.mark.parametrize("name", ["Llama-3.1-8B-Instruct", "Qwen3-30B-A3B"])
def test_heads_and_experts_of_a_file_are_cut_for_two_ranks(name: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    checkpoint = make_checkpoint(Row(name), tmp_path / "published")
    folder = folder_of(convert(tmp_path / "published", tmp_path / "model.gguf"))
    assert error_of(checkpoint, divided(folder, prompts(), 37, (2, 1))) < TOLERANCE
