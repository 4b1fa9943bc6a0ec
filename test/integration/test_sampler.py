"""The batched sampler against a naive one that handles one row at a time in numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chitu.engine import sampling_ops
from chitu.engine.sampler import Sampler
from chitu.errors import Internal
from chitu.ops.sampling_numbers import NO_TOKEN
from chitu.protocol import MAX_BAD_WORD_TOKENS, SamplingParams

CPU = torch.device("cpu")
VOCAB = 97
EOS = (2, 5)
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
few_or_all = pytest.mark.parametrize("share", [20, pytest.param(1, marks=pytest.mark.by_hand)])
"""A twentieth of a statistic's draws, and all of them by hand."""

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


def ids(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB, std: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def naive_exponentials(seed: int, position: int, vocab: int) -> np.ndarray:
    key = splitmix64(splitmix64(seed & ((1 << 64) - 1)) ^ position)
    x = np.arange(vocab, dtype=np.uint32) + np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ np.uint32(key >> 32)) * np.uint32(0x846CA68B)
    return -np.log1p((((x ^ (x >> 16)) & 0x7FFFFFFF) | 1) / -(2.0**31))


def naive_logits(row: np.ndarray, prompt: list[int], emitted: list[int], p: SamplingParams) -> np.ndarray:
    row = row.astype(np.float64)
    for token in set(prompt) | set(emitted):
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token, count in Counter(emitted).items():
        row[token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if len(emitted) < p.min_tokens:
        for token in set(p.stop_token_ids) | (set() if p.ignore_eos else set(EOS)):
            row[token] = -math.inf
    if p.allowed_token_ids:
        row[[token for token in range(len(row)) if token not in p.allowed_token_ids]] = -math.inf
    for word in p.bad_words:
        if emitted[len(emitted) - len(word) + 1 :] == list(word[:-1]):
            row[word[-1]] -= 1e28
    return row


def naive_probabilities(row: np.ndarray, p: SamplingParams) -> np.ndarray:
    row = row / p.temperature
    probability = np.exp(row - row.max())
    probability /= probability.sum()
    probability[probability < p.min_p * probability.max()] = 0
    if 0 < p.top_k < len(row):
        probability[probability < np.sort(probability)[-p.top_k]] = 0
    if p.top_p < 1:
        probability /= probability.sum()
        mass = 0.0
        order = np.argsort(-probability)
        for place, token in enumerate(order):
            if place and mass >= p.top_p:
                probability[token] = 0
            else:
                mass += probability[token]
    return probability / probability.sum()


def naive_token(row: np.ndarray, prompt: list[int], emitted: list[int], p: SamplingParams) -> int:
    edited = naive_logits(row, prompt, emitted, p)
    if p.temperature == 0:
        return int(edited.argmax())
    return int((naive_probabilities(edited, p) / naive_exponentials(p.seed, len(emitted), len(row))).argmax())


params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.1]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20, width=32), max_size=4),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    # Few enough that words of several tokens occur.
    allowed_token_ids=st.sampled_from([(), (), (7, 3, 40, 41, 42), (96, 0, 1, 9)]),
    bad_words=st.lists(
        st.lists(st.sampled_from([7, 3, 40, 96, 0, 11]), min_size=1, max_size=3).map(tuple), max_size=4
    ).map(tuple),
)


@given(st.lists(params, min_size=1, max_size=9), st.integers(0, 2**32), st.integers(1, 12))
def test_every_row_of_any_batch_gets_the_naive_samplers_token(
    batch: list[SamplingParams], seed: int, prompt_len: int
) -> None:
    rng = np.random.default_rng(seed)
    sampler = Sampler(len(batch), VOCAB, CPU, EOS)
    prompts = [rng.integers(0, VOCAB, prompt_len).tolist() for _ in batch]
    emitted: list[list[int]] = [[] for _ in batch]
    for slot, p in enumerate(batch):
        sampler.admit(slot, ids(prompts[slot]), prompt_len, p)
    for step in range(7):
        logits = logits_of(len(batch), seed=seed % 1000 + step)
        before = logits.clone()
        order = rng.permutation(len(batch)).tolist() if step % 3 == 2 else list(range(len(batch)))
        tokens = sampler.sample(logits, order)
        assert torch.equal(logits, before)
        assert tokens.dtype == torch.int64
        for row, slot in enumerate(order):
            expected = naive_token(logits[row].numpy(), prompts[slot], emitted[slot], batch[slot])
            assert int(tokens[row]) == expected, (step, slot, batch[slot])
            emitted[slot].append(expected)


@given(
    st.lists(params, min_size=1, max_size=9),
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.integers(0, 3),
    st.sampled_from([VOCAB, 4099, 50_257]),
)
def test_p_and_d_draw_the_same_token_from_a_row(
    batch: list[SamplingParams], seed: int, prompt_len: int, num_emitted: int, vocab: int
) -> None:
    """P has the row among others of its step, D copies it from an aux row, with other requests of its own: the early
    token (ADR 65), also behind tokens of an earlier attempt."""
    rng = np.random.default_rng(seed)
    on_p, on_d = Sampler(len(batch), vocab, CPU, EOS), Sampler(len(batch) + 1, vocab, CPU, EOS)
    tokens = [ids(rng.integers(0, vocab, prompt_len + num_emitted)) for _ in batch]
    logits = logits_of(len(batch), seed=seed % 1000, vocab=vocab)
    for slot, p in enumerate(batch):
        on_p.admit(slot, tokens[slot], prompt_len, p)
        on_d.admit(len(batch) - slot, tokens[slot], prompt_len, p)
    early = on_p.sample(logits, list(range(len(batch)))).tolist()
    rows = np.frombuffer(logits.numpy().tobytes(), np.float32).reshape(logits.shape).copy()
    for slot in rng.permutation(len(batch)).tolist():
        alone = on_d.sample(torch.from_numpy(rows[slot : slot + 1]), [len(batch) - slot])
        assert alone.tolist() == [early[slot]], batch[slot]


MIXED = [
    GREEDY,
    SamplingParams(max_tokens=9, seed=11),
    SamplingParams(max_tokens=9, seed=12, top_p=0.9, temperature=0.8),
    SamplingParams(max_tokens=9, seed=13, top_k=5, presence_penalty=1.0),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.4),
    SamplingParams(max_tokens=9, seed=14, min_p=0.1, logit_bias={7: 2.0}),
    SamplingParams(max_tokens=9, seed=15, min_tokens=6, stop_token_ids=(40,)),
    SamplingParams(max_tokens=9, seed=16, temperature=1.5, allowed_token_ids=(7, 8, 9), bad_words=((7, 7), (8, 9, 7))),
    SamplingParams(max_tokens=9, temperature=0.0, bad_words=tuple((t,) for t in range(3, 90))),
]


def run(sampler: Sampler, slots: list[int], rows: torch.Tensor) -> list[int]:
    return sampler.sample(rows, slots).tolist()


def test_a_request_gets_the_same_tokens_alone_as_in_a_batch() -> None:
    steps = [logits_of(len(MIXED), seed=step) for step in range(9)]
    together = Sampler(len(MIXED), VOCAB, CPU, EOS)
    for slot, p in enumerate(MIXED):
        together.admit(slot, ids([1, 2, 3]), 3, p)
    batched = [run(together, list(range(len(MIXED))), rows) for rows in steps]
    for slot, p in enumerate(MIXED):
        alone = Sampler(3, VOCAB, CPU, EOS)
        alone.admit(2, ids([1, 2, 3]), 3, p)
        assert [run(alone, [2], rows[slot : slot + 1])[0] for rows in steps] == [tokens[slot] for tokens in batched]


@pytest.mark.parametrize("retracted_after", range(1, 9))
def test_a_retracted_request_goes_on_with_the_tokens_it_would_have_got(retracted_after: int) -> None:
    steps = [logits_of(len(MIXED), seed=100 + step) for step in range(9)]
    slots = list(range(len(MIXED)))

    def tokens_with(retract_at: int | None) -> list[list[int]]:
        sampler = Sampler(2 * len(MIXED), VOCAB, CPU, EOS)
        held = list(slots)
        emitted: list[list[int]] = [[] for _ in MIXED]
        for slot, p in enumerate(MIXED):
            sampler.admit(slot, ids([4, 4, 9]), 3, p)
        for step, rows in enumerate(steps):
            if step == retract_at:
                for slot in slots:
                    sampler.release(slot)
                # Admitted again to other slots, in another order.
                held = [2 * len(MIXED) - 1 - slot for slot in slots]
                for slot, p in enumerate(MIXED):
                    sampler.admit(held[slot], ids([4, 4, 9, *emitted[slot]]), 3, p)
            for slot, token in enumerate(run(sampler, held, rows)):
                emitted[slot].append(token)
        return emitted

    assert tokens_with(retracted_after) == tokens_with(None)


def test_a_slot_forgets_its_request_when_it_is_given_to_another() -> None:
    rows = logits_of(1, seed=3)
    sampler = Sampler(1, VOCAB, CPU, EOS)
    for p in MIXED[1:]:
        sampler.admit(0, ids([1, 1, 1]), 3, p)
        run(sampler, [0], rows)
        sampler.admit(0, ids([1]), 1, GREEDY)
        assert run(sampler, [0], rows) == [int(rows.argmax())]
        sampler.release(0)


def test_an_ended_slot_keeps_out_of_the_way_of_the_fast_path() -> None:
    sampler = Sampler(2, VOCAB, CPU, EOS)
    sampler.admit(0, ids([1]), 1, msgspec.structs.replace(GREEDY, min_tokens=2))
    rows = torch.zeros(1, VOCAB)
    rows[0, EOS[0]] = 1.0
    rows[0, 50] = 0.5
    assert [run(sampler, [0], rows)[0] for _ in range(4)] == [50, 50, EOS[0], EOS[0]]


def test_min_tokens_leaves_eos_alone_for_a_request_that_ignores_it() -> None:
    sampler = Sampler(1, VOCAB, CPU, EOS)
    sampler.admit(0, ids([1]), 1, msgspec.structs.replace(GREEDY, min_tokens=5, ignore_eos=True, stop_token_ids=(50,)))
    rows = torch.zeros(1, VOCAB)
    rows[0, 50], rows[0, EOS[0]] = 2.0, 1.0
    assert run(sampler, [0], rows) == [EOS[0]]


def test_a_bad_word_may_be_ended_only_by_what_it_does_not_end_with() -> None:
    longest = tuple(range(20, 20 + MAX_BAD_WORD_TOKENS))
    word = msgspec.structs.replace(GREEDY, bad_words=(longest, (60,), (50, 51)))
    sampler = Sampler(1, VOCAB, CPU, EOS)

    def drawn(emitted: list[int], wanted: int, prompt: tuple[int, ...] = (1,)) -> int:
        """Return the token of a row in which only `wanted` is likely, and 90 is a distant second."""
        sampler.admit(0, ids([*prompt, *emitted]), len(prompt), word)
        row = torch.zeros(1, VOCAB)
        row[0, wanted], row[0, 90] = 30.0, 1.0
        return run(sampler, [0], row)[0]

    assert drawn([], 60) == 90
    assert drawn([3, *longest[:-1]], longest[-1]) == 90
    assert drawn([*longest[1:-1]], longest[-1]) == longest[-1], "its first token is missing"
    assert drawn([50], 51) == 90
    assert drawn([50, 3], 51) == 51
    assert drawn([], 51, prompt=(1, 50)) == 51, "a prompt is not followed"
    # The word is matched from step to step, without a new admission.
    sampler.admit(0, ids([1]), 1, word)
    for wanted, expected in ((50, 50), (51, 90), (50, 50), (50, 50), (51, 90), (51, 51), (60, 90)):
        row = torch.zeros(1, VOCAB)
        row[0, wanted], row[0, 90] = 30.0, 1.0
        assert run(sampler, [0], row) == [expected], wanted


def test_what_is_not_allowed_is_never_drawn_also_where_bad_words_leave_nothing() -> None:
    all_bad = ((4,), (8,), (4, 4), (8, 4))
    for temperature in (0.0, 0.001, 1.0):
        for top_p in (1.0, 0.5):
            p = SamplingParams(100, temperature=temperature, top_p=top_p, allowed_token_ids=(4, 8), bad_words=all_bad)
            sampler = Sampler(2, VOCAB, CPU, EOS)
            sampler.admit(0, ids([1]), 1, p)
            sampler.admit(1, ids([1]), 1, GREEDY)
            for step in range(20):
                rows = logits_of(2, seed=step, std=50.0)
                found, plain = run(sampler, [0, 1], rows)
                assert found in (4, 8) and plain == int(rows[1].argmax())


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e-30, 0.01])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_no_repetition_penalty_is_too_small_for_what_else_is_forbidden(penalty: float, temperature: float) -> None:
    """A prompt's tokens become so likely that their logits left float32, or what forbids a token had no effect."""
    p = SamplingParams(100, temperature=temperature, repetition_penalty=penalty, allowed_token_ids=(7, 8, 9))
    sampler = Sampler(2, VOCAB, CPU, EOS)
    sampler.admit(0, ids([7]), 1, p)
    sampler.admit(1, ids([7, 9]), 2, msgspec.structs.replace(p, bad_words=((7,),)))
    for step in range(9):
        assert run(sampler, [0, 1], logits_of(2, seed=step, std=0.1).add_(5.0)) == [7, 9]


def num_kept(sampler: Sampler) -> int:
    """Count the numbers on the device, in whatever structure, except those of penalties."""
    found, seen = [sampler], set()
    total = 0
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            total += value.numel()
        elif type(value).__module__.startswith("chitu.engine.sampl"):
            names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            found += [getattr(value, name) for name in names] + list(getattr(value, "__dict__", {}).values())
    return total


def test_the_longest_list_costs_only_while_its_request_runs() -> None:
    one = msgspec.structs.replace(GREEDY, logit_bias={7: 1.0}, stop_token_ids=(3,), min_tokens=9)
    all_tokens = msgspec.structs.replace(
        GREEDY, logit_bias={t: 1.0 for t in range(VOCAB)}, stop_token_ids=tuple(range(VOCAB)), min_tokens=9
    )
    costs = []
    sampler = Sampler(8, VOCAB, CPU, EOS)
    for params in (one, all_tokens, one):
        sampler.admit(0, ids([1]), 1, params)
        for slot in (1, 2, 3):
            sampler.admit(slot, ids([1]), 1, one)
        sampler.sample(logits_of(4), [0, 1, 2, 3])
        costs.append(num_kept(sampler))
    assert costs[0] == costs[2] < costs[1]
    assert costs[1] - costs[0] <= 2 * 2 * VOCAB, "of one request, in the batch of four"


def test_only_requests_with_penalties_take_memory_for_counts() -> None:
    sampler = Sampler(64, VOCAB, CPU, EOS)
    for slot in range(64):
        sampler.admit(slot, ids([1]), 1, SamplingParams(max_tokens=5, seed=slot, top_p=0.5))
    assert sampler.count_rows == 0
    for _ in range(3):
        for slot in range(5):
            sampler.admit(slot, ids([1]), 1, SamplingParams(max_tokens=5, frequency_penalty=0.5))
    assert 5 <= sampler.count_rows <= 8


@few_or_all
@pytest.mark.parametrize(
    "p",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, top_k=6),
        SamplingParams(max_tokens=1, top_p=0.8),
        SamplingParams(max_tokens=1, min_p=0.15),
        SamplingParams(max_tokens=1, temperature=1.3, min_p=0.02, top_k=15, top_p=0.9),
    ],
)
def test_draws_follow_the_distribution(p: SamplingParams, share: int) -> None:
    """Chi-square over 8000 seeds, at the 0.1 % point: fixed seeds, so the outcome never changes."""
    vocab, draws = 24, 8000 // share
    row = logits_of(1, seed=5, vocab=vocab, std=1.5)
    sampler = Sampler(draws, vocab, CPU)
    for slot in range(draws):
        sampler.admit(slot, ids([0]), 1, msgspec.structs.replace(p, seed=slot * 7919))
    tokens = sampler.sample(row.expand(draws, vocab), list(range(draws)))
    expected = naive_probabilities(row[0].numpy().astype(np.float64), p) * draws
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    chi2 = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi2 < limit, (chi2, limit)


@few_or_all
@pytest.mark.parametrize("draws", ["positions of one seed", "seeds at one position"])
def test_successive_draws_are_independent(draws: str, share: int) -> None:
    """Chi-square over pairs of successive draws from 20 tokens, at the 0.1 % point."""
    vocab, number = 20, 40_000 // share
    count, fixed = torch.arange(number), torch.full((number,), sampling_ops.int64_of(2**64 - 3))
    seed, position = (fixed, count) if draws.startswith("positions") else (count, fixed)
    weights = sampling_ops.weights(logits_of(1, seed=6, vocab=vocab, std=1.0))
    tokens = sampling_ops.choose(weights.repeat(number, 1), sampling_ops.draw_keys(seed, position))
    probability = (weights / weights.sum())[0].double()
    expected = torch.outer(probability, probability).flatten() * (number - 1)
    found = torch.bincount(tokens[1:] * vocab + tokens[:-1], minlength=vocab * vocab)
    chi2 = float(((found - expected) ** 2 / expected).sum())
    assert abs(chi2 - vocab**2) < 3.3 * math.sqrt(2 * vocab**2), chi2


def test_exponential_numbers_are_those_of_float64() -> None:
    edges = [bits | 1 for n in range(31) for bits in (1 << n, (1 << 31) - (1 << n))]
    key = sampling_ops.draw_keys(torch.tensor([sampling_ops.int64_of(2**64 - 3)]), torch.tensor([9]))
    bits = torch.cat([torch.tensor(edges, dtype=torch.int32), sampling_ops.token_bits(key, 100_000)[0]])
    found, uniform = sampling_ops.exponential(bits), bits.double() * 2.0**-31
    exact = -torch.log1p(-uniform)
    assert float((found / exact - 1).abs().max()) < 1e-6
    assert bool((found >= uniform.float()).all()), "the bound of a CPU"
    assert np.allclose(exact[len(edges) :], naive_exponentials(2**64 - 3, 9, 100_000))


def test_a_cpu_finds_the_winner_that_all_exponential_numbers_give() -> None:
    weights = sampling_ops.weights(logits_of(500, seed=7, std=4.0))
    weights[::5, ::2] = 0.0
    weights[0] = 0.0
    key = sampling_ops.draw_keys(torch.arange(500), torch.arange(500) % 7)
    scores = weights.trunc() / sampling_ops.exponential(sampling_ops.token_bits(key, VOCAB))
    found = sampling_ops.choose(weights, key)
    assert found[0] == NO_TOKEN and torch.equal(found[1:], scores[1:].argmax(dim=-1))


@few_or_all
def test_logits_that_differ_by_rounding_give_the_same_draw(share: int) -> None:
    """A prefill and a decode step round differently. With an inverse CDF some 20 of these draws would change, of all
    as of a twentieth, whose noise is so much greater."""
    draws, vocab = 8000 // share, 512
    logits = logits_of(1, seed=3, vocab=vocab, std=2.0).repeat(draws, 1)
    noisy = logits + logits_of(draws, seed=4, vocab=vocab, std=share * 1e-4)
    tokens = []
    for rows in (logits, noisy):
        sampler = Sampler(draws, vocab, CPU)
        for slot in range(draws):
            sampler.admit(slot, ids([0]), 1, SamplingParams(max_tokens=9, seed=slot, top_p=0.95))
        tokens.append(sampler.sample(rows, list(range(draws))))
    assert int((tokens[0] != tokens[1]).sum()) <= 2


def test_top_p_that_needs_more_than_the_first_candidates_is_exact() -> None:
    """On a flat row the nucleus is far larger than the candidates that a CPU tries first."""
    vocab = 8 * sampling_ops.NARROW_SEARCH
    rows = logits_of(3, seed=8, vocab=vocab, std=0.3)
    p = SamplingParams(max_tokens=9, top_p=0.9, seed=5)
    sampler = Sampler(3, vocab, CPU)
    for slot in range(3):
        sampler.admit(slot, ids([0]), 1, msgspec.structs.replace(p, seed=slot))
    for step in range(4):
        expected = [
            naive_token(rows[slot].numpy(), [0], [0] * step, msgspec.structs.replace(p, seed=slot)) for slot in range(3)
        ]
        assert run(sampler, [0, 1, 2], rows) == expected


def test_ids_outside_the_vocabulary_are_ignored_and_hopeless_rows_have_no_token() -> None:
    sampler = Sampler(2, VOCAB, CPU, (VOCAB + 3,))
    sampler.admit(0, ids([1]), 1, SamplingParams(max_tokens=5, logit_bias={VOCAB: 5.0, -1: 5.0}, min_tokens=3))
    sampler.admit(1, ids([1]), 1, SamplingParams(max_tokens=5, top_p=0.5))
    hopeless = torch.full((2, VOCAB), -math.inf)
    hopeless[0] = math.nan
    assert run(sampler, [0, 1], hopeless) == [NO_TOKEN] * 2
    assert all(0 <= token < VOCAB for token in run(sampler, [0, 1], logits_of(2)))


def test_rows_may_be_strided_as_aux_rows_are() -> None:
    wide = logits_of(2, seed=4, vocab=VOCAB + 16)
    sampler = Sampler(2, VOCAB, CPU)
    compact = Sampler(2, VOCAB, CPU)
    for slot, p in enumerate(MIXED[1:3]):
        sampler.admit(slot, ids([1]), 1, p)
        compact.admit(slot, ids([1]), 1, p)
    assert run(sampler, [0, 1], wide[:, 16:]) == run(compact, [0, 1], wide[:, 16:].contiguous())


def test_calls_may_come_inside_and_outside_of_inference_mode() -> None:
    rows = logits_of(len(MIXED), seed=6)
    slots = list(range(len(MIXED)))
    outside, mixed = Sampler(len(MIXED), VOCAB, CPU, EOS), Sampler(len(MIXED), VOCAB, CPU, EOS)
    with torch.inference_mode():
        for slot, p in enumerate(MIXED):
            mixed.admit(slot, ids([1, 2]), 2, p)
        first = run(mixed, slots, rows)
    for slot, p in enumerate(MIXED):
        outside.admit(slot, ids([1, 2]), 2, p)
    assert first == run(outside, slots, rows)
    assert run(mixed, slots, rows) == run(outside, slots, rows)


def test_a_slot_that_was_never_admitted_is_refused() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    sampler.admit(0, ids([1]), 1, MIXED[1])
    with pytest.raises(Internal, match="slot 1"):
        sampler.sample(logits_of(2), [0, 1])
