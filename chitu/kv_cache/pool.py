"""The KV memory: one allocation (the *arena*) with the regions of every layer, then the aux rows, then the state rows,
then memory for transports that need some.

It is one allocation so that every transport registers it once and a range check takes two comparisons. On CPU it is an
anonymous shared file (memfd), so that a process of the same host can map it (transport `shm`) and a `kill -9` leaves
nothing; staging segments and tiers on the host are such files, too. Built by the service, read and
written by the executor (step thread) and by transports. It ends with the last tensor that views it.

Layout: the regions of `KVLayout.regions`, K and V of each layer or what else it has. Each is
`[num_pages, kv_heads, page_size, head_dim]`, of its group's heads and its own width: heads come before tokens, so one
head group of a page is contiguous. With dtype `fp8_e4m3` each head of a page stores its tokens' scales after its values
(`ops/fp8_pages.py`). An aux row is a 64 byte header and `vocab_size` float32, and `draft_hidden` more.
"""

from __future__ import annotations

import mmap
import os
import weakref
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.config.tensor_parallel import kv_heads_per_rank
from chitu.errors import ConfigError
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES as AUX_HEADER_BYTES
from chitu.kv_cache.aux_row import RowMemory
from chitu.kv_cache.aux_row import aux_row_bytes as aux_row_bytes
from chitu.kv_cache.device_rows import DeviceRows
from chitu.kv_cache.state_row import StateRow
from chitu.ops.fp8_pages import values_of
from chitu.protocol import FP8_E4M3, KVLayout

ALIGNMENT_BYTES = 4096
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        return mapped(file, nbytes, purpose)
    finally:
        os.close(file)


def mapped(file: int, nbytes: int, purpose: str) -> mmap.mmap:
    """Map a file. Raise ConfigError if there is no memory."""
    try:
        return mmap.mmap(file, nbytes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot allocate {nbytes} bytes for {purpose}: {error}") from error


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class KVPool:
    """The pages and aux rows of one rank. `k[l]`, `v[l]`: `[num_pages, kv_heads, page_size, head_dim]` (one page more
    with a scratch page), the first and the last region of layer l: the same tensor if it has one, without elements if
    it has none. `regions`: each region once; with e4m3 as bytes, including the scales. `aux`: uint8
    `[num_aux_slots, aux_row_bytes]`. `states[layer, name]`: `[num_state_slots, *shape]`, this rank's part of a tensor
    of `KVLayout.state`."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        num_aux_slots: int,
        device: str = "cpu",
        *,
        has_scratch: bool = False,
        transfer_bytes: int = 0,
        num_state_slots: int = 0,
    ) -> None:
        """Allocate the arena. With `has_scratch` the regions have one page more, `scratch_page`, which rows that only
        pad a batch write to. It belongs to no request and must not be offered to a peer. `transfer_bytes` at the end of
        the arena, from `transfer_base` on, are for transports and not used here. `num_state_slots`: rows of recurrent
        state, if the layout has any. Raises ConfigError if the ranks cannot cut it."""
        self.layout = layout
        self.num_pages = num_pages
        self.scratch_page = num_pages if has_scratch else None
        self.num_aux_slots = num_aux_slots
        self.device = torch.device(device)
        self.page_bytes = layout.page_bytes
        self.aux_row_bytes = aux_row_bytes(layout.aux_numbers)
        row = StateRow.of(layout)
        self.num_state_slots = num_state_slots if layout.state else 0
        self.state_row_bytes = row.row_bytes
        used = [(num_pages + has_scratch) * nbytes for nbytes in self.page_bytes]
        *starts, aux_start = accumulate(map(_aligned, used), initial=0)
        state_start = aux_start + _aligned(num_aux_slots * self.aux_row_bytes)
        self.arena_bytes = state_start + _aligned(self.num_state_slots * self.state_row_bytes)
        transfer_offset = self.arena_bytes
        self.arena_bytes += _aligned(transfer_bytes)
        self.pinned_by = ""
        """Name of a transport whose registration pins the memory, so that it cannot be given back."""
        self._map: mmap.mmap | None = None
        self._file = -1
        arena = self._allocate()
        self.arena_base = arena.data_ptr()
        self.transfer_base = self.arena_base + transfer_offset
        self.region_bases = tuple(self.arena_base + start for start in starts)
        self.aux_base = self.arena_base + aux_start
        self.state_base = self.arena_base + state_start
        no_pages = torch.empty(0, 0, layout.page_size, 0, dtype=torch.uint8)
        self.regions: list[torch.Tensor] = []
        self.k = [no_pages] * layout.num_layers
        self.v = [no_pages] * layout.num_layers
        for region, start, nbytes in zip(layout.regions, starts, used, strict=True):
            heads = kv_heads_per_rank(region.num_kv_heads, layout.tp_size)
            raw = arena[start : start + nbytes]
            if layout.dtype == FP8_E4M3:
                raw = raw.view(num_pages + has_scratch, heads, -1)
                pages = values_of(raw, layout.page_size, region.head_dim)
            else:
                shape = (num_pages + has_scratch, heads, layout.page_size, region.head_dim)
                raw = pages = raw.view(TORCH_DTYPES[layout.dtype]).view(shape)
            self.regions.append(raw)
            if self.k[region.layer] is no_pages:
                self.k[region.layer] = pages
            self.v[region.layer] = pages
        self.aux = arena[aux_start : aux_start + num_aux_slots * self.aux_row_bytes].view(
            num_aux_slots, self.aux_row_bytes
        )
        self.aux_logits = self.aux[:, AUX_HEADER_BYTES : AUX_HEADER_BYTES + 4 * layout.vocab_size].view(torch.float32)
        """`[num_aux_slots, vocab_size]` float32 view of the rows."""
        hidden_start = AUX_HEADER_BYTES + 4 * layout.vocab_size
        self.aux_hidden = self.aux[:, hidden_start : hidden_start + 4 * layout.draft_hidden].view(torch.float32)
        """`[num_aux_slots, draft_hidden]` float32: the numbers behind the logits."""
        self.state_rows = arena[state_start : state_start + self.num_state_slots * self.state_row_bytes].view(
            self.num_state_slots, self.state_row_bytes
        )
        """uint8 `[num_state_slots, state_row_bytes]`: a stamp, then the tensors (`state_row.py`)."""
        self.states: dict[tuple[int, str], torch.Tensor] = {
            (part.tensor.layer, part.tensor.name): self.state_rows[:, part.offset : part.offset + part.nbytes]
            .view(TORCH_DTYPES[part.tensor.dtype])
            .view(self.num_state_slots, *part.shape)
            for part in row.parts
        }

    @property
    def aux_rows(self) -> NDArray[np.uint8] | RowMemory:
        """`aux` for `MetadataBuffers`: a numpy view, or a `RowMemory` if the pool is not in host memory."""
        if self.device.type != "cpu":
            return DeviceRows(self.aux)
        rows: NDArray[np.uint8] = self.aux.numpy()
        return rows

    def _allocate(self) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(self.arena_bytes, dtype=torch.uint8, device=self.device)
        self._file = shared_file("chitu-kv", self.arena_bytes, "the KV cache")
        weakref.finalize(self, os.close, self._file)
        self._map = mapped(self._file, self.arena_bytes, "the KV cache")
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def give_back(self) -> int:
        """Give the memory of the arena back to the system, in every process that maps it, and return its bytes: 0 if it
        is pinned, or not in host memory. It stays mapped and registered where it is, reads as zeros, and takes memory
        again as it is written. No transfer may run, nor any other access to what it held."""
        if self._map is None or self.pinned_by:
            return 0
        used = os.fstat(self._file).st_blocks * BLOCK_BYTES
        self._map.madvise(mmap.MADV_REMOVE)
        return used - os.fstat(self._file).st_blocks * BLOCK_BYTES
