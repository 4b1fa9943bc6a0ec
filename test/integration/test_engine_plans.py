"""Meaning of a plan: hand-over through an aux row, offload and restore, the order within a step, and its refusals."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import torch
from engine_checkpoints import (
    GREEDY,
    PAGE_SIZE,
    VOCAB_SIZE,
    Engine,
    chunks_of,
    expected_tokens,
    make_prompt,
    write_checkpoint,
)
from support.operations import Operations

from chitu.engine.executor import (
    Admit,
    AppendPages,
    FirstToken,
    Offload,
    PrefillChunk,
    Restore,
    StepPlan,
    StepResult,
)
from chitu.engine.sampler import Sampler
from chitu.errors import ConfigError, Internal
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import SamplingParams, pack_i32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3")


pytestmark = pytest.mark.usefixtures("one_thread")


def decode(engine: Engine, slots: list[int], steps: int) -> list[list[int]]:
    results = [engine.runner.execute(StepPlan(decode=slots)) for _ in range(steps)]
    assert all(result.slots == slots for result in results)
    return [list(tokens) for tokens in zip(*(result.tokens for result in results), strict=True)]


def test_prefill_hands_over_pages_and_logits_and_decode_goes_on_elsewhere(checkpoint):
    folder, reference = checkpoint
    sender, receiver = Engine(folder, sampling=False), Engine(folder)
    prompt = make_prompt(75)
    source = sender.admit(2, prompt, len(prompt), sampling=None)
    for index, chunk in enumerate(chunks_of(2, len(prompt), 37, aux_slot=3)):
        result = sender.runner.execute(StepPlan(admit=[] if index else [source], prefill=[chunk]))
        assert result == StepResult([], [])
    target = receiver.admit(5, prompt, len(prompt), kv_len=len(prompt))
    receiver.pool.aux_logits[1] = sender.pool.aux_logits[3]
    first = receiver.runner.execute(StepPlan(admit=[target], first_tokens=[FirstToken(5, 1)]))
    assert first.slots == [5]
    for mine, theirs in zip((sender.pool.k, sender.pool.v), (receiver.pool.k, receiver.pool.v), strict=True):
        for source_region, target_region in zip(mine, theirs, strict=True):
            target_region[list(target.pages)] = source_region[list(source.pages)]
    receiver.runner.execute(StepPlan(append=[AppendPages(5, receiver.pages(PAGE_SIZE))]))
    tokens = first.tokens + decode(receiver, [5], 9)[0]
    assert tokens == expected_tokens(reference, prompt, 10)


def test_first_token_and_decode_of_a_slot_may_share_a_step(checkpoint):
    folder, reference = checkpoint
    engine = Engine(folder)
    prompt = make_prompt(20)
    engine.runner.execute(
        StepPlan(admit=[engine.admit(0, prompt, 32, sampling=None)], prefill=[PrefillChunk(0, 0, 20, aux_slot=0)])
    )
    pages = tuple(engine.runner._slots.page_table[0, :2].tolist())
    again = Admit(1, pack_i32(prompt), 20, 20, pages, GREEDY)
    result = engine.runner.execute(StepPlan(release=[0], admit=[again], first_tokens=[FirstToken(1, 0)], decode=[1]))
    assert result.slots == [1, 1]
    assert result.tokens == expected_tokens(reference, prompt, 2)


def test_offload_and_restore_lose_no_token(checkpoint):
    folder, reference = checkpoint
    engine = Engine(folder)
    prompts = [make_prompt(45), make_prompt(18)]
    expected = [expected_tokens(reference, prompt, 12) for prompt in prompts]
    first = engine.runner.execute(
        StepPlan(
            admit=[engine.admit(slot, prompt, 64) for slot, prompt in enumerate(prompts)],
            prefill=[PrefillChunk(slot, 0, len(prompt), sample=True) for slot, prompt in enumerate(prompts)],
        )
    )
    outputs = [[token] for token in first.tokens]
    for output, more in zip(outputs, decode(engine, [0, 1], 4), strict=True):
        output += more
    engine.runner.execute(StepPlan(offload=[Offload(0, key=9)]))
    outputs[1] += decode(engine, [1], 3)[0]
    for region in (*engine.pool.k, *engine.pool.v):  # as if the pages had a new owner that overwrote them
        own = set(engine.runner._slots.page_table[1].tolist())
        region[[page for page in range(engine.pool.num_pages) if page not in own]] = float("nan")
    tokens = prompts[0] + outputs[0]
    back = engine.admit(3, tokens, 64, kv_len=len(tokens) - 1, prompt_len=45)
    result = engine.runner.execute(StepPlan(admit=[back], restore=[Restore(3, key=9)], decode=[3, 1]))
    assert result.slots == [3, 1]
    outputs[0].append(result.tokens[0])
    outputs[1].append(result.tokens[1])
    outputs[0] += decode(engine, [3], 6)[0]
    outputs[1] += decode(engine, [1], 3)[0]
    assert outputs == expected
    assert engine.sampler.admitted.keys() == {1, 3}
    token_ids, prompt_len = engine.sampler.admitted[3]
    assert (token_ids.tolist(), prompt_len) == (tokens, 45)


def test_a_dropped_copy_cannot_be_restored(checkpoint):
    engine = Engine(checkpoint[0])
    prompt = make_prompt(10)
    engine.runner.execute(StepPlan(admit=[engine.admit(0, prompt, 16)], prefill=[PrefillChunk(0, 0, 10)]))
    engine.runner.execute(StepPlan(offload=[Offload(0, key=1)], drop=[1]))
    back = engine.admit(0, prompt, 16, kv_len=10)
    with pytest.raises(Internal, match="key 1"):
        engine.runner.execute(StepPlan(admit=[back], restore=[Restore(0, key=1)]))


def test_results_come_in_plan_order_first_tokens_prefills_decodes(checkpoint):
    folder, reference = checkpoint
    engine = Engine(folder)
    prompts = {slot: make_prompt(10 + slot) for slot in range(4)}
    expected = {slot: expected_tokens(reference, prompt, 2) for slot, prompt in prompts.items()}
    engine.runner.execute(
        StepPlan(
            admit=[engine.admit(slot, prompt, 32) for slot, prompt in prompts.items()],
            prefill=[PrefillChunk(3, 0, 13, sample=True), PrefillChunk(1, 0, 11, aux_slot=2), PrefillChunk(2, 0, 5)],
        )
    )
    result = engine.runner.execute(
        StepPlan(
            first_tokens=[FirstToken(1, 2)],
            prefill=[PrefillChunk(2, 5, 7, sample=True), PrefillChunk(0, 0, 10, sample=True)],
            decode=[3],
        )
    )
    assert result == StepResult([1, 2, 0, 3], [expected[1][0], expected[2][0], expected[0][0], expected[3][1]])


def test_on_layer_comes_once_per_layer_when_its_pages_are_written(checkpoint):
    engine = Engine(checkpoint[0])
    prompt = make_prompt(40)
    admit = engine.admit(0, prompt, 48)
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        written = engine.pool.k[layer][list(admit.pages)].abs().sum(dim=(1, 3)).flatten() > 0
        assert written[:40].all()
        assert not written[40:].any()
        if layer + 1 < engine.spec.num_layers:
            assert not engine.pool.k[layer + 1].any()

    engine.runner.execute(StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, 40, sample=True)]), on_layer)
    assert seen == list(range(engine.spec.num_layers))
    engine.runner.execute(StepPlan(decode=[0]), on_layer)
    assert len(seen) == engine.spec.num_layers


def test_a_slot_can_be_filled_to_its_last_token(checkpoint):
    folder, reference = checkpoint
    engine = Engine(folder, max_model_len=32)
    prompt = make_prompt(28)
    plan = StepPlan(admit=[engine.admit(0, prompt, 32)], prefill=[PrefillChunk(0, 0, 28, sample=True)])
    tokens = engine.runner.execute(plan).tokens + decode(engine, [0], 3)[0]
    tokens += decode(engine, [0], 1)[0]
    assert tokens == expected_tokens(reference, prompt, 5)
    with pytest.raises(Internal, match="do not fit"):
        engine.runner.execute(StepPlan(decode=[0]))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (StepPlan(decode=[1]), "slot 1 holds no sequence"),
        (StepPlan(release=[7]), "slot 7 holds no sequence"),
        (StepPlan(decode=[-1]), "slot -1 holds no sequence"),
        (StepPlan(decode=[0]), "decode with kv_len 0"),
        (StepPlan(prefill=[PrefillChunk(0, 4, 2)]), "does not follow"),
        (StepPlan(prefill=[PrefillChunk(0, 0, 21)]), "does not follow"),
        (StepPlan(append=[AppendPages(0, (256,))]), "do not fit"),
        (StepPlan(append=[AppendPages(0, (-1,))]), "do not fit"),
        (StepPlan(admit=[Admit(0, pack_i32([1]), 1, 0, (0,), None)]), "not free"),
        (StepPlan(admit=[Admit(1, array("i").tobytes(), 0, 0, (0,), None)]), "0 tokens"),
        (StepPlan(prefill=[PrefillChunk(0, 0, 20)]), "do not fit into 1 pages"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(checkpoint, plan, reason):
    engine = Engine(checkpoint[0])
    engine.runner.execute(StepPlan(admit=[engine.admit(0, make_prompt(20), PAGE_SIZE)]))
    with pytest.raises(Internal, match=reason):
        engine.runner.execute(plan)


def test_an_executor_without_a_sampler_refuses_to_sample(checkpoint):
    engine = Engine(checkpoint[0], sampling=False)
    with pytest.raises(Internal, match="no sampler"):
        engine.runner.execute(StepPlan(admit=[engine.admit(0, make_prompt(5), 16)]))


def test_more_tokens_than_the_model_was_loaded_for_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="max_model_len"):
        Engine(checkpoint[0], max_model_len=1025)


@pytest.mark.parametrize("sampling", [True, False])
@pytest.mark.parametrize("limits", [(64, 512), (3, 40), (1, 2)])
def test_warmup_leaves_every_slot_free(checkpoint, sampling, limits):
    num_pages, max_model_len = limits
    engine = Engine(checkpoint[0], num_pages=num_pages, max_model_len=max_model_len, sampling=sampling)
    engine.runner.warmup()
    assert not any(engine.runner._slots._sequences)
    assert not engine.sampler.admitted


def test_after_the_warm_up_no_request_asks_the_device_for_an_operation_of_a_new_kind(checkpoint):
    """A GPU loads a kernel when it is first used. Grammars are left out: their masks are made at the first such
    request."""
    folder, _ = checkpoint
    sampler = Sampler(4, VOCAB_SIZE, torch.device("cpu"), (2,))
    engine = Engine(folder, ops=TorchOps(), num_slots=4, max_model_len=128, sampler=sampler)
    with Operations() as before:
        engine.runner.warmup()
    asked = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=0.7,
        top_p=0.8,
        min_p=0.05,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={9: 1.5, 30: -2.0},
        stop_token_ids=(4, 5),
        bad_words=((7, 8), (9,)),
        logprobs=3,
    )
    every = (asked, msgspec.structs.replace(asked, allowed_token_ids=(7, 8, 9, 10)), GREEDY)
    with Operations() as after:
        for slot, params in enumerate(every):
            admit = engine.admit(slot, make_prompt(20), 32, sampling=params)
            engine.runner.execute(StepPlan(admit=[admit], prefill=[PrefillChunk(slot, 0, 20, sample=True)]))
        for _ in range(4):
            engine.runner.execute(StepPlan(decode=[0, 1, 2]))
    assert not set(after.names) - set(before.names)
