"""The process that decodes images of strangers: what it may take, and that it ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.image_files import image_file
from support.image_models import write_image_model

from chitu.config.cluster_key import ENVIRONMENT_KEY
from chitu.config.schema import ImagesConfig
from chitu.errors import ChituError, Internal, InvalidRequest
from chitu.images.child import ChildSetup, ImageChild
from chitu.images.forms import ImageModel, image_model_of
from chitu.images.patches import PatchesProcess, PatchFile

pytestmark = pytest.mark.engine

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    found = image_model_of(write_image_model(tmp_path_factory.mktemp("model"), "qwen3_vl"))
    assert isinstance(found, ImageModel)
    return found


@pytest.fixture
def process(model: ImageModel) -> Iterator[PatchesProcess]:
    made = PatchesProcess(model, ImagesConfig())
    yield made
    made.close()


def result(process: PatchesProcess, data: bytes) -> PatchFile | ChituError:
    process.begin(data)
    end_s = time.monotonic() + PATIENCE_S
    while (found := process.take()) is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return found


def works(process: PatchesProcess) -> bool:
    found = result(process, image_file(30, 40))
    assert isinstance(found, PatchFile), found
    found.close()
    return True


def wait(is_over: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_over():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_memory_and_time_of_a_task_are_bounded(process: PatchesProcess, model: ImageModel) -> None:
    """Too much memory is an error in the process, too much time ends it; the next image works."""
    process._setup = ChildSetup(model.spec, ImagesConfig(), memory_bytes=64 << 20)
    large = image_file(2000, 2000)
    found = result(process, large)
    assert isinstance(found, InvalidRequest) and "needs more memory" in found.message, found
    assert works(process)
    process.close()
    process._setup = ChildSetup(model.spec, ImagesConfig(), memory_bytes=1 << 30, task_cpu_s=0.1)
    found = result(process, large)
    assert isinstance(found, InvalidRequest) and "too much time" in found.message, found
    assert works(process)


def test_a_child_that_stops_is_killed(process: PatchesProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(process) and process.pid is not None
    monkeypatch.setattr("chitu.images.child.HUNG_S", 0.2)
    os.kill(process.pid, signal.SIGSTOP)
    found = result(process, image_file(30, 40))
    assert isinstance(found, Internal) and "SIGKILL" in found.message


@pytest.mark.by_hand
def test_a_child_that_computes_for_long_is_not(process: PatchesProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody looks whether it does."""
    process.close()
    monkeypatch.setattr("chitu.images.child.HUNG_S", 0.5)
    monkeypatch.setattr("chitu.images.child.SIGN_CPU_S", 0.01)
    assert works(process), "loading takes longer"
    assert process.num_signs > 2
    process.close()
    monkeypatch.setattr(ImageChild, "_look", lambda child: None)
    found = result(process, image_file(30, 40))
    assert isinstance(found, Internal) and "SIGKILL" in found.message


def test_a_folder_that_cannot_be_loaded(model: ImageModel, tmp_path: Path) -> None:
    spec = image_model_of(write_image_model(tmp_path, "qwen3_vl", patch_size="sixteen"))
    assert isinstance(spec, ImageModel)
    (tmp_path / "preprocessor_config.json").unlink()
    process = PatchesProcess(spec, ImagesConfig())
    for _ in range(2):
        found = result(process, image_file(30, 40))
        assert isinstance(found, Internal) and "cannot be loaded" in found.message
    process.close()


def test_it_ends_with_its_parent_and_knows_no_key(model: ImageModel) -> None:
    code = (
        "import sys, time\n"
        "from chitu.config.schema import ImagesConfig\n"
        "from chitu.images.forms import image_model_of\n"
        "from chitu.images.patches import PatchesProcess\n"
        "process = PatchesProcess(image_model_of(sys.argv[1]), ImagesConfig())\n"
        "process.start()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, model.spec.folder],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, ENVIRONMENT_KEY: "a secret of the cluster"},
    )
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    wait(lambda: b"chitu.images.child" in (child / "cmdline").read_bytes())
    assert b"a secret of the cluster" not in (child / "environ").read_bytes()
    parent.kill()
    parent.communicate()
    wait(lambda: not child.exists())
