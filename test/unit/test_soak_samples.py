"""The verdict of a soak test: what counts as flat, and what does not."""

from __future__ import annotations

from collections import Counter

from benchmark.soak import ResourceUsage, Sample, findings, row_of

FLAT = ResourceUsage(rss_mib=100.0, threads=5, fds=40, sockets=12)


def samples(usages: list[ResourceUsage], name: str = "router") -> list[Sample]:
    return [
        Sample(60.0 * n, {name: usage, "P0": FLAT}, 0, Counter(right=10, left=2)) for n, usage in enumerate(usages, 1)
    ]


def test_a_flat_soak_has_no_findings_whatever_the_first_sample_was() -> None:
    warming_up = ResourceUsage(rss_mib=20.0, threads=2, fds=10, sockets=1)
    assert findings(samples([warming_up, *[FLAT] * 9])) == []
    wobble = ResourceUsage(rss_mib=104.0, threads=5, fds=42, sockets=10)
    assert findings(samples([FLAT, wobble, FLAT, FLAT, wobble, wobble])) == []


def test_what_grows_is_named_with_both_values() -> None:
    grown = {
        "rss_mib": ResourceUsage(110.0, 5, 40, 12),
        "threads": ResourceUsage(100.0, 6, 40, 12),
        "fds": ResourceUsage(100.0, 5, 44, 12),
        "sockets": ResourceUsage(100.0, 5, 40, 16),
    }
    for what, usage in grown.items():
        (sentence,) = findings(samples([FLAT] * 6 + [usage] * 2))
        assert sentence.startswith(f"router: {what} grew from ")


def test_a_lost_page_and_a_failed_request_are_findings_even_when_they_were_seen_once() -> None:
    seen = samples([FLAT] * 6)
    seen[2].pages_not_free = 3
    seen[4].outcomes["decode_lost"] = 1
    assert findings(seen) == ["1 requests: decode_lost", "3 pages were not free at rest, 180 s in"]


def test_no_samples_and_no_answers_are_no_proof() -> None:
    assert findings(samples([FLAT])) == ["1 samples are too few to judge by"]
    silent = samples([FLAT] * 4)
    for sample in silent:
        sample.outcomes = Counter(left=3)
    assert findings(silent) == ["no answer at all was right"]
    assert "3 left" in row_of(silent[0]) and "router 100 MiB 5 thr 40 fds 12 tcp" in row_of(silent[0])
