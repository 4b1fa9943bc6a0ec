"""Logits of the layer that drafts equal those of transformers' layer on the whole text at once: with the operations of
CPUs and of GPUs, behind recorded steps and others."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_checkpoints import VOCAB_SIZE, Engine, make_prompt
from mtp_checkpoints import NUM_MODEL_LAYERS, write_random
from mtp_instance import poison, prefilled
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


def expected_logits(model, tokens):
    """Return the logits `[n - 1, V]` of the layer at positions 1, 2, ... of a text, without cache or chunks."""
    with torch.inference_mode():
        drafter = MtpModel.from_pretrained(model)
        ids = torch.tensor([tokens])
        hidden = model.model(ids).last_hidden_state
        embeds, positions = drafter.embed_tokens(ids[:, 1:]), torch.arange(1, len(tokens)).unsqueeze(0)
        mask = torch.full((len(tokens) - 1,) * 2, float("-inf")).triu_(1)[None, None]
        rotary = drafter.rotary_emb(embeds, positions)
        found = drafter.layers[0](embeds, hidden[:, :-1], rotary, mask, positions, None)
        return drafter.shared_head(found)[0]


def noting(ops, noted):
    """Return operations that note the logits which they compute."""

    class Noting(type(ops)):
        def norm_linear(self, x_TD, norm_D, eps, weight):
            out = super().norm_linear(x_TD, norm_D, eps, weight)
            if weight.out_features == VOCAB_SIZE:
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
    [(TorchOps, None), (TorchOps, DECODES), (gpu_ops, ALL)],
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
