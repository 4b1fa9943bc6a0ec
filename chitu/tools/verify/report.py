"""Report of `chitu verify`, for people and machines. Pure except `show`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from chitu.protocol import LEAST_NOISE, KVLayout
from chitu.tools.verify.parity import (
    Judgement,
    Mean,
    Place,
    blame,
    first_unlike,
    is_unsound,
    num_compared,
    pair_name,
    unlike_pairs,
    unlike_texts,
)
from chitu.tools.verify.probe import CheckedRequest, Pair, Served
from chitu.tools.verify.topology import TopologyVerdict

EXIT_CODES = {"right": 0, "wrong": 1, "unjudged": 2}
CACHED = "cached"
"""Kind of request that uses the prefix cache, so a wrong answer may be another pair's fault."""
FORCED = "forced"
"""Kind of request whose tokens are fixed, so that the checksums of different pairs can be compared."""
BEHIND_P = 1
"""Position of a token that depends on transferred KV; the first one is sampled from P's logits."""
MAX_REASONS = 20
"""Maximum lines of reasons; the first wrong answer of each pair precedes the others."""


class Judged(msgspec.Struct, frozen=True):
    asked: CheckedRequest
    served: Served
    """Pair that served it, as the router proves."""
    kind: str
    judgement: Judgement
    damage: Place | None = None
    """First page that differs between P and D; then it is wrong."""
    mean: float = 0.0
    """Mean difference of its logprobs from the engine's (nats)."""

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
    damaged: int = 0
    """Number of its answers with a page that differs between P and D."""
    sums_compared: int = 0
    """Number of checksums (of one page, in one layer) that P and D both gave."""
    refused: int = 0
    """Number of transfers that D refused as damaged; the router sent the request again."""


class WrongPage(msgspec.Struct, frozen=True):
    pair: str
    place: Place
    request_id: str = ""


class Rounding(msgspec.Struct, frozen=True):
    """What rounding does to logprobs (nats), as measured on the engine's own answers, scored by a reference."""

    noise: float
    """Largest difference."""
    mean: float


class Report(msgspec.Struct, frozen=True):
    verdict: Literal["right", "wrong", "unjudged"]
    guilty: list[str]
    """Instances, pairs (`P0-D1`), `router`, or `all` at fault; `all`: the model or the reference is another one."""
    reasons: list[str]
    model: str
    dtype: str
    """Dtype of K and V."""
    rounding: dict[str, Rounding]
    """By reference, the engine first."""
    limit: float
    """Largest difference of a logprob from the engine's (nats) that is allowed in the cluster's answers."""
    references: list[str]
    pages: list[WrongPage]
    """First wrong page of each damaged request, and of each pair that is wrong otherwise, if checksums show one."""
    requests: int
    pairs: list[PairParity]


def wrong_pages(
    judged: Sequence[Judged], layouts: Mapping[str, KVLayout], alone: Mapping[int, str], alone_layout: KVLayout | None
) -> list[WrongPage]:
    """Return the first wrong page of each damaged request, and for each pair that is wrong without damage the first
    difference in the first prompt that shows one. `layouts` is by name of D. `alone` has by prompt the sums of the
    unified engine, which are used if no other pair is right."""
    damaged = [WrongPage(pair_name(one.pair), one.damage, one.asked.request_id) for one in judged if one.damage]
    wrong = {one.pair for one in judged if one.judgement.outcome == "wrong"}
    hurt = {one.pair for one in judged if one.damage}
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
        place = (
            first_unlike(one.served.page_sums, right, layout.num_summed_layers) if one.pair in wrong - hurt else None
        )
        if place is not None:
            found.setdefault(one.pair, place)
    return damaged + [WrongPage(pair_name(pair), place) for pair, place in found.items()]


def report_of(
    verdict: TopologyVerdict,
    judged: Sequence[Judged],
    missing: Sequence[str],
    dtype: str,
    rounding: dict[str, Rounding],
    limit: float,
    pages: list[WrongPage],
    refused: Sequence[Pair] = (),
) -> Report:
    """Build the report. `verdict` is that of the topology, from the requests without the cache and without comparing
    tokens. `missing` has other reasons why the verdict is incomplete. `refused`: the pairs of transfers that D refused
    as damaged, of requests that failed; those that were tried again say so themselves."""
    wrong: dict[Pair, list[Judged]] = defaultdict(list)
    by_pair: dict[Pair, list[Judged]] = defaultdict(list)
    for one in judged:
        by_pair[one.pair].append(one)
        if one.judgement.outcome == "wrong":
            wrong[one.pair].append(one)
    places: dict[Pair, set[int]] = defaultdict(set)
    refusals = Counter([*refused, *(pair for one in judged for pair in one.served.refused)])
    means = [Mean(one.pair, (one.asked.prompt, one.asked.tokens), one.mean) for one in judged if one.kind != CACHED]
    unlike = unlike_pairs(means, max(LEAST_NOISE[dtype] / 4, next((each.mean for each in rounding.values()), 0.0)))
    every = [one for found in wrong.values() for one in found]
    damaged = {one.pair for one in every if one.damage} | refusals.keys()
    computed = [one for one in every if one.kind != CACHED or one.damage]
    for one in computed or ([] if refusals or unlike else every):
        places[one.pair].add(one.judgement.place)
    for pair in [*refusals, *unlike]:
        places[pair].add(BEHIND_P)
    guilty = blame(places, by_pair.keys() | refusals.keys())
    if guilty == ["all"] and damaged == places.keys():  # the model is right: what was sent did not arrive
        guilty = sorted(map(pair_name, damaged))
    unsound = [
        f"the engine's own answers differ from {name} by {each.mean:.2g} in the mean and {each.noise:.2g} at most: the"
        " model or its computation differs"
        for name, each in rounding.items()
        if is_unsound(each.noise, each.mean, dtype)
    ]
    guilty = ["all"] if unsound else guilty
    for found in wrong.values():
        found.sort(key=lambda one: one.damage is None)
    reasons = unsound + [_reason(pair, one) for pair, found in wrong.items() for one in found[:1]]
    reasons += [
        f"{pair_name(pair)}: D rejected {count} transfers: the data was damaged (integrity)"
        for pair, count in refusals.items()
    ]
    reasons += [
        f"{pair_name(pair)}: its logprobs differ by {mean:.2g} in the mean, those of another pair by {least:.2g} at"
        " most for the same tokens"
        for pair, (mean, least) in unlike.items()
    ]
    moved = {(pair.prefill, pair.decode): (pair.kv_bytes, pair.expected_bytes) for pair in verdict.pairs}
    for pair, (found_bytes, right_bytes) in moved.items():
        if found_bytes != right_bytes:
            guilty.append(pair_name(pair))
            reasons.append(f"{pair_name(pair)} moved {found_bytes} bytes, not {right_bytes}")
    reasons += [f"{page.pair}: {page.place.says}" for page in pages if page.place.cause == "unlike"]
    reasons += [_reason(pair, one) for pair, found in wrong.items() for one in found[1:]]
    texts = [reason for number in sorted({one.asked.prompt for one in judged}) for reason in _texts(judged, number)]
    guilty += ["router"] if texts else []
    reasons = [*reasons, *texts][:MAX_REASONS]
    open_reasons = [*missing, *verdict.reasons]
    return Report(
        verdict="wrong" if guilty else "unjudged" if open_reasons or not judged else "right",
        guilty=list(dict.fromkeys(guilty)),
        reasons=[*reasons, *open_reasons],
        model=verdict.model,
        dtype=dtype,
        rounding=rounding,
        limit=limit,
        references=list(rounding),
        pages=pages,
        requests=len(judged),
        pairs=[
            _row(pair, found, refusals[pair], *moved.get((str(pair[0]), pair[1]), (0, 0)))
            for pair, found in _ordered(by_pair)
        ],
    )


def _ordered(by_pair: dict[Pair, list[Judged]]) -> list[tuple[Pair, list[Judged]]]:
    return sorted(by_pair.items(), key=lambda item: pair_name(item[0]))


def _texts(judged: Sequence[Judged], number: int) -> list[str]:
    return unlike_texts([one.asked for one in judged if one.asked.prompt == number])


def _reason(pair: Pair, one: Judged) -> str:
    served = one.served
    cached = f", {served.cached_tokens} tokens cached" if served.cached_tokens else ""
    what = f"{one.kind}, prompt of {served.prompt_tokens} tokens{cached}"
    return f"{pair_name(pair)}: request {one.asked.request_id} ({what}): {one.judgement.says}"


def _row(pair: Pair, found: Sequence[Judged], refused: int, kv_bytes: int, expected_bytes: int) -> PairParity:
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
        damaged=sum(one.damage is not None for one in found),
        sums_compared=sum(num_compared(one.served) for one in found),
        refused=refused,
    )


def show(report: Report, console: Console) -> None:
    table = Table(title=f"{report.model} ({report.dtype}) against {' and '.join(report.references) or 'nothing'}")
    columns = ("pair", "same", "near-tie", "wrong", "from cache", "bytes moved", "formula", "checksums", "damaged")
    for name in (*columns, "logprobs differ by"):
        table.add_column(name, justify="left" if name == "pair" else "right")
    for pair in report.pairs:
        counts = [pair.same, pair.near_ties, pair.wrong, pair.cached, pair.kv_bytes, pair.expected_bytes]
        counts += [pair.sums_compared, pair.damaged + pair.refused]
        table.add_row(pair_name((pair.prefill, pair.decode)), *map(str, counts), f"{pair.largest_difference:.6f}")
    console.print(table)
    for name, each in report.rounding.items():
        console.print(f"the engine's own logprobs differ from {name} by up to {each.noise:.2g}", markup=False)
    console.print(f"allowed in the cluster's answers: {report.limit:.2g}", markup=False)
    for reason in report.reasons:
        console.print(reason, markup=False, soft_wrap=True)
    if report.verdict == "right":
        console.print(f"right: {report.requests} answers over {len(report.pairs)} pairs are those of one engine")
    elif report.verdict == "wrong":
        console.print(f"WRONG: {', '.join(report.guilty)}", markup=False)
    else:
        console.print("could not be judged")
