"""Logits of the layer that drafts equal those of transformers' layer on the whole text at once: with the operations of
CPUs and of GPUs, behind recorded steps and others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from engine_checkpoints import PAGE_SIZE, Engine, make_prompt
from mtp_checkpoints import NUM_MODEL_LAYERS, write_random
from mtp_instance import poison, prefilled
from thread_ranks import Ranks
from transformers.modeling_layers import MtpModel

from chitu.engine.executor import Draft, StepPlan
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.ops.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = make_prompt(6)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    write_random(folder)
    return folder


@pytest.fixture(scope="module")
def model(random_model):
    """Return the model by transformers, whose list of ignored layers has the numbers of published checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        layers = [rf"model\.layers\.{NUM_MODEL_LAYERS}.*"]
        patch.setattr(transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", layers)
        return transformers.DeepseekV3ForCausalLM.from_pretrained(random_model, dtype=torch.float32)


def results(drafter, tokens, hidden):
    """Return the layer's results `[n - 1, D]`, normed, at positions 1, 2, ... of a text, without cache or chunks.
    `hidden`: hidden states `[n - 1, D]` of the positions before."""
    embeds = drafter.embed_tokens(torch.tensor([tokens[1:]]))
    positions = torch.arange(1, len(tokens)).unsqueeze(0)
    mask = torch.full((len(tokens) - 1,) * 2, float("-inf")).triu_(1)[None, None]
    return drafter.layers[0](embeds, hidden[None], drafter.rotary_emb(embeds, positions), mask, positions, None)[0]


def expected_logits(model, tokens):
    """Return the logits `[n - 1, V]` of the layer at positions 1, 2, ..."""
    with torch.inference_mode():
        drafter, hidden = MtpModel.from_pretrained(model), model.model(torch.tensor([tokens])).last_hidden_state[0]
        return drafter.shared_head(results(drafter, tokens, hidden[:-1]))


def expected_drafts(model, tokens, count):
    """Return tokens that the layer drafts in a row, each from its own results for those before."""
    with torch.inference_mode():
        drafter, hidden = MtpModel.from_pretrained(model), model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        text = list(tokens)
        for _ in range(count):
            last = results(drafter, text, hidden)[-1:]
            hidden = torch.cat([hidden, last])
            text.append(int(drafter.shared_head(last).argmax()))
    return text[len(tokens) :]


def noting(ops, noted):
    """Return operations that note the logits which they compute."""

    class Noting(type(ops)):
        def norm_logits(self, *values):
            out = super().norm_logits(*values)
            noted.append(out.clone())
            return out

    ops.__class__ = Noting
    return ops


def gpu_ops():
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    return TritonOps(4)


DECODES = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())
ALL = Recording(EagerRecorder(), decode_sizes=(3,), prefill_sizes=(8,))


@pytest.mark.parametrize(
    ("make_ops", "recording"),
    [(TorchOps, None), (TorchOps, DECODES), pytest.param(gpu_ops, ALL, marks=pytest.mark.engine)],
    ids=["torch", "recorded_torch", "recorded_triton"],
)
def test_logits_equal_those_of_transformers(make_ops, recording, random_model, model):
    """Of a prompt in two chunks, of a decode, of one with a right and a wrong draft."""
    noted: list[torch.Tensor] = []
    options = {"num_pages": 8, "num_slots": 3, "max_model_len": 64}
    engine = Engine(random_model, drafts=True, ops=noting(make_ops(), noted), recording=recording, **options)
    poison(engine)
    _, result = prefilled(engine, 0, PROMPT, 4, 20, sample=True)
    text, found = [*PROMPT, *result.tokens], {len(PROMPT): noted[-1][0]}
    rest = model.generate(torch.tensor([text]), max_new_tokens=3, do_sample=False, eos_token_id=None)[0].tolist()
    for draft in ((), (rest[len(text) + 1], 3)):
        result = engine.runner.execute(StepPlan(decode=[0], drafts=[Draft(0, draft)] if draft else []))
        text += result.tokens
        found[len(text) - 1] = noted[-1][0]
    assert text == rest[: len(text)] and len(text) == len(PROMPT) + 4 and len(result.tokens) == 2
    expected = expected_logits(model, text)
    for position, logits in found.items():
        torch.testing.assert_close(logits, expected[position - 1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_in_a_row_are_those_of_transformers(num_ranks, random_model, model):
    """Also after a decode, which overwrites what they wrote; as far as the sequence has pages."""
    made = Engine if num_ranks == 1 else partial(Ranks, size=num_ranks)
    engine = poison(made(random_model, num_pages=8, drafts=True, mtp_tokens=4))
    prompt = make_prompt(PAGE_SIZE - 4)
    _, result = prefilled(engine, 0, prompt, 7, PAGE_SIZE, sample=True)
    text = [*prompt, *result.tokens]
    for most in (4, 3, 2, 1):
        assert result.drafts[0] == expected_drafts(model, text, most)
        if most > 1:
            result = engine.runner.execute(StepPlan(decode=[0]))
            text += result.tokens
    if num_ranks > 1:
        engine.close()
