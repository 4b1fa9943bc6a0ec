r"""Which work the rows of a batch need, in which order the sampler does it, and which tokens a row may emit. Owned by
the sampler; step thread.

A bad word is a sequence of tokens: its last one is forbidden if the request has just emitted the ones before it. The
device tracks emitted tokens, because a token may not have been read yet when the next one is drawn. `allowed_token_ids`
override bad words: if these forbid all allowed tokens, an allowed one is drawn all the same.

*Grammars*: a matcher on the host must have consumed a row's newest token before the next mask can be made. If steps
overlap, that token may still be on its way to the host when the next step has been launched up to its logits. It is
copied behind its own step, and `PendingTokens` waits for it before the masks are made, while the device computes.

A mask has one bit a token. The host combines it with the row's other limits: `allowed_token_ids` (the request fails if
they leave no token that the grammar allows), and the eos and stop ids that `min_tokens` masks, which the grammar
overrides.

Rows that need more than an argmax form the *work matrix*, sorted so that every kind of work is one slice of it:

    edited greedy | edited random | edited random, filtered | random, filtered | random
    \_____________ edited ________________________________/
                    \_____________ drawn ____________________________________________/
                                    \_____ filtered ______________________/

*Edited*: penalties, logit bias, masked stop ids or forbidden tokens change the logits. *Filtered*: by min-p, top-k or
top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chitu.engine.batch import upload, upload_tensor
from chitu.engine.sampling_ops import FilterNeeds
from chitu.errors import InvalidRequest
from chitu.grammars import Matcher
from chitu.protocol import MAX_BAD_WORD_TOKENS, SamplingParams

NEVER = -1e28
"""Added to the logit of a forbidden token, so that its weight is 0 beside that of any other token. Finite and small
enough for float32, even if every bad word of a request adds it and the lowest temperature divides the sum."""
HISTORY = MAX_BAD_WORD_TOKENS - 1
"""Number of newest emitted tokens that bad words can depend on."""
ANY, NONE = -1, -2
"""In a history: ANY matches every token, NONE is no token."""
ROWS_AT_ONCE = 64
"""Rows drawn together on an accelerator; bounds the temporary memory (about 32 bytes a row and vocabulary entry)."""
CPU_ENTRIES_AT_ONCE = 1 << 16
"""Logits drawn together on a CPU. They fit its cache (measured: twice as fast as 16 rows of 152 k)."""
NO_ENTRIES: Entries = (np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass(slots=True)
class Restriction:
    """Restrictions of one request, on the host."""

    allowed: npt.NDArray[np.int64]
    """Allowed token ids; empty means all."""
    before_EH: npt.NDArray[np.int64]
    """For each bad word, the tokens before its last one; shorter words begin with ANY."""
    last_E: npt.NDArray[np.int64]


def restriction_of(params: SamplingParams, vocab_size: int) -> Restriction | None:
    """Return the restriction, or None if every token is allowed. Leaves out ids outside the vocabulary."""
    allowed = sorted({t for t in params.allowed_token_ids if 0 <= t < vocab_size})
    words = [word for word in params.bad_words if word and min(word) >= 0 and max(word) < vocab_size]
    if not allowed and not words:
        return None
    before = [[ANY] * (HISTORY + 1 - len(word)) + list(word[:-1]) for word in words]
    return Restriction(
        np.array(allowed, np.int64),
        np.array(before, np.int64).reshape(len(words), HISTORY),
        np.array([word[-1] for word in words], np.int64),
    )


@dataclass(slots=True)
class _Words:
    """Bad words of a batch."""

    slots_E: Tensor
    before_EH: Tensor
    cells_E: Tensor
    """`work row * vocab_size + last token`."""
    followed: Tensor
    """Work rows whose emitted tokens go into the history."""


@dataclass(slots=True)
class Restrictions:
    """Restrictions of the edited rows of a batch, on the device."""

    open_rows: Tensor | None
    """Work rows with allowed tokens."""
    open_cells: Tensor | None
    words: _Words | None

    def apply_(self, work: Tensor, history: Tensor) -> None:
        """Apply to the edited rows `[rows, vocab]`. `history` `[slots, HISTORY]`: the newest tokens of each slot."""
        flat = work.view(-1)
        if self.open_rows is not None and self.open_cells is not None:
            kept = flat.take(self.open_cells)
            work.index_fill_(0, self.open_rows, -torch.inf)
            flat[self.open_cells] = kept
        if self.words is not None:
            words = self.words
            is_before = (words.before_EH == history.index_select(0, words.slots_E)).logical_or_(words.before_EH == ANY)
            flat.index_add_(0, words.cells_E, is_before.all(dim=1).to(flat.dtype).mul_(NEVER))


def restrictions_of(
    rows: Sequence[Restriction | None], slots: Sequence[int], vocab_size: int, device: torch.device
) -> Restrictions | None:
    """Return the restrictions, `rows[i]` and `slots[i]` being those of work row i, or None if there are none."""
    if not any(rows):
        return None
    allowed = [(row, one.allowed) for row, one in enumerate(rows) if one is not None and len(one.allowed)]
    worded = [(row, one) for row, one in enumerate(rows) if one is not None and len(one.last_E)]

    def placed(array: npt.NDArray[np.int64]) -> Tensor:
        return upload_tensor(torch.from_numpy(array), device)

    words = None
    if worded:
        words = _Words(
            slots_E=placed(np.repeat([slots[row] for row, _ in worded], [len(one.last_E) for _, one in worded])),
            before_EH=placed(np.concatenate([one.before_EH for _, one in worded])),
            cells_E=placed(np.concatenate([one.last_E + row * vocab_size for row, one in worded])),
            followed=upload([row for row, _ in worded], device),
        )
    return Restrictions(
        open_rows=upload([row for row, _ in allowed], device) if allowed else None,
        open_cells=placed(np.concatenate([ids + row * vocab_size for row, ids in allowed])) if allowed else None,
        words=words,
    )


Bits = npt.NDArray[np.uint32]
"""One bit a token, the first token in the lowest bit."""


def bits_of(ids: Iterable[int], vocab_size: int) -> Bits:
    """Return a mask with the bits of these ids. Leaves out ids outside the vocabulary."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[[token for token in ids if 0 <= token < vocab_size]] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


@dataclass(slots=True)
class GrammarState:
    """Grammar state of one slot."""

    matcher: Matcher
    allowed: Bits | None
    """Mask of `allowed_token_ids`."""
    held_back: Bits | None
    """Mask of eos and stop ids, until min_tokens."""

    @classmethod
    def of(cls, matcher: Matcher, params: SamplingParams, masked: Sequence[int], vocab_size: int) -> GrammarState:
        return cls(
            matcher,
            bits_of(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None,
            bits_of(masked, vocab_size) if masked else None,
        )

    def mask(self) -> Bits:
        """Return the mask of the next token, with at least one bit. Raises InvalidRequest if no token is allowed."""
        bits = self.matcher.mask()
        if self.allowed is not None:
            bits &= self.allowed
            if not bits.any():
                raise InvalidRequest("allowed_token_ids leave no token that the grammar of this request allows here")
        if self.held_back is not None and (bits & ~self.held_back).any():
            bits &= ~self.held_back
        return bits


@dataclass(slots=True)
class GrammarRows:
    """Grammar states of the edited rows of a batch."""

    rows: list[int]
    """Rows of the work matrix that have a grammar."""
    rows_R: Tensor
    tokens_R: Tensor
    """Their places among the tokens of the batch."""
    slots: list[int]
    courses: list[GrammarState]

    @classmethod
    def of(
        cls, states: Sequence[GrammarState | None], rows: Sequence[int], slots: Sequence[int], device: torch.device
    ) -> GrammarRows | None:
        """Return the states, or None if no row has a grammar. `states[i]` is that of work row i, which is row `rows[i]`
        of the batch, for slot `slots[rows[i]]`."""
        places = [place for place, state in enumerate(states) if state is not None]
        if not places:
            return None
        courses = [state for state in states if state is not None]
        in_work, in_batch = upload([places, [rows[place] for place in places]], device)
        return cls(places, in_work, in_batch, [slots[rows[place]] for place in places], courses)

    def apply_(self, work: Tensor, forbid_: Callable[[Tensor, Tensor, Tensor], None]) -> dict[int, str]:
        """Set forbidden tokens of the edited rows `[rows, vocab]` to -inf, by `forbid_`. Return, by slot, why no token
        is allowed; such a row stays as it is."""
        failures: dict[int, str] = {}
        num_words = -(-work.shape[1] // 32)
        masks = np.full((len(self.rows), num_words), 0xFFFFFFFF, np.uint32)
        for i, course in enumerate(self.courses):
            try:
                masks[i] = course.mask()
            except InvalidRequest as error:
                failures[self.slots[i]] = error.message
        packed_RW = upload_tensor(torch.from_numpy(masks.view(np.int32)), work.device)
        forbid_(work, self.rows_R, packed_RW)
        return failures


def forbid_(work: Tensor, rows_R: Tensor, packed_RW: Tensor) -> None:
    """Set forbidden tokens to -inf: the twin of `SamplingKernels.forbid_`."""
    logits_RV = work.index_select(0, rows_R)
    logits_RV.masked_fill_(forbidden(packed_RW, work.shape[1]), -torch.inf)
    work.index_copy_(0, rows_R, logits_RV)


def forbidden(packed_RW: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens have no bit in packed masks (int32), as bool `[R, V]`."""
    bits_32 = torch.arange(32, dtype=torch.int32, device=packed_RW.device)
    return ((packed_RW[:, :, None] >> bits_32) & 1).view(packed_RW.shape[0], -1)[:, :vocab_size] == 0


class PendingTokens:
    """Tokens that matchers have not consumed yet: those of the newest step."""

    def __init__(self, device: torch.device) -> None:
        self._is_async = device.type == "cuda"
        self._owed: list[tuple[list[GrammarState], Tensor, torch.cuda.Event | None]] = []

    def note(self, rows: GrammarRows, tokens_N: Tensor) -> None:
        """Start the copy of these rows' tokens to the host."""
        tokens = tokens_N.index_select(0, rows.tokens_R)
        event = None
        if self._is_async:
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._owed.append((rows.courses, tokens, event))

    def settle(self) -> None:
        for courses, tokens, event in self._owed:
            if event is not None:
                event.synchronize()
            for course, token in zip(courses, tokens.tolist(), strict=True):
                course.matcher.consume([token])
        self._owed = []


@dataclass(slots=True)
class Edits:
    """Values to add to logits, as a flat list. The cost is proportional to the number of entries."""

    cells: Tensor
    """`row * vocab_size + token id`, int64."""
    values: Tensor
    """float32."""

    def add_to_(self, logits_RV: Tensor) -> None:
        logits_RV.view(-1).index_add_(0, self.cells, self.values)


Entries = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Entries of one row: token ids, each once, and the values to add."""


def entries_of(values: dict[int, float]) -> Entries:
    return np.fromiter(values, np.int64, len(values)), np.fromiter(values.values(), np.float32, len(values))


def edits_of(rows: list[Entries], vocab_size: int, device: torch.device) -> Edits | None:
    """Return the edits with `rows[i]` for row i, or None if there is nothing to add."""
    if not any(len(ids) for ids, _ in rows):
        return None
    cells = np.concatenate([ids + row * vocab_size for row, (ids, _) in enumerate(rows)])
    values = np.concatenate([values for _, values in rows])
    return Edits(upload_tensor(torch.from_numpy(cells), device), upload_tensor(torch.from_numpy(values), device))


@dataclass(slots=True)
class SamplingSlot:
    """Host side state of an admitted slot: which work its rows need."""

    random: bool
    top_k: int
    top_p: float
    filtered: bool
    penalised: bool
    num_tokens: int
    """Prompt and emitted tokens at the last `admit`; if `penalised`, plus those emitted since."""
    bias: Entries
    masked: Entries
    restriction: Restriction | None
    masked_steps: int
    """Number of tokens still to emit before eos and stop ids (`masked`) are allowed."""
    course: GrammarState | None = None

    @property
    def edited(self) -> bool:
        is_limited = self.restriction is not None or self.course is not None
        return self.penalised or len(self.bias[0]) > 0 or self.masked_steps > 0 or is_limited

    @property
    def special(self) -> bool:
        return self.random or self.edited


@dataclass(slots=True)
class LayoutSegment:
    """Contiguous random rows of the work matrix that are drawn together."""

    start: int
    end: int
    filtered: bool
    needs: FilterNeeds


@dataclass(slots=True)
class BatchLayout:
    """Places of the special rows of one batch. Reused while the slots stay the same, so a steady batch plans once."""

    rows: Tensor
    """Rows of the logits that need more than an argmax, in the order of the work matrix."""
    slots: Tensor
    """Slots of `rows`."""
    num_greedy: int
    """Number of edited greedy rows, with which the work matrix begins; the other rows are drawn."""
    num_edited: int
    """Number of edited rows, greedy then random, with which the work matrix begins."""
    bias: Edits | None
    mask: Edits | None
    restrictions: Restrictions | None
    courses: GrammarRows | None
    penalised: Tensor | None
    """Work rows with penalties."""
    penalised_slots: list[int]
    """Slots of the work rows with penalties."""
    segments: list[LayoutSegment]
    masked: list[int]
    """Slots that have not reached min_tokens."""
    any_plain: bool
    sources: Tensor | None
    """For kernels, `[2, N]`: each row's index among the edited rows, and its slot; -1 if it has none."""
    is_cut: bool
    """Whether some row has a top-k or top-p."""

    @property
    def follows(self) -> bool:
        """Whether the tokens are kept here, for penalties, bad words or grammars."""
        has_words = self.restrictions is not None and self.restrictions.words is not None
        return self.penalised is not None or has_words or self.courses is not None


def place(state: SamplingSlot) -> int:
    """Return the sort key of a special row in the work matrix."""
    if not state.random:
        return 0
    if state.edited:
        return 2 if state.filtered else 1
    return 3 if state.filtered else 4


def sources_of(num_rows: int, order: list[int], slots: list[int], num_edited: int) -> list[list[int]]:
    """Return `BatchLayout.sources`. `order`: the special rows in the order of the work matrix."""
    edited, special = [-1] * num_rows, [-1] * num_rows
    for place_in_work, row in enumerate(order):
        special[row] = slots[row]
        if place_in_work < num_edited:
            edited[row] = place_in_work
    return [edited, special]


def rows_at_once(device: torch.device, vocab_size: int) -> int:
    """Return how many rows are drawn together."""
    return max(2, min(ROWS_AT_ONCE, CPU_ENTRIES_AT_ONCE // vocab_size)) if device.type == "cpu" else ROWS_AT_ONCE


def segments_of(ordered: list[SamplingSlot], start: int, most: int) -> list[LayoutSegment]:
    """Cut the random rows from `start` on into segments: where filtering begins or ends, and after `most` rows."""
    segments = []
    while start < len(ordered):
        filtered = ordered[start].filtered
        end = start + 1
        while end < len(ordered) and end - start < most and ordered[end].filtered == filtered:
            end += 1
        part = ordered[start:end]
        segments.append(
            LayoutSegment(
                start=start,
                end=end,
                filtered=filtered,
                needs=FilterNeeds(
                    largest_k=max(state.top_k for state in part),
                    top_p=any(state.top_p < 1.0 for state in part),
                    open_top_p=any(state.top_p < 1.0 and state.top_k == 0 for state in part),
                ),
            )
        )
        start = end
    return segments
