"""Greedy tokens in two launches: each row's largest logit, whether the row is sound, and its token appended to its
sequence. For first tokens the rows are aux rows, and the first launch also sums up what their checksums cover: a row is
read once. If some of them are drawn, the launches of `sampling.py` follow the first one in place of the second.

Gives the tokens of `sampling_ops.greedy`, bit by bit, and the sums of `kv_cache/device_rows.py`. Called by
`ModelRunner` and `StepGraphs` on the step thread. Every launch can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.kernels.sampling import (
    CHUNK,
    INFINITY_KEY,
    LARGEST_KEY,
    LARGEST_PACKED,
    LOWEST,
    NO_TOKEN,
    Draws,
    _best,
    _ordered,
    found_in_row,
)


# The numbers of a launch begin anywhere in one upload: an alignment more would be a kernel more, compiled by a request.
@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["index_ptr"])
def _scan(
    words_ptr, index_ptr, weights_ptr, peaks_ptr, sums_ptr, collected_ptr, row_stride, num_words, vocab,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, IS_AUX: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk). Aux rows are at `index`, and begin one word before the logits. Of these nothing is
    collected yet (`sampling._gather`)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = at - 1 if IS_AUX else at
    source = tl.load(index_ptr + row) if IS_AUX else row
    words = tl.load(words_ptr + source * row_stride + at, mask=at < num_words, other=0)
    x = words.to(tl.float32, bitcast=True)
    packed = (_ordered(x).to(tl.int64) << 32) | (ids ^ LARGEST_KEY).to(tl.int64)
    packed = tl.where(x < float("inf"), packed, LARGEST_PACKED)
    tl.store(peaks_ptr + row * CHUNKS + chunk, tl.max(tl.where((ids >= 0) & (ids < vocab), packed, LOWEST), 0))
    if IS_AUX:
        weights = tl.load(weights_ptr + at, mask=at < num_words, other=0)
        tl.store(sums_ptr + row * CHUNKS + chunk, tl.sum(words.to(tl.int64) * weights, 0))
        if chunk == 0:
            tl.store(collected_ptr + row, 0)


@triton.jit(do_not_specialize=["num_rows", "scratch_slot"], do_not_specialize_on_alignment=["numbers_ptr", "rows_ptr"])
def _append(
    peaks_ptr, sums_ptr, numbers_ptr, headers_ptr, rows_ptr, token_ids_ptr, tokens_ptr, header_stride, token_stride,
    num_rows, scratch_slot, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, IS_AUX: tl.constexpr,
    HEADER_NUMBERS: tl.constexpr,
):  # fmt: skip
    """One program a row. `rows`: slots, then positions. A decoded row's token comes behind its position, which moves
    on; a first token comes to its position. `tokens`: the tokens, then for aux rows header and checksum of each."""
    row = tl.program_id(0).to(tl.int64)
    best = _best(peaks_ptr, row, CHUNKS, CHUNKS_PAD)
    key = best >> 32
    is_sound = (key < INFINITY_KEY) & (key > -INFINITY_KEY - 1)
    token = tl.where(is_sound, (best & LARGEST_KEY) ^ LARGEST_KEY, NO_TOKEN)
    slot, position = tl.load(rows_ptr + row), tl.load(rows_ptr + num_rows + row)
    tl.store(tokens_ptr + row, token)
    place = position if IS_AUX else position + 1
    tl.store(token_ids_ptr + slot * token_stride + place, tl.where(is_sound, token, 0))
    if IS_AUX:
        found_in_row(
            tokens_ptr + num_rows + row * (HEADER_NUMBERS + 1),
            headers_ptr + tl.load(numbers_ptr + row) * header_stride,
            sums_ptr + row * CHUNKS,
            CHUNKS,
            CHUNKS_PAD,
            HEADER_NUMBERS,
        )
    else:
        tl.store(rows_ptr + num_rows + row, position + (slot != scratch_slot).to(tl.int64))


class GreedyKernels:
    """Scratch memory for up to `num_rows` rows over a vocabulary, and the launches that use it. One stream: two calls
    never overlap.

    An aux row is a header of `header_bytes`, which is a power of two, then the logits. `weights`: int64 `[W]`, of the
    words that a checksum covers, from the last one of the header on (`aux_row.row_weights`).
    """

    def __init__(
        self, num_rows: int, vocab_size: int, header_bytes: int, weights_W: torch.Tensor, chunk: int = CHUNK
    ) -> None:
        self._vocab_size, self._chunk = vocab_size, chunk
        self._weights = weights_W
        self._first_word, self._header_numbers = header_bytes // 4 - 1, header_bytes // 8
        self._chunks = triton.cdiv(weights_W.shape[0], chunk)
        self._peaks = torch.empty(num_rows * self._chunks, dtype=torch.int64, device=weights_W.device)
        self._sums = torch.empty_like(self._peaks)
        self._collected = torch.empty(num_rows, dtype=torch.int32, device=weights_W.device)

    def append_(
        self,
        logits_BV: torch.Tensor,
        rows_2B: torch.Tensor,
        token_ids: torch.Tensor,
        tokens_B: torch.Tensor,
        scratch_slot: int,
    ) -> None:
        """Do what `sampling_ops.append_greedy_` does."""
        num_rows, chunks = logits_BV.shape[0], triton.cdiv(self._vocab_size, self._chunk)
        words = logits_BV.view(torch.int32)
        none = rows_2B
        sizes: dict[str, Any] = {"CHUNKS": chunks, "IS_AUX": False}
        padded: dict[str, Any] = {"CHUNKS_PAD": triton.next_power_of_2(chunks), "HEADER_NUMBERS": self._header_numbers}
        kernel: Any = _scan[(num_rows, chunks)]
        kernel(
            words, none, self._weights, self._peaks, self._sums, none, words.stride(0), self._vocab_size,
            self._vocab_size, CHUNK=self._chunk, num_warps=8, **sizes,
        )  # fmt: skip
        kernel = _append[(num_rows,)]
        kernel(
            self._peaks, self._sums, none, none, rows_2B, token_ids, tokens_B, 0, token_ids.stride(0),
            num_rows, scratch_slot, **padded, **sizes,
        )  # fmt: skip

    def first_tokens(
        self, aux: torch.Tensor, numbers_4R: torch.Tensor, token_ids: torch.Tensor, draws: Draws | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens of aux rows, int64 `[R]`, what is found in the rows (header and checksum, int64 `[R, 9]`
        with a header of 64 bytes), and both as one tensor. `numbers`: int64, the index of each row, its slot in the
        sampler's tables or -1 if it is greedy, the slot of its sequence and the position to which the token is
        appended. `draws`: None if all rows are greedy."""
        num_rows = numbers_4R.shape[1]
        words, headers = aux.view(torch.int32), aux.view(torch.int64)
        out = torch.empty(num_rows * (2 + self._header_numbers), dtype=torch.int64, device=aux.device)
        sizes: dict[str, Any] = {"CHUNKS": self._chunks, "IS_AUX": True}
        collected = self._collected if draws is None else draws.kernels.collected
        kernel: Any = _scan[(num_rows, self._chunks)]
        kernel(
            words[:, self._first_word :], numbers_4R[0], self._weights, self._peaks, self._sums, collected,
            words.stride(0), self._weights.shape[0], self._vocab_size, CHUNK=self._chunk, num_warps=8, **sizes,
        )  # fmt: skip
        if draws is None:
            kernel = _append[(num_rows,)]
            kernel(
                self._peaks, self._sums, numbers_4R[0], headers, numbers_4R[2:], token_ids, out, headers.stride(0),
                token_ids.stride(0), num_rows, -1, CHUNKS_PAD=triton.next_power_of_2(self._chunks),
                HEADER_NUMBERS=self._header_numbers, **sizes,
            )  # fmt: skip
        else:
            scanned = self._peaks, self._sums, self._chunks
            draws.kernels.draw_first(aux, 8 * self._header_numbers, numbers_4R, token_ids, draws, scanned, out)
        return out[:num_rows], out[num_rows:].view(num_rows, -1), out
