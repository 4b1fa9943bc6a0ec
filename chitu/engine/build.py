"""Everything of an instance that is made of tensors, for one rank: group, weights, pool, runner.

Called once by the main thread of each rank (`serve/scheduler.py`), after the ports are bound and before anything is
served. With several ranks all of them run this together; they agree on the number of pages, which also makes the fast
ones wait for those that still read weights.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Protocol

import torch

from chitu.config.schema import Topology
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance, instances_on, threads_of
from chitu.engine.loader import load_model, resolve_dtype
from chitu.engine.memory_budget import available_cpu_bytes, num_pages_for
from chitu.engine.model_runner import ModelRunner
from chitu.engine.parallel import RankGroup
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import CudaRecorder, Recording
from chitu.kv_cache.pool import KVPool, page_bytes
from chitu.messages import KVLayout
from chitu.models.config import model_hash, read_model_spec
from chitu.types import Role

logger = logging.getLogger(__name__)


class BuildProgress(Protocol):
    def state(self, state: str) -> None: ...

    def loading(self, done: int, total: int) -> None: ...


@dataclass(slots=True)
class RankEngine:
    group: RankGroup | None
    """None on an instance of one rank."""
    pool: KVPool
    runner: ModelRunner
    threads: int

    def prepare_thread(self) -> None:
        """Settings of the math library are per thread; call first thing on the one that runs steps."""
        torch.set_num_threads(self.threads)


def build_rank(topology: Topology, instance: Instance, tp_rank: int, progress: BuildProgress) -> RankEngine:
    """Rank 0 alone samples and has logits rows. Raises ConfigError for what cannot be served."""
    config, role, path = instance.config, instance.role, topology.model.path
    threads = threads_of(topology, instance, os.cpu_count() or 1)
    torch.set_num_threads(threads)
    device = torch.device(config.devices[tp_rank])
    spec = read_model_spec(path, topology.model.max_model_len)
    max_model_len = min(topology.model.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    group = RankGroup(tp_rank, config.tp_size, device) if config.tp_size > 1 else None
    progress.state("loading")
    model = load_model(path, topology.model.dtype, str(device), progress.loading, max_model_len, shard=group)
    layout = KVLayout(
        model_hash=model_hash(path),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=topology.cache.page_size,
        dtype=resolve_dtype(topology.model.dtype, spec, device),
        vocab_size=spec.vocab_size,
        tp_size=config.tp_size,
    )
    num_slots = topology.scheduler.max_running_requests
    bytes_per_page = 2 * spec.num_layers * page_bytes(layout)
    num_pages = config.num_pages or num_pages_for(
        topology.cache,
        bytes_per_page,
        available_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0],
        sum(member.config.tp_size for member in instances_on(topology, config.host)),
        num_slots * 2 * -(-max_model_len // layout.page_size),
    )
    if group is not None:
        num_pages = group.smallest(num_pages)
    is_main = tp_rank == MAIN_RANK
    has_aux = is_main and role is not Role.UNIFIED
    num_aux_slots = (topology.cache.num_aux_slots or 2 * num_slots) if has_aux else 0
    # Only on one rank: what the ranks say to each other within a step is not recorded yet.
    recording = Recording(CudaRecorder(device)) if device.type == "cuda" and group is None else None
    pool = KVPool(layout, num_pages, num_aux_slots, str(device), has_scratch=recording is not None)
    logger.info("%d pages of %d bytes, %d aux slots, %d threads", num_pages, bytes_per_page, num_aux_slots, threads)
    samples = is_main and role is not Role.PREFILL
    sampler = Sampler(num_slots, spec.vocab_size, device, spec.eos_token_ids) if samples else None
    # What can never fit the pool is refused at the router, which takes the smallest limit of all instances.
    longest = min(max_model_len, num_pages * layout.page_size)
    runner = ModelRunner(spec, model, pool, num_slots, longest, sampler, recording)
    return RankEngine(group, pool, runner, threads)
