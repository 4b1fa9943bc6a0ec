"""Recorded steps (CUDA graphs) and steps launched one operation at a time give the same tokens, those of transformers.
In float32, so that rounding cannot change a token."""

from __future__ import annotations

import pytest
from engine_checkpoints import Engine, expected_tokens, generate, make_prompt, write_checkpoint
from mtp_checkpoints import answer_to, write_predictable
from mtp_instance import prefilled

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.engine.executor import Draft, StepPlan
from chitu.engine.step_graphs import Recording
from chitu.ops.triton_ops import TritonOps

pytestmark = pytest.mark.on_card


@pytest.fixture(scope="module")
def checkpoint(card, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3", num_layers=card.size(3, 1))


def test_recorded_eager_and_the_reference_agree(card, checkpoint):
    """Decode rows pass through every bucket up and down; prompts are within, at and beyond the recorded sizes."""
    folder, reference = checkpoint
    lengths = (3, 40, 64, 65, 150, 257, 700) if not card.is_twin else (3, 65)
    count = card.size(24, 2)
    prompts = [make_prompt(length) for length in lengths]
    expected = [expected_tokens(reference, prompt, count) for prompt in prompts]
    recordings = {
        "eager": None,
        "recorded": Recording(card.recorder(), decode_sizes=(1, 2, 4), prefill_sizes=(64, card.size(256, 64))),
    }
    for name, recording in recordings.items():
        engine = Engine(
            folder,
            ops=TritonOps(card.num_multiprocessors),
            device=str(card.device),
            recording=recording,
            max_model_len=1024 if not card.is_twin else 96,
            num_slots=card.size(8, 2),
        )
        assert generate(engine, prompts, count, chunk_size=card.size(200, 65)) == expected, name
        assert generate(engine, prompts[:2], count, chunk_size=card.size(300, 65)) == expected[:2], name


def test_warm_up_records_every_bucket_and_leaves_no_trace(card, checkpoint):
    folder, reference = checkpoint
    recording = Recording(card.recorder(), decode_sizes=(1,), prefill_sizes=(64,))
    engine = Engine(
        folder,
        ops=TritonOps(card.num_multiprocessors),
        device=str(card.device),
        recording=recording,
        max_model_len=64,
        num_slots=2,
        num_pages=8,
    )
    engine.runner.warmup()
    prompt = make_prompt(20)
    assert generate(engine, [prompt], 2, chunk_size=64) == [expected_tokens(reference, prompt, 2)]


def test_a_layer_that_drafts_behind_recorded_steps(card, tmp_path):
    """Each draft is right if the hidden state is the recording's, of the position before."""
    write_predictable(tmp_path, None)
    recording = Recording(card.recorder(), decode_sizes=(2,), prefill_sizes=(64,))
    options = {"recording": recording, "max_model_len": 128, "num_slots": 2, "num_pages": 16}
    ops = TritonOps(card.num_multiprocessors)
    engine = Engine(tmp_path, ops=ops, device=str(card.device), drafts=True, **options)
    if not card.is_twin:
        engine.runner.warmup()
    prompt, count = [7, 100, 30, 219, 4], card.size(40, 2)
    _, result = prefilled(engine, 0, prompt, 5, 100, sample=True)
    tokens = list(result.tokens)
    for _ in range(count):
        result = engine.runner.execute(StepPlan(decode=[0], drafts=[Draft(0, tuple(result.drafts[0]))]))
        tokens += result.tokens
    assert tokens == answer_to(prompt, 1 + 2 * count)
