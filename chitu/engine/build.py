"""Builds the parts of an instance that hold tensors, for one rank: group, weights, pool, runner.

Called once by the main thread of each rank (`serve/scheduler.py`), after the ports are bound and before any request is
served. With several ranks all of them run this together. They agree on the number of pages, which also makes fast ranks
wait for those that still read weights. `model.prefill_attention` chooses the operations, and the prompts that warm up
those of a rank that computes prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from chitu.config.devices import dtype_on
from chitu.config.schema import Topology
from chitu.config.staging import pool_bytes_of
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance, computes_prompts, find_instance, instances_on, threads_of
from chitu.engine.memory_budget import (
    DeviceMemory,
    available_cpu_bytes,
    cpu_pool_bytes,
    device_pages,
    kv_dtype_of,
    kv_layout,
    num_pages_asked,
    num_pages_for,
    num_pages_key,
    num_state_rows,
    reserve_bytes,
    share_of_device,
    small_pool,
    state_problems,
    too_large,
)
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import PREFILL_SIZES, CudaRecorder, Recording
from chitu.engine.tp_executor import RankGroup
from chitu.engine.weights import RankWeights, WeightsSource
from chitu.errors import ConfigError, Internal
from chitu.grammars import GrammarCompiler, GrammarStore
from chitu.kv_cache.aux_row import aux_row_bytes, num_aux_rows
from chitu.kv_cache.pool import TORCH_DTYPES, KVPool
from chitu.kv_cache.state_row import StateRow
from chitu.models.adapters import AdapterSpec, hashes_of, read_adapters
from chitu.models.common import build_decoder, part_of
from chitu.models.config import Code, ModelSpec, model_hash, read_model_spec, weights_digest, weights_stamp
from chitu.models.families import traits_of
from chitu.models.layers import DecoderModel, Shard
from chitu.models.lora import load_adapters
from chitu.models.model import Model
from chitu.models.weights import WeightSource
from chitu.models.window_state import with_window_state
from chitu.net.control_groups import usable_cores
from chitu.ops.interface import Ops
from chitu.ops.select import select_ops
from chitu.tokenizer import Tokenizer
from chitu.types import Role

logger = logging.getLogger(__name__)


def warmup_prompts(
    topology: Topology, instance: Instance, spec: ModelSpec, device: torch.device, longest_recorded: int
) -> list[tuple[int, ...]]:
    """Return prompt lengths for the warm-up of a GPU, a tuple for each step: every length that prompts are padded to
    for torch's library, else one too long for a recording. `longest_recorded`: tokens of a step; 0 without recordings.
    """
    if device.type != "cuda" or not computes_prompts(topology, instance.role) or spec.code == "transformers":
        return []
    from chitu.ops.whole_prompts import WHOLE_PROMPT_TOKENS, padded_lengths  # Triton: only with a GPU

    scheduler = topology.scheduler
    longest = min(scheduler.chunk_size, scheduler.max_batched_tokens, spec.max_model_len)
    lengths = [longest_recorded + 1]
    if topology.model.prefill_attention == "auto" and spec.latent is None:
        lengths = [min(length, longest) for length in padded_lengths(WHOLE_PROMPT_TOKENS, longest)]
    # A prompt short enough for a recording reaches the library together with others, in a step too long to be recorded.
    steps = [(n,) if n > longest_recorded else (n, longest_recorded + 1 - n) for n in lengths]
    return [step for step in steps if sum(step) <= scheduler.max_batched_tokens and max(step) <= longest]


def resolve_dtype(dtype: str, spec: ModelSpec, device: torch.device) -> str:
    """Return the dtype by name. `auto` is float32 on a CPU and the checkpoint's own dtype elsewhere."""
    resolved = dtype_on(device.type, dtype, spec.dtype)
    if resolved not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype: {dtype!r} is not one of auto, {', '.join(TORCH_DTYPES)}")
    return resolved


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    shard: Shard | None = None,
    code: Code = "auto",
    adapters: Sequence[AdapterSpec] = (),
    window_state: bool = False,
) -> Model:
    """Read the weights of a checkpoint folder and of its LoRA adapters, or with `shard` this rank's part of them.

    Calls `progress(bytes_done, bytes_total)` after every tensor. `max_model_len` is the length of the rotary table; see
    `read_model_spec`. `window_state` as in `CacheConfig`. Without `ops`: the fastest implementation for this device and
    dtype. Raises ConfigError (UnsupportedModel) for a folder that cannot be served, before reading weights if possible.
    """
    spec = with_window_state(read_model_spec(path, max_model_len, code), window_state)
    target = torch.device(device)
    torch_dtype = TORCH_DTYPES[resolve_dtype(dtype, spec, target)]
    chosen = ops if ops is not None else select_ops(target, torch_dtype)
    source = WeightSource(
        path, torch_dtype, target, progress, spec.quantization, keeps_eight_bits=chosen.keeps_eight_bits
    )
    with torch.inference_mode(), source as weights:
        if spec.code == "transformers":
            from chitu.models.generic.model import build_generic  # transformers' modules: seconds and memory

            return build_generic(path, spec, torch_dtype, target, weights, shard, adapters, chosen)
        model = build_decoder(spec, traits_of(spec), weights, chosen, target, spec.max_model_len, shard)
        if not adapters:
            return model
        part = part_of(spec, *((shard.rank, shard.size) if shard is not None else (0, 1)))
        loaded = load_adapters(adapters, model, part.query, part.key, part.inner, torch_dtype, target)
        return replace(model, adapters=loaded)


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
    weights: RankWeights
    """Changes the model's weights while it serves."""
    make_sampler: Callable[[], tuple[Sampler, GrammarStore]]

    def begin_sampling(self) -> GrammarStore:
        """Have the rank sample, which on P it does not, and return the compiled grammars. Step thread, with no step in
        flight. Steps that sample are recorded when the first of their size comes."""
        if self.grammars is None:
            sampler, self.grammars = self.make_sampler()
            self.runner.use_sampler(sampler)
        return self.grammars

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
    spec = read_model_spec(path, topology.model.max_model_len, topology.model.code)
    spec = with_window_state(spec, topology.cache.window_state)
    model_dtype = resolve_dtype(topology.model.dtype, spec, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kv_dtype = kv_dtype_of(topology.cache, spec, model_dtype, capability)
    group = RankGroup(tp_rank, config.tp_size, device) if config.tp_size > 1 else None
    # Otherwise a matrix product split along its inner dimension keeps partial sums in float16, which may overflow.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    layout = kv_layout(
        spec, topology.cache.page_size, kv_dtype, config.tp_size, model_hash(path, spec.code), model_dtype
    )
    adapters = read_adapters(topology.model.adapters, spec, path)
    hashes = hashes_of(adapters)
    layout = msgspec.structs.replace(layout, adapters=hashes)
    bytes_per_page = layout.bytes_per_page
    for problem in state_problems(topology, spec, [instance]):
        raise ConfigError(problem)
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
    ops = select_ops(device, TORCH_DTYPES[model_dtype], topology.model.prefill_attention == "paged")
    model = load_model(
        path,
        topology.model.dtype,
        str(device),
        progress.loading,
        spec.max_model_len,
        ops,
        group,
        spec.code,
        adapters,
        topology.cache.window_state,
    )
    if hashes != hashes_of(adapters):
        raise Internal("a LoRA adapter was replaced while it was loaded: start again")
    num_slots = topology.scheduler.max_running_requests
    is_main = tp_rank == MAIN_RANK
    num_aux_slots = num_aux_rows(topology.cache.num_aux_slots, num_slots, role) if is_main else 0
    transfer_bytes = pool_bytes_of(topology.dp_config.router, role, config)
    row_bytes = StateRow.of(layout).row_bytes
    num_states = num_state_rows(topology.cache, role, num_slots, row_bytes)
    if num_pages is None:
        useful = num_slots * 2 * -(-spec.max_model_len // layout.page_size)
        if device.type == "cpu":
            num_here = sum(member.config.tp_size for member in instances_on(topology, config.host))
            free_bytes = available_cpu_bytes()
            pool_bytes = cpu_pool_bytes(topology.cache, free_bytes, num_here)
            num_states = num_state_rows(topology.cache, role, num_slots, row_bytes, pool_bytes)
            state_bytes = num_states * row_bytes
            num_pages = num_pages_for(topology.cache, bytes_per_page, free_bytes, num_here, useful, state_bytes)
        else:
            rows = max(topology.scheduler.max_batched_tokens, *PREFILL_SIZES) + num_slots
            itemsize = TORCH_DTYPES[model_dtype].itemsize
            share = share_of_device(topology, instance, _shared_name(topology, instance, tp_rank))
            memory = device_memory(device)
            reserve = reserve_bytes(spec, itemsize, rows, num_slots, spec.max_model_len, config.tp_size)
            pool_bytes = int(share * memory.total_bytes) - memory.own_bytes - reserve
            num_states = num_state_rows(topology.cache, role, num_slots, row_bytes, pool_bytes)
            num_pages = device_pages(
                share,
                memory,
                reserve,
                num_aux_slots * aux_row_bytes(spec.vocab_size),
                bytes_per_page,
                useful,
                transfer_bytes,
                num_states * row_bytes,
            )
    if group is not None:
        num_pages = group.smallest(num_pages)
        num_states = group.smallest(num_states) if row_bytes else 0
    # Only on one rank, as collectives within a step are not recorded yet, and without state: the rows of a padded batch
    # would need state rows of their own. The attention of `models/generic` would read the longest sequence's pages.
    # Sparse attention reads as many positions as the longest sequence has.
    is_sparse = spec.latent is not None and spec.latent.index is not None
    is_own = spec.code == "own" and not is_sparse
    is_recorded = device.type == "cuda" and group is None and not layout.state and is_own
    recording = Recording.of(CudaRecorder(device), computes_prompts(topology, role)) if is_recorded else None
    pool = KVPool(
        layout,
        num_pages,
        num_aux_slots,
        str(device),
        has_scratch=is_recorded,
        transfer_bytes=transfer_bytes,
        num_state_slots=num_states,
    )
    logger.info(
        "%d pages of %d bytes (K and V are %s), %d aux slots, %d threads",
        num_pages,
        bytes_per_page,
        kv_dtype,
        num_aux_slots,
        threads,
    )
    if num_states:
        logger.info("%d state rows of %d bytes", num_states, row_bytes)

    def make_sampler() -> tuple[Sampler, GrammarStore]:
        store = GrammarStore(lambda: GrammarCompiler(Tokenizer.load(path), spec.vocab_size))
        return Sampler(num_slots, spec.vocab_size, device, spec.eos_token_ids, grammars=store), store

    samples = is_main and role is not Role.PREFILL
    sampler, grammars = make_sampler() if samples else (None, None)
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
    own_ops = model.ops if device.type == "cuda" and isinstance(model, DecoderModel) else None  # others have their own

    def load_into_host_memory(folder: str) -> Model:
        return load_model(
            folder,
            model_dtype,
            "cpu",
            max_model_len=spec.max_model_len,
            ops=own_ops,
            shard=group,
            code=spec.code,
            window_state=topology.cache.window_state,
        )

    source = WeightsSource(path, spec, load_into_host_memory, bool(adapters), topology.cache.window_state)
    return RankEngine(group, pool, runner, threads, path, stamp, grammars, RankWeights(source, runner), make_sampler)


def _shared_name(topology: Topology, instance: Instance, tp_rank: int) -> str:
    """Return the name that other instances of the host have for this rank's device; this process may count from 0."""
    return find_instance(topology, instance.role, instance.engine_rank).config.devices[tp_rank]


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a GPU after the weights are loaded. Empties the allocator's cache first."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes, free_bytes, torch.cuda.memory_allocated(device))
