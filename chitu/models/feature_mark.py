"""The mark of the weights that features of images are made with: equal on two instances if their towers have the same
numbers.

It is taken of the tensors themselves, so a tower that stayed what it was has its old mark, whatever its process says.
It covers every tensor, and of a large one numbers at equal distances: another step of a training changes nearly all.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch

from chitu.protocol import FEATURE_MARK_BYTES

MOST_SAMPLES = 4096
"""Numbers of a tensor that are covered."""


def feature_mark(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the mark of a tower with these tensors, on whatever device they are."""
    digest = blake2b(digest_size=FEATURE_MARK_BYTES)
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        sampled = flat[:: max(1, len(flat) // MOST_SAMPLES)].cpu().contiguous()
        digest.update(f"{name} {tuple(tensors[name].shape)} {sampled.dtype} ".encode())
        digest.update(sampled.view(torch.uint8).numpy().tobytes() if len(sampled) else b"")
    return digest.digest()
