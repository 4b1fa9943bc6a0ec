"""The checksum engine: its tokens equal the oracle's, and any wrong byte of KV changes them."""

from __future__ import annotations

import pytest

from chitu.engine.executor import Admit, ExecutorInfo, FirstToken, Offload, PrefillChunk, Restore, StepPlan
from chitu.protocol import SamplingParams, pack_i32
from chitu.testing.checksum_engine import ChecksumExecutor, ChecksumPool, Pace, checksum_layout
from chitu.testing.fake_executor import expected_tokens

VOCAB = 100
PROMPT = [20 + n % 70 for n in range(37)]
INFO = ExecutorInfo(num_slots=4, max_model_len=128, vocab_size=VOCAB, num_layers=2, eos_token_ids=(1,))
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
P_PAGES, D_PAGES = (3, 1, 7), (5, 0, 2, 6)


class Pair:
    """A P and a D; `hand_over` does the transport's part."""

    def __init__(self) -> None:
        self.p_pool, self.d_pool = (ChecksumPool(checksum_layout(16, VOCAB), 8, 2) for _ in range(2))
        self.p = ChecksumExecutor(INFO, self.p_pool, Pace())
        self.d = ChecksumExecutor(INFO, self.d_pool, Pace())

    def prefill(self, chunk: int) -> None:
        self.p.execute(StepPlan(admit=[Admit(0, pack_i32(PROMPT), len(PROMPT), 0, P_PAGES, None)]))
        layers: list[int] = []
        for start in range(0, len(PROMPT), chunk):
            length = min(chunk, len(PROMPT) - start)
            is_last = start + length == len(PROMPT)
            plan = StepPlan(prefill=[PrefillChunk(0, start, length, aux_slot=1 if is_last else -1)])
            self.p.execute(plan, layers.append)
        assert layers[:2] == [0, 1]

    def hand_over(self) -> None:
        for source, target in zip(P_PAGES, D_PAGES, strict=False):
            self.d_pool.kv[:, target * 16 : target * 16 + 16] = self.p_pool.kv[:, source * 16 : source * 16 + 16]
        self.d_pool.aux_rows[0] = self.p_pool.aux_rows[1]

    def first_token(self, sampling: SamplingParams = GREEDY) -> list[int]:
        admit = Admit(2, pack_i32(PROMPT), len(PROMPT), len(PROMPT), D_PAGES, sampling)
        return self.d.execute(StepPlan(admit=[admit], first_tokens=[FirstToken(2, 0)])).tokens

    def decode(self, count: int) -> list[int]:
        return [token for _ in range(count) for token in self.d.execute(StepPlan(decode=[2])).tokens]


@pytest.mark.parametrize("chunk", [5, 16, 100])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=20, temperature=0.8, seed=7)])
def test_tokens_over_p_and_d_are_those_of_the_oracle(chunk: int, sampling: SamplingParams) -> None:
    pair = Pair()
    pair.prefill(chunk)
    pair.hand_over()
    tokens = pair.first_token(sampling) + pair.decode(19)
    assert tokens == expected_tokens(PROMPT, 20, VOCAB, sampling)
    assert len(set(tokens)) > 10


@pytest.mark.parametrize("region", range(4))
def test_one_wrong_byte_of_kv_changes_every_token_after_it(region: int) -> None:
    pair = Pair()
    pair.prefill(16)
    pair.hand_over()
    right = expected_tokens(PROMPT, 20, VOCAB)
    assert pair.first_token() + pair.decode(4) == right[:5]
    pair.d_pool.kv[region, D_PAGES[1] * 16 + 3, 5] ^= 1
    wrong = pair.decode(15)
    assert sum(a == b for a, b in zip(wrong, right[5:], strict=True)) <= 2, "equal by chance at most"


def test_two_pages_in_the_wrong_order_change_the_tokens() -> None:
    pair = Pair()
    pair.prefill(16)
    pair.hand_over()
    first, second = (slice(page * 16, page * 16 + 16) for page in D_PAGES[:2])
    pair.d_pool.kv[:, first], pair.d_pool.kv[:, second] = (
        pair.d_pool.kv[:, second].copy(),
        pair.d_pool.kv[:, first].copy(),
    )
    pair.first_token()
    assert pair.decode(8) != expected_tokens(PROMPT, 9, VOCAB)[1:]


def test_kv_that_was_offloaded_comes_back() -> None:
    pair = Pair()
    pair.prefill(16)
    pair.hand_over()
    tokens = pair.first_token() + pair.decode(4)
    kv_len = len(PROMPT) + 4
    pair.d.execute(StepPlan(offload=[Offload(2, 9)]))
    pair.d_pool.kv[:] = 0
    resumed = Admit(2, pack_i32(PROMPT + tokens), len(PROMPT), kv_len, (1, 7, 4), GREEDY)
    pair.d.execute(StepPlan(admit=[resumed], restore=[Restore(2, 9)]))
    assert tokens + pair.decode(3) == expected_tokens(PROMPT, 8, VOCAB)
