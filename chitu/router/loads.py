"""What an instance has to do, and how long that takes: one record of each, from its reports and what is sent there.

Owned by `Members`, on the loop thread. Pure: reports, requests and the time come in. Policies read `work`, costs the
seconds of queues and of steps, admission and the balancer `waits_s`.

Two queues: prompts that wait to be computed, in tokens, and requests that wait for slots and pages to decode in. A P
has the first, a D the second, an instance that does both has both. A queue is what the newest report shows and what was
sent since, less what was done meanwhile; and at most what is outstanding, which of this router's requests is known
exactly.

* **Seconds of a queue**: its work by the rate at which it moved of late. That rate is measured only while something
  waits (`LoadReport.backlog_*`), since an instance without a queue works only as fast as requests come. Until then
  prompts take what the instance's steps take (`StepRates`), and pages nothing.
* **Steps** of an instance that has measured none take what those of another did (it has the same model); before any has
  reported, `PRIOR`, with which only the numbers of tokens and requests decide.

Invariants: nothing waits where nothing is outstanding; more work never predicts a shorter wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import msgspec

from chitu.config.schema import SLOConfig
from chitu.protocol import InstanceInfo, LoadReport, StepRates
from chitu.router.candidates import InstanceKey, instance_key
from chitu.types import Role

PRIOR = StepRates(
    decode_step_s=0.02, row_s=1e-4, context_token_s=0.0, prompt_step_s=0.0, prompt_token_s=1e-4, prompt_pair_s=0.0
)
"""Rates of instances while none of the cluster has reported any: about those of a model of 8 G weights on a GPU."""
CHUNK_TOKENS = 512
"""Prompt tokens of a step, if none was measured."""
LINK_BYTES = 1 << 20
"""A link is measured once so many bytes went over it: the first writes also connect."""
EXPIRES = 3
"""A rate is forgotten once nothing has waited for this many time constants: the next queue may be of other requests."""
TURNOVER = 0.25
"""D's rate is updated once this share of what it runs was replaced: requests that began together end together, and the
pause before that is no rate."""
SHORTEST_S = 1e-6
"""Shortest time of backlog from which a rate is taken."""


@dataclass(slots=True)
class Queue:
    """Work that waits, in its unit, and the rate at which it is done."""

    memory_s: float
    """Time constant of the rate: what was measured that many seconds of backlog ago counts by 1/e."""
    rate: float | None = None
    """Units a second while something waited; None while unknown."""
    _work: float = 0.0
    """Waited at `_counted_s`."""
    _counted_s: float = 0.0
    _seconds: float = 0.0
    _done: float = 0.0
    """`_seconds` of backlog and what was done in them, decaying."""
    _taken: tuple[float, int] = (0.0, 0)
    """Counters of the report that both sums already include."""
    _waited: tuple[float, float] = (0.0, 0.0)
    """Seconds of backlog that the newest report shows, and when they last grew."""

    def left(self, now_s: float, unit_s: float) -> float:
        """Return how much waits now, if a unit takes `unit_s`."""
        return max(0.0, self._work - (now_s - self._counted_s) / unit_s) if self._work and unit_s else self._work

    def put(self, work: float, now_s: float) -> None:
        """Set how much waits."""
        self._work, self._counted_s = work, now_s

    def measure(self, counters: tuple[float, int], now_s: float, enough: float = 1.0, counts: bool = True) -> None:
        """Take a report's seconds of backlog and work done in them. A rate needs `enough` work. What was done up to
        this report is left out unless it `counts`."""
        if not counts:
            self._taken, self._waited = counters, (counters[0], self._waited[1])
        if counters[0] != self._waited[0]:
            self._waited = counters[0], now_s
        elif self.rate is not None and now_s - self._waited[1] > EXPIRES * self.memory_s:
            self.rate, self._seconds, self._done, self._taken = None, 0.0, 0.0, counters
        seconds, work = counters[0] - self._taken[0], counters[1] - self._taken[1]
        if work < enough or seconds < SHORTEST_S:
            return
        self._taken = counters
        kept = math.exp(-seconds / self.memory_s)
        share = self.memory_s * (1 - kept) / seconds  # a long stretch has decayed too by its end
        self._seconds = self._seconds * kept + seconds * share
        self._done = self._done * kept + work * share
        self.rate = self._done / self._seconds


@dataclass(slots=True, eq=False)
class InstanceLoad:
    key: InstanceKey
    info: InstanceInfo
    """As in the newest view that was used."""
    prompts: Queue
    pages: Queue
    page_size: int
    kv_token_bytes: float
    """Bytes of one token's KV on all ranks."""
    row_bytes: float
    """Bytes that move with every prompt: a logits row and the recurrent state."""
    bound_s: float = math.inf
    """`slo.tpot_s` of the configuration: a bound of steps that also decode."""
    newest: LoadReport = field(default_factory=LoadReport)
    rates: StepRates = PRIOR

    requests: int = 0
    """Requests of this router that are here and not over (on P: without a first token)."""
    num_prompts: int = 0
    """Those of them whose prompts are to be computed here and have no first token, with `tokens` to compute."""
    tokens: int = 0
    streams: int = 0
    """Those that decode here."""
    other_requests: int = 0
    """Requests of other routers, their `other_tokens` and `other_streams`: the newest report less this router's
    share."""
    other_tokens: int = 0
    other_streams: int = 0

    sent_tokens: int = 0
    """Prompt tokens sent here since the report."""
    lacks_pages: bool = False
    """Whether requests were waiting for pages at the report. If not, what is sent here most likely gets its own at
    once, or in the next step."""
    works: list[int] = field(default_factory=lambda: [0])
    position: int = 0
    """List of `work` of the newest group that has the instance, and index in it."""
    _links: dict[int, float] | None = None

    @classmethod
    def of(cls, info: InstanceInfo, slo: SLOConfig, memory_s: float) -> InstanceLoad:
        layout = info.layout
        token_bytes = layout.bytes_per_page * layout.tp_size / layout.page_size
        row_bytes = 4.0 * layout.vocab_size + layout.state_bytes
        bound_s = math.inf if slo.tpot_s is None else slo.tpot_s
        return cls(
            instance_key(info),
            info,
            Queue(memory_s),
            Queue(memory_s),
            layout.page_size,
            token_bytes,
            row_bytes,
            bound_s,
        )

    # ------------------------------------------------------------------------------------------------- what comes in

    def report(self, load: LoadReport, now_s: float, typical: StepRates) -> StepRates:
        """Take a report, up to a heartbeat old. `typical` are the rates of an instance that has not measured its own;
        return them anew."""
        self.newest, self.rates, self._links = load, _known(load.rates, typical), None
        present = load.waiting + load.transferring + load.running + load.retracted
        self.other_requests = max(0, present - self.requests)
        self.other_tokens = max(0, load.waiting_tokens - self.tokens)
        self.other_streams = max(0, load.running - load.computing - self.streams)
        self.works[self.position] = self.work
        self.sent_tokens = 0
        self.prompts.put(load.waiting_tokens, now_s)
        is_prefill, backlog = self.info.role is Role.PREFILL, (load.backlog_s, load.backlog_work)
        if is_prefill or self.computes:
            self.prompts.measure(backlog, now_s)
            backlog = load.decode_backlog_s, load.decode_backlog_work
        if not is_prefill:
            # No queue if no request that was looked at was left waiting, or only by the queue of P.
            self.lacks_pages = load.unread + load.held_by_prefill < load.waiting
            self.pages.put(load.waiting if self.lacks_pages else 0, now_s)
            enough = max(1.0, TURNOVER * (load.running + load.transferring))
            self.pages.measure(backlog, now_s, enough, counts=not load.held_by_prefill)  # else it moves as P computes
        return self.rates

    def sent(self, new_tokens: int, now_s: float) -> None:
        """Count a request that was sent here, with the prompt tokens that are to be computed here."""
        if new_tokens:
            self.prompts.put(self.queued_tokens(now_s) + new_tokens, now_s)
            self.num_prompts += 1
            self.sent_tokens += new_tokens
            self.tokens += new_tokens
        if self.lacks_pages:
            self.pages.put(self.waiting_requests(now_s) + 1, now_s)
        self._count(1)

    def began(self, new_tokens: int) -> None:
        """Count the first token of a request that was sent here with so many tokens to compute."""
        self._computed(new_tokens)
        if self.info.role is Role.PREFILL:
            self._count(-1)
        else:
            self.streams += 1

    def ended(self, new_tokens: int, has_begun: bool) -> None:
        """Count the end of such a request."""
        if not has_begun:
            self._computed(new_tokens)
        elif self.info.role is Role.PREFILL:
            return
        else:
            self.streams -= 1
        self._count(-1)

    def _computed(self, new_tokens: int) -> None:
        self.num_prompts -= bool(new_tokens)
        self.tokens -= new_tokens

    def _count(self, requests: int) -> None:
        self.requests += requests
        self.works[self.position] = self.work

    # ---------------------------------------------------------------------------------------------- what there is to do

    @property
    def computes(self) -> bool:
        """Whether it both computes prompts and decodes."""
        return self.info.role is Role.UNIFIED or (self.info.role is Role.DECODE and self.info.computes)

    @property
    def work(self) -> int:
        """What this router has outstanding here, and what others have by the report: prompt tokens still to compute on
        P, requests elsewhere."""
        if self.info.role is Role.PREFILL:
            return self.tokens + self.other_tokens
        return self.requests + self.other_requests

    @property
    def rows(self) -> int:
        """Requests that decode here."""
        return self.streams + self.other_streams

    @property
    def context_tokens(self) -> int:
        """Tokens of KV that requests hold here."""
        return self.newest.pages_used * self.page_size

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt it is likely to compute, if nothing is known of the prompt."""
        return max(1, round(prompt_tokens * (1 - self.newest.cached_share)))

    def queued_tokens(self, now_s: float) -> float:
        """Return how many prompt tokens wait here or are being computed."""
        return min(self.prompts.left(now_s, self.token_s), self.tokens + self.other_tokens)

    def waiting_requests(self, now_s: float) -> float:
        """Return how many requests wait for pages."""
        if not self.lacks_pages:
            return 0.0
        left = self.pages.left(now_s, 1 / self.pages.rate if self.pages.rate else 0.0)
        return max(0.0, min(left, self.requests + self.other_requests - self.rows))

    # --------------------------------------------------------------------------------------------------------- seconds

    @property
    def is_measured(self) -> bool:
        """Whether the instance has measured how long prompts take."""
        return self.newest.rates.prompt_steps > 0 or self.prompts.rate is not None

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token in the queue."""
        if self.prompts.rate:
            return 1 / self.prompts.rate
        rows = self.rows
        chunk = min(self.chunk(rows), self.rates.chunk_tokens or CHUNK_TOKENS)
        return (self.rates.prompt_s(chunk, 0.0, chunk) + self.step_s(rows)) / chunk

    def queue_s(self, now_s: float) -> float:
        """Return the seconds of the prompts that wait here or are being computed."""
        return self.queued_tokens(now_s) * self.token_s

    def pages_wait_s(self, now_s: float) -> float:
        """Return the seconds until a request that is sent now has pages; 0 while the rate is not known."""
        return self.waiting_requests(now_s) / self.pages.rate if self.pages.rate else 0.0

    def waits_s(self, now_s: float) -> tuple[float, float]:
        """Return the seconds until the first chunk of a request that is sent now is computed, and until it has pages.
        Each is 0 while nothing waits, or its rate was not measured."""
        if not self.prompts.rate:
            return 0.0, self.pages_wait_s(now_s)
        tokens = self.queued_tokens(now_s)
        if self.newest.waiting_tokens <= self.newest.joinable_tokens:  # there was room: a prompt alone waits for none
            tokens = min(tokens, self.sent_tokens if self.num_prompts > 1 else 0)
        return tokens / self.prompts.rate, self.pages_wait_s(now_s)

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

    def link_s_per_byte(self, decode_rank: int) -> float | None:
        """Return the measured time of a byte to a D; None if it was not measured."""
        if self._links is None:
            self._links = {p.decode: p.busy_s / p.bytes for p in self.newest.paths if p.bytes >= LINK_BYTES}
        return self._links.get(decode_rank)


@dataclass(slots=True, frozen=True)
class InstanceGroup:
    """The instances of one role that may get new requests. Made once per view; never empty when a policy sees it."""

    loads: tuple[InstanceLoad, ...] = ()
    works: list[int] = field(default_factory=list)
    """`work` of each, which the loads keep up to date: a choice only reads this list."""
    positions: Mapping[InstanceKey, int] = field(default_factory=dict)
    """Index of each in both."""

    @classmethod
    def of(cls, loads: Iterable[InstanceLoad]) -> InstanceGroup:
        loads = tuple(loads)
        return cls(loads, [load.work for load in loads], {load.key: n for n, load in enumerate(loads)})

    @property
    def counts_tokens(self) -> bool:
        """Whether `works` are tokens (P) or requests."""
        return self.loads[0].key.role is Role.PREFILL

    def watch(self) -> InstanceGroup:
        """Have the loads write to this group, and no more to an earlier one."""
        for position, load in enumerate(self.loads):
            load.works, load.position = self.works, position
        return self

    def without(self, avoid: Set[InstanceKey], blocked: Set[InstanceKey] = frozenset()) -> InstanceGroup:
        """Return the group without the unwanted instances, or with as few of them as it takes to keep one."""
        for unwanted in (avoid | blocked, blocked, avoid) if avoid or blocked else ():
            kept = [load for load in self.loads if load.key not in unwanted]
            if kept:
                return self if len(kept) == len(self.loads) else InstanceGroup.of(kept)
        return self


def _known(measured: StepRates, typical: StepRates) -> StepRates:
    """Return what an instance has measured, and the rest from the rates of others."""
    names: tuple[str, ...] = ()
    if measured.decode_steps:
        names += ("decode_step_s", "row_s", "context_token_s")
    if measured.prompt_steps:
        names += ("prompt_step_s", "prompt_token_s", "prompt_pair_s", "chunk_tokens")
    return msgspec.structs.replace(typical, **{name: getattr(measured, name) for name in names})
