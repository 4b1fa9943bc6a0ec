"""Process entry of an instance: `torchrun ... -m chitu.serve.scheduler --role decode --rank 0`.

Reads the topology, binds the ports, loads the model, warms it up, then hands everything to `PDSchedulerService`. Also
runs without torchrun. Ranks 1, 2, ... of a tensor-parallel instance run `ranks.py`. A configuration error prints one
sentence and exits with code 2 before any model loads.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import zmq

from chitu import __version__
from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.cluster_key import cluster_key_of
from chitu.config.devices import is_auto, max_draft_tokens, on_visible_devices, overlaps_steps
from chitu.config.load import load_topology, pd_master_addr, reached_hosts, shown_devices, torchrun_rank
from chitu.config.schema import Topology
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import (
    Instance,
    find_instance,
    has_lasting_tiers,
    has_tiers,
    inside_address,
    revision_of,
    routers,
)
from chitu.config.topology_checks import check, warn_without_key
from chitu.engine.executor import Executor
from chitu.engine.memory_budget import available_cpu_bytes
from chitu.engine.weights_loader import NoLoader, WeightsLoader
from chitu.errors import ChituError, ConfigError
from chitu.instance.comm import CommLoop, RouterAddress
from chitu.instance.core import LoadedEngine, SchedulerSettings
from chitu.instance.neighbours import share_of
from chitu.instance.profiling import Profiler, Profiling
from chitu.kv_cache.kv_events import KVEventFeed
from chitu.kv_cache.pool import shared_file
from chitu.kv_cache.prefix_index import lasting_fingerprint, layout_fingerprint
from chitu.kv_cache.state_row import StateSlots
from chitu.kv_cache.tiers.prefix_tiers import NoTiers, PrefixTiers, build_tiers, decode_cache
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.ranks import FanOut, TPPageCopies
from chitu.kv_transfer.transports.local import RankPool
from chitu.log import setup_logging
from chitu.net.curve import derive
from chitu.net.interfaces import address_towards
from chitu.net.process_deaths import pid_namespace, start_ticks
from chitu.net.sockets import PushSocket
from chitu.net.threads import Waker, end_process
from chitu.pd_service import PDSchedulerService
from chitu.process.descendants import die_with_torchrun
from chitu.process.placement import place
from chitu.process.progress import DRAINED, TAKEN, ProgressWriter
from chitu.protocol import InstanceInfo, KVLayout
from chitu.serve.compositions import Compositions, roles_of
from chitu.serve.encoder import build_encode_service, image_thread, may_see_images
from chitu.serve.factories import BuiltRank, Factories
from chitu.tracing.tracer import MAX_MESSAGES, Tracer
from chitu.types import Incarnation, Role, instance_name, new_incarnation, place_text

if TYPE_CHECKING:
    from chitu.engine.lockstep import LockstepExecutor
    from chitu.instance.member_group import MemberGroup
    from chitu.instance.ranks import RankHello

logger = logging.getLogger(__name__)

SWITCH_S = 0.0002
"""Switch interval: steps and transfers are launched by two threads, and with Python's 5 ms one of them may starve."""


def main(argv: Sequence[str] | None = None, factories: Factories = Factories()) -> int:
    """Run the instance and return the exit code. `factories`: factories of the engine and transports."""
    arguments = _parse(argv)
    role = Role(arguments.role)
    name = instance_name(role, arguments.rank)
    try:
        topology = _load(arguments.config, arguments.overrides, role, arguments.rank)
        check(topology, pd_master_addr())
        found, tp_rank = _member(topology, role, arguments.rank)
        instance = replace(found, config=on_visible_devices(found.config, shown_devices()))
        name = instance.name
        setup_logging(
            f"{name}.{tp_rank}" if tp_rank else name, topology.log.level, topology.log.modules, topology.log.format
        )
        warn_without_key(topology)
        sys.setswitchinterval(SWITCH_S)
        return _serve(topology, instance, tp_rank, factories, arguments.if_free)
    except ConfigError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        return 2
    except ChituError as error:
        print(f"{name}: {error.code}: {error.message}", file=sys.stderr)
        return 1


def _load(config: str | None, overrides: Sequence[str], role: Role, engine_rank: int) -> Topology:
    """Load the topology. If no launcher has placed devices in it, take the first GPUs that this process sees."""
    topology = load_topology(config, overrides)
    if not is_auto(find_instance(topology, role, engine_rank).config):
        return topology
    return place(config, overrides, lambda topology: [find_instance(topology, role, engine_rank)]).topology


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chitu.serve.scheduler", description=__doc__)
    parser.add_argument("--config", default=None, help="topology YAML, or the name of a packaged one")
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument("--rank", type=int, required=True, help="index of the instance in its list")
    parser.add_argument("--if-free", action="store_true", help="start only if no live process has this rank")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="dotted overrides of the topology")
    return parser.parse_args(argv)


def _member(topology: Topology, role: Role, engine_rank: int) -> tuple[Instance, int]:
    """Return the instance that this process is a rank of, and the TP rank. `engine_rank`: of the instance, or of the
    first one of its group. Raises ConfigError unless torchrun started as many ranks as there are."""
    first, ranks = find_instance(topology, role, engine_rank), torchrun_rank()
    config = first.config
    if ranks.world_size != config.num_devices:
        of_group = f" and dp_size {config.dp_size}" if config.dp_size > 1 else ""
        raise ConfigError(
            f"{first.key}.tp_size is {config.tp_size}{of_group}, but torchrun started {ranks.world_size} ranks: give "
            f"--nproc-per-node={config.members_per_host * config.tp_size}"
        )
    if first.data_rank:
        raise ConfigError(f"{first.name} is member {first.data_rank} of a group: give the --rank of its first member")
    data_rank, tp_rank = divmod(ranks.rank, config.tp_size)
    return find_instance(topology, role, engine_rank + data_rank), tp_rank


def _serve(topology: Topology, instance: Instance, tp_rank: int, factories: Factories, yields: bool) -> int:
    if tp_rank != MAIN_RANK:
        from chitu.instance.ranks import follow

        return follow(topology, instance, tp_rank, factories.open_transports)
    progress = ProgressWriter(data_rank=instance.place)
    incarnation = new_incarnation()
    secrets = derive(cluster_key_of(topology))
    try:
        comm = CommLoop(
            inside_address(instance.config.host),  # several hosts: see docs/security.md
            instance.config.port,
            [
                RouterAddress(
                    host,
                    router.stats_port,
                    router.pd_disaggregation.coordination_port,
                    router.pd_disaggregation.metadata_sync_port,
                    router.token_port,
                )
                for host, router in zip(reached_hosts(topology), routers(topology), strict=True)
            ],
            RealClock(),
            secrets,
            takes_features=instance.role is not Role.ENCODE and may_see_images(topology.model),
        )
    except zmq.ZMQError as error:
        raise ConfigError(f"{instance.key}.port: cannot listen on {error}") from error
    build = build_encode_service if instance.role is Role.ENCODE else _build
    service = build(topology, instance, incarnation, yields, comm, progress, factories)
    progress.state("warmup")
    service.warm_up()
    _stop_on_signals(service.stop)
    progress.ready(incarnation)
    logger.info("%s serves on port %d", instance.name, comm.port)
    code = service.run(partial(_tell, progress))
    if service.was_drained:
        progress.state(DRAINED)
    elif service.rank_was_taken:
        progress.state(TAKEN)
    return code


def _tell(progress: ProgressWriter, info: InstanceInfo, is_member: bool) -> None:
    place = place_text(info.role, info.engine_rank) if info.home else ""
    progress.ready(info.incarnation, is_member=is_member, place=place)


def _stop_on_signals(stop: Callable[[], None]) -> None:
    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _build(
    topology: Topology,
    instance: Instance,
    incarnation: Incarnation,
    yields: bool,
    comm: CommLoop,
    progress: ProgressWriter,
    factories: Factories,
) -> PDSchedulerService:
    """Load the model and build everything that accesses its memory. From here on the pool never moves."""
    rank = factories.build_rank(topology, instance, MAIN_RANK, progress)
    if topology.scheduler.speculation == "text" and not rank.runner.info.most_drafts:
        raise ConfigError(
            "scheduler.speculation: text, but this model has recurrent state (or cache.window_state is set), and a "
            "state cannot go back to before a draft; set auto or off"
        )
    waker, pool = Waker(), rank.pool
    cache = PagedKVCacheManager(pool.num_pages, pool.layout.page_size, _fingerprint(topology, instance, rank))
    fan_out = _fan_out(topology, instance, rank) if rank.group is not None else None
    tiers: PrefixTiers | NoTiers = NoTiers()
    tier_file = -1
    if has_tiers(topology, instance):
        tiers, tier_file = _build_tiers(topology, instance, pool, cache, waker, fan_out)
    events = _event_feed(topology, instance, cache)
    if rank.weights is not None:
        rank.weights.fingerprint = partial(_fingerprint_of, topology, instance, pool.layout)
        rank.weights.wake = waker.wake
    executor, loader, greetings = _join_followers(instance, rank, fan_out, tier_file)
    lockstep = _join_lockstep(executor, instance, rank, waker)
    comm.tracer = _tracer(instance, incarnation, comm, pool)
    engine = LoadedEngine(
        lockstep or executor,
        cache,
        MetadataBuffers(pool.aux_rows, 4 * pool.layout.aux_numbers),
        tiers,
        StateSlots(pool.num_state_slots),
        rank.grammars,
        prepare_step_thread=rank.prepare_thread,
        weights=loader,
        feature_mark=rank.features.mark if rank.features is not None else b"",
        lockstep=lockstep,
        lane=rank.lane,
        events=events,
        host_image_rows=_host_image_rows(topology, instance, rank),
        report_blocks=rank.report_blocks,
        profiling=_profiling(topology, rank),
    )
    group = _meet_members(instance, rank, incarnation)
    info = _describe(topology, instance, incarnation, rank, comm.port, greetings, yields)
    if group is not None:
        info = msgspec.structs.replace(info, group=group.place)
    followers = [greeting.memory for greeting in greetings if greeting.memory is not None]
    features = [greeting.features for greeting in greetings if greeting.features is not None]
    compositions = Compositions(topology, instance, rank, comm, engine, waker, fan_out, followers, features, factories)
    settings, begin_end = _settings(topology, instance), group.begin_end if group is not None else None
    images = image_thread(topology, comm, waker) if rank.runner.info.image_rows else None
    share = share_of(topology, instance, comm.context, rank.weights)
    if share is not None:
        info = msgspec.structs.replace(info, weights_port=share.port)
    return PDSchedulerService(settings, info, comm, engine, waker, compositions.build, begin_end, images, share)


def _profiling(topology: Topology, rank: BuiltRank) -> Profiling:
    """Return what records the steps of all ranks; nothing is, without a folder for the files."""
    profiler: Profiler | None = None
    trace = topology.trace
    if trace.profile_dir is not None:
        from chitu.engine.profiler import RankProfiler
        from chitu.engine.tp_executor import TensorParallelProfiler

        profiler = TensorParallelProfiler(rank.group) if rank.group is not None else RankProfiler(MAIN_RANK)
    return Profiling(profiler, trace.profile_dir, trace.profile_mb << 20, RealClock())


def _host_image_rows(topology: Topology, instance: Instance, rank: BuiltRank) -> int:
    """Return how many rows of features are kept in host memory. Each rank has copies of all. Raises ConfigError if
    there is no such memory."""
    asked_bytes, free_bytes = topology.cache.host_image_bytes, available_cpu_bytes()
    if asked_bytes > free_bytes:
        raise ConfigError(f"cache.host_image_bytes is {asked_bytes}, but {free_bytes} bytes of host memory are free")
    if rank.features is None:
        return 0
    return asked_bytes // (rank.features.page_bytes[0] * instance.config.tp_size)


def _join_lockstep(executor: Executor, instance: Instance, rank: BuiltRank, waker: Waker) -> LockstepExecutor | None:
    """Return the executor of a member of a group that shares experts; None for any other instance."""
    if rank.members is None or rank.members.turns is None:
        return None
    from chitu.engine.lockstep import join_lockstep
    from chitu.engine.model_runner import ModelRunner
    from chitu.engine.tp_executor import TensorParallelExecutor

    assert isinstance(rank.runner, ModelRunner) and isinstance(executor, ModelRunner | TensorParallelExecutor)
    hosts = instance.config.hosts
    address = address_towards(hosts[0]) if len(hosts) > 1 else ""
    return join_lockstep(executor, rank.runner.shapes, rank.members.turns, waker.wake, address)


def _meet_members(instance: Instance, rank: BuiltRank, incarnation: Incarnation) -> MemberGroup | None:
    """Return the group of this instance; None if it is alone."""
    if rank.members is None:
        return None
    from chitu.instance.member_group import MemberGroup

    config = instance.config
    return MemberGroup(rank.members, incarnation, config.members_per_host, config.experts == "spread")


def _join_followers(
    instance: Instance, rank: BuiltRank, fan_out: FanOut | None, tier_file: int
) -> tuple[Executor, WeightsLoader, list[RankHello]]:
    """Return what computes with all ranks of the instance and what changes their weights, and the ranks' greetings; if
    it has only one, the rank itself and none."""
    if rank.group is None:
        return rank.runner, rank.weights or NoLoader(), []
    from chitu.engine.model_runner import ModelRunner
    from chitu.engine.process_watch import ProcessWatch, open_lifelines
    from chitu.engine.tp_executor import TensorParallelExecutor, TensorParallelWeights
    from chitu.instance.ranks import RankHello, exchange_hellos

    lanes = (fan_out.base, fan_out.num_lanes) if fan_out is not None else ("", 0)
    lifelines = open_lifelines(instance.config.tp_size - 1)
    greetings = exchange_hellos(rank.group, RankHello(os.getpid(), None, None, *lanes, tier_file, lifelines))
    if fan_out is not None:
        fan_out.wait_connected()
    assert isinstance(rank.runner, ModelRunner)
    watch = ProcessWatch([greeting.pid for greeting in greetings[1:]])
    loader = TensorParallelWeights(rank.weights, rank.group) if rank.weights is not None else NoLoader()
    return TensorParallelExecutor(rank.runner, rank.group, watch), loader, greetings


def _settings(topology: Topology, instance: Instance) -> SchedulerSettings:
    router = topology.dp_config.router
    return SchedulerSettings(
        topology.scheduler,
        router.pd_disaggregation.deadlines,
        instance.name,
        router.request_timeout_s,
        overlaps_steps(topology.scheduler, instance.config),
        math.inf if router.slo.tpot_s is None else router.slo.tpot_s,
        max_draft_tokens(topology.scheduler, instance.config),
    )


def _describe(
    topology: Topology,
    instance: Instance,
    incarnation: Incarnation,
    rank: BuiltRank,
    port: int,
    greetings: Sequence[RankHello],
    yields: bool,
) -> InstanceInfo:
    """Return the record of the process, without what depends on its composition."""
    roles, why_not = roles_of(topology, instance, rank)
    if why_not:
        logger.info("%s cannot change its role to every other one: %s", instance.name, why_not)
    pool, found = rank.pool, rank.runner.info
    return InstanceInfo(
        role=instance.role,
        engine_rank=instance.engine_rank,
        incarnation=incarnation,
        host=instance.config.host,
        port=port,
        control_port=0,
        layout=pool.layout,
        max_model_len=found.max_model_len,
        num_slots=_choices_at_once(found.num_slots, pool.num_state_slots),
        num_pages=pool.num_pages,
        pid=os.getpid(),
        follower_pids=tuple(greeting.pid for greeting in greetings[1:]),
        pid_namespace=pid_namespace(),
        start_ticks=start_ticks(os.getpid()),
        device=_device_kind(instance),
        sees_images=found.image_rows > 0,
        rack=instance.config.rack,
        revision=revision_of(topology, instance.config),
        yields=yields,
        roles=roles,
    )


def _fan_out(topology: Topology, instance: Instance, rank: BuiltRank) -> FanOut | None:
    """Return the main rank's channels to its followers; None if the followers only execute steps."""
    pd, num_followers = topology.dp_config.router.pd_disaggregation, instance.config.tp_size - 1
    if instance.role is not Role.UNIFIED:  # D has lanes for writes, too, which it uses once it has become P
        return FanOut(num_followers, pd.transfer_threads)
    return FanOut(num_followers, 0) if has_tiers(topology, instance) or rank.features is not None else None


def _build_tiers(
    topology: Topology,
    instance: Instance,
    pool: RankPool,
    cache: PagedKVCacheManager,
    wake: Waker,
    fan_out: FanOut | None,
) -> tuple[PrefixTiers, int]:
    """Return the tiers, and the file descriptor of their memory for the other ranks (-1 if there are none)."""
    config = decode_cache(topology.cache) if instance.role is Role.DECODE else topology.cache
    device, name, host = instance.config.devices[MAIN_RANK], instance.name, instance.config.host
    build = partial(build_tiers, config, name, host, pool, device, cache, available_cpu_bytes(), RealClock(), wake.wake)
    if fan_out is None:
        return build(), -1
    file = shared_file("chitu-tiers", config.host_bytes, "cache.host_bytes, for all ranks")
    step_s = topology.dp_config.router.pd_disaggregation.deadlines.step_s
    return build(file, partial(TPPageCopies, fan_out, timeout_s=step_s)), file


def _event_feed(topology: Topology, instance: Instance, cache: PagedKVCacheManager) -> KVEventFeed | None:
    """Return what publishes the instance's KV events, after which `cache` notes them; None if it has no port."""
    config, model, keys = instance.config, topology.model, topology.cache.events
    if not config.kv_events_port:
        return None
    name = model.served_name or Path(model.path).name
    try:
        feed = KVEventFeed(
            inside_address(config.host),
            config.kv_events_port,
            config.kv_events_replay_port,
            topic=keys.topic.format(host=config.host, port=config.port, name=instance.name, model=name),
            page_size=cache.page_size,
            data_rank=instance.data_rank,
            encoding=keys.encoding,
            most_kept=keys.replay_messages,
        )
    except zmq.ZMQError as error:
        raise ConfigError(f"{instance.key}.kv_events_port: cannot listen on {error}") from error
    cache.events = feed.log
    return feed


def _choices_at_once(num_slots: int, num_state_slots: int) -> int:
    """Return for how many choices of a prompt there are slots at once; each has a state row, and the prompt has one."""
    return min(num_slots, max(1, num_state_slots - 1)) if num_state_slots else num_slots


def _device_kind(instance: Instance) -> str:
    return instance.config.devices[MAIN_RANK].partition(":")[0]


def _tracer(instance: Instance, incarnation: Incarnation, comm: CommLoop, pool: RankPool) -> Tracer:
    return Tracer(
        instance.role,
        instance.engine_rank,
        incarnation,
        pool.layout,
        _device_kind(instance),
        lambda: [PushSocket(comm.context, r.address.host, r.address.stats_port, MAX_MESSAGES) for r in comm.routers],
        RealClock(),
    )


def _fingerprint(topology: Topology, instance: Instance, engine: BuiltRank) -> bytes | None:
    """Return the prefix of the keys of cached pages; None if nothing is cached. With recurrent state D caches nothing:
    it computes no prompt, and gets the whole state from P."""
    return _with_digest(topology, instance, engine.pool.layout, engine.weights_digest)


def _fingerprint_of(
    topology: Topology, instance: Instance, layout: KVLayout, path: str, model_hash: str
) -> bytes | None:
    """Return the same for the weights in another folder."""
    from chitu.models.config import weights_digest, weights_stamp

    # The hash covers samples of the weights, so the files' times, too: two steps of a training may differ elsewhere.
    layout = msgspec.structs.replace(layout, model_hash=f"{model_hash} {weights_stamp(path)}")
    return _with_digest(topology, instance, layout, partial(weights_digest, path))


def _with_digest(topology: Topology, instance: Instance, layout: KVLayout, digest: Callable[[], bytes]) -> bytes | None:
    if not topology.cache.prefix_cache or (layout.state and instance.role is Role.DECODE):
        return None
    fingerprint, model = layout_fingerprint(layout), topology.model
    if not (has_tiers(topology, instance) and has_lasting_tiers(topology)):
        return fingerprint
    return lasting_fingerprint(fingerprint, digest(), __version__, (model.dtype, model.max_model_len))


if __name__ == "__main__":
    die_with_torchrun()
    end_process(main())
