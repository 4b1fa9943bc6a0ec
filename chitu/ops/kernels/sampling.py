"""Sampling of a batch in two to four launches, without a sort over the vocabulary and without the host. First tokens
are drawn from aux rows, and appended, by the same kernels behind the scan of these rows (`greedy.py`).

Gives the same tokens as `engine/sampling_ops.py`, bit by bit: sums are of integers, so neither their order nor the
number of programs matters, and weights and exponential numbers follow `ops/sampling_numbers.py`. Called by
`engine/sampler.py` on the step thread, which has applied penalties, bias and masks to a copy of the rows that have any.

A row is split into chunks. `_peaks` finds each chunk's largest logit. `_measure` finds the winner of each chunk of a
row without top-k and top-p; of others, each chunk's weight, and the count or weight above a ladder of thresholds.
`_gather` collects the tokens above the lowest rung that can matter, usually few of a vocabulary of 150000. `_finish`,
one program a row, finds the cut-offs among those by bisection, and the winner. If they do not fit the list (a flat
row), it searches the whole row: slower, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops import sampling_numbers as numbers

CHUNK = 4096
CAPACITY = 8192
"""Most tokens of a row that are collected."""
THRESHOLDS = 16

SMALLEST_EXPONENT = tl.constexpr(numbers.SMALLEST_EXPONENT)
ROUND_TO_INTEGER = tl.constexpr(numbers.ROUND_TO_INTEGER)
EXPONENT_SHIFT = tl.constexpr(numbers.EXPONENT_SHIFT)
C5, C4, C3, C2, C1 = (tl.constexpr(value) for value in numbers.EXP2)
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(value) for value in (numbers.GOLDEN, numbers.MIX_1, numbers.MIX_2))
LOW_MIX_1, LOW_MIX_2 = (tl.constexpr(value) for value in (numbers.LOW_MIX_1, numbers.LOW_MIX_2))
UNIFORM_STEP = tl.constexpr(2.0**-numbers.UNIFORM_BITS)
LARGEST_BITS = tl.constexpr((1 << numbers.UNIFORM_BITS) - 1)
THREE_QUARTERS, LN2 = tl.constexpr(numbers.THREE_QUARTERS), tl.constexpr(numbers.LN2)
L7, L6, L5, L4, L3, L2, L1, L0 = (tl.constexpr(value) for value in numbers.LOG1P)
UNIT, TOP_P, LOG_MIN_P = (tl.constexpr(value) for value in (numbers.UNIT, numbers.TOP_P, numbers.LOG_MIN_P))
SEED, POSITION, TOP_K = (tl.constexpr(value) for value in (numbers.SEED, numbers.POSITION, numbers.TOP_K))
RUNGS = tl.constexpr(THRESHOLDS)
RUNG = tl.constexpr((numbers.WEIGHT_BITS + 1.0) / THRESHOLDS**2)
"""Rung i of the ladder is `RUNG * (i + 1)^2` bits below the row's maximum. Below the last, weights are 0. Exact."""
LOWEST = tl.constexpr(-(1 << 63))
LARGEST_KEY = tl.constexpr(0x7FFFFFFF)
INFINITY_KEY = tl.constexpr(0x7F800000)
"""`_ordered` of infinity; that of minus infinity is `-INFINITY_KEY - 1`."""
LARGEST_PACKED = tl.constexpr((1 << 63) - 1)
NO_TOKEN = tl.constexpr(numbers.NO_TOKEN)


@triton.jit
def _ordered(x):
    """Map float32 to int32 in the same order. Both zeros are equal, NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LARGEST_KEY, bits ^ ((bits >> 31) & LARGEST_KEY))


@triton.jit
def _float_of(key):
    return (key ^ ((key >> 31) & LARGEST_KEY)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top):
    """Return the weight of a token, int64; 0 for every token of a row whose largest value is not a number."""
    t = x - top
    t = tl.where(t > SMALLEST_EXPONENT, t, SMALLEST_EXPONENT)
    n = t + ROUND_TO_INTEGER
    t = t - (n - ROUND_TO_INTEGER)
    p = (t * C5 + C4) * t
    p = (p + C3) * t
    p = (p + C2) * t
    p = (p + C1) * t + 1.0
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32, bitcast=True) << EXPONENT_SHIFT)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _splitmix64(x):
    x = x + GOLDEN
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _draw_key(ints_ptr):
    return _splitmix64(_splitmix64(tl.load(ints_ptr + SEED).to(tl.uint64)) ^ tl.load(ints_ptr + POSITION).to(tl.uint64))


@triton.jit
def _raced(weight, ids, draw):
    """Pack the result of tokens in the race and their ids: the largest wins, of equal ones the first id."""
    x = ids.to(tl.uint32) + draw.to(tl.uint32)
    x = (x ^ (x >> 16)) * LOW_MIX_1
    x = (x ^ (x >> 15) ^ (draw >> 32).to(tl.uint32)) * LOW_MIX_2
    bits = ((x ^ (x >> 16)) & LARGEST_BITS | 1).to(tl.int32)
    u = bits.to(tl.float32) * UNIFORM_STEP
    v = ((bits ^ LARGEST_BITS) + 1).to(tl.float32) * UNIFORM_STEP
    k = (v.to(tl.int32, bitcast=True) - THREE_QUARTERS) >> EXPONENT_SHIFT
    m = (v.to(tl.int32, bitcast=True) - (k << EXPONENT_SHIFT)).to(tl.float32, bitcast=True)
    f = tl.where(bits < (LARGEST_BITS + 1) // 4, -u, m - 1.0)
    q = (f * L7 + L6) * f
    q = (q + L5) * f
    q = (q + L4) * f
    q = (q + L3) * f
    q = (q + L2) * f
    q = (q + L1) * f + L0
    exponential = k.to(tl.float32) * -LN2 - f * q
    score = tl.div_rn(weight.to(tl.float32), exponential)
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (ids ^ LARGEST_KEY).to(tl.int64)


@triton.jit
def _token_of(winner):
    """Return the token that won, NO_TOKEN if not even that has a weight."""
    return tl.where((winner >> 32) > 0, (winner & LARGEST_KEY) ^ LARGEST_KEY, NO_TOKEN)


@triton.jit
def _logits(logits_ptr, row_stride, edited_ptr, row, source, ids, vocab, HAS_EDITED: tl.constexpr):
    """Load logits, NaN past the end. `source`: the row's index among the edited rows, -1 if it is not edited."""
    if HAS_EDITED:
        plain_end = tl.where(source < 0, vocab, 0)
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < plain_end, other=0.0)
        x += tl.load(edited_ptr + source * vocab + ids, mask=ids < vocab - plain_end, other=0.0)
    else:
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=0.0)
    return tl.where(ids < vocab, x, float("nan"))


@triton.jit
def found_in_row(
    to_ptr, from_ptr, sums_ptr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, HEADER_NUMBERS: tl.constexpr
):  # fmt: skip
    """Store the header of an aux row, and behind it its checksum, of which `sums` has the parts. Return that."""
    c, h = tl.arange(0, CHUNKS_PAD), tl.arange(0, HEADER_NUMBERS)
    tl.store(to_ptr + h, tl.load(from_ptr + h))
    total = tl.sum(tl.load(sums_ptr + c, mask=c < CHUNKS, other=0), 0)
    tl.store(to_ptr + HEADER_NUMBERS, total)
    return total


@triton.jit
def _put(token, token_ptr, place_ptr, IS_AUX: tl.constexpr):
    """Store a token, and if it is a first one, append it to its sequence. Return it."""
    tl.store(token_ptr, token)
    if IS_AUX:
        tl.store(place_ptr, tl.maximum(token, 0))
    return token


@triton.jit
def _best(peaks_ptr, row, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """Return key and id of a row's largest logit, as `_peaks` packs them; of equal logits the first. The key is that of
    NaN if a logit was NaN or infinity before the edits."""
    c = tl.arange(0, CHUNKS_PAD)
    return tl.max(tl.load(peaks_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=LOWEST), 0)


@triton.jit
def _top(best, unit):
    return tl.div_rn(_float_of((best >> 32).to(tl.int32)), unit)


@triton.jit(do_not_specialize=["num_rows"])
def _peaks(
    logits_ptr, edited_ptr, rows_ptr, peaks_ptr, found_ptr, row_stride, num_rows, vocab,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HAS_EDITED: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _logits(logits_ptr, row_stride, edited_ptr, row, tl.load(rows_ptr + row), ids, vocab, HAS_EDITED)
    packed = (_ordered(x).to(tl.int64) << 32) | (ids ^ LARGEST_KEY).to(tl.int64)
    if HAS_EDITED:
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=0.0)
    packed = tl.where(x < float("inf"), packed, LARGEST_PACKED)
    tl.store(peaks_ptr + row * CHUNKS + chunk, tl.max(tl.where(ids < vocab, packed, LOWEST), 0))
    if chunk == 0:
        tl.store(found_ptr + row, 0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _measure(
    logits_ptr, edited_ptr, rows_ptr, floats_ptr, ints_ptr, peaks_ptr, sums_ptr, counts_ptr, masses_ptr,
    row_stride, num_rows, vocab, num_floats, num_ints,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, HAS_EDITED: tl.constexpr,
    PEAKS: tl.constexpr, PEAKS_PAD: tl.constexpr, IS_AUX: tl.constexpr,
):  # fmt: skip
    """Store a chunk's winner in `sums`, or if its row is cut: its weight there, and in `counts` or `masses` (`[rows,
    CHUNKS, RUNGS]`) number or weight of its tokens from each rung up."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(rows_ptr + row)
    if IS_AUX:
        logits_ptr += (source - row) * row_stride
    slot = tl.load(rows_ptr + num_rows + row)
    unit = tl.load(floats_ptr + slot * num_floats + UNIT, mask=slot >= 0, other=0.0).to(tl.float32)
    if unit == 0.0:
        return
    top = _top(_best(peaks_ptr, row, PEAKS, PEAKS_PAD), unit)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _logits(logits_ptr, row_stride, edited_ptr, row, source, ids, vocab, HAS_EDITED)
    x = tl.div_rn(x, unit)
    least = top + tl.load(floats_ptr + slot * num_floats + LOG_MIN_P).to(tl.float32)
    weight = tl.where(x >= least, _weight(x, top), 0)
    top_k = tl.load(ints_ptr + slot * num_ints + TOP_K)
    top_p = tl.load(floats_ptr + slot * num_floats + TOP_P)
    if (top_k == 0) & (top_p >= 1.0):
        raced = _raced(weight, ids, _draw_key(ints_ptr + slot * num_ints))
        tl.store(sums_ptr + row * CHUNKS + chunk, tl.max(raced, 0))
        return
    tl.store(sums_ptr + row * CHUNKS + chunk, tl.sum(weight, 0))
    cells = (row * CHUNKS + chunk) * RUNGS
    if top_k > 0:
        for i in tl.static_range(RUNGS):
            tl.store(
                counts_ptr + cells + i, tl.sum((x >= top - RUNG * ((i + 1) * (i + 1))).to(tl.int32), 0).to(tl.int64)
            )
    else:
        for i in tl.static_range(RUNGS):
            is_in = x >= top - RUNG * ((i + 1) * (i + 1))
            tl.store(masses_ptr + cells + i, tl.sum(tl.where(is_in, weight, 0), 0))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _gather(
    logits_ptr, edited_ptr, rows_ptr, floats_ptr, ints_ptr, peaks_ptr, sums_ptr, counts_ptr, masses_ptr,
    lows_ptr, found_ptr, list_ptr, row_stride, num_rows, vocab, num_floats, num_ints,
    CAPACITY: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    PEAKS: tl.constexpr, PEAKS_PAD: tl.constexpr, IS_AUX: tl.constexpr,
):  # fmt: skip
    """Collect keys and ids of the tokens that top-k or top-p may keep, in any order."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(rows_ptr + row)
    if IS_AUX:
        logits_ptr += (source - row) * row_stride
    slot = tl.load(rows_ptr + num_rows + row)
    unit = tl.load(floats_ptr + slot * num_floats + UNIT, mask=slot >= 0, other=0.0).to(tl.float32)
    if unit == 0.0:
        return
    top_k = tl.load(ints_ptr + slot * num_ints + TOP_K)
    top_p = tl.load(floats_ptr + slot * num_floats + TOP_P)
    if (top_k == 0) & (top_p >= 1.0):
        return
    top = _top(_best(peaks_ptr, row, PEAKS, PEAKS_PAD), unit)
    least = top + tl.load(floats_ptr + slot * num_floats + LOG_MIN_P).to(tl.float32)
    c, i = tl.arange(0, CHUNKS_PAD), tl.arange(0, RUNGS)
    cells = (row * CHUNKS + c[:, None]) * RUNGS + i[None, :]
    counted = tl.where(top_k > 0, CHUNKS, 0)
    above = tl.load(counts_ptr + cells, mask=c[:, None] < counted, other=0)
    above += tl.load(masses_ptr + cells, mask=c[:, None] < CHUNKS - counted, other=0)
    above = tl.sum(above, 0)
    total = tl.sum(tl.load(sums_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)
    needed = tl.where(top_k > 0, top_k.to(tl.float64), total.to(tl.float64) * top_p)
    rungs = top - ((i + 1) * (i + 1)).to(tl.float32) * RUNG
    # Tokens below the last rung have weight 0, whether or not they are kept.
    low = tl.max(tl.where((above.to(tl.float64) >= needed) | (i == RUNGS - 1), rungs, float("-inf")), 0)
    low = tl.where(least > low, least, low)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _logits(logits_ptr, row_stride, edited_ptr, row, source, ids, vocab, HAS_EDITED)
    x = tl.div_rn(x, unit)
    is_in = (x >= low).to(tl.int32)
    if chunk == 0:
        tl.store(lows_ptr + row, low)
    count = tl.sum(is_in, 0)
    if count > 0:
        place = tl.atomic_add(found_ptr + row, count) + tl.cumsum(is_in, 0) - 1
        packed = (_ordered(x).to(tl.int64) << 32) | ids.to(tl.int64)
        tl.store(list_ptr + row * CAPACITY + place, packed, mask=(is_in > 0) & (place < CAPACITY))


@triton.jit
def _candidates(
    start, found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, HAS_EDITED: tl.constexpr,
):  # fmt: skip
    """Return key, id and weight of CHUNK candidates: of the collected list, or of the row if the list overflowed."""
    at = start + tl.arange(0, CHUNK)
    if found > CAPACITY:
        x = _logits(logits_ptr, row_stride, edited_ptr, row, source, at, vocab, HAS_EDITED)
        packed = (_ordered(tl.div_rn(x, unit)).to(tl.int64) << 32) | at.to(tl.int64)
        packed = tl.where(at < vocab, packed, LOWEST)
    else:
        packed = tl.load(list_ptr + row * CAPACITY + at, mask=at < found, other=LOWEST)
    key = (packed >> 32).to(tl.int32)
    return key, (packed & LARGEST_KEY).to(tl.int32), _weight(_float_of(key), top)


@triton.jit
def _total(
    key, weight, least_key,
    found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
    IS_COUNT: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, HAS_EDITED: tl.constexpr,
):  # fmt: skip
    """Return count or weight of the candidates from `least_key` up. The first CHUNK are given."""
    total = tl.sum(tl.where(key >= least_key, 1 if IS_COUNT else weight, 0).to(tl.int64), 0)
    end = tl.where(found > CAPACITY, vocab, found)
    for start in range(CHUNK, end, CHUNK):
        key, _, weight = _candidates(
            start, found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
            CAPACITY, CHUNK, HAS_EDITED,
        )  # fmt: skip
        total += tl.sum(tl.where(key >= least_key, 1 if IS_COUNT else weight, 0).to(tl.int64), 0)
    return total


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _finish(
    logits_ptr, edited_ptr, rows_ptr, floats_ptr, ints_ptr, peaks_ptr, sums_ptr, lows_ptr, found_ptr, list_ptr,
    tokens_ptr, token_ids_ptr, checksums_ptr, headers_ptr, row_stride, num_rows, vocab, num_floats, num_ints,
    token_stride, header_stride,
    CAPACITY: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    PEAKS: tl.constexpr, PEAKS_PAD: tl.constexpr, IS_AUX: tl.constexpr, HEADER_NUMBERS: tl.constexpr,
):  # fmt: skip
    """Program: a row. Numbers of an aux row are its place, its slot in the tables, and the slot and position of its
    token. What is found in it comes behind the tokens of all rows."""
    row = tl.program_id(0).to(tl.int64)
    source, slot = tl.load(rows_ptr + row), tl.load(rows_ptr + num_rows + row)
    token_ptr, place_ptr = tokens_ptr + row, token_ids_ptr
    if IS_AUX:
        logits_ptr += (source - row) * row_stride
        place_ptr += tl.load(rows_ptr + 2 * num_rows + row) * token_stride + tl.load(rows_ptr + 3 * num_rows + row)
        found_in_row(
            tokens_ptr + num_rows + row * (HEADER_NUMBERS + 1), headers_ptr + source * header_stride,
            checksums_ptr + row * PEAKS, PEAKS, PEAKS_PAD, HEADER_NUMBERS,
        )  # fmt: skip
    best = _best(peaks_ptr, row, PEAKS, PEAKS_PAD)
    unit = tl.load(floats_ptr + slot * num_floats + UNIT, mask=slot >= 0, other=0.0).to(tl.float32)
    if unit == 0.0:
        best_key = best >> 32
        is_finite = (best_key < INFINITY_KEY) & (best_key > -INFINITY_KEY - 1)
        _put(tl.where(is_finite, (best & LARGEST_KEY) ^ LARGEST_KEY, NO_TOKEN), token_ptr, place_ptr, IS_AUX)
        return
    floats_ptr += slot * num_floats
    ints_ptr += slot * num_ints
    top = _top(best, unit)
    top_k, top_p = tl.load(ints_ptr + TOP_K), tl.load(floats_ptr + TOP_P)
    draw = _draw_key(ints_ptr)
    tl.store(ints_ptr + POSITION, tl.load(ints_ptr + POSITION) + 1)
    if (top_k == 0) & (top_p >= 1.0):
        winner = _best(sums_ptr, row, CHUNKS, CHUNKS_PAD)
        _put(_token_of(winner), token_ptr, place_ptr, IS_AUX)
        return
    c = tl.arange(0, CHUNKS_PAD)
    total = tl.sum(tl.load(sums_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)
    found = tl.load(found_ptr + row)
    key, ids, weight = _candidates(
        0, found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
        CAPACITY, CHUNK, HAS_EDITED,
    )  # fmt: skip
    least = _ordered(tl.load(lows_ptr + row)).to(tl.int64)
    if top_k > 0:
        # Find the largest key that at least k tokens reach.
        high = _ordered(top).to(tl.int64)
        while least < high:
            middle = (least + high + 1) >> 1
            reaching = _total(
                key, weight, middle.to(tl.int32),
                found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
                True, CAPACITY, CHUNK, HAS_EDITED,
            )  # fmt: skip
            least = tl.where(reaching >= top_k, middle, least)
            high = tl.where(reaching >= top_k, high, middle - 1)
        total = _total(
            key, weight, least.to(tl.int32),
            found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
            False, CAPACITY, CHUNK, HAS_EDITED,
        )  # fmt: skip
    if top_p < 1.0:
        # Find the smallest key with less than top-p of the remaining weight above it.
        allowed = total.to(tl.float64) * top_p
        high = _ordered(top).to(tl.int64)
        while least < high:
            middle = (least + high) >> 1
            above = _total(
                key, weight, (middle + 1).to(tl.int32),
                found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
                False, CAPACITY, CHUNK, HAS_EDITED,
            )  # fmt: skip
            high = tl.where(above.to(tl.float64) < allowed, middle, high)
            least = tl.where(above.to(tl.float64) < allowed, least, middle + 1)
    winner = tl.max(_raced(tl.where(key >= least, weight, 0), ids, draw), 0)
    for start in range(CHUNK, tl.where(found > CAPACITY, vocab, found), CHUNK):
        key, ids, weight = _candidates(
            start, found, list_ptr, logits_ptr, row_stride, edited_ptr, row, source, unit, top, vocab,
            CAPACITY, CHUNK, HAS_EDITED,
        )  # fmt: skip
        winner = tl.maximum(winner, tl.max(_raced(tl.where(key >= least, weight, 0), ids, draw), 0))
    _put(_token_of(winner), token_ptr, place_ptr, IS_AUX)


@triton.jit
def _forbid(work_ptr, rows_ptr, packed_ptr, row_stride, num_words, vocab, CHUNK: tl.constexpr):
    """Program (mask, chunk of its row): write -inf where the packed mask has no bit."""
    mask = tl.program_id(0)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_id = ids < vocab
    words = tl.load(packed_ptr + mask * num_words + ids // 32, mask=is_id, other=-1)
    row = tl.load(rows_ptr + mask)
    is_forbidden = ((words >> (ids % 32)) & 1) == 0
    tl.store(work_ptr + row * row_stride + ids, float("-inf"), mask=is_id & is_forbidden)


@dataclass(frozen=True, slots=True)
class Draws:
    """How rows without edits are drawn."""

    kernels: SamplingKernels
    floats: torch.Tensor
    ints: torch.Tensor
    is_cut: bool
    """Whether some row has a top-k or top-p."""


class SamplingKernels:
    """Scratch memory for batches of up to `num_rows` rows over one vocabulary, and the launches that use it.

    One stream: two calls never overlap. Every launch can be captured in a CUDA graph.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, chunk: int = CHUNK, capacity: int = CAPACITY
    ) -> None:
        self._vocab_size, self._chunk, self._capacity = vocab_size, chunk, capacity
        self._chunks = triton.cdiv(vocab_size, chunk)
        self._peaks = torch.empty(num_rows, self._chunks, dtype=torch.int64, device=device)
        self._sums = torch.empty_like(self._peaks)
        self._above = torch.empty(2, num_rows, self._chunks, THRESHOLDS, dtype=torch.int64, device=device).unbind()
        self._lows = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._found = torch.empty(num_rows, dtype=torch.int32, device=device)
        self._list = torch.empty(num_rows, capacity, dtype=torch.int64, device=device)

    def warm_up(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        """Compile every kernel now, not while requests wait."""
        logits_1V = torch.zeros(1, self._vocab_size, dtype=torch.float32, device=floats.device)
        rows_21 = torch.full((2, 1), -1, dtype=torch.int64, device=floats.device)
        for edited in (None, logits_1V):
            self.sample(logits_1V, edited, rows_21, floats, ints, is_drawn=True, is_cut=True)
        num_words = -(-self._vocab_size // 32)
        self.forbid_(
            logits_1V, rows_21.new_zeros(1), torch.zeros(1, num_words, dtype=torch.int32, device=floats.device)
        )

    def forbid_(self, work_EV: torch.Tensor, rows_R: torch.Tensor, packed_RW: torch.Tensor) -> None:
        """Set the logits of tokens without a bit in the packed masks (int32, the first token in the lowest bit) to
        -inf, in place: mask i is for row `rows_R[i]`."""
        vocab, num_words = work_EV.shape[1], packed_RW.shape[1]
        kernel: Any = _forbid[(packed_RW.shape[0], triton.cdiv(vocab, self._chunk))]
        kernel(work_EV, rows_R, packed_RW, work_EV.stride(0), num_words, vocab, CHUNK=self._chunk, num_warps=8)

    def sample(
        self,
        logits_BV: torch.Tensor,
        edited_EV: torch.Tensor | None,
        rows_2B: torch.Tensor,
        floats: torch.Tensor,
        ints: torch.Tensor,
        is_drawn: bool,
        is_cut: bool,
    ) -> torch.Tensor:
        """Return the next token of every row, int64 `[B]`, and add 1 to the position of the slots that drew. It is
        NO_TOKEN if a logit is NaN or infinity in `logits_BV`, or none is left to choose.

        `logits_BV`, `edited_EV`: float32, dense within a row. `rows_2B`: int64, each row's index in `edited_EV` or -1
        for `logits_BV`, and its slot or -1 for argmax. `floats`, `ints`: the slots' tables, columns as in
        `sampling_numbers`. `is_drawn`: whether some row is not greedy; `is_cut`: whether some row has a top-k or top-p.
        """
        num_rows = logits_BV.shape[0]
        tokens_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
        edited = logits_BV if edited_EV is None else edited_EV
        launch: Any = _peaks[num_rows, self._chunks]
        launch(
            logits_BV, edited, rows_2B, self._peaks, self._found, logits_BV.stride(0), num_rows, self._vocab_size,
            HAS_EDITED=edited_EV is not None, **self._constants,
        )  # fmt: skip
        none = rows_2B
        self._draw(
            logits_BV, edited_EV, rows_2B, floats, ints, is_drawn, is_cut, tokens_B, self._peaks, self._chunks,
            none, none, none, 0, 0,
        )  # fmt: skip
        return tokens_B

    def draws(self, floats: torch.Tensor, ints: torch.Tensor, is_cut: bool) -> Draws:
        """Return how rows of these tables are drawn, for `GreedyKernels.first_tokens`."""
        return Draws(self, floats, ints, is_cut)

    def draw_first(
        self,
        aux: torch.Tensor,
        header_bytes: int,
        numbers_4R: torch.Tensor,
        token_ids: torch.Tensor,
        draws: Draws,
        scanned: tuple[torch.Tensor, torch.Tensor, int],
        out: torch.Tensor,
    ) -> None:
        """Draw first tokens from aux rows that `greedy._scan` has read, as `sample` does, and append them. `numbers`:
        int64, the index of each row, its slot in the tables or -1 for argmax, the slot of its sequence, and the
        position of the token. `scanned`: peaks, parts of checksums, and chunks of a row. `out`: see `found_in_row`."""
        words, headers = aux.view(torch.float32), aux.view(torch.int64)
        logits = words[:, header_bytes // 4 :]
        peaks, sums, chunks = scanned
        strides = token_ids.stride(0), headers.stride(0)
        self._draw(
            logits, None, numbers_4R, draws.floats, draws.ints, True, draws.is_cut, out, peaks, chunks,
            token_ids, sums, headers, *strides, header_numbers=header_bytes // 8,
        )  # fmt: skip

    @property
    def collected(self) -> torch.Tensor:
        """Number of collected tokens of each row, which the scan before `draw_first` sets to 0."""
        return self._found

    @property
    def _constants(self) -> dict[str, Any]:
        # No fused multiply-add: two roundings make the weights the same on every device.
        return {"CHUNK": self._chunk, "CHUNKS": self._chunks, "num_warps": 8, "enable_fp_fusion": False}

    def _draw(
        self,
        logits_BV: torch.Tensor,
        edited_EV: torch.Tensor | None,
        rows: torch.Tensor,
        floats: torch.Tensor,
        ints: torch.Tensor,
        is_drawn: bool,
        is_cut: bool,
        tokens: torch.Tensor,
        peaks: torch.Tensor,
        chunks: int,
        token_ids: torch.Tensor,
        checksums: torch.Tensor,
        headers: torch.Tensor,
        token_stride: int,
        header_stride: int,
        header_numbers: int = 0,
    ) -> None:
        """Launch what follows the search for the largest logits, with `chunks` of a row."""
        num_rows = rows.shape[1]
        edited = logits_BV if edited_EV is None else edited_EV
        sizes = (logits_BV.stride(0), num_rows, self._vocab_size)
        widths = (floats.stride(0), ints.stride(0))
        constants = {"HAS_EDITED": edited_EV is not None, "CHUNKS_PAD": triton.next_power_of_2(self._chunks)}
        constants |= {"PEAKS": chunks, "PEAKS_PAD": triton.next_power_of_2(chunks), "IS_AUX": header_numbers > 0}
        constants |= self._constants
        tables = (logits_BV, edited, rows, floats, ints, peaks, self._sums)
        if is_drawn:
            launch: Any = _measure[num_rows, self._chunks]
            launch(*tables, *self._above, *sizes, *widths, **constants)
        constants |= {"CAPACITY": self._capacity}
        found = (self._lows, self._found, self._list)
        if is_cut:
            launch = _gather[num_rows, self._chunks]
            launch(*tables, *self._above, *found, *sizes, *widths, **constants)
        launch = _finish[(num_rows,)]
        first = (token_ids, checksums, headers)
        strides = (token_stride, header_stride)
        launch(*tables, *found, tokens, *first, *sizes, *widths, *strides, HEADER_NUMBERS=header_numbers, **constants)
