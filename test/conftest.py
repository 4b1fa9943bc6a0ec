"""Settings of every test process: set before torch is imported anywhere."""

import os

# Tests share few cores with the processes that they start; a math library with a thread per core only slows them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each of some hundred processes would compile the package anew, half a second of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# UCX (of NIXL) listens on every interface that it is not told to leave alone.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
# Without a GPU Triton's kernels are interpreted; it reads this when it is imported, be it by torch.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# No timed tests: a loaded machine is no failure. In CI the same examples every time; by hand new ones.
settings.register_profile("chitu", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("chitu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests last. Their files are short, so that two workers, a file at a time in this order, end together."""
    items.sort(key=lambda item: item.path.parent.name == "unit")
