"""Samples of the idle cluster during a soak, and checks for growth. Pure except `usage_of`. Used by `bench/soak.py`.

Between the first samples and the last ones memory, threads, file descriptors and sockets of every process must be the
same within `TOLERANCE`. A page that is not free at rest, and a request that was neither right nor left by its client,
is always a finding.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from chitu.testing.steady_load import LEFT, RIGHT


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of one process. Of an instance it is the process that computes, not its parent torchrun."""

    rss_mib: float
    threads: int
    fds: int
    sockets: int


TOLERANCE = {"rss_mib": (0.05, 8.0), "threads": (0.0, 0.0), "fds": (0.0, 3.0), "sockets": (0.0, 3.0)}
"""Growth that counts as flat, by field of `ResourceUsage`: a share and an amount in its unit; the larger applies."""


@dataclass(slots=True)
class Sample:
    """State of the cluster at rest."""

    at_s: float
    usage: dict[str, ResourceUsage]
    pages_not_free: int
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes of the requests since the last sample."""
    accidents: list[str] = field(default_factory=list)


def findings(samples: Sequence[Sample]) -> list[str]:
    """Return a sentence for each resource that grew and each wrong result. The first fifth of the samples (at least
    one) is the warm-up."""
    words = []
    outcomes = sum((sample.outcomes for sample in samples), Counter[str]())
    words += [f"{n} requests: {code}" for code, n in sorted(outcomes.items()) if code not in (RIGHT, LEFT)]
    if not outcomes[RIGHT]:
        words.append("no answer at all was right")
    words += [f"{s.pages_not_free} pages were not free at rest, {s.at_s:.0f} s in" for s in samples if s.pages_not_free]
    judged = samples[max(1, len(samples) // 5) :]
    if len(judged) < 2:
        return [*words, f"{len(samples)} samples are too few to judge by"]
    part = max(1, len(judged) // 4)
    for name in sorted(judged[0].usage.keys() & judged[-1].usage.keys()):
        for what, (share, amount) in TOLERANCE.items():
            before, after = (
                statistics.median(getattr(s.usage[name], what) for s in some if name in s.usage)
                for some in (judged[:part], judged[-part:])
            )
            if after - before > max(share * before, amount):
                words.append(f"{name}: {what} grew from {before:g} to {after:g}")
    return words


def row_of(sample: Sample) -> str:
    outcomes = ", ".join(f"{n} {code}" for code, n in sorted(sample.outcomes.items(), key=lambda item: -item[1]))
    processes = "  ".join(
        f"{name} {u.rss_mib:.0f} MiB {u.threads} thr {u.fds} fds {u.sockets} tcp" for name, u in sample.usage.items()
    )
    accidents = ", ".join(sample.accidents) or "no accident"
    head = f"{sample.at_s:5.0f} s  {sample.outcomes.total()} requests: {outcomes}; {accidents}; "
    return f"{head}{sample.pages_not_free} pages not free\n         {processes}"


def usage_of(pid: int) -> ResourceUsage:
    process = psutil.Process(pid)
    with process.oneshot():
        sockets = len(process.net_connections(kind="tcp"))
        return ResourceUsage(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds(), sockets)
