"""Settings of every test process, set before torch is imported anywhere; and what a failed test leaves to the next."""

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

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

import certifi
import pytest
from hypothesis import settings

# No timed tests: a loaded machine is no failure. In CI the same examples every time; by hand new ones.
settings.register_profile("chitu", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("chitu")

ROOT_END = "-----END CERTIFICATE-----\n"


def pytest_configure(config: pytest.Config) -> None:
    """An HTTP client reads all roots that `certifi` knows when it is made, 20 ms of a core, and tests make a thousand
    to talk to this machine without TLS: here it knows one."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    root = Path(folder.name) / "one.pem"
    root.write_text(Path(certifi.where()).read_text().partition(ROOT_END)[0] + ROOT_END)
    certifi.where = lambda: str(root)
    gc.disable()  # until all is collected, of which nothing goes


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules live to the end: the collector need not look at them again and again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries name as leaks what the collector did not look at


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests last. Their files are short, so that two workers, a file at a time in this order, end together."""
    items.sort(key=lambda item: item.path.parent.name == "unit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed does not drag those along that share its cluster: what it killed or stopped runs again."""
    report = yield
    if report.when == "call" and report.failed:
        _heal(getattr(item, "funcargs", {}).get("cluster"))
    return report


def _heal(cluster: object) -> None:
    from chitu.launch.local import LocalCluster
    from chitu.launch.supervisor import StartFailed

    if not isinstance(cluster, LocalCluster):
        return
    with contextlib.suppress(StartFailed, OSError):  # then the next test says what is not there
        for name in cluster.members:
            if cluster.alive(name):
                cluster.kill(name, signal.SIGCONT)
            else:
                cluster.restart(name)
        cluster.wait_ready()
