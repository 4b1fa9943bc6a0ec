"""The engine on several tensor-parallel ranks gives the tokens of one rank. Ranks are threads here, so no gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_checkpoints import FAMILIES, GREEDY, Engine, expected_tokens, generate, make_prompt, write_checkpoint
from thread_ranks import Meeting, Ranks, ThreadRank

from chitu.engine.build import load_model
from chitu.engine.executor import Admit, FirstToken, Offload, PrefillChunk, Restore, StepPlan
from chitu.engine.tp_executor import for_followers
from chitu.errors import ConfigError, Internal
from chitu.protocol import pack_i32

LENGTHS = (1, 16, 37, 150)


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"tp{size}")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_several_ranks_equal_transformers(family: str, size: int, tmp_path: Path) -> None:
    """4 heads and 2 KV heads: two ranks split the KV heads, four ranks hold each of them twice."""
    reference = write_checkpoint(tmp_path, family)
    prompts = [make_prompt(length) for length in LENGTHS]
    ranks = Ranks(tmp_path, size)
    assert generate(ranks, prompts, 8) == [expected_tokens(reference, prompt, 8) for prompt in prompts]  # type: ignore[arg-type]
    heads = [pool.k[0].shape[1] for pool in ranks.pools]
    assert heads == [1] * size
    for pool in ranks.pools[1:]:
        assert pool.num_aux_slots == 0
    if size == 4:  # neighbours hold the same head
        assert torch.equal(ranks.pools[0].k[1], ranks.pools[1].k[1])
        is_latent = ranks.spec.latent is not None  # then all hold the same
        assert torch.equal(ranks.pools[1].k[1], ranks.pools[2].k[1]) == is_latent
    ranks.close()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3")


def test_uneven_shares_of_vocabulary_and_mlp_change_nothing(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=299, hidden_size=48, intermediate_size=101, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=16, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    reference = transformers.LlamaForCausalLM(config).float().eval()
    reference.save_pretrained(tmp_path)
    ranks = Ranks(tmp_path, 3)
    prompt = [token % 299 for token in make_prompt(50)]
    assert generate(ranks, [prompt], 8) == [expected_tokens(reference, prompt, 8)]  # type: ignore[arg-type]
    ranks.close()


def test_an_mlp_share_as_wide_as_the_hidden_state_changes_nothing(tmp_path: Path) -> None:
    """The result of gate and up then has the shape of the down projection's result."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(4)
    reference = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.3)
    reference.save_pretrained(tmp_path)
    ranks = Ranks(tmp_path, 2)
    prompt = [token % 300 for token in make_prompt(50)]
    assert generate(ranks, [prompt], 8) == [expected_tokens(reference, prompt, 8)]  # type: ignore[arg-type]
    ranks.close()


def test_layers_are_reported_when_every_rank_has_written_them(qwen3: tuple[Path, object]) -> None:
    ranks, prompt = Ranks(qwen3[0], 2), make_prompt(20)
    admit = ranks.admit(0, prompt, 20)
    seen = []

    def on_layer(layer: int) -> None:
        written = [bool(pool.k[layer][list(admit.pages)].any()) for pool in ranks.pools]
        seen.append((layer, written))

    ranks.runner.execute(StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, 20)]), on_layer)
    assert seen == [(layer, [True, True]) for layer in range(ranks.spec.num_layers)]
    ranks.close()


def test_hand_over_offload_and_restore_work_on_every_rank(qwen3: tuple[Path, object]) -> None:
    folder, reference = qwen3
    sender, receiver = Engine(folder, sampling=False), Ranks(folder, 2)
    prompt = make_prompt(45)
    source = sender.admit(0, prompt, 45, sampling=None)
    sender.runner.execute(StepPlan(admit=[source], prefill=[PrefillChunk(0, 0, 45, aux_slot=3)]))
    target = receiver.admit(5, prompt, 64, kv_len=45)
    receiver.pools[0].aux_logits[1] = sender.pool.aux_logits[3]
    tokens = receiver.runner.execute(StepPlan(admit=[target], first_tokens=[FirstToken(5, 1)])).tokens
    there = list(target.pages[: len(source.pages)])
    for rank, pool in enumerate(receiver.pools):
        for mine, theirs in ((sender.pool.k, pool.k), (sender.pool.v, pool.v)):
            for layer in range(receiver.spec.num_layers):
                theirs[layer][there] = mine[layer][list(source.pages)][:, rank : rank + 1]
    for _ in range(4):
        tokens += receiver.runner.execute(StepPlan(decode=[5])).tokens
    receiver.runner.execute(StepPlan(offload=[Offload(5, key=9)]))
    for pool in receiver.pools:
        for region in (*pool.k, *pool.v):
            region[list(target.pages)] = float("nan")
    known = prompt + tokens
    back = Admit(2, pack_i32(known), 45, len(known) - 1, receiver.pages(64), GREEDY)
    tokens += receiver.runner.execute(StepPlan(admit=[back], restore=[Restore(2, key=9)], decode=[2])).tokens
    tokens += receiver.runner.execute(StepPlan(decode=[2])).tokens
    assert tokens == expected_tokens(reference, prompt, 7)  # type: ignore[arg-type]
    receiver.close()


def test_a_first_token_is_not_fed_back_in_its_own_step(qwen3: tuple[Path, object]) -> None:
    ranks = Ranks(qwen3[0], 2)
    with pytest.raises(Internal, match="the followers cannot know it"):
        ranks.runner.execute(StepPlan(first_tokens=[FirstToken(1, 0)], decode=[1]))
    ranks.close()


def test_followers_hear_no_parameters_of_sampling() -> None:
    admit = Admit(1, b"", 0, 0, (), GREEDY)
    plan = StepPlan(admit=[admit], first_tokens=[FirstToken(1, 0)], prefill=[PrefillChunk(2, 0, 1, sample=True)])
    admitted = [Admit(1, b"", 0, 0, (), None)]
    assert for_followers(plan) == StepPlan(admit=admitted, first_tokens=plan.first_tokens, prefill=plan.prefill)


def test_a_model_that_cannot_be_cut_is_refused(qwen3: tuple[Path, object]) -> None:
    with pytest.raises(ConfigError, match="tp_size 3: 4 attention heads"):
        load_model(qwen3[0], shard=ThreadRank(Meeting(3), 0))
