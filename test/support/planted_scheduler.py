"""Process entry of instances with a planted fault, by instance in the file that CHITU_TEST_PLANTED names. P and D are
not aware of it. `python -m support.planted_scheduler`

`model`: a folder that replaces the topology's. `kernel`: a layer whose attention is wrong. `flip`: of all writes to the
D whose pool has `num_pages`, one byte of position `page` of the first piece that goes to this `layer`. `faults`: a
`FaultConfig`, of this instance alone. `early`: P draws first tokens with another `seed`, at another `position`, or
takes the `next` token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from support.faults import FaultConfig, FaultyPeer, FaultyTransport, with_faults

from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig, Topology
from chitu.config.topology import Instance
from chitu.kv_transfer.transports.local import RankPool, open_transports, wrap_transports
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport
from chitu.net.threads import end_process
from chitu.process.progress import ProgressWriter
from chitu.protocol import RankMemory, SamplingParams, TransportSession
from chitu.serve.factories import Factories, build_real_rank
from chitu.serve.scheduler import main
from chitu.types import Role, instance_name

ENVIRONMENT = "CHITU_TEST_PLANTED"


def planted(name: str) -> dict[str, Any]:
    return json.loads(Path(os.environ[ENVIRONMENT]).read_text()).get(name, {}) if ENVIRONMENT in os.environ else {}


class WrongAttention:
    """Operations that scale the attention of one layer by 1.5. Counts calls to find the layer: layers are computed in
    turn."""

    def __init__(self, ops: Any, layer: int, num_layers: int) -> None:
        self._ops, self._layer, self._num_layers = ops, layer, num_layers
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def append_attention(self, *values: Any) -> Any:
        layer, self._calls = self._calls % self._num_layers, self._calls + 1
        mixed = self._ops.append_attention(*values)
        return mixed * 1.5 if layer == self._layer else mixed


class WrongSampler:
    """A sampler whose draws are not those that its requests ask for."""

    def __init__(self, sampler: Any, fault: str) -> None:
        self._sampler, self._fault = sampler, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def numbers_of(self, *values: Any) -> list[int]:
        return []  # they would be right

    def admit(self, slot: int, token_ids: Any, prompt_len: int, params: SamplingParams, numbers: None) -> None:
        if self._fault == "seed":
            params = msgspec.structs.replace(params, seed=params.seed + 1)
        self._sampler.admit(slot, token_ids, prompt_len - (self._fault == "position"), params)

    def sample(self, logits: Any, slots: list[int]) -> Any:
        tokens = self._sampler.sample(logits, slots)
        return (tokens + 1) % self._sampler.vocab_size if self._fault == "next" else tokens


def build_rank(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> Any:
    fault = planted(instance.name)
    model = msgspec.structs.replace(topology.model, path=fault.get("model", topology.model.path))
    rank: Any = build_real_rank(msgspec.structs.replace(topology, model=model), instance, tp_rank, progress)
    if "early" in fault:
        rank.runner._sampler = WrongSampler(rank.runner._sampler, fault["early"])
    if "kernel" in fault:
        decoder = rank.runner._model
        object.__setattr__(decoder, "ops", WrongAttention(decoder.ops, fault["kernel"], rank.pool.layout.num_layers))
    return rank


class FlippingTransport(FaultyTransport):
    def __init__(self, inner: Transport, fault: dict[str, int]) -> None:
        super().__init__(inner, FaultConfig())
        self._fault = fault
        self._scratch = np.full(1, 0x42, np.uint8)  # exponent byte of a float32: values from 32 to 128
        self._targets: dict[str, tuple[range, int]] = {}

    def connect(self, memory: RankMemory, session: TransportSession) -> FaultyPeer:
        peer = super().connect(memory, session)
        if memory.num_pages == self._fault["num_pages"]:
            self._inner.register(int(self._scratch.ctypes.data), 1)
            region = 2 * self._fault["layer"]
            base, page_bytes = memory.region_bases[region], memory.page_bytes[region]
            self._targets[peer.session_id] = range(base, base + memory.num_pages * page_bytes), page_bytes
        return peer

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        super().write(peer, copies, timeout_s)
        assert isinstance(peer, FaultyPeer)
        region, page_bytes = self._targets.get(peer.session_id, (range(0), 0))
        for dst, length in zip(copies.dst, copies.length, strict=True):
            at = dst + self._fault["page"] * page_bytes + 3
            if dst in region and at < dst + length:
                self._inner.write(peer.inner, CopyList([int(self._scratch.ctypes.data)], [at], [1]), timeout_s)
                return


def wrap(
    transports: Sequence[Transport],
    router: RouterConfig,
    role: Role,
    engine_rank: int,
    instance: InstanceConfig,
    pool: RankPool,
) -> list[Transport]:
    fault = planted(instance_name(role, engine_rank))
    broken: Sequence[Transport] = transports
    if "flip" in fault:
        broken = [FlippingTransport(transport, fault["flip"]) for transport in transports]
    elif "faults" in fault:
        broken = [FaultyTransport(transport, FaultConfig(**fault["faults"])) for transport in transports]
    return wrap_transports(broken, router, role, engine_rank, instance, pool)


def open_faulty(config: PDDisaggregationConfig, host: str, device: str) -> list[Transport]:
    """Open the transports, with the faults of all P (`faults.py`)."""
    return with_faults(open_transports(config, host, device))


if __name__ == "__main__":
    end_process(main(factories=Factories(build_rank, open_faulty, wrap)))
