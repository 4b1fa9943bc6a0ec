"""What the router counts, and `/metrics` as a Prometheus server reads it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from test_router_requests import World, pair

from chitu.errors import TooManyRequests
from chitu.http.fleet.metrics_text import PART_SAMPLES, MetricsReport, render_metrics, render_pieces
from chitu.kv_transfer.page_writer import PathMeter
from chitu.protocol import Finish, ImageLoad, LoadReport, PathLoad, RequestFailed, SamplingParams, StepRates, pack_i32
from chitu.protocol.account import PrefillTimes, StageTimes
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.router.generation import GenerateRequest
from chitu.router.metrics import (
    TIME_BOUNDS_S,
    BalanceMetrics,
    CoordinationMetrics,
    RouterMetrics,
    TimeHistogram,
)
from chitu.types import Role

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
NUM_BUCKETS = len(TIME_BOUNDS_S) + 1

counts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 1000), max_size=3)
histograms = st.builds(
    TimeHistogram,
    st.lists(st.integers(0, 1000), min_size=NUM_BUCKETS, max_size=NUM_BUCKETS),
    st.integers(0, 10**6).map(float),
)
records = st.builds(
    RouterMetrics,
    requests=st.integers(0, 1000),
    failed=counts,
    ttft=histograms,
    stages=st.fixed_dictionaries({"queue": st.dictionaries(st.sampled_from(["P0", "P1"]), histograms)}),
    breakers=st.dictionaries(st.sampled_from(["P0", "D0"]), counts),
)


def sum_of_queues(metrics: RouterMetrics) -> float:
    return sum(times.sum_s for times in metrics.stages["queue"].values())


def families(report: MetricsReport) -> dict[str, Metric]:
    """Return the metrics by name, without `_total`."""
    body, _ = render_metrics(report)
    found = list(parse_text(body.decode()))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def value(report: MetricsReport, sample: str, **labels: str) -> float:
    """Return the one sample with that name and exactly these labels."""
    (found,) = [
        s.value
        for family in families(report).values()
        for s in family.samples
        if (s.name, s.labels) == (sample, labels)
    ]
    return found


def report_of(metrics: RouterMetrics, *instances: InstanceSnapshot) -> MetricsReport:
    return MetricsReport("1.2.3", metrics, CoordinationMetrics(), instances)


def instance(name: str, role: Role, load: LoadReport | None) -> InstanceSnapshot:
    return InstanceSnapshot(name, str(role), "up" if load else "down", "h", 1, "1", load)


def full_report() -> MetricsReport:
    """Return a report with a value in every family."""
    stages = {"admission": {"D0": TimeHistogram()}, "queue": {"P0": TimeHistogram()}}
    metrics = RouterMetrics(stages=stages, breakers={"P0": {"open": 1}})
    balance = BalanceMetrics(wanted={"prefill": 2}, pressure={"prefill": 1.2}, role_changes={"prefill": 1})
    coordination = CoordinationMetrics(ages_s={"P0": 5.0}, heartbeat_ages_s={"P0": 0.1}, balance=balance)
    load = LoadReport(pages_total=1, pages_free=1, paths=(PathLoad(0, "shm", 1, 8, 0.5),), drafts={"text": (5, 3)})
    seeing = LoadReport(image_rows=64, image_load=ImageLoad(30, 0.5, 2, bytes(24)))
    instances = (
        *(instance("P0", Role.PREFILL, load), instance("D0", Role.DECODE, load)),
        instance("E0", Role.ENCODE, seeing),
    )
    return MetricsReport("1.2.3", metrics, coordination, instances)


# ------------------------------------------------------------------------------------------------------------- records


@given(records)
def test_a_record_travels_whole(record: RouterMetrics) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RouterMetrics) == record


@pytest.mark.parametrize(
    ("span_s", "bucket"),
    [
        (-0.1, 0),
        (0.0, 0),
        (0.001, 0),
        (0.0011, 1),
        (1.0, TIME_BOUNDS_S.index(1.0)),
        (60.0, NUM_BUCKETS - 2),
        (61.0, -1),
    ],
)
def test_a_bound_belongs_to_the_bucket_below_it(span_s: float, bucket: int) -> None:
    histogram = TimeHistogram()
    histogram.observe(span_s, 3)
    assert (histogram.counts[bucket], histogram.count) == (3, 3)
    assert histogram.sum_s == pytest.approx(3 * max(span_s, 0.0))


# ------------------------------------------------------------------------------------------------- what requests leave


def test_a_streamed_request_leaves_its_times_and_tokens() -> None:
    world = pair()
    _, room = world.add()
    assert value(world_report(world), "chitu_requests_in_flight", state="prefill") == 1
    world.clock.advance(0.2)
    world.tokens([room])
    assert value(world_report(world), "chitu_requests_in_flight", state="decode") == 1
    world.clock.advance(0.02)
    world.tokens([room])
    world.clock.advance(0.08)
    stages = StageTimes(PrefillTimes(0.01, 0.1, 0.02), 0.005, 0.15, 0.17, 0.3)
    world.tokens([room, room], [Finish(room, "length", stages=stages)])
    report = world_report(world)
    assert value(report, "chitu_requests_total") == value(report, "chitu_attempts_total") == 1
    assert value(report, "chitu_prompt_tokens_total") == 3
    assert value(report, "chitu_output_tokens_total") == 4
    assert value(report, "chitu_requests_finished_total", reason="length") == 1
    assert sum(s.value for s in families(report)["chitu_requests_in_flight"].samples) == 0
    assert histogram(report, "chitu_time_to_first_token_seconds") == ({"0.25": 1}, pytest.approx(0.2))
    # 20 ms, then two tokens at once after 80 ms, which count as 40 ms each.
    assert histogram(report, "chitu_inter_token_latency_seconds") == ({"0.02": 1, "0.05": 2}, pytest.approx(0.1))
    assert histogram(report, "chitu_request_duration_seconds") == ({"0.5": 1}, pytest.approx(0.3))
    p0, d0 = {"role": "prefill", "instance": "P0"}, {"role": "decode", "instance": "D0"}
    for stage, place, bound, span_s in (
        ("admission", d0, "0.005", 0.005),
        ("queue", p0, "0.005", 0.005),
        ("compute", p0, "0.1", 0.1),
        ("transfer", p0, "0.05", 0.04),
    ):
        assert histogram(report, "chitu_stage_seconds", stage=stage, **place) == ({bound: 1}, span_s)


def test_a_reader_that_waits_for_the_end_counts_the_mean_of_its_tokens() -> None:
    world = pair()
    request = GenerateRequest("id", pack_i32([1, 2, 3]), 3, SamplingParams(max_tokens=9), wake_per_token=False)
    attempt = world.router.add_request(request, world.wake).attempt
    assert attempt is not None
    room = attempt.room
    for _ in range(5):
        world.clock.advance(0.1)
        world.tokens([room])
    world.tokens([], [Finish(room, "stop")])
    report = world_report(world)
    assert histogram(report, "chitu_inter_token_latency_seconds") == ({"0.1": 4}, pytest.approx(0.4))
    assert histogram(report, "chitu_time_to_first_token_seconds")[0] == {"0.1": 1}


def test_every_end_is_counted_by_its_name() -> None:
    world = World(Role.PREFILL, Role.DECODE, max_in_flight=3)
    generation, _ = world.add()
    world.router.cancel(generation)
    generation, room = world.add()
    world.tokens([room])
    world.router.cancel(generation, is_complete=True)
    _, room = world.add()
    world.router.on_request_failed(RequestFailed(Role.PREFILL, 0, 1, room, "invalid_request", "no"))
    for _ in range(3):
        world.add()
    with pytest.raises(TooManyRequests):
        world.add()
    world.tokens([room])
    report = world_report(world)
    assert value(report, "chitu_requests_total") == 6
    assert value(report, "chitu_requests_cancelled_total") == 1
    assert value(report, "chitu_requests_finished_total", reason="stop") == 1
    assert value(report, "chitu_requests_failed_total", code="invalid_request") == 1
    assert value(report, "chitu_requests_failed_total", code="transfer_failed") == 0, "known codes are there at 0"
    assert value(report, "chitu_requests_rejected_total", code="capacity") == 1
    assert value(report, "chitu_requests_in_flight", state="prefill") == 3
    assert value(report, "chitu_stale_tokens_total") == 1
    assert value(report, "chitu_output_tokens_total") == 1


def world_report(world: World) -> MetricsReport:
    return report_of(world.router.metrics())


def histogram(report: MetricsReport, name: str, **labels: str) -> tuple[dict[str, float], float]:
    """Return the non-empty buckets by bound, not cumulative, and the sum."""
    buckets, before = {}, 0.0
    for sample in families(report)[name].samples:
        if sample.name == f"{name}_bucket" and sample.labels == {**labels, "le": sample.labels["le"]}:
            assert sample.value >= before, "buckets are cumulative"
            if sample.value > before:
                buckets[sample.labels["le"]] = sample.value - before
            before = sample.value
    assert value(report, f"{name}_count", **labels) == before
    return buckets, value(report, f"{name}_sum", **labels)


# -------------------------------------------------------------------------------------------------------- the instances


def test_drafts_count_by_source_and_a_row_has_its_tokens_where_something_decodes() -> None:
    drafting = LoadReport(drafts={"text": (9, 4), "prediction": (5, 5)}, rates=StepRates(tokens_a_row=1.75))
    names = {"P0": (Role.PREFILL, LoadReport()), "D0": (Role.DECODE, drafting), "U0": (Role.UNIFIED, LoadReport())}
    report = report_of(RouterMetrics(), *(instance(name, *given) for name, given in names.items()))
    found = {
        (sample.labels["instance"], sample.labels["source"], sample.labels["result"]): sample.value
        for sample in families(report)["chitu_draft_tokens"].samples
    }
    assert found == {
        ("D0", "prediction", "accepted"): 5,
        ("D0", "prediction", "rejected"): 0,
        ("D0", "text", "accepted"): 4,
        ("D0", "text", "rejected"): 5,
    }
    rows = {s.labels["instance"]: s.value for s in families(report)["chitu_decode_tokens_per_row"].samples}
    assert rows == {"D0": 1.75, "U0": 1.0}


def test_queues_have_the_names_of_their_side_and_pages_add_up() -> None:
    load = LoadReport(
        waiting=5,
        unannounced=2,
        transferring=4,
        landed=1,
        running=3,
        retracted=6,
        closing=7,
        pages_total=10,
        pages_free=4,
        pages_used=3,
        pages_quarantined=2,
        pages_cached=1,
        aux_total=8,
        aux_free=6,
        states_total=5,
        states_free=2,
        image_rows=9,
        image_rows_used=4,
    )
    names = {"P0": Role.PREFILL, "D0": Role.DECODE, "U0": Role.UNIFIED}
    report = report_of(RouterMetrics(), *(instance(name, role, load) for name, role in names.items()))

    def parts(family: str, name: str, label: str) -> dict[str, float]:
        samples = families(report)[family].samples
        return {s.labels[label]: s.value for s in samples if s.labels["instance"] == name}

    queues = {name: parts("chitu_instance_requests", name, "queue") for name in names}
    assert queues["P0"] == {"bootstrap": 2, "waiting": 3, "running": 3, "inflight": 4, "closing": 7}
    assert queues["D0"] == {"prealloc": 5, "transfer": 3, "waiting": 1, "running": 3, "retracted": 6, "closing": 7}
    assert queues["U0"] == {"waiting": 5, "running": 3, "retracted": 6}
    assert parts("chitu_instance_pages", "D0", "state") == {"free": 4, "used": 3, "quarantined": 2, "cached": 1}
    assert parts("chitu_instance_aux_slots", "P0", "state") == {"free": 6, "used": 2}
    assert parts("chitu_instance_state_slots", "D0", "state") == {"free": 2, "used": 3}
    assert parts("chitu_instance_image_rows", "P0", "state") == {"free": 5, "used": 4}


def test_a_p_tells_how_many_d_it_does_not_write_to() -> None:
    suspended, sound = (instance(f"P{n}", Role.PREFILL, LoadReport(suspended=d)) for n, d in enumerate([(0, 3), ()]))
    report = report_of(RouterMetrics(), suspended, sound)
    samples = families(report)["chitu_instance_suspended_peers"].samples
    assert {s.labels["instance"]: s.value for s in samples} == {"P0": 2, "P1": 0}


PATH = ("prefill", "decode", "transport")


def test_each_path_has_its_rates_and_failures() -> None:
    meter = PathMeter()
    for nbytes, took_s in ((4096, 0.5), (None, 5.0), (1024, 0.25)):
        meter.add(1, "mooncake_rdma", nbytes, took_s)
    meter.add(0, "shm", 512, 0.125)
    report = report_of(RouterMetrics(), instance("P0", Role.PREFILL, LoadReport(paths=meter.loads())))
    seen = {
        family.removeprefix("chitu_path_"): {
            tuple(s.labels[k] for k in PATH): s.value for s in families(report)[family].samples
        }
        for family in ("chitu_path_bytes", "chitu_path_writes", "chitu_path_busy_seconds", "chitu_path_failed_writes")
    }
    slow, fast = ("P0", "D1", "mooncake_rdma"), ("P0", "D0", "shm")
    assert seen == {
        "bytes": {slow: 5120, fast: 512},
        "writes": {slow: 2, fast: 1},
        "busy_seconds": {slow: 5.75, fast: 0.125},
        "failed_writes": {slow: 1, fast: 0},
    }


def test_an_instance_that_is_away_is_down_and_has_no_load() -> None:
    here, away = instance("P0", Role.PREFILL, LoadReport(steps=3)), instance("D1", Role.DECODE, None)
    coordination = CoordinationMetrics(expired_leases={"D1": 2})
    report = MetricsReport("1", RouterMetrics(), coordination, (here, away))
    labels = {"role": "decode", "instance": "D1"}
    assert value(report, "chitu_instance_up", **labels) == 0
    assert value(report, "chitu_instance_up", role="prefill", instance="P0") == 1
    assert value(report, "chitu_instance_leases_expired_total", **labels) == 2
    assert [s.labels["instance"] for s in families(report)["chitu_instance_steps"].samples] == ["P0"]


def test_the_state_of_a_breaker_is_one_of_three() -> None:
    metrics = RouterMetrics(breakers={"D0": {"open": 1}})
    report = MetricsReport("1", metrics, CoordinationMetrics(), ())
    states = {s.labels["state"]: s.value for s in families(report)["chitu_instance_breaker"].samples}
    assert states == {"closed": 0, "open": 1, "half_open": 0}


# ------------------------------------------------------------------------------------------------------------- the text


def test_the_text_is_well_formed_and_says_what_it_is() -> None:
    body, content_type = render_metrics(full_report())
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    lines = body.decode().splitlines()
    for kind in ("HELP", "TYPE"):
        names = [line.split()[2] for line in lines if line.startswith(f"# {kind} ")]
        assert len(names) == len(set(names)) > 40
    for family in families(full_report()).values():
        assert family.name.startswith("chitu_") and family.samples
        assert not family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,*/*;q=0.1",
        "application/openmetrics-text; version=abc",
    ],
)
def test_openmetrics_for_those_who_ask(accept: str) -> None:
    body, content_type = render_metrics(full_report(), accept)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    assert {family.name for family in parse_openmetrics(body.decode())} == set(families(full_report()))


@pytest.mark.parametrize("accept", ["*/*", "text/plain; version=x.y", "text/html", ""])
def test_plain_text_for_the_others(accept: str) -> None:
    assert render_metrics(full_report(), accept) == render_metrics(full_report())


def test_the_page_of_metrics_lists_every_family_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    written = {name: (kind, set(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    assert len(written) == len(rows)
    exported = {}
    for family in families(full_report()).values():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        exported[name] = (family.type, labels, family.documentation)
    assert written == exported


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_the_page_of_a_large_cluster_comes_in_small_pieces_that_together_are_one_page(accept: str) -> None:
    names = [f"{role.letter}{rank}" for role in (Role.PREFILL, Role.DECODE) for rank in range(300)]
    roles = {role.letter: str(role) for role in Role}
    instances = tuple(InstanceSnapshot(n, roles[n[0]], "up", "h", 1, "1", LoadReport()) for n in names)
    counted = RouterMetrics(breakers={name: {"closed": 1} for name in names})
    for name in names:
        counted.stages["queue"][name].observe(0.1)
    ages = CoordinationMetrics(ages_s=dict.fromkeys(names, 1.0))
    pieces, content_type = render_pieces(MetricsReport("1", counted, ages, instances), accept)
    texts = [piece.decode() for piece in pieces]
    assert max(text.count("\n") for text in texts) <= 1.2 * PART_SAMPLES
    parse = parse_openmetrics if accept else parse_text
    found = {family.name: family for family in parse("".join(texts))}
    assert len(found) == "".join(texts).count("# TYPE "), "each family has one head"
    assert accept in content_type
    assert {s.labels["instance"] for s in found["chitu_instance_pages"].samples} == set(names)
    assert len(found["chitu_instance_pages"].samples) == 4 * len(names)
    sums = [s for s in found["chitu_stage_seconds"].samples if s.name.endswith("_sum")]
    assert len(sums) == len(names)
