"""Process entry of a P, D or unified instance (S3): `torchrun ... -m chitu.serve.scheduler --role decode --rank 0`.

Reads the topology, binds the ports, loads the model, warms it up, then hands everything to `PDSchedulerService`. Also
works by hand, without torchrun. Configuration errors are one sentence and exit code 2, before any model loads.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from chitu.clock import RealClock
from chitu.config.load import load_topology, pd_master_addr, router_host, torchrun_rank
from chitu.config.schema import Topology
from chitu.config.topology import (
    Instance,
    check,
    find_instance,
    instances_on,
    is_loopback,
    threads_of,
    warn_of_faults,
)
from chitu.errors import ChituError, ConfigError
from chitu.kv_transfer.bootstrap import BootstrapClient
from chitu.kv_transfer.kv_manager import KVManager, KVManagerConfig
from chitu.kv_transfer.metadata_buffers import MetadataBuffers
from chitu.kv_transfer.select import open_transports
from chitu.launch.process import die_with_torchrun
from chitu.launch.progress import ProgressWriter
from chitu.log import setup_logging
from chitu.messages import KVLayout
from chitu.net.threads import Waker
from chitu.pd_comm import CommLoop, RouterAddress
from chitu.pd_service import EngineParts, Identity, PDSchedulerService
from chitu.types import Role, instance_name, new_incarnation

if TYPE_CHECKING:
    from chitu.kv_cache.pool import KVPool

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    role = Role(arguments.role)
    name = instance_name(role, arguments.rank)
    try:
        topology = load_topology(arguments.config, arguments.overrides)
        check(topology, pd_master_addr())
        instance = find_instance(topology, role, arguments.rank)
        setup_logging(name, topology.log.level)
        warn_of_faults(topology)
        return _serve(topology, instance)
    except ConfigError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        return 2
    except ChituError as error:
        print(f"{name}: {error.code}: {error.message}", file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chitu.serve.scheduler", description=__doc__)
    parser.add_argument("--config", default=None, help="topology YAML, or the name of a packaged one")
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument("--rank", type=int, required=True, help="index of the instance in its list")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="dotted overrides of the topology")
    return parser.parse_args(argv)


def _serve(topology: Topology, instance: Instance) -> int:
    if torchrun_rank().rank > 0:
        raise ConfigError("tensor parallelism is not there yet: start one rank an instance")
    if instance.role is not Role.UNIFIED and instance.config.devices[0] != "cpu":
        raise ConfigError(
            f"{instance.key}.devices: {instance.config.devices[0]}: KV transfer from GPU memory is not there yet; "
            "use cpu, or a unified instance"
        )
    progress = ProgressWriter()
    identity = Identity(instance.role, instance.engine_rank, new_incarnation(), instance.config)
    router = topology.dp_config.router
    host = router_host(topology)
    base_port = topology.dp_config.scheduler_base_port
    port = instance.config.port if base_port is None else base_port
    comm = CommLoop(
        instance.role,
        "127.0.0.1" if is_loopback(instance.config.host) else "0.0.0.0",  # several hosts: see docs/operations.md
        port,
        RouterAddress(
            host,
            router.stats_port,
            router.pd_disaggregation.coordination_port,
            router.pd_disaggregation.metadata_sync_port,
        ),
        RealClock(),
    )
    engine = build_engine(topology, instance, identity, comm, progress)
    progress.state("ready")
    service = PDSchedulerService(topology, identity, host, comm, engine)
    _stop_on_signals(service.stop)
    logger.info("%s serves on port %d", identity.name, comm.port)
    return service.run()


def _stop_on_signals(stop: Callable[[], None]) -> None:
    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def build_engine(
    topology: Topology, instance: Instance, identity: Identity, comm: CommLoop, progress: ProgressWriter
) -> EngineParts:
    """Load the model and everything that touches its memory. torch is imported here, after the configuration passed."""
    import torch

    from chitu.cache_manager import PagedKVCacheManager
    from chitu.engine.loader import load_model, resolve_dtype
    from chitu.engine.memory_budget import available_cpu_bytes, num_pages_for
    from chitu.engine.model_runner import ModelRunner
    from chitu.engine.sampler import Sampler
    from chitu.kv_cache.pool import KVPool, page_bytes
    from chitu.models.config import model_hash, read_model_spec

    threads = threads_of(topology, instance, os.cpu_count() or 1)
    torch.set_num_threads(threads)
    device = torch.device(instance.config.devices[0])
    role = instance.role
    path = topology.model.path
    spec = read_model_spec(path, topology.model.max_model_len)
    max_model_len = min(topology.model.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    progress.state("loading")
    model = load_model(path, topology.model.dtype, str(device), progress.loading, max_model_len)
    layout = KVLayout(
        model_hash=model_hash(path),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=topology.cache.page_size,
        dtype=resolve_dtype(topology.model.dtype, spec, device),
        vocab_size=spec.vocab_size,
        tp_size=instance.config.tp_size,
    )
    num_slots = topology.scheduler.max_running_requests
    bytes_per_page = 2 * spec.num_layers * page_bytes(layout)
    free_bytes = available_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    num_pages = instance.config.num_pages or num_pages_for(
        topology.cache,
        bytes_per_page,
        free_bytes,
        len(instances_on(topology, instance.config.host)),
        num_slots * 2 * -(-max_model_len // layout.page_size),
    )
    num_aux_slots = 0 if role is Role.UNIFIED else topology.cache.num_aux_slots or 2 * num_slots
    pool = KVPool(layout, num_pages, num_aux_slots, str(device))
    logger.info("%d pages of %d bytes, %d aux slots, %d threads", num_pages, bytes_per_page, num_aux_slots, threads)
    sampler = None if role is Role.PREFILL else Sampler(num_slots, spec.vocab_size, device, spec.eos_token_ids)
    # What can never fit the pool is refused at the router, which takes the smallest limit of all instances.
    longest = min(max_model_len, num_pages * layout.page_size)
    runner = ModelRunner(spec, model, pool, num_slots, longest, sampler)
    progress.state("warmup")
    runner.warmup()
    wake = Waker()
    cache = PagedKVCacheManager(num_pages, layout.page_size, pool)
    aux, kv = (None, None) if role is Role.UNIFIED else _build_transfer(topology, identity, comm, pool, wake)

    def close() -> None:
        runner.close()
        pool.close()

    return EngineParts(
        wake=wake,
        executor=runner,
        layout=layout,
        cache=cache,
        aux=aux,
        kv=kv,
        prepare_step_thread=lambda: torch.set_num_threads(threads),
        close=close,
    )


def _build_transfer(
    topology: Topology, identity: Identity, comm: CommLoop, pool: KVPool, wake: Waker
) -> tuple[MetadataBuffers, KVManager]:
    """Aux slots and the transfer layer over the pool; from here on the pool never moves."""
    pd = topology.dp_config.router.pd_disaggregation
    aux = MetadataBuffers(pool.aux.numpy(), 4 * pool.layout.vocab_size)
    config = KVManagerConfig(
        engine_rank=identity.engine_rank,
        incarnation=identity.incarnation,
        host=identity.instance.host,
        control_port=comm.control_port,
        layout=pool.layout,
        deadlines=pd.deadlines,
        transfer_threads=pd.transfer_threads,
    )
    kv = KVManager(
        identity.role,
        config,
        memory=pool,
        aux=aux,
        transports=open_transports(pd, identity.instance.host),
        link=comm.send_peer,
        wake=wake.wake,
        clock=RealClock(),
        bootstrap=BootstrapClient(router_host(topology), pd.bootstrap_port),
    )
    return aux, kv


if __name__ == "__main__":
    die_with_torchrun()
    sys.exit(main())
