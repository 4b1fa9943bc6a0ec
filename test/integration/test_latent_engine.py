"""An engine with a latent cache (DeepSeek): hand-over, retraction and the content of its pool. Tokens of a mixed batch,
of several ranks and of P and D are tested with the other families."""

from __future__ import annotations

import json

import pytest
from engine_checkpoints import GREEDY, PAGE_SIZE, Engine, expected_tokens, generate, make_prompt, write_checkpoint
from support.reference_ops import ReferenceOps

from chitu.engine.build import load_model
from chitu.engine.executor import Admit, FirstToken, Offload, PrefillChunk, Restore, StepPlan
from chitu.errors import UnsupportedModel
from chitu.kv_cache.checksum import page_sums_of
from chitu.models.config import read_model_spec
from chitu.protocol import pack_i32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, write_checkpoint(folder, "deepseek_v3")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_token_costs_one_row_of_latent_and_rotated_key_a_layer(checkpoint):
    engine = Engine(checkpoint[0], num_pages=8)
    assert len(engine.pool.region_bases) == engine.spec.num_layers
    assert engine.pool.page_bytes == (PAGE_SIZE * (40 + 16) * 4,) * engine.spec.num_layers
    assert engine.pool.k[1].data_ptr() == engine.pool.v[1].data_ptr() == engine.pool.region_bases[1]
    assert engine.pool.aux_base >= engine.pool.region_bases[-1] + 8 * engine.pool.page_bytes[-1]


def test_the_reference_operations_give_the_same_tokens(checkpoint):
    folder, reference = checkpoint
    prompts = [make_prompt(length) for length in (3, 40)]
    expected = [expected_tokens(reference, prompt, 5) for prompt in prompts]
    assert generate(Engine(folder, ops=ReferenceOps()), prompts, 5) == expected


def test_pages_go_elsewhere_and_a_sequence_goes_away_and_comes_back(checkpoint):
    folder, reference = checkpoint
    sender, receiver = Engine(folder, sampling=False), Engine(folder)
    prompt = make_prompt(45)
    source = sender.admit(0, prompt, 45, sampling=None)
    seen: list[int] = []
    sender.runner.execute(
        StepPlan(admit=[source], prefill=[PrefillChunk(0, 0, 45, aux_slot=3)]), lambda layer, *_: seen.append(layer)
    )
    assert seen == [0, 1, 2]
    target = receiver.admit(5, prompt, 64, kv_len=45)
    receiver.pool.aux_logits[1] = sender.pool.aux_logits[3]
    there = list(target.pages[: len(source.pages)])
    for mine, theirs in zip(sender.pool.regions, receiver.pool.regions, strict=True):
        theirs[there] = mine[list(source.pages)]
    layers = range(receiver.spec.num_layers)
    sums = page_sums_of(receiver.pool, 0).sums(layers, there)
    assert sums.tolist() == page_sums_of(sender.pool, 0).sums(layers, source.pages).tolist()
    assert sums.tolist() != page_sums_of(receiver.pool, 0).sums(range(2), there).tolist()
    tokens = receiver.runner.execute(StepPlan(admit=[target], first_tokens=[FirstToken(5, 1)])).tokens
    for _ in range(4):
        tokens += receiver.runner.execute(StepPlan(decode=[5])).tokens
    receiver.runner.execute(StepPlan(offload=[Offload(5, key=9)]))
    for region in receiver.pool.regions:
        region[list(target.pages)] = float("nan")
    known = prompt + tokens
    back = Admit(2, pack_i32(known), 45, len(known) - 1, receiver.pages(64), GREEDY)
    tokens += receiver.runner.execute(StepPlan(admit=[back], restore=[Restore(2, key=9)], decode=[2])).tokens
    tokens += receiver.runner.execute(StepPlan(decode=[2])).tokens
    assert tokens == expected_tokens(reference, prompt, 7)


def test_layers_that_guess_further_tokens_are_left_out_and_others_refused(checkpoint, tmp_path):
    """A checkpoint of DeepSeek-V3 has one more layer than its config states, for predicting several tokens at once."""
    folder, _ = checkpoint
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for extra, is_known in ((1, True), (0, False)):
        changed = config | {"num_hidden_layers": 2, "num_nextn_predict_layers": extra}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert read_model_spec(tmp_path).num_extra_layers == extra
        if is_known:
            assert len(load_model(tmp_path).layers) == 2
        else:
            with pytest.raises(UnsupportedModel, match=r"model\.layers\.2"):
                load_model(tmp_path)
