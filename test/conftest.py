"""Settings of every test process, made before anything imports torch; event loops of asynchronous tests; repair of a
cluster after a failed test."""

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

# Tests share few cores with the processes that they start; a math library with a thread per core only slows them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Otherwise each of some hundred processes would compile the package again, half a second of a core, and each worker all
# tests, eight seconds (`pytest_configure`).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# UCX (of NIXL) listens on every interface unless it is restricted.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
# Processes that tests start find their doubles, as tests do.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
# The PATH of a plain Debian user has no folder of daemons (Slurm's).
os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"
# Without a GPU Triton's kernels are interpreted. Triton reads this when it is imported, which torch may do.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import certifi
import pytest
from draws import EXAMPLES, IS_NIGHTLY, often
from hypothesis import settings

# No time limits: a loaded machine is no failure.
settings.register_profile(
    "chitu", deadline=None, derandomize=not IS_NIGHTLY, max_examples=often(EXAMPLES), print_blob=True
)
settings.load_profile("chitu")

ROOT_END = "-----END CERTIFICATE-----\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--by-hand", action="store_true", help="run the tests that are marked by_hand, too")


def pytest_configure(config: pytest.Config) -> None:
    """Let `certifi` name a file with a single root certificate. Each new HTTP client reads all roots, 20 ms of a core,
    and tests make a thousand clients that talk to this machine without TLS."""
    sys.dont_write_bytecode = False
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    root = Path(folder.name) / "one.pem"
    root.write_text(Path(certifi.where()).read_text().partition(ROOT_END)[0] + ROOT_END)
    certifi.where = lambda: str(root)
    gc.disable()  # until collection is over: nothing that it makes becomes garbage


def pytest_collection_finish() -> None:
    """Exclude thousands of tests and all modules from garbage collection: they live to the end."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report as leaks what the collector did not look at


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is run by hand, and give the many draws of the night their time. Run unit tests last: their files
    are short, so two workers that take them file by file end together."""
    by_hand = [item for item in items if item.get_closest_marker("by_hand")]
    if by_hand and not config.option.by_hand:
        config.hook.pytest_deselected(items=by_hand)
        items[:] = [item for item in items if item not in set(by_hand)]
    for item in items if IS_NIGHTLY else ():
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker is not None else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(often(1) * seconds), append=False)
    items.sort(key=lambda item: item.path.parent.name == "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Run an asynchronous test in an event loop of its own."""
    if inspect.iscoroutinefunction(test := pyfuncitem.obj):
        pyfuncitem.obj = functools.wraps(test)(lambda **arguments: asyncio.run(test(**arguments)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Restart what a failed test killed or stopped, so that the next tests that share its cluster do not fail too."""
    report = yield
    if report.when == "call" and report.failed:
        _heal(getattr(item, "funcargs", {}).get("cluster"))
    return report


def _heal(cluster: object) -> None:
    from chitu.launch.local import LocalCluster
    from chitu.process.supervisor import StartFailed

    if not isinstance(cluster, LocalCluster):
        return
    with contextlib.suppress(StartFailed, OSError):  # then the next test reports what is missing
        for name in cluster.members:
            if cluster.alive(name):
                cluster.kill(name, signal.SIGCONT)
            else:
                cluster.restart(name)
        cluster.wait_ready()
