"""Report of `chitu verify`, for people and machines. Pure except `show`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from chitu.client.verify.pages import Place, first_unlike
from chitu.client.verify.parity import Judgement, blame, pair_name, unlike_texts
from chitu.client.verify.probe import CheckedRequest, Pair, Served
from chitu.client.verify.topology import TopologyVerdict
from chitu.protocol import KVLayout

EXIT_CODES = {"right": 0, "wrong": 1, "unjudged": 2}
CACHED = "cached"
"""Kind of request that uses the prefix cache, so a wrong answer may be another pair's fault."""
FORCED = "forced"
"""Kind of request whose tokens are fixed, and whose pages are checksummed."""
MAX_REASONS = 20
"""Maximum lines of reasons; the first wrong answer of each pair precedes the others."""


class Judged(msgspec.Struct, frozen=True):
    asked: CheckedRequest
    served: Served
    """Pair that served it, as the router proves."""
    kind: str
    judgement: Judgement

    @property
    def pair(self) -> Pair:
        return self.served.prefill, self.served.decode


class PairParity(msgspec.Struct, frozen=True):
    prefill: str | None
    """Name of P; None: a unified instance."""
    decode: str
    same: int
    near_ties: int
    wrong: int
    cached: int
    """Number of its answers whose prompts hit the prefix cache."""
    kv_bytes: int
    """Bytes moved for requests without the cache; `expected_bytes` is the formula's result."""
    expected_bytes: int
    largest_difference: float
    """Largest difference of a logprob from the reference's (nats)."""


class WrongPage(msgspec.Struct, frozen=True):
    pair: str
    place: Place


class Report(msgspec.Struct, frozen=True):
    verdict: Literal["right", "wrong", "unjudged"]
    guilty: list[str]
    """Instances, pairs (`P0-D1`), `router`, or `all` at fault; `all`: the model or the reference is another one."""
    reasons: list[str]
    model: str
    dtype: str
    """Dtype of K and V."""
    tolerance: float
    """Allowed difference of logprobs in nats."""
    references: list[str]
    pages: list[WrongPage]
    """First wrong page of each wrong pair, if page checksums show one."""
    requests: int
    pairs: list[PairParity]


def wrong_pages(
    judged: Sequence[Judged], layouts: Mapping[str, KVLayout], alone: Mapping[int, str], alone_layout: KVLayout | None
) -> list[WrongPage]:
    """Return for each pair with wrong answers the first difference in the first prompt that shows one. `layouts` is by
    name of D. `alone` has by prompt the sums of the unified engine, which are used if no other pair is right."""
    wrong = {one.pair for one in judged if one.judgement.outcome == "wrong"}
    forced = [one for one in judged if one.kind == FORCED]
    found: dict[Pair, Place] = {}
    for one in forced:
        layout = layouts[one.served.decode]
        right = [
            other.served.page_sums
            for other in forced
            if other.asked.prompt == one.asked.prompt and other.pair not in wrong
            if layouts[other.served.decode] == layout
        ]
        if not right and layout == alone_layout and one.asked.prompt in alone:
            right = [alone[one.asked.prompt]]
        place = first_unlike(one.served.page_sums, right, layout.num_layers) if one.pair in wrong else None
        if place is not None:
            found.setdefault(one.pair, place)
    return [WrongPage(pair_name(pair), place) for pair, place in found.items()]


def report_of(
    verdict: TopologyVerdict,
    judged: Sequence[Judged],
    missing: Sequence[str],
    dtype: str,
    tolerance: float,
    refs: list[str],
    pages: list[WrongPage],
) -> Report:
    """Build the report. `verdict` is that of the topology, from the requests without the cache and without comparing
    tokens. `missing` has other reasons why the verdict is incomplete."""
    wrong: dict[Pair, list[Judged]] = defaultdict(list)
    by_pair: dict[Pair, list[Judged]] = defaultdict(list)
    for one in judged:
        by_pair[one.pair].append(one)
        if one.judgement.outcome == "wrong":
            wrong[one.pair].append(one)
    places: dict[Pair, set[int]] = defaultdict(set)
    computed = [one for found in wrong.values() for one in found if one.kind != CACHED]
    for one in computed or [one for found in wrong.values() for one in found]:
        places[one.pair].add(one.judgement.place)
    guilty = blame(places, by_pair.keys())
    reasons = [_reason(pair, one) for pair, found in wrong.items() for one in found[:1]]
    moved = {(pair.prefill, pair.decode): (pair.kv_bytes, pair.expected_bytes) for pair in verdict.pairs}
    for pair, (found_bytes, right_bytes) in moved.items():
        if found_bytes != right_bytes:
            guilty.append(pair_name(pair))
            reasons.append(f"{pair_name(pair)} moved {found_bytes} bytes, not {right_bytes}")
    reasons += [f"{page.pair}: {page.place.says}" for page in pages]
    reasons += [_reason(pair, one) for pair, found in wrong.items() for one in found[1:]]
    unlike = [reason for number in sorted({one.asked.prompt for one in judged}) for reason in _texts(judged, number)]
    guilty += ["router"] if unlike else []
    reasons = [*reasons, *unlike][:MAX_REASONS]
    open_reasons = [*missing, *verdict.reasons]
    return Report(
        verdict="wrong" if guilty else "unjudged" if open_reasons or not judged else "right",
        guilty=list(dict.fromkeys(guilty)),
        reasons=[*reasons, *open_reasons],
        model=verdict.model,
        dtype=dtype,
        tolerance=tolerance,
        references=refs,
        pages=pages,
        requests=len(judged),
        pairs=[_row(pair, found, *moved.get((str(pair[0]), pair[1]), (0, 0))) for pair, found in _ordered(by_pair)],
    )


def _ordered(by_pair: dict[Pair, list[Judged]]) -> list[tuple[Pair, list[Judged]]]:
    return sorted(by_pair.items(), key=lambda item: pair_name(item[0]))


def _texts(judged: Sequence[Judged], number: int) -> list[str]:
    return unlike_texts([one.asked for one in judged if one.asked.prompt == number])


def _reason(pair: Pair, one: Judged) -> str:
    served = one.served
    cached = f", {served.cached_tokens} tokens cached" if served.cached_tokens else ""
    return f"{pair_name(pair)}: {one.kind}, prompt of {served.prompt_tokens} tokens{cached}: {one.judgement.says}"


def _row(pair: Pair, found: Sequence[Judged], kv_bytes: int, expected_bytes: int) -> PairParity:
    outcomes = [one.judgement.outcome for one in found]
    return PairParity(
        *pair,
        same=outcomes.count("same"),
        near_ties=outcomes.count("near-tie"),
        wrong=outcomes.count("wrong"),
        cached=sum(one.served.cached_tokens > 0 for one in found),
        kv_bytes=kv_bytes,
        expected_bytes=expected_bytes,
        largest_difference=round(max(one.judgement.difference for one in found), 6),
    )


def show(report: Report, console: Console) -> None:
    table = Table(title=f"{report.model} ({report.dtype}) against {' and '.join(report.references) or 'nothing'}")
    for name in ("pair", "same", "near-tie", "wrong", "from cache", "bytes moved", "formula", "logprobs differ by"):
        table.add_column(name, justify="left" if name == "pair" else "right")
    for pair in report.pairs:
        counts = (pair.same, pair.near_ties, pair.wrong, pair.cached, pair.kv_bytes, pair.expected_bytes)
        table.add_row(pair_name((pair.prefill, pair.decode)), *map(str, counts), f"{pair.largest_difference:.6f}")
    console.print(table)
    for reason in report.reasons:
        console.print(reason, markup=False, soft_wrap=True)
    if report.verdict == "right":
        console.print(f"right: {report.requests} answers over {len(report.pairs)} pairs are those of one engine")
    elif report.verdict == "wrong":
        console.print(f"WRONG: {', '.join(report.guilty)}", markup=False)
    else:
        console.print("could not be judged")
