"""Fixtures of tests that need a GPU; the tests are skipped without one.

`CHITU_GPU_TWIN=1` runs the same tests on a CPU, with Triton's interpreter, the eager recorder, `shm` and small sizes:
so they are known to work before a GPU runs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for its checkpoints and its HTTP client

from chitu.engine.step_graphs import CudaRecorder, EagerRecorder, Recorder

IS_TWIN = os.environ.get("CHITU_GPU_TWIN") == "1"


@dataclass(frozen=True, slots=True)
class Card:
    """The device of these tests, or its twin."""

    device: torch.device
    num_multiprocessors: int
    recorder: Callable[[], Recorder]
    transport: str
    dtype: torch.dtype

    @property
    def is_twin(self) -> bool:
        return self.device.type == "cpu"

    def size(self, real: int, twin: int) -> int:
        return twin if self.is_twin else real


@pytest.fixture(scope="session")
def card() -> Card:
    if IS_TWIN:
        return Card(torch.device("cpu"), 2, EagerRecorder, "shm", torch.float32)
    device = torch.device("cuda:0")
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return Card(device, count, lambda: CudaRecorder(device), "cuda_ipc", torch.bfloat16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if IS_TWIN or torch.cuda.is_available() else "there is no CUDA device"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
