"""Anonymous shared files (memfd): memory that processes of this host can map, and of which a `kill -9` leaves nothing.

Called by whatever allocates the memory of a rank: its pool, its staging segments, its tiers.
"""

from __future__ import annotations

import mmap
import os

from chitu.errors import ConfigError


def shared_file(name: str, nbytes: int, purpose: str) -> int:
    """Return a descriptor of a new zeroed file. Raise ConfigError if there is none."""
    file = -1
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
    except OSError as error:
        if file >= 0:
            os.close(file)
        raise ConfigError(f"cannot allocate {nbytes} bytes for {purpose}: {error}") from error
    return file


def shared_memory(name: str, nbytes: int, purpose: str) -> mmap.mmap:
    """Map a new zeroed file. The mapping has a descriptor of it; both end with the last view of the mapping. Raise
    ConfigError if there is no memory."""
    file = shared_file(name, nbytes, purpose)
    try:
        return mmap.mmap(file, nbytes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot allocate {nbytes} bytes for {purpose}: {error}") from error
    finally:
        os.close(file)
