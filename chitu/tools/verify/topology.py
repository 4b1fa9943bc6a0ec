"""Check that every P, every D and every pair of a running cluster takes part, and moves the right bytes.

Pure: `judge` takes cluster snapshots around some requests, and their results. Used by `chitu verify` and by
`test/verify_xpyd_topology.py`.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from chitu.errors import Integrity
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.protocol import KVLayout, logprob_limit
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.tools.verify.parity import damage_of, pair_name
from chitu.tools.verify.probe import CheckedRequest, Pair, Served

MIN_ROUNDS = 2


class PairReport(msgspec.Struct, frozen=True):
    prefill: str
    decode: str
    requests: int
    prompt_tokens: int
    kv_bytes: int
    """Bytes that P moved into D's memory, over all its requests; `expected_bytes` is the formula's result."""
    expected_bytes: int
    tokens_equal: bool
    """Whether its answers equal those of the other pairs to the same prompts, up to near-ties of two tokens."""
    ttft_ms: float
    """Median time from the dispatch to the first token, on the router."""


class TopologyVerdict(msgspec.Struct, frozen=True):
    ok: bool
    reasons: list[str]
    """Reasons of a failure; empty if ok."""
    model: str
    prompts: int
    requests: int
    instances: dict[str, int]
    """Number of requests by instance of the topology."""
    pairs: list[PairReport]
    """All pairs of the topology, hit or not."""


def fakes(cluster: ClusterSnapshot) -> list[str]:
    """Return the names of the instances that compute no model (`chitu serve --fake`)."""
    return [each.name for each in cluster.instances if each.layout is not None and each.layout.is_fake]


def expected_bytes(prompt_tokens: int, layout: KVLayout) -> int:
    """Return the bytes that a prompt moves to a D of this layout: whole pages of K and V of all layers, and one logits
    row.

    Each rank of D gets the KV heads that it holds. If there are fewer heads than ranks, several ranks hold the same
    head, and each gets its own copy.
    """
    pages = -(-prompt_tokens // layout.page_size)
    return pages * layout.tp_size * layout.bytes_per_page + aux_row_bytes(layout.aux_numbers)


def prefilled_tokens(served: Served) -> int:
    """Return the tokens that P prefilled: the prompt, and the output of an earlier attempt whose instance was lost."""
    return served.prompt_tokens + served.continued_tokens


def bytes_of(served: Served, layout: KVLayout) -> int:
    """Return the bytes that its last attempt moves. A single token needs only the logits row, no KV."""
    is_row_alone = served.output_tokens - served.continued_tokens == 1
    return expected_bytes(0 if is_row_alone else prefilled_tokens(served), layout)


def pairs_among(instances: Sequence[InstanceSnapshot]) -> list[tuple[str, str]]:
    """Return the pairs of P and D among instances that the router may choose: within one revision, if any is whole."""
    prefills, decodes = ([one for one in instances if one.role == role] for role in ("prefill", "decode"))
    pairs = list(itertools.product(prefills, decodes))
    within = [(p, d) for p, d in pairs if p.revision == d.revision or not (p.revision and d.revision)]
    return [(p.name, d.name) for p, d in within or pairs]


def refused_pairs(failed: Sequence[CheckedRequest], after: ClusterSnapshot) -> list[Pair]:
    """Return the pairs of the attempts that failed requests made and whose D rejected P's data, from the router's
    own records of them."""
    ids = {one.request_id for one in failed}
    return [
        (record.prefill, record.decode)
        for record in after.requests
        if record.request_id in ids and record.error == Integrity.code
    ]


def judge(
    before: ClusterSnapshot, after: ClusterSnapshot, asked: Sequence[CheckedRequest], *, compares: bool = True
) -> TopologyVerdict:
    """Judge requests between two snapshots of the cluster. Pure. `compares` needs greedy requests: then their
    tokens, logprobs and checksums are judged, too, as far as the answers have them. What repeated answers of one pair
    differ by, with the same tokens, is rounding (`logprob_limit`)."""
    layouts = {i.name: i.layout for i in (*after.instances, *before.instances) if i.layout is not None}
    status = {i.name: i.status for i in before.instances}
    status |= {i.name: i.status for i in after.instances if i.status != "up"}
    names = {role: [i.name for i in before.instances if i.role == role] for role in ("prefill", "decode")}
    done = [one for one in asked if not one.error and one.served is not None]
    noise, apart = apart_by_pairs(done)
    dtype = next((layout.dtype for layout in layouts.values()), "float32")
    limit = logprob_limit(noise, dtype)
    pairs = [
        _pair_report(pair, [one for one in done if one.pair == pair], _usual(done), layouts, limit)
        for pair in pairs_among(before.instances)
    ]
    counts = Counter({name: 0 for name in (*names["prefill"], *names["decode"])})
    for report in pairs:
        counts[report.prefill] += report.requests
        counts[report.decode] += report.requests
    reasons = [f"{name} is {status[name]}" for name in counts if status[name] != "up"]
    reasons += [f"{name} is fake: it computes no model" for name in fakes(after)]
    reasons += [f"{name} got no request" for name, count in counts.items() if not count and status[name] == "up"]
    missed = [r for r in pairs if not r.requests and counts[r.prefill] and counts[r.decode]]
    reasons += [f"no request went over the pair {r.prefill}-{r.decode}" for r in missed]
    reasons += _request_reasons(asked, layouts)
    reasons += [
        f"{r.prefill}-{r.decode} gave other tokens than other pairs did to the same prompt"
        for r in pairs
        if compares and not r.tokens_equal
    ]
    if compares:
        reasons += _damage_reasons(done, layouts, refused_pairs([one for one in asked if one.error], after))
        reasons += [
            f"{pair_name(one)} and {pair_name(other)} differ by {difference:.2g} in logprobs of the same tokens,"
            f" where rounding explains {limit:.2g}"
            for (one, other), difference in apart.items()
            if not difference <= limit
        ]
    return TopologyVerdict(
        ok=not reasons,
        reasons=reasons,
        model=before.model,
        prompts=len({one.prompt for one in asked}),
        requests=len(asked),
        instances=dict(counts),
        pairs=pairs,
    )


def apart_by_pairs(done: Sequence[CheckedRequest]) -> tuple[float, dict[tuple[Pair, Pair], float]]:
    """Return the largest difference (nats) of two logprobs of the same tokens in two answers of one pair, and by two
    pairs the same of one answer of each: the least of those, since one that other requests disturbed proves nothing."""
    groups: dict[tuple[int, tuple[int, ...]], dict[Pair, list[tuple[float, ...]]]] = defaultdict(dict)
    for one in done:
        if one.pair is not None and one.logprobs:
            groups[one.prompt, one.tokens].setdefault(one.pair, []).append(one.logprobs)
    noise, apart = 0.0, dict[tuple[Pair, Pair], float]()
    for by_pair in groups.values():
        for each in by_pair.values():
            noise = max([noise, *itertools.starmap(_largest, itertools.combinations(each, 2))])
        for pairs in itertools.combinations(sorted(by_pair, key=str), 2):
            least = min(itertools.starmap(_largest, itertools.product(*map(by_pair.__getitem__, pairs))))
            apart[pairs] = max(least, apart.get(pairs, 0.0))
    return noise, apart


def _largest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))


def _usual(done: Sequence[CheckedRequest]) -> dict[int, CheckedRequest]:
    """Return by prompt an answer with the most frequent tokens."""
    answers: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for one in done:
        answers[one.prompt][one.tokens] += 1
    usual = {prompt: tokens.most_common(1)[0][0] for prompt, tokens in answers.items()}
    return {one.prompt: one for one in reversed(done) if one.tokens == usual[one.prompt]}


def _is_alike(one: CheckedRequest, usual: CheckedRequest, limit: float) -> bool:
    """Return whether two greedy answers are equal up to a near-tie, behind which all tokens may differ."""
    if one.tokens == usual.tokens:
        return True
    pairs = enumerate(zip(one.tokens, usual.tokens, strict=False))
    place = next((place for place, (mine, other) in pairs if mine != other), None)
    if place is None or not one.logprobs or not usual.logprobs:
        return False
    return abs(one.logprobs[place] - usual.logprobs[place]) <= limit


def _damage_reasons(
    done: Sequence[CheckedRequest], layouts: dict[str, KVLayout], refused: Sequence[Pair]
) -> Iterator[str]:
    for one in done:
        assert one.served is not None and one.pair is not None
        damage = damage_of(one.served, layouts[one.served.decode])
        if damage is not None:
            yield f"request {one.request_id} over {pair_name(one.pair)}: {damage.says}"
    counts = Counter([*refused, *(pair for one in done if one.served is not None for pair in one.served.refused)])
    for pair, count in counts.items():
        yield f"{pair_name(pair)}: D rejected {count} transfers: the data was damaged (integrity)"


def _pair_report(
    pair: tuple[str, str],
    asked: Sequence[CheckedRequest],
    usual: dict[int, CheckedRequest],
    layouts: dict[str, KVLayout],
    limit: float,
) -> PairReport:
    done = [(one, one.served) for one in asked if one.served is not None]
    return PairReport(
        prefill=pair[0],
        decode=pair[1],
        requests=len(done),
        prompt_tokens=sum(prefilled_tokens(served) for _, served in done),
        kv_bytes=sum(served.kv_bytes or 0 for _, served in done),
        expected_bytes=sum(bytes_of(served, layouts[pair[1]]) for _, served in done),
        tokens_equal=all(_is_alike(one, usual[one.prompt], limit) for one, _ in done),
        ttft_ms=round(1e3 * statistics.median(served.ttft_s for _, served in done), 1) if done else 0.0,
    )


def _request_reasons(asked: Sequence[CheckedRequest], layouts: dict[str, KVLayout]) -> list[str]:
    """Return the faults of single requests, each kind once with its count."""
    reasons: Counter[str] = Counter(f"failed: {one.error}" for one in asked if one.error)
    for one in asked:
        served = one.served
        if one.error or served is None:
            continue
        if served.prefill is None:
            reasons["served by a unified instance, not by a pair"] += 1
            continue
        right = bytes_of(served, layouts[served.decode])
        if served.kv_bytes != right:
            pair = f"{served.prefill}-{served.decode}"
            reasons[
                f"of {prefilled_tokens(served)} prompt tokens over {pair} moved {served.kv_bytes} bytes, not {right}"
            ] += 1
        if not one.tokens or len(one.tokens) != served.output_tokens:
            reasons[f"got {len(one.tokens)} tokens, but the router counted {served.output_tokens}"] += 1
    lines = [f"{count} of {len(asked)} requests {reason}" for reason, count in reasons.items()]
    twice = [name for name, count in Counter(one.request_id for one in asked if one.request_id).items() if count > 1]
    return lines + [f"the request id {name} was given more than once" for name in twice]
