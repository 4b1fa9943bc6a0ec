"""The layer that drafts on tensor-parallel ranks: all compute the same entries, holes among them, and draft what one
rank drafts."""

from __future__ import annotations

import pytest
import torch
from engine_checkpoints import PAGE_SIZE, Engine, GreedySampler, make_prompt
from mtp_checkpoints import (
    NUM_MODEL_LAYERS,
    answer_to,
    follower,
    predicted_steps,
    some_tokens,
    write_predictable,
    write_random,
)
from mtp_instance import NUM_PAGES, Instance, entries, poison, prefilled, sent
from thread_ranks import Ranks

from chitu.engine.executor import Admit, Draft, PrefillChunk, StepPlan
from chitu.protocol import SamplingParams, pack_i32

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS, LAYER = 60, NUM_MODEL_LAYERS
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPT = [5, 9, 17]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    write_random(folder)
    return folder


@pytest.fixture(scope="module")
def by_hidden_state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predictable")
    write_predictable(folder, None)
    return folder


def on(size, folder, **options):
    """Return an engine of so many ranks, with NaN in its pages."""
    return poison(
        Ranks(folder, size, 24, drafts=True, **options)
        if size > 1
        else Engine(folder, num_pages=24, drafts=True, **options)
    )


def close(*engines):
    for engine in engines:
        if isinstance(engine, Ranks):
            engine.close()


@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"tp{size}")
def test_steps_are_those_of_the_construction(size, tmp_path):
    right = some_tokens(0.5)
    write_predictable(tmp_path, right)
    instance, answer = Instance(tmp_path, num_ranks=size), answer_to(PROMPT, NUM_TOKENS)
    assert instance.serve([(PROMPT, GREEDY)]) == [answer]
    assert instance.num_decodes == predicted_steps(answer, right)
    instance.close()


def test_all_ranks_hold_the_same_entries_and_the_tokens_are_those_without_drafts(random_model):
    """With wrong drafts, other guesses than greedy, prompts that continue others, and sequences that go away."""
    prompts = [make_prompt(length) for length in (3, 40, 16, 30, 25)]
    params = [
        GREEDY,
        SamplingParams(max_tokens=33, temperature=1.0, top_p=0.9, seed=17, ignore_eos=True),
        SamplingParams(max_tokens=36, temperature=0.0, repetition_penalty=1.8, frequency_penalty=1.5),
        SamplingParams(max_tokens=1, temperature=0.0),
        GREEDY,
    ]
    requests = list(zip(prompts, params, strict=True))
    for num_pages in (NUM_PAGES, 14):
        without = Instance(random_model, drafts=False, num_pages=num_pages).serve(requests)
        instance = Instance(random_model, num_pages=num_pages, num_ranks=2)
        poison(instance.engine)
        assert instance.serve(requests) == without
        follow_ups = [(prompt + answer[:-7], GREEDY) for (prompt, _), answer in zip(requests, without, strict=True)]
        other = Instance(random_model, drafts=False, num_pages=num_pages)
        assert instance.serve(follow_ups[:2]) == other.serve(follow_ups[:2])
        main, second = (pool.k[LAYER].nan_to_num(7) for pool in instance.engine.pools)
        assert torch.equal(main, second) and (main != 7).any()
        instance.close()


def test_guesses_are_those_of_one_rank(random_model):
    found = []
    for size in (1, 2):
        instance = Instance(random_model, num_ranks=size)
        instance.serve([(make_prompt(45), GREEDY)])
        found.append(instance.guesses)
        if size > 1:
            instance.close()
    assert found[0] == found[1] and len(found[0]) > 20


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize(("of_p", "of_d"), [(2, 1), (1, 2), (2, 4)])
def test_p_and_d_of_unlike_sizes_hand_entries_and_hidden_state_over(of_p, of_d, has_kv, random_model):
    prompt = make_prompt(45)
    whole = on(1, random_model)
    _, result = prefilled(whole, 0, prompt, 45, 70, sample=True)
    expected = [result.drafts[0]] if has_kv else [[]]
    source, target = on(of_p, random_model, sampling=False), on(of_d, random_model)
    admit, _ = prefilled(source, 0, prompt, 20, 45, aux_slot=3, admission={"sampling": None})
    own, first = sent(source, target, prompt, admit.pages, has_kv)
    found = [first.drafts.get(5, [])]
    for _ in range(8):
        expected.append(whole.runner.execute(StepPlan(decode=[0])).drafts[0])
        found.append(target.runner.execute(StepPlan(decode=[5])).drafts[5])
    assert found == expected
    for rank in range(1, of_d):
        assert torch.equal(entries(target, own, 53, rank), entries(target, own, 53))
    close(source, target)


def test_ranks_have_the_same_holes(random_model):
    """Behind a cached prefix, in a slot whose hidden state was that of another sequence at the same position."""
    prompt, engine = make_prompt(45), on(2, random_model)
    admit, _ = prefilled(engine, 0, prompt, 45, 45, sample=True)
    prefilled(engine, 1, make_prompt(32), 32, 32, sample=True)
    engine.runner.execute(StepPlan(release=[0, 1]))
    back = Admit(1, pack_i32(prompt), 45, 2 * PAGE_SIZE, (*admit.pages[:2], *engine.pages(20)), GREEDY)
    engine.runner.execute(StepPlan(admit=[back], prefill=[PrefillChunk(1, 32, 13, sample=True)]))
    for rank in (0, 1):
        after = entries(engine, back, 46, rank)
        assert not after[32].any() and after[33:].any(dim=1).all()
        assert torch.equal(after, entries(engine, back, 46))
    close(engine)


class RejectsOnce(GreedySampler):
    """Draws no token of slot 1 in its third draw."""

    num_draws = 0

    def sample(self, logits, slots):
        tokens = super().sample(logits, slots)
        self.num_draws += 1
        return tokens.masked_fill(torch.tensor([slot == 1 and self.num_draws == 3 for slot in slots]), -1)


def test_drafts_of_unlike_lengths_and_a_row_without_a_token_reach_every_rank(by_hidden_state):
    engine = on(2, by_hidden_state, sampler=RejectsOnce())
    for slot, prompt in enumerate([[7, 100], [30, 4]]):
        prefilled(engine, slot, prompt, 2, 40, sample=True)
    first = engine.admit(2, [11], 40)
    right = [follower(follower(100))]
    right.append(follower(right[0]))
    result = engine.runner.execute(
        StepPlan(
            admit=[first],
            prefill=[PrefillChunk(2, 0, 1, sample=True)],
            decode=[0, 1],
            drafts=[Draft(0, (*right, 1)), Draft(1, (6, 6))],
        )
    )
    assert result.slots == [2, 0, 0, 0, 1] and result.tokens[-1] == -1
    for _ in range(3):
        result = engine.runner.execute(StepPlan(decode=[0, 2]))
        assert result.drafts == {
            slot: [follower(token)] for slot, token in zip(result.slots, result.tokens, strict=True)
        }
    engine.close()
