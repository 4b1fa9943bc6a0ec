"""Fixtures: SmolLM2, `transformers` with its numbers, and one P and one D that serve it, with a LoRA adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for its HTTP client

from published import Judge, fetch_smollm2, serving
from tilted import write_adapter

from chitu.launch.local import LocalCluster


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, made of the published GGUF file."""
    return fetch_smollm2()


@pytest.fixture(scope="session")
def judge(smollm2: Path) -> Judge:
    return Judge.of(smollm2)


@pytest.fixture(scope="session")
def adapter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(smollm2, tmp_path_factory.mktemp("adapters") / "tilted")


@pytest.fixture(scope="module")
def cluster(smollm2: Path, adapter: Path) -> Iterator[LocalCluster]:
    with serving(
        smollm2, "model.max_model_len=2048", "scheduler.chunk_size=128", f"model.adapters.tilted={adapter}"
    ) as cluster:
        yield cluster
