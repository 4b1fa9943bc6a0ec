"""`chitu doctor`: what this machine has of what the project can use, a line each. Called by the command line only."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from chitu.config.schema import Topology
from chitu.config.topology import instances, on_one_host, router_ports


@dataclass(frozen=True, slots=True)
class Finding:
    """`fatal`: the project cannot work without it."""

    ok: bool
    what: str
    detail: str
    fatal: bool = False


def findings(topology: Topology) -> Iterator[Finding]:
    """Look at the interpreter, the libraries, shared memory and the ports of `topology`."""
    version = ".".join(map(str, sys.version_info[:3]))
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(supported, "python", version if supported else f"{version}: 3.11 to 3.13 is needed", fatal=True)
    yield _torch()
    for name in ("transformers", "tokenizers", "zmq", "msgspec", "fastapi", "uvicorn"):
        yield _importable(name, name, fatal=name != "transformers")
    yield _importable("triton", "triton", "the kernels of a GPU; without them it computes with torch's operations")
    yield _flashinfer()
    yield _importable("mooncake", "mooncake.engine", "transport mooncake needs Debian's libibverbs1 libnuma1 libcurl4")
    yield _importable("nixl", "nixl", "the nixl extra is not installed")
    yield _shared_memory()
    yield from _ports(topology)


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(False, "torch", f"cannot be imported: {error}", fatal=True)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus]
    return Finding(True, "torch", f"{torch.__version__}, {', '.join(devices) or 'no CUDA device: runs on the CPU'}")


def _flashinfer() -> Finding:
    """Not imported: that takes seconds."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "flashinfer", "extra gpu-flashinfer; without it our own kernel attends to long chunks")
    return Finding(True, "flashinfer", f"flashinfer-python {version}: FA3 kernels on Hopper (H100, H200)")


def _importable(what: str, module: str, hint: str = "", fatal: bool = False) -> Finding:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return Finding(False, what, f"{error}" + (f" ({hint})" if hint else ""), fatal)
    owners = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    return Finding(True, what, ", ".join(f"{owner} {importlib.metadata.version(owner)}" for owner in set(owners)))


def _shared_memory() -> Finding:
    try:
        os.close(os.memfd_create("chitu-doctor"))
    except (OSError, AttributeError) as error:
        return Finding(False, "shared memory", f"memfd_create does not work: {error}; transport shm cannot", fatal=True)
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return Finding(True, "shared memory", f"memfd works; {available / 2**20:.1f} GiB of memory are free")


def _ports(topology: Topology) -> Iterator[Finding]:
    topology = on_one_host(topology)
    wanted = router_ports(topology.dp_config.router)
    wanted |= {f"{instance.key}.port": instance.config.port for instance in instances(topology)}
    for key, port in wanted.items():
        if port:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    yield Finding(False, f"port {port}", f"{key}: {error.strerror}")
                else:
                    yield Finding(True, f"port {port}", f"free ({key})")
