"""Checksums of a finished request's pages, by layer, if it asks for them (`SamplingParams.page_sums`).

On D and on unified instances; step thread only. With TP they cover the main rank's KV heads. Two requests with the same
tokens have the same sums if the same arithmetic made their KV. So a comparison (`chitu verify`) finds the first layer
and page that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from chitu.cache_manager import PagedKVCacheManager
from chitu.instance.sequences import Sequence, SequenceState
from chitu.kv_transfer.layout import PageSums
from chitu.protocol import KVLayout

MAX_SUMMED_BYTES = 32 << 20
"""Most bytes summed for one request: some 10 ms of a core, in which no step is launched. Later pages are left out."""


@dataclass(frozen=True, slots=True)
class FinishedPages:
    page_sums: PageSums
    cache: PagedKVCacheManager
    layout: KVLayout

    def sums_of(self, sequence: Sequence) -> bytes:
        """Return int64 LE `[layers, pages]` of the request's leading full pages; empty if it asked for none."""
        is_running = sequence.state is SequenceState.RUNNING  # else a peer may still write
        if sequence.sampling is None or not sequence.sampling.page_sums or not is_running:
            return b""
        # K and V of the newest token are missing or being computed.
        num_full = (sequence.prompt_len + len(sequence.emitted) - 1) // self.layout.page_size
        num_pages = min(num_full, MAX_SUMMED_BYTES // self.layout.bytes_per_page)
        pages = self.cache.get_page_indices(sequence.room)[:num_pages]
        layers = range(self.layout.num_summed_layers) if pages else ()
        return b"".join(self.page_sums.sums(range(n, n + 1), pages).astype("<i8").tobytes() for n in layers)
