"""What each way to serve a request costs, in seconds. Pure: loads of instances, the request and the time come in.

A way is a pair (Pi, Dj), D alone, or a unified instance. Its cost is what all requests together wait longer: this one
until its first token and between its tokens, and those that run where it goes, which each of its prompt tokens and its
row in each step delay. The cheapest way that keeps the request's SLO is taken; if none does, the cheapest.

* **Time of prompts**: the queue there (`loads.py`), and the tokens of this request that are likely not cached there
  (`prefix_history.py`), at the rates of its steps. Beside streams each step also takes their time, and has as many
  prompt tokens as the SLO leaves (`instance/pace.py`).
* **Bytes to move**: what D has not cached, over that very link. It was measured if P wrote there before
  (`LoadReport.paths`), else it is taken for what is usual within a host, within a rack, or between racks. Layers are
  moved while others are computed, so the longer of the two counts.
* **Waiting for pages**: the queue there.
* **Groups that share experts** step together: a prompt, and a row, on one member delays the streams of all, and each
  step has the rows of all. Which member of a group gets it is the policy's: the one with least to do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from chitu.config.schema import SLOConfig
from chitu.protocol import InstanceInfo
from chitu.router.loads import InstanceLoad

HOST_BYTES_PER_S, RACK_BYTES_PER_S, FAR_BYTES_PER_S = 8e9, 5e9, 2e9
"""Speed of a link that was not measured: within a host, within a rack, and between racks."""
ANSWER_TOKENS = 128
"""Tokens of an answer, for what its row costs, if the client allows so many."""


class SLO(NamedTuple):
    """A request's own targets; None: those of `router.slo`."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_SLO = SLO()


class Asked(NamedTuple):
    """What a request asks, for its cost."""

    num_tokens: int
    max_tokens: int = ANSWER_TOKENS
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    @classmethod
    def of(cls, num_tokens: int, max_tokens: int, slo: SLO, usual: SLOConfig) -> Asked:
        ttft_s = usual.ttft_s if slo.ttft_s is None else slo.ttft_s
        tpot_s = usual.tpot_s if slo.tpot_s is None else slo.tpot_s
        return cls(
            num_tokens, max_tokens, math.inf if ttft_s is None else ttft_s, math.inf if tpot_s is None else tpot_s
        )


class Cost(NamedTuple):
    """Prediction for one way. Compares as `min` needs it: ways that keep the SLO first, then by seconds."""

    breaks_slo: bool
    seconds: float
    """Sum of what requests wait longer: this one, and those that run there."""
    wait_s: float = 0.0
    """Wait for the first chunk and for pages, by measured rates; 0 if there are none."""


def pair_cost(
    asked: Asked, prefill: InstanceLoad, decode: InstanceLoad, new_tokens: int, moved_tokens: int, now_s: float
) -> Cost:
    """Return the cost of a pair, of which P computes `new_tokens` of the prompt; `moved_tokens` D has not cached."""
    byte_s = prefill.link_s_per_byte(decode.info.engine_rank)
    if byte_s is None:
        byte_s = usual_s_per_byte(prefill.info, decode.info)
    ahead_s, pages_s = prefill.queue_s(now_s), decode.pages_wait_s(now_s)
    computed_s = ahead_s + prefill.prompt_s(new_tokens, asked.num_tokens - new_tokens)
    moved_s = byte_s * decode.kv_token_bytes * moved_tokens
    # The row of logits goes first; D draws from it with its next step, and needs the KV for the one after.
    first_s = byte_s * decode.row_bytes + decode.step_s(decode.step_rows)
    wait_s = max(ahead_s if prefill.is_measured else 0.0, pages_s)
    return _cost(asked, max(computed_s, moved_s, pages_s) + first_s, wait_s, decode)


def cost_alone(asked: Asked, load: InstanceLoad, new_tokens: int, now_s: float) -> Cost:
    """Return the cost of one instance that computes `new_tokens` of the prompt and decodes it."""
    rows, ahead_s, pages_s = load.step_rows, load.queue_s(now_s), load.pages_wait_s(now_s)
    chunk, beside_s = load.chunk(rows), load.step_s(rows)
    own_s = load.rates.prompt_s(new_tokens, asked.num_tokens - new_tokens, chunk)
    ttft_s = max(ahead_s, pages_s) + own_s + max(1.0, new_tokens / chunk) * beside_s
    wait_s = max(ahead_s if load.is_measured else 0.0, pages_s)
    return _cost(asked, ttft_s, wait_s, load, rows * own_s)


def _cost(asked: Asked, ttft_s: float, wait_s: float, decodes: InstanceLoad, delays_s: float = 0.0) -> Cost:
    """Return the cost of a first token after `ttft_s` and an answer on `decodes`, where requests that decode wait
    `delays_s` longer in sum for the prompt."""
    rates, soon, num_steps = decodes.rates, decodes.step_requests, min(asked.max_tokens, ANSWER_TOKENS)
    tpot_s = rates.requests_s(soon + 1, decodes.context_tokens + asked.num_tokens) / rates.tokens_a_row
    row_s = (rates.row_s + rates.context_token_s * asked.num_tokens) * (1 + rates.draft_rows) / rates.tokens_a_row
    breaks_slo = ttft_s > asked.ttft_s or tpot_s > asked.tpot_s
    return Cost(breaks_slo, ttft_s + num_steps * (tpot_s + soon * row_s) + delays_s, wait_s)


def usual_s_per_byte(prefill: InstanceInfo, decode: InstanceInfo) -> float:
    """Return the time of a byte on a link that was not measured."""
    if prefill.host == decode.host:
        return 1 / HOST_BYTES_PER_S
    return 1 / (RACK_BYTES_PER_S if prefill.rack and prefill.rack == decode.rack else FAR_BYTES_PER_S)
