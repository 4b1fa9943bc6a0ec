"""Drafts change no token and no end, whatever they guess: in tiny pools, with retraction, stops, cancellations, failed
transfers, cached prefixes and a late device."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, loads, room_of
from support.drafts import Guesses
from test_step_overlap import run_pd, run_unified, stopped, stops

from chitu.instance.draft_source import DraftSource
from chitu.instance.sequences import Sequence

DRAFTING = msgspec.structs.replace(INFO, most_drafts=15)
NEVER = 8
"""Index of a stop that no request has."""
rates = st.sampled_from((0.0, 0.5, 0.9, 1.0))
stop_lists = st.lists(stops, min_size=20, max_size=20)
Load = list[tuple[int, int, int]]


def guessing(load: Load, rate: float, rng: random.Random) -> Callable[[Sequence], DraftSource]:
    """Return what makes guesses for these requests."""
    rooms = [room_of(index) for index in range(len(load))]

    def source(sequence: Sequence) -> DraftSource:
        index = rooms.index(sequence.room)
        answer = stopped(index, load[index], NEVER)[3]
        return Guesses(sequence.prompt_len, answer, rate, rng, INFO.vocab_size)

    return source


@given(loads, st.integers(17, 60), st.integers(1, 16), stop_lists, rates, st.booleans(), st.randoms())
def test_tokens_ends_and_pages_are_those_without_drafts(
    load: Load, num_pages: int, chunk: int, stop_at: list[int], rate: float, overlap: bool, rng: random.Random
) -> None:
    source = guessing(load, rate, rng)
    lanes = rng.randint(1, 2)
    instance = Instance(num_pages, chunk=chunk, overlap=overlap, info=DRAFTING, draft_source=source, lanes=lanes)
    run_unified(instance, load, stop_at, rng)


@given(loads, st.tuples(st.integers(17, 50), st.integers(17, 50)), stop_lists, rates, st.booleans(), st.randoms())
def test_tokens_ends_and_pages_of_a_pair_are_those_without_drafts(
    load: Load, pages: tuple[int, int], stop_at: list[int], rate: float, overlap: bool, rng: random.Random
) -> None:
    wire, source = Wire(), guessing(load, rate, rng)
    wire.prefill = Instance(pages[0], sender=PSide(wire), overlap=overlap)
    wire.decode = Instance(pages[1], receiver=DSide(wire), overlap=overlap, info=DRAFTING, draft_source=source)
    run_pd(wire, wire.prefill, wire.decode, load, stop_at, rng)
