"""Metrics under the names of a vLLM server: the page lists them, and the numbers are those of the whole cluster."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from chitu.http.fleet.metric_aliases import AliasFacts, alias_families
from chitu.http.fleet.metrics_text import MetricsReport, render_metrics
from chitu.protocol import LoadReport
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.router.metrics import CoordinationMetrics, RouterMetrics
from chitu.types import Role

DOCS = Path(__file__).parents[2] / "docs" / "gateway.md"
FACTS = AliasFacts("m", ("sql", "tone"), 16, 1000.5)
USED = 40
"""Pages in use of P; a hundred are there."""


def member(name: str, role: Role, **load: int) -> InstanceSnapshot:
    return InstanceSnapshot(name, str(role), "up", "h", 1, "1", LoadReport(**load))  # type: ignore[arg-type]


CLUSTER = (
    member("P0", Role.PREFILL, waiting=3, running=2, pages_total=100, pages_used=USED, pages_cached=50),
    member("D0", Role.DECODE, waiting=7, running=5, pages_total=100, pages_used=10, pages_quarantined=20),
    member("D1", Role.DECODE, running=1, pages_total=100),
    member("E0", Role.ENCODE, waiting=9, running=9, pages_total=1, pages_used=1),
    InstanceSnapshot("P1", "prefill", "down", "h", 1, "", None),
)


def report(metrics: RouterMetrics, with_aliases: bool = True) -> MetricsReport:
    aliases = partial(alias_families, FACTS) if with_aliases else None
    return MetricsReport("1", metrics, CoordinationMetrics(), CLUSTER, aliases)


def families(metrics: RouterMetrics | None = None) -> dict[str, Metric]:
    text = render_metrics(report(metrics or RouterMetrics()))[0].decode()
    return {each.name: each for each in text_string_to_metric_families(text) if each.name.startswith("vllm:")}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    (sample,) = [s for s in found[name].samples if s.labels == {"model_name": "m", **labels}]
    return float(sample.value)


def test_the_cluster_is_one_server() -> None:
    found = families()
    assert value(found, "vllm:num_requests_waiting") == 3, "those that wait on D are P's, too"
    assert value(found, "vllm:num_requests_running") == 2 + 5 + 1, "an E runs no request"
    assert value(found, "vllm:kv_cache_usage_perc") == value(found, "vllm:gpu_cache_usage_perc") == USED / 100
    adapters = {"max_lora": "2", "running_lora_adapters": "sql,tone", "waiting_lora_adapters": ""}
    assert value(found, "vllm:lora_requests_info", **adapters) == 1000.5
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_counters_are_those_of_the_router() -> None:
    metrics = RouterMetrics(prompt_tokens=7, tokens=5, finished={"stop": 2})
    metrics.ttft.observe(0.5)
    found = families(metrics)
    assert value(found, "vllm:prompt_tokens") == 7 and value(found, "vllm:generation_tokens") == 5
    assert value(found, "vllm:request_success", finished_reason="stop") == 2
    assert value(found, "vllm:request_success", finished_reason="length") == 0
    sums = [s.value for s in found["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert sums == [1.0]


def test_the_page_lists_every_alias_and_no_other() -> None:
    rows = re.findall(r"^\| `(vllm:\w+)` \| (\w+) \| (.*?) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    written = {name: (kind, set(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    exported = {}
    for family in alias_families(FACTS, RouterMetrics(), CLUSTER):
        labels = {label for sample in family.samples for label in sample.labels} - {"le", "model_name"}
        name = family.name + ("_total" if family.type == "counter" else "")
        exported[name] = (family.type, labels, family.documentation)
    assert written == exported


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_aliases_come_behind_the_key_alone(accept: str) -> None:
    parse = parse_openmetrics if accept else text_string_to_metric_families
    texts = [
        render_metrics(report(RouterMetrics(), with_aliases), accept)[0].decode() for with_aliases in (False, True)
    ]
    own, both = ({family.name for family in parse(text)} for text in texts)
    assert not any(name.startswith("vllm:") for name in own)
    assert {name for name in both if not name.startswith("vllm:")} == own and len(both) == len(own) + 12
