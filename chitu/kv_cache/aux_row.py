"""Shape of an aux row (one logits row with its header), for code that must not import torch."""

from __future__ import annotations

AUX_HEADER_BYTES = 64
"""A cache line of header (see `kv_transfer.metadata_buffers`) ahead of the logits."""


def aux_row_bytes(vocab_size: int) -> int:
    """Header plus one float32 per vocabulary entry, in whole cache lines."""
    return AUX_HEADER_BYTES + (4 * vocab_size + 63) // 64 * 64
