"""A step's tokens and logprobs on their way to the host: one copy behind the step into pinned memory, and an event
behind the copy. Owned by `ModelRunner`, step thread only.

Two buffers are used in turn, so that the copy of a step may run while the tokens of the one before are read. Logprobs
are computed on the device, for the rows that asked, from the model's unmodified logits. A row is one line of int64, so
that one copy brings all: the token, the bits of its own logprob (float32), then ids and logprob bits of the most likely
tokens. A `Mark` is a CUDA event, or in tests a twin that passes when the test lets it.

Invariants: a buffer is not written again before its tokens were read; computing logprobs waits for nothing; a step
without logprobs costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from chitu.engine.batch import upload
from chitu.engine.executor import MAX_UNREAD_STEPS, DoneStep, StepHandle, StepResult
from chitu.errors import Internal
from chitu.kv_cache.aux_row import CHECKED_BYTES
from chitu.protocol import MAX_LOGPROBS

ROWS_AT_ONCE = 64
"""Rows computed together. Bounds the temporary memory: two float32 a row and vocabulary entry."""

CHECKED_NUMBERS = CHECKED_BYTES // 8


class Lines(NamedTuple):
    """Logprobs of some of a step's tokens."""

    places: list[int]
    """Indices into the step's tokens."""
    counts: list[int]
    """Number of most likely tokens that each gets of those in its line."""
    lines_MC: Tensor
    """The lines, int64 on the device."""


def logprob_lines(logits_RV: Tensor, tokens_R: Tensor, most: int) -> Tensor:
    """Return lines, int64 `[R, 1 + 2 * most]`, of float32 logits and the tokens taken. `most` is at most V."""
    lines = []
    for start in range(0, logits_RV.shape[0], ROWS_AT_ONCE):
        rows_RV, tokens = logits_RV[start : start + ROWS_AT_ONCE], tokens_R[start : start + ROWS_AT_ONCE]
        total_R1 = rows_RV.logsumexp(dim=-1, keepdim=True)
        top_RK, ids_RK = rows_RV.topk(most, dim=-1)
        pairs = torch.stack([ids_RK, _bits(top_RK - total_R1)], dim=-1).flatten(1)
        lines.append(torch.cat([_bits(rows_RV.gather(1, tokens[:, None]) - total_R1), pairs], dim=1))
    return torch.cat(lines)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).long()


def packed_lines(lines_MC: Tensor, counts: Sequence[int]) -> list[bytes]:
    """Pack lines on the host, each with its count of most likely tokens, for `protocol/logprobs.py`."""
    numbers = lines_MC.numpy().astype("<i4")
    return [line[: 1 + 2 * count].tobytes() for line, count in zip(numbers, counts, strict=True)]


def packed_matrix(lines_TC: Tensor) -> bytes:
    """Pack the lines of a prompt, each in full."""
    return lines_TC.numpy().astype("<i4").tobytes()


class StepLogprobs:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[int, int] = {}
        """Most likely tokens wanted, by slot, for slots that ask for logprobs."""

    def admit(self, slot: int, count: int | None) -> None:
        """Note the request of the slot. `count`: `SamplingParams.logprobs`."""
        self.release(slot)
        if count is not None:
            self._counts[slot] = min(count, self._vocab_size)

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether one of these slots asks for logprobs."""
        return not self._counts.keys().isdisjoint(slots)

    def release(self, slot: int) -> None:
        """Forget the request of the slot, if any."""
        self._counts.pop(slot, None)

    def lines(self, logits_RV: Tensor, slots: list[int], tokens_R: Tensor, first_place: int) -> Lines | None:
        """Return lines of a step's tokens from index `first_place` on. `tokens_R[i]` is for `slots[i]`, from row i."""
        if not self._counts:
            return None
        rows = [row for row, slot in enumerate(slots) if slot in self._counts]
        if not rows:
            return None
        if len(rows) < len(slots):
            where = upload(rows, self._device)
            logits_RV, tokens_R = logits_RV.index_select(0, where), tokens_R.index_select(0, where)
        # As wide as the widest of all slots, so that parts of one step can be concatenated. NO_TOKEN has no logprob.
        lines_MC = logprob_lines(logits_RV, tokens_R.clamp(min=0), max(self._counts.values()))
        return Lines([first_place + row for row in rows], [self._counts[slots[row]] for row in rows], lines_MC)


def joined(parts: list[Lines]) -> Lines | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    places = [place for part in parts for place in part.places]
    counts = [count for part in parts for count in part.counts]
    return Lines(places, counts, torch.cat([part.lines_MC for part in parts]))


class Mark(Protocol):
    """A point in the device's queue behind everything launched so far."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Checks(NamedTuple):
    """Whether the numbers of some slots are sound."""

    slots: list[int]
    is_sound_N: torch.Tensor
    """bool, on the device."""


class Guesses(NamedTuple):
    """What the model drafts behind the newest tokens of some slots; of a slot with several, in order."""

    slots: list[int]
    tokens_N: torch.Tensor
    """int64, on the device."""


class FoundRows(NamedTuple):
    """What was found in the aux rows of some slots."""

    slots: list[int]
    found_RC: torch.Tensor
    """`RowSums.checked`: int64, on the device."""
    behind_tokens: Tensor | None = None
    """The same behind the tokens of these slots, as one tensor, if it is there already."""


@dataclass(slots=True)
class _Buffer:
    numbers: torch.Tensor
    """Tokens, the lines of their logprobs, checks, guesses, then rows; int64, in host memory."""
    is_unread: bool = False


@dataclass(slots=True, frozen=True)
class _UnreadStep:
    slots: list[int]
    mark: Mark
    buffer: _Buffer | None
    lines: Lines | None
    prompt_lines: dict[int, torch.Tensor]
    failures: dict[int, str]
    checked: list[int]
    guessed: list[int]
    rows: list[int]

    def is_done(self) -> bool:
        return self.mark.query()

    def result(self) -> StepResult:
        self.mark.synchronize()
        if self.buffer is None:
            return _result([], None, None, self.prompt_lines, {}, [], [], [])
        self.buffer.is_unread = False
        found = self.lines, self.prompt_lines, self.failures, self.checked, self.guessed, self.rows
        return _result(self.slots, self.buffer.numbers, *found)


def _result(
    slots: list[int],
    numbers: torch.Tensor | None,
    lines: Lines | None,
    prompt_lines: dict[int, torch.Tensor],
    failures: dict[int, str],
    checked: list[int],
    guessed: list[int],
    rows: list[int],
) -> StepResult:
    prompts = {slot: packed_matrix(lines_TC) for slot, lines_TC in prompt_lines.items()}
    if numbers is None:
        return StepResult(slots, [], {}, prompts, failures)
    end = len(slots)
    packed = {}
    if lines is not None:
        own = numbers[end : end + lines.lines_MC.numel()].view(lines.lines_MC.shape)
        packed = dict(zip(lines.places, packed_lines(own, lines.counts), strict=True))
        end += own.numel()
    unsound = []
    if checked:
        checks = numbers[end : end + len(checked)].tolist()
        unsound = [slot for slot, is_sound in zip(checked, checks, strict=True) if not is_sound]
        end += len(checked)
    drafts: dict[int, list[int]] = {}
    if guessed:
        for slot, token in zip(guessed, numbers[end : end + len(guessed)].tolist(), strict=True):
            drafts.setdefault(slot, []).append(token)
        end += len(guessed)
    found: dict[int, bytes] = {}
    if rows:
        of_rows = numbers[end : end + len(rows) * CHECKED_NUMBERS].view(len(rows), -1).numpy()
        found = {slot: row.tobytes() for slot, row in zip(rows, of_rows, strict=True)}
    return StepResult(slots, numbers[: len(slots)].tolist(), packed, prompts, failures, unsound, drafts, found)


class StepTokens:
    """Buffers for the tokens of steps. `most`: tokens of one step. `mark`: makes a mark on the device's current queue;
    None for a device without a queue. `is_pinned`: False only in tests."""

    def __init__(self, most: int, mark: Callable[[], Mark] | None, is_pinned: bool = True) -> None:
        self._mark = mark
        self._turn = 0
        self._buffers: list[_Buffer] = []
        if mark is not None:
            most_numbers = 3 + 2 * MAX_LOGPROBS + CHECKED_NUMBERS
            self._buffers = [
                _Buffer(torch.zeros(most * most_numbers, dtype=torch.int64, pin_memory=is_pinned))
                for _ in range(MAX_UNREAD_STEPS)
            ]

    def launched(
        self,
        slots: list[int],
        tokens_N: torch.Tensor | None,
        lines: Lines | None = None,
        prompt_lines: dict[int, torch.Tensor] | None = None,
        failures: dict[int, str] | None = None,
        checks: Sequence[Checks] = (),
        guesses: Guesses | None = None,
        rows: FoundRows | None = None,
    ) -> StepHandle:
        """Return the handle of the step just launched. `tokens_N[i]` is for `slots[i]`; None if it samples none.
        `prompt_lines`, by slot, are large and rare: each gets its own copy. `failures`: as in `StepResult`."""
        prompt_lines, failures = prompt_lines or {}, failures or {}
        checked = [slot for each in checks for slot in each.slots]
        guessed = [] if guesses is None else guesses.slots
        parts = [] if tokens_N is None else [tokens_N]
        if tokens_N is not None and lines is not None:
            parts.append(lines.lines_MC.flatten())
        parts += [each.is_sound_N.long() for each in checks]
        if guesses is not None:
            parts.append(guesses.tokens_N)
        row_slots = [] if rows is None else rows.slots
        if rows is not None and rows.behind_tokens is not None and len(parts) == 1 and rows.slots == slots:
            parts = [rows.behind_tokens]
        elif rows is not None:
            parts.append(rows.found_RC.flatten())
        tokens_N = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
        if self._mark is None:
            return DoneStep(_result(slots, tokens_N, lines, prompt_lines, failures, checked, guessed, row_slots))
        buffer = None
        if tokens_N is not None:
            buffer = self._buffers[self._turn]
            if buffer.is_unread:
                raise Internal(f"a step was launched with {MAX_UNREAD_STEPS} unread")
            self._turn = (self._turn + 1) % len(self._buffers)
            buffer.is_unread = True
            buffer.numbers[: len(tokens_N)].copy_(tokens_N, non_blocking=True)
        prompt_lines = {slot: _on_host(lines_TC) for slot, lines_TC in prompt_lines.items()}
        return _UnreadStep(slots, self._mark(), buffer, lines, prompt_lines, failures, checked, guessed, row_slots)


def _on_host(lines_TC: torch.Tensor) -> torch.Tensor:
    """Start a copy to the host, complete when the step's mark has passed."""
    if lines_TC.device.type == "cpu":
        return lines_TC
    host = torch.empty(lines_TC.shape, dtype=lines_TC.dtype, pin_memory=True)
    return host.copy_(lines_TC, non_blocking=True)
