"""The fence that NIXL receives has the same kind of memory at both ends as the pages."""

from __future__ import annotations

import base64
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chitu.kv_transfer.transports.nixl import MODULES, NixlTransport
from chitu.protocol import RankMemory, TransportSession


class Agent:
    """Stand-in for NIXL's agent, as far as a connection needs it; every request completes at once."""

    def __init__(self, name: str, _config: object) -> None:
        self.registered: list[tuple[tuple[int, int, int, str], str]] = []
        self.requests: list[tuple[str, Any, Any]] = []

    def create_backend(self, name: str) -> None:
        assert name == "UCX"

    def register_memory(self, entries: list[tuple[int, int, int, str]], memory: str) -> object:
        self.registered += [(entry, memory) for entry in entries]
        return object()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def get_xfer_descs(self, entries: list[tuple[int, int, int]], memory: str) -> object:
        return entries, memory

    def initialize_xfer(self, operation: str, local: object, remote: object, _peer: str) -> object:
        self.requests.append((operation, local, remote))
        return object()

    def transfer(self, _handle: object) -> str:
        return "DONE"

    def release_xfer_handle(self, _handle: object) -> None: ...


@pytest.mark.parametrize(("device", "kind", "number"), [("cpu", "DRAM", 0), ("cuda:1", "VRAM", 1)])
def test_the_fence_lands_in_memory_of_the_pools_kind(monkeypatch, device, kind, number):
    library = SimpleNamespace(
        __name__=MODULES[0],
        __file__=__file__,
        nixl_agent=Agent,
        nixl_agent_config=lambda **options: options,
        nixlBind=SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=lambda _name, _config: None),
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_NONE=SimpleNamespace(value=0)),
    )
    monkeypatch.setitem(sys.modules, MODULES[0], library)
    asked: list[object] = []
    zeros = torch.zeros

    def on_host(*size: int, device: str, **options: Any) -> torch.Tensor:
        asked.append(device)
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", on_host)
    transport = NixlTransport("10.0.0.1", device)
    agent: Agent = transport._agent
    assert asked == ([] if device == "cpu" else [device])
    ((base, nbytes, where, _), memory) = agent.registered[0]
    assert (where, memory) == (number, kind)
    attributes = {"metadata": base64.b64encode(b"d").decode(), "memory": "VRAM", "device": "0", "pid": "1"}
    session = TransportSession("nixl", "d", attributes)
    transport.connect(RankMemory(**memory_of(session)), session)
    assert agent.requests == [("READ", ([(base, nbytes, number)], kind), ([(4096, nbytes, 0)], "VRAM"))]


def memory_of(session: TransportSession) -> dict[str, Any]:
    fields: dict[str, Any] = {name: 0 for name in RankMemory.__struct_fields__}
    return fields | {"arena_base": 4096, "arena_bytes": 1 << 20, "sessions": (session,)}
