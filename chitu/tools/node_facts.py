"""Facts that `chitu doctor` gathers on one node, as values that are sent to the node that judges them
(`doctor.py`).

`gather` reads files, tries ports and runs nvidia-smi. It imports none of the libraries that it looks for, makes no CUDA
context, and raises nothing: an unknown fact is empty.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from chitu.config.load import pd_master_addr
from chitu.config.schema import Topology
from chitu.engine.memory_budget import available_cpu_bytes
from chitu.errors import ConfigError
from chitu.launch.preflight import MOONCAKE_WITH_CUDA, Bind, ModelFacts, installed, look_at_model, look_at_ports
from chitu.models.checkpoint import WeightCount, damaged_tensor
from chitu.net.rdma_devices import Rdma, look_at_rdma
from chitu.process.node_devices import NodeDevices, look, torch_build
from chitu.tokenizer.core import Tokenizer

LIBRARIES = {
    # distribution: extra that needs it; empty: always needed
    "torch": "",
    "transformers": "",
    "tokenizers": "",
    "pillow": "",
    "pyzmq": "",
    "msgspec": "",
    "fastapi": "",
    "uvicorn": "",
    "triton": "gpu",
    "mooncake-transfer-engine": "mooncake",
    "mooncake-transfer-engine-cuda13": "mooncake",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "nixl": "nixl",
}
"""Distributions that are checked, with the extra that installs each."""
SHARED_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Shared libraries that Mooncake's wheels need, with the Debian package of each."""
CUDA_SHARED_LIBRARIES = {"libmlx5.so.1": "ibverbs-providers", "libcuda.so.1": "libcuda1"}
"""Shared libraries that wheels built for CUDA need in addition."""
STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    """Name of the node in the topology."""
    name: str = ""
    """Own host name of the node."""
    python: tuple[int, int, int] = (3, 11, 0)
    libraries: dict[str, str] = {}
    """Version of each installed distribution."""
    missing_shared: tuple[str, ...] = ()
    """Debian packages whose library cannot be loaded."""
    torch_cuda: str = ""
    """CUDA version of torch's build; empty: none."""
    devices: NodeDevices = NodeDevices((), "")
    driver: str = ""
    driver_cuda: str = ""
    """Newest CUDA version that the driver supports."""
    compiler: str = ""
    has_python_header: bool = False
    memlock_bytes: int = -1
    """Limit of memory that a process may pin; -1: no limit, as with CAP_IPC_LOCK."""
    rdma: Rdma = Rdma()
    available_bytes: int = 0
    shared_memory_error: str = ""
    binds: tuple[Bind, ...] = ()
    model: ModelFacts = ModelFacts("")
    weights: WeightCount = WeightCount()
    """Of the checkpoint's tensors."""
    master_addr: str = ""
    unreachable: tuple[str, ...] = ()
    """`HOST:PORT: why` of other nodes' ports that this node cannot reach."""
    clock_ahead_s: float | None = None
    """Difference of this node's clock to the judging node's; None if not compared."""


def gather(topology: Topology, host: str) -> NodeFacts:
    model = _read_model(topology)
    driver, driver_cuda = _driver()
    found = libraries()
    return NodeFacts(
        host=host,
        name=socket.gethostname(),
        python=sys.version_info[:3],
        libraries=found,
        missing_shared=missing_shared(found),
        torch_cuda=torch_build()[1] or "",
        devices=look(),
        driver=driver,
        driver_cuda=driver_cuda,
        compiler=shutil.which("cc") or shutil.which("gcc") or "",
        has_python_header=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        memlock_bytes=memlock_bytes(_text(STATUS)),
        rdma=look_at_rdma(),
        available_bytes=_available(),
        shared_memory_error=_shared_memory_error(),
        binds=tuple(look_at_ports(topology, host)),
        model=model,
        weights=model.weights,
        master_addr=pd_master_addr() or "",
    )


def _read_model(topology: Topology) -> ModelFacts:
    """Check the model's files, look at the weights, and read the tokenizer as the processes will."""
    _, found = look_at_model(topology)
    if found.path and not found.error:
        try:
            Tokenizer.load(found.path)
            damaged = damaged_tensor(found.path)
        except (ConfigError, OSError) as error:
            return ModelFacts(found.path, str(error))
        if damaged:
            text = f"model.path: {found.path}: tensor {damaged!r} has numbers that are not finite (NaN or infinite)"
            return ModelFacts(found.path, text)
    return found


def libraries() -> dict[str, str]:
    found = installed(list(LIBRARIES))
    if "nixl" not in found and (own := installed(["nixl-cu13", "nixl-cu12"])):
        found["nixl"] = next(iter(own.values()))
    return found


def parse_smi_head(text: str) -> tuple[str, str]:
    """Return driver and CUDA version from the head of `nvidia-smi`."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", text)
    return driver[1] if driver else "", cuda[1] if cuda else ""


def memlock_bytes(status: str) -> int:
    """Return the limit of pinned memory. `status` is this process's /proc file; with CAP_IPC_LOCK there is no limit."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1:
        return -1
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _driver() -> tuple[str, str]:
    try:
        done = subprocess.run(["nvidia-smi"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    return parse_smi_head(done.stdout)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_shared(distributions: Iterable[str], loads: Callable[[str], bool] = _loads) -> tuple[str, ...]:
    """Return the Debian packages of libraries that Mooncake in `distributions` needs and that cannot be loaded."""
    of_cuda = CUDA_SHARED_LIBRARIES if not set(MOONCAKE_WITH_CUDA).isdisjoint(distributions) else {}
    return tuple(package for name, package in (SHARED_LIBRARIES | of_cuda).items() if not loads(name))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _available() -> int:
    try:
        return available_cpu_bytes()
    except (ConfigError, OSError):
        return 0


def _shared_memory_error() -> str:
    try:
        os.close(os.memfd_create("chitu-doctor"))
    except (OSError, AttributeError) as error:
        return str(error)
    return ""
