"""`/metrics` of the router, in the text formats of Prometheus and OpenMetrics. Pure; loop thread.

Called by the route in `cold_routes.py` with what the API processes counted, what the membership knows and the newest
load report of each instance. No instance listens for scrapes: its numbers come with its heartbeats. `docs/metrics.md`
has a row for every family made here, and a test compares the two. Labels are bounded: names of instances, states and
codes of closed lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chitu.errors import ServiceError
from chitu.messages import LoadReport
from chitu.metrics import TIME_BOUNDS_S, CoordinationMetrics, Histograms, RouterMetrics, TimeHistogram, add_up
from chitu.serve.cluster_snapshot import InstanceSnapshot
from chitu.types import Role

OPENMETRICS = "application/openmetrics-text"
_BOUNDS = [*map(floatToGoString, TIME_BOUNDS_S), "+Inf"]
_ROLE_OF_LETTER = {role.letter: str(role) for role in Role}
_PER_INSTANCE = ("role", "instance")

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the number."""


class MetricsReport(NamedTuple):
    """All that a scrape shows."""

    version: str
    """Of chitu."""
    num_workers: int
    """API processes now."""
    workers: list[RouterMetrics]
    """What each of them counted, and those that have ended."""
    coordination: CoordinationMetrics
    instances: tuple[InstanceSnapshot, ...]
    """Of the topology, and whoever joined beyond it."""


class _Families(Collector):
    def __init__(self, report: MetricsReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report
        total = add_up(report.workers)
        yield _gauge("chitu_build_info", "The version that runs; always 1", [((report.version,), 1)], ("version",))
        yield _gauge("chitu_router_workers", "API processes that the numbers are of", _one(report.num_workers))
        yield from _requests(total)
        yield from _ports(total, report.coordination)
        yield from _stages(total)
        yield from _membership(total, report.coordination, report.instances)
        yield from _loads(report.instances)


def render_metrics(report: MetricsReport, accept: str = "") -> tuple[bytes, str]:
    """Body and content type: OpenMetrics where the `Accept` header names it, else Prometheus text."""
    # Not the client's own words: the library fails at a version that is no number.
    wanted = OPENMETRICS if OPENMETRICS in accept else ""
    encode, content_type = choose_encoder(wanted)
    return encode(_Families(report)), content_type


# ------------------------------------------------------------------------------------------------------------ families


def _one(value: float) -> Samples:
    return [((), value)]


def _by_key(counts: Mapping[str, float], known: Iterable[str] = ()) -> Samples:
    """`known` keys are there from the start, so that a rate sees their first event too."""
    return [((key,), counts.get(key, 0)) for key in sorted({*known, *counts})]


def _by_instance(numbers: Mapping[str, float]) -> Samples:
    return [((_ROLE_OF_LETTER[name[0]], name), number) for name, number in sorted(numbers.items())]


def _counter(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    """`name` without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _histogram(name: str, text: str, histogram: TimeHistogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=())
    family.add_metric((), _buckets(histogram), histogram.sum_s)
    return family


def _histograms(name: str, text: str, histograms: Histograms) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_PER_INSTANCE)
    for instance, histogram in sorted(histograms.items()):
        family.add_metric((_ROLE_OF_LETTER[instance[0]], instance), _buckets(histogram), histogram.sum_s)
    return family


def _buckets(histogram: TimeHistogram) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, accumulate(histogram.counts), strict=True))


def _service_codes(cls: type[ServiceError] = ServiceError) -> set[str]:
    """Codes of all errors that are ours, not the client's."""
    codes = {code for child in cls.__subclasses__() for code in _service_codes(child)}
    return codes | {cls.code} if "code" in cls.__dict__ else codes


# -------------------------------------------------------------------------------------------------- the router's share


def _requests(total: RouterMetrics) -> Iterator[Metric]:
    codes = _service_codes()
    yield _counter("chitu_requests", "Requests accepted; each choice of each prompt is one", _one(total.requests))
    yield _gauge(
        "chitu_requests_in_flight",
        "Requests running: prefill until the first token, then decode",
        _by_key(total.in_flight, ("prefill", "decode")),
        ("state",),
    )
    yield _counter(
        "chitu_requests_finished",
        "Requests that ended well; a stop string counts as stop",
        _by_key(total.finished, ("stop", "length")),
        ("reason",),
    )
    yield _counter(
        "chitu_requests_failed",
        "Accepted requests whose client got an error",
        _by_key(total.failed, codes),
        ("code",),
    )
    yield _counter("chitu_requests_cancelled", "Requests whose client left", _one(total.cancelled))
    yield _counter("chitu_requests_rejected", "Requests refused on arrival", _by_key(total.rejected, codes), ("code",))
    yield _counter("chitu_attempts", "Tries of a request on a pair", _one(total.attempts))
    yield _counter(
        "chitu_retries",
        "Failed attempts that another followed, by the code of the failure",
        _by_key(total.retries, codes),
        ("code",),
    )
    yield _counter(
        "chitu_recomputes", "Retries after the first token: a request went on elsewhere", _one(total.continuations)
    )
    yield _counter(
        "chitu_recomputed_tokens",
        "Prompt and output tokens that recomputes prefilled again",
        _one(total.recomputed_tokens),
    )
    yield _counter("chitu_prompt_tokens", "Prompt tokens of accepted requests", _one(total.prompt_tokens))
    yield _counter("chitu_output_tokens", "Tokens received for requests", _one(total.tokens - total.stale_tokens))
    yield _counter("chitu_stale_tokens", "Tokens that came for requests that were over", _one(total.stale_tokens))
    yield _histogram("chitu_time_to_first_token_seconds", "From acceptance to the first token", total.ttft)
    yield _histogram(
        "chitu_inter_token_latency_seconds", "From a token to the next one of its request", total.inter_token
    )
    yield _histogram(
        "chitu_request_duration_seconds", "From acceptance to the end of requests that ended well", total.e2e
    )


def _ports(total: RouterMetrics, coordination: CoordinationMetrics) -> Iterator[Metric]:
    yield _histogram("chitu_router_loop_lag_seconds", "How late a timer of the router's loop came", total.loop_lag)
    bad = {"token": total.bad_token_messages, **coordination.bad_frames}
    yield _counter("chitu_router_bad_frames", "Messages that could not be read", _by_key(bad), ("port",))
    yield _counter(
        "chitu_router_unknown_heartbeats",
        "Heartbeats of processes that are not members",
        _one(coordination.unknown_heartbeats),
    )


def _stages(total: RouterMetrics) -> Iterator[Metric]:
    """Where finished requests spent their time, as the instances tell with the end."""
    for name, text, histograms in (
        ("chitu_prefill_queue_seconds", "P: from arrival to the first chunk", total.queue),
        ("chitu_prefill_compute_seconds", "P: from the first chunk to the logits", total.prefill),
        ("chitu_kv_transfer_seconds", "P: from the logits to the last byte in D's memory", total.transfer),
        ("chitu_decode_admission_seconds", "D: from arrival to the announcement of its pages", total.admission),
    ):
        yield _histograms(name, text, histograms)


# ----------------------------------------------------------------------------------------------- the instances' share


def _membership(
    total: RouterMetrics, coordination: CoordinationMetrics, instances: tuple[InstanceSnapshot, ...]
) -> Iterator[Metric]:
    names = {instance.name: 0 for instance in instances}
    up = {instance.name: float(instance.status != "down") for instance in instances}
    draining = {instance.name: float(instance.status == "draining") for instance in instances}
    for name, text, numbers in (
        ("chitu_instance_up", "1: a member; 0: of the topology, but not there", up),
        ("chitu_instance_draining", "1: takes nothing new and will leave", draining),
        ("chitu_instance_age_seconds", "Since it joined", coordination.ages_s),
        ("chitu_instance_heartbeat_age_seconds", "Since its last heartbeat", coordination.heartbeat_ages_s),
    ):
        yield _gauge(name, text, _by_instance(numbers), _PER_INSTANCE)
    for name, text, counts in (
        ("chitu_instance_leases_expired", "Leases that ended because no heartbeat came", coordination.expired_leases),
        ("chitu_instance_deaths", "Processes that ended without a goodbye", coordination.deaths),
        ("chitu_instance_breaker_openings", "How often its circuit breakers opened", total.breaker_openings),
    ):
        yield _counter(name, text, _by_instance({**names, **counts}), _PER_INSTANCE)
    yield _gauge(
        "chitu_instance_breaker",
        "API processes whose circuit breaker of the instance is in that state",
        [
            ((*labels, state), count)
            for name, states in sorted(total.breakers.items())
            for labels, _ in _by_instance({name: 0})
            for state, count in sorted(states.items())
        ],
        (*_PER_INSTANCE, "state"),
    )


def _loads(instances: tuple[InstanceSnapshot, ...]) -> Iterator[Metric]:
    """Load reports, up to a heartbeat old. Counters begin anew with the process of the instance."""
    loads = [((i.role, i.name), i.load) for i in instances if i.load is not None]
    for name, text, label, parts_of in (
        ("chitu_instance_requests", "Requests by the queue that they are in", "queue", _queues),
        ("chitu_instance_pages", "KV pages; the states add up to all of them", "state", _pages),
        ("chitu_instance_aux_slots", "Slots for logits rows", "state", _aux_slots),
    ):
        samples = [
            ((*labels, part), number) for labels, load in loads for part, number in parts_of(labels[0], load).items()
        ]
        yield _gauge(name, text, samples, (*_PER_INSTANCE, label))
    waiting = [(labels, load.waiting_tokens) for labels, load in loads]
    yield _gauge("chitu_instance_waiting_tokens", "Prompt tokens still to compute", waiting, _PER_INSTANCE)
    for name, text, field in (
        ("chitu_instance_steps", "Forward passes", "steps"),
        ("chitu_instance_tokens", "Tokens: prompts computed (P), output sent (D, unified)", "tokens"),
        ("chitu_instance_transferred_bytes", "KV and logits sent (P) or received (D)", "bytes_moved"),
        ("chitu_instance_retractions", "Requests moved to host memory for want of pages", "retractions"),
        ("chitu_instance_unknown_frames", "Messages that were unreadable or of nobody known", "unknown_frames"),
        ("chitu_instance_backlog_seconds", "Time in which work waited that no step could take", "backlog_s"),
    ):
        yield _counter(name, text, [(labels, getattr(load, field)) for labels, load in loads], _PER_INSTANCE)


def _queues(role: str, load: LoadReport) -> dict[str, int]:
    if role == Role.PREFILL:
        return {
            "bootstrap": load.unannounced,
            "waiting": load.waiting - load.unannounced,
            "running": load.running,
            "inflight": load.transferring,
            "closing": load.closing,
        }
    if role == Role.DECODE:
        return {
            "prealloc": load.waiting,
            "transfer": load.transferring - load.landed,
            "waiting": load.landed,
            "running": load.running,
            "retracted": load.retracted,
            "closing": load.closing,
        }
    return {"waiting": load.waiting, "running": load.running, "retracted": load.retracted}


def _pages(role: str, load: LoadReport) -> dict[str, int]:
    return {
        "free": load.pages_free,
        "used": load.pages_used,
        "quarantined": load.pages_quarantined,
        "cached": load.pages_cached,
    }


def _aux_slots(role: str, load: LoadReport) -> dict[str, int]:
    return {"free": load.aux_free, "used": load.aux_total - load.aux_free}
