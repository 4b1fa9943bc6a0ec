"""Draws of a step with drafts by a sampler of the test's: which rows are drawn, and what ends a draft."""

from __future__ import annotations

from typing import cast

import torch

from chitu.engine.batch import SlotTable
from chitu.engine.draft_waves import DraftWaves
from chitu.engine.executor import Admit
from chitu.engine.sampler import Sampler
from chitu.engine.step_tokens import StepLogprobs
from chitu.protocol import SamplingParams, pack_i32

CPU = torch.device("cpu")
VOCAB = 50


class Argmax:
    """Takes the argmax; fails for a slot once it has drawn `fails_at`, as a grammar that leaves no token does."""

    def __init__(self, fails_at: int = -1) -> None:
        self.drawn: list[list[int]] = []
        self._fails_at, self._failures = fails_at, dict[int, str]()

    def sample(self, logits_RV: torch.Tensor, slots: list[int]) -> torch.Tensor:
        tokens = logits_RV.argmax(-1)
        self.drawn.append(slots)
        self._failures = {
            s: "no token" for s, token in zip(slots, tokens.tolist(), strict=True) if token == self._fails_at
        }
        return tokens

    def take_failures(self) -> dict[int, str]:
        return self._failures


def draw(sampler: Argmax, wanted: list[int], drafts: dict[int, list[int]], slots: list[int]) -> tuple[object, ...]:
    """Draw `wanted`, one token for each row. Return slots, tokens, failures, and the tokens whose KV counts by slot."""
    table = SlotTable(4, 64, 4, 64, CPU)
    for slot in slots:
        admit = Admit(slot, pack_i32([1, 2, 3]), 2, 2, tuple(range(8 * slot, 8 * slot + 8)), SamplingParams(20))
        table.admit([admit])
    table.advance_decode(slots)
    logits_RV = torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB).float()
    waves = DraftWaves(table, StepLogprobs(VOCAB, CPU))
    drawn, _, failures = waves.draw(cast(Sampler, sampler), logits_RV, slots, drafts, 0)
    return drawn.slots, drawn.tokens_N.tolist(), failures, {slot: table[slot].kv_len for slot in slots}


def test_each_wave_has_the_slots_whose_draft_was_right_so_far() -> None:
    sampler = Argmax()
    found = draw(sampler, [10, 20, 21, 22, 30, 31], {1: [20, 21], 2: [29]}, [0, 1, 2])
    assert found == ([0, 1, 1, 1, 2], [10, 20, 21, 22, 30], {}, {0: 3, 1: 5, 2: 3})
    assert sampler.drawn == [[0, 1, 2], [1], [1]]


def test_a_draw_that_failed_ends_the_draft_though_its_token_is_the_drafted_one() -> None:
    found = draw(Argmax(fails_at=21), [20, 21, 22, 30], {1: [20, 21]}, [1, 0])
    assert found == ([1, 1, 0], [20, 21, 30], {1: "no token"}, {1: 4, 0: 3})
