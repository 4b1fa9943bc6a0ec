"""Cost of `verify_kv`: the checksum beside memcpy and CRC-32, and 1P1D with it off, sampled and on all KV.

    python -m benchmark.verify_kv [--model MODEL]

First one thread over the same scattered pages (K and V of all layers): a copy of each page with one call, CRC-32 of
each page with one call, and the checksum, in turn; CPU time of the thread, so that other work does not count. Then
three clusters that differ only in `verify_kv` get streamed requests of 2048 tokens in turn, one at a time. KV is
verified between the first and the second token, which has to wait for it.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from chitu.config.load import load_topology
from chitu.kv_cache.checksum import page_sums_of
from chitu.kv_cache.pool import KVPool
from chitu.launch.local import LocalCluster
from chitu.protocol import KVLayout
from chitu.tools.bench.report import publish
from chitu.tools.bench.token_times import comparison, token_times_s

LAYOUT = KVLayout.uniform(
    "bench", num_layers=28, num_kv_heads=4, head_dim=128, page_size=16, dtype="bfloat16", vocab_size=1000
)
"""KV layout of a Qwen2.5-7B: 16 KiB a page and region, 117 MB for 2048 tokens."""
PROMPT_TOKENS = 2048
MODES = ("off", "sample", "all")


class Speed(msgspec.Struct, frozen=True):
    what: str
    gb_per_s: float
    """Median over the rounds."""
    fraction_of_memcpy: float
    """Median over the rounds of the ratio to memcpy."""
    rounds: int


def measure_sums(rounds: int) -> list[Speed]:
    num_pages = PROMPT_TOKENS // LAYOUT.page_size
    pool, other = (KVPool(LAYOUT, 2 * num_pages, 1) for _ in range(2))
    for each in (pool, other):
        ctypes.memset(each.arena_base, 1, each.arena_bytes)
    pages = random.Random(0).sample(range(2 * num_pages), num_pages)
    page_bytes = pool.page_bytes[0]
    offsets = [base - pool.arena_base + page * page_bytes for base in pool.region_bases for page in pages]
    views = [memoryview((ctypes.c_char * page_bytes).from_address(pool.arena_base + at)) for at in offsets]
    page_sums, layers = page_sums_of(pool, 0), range(LAYOUT.num_layers)

    def copy() -> None:
        for at in offsets:
            ctypes.memmove(other.arena_base + at, pool.arena_base + at, page_bytes)

    def crc() -> None:
        for view in views:
            zlib.crc32(view)

    calls: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "CRC-32": crc,
        "checksum": lambda: page_sums.sums(layers, pages),
    }
    seconds = _in_turn(calls, rounds)
    nbytes = len(offsets) * page_bytes
    return [
        Speed(
            name,
            nbytes / statistics.median(own) / 1e9,
            statistics.median(reference / each for reference, each in zip(seconds["memcpy"], own, strict=True)),
            rounds,
        )
        for name, own in seconds.items()
    ]


def _in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started_s = time.thread_time()
            call()
            seconds[name].append(time.thread_time() - started_s)
    return seconds


class Times(msgspec.Struct, frozen=True):
    verify_kv: str
    first_token_ms: float
    second_token_ms: float
    """Median time from sending the request; `first_token_ms` likewise."""
    first_over_off: float
    second_over_off: float
    """Median over the rounds of the ratio to `off`; `first_over_off` likewise."""
    rounds: int


def measure_clusters(settings: list[str], rounds: int) -> list[Times]:
    rng = random.Random(1)
    times: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for mode in MODES:
            more = [*settings, f"dp_config.router.pd_disaggregation.verify_kv={mode}"]
            cluster = stack.enter_context(LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", more)))
            cluster.wait_ready()
            urls[mode] = cluster.url
        for number in range(rounds + 2):
            prompt = [rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)]
            for mode in MODES[number % 3 :] + MODES[: number % 3]:
                times[mode].append(token_times_s(urls[mode], prompt, 2))
    results = []
    for mode in MODES:
        own, off = times[mode][2:], times["off"][2:]  # the first rounds are the warm-up
        first_ms, second_ms = (1e3 * statistics.median(each[token] for each in own) for token in (0, 1))
        first, second = (
            statistics.median(mine[token] / theirs[token] for mine, theirs in zip(own, off, strict=True))
            for token in (0, 1)
        )
        results.append(Times(mode, first_ms, second_ms, first, second, rounds))
    return results


def main() -> None:
    with comparison((__doc__ or "").partition("\n")[0], rounds=21) as compared:
        times = measure_clusters([*compared.settings, "cache.num_pages=400"], compared.rounds)
    for name, results in (("verify_kv_sums", measure_sums(compared.rounds)), ("verify_kv", times)):
        columns = results[0].__struct_fields__
        publish(
            name, columns, [[getattr(result, column) for column in columns] for result in results], compared.json_dir
        )


if __name__ == "__main__":
    main()
