"""The sampler: logits to tokens, batched on the device. Owns each slot's sampling state; called by the step thread.

Order of operations on a row: repetition, frequency and presence penalty; logit bias; masks of eos and stop ids (until
min_tokens), of tokens that are not allowed, that end a bad word or that break a grammar; then argmax (temperature 0),
or temperature, min-p, top-k, top-p and one draw. The draw depends only on the seed and the number of tokens emitted so
far: a request gets the same tokens in any batch, before and after a retraction (`admit` with the emitted tokens
resumes it), on D or on a unified instance.

Invariants: plain greedy slots cost one argmax; a row pays only for what its own request asked for; nothing here waits
for the device, unless a row has a grammar. The scheduler decides whether a token ends its request.

Kernels (`ops/kernels/sampling.py`) draw the rows on CUDA, `sampling_ops.py` elsewhere; both draw the same tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chitu.engine import sampling_ops
from chitu.engine.batch import upload
from chitu.engine.sampling_layout import (
    HISTORY,
    NO_ENTRIES,
    NONE,
    BatchLayout,
    GrammarRows,
    GrammarState,
    LayoutSegment,
    PendingTokens,
    SamplingSlot,
    edits_of,
    entries_of,
    forbid_,
    place,
    restriction_of,
    restrictions_of,
    rows_at_once,
    segments_of,
    sources_of,
)
from chitu.errors import Internal
from chitu.grammars import GrammarStore
from chitu.ops.sampling_numbers import LOG_MIN_P, POSITION, SEED, TOP_K, TOP_P, UNIT
from chitu.protocol import SamplingParams

if TYPE_CHECKING:
    from chitu.ops.kernels.sampling import Draws, SamplingKernels

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""

_PRESENCE, _FREQUENCY, _REPETITION = range(3, 6)
_PENALTY_ROW, _LENGTH = range(3, 5)
"""Columns of the float and the int table. `sampling_numbers` has the columns before them."""
NUM_FLOATS, NUM_INTS = 6, 5


def _is_penalised(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


class Sampler:
    """A sampler of `num_slots` slots, each free or admitted. Masks `eos_token_ids` and stop ids until min_tokens.

    `kernels`: the kernels that draw; on CUDA the sampler creates them unless given. `grammars`: the compiled grammars.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: tuple[int, ...] = (),
        kernels: SamplingKernels | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._eos = eos_token_ids
        self._states: list[SamplingSlot | None] = [None] * num_slots
        self._special: set[int] = set()
        # One table, so that a slot's numbers are one copy; the floats are float64.
        self._numbers = torch.zeros(num_slots, NUM_FLOATS + NUM_INTS, dtype=torch.int64, device=device)
        self._floats, self._ints = self._numbers[:, :NUM_FLOATS].view(torch.float64), self._numbers[:, NUM_FLOATS:]
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # The same tokens as a list, padded with token 0: penalties then cost by the tokens seen, not by the vocabulary.
        # A count of 0 protects token 0 if it is only padding.
        self._seen = torch.zeros(0, 1, dtype=torch.int64, device=device)  # torch 2.9 pads no dimension of size 0
        # The newest emitted tokens of slots with bad words.
        self._history = torch.full((num_slots, HISTORY), NONE, dtype=torch.int64, device=device)
        self._grammars = grammars
        self._owed = PendingTokens(device)
        self._failures: dict[int, str] = {}
        self._penalty_row: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._layout_of: list[int] = []
        self._layout: BatchLayout | None = None
        if kernels is None and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            from chitu.ops.kernels.sampling import SamplingKernels

            kernels = SamplingKernels(num_slots, vocab_size, device)
            kernels.warm_up(self._floats, self._ints)
        self._kernels = kernels

    @property
    def count_rows(self) -> int:
        """Rows of token counts allocated so far, `vocab_size` int32 each. Only requests with penalties need a row."""
        return self._counts.shape[0]

    @torch.inference_mode()
    def admit(
        self, slot: int, token_ids: Tensor, prompt_len: int, params: SamplingParams, numbers: Tensor | None = None
    ) -> None:
        """Start or resume a request in a slot. Replaces the request of an admitted slot.

        `token_ids`: int64 `[prompt + already emitted]` on this device; the first `prompt_len` are the prompt. Ignores
        bias and stop ids outside the vocabulary: the router refuses them. `numbers`: what `numbers_of` returns, on this
        device, if it was uploaded with something else.
        """
        self.release(slot)
        emitted = token_ids.shape[0] - prompt_len
        bias = {t: v for t, v in params.logit_bias.items() if 0 <= t < self.vocab_size and v != 0.0}
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos))
        masked = sorted(t for t in stops if 0 <= t < self.vocab_size) if params.min_tokens > emitted else []
        course = None
        if params.grammar is not None:
            if self._grammars is None:
                raise Internal("a request with a grammar reached a sampler without compiled grammars")
            matcher = self._grammars.compiled(params.grammar).matcher()
            course = GrammarState.of(matcher, params, masked, self.vocab_size)
            if emitted:
                matcher.consume(token_ids[prompt_len:].tolist())
        random = params.temperature >= GREEDY_BELOW
        state = SamplingSlot(
            random=random,
            top_k=self._top_k(params),
            top_p=params.top_p,
            filtered=random and (0 < params.top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0),
            penalised=_is_penalised(params),
            num_tokens=token_ids.shape[0],
            bias=entries_of(bias),
            masked=NO_ENTRIES if course is not None else entries_of(dict.fromkeys(masked, -torch.inf)),
            masked_steps=params.min_tokens - emitted if masked else 0,
            restriction=restriction_of(params, self.vocab_size),
            course=course,
        )
        self._states[slot] = state
        self._layout = None
        if not state.special:
            return
        self._special.add(slot)
        if params.bad_words:
            newest = token_ids[prompt_len:][-HISTORY:]
            self._history[slot] = NONE
            self._history[slot, HISTORY - newest.shape[0] :] = newest
        row = self._count_tokens(slot, token_ids, prompt_len) if state.penalised else 0
        if numbers is None:
            numbers = upload(self._numbers_of(params, emitted, state.num_tokens, row), self.device)
        self._numbers[slot] = numbers

    def numbers_of(self, params: SamplingParams, num_tokens: int, prompt_len: int) -> list[int]:
        """Return what an admission with so many tokens uploads; empty if that depends on others, or it is nothing."""
        if _is_penalised(params) or params.temperature < GREEDY_BELOW:
            return []
        return self._numbers_of(params, num_tokens - prompt_len, num_tokens, 0)

    def _numbers_of(self, params: SamplingParams, emitted: int, num_tokens: int, penalty_row: int) -> list[int]:
        """Return a slot's row of the tables."""
        floats = [
            sampling_ops.unit_of(params.temperature) if params.temperature >= GREEDY_BELOW else 0.0,
            params.top_p,
            sampling_ops.log_min_p(params.min_p),
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ]
        ints = [sampling_ops.int64_of(params.seed), emitted, self._top_k(params), penalty_row, num_tokens]
        return [*np.array(floats).view(np.int64).tolist(), *ints]

    def _top_k(self, params: SamplingParams) -> int:
        """Return top-k, 0 if it leaves all tokens."""
        return params.top_k if 0 < params.top_k < self.vocab_size else 0

    def drawn_slot(self, slot: int, params: SamplingParams | None = None) -> int:
        """Return the slot, or -1 if its tokens are those of largest logits. `params`: of an admission to come."""
        is_random = self._require(slot).random if params is None else params.temperature >= GREEDY_BELOW
        return slot if is_random else -1

    def draws_of(self, slots: list[int]) -> Draws | None:
        """Return how kernels draw the next token of each slot; None if there are none, or more is to be done."""
        states = [self._require(slot) for slot in slots]
        if self._kernels is None or any(state.edited for state in states):
            return None
        is_cut = any(state.top_k > 0 or state.top_p < 1.0 for state in states if state.random)
        return self._kernels.draws(self._floats, self._ints, is_cut)

    def release(self, slot: int) -> None:
        """Free a slot. Idempotent."""
        if self._states[slot] is None:
            return
        self._states[slot] = None
        self._failures.pop(slot, None)
        self._special.discard(slot)
        self._layout = None
        if slot in self._penalty_row:
            self._free_rows.append(self._penalty_row.pop(slot))

    def is_greedy(self, slots: list[int]) -> bool:
        """Return whether the next token of each slot is the argmax of its logits."""
        return not self._special or self._special.isdisjoint(slots)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: list[int]) -> Tensor:
        """Return each slot's next token: int64 `[N]` on the device, from float32 `[N, vocab]`, row i for `slots[i]`.
        It is NO_TOKEN if the row is not sound (`sampling_ops.is_sound`), or no token is left to choose.

        Every slot must be admitted and occur only once. Counts the tokens as emitted; does not change `logits`.
        """
        layout = self._layout_for(slots) if self._special else None
        if layout is None:
            return sampling_ops.greedy(logits)
        if self._kernels is not None:
            drawn = self._sample_by_kernels(self._kernels, logits, layout)
        else:
            drawn = sampling_ops.marked(self._sample_by_torch(logits, layout), sampling_ops.is_sound(logits))
        tokens = drawn
        if layout.follows:
            tokens = drawn.clamp(min=0)
        if layout.penalised is not None:
            self._remember(
                layout.penalised_slots,
                layout.slots.index_select(0, layout.penalised),
                tokens.index_select(0, layout.rows.index_select(0, layout.penalised)),
            )
        if layout.restrictions is not None and layout.restrictions.words is not None:
            self._follow(layout, layout.restrictions.words.followed, tokens)
        if layout.courses is not None:
            self._owed.note(layout.courses, tokens)
        if layout.masked:
            self._count_down(layout.masked)
        return drawn

    def take_failures(self) -> dict[int, str]:
        """Return and forget, by slot, why its newest token is invalid: no token was left that its grammar allows."""
        failures, self._failures = self._failures, {}
        return failures

    def _sample_by_kernels(self, kernels: SamplingKernels, logits: Tensor, layout: BatchLayout) -> Tensor:
        edited = None
        if layout.num_edited:
            edited = logits.index_select(0, layout.rows[: layout.num_edited])
            self._edit_(edited, layout)
        assert layout.sources is not None
        return kernels.sample(
            logits, edited, layout.sources, self._floats, self._ints, bool(layout.segments), layout.is_cut
        )

    def _sample_by_torch(self, logits: Tensor, layout: BatchLayout) -> Tensor:
        work = logits.index_select(0, layout.rows)
        if layout.num_edited:
            self._edit_(work[: layout.num_edited], layout)
        chosen = [sampling_ops.greedy(work[: layout.num_greedy])] if layout.num_greedy else []
        chosen += [self._draw(work, segment, layout.slots) for segment in layout.segments]
        special = torch.cat(chosen) if len(chosen) > 1 else chosen[0]
        self._ints[:, POSITION].index_add_(0, layout.slots, torch.ones_like(layout.slots))
        tokens = logits.argmax(dim=-1) if layout.any_plain else torch.empty_like(special)
        return tokens.index_copy_(0, layout.rows, special)

    def _edit_(self, work: Tensor, layout: BatchLayout) -> None:
        """Apply penalties, bias, masks, restrictions and grammars to the edited rows, in place."""
        if layout.penalised is not None:
            slots = layout.slots.index_select(0, layout.penalised)
            floats = self._floats.index_select(0, slots).float()
            rows = self._ints[:, _PENALTY_ROW].index_select(0, slots)
            seen = self._seen[:, : max(self._require(slot).num_tokens for slot in layout.penalised_slots)]
            seen = seen.index_select(0, rows)
            counts = self._counts.view(-1).take(seen + rows[:, None] * self.vocab_size)
            cells = seen + layout.penalised[:, None] * self.vocab_size
            flat = work.view(-1)
            # A token that was seen twice is written twice, with the same value.
            flat[cells] = sampling_ops.penalised(
                flat.take(cells), counts, floats[:, _PRESENCE], floats[:, _FREQUENCY], floats[:, _REPETITION]
            )
        for edits in (layout.bias, layout.mask):
            if edits is not None:
                edits.add_to_(work)
        if layout.restrictions is not None:
            layout.restrictions.apply_(work, self._history)
        if layout.courses is not None:
            self._owed.settle()
            own = forbid_ if self._kernels is None else self._kernels.forbid_
            self._failures.update(layout.courses.apply_(work, own))

    def _draw(self, work: Tensor, segment: LayoutSegment, slots: Tensor) -> Tensor:
        """Draw one token for each row of the segment, `[rows]`. Overwrites the segment's part of the work matrix."""
        part = slots[segment.start : segment.end]
        floats = self._floats.index_select(0, part)
        ints = self._ints.index_select(0, part)
        scaled = work[segment.start : segment.end].div_(floats[:, UNIT, None].float())
        mass = sampling_ops.weights(scaled)
        if segment.filtered:
            smallest = sampling_ops.cutoff(
                scaled,
                mass,
                ints[:, TOP_K],
                floats[:, TOP_P],
                floats[:, LOG_MIN_P],
                segment.needs,
            )
            mass.mul_(sampling_ops.at_least(scaled, smallest))
        return sampling_ops.choose(mass, sampling_ops.draw_keys(ints[:, SEED], ints[:, POSITION]))

    def _layout_for(self, slots: list[int]) -> BatchLayout | None:
        """Return the layout of this batch, or None if no row of it is special."""
        if self._layout is not None and self._layout_of == slots:
            return self._layout
        states = [self._require(slot) for slot in slots]
        rows = [row for row, slot in enumerate(slots) if slot in self._special]
        if not rows:
            return None
        rows.sort(key=lambda row: place(states[row]))
        ordered = [states[row] for row in rows]
        penalised = [i for i, state in enumerate(ordered) if state.penalised]
        num_greedy = sum(not state.random for state in ordered)
        num_edited = sum(state.edited for state in ordered)
        sources = sources_of(len(slots), rows, slots, num_edited) if self._kernels is not None else None
        self._layout = BatchLayout(
            rows=self._indices(rows),
            slots=self._indices([slots[row] for row in rows]),
            num_greedy=num_greedy,
            num_edited=num_edited,
            bias=edits_of([state.bias for state in ordered[:num_edited]], self.vocab_size, self.device),
            mask=edits_of([state.masked for state in ordered[:num_edited]], self.vocab_size, self.device),
            restrictions=restrictions_of(
                [state.restriction for state in ordered[:num_edited]],
                [slots[row] for row in rows[:num_edited]],
                self.vocab_size,
                self.device,
            ),
            courses=GrammarRows.of([state.course for state in ordered[:num_edited]], rows, slots, self.device),
            penalised=self._indices(penalised) if penalised else None,
            penalised_slots=[slots[rows[i]] for i in penalised],
            segments=segments_of(ordered, num_greedy, rows_at_once(self.device, self.vocab_size)),
            masked=[slots[row] for row in rows if states[row].masked_steps > 0],
            any_plain=len(rows) < len(slots),
            sources=None if sources is None else upload(sources, self.device),
            is_cut=any(state.top_k > 0 or state.top_p < 1.0 for state in ordered if state.random),
        )
        self._layout_of = list(slots)
        return self._layout

    def _count_down(self, slots: list[int]) -> None:
        """Count one token towards min_tokens. Unmask the eos and stop ids of slots that reach it."""
        for slot in slots:
            state = self._require(slot)
            state.masked_steps -= 1
            if state.masked_steps == 0:
                state.masked = NO_ENTRIES
                if state.course is not None:
                    state.course.held_back = None
                self._layout = None
                if not state.special:
                    self._special.discard(slot)

    def _count_tokens(self, slot: int, token_ids: Tensor, prompt_len: int) -> int:
        """Assign the slot a row of counts and of seen tokens, fill it from its tokens so far, and return the row."""
        if not self._free_rows:
            have = self._counts.shape[0]
            more = min(max(have, 4), len(self._states) - have)
            self._counts = torch.nn.functional.pad(self._counts, (0, 0, 0, more))
            self._seen = torch.nn.functional.pad(self._seen, (0, 0, 0, more))
            self._free_rows = list(range(have, have + more))
        row = self._penalty_row[slot] = self._free_rows.pop()
        counts = self._counts[row].zero_()
        counts.index_fill_(0, token_ids[:prompt_len], sampling_ops.IN_PROMPT)
        emitted = token_ids[prompt_len:]
        counts.index_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))
        self._widen(token_ids.shape[0])
        self._seen[row].zero_()
        self._seen[row, : token_ids.shape[0]] = token_ids
        return row

    def _widen(self, num_tokens: int) -> None:
        """Make room for `num_tokens` seen tokens a row."""
        missing = num_tokens - self._seen.shape[1]
        if missing > 0:
            self._seen = torch.nn.functional.pad(self._seen, (0, max(missing, self._seen.shape[1])))

    def _remember(self, held: list[int], slots: Tensor, tokens: Tensor) -> None:
        """Count the tokens that the penalised slots (`held` on the host, `slots` on the device) just emitted."""
        for slot in held:
            state = self._require(slot)
            state.num_tokens += 1
            self._widen(state.num_tokens)
        ints = self._ints.index_select(0, slots)
        cells = ints[:, _PENALTY_ROW] * self.vocab_size + tokens
        self._counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
        self._seen[ints[:, _PENALTY_ROW], ints[:, _LENGTH]] = tokens
        self._ints[:, _LENGTH].index_add_(0, slots, torch.ones_like(slots))

    def _follow(self, layout: BatchLayout, places: Tensor, tokens: Tensor) -> None:
        """Append the tokens that these work rows just emitted to the histories of their slots."""
        slots = layout.slots.index_select(0, places)
        newest = tokens.index_select(0, layout.rows.index_select(0, places))
        older = self._history.index_select(0, slots)[:, 1:]
        self._history.index_copy_(0, slots, torch.cat([older, newest[:, None]], dim=1))

    def _require(self, slot: int) -> SamplingSlot:
        state = self._states[slot]
        if state is None:
            raise Internal(f"sampling slot {slot} was never admitted")
        return state

    def _indices(self, values: Iterable[int]) -> Tensor:
        return upload(list(values), self.device)
