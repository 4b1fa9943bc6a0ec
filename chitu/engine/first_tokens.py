"""What a step sends to the device for its admissions and first tokens, beside prompts and pages: by the same copy. Step
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from chitu.engine.batch import SlotTable
from chitu.engine.executor import Admit, FirstToken
from chitu.engine.sampler import Sampler


def numbers_of(
    first_tokens: Sequence[FirstToken], admits: Sequence[Admit], slots: SlotTable, sampler: Sampler | None
) -> tuple[list[int], list[int]]:
    """Return numbers, and how many of them belong together: `[4, R]` of first tokens (`GreedyKernels.first_tokens`),
    then for each admission what `Sampler.admit` takes. `slots`: before the admissions."""
    new = {admit.slot: admit for admit in admits}
    lengths = {slot: len(admit.token_ids) // 4 for slot, admit in new.items()}
    drawn: list[list[int]] = [[] for _ in admits]
    drawn_slots = [-1 for _ in first_tokens]
    if sampler is not None:
        given = [(admit.sampling, lengths[admit.slot], admit.prompt_len) for admit in admits]
        drawn = [sampler.numbers_of(sampling, *more) if sampling is not None else [] for sampling, *more in given]
        came = [(first.slot, new.get(first.slot)) for first in first_tokens]
        drawn_slots = [sampler.drawn_slot(slot, admit.sampling if admit is not None else None) for slot, admit in came]
    rows = [
        [first.aux_slot for first in first_tokens],
        drawn_slots,
        [first.slot for first in first_tokens],
        [lengths.get(first.slot) or slots[first.slot].num_tokens for first in first_tokens],
    ]
    return list(chain(*rows, *drawn)), [4 * len(first_tokens), *map(len, drawn)]
