"""A token's logprobs as bytes: what executors return, token messages carry and the HTTP layer reads. Pure.

`float32 | int32 float32 | int32 float32 | ...`, little endian: the token's own logprob, then ids and logprobs of the
most likely tokens, most likely first. They are of the model's raw logits: before temperature, penalties, bias and
filters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chitu.errors import BadFrame

MAX_LOGPROBS = 20
"""Largest number of most likely tokens that a request may ask for with each token."""
LEAST_NOISE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2, "fp8_e4m3": 1e-5}
"""Nats by which rounding moves some logprob of a few answers, by the dtype of K and V, at least: fp8 pages may come
from float32."""
LOGPROB_CAPS = {"float32": 0.01, "float16": 0.15, "bfloat16": 0.5, "fp8_e4m3": 1.0}
"""Most nats that are ever taken for rounding, by the dtype of K and V, whatever was measured."""
LIMIT_OVER_NOISE = 8.0
"""Limit of a single difference, in multiples of the largest one that was measured where all was sound."""
UNLIKE_OVER_NOISE = 4.0
"""Limit of a mean difference, in multiples of the mean one that was measured where all was sound. A quarter of
`LEAST_NOISE` counts as measured."""
_PAIR = struct.Struct("<if")
_OWN = struct.Struct("<f")


class TokenLogprobs(NamedTuple):
    logprob: float
    """Logprob of the token itself."""
    top: Sequence[tuple[int, float]]
    """Most likely token ids and their logprobs, most likely first."""


def logprob_limit(noise: float, *dtypes: str) -> float:
    """Return the most nats that rounding may move a logprob between engines, batches or devices. `noise`: the largest
    difference between two sound computations of the same tokens; 0 if none was measured. `dtypes`: of K and V, on
    either side. A difference that is no number is no noise."""
    least, most = max(map(LEAST_NOISE.__getitem__, dtypes)), max(map(LOGPROB_CAPS.__getitem__, dtypes))
    return min(most, LIMIT_OVER_NOISE * max(least, noise)) if noise == noise else LIMIT_OVER_NOISE * least


def pack_logprobs(logprob: float, top: Iterable[tuple[int, float]] = ()) -> bytes:
    return _OWN.pack(logprob) + b"".join([_PAIR.pack(token, value) for token, value in top])


def prompt_lines(num_tokens: int, data: bytes) -> list[bytes | None]:
    """Return one entry per token of a prompt, None for the first one. Raises BadFrame if the number differs."""
    width, rest = divmod(len(data), num_tokens - 1) if num_tokens > 1 else (0, len(data))
    if rest:
        raise BadFrame(f"{len(data)} bytes of logprobs for a prompt of {num_tokens} tokens")
    return [None, *(data[start : start + width] for start in range(0, len(data), width or 1))]


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    """Return the logprobs of one token. Raises BadFrame if the length is wrong."""
    if len(packed) % _PAIR.size != _OWN.size:
        raise BadFrame(f"logprobs of {len(packed)} bytes: not 4 and a multiple of {_PAIR.size}")
    return TokenLogprobs(_OWN.unpack_from(packed)[0], list(_PAIR.iter_unpack(packed[_OWN.size :])))
