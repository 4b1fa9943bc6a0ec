"""The trainer's side of weights that change: makes the tensors of a training reachable for the instances of its host,
which `POST /admin/weights` then has them read (docs/weights.md, "From a trainer's memory").

    publisher = Publisher("/dev/shm/policy", like="/checkpoints/base")
    while training:
        ...
        path = publisher.publish(model.state_dict())
        post("/admin/weights", {"path": path})     # when it has returned, the tensors may be written again

Runs in the trainer's process, and needs nothing but torch, the standard library and three small modules of this
project. It writes no numbers to a disk if the folder is in memory (`/dev/shm`).

Tensors on a GPU stay there: the instances get CUDA's interprocess handles. Tensors in host memory are copied to shared
memory; those that `allocate` made are in it already, and are not.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from chitu.config.model_files import TENSORS_MANIFEST
from chitu.models.dtypes import DTYPES

BLOCK_BYTES = 1 << 20
"""Bytes of a tensor that have a digest."""
DIGEST_DIGITS = 32
ALIGNMENT = 64
"""Bytes between the beginnings of tensors are a multiple of it."""
PREFIX = "chitu-tensors-"
DESCRIPTIONS = ("config.json", "generation_config.json")
NAMES = {dtype: name for name, dtype in DTYPES.items()}
THREADS = 8

Place = dict[str, object]


class GpuMemory(Protocol):
    """What shares memory of GPUs; CPU tests have a stand-in."""

    def has(self, tensor: torch.Tensor) -> bool: ...

    def export(self, tensor: torch.Tensor) -> tuple[Place, int]:
        """Return the place of a tensor for the manifest, and its offset there. All that was launched is over."""
        ...


class CudaMemory:
    """Memory of torch's CUDA allocator. It must come from cudaMalloc: no expandable segments."""

    def __init__(self) -> None:
        self._drivers: dict[int, Any] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def export(self, tensor: torch.Tensor) -> tuple[Place, int]:
        from chitu.ops.cuda_driver import CudaDriver

        index = tensor.device.index or 0
        if index not in self._drivers:
            self._drivers[index] = CudaDriver(index)
        torch.cuda.synchronize(index)
        driver = self._drivers[index]
        with driver.current():
            found = driver.export(tensor.data_ptr())
        place: Place = {"kind": "cuda", "device": driver.uuid, "handle": found.handle.hex(), "nbytes": found.nbytes}
        return place, found.offset


@dataclass(frozen=True, slots=True)
class _SharedFile:
    """A file in the folder, mapped here."""

    path: Path
    address: int
    nbytes: int

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where a tensor is; None if not here."""
        offset = tensor.data_ptr() - self.address
        return offset if offset >= 0 and offset + tensor.nbytes <= self.nbytes else None


class Publisher:
    """The tensors of one model, in one folder. One at a time; one thread."""

    def __init__(self, folder: str | Path, like: str | Path, gpu: GpuMemory | None = None) -> None:
        """Make the folder, with the description of the model that `like` has: a checkpoint that the instances could
        serve. Only this user can read it. Raises OSError."""
        self._folder = Path(folder).absolute()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in DESCRIPTIONS:
            if (Path(like) / name).is_file():
                shutil.copyfile(Path(like) / name, self._folder / name)
        self._gpu = gpu if gpu is not None else CudaMemory()
        self._segments: list[_SharedFile] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: _SharedFile | None = None

    def allocate(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors in shared memory with the dtypes and shapes of these, not filled. What is in them is published
        without a copy. They stay until `close`. Raises OSError if there is too little memory."""
        tensors, segment = self._allocate(like)
        if segment is not None:
            self._segments.append(segment)
        return tensors

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Make these tensors reachable, under the names that the checkpoint has, and return the folder's path. They
        must not be written until the instances have read them: one that is, is found, and the change refused. Raises
        ValueError for a dtype that checkpoints do not have, OSError if there is too little memory."""
        plain = {name: tensor.detach() for name, tensor in tensors.items()}
        if odd := [name for name, tensor in plain.items() if tensor.dtype not in NAMES]:
            raise ValueError(f"tensor {odd[0]!r} has dtype {plain[odd[0]].dtype}, which checkpoints do not have")
        elsewhere = {name: tensor for name, tensor in plain.items() if not self._is_reachable(tensor)}
        self._copy(elsewhere)
        placed = plain | {name: self._copies[name] for name in elsewhere}
        places: list[Place] = []
        described = {name: self._described(tensor, places) for name, tensor in placed.items()}
        for entry, digests in zip(described.values(), _digests(placed.values()), strict=True):
            entry["sha256"] = digests
        self._write({"version": 1, "block_bytes": BLOCK_BYTES, "places": places, "tensors": described})
        return str(self._folder)

    def close(self) -> None:
        """Remove the folder. Instances keep what they have read; one that starts again needs another folder."""
        self._copies, self._copied = {}, None
        self._segments.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- internal

    def _is_reachable(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_contiguous():
            return False
        return self._gpu.has(tensor) or any(each.offset_of(tensor) is not None for each in self._segments)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these to shared memory: to that of the last time, if they are like those of then."""
        if _forms(tensors) != _forms(self._copies):
            self._copies, self._copied = self._allocate(tensors)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor)

    def _allocate(self, like: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], _SharedFile | None]:
        offsets, end = [], 0
        for tensor in like.values():
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if not end:
            return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}, None
        path = self._folder / f"{PREFIX}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, end)  # else too little memory would be a signal, at the first write
            mapping = mmap.mmap(descriptor, end)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        tensors = {}
        for (name, tensor), offset in zip(like.items(), offsets, strict=True):
            part = whole[offset : offset + tensor.numel() * tensor.element_size()]
            tensors[name] = part.view(tensor.dtype).view(tensor.shape)
        return tensors, _SharedFile(path, whole.data_ptr(), end)

    def _described(self, tensor: torch.Tensor, places: list[Place]) -> dict[str, object]:
        place, offset = self._place_of(tensor)
        if place not in places:
            places.append(place)
        shape = list(tensor.shape)
        return {"dtype": NAMES[tensor.dtype], "shape": shape, "place": places.index(place), "offset": offset}

    def _place_of(self, tensor: torch.Tensor) -> tuple[Place, int]:
        if self._gpu.has(tensor):
            return self._gpu.export(tensor)
        segments = [*self._segments, *([self._copied] if self._copied is not None else [])]
        for segment in segments:
            if (offset := segment.offset_of(tensor)) is not None:
                return {"kind": "file", "name": segment.path.name}, offset
        return {"kind": "file", "name": TENSORS_MANIFEST}, 0  # it has no numbers

    def _write(self, manifest: Mapping[str, object]) -> None:
        """Put the manifest in the place of the last one, and remove the memory of what nobody can read any more: also
        that of an earlier trainer, which was killed."""
        path = self._folder / f"{TENSORS_MANIFEST}.{secrets.token_hex(8)}"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        path.replace(self._folder / TENSORS_MANIFEST)
        mine = {each.path.name for each in [*self._segments, *([self._copied] if self._copied is not None else [])]}
        for name in os.listdir(self._folder):
            if name.startswith((PREFIX, f"{TENSORS_MANIFEST}.")) and name not in mine:
                with suppress(OSError):
                    (self._folder / name).unlink()


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _digests(tensors: Iterable[torch.Tensor]) -> list[list[str]]:
    """Return the digests of the blocks of each tensor; several blocks at a time."""
    counts: list[int] = []
    blocks: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        found = [flat[first : first + BLOCK_BYTES] for first in range(0, len(flat), BLOCK_BYTES)]
        counts.append(len(found))
        blocks += found
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        digests = iter(list(threads.map(_digest, blocks)))
    return [[next(digests) for _ in range(count)] for count in counts]


def _digest(block: torch.Tensor) -> str:
    here = block.cpu()
    view = memoryview((ctypes.c_char * len(here)).from_address(here.data_ptr()))
    return hashlib.sha256(view).hexdigest()[:DIGEST_DIGITS]
