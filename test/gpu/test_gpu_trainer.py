"""Tensors that a trainer has on a card: another process reads them by the handles of a manifest, and copies none of
them to shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_ipc_twin import FileDriver
from safetensors.torch import load_file

from chitu.errors import ConfigError, TransferFailed
from chitu.models import byte_sources
from chitu.models.checkpoint import damaged_tensor
from chitu.models.weights import TensorFiles, WeightSource, weight_files
from chitu.tools.make_model import make_model

PROGRAM = Path(__file__).with_name("gpu_trainer.py")
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def published(card, tmp_path, monkeypatch):
    base = make_model(tmp_path / "base", layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=500)
    command = [sys.executable, str(PROGRAM), "twin" if card.is_twin else "cuda", str(base), str(tmp_path / "policy")]
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "integration"), str(Path(__file__).parents[2])])
    env = {**os.environ, "PYTHONPATH": paths}
    if card.is_twin:

        def driver_of(uuid: str) -> FileDriver:
            if uuid != "ab" * 16:
                raise TransferFailed(f"no GPU has the uuid {uuid}")
            return FileDriver()

        monkeypatch.setattr(byte_sources, "driver_of", driver_of)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    yield process, Path(process.stdout.readline().strip()), load_file(base / "model.safetensors")
    process.kill()
    process.wait()


def test_what_a_trainer_has_on_a_card_is_read_there_and_seen_when_it_is_written(published):
    process, path, tensors = published
    assert {file.name for file in path.iterdir()} >= {"chitu_tensors.json", "config.json"}
    assert not list(path.glob("chitu-tensors-*")), "they were copied"
    assert damaged_tensor(path) == ""
    with WeightSource(path, torch.float32, torch.device("cpu"), None) as source:
        found = {name: source.take(name, *shape) for name, shape in source.names.items()}
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    files = TensorFiles(weight_files(path), torch.device("cpu"))
    part = files.read(NAME, torch.float32, range(3, 9), range(5, 11))
    assert torch.equal(part, tensors[NAME][3:9, 5:11])
    process.stdin.write(f"{NAME}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "written\n"
    with pytest.raises(ConfigError, match=f"tensor '{NAME}' is not what"):
        files.read(NAME, torch.float32)
    files.close()


def test_a_card_that_is_not_here_and_a_trainer_that_has_ended_are_refused_by_name(published):
    process, path, _ = published
    manifest = path / "chitu_tensors.json"
    text = manifest.read_text()
    uuid = text.split('"device": "')[1][:32]
    manifest.write_text(text.replace(uuid, "cd" * 16))
    with pytest.raises(ConfigError, match=r"the memory of GPU (cd){16} cannot be read: .*has the uuid"):
        TensorFiles(weight_files(path), torch.device("cpu"))
    manifest.write_text(text)
    process.kill()
    process.wait()
    with pytest.raises(ConfigError, match=r"the memory of GPU|is not what"):
        files = TensorFiles(weight_files(path), torch.device("cpu"))
        for name in files.tensors:
            files.read(name, torch.float32)
