"""Builds the parts of an instance that hold tensors, for one rank: group, weights, pool, runner.

Called once by the main thread of each rank (`serve/scheduler.py`), after the ports are bound and before any request is
served. With several ranks all of them run this together. They agree on the number of pages, which also makes fast ranks
wait for those that still read weights. `model.prefill_attention` chooses the operations, and the prompts that warm up
those of a rank that computes prompts.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from chitu import __version__
from chitu.config.devices import dtype_on
from chitu.config.schema import Topology, WeightForm
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance, computes_prompts, threads_of
from chitu.engine.executor import PromptLane
from chitu.engine.expert_group import ExpertGroup, GroupLinks
from chitu.engine.image_features import feature_pool, image_table
from chitu.engine.lanes import lane_problems, num_lanes
from chitu.engine.memory_budget import (
    DeviceMemory,
    HostMemory,
    ImageMemory,
    PoolPlan,
    available_cpu_bytes,
    expert_problems,
    kv_dtype_of,
    kv_layout,
    num_image_rows,
    num_pages_asked,
    num_pages_key,
    plan_pool,
    small_pool,
    state_problems,
    too_large,
)
from chitu.engine.model_runner import ModelRunner
from chitu.engine.rank_groups import Meeting, RankGroup, RankGroups, groups_of_rank
from chitu.engine.rendezvous import Claim
from chitu.engine.sampler import Sampler
from chitu.engine.sleep import ON_GPU
from chitu.engine.step_graphs import PREFILL_SIZES, CudaRecorder, Recording
from chitu.engine.weights import RankWeights, WeightsSource
from chitu.errors import ConfigError, Internal
from chitu.grammars import GrammarCompiler, GrammarStore
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, row_weights
from chitu.kv_cache.feature_pool import FeaturePool
from chitu.kv_cache.pool import TORCH_DTYPES, KVPool
from chitu.kv_cache.state_row import StateRow
from chitu.models.adapters import AdapterSpec, hashes_of, read_adapters
from chitu.models.common import build_decoder, part_of
from chitu.models.config import Code, ModelSpec, model_hash, read_model_spec, weights_digest, weights_stamp
from chitu.models.draft_layer import with_draft_layer
from chitu.models.families import traits_of
from chitu.models.layers import DecoderModel, Shard, Spread
from chitu.models.lora import Adapters, adaptable
from chitu.models.model import Model, vision_of
from chitu.models.served_folder import ServedFolder
from chitu.models.weights import OpenPieces, Pieces, WeightSource, opened_pieces
from chitu.models.window_state import with_window_state
from chitu.net.control_groups import usable_cores
from chitu.ops.interface import Ops
from chitu.ops.select import select_ops
from chitu.protocol import ITEM_BYTES, KVLayout
from chitu.tokenizer import Tokenizer
from chitu.types import Role

if TYPE_CHECKING:
    from chitu.ops.kernels.greedy import GreedyKernels

logger = logging.getLogger(__name__)

HASH_DIGITS = 8
"""Digits of a model's hash that sentences show."""


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
    if topology.model.prefill_attention == "auto" and spec.latent is None and not traits_of(spec).sinks:
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
    spec: ModelSpec | None = None,
    drafts: bool = False,
    spread: Spread | None = None,
    weights: WeightForm = "keep",
    images: bool = False,
    pieces: Pieces | None = None,
) -> Model:
    """Read the weights of a checkpoint folder and of its LoRA adapters, or with `shard` this rank's part of them.

    Calls `progress(bytes_done, bytes_total)` after every tensor. `max_model_len` is the length of the rotary table; see
    `read_model_spec`. `window_state` as in `CacheConfig`. `drafts`: load the layer that drafts, too. `spread`: load
    this rank's own experts alone. `weights`: `model.weights`. `images`: load what makes features of images, too,
    if it can be used. `pieces`: asked for bytes of the folder's files before these. `spec`: what the folder and these
    options give, if it is known. Without `ops`: the fastest implementation for this device and dtype. Raises
    ConfigError (UnsupportedModel) for a folder that cannot be served, before reading weights if possible.
    """
    if spec is None:
        spec = with_window_state(read_model_spec(path, max_model_len, code), window_state)
        spec = with_draft_layer(spec, drafts)
    target = torch.device(device)
    torch_dtype = TORCH_DTYPES[resolve_dtype(dtype, spec, target)]
    chosen = ops if ops is not None else select_ops(target, torch_dtype)
    keeps = chosen.keeps if weights == "keep" else None
    source = WeightSource(
        path, torch_dtype, target, progress, spec.quantization, keeps=keeps, prefix=spec.tensor_prefix, pieces=pieces
    )
    with torch.inference_mode(), source as opened:
        if spec.code == "transformers":
            from chitu.models.generic.model import build_generic  # transformers' modules: seconds and memory

            return build_generic(path, spec, torch_dtype, target, opened, shard, adapters, chosen, spread, images)
        model = build_decoder(spec, traits_of(spec), opened, chosen, target, spec.max_model_len, shard, spread)
        if spec.latent is not None or spec.state:
            return model
        part = part_of(spec, *((shard.rank, shard.size) if shard is not None else (0, 1)))
        loaded = Adapters(chosen, target, torch_dtype, adaptable(model, part.query, part.key, part.inner))
        for number, adapter in enumerate(adapters, 1):
            loaded.put(number, loaded.read(adapter))
        return replace(model, adapters=loaded)


class BuildProgress(Protocol):
    def state(self, state: str) -> None: ...

    def loading(self, done: int, total: int) -> None: ...


@dataclass(slots=True)
class RankEngine:
    group: RankGroup | None
    """Ranks of the instance; None if it has only one."""
    members: RankGroup | None
    """Ranks at the same place in the members of its group; None if it is in none."""
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
    lane: PromptLane | None
    """The runner, if it computes prompts beside decode steps."""
    make_sampler: Callable[[], tuple[Sampler, GrammarStore]]
    """Makes what D and unified instances sample with; P's own sampler, if any, follows no grammars."""
    features: FeaturePool | None = None
    """Rows for features of images; None if the model sees none."""

    def report_blocks(self, report: Callable[[], None]) -> None:
        """Have `report` called before each block of the vision tower is computed, if the model has one."""
        tower = vision_of(self.runner.model)
        if tower is not None:
            tower.report_blocks(report)

    def begin_sampling(self) -> GrammarStore:
        """Have the rank sample and decode, which on P it does not, and return the compiled grammars. Step thread, with
        no step in flight. Steps that decode are recorded when the first of their size comes."""
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


@dataclass(frozen=True, slots=True)
class _Target:
    """What a rank is built for: its place, its model, and the forms of weights and of pages."""

    topology: Topology
    instance: Instance
    tp_rank: int
    device: torch.device
    spec: ModelSpec
    dtype: str
    kv_dtype: str
    layout: KVLayout
    adapters: tuple[AdapterSpec, ...]
    open_pieces: OpenPieces | None = None

    @property
    def is_main(self) -> bool:
        return self.tp_rank == MAIN_RANK

    @property
    def window_state(self) -> bool:
        return self.topology.cache.window_state


def build_rank(
    topology: Topology,
    instance: Instance,
    tp_rank: int,
    progress: BuildProgress,
    open_pieces: OpenPieces | None = None,
) -> RankEngine:
    """Build one rank. Only rank 0 samples and has aux rows for logits. `open_pieces`: opens what is asked for bytes of
    weights before their files. Raises ConfigError if it cannot be served."""
    threads = threads_of(topology, instance, usable_cores())
    torch.set_num_threads(threads)
    target = replace(_target(topology, instance, tp_rank), open_pieces=open_pieces)
    config, path = instance.config, topology.model.path
    sizes, is_spread = (config.dp_size, config.tp_size), config.experts == "spread"
    places = instance.data_rank, tp_rank
    groups = groups_of_rank(*sizes, *places, target.device, share_experts=is_spread, meeting=_meeting(target))
    group, experts = groups.tp, _experts(target, groups)
    # Otherwise a matrix product split along its inner dimension keeps partial sums in float16, which may overflow.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    _require_memory(target)
    progress.state("loading")
    stamp = weights_stamp(path)
    model = _load(target, group, experts, progress.loading)
    plan = _plan(target, model)
    if group is not None:
        plan = replace(
            plan,
            num_pages=group.smallest(plan.num_pages),
            num_states=group.smallest(plan.num_states) if target.layout.state else 0,
        )
    return _assemble(target, plan, model, groups, experts, threads, stamp)


def _experts(target: _Target, groups: RankGroups) -> ExpertGroup | None:
    """Return the ranks among which experts are spread; None if they are not."""
    config, members = target.instance.config, groups.members
    if config.experts == "cut" or config.num_devices == 1:
        return None
    shared = members.compute if members is not None else None
    return ExpertGroup(GroupLinks(shared) if shared is not None else None, target.tp_rank, config.tp_size)


def _target(topology: Topology, instance: Instance, tp_rank: int) -> _Target:
    """Return what to build. Raises ConfigError if the model, its dtype or its state cannot be served here."""
    device = torch.device(instance.config.devices[tp_rank])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    path, cache = topology.model.path, topology.cache
    spec = read_model_spec(path, topology.model.max_model_len, topology.model.code)
    spec = with_window_state(spec, cache.window_state)
    spec = with_draft_layer(spec, topology.scheduler.speculation == "mtp")
    dtype = resolve_dtype(topology.model.dtype, spec, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kv_dtype = kv_dtype_of(cache, spec, dtype, capability)
    layout = kv_layout(spec, cache.page_size, kv_dtype, instance.config.tp_size, model_hash(path, spec.code), dtype)
    adapters = tuple(read_adapters(topology.model.adapters, spec, path))
    layout = msgspec.structs.replace(layout, adapters=hashes_of(adapters))
    problems = *state_problems(topology, spec, [instance]), *expert_problems(spec, [instance])
    for problem in (*problems, *lane_problems(topology, spec, [instance])):
        raise ConfigError(problem)
    return _Target(topology, instance, tp_rank, device, spec, dtype, kv_dtype, layout, adapters)


def _meeting(target: _Target) -> Meeting | None:
    """Return how a group on several hosts meets; None if all its ranks are on one."""
    config = target.instance.config
    if len(config.hosts) < 2:
        return None
    name = target.instance.name + (f".{target.tp_rank}" if target.tp_rank else "")
    facts = {
        "chitu": __version__,
        "torch": str(torch.__version__),
        "dp_size x tp_size": f"{config.dp_size} x {config.tp_size}",
        "the model": target.layout.model_hash[:HASH_DIGITS],
        "dtype": target.dtype,
        "devices of kind": target.device.type,
    }
    lease_s = target.topology.dp_config.router.pd_disaggregation.deadlines.lease_s
    return Meeting(config.hosts, config.rendezvous_port, Claim(f"{name} on {config.host}", facts), lease_s)


def _require_memory(target: _Target) -> None:
    """Raise ConfigError if so many pages as are asked for do not fit, before any weight is read."""
    device, instance, page_bytes = target.device, target.instance, target.layout.bytes_per_page
    num_pages = num_pages_asked(target.topology, instance)
    if num_pages is None:
        return
    free_bytes = available_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if num_pages * page_bytes > free_bytes:
        needed_bytes = num_pages * page_bytes
        raise ConfigError(too_large(num_pages_key(instance), [instance.name], needed_bytes, free_bytes, page_bytes))


def _load(
    target: _Target, group: RankGroup | None, experts: ExpertGroup | None, loading: Callable[[int, int], None]
) -> Model:
    """Read the weights and adapters. Raises Internal if an adapter is not the one that the layout names."""
    config, spec, dtype = target.topology.model, target.spec, TORCH_DTYPES[target.dtype]
    with opened_pieces(target.open_pieces, config.path, target.layout.model_hash) as pieces:
        model = load_model(
            config.path,
            config.dtype,
            str(target.device),
            loading,
            ops=select_ops(target.device, dtype, config.prefill_attention == "paged"),
            shard=group,
            adapters=target.adapters,
            spec=spec,
            spread=experts,
            weights=config.weights,
            images=config.images == "auto",
            pieces=pieces,
        )
    if target.layout.adapters != hashes_of(target.adapters):
        raise Internal("a LoRA adapter was replaced while it was loaded: start again")
    return model


def _plan(target: _Target, model: Model) -> PoolPlan:
    """Plan the pool by the memory that the weights have left, and that features of images leave."""
    topology, instance, device = target.topology, target.instance, target.device
    memory: HostMemory | DeviceMemory | None = None
    if num_pages_asked(topology, instance) is None:
        memory = HostMemory(available_cpu_bytes()) if device.type == "cpu" else device_memory(device)
    images, tower = ImageMemory(), vision_of(model)
    if tower is not None:
        rows = num_image_rows(topology.cache, target.spec)
        images = ImageMemory(rows, rows * tower.shape.width * ITEM_BYTES[target.dtype], tower.step_bytes(rows))
    recorded = max(PREFILL_SIZES)
    return plan_pool(
        topology, instance, target.tp_rank, target.spec, target.layout, target.dtype, memory, recorded, images
    )


def _assemble(
    target: _Target,
    plan: PoolPlan,
    model: Model,
    groups: RankGroups,
    experts: ExpertGroup | None,
    threads: int,
    stamp: tuple[tuple[object, ...], ...],
) -> RankEngine:
    """Put the parts of a rank together over its model."""
    topology, role, spec, group = target.topology, target.instance.role, target.spec, groups.tp
    device, layout = target.device, target.layout
    path, num_slots = topology.model.path, topology.scheduler.max_running_requests
    # Without state: the rows of a padded batch would need state rows of their own. The attention of `models/generic`
    # would read the longest sequence's pages. Sparse attention reads as many positions as the longest sequence has.
    # Whether rows have adapters, members that share experts do not tell each other.
    is_sparse = spec.latent is not None and spec.latent.index is not None
    is_own = spec.code == "own" and not is_sparse and not (experts is not None and target.adapters)
    has_graphs = device.type == "cuda" and topology.scheduler.graphs == "auto"
    is_recorded, recording = has_graphs and not layout.state and is_own, None
    if is_recorded:
        has_members = experts is not None and experts.has_members  # then steps with prompts exchange by all_to_all
        recorder = CudaRecorder(device, has_ranks=group is not None or has_members)
        recording = Recording.of(recorder, computes_prompts(topology, role) and not has_members)
    pool = KVPool(
        layout,
        plan.num_pages,
        plan.num_aux_slots,
        str(device),
        has_scratch=is_recorded,
        transfer_bytes=plan.transfer_bytes,
        num_state_slots=plan.num_states,
    )
    counts = plan.num_pages, layout.bytes_per_page, target.kv_dtype, plan.num_aux_slots, threads
    logger.info("%d pages of %d bytes (K and V are %s), %d aux slots, %d threads", *counts)
    if plan.images.num_rows:
        logger.info("%d rows for features of images, %d bytes", plan.images.num_rows, plan.images.region_bytes)
    if plan.num_states:
        logger.info("%d state rows of %d bytes", plan.num_states, StateRow.of(layout).row_bytes)

    def make_sampler() -> tuple[Sampler, GrammarStore]:
        store = GrammarStore(lambda: GrammarCompiler(Tokenizer.load(path), spec.vocab_size))
        return Sampler(num_slots, spec.vocab_size, device, spec.eos_token_ids, grammars=store), store

    decodes, sampler, grammars = role is not Role.PREFILL, None, None
    if target.is_main and decodes:
        sampler, grammars = make_sampler()
    elif target.is_main and topology.dp_config.router.pd_disaggregation.early_token:
        sampler = Sampler(num_slots, spec.vocab_size, device, spec.eos_token_ids)
    longest = _longest(target, plan.num_pages)
    prompts = warmup_prompts(
        topology, target.instance, spec, device, max(recording.prefill_sizes, default=0) if recording is not None else 0
    )
    mtp_tokens = topology.scheduler.mtp_tokens
    checks_rows = pool.device.type == "cuda"
    rows, tp_size = plan.images.num_rows, layout.tp_size
    features = feature_pool(model, rows, pool.device, layout.model_hash, target.dtype, tp_size)
    images = image_table(model, rows, pool.device, features)
    steps = recording, prompts, mtp_tokens, decodes, experts, checks_rows, greedy_kernels(num_slots, pool)
    runner = ModelRunner(spec, model, pool, num_slots, longest, sampler, *steps, images=images)
    served, pools = ServedFolder(path, layout.model_hash, stamp), (pool,) if features is None else (pool, features)
    weights = RankWeights(_weights_source(target, model, group, experts), runner, served, pools)
    weights.no_sleep = _no_sleep(target, groups)
    lane = None
    if num_lanes(topology.scheduler, target.instance) == 2:
        runner.use_lanes(threads)
        lane = runner
    parts = group, groups.members, pool, runner, threads, path, stamp, grammars, weights, lane, make_sampler
    return RankEngine(*parts, features)


def _no_sleep(target: _Target, groups: RankGroups) -> str:
    """Return why a rank cannot give its memory back; empty if it can."""
    if target.device.type != "cpu":
        return ON_GPU
    return "members of a group (dp_size) do not sleep" if groups.members is not None else ""


def greedy_kernels(num_slots: int, pool: KVPool) -> GreedyKernels | None:
    """Return the kernels for greedy tokens on a GPU, compiled; None elsewhere."""
    if pool.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from chitu.ops.kernels.greedy import GreedyKernels

    weights = torch.from_numpy(row_weights(AUX_HEADER_BYTES + 4 * pool.layout.aux_numbers)).to(pool.device)
    return GreedyKernels(num_slots, pool.layout.vocab_size, AUX_HEADER_BYTES, weights)


def _longest(target: _Target, num_pages: int) -> int:
    """Return the most tokens that the pool holds of a request. The router refuses what can never fit: it takes the
    smallest limit of all instances. Warn if that is less than one may expect."""
    asked, spec, page_size = target.topology.model.max_model_len, target.spec, target.layout.page_size
    longest = min(spec.max_model_len, num_pages * page_size)
    if asked is not None and longest < asked:
        logger.warning(
            "model.max_model_len is %d, but the KV pages hold %d tokens: longer requests are refused",
            spec.max_model_len,
            longest,
        )
    elif warning := small_pool(num_pages, page_size, spec.max_model_len):
        logger.warning("%s", warning)
    return longest


def _weights_source(
    target: _Target, model: Model, group: RankGroup | None, experts: ExpertGroup | None
) -> WeightsSource:
    """Return what reads other weights beside those that serve, into host memory."""
    spec = target.spec
    # Others have their own operations.
    own_ops = model.ops if target.device.type == "cuda" and isinstance(model, DecoderModel) else None

    def load_into_host_memory(folder: str, found: str) -> Model:
        with opened_pieces(target.open_pieces, folder, found) as pieces:
            return load_model(
                folder,
                target.dtype,
                "cpu",
                max_model_len=spec.max_model_len,
                ops=own_ops,
                shard=group,
                code=spec.code,
                window_state=target.window_state,
                drafts=spec.has_draft_layer,
                spread=experts,
                weights=target.topology.model.weights,
                images=vision_of(model) is not None,
                pieces=pieces,
            )

    path = target.topology.model.path
    return WeightsSource(path, spec, load_into_host_memory, target.window_state, _why_unadapted(target, experts))


def _why_unadapted(target: _Target, experts: ExpertGroup | None) -> str:
    """Return why a rank takes no LoRA adapters while it serves, beyond what is wrong with each; empty if it does."""
    topology, spec, instance = target.topology, target.spec, target.instance
    if spec.code == "transformers" and instance.config.tp_size > 1:
        return f"{spec.architecture} takes LoRA adapters with tp_size 1 only"
    if num_lanes(topology.scheduler, instance) == 2:
        return "prompts compute in a lane of their own (scheduler.lanes is 2)"
    if experts is not None and not target.adapters and target.device.type == "cuda":
        return "a group that shares experts, and was started without an adapter, has recorded steps (scheduler.graphs)"
    return ""


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a GPU after the weights are loaded. Empties the allocator's cache first."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes, free_bytes, torch.cuda.memory_allocated(device))
