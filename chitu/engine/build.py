"""Builds the parts of an instance that hold tensors, for one rank: group, weights, pool, runner.

Called once by the main thread of each rank (`serve/scheduler.py`), after the ports are bound and before any request is
served. With several ranks all of them run this together. They agree on the number of pages, which also makes fast ranks
wait for those that still read weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from chitu.config.schema import Topology
from chitu.config.staging import pool_bytes_of
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance, find_instance, instances_on, threads_of
from chitu.engine.kv_format import kv_dtype_of
from chitu.engine.loader import load_model, resolve_dtype
from chitu.engine.memory_budget import (
    DeviceMemory,
    available_cpu_bytes,
    device_pages,
    kv_layout,
    num_pages_asked,
    num_pages_for,
    num_pages_key,
    reserve_bytes,
    share_of_device,
    small_pool,
    too_large,
)
from chitu.engine.model_runner import ModelRunner
from chitu.engine.parallel import RankGroup
from chitu.engine.prefill_ops import prefill_ops, warmup_prompts
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import PREFILL_SIZES, CudaRecorder, Recording
from chitu.errors import ConfigError, Internal
from chitu.grammars import GrammarCompiler, GrammarStore
from chitu.kv_cache.aux_row import aux_row_bytes, num_aux_rows
from chitu.kv_cache.pool import TORCH_DTYPES, KVPool
from chitu.models.config import model_hash, read_model_spec, weights_digest, weights_stamp
from chitu.net.control_groups import usable_cores
from chitu.tokenizer import Tokenizer
from chitu.types import Role

logger = logging.getLogger(__name__)


class BuildProgress(Protocol):
    def state(self, state: str) -> None: ...

    def loading(self, done: int, total: int) -> None: ...


@dataclass(slots=True)
class RankEngine:
    group: RankGroup | None
    """Ranks of the instance; None if it has only one."""
    pool: KVPool
    runner: ModelRunner
    threads: int
    model_path: str
    weights_stamp: tuple[tuple[object, ...], ...]
    """Of the files before they were loaded."""
    grammars: GrammarStore | None
    """Compiled grammars; None on a rank that does not sample."""

    def weights_digest(self) -> bytes:
        """Return the digest of the checkpoint's weights. Reads all of them. Raises Internal if others may have been
        loaded: pages would get the keys of another model."""
        digest = weights_digest(self.model_path)
        if weights_stamp(self.model_path) != self.weights_stamp:
            raise Internal(f"the weights in {self.model_path} were replaced while they were loaded: start again")
        return digest

    def prepare_thread(self) -> None:
        """Set up the math library, whose settings are per thread. Call it first on the step thread."""
        torch.set_num_threads(self.threads)


def build_rank(topology: Topology, instance: Instance, tp_rank: int, progress: BuildProgress) -> RankEngine:
    """Build one rank. Only rank 0 samples and has aux rows for logits. Raises ConfigError if it cannot be served."""
    config, role, path = instance.config, instance.role, topology.model.path
    threads = threads_of(topology, instance, usable_cores())
    torch.set_num_threads(threads)
    device = torch.device(config.devices[tp_rank])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    spec = read_model_spec(path, topology.model.max_model_len)
    model_dtype = resolve_dtype(topology.model.dtype, spec, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kv_dtype = kv_dtype_of(topology.cache, spec, model_dtype, capability)
    group = RankGroup(tp_rank, config.tp_size, device) if config.tp_size > 1 else None
    # Otherwise a matrix product split along its inner dimension keeps partial sums in float16, which may overflow.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    layout = kv_layout(spec, topology.cache.page_size, kv_dtype, config.tp_size, model_hash(path))
    bytes_per_page = layout.bytes_per_page
    num_pages = num_pages_asked(topology, instance)
    if num_pages is not None:
        free_bytes = available_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        if num_pages * bytes_per_page > free_bytes:
            needed_bytes = num_pages * bytes_per_page
            raise ConfigError(
                too_large(num_pages_key(instance), [instance.name], needed_bytes, free_bytes, bytes_per_page)
            )
    progress.state("loading")
    stamp = weights_stamp(path)
    ops = prefill_ops(topology, instance, spec, device, model_dtype, kv_dtype)
    model = load_model(path, topology.model.dtype, str(device), progress.loading, spec.max_model_len, ops, group)
    num_slots = topology.scheduler.max_running_requests
    is_main = tp_rank == MAIN_RANK
    num_aux_slots = num_aux_rows(topology.cache.num_aux_slots, num_slots, role) if is_main else 0
    transfer_bytes = pool_bytes_of(topology.dp_config.router, role, config)
    if num_pages is None:
        useful = num_slots * 2 * -(-spec.max_model_len // layout.page_size)
        if device.type == "cpu":
            num_here = sum(member.config.tp_size for member in instances_on(topology, config.host))
            num_pages = num_pages_for(topology.cache, bytes_per_page, available_cpu_bytes(), num_here, useful)
        else:
            rows = max(topology.scheduler.max_batched_tokens, *PREFILL_SIZES) + num_slots
            itemsize = TORCH_DTYPES[model_dtype].itemsize
            num_pages = device_pages(
                share_of_device(topology, instance, _shared_name(topology, instance, tp_rank)),
                device_memory(device),
                reserve_bytes(spec, itemsize, rows, num_slots, spec.max_model_len, config.tp_size),
                num_aux_slots * aux_row_bytes(spec.vocab_size),
                bytes_per_page,
                useful,
                transfer_bytes,
            )
    if group is not None:
        num_pages = group.smallest(num_pages)
    # Only on one rank: collectives of the ranks within a step are not recorded yet.
    recording = Recording(CudaRecorder(device)) if device.type == "cuda" and group is None else None
    has_scratch = recording is not None
    pool = KVPool(layout, num_pages, num_aux_slots, str(device), has_scratch=has_scratch, transfer_bytes=transfer_bytes)
    logger.info(
        "%d pages of %d bytes (K and V are %s), %d aux slots, %d threads",
        num_pages,
        bytes_per_page,
        kv_dtype,
        num_aux_slots,
        threads,
    )
    samples = is_main and role is not Role.PREFILL
    grammars = GrammarStore(lambda: GrammarCompiler(Tokenizer.load(path), spec.vocab_size)) if samples else None
    sampler = Sampler(num_slots, spec.vocab_size, device, spec.eos_token_ids, grammars=grammars) if samples else None
    # The router refuses what can never fit the pool: it takes the smallest limit of all instances.
    longest = min(spec.max_model_len, num_pages * layout.page_size)
    if topology.model.max_model_len is not None and longest < topology.model.max_model_len:
        logger.warning(
            "model.max_model_len is %d, but the KV pages hold %d tokens: longer requests are refused",
            spec.max_model_len,
            longest,
        )
    elif warning := small_pool(num_pages, layout.page_size, spec.max_model_len):
        logger.warning("%s", warning)
    prompts = warmup_prompts(topology, instance, spec, device, max(PREFILL_SIZES) if recording is not None else 0)
    runner = ModelRunner(spec, model, pool, num_slots, longest, sampler, recording, prompts)
    return RankEngine(group, pool, runner, threads, path, stamp, grammars)


def _shared_name(topology: Topology, instance: Instance, tp_rank: int) -> str:
    """Return the name that other instances of the host have for this rank's device; this process may count from 0."""
    return find_instance(topology, instance.role, instance.engine_rank).config.devices[tp_rank]


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a GPU after the weights are loaded. Empties the allocator's cache first."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes, free_bytes, torch.cuda.memory_allocated(device))
