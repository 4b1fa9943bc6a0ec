"""Balances prefill against decode: which instance should change its role, and how many of each role are wanted.

Pure: reports of instances and the time in, a decision out. Its shell is `cluster/balancing.py`, on the router's loop
thread. The *demand* of a role is its work in instances: tokens a second over those that one instance can make within
the SLO, summed up. The demands of both sides are measured at the same throughput of requests, also while one side holds
the other up. So the split of the instances that lets the most through is the one whose larger *pressure* (demand by
instance) is smallest. An instance changes its role if a pressure is high, or prompts queue for too long, and the other
split has a lower one.

Invariants: an instance never changes its role if its side would be empty, nor while the fleet is moving (`Fleet.busy`,
an instance that leaves or has just come). A change has a reason in numbers. Hysteresis: the squared gain of a change is
summed up over time (as in a CUSUM test: E. S. Page, "Continuous Inspection Schemes", 1954) and must reach `EVIDENCE_S`;
time in which it gains less than `MARGIN` counts against it. So a large change of the load is answered in seconds, and
noise is not. Unified instances are watched, but keep their role: the router already sends them the half that is short.

E are watched like unified instances. Nothing becomes an E, nor does an E become something else: it has no pages for KV,
and the others have pages in their memory. So the balancer only recommends (`encoders`): one more E, if need be in the
place of a P that the others can do without, or one P more in the place of an E.

It also names an instance that is much slower than others of its role at the same work (`slow_ones`). Routing sends it
less by its rates; why it is slow only its operator can find out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chitu.protocol import InstanceInfo, LoadReport
from chitu.types import Role

SIDES = (Role.PREFILL, Role.DECODE)
FULL = {Role.PREFILL: 0.8, Role.DECODE: 0.9, Role.UNIFIED: 0.8, Role.ENCODE: 0.8}
"""Largest share of its capacity that an instance should have to do."""
LEAST = 0.4
"""The least share to which prompts that are long for the TTFT lower it (`Balancer.aim`)."""
PATIENCE = 0.32
"""Mean wait of prompts, as a share of what the TTFT leaves for it, over (1 + cv^2) / 2 of the lengths of prompts, which
are uneven: 0.4 / 1.25. Nine of ten then wait less than the TTFT allows."""
WINDOW_S = 20.0
"""Time constant of the demands."""
SETTLE_S = 4.0
"""Age from which an instance is no newcomer, and shortest time between two changes."""
NEED = 0.9
"""Pressure from which an instance may change its role."""
QUEUE_SHARE = 0.5
"""Share of the TTFT that prompts may queue; beyond it, an instance may change its role, too."""
MARGIN = 0.08
"""Gain that is not worth a change, as a share of the larger pressure."""
EVIDENCE_S = 2.0
"""Squared gain, summed up over time, at which an instance changes its role: a half for 8 s, a quarter for half a
minute, a tenth for 200 s. Squared, because that many independent looks it takes to see a gain beside the same noise."""
MOST_UNMET = 2.0
"""Largest factor by which a wish goes beyond the work that is done: rejected requests are often sent again."""
RETRY_S = 60.0
"""Pause after a change that failed."""
KEPT_S = 300.0
"""Time for which a wish for more instances stays: loads come back, and an instance takes long to start."""
LINE_S = 120.0
"""Time constant of the seconds of a step, and of a prompt."""
DOUBT = 0.01
"""Variance of the requests in a step, as a share of their squared mean, of which a slope is believed by half."""
SLOW = 2.0
"""Factor by which an instance must be slower than others to be named."""
KEPT_PARTS = 10
"""Parts of that time, of each of which the largest wish is kept."""


class Observed(NamedTuple):
    """One instance, as its newest report shows it. Token counts are since its start."""

    name: str
    role: Role
    incarnation: int
    age_s: float
    """Time since it joined."""
    is_leaving: bool
    """Whether it drains, or changes its role."""
    prompt_tokens: int
    """Prompt tokens that it has computed; of an E, here and below, feature rows."""
    prompt_token_s: float
    """Seconds that it computes for one; 0: unknown."""
    output_tokens: int
    rows: int
    """Requests that decode in a step."""
    step_s: float
    """Seconds of such a step; 0: unknown."""
    num_slots: int
    """Requests that may run at once; 0: unknown."""
    pages_share: float
    """Share of its pages that requests which decode have."""
    backlog_s: float
    """Time since its start in which work waited because it had no room."""
    is_held: bool
    """Whether it has no room only because of prompts that other instances compute."""
    roles: tuple[Role, ...]
    """Roles that it can change to."""
    cost_pages: float
    """Pages that are in use, or would be missed, if it changed its role."""
    context_tokens: int
    """Tokens of KV that requests hold there."""


class Fleet(NamedTuple):
    """What the router knows at one moment."""

    instances: Sequence[Observed]
    offered: int
    """Requests since the start, with those that were rejected for overload."""
    begun: int
    """Those of them that had a first token."""
    waits_s: Mapping[Role, float]
    """Predicted time that a request sent now waits for a role; 0 if unknown."""
    busy: str = ""
    """Why no instance may change its role now; empty if one may."""


class Change(NamedTuple):
    """A decision: `instance` becomes `role`."""

    instance: str
    role: Role
    reason: str

    def __str__(self) -> str:
        return f"{self.instance} should become {self.role.letter}: {self.reason}"


class Slow(NamedTuple):
    """An instance that takes `times` as long for its work as others of its role that have no less to do."""

    instance: str
    work: str
    times: float

    def __str__(self) -> str:
        return (
            f"{self.instance} takes {self.times:.1f} times as long for {self.work} as others of its role that do no "
            "less: compare its host and device"
        )


class _Rate:
    """Amount a second, over about the last `memory_s`."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._seconds = self._amount = 0.0

    def add(self, amount: float, seconds: float) -> None:
        kept = math.exp(-seconds / self._memory_s)
        self._seconds = self._seconds * kept + seconds
        self._amount = self._amount * kept + amount

    @property
    def value(self) -> float:
        return self._amount / self._seconds if self._seconds else 0.0


class _Steps:
    """Seconds of a decode step over its requests: a line through what all instances of a role report. The fit of one
    instance (`StepRates`) is good where it computes now, but not far from there."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def add(self, instances: Sequence[Observed], passed_s: float) -> None:
        kept = math.exp(-passed_s / LINE_S)
        sums = [kept * each for each in self._sums]
        for one in instances:
            n, s = one.rows, one.step_s
            if n and s > 0:
                sums = [a + b for a, b in zip(sums, (1, n, s, n * n, n * s), strict=True)]
        self._sums = sums

    def output_token_s(self, instances: Sequence[Observed], tpot_s: float | None) -> float:
        """Return the seconds of an instance by output token if it has as many requests as it has room for within the
        SLO; 0 if unknown."""
        weight, rows, seconds, squares, products = self._sums
        if not weight:
            return 0.0
        rows, seconds = rows / weight, seconds / weight
        # Unless the number of requests has varied, a step is taken to cost the same for any.
        slope = max(0.0, products / weight - rows * seconds) / (squares / weight - (1 - DOUBT) * rows * rows)
        base = seconds - slope * rows
        room = math.fsum(one.num_slots for one in instances) / len(instances) or math.inf
        if tpot_s is not None and slope > 0:
            room = min(room, (tpot_s - base) / slope)
        room = max(room, 1.0) if room < math.inf else rows
        return (base + slope * room) / room


class _Wish:
    """The largest number of instances that was needed in the last `KEPT_S`."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, int]] = deque(maxlen=KEPT_PARTS)
        """Number of the part of time, and what was needed in it."""

    def note(self, now_s: float, needed: int) -> int:
        part = int(now_s * KEPT_PARTS / KEPT_S)
        if self._parts and self._parts[-1][0] == part:
            needed = max(needed, self._parts.pop()[1])
        self._parts.append((part, needed))
        return max(number for at, number in self._parts if at > part - KEPT_PARTS)


class Balancer:
    """Call `tick` about twice a second; longer pauses do no harm."""

    def __init__(self, ttft_s: float, tpot_s: float | None = None, acts: bool = True) -> None:
        """Aim at this time to first token, and from token to token if there is an SLO for it. Unless it `acts`, it only
        advises."""
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._acts = acts
        self.demand: dict[Role, float] = {}
        """Work of each role that is there, in instances."""
        self.pressure: dict[Role, float] = {}
        """The same by instance, over `aim`: above 1, the role is short of instances."""
        self.wanted: dict[Role, int] = {}
        """How many instances of each role the load asks for."""
        self.advice: Change | None = None
        """The change that is due, also while it cannot be made."""
        self.obstacle = ""
        """Why the change that is due is not made yet."""
        self.encoders = ""
        """What is recommended about E; empty if there is nothing, or no E."""
        self.slow: Slow | None = None
        """The slowest instance, of those that the last two looks, `WINDOW_S` apart, found slow."""
        self._work = {role: _Rate(WINDOW_S) for role in Role}
        self._steps = {role: _Steps() for role in Role}
        self._offered, self._begun = _Rate(WINDOW_S), _Rate(WINDOW_S)
        self._prompt_work, self._prompts = _Rate(LINE_S), _Rate(LINE_S)
        self._reported: dict[int, Observed] = {}
        """The last reports, by incarnation."""
        self._last: tuple[float, int, int] | None = None
        """Time, `offered` and `begun` of the last call."""
        self._evidence = dict.fromkeys(SIDES, 0.0)
        self._rests_until_s = -math.inf
        self._wishes: dict[Role, _Wish] = {}
        self._unknown_until_s = -math.inf
        self._suspects: frozenset[str] = frozenset()
        self._looks_again_s = -math.inf

    def tick(self, now_s: float, fleet: Fleet) -> Change | None:
        """Take in what the instances reported. Return the change that is to be made now, once."""
        passed_s = self._measure(now_s, fleet)
        if passed_s <= 0:
            return None
        self._look(now_s, fleet)
        counts = {role: sum(i.role is role for i in fleet.instances) for role in Role}
        self._weigh(now_s, counts)
        self.encoders = self._about_encoders(counts) if counts[Role.ENCODE] else ""
        role, gain = self._gain(fleet, counts)
        for side in SIDES:
            step = gain * gain if side is role and gain > MARGIN else -MARGIN
            self._evidence[side] = min(max(0.0, self._evidence[side] + step * passed_s), EVIDENCE_S)
        if role is None or self._evidence[role] < EVIDENCE_S:
            self.advice, self.obstacle = None, ""
            return None
        self.advice = self._change(fleet, counts, role, gain)
        self.obstacle = self._why_not(now_s, fleet)
        if self.advice is None or self.obstacle or not self._acts:
            return None
        self._rests_until_s = now_s + SETTLE_S
        self._evidence = dict.fromkeys(SIDES, 0.0)
        return self.advice

    def on_failed(self, now_s: float) -> None:
        """Pause after a change that could not be made."""
        self._rests_until_s = now_s + RETRY_S

    def _look(self, now_s: float, fleet: Fleet) -> None:
        if now_s < self._looks_again_s:
            return
        self._looks_again_s = now_s + WINDOW_S
        found = slow_ones(fleet.instances)
        again = [slow for slow in found if slow.instance in self._suspects]
        self.slow = max(again, key=lambda slow: slow.times, default=None)
        self._suspects = frozenset(slow.instance for slow in found)

    def _measure(self, now_s: float, fleet: Fleet) -> float:
        """Return the seconds since the last call; 0 for the first one."""
        last, self._last = self._last, (now_s, fleet.offered, fleet.begun)
        reported, self._reported = self._reported, {one.incarnation: one for one in fleet.instances}
        if last is None or now_s <= last[0]:
            return 0.0
        passed_s, prompts_s = now_s - last[0], 0.0
        for role, rate in self._work.items():
            instances, work_s = [one for one in fleet.instances if one.role is role], 0.0
            if instances:
                self._steps[role].add(instances, passed_s)
                output_token_s = self._steps[role].output_token_s(instances, self._tpot_s)
            for one in instances:
                before = reported.get(one.incarnation, one)
                prompt, output = one.prompt_tokens - before.prompt_tokens, one.output_tokens - before.output_tokens
                # While work waits an instance does all that it can, whatever its rates say.
                full_s = 0.0 if one.is_held else one.backlog_s - before.backlog_s
                computed_s = prompt * one.prompt_token_s + output * output_token_s
                work_s += max(computed_s, full_s, one.pages_share * passed_s)
                prompts_s += 0.0 if role is Role.ENCODE else prompt * one.prompt_token_s
            rate.add(work_s, passed_s)
        self._prompt_work.add(prompts_s, passed_s)
        self._prompts.add(fleet.begun - last[2], passed_s)
        self._offered.add(fleet.offered - last[1], passed_s)
        self._begun.add(fleet.begun - last[2], passed_s)
        return passed_s

    def _weigh(self, now_s: float, counts: dict[Role, int]) -> None:
        """Compute what is shown: demands and wishes."""
        present = [role for role, count in counts.items() if count]
        self.demand = {role: self._work[role].value for role in present}
        self.pressure = {role: self._pressure(role, counts[role]) for role in present}
        # What is offered and does not begin is demand, too: it queues, or was rejected.
        begun = self._begun.value
        unmet = min(max(1.0, self._offered.value / begun), MOST_UNMET) if begun else 1.0
        for role in present:
            needed = max(1, math.ceil(self.demand[role] * unmet / self.aim(role, counts[role]) - MARGIN))
            wish = self._wishes.get(role)
            if wish is None:
                wish = self._wishes[role] = _Wish()
                self._unknown_until_s = now_s + WINDOW_S
            # What is there was wanted, until the load is known.
            self.wanted[role] = wish.note(now_s, counts[role] if now_s < self._unknown_until_s else needed)

    def aim(self, role: Role, count: int) -> float:
        """Return the share of their capacity that so many instances of a role should have to do. Prompts wait for each
        other: with utilisation u about u / (1 - u) times the work of one, by the number of instances that share the
        queue (Pollaczek and Khinchine). So the longer a prompt takes beside the TTFT, the less P should have to do."""
        prompts = self._prompts.value
        if role in (Role.DECODE, Role.ENCODE) or not prompts:
            return FULL[role]
        prompt_s = self._prompt_work.value / prompts
        if prompt_s <= 0:
            return FULL[role]
        waits = PATIENCE * count * max(0.0, self._ttft_s - prompt_s) / prompt_s
        return min(max(LEAST, waits / (1 + waits)), FULL[role])

    def _pressure(self, role: Role, count: int) -> float:
        return self.demand[role] / count / self.aim(role, count)

    def _about_encoders(self, counts: dict[Role, int]) -> str:
        """Return what is recommended about E."""
        p, e = Role.PREFILL, Role.ENCODE
        of_e, of_p = self.pressure[e], self.pressure.get(p, 0.0)
        says = f"{counts[e]} E {'is' if counts[e] == 1 else 'are'} at {of_e:.0%} of the aim"
        if of_e > 1.0 and self.wanted[e] > counts[e]:
            can_spare = counts[p] > 1 and self._pressure(p, counts[p] - 1) < NEED
            spare = ", in the place of a P, which the others can do without" if can_spare else ""
            return f"{says}: {self.wanted[e]} are wanted; `chitu join encode` adds one{spare}"
        if of_p > 1.0 and counts[e] > 1 and self.wanted[e] < counts[e]:
            return f"{says}, P at {of_p:.0%}: `chitu drain` one E, and `chitu join prefill` in its place"
        return ""

    def _gain(self, fleet: Fleet, counts: dict[Role, int]) -> tuple[Role | None, float]:
        """Return the side that is short, and by which share the larger pressure would fall if it got an instance of the
        other one. None if no side is short, or the other has none to give."""
        if not all(counts[side] for side in SIDES):
            return None, 0.0
        short, other = SIDES if self.pressure[SIDES[0]] >= self.pressure[SIDES[1]] else SIDES[::-1]
        pressure = self.pressure[short]
        queues = fleet.waits_s.get(short, 0.0) > QUEUE_SHARE * self._ttft_s
        if counts[other] < 2 or not pressure or not (pressure >= NEED or queues):
            return None, 0.0
        after = max(self._pressure(short, counts[short] + 1), self._pressure(other, counts[other] - 1))
        return short, 1 - after / pressure

    def _change(self, fleet: Fleet, counts: dict[Role, int], role: Role, gain: float) -> Change | None:
        """Return the change of the instance that costs least; None if none can take the role."""
        other = SIDES[1] if role is SIDES[0] else SIDES[0]
        able = [i for i in fleet.instances if i.role is other and role in i.roles]
        if not able:
            return None
        chosen = min(able, key=lambda i: (i.is_leaving, i.cost_pages, i.name))
        wait_s = fleet.waits_s.get(role, 0.0)
        queue = f" with a wait of {wait_s:.1f} s" if wait_s else ""
        reason = (
            f"{counts[role]} {role.letter} are at {self.pressure[role]:.0%} of their aim{queue}, {counts[other]} "
            f"{other.letter} at {self.pressure[other]:.0%}; the larger falls by {gain:.0%}, "
            f"and {chosen.cost_pages:.0f} pages move or are missed"
        )
        return Change(chosen.name, role, reason)

    def _why_not(self, now_s: float, fleet: Fleet) -> str:
        """Return why no instance may change its role now; empty if one may."""
        if fleet.busy:
            return fleet.busy
        for one in fleet.instances:
            if one.role is Role.ENCODE:
                continue
            if one.is_leaving:
                return f"{one.name} leaves, or changes its role"
            if one.age_s < SETTLE_S:
                return f"{one.name} has just joined"
        return "the last change was a moment ago" if now_s < self._rests_until_s else ""


def observe(info: InstanceInfo, load: LoadReport, age_s: float, prompt_tokens: float) -> Observed:
    """Return what the balancer needs of an instance. `prompt_tokens`: mean length of a prompt."""
    if info.role is Role.ENCODE:
        return _observe_encoder(info, load, age_s)
    is_prefill, rows = info.role is Role.PREFILL, load.running - load.computing
    # Cached pages are missed as far as requests find theirs among them.
    seen = load.bytes_moved + load.bytes_saved
    hits = load.cached_share if info.role is not Role.DECODE else load.bytes_saved / seen if seen else 0.0
    return Observed(
        name=info.name,
        role=info.role,
        incarnation=info.incarnation,
        age_s=age_s,
        is_leaving=info.draining,
        prompt_tokens=load.prompt_tokens,
        prompt_token_s=load.rates.prompt_s(prompt_tokens) / prompt_tokens,
        output_tokens=0 if is_prefill else load.tokens,
        rows=0 if is_prefill else rows,
        step_s=load.rates.requests_s(rows, info.layout.page_size * load.pages_used) / load.rates.tokens_a_row,
        num_slots=info.num_slots,
        pages_share=load.pages_used / max(1, load.pages_total) * rows / max(1, load.running + load.transferring),
        backlog_s=load.backlog_s,
        is_held=load.held_by_prefill > 0,
        roles=info.roles,
        cost_pages=load.pages_used + hits * load.pages_cached,
        context_tokens=info.layout.page_size * load.pages_used,
    )


def _observe_encoder(info: InstanceInfo, load: LoadReport, age_s: float) -> Observed:
    return Observed(
        name=info.name,
        role=info.role,
        incarnation=info.incarnation,
        age_s=age_s,
        is_leaving=info.draining,
        prompt_tokens=load.tokens,
        prompt_token_s=load.image_load.row_s,
        output_tokens=0,
        rows=0,
        step_s=0.0,
        num_slots=0,
        pages_share=0.0,
        backlog_s=load.backlog_s,
        is_held=False,
        roles=(),
        cost_pages=0.0,
        context_tokens=0,
    )


def slow_ones(instances: Sequence[Observed]) -> list[Slow]:
    """Return the instances that are `SLOW` beside others at the same work. Prompt tokens are those of prompts of one
    length. A step is compared with steps of at least as many requests and tokens of KV, so no rate has to hold where it
    was not measured. E are not compared: images differ in what a row takes."""
    found: list[Slow] = []
    for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED):
        peers = [one for one in instances if one.role is role]
        prompts_s = [one.prompt_token_s for one in peers if one.prompt_token_s > 0 and role is not Role.DECODE]
        steps = [one for one in peers if one.step_s > 0]
        least_prompt_s = min(prompts_s, default=math.inf)
        least_step_s = min([one.step_s for one in steps], default=math.inf)
        for one in peers:
            if one.prompt_token_s >= SLOW * least_prompt_s:
                others_s = [other.prompt_token_s for other in peers if other is not one and other.prompt_token_s > 0]
                found += _times(one, "a prompt token", one.prompt_token_s, others_s)
            if one.step_s >= SLOW * least_step_s:
                others_s = [
                    other.step_s
                    for other in steps
                    if other.rows >= one.rows and other.context_tokens >= one.context_tokens and other is not one
                ]
                found += _times(one, "a step", one.step_s, others_s)
    return found


def _times(one: Observed, work: str, own_s: float, others_s: Sequence[float]) -> list[Slow]:
    times = own_s / statistics.median(others_s) if others_s else 0.0
    return [Slow(one.name, work, times)] if times >= SLOW else []
