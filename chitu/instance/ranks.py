"""The ranks of a tensor-parallel instance as processes: how they exchange addresses, and the life of a follower.

Every rank calls `exchange_hellos` once its memory is registered with its transports, before the first step. The main
rank then continues in `scheduler.py`; every other rank stays in `follow` until its end. A follower opens no port: it
takes orders from its main rank alone.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial

import msgspec

from chitu.config.schema import PDDisaggregationConfig, Topology
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance
from chitu.engine.build import BuildProgress, RankEngine, build_rank
from chitu.engine.process_watch import Lifeline, explaining
from chitu.engine.rank_groups import RankGroup
from chitu.engine.tp_executor import run_follower
from chitu.errors import ChituError
from chitu.instance.neighbours import pieces_of
from chitu.known_types import known
from chitu.kv_cache.checksum import optional_page_sums_of, page_sums_of
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.state_sums import state_seals_of
from chitu.kv_cache.tiers.page_copies import host_memory, page_copies_of
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.ranks import ShardFollower, TierMemory
from chitu.kv_transfer.transports.local import register_memory
from chitu.kv_transfer.transports.transport import Transport
from chitu.net.threads import ServiceThread
from chitu.protocol import RankMemory
from chitu.types import Role

logger = logging.getLogger(__name__)


class RankHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank sends to all other ranks at the start."""

    pid: int
    memory: RankMemory | None = None
    """Registered memory of a follower of P or D; P's ranks write to that of D's."""
    features: RankMemory | None = None
    """Registered feature region of a follower whose model sees images; E writes to it."""
    lane_base: str = ""
    """Base address of the lanes on which followers take orders (`FanOut`); set by main ranks of P, of D, and with
    tiers."""
    num_lanes: int = 0
    tier_file: int = -1
    """File descriptor of the tiers' memory in the main rank's process; set by a main rank with tiers."""
    lifelines: tuple[int, ...] = ()
    """Descriptors in the main rank's process, one for each follower (`Lifeline`); set by the main rank."""


def exchange_hellos(group: RankGroup, mine: RankHello) -> list[RankHello]:
    """Exchange greetings; return those of all ranks, by rank. A collective operation."""
    return [msgspec.msgpack.decode(each, type=known(RankHello)) for each in group.collect(msgspec.msgpack.encode(mine))]


OpenTransports = Callable[[PDDisaggregationConfig, str, str], list[Transport]]


class _Silent:
    """Build progress of a follower, which is not reported: the main rank's stands for all."""

    def state(self, state: str) -> None: ...

    def loading(self, done: int, total: int) -> None: ...


def follow(topology: Topology, instance: Instance, tp_rank: int, open_transports: OpenTransports) -> int:
    """Run a follower from start to end; return the exit code."""
    silent: BuildProgress = _Silent()
    engine = build_rank(topology, instance, tp_rank, silent, pieces_of(topology, instance))
    assert engine.group is not None
    transports: list[Transport] = []
    memory: RankMemory | None = None
    config, pd = instance.config, topology.dp_config.router.pd_disaggregation
    opened = partial(open_transports, pd, config.host, config.devices[tp_rank])
    if instance.role is not Role.UNIFIED:
        transports = opened()
        memory = rank_memory(engine.pool, tp_rank, register_memory(engine.pool, transports))
    greetings = exchange_hellos(engine.group, RankHello(os.getpid(), memory, _features(engine, tp_rank, opened)))
    lifeline = Lifeline(greetings[MAIN_RANK].pid, greetings[MAIN_RANK].lifelines[tp_rank - 1])
    # The main rank drains before it ends and needs its followers for that. If it dies, the kernel ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = _start_writer(topology, instance.role, engine, tp_rank, transports, greetings[MAIN_RANK])
    logger.info("follows rank 0 (pid %d)", greetings[MAIN_RANK].pid)
    with explaining():
        run_follower(engine.runner, engine.group, lifeline, engine.weights)
    if writer is not None:
        writer.close()
    # Transports and pool end with the process, right now: closing a Mooncake engine would take another second.
    return 0


def _features(engine: RankEngine, tp_rank: int, opened: Callable[[], list[Transport]]) -> RankMemory | None:
    """Return the record of this rank's feature region, registered with transports of its own; None if it has none, or
    if no transport can use it: the instance then takes no features from E."""
    features = engine.features
    if features is None:
        return None
    try:
        return rank_memory(features, tp_rank, register_memory(features, opened()))
    except ChituError as error:
        logger.warning("features of images are computed here, not by E: %s", error.message)
        return None


def _start_writer(
    topology: Topology, role: Role, engine: RankEngine, tp_rank: int, transports: list[Transport], main: RankHello
) -> ShardFollower | None:
    """Start the threads that, on orders of the main rank, write this rank's shard (P) and sum or copy its pages."""
    if not main.num_lanes:
        return None
    pool = engine.pool
    verify_kv = topology.dp_config.router.pd_disaggregation.verify_kv
    counts_copies = role is not Role.PREFILL
    sums = (optional_page_sums_of if verify_kv == "off" else page_sums_of)(pool, tp_rank, counts_copies)
    tiers = _tier_memory(engine.pool, tp_rank, main) if main.tier_file >= 0 else None
    lanes = main.lane_base, main.num_lanes
    seals = state_seals_of(pool, tp_rank, counts_copies)
    features = engine.features
    of_features = None if features is None else optional_page_sums_of(features, tp_rank)
    writer = ShardFollower(pool.layout, tp_rank, pool, transports, *lanes, sums, tiers, seals, of_features)
    writer.start(ServiceThread)
    return writer


def _tier_memory(pool: KVPool, tp_rank: int, main: RankHello) -> TierMemory:
    with open(f"/proc/{main.pid}/fd/{main.tier_file}", "r+b") as file:
        memory = host_memory(os.fstat(file.fileno()).st_size, file.fileno())
    return TierMemory(memory, page_copies_of(pool, str(pool.device), memory, tp_rank))
