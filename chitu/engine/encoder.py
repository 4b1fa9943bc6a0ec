"""What an E computes with: the vision tower alone, and a region for its features. Built once by the main thread, used
by the step thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

from chitu.config.schema import Topology
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance, threads_of
from chitu.engine.batch import upload_tensor
from chitu.engine.build import BuildProgress, resolve_dtype
from chitu.engine.executor import EncodeImage
from chitu.engine.memory_budget import num_image_rows
from chitu.errors import ConfigError
from chitu.kv_cache.feature_pool import FeaturePool, feature_layout
from chitu.kv_cache.pool import TORCH_DTYPES
from chitu.models.config import model_hash, read_model_spec
from chitu.models.generic.vision import Vision
from chitu.models.weights import WeightSource
from chitu.net.control_groups import usable_cores
from chitu.ops.image_rows import ImageTable
from chitu.types import Ready

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TowerEncoder:
    """Implements `FeatureMaker`."""

    tower: Vision
    pool: FeaturePool
    table: ImageTable
    max_model_len: int
    threads: int

    def prepare_thread(self) -> None:
        """Set up the math library, whose settings are per thread. Call it first on the step thread."""
        torch.set_num_threads(self.threads)

    def report_blocks(self, report: Callable[[], None]) -> None:
        """Call `report` before each block of the tower is computed."""
        self.tower.report_blocks(report)

    @torch.inference_mode()
    def encode(self, images: Sequence[EncodeImage]) -> Ready | None:
        counts = [len(self.table.numbers(image.rows)) for image in images]
        device = self.pool.device
        features = self.tower.encode([load_file(image.patches) for image in images], counts, device)
        self.table.write(zip((image.rows for image in images), features, strict=True))
        if device.type != "cuda":
            return None
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return ready

    @torch.inference_mode()
    def name_row(self, slot: int, key: bytes) -> None:
        self.pool.name_row(slot, key)


def build_encoder(topology: Topology, instance: Instance, progress: BuildProgress) -> TowerEncoder:
    """Read the tower of `model.path` and allocate the rows. Raises ConfigError (UnsupportedModel) if the model has
    none that can be used."""
    from chitu.models.generic.model import build_tower  # transformers' modules: seconds and memory

    threads = threads_of(topology, instance, usable_cores())
    torch.set_num_threads(threads)
    device = torch.device(instance.config.devices[MAIN_RANK])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    path = topology.model.path
    spec = read_model_spec(path, topology.model.max_model_len, topology.model.code)
    if not spec.is_text_part or spec.code != "transformers":
        raise ConfigError(f"{instance.key}: {spec.architecture} has no vision tower that an E could serve")
    dtype = resolve_dtype(topology.model.dtype, spec, device)
    progress.state("loading")
    source = WeightSource(
        path, TORCH_DTYPES[dtype], device, progress.loading, spec.quantization, prefix=spec.tensor_prefix
    )
    with torch.inference_mode(), source as opened:
        tower = build_tower(path, spec, TORCH_DTYPES[dtype], device, opened)
    num_rows, shape = num_image_rows(topology.cache, spec), tower.shape
    pool = FeaturePool(feature_layout(model_hash(path, spec.code), shape.width, dtype), num_rows, str(device))
    table = ImageTable(
        shape, num_rows, TORCH_DTYPES[dtype], device, lambda values: upload_tensor(values, device), pool.features
    )
    logger.info("%d rows for features of images, %d bytes each", num_rows, pool.page_bytes[0])
    return TowerEncoder(tower, pool, table, spec.max_model_len, threads)
