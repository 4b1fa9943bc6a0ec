"""The fake executor: one oracle for every path of a request, and an error for every impossible plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chitu.engine.executor import (
    Admit,
    AppendPages,
    Executor,
    ExecutorInfo,
    FirstToken,
    Offload,
    PrefillChunk,
    Restore,
    StepPlan,
)
from chitu.protocol import SamplingParams, pack_i32
from chitu.testing.fake_executor import FakeExecutor, InvariantViolation, expected_tokens

INFO = ExecutorInfo(num_slots=4, max_model_len=64, vocab_size=70, num_layers=3, eos_token_ids=(2, 3))
PROMPT = [7, 1, 9, 9, 4, 30]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, seed=99)


def executor(num_aux_slots: int = 2) -> FakeExecutor:
    return FakeExecutor(INFO, 16, 4, np.zeros((num_aux_slots, 128), np.uint8))


def admit(
    slot: int,
    tokens: Sequence[int],
    pages: Sequence[int],
    kv_len: int = 0,
    prompt_len: int = len(PROMPT),
    sampling: SamplingParams | None = GREEDY,
) -> Admit:
    return Admit(slot, pack_i32(tokens), prompt_len, kv_len, tuple(pages), sampling)


def unified(fake: Executor, steps: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """Run a request in slot 0, with prefill in two chunks, up to `steps` tokens. It ends up on pages 0, 5, 6, 7, ..."""
    fake.execute(StepPlan(admit=[admit(0, PROMPT, [0], sampling=sampling)], prefill=[PrefillChunk(0, 0, 4)]))
    plan = StepPlan(append=[AppendPages(0, (5,))], prefill=[PrefillChunk(0, 4, 2, sample=True)])
    tokens = fake.execute(plan).tokens
    for step in range(1, steps):
        kv_len = len(PROMPT) + step
        append = [AppendPages(0, (5 + (kv_len - 5) // 4,))] if kv_len % 4 == 1 and kv_len > 8 else []
        tokens += fake.execute(StepPlan(append=append, decode=[0])).tokens
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_unified_request_gets_the_expected_tokens(sampling: SamplingParams) -> None:
    assert unified(executor(), 14, sampling) == expected_tokens(PROMPT, 14, INFO.vocab_size, sampling)


def test_prompt_order_seed_and_history_all_change_the_tokens() -> None:
    base = expected_tokens(PROMPT, 8, INFO.vocab_size)
    assert base != expected_tokens(PROMPT[::-1], 8, INFO.vocab_size)
    assert base != expected_tokens(PROMPT[:-1], 8, INFO.vocab_size)
    assert base != expected_tokens(PROMPT, 8, INFO.vocab_size, SEEDED)
    assert expected_tokens([*PROMPT, *base[:3]], 5, INFO.vocab_size) == base[3:]
    assert len(set(expected_tokens(PROMPT, 200, INFO.vocab_size))) > 40
    assert not set(expected_tokens(PROMPT, 200, INFO.vocab_size)) & set(INFO.eos_token_ids)


def test_a_disaggregated_request_gets_the_expected_tokens() -> None:
    prefill, decode = executor(), executor()
    prefill.execute(
        StepPlan(admit=[admit(1, PROMPT, [3, 8], sampling=None)], prefill=[PrefillChunk(1, 0, 6, aux_slot=1)])
    )
    decode.execute(StepPlan(admit=[admit(2, PROMPT, [4, 2], kv_len=6)]))
    decode.aux_row(0)[:] = prefill.aux_row(1)  # a transport does this
    tokens = decode.execute(StepPlan(first_tokens=[FirstToken(2, 0)])).tokens
    for _ in range(2):
        tokens += decode.execute(StepPlan(decode=[2])).tokens
    assert tokens == expected_tokens(PROMPT, 3, INFO.vocab_size)


def test_logits_rows_lie_in_the_memory_that_was_passed_in() -> None:
    memory = np.zeros(256, np.uint8)
    fake = FakeExecutor(INFO, 16, 4, memory.reshape(2, 128))
    fake.execute(StepPlan(admit=[admit(0, PROMPT, [0, 1])], prefill=[PrefillChunk(0, 0, 6, aux_slot=1)]))
    assert not any(memory[:192])
    assert any(memory[192:200])


def test_a_retracted_request_goes_on_where_it_was() -> None:
    fake = executor()
    tokens = unified(fake, 3)
    fake.execute(StepPlan(offload=[Offload(0, key=77)]))
    assert fake.saved_keys == {77}
    assert not fake.owned_pages
    fake.execute(StepPlan(admit=[admit(3, PROMPT + tokens, [9, 1, 2], kv_len=8)], restore=[Restore(3, 77)]))
    assert not fake.saved_keys
    assert fake.execute(StepPlan(decode=[3])).tokens == expected_tokens(PROMPT, 4, INFO.vocab_size)[3:]


def test_results_come_in_plan_order_and_layers_are_reported_with_prefills_only() -> None:
    fake = executor()
    unified(fake, 1)
    layers: list[int] = []
    fake.execute(StepPlan(decode=[0]), layers.append)
    assert layers == []
    fake.execute(
        StepPlan(admit=[admit(3, PROMPT, [2, 3], sampling=None)], prefill=[PrefillChunk(3, 0, 6, aux_slot=0)]),
        layers.append,
    )
    assert layers == [0, 1, 2]
    result = fake.execute(
        StepPlan(
            admit=[admit(1, PROMPT, [8, 9]), admit(2, PROMPT, [10, 11], kv_len=6)],
            first_tokens=[FirstToken(2, 0)],
            prefill=[PrefillChunk(1, 0, 6, sample=True)],
            decode=[0],
        )
    )
    first, second, third = expected_tokens(PROMPT, 3, INFO.vocab_size)
    assert (result.slots, result.tokens) == ([2, 1, 0], [first, first, third])
    assert second != third


def test_pages_of_the_same_beginning_serve_several_slots_until_they_are_written_to() -> None:
    fake = executor()
    unified(fake, 1)
    longer = [*PROMPT[:4], 11, 12]
    plan = StepPlan(admit=[admit(1, longer, [0, 9], kv_len=4)], prefill=[PrefillChunk(1, 4, 2, sample=True)])
    assert fake.execute(plan).tokens == expected_tokens(longer, 1, INFO.vocab_size)
    with pytest.raises(InvariantViolation, match="never restored"):
        fake.execute(StepPlan(admit=[admit(2, longer, [0, 5, 10], kv_len=5)], prefill=[PrefillChunk(2, 5, 1)]))


def test_released_slots_and_pages_can_be_used_again() -> None:
    fake = executor()
    unified(fake, 2)
    fake.execute(StepPlan(release=[0], admit=[admit(0, PROMPT, [0, 5])]))
    assert fake.live_slots == {0}
    assert fake.owned_pages == {0, 5}
    fake.execute(StepPlan(release=[0]))
    assert not fake.live_slots | fake.owned_pages


LATER = [*PROMPT, *expected_tokens(PROMPT, 1, INFO.vocab_size)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"admit": [admit(0, PROMPT, [9])]}, "slot 0, which is taken"),
        ({"admit": [admit(4, PROMPT, [9])]}, "slot 4 of 4"),
        ({"admit": [admit(1, [], [9], prompt_len=0)]}, "prompt of 0"),
        ({"admit": [admit(1, [70], [9], prompt_len=1)]}, "token id 70"),
        ({"admit": [admit(1, [1] * 65, [9], prompt_len=65)]}, "65 tokens exceed"),
        ({"admit": [admit(1, PROMPT, [9], kv_len=6)]}, "6 tokens in 1 pages"),
        ({"admit": [admit(1, PROMPT, [9, 16])]}, "page 16 of 16"),
        (
            {"admit": [admit(1, PROMPT, [9, 5])], "prefill": [PrefillChunk(1, 0, 6)]},
            r"slot 1 writes to page 5, which slots \[0, 1\] use",
        ),
        ({"append": [AppendPages(0, (5,))]}, "page 5 for slot 0, which has it already"),
        (
            {"admit": [admit(1, [7, 1, 9, 8, 4], [0, 9], kv_len=4, prompt_len=5)], "prefill": [PrefillChunk(1, 4, 1)]},
            "never restored",
        ),
        ({"append": [AppendPages(1, (9,))]}, "append of slot 1, which is free"),
        ({"release": [1]}, "release of slot 1, which is free"),
        ({"release": [0, 0]}, "release of slot 0, which is free"),
        ({"offload": [Offload(1, 1)]}, "offload of slot 1, which is free"),
        ({"drop": [5]}, "key 5, under which nothing"),
        ({"restore": [Restore(0, 5)]}, "key 5, under which nothing"),
        ({"prefill": [PrefillChunk(0, 5, 1)]}, "chunk from 5, kv_len is 6"),
        ({"prefill": [PrefillChunk(0, 6, 2)]}, "chunk to 8 of 7 tokens"),
        ({"prefill": [PrefillChunk(0, 6, 0)]}, "chunk of 0 tokens"),
        ({"prefill": [PrefillChunk(0, 6, 1, aux_slot=2)]}, "aux slot 2 of 2"),
        ({"decode": [1]}, "decode of slot 1, which is free"),
        ({"decode": [0, 0]}, "decodes twice"),
        ({"admit": [admit(1, PROMPT, [9, 10])], "decode": [1]}, "KV of 0 tokens of 6"),
        ({"admit": [admit(1, PROMPT, [9, 10], kv_len=6)], "decode": [1]}, "KV of 6 tokens of 6"),
        ({"admit": [admit(1, LATER, [9, 10], kv_len=6)], "decode": [1]}, "never restored"),
        (
            {"admit": [admit(1, LATER, [9, 10], kv_len=6)], "offload": [Offload(0, 1)], "restore": [Restore(1, 2)]},
            "key 2",
        ),
        ({"admit": [admit(1, PROMPT, [9, 10])], "prefill": [PrefillChunk(1, 0, 4, sample=True)]}, "logits at 4 of 6"),
        (
            {"admit": [admit(1, PROMPT, [9, 10], sampling=None)], "prefill": [PrefillChunk(1, 0, 6, sample=True)]},
            "without sampling parameters",
        ),
        ({"admit": [admit(1, PROMPT, [9, 10], kv_len=6)], "first_tokens": [FirstToken(1, 1)]}, "holds no logits"),
        ({"admit": [admit(1, PROMPT[::-1], [9, 10], kv_len=6)], "first_tokens": [FirstToken(1, 0)]}, "of other tokens"),
        ({"first_tokens": [FirstToken(0, 0)]}, "of other tokens"),
    ],
)
def test_an_impossible_plan_is_refused(plan: dict[str, Any], message: str) -> None:
    fake = executor()
    unified(fake, 1)
    row = executor()
    row.execute(StepPlan(admit=[admit(0, PROMPT, [0, 1])], prefill=[PrefillChunk(0, 0, 6, aux_slot=0)]))
    fake.aux_row(0)[:] = row.aux_row(0)
    with pytest.raises(InvariantViolation, match=message):
        fake.execute(StepPlan(**plan))


def test_a_page_too_few_is_noticed_at_the_token_that_needs_it() -> None:
    fake = executor()
    unified(fake, 1)
    for _ in range(2):
        fake.execute(StepPlan(decode=[0]))
    with pytest.raises(InvariantViolation, match="9 tokens in 2 pages of 4"):
        fake.execute(StepPlan(decode=[0]))


def test_a_token_beyond_max_tokens_is_refused() -> None:
    fake = executor()
    unified(fake, 1, SamplingParams(max_tokens=1, temperature=0.0))
    with pytest.raises(InvariantViolation, match="token 2 of 1"):
        fake.execute(StepPlan(decode=[0]))


@pytest.mark.parametrize(
    ("resumed", "kv_len", "message"),
    [([*PROMPT, 11, 12, 13], 8, "other tokens"), ([*PROMPT, 11, 12], 7, "kv_len 7, but 8")],
)
def test_kv_of_another_sequence_is_not_restored(resumed: list[int], kv_len: int, message: str) -> None:
    fake = executor()
    unified(fake, 3)
    fake.execute(StepPlan(offload=[Offload(0, 1)]))
    with pytest.raises(InvariantViolation, match=message):
        fake.execute(StepPlan(admit=[admit(0, resumed, [0, 1, 2], kv_len=kv_len)], restore=[Restore(0, 1)]))


def test_a_step_after_close_is_refused() -> None:
    fake = executor()
    fake.close()
    with pytest.raises(InvariantViolation, match="after close"):
        fake.execute(StepPlan())
