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
Form = tuple[torch.dtype, torch.Size]


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
        self._shared: list[_SharedFile] = []
        self._copied: Path | None = None
        """File of the tensors that are copied."""
        self._copied_forms: dict[str, Form] = {}
        """What that file has room for."""

    def allocate(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors in shared memory with the dtypes and shapes of these, not filled. What is in them is published
        without a copy. They stay until `close`. Raises OSError if there is too little memory."""
        offsets, end = _laid_out(like)
        path = self._new_file(end)
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), end)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._shared.append(_SharedFile(path, whole.data_ptr(), end))
        tensors = {}
        for name, tensor in like.items():
            part = whole[offsets[name] : offsets[name] + _nbytes(tensor)]
            tensors[name] = part.view(tensor.dtype).view(tensor.shape)
        return tensors

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Make these tensors reachable, under the names that the checkpoint has, and return the folder's path. They
        must not be written until the instances have read them: one that is, is found, and the change refused. Raises
        ValueError for a dtype that checkpoints do not have, OSError if there is too little memory."""
        plain = {name: tensor.detach() for name, tensor in tensors.items()}
        if odd := [name for name, tensor in plain.items() if tensor.dtype not in NAMES]:
            raise ValueError(f"tensor {odd[0]!r} has dtype {plain[odd[0]].dtype}, which checkpoints do not have")
        places: list[Place] = []
        found = {name: self._place_of(tensor) for name, tensor in plain.items()}
        copied = self._copy({name: tensor for name, tensor in plain.items() if found[name] is None})
        described = {}
        for name, tensor in plain.items():
            place, offset = found[name] or copied[name]
            if place not in places:
                places.append(place)
            described[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "place": places.index(place),
                "offset": offset,
            }
        for entry, digests in zip(described.values(), _digests(plain.values()), strict=True):
            entry["sha256"] = digests
        self._write({"version": 1, "block_bytes": BLOCK_BYTES, "places": places, "tensors": described})
        return str(self._folder)

    def close(self) -> None:
        """Remove the folder. Instances keep what they have read; one that starts again needs another folder."""
        self._shared.clear()
        self._copied = None
        self._copied_forms = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- internal

    def _place_of(self, tensor: torch.Tensor) -> tuple[Place, int] | None:
        """Return the place of a tensor and its offset there; None if nobody else can reach it as it is."""
        if not tensor.is_contiguous():
            return None
        if self._gpu.has(tensor):
            return self._gpu.export(tensor)
        for file in self._shared:
            if (offset := file.offset_of(tensor)) is not None:
                return _place(file.path), offset
        return None

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Place, int]]:
        """Copy these to a file: to that of the last time, if they are like those of then. Return where they are."""
        if not tensors:
            return {}
        offsets, end = _laid_out(tensors)
        forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if self._copied is None or list(forms.items()) != list(self._copied_forms.items()):
            self._copied, self._copied_forms = self._new_file(end), forms
        with self._copied.open("r+b", buffering=0) as file:
            for name, tensor in tensors.items():
                here = tensor.contiguous().cpu()
                file.seek(offsets[name])
                left = _bytes_of(here)
                while left:
                    left = left[file.write(left) :]
        return {name: (_place(self._copied), offset) for name, offset in offsets.items()}

    def _new_file(self, nbytes: int) -> Path:
        """Make a file of this size."""
        path = self._folder / f"{PREFIX}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # else too little memory would be a signal, at the first write
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return path

    def _write(self, manifest: Mapping[str, object]) -> None:
        """Put the manifest in the place of the last one, and remove the memory of what nobody can read any more: also
        that of an earlier trainer, which was killed."""
        path = self._folder / f"{TENSORS_MANIFEST}.{secrets.token_hex(8)}"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        path.replace(self._folder / TENSORS_MANIFEST)
        mine = {file.path.name for file in self._shared}
        if self._copied is not None:
            mine.add(self._copied.name)
        for name in os.listdir(self._folder):
            if name.startswith((PREFIX, f"{TENSORS_MANIFEST}.")) and name not in mine:
                with suppress(OSError):
                    (self._folder / name).unlink()


def _laid_out(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Return offsets of these tensors in a file, and its size, which is not 0."""
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-_nbytes(tensor) // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _place(path: Path) -> Place:
    return {"kind": "file", "name": path.name}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, while it lives."""
    return memoryview((ctypes.c_ubyte * _nbytes(tensor)).from_address(tensor.data_ptr())).cast("B")


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
    return hashlib.sha256(_bytes_of(here)).hexdigest()[:DIGEST_DIGITS]
