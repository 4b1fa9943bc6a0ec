"""Prefix cache hits on a trace of real conversations: `python -m benchmark.prefix TRACE` (Mooncake's JSONL).

A trace has the time, the lengths and the chain of block hashes of every request. They become prompts (a block is 512
tokens, all equal to its hash), which go through the code that serves: `Selector` with each routing policy, and a
`PagedKVCacheManager` for each P with pages of a block. Only time is simulated: a P computes one prompt after the other
at a fixed token rate, and cached tokens take no time. At that rate all P are busy for a given share of the time without
a cache.

Two upper bounds for the hits are printed beside it: an unbounded cache, and the optimum for the same memory (Belady's
rule: evict the block whose next use is farthest, or never insert it), as one cache for all P.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import statistics
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from benchmark.routing import NO_OUTBOX
from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import PolicyName, RouterConfig
from chitu.protocol import ClusterView, InstanceInfo, KVLayout
from chitu.router.candidates import instance_key
from chitu.router.members import Members
from chitu.router.ways import Selector
from chitu.types import Role

BLOCK_TOKENS = 512
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LAYOUT = KVLayout.uniform("trace", 1, 1, 16, BLOCK_TOKENS, "float32", 1 << 30)


@dataclass(frozen=True, slots=True)
class Ask:
    arrival_s: float
    prompt: bytes
    """Token ids, int32 LE."""
    blocks: tuple[int, ...]
    """Hashes of the blocks that a cache could hit; the last token is always computed."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) // 4


def read_trace(path: Path) -> list[Ask]:
    asks = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        length, hashes = record["input_length"], record["hash_ids"]
        tokens = array("i", [h for h in hashes for _ in range(BLOCK_TOKENS)])[:length]
        asks.append(Ask(record["timestamp"] / 1000, tokens.tobytes(), tuple(hashes[: (length - 1) // BLOCK_TOKENS])))
    return asks


@dataclass(slots=True)
class Prefill:
    """One simulated P: its cache and its queue."""

    cache: PagedKVCacheManager
    waiting: deque[int] = field(default_factory=deque)
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_share: float
    """Cached share of all prompt tokens."""
    mean_s: float
    p99_s: float
    """99th percentile of the time from arrival to the last prompt token; `mean_s` is the mean."""


def replay(asks: Sequence[Ask], policy: PolicyName, num_prefills: int, num_pages: int, tokens_s: float) -> Outcome:
    """Replay the trace. Each P has `num_pages` pages (0: no cache) and computes `tokens_s` tokens a second."""
    config = RouterConfig(prefill_policy=policy)
    members = Members(config, NO_OUTBOX)
    selector = Selector(config, members)
    ranks = [(Role.PREFILL, rank) for rank in range(num_prefills)] + [(Role.DECODE, 0)]
    view = ClusterView(1, 1, tuple(InstanceInfo(role, rank, 1, "h", 1, 2, LAYOUT, 1 << 30) for role, rank in ranks))
    for info in view.instances:
        members.add(info)
    members.on_view(view)
    fingerprint = b"trace" if num_pages else None
    size = num_pages or max(ask.num_tokens for ask in asks) // BLOCK_TOKENS + 1
    prefills = [Prefill(PagedKVCacheManager(size, BLOCK_TOKENS, fingerprint=fingerprint)) for _ in range(num_prefills)]
    keys = [instance_key(info) for info in view.instances]
    order = itertools.count()
    ends: list[tuple[float, int, int, int]] = []
    taken: list[float] = [0.0] * len(asks)
    new_tokens = [0] * len(asks)
    hits = 0

    def start(rank: int, now_s: float) -> None:
        nonlocal hits
        prefill = prefills[rank]
        if prefill.is_busy or not prefill.waiting:
            return
        prefill.is_busy = True
        number = prefill.waiting.popleft()
        ask, cache, room = asks[number], prefill.cache, number.to_bytes(16)
        cached = cache.begin(room, cache.page_keys(""), ask.prompt)
        cache.reserve(room, ask.num_tokens)
        hits += cached
        heapq.heappush(ends, (now_s + (ask.num_tokens - cached) / tokens_s, next(order), rank, number))

    def end(now_s: float, rank: int, number: int) -> None:
        prefill, ask, room = prefills[rank], asks[number], number.to_bytes(16)
        prefill.cache.commit(room, prefill.cache.page_keys(""), ask.prompt, ask.num_tokens)
        prefill.cache.remove_task(room)
        prefill.is_busy = False
        taken[number] = now_s - ask.arrival_s
        members[keys[rank]].load.on_begun(new_tokens[number])
        start(rank, now_s)

    for number, ask in enumerate(asks):
        while ends and ends[0][0] <= ask.arrival_s:
            now_s, _, rank, done = heapq.heappop(ends)
            end(now_s, rank, done)
        way = selector.select(ask.prompt)
        assert way.prefill is not None
        rank, new_tokens[number] = way.prefill.engine_rank, way.new_tokens
        members[keys[rank]].load.on_sent(way.new_tokens, ask.arrival_s)
        prefills[rank].waiting.append(number)
        start(rank, ask.arrival_s)
    while ends:
        now_s, _, rank, done = heapq.heappop(ends)
        end(now_s, rank, done)
    for prefill in prefills:
        prefill.cache.check_idle()
    return Outcome(
        hits / sum(ask.num_tokens for ask in asks), statistics.fmean(taken), sorted(taken)[len(taken) * 99 // 100]
    )


def best_hits(asks: Sequence[Ask], num_pages: float) -> float:
    """Return the share of all prompt tokens that one cache of `num_pages` pages hits by Belady's rule."""
    wanted: defaultdict[int, deque[int]] = defaultdict(deque)
    for number, ask in enumerate(asks):
        for block in ask.blocks:
            wanted[block].append(number)
    kept: dict[int, float] = {}
    farthest: list[tuple[float, int]] = []
    hits = 0
    for ask in asks:
        is_chain = True
        for block in ask.blocks:
            is_chain = is_chain and block in kept
            hits += is_chain
            wanted[block].popleft()
            again = wanted[block][0] if wanted[block] else math.inf
            kept[block] = again
            heapq.heappush(farthest, (-again, block))
        while len(kept) > num_pages:
            again, block = heapq.heappop(farthest)
            if kept.get(block) == -again:
                del kept[block]
    return hits * BLOCK_TOKENS / sum(ask.num_tokens for ask in asks)


def rows(asks: Sequence[Ask], sizes: Sequence[int], pages: Sequence[int], busy: float) -> Iterator[str]:
    span_s = asks[-1].arrival_s - asks[0].arrival_s
    total = sum(ask.num_tokens for ask in asks)
    unbounded = best_hits(asks, math.inf)
    yield f"{len(asks)} requests, {total:,} prompt tokens in {span_s:.0f} s; {unbounded:.1%} of them could be found"
    for count, num_pages in itertools.product(sizes, pages):
        tokens_s = total / span_s / count / busy
        best = best_hits(asks, count * num_pages)
        plain = replay(asks, "least_loaded", count, 0, tokens_s)
        yield (
            f"\n{count} P with {num_pages * BLOCK_TOKENS:,} tokens of cache each, {tokens_s:,.0f} tokens/s each; "
            f"best possible {best:.1%}; no cache: mean {plain.mean_s:.2f} s, p99 {plain.p99_s:.1f} s"
        )
        for policy in POLICIES:
            got = replay(asks, policy, count, num_pages, tokens_s)
            found = f"{got.hit_share:6.1%} ({got.hit_share / best if best else 1.0:4.0%} of it)"
            yield f"  {policy:16} {found}  mean {got.mean_s:6.2f} s  p99 {got.p99_s:6.1f} s"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--prefills", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--pages", type=int, nargs="+", default=[1000, 4000], help="of 512 tokens, of each P")
    parser.add_argument(
        "--busy", type=float, default=0.7, help="share of the time in which all P compute, without cache"
    )
    args = parser.parse_args(argv)
    for row in rows(read_trace(args.trace), args.prefills, args.pages, args.busy):
        print(row, flush=True)


if __name__ == "__main__":
    main()
