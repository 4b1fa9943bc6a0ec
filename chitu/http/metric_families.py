"""Metric families of the Prometheus library, built from numbers that were counted elsewhere. Pure.

Used by `metrics_text.py`. The library's own counters are not used: they take a lock and look up labels on every count,
and their values can neither be sent to another process nor added up over processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from chitu.router.metrics import TIME_BOUNDS_S, Histograms, TimeHistogram
from chitu.types import Role

PER_INSTANCE = ("role", "instance")
_BOUNDS = [*map(floatToGoString, TIME_BOUNDS_S), "+Inf"]
_ROLE_OF_LETTER = {role.letter: str(role) for role in Role}

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and a number."""


def one(value: float) -> Samples:
    return [((), value)]


def by_key(counts: Mapping[str, float], known: Iterable[str] = ()) -> Samples:
    """Return a sample per key. `known` keys have one from the start, so that a rate sees their first event, too."""
    return [((key,), counts.get(key, 0)) for key in sorted({*known, *counts})]


def by_instance(numbers: Mapping[str, float]) -> Samples:
    return [((_ROLE_OF_LETTER[name[0]], name), number) for name, number in sorted(numbers.items())]


def counter(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    """Return a counter family. `name` comes without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def gauge(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def histogram(name: str, text: str, times: TimeHistogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=())
    family.add_metric((), _buckets(times), times.sum_s)
    return family


def histograms(name: str, text: str, times: Histograms) -> Metric:
    family = HistogramMetricFamily(name, text, labels=PER_INSTANCE)
    for instance, of_one in sorted(times.items()):
        family.add_metric((_ROLE_OF_LETTER[instance[0]], instance), _buckets(of_one), of_one.sum_s)
    return family


def _buckets(times: TimeHistogram) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, accumulate(times.counts), strict=True))
