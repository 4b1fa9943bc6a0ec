"""The split of devices into P, D and unified instances that serves the most requests within an SLO.

Goodput of a split is the highest rate at which a share of the requests (90 %) keeps both bounds, found by bisection;
the arrivals are the same at each rate but for their scale. Splits are tried from the one that a back-of-the-envelope
estimate likes most, a few of each kind, and the neighbours of the best. A run ends as soon as too many requests have
missed. Nothing here is random but the seed of Poisson arrivals.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from chitu.config.schema import AdmissionConfig, RouterConfig, SchedulerConfig
from chitu.errors import ConfigError
from chitu.simulation.cluster import SimulatedCluster, SimulatedRequest
from chitu.simulation.profile import EngineProfile
from chitu.tools.size.workload import Workload, percentile
from chitu.types import Role

TOLERANCE = 1.03
"""Ratio of the lowest rate that fails to the highest that does not, at which bisection ends."""
STEP_UP = 1.4
LIKELY = 4
"""Splits of each kind (sizes; pairs or unified) that are tried in any case."""
WINDOW = 4
"""Requests come for at least so many times what an answer within the SLO takes."""
LOOK_S = 0.5
LONG_SHARE = 0.5
"""Share of the misses that the SLO allows, from which on prompts that miss it by themselves count as what limits."""
BUSY = 0.85
"""Share of the time from which on an instance or a link counts as what limits."""


class Slo(NamedTuple):
    ttft_s: float
    tpot_s: float
    share: float = 0.9
    """Share of the requests that keep both."""


class Shape(NamedTuple):
    """Devices of an instance: data ranks, each of `tp` devices."""

    tp: int = 1
    dp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in (("dp", self.dp), ("tp", self.tp)) if size > 1)


class Split(NamedTuple):
    prefill: int = 0
    decode: int = 0
    unified: int = 0
    prefill_shape: Shape = Shape()
    decode_shape: Shape = Shape()
    """Also of unified instances."""
    encode: int = 0
    """E, which have a device each."""

    @property
    def devices(self) -> int:
        return (
            self.encode
            + self.prefill * self.prefill_shape.devices
            + (self.decode + self.unified) * self.decode_shape.devices
        )

    @property
    def name(self) -> str:
        of_e = self.encode, "E", Shape()
        pair = of_e, (self.prefill, "P", self.prefill_shape), (self.decode, "D", self.decode_shape)
        parts = (*pair, (self.unified, "U", self.decode_shape))
        return "".join(f"{n}{letter}" + (f"({shape})" if shape.devices > 1 else "") for n, letter, shape in parts if n)


@dataclass(slots=True)
class Trial:
    """A split at a rate."""

    split: Split
    rate: float
    num_requests: int
    kept: int = 0
    """Requests within the SLO."""
    refused: int = 0
    failed: int = 0
    late_first: int = 0
    """Whole answers whose first token was late; of the others those whose tokens were slow are in `slow`."""
    slow: int = 0
    is_short: bool = False
    """Whether the workload has too few requests to judge a higher rate."""
    is_cut: bool = False
    """Whether the run ended early, as too many had missed."""
    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    """Share of the time in which steps run, by role letter; `link`: in which KV leaves a P."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Mean number of requests that wait on an instance, by role letter."""
    by_encoders: int = 0
    """Images that E encoded; P encoded the rest."""
    running: float = 0.0
    """Mean number of requests that run on a D or a unified instance."""
    pages: float = 0.0
    """Mean share of the pages in use there."""

    @property
    def attained(self) -> float:
        return self.kept / self.num_requests

    @property
    def goodput(self) -> float:
        """Requests a second that keep the SLO."""
        return self.rate * self.attained

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def note(self, request: SimulatedRequest, slo: Slo) -> None:
        self.refused += request.is_rejected
        self.failed += bool(request.error) and not request.is_rejected
        if not request.is_whole:
            return
        self.ttfts_s.append(request.ttft_s)
        self.tpots_s.append(request.tpot_s)
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        if request.keeps(slo.ttft_s, slo.tpot_s):
            self.kept += 1
        elif request.ttft_s > slo.ttft_s:
            self.late_first += 1
        else:
            self.slow += 1

    @property
    def missed(self) -> int:
        return self.refused + self.failed + self.late_first + self.slow

    def quantiles(self) -> dict[str, float]:
        """Return p50 and p90 of both times."""
        found: dict[str, float] = {}
        for name, values in (("ttft", self.ttfts_s), ("tpot", self.tpots_s)):
            values = sorted(values)
            found |= {f"{name}_p50_s": percentile(values, 0.5), f"{name}_p90_s": percentile(values, 0.9)}
        return found


@dataclass(slots=True)
class Question:
    """What is asked: load, bound, engines by the shape of their instances."""

    workload: Workload
    slo: Slo
    profiles: Mapping[Shape, EngineProfile]
    is_poisson: bool = False
    seed: int = 0
    say: Callable[[str], None] = lambda text: None
    encode: int | None = None
    """Number of E of all splits; None: any."""

    # --------------------------------------------------------------------------------------------------------- limits

    def max_running(self, shape: Shape) -> int:
        """Return the largest batch on each member of a D whose steps keep `tpot_s`, with answers half done."""
        profile, context = self.profiles[shape], self.workload.mean_prompt + self.workload.mean_output / 2
        batches = range(1, profile.max_running_requests + 1)
        return max(1, bisect_right(batches, self.slo.tpot_s, key=lambda batch: profile.token_s(batch, context)))

    def prompt_s(self, shape: Shape, tokens: float) -> float:
        """Return the seconds of steps that compute a prompt, beside like ones on the other members of a group."""
        profile, cost = self.profiles[shape], self.profiles[shape].cost
        steps = max(1.0, tokens / profile.max_batched_tokens)
        own_s = steps * cost.prefill_s + tokens * cost.prompt_token_s + tokens * tokens / 2 * cost.prompt_pair_s
        if profile.experts == "cut" or profile.dp_size == 1:
            return own_s
        return own_s + steps * profile.exchange.step_s + tokens * profile.exchange.row_s

    def scheduler(self, shape: Shape, max_running: int) -> SchedulerConfig:
        profile = self.profiles[shape]
        return SchedulerConfig(
            max_running_requests=max_running,
            max_batched_tokens=profile.max_batched_tokens,
            chunk_size=profile.chunk_size,
            max_waiting_requests=1 << 20,
        )

    def estimate(self, split: Split, cached_share: float = 0.0) -> float:
        """Return about how many requests a second a split serves, from the mean request alone."""
        prompt, output = self.workload.mean_prompt, self.workload.mean_output
        shape = split.prefill_shape if split.prefill else split.decode_shape
        images_s = self.workload.mean_image_rows * self.profiles[shape].images.row_s
        prompt_s = self.prompt_s(shape, prompt * (1 - cached_share)) + (0.0 if split.encode else images_s)
        batch, profile = self.max_running(split.decode_shape), self.profiles[split.decode_shape]
        batch = max(1, min(batch, int(profile.num_pages * profile.page_size / (prompt + output))))
        answer_s = output * profile.token_s(batch, prompt + output / 2) / batch
        prefill, decode = split.prefill * split.prefill_shape.dp, split.decode * split.decode_shape.dp
        pairs = min(prefill / max(prompt_s, 1e-9), decode / max(answer_s, 1e-9))
        if split.encode and images_s:  # what E cannot take P encodes, but then its prompts wait
            pairs = min(pairs, split.encode / images_s)
        return pairs + split.unified * split.decode_shape.dp / (prompt_s + answer_s)

    # ---------------------------------------------------------------------------------------------------------- trials

    def trial(self, split: Split, rate: float, *, is_whole: bool = False, max_queue_s: float | None = None) -> Trial:
        """Run a split at a rate. Unless `is_whole`, end once the SLO is missed. Without `max_queue_s` nothing is
        refused."""
        trial = Trial(split, rate, len(self.workload.requests))
        most_missed = trial.num_requests * (1 - self.slo.share)

        def note(request: SimulatedRequest) -> None:
            trial.note(request, self.slo)
            if trial.missed > most_missed and not is_whole:
                trial.is_cut = True
                cluster.stop()

        cluster = self._cluster(split, max_queue_s, note)
        cluster.feed(self.workload.arrivals(rate, self.seed, self.is_poisson))
        watch = _Watch(cluster)

        def look() -> None:
            watch.look()
            if not is_whole and trial.missed + self._num_overdue(cluster) > most_missed:
                trial.is_cut = True
                cluster.stop()
            cluster.at(cluster.clock.now_s + LOOK_S, look)

        cluster.at(LOOK_S, look)
        cluster.run()
        watch.fill(trial)
        self.say(f"{split.name} at {rate:.3g}/s: {_verdict(trial, self.slo)}")
        return trial

    def _cluster(
        self, split: Split, max_queue_s: float | None, on_end: Callable[[SimulatedRequest], None]
    ) -> SimulatedCluster:
        prefill, decode = self.profiles[split.prefill_shape], self.profiles[split.decode_shape]
        running = self.max_running(split.decode_shape)
        of_prefill = self.scheduler(split.prefill_shape, prefill.max_running_requests)
        of_decode = self.scheduler(split.decode_shape, running)
        config, forever_s = RouterConfig(max_in_flight=1 << 30, max_tokens_in_flight=1 << 50), 1e6
        deadlines = msgspec.structs.replace(
            config.pd_disaggregation.deadlines, queue_s=forever_s, transfer_s=forever_s, bootstrap_s=forever_s
        )
        config = msgspec.structs.replace(
            config,
            request_timeout_s=forever_s,
            admission=AdmissionConfig(max_queue_s=max_queue_s),
            pd_disaggregation=msgspec.structs.replace(config.pd_disaggregation, deadlines=deadlines),
        )
        return SimulatedCluster(
            {Role.PREFILL: prefill, Role.DECODE: decode, Role.UNIFIED: decode, Role.ENCODE: prefill},
            split.prefill,
            split.decode,
            split.unified,
            config,
            {Role.PREFILL: of_prefill, Role.DECODE: of_decode, Role.UNIFIED: of_decode},
            on_end,
            encode=split.encode,
        )

    def _num_overdue(self, cluster: SimulatedCluster) -> int:
        count, now_s = 0, cluster.clock.now_s
        for request in cluster.open:
            if now_s - request.at_s <= self.slo.ttft_s:
                break
            generation = request.generation
            count += generation is not None and generation.first_token_s is None
        return count

    def max_rate(self, split: Split, known: Trial | None = None, cached_share: float = 0.0) -> Trial:
        """Return the trial at the highest rate that keeps the SLO. `known`: one that does, to begin from. The rate is 0
        if none keeps it."""
        low, high = known, math.inf
        rate = 0.7 * self.estimate(split, cached_share) if known is None else known.rate * STEP_UP
        lowest, highest = rate / 200, self.highest_rate
        rate = min(rate, highest)
        while low is None or high / low.rate > TOLERANCE:
            trial = self.trial(split, rate)
            if not trial.is_cut and trial.attained >= self.slo.share:
                low = trial
            else:
                high = rate
            if low is None:
                rate = high / 2
                if rate < lowest:
                    return Trial(split, 0.0, len(self.workload.requests))
            elif low.rate >= highest:
                low.is_short = True
                return low
            else:
                rate = min(highest, low.rate * STEP_UP if math.isinf(high) else math.sqrt(low.rate * high))
        return low

    @property
    def highest_rate(self) -> float:
        """The highest rate that the requests suffice for: they must come for longer than a few of them take."""
        answer_s = self.slo.ttft_s + self.slo.tpot_s * self.workload.mean_output
        return len(self.workload.requests) / (WINDOW * answer_s)


class _Watch:
    """Means over the time of a run."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._looks = 0
        self._running = self._pages = 0.0
        self._waiting: dict[str, float] = {}

    def look(self) -> None:
        self._looks += 1
        for instance in self._cluster.processes:
            load, letter = instance.scheduler.load, instance.role.letter
            of_role = sum(other.role is instance.role for other in self._cluster.processes)
            self._waiting[letter] = self._waiting.get(letter, 0.0) + load.waiting / of_role
            if instance.role is not Role.PREFILL:
                self._running += load.running / of_role
                self._pages += load.pages_used / load.pages_total / of_role

    def fill(self, trial: Trial) -> None:
        elapsed_s, looks = max(self._cluster.clock.now_s, 1e-9), max(1, self._looks)
        for role in Role:
            those = [instance for instance in self._cluster.processes if instance.role is role]
            if those:
                steps_s = sum(instance.executor.busy_s for instance in those)
                trial.busy[role.letter] = steps_s / len(those) / elapsed_s
            senders = [instance.sender for instance in those if instance.sender is not None]
            if senders:
                trial.busy["link"] = sum(sender.busy_s for sender in senders) / len(senders) / elapsed_s
        if encoders := self._cluster.encoders:
            trial.busy["E"] = sum(each.busy_s for each in encoders) / len(encoders) / elapsed_s
            trial.by_encoders = sum(each.num_images for each in encoders)
        trial.waiting = {letter: total / looks for letter, total in self._waiting.items()}
        trial.running, trial.pages = self._running / looks, self._pages / looks


def _verdict(trial: Trial, slo: Slo) -> str:
    if trial.is_cut:
        return f"misses the SLO (cut off after {len(trial.ttfts_s)} answers)"
    return f"{trial.attained:.1%} within the SLO" + ("" if trial.attained >= slo.share else ", too few")


# --------------------------------------------------------------------------------------------------------------- search


@dataclass(slots=True)
class Sizing:
    """The best split, and what is said of it."""

    best: Trial
    tried: list[Trial]
    """The best trial of each split that was measured; a rate of 0: it is not better than another one."""
    limit: str
    more: list[Trial] = field(default_factory=list)
    """The best trial with one more P, and with one more D (or unified instance)."""
    max_running: int = 0
    max_queue_s: float = 0.0
    overload: tuple[Trial, Trial] | None = None
    """At twice the rate, without and with `max_queue_s`."""


def splits(devices: int, shapes: list[Shape], encode: Sequence[int] = (0,)) -> Iterator[Split]:
    """Yield the splits that use all devices, or as many as instances of these shapes can, with each of these numbers
    of E. Unified instances encode their images themselves."""
    for num_encode in encode:
        rest = devices - num_encode
        for decode_shape in shapes:
            if rest >= decode_shape.devices and not num_encode:
                yield Split(0, 0, rest // decode_shape.devices, decode_shape, decode_shape)
            for prefill_shape in shapes:
                for prefill in range(1, rest // prefill_shape.devices + 1):
                    decode = (rest - prefill * prefill_shape.devices) // decode_shape.devices
                    if decode > 0:
                        yield Split(prefill, decode, 0, prefill_shape, decode_shape, num_encode)


def _numbers_of_e(question: Question, devices: int) -> Sequence[int]:
    """Return how many E to try."""
    if question.encode is not None:
        return (question.encode,)
    return range(max(1, devices - 1)) if question.workload.mean_image_rows else (0,)


def search(question: Question, devices: int) -> Sizing:
    """Return the split of so many devices with the highest goodput. Raises ConfigError if none keeps the SLO."""
    shapes, encode = sorted(question.profiles), _numbers_of_e(question, devices)
    found = sorted(splits(devices, shapes, encode), key=question.estimate, reverse=True)
    if not found:
        least = min(shape.devices for shape in question.profiles)
        beside = f", and {question.encode} E one each, beside a P and a D" if question.encode else ""
        raise ConfigError(f"{devices} devices are too few: an instance of the given profiles has {least}{beside}")
    tried: dict[Split, Trial] = {}
    best = tried[found[0]] = question.max_rate(found[0])
    likely = _likeliest(found)
    while candidates := [split for split in (*_neighbours(best.split, found), *likely) if split not in tried]:
        trial = tried[candidates[0]] = _better(question, candidates[0], best)
        best = trial if trial.rate else best
    if not best.rate:
        raise ConfigError(
            f"no split of {devices} devices keeps ttft={question.slo.ttft_s:g} and tpot={question.slo.tpot_s:g} for "
            f"{question.slo.share:.0%} of the requests, however few they are"
        )
    finding = Sizing(best, list(tried.values()), _limit(question, best))
    finding.max_running = question.max_running(best.split.decode_shape)
    finding.more = [
        _more(question, best, split) for split in _one_more(best.split, bool(question.workload.mean_image_rows))
    ]
    _set_limits(question, finding)
    return finding


def _better(question: Question, split: Split, best: Trial) -> Trial:
    """Return the best trial of a split if it beats the best one; else one of rate 0."""
    if not best.rate:
        return question.max_rate(split)
    if best.is_short:
        return Trial(split, 0.0, best.num_requests)
    first = question.trial(split, best.rate * TOLERANCE)
    if first.is_cut or first.attained < question.slo.share:
        return Trial(split, 0.0, first.num_requests)
    return question.max_rate(split, first)


def _neighbours(split: Split, found: list[Split]) -> list[Split]:
    """Return the splits with one P, or one E, more or less."""
    sizes = split.prefill_shape, split.decode_shape
    return [
        other
        for other in found
        if other.prefill
        and (other.prefill_shape, other.decode_shape) == sizes
        and abs(other.prefill - split.prefill) <= 1
        and abs(other.encode - split.encode) <= 1
        and other != split
    ]


def _likeliest(found: list[Split]) -> list[Split]:
    """Return the first splits of each kind, in the order of `found`: an estimate is seldom off by more."""
    counts: dict[tuple[bool, Shape, Shape], int] = {}
    likely = []
    for split in found:
        kind = split.unified > 0, split.prefill_shape, split.decode_shape
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= LIKELY:
            likely.append(split)
    return likely


def _one_more(split: Split, has_images: bool) -> list[Split]:
    if split.unified:
        return [split._replace(unified=split.unified + 1)]
    of_e = [split._replace(encode=split.encode + 1)] if has_images else []
    return [split._replace(prefill=split.prefill + 1), split._replace(decode=split.decode + 1), *of_e]


def _more(question: Question, best: Trial, split: Split) -> Trial:
    trial = _better(question, split, best)
    return trial if trial.rate else replace(best, split=split)


def _limit(question: Question, best: Trial) -> str:
    """Return what keeps the rate from being higher."""
    trial = question.trial(best.split, best.rate * 1.25, is_whole=True)
    busy, waiting = trial.busy, trial.waiting
    split, slo, requests = trial.split, question.slo, question.workload.requests
    shape, computed = split.prefill_shape if split.prefill else split.decode_shape, 1 - trial.cached_share
    row_s = question.profiles[shape].images.row_s
    alone_s = (
        question.prompt_s(shape, computed * request.prompt_tokens) + row_s * sum(request.image_rows)
        for request in requests
    )
    too_long = sum(seconds > slo.ttft_s for seconds in alone_s)
    if too_long > LONG_SHARE * (1 - slo.share) * len(requests):
        share = too_long / len(requests)
        return (
            f"{share:.0%} of the prompts take longer than ttft by themselves: only faster instances help (a larger TP)"
        )
    if trial.slow > trial.late_first:
        of = "chunks of prompts lengthen the steps of decoding" if trial.split.unified else "its batch is too large"
        return f"{'U' if trial.split.unified else 'D'}: tokens come too slowly ({trial.running:.0f} run at once; {of})"
    if busy.get("E", 0.0) > BUSY:
        num_images = sum(len(request.image_rows) for request in requests)
        return f"E: images wait, they encode {busy['E']:.0%} of the time ({trial.by_encoders} of {num_images} images)"
    if busy.get("link", 0.0) > BUSY:
        return f"the link: KV leaves P {busy['link']:.0%} of the time"
    if trial.split.unified:
        return f"U: prompts wait ({waiting['U']:.1f} on each), steps run {busy['U']:.0%} of the time"
    if waiting.get("D", 0.0) >= 1.0 and (
        trial.pages > BUSY or trial.running > BUSY * question.max_running(trial.split.decode_shape)
    ):
        what = "pages" if trial.pages > BUSY else "a place in the batch"
        return f"D: requests wait for {what} ({waiting['D']:.1f} on each; {trial.pages:.0%} of the pages in use)"
    return f"P: prompts wait ({waiting['P']:.1f} on each), steps run {busy['P']:.0%} of the time"


def _set_limits(question: Question, finding: Sizing) -> None:
    """Choose `max_queue_s` so that an admitted request still keeps `ttft_s`, and try it at twice the rate."""
    split, slo = finding.best.split, question.slo
    prompts = sorted(request.prompt_tokens for request in question.workload.requests)
    long_s = question.prompt_s(split.prefill_shape, percentile(prompts, 0.9) * (1 - finding.best.cached_share))
    finding.max_queue_s = round(max(slo.ttft_s / 10, (slo.ttft_s - long_s) * 0.75), 2)
    rate = 2 * finding.best.rate
    finding.overload = (
        question.trial(split, rate, is_whole=True),
        question.trial(split, rate, is_whole=True, max_queue_s=finding.max_queue_s),
    )
