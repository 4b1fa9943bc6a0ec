"""Tensors in a trainer's memory, as a manifest in a checkpoint folder names them (`chitu_tensors.json`). No torch.

The manifest stands beside safetensors files, or in their stead. It has dtype, shape, place and digests of each tensor.
A place is a file in the same folder, an object of POSIX shared memory, or memory of a GPU that its process has shared.
So a manifest leads nowhere but to its own folder, `/dev/shm` and GPUs of this host; links are not followed.

*What is in the tensors* (names, dtypes, shapes, digests) identifies them, and not where they are: two folders with the
same tensors in blocks of one size have the same hash, and another step of a training has another one, however the files
are named.

`chitu/tools/publish.py` writes it. Version 1:

    {"version": 1, "block_bytes": 1048576,
     "places": [{"kind": "file", "name": "chitu-tensors-1"}, {"kind": "shm", "name": "psm_5f"},
                {"kind": "cuda", "device": "9f...", "handle": "00...", "nbytes": 20971520}],
     "tensors": {"model.norm.weight": {"dtype": "BF16", "shape": [64], "place": 0, "offset": 0, "sha256": ["1f..."]}}}

`sha256` has the first 32 hex digits of each block of `block_bytes` of the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from chitu.errors import ConfigError
from chitu.models.byte_sources import DIGEST_BYTES, DevicePlace, Seal, plain_size

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has the objects of POSIX shared memory."""
MAX_MANIFEST_BYTES = 256 << 20
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 4 << 10, 64 << 20
HANDLE_BYTES, UUID_BYTES = 64, 16

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class FilePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="file"):
    """A file in the folder of the manifest."""

    name: str


class ShmPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shm"):
    """An object of POSIX shared memory, by its name without the slash."""

    name: str


class CudaPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cuda"):
    """An allocation on a GPU."""

    device: str
    """UUID of the GPU: 32 hex digits."""
    handle: str
    """Hex digits of CUDA's interprocess handle."""
    nbytes: Size


class PublishedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    """As in safetensors files."""
    shape: tuple[Size, ...]
    place: Size
    """Index in `places`."""
    offset: Size
    sha256: tuple[str, ...]


class TensorManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    block_bytes: int
    places: tuple[FilePlace | ShmPlace | CudaPlace, ...]
    tensors: dict[str, PublishedTensor]


_decoder = msgspec.json.Decoder(TensorManifest)


def read_manifest(file: Path) -> TensorManifest:
    """Return what a manifest says. Raises ConfigError for what is no manifest of version 1."""
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise ConfigError(f"model.path: {file} is longer than {MAX_MANIFEST_BYTES} bytes")
        found = _decoder.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
    if found.version != 1:
        raise ConfigError(f"model.path: {file} has version {found.version}, and 1 is known here")
    if not MIN_BLOCK_BYTES <= found.block_bytes <= MAX_BLOCK_BYTES:
        raise ConfigError(
            f"model.path: {file}: block_bytes {found.block_bytes} is not within {MIN_BLOCK_BYTES} and {MAX_BLOCK_BYTES}"
        )
    return found


def content_digest(file: Path) -> bytes:
    """Return what is equal for two manifests if their tensors have the same names, dtypes, shapes and numbers."""
    manifest, digest = read_manifest(file), hashlib.sha256()
    digest.update(f"{manifest.block_bytes}".encode())
    for name, tensor in sorted(manifest.tensors.items()):
        digest.update(msgspec.json.encode((name, tensor.dtype, tensor.shape, tensor.sha256)))
    return digest.digest()


class Published(msgspec.Struct, frozen=True):
    """A tensor of a manifest, whose numbers fit."""

    file: Path
    """That holds it, or the manifest if a GPU does."""
    device: DevicePlace | None
    tensor: PublishedTensor
    seal: Seal


def published(file: Path, size_of: Callable[[str, tuple[int, ...]], int | None]) -> Iterator[tuple[str, Published]]:
    """Yield the tensors of a manifest by name. `size_of` returns the bytes of a tensor by dtype and shape; None: the
    dtype is not known. Raises ConfigError for a place that is not there or may not be used, and for a tensor that does
    not fit in it, or has not one digest a block."""
    manifest = read_manifest(file)
    places = [_found(file, place) for place in manifest.places]
    for name, tensor in manifest.tensors.items():
        where = f"model.path: {file}: tensor {name!r}"
        nbytes = size_of(tensor.dtype, tensor.shape)
        if nbytes is None:
            raise ConfigError(f"{where} has dtype {tensor.dtype}, which is not known here")
        if tensor.place >= len(places):
            raise ConfigError(f"{where} is in place {tensor.place}, and there are {len(places)}")
        holder, device, size = places[tensor.place]
        if tensor.offset + nbytes > size:
            raise ConfigError(
                f"{where} ends at byte {tensor.offset + nbytes} of its place, which has {size}: {_name(holder, device)}"
            )
        digests = tuple(_hex(each, DIGEST_BYTES, where) for each in tensor.sha256)
        count = -(-nbytes // manifest.block_bytes)
        if len(digests) != count:
            raise ConfigError(f"{where} has {len(digests)} digests, and {count} blocks")
        seal = Seal(name, file, tensor.offset, nbytes, manifest.block_bytes, digests)
        yield name, Published(holder, device, tensor, seal)


def _found(file: Path, place: FilePlace | ShmPlace | CudaPlace) -> tuple[Path, DevicePlace | None, int]:
    """Return what holds a place, and its bytes."""
    where = f"model.path: {file}"
    if isinstance(place, CudaPlace):
        uuid = _hex(place.device, UUID_BYTES, f"{where}: a device").hex()
        handle = _hex(place.handle, HANDLE_BYTES, f"{where}: a handle")
        return file, DevicePlace(uuid, handle, place.nbytes), place.nbytes
    if place.name in ("", ".", "..") or "/" in place.name or "\0" in place.name:
        raise ConfigError(
            f"{where} names {place.name!r}, which is no name of a file in its folder or of an object in {SHARED_MEMORY}"
        )
    holder = (SHARED_MEMORY if isinstance(place, ShmPlace) else file.parent) / place.name
    try:
        return holder, None, plain_size(holder)
    except OSError as error:
        raise ConfigError(
            f"{where} names {holder}, which cannot be read ({error}): the memory of a trainer is reachable on its own "
            "host alone, until the trainer removes it"
        ) from error


def _hex(text: str, nbytes: int, where: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != nbytes:
        raise ConfigError(f"{where}: {text[:80]!r} is not {2 * nbytes} hex digits")
    return found


def _name(holder: Path, device: DevicePlace | None) -> str:
    return f"GPU {device.uuid}" if device is not None else str(holder)
