"""The account of a request: the record of each attempt, and the stages in which its time went. Pure.

P and D report their times with the end of a request (`StageTimes`). When an attempt ends, the router makes its `Stages`
of them and of its own moments, and keeps them in the attempt's record. Everything else formats stages: `GET /cluster`
and its page, metrics, `chitu chat`, and with the moments of the HTTP layer `return_proof`, `Server-Timing` and the
spans of OpenTelemetry.

Invariant: no stage is negative, and the known stages add up to the time at the router, to the microsecond. So a time
counts once, for the stage that it is due to. P's queue, for example, counts from D's announcement, since before it P
computes a prompt only if it has nothing else to do: more P would not shorten it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from chitu.protocol.wire import Wire

OF_PREDICTION = "prediction"
"""Source of drafts that are taken from a request's `prediction`: the only one that OpenAI's usage counts."""

# ------------------------------------------------------------------------------------------- what the instances report


class PrefillTimes(Wire, frozen=True, omit_defaults=False):
    """Where P (or the prefill half of a unified instance) spent its time on a room. Seconds on that host's clock."""

    queue_s: float = 0.0
    """From the request's arrival to its first chunk."""
    compute_s: float = 0.0
    """From the first chunk to the logits of the last token; layers leave meanwhile."""
    transfer_s: float = 0.0
    """From those logits to the last byte in D's memory: the part of the transfer that compute did not hide."""

    @classmethod
    def of(cls, arrived_s: float, started_s: float, computed_s: float, landed_s: float | None = None) -> PrefillTimes:
        """Return the times between four moments; without the last, which a unified instance does not have, of three."""
        transfer_s = 0.0 if landed_s is None else landed_s - computed_s
        return cls(started_s - arrived_s, computed_s - started_s, transfer_s)

    def moments(self, arrived_s: float = 0.0) -> tuple[float, float, float]:
        """Return when a request that arrived then began to compute, was computed, and was in D's memory."""
        started_s = arrived_s + self.queue_s
        computed_s = started_s + self.compute_s
        return started_s, computed_s, computed_s + self.transfer_s


NO_TIMES = PrefillTimes()


class StageTimes(Wire, frozen=True, omit_defaults=False):
    """Where a finished request spent its time. Each field is a span on one host's clock, so clocks need not agree."""

    prefill: PrefillTimes = NO_TIMES
    admission_s: float = 0.0
    """D: from the request's arrival to the announcement of its pages."""
    first_token_s: float = 0.0
    """D: from the arrival to token 1."""
    kv_landed_s: float = 0.0
    """D: from the arrival to the whole KV; 0 on a unified instance, which has no transfer."""
    total_s: float = 0.0
    """D: from the arrival to the last token."""

    @classmethod
    def of(
        cls,
        prefill: PrefillTimes,
        arrived_s: float,
        announced_s: float,
        first_token_s: float,
        landed_s: float,
        ended_s: float,
    ) -> StageTimes:
        """Return the times from the arrival to each moment. A moment that did not come is 0, on any clock."""
        announced, first, landed = (max(0.0, at_s - arrived_s) for at_s in (announced_s, first_token_s, landed_s))
        return cls(prefill, announced, first, landed, ended_s - arrived_s)


# --------------------------------------------------------------------------------------------------------- the account


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a request, or of one attempt, went: stages in their order. The known ones add up to the whole.
    An attempt has those from `prefill_s` to `messages_s`: `prefill_s` and `decode_s` if no report came from D, else
    what the prefill consists of."""

    receive_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the request's head to the end of its body."""
    prepare_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the end of the body to the first attempt on P and D: JSON, chat template, tokens, grammar."""
    retry_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the first attempt to the last one: the time of failed attempts."""
    prefill_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the attempt to token 1 at the router, if D did not report what it consists of."""
    admission_s: float | msgspec.UnsetType = msgspec.UNSET
    """Until D has announced its pages to P, unless P computes meanwhile."""
    queue_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the announcement (on a unified instance, the arrival) to the first chunk."""
    compute_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the first chunk to the logits of the last prompt token."""
    transfer_s: float | msgspec.UnsetType = msgspec.UNSET
    """From those logits to the last byte in D's memory: what computing did not hide. Token 1 may come before its
    end."""
    first_step_s: float | msgspec.UnsetType = msgspec.UNSET
    """The rest of the time to token 1 on D: its step, and the wait for that."""
    confirm_s: float | msgspec.UnsetType = msgspec.UNSET
    """The same, in place of `first_step_s`, if P's token 1 was shown: it came before `transfer_s`, and D only draws it
    again. With `transfer_s` and a step of decoding, this is the time from token 1 to token 2."""
    decode_s: float | msgspec.UnsetType = msgspec.UNSET
    """From token 1, and the KV that token 2 needs, to the last token."""
    messages_s: float | msgspec.UnsetType = msgspec.UNSET
    """The rest of the attempt: messages to and from the instances, and the wait for the router's loop."""
    answer_s: float | msgspec.UnsetType = msgspec.UNSET
    """From the last token to the end of the answer: its text, and choices that take longer."""

    @property
    def is_reported(self) -> bool:
        """Whether D reported the end, so that the prefill's stages are known."""
        return self.compute_s is not msgspec.UNSET

    def known(self) -> Iterator[tuple[str, float]]:
        """Yield the names and seconds of the known stages, in order."""
        for name, field in _FIELDS.items():
            span_s = getattr(self, field)
            if span_s is not msgspec.UNSET:
                yield name, span_s

    def span_s(self, name: str) -> float | None:
        """Return the seconds of a stage; None if it is not known."""
        span_s: float | msgspec.UnsetType = getattr(self, _FIELDS[name])
        return None if span_s is msgspec.UNSET else span_s


_FIELDS = {field.removesuffix("_s"): field for field in Stages.__struct_fields__}
STAGES = tuple(_FIELDS)
"""Names of all stages, in order."""
ATTEMPT_STAGES = STAGES[STAGES.index("prefill") : STAGES.index("answer")]
"""Stages of an attempt."""
REPORTED_STAGES = ATTEMPT_STAGES[1:]
"""Those of one whose end D reported."""


class Moments(NamedTuple):
    """Moments of one request in the HTTP layer, on the router's clock."""

    arrived_s: float
    received_s: float
    answered_s: float

    @property
    def total_s(self) -> float:
        return max(0, _us(self.answered_s) - _us(self.arrived_s)) / 1e6


def attempt_stages(
    created_s: float,
    first_token_s: float | None,
    ended_s: float,
    report: StageTimes | None,
    *,
    is_pair: bool,
    is_early: bool = False,
) -> Stages:
    """Return the stages of an attempt, from three moments on the router's clock and from D's report, if it came. A
    request counts as arrived, on P and on D, when the router sends it. `is_early`: P's token 1 was shown."""
    created = round(1e6 * created_s)
    total = max(0, round(1e6 * ended_s) - created)
    if report is None:
        prefill = total if first_token_s is None else min(max(0, round(1e6 * first_token_s) - created), total)
        return Stages(prefill_s=prefill / 1e6, decode_s=(total - prefill) / 1e6)
    # Each moment is counted from the arrival, and is not before the one that it follows, nor after the end.
    of_p = report.prefill
    end = _within(report.total_s, 0, total)
    started = _within(of_p.queue_s, 0, end)
    computed = _within(of_p.queue_s + of_p.compute_s, started, end)
    announced = _within(report.admission_s, 0, end) if is_pair else 0
    # P may compute before the announcement: what the request waits for is the rest of the time until both are done.
    queue = started - announced if started > announced else 0
    compute, ready = computed - started, computed if computed > announced else announced
    first = _within(report.first_token_s, ready, end)
    landed, here = ready, first
    if is_pair:
        landed = _within(of_p.queue_s + of_p.compute_s + of_p.transfer_s, ready, first)
        here = _within(report.kv_landed_s, first, end)
    return Stages(
        admission_s=(ready - compute - queue) / 1e6 if is_pair else msgspec.UNSET,
        queue_s=queue / 1e6,
        compute_s=compute / 1e6,
        transfer_s=(landed - ready + here - first) / 1e6 if is_pair else msgspec.UNSET,
        first_step_s=msgspec.UNSET if is_early else (first - landed) / 1e6,
        confirm_s=(first - landed) / 1e6 if is_early else msgspec.UNSET,
        decode_s=(end - here) / 1e6,
        messages_s=(total - end) / 1e6,
    )


def request_stages(moments: Moments, attempts: Sequence[RequestSnapshot]) -> Stages:
    """Return the stages of a request with these attempts of its one choice; without any, it was not sent to instances.
    What has not ended yet ends now, which is `answered_s`."""
    names, moments_us = ["receive"], [_us(moments.arrived_s), _us(moments.received_s)]
    if attempts:
        last = attempts[-1]
        at_us = _us(last.created_at_s)
        names += ["prepare", "retry"]
        moments_us += [_us(attempts[0].created_at_s), at_us]
        for name, span_s in last.stages_at(moments.answered_s).known():
            names.append(name)
            moments_us.append(at_us := at_us + _us(span_s))
    names.append("answer")
    spans, since_us = {}, moments_us[0]
    end_us = max(since_us, _us(moments.answered_s))
    for name, until_us in zip(names, [*moments_us[1:], end_us], strict=True):
        until_us = min(max(since_us, until_us), end_us)
        spans[_FIELDS[name]] = (until_us - since_us) / 1e6
        since_us = until_us
    return Stages(**spans)


def laid_out(stages: Stages, start_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of the known stages, one after the other."""
    at_us = _us(start_s)
    for name, span_s in stages.known():
        since_us, at_us = at_us, at_us + _us(span_s)
        yield name, since_us / 1e6, at_us / 1e6


def _us(moment_s: float) -> int:
    return round(1e6 * moment_s)


def _within(span_s: float, low: int, high: int) -> int:
    """Return the microseconds of a span, at least `low` and at most `high`, whatever number an instance sent."""
    span = 1e6 * span_s
    return round(span) if low < span < high else high if span >= high else low


# ---------------------------------------------------------------------------------------------------------- the record

DraftCounts = tuple[tuple[str, int, int], ...]
"""By source: tokens that were drafted, and those of them that were right, as in `Finish`."""


def total_drafts(counts: Iterable[DraftCounts]) -> DraftCounts:
    """Return the sums, by source."""
    totals: dict[str, tuple[int, int]] = {}
    for each in counts:
        for source, drafted, accepted in each:
            before = totals.get(source, (0, 0))
            totals[source] = before[0] + drafted, before[1] + accepted
    return tuple([(source, *total) for source, total in totals.items()])


RequestState = Literal["prefill", "decode", "finished", "retried", "failed", "cancelled"]
"""`prefill`: sent to its pair, no token yet. `decode`: tokens come. `finished`: stop, length or a stop string.
`retried`: this attempt failed, and the request continued with another one, which has a record of its own."""


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One attempt of one choice of one request, running or among the last that ended. Times named `_at_s` are on the
    router's monotonic clock."""

    room: str
    """UUID; the key."""
    request_id: str
    """The X-Request-Id of the response; with several choices `<id>-<choice>`."""
    prefill: str | None
    """Name of P; None on a unified instance."""
    decode: str
    state: RequestState
    prompt_tokens: int
    output_tokens: int
    created_at_s: float
    first_token_at_s: float | None
    ended_at_s: float | None
    kv_bytes: int
    """KV and logits that P moved into D's memory; known when the request has finished."""
    stages: Stages | None
    """Known when the attempt has ended."""
    error: str
    """Code of `chitu.errors` if the attempt failed (`failed` or `retried`), else empty."""
    attempt: int = 1
    """Number of this try of its request, from 1."""
    continued_tokens: int = 0
    """Output of earlier attempts that was prefilled again here, after the prompt. `output_tokens` counts it too."""
    cached_tokens: int = 0
    """Prefilled tokens that were in cached pages and needed no computing; known with the first token."""
    prompt_room: str | msgspec.UnsetType = msgspec.UNSET
    """Room of the prompt, if it was sent once for several choices: the only one that P sees."""
    drafts: DraftCounts | msgspec.UnsetType = msgspec.UNSET
    """By source: output tokens that D drafted, and those of them that were right; known with D's report of the end."""
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    """Tenant of the API key that asked (a hash), if the router has API keys."""
    revision: str | msgspec.UnsetType = msgspec.UNSET
    """Revision of its instances, if they have one."""

    @property
    def first_token_s(self) -> float | None:
        """From the attempt to its first token at the router; None before it."""
        return None if self.first_token_at_s is None else self._since_created_s(self.first_token_at_s)

    @property
    def total_s(self) -> float | None:
        """From the attempt to its end, which its stages add up to; None while it runs."""
        return None if self.ended_at_s is None else self._since_created_s(self.ended_at_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after token 1; None if there are none, or if the time is not known."""
        tokens = self.output_tokens - 1 - self.continued_tokens
        return tokens / self.stages.decode_s if tokens > 0 and self.stages and self.stages.decode_s else None

    def _since_created_s(self, at_s: float) -> float:
        return max(0, _us(at_s) - _us(self.created_at_s)) / 1e6

    def stages_at(self, now_s: float) -> Stages:
        """Return its stages; those of a running attempt until now."""
        if self.stages is not None:
            return self.stages
        ended_s = now_s if self.ended_at_s is None else self.ended_at_s
        return attempt_stages(self.created_at_s, self.first_token_at_s, ended_s, None, is_pair=self.prefill is not None)
