"""The process of an E, which `serve/scheduler.py` starts in the place of a P's or D's for `--role encode`."""

from __future__ import annotations

import logging
import os

from chitu.clock import RealClock
from chitu.config.schema import ModelConfig, Topology
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance
from chitu.engine.weights_loader import NoLoader
from chitu.images.forms import image_model_of
from chitu.instance.comm import CommLoop
from chitu.instance.encode_service import EncodeService
from chitu.instance.encoding import EncodeScheduler
from chitu.instance.image_source import NoImages
from chitu.instance.image_thread import ImageThread
from chitu.instance.images import FeatureStore
from chitu.instance.weights import WeightsKeeper
from chitu.kv_transfer.both_sides import KVManagerConfig, TransferContext
from chitu.kv_transfer.kv_manager import manager_of_encode
from chitu.kv_transfer.pulling import feature_config
from chitu.net.process_deaths import pid_namespace, start_ticks
from chitu.net.threads import Waker
from chitu.process.progress import ProgressWriter
from chitu.protocol import InstanceInfo
from chitu.serve.compositions import feature_memory
from chitu.serve.factories import Factories
from chitu.types import Incarnation

logger = logging.getLogger(__name__)


def may_see_images(model: ModelConfig) -> bool:
    """Return whether prompts of the model may have images, as far as its folder tells."""
    return model.images == "auto" and not isinstance(image_model_of(model.path), str)


def image_thread(topology: Topology, comm: CommLoop, waker: Waker) -> ImageThread | None:
    """Return what gets images for a model with vision; None if its prompts cannot have any, so that none will come."""
    model, router = image_model_of(topology.model.path), topology.dp_config.router
    if isinstance(model, str):
        logger.warning("requests have no images: %s", model)
        return None
    addresses = [each.address for each in comm.routers]
    retry_s = router.pd_disaggregation.deadlines.retry_interval_s
    return ImageThread(
        comm.context,
        addresses,
        model,
        router.images,
        retry_s,
        waker.wake,
        version_of=lambda router: comm.contacts.routers[router].protocol,
    )


def build_encode_service(
    topology: Topology,
    instance: Instance,
    incarnation: Incarnation,
    yields: bool,
    comm: CommLoop,
    progress: ProgressWriter,
    factories: Factories,
) -> EncodeService:
    """Load the tower and build everything that accesses its memory."""
    encoder = factories.build_encoder(topology, instance, progress)
    pool, config, pd = encoder.pool, instance.config, topology.dp_config.router.pd_disaggregation
    waker = Waker()
    base = KVManagerConfig(
        engine_rank=instance.engine_rank,
        incarnation=incarnation,
        host=config.host,
        control_port=comm.control_port,
        layout=pool.layout,
        deadlines=pd.deadlines,
        transfer_threads=pd.transfer_threads,
    )
    memory = feature_memory(pool, factories, pd, config)
    context = TransferContext(comm.send_peer, waker.wake, RealClock(), version_of=comm.version_of)
    transfer = manager_of_encode(feature_config(base, pool.layout, comm.control_port), memory, context)
    images = image_thread(topology, comm, waker)
    if images is not None:
        images.load()  # a P waits a few seconds for features, and this takes longer
    scheduler = EncodeScheduler(
        transfer.side,
        images or NoImages(),
        encoder,
        FeatureStore(pool.num_pages),
        memory.aux,
        topology.scheduler.max_batched_tokens,
        waker,
        WeightsKeeper(encoder.weights or NoLoader(), RealClock(), feature_mark=encoder.mark),
    )
    if encoder.weights is not None:
        encoder.weights.wake = waker.wake
    encoder.report_blocks(scheduler.note_block)
    info = InstanceInfo(
        role=instance.role,
        engine_rank=instance.engine_rank,
        incarnation=incarnation,
        host=config.host,
        port=comm.port,
        control_port=0,
        layout=pool.layout,
        max_model_len=encoder.max_model_len,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        start_ticks=start_ticks(os.getpid()),
        device=config.devices[MAIN_RANK].partition(":")[0],
        rack=config.rack,
        yields=yields,
    )
    return EncodeService(pd.deadlines, info, comm, transfer, scheduler, waker, encoder.prepare_thread, images)
