"""Numbers of the cluster under the names that scrapers of other projects expect of a vLLM server (`metric_aliases`).

Pure. For them the router is one server: numbers of instances are sums, and the use of pages is the fullest role's.
`docs/gateway.md` has a row for every family made here, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from chitu.http.fleet.metrics_text import buckets
from chitu.protocol import LoadReport
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.router.metrics import RouterMetrics
from chitu.types import Role

MODEL = ("model_name",)


class AliasFacts(NamedTuple):
    """What the aliases say beside the numbers of the cluster."""

    model: str
    """Name in the API."""
    adapters: tuple[str, ...]
    """Names of the LoRA adapters, all of which every instance has in memory."""
    page_size: int
    """Tokens per page."""
    time_s: float
    """Now, in seconds since 1970."""


def alias_families(
    facts: AliasFacts, total: RouterMetrics, instances: tuple[InstanceSnapshot, ...]
) -> Iterator[Metric]:
    loads = [(Role(each.role), each.load) for each in instances if each.load is not None]
    prompts = [load for role, load in loads if role in (Role.PREFILL, Role.UNIFIED)]
    at_work = [load for role, load in loads if role is not Role.ENCODE]
    used = _fullest(loads)
    for name, text, value in (
        ("vllm:num_requests_waiting", "Requests whose prompts wait", sum(load.waiting for load in prompts)),
        ("vllm:num_requests_running", "Requests in the batches", sum(load.running for load in at_work)),
        ("vllm:kv_cache_usage_perc", "Share (0 to 1) of the pages in use, of the fullest role", used),
        ("vllm:gpu_cache_usage_perc", "The same, by its former name", used),
    ):
        yield _gauge(name, text, {"model_name": facts.model}, value)
    labels = {"max_lora": str(len(facts.adapters)), "running_lora_adapters": ",".join(facts.adapters)}
    labels |= {"waiting_lora_adapters": "", "model_name": facts.model}
    yield _gauge("vllm:lora_requests_info", "Time (s since 1970); the adapters are labels", labels, facts.time_s)
    labels = {"block_size": str(facts.page_size), "num_gpu_blocks": str(sum(load.pages_total for load in prompts))}
    labels["model_name"] = facts.model
    yield _gauge("vllm:cache_config_info", "Always 1; the pages are labels", labels, 1)
    for name, text, count in (
        ("vllm:prompt_tokens", "Prompt tokens of accepted requests", total.prompt_tokens),
        ("vllm:generation_tokens", "Tokens received for requests", total.tokens),
    ):
        counter = CounterMetricFamily(name, text, labels=MODEL)
        counter.add_metric([facts.model], count)
        yield counter
    ends = CounterMetricFamily("vllm:request_success", "Requests that ended well", labels=(*MODEL, "finished_reason"))
    for reason in sorted({"stop", "length", *total.finished}):
        ends.add_metric([facts.model, reason], total.finished.get(reason, 0))
    yield ends
    for name, text, times in (
        ("vllm:time_to_first_token_seconds", "From acceptance to the first token", total.ttft),
        ("vllm:inter_token_latency_seconds", "From a token to the next one of its request", total.inter_token),
        ("vllm:e2e_request_latency_seconds", "From acceptance to the end of requests that ended well", total.e2e),
    ):
        histogram = HistogramMetricFamily(name, text, labels=MODEL)
        histogram.add_metric([facts.model], buckets(times), times.sum_s)
        yield histogram


def _fullest(loads: list[tuple[Role, LoadReport]]) -> float:
    """Return the share of its pages that the fullest role uses."""
    shares = []
    for role in {role for role, _ in loads} - {Role.ENCODE}:
        own = [load for each, load in loads if each is role]
        total = sum(load.pages_total for load in own)
        shares.append(sum(load.pages_used + load.pages_quarantined for load in own) / total if total else 0.0)
    return max(shares, default=0.0)


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(list(labels.values()), value)
    return family
