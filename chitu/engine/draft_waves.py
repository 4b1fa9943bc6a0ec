"""Draws of a step with drafts, wave by wave: first every slot, then those whose draw was the first token of their
draft, and so on. So each draw finds the sampler as it is without drafts, and rows behind a wrong draft are never drawn.

A draw depends on the logits, the seed and the position alone (ADR 39): an accepted draft is the token that would have
been drawn anyway. Each wave is read, which is free on a CPU. Called by `ModelRunner`, step thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from chitu.engine.batch import SlotTable, upload
from chitu.engine.sampler import Sampler
from chitu.engine.step_tokens import Lines, StepLogprobs


class Drawn(NamedTuple):
    """Tokens of rows, in the order of their slots; of a slot with a draft several in a row."""

    slots: list[int]
    tokens_N: torch.Tensor
    """int64 `[N]` on the device."""


class DraftWaves:
    def __init__(self, table: SlotTable, logprobs: StepLogprobs) -> None:
        self._table = table
        self._logprobs = logprobs

    def draw(
        self,
        sampler: Sampler,
        logits_RV: torch.Tensor,
        slots: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
        first_place: int,
    ) -> tuple[Drawn, list[Lines], dict[int, str]]:
        """Draw the tokens, append them to their sequences, and count the KV of the drafts that are right.

        `logits_RV`: float32, for each of `slots` one row, behind it one for each token of its draft. `first_place`:
        index of the first token among the step's. Return tokens, logprobs and failures by slot (`StepResult`).
        """
        first_rows, num_rows = [], 0
        for slot in slots:
            first_rows.append(num_rows)
            num_rows += 1 + len(drafts.get(slot, ()))
        drawn: list[list[int]] = [[] for _ in slots]
        parts: list[tuple[list[int], Lines]] = []
        failures: dict[int, str] = {}
        wave, depth = list(range(len(slots))), 0
        while wave:
            wave_slots = [slots[index] for index in wave]
            rows_RV = logits_RV[upload([first_rows[index] + depth for index in wave], logits_RV.device)]
            tokens = sampler.sample(rows_RV, wave_slots)
            self._table.append_tokens(wave_slots, tokens.clamp(min=0))
            lines = self._logprobs.lines(rows_RV, wave_slots, tokens, 0)
            if lines is not None:
                parts.append(([wave[place] for place in lines.places], lines))
            failures.update(sampler.take_failures())
            for index, token in zip(wave, tokens.tolist(), strict=True):
                drawn[index].append(token)
            wave = [
                index for index in wave if slots[index] not in failures and _goes_on(slots[index], drawn[index], drafts)
            ]
            depth += 1
        for slot, each in zip(slots, drawn, strict=True):
            if len(each) > 1:
                self._table.settle(slot, len(each) - 1)
        tokens_N = upload([token for each in drawn for token in each], logits_RV.device)
        of_rows = [slot for slot, each in zip(slots, drawn, strict=True) for _ in each]
        return Drawn(of_rows, tokens_N), _placed(parts, drawn, first_place), failures


def _goes_on(slot: int, drawn: Sequence[int], drafts: Mapping[int, Sequence[int]]) -> bool:
    """Return whether the newest token that was drawn is that of the draft."""
    draft = drafts.get(slot, ())
    return len(drawn) <= len(draft) and draft[len(drawn) - 1] == drawn[-1]


def _placed(parts: list[tuple[list[int], Lines]], drawn: list[list[int]], first_place: int) -> list[Lines]:
    """Return the logprobs of waves, each with the indices of its slots, at the places of their tokens in the step."""
    firsts, place = [], first_place
    for each in drawn:
        firsts.append(place)
        place += len(each)
    depths = dict.fromkeys(range(len(drawn)), 0)
    found = []
    for indices, lines in parts:
        found.append(Lines([firsts[index] + depths[index] for index in indices], lines.counts, lines.lines_MC))
        for index in indices:
            depths[index] += 1
    return found
