"""Fixtures of the tests of GPUs. Where there is none their *twin* runs: the same tests on a CPU, with Triton's
interpreter, the eager recorder, `shm` and small sizes, so that they are known to work before a GPU runs them.

A twin that takes long, and shows only what other tests show on a CPU, is marked `on_card`: it runs by hand
(`--by-hand`). `CHITU_GPU_TWIN=1` runs the twin, all of it, also beside a GPU.
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

IS_WHOLE_TWIN = os.environ.get("CHITU_GPU_TWIN") == "1"
IS_TWIN = IS_WHOLE_TWIN or not torch.cuda.is_available()


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.emulated if IS_TWIN else pytest.mark.gpu)
    if IS_TWIN and not IS_WHOLE_TWIN and not config.option.by_hand:
        left_out = {item for item in own if item.get_closest_marker("on_card")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
