"""The sampling kernels under Triton's interpreter against their torch twin: every token is equal, not just nearly
all."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
import torch
from draws import often
from hypothesis import given, settings
from hypothesis import strategies as st

from chitu.engine import sampling_ops
from chitu.engine.sampler import Sampler
from chitu.ops.sampling_numbers import NO_TOKEN
from chitu.protocol import SamplingParams

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.sampling import SamplingKernels

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
VOCAB, CHUNK = 97, 64
EOS = (2, 5)
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
ROOMY, NARROW = 128, 8
"""Capacities for collected tokens: enough for a whole row, and so few that the whole row is searched."""


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(SamplingParams(max_tokens=100, seed=7), **changes)


MIXED = [
    GREEDY,
    params(),
    params(temperature=0.3, seed=2**63 - 1),
    params(top_k=1),
    params(top_k=5, presence_penalty=1.0),
    params(top_k=60, temperature=1.7),
    params(top_p=0.9),
    params(top_p=0.1, temperature=2.5),
    params(top_k=20, top_p=0.6),
    params(min_p=0.1, logit_bias={7: 2.0}),
    params(min_p=0.02, top_k=15, top_p=0.95, temperature=1.3),
    params(temperature=0.0, repetition_penalty=1.4),
    params(min_tokens=3, stop_token_ids=(40,)),
    params(allowed_token_ids=(7, 8, 90), bad_words=((7,),)),
    params(temperature=0.0, allowed_token_ids=(7, 8), bad_words=((7,), (8,))),
    params(top_p=0.9, bad_words=tuple((t,) for t in range(5, 97))),
]


def sampler_of(batch: list[SamplingParams], capacity: int | None, vocab: int = VOCAB, chunk: int = CHUNK) -> Sampler:
    """Return a sampler that uses kernels if there is a `capacity`, and torch otherwise."""
    kernels = SamplingKernels(len(batch), vocab, CPU, chunk, capacity) if capacity is not None else None
    sampler = Sampler(len(batch), vocab, CPU, EOS, kernels)
    for slot, p in enumerate(batch):
        sampler.admit(slot, torch.tensor([1, 2, 3, 3]), 3, p)
    return sampler


def logits_of(rows: int, seed: int, std: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std


def test_a_mixed_batch_gets_the_tokens_of_the_twin() -> None:
    found, expected = sampler_of(MIXED, ROOMY), sampler_of(MIXED, None)
    for order in (list(range(len(MIXED))), list(range(len(MIXED)))[::-1]):
        logits = logits_of(len(MIXED), order[0])
        before = logits.clone()
        assert found.sample(logits, order).tolist() == expected.sample(logits, order).tolist()
        assert torch.equal(logits, before)


def test_a_row_with_more_candidates_than_there_is_room_for_is_searched_whole() -> None:
    batch = [params(top_k=50, top_p=0.9, presence_penalty=1.0), params(top_p=0.97)]
    logits = logits_of(2, 5, std=0.5)
    assert sampler_of(batch, NARROW).sample(logits, [0, 1]).tolist() == (
        sampler_of(batch, None).sample(logits, [0, 1]).tolist()
    )


options = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 1e-9, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
)


@settings(max_examples=often(10))
@given(
    st.lists(options, min_size=1, max_size=3),
    st.integers(0, 999),
    st.sampled_from([0.1, 1.0, 3.0, 30.0]),
    st.sampled_from([NARROW, ROOMY]),
    st.booleans(),
)
def test_any_batch_over_any_row_gets_the_tokens_of_the_twin(
    batch: list[SamplingParams], seed: int, std: float, capacity: int, is_tied: bool
) -> None:
    """Flat, usual and steep rows; with rounded logits many tokens tie, at both zeros too."""
    logits = logits_of(len(batch), seed, std)
    logits = logits.round() if is_tied else logits
    slots = list(range(len(batch)))
    assert sampler_of(batch, capacity).sample(logits, slots).tolist() == (
        sampler_of(batch, None).sample(logits, slots).tolist()
    )


NOT_FINITE = math.nan, math.inf, -math.inf
BAD = [NOT_FINITE, *(pytest.param((bad,), marks=pytest.mark.by_hand) for bad in NOT_FINITE)]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_rows_with_a_logit_that_is_not_finite_have_no_token_and_their_neighbours_theirs(bad: tuple[float, ...]) -> None:
    """Also if bias, restrictions or penalties change that logit, and behind a chunk of the row that is sound."""
    samplers = sampler_of(MIXED, ROOMY), sampler_of(MIXED, None)
    slots, logits = list(range(len(MIXED))), logits_of(len(MIXED), 1)
    sound = sampler_of(MIXED, None).sample(logits, slots).tolist()
    for row, value in zip(slots[::2], itertools.cycle(bad), strict=False):
        logits[row, slice(None) if value == -math.inf else (7 * row + 3) % VOCAB] = value
    found, expected = (sampler.sample(logits, slots).tolist() for sampler in samplers)
    assert found == expected == [NO_TOKEN if row % 2 == 0 else sound[row] for row in slots]
    logits = logits_of(len(MIXED), 2)
    assert samplers[0].sample(logits, slots).tolist() == samplers[1].sample(logits, slots).tolist()


def test_rows_of_which_nothing_is_left_have_no_token_and_masks_alone_are_no_fault() -> None:
    everything = {token: -math.inf for token in range(VOCAB)}
    ways: list[dict[str, object]] = [{}, {"top_k": 4, "top_p": 0.5}, {"temperature": 0.0}]
    all_but_one = {token: bias for token, bias in everything.items() if token != 50}
    batch = [params(logit_bias=bias, **way) for bias in (everything, all_but_one) for way in ways]
    logits, slots = logits_of(len(batch), 1), list(range(len(batch)))
    for capacity in (ROOMY, None):
        assert sampler_of(batch, capacity).sample(logits, slots).tolist() == [NO_TOKEN] * 3 + [50] * 3
    huge = logits * 1e37  # a low temperature makes them infinite
    cold = [params(temperature=1e-4), params(temperature=1e-4, top_k=3), GREEDY]
    tokens = [sampler_of(cold, capacity).sample(huge[:3], [0, 1, 2]).tolist() for capacity in (ROOMY, None)]
    assert tokens[0] == tokens[1] == [NO_TOKEN, NO_TOKEN, int(huge[2].argmax())]


def test_rows_may_be_strided_and_plain_ones_are_argmax() -> None:
    wide = logits_of(2, 4, vocab=VOCAB + 16)[:, 16:]
    batch = [GREEDY, params(top_p=0.9)]
    found = sampler_of(batch, ROOMY).sample(wide, [1, 0])
    assert found.tolist() == sampler_of(batch, None).sample(wide.contiguous(), [1, 0]).tolist()
    assert found[1] == wide[1].argmax()


def test_candidates_may_fill_more_than_one_chunk() -> None:
    """More than CHUNK tokens are collected, and they fit, as with a flat row of a real vocabulary."""
    vocab, chunk = 300, 64
    batch = [params(top_p=0.97), params(top_k=150), params(min_p=0.3)]
    logits = logits_of(len(batch), 3, std=0.5, vocab=vocab)
    slots = list(range(len(batch)))
    found, expected = (sampler_of(batch, capacity, vocab, chunk) for capacity in (256, None))
    assert found.sample(logits, slots).tolist() == expected.sample(logits, slots).tolist()


def test_compiling_beforehand_leaves_the_tables_as_they_are() -> None:
    floats, ints = torch.rand(2, 6, dtype=torch.float64), torch.arange(10).view(2, 5)
    before = floats.clone(), ints.clone()
    SamplingKernels(2, VOCAB, CPU, CHUNK, ROOMY).warm_up(floats, ints)
    assert torch.equal(floats, before[0]) and torch.equal(ints, before[1])


def test_weights_are_powers_of_two_within_a_few_roundings() -> None:
    scaled = torch.cat([torch.linspace(-45, 0, 5000), torch.tensor([-math.inf, -1e30])])[None]
    exact = torch.exp2(scaled.double() + 40)
    found = sampling_ops.weights(scaled).double()
    assert float(((found - exact).abs() / exact)[exact >= 1].max()) < 3e-7
    assert int(found[0, 4999]) == 1 << 40
    assert found[0, 5000:].long().tolist() == [0, 0]
