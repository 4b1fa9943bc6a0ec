"""The entries of a drafting layer, plan by plan: what a prompt's chunks write, what P hands over to D, holes, and what
a sequence keeps that goes away and comes back."""

from __future__ import annotations

import pytest
import torch
from engine_checkpoints import GREEDY, PAGE_SIZE, Engine, make_prompt
from mtp_checkpoints import NUM_MODEL_LAYERS, VOCAB, follower, write_predictable, write_random
from mtp_instance import entries, poison, prefilled, sent

from chitu.engine.executor import Admit, AppendPages, Offload, PrefillChunk, Restore, StepPlan
from chitu.protocol import pack_i32

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = NUM_MODEL_LAYERS


@pytest.fixture(scope="module")
def by_hidden_state(tmp_path_factory):
    """Return a model whose drafts are right exactly if the hidden state is that of the position before."""
    folder = tmp_path_factory.mktemp("predictable")
    write_predictable(folder, None)
    return folder


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    write_random(folder)
    return folder


def poisoned(folder, **options) -> Engine:
    return poison(Engine(folder, num_pages=24, drafts=True, **options))


def test_the_entries_of_a_prompt_do_not_depend_on_its_chunks(random_model):
    prompt = make_prompt(45)
    found = []
    for size in (45, 17, 1):
        engine = poisoned(random_model)
        admit, result = prefilled(engine, 0, prompt, size, 64, sample=True)
        found.append((result.tokens, result.drafts, entries(engine, admit, 46)))
    for tokens, drafts, content in found[1:]:
        assert (tokens, drafts) == found[0][:2] and list(drafts) == [0]
        assert torch.allclose(content, found[0][2], atol=1e-4)
    assert not found[0][2][0].any() and found[0][2][1:].any(dim=1).all(), "position 0 has none, all others have one"


def test_the_hidden_state_of_the_last_position_reaches_d_with_the_logits(by_hidden_state):
    prompt = [7, 100, 30, 219, 4]
    source = poisoned(by_hidden_state, sampling=False)
    admit, _ = prefilled(source, 0, prompt, 2, 5, aux_slot=3, admission={"sampling": None})
    token = follower(prompt[-1])
    target = poisoned(by_hidden_state)
    _, result = sent(source, target, prompt, admit.pages)
    assert result.tokens == [token] and result.drafts == {5: [follower(token)]}
    for count in range(1, 4):
        token = follower(token)
        result = target.runner.execute(StepPlan(decode=[5]))
        assert result.tokens == [token] and result.drafts == {5: [follower(token)]}, count


def test_a_first_token_before_its_kv_has_its_draft_one_step_later(random_model):
    """Its entry is computed with the next step, by the hidden state that came with the logits."""
    prompt = make_prompt(37)
    source = poisoned(random_model, sampling=False)
    admit, _ = prefilled(source, 0, prompt, 20, 37, aux_slot=3, admission={"sampling": None})
    later, first, second = poisoned(random_model), poisoned(random_model), []
    for engine, has_kv in ((later, True), (first, False)):
        own, result = sent(source, engine, prompt, admit.pages, has_kv)
        assert bool(result.drafts) == has_kv
        result = engine.runner.execute(StepPlan(decode=[5]))
        second.append((result.tokens, result.drafts, entries(engine, own, 39)))
    assert second[0][:2] == second[1][:2] and second[0][1]
    assert torch.allclose(second[0][2], second[1][2], atol=1e-5)


def test_d_drafts_by_the_entries_that_p_computed(random_model):
    """The same guesses as where the prompt was computed; others without these entries."""
    prompt = make_prompt(45)
    whole = poisoned(random_model)
    _, result = prefilled(whole, 0, prompt, 45, 70, sample=True)
    expected = [result.drafts[0]]
    source = poisoned(random_model, sampling=False)
    admit, _ = prefilled(source, 0, prompt, 20, 45, aux_slot=3, admission={"sampling": None})
    found = []
    targets = [poisoned(random_model), poisoned(random_model)]
    for target in targets:
        found.append([sent(source, target, prompt, admit.pages)[1].drafts[5]])
        if target is targets[1]:  # lost after the first draft
            target.pool.k[LAYER].zero_()
    for _ in range(12):
        expected.append(whole.runner.execute(StepPlan(decode=[0])).drafts[0])
        for target, guesses in zip(targets, found, strict=True):
            guesses.append(target.runner.execute(StepPlan(decode=[5])).drafts[5])
    assert found[0] == expected and found[1] != expected


def test_behind_a_cached_prefix_one_entry_is_a_hole_of_zeros(random_model):
    """Whoever had the slot before: the hidden state that it left may be one of the same position."""
    prompt, engine = make_prompt(45), poisoned(random_model)
    admit, _ = prefilled(engine, 0, prompt, 45, 45, sample=True)
    before = entries(engine, admit, 45).clone()
    prefilled(engine, 1, make_prompt(32), 32, 32, sample=True)
    engine.runner.execute(StepPlan(release=[0, 1]))
    back = Admit(1, pack_i32(prompt), 45, 2 * PAGE_SIZE, (*admit.pages[:2], *engine.pages(20)), GREEDY)
    result = engine.runner.execute(StepPlan(admit=[back], prefill=[PrefillChunk(1, 32, 13, sample=True)]))
    after = entries(engine, back, 45)
    assert torch.equal(after[:32], before[:32]) and not after[32].any() and after[33:].any(dim=1).all()
    assert torch.allclose(after[33:], before[33:], atol=1e-5) and list(result.drafts) == [1]


def test_entries_go_away_with_their_sequence_and_come_back(by_hidden_state):
    prompt, engine = [7, 100, 30, 219, 4], poisoned(by_hidden_state)
    admit, result = prefilled(engine, 0, prompt, 5, 40, sample=True)
    tokens = list(result.tokens)
    for _ in range(14):
        tokens += engine.runner.execute(StepPlan(decode=[0])).tokens
    kept = entries(engine, admit, 19).clone()
    engine.runner.execute(StepPlan(offload=[Offload(0, key=9)]))
    for region in engine.pool.regions:
        region.fill_(float("nan"))
    known = prompt + tokens
    back = Admit(2, pack_i32(known), 5, len(known) - 1, engine.pages(40), GREEDY)
    result = engine.runner.execute(StepPlan(admit=[back], restore=[Restore(2, key=9)], decode=[2]))
    token = follower(tokens[-1])
    assert result.tokens == [token] and result.drafts == {2: [follower(token)]}
    after = entries(engine, back, 21)
    assert torch.equal(after[:19], kept) and not after[19].any() and after[20].any()


def test_without_a_page_for_a_token_its_entry_waits(by_hidden_state):
    """Nothing is written where the sequence has no page: that would be a page of others."""
    prompt, engine = [(11 * place) % VOCAB for place in range(PAGE_SIZE - 1)], poisoned(by_hidden_state)
    admit, result = prefilled(engine, 0, prompt, PAGE_SIZE, PAGE_SIZE, sample=True)
    assert list(result.drafts) == [0]
    others = [page for page in range(24) if page not in admit.pages]
    result = engine.runner.execute(StepPlan(decode=[0]))
    assert result.drafts == {} and engine.pool.k[LAYER][others].isnan().all()
    new = engine.pages(PAGE_SIZE)
    result = engine.runner.execute(StepPlan(append=[AppendPages(0, new)], decode=[0]))
    assert result.drafts == {0: [follower(result.tokens[0])]}
    grown = Admit(0, b"", 0, 0, (*admit.pages, *new), None)
    assert entries(engine, grown, PAGE_SIZE + 2)[1:].any(dim=1).all()
