"""Checks that a launcher can make before it starts a process: ports, the model's files, libraries, memory for KV pages.

Used by the launchers before anything starts, and by `chitu doctor`, so all report the same findings. `look_*` functions
read files and try ports (no torch, at most a second); the others are pure. Processes still make their own checks, since
they may run without a launcher.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from chitu.config.schema import Topology
from chitu.config.staging import protocol_of
from chitu.config.topology import EVENT_PORTS, Instance, bound_ports, inside_address, instances_on, is_loopback
from chitu.engine.lanes import lane_problems
from chitu.engine.memory_budget import (
    available_cpu_bytes,
    expert_problems,
    pool_problems,
    small_pools,
    state_problems,
    weight_problems,
)
from chitu.errors import ConfigError
from chitu.images.forms import form_of, has_vision
from chitu.models.adapters import read_adapters
from chitu.models.checkpoint import WeightCount, check_checkpoint
from chitu.models.config import ModelSpec, model_hash, read_model_spec
from chitu.models.draft_layer import with_draft_layer
from chitu.models.window_state import with_window_state
from chitu.process.child import is_router
from chitu.process.placement import KEY, PD, needed_library, why_not_sent
from chitu.tokenizer.core import require_tokenizer
from chitu.types import Role

HTTP_PORT = "dp_config.router.port"
PORT_ERRORS = (os.strerror(errno.EADDRINUSE), os.strerror(errno.EACCES))
"""Errors of listening that another port cures; the others are about the address."""
LIBRARIES = {"nixl": ("nixl", "nixl_cu13", "nixl_cu12"), "mooncake": ("mooncake",)}
"""Modules of each transport that is a library; one of them is enough. The extra has the transport's name."""
MOONCAKE_WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"
MOONCAKE_WITH_CUDA = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
"""Distributions of Mooncake with CUDA; all have the same module."""
MOONCAKE_PYTHON = (3, 13)
"""Newest Python that Mooncake's wheels support, except the one with CUDA 13."""


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """The topology can serve, but not as well as it could."""
    ERROR = "error"
    """The topology cannot serve like this."""


class Finding(msgspec.Struct, frozen=True):
    level: Level
    what: str
    """Subject in a word or two: `port 21003`, `torch`."""
    says: str
    cure: str = ""
    """What to do; empty if nothing."""

    @property
    def sentence(self) -> str:
        return f"{self.says}; {self.cure}" if self.cure else self.says


class Bind(msgspec.Struct, frozen=True):
    """Result of an attempt to listen on a port."""

    key: str
    host: str
    port: int
    error: str = ""
    """Error text of the system; empty if the port is free."""


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about a checkpoint folder."""

    path: str
    error: str = ""
    """Error as a sentence; with one, the fields below are empty."""
    hash: str = ""
    max_model_len: int = 0
    weights: WeightCount = WeightCount()
    quantization: str = ""
    """How they are quantised; empty if they are not."""
    images: str = ""
    """Fingerprint (hex) of what makes patches of images; empty if requests have none."""
    why_no_images: str = ""
    """Why requests have none although the model has a part for images and the topology asks for it."""


# ------------------------------------------------------------------------------------------------------------- looking


def look_at_ports(topology: Topology, host: str) -> list[Bind]:
    """Try to listen on every fixed port of the topology's processes at `host`, and on the API's address with any port.
    Return the results; the ports are free again."""
    return [
        Bind(key, address, port, _why_not_free(address, port))
        for key, where, port in bound_ports(topology)
        if (port or key == HTTP_PORT) and (where == host or (is_loopback(where) and is_loopback(host)))
        for address in [_address(topology, key, where)]
    ]


def _address(topology: Topology, key: str, host: str) -> str:
    """Return the address at which a process on `host` listens."""
    if key == HTTP_PORT:
        given = topology.dp_config.router.http_host
        return host if given is None else given  # each router of several has its own
    return inside_address(host) if "_schedulers." in key and not is_loopback(host) else host


def _why_not_free(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError, OverflowError) as error:  # an invalid host name: too long, or with an odd character
        return getattr(error, "strerror", "") or str(error)
    return ""


def look_at_model(topology: Topology) -> tuple[ModelSpec | None, ModelFacts]:
    """Check the model files that the processes will read, by headers except for the weights themselves."""
    path = topology.model.path
    try:
        spec = read_model_spec(path, topology.model.max_model_len, topology.model.code)
        spec = with_window_state(spec, topology.cache.window_state)
        spec = with_draft_layer(spec, topology.scheduler.speculation == "mtp")
        count = check_checkpoint(path, spec, topology.model.weights == "keep")
        words = spec.quantization.words if spec.quantization is not None else ""
        found = ModelFacts(path, "", model_hash(path, spec.code), spec.max_model_len, count, words)
        require_tokenizer(path)
        read_adapters(topology.model.adapters, spec, path)
        if topology.model.images != "off" and has_vision(path):
            form = form_of(path)
            of_images = {"why_no_images": form} if isinstance(form, str) else {"images": form.fingerprint.hex()}
            found = msgspec.structs.replace(found, **of_images)
    except ConfigError as error:
        return None, ModelFacts(path, error.message)
    except OSError as error:
        return None, ModelFacts(path, f"model.path: {path} cannot be read: {error}")
    return spec, found


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def installed(names: Sequence[str]) -> dict[str, str]:
    """Return the version of each of these distributions that is installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# -------------------------------------------------------------------------------------------------------------- judging


def port_findings(binds: Iterable[Bind]) -> Iterator[Finding]:
    for bind in binds:
        what, where = f"port {bind.port}", f"{bind.host}:{bind.port}"
        if not bind.error:
            yield Finding(Level.OK, what, f"free ({bind.key})")
            continue
        cure = f"set {bind.key} to another port, on one machine 0 for any free one"
        if bind.error not in PORT_ERRORS:
            cure = f"give an address of this machine in place of {bind.host}"
        elif bind.key == HTTP_PORT:
            cure = "give another one with --port, 0 for any free one"
        yield Finding(Level.ERROR, what, f"{bind.key}: cannot listen on {where}: {bind.error}", cure)


def model_findings(model: ModelFacts) -> Iterator[Finding]:
    if model.error:
        yield Finding(Level.ERROR, "model", model.error)
    else:
        form = f", weights in {model.quantization}" if model.quantization else ""
        text = f"{model.path}: {model.max_model_len} tokens, hash {model.hash[:8]}{form}"
        yield Finding(Level.OK, "model", text)
    if model.images:
        yield Finding(Level.OK, "images", f"requests may have them; fingerprint of their processor {model.images[:8]}")
    elif model.why_no_images:
        text = f"the model sees images, but requests can have none: {model.why_no_images}"
        yield Finding(Level.WARNING, "images", text)


def cure_of_missing(extra: str, python: tuple[int, ...]) -> str:
    """Return how to install an extra. `python` is the running version."""
    if extra == "mooncake" and python[:2] > MOONCAKE_PYTHON:
        return (
            "Mooncake has wheels for Python 3.11 to 3.13 (with CUDA 13, the extra mooncake-cuda13: to 3.14): make .venv"
            f" with one of them, or use nixl ({PD}.transport)"
        )
    return f"install the extra {extra}: pip install -e '.[{extra}]' in the project's folder"


def transport_findings(
    topology: Topology, has: Callable[[str], bool] = is_installed, python: tuple[int, ...] = sys.version_info[:3]
) -> Iterator[Finding]:
    """Check the library that P and D need: configured by name, or by `auto` because they are on several hosts."""
    transport, library = topology.dp_config.router.pd_disaggregation.transport, needed_library(topology)
    if library and not any(map(has, LIBRARIES[library])):
        says = f"{PD}.transport is {transport}"
        if transport == "auto":
            says = f"P and D are on several hosts, between which {PD}.transport: auto is {library}"
        yield Finding(
            Level.ERROR,
            library,
            f"{says}, but its library is not installed",
            cure_of_missing(library, python),
        )


def gpu_transfer_findings(topology: Topology, protocol: str, distributions: Iterable[str]) -> Iterator[Finding]:
    """Check that Mooncake can send KV of GPUs. `topology` has devices, `protocol` is Mooncake's on this node. A
    Mooncake that is in none of the installed `distributions` is assumed to have CUDA."""
    found = set(distributions)
    has_cuda_build = MOONCAKE_WITHOUT_CUDA not in found or not found.isdisjoint(MOONCAKE_WITH_CUDA)
    error, warning = why_not_sent(topology, protocol, has_cuda_build)
    if error:
        cure = "install the extra mooncake-cuda12 or mooncake-cuda13 in its place, or have it staged: tp_size 1, "
        yield Finding(Level.ERROR, "mooncake", error, f"{cure}{PD}.transfer=auto, {KEY}=tcp")
    if warning:
        yield Finding(Level.WARNING, "mooncake", warning, f"use RDMA, or tp_size 1 with {PD}.transfer=auto")


def memory_findings(
    topology: Topology,
    spec: ModelSpec,
    here: Sequence[Instance],
    available_bytes: int,
    weights: WeightCount = WeightCount(),
    cards: Mapping[int, int] = {},
) -> Iterator[Finding]:
    """Check the memory for the weights and for the KV pages of `num_pages`; pools without it are sized to fit. `cards`
    has the bytes of each GPU of this host. An E has no pages, and of the weights the vision tower."""
    here = [item for item in here if item.role is not Role.ENCODE]
    for problem in weight_problems(topology, spec, weights, here, available_bytes, cards):
        yield Finding(Level.ERROR, "memory", problem)
    problems = *state_problems(topology, spec, here), *expert_problems(spec, here)
    for problem in (*problems, *lane_problems(topology, spec, here)):
        yield Finding(Level.ERROR, "model", problem)
    for problem in pool_problems(topology, spec, here, available_bytes):
        yield Finding(Level.ERROR, "memory", problem)
    for warning in small_pools(topology, spec, here):
        yield Finding(Level.WARNING, "context", warning)


def preflight(
    topology: Topology,
    host: str,
    reads_model: bool = True,
    cards: Mapping[int, int] = {},
    names: Sequence[str] | None = None,
) -> Iterator[Finding]:
    """Run all checks for the processes of the topology on this machine, its `host`. `cards` has the bytes of each of
    its GPUs, if known. `names` limits the checks to these processes."""
    here = [item for item in instances_on(topology, host) if names is None or item.name in names]
    absent = [item for item in instances_on(topology, host) if item not in here]
    others = {item.key_of(port) for item in absent for port in ("port", *EVENT_PORTS)}
    has_router = names is None or any(map(is_router, names))
    binds = look_at_ports(topology, host)
    yield from port_findings(b for b in binds if b.key not in others and (has_router or "_schedulers." in b.key))
    if not reads_model:
        return
    if any(item.role is not Role.UNIFIED for item in here):
        builds = installed((MOONCAKE_WITHOUT_CUDA, *MOONCAKE_WITH_CUDA))
        yield from transport_findings(topology)
        protocol = protocol_of(topology.dp_config.router.pd_disaggregation)
        yield from gpu_transfer_findings(topology, protocol, builds)
    spec, found = look_at_model(topology)
    yield from model_findings(found)
    if spec is not None:
        free = available_cpu_bytes()
        yield from memory_findings(topology, spec, here, free, found.weights, cards)


def require_preflight(
    topology: Topology,
    host: str,
    reads_model: bool,
    warn: Callable[[str], None],
    cards: Mapping[int, int] = {},
    names: Sequence[str] | None = None,
) -> None:
    """Run `preflight`, raise ConfigError with the first error and pass warnings to `warn`."""
    for finding in preflight(topology, host, reads_model, cards, names):
        if finding.level is Level.ERROR:
            raise ConfigError(finding.sentence)
        if finding.level is Level.WARNING:
            warn(finding.sentence)
