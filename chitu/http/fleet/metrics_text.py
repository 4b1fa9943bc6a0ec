"""`/metrics` of the router, in the text formats of Prometheus and OpenMetrics, from numbers counted elsewhere. Pure.

Called by the route in `api_document.py` with the counts of the router, the state of the membership and the newest load
report of each instance, whose numbers come with their heartbeats. The library's own counters are not used: they take a
lock and look up labels on every count. A family
comes in parts of `PART_SAMPLES`, made one after the other, because one of a large cluster takes too long at once.
`docs/metrics.md` has a row for every family made here, and a test compares the two. Labels are bounded: names of
instances, states and codes of closed lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chitu.errors import ServiceError
from chitu.protocol import LoadReport
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.router.members import BreakerState
from chitu.router.metrics import (
    TIME_BOUNDS_S,
    BalanceMetrics,
    CoordinationMetrics,
    Histograms,
    RouterMetrics,
    TimeHistogram,
)
from chitu.types import Role, instance_name

PART_SAMPLES = 400
"""Samples of a part; they take about 3 ms."""
PER_INSTANCE = ("role", "instance")
EARLY_OUTCOMES = ("shown", "confirmed", "late", "different", "stale")
_BOUNDS = [*map(floatToGoString, TIME_BOUNDS_S), "+Inf"]
_ROLE_OF_LETTER = {role.letter: str(role) for role in Role}

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and a number."""
OPENMETRICS = "application/openmetrics-text"
END = b"# EOF\n"
"""Last line of OpenMetrics."""


def one(value: float) -> Samples:
    return [((), value)]


def by_key(counts: Mapping[str, float], known: Iterable[str] = ()) -> Samples:
    """Return a sample per key. `known` keys have one from the start, so that a rate sees their first event, too."""
    return [((key,), counts.get(key, 0)) for key in sorted({*known, *counts})]


def by_instance(numbers: Mapping[str, float]) -> Samples:
    return [((_ROLE_OF_LETTER[name[0]], name), number) for name, number in sorted(numbers.items())]


def counter(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Yield the parts of a counter family. `name` comes without `_total`."""
    return _parts(lambda: CounterMetricFamily(name, text, labels=labels), samples)


def gauge(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Iterator[Metric]:
    return _parts(lambda: GaugeMetricFamily(name, text, labels=labels), samples)


def histogram(name: str, text: str, times: TimeHistogram) -> Iterator[Metric]:
    family = HistogramMetricFamily(name, text, labels=())
    family.add_metric((), buckets(times), times.sum_s)
    yield family


def histograms(name: str, text: str, label: str, times: Mapping[str, Histograms]) -> Iterator[Metric]:
    """Yield the parts of a histogram family of instances, with a further label."""
    samples = (
        ((_ROLE_OF_LETTER[instance[0]], instance, part), buckets(of_one), of_one.sum_s)
        for part, by_name in sorted(times.items())
        for instance, of_one in sorted(by_name.items())
    )
    return _parts(lambda: HistogramMetricFamily(name, text, labels=(*PER_INSTANCE, label)), samples, len(_BOUNDS))


def _parts(make: Callable[[], Any], samples: Iterable[tuple[Any, ...]], size: int = 1) -> Iterator[Metric]:
    """Yield at least one family with the arguments of its `add_metric`, each of which makes `size` samples."""
    rest, is_first = iter(samples), True
    while (part := list(islice(rest, PART_SAMPLES // size))) or is_first:
        is_first, family = False, make()
        for arguments in part:
            family.add_metric(*arguments)
        yield family


def buckets(times: TimeHistogram) -> list[tuple[str, float]]:
    """Return the counts up to each bound, as a histogram family has them."""
    return list(zip(_BOUNDS, accumulate(times.counts), strict=True))


class MetricsReport(NamedTuple):
    """All data of one scrape."""

    version: str
    """Version of chitu."""
    router: RouterMetrics
    coordination: CoordinationMetrics
    instances: tuple[InstanceSnapshot, ...]
    """Instances of the topology, and those that joined in addition."""
    aliases: Callable[[RouterMetrics, tuple[InstanceSnapshot, ...]], Iterator[Metric]] | None = None
    """Further families, which say the same by names of other projects; None: none."""


class _FamilyPart(Collector):
    """One part of a family, as the library's encoders take it."""

    def __init__(self, part: Metric) -> None:
        self._part = part

    def collect(self) -> Iterator[Metric]:
        yield self._part


def render_pieces(report: MetricsReport, accept: str = "") -> tuple[Iterator[bytes], str]:
    """Return the body in pieces, each of which is made in a few milliseconds when it is taken, and the content type:
    OpenMetrics if the `Accept` header names it, else Prometheus text."""
    # Do not pass the client's header on: the library fails if its version is not a number.
    wanted = OPENMETRICS if OPENMETRICS in accept else ""
    encode, content_type = choose_encoder(wanted)

    def pieces() -> Iterator[bytes]:
        name = ""
        for part in _families(report):
            text = encode(_FamilyPart(part)).removesuffix(END)
            if ":" in part.name:  # the library's OpenMetrics has `_` in names of samples, and `:` in the family's head
                text = text.replace(f"\n{part.name.replace(':', '_')}".encode(), f"\n{part.name}".encode())
            while part.name == name and text.startswith(b"#"):  # the family's head is there already
                text = text.partition(b"\n")[2]
            name = part.name
            yield text
        if wanted:
            yield END

    return pieces(), content_type


def render_metrics(report: MetricsReport, accept: str = "") -> tuple[bytes, str]:
    """Return the whole body and the content type."""
    pieces, content_type = render_pieces(report, accept)
    return b"".join(pieces), content_type


def _families(report: MetricsReport) -> Iterator[Metric]:
    total = report.router
    yield from gauge("chitu_build_info", "The version that runs; always 1", [((report.version,), 1)], ("version",))
    yield from _requests(total)
    yield from _ports(total, report.coordination)
    yield from _stages(total)
    yield from _membership(total, report.coordination, report.instances)
    yield from _loads(report.instances)
    if (balance := report.coordination.balance) is not None:
        yield from _balance(balance)
    if report.aliases is not None:
        yield from report.aliases(total, report.instances)


def _service_codes(cls: type[ServiceError] = ServiceError) -> set[str]:
    """Return the codes of all errors that are the service's, not the client's."""
    codes = {code for child in cls.__subclasses__() for code in _service_codes(child)}
    return codes | {cls.code} if "code" in cls.__dict__ else codes


# -------------------------------------------------------------------------------------------------- the router's share


def _requests(total: RouterMetrics) -> Iterator[Metric]:
    codes = _service_codes()
    yield from counter("chitu_requests", "Requests accepted; each choice of each prompt is one", one(total.requests))
    yield from gauge(
        "chitu_requests_in_flight",
        "Requests running: prefill until the first token, then decode",
        by_key(total.in_flight, ("prefill", "decode")),
        ("state",),
    )
    yield from gauge("chitu_image_files", "Files of images of running requests", one(total.image_files))
    yield from gauge("chitu_image_file_bytes", "Size of these files", one(total.image_bytes))
    yield from counter(
        "chitu_requests_finished",
        "Requests that ended well; a stop string counts as stop",
        by_key(total.finished, ("stop", "length")),
        ("reason",),
    )
    yield from counter(
        "chitu_requests_failed",
        "Accepted requests whose client got an error",
        by_key(total.failed, codes),
        ("code",),
    )
    yield from counter("chitu_requests_cancelled", "Requests whose client left, or aborted them", one(total.cancelled))
    yield from counter(
        "chitu_requests_rejected", "Requests refused on arrival", by_key(total.rejected, codes), ("code",)
    )
    yield from counter("chitu_attempts", "Tries of a request on a pair", one(total.attempts))
    yield from counter(
        "chitu_retries",
        "Failed attempts that were retried, by the code of the failure",
        by_key(total.retries, codes),
        ("code",),
    )
    yield from counter(
        "chitu_recomputes",
        "Retries after the first token: a request continued on another pair",
        one(total.continuations),
    )
    yield from counter(
        "chitu_recomputed_tokens",
        "Prompt and output tokens that recomputes prefilled again",
        one(total.recomputed_tokens),
    )
    yield from counter("chitu_prompt_tokens", "Prompt tokens of accepted requests", one(total.prompt_tokens))
    yield from counter("chitu_output_tokens", "Tokens received for requests", one(total.tokens - total.stale_tokens))
    yield from counter(
        "chitu_early_tokens",
        "First tokens that P drew before D did, by what became of them",
        by_key(total.early_tokens, EARLY_OUTCOMES),
        ("outcome",),
    )
    yield from counter("chitu_stale_tokens", "Tokens that came for requests that were over", one(total.stale_tokens))
    yield from histogram("chitu_time_to_first_token_seconds", "From acceptance to the first token", total.ttft)
    yield from histogram(
        "chitu_inter_token_latency_seconds", "From a token to the next one of its request", total.inter_token
    )
    yield from histogram(
        "chitu_second_token_seconds", "From the first token to the second one of a stream", total.second_token
    )
    yield from histogram(
        "chitu_request_duration_seconds", "From acceptance to the end of requests that ended well", total.e2e
    )


def _ports(total: RouterMetrics, coordination: CoordinationMetrics) -> Iterator[Metric]:
    yield from histogram("chitu_router_loop_lag_seconds", "How late a timer of the router's loop came", total.loop_lag)
    bad = {"token": total.bad_token_messages, **coordination.bad_frames}
    yield from counter("chitu_router_bad_frames", "Messages that could not be read", by_key(bad), ("port",))
    yield from counter(
        "chitu_router_unknown_heartbeats",
        "Heartbeats of processes that are not members",
        one(coordination.unknown_heartbeats),
    )


def _stages(total: RouterMetrics) -> Iterator[Metric]:
    """Yield the time that finished requests spent in the stages on an instance."""
    yield from histograms("chitu_stage_seconds", "Time of a request in the stage", "stage", total.stages)


# ----------------------------------------------------------------------------------------------- the instances' share


def _membership(
    total: RouterMetrics, coordination: CoordinationMetrics, instances: tuple[InstanceSnapshot, ...]
) -> Iterator[Metric]:
    names = {instance.name: 0 for instance in instances}
    up = {instance.name: float(instance.status != "down") for instance in instances}
    draining = {instance.name: float(instance.status == "draining") for instance in instances}
    asleep = {instance.name: float(instance.status == "asleep") for instance in instances}
    for name, text, numbers in (
        ("chitu_instance_up", "1: a member; 0: of the topology, but not there", up),
        ("chitu_instance_draining", "1: accepts no new requests and will leave", draining),
        ("chitu_instance_asleep", "1: has given memory back, and serves once it wakes", asleep),
        ("chitu_instance_age_seconds", "Since it joined", coordination.ages_s),
        ("chitu_instance_heartbeat_age_seconds", "Since its last heartbeat", coordination.heartbeat_ages_s),
    ):
        yield from gauge(name, text, by_instance(numbers), PER_INSTANCE)
    yield from gauge(
        "chitu_instance_info",
        "1: release and revision of a member",
        [((one.role, one.name, one.release, one.revision), 1.0) for one in instances if one.status != "down"],
        (*PER_INSTANCE, "release", "revision"),
    )
    for name, text, counts in (
        ("chitu_instance_leases_expired", "Leases that ended because no heartbeat came", coordination.expired_leases),
        ("chitu_instance_deaths", "Processes that ended without leaving", coordination.deaths),
        ("chitu_instance_breaker_openings", "How often its circuit breakers opened", total.breaker_openings),
    ):
        yield from counter(name, text, by_instance({**names, **counts}), PER_INSTANCE)
    yield from gauge(
        "chitu_instance_breaker",
        "1 for the state of its circuit breaker, else 0",
        (
            ((*labels, state), count)
            for name, states in sorted(total.breakers.items())
            for labels, _ in by_instance({name: 0})
            for (state,), count in by_key(states, get_args(BreakerState))
        ),
        (*PER_INSTANCE, "state"),
    )


def _loads(instances: tuple[InstanceSnapshot, ...]) -> Iterator[Metric]:
    """Yield the load reports, which are up to a heartbeat old. Counters restart with the process of the instance."""
    loads = [((i.role, i.name), i.load) for i in instances if i.load is not None]
    for name, text, label, parts_of in (
        ("chitu_instance_requests", "Requests by the queue that they are in", "queue", _queues),
        ("chitu_instance_pages", "KV pages; the states add up to all of them", "state", _pages),
        ("chitu_instance_aux_slots", "Slots for logits rows", "state", _aux_slots),
        ("chitu_instance_state_slots", "Rows of recurrent state, if the model has any", "state", _state_slots),
        ("chitu_instance_image_rows", "Rows for features of images, if the model has vision", "state", _image_rows),
    ):
        samples = (
            ((*labels, part), number) for labels, load in loads for part, number in parts_of(labels[0], load).items()
        )
        yield from gauge(name, text, samples, (*PER_INSTANCE, label))
    tiers = (((*labels, tier), number) for labels, load in loads for tier, number in _tier_tokens(load).items())
    text = "Prompt tokens whose pages came from outside the pool, and were not computed"
    yield from counter("chitu_instance_tier_tokens", text, tiers, (*PER_INSTANCE, "tier"))
    waiting = ((labels, load.waiting_tokens) for labels, load in loads)
    yield from gauge("chitu_instance_waiting_tokens", "Prompt tokens still to compute", waiting, PER_INSTANCE)
    yield from _image_loads(loads)
    suspended = ((labels, len(load.suspended)) for labels, load in loads)
    text = "D to which P writes nothing until a failed write is fenced"
    yield from gauge("chitu_instance_suspended_peers", text, suspended, PER_INSTANCE)
    drafts = (
        ((*labels, source, result), number)
        for labels, load in loads
        for source, (drafted, accepted) in sorted(load.drafts.items())
        for result, number in (("accepted", accepted), ("rejected", drafted - accepted))
    )
    text = "Tokens that were drafted ahead; the accepted ones are in answers"
    yield from counter("chitu_draft_tokens", text, drafts, (*PER_INSTANCE, "source", "result"))
    per_row = (
        (labels, load.rates.tokens_a_row) for labels, load in loads if labels[0] not in (Role.PREFILL, Role.ENCODE)
    )
    text = "Tokens that a step of late gave to a request that decodes: 1 without drafts"
    yield from gauge("chitu_decode_tokens_per_row", text, per_row, PER_INSTANCE)
    paths = [
        (name, instance_name(Role.PREFILL if role == Role.ENCODE else Role.DECODE, path.decode), path)
        for (role, name), load in loads
        for path in load.paths
    ]
    for name, text, field in (
        ("chitu_path_bytes", "Bytes that P wrote to D, or E to P", "bytes"),
        ("chitu_path_writes", "Writes of P to D, or of E to P, that ended well", "writes"),
        ("chitu_path_busy_seconds", "Time that these writes took, failed ones too", "busy_s"),
        ("chitu_path_failed_writes", "Writes of P to D, or of E to P, that failed or did not end in time", "failures"),
    ):
        samples = (((p, d, path.transport), getattr(path, field)) for p, d, path in paths)
        yield from counter(name, text, samples, ("prefill", "decode", "transport"))
    for name, text, field in (
        ("chitu_instance_steps", "Forward passes", "steps"),
        ("chitu_instance_tokens", "Tokens: prompts computed (P), output sent (D, unified)", "tokens"),
        ("chitu_instance_dropped_tokens", "Of these, tokens that the router did not accept", "tokens_dropped"),
        ("chitu_instance_transferred_bytes", "KV and logits sent (P) or received (D)", "bytes_moved"),
        (
            "chitu_instance_cached_tokens",
            "Prompt tokens in cached pages: not computed (D: not moved)",
            "cached_tokens",
        ),
        ("chitu_instance_saved_bytes", "KV that P did not send, as D had it in cached pages", "bytes_saved"),
        ("chitu_instance_evicted_pages", "Cached pages that were given to other requests", "evictions"),
        ("chitu_instance_host_evicted_pages", "Pages that host memory gave up for others", "host_evictions"),
        ("chitu_instance_bad_pages", "Pages from disk or store with a wrong key or checksum", "bad_pages"),
        ("chitu_instance_unsound_requests", "Requests whose logits were not finite (NaN or infinite)", "unsound"),
        ("chitu_instance_retractions", "Requests moved to host memory for want of pages", "retractions"),
        ("chitu_instance_encoded_images", "Images whose features were computed", "images"),
        ("chitu_instance_unknown_frames", "Messages that were unreadable or of an unknown sender", "unknown_frames"),
        ("chitu_instance_backlog_seconds", "Time in which work waited because no step had room", "backlog_s"),
        (
            "chitu_instance_decode_backlog_seconds",
            "Unified: time in which requests waited for decoding ones to end",
            "decode_backlog_s",
        ),
    ):
        yield from counter(name, text, ((labels, getattr(load, field)) for labels, load in loads), PER_INSTANCE)


def _image_loads(loads: Sequence[tuple[tuple[str, str], LoadReport]]) -> Iterator[Metric]:
    """Yield what instances have to do for images, of those that have rows for features."""
    seen = [(labels, load.image_load) for labels, load in loads if load.image_rows]
    for name, text, values in (
        ("waiting_image_rows", "Feature rows to encode here", [each.waiting_rows for _, each in seen]),
        ("image_row_seconds", "Time of a feature row, from its order on; 0: unknown", [each.row_s for _, each in seen]),
        ("held_images", "Images whose features are here: at most 256", [each.num_keys for _, each in seen]),
    ):
        samples = zip((labels for labels, _ in seen), values, strict=True)
        yield from gauge(f"chitu_instance_{name}", text, samples, PER_INSTANCE)
    hits = ((labels, each.hits) for labels, each in seen if labels[0] == Role.ENCODE)
    text = "Images that an E was asked for and had already"
    yield from counter("chitu_instance_image_hits", text, hits, PER_INSTANCE)


def _balance(balance: BalanceMetrics) -> Iterator[Metric]:
    """Yield what the balancer says."""
    text = "Instances that the load asks for"
    yield from gauge("chitu_wanted_instances", text, by_key(balance.wanted), ("role",))
    text = "Work over what the present instances should have to do; above 1 they are too few"
    yield from gauge("chitu_balance_pressure_ratio", text, by_key(balance.pressure), ("role",))
    text = "Instances that the balancer had take the role"
    yield from counter("chitu_balance_role_changes", text, by_key(balance.role_changes, balance.wanted), ("role",))


def _tier_tokens(load: LoadReport) -> dict[str, int]:
    return {"host": load.host_tokens, "disk": load.disk_tokens, "store": load.store_tokens}


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
    if role == Role.ENCODE:
        return {"waiting": load.waiting, "inflight": load.transferring, "closing": load.closing}
    return {"waiting": load.waiting, "running": load.running, "retracted": load.retracted}


def _pages(role: str, load: LoadReport) -> dict[str, int]:
    return {
        "free": load.pages_free,
        "used": load.pages_used,
        "quarantined": load.pages_quarantined,
        "cached": load.pages_cached,
    }


def _state_slots(role: str, load: LoadReport) -> dict[str, int]:
    return {"free": load.states_free, "used": load.states_total - load.states_free}


def _image_rows(role: str, load: LoadReport) -> dict[str, int]:
    return {"free": load.image_rows - load.image_rows_used, "used": load.image_rows_used}


def _aux_slots(role: str, load: LoadReport) -> dict[str, int]:
    return {"free": load.aux_free, "used": load.aux_total - load.aux_free}
