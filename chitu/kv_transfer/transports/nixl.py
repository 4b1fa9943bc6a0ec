"""Transport `nixl`: NIXL with its UCX backend, between hosts or processes of one host, over whatever UCX finds: TCP,
shared memory, RDMA, NVLink.

One agent per process. Measured with nixl-cu13 1.5.1 and host memory, over TCP and over RDMA with soft-RoCE between two
virtual machines; GPU memory was never run here. These properties shape the code below:

* UCX listens on every interface unless UCX_NET_DEVICES limits it, and asks for no credential: any process that reaches
  it can read and write registered memory. A host on the loopback address gets UCX_NET_DEVICES=lo.
* A transfer has no timeout of its own: over TCP, one to a stopped process stays in progress for ever. Releasing its
  handle does not stop it: the engine goes on, and later sends what the source holds then. So the handle of a write that
  did not end in time is kept, and `fence` waits until it has ended: a write is done only when the peer has flushed it.
* A connection that broke stays broken: every request to that agent fails until the agent is removed and added again.
  Idle connections break too, which casts no doubt on any write. So a connection that was idle is tested with a read
  before it is written to, and is renewed if it broke.
* A write that ended with an error may have bytes in flight that nothing reports. It is fenced once the peer's process
  is known to be gone, which only its own host can see. Between hosts such a D stays suspended until the cluster view
  reports that it is gone.
* The wheel has its own libibverbs, with a driver for mlx5 alone: it finds no other RDMA device, and UCX then uses TCP.
  So on a host that has another one, UCX is given the system's libibverbs, which has the drivers of the distribution.
  Both bring a libnl, and UCX's module for EFA needs both anyway. If symbols of one libnl are bound to the other, its
  destructor takes entries out of a list that they were never in: SIGSEGV at exit. So both are loaded before UCX, the
  wheel's first, and each is bound to its own (`_load_verbs`).
* NIXL's progress thread serves the peers' writes (over TCP they need the peer to run). The Python API starts it with a
  period of 0: it would spin on a core of every instance for as long as the instance lives (`_make_agent`).
* Errors are exceptions of many classes without a common base.
* The cost is per piece (15 us each, measured with GPU memory), so use it for few large pieces: `staged.py`, whose
  segments lie in the pool's arena and are registered with it, as memory of the same kind.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chitu.config.topology import is_loopback
from chitu.config.transport_env import ucx_limits
from chitu.errors import ConfigError, MissingDependency, PeerUnreachable, TransferFailed
from chitu.kv_transfer.transports.mapped import PeerProcess, host_id, own_start_time, require_inside
from chitu.kv_transfer.transports.transport import (
    CopyList,
    Int64s,
    PeerHandle,
    WriteError,
    pause_s,
    pinning_hint,
)
from chitu.net.rdma_devices import MLX5, VERBS, Rdma, choose_for_ucx, look_at_rdma, seen_by_ucx, used
from chitu.protocol import RankMemory, TransportSession

logger = logging.getLogger(__name__)

NAME = "nixl"
MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
MAX_ENTRIES = 4096
"""Most entries of one request; a longer list is split into several requests."""
FENCE_BYTES = 64
CONNECT_TIMEOUT_S = 2.0
TRUSTED_S = 3.0
"""A connection whose last request succeeded less than this long ago is written to without a test read."""
PROGRESS_PERIOD_US = 1000
"""Period at which the progress thread polls. Arriving data wakes it too, but UCX may miss a wake-up."""


@dataclass(slots=True)
class KnownAgent:
    """An agent that was added to the library, perhaps without an open peer."""

    metadata: bytes
    num_peers: int = 0
    num_in_progress: int = 0
    good_at_s: float = 0.0
    """Time at which a request to it last succeeded."""


@dataclass(slots=True)
class NixlPeer:
    session_id: str
    """Name of the peer's agent."""
    arena_base: int
    arena_bytes: int
    memory: str
    """Kind of memory of its arena (`DRAM`, `VRAM`); `device` is the number of its device."""
    device: int
    process: PeerProcess | None
    """None if the peer runs on another host."""
    pending: list[tuple[Any, str]] = field(default_factory=list)
    """Handles and operations of requests that did not end in time. They are kept because a handle that is
    garbage-collected is released."""
    is_doubtful: bool = False
    """True if a write ended with an error."""
    is_closed: bool = False

    @property
    def is_dead(self) -> bool:
        return self.process is not None and not self.process.is_alive()


class NixlTransport:
    """Implements `kv_transfer.transports.transport.Transport`.

    `host`: this process's address as peers reach it. `device`: the pool's device. `ib_device`: names of RDMA devices to
    use; empty: all. Raises MissingDependency if the library cannot be imported, ConfigError if UCX cannot start.
    """

    name = NAME

    def __init__(self, host: str, device: str = "cpu", ib_device: Sequence[str] = ()) -> None:
        found = look_at_rdma()
        if is_loopback(host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        elif mine := used(seen_by_ucx(found), ib_device) if ib_device else []:
            os.environ["UCX_NET_DEVICES"] = ",".join(f"{name}:{port}" for name in mine for port in found.ports[name])
        if ":" in host:
            os.environ.setdefault("UCX_TCP_AF_PRIO", "inet6,inet")
        module = _import_nixl()
        _load_verbs(module, found)
        limits = {} if ib_device else ucx_limits(os.environ)
        logger.info("nixl %s", choose_for_ucx(ib_device, found, device != "cpu", limits))
        kind, _, index = device.partition(":")
        self._memory, self._device = ("VRAM", int(index or 0)) if kind == "cuda" else ("DRAM", 0)
        self.pins = bool(found.active) and not is_loopback(host)
        self._agent_name = f"chitu-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        """Guards the agent and all peers; never held while waiting."""
        self._agent: Any = _make_agent(module, self._agent_name, found)
        self._host_id = host_id()
        self._ranges: list[tuple[int, int]] = []
        self._registered: list[Any] = []
        self._known: dict[str, KnownAgent] = {}
        self._abandoned: list[NixlPeer] = []
        """Peers that were disconnected with requests in progress."""
        self._scratch, self._scratch_base = _scratch_on(device)
        self._register(self._scratch_base, FENCE_BYTES, self._memory, self._device)

    def register(self, base: int, nbytes: int) -> None:
        if (base, nbytes) in self._ranges:
            return
        self._register(base, nbytes, self._memory, self._device)
        self._ranges.append((base, nbytes))

    def local_session(self) -> TransportSession:
        with self._lock:
            metadata = self._agent.get_agent_metadata()
        return TransportSession(
            transport=NAME,
            session_id=self._agent_name,
            attributes={
                "metadata": base64.b64encode(metadata).decode(),
                "memory": self._memory,
                "device": str(self._device),
                "host_id": self._host_id,
                "pid": str(os.getpid()),
                "start_time": own_start_time(),
            },
        )

    def can_reach(self, session: TransportSession) -> bool:
        return session.transport == NAME and session.attributes.get("memory") in ("DRAM", "VRAM")

    def connect(self, memory: RankMemory, session: TransportSession) -> NixlPeer:
        if not self.can_reach(session):
            raise TransferFailed(f"nixl: {session.session_id} is not a usable session")
        attributes = session.attributes
        try:
            metadata = base64.b64decode(attributes["metadata"], validate=True)
            pid, device = int(attributes["pid"]), int(attributes["device"])
        except (KeyError, ValueError) as error:
            raise TransferFailed(f"nixl: malformed session {session.session_id}: {error}") from error
        process: PeerProcess | None = None
        if self._host_id and attributes.get("host_id") == self._host_id:
            try:
                with PeerProcess.entered(pid, attributes.get("start_time", "")) as (process, _):
                    pass
            except (OSError, OverflowError) as error:
                raise TransferFailed(f"nixl: the process of {session.session_id} is gone: {error}") from error
        peer = NixlPeer(
            session.session_id, memory.arena_base, memory.arena_bytes, attributes["memory"], device, process
        )
        self._open(peer, metadata)
        try:
            # A read opens the connection, and shows that the arena is what its registration describes.
            self._try(peer, time.monotonic() + CONNECT_TIMEOUT_S)
        except TransferFailed as error:
            self.disconnect(peer)
            text = f"nixl: no read of the arena of {peer.session_id} succeeds: {error.message}"
            raise PeerUnreachable(text) from error
        return peer

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        assert isinstance(peer, NixlPeer)
        deadline_s = time.monotonic() + timeout_s
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        require_inside(NAME, (src_N, dst_N, length_N), (peer.arena_base, peer.arena_bytes), self._ranges)
        with self._lock:
            is_trusted = peer.is_closed or time.monotonic() - self._known[peer.session_id].good_at_s < TRUSTED_S
        if not is_trusted:
            self._try(peer, deadline_s)
        for start in range(0, len(src_N), MAX_ENTRIES):
            part = slice(start, start + MAX_ENTRIES)
            local = _entries(src_N[part], length_N[part], self._device)
            remote = _entries(dst_N[part], length_N[part], peer.device)
            self._transfer(peer, "WRITE", (local, self._memory), remote, deadline_s)

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        assert isinstance(peer, NixlPeer)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._sweep(peer)
            if peer.is_dead:
                return True
            if not any(operation == "WRITE" for _, operation in peer.pending):
                return not peer.is_doubtful
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.005)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, NixlPeer)
        with self._lock:
            if peer.is_closed:
                return
            peer.is_closed = True
            self._known[peer.session_id].num_peers -= 1
            is_last = not self._known[peer.session_id].num_peers
            is_dead = peer.is_dead
            if peer.process is not None:
                peer.process.close()
            if peer.pending and not is_dead:
                self._abandoned.append(peer)  # releasing the handles would not stop the requests
                return
            peer.pending.clear()
            # UCX keeps the socket of an agent that is removed and added again, so an agent that lives stays known.
            if is_last and (is_dead or peer.process is None):
                del self._known[peer.session_id]
                with contextlib.suppress(Exception):  # it disconnected by itself
                    self._agent.remove_remote_agent(peer.session_id)

    def close(self) -> None:
        if self._agent is not None:
            for descriptors in self._registered:
                with contextlib.suppress(Exception):  # the agent is dropped in any case
                    self._agent.deregister_memory(descriptors)
            self._registered.clear()
            self._ranges.clear()
            self._abandoned.clear()
            self._agent = None

    # ------------------------------------------------------------------------------------------------------- the agent

    def _register(self, base: int, nbytes: int, memory: str, device: int) -> None:
        try:
            self._registered.append(self._agent.register_memory([(base, nbytes, device, "")], memory))
        except Exception as error:
            hint = pinning_hint() if memory == "DRAM" else ""
            raise TransferFailed(f"nixl: cannot register {nbytes} bytes at {base:#x}: {error!r}{hint}") from error

    def _open(self, peer: NixlPeer, metadata: bytes) -> None:
        with self._lock:
            if peer.session_id not in self._known:
                self._add(peer.session_id, metadata)
                self._known[peer.session_id] = KnownAgent(metadata)
            self._known[peer.session_id].num_peers += 1

    def _add(self, session_id: str, metadata: bytes) -> None:
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferFailed(f"nixl: cannot add the agent of {session_id}: {error!r}") from error
        name = found.decode() if isinstance(found, bytes) else str(found)
        if name != session_id:
            raise TransferFailed(f"nixl: the agent of {session_id} calls itself {name}")

    def _try(self, peer: NixlPeer, deadline_s: float) -> None:
        """Read a few bytes of the peer; renew the connection if it broke. Raises TransferFailed."""
        for other in (peer, *self._abandoned):
            if other.session_id == peer.session_id:
                self._sweep(other)
        try:
            self._fence_read(peer, deadline_s)
        except WriteError:
            if not self._renew(peer):
                raise
            self._fence_read(peer, deadline_s)

    def _renew(self, peer: NixlPeer) -> bool:
        """Drop the connection after a failed request, so that the next request opens another. Return False if the peer
        is dead, or if other requests use the connection: if it broke, they end."""
        with self._lock:
            known = self._known.get(peer.session_id)
            if known is None or known.num_in_progress or peer.is_dead:
                return False
            with contextlib.suppress(Exception):  # it disconnected by itself
                self._agent.remove_remote_agent(peer.session_id)
            self._add(peer.session_id, known.metadata)
        return True

    def _fence_read(self, peer: NixlPeer, deadline_s: float) -> None:
        """Read the first bytes of the peer's arena. Raises WriteError, which is fenced because nothing is written."""
        nbytes = min(FENCE_BYTES, peer.arena_bytes)
        local = [(self._scratch_base, nbytes, self._device)]
        remote = [(peer.arena_base, nbytes, peer.device)]
        deadline_s = min(deadline_s, time.monotonic() + CONNECT_TIMEOUT_S)
        self._transfer(peer, "READ", (local, self._memory), remote, deadline_s)

    def _transfer(
        self,
        peer: NixlPeer,
        operation: str,
        local: tuple[list[tuple[int, int, int]], str],
        remote: list[tuple[int, int, int]],
        deadline_s: float,
    ) -> None:
        """Run one request from its start to its end. Raises WriteError, which is fenced if the request is a read."""
        agent = self._agent
        with self._lock:
            if peer.is_closed:
                raise WriteError(f"nixl: {peer.session_id} was disconnected", fenced=True)
            try:
                sources, targets = agent.get_xfer_descs(*local), agent.get_xfer_descs(remote, peer.memory)
                handle = agent.initialize_xfer(operation, sources, targets, peer.session_id)
            except Exception as error:  # a local check: nothing was sent
                raise WriteError(
                    f"nixl: cannot submit a request to {peer.session_id}: {error!r}", fenced=True
                ) from error
            known = self._known[peer.session_id]
            known.num_in_progress += 1
        state = self._ask(peer, lambda: agent.transfer(handle))
        started_s = time.monotonic()
        while state == "PROC":
            now_s = time.monotonic()
            if now_s > deadline_s:
                with self._lock:
                    peer.pending.append((handle, operation))
                raise WriteError(f"nixl: {peer.session_id} did not answer in time", fenced=operation == "READ")
            time.sleep(pause_s(now_s - started_s))
            state = self._ask(peer, lambda: agent.check_xfer_state(handle))
        self._ended(peer, handle, operation, state)
        if state != "DONE":
            is_fenced = operation == "READ" or peer.is_dead
            raise WriteError(f"nixl: the request to {peer.session_id} failed: {state}", fenced=is_fenced)

    def _ended(self, peer: NixlPeer, handle: Any, operation: str, state: str) -> None:
        with self._lock:
            with contextlib.suppress(Exception):  # the request has ended, whatever the library reports
                self._agent.release_xfer_handle(handle)
            peer.is_doubtful |= state != "DONE" and operation == "WRITE"
            known = self._known.get(peer.session_id)
            if known is not None:
                known.num_in_progress -= 1
                if state == "DONE":
                    known.good_at_s = time.monotonic()

    def _ask(self, peer: NixlPeer, question: Any) -> str:
        """Return the state of a request: `DONE`, `PROC`, or what went wrong."""
        try:
            with self._lock:
                return str(question())
        except Exception as error:
            return repr(error)

    def _sweep(self, peer: NixlPeer) -> None:
        """Release pending requests that have ended meanwhile."""
        for handle, operation in list(peer.pending):
            state = self._ask(peer, lambda handle=handle: self._agent.check_xfer_state(handle))
            if state == "PROC":
                continue
            with self._lock:
                if (handle, operation) not in peer.pending:
                    continue  # another thread released it
                peer.pending.remove((handle, operation))
            self._ended(peer, handle, operation, state)


def _entries(address_N: Int64s, length_N: Int64s, device: int) -> list[tuple[int, int, int]]:
    return [(address, length, device) for address, length in zip(address_N.tolist(), length_N.tolist(), strict=True)]


def _load_verbs(module: Any, found: Rdma) -> None:
    """Load the wheel's libibverbs and the system's, each with its own libnl, before UCX loads parts of both. Give UCX
    the system's if this host has a device for which the wheel's has no driver.

    UCX's modules, which are loaded with the first agent, find symbols in libraries that were loaded globally before
    those that they name. All stay loaded until the process ends.
    """
    libraries = Path(module.__file__).parent.parent / f"{module.__name__.partition('.')[0]}.libs"
    for pattern in ("libnl-3-*", "libnl-route-3-*", "libibverbs-*"):
        for path in sorted(libraries.glob(pattern)):
            ctypes.CDLL(str(path))
    is_for_ucx = any(found.drivers.get(name) != MLX5 for name in found.active)
    with contextlib.suppress(OSError):  # not installed: no device of `found` is active then
        ctypes.CDLL(VERBS, ctypes.RTLD_GLOBAL if is_for_ucx else ctypes.RTLD_LOCAL)


def _make_agent(module: Any, name: str, found: Rdma) -> Any:
    """Return an agent with UCX. Replaces the Python API's configuration, which leaves no choice of the period."""
    agent = module.nixl_agent(name, module.nixl_agent_config(backends=[]))
    config = module.nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_PERIOD_US
    config.useListenThread, config.captureTelemetry = False, False
    config.syncMode = module.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE.value  # `NixlTransport._lock`
    agent.agent = module.nixlBind.nixlAgent(name, config)
    try:
        agent.create_backend("UCX")
    except Exception as error:
        given = " ".join(f"{name}={value}" for name, value in ucx_limits(os.environ).items())
        have = ", ".join(f"{name} {state}" for name, state in found.devices.items()) or "no RDMA device"
        raise ConfigError(
            f"nixl: UCX cannot start ({error}): it finds no transport that may be used, with {given or 'its defaults'} "
            f"and {have} on this host: `chitu doctor` checks the devices, and tcp among UCX_TLS always works"
        ) from error
    return agent


def _scratch_on(device: str) -> tuple[Any, int]:
    """Return `FENCE_BYTES` on the pool's device, and their address: the fence then takes the path of page writes."""
    if device == "cpu":
        host = np.zeros(FENCE_BYTES, np.uint8)
        return host, int(host.ctypes.data)
    from chitu.ops.cuda_device import device_bytes  # torch: only with a GPU

    memory = device_bytes(device, FENCE_BYTES)
    return memory, memory.data_ptr()


def _import_nixl() -> Any:
    reasons = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
            continue
        library = logging.getLogger("nixl")  # it logs to stdout, which programs may read
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.WARNING)
        return module
    raise MissingDependency(
        f"NIXL cannot be imported ({'; '.join(reasons)}): install the extra nixl "
        "(with CUDA 12: nixl-cuda12; pip install -e '.[nixl]' in chitu's folder)"
    )
