"""What an instance has to do, and how long that takes: one record of each, from its reports and what is sent there.

Owned by `Members`, on the loop thread. Pure: reports, requests and the time come in. Policies read `work`, costs the
seconds of queues and of steps, admission and the balancer the waits.

Two queues: prompts that wait to be computed, in tokens, and requests that wait for slots and pages to decode in. A P
has the first, a D the second, an instance that does both has both. A queue is what the newest report shows and what was
sent since, as far as it has no first token, less what was done meanwhile.

* **Costs** compare queues by what the instance's steps take (`StepRates`). Steps of an instance that has measured none
  take what those of another did (it has the same model); before any has reported, `PRIOR`, with which only the numbers
  of tokens and requests decide.
* **Waits** by which requests are refused are those of queues that were seen to move: the same queue by its own rate,
  which is measured only while something waits (`LoadReport.backlog_*`), since an instance without a queue works only as
  fast as requests come. It includes what steps do not show: pages from a store, room that others hold.

Invariants: nothing waits where nothing is outstanding; more work never predicts a shorter wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import msgspec

from chitu.config.schema import SLOConfig
from chitu.kv_cache.state_row import state_bytes_of
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
class QueueRate:
    """How fast a queue moves: work a second, measured while something waits in it."""

    memory_s: float
    """Time constant: what was measured that many seconds of backlog ago counts by 1/e."""
    value: float | None = None
    """None while unknown."""
    _seconds: float = 0.0
    _work: float = 0.0
    """`_seconds` and `_work` of backlog, decaying."""
    _taken: tuple[float, int] | None = None
    """Counters of the report that both sums already include. None before the first: what an instance did before it
    joined, or joined again, is no rate of now. It may have been stopped meanwhile."""
    _waited: tuple[float, float] = (0.0, 0.0)
    """Seconds of backlog that the newest report shows, and when they last grew."""

    def report(self, counters: tuple[float, int], now_s: float, enough: float = 1.0, counts: bool = True) -> None:
        """Take a report's seconds of backlog and work done in them. A rate needs `enough` work. What was done up to
        this report is left out unless it `counts`."""
        if self._taken is None or not counts:
            self._taken, self._waited = counters, (counters[0], self._waited[1])
        if counters[0] != self._waited[0]:
            self._waited = counters[0], now_s
        elif self.value is not None and now_s - self._waited[1] > EXPIRES * self.memory_s:
            self.value, self._seconds, self._work, self._taken = None, 0.0, 0.0, counters
        seconds, work = counters[0] - self._taken[0], counters[1] - self._taken[1]
        if work < enough or seconds < SHORTEST_S:
            return
        self._taken = counters
        kept = math.exp(-seconds / self.memory_s)
        share = self.memory_s * (1 - kept) / seconds  # a long stretch has decayed too by its end
        self._seconds = self._seconds * kept + seconds * share
        self._work = self._work * kept + work * share
        self.value = self._work / self._seconds


@dataclass(slots=True)
class LoadCounts:
    """Requests of an instance."""

    requests: int = 0
    """Those that are not over (on P: that have no first token)."""
    prompts: int = 0
    """Those of them whose prompts are to be computed here and that have no first token, with so many `tokens` to
    compute."""
    tokens: int = 0
    streams: int = 0
    """Those that decode here."""

    def add(self, requests: int, prompts: int, tokens: int) -> None:
        self.requests += requests
        self.prompts += prompts
        self.tokens += tokens


@dataclass(slots=True, eq=False)
class InstanceLoad:
    """One instance's load, from its joining to its loss."""

    key: InstanceKey
    info: InstanceInfo
    """As in the newest view that was used."""
    prompts: QueueRate
    """Rate of the queue for steps, in prompt tokens; `pages`: of that for slots and pages, in requests."""
    pages: QueueRate
    kv_token_bytes: float
    """Bytes of one token's KV on all ranks."""
    row_bytes: float
    """Bytes that move with every prompt: a logits row and the recurrent state."""
    bound_s: float
    """`slo.tpot_s` of the configuration: a bound of steps that also decode."""
    newest: LoadReport = field(default_factory=LoadReport)
    reported_s: float = 0.0
    rates: StepRates = PRIOR
    own: LoadCounts = field(default_factory=LoadCounts)
    """Requests of this router: exact."""
    sent: LoadCounts = field(default_factory=LoadCounts)
    """Those that were sent since the report."""
    others: LoadCounts = field(default_factory=LoadCounts)
    """Requests of other routers: what the report has beyond this router's."""
    together: tuple[InstanceLoad, ...] = field(default=(), repr=False)
    """All members of its group, itself included, if they share experts: they step together. Empty: it steps alone."""
    _queued: tuple[float, float] = (0.0, 0.0)
    """Prompt tokens that waited or were being computed, and when."""
    works: list[int] = field(default_factory=lambda: [0])
    position: int = 0
    """List of `work` of the newest group that has the instance, and index in it."""
    _links: dict[int, float] | None = None

    @classmethod
    def of(cls, info: InstanceInfo, slo: SLOConfig, memory_s: float) -> InstanceLoad:
        layout, rates = info.layout, (QueueRate(memory_s), QueueRate(memory_s))
        token_bytes = layout.bytes_per_page * layout.tp_size / layout.page_size
        row_bytes = 4.0 * layout.aux_numbers + state_bytes_of(layout)
        bound_s = math.inf if slo.tpot_s is None else slo.tpot_s
        return cls(instance_key(info), info, *rates, token_bytes, row_bytes, bound_s)

    # ------------------------------------------------------------------------------------------------- what comes in

    def on_report(self, load: LoadReport, now_s: float, typical: StepRates) -> StepRates:
        """Take a report, up to a heartbeat old. `typical` are the rates of an instance that has not measured its own;
        return them anew."""
        self.newest, self.reported_s, self.rates, self._links = load, now_s, _known(load.rates, typical), None
        self._queued, self.sent = (load.waiting_tokens, now_s), LoadCounts()
        present = load.waiting + load.transferring + load.running + load.retracted
        self.others.requests = max(0, present - self.own.requests)
        self.others.tokens = max(0, load.waiting_tokens - self.own.tokens)
        self.others.streams = max(0, load.running - load.computing - self.own.streams)
        self.works[self.position] = self.work
        is_prefill, backlog = self.key.role is Role.PREFILL, (load.backlog_s, load.backlog_work)
        if is_prefill or self.computes:
            self.prompts.report(backlog, now_s)
            backlog = load.decode_backlog_s, load.decode_backlog_work
        if not is_prefill:
            enough = max(1.0, TURNOVER * (load.running + load.transferring))
            self.pages.report(backlog, now_s, enough, counts=not load.held_by_prefill)  # else it moves as P computes
        return self.rates

    def on_sent(self, new_tokens: int, now_s: float) -> None:
        """Count a request that was sent here, with the prompt tokens that are to be computed here."""
        self._queued = self.queued_tokens(now_s) + new_tokens, now_s
        self.sent.add(1, bool(new_tokens), new_tokens)
        self._count(1, bool(new_tokens), new_tokens)

    def on_begun(self, new_tokens: int) -> None:
        """Count the first token of a request that was sent here with so many tokens to compute."""
        is_prefill = self.key.role is Role.PREFILL
        self.own.streams += not is_prefill
        self._count(-is_prefill, -bool(new_tokens), -new_tokens)

    def on_ended(self, new_tokens: int, has_begun: bool) -> None:
        """Count the end of such a request."""
        if not has_begun:
            self._count(-1, -bool(new_tokens), -new_tokens)
        elif self.key.role is not Role.PREFILL:
            self.own.streams -= 1
            self._count(-1, 0, 0)

    def _count(self, requests: int, prompts: int, tokens: int) -> None:
        self.own.add(requests, prompts, tokens)
        self.works[self.position] = self.work

    # ---------------------------------------------------------------------------------------------- what there is to do

    @property
    def computes(self) -> bool:
        """Whether it both computes prompts and decodes."""
        return self.key.role is Role.UNIFIED or (self.key.role is Role.DECODE and self.info.computes)

    @property
    def work(self) -> int:
        """What this router has outstanding here, and what others have by the report: prompt tokens still to compute on
        P, requests elsewhere."""
        if self.key.role is Role.PREFILL:
            return self.own.tokens + self.others.tokens
        return self.num_requests

    @property
    def num_requests(self) -> int:
        """Requests that are here, each of which decodes or will soon (not on P)."""
        return self.own.requests + self.others.requests

    @property
    def rows(self) -> int:
        """Requests that decode here."""
        return self.own.streams + self.others.streams

    @property
    def step_rows(self) -> int:
        """Requests that decode in its steps: those of all members that step together."""
        return self.rows if not self.together else sum([member.rows for member in self.together])

    @property
    def step_requests(self) -> int:
        """Requests that decode in its steps, or will soon."""
        return self.num_requests if not self.together else sum([member.num_requests for member in self.together])

    @property
    def context_tokens(self) -> int:
        """Tokens of KV that requests hold here."""
        return self.newest.pages_used * self.info.layout.page_size

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt it is likely to compute, if nothing is known of the prompt."""
        return max(1, round(prompt_tokens * (1 - self.newest.cached_share)))

    def queued_tokens(self, now_s: float) -> float:
        """Return how many prompt tokens wait here or are being computed."""
        tokens, counted_s = self._queued
        token_s = self.token_s
        return max(0.0, tokens - (now_s - counted_s) / token_s) if tokens and token_s else tokens

    # --------------------------------------------------------------------------------------------------------- seconds

    @property
    def is_measured(self) -> bool:
        """Whether the instance has measured how long prompts take."""
        return self.newest.rates.prompt_steps > 0

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token as the queue is counted down: rather too many, as long steps end late."""
        if self.prompts.value and not self.newest.rates.prompt_steps:
            return 1 / self.prompts.value
        rows = self.step_rows
        chunk = min(self.chunk(rows), CHUNK_TOKENS)
        return (self.rates.prompt_s(chunk, 0.0, chunk) + self.step_s(rows)) / chunk

    def queue_s(self, now_s: float) -> float:
        """Return the seconds of the prompts that wait here or are being computed, in steps beside those that decode."""
        rows, tokens = self.step_rows, self.queued_tokens(now_s)
        chunk = self.chunk(rows)
        return self.rates.prompt_s(tokens, 0.0, chunk) + tokens / chunk * self.step_s(rows)

    def pages_wait_s(self, now_s: float) -> float:
        """Return the seconds until a request that is sent now has pages; 0 while none wait, or the rate is unknown."""
        load, rate = self.newest, self.pages.value
        # No queue if no request that was looked at was left waiting, or only by the queue of P: what is sent then most
        # likely gets its pages at once, or in the next step.
        if rate is None or load.unread + load.held_by_prefill >= load.waiting:
            return 0.0
        waiting = load.waiting + min(self.sent.requests, self.own.requests - self.own.streams)
        return max(0.0, waiting / rate - (now_s - self.reported_s))

    def prompt_wait_s(self, now_s: float) -> float:
        """Return the seconds until the first chunk of a request that is sent now is computed, by the rate at which this
        queue moved of late; 0 while nothing waits, or that is unknown."""
        load, rate = self.newest, self.prompts.value
        if rate is None:
            return 0.0
        # Prompts in steps with room for more hold up no other, and one alone is in such a step.
        ahead = load.waiting_tokens - load.joinable_tokens
        if ahead or self.own.prompts > 1:
            ahead += min(self.sent.tokens, self.own.tokens)
        return min(ahead, self.queued_tokens(now_s)) / rate

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step with so many requests and no prompt."""
        return self.rates.requests_s(rows, self.context_tokens)

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

    def step_together(self) -> InstanceGroup:
        """Tell each load which others step with it."""
        groups: dict[int, list[InstanceLoad]] = {}
        for load in self.loads:
            load.together = ()
            if load.info.group is not None and load.info.group.shares_experts:
                groups.setdefault(load.info.group.id, []).append(load)
        for members in groups.values():
            together = tuple(members)
            for load in members:
                load.together = together
        return self

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
