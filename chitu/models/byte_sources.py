"""Where the bytes of tensors are read from: files, and memory of a GPU that another process has shared. No torch.

A tensor of a trainer's memory has a *seal*: digests of its blocks, from the manifest that names it
(`trainer_tensors.py`). What is read of such a tensor is compared with them where it has been read to, whole blocks at
a time. So a trainer that writes meanwhile, or has ended and whose memory is another's by now, is found, whenever it
wrote: either the bytes are those of the manifest, or the read fails.

Files are read by their descriptors and never mapped: a file that becomes shorter is an error, not a signal.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, Protocol

from chitu.errors import ChituError, ConfigError

DIGEST_BYTES = 16
"""Of a block: the first bytes of its sha256."""


class ByteSource(Protocol):
    """An open file, or memory."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from `offset` on. Raises ConfigError if they cannot be read."""
        ...

    def close(self) -> None: ...


class SharedDriver(Protocol):
    """What reading another process's GPU memory needs of a device; CPU tests have a stand-in over shared files."""

    def open(self, handle: bytes) -> int: ...

    def close(self, address: int) -> None: ...

    def copy_to_host(self, host: int, device: int, nbytes: int) -> None:
        """Copy from an address of the device to one of this process, and return when it is done."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Enter the device for the calls above, and leave the thread behind as it was."""
        ...


class DevicePlace(NamedTuple):
    """An allocation on a GPU of this host, as its process has shared it."""

    uuid: str
    """Of the GPU: 32 hex digits."""
    handle: bytes
    """CUDA's interprocess handle."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Seal:
    """What the bytes of a tensor must be."""

    name: str
    manifest: Path
    begin: int
    """Of the tensor, in its source."""
    nbytes: int
    block_bytes: int
    digests: tuple[bytes, ...]
    """One a block; the last block may be shorter."""


class FileBytes:
    def __init__(self, path: Path, is_sealed: bool = False) -> None:
        """Open a file; one that a manifest names only if it is a regular one, and no link. Raises ConfigError."""
        self._path = path
        try:
            self._descriptor = _open_plain(path) if is_sealed else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"model.path: {path} cannot be read: {error}") from error

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise ConfigError(f"model.path: {self._path} cannot be read: {error}") from error
            if not count:
                raise ConfigError(f"model.path: {self._path} became shorter while it was read")
            done += count

    def close(self) -> None:
        os.close(self._descriptor)


class DeviceBytes:
    def __init__(self, place: DevicePlace) -> None:
        """Map the allocation. Raises ConfigError if this host has no such GPU, or its process has ended."""
        self._place = place
        try:
            self._driver = driver_of(place.uuid)
            with self._driver.current():
                self._address = self._driver.open(place.handle)
        except ChituError as error:
            raise ConfigError(f"model.path: the memory of GPU {place.uuid} cannot be read: {error.message}") from error

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if not len(buffer):
            return
        try:
            with self._driver.current():
                host = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                self._driver.copy_to_host(host, self._address + offset, len(buffer))
        except ChituError as error:
            place = self._place
            raise ConfigError(f"model.path: the memory of GPU {place.uuid} cannot be read: {error.message}") from error

    def close(self) -> None:
        with self._driver.current():
            self._driver.close(self._address)


def driver_of(uuid: str) -> SharedDriver:
    """Return the driver of this GPU. Raises MissingDependency or TransferFailed if there is none here."""
    from chitu.ops.cuda_driver import CudaDriver

    return CudaDriver.of_uuid(uuid)


def _open_plain(path: Path) -> int:
    """Open a regular file, and neither a link nor what would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return descriptor


def plain_size(path: Path) -> int:
    """Return the bytes of a file that a manifest names. Raises OSError if it is none, or a link."""
    descriptor = _open_plain(path)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_sealed(source: ByteSource, seal: Seal, buffer: memoryview, offset: int) -> None:
    """Fill the buffer with bytes of a tensor, from `offset` of its source on, and compare all of them with the seal:
    blocks of which a part is wanted are read whole. Raises ConfigError for others than the seal's."""
    end, last = offset + len(buffer), seal.begin + seal.nbytes
    index = (offset - seal.begin) // seal.block_bytes
    while len(buffer) and (begin := seal.begin + index * seal.block_bytes) < end:
        stop = min(begin + seal.block_bytes, last)
        is_whole = begin >= offset and stop <= end
        block = buffer[begin - offset : stop - offset] if is_whole else memoryview(bytearray(stop - begin))
        source.read_into(block, begin)
        if hashlib.sha256(block).digest()[:DIGEST_BYTES] != seal.digests[index]:
            raise ConfigError(
                f"model.path: tensor {seal.name!r} is not what {seal.manifest} says: it was written to since it was "
                "published"
            )
        if not is_whole:
            low, high = max(begin, offset), min(stop, end)
            buffer[low - offset : high - offset] = block[low - begin : high - begin]
        index += 1
