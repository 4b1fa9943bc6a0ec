"""1P1D of a large model on one card, with pools that the memory budget sizes: whether it starts, and what is left free.

The checkpoint is a sparse file of zeros with the names and shapes of a real one, so it needs no disk and no time.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.models.checkpoint import tensor_shapes
from chitu.models.config import read_model_spec
from chitu.models.families import traits_of
from chitu.tools.bench.gpu.card import Card, Row
from chitu.tools.bench.gpu.served import PROMPT_IDS, topology_overrides
from chitu.tools.bench.gpu.shapes import shape_of, write_shape
from chitu.tools.bench.token_times import token_times_s

NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
REQUESTS = 8


def rows(card: Card, folder: Path, name: str) -> Iterator[Row]:
    """Yield the time until the cluster is ready, and the free memory before and after requests."""
    write_zeros(card, folder, name)
    overrides = [
        each
        for each in topology_overrides(card, folder, "pd_disagg_1p1d_local.yaml")
        if not each.startswith("cache.num_pages")
    ]
    begin_s = time.monotonic()
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", overrides)) as cluster:
        cluster.wait_ready(300)
        yield Row(f"{name}, 1P1D without num_pages: ready", time.monotonic() - begin_s, "s")
        yield _free(card, f"{name}, 1P1D without num_pages: free, ready")
        rng = random.Random(5)
        for _ in range(REQUESTS):
            token_times_s(cluster.url, [rng.randrange(*PROMPT_IDS) for _ in range(card.sizes.long_prompt)], 4)
        yield _free(card, f"{name}, 1P1D without num_pages: free, after {REQUESTS} prompts of {card.sizes.long_prompt}")


def write_zeros(card: Card, folder: Path, name: str) -> None:
    family, shape = shape_of(card, name)
    folder.mkdir(exist_ok=True)
    write_shape(folder, family, shape)
    spec = read_model_spec(folder, code="own")
    header, end = {}, 0
    for tensor, sizes in tensor_shapes(spec, traits_of(spec)):
        begin, end = end, end + math.prod(sizes) * card.dtype.itemsize
        header[tensor] = {"dtype": NAMES[shape.dtype], "shape": sizes, "data_offsets": (begin, end)}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


def _free(card: Card, what: str) -> Row:
    """Return the card's free memory, and its share of all; on a CPU nothing."""
    if not card.is_gpu:
        return Row(what, 0.0, "GiB")
    free, total = torch.cuda.mem_get_info(card.device)
    return Row(what, free / (1 << 30), "GiB", free / total, "all")
