"""What an E computes with: the vision tower alone, and a region for its features. Built once by the main thread, used
by the step thread. Its weights change as those of a rank with the whole model (`engine/weights.py`)."""

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
from chitu.engine.sleep import ON_GPU
from chitu.engine.weights import RankWeights, WeightsSource
from chitu.errors import ConfigError
from chitu.kv_cache.feature_pool import FeaturePool, feature_layout
from chitu.kv_cache.pool import TORCH_DTYPES
from chitu.models.config import ModelSpec, model_hash, read_model_spec
from chitu.models.feature_mark import feature_mark
from chitu.models.generic.vision import Vision
from chitu.models.tensors import copy_numbers
from chitu.models.weights import OpenPieces, Pieces, WeightSource, opened_pieces
from chitu.net.control_groups import usable_cores
from chitu.ops.image_rows import ImageTable
from chitu.types import Ready

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoneTower:
    """The vision tower of a model without the rest of it."""

    vision: Vision
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    """Of the tower (`models/tensors.py`)."""


@dataclass(slots=True)
class TowerEncoder:
    """Implements `FeatureMaker`, and `Changeable`."""

    model: LoneTower
    pool: FeaturePool
    table: ImageTable
    max_model_len: int
    threads: int
    mark: bytes
    weights: RankWeights | None = None
    """Changes the weights of the tower while it serves; set once."""

    @property
    def tower(self) -> Vision:
        return self.model.vision

    @torch.inference_mode()
    def change_model(self, model: LoneTower) -> None:
        """Compute with the numbers of another tower from now on. Step thread, between two calls of `encode`."""
        copy_numbers(self.model, model)
        self.mark = feature_mark(self.model.tensors)

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
    def name_row(self, slot: int, key: bytes, mark: bytes) -> None:
        self.pool.name_row(slot, key, mark)


def build_encoder(
    topology: Topology, instance: Instance, progress: BuildProgress, open_pieces: OpenPieces | None = None
) -> TowerEncoder:
    """Read the tower of `model.path` and allocate the rows. `open_pieces` as of `build_rank`. Raises ConfigError
    (UnsupportedModel) if the model has none that can be used."""
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
    found = model_hash(path, spec.code)
    with opened_pieces(open_pieces, path, found) as pieces:
        model = load_tower(path, spec, TORCH_DTYPES[dtype], device, progress.loading, pieces)
    num_rows, shape = num_image_rows(topology.cache, spec), model.vision.shape
    pool = FeaturePool(feature_layout(found, shape.width, dtype), num_rows, str(device))
    table = ImageTable(
        shape, num_rows, TORCH_DTYPES[dtype], device, lambda values: upload_tensor(values, device), pool.features
    )
    logger.info("%d rows for features of images, %d bytes each", num_rows, pool.page_bytes[0])
    encoder = TowerEncoder(model, pool, table, spec.max_model_len, threads, feature_mark(model.tensors))

    def load_into_host_memory(folder: str, found: str) -> LoneTower:
        with opened_pieces(open_pieces, folder, found) as pieces:
            return load_tower(folder, spec, TORCH_DTYPES[dtype], torch.device("cpu"), lambda done, total: None, pieces)

    source = WeightsSource(path, spec, load_into_host_memory)
    encoder.weights = RankWeights(source, encoder, pools=(pool,))
    encoder.weights.no_sleep = "" if device.type == "cpu" else ON_GPU
    return encoder


def load_tower(
    path: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, int], None],
    pieces: Pieces | None = None,
) -> LoneTower:
    """Read the tower of a folder whose model is of this kind. `report`: gets how many bytes are read, and of how
    many. `pieces`: asked for bytes before the files."""
    from chitu.models.generic.model import build_tower  # transformers' modules: seconds and memory

    source = WeightSource(path, dtype, device, report, spec.quantization, prefix=spec.tensor_prefix, pieces=pieces)
    with torch.inference_mode(), source as opened:
        tower = build_tower(path, spec, dtype, device, opened)
    return LoneTower(tower, dtype, tower.tensors())
