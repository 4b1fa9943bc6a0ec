"""Metric families of the Prometheus library, built from numbers that were counted elsewhere. Pure.

Used by `metrics_text.py`. The library's own counters are not used: they take a lock and look up labels on every count,
and their values can neither be sent to another process nor added up over processes. A family comes in parts of
`PART_SAMPLES`, made one after the other: one of a large cluster takes too long to be made and written at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from chitu.router.metrics import TIME_BOUNDS_S, Histograms, TimeHistogram
from chitu.types import Role

PART_SAMPLES = 400
"""Samples of a part; they take about 3 ms."""
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


def counter(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Yield the parts of a counter family. `name` comes without `_total`."""
    return _parts(lambda: CounterMetricFamily(name, text, labels=labels), samples)


def gauge(name: str, text: str, samples: Samples, labels: tuple[str, ...] = ()) -> Iterator[Metric]:
    return _parts(lambda: GaugeMetricFamily(name, text, labels=labels), samples)


def histogram(name: str, text: str, times: TimeHistogram) -> Iterator[Metric]:
    family = HistogramMetricFamily(name, text, labels=())
    family.add_metric((), _buckets(times), times.sum_s)
    yield family


def histograms(name: str, text: str, times: Histograms) -> Iterator[Metric]:
    samples = (
        ((_ROLE_OF_LETTER[instance[0]], instance), _buckets(of_one), of_one.sum_s)
        for instance, of_one in sorted(times.items())
    )
    return _parts(lambda: HistogramMetricFamily(name, text, labels=PER_INSTANCE), samples, len(_BOUNDS))


def _parts(make: Callable[[], Any], samples: Iterable[tuple[Any, ...]], size: int = 1) -> Iterator[Metric]:
    """Yield at least one family with the arguments of its `add_metric`, each of which makes `size` samples."""
    rest, is_first = iter(samples), True
    while (part := list(islice(rest, PART_SAMPLES // size))) or is_first:
        is_first, family = False, make()
        for arguments in part:
            family.add_metric(*arguments)
        yield family


def _buckets(times: TimeHistogram) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, accumulate(times.counts), strict=True))
