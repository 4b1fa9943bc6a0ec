"""The tokens that the main rank draws, on all tensor-parallel ranks within the step: the next step feeds them, and the
layer that drafts follows them at once (`mtp.py`). They go from device to device, and no host waits for them before the
next step.

Which slots draw follows from the plan. How many tokens of a draft are right does not, so each slot has a place for the
most that it may draw, and one broadcast brings all. Called by `ModelRunner`, step thread only; collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from chitu.engine.batch import upload
from chitu.engine.executor import StepPlan
from chitu.models.layers import Shard

NOT_DRAWN = -2
"""In the place of a token behind a wrong draft."""


class SharedDraws(NamedTuple):
    """Tokens that the main rank drew, in the order of the plan."""

    slots: list[int]
    tokens_N: torch.Tensor
    """int64 `[N]` on the device, once `wait` has returned."""
    wait: Callable[[], None]


def drawing_slots(plan: StepPlan) -> list[int]:
    """Return the slots that a step draws for, in the order of its result."""
    chunks = [chunk.slot for chunk in plan.prefill if chunk.sample]
    return [first.slot for first in plan.first_tokens] + chunks + plan.decode


def share_draws(
    shard: Shard, plan: StepPlan, device: torch.device, slots: Sequence[int], tokens_N: torch.Tensor | None
) -> SharedDraws | None:
    """Return what the main rank drew, on every rank; None if the plan draws nothing. `slots`, `tokens_N`: on the main
    rank the tokens, several in a row of a slot with a draft. Waits for ranks and device only if the plan has drafts."""
    drafts: Mapping[int, int] = {draft.slot: len(draft.tokens) for draft in plan.drafts}
    places = [slot for slot in drawing_slots(plan) for _ in range(1 + drafts.get(slot, 0))]
    if not places:
        return None
    if tokens_N is not None and len(slots) == len(places):
        drawn_N = tokens_N
    else:
        drawn_N = torch.full((len(places),), NOT_DRAWN, dtype=torch.int64, device=device)
        if tokens_N is not None:
            drawn_N[upload(_taken(places, slots), device)] = tokens_N
    wait = shard.broadcast(drawn_N)
    if not drafts:
        return SharedDraws(places, drawn_N, wait)
    wait()
    is_drawn = [number != NOT_DRAWN for number in drawn_N.tolist()]
    kept = upload([place for place, found in enumerate(is_drawn) if found], device)
    return SharedDraws([slot for slot, found in zip(places, is_drawn, strict=True) if found], drawn_N[kept], wait)


def _taken(places: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Return the place of each token: those of a slot are the first of its places."""
    taken, place = [], 0
    for slot in slots:
        while places[place] != slot:
            place += 1
        taken.append(place)
        place += 1
    return taken
