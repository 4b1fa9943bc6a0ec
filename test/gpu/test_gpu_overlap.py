"""A step is launched behind the running one, the host never waits for the device, and the tokens are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_checkpoints import PAGE_SIZE, VOCAB_SIZE, Engine, expected_tokens, make_prompt, write_checkpoint

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.engine.executor import AppendPages, FirstToken, PrefillChunk, StepPlan
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import Recording
from chitu.ops.triton_ops import TritonOps
from chitu.protocol import SamplingParams


@pytest.fixture(scope="module")
def checkpoint(card, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3", num_layers=1)


@contextmanager
def no_waits(card) -> Iterator[None]:
    """Make torch raise if the host would wait for the device: for a copy from pageable memory, or for a value."""
    if card.is_twin:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.on_card
def test_no_launch_waits_for_the_device_and_the_tokens_are_those_of_the_reference(card, checkpoint):
    """Admissions, first tokens, grown pages and sampling with penalties are launched before the last step is read."""
    folder, reference = checkpoint
    sampler = Sampler(4, VOCAB_SIZE, card.device, (2,))
    engine = Engine(
        folder,
        ops=TritonOps(card.num_multiprocessors),
        device=str(card.device),
        recording=Recording(card.recorder(), decode_sizes=(1, 2), prefill_sizes=() if card.is_twin else (64,)),
        max_model_len=card.size(256, 64),
        num_slots=4,
        num_pages=64,
        sampler=sampler,
    )
    if not card.is_twin:
        engine.runner.warmup()
    count = card.size(20, 3)
    prompts = [make_prompt(PAGE_SIZE - 1), make_prompt(20)]
    params = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5, min_tokens=2)
    first = engine.admit(0, prompts[0], PAGE_SIZE)
    random = engine.admit(1, prompts[1], card.size(96, 32), sampling=params)
    plans = [
        StepPlan(admit=[first, random], prefill=[PrefillChunk(0, 0, PAGE_SIZE - 1, sample=True)]),
        StepPlan(prefill=[PrefillChunk(1, 0, 20, sample=True)], decode=[0]),
    ]
    for step in range(1, count):
        kv_len = PAGE_SIZE - 1 + step
        append = [AppendPages(0, engine.pages(1))] if kv_len % PAGE_SIZE == 0 else []
        plans.append(StepPlan(append=append, decode=[0, 1]))
    plans.append(StepPlan(release=[0, 1]))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    unread = []
    for plan in plans:
        with no_waits(card):
            unread.append(engine.runner.launch(plan))
        if len(unread) == 2:
            result = unread.pop(0).result()
            for slot, token in zip(result.slots, result.tokens, strict=True):
                tokens[slot].append(token)
    unread.pop().result()
    assert tokens[0] == expected_tokens(reference, prompts[0], count + 1)
    assert len(tokens[1]) == count


def test_logits_of_a_peer_are_sampled_without_a_wait(card, checkpoint):
    folder, reference = checkpoint
    engine = Engine(folder, ops=TritonOps(card.num_multiprocessors), device=str(card.device), max_model_len=64)
    prompt = make_prompt(20)
    admit = engine.admit(0, prompt, 32, sampling=None)
    engine.runner.execute(StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, 20, aux_slot=3)]))
    again = engine.admit(1, prompt, 32, kv_len=20)
    with no_waits(card):
        handle = engine.runner.launch(StepPlan(release=[0], admit=[again], first_tokens=[FirstToken(1, 3)]))
    assert handle.result().tokens == expected_tokens(reference, prompt, 1)
