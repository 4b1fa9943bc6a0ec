"""How many KV pages an instance gets, and the dtype of K and V in them (`cache.kv_dtype`, checked against model and
device). Pure arithmetic over the memory that the host or the device reports; called once by `build.py`.

On a CPU: a fraction of the free RAM, shared by the instances of the host. On a GPU: an instance has a fraction of the
whole card, and its pages get what its weights and its steps leave of that. It is a fraction of the whole, not of the
free memory, because P and D of one card start together: neither share may depend on which of them is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from chitu.config.devices import CPU, dtype_on, gpu_index, is_gpu
from chitu.config.schema import CacheConfig, InstanceConfig, Topology
from chitu.config.staging import pool_bytes_of
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance, find_instance, instances_on
from chitu.errors import ConfigError
from chitu.kv_cache.aux_row import UNIFIED_AUX_ROWS, aux_row_bytes, num_aux_rows
from chitu.kv_cache.state_row import StateRow, why_not_cut
from chitu.models.checkpoint import WeightCount
from chitu.models.config import ModelSpec
from chitu.models.window_state import with_window_state
from chitu.net.control_groups import memory_left_bytes
from chitu.ops.kept_on_cards import E4M3_CAPABILITY, WIDE_NUMBERS
from chitu.protocol import (
    FP8_E4M3,
    ITEM_BYTES,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    KVLayout,
    fp8_head_bytes,
)
from chitu.protocol.cluster import HEAD_ALIGNMENT_BYTES
from chitu.types import Role

CPU_POOL_LIMIT_BYTES = 4 << 30
"""Largest pool that `memory_fraction` gives on a CPU. `cache.num_pages` may ask for more."""
CPU_FRACTION = 0.25
GPU_FRACTION = 0.9
CONTEXT_BYTES = 1 << 30
"""Memory of a CUDA process before it computes: libraries, kernels and graphs. A guess, not measured."""
DEFAULT_IMAGE_ROWS = 16384
"""Rows for features of images: the largest image of Qwen's models has so many."""
GIB = 1 << 30
MIN_LOADED_SHARE = 0.9
"""Share of a checkpoint's weights that is certainly loaded; the rest may be tensors that no layer reads."""
EXCHANGED_COPIES = 4
"""Copies of a row of another member that are in memory at once: as it came, as it is computed, its sums."""
MIN_CONTEXT_TOKENS = 512
"""Warn of a pool that holds fewer tokens than this and than the model takes: it is probably a mistake."""
SLOT_TOKEN_BYTES = 32
"""Bytes of each token that a slot can hold: its id, its page table entry, and with penalties twice the id again (the
table of seen tokens doubles as it grows)."""
EDIT_BYTES = 2 * 12
"""Bytes of each entry of logit_bias and each masked id: an index and a value, for the current and the next batch."""
BAD_WORD_BYTES = MAX_BAD_WORD_TOKENS * (2 * 8 + 8 + 2) + 2 * 3 * 8
"""Bytes of each bad word: its tokens and index, for the current and the next batch, and what it is compared with."""


def kv_dtype_of(config: CacheConfig, spec: ModelSpec, model_dtype: str, capability: tuple[int, int] | None) -> str:
    """Return `KVLayout.dtype`. `capability`: of the GPU; None on a CPU. Raises ConfigError if e4m3 is asked for but
    the GPU does not support it or a head's page is not aligned."""
    if config.kv_dtype == "auto":
        return model_dtype
    for head_dim in sorted({head_dim for group in spec.groups for head_dim in group.head_dims}):
        nbytes = fp8_head_bytes(config.page_size, head_dim)
        if nbytes % HEAD_ALIGNMENT_BYTES:
            raise ConfigError(
                f"cache.kv_dtype: with {FP8_E4M3} a KV head's page of {config.page_size} tokens of {head_dim} numbers "
                f"and their scales has {nbytes} bytes, which is no multiple of {HEAD_ALIGNMENT_BYTES}: set "
                "cache.page_size to a multiple of 16"
            )
    if capability is not None and capability < E4M3_CAPABILITY:
        raise ConfigError(
            f"cache.kv_dtype: {FP8_E4M3} needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; this one has "
            f"{capability[0]}.{capability[1]}"
        )
    return FP8_E4M3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU, as the driver and torch report them after the weights are loaded."""

    total_bytes: int
    free_bytes: int
    own_bytes: int
    """Bytes that torch allocated in this process: weights and what came with them."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ImageMemory:
    """What images take of a rank's memory; nothing if its model sees none."""

    num_rows: int = 0
    """Rows for features (`ExecutorInfo.image_rows`)."""
    region_bytes: int = 0
    """Bytes of these rows."""
    step_bytes: int = 0
    """Bytes that the vision tower needs while it computes so many."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What a rank's pool holds."""

    num_pages: int
    num_states: int
    num_aux_slots: int
    transfer_bytes: int
    """Memory of its arena that transfers use."""
    images: ImageMemory = ImageMemory()


def num_image_rows(config: CacheConfig, spec: ModelSpec) -> int:
    """Return the rows for features of images of an instance whose model makes such: `cache.image_rows`."""
    return config.image_rows or min(DEFAULT_IMAGE_ROWS, spec.max_model_len)


def available_cpu_bytes() -> int:
    """Return MemAvailable of the host, or less if a control group (container, pod, job) leaves less."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                host_bytes = int(line.split()[1]) * 1024
                left_bytes = memory_left_bytes()
                return host_bytes if left_bytes is None else min(host_bytes, left_bytes)
    raise ConfigError("/proc/meminfo has no MemAvailable: set cache.num_pages")


def num_pages_asked(topology: Topology, instance: Instance) -> int | None:
    """Return the configured number of pages, or None for as many as memory allows."""
    return instance.config.num_pages or topology.cache.num_pages


def num_pages_key(instance: Instance) -> str:
    """Return the config key that `num_pages_asked` comes from."""
    return f"{instance.key}.num_pages" if instance.config.num_pages else "cache.num_pages"


def kv_layout(
    spec: ModelSpec, page_size: int, dtype: str, tp_size: int, model_hash: str = "", model_dtype: str = ""
) -> KVLayout:
    """Return the KV layout of a rank. `dtype`: that of K and V. `model_dtype` (by default `spec.dtype`): that of a
    state whose dtype is `auto`."""
    state = tuple(
        msgspec.structs.replace(each, dtype=model_dtype or spec.dtype) if each.dtype == "auto" else each
        for each in spec.state
    )
    return KVLayout(
        model_hash=model_hash,
        page_size=page_size,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        groups=spec.groups,
        tp_size=tp_size,
        state=state,
        draft_hidden=spec.hidden_size if spec.has_draft_layer else 0,
    )


def _cpu_page_bytes(topology: Topology, spec: ModelSpec, instance: Instance) -> int:
    """Return the bytes of a page over all ranks of an instance on CPUs."""
    config, cache = instance.config, topology.cache
    dtype = FP8_E4M3 if cache.kv_dtype == FP8_E4M3 else dtype_on(CPU, topology.model.dtype, spec.dtype)
    spec = with_window_state(spec, cache.window_state)
    return config.tp_size * kv_layout(spec, cache.page_size, dtype, config.tp_size).bytes_per_page


def pool_problems(topology: Topology, spec: ModelSpec, here: Sequence[Instance], available_bytes: int) -> Iterator[str]:
    """Yield an error text if the host's memory certainly cannot hold the `num_pages` of its CPU instances."""
    asked = [
        (instance, pages, _cpu_page_bytes(topology, spec, instance))
        for instance in here
        if "cpu" in instance.config.devices and (pages := num_pages_asked(topology, instance)) is not None
    ]
    needed = sum(pages * page_bytes for _, pages, page_bytes in asked)
    if needed <= available_bytes:
        return
    keys = dict.fromkeys(num_pages_key(instance) for instance, _, _ in asked)
    names = [instance.name for instance, _, _ in asked]
    yield too_large(", ".join(keys), names, needed, available_bytes, sum(page_bytes for _, _, page_bytes in asked))


def state_problems(topology: Topology, spec: ModelSpec, here: Sequence[Instance]) -> Iterator[str]:
    """Yield error texts on settings that a model with recurrent state does not allow."""
    if spec.state and topology.cache.host_bytes:
        yield (
            f"cache.host_bytes is {topology.cache.host_bytes}, but kept pages (in host memory, on disk, in a store) "
            "continue no prompt of a model with recurrent state: set it to 0"
        )
    for instance in here:
        if why := why_not_cut(spec.state, instance.config.tp_size):
            yield f"{instance.key}.tp_size is {instance.config.tp_size}, but {why}"


def expert_problems(spec: ModelSpec, here: Sequence[Instance]) -> Iterator[str]:
    """Yield error texts on experts that cannot be spread. Of a model that the library computes, loading finds out."""
    for instance in here:
        config = instance.config
        if config.experts == "cut" or spec.code != "own":
            continue
        if spec.experts is None:
            yield f"{instance.key}.experts is spread, but {spec.architecture} has no experts"
        elif spec.experts.num_experts < config.num_devices:
            yield (
                f"{instance.key}.experts is spread, but a layer has {spec.experts.num_experts} experts for the "
                f"{config.num_devices} ranks of {instance.key} (dp_size x tp_size)"
            )


def held_share(spec: ModelSpec, num_weights: int, config: InstanceConfig) -> float:
    """Return the share of a checkpoint's weights that all ranks of one instance hold together. Of a model that the
    library computes, at least that much."""
    if config.experts == "cut" or config.dp_size == 1 or not num_weights:
        return 1.0
    experts = spec.experts
    if experts is None:
        return 1 / config.dp_size
    # The layer that drafts has its experts whole on every member.
    num_layers = len([layer for layer in experts.layers if layer < spec.num_layers])
    count = num_layers * experts.num_experts * 3 * experts.intermediate_size * spec.hidden_size
    return 1 - min(1.0, count / num_weights) * (1 - 1 / config.dp_size)


def weight_problems(
    topology: Topology,
    spec: ModelSpec,
    weights: WeightCount,
    here: Sequence[Instance],
    available_bytes: int,
    cards: Mapping[int, int],
) -> Iterator[str]:
    """Yield error texts on weights that one host certainly cannot hold: one for its CPUs, one for each such GPU.

    `weights`: of the checkpoint's files. Some may stay unread, hence `MIN_LOADED_SHARE`. `cards`: bytes of each GPU of
    the host by its index, if known; all are taken for such that keep FP8, too. Skips instances whose devices
    are not chosen yet.
    """
    on_cpus = [item for item in here if "cpu" in item.config.devices]
    dtype = dtype_on(CPU, topology.model.dtype, spec.dtype)
    names = ", ".join(item.name for item in on_cpus)
    wide = weights.numbers * ITEM_BYTES[dtype]
    each = min(wide, weights.cpu_bytes or wide) if dtype == "float32" else wide  # the kernels compute in float32
    together = sum(held_share(spec, weights.numbers, item.config) for item in on_cpus)
    if MIN_LOADED_SHARE * each * together > available_bytes:
        half = weights.numbers * ITEM_BYTES["bfloat16"] * together
        fits_in_half = dtype == "float32" and half < each * together and MIN_LOADED_SHARE * half <= available_bytes
        form = dtype if each == wide else f"{dtype}, or as small as stored"
        yield (
            f"the weights would have {each * together / len(on_cpus) / GIB:.1f} GiB ({form}) in each of {names} on "
            f"CPUs, {each * together / GIB:.1f} GiB together, but {available_bytes / GIB:.1f} GiB of memory are "
            "free: use GPUs, fewer instances on this host, a smaller model"
            + (f", or model.dtype=bfloat16 ({half / GIB:.1f} GiB together)" if fits_in_half else "")
        )
    dtype = dtype_on("cuda", topology.model.dtype, spec.dtype)
    form = f"{dtype}, or as small as stored" if weights.card_bytes else dtype
    for index, total_bytes in cards.items():
        on_it = [item for item in here if any(is_gpu(d) and gpu_index(d) == index for d in item.config.devices)]
        shares = [held_share(spec, weights.numbers, item.config) / item.config.tp_size for item in on_it]
        needed = weights.bytes_on_card(ITEM_BYTES[dtype]) * sum(shares)
        fraction = topology.cache.memory_fraction or GPU_FRACTION
        fraction = max([fraction, *(item.config.memory_fraction or 0.0 for item in on_it)])
        if MIN_LOADED_SHARE * needed > fraction * total_bytes:
            yield (
                f"the weights of {', '.join(item.name for item in on_it)} on cuda:{index} would have "
                f"{needed / GIB:.1f} GiB ({form}), but it has {total_bytes / GIB:.1f} GiB, of which "
                f"{fraction:g} may be filled: use a larger tp_size, or fewer "
                "instances on it"
            )


def too_large(keys: str, names: Sequence[str], needed_bytes: int, free_bytes: int, bytes_per_page: int) -> str:
    """Return the error text on pools that memory cannot hold. `bytes_per_page`: of one page in every pool."""
    each = " each" if len(names) > 1 else ""
    return (
        f"{keys}: the KV pages of {', '.join(names)} would have {needed_bytes / GIB:.1f} GiB, but "
        f"{free_bytes / GIB:.1f} GiB of memory are free: at most {free_bytes // bytes_per_page} pages{each} fit, less "
        "the size of the weights"
    )


def small_pools(topology: Topology, spec: ModelSpec, here: Sequence[Instance]) -> Iterator[str]:
    """Yield a warning for each `num_pages` that leaves requests hardly any context."""
    said = set()
    for instance in here:
        pages = num_pages_asked(topology, instance)
        warning = small_pool(pages, topology.cache.page_size, spec.max_model_len) if pages is not None else ""
        if warning and warning not in said:
            said.add(warning)
            yield warning


def small_pool(num_pages: int, page_size: int, max_model_len: int) -> str:
    """Return a warning if the pool is too small for the use of any model, else an empty string."""
    tokens = num_pages * page_size
    if tokens >= min(max_model_len, MIN_CONTEXT_TOKENS):
        return ""
    return (
        f"the KV pool of {num_pages} pages holds {tokens} tokens, the limit of a request, prompt and answer "
        f"together; the model's limit is {max_model_len}, which are {-(-max_model_len // page_size)} pages"
    )


def cpu_pool_bytes(config: CacheConfig, free_bytes: int, instances_here: int) -> int:
    """Return the bytes of one instance's pages and state rows on a CPU: `memory_fraction` of the free bytes, shared by
    this host's instances."""
    fraction = config.memory_fraction or CPU_FRACTION
    return min(int(free_bytes * fraction) // max(1, instances_here), CPU_POOL_LIMIT_BYTES)


def num_state_rows(
    config: CacheConfig, role: Role, num_slots: int, row_bytes: int, pool_bytes: int | None = None
) -> int:
    """Return the number of state rows of an instance: `cache.num_state_slots`, else one for each request that may hold
    one at a time, which on P are those that compute and as many in transfer, elsewhere those that run and some prompts
    with forks. They get at most half of `pool_bytes` (None: no bound). 0 without state (`row_bytes` is 0)."""
    if not row_bytes:
        return 0
    if config.num_state_slots is not None:
        return config.num_state_slots
    wanted = 2 * num_slots if role is Role.PREFILL else num_slots + min(num_slots, UNIFIED_AUX_ROWS)
    return wanted if pool_bytes is None else max(1, min(wanted, pool_bytes // 2 // row_bytes))


def num_pages_for(
    config: CacheConfig,
    bytes_per_page: int,
    free_bytes: int,
    instances_here: int,
    max_pages_useful: int,
    state_bytes: int = 0,
) -> int:
    """Return the pages of one instance on CPU: `memory_fraction` of the free bytes, shared by this host's instances.

    `bytes_per_page`: K and V of one page over all layers. `max_pages_useful`: more can never be in use at once.
    `state_bytes`: of the state rows and of features of images, which come first.
    Raises ConfigError if no page fits. The caller checks whether a request of full length fits.
    """
    fraction = config.memory_fraction or CPU_FRACTION
    budget = cpu_pool_bytes(config, free_bytes, instances_here) - state_bytes
    pages = min(budget // bytes_per_page, max_pages_useful)
    if pages < 1:
        raise ConfigError(
            f"cache.memory_fraction: {fraction} of {free_bytes} free bytes holds no page of "
            f"{bytes_per_page} bytes; raise it or set cache.num_pages"
        )
    return pages


def share_of_device(topology: Topology, instance: Instance, device: str) -> float:
    """Return the fraction of a GPU that one rank of this instance may fill.

    That is the instance's `memory_fraction`. Ranks without one share equally what the other ranks of the card leave of
    `cache.memory_fraction`. Raises ConfigError if those leave nothing or together ask for more than the card.
    """
    name = _device_name(device)
    ranks = [
        member
        for member in instances_on(topology, instance.config.host)
        for other in member.config.devices
        if _device_name(other) == name
    ]
    fixed = [rank.config.memory_fraction for rank in ranks if rank.config.memory_fraction is not None]
    taken, who = sum(fixed), ", ".join(rank.name for rank in ranks)
    if taken > 1:
        raise ConfigError(f"{instance.key}.memory_fraction: {who} ask for {taken:g} of {name} together")
    own = instance.config.memory_fraction
    if own is not None:
        return own
    left = (topology.cache.memory_fraction or GPU_FRACTION) - taken
    if left <= 0:
        raise ConfigError(
            f"{instance.key}.memory_fraction: the ranks on {name} ({who}) have {taken:g} of it, which leaves nothing "
            "of cache.memory_fraction: set memory_fraction of this instance too, or lower that of the others"
        )
    return left / (len(ranks) - len(fixed))


def reserve_bytes(
    spec: ModelSpec,
    itemsize: int,
    max_rows: int,
    num_slots: int,
    max_model_len: int,
    tp_size: int = 1,
    num_sharing: int = 1,
) -> int:
    """Return the most bytes that steps need besides weights and pages: activations of `max_rows` rows, float32 logits
    of all slots in a recorded step and in a sampler that sorts them, the state of each slot, and what is widened of a
    weight in 8 or 4 bits. `num_sharing`: members of a group whose rows pass the experts of each rank."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim // tp_size
    width = 4 * spec.hidden_size + 2 * heads + 3 * spec.intermediate_size // tp_size
    width += EXCHANGED_COPIES * (num_sharing - 1) * spec.hidden_size
    logits = num_slots * spec.vocab_size * (4 * 4 + 2 * 8)
    counts = spec.vocab_size * 4
    edits = (MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + len(spec.eos_token_ids) + MAX_ALLOWED_TOKEN_IDS) * EDIT_BYTES
    words = MAX_BAD_WORDS * BAD_WORD_BYTES
    slots = num_slots * (max_model_len * SLOT_TOKEN_BYTES + counts + edits + words)
    widened = WIDE_NUMBERS * itemsize if spec.quantization is not None else 0
    return CONTEXT_BYTES + widened + 2 * max_rows * width * itemsize + logits + slots


def device_pages(
    share: float,
    memory: DeviceMemory,
    reserve: int,
    aux_bytes: int,
    bytes_per_page: int,
    max_pages_useful: int,
    transfer_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    """Return the pages of one rank on a GPU. Raises ConfigError if its share holds no page or is not free.

    `transfer_bytes`, `state_bytes`: memory for transfers and of the state rows, in the same allocation as pages and aux
    rows."""
    own = int(share * memory.total_bytes)
    rest = own - memory.own_bytes - reserve - aux_bytes - transfer_bytes - state_bytes
    pages = min(rest // bytes_per_page, max_pages_useful)
    parts = (
        f"{share:.3g} of the GPU's {memory.total_bytes / GIB:.1f} GiB are {own / GIB:.1f} GiB: "
        f"{memory.own_bytes / GIB:.1f} for weights, {reserve / GIB:.1f} for steps, {aux_bytes / GIB:.1f} for aux rows"
        + (f", {transfer_bytes / GIB:.1f} for transfers" if transfer_bytes else "")
        + (f", {state_bytes / GIB:.1f} for recurrent state" if state_bytes else "")
    )
    if pages < 1:
        raise ConfigError(
            f"memory_fraction: {parts}; the rest holds no page of {bytes_per_page / 1024:.0f} KiB: raise the fraction, "
            "use fewer scheduler.max_running_requests or more GPUs"
        )
    # The unused part of the reserve must be free as well.
    needed = pages * bytes_per_page + aux_bytes + transfer_bytes + state_bytes
    if needed > memory.free_bytes:
        raise ConfigError(
            f"memory_fraction: {parts}, {pages * bytes_per_page / GIB:.1f} for pages, but only "
            f"{memory.free_bytes / GIB:.1f} GiB are free: other processes use this GPU; lower the fraction"
        )
    return pages


def plan_pool(
    topology: Topology,
    instance: Instance,
    tp_rank: int,
    spec: ModelSpec,
    layout: KVLayout,
    model_dtype: str,
    memory: HostMemory | DeviceMemory | None,
    longest_recorded: int,
    images: ImageMemory = ImageMemory(),
) -> PoolPlan:
    """Return what the pool of a rank gets. `memory`: what its weights have left; None if the topology says how many
    pages there are. `longest_recorded`: most tokens of a recorded step. `images`: what images need; on a CPU their
    features come out of the share of pages."""
    cache, role, num_slots = topology.cache, instance.role, topology.scheduler.max_running_requests
    num_aux_slots = num_aux_rows(cache.num_aux_slots, num_slots, role) if tp_rank == MAIN_RANK else 0
    transfer_bytes = pool_bytes_of(topology.dp_config.router, role, instance.config)
    row_bytes, page_bytes = StateRow.of(layout).row_bytes, layout.bytes_per_page
    if memory is None:
        num_pages = num_pages_asked(topology, instance)
        assert num_pages is not None, "the memory is known if the number of pages is not"
        num_states = num_state_rows(cache, role, num_slots, row_bytes)
        return PoolPlan(num_pages, num_states, num_aux_slots, transfer_bytes, images)
    useful = num_slots * 2 * -(-spec.max_model_len // layout.page_size)
    if isinstance(memory, HostMemory):
        num_here = sum(member.config.tp_size for member in instances_on(topology, instance.config.host))
        pool_bytes = cpu_pool_bytes(cache, memory.free_bytes, num_here)
        num_states = num_state_rows(cache, role, num_slots, row_bytes, pool_bytes)
        other_bytes = num_states * row_bytes + images.region_bytes
        num_pages = num_pages_for(cache, page_bytes, memory.free_bytes, num_here, useful, other_bytes)
        return PoolPlan(num_pages, num_states, num_aux_slots, transfer_bytes, images)
    rows = max(topology.scheduler.max_batched_tokens, longest_recorded) + num_slots
    # The name that other instances of the host have for this rank's device; this process may count from 0.
    device = find_instance(topology, role, instance.engine_rank).config.devices[tp_rank]
    share = share_of_device(topology, instance, device)
    tp_size = instance.config.tp_size
    num_sharing = instance.config.dp_size if instance.config.experts == "spread" else 1
    reserve = reserve_bytes(spec, ITEM_BYTES[model_dtype], rows, num_slots, spec.max_model_len, tp_size, num_sharing)
    reserve += images.step_bytes + images.region_bytes
    pool_bytes = int(share * memory.total_bytes) - memory.own_bytes - reserve
    num_states = num_state_rows(cache, role, num_slots, row_bytes, pool_bytes)
    aux_bytes, state_bytes = num_aux_slots * aux_row_bytes(layout.aux_numbers), num_states * row_bytes
    num_pages = device_pages(share, memory, reserve, aux_bytes, page_bytes, useful, transfer_bytes, state_bytes)
    return PoolPlan(num_pages, num_states, num_aux_slots, transfer_bytes, images)


def _device_name(device: str) -> str:
    return "cuda:0" if device == "cuda" else device
