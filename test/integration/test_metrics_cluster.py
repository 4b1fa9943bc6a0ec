"""`/metrics`, logs and traces of a real 1P1D: they report what was sent, and a killed instance shows."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import httpx
import pytest
from completions import complete_all
from nursery import FORKED
from otlp_collector import Collector
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

NUM_PAGES = 200
PROMPTS = [[7] * length for length in (1, 40, 100, 33)]
TOKENS = [1, 5, 12, 30]
STREAMED_PROMPT, STREAMED_TOKENS = [9] * 17, 8
P0, D0 = 'role="prefill",instance="P0"', 'role="decode",instance="D0"'


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[LocalCluster]:
    model = make_model(tmp_path_factory.mktemp("models") / "llama", family="llama")
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        f"cache.num_pages={NUM_PAGES}",
        "dp_config.router.retry.max_attempts=1",
        f"dp_config.router.otlp_endpoint={collector.url}",
        "log.format=json",
        "log.level=DEBUG",
        "log.modules=[kv_transfer=WARNING]",
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


class Scrape:
    """One answer of `/metrics`."""

    def __init__(self, url: str) -> None:
        response = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        self.samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]

    def __call__(self, name: str, labels: str = "") -> float:
        """Return the sum of the samples with that name and at least these labels (`a="b",c="d"`)."""
        wanted = dict(re.findall(r'(\w+)="(\w+)"', labels)).items()
        return sum(s.value for s in self.samples if s.name == name and wanted <= s.labels.items())


def stream(url: str, prompt: list[int], max_tokens: int) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False) as response:
        events = [line for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"


def test_the_numbers_are_those_of_the_requests_that_were_sent(cluster: LocalCluster) -> None:
    """Runs first: only a fresh cluster has known counters."""
    complete_all(cluster.url, PROMPTS, [{"max_tokens": count, "ignore_eos": True} for count in TOKENS])
    stream(cluster.url, STREAMED_PROMPT, STREAMED_TOKENS)
    prompts = [*PROMPTS, STREAMED_PROMPT]
    requests, prompt_tokens = len(prompts), sum(map(len, prompts))
    output_tokens = sum(TOKENS) + STREAMED_TOKENS
    # The default model: 4 layers, 4 KV heads of 16, float32, pages of 16 tokens; 512 logits and a 64 byte header.
    # A request for one token moves only the logits.
    pages = sum(
        -(-len(prompt) // 16) for prompt, count in zip(prompts, [*TOKENS, STREAMED_TOKENS], strict=True) if count > 1
    )
    moved = pages * 4 * 2 * (16 * 4 * 16 * 4) + requests * (64 + 512 * 4)

    def told() -> bool:
        """Return whether the instances' counters have arrived; they come with a heartbeat."""
        scrape = Scrape(cluster.url)
        saved = scrape("chitu_instance_saved_bytes_total", D0)  # if one prompt ended before another arrived
        return (
            scrape("chitu_instance_tokens_total", D0) == output_tokens
            and scrape("chitu_instance_requests") == 0
            and scrape("chitu_instance_transferred_bytes_total") == 2 * (moved - saved)
        )

    wait_until(told, 15.0, lambda: [s for s in Scrape(cluster.url).samples if s.name.startswith("chitu_instance")])
    scrape = Scrape(cluster.url)
    for name in ("chitu_requests_total", "chitu_attempts_total", "chitu_requests_finished_total"):
        assert scrape(name) == requests, name
    assert scrape("chitu_requests_finished_total", 'reason="length"') == requests
    assert scrape("chitu_prompt_tokens_total") == prompt_tokens
    cached = scrape("chitu_instance_cached_tokens_total", P0)
    assert cached % 16 == 0 and scrape("chitu_instance_tokens_total", P0) == prompt_tokens - cached
    assert scrape("chitu_output_tokens_total") == output_tokens
    assert scrape("chitu_time_to_first_token_seconds_count") == requests
    assert scrape("chitu_request_duration_seconds_count") == requests
    assert scrape("chitu_inter_token_latency_seconds_count") == output_tokens - requests
    for stage, place in (("queue", P0), ("compute", P0), ("transfer", P0), ("admission", D0)):
        assert scrape("chitu_stage_seconds_count", f'{place},stage="{stage}"') == requests, stage
    assert 0 < scrape("chitu_time_to_first_token_seconds_sum") < scrape("chitu_request_duration_seconds_sum")
    saved = scrape("chitu_instance_saved_bytes_total", D0)
    for labels in (P0, D0):
        assert scrape("chitu_instance_pages", labels) == NUM_PAGES
        free, kept = (scrape("chitu_instance_pages", f'{labels},state="{state}"') for state in ("free", "cached"))
        assert free + kept == NUM_PAGES
        assert scrape("chitu_instance_transferred_bytes_total", labels) == moved - saved
        assert scrape("chitu_instance_breaker", f'{labels},state="closed"') == 1
    path = 'prefill="P0",decode="D0",transport="shm"'
    assert scrape("chitu_path_bytes_total", path) == scrape("chitu_path_bytes_total") == moved - saved
    assert scrape("chitu_path_writes_total", path) > len(prompts), "the logits row of each, and pages that D has not"
    assert scrape("chitu_path_busy_seconds_total", path) > 0 == scrape("chitu_path_failed_writes_total", path)
    for name in ("failed", "cancelled", "rejected", "in_flight"):
        assert scrape(f"chitu_requests_{name}") == scrape(f"chitu_requests_{name}_total") == 0, name
    assert scrape("chitu_router_loop_lag_seconds_count") > 10
    assert 0 < scrape("chitu_instance_heartbeat_age_seconds", D0) < scrape("chitu_instance_age_seconds", D0)
    assert scrape("chitu_retries_total") == scrape("chitu_stale_tokens_total") == 0


def test_openmetrics_for_a_prometheus_server(cluster: LocalCluster) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    response = httpx.get(f"{cluster.url}/metrics", headers={"Accept": accept}, timeout=5.0, trust_env=False)
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    names = {family.name for family in parse_openmetrics(response.text)}
    assert {"chitu_requests", "chitu_instance_pages", "chitu_time_to_first_token_seconds"} <= names


def test_json_logs_follow_a_request_through_all_processes_and_tell_what_steps_did(cluster: LocalCluster) -> None:
    request_id = httpx.post(
        f"{cluster.url}/v1/completions", json={"prompt": [11] * 20, "max_tokens": 3}, timeout=60.0, trust_env=False
    ).headers["x-request-id"]

    def lines(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in cluster.logs(name).splitlines() if line.startswith("{")]

    def is_told(name: str) -> bool:
        return any(line.get("request_id") == request_id for line in lines(name))

    for name in ("router", "P0", "D0"):
        wait_until(lambda name=name: is_told(name), 20.0, lambda name=name: cluster.logs(name)[-2000:])
        assert {line["process"] for line in lines(name)} == {name}
    assert any(re.match(r"step \d+ launched: 20 prompt tokens in 1 chunks", line["message"]) for line in lines("P0"))
    quiet = {line["level"] for line in lines("P0") if line["module"].startswith("chitu.kv_transfer")}
    assert not quiet & {"DEBUG", "INFO"}, "log.modules"


def test_a_request_is_a_span_of_its_clients_trace_and_its_stages_are_spans_of_router_p_and_d(
    cluster: LocalCluster, collector: Collector
) -> None:
    trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{client}-01", "X-Request-Id": "traced"}
    body = {"prompt": [13] * 40, "max_tokens": 4, "ignore_eos": True, "return_proof": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)
    total_s = answer.json()["chitu"]["total_s"]
    wait_until(lambda: bool(collector.spans(trace)), 30.0, lambda: cluster.logs("router")[-2000:])
    spans = {span.name: span for span in collector.spans(trace)}
    root, attempt = spans["POST /v1/completions"], spans["attempt"]
    assert root.parent_id == client and root.attributes["chitu.request_id"] == "traced"
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.usage.output_tokens"]) == (40, 4)
    assert abs((root.end_ns - root.start_ns) / 1e9 - total_s) < max(0.02 * total_s, 0.05)
    of_p, of_d = ("chitu-prefill", "P0", attempt.span_id), ("chitu-decode", "D0", attempt.span_id)
    told = {name: (span.service, span.instance, span.parent_id) for name, span in spans.items()}
    no_time = {"queue", "transfer", "first_step"} - told.keys()  # a stage that took none has no span
    assert {**told, **dict.fromkeys(no_time)} == {
        "POST /v1/completions": ("chitu-router", "router", client),
        **dict.fromkeys(("receive", "prepare", "attempt"), ("chitu-router", "router", root.span_id)),
        **dict.fromkeys(("queue", "compute", "transfer"), of_p),
        **dict.fromkeys(("admission", "first_step", "decode"), of_d),
        **dict.fromkeys(no_time),
    }


def test_no_label_holds_what_clients_or_requests_are_called(cluster: LocalCluster) -> None:
    headers = {"X-Request-Id": "who-knows"}
    body = {"model": "other", "prompt": "x"}
    httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=30.0, trust_env=False)
    for sample in Scrape(cluster.url).samples:
        for label, value in sample.labels.items():
            if label in ("instance", "prefill", "decode"):
                assert value in ("P0", "D0")
            elif label not in ("le", "version", "release", "revision"):  # an operator's words
                assert re.fullmatch(r"[a-z_]{2,24}", value), sample
            assert "who-knows" not in value


def test_a_kill_is_seen_as_a_death_and_by_the_code_of_the_failures(cluster: LocalCluster, collector: Collector) -> None:
    body = {"model": "m", "prompt": [5] * 20, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        cluster.kill("D0", signal.SIGKILL)
        last = [line for line in lines if line][-1]
    code = json.loads(last.removeprefix("data: "))["error"]["code"]
    wait_until(lambda: Scrape(cluster.url)("chitu_instance_up", D0) == 0, 10.0, lambda: cluster.logs("router")[-2000:])
    scrape = Scrape(cluster.url)
    assert scrape("chitu_requests_failed_total", f'code="{code}"') == scrape("chitu_requests_failed_total") == 1
    assert scrape("chitu_instance_deaths_total", D0) + scrape("chitu_instance_leases_expired_total", D0) == 1
    assert scrape("chitu_instance_up", P0) == 1
    assert not [s for s in scrape.samples if s.name == "chitu_instance_steps_total" and s.labels["instance"] == "D0"]
    # No instance can decode: refused on arrival.
    refused = httpx.post(f"{cluster.url}/v1/completions", json={**body, "stream": False}, timeout=30.0, trust_env=False)
    assert refused.status_code == 503
    assert Scrape(cluster.url)("chitu_requests_rejected_total", 'code="no_instance"') == 1

    def failed() -> set[str]:
        return {
            span.attributes["error.type"] for span in collector.spans() if span.is_error and span.instance == "router"
        }

    wait_until(lambda: failed() >= {code, "no_instance"}, 30.0, failed)
