"""Features of images as a pool of pages of one row: so transfers move them as they move KV, from E to P.

The layout has one layer with one region; a page is a feature row. An aux row has no logits but the key of the image
whose features were written, and the mark of the weights that they were made with (`feature_name`), by which P knows
them. The region is the executor's own.
"""

from __future__ import annotations

import numpy as np
import torch

from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_cache.pool import KVPool
from chitu.protocol import FEATURE_MARK_BYTES, IMAGE_KEY_BYTES, KVLayout

NAME_BYTES = IMAGE_KEY_BYTES + FEATURE_MARK_BYTES
NAME_NUMBERS = NAME_BYTES // 4
"""float32 numbers of an aux row that a key and a mark have the place of."""
AUX_SLOTS = 64
"""Images that may be between E and P at once, on either side."""


def feature_layout(model_hash: str, width: int, dtype: str, tp_size: int = 1) -> KVLayout:
    """Return the layout of features of so many numbers a row. P and E must have the same but for `tp_size`: a row is
    one KV head, and as ranks share a head where there are fewer heads than ranks, each rank of P has all rows."""
    return KVLayout.uniform(model_hash, 1, 1, width, 1, dtype, NAME_NUMBERS, tp_size, regions_per_layer=1)


class FeaturePool(KVPool):
    """The feature region of one device. `features`: `[num_rows, width]`."""

    def __init__(self, layout: KVLayout, num_rows: int, device: str = "cpu", num_aux_slots: int = AUX_SLOTS) -> None:
        """`layout`: a `feature_layout`. Raises ConfigError if there is no memory."""
        super().__init__(layout, num_rows, num_aux_slots, device)
        self.features: torch.Tensor = self.k[0].view(num_rows, -1)
        self.mark = bytes(FEATURE_MARK_BYTES)
        """Mark of the weights with which features are made here at the start."""

    def name_row(self, slot: int, key: bytes, mark: bytes) -> None:
        """Write the key of an image, and the mark of the weights of its features, into an aux row, before it is
        sent."""
        numbers = torch.from_numpy(np.frombuffer(key + mark, np.uint8).copy())
        self.aux[slot, AUX_HEADER_BYTES : AUX_HEADER_BYTES + NAME_BYTES] = numbers.to(self.device)
