"""What each way to serve a request costs, in seconds. Pure: reports of instances, the request and the time come in.

A way is a pair (Pi, Dj), D alone, or a unified instance. Its cost is what all requests together wait longer: this one
until its first token and between its tokens, and those that run where it goes, which each of its prompt tokens and its
row in each step delay. The cheapest way that keeps the request's SLO is taken; if none does, the cheapest.

* **Time of prompts**: tokens that wait there and those of this request, at the measured rates (`StepRates`). Beside
  streams each step also takes their time, and has as many prompt tokens as the SLO leaves (`instance/pace.py`).
* **Tokens to compute**: the prompt less what the instance is likely to have cached (`prefix_history.py`).
* **Bytes to move**: what D has not cached, over that very link. It was measured if P wrote there before
  (`LoadReport.paths`), else it is taken for what is usual within a host, within a rack, or between racks. Layers are
  moved while others are computed, so the longer of the two counts.
* **Waiting for pages**: the requests that wait there divided by the rate at which they got some.

An instance without rates of its own has those that another one reported last (it has the same model); before any has
reported, `PRIOR`, with which only the numbers of tokens and requests decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from chitu.config.schema import SLOConfig
from chitu.protocol import InstanceInfo, LoadReport, StepRates

PRIOR = StepRates(
    decode_step_s=0.02, row_s=1e-4, context_token_s=0.0, prompt_step_s=0.0, prompt_token_s=1e-4, prompt_pair_s=0.0
)
"""Rates of instances while none of the cluster has reported any: about those of a model of 8 G weights on a GPU."""
HOST_BYTES_PER_S, RACK_BYTES_PER_S, FAR_BYTES_PER_S = 8e9, 5e9, 2e9
"""Speed of a link that was not measured: within a host, within a rack, and between racks."""
LINK_BYTES = 1 << 20
"""A link is measured once so many bytes went over it: the first writes also connect."""
ANSWER_TOKENS = 128
"""Tokens of an answer, for what its row costs, if the client allows so many."""
CHUNK_TOKENS = 512
"""Prompt tokens of a step beside streams, if no SLO bounds it."""


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


class DecodePlace(NamedTuple):
    """What a request finds where it would be decoded, and has to be computed for it."""

    rows: int
    """Requests that decode there."""
    soon: int
    """All requests that are there, each of which decodes or will soon."""
    new_tokens: int
    """Prompt tokens to compute, on P if there is one."""
    room_s: float = 0.0
    """Predicted wait for pages."""


class Cost(NamedTuple):
    """Prediction for one way. Compares as `min` needs it: ways that keep the SLO first, then by seconds."""

    breaks_slo: bool
    seconds: float
    """Sum of what requests wait longer: this one, and those that run there."""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    wait_s: float = 0.0
    """Wait for the first chunk and for pages, by measured rates; 0 if there are none."""


@dataclass(slots=True)
class InstanceCosts:
    """What the costs know of an instance: its newest report, and what was sent there since."""

    page_size: int = 1
    kv_token_bytes: float = 0.0
    """Bytes of one token's KV on all ranks."""
    row_bytes: float = 0.0
    """Bytes that move with every prompt: a logits row and the recurrent state."""
    bound_s: float = math.inf
    """`slo.tpot_s` of the configuration: a bound of steps that also decode."""
    load: LoadReport = field(default_factory=LoadReport)
    rates: StepRates = PRIOR
    _tokens: float = 0.0
    """Prompt tokens that waited there or were being computed at `_counted_s`."""
    _counted_s: float = 0.0
    streams: int = 0
    """Requests of this router that decode there."""
    other_streams: int = 0
    """Those of other routers, by the report."""
    _links: dict[int, float] | None = None

    @classmethod
    def of(cls, info: InstanceInfo, slo: SLOConfig = SLOConfig()) -> InstanceCosts:
        layout = info.layout
        token_bytes = layout.bytes_per_page * layout.tp_size / layout.page_size
        bound_s = math.inf if slo.tpot_s is None else slo.tpot_s
        return cls(layout.page_size, token_bytes, 4.0 * layout.vocab_size + layout.state_bytes, bound_s)

    def report(self, load: LoadReport, now_s: float, typical: StepRates) -> StepRates:
        """Take a report. `typical` are the rates of an instance that has not measured its own; return them anew."""
        known, rates = load.rates, typical
        if known.decode_steps:
            rates = msgspec.structs.replace(
                rates,
                decode_step_s=known.decode_step_s,
                row_s=known.row_s,
                context_token_s=known.context_token_s,
            )
        if known.prompt_steps:
            rates = msgspec.structs.replace(
                rates,
                prompt_step_s=known.prompt_step_s,
                prompt_token_s=known.prompt_token_s,
                prompt_pair_s=known.prompt_pair_s,
                chunk_tokens=known.chunk_tokens,
            )
        self.other_streams = max(0, load.running - load.computing - self.streams)
        self.load, self.rates, self._links = load, rates, None
        self._tokens, self._counted_s = load.waiting_tokens, now_s
        return rates

    @property
    def is_measured(self) -> bool:
        """Whether the instance has measured how long prompts take."""
        return self.load.rates.prompt_steps > 0

    @property
    def context_tokens(self) -> int:
        """Tokens of KV that requests hold there."""
        return self.load.pages_used * self.page_size

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step with so many requests and no prompt."""
        return self.rates.step_s(rows, self.context_tokens)

    def prompt_s(self, tokens: float, start: float = 0.0) -> float:
        """Return the seconds of so many prompt tokens behind `start` others, in steps like those of late."""
        return self.rates.prompt_s(tokens, start, self.rates.chunk_tokens or CHUNK_TOKENS)

    def chunk(self, rows: int) -> float:
        """Return the prompt tokens of a step beside so many requests that decode."""
        if rows and self.bound_s < math.inf:
            return self.rates.prompt_tokens_within(self.bound_s, rows, self.context_tokens)
        return self.rates.chunk_tokens or CHUNK_TOKENS

    def queue_s(self, now_s: float) -> float:
        """Return the seconds of the prompts that wait there, on a P."""
        return self.prompt_s(self.queued_tokens(now_s))

    def queued_tokens(self, now_s: float) -> float:
        """Return how many prompt tokens wait there or are being computed."""
        if not self._tokens:
            return 0.0
        rows = self.streams + self.other_streams
        chunk = min(self.chunk(rows), CHUNK_TOKENS)
        token_s = (self.rates.prompt_s(chunk, 0.0, chunk) + (self.step_s(rows) if rows else 0.0)) / chunk
        return max(0.0, self._tokens - (now_s - self._counted_s) / token_s) if token_s > 0 else self._tokens

    def sent(self, new_tokens: int, now_s: float) -> None:
        """Count prompt tokens to compute that are sent there."""
        self._tokens, self._counted_s = self.queued_tokens(now_s) + new_tokens, now_s

    def link_s_per_byte(self, decode_rank: int) -> float | None:
        """Return the measured time of a byte to a D; None if it was not measured."""
        if self._links is None:
            self._links = {p.decode: p.busy_s / p.bytes for p in self.load.paths if p.bytes >= LINK_BYTES}
        return self._links.get(decode_rank)


def pair_cost(
    asked: Asked,
    prefill: InstanceCosts,
    decode: InstanceCosts,
    place: DecodePlace,
    moved_tokens: int,
    byte_s: float,
    now_s: float,
) -> Cost:
    """Return the cost of a pair. `place`: what is on D, and what P has to compute; `moved_tokens`: those that D has
    not cached; `byte_s`: seconds of a byte on the link."""
    start = asked.num_tokens - place.new_tokens
    ahead_s = prefill.queue_s(now_s)
    computed_s = ahead_s + prefill.prompt_s(place.new_tokens, start)
    moved_s = byte_s * decode.kv_token_bytes * moved_tokens
    # The row of logits goes first; D draws from it with its next step, and needs the KV for the one after.
    first_s = byte_s * decode.row_bytes + decode.step_s(place.rows)
    ttft_s = max(computed_s, moved_s, place.room_s) + first_s
    wait_s = max(ahead_s if prefill.is_measured else 0.0, place.room_s)
    return _cost(asked, ttft_s, decode, place, 0.0, wait_s)


def cost_alone(asked: Asked, instance: InstanceCosts, place: DecodePlace, now_s: float) -> Cost:
    """Return the cost of one instance that computes the prompt and decodes it."""
    start, rates = asked.num_tokens - place.new_tokens, instance.rates
    chunk, beside_s = instance.chunk(place.rows), instance.step_s(place.rows)
    own_s = rates.prompt_s(place.new_tokens, start, chunk)
    ahead_s = rates.prompt_s(ahead := instance.queued_tokens(now_s), 0.0, chunk) + ahead / chunk * beside_s
    ttft_s = max(ahead_s, place.room_s) + own_s + max(1.0, place.new_tokens / chunk) * beside_s
    wait_s = max(ahead_s if instance.is_measured else 0.0, place.room_s)
    return _cost(asked, ttft_s, instance, place, own_s, wait_s)


def _cost(
    asked: Asked,
    ttft_s: float,
    decodes: InstanceCosts,
    place: DecodePlace,
    beside_s: float,
    wait_s: float,
) -> Cost:
    """Return the cost of a first token after `ttft_s` and an answer on `decodes`, where each request that decodes
    waits `beside_s` longer for the prompt."""
    rates, num_steps = decodes.rates, min(asked.max_tokens, ANSWER_TOKENS)
    tpot_s = rates.step_s(place.soon + 1, decodes.context_tokens + asked.num_tokens)
    row_s = rates.row_s + rates.context_token_s * asked.num_tokens
    breaks = ttft_s > asked.ttft_s or tpot_s > asked.tpot_s
    seconds = ttft_s + num_steps * (tpot_s + place.soon * row_s) + place.rows * beside_s
    return Cost(breaks, seconds, ttft_s, tpot_s, wait_s)


def usual_s_per_byte(prefill: InstanceInfo, decode: InstanceInfo) -> float:
    """Return the time of a byte on a link that was not measured."""
    if prefill.host == decode.host:
        return 1 / HOST_BYTES_PER_S
    return 1 / (RACK_BYTES_PER_S if prefill.rack and prefill.rack == decode.rack else FAR_BYTES_PER_S)
