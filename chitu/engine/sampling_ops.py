"""Tensor arithmetic of sampling: stateless, one row a request, every row computed as if it were alone.

Called by `sampler.py` on the step thread. Nothing here synchronises with the device, except the searches of `cutoff`
and `choose` on a CPU, where reading a value is free. `ops/kernels/sampling.py` is its twin on CUDA.

Probabilities are summed as integers, `floor(exp(logit - row max) * 2^40)`. Such sums do not depend on the order of
summation, so a row has the same top-p whatever the batch, the number of threads or the kernel. The power is the same on
every device, too (`ops/sampling_numbers.py`).

A draw is an exponential race (docs/adr/0039): each token has its own exponential number, a hash of the seed, the
position and the id, and the largest quotient of weight and that number wins. The winner changes only if two quotients
are as near as the rounding of their logits.

*Scaled* logits count bits: divided by the temperature and by ln 2.

Shape suffixes: M rows, V vocabulary, K candidates, L tokens seen so far.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chitu.ops import sampling_numbers as numbers

NARROW_SEARCH = 1024
"""Candidates that a CPU sorts first for top-p. If they are too few, it sorts the whole vocabulary."""
LARGEST_LOGIT = 1e27
"""Bound of logits after penalties, so that a tiny repetition penalty, divided by the lowest temperature, does not
overflow float32. A tenth of what forbids a token (`restrictions.NEVER`)."""
IN_PROMPT = 1 << 30
"""Flag in a row of token counts: the token occurs in the prompt. The bits below count its emissions."""
_LOW_MIX_2 = numbers.LOW_MIX_2 - (1 << 32)


def int64_of(value: int) -> int:
    """Return the low 64 bits of any integer as the int64 that tensors hold."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN, _MIX_1, _MIX_2 = map(int64_of, (numbers.GOLDEN, numbers.MIX_1, numbers.MIX_2))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically: `>>` of an int64 would copy the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def draw_keys(seed_M: Tensor, position_M: Tensor) -> Tensor:
    """Return int64 keys `[M]`, 64 mixed bits of each request's seed and its number of emitted tokens (both int64).

    Counter based (splitmix64 twice), so no generator state must survive a retraction or move from P to D.
    """
    return _splitmix64(_splitmix64(seed_M) ^ position_M)


def token_bits(key_M: Tensor, vocab: int) -> Tensor:
    """Return an odd int32 above 0 for each token of each draw, `[M, vocab]`: its uniform number times 2^31."""
    halves_M2 = key_M.view(torch.int32).view(-1, 2)
    x = torch.arange(vocab, dtype=torch.int32, device=key_M.device) + halves_M2[:, :1]
    y = x >> 16
    x.bitwise_xor_(y.bitwise_and_(0xFFFF)).mul_(numbers.LOW_MIX_1)
    torch.bitwise_right_shift(x, 15, out=y)
    x.bitwise_xor_(y.bitwise_and_(0x1FFFF)).bitwise_xor_(halves_M2[:, 1:]).mul_(_LOW_MIX_2)
    torch.bitwise_right_shift(x, 16, out=y)
    x.bitwise_xor_(y.bitwise_and_(0xFFFF))
    return x.bitwise_and_((1 << numbers.UNIFORM_BITS) - 1).bitwise_or_(1)


def exponential(bits: Tensor) -> Tensor:
    """Return the exponential numbers (float32, mean 1) of these `token_bits`: never below their uniform numbers."""
    step = 2.0**-numbers.UNIFORM_BITS
    u = bits.float() * step
    v = ((bits ^ ((1 << numbers.UNIFORM_BITS) - 1)) + 1).float() * step
    k = (v.view(torch.int32) - numbers.THREE_QUARTERS) >> numbers.EXPONENT_SHIFT
    m = (v.view(torch.int32) - (k << numbers.EXPONENT_SHIFT)).view(torch.float32)
    # A small number u keeps all its bits, which 1 - u has lost.
    f = torch.where(bits < 1 << (numbers.UNIFORM_BITS - 2), -u, m - 1.0)
    q = torch.full_like(f, numbers.LOG1P[0])
    for coefficient in numbers.LOG1P[1:]:
        q.mul_(f).add_(coefficient)
    return k.float() * -numbers.LN2 - f * q


def penalised(
    logits_ML: Tensor, counts_ML: Tensor, presence_M: Tensor, frequency_M: Tensor, repetition_M: Tensor
) -> Tensor:
    """Return logits (float32) of tokens seen so far after the repetition, then frequency and presence penalty.

    `counts`: int32, as described at `IN_PROMPT`. A token that was not seen (count 0) keeps its logit.
    """
    factor_ML = torch.where(logits_ML > 0, 1.0 / repetition_M[:, None], repetition_M[:, None])
    logits_ML = logits_ML * factor_ML.masked_fill_(counts_ML == 0, 1.0)
    emitted_ML = counts_ML & (IN_PROMPT - 1)
    logits_ML = logits_ML - frequency_M[:, None] * emitted_ML - presence_M[:, None] * (emitted_ML > 0)
    return logits_ML.clamp_(max=LARGEST_LOGIT)


def is_finite(rows_RX: Tensor) -> Tensor:
    """Return, bool `[R]`, whether all numbers of a row are finite."""
    largest_R: Tensor = torch.linalg.vector_norm(rows_RX, torch.inf, dim=-1)
    return largest_R.isfinite()


def is_sound(logits_RV: Tensor) -> Tensor:
    """Return, bool `[R]`, whether a token can be drawn: no logit is NaN or infinity, and not all are minus infinity
    (the logit of a token that is never drawn)."""
    return logits_RV.amax(dim=-1).isfinite()


def marked(tokens_R: Tensor, is_sound_R: Tensor) -> Tensor:
    """Return the tokens, with NO_TOKEN for rows that are not sound."""
    return tokens_R.masked_fill(~is_sound_R, numbers.NO_TOKEN)


def greedy(logits_RV: Tensor) -> Tensor:
    """Return the token with the largest logit of each row, the first of equal ones; NO_TOKEN if the row is not
    sound."""
    return marked(logits_RV.argmax(dim=-1), is_sound(logits_RV))


def append_greedy_(logits_BV: Tensor, rows_2B: Tensor, token_ids: Tensor, tokens_B: Tensor, scratch_slot: int) -> None:
    """Write each row's greedy token to `tokens`, append it to its sequence behind its position, and advance that.

    `rows`: int64, slots and positions of the rows; `token_ids`: int64 `[slots, positions]`, whose last column takes
    what a full sequence emits but never feeds. The scratch slot's position stays.
    """
    greedy_B = logits_BV.argmax(-1)
    token_ids[rows_2B[0], rows_2B[1] + 1] = greedy_B
    tokens_B.copy_(marked(greedy_B, is_sound(logits_BV)))
    rows_2B[1] += rows_2B[0] != scratch_slot


def unit_of(temperature: float) -> float:
    """Return the divisor of scaled logits; 0 means argmax."""
    return temperature * math.log(2)


def log_min_p(min_p: float) -> float:
    """Return log2 of min-p: how many bits a token may be below the most probable one; -inf if min-p is off."""
    return math.log2(min_p) if min_p > 0.0 else -math.inf


def weights(scaled_MV: Tensor) -> Tensor:
    """Return unnormalised probabilities, float32, with 2^40 for the row's maximum. Only their integer parts are used.

    A row whose largest value is not finite gets 0. Does not use `exp`: libraries round its last bit differently.
    """
    top_M = scaled_MV.amax(dim=-1)
    t = (scaled_MV - top_M[:, None]).clamp_(min=numbers.SMALLEST_EXPONENT)
    n = t + numbers.ROUND_TO_INTEGER
    t.sub_(n - numbers.ROUND_TO_INTEGER)
    highest, *others = numbers.EXP2
    p = t * highest
    for coefficient in others:
        p.add_(coefficient).mul_(t)
    p.add_(1.0)
    p.view(torch.int32).add_(n.view(torch.int32).bitwise_left_shift_(numbers.EXPONENT_SHIFT))
    is_hopeless_M = ~top_M.isfinite()
    if p.device.type != "cpu" or bool(is_hopeless_M.any()):
        p.masked_fill_(is_hopeless_M[:, None], 0.0)
    return p


def at_least(values: Tensor, floor_M: Tensor) -> Tensor:
    """Return 1.0 for values that reach their row's floor, else 0.0. A CPU multiplies far faster than it masks."""
    return values.clone().ge_(floor_M[:, None])


class FilterNeeds(NamedTuple):
    """Host knowledge of the filters of some rows, so that the device does no more than they need."""

    largest_k: int
    """The largest top-k; 0 if no row has one."""
    top_p: bool
    """Whether some row has a top-p."""
    open_top_p: bool
    """Whether some row has a top-p without a top-k: any number of candidates may be needed."""


def cutoff(
    scaled_MV: Tensor,
    weights_MV: Tensor,
    top_k_M: Tensor,
    top_p_M: Tensor,
    log_min_p_M: Tensor,
    needs: FilterNeeds,
) -> Tensor:
    """Return the smallest logit `[M]` that each row may choose after min-p, then top-k, then top-p of the rest.

    Tokens that tie with the last one kept are kept too (as transformers does for top-k), so the order in which a sort
    puts equal values never matters. `top_k` 0, `top_p` 1 and `log_min_p` -inf mean off.
    """
    floor_M = scaled_MV.amax(dim=-1) + log_min_p_M.float()
    if needs.largest_k == 0 and not needs.top_p:
        return floor_M
    vocab = scaled_MV.shape[-1]
    candidates = min(vocab, needs.largest_k)
    if needs.open_top_p:
        candidates = min(vocab, max(candidates, NARROW_SEARCH)) if scaled_MV.device.type == "cpu" else vocab
    sorted_MK = _largest(scaled_MV, candidates)
    kth_M = sorted_MK.gather(1, (top_k_M - 1).clamp(0, candidates - 1)[:, None]).squeeze(1)
    floor_M = torch.maximum(floor_M, torch.where(top_k_M > 0, kth_M, -math.inf))

    if not needs.top_p:
        return floor_M

    allowed_M = (weights_MV * at_least(scaled_MV, floor_M)).long().sum(-1).double() * top_p_M
    while True:
        # Token j of the order is kept if those before it have less than top_p of the weight that is left.
        weights_MK = (weights(sorted_MK) * at_least(sorted_MK, floor_M)).long()
        reached_MK = weights_MK.cumsum(-1)
        if candidates < vocab and needs.open_top_p:
            short_M = (reached_MK[:, -1] < allowed_M) & (sorted_MK[:, -1] > floor_M) & (top_p_M < 1)
            if bool(short_M.any()):
                candidates = vocab
                sorted_MK = _largest(scaled_MV, vocab)
                continue
        kept_M = ((reached_MK - weights_MK) < allowed_M[:, None]).sum(-1).clamp_(min=1)
        nucleus_M = sorted_MK.gather(1, (kept_M - 1)[:, None]).squeeze(1)
        return torch.where(top_p_M < 1, torch.maximum(floor_M, nucleus_M), floor_M)


def _largest(scaled_MV: Tensor, count: int) -> Tensor:
    """Return each row's `count` largest values, descending. On a CPU numpy sorts 10 to 25 times as fast as torch."""
    vocab = scaled_MV.shape[-1]
    if scaled_MV.device.type == "cpu":
        values = scaled_MV.numpy()
        part = values if count == vocab else np.partition(values, vocab - count, axis=-1)[:, vocab - count :]
        return torch.from_numpy(np.sort(part, axis=-1)).flip(-1)
    if count == vocab:
        return scaled_MV.sort(dim=-1, descending=True).values
    return scaled_MV.topk(count, dim=-1).values


def choose(weights_MV: Tensor, key_M: Tensor) -> Tensor:
    """Return, int64 `[M]`, the token whose weight over its exponential number is largest; of equal ones the first.

    `key`: of `draw_keys`. A row without any weight (the largest logit is not finite) gets NO_TOKEN.
    """
    if weights_MV.device.type == "cpu":
        return torch.tensor([_choose_one(weights_V, key) for weights_V, key in zip(weights_MV, key_M, strict=True)])
    largest = (weights_MV.trunc() / exponential(token_bits(key_M, weights_MV.shape[-1]))).max(dim=-1)
    return marked(largest.indices, largest.values > 0.0)


def _choose_one(weights_V: Tensor, key: Tensor) -> int:
    """Return what `choose` does. Makes few exponential numbers: of the token with the largest bound at that time.

    A token's bound is its weight over its uniform number. Rows one by one stay in a CPU's cache.
    """
    bits_V = token_bits(key[None], weights_V.shape[0])[0]
    bounds_V = (weights_V / bits_V.float().mul_(2.0**-numbers.UNIFORM_BITS)).numpy()
    token = int(bounds_V.argmax())
    while True:
        bounds_V[token] = weights_V[token].trunc() / exponential(bits_V[token])
        best = int(bounds_V.argmax())
        if best == token:
            return token if bounds_V[token] > 0.0 else numbers.NO_TOKEN
        token = best
