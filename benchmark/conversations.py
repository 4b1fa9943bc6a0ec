"""What the prefix cache is worth in a conversation, and what it costs where it never hits.

    python -m benchmark.conversations [--model DIR]

A unified instance, 1P1D and 2P2D (with `prefix_affinity` for P) are up at once. Each round a conversation of eight
turns grows to some 2000 tokens on all of them, one request at a time, streamed. Every turn is asked twice, with the
cache and with `cache_prompt: false`, in an order that changes; what counts is the ratio of the two first tokens. What
stands behind a prompt is drawn, not the model's answer, so that prompts alone are found again.

Then prompts of 2048 drawn tokens through the step loop of an instance whose executor computes nothing, with the cache
and without in turn: the cache is full, finds nothing, and gives up a page for each that it takes in. CPU time of the
thread for a prompt, beside the first token of such a prompt on the unified instance.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack

from benchmark.scheduler import IdleExecutor
from chitu.bench.report import publish
from chitu.bench.token_times import comparison, token_times_s
from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.load import load_topology
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.errors import ChituError, Internal
from chitu.instance.token_manager import TokenManager
from chitu.launch.local import LocalCluster
from chitu.pd_scheduler import PDScheduler, PDSchedulerParts
from chitu.protocol import SamplingParams, UnifiedRequest, pack_i32
from chitu.types import new_room

FIRST_TURN_TOKENS, NEW_TOKENS, TURNS = 1024, 144, 8
"""So 88 to 92 % of each later turn stands in the one before."""
MISS_TOKENS, PAGE_SIZE, PROMPTS_AT_ONCE, POOL_PROMPTS = 2048, 16, 4, 8
CLUSTERS: dict[str, tuple[str, list[str]]] = {
    "unified": ("unified_local.yaml", []),
    "1P1D": ("pd_disagg_1p1d_local.yaml", []),
    "2P2D": (
        "pd_disagg_1p1d_local.yaml",
        [
            "dp_config.router.prefill_policy=prefix_affinity",
            *(
                f"dp_config.router.{role}_schedulers.1.{setting}"
                for role in ("prefill", "decode")
                for setting in ("port=0", "devices=[cpu]")
            ),
        ],
    ),
}
OFF = {"cache_prompt": False}


Row = tuple[str, int, int, float, float, float, int]


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(num_tokens)]


def measure_turns(settings: list[str], rounds: int) -> tuple[list[Row], float]:
    """A row for each cluster and turn; the first token of an uncached prompt of MISS_TOKENS on a unified instance."""
    times: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        urls = {}
        for name, (topology, more) in CLUSTERS.items():
            cluster = stack.enter_context(LocalCluster(load_topology(topology, [*settings, *more])))
            cluster.wait_ready()
            urls[name] = cluster.url
        for number in range(rounds + 1):
            rng = random.Random(number)
            prompt = drawn(rng, FIRST_TURN_TOKENS)
            for turn in range(1, TURNS + 1):
                for name, url in urls.items():
                    pair = [0.0, 0.0]
                    for is_off in (number + turn) % 2, (number + turn + 1) % 2:
                        pair[is_off] = token_times_s(url, prompt, 2, **(OFF if is_off else {}))[0]
                    if number:  # the first round warms all of them up
                        times[name, turn].append((pair[0], pair[1]))
                prompt = prompt + drawn(rng, NEW_TOKENS)
        rng = random.Random(-1)
        misses = [token_times_s(urls["unified"], drawn(rng, MISS_TOKENS), 2, **OFF)[0] for _ in range(rounds)]
    rows = []
    for (name, turn), pairs in times.items():
        cached_ms, computed_ms = (1e3 * statistics.median(pair[is_off] for pair in pairs) for is_off in (0, 1))
        ratio = statistics.median(computed / cached for cached, computed in pairs)
        tokens = FIRST_TURN_TOKENS + (turn - 1) * NEW_TOKENS
        rows.append((name, turn, tokens, cached_ms, computed_ms, ratio, len(pairs)))
    return rows, statistics.median(misses)


class StepLoop:
    """A unified instance that computes nothing."""

    def __init__(self, is_cached: bool) -> None:
        self._executor = IdleExecutor(PROMPTS_AT_ONCE, MISS_TOKENS + 1)
        num_pages = POOL_PROMPTS * MISS_TOKENS // PAGE_SIZE
        self.cache = PagedKVCacheManager(num_pages, PAGE_SIZE, b"model" if is_cached else None)
        parts = PDSchedulerParts(
            config=SchedulerConfig(max_running_requests=PROMPTS_AT_ONCE),
            deadlines=DeadlineConfig(),
            executor=self._executor,
            cache=self.cache,
            tokens=TokenManager(1, lambda frame: True),
            report_failure=_refuse,
            clock=RealClock(),
        )
        self._scheduler = PDScheduler(parts)

    def cpu_s(self, prompts: list[bytes]) -> float:
        """Of one prompt, its one token included."""
        start_s, computed_s = time.thread_time(), self._executor.cpu_s
        for prompt in prompts:
            self._scheduler.submit(UnifiedRequest(new_room(), "r", prompt, SamplingParams(1, ignore_eos=True)))
        while not self._scheduler.is_idle:
            self._scheduler.step()
        return (time.thread_time() - start_s - (self._executor.cpu_s - computed_s)) / len(prompts)


def _refuse(room: bytes, error: ChituError) -> None:
    raise Internal(f"a unified scheduler reported a failure: {error}")


def measure_misses(rounds: int) -> tuple[float, float]:
    """Medians in seconds of a prompt, with the cache and without."""
    rng = random.Random(0)
    loops = {True: StepLoop(True), False: StepLoop(False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        prompts = [pack_i32(drawn(rng, MISS_TOKENS)) for _ in range(PROMPTS_AT_ONCE)]
        for is_cached, loop in loops.items():
            seconds[is_cached].append(loop.cpu_s(prompts))
    if loops[True].cache.hit_tokens or not loops[True].cache.evictions:
        raise RuntimeError("the cache was to miss, and to be full")
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def main() -> None:
    with comparison((__doc__ or "").partition("\n")[0], rounds=9) as compared:
        rows, first_s = measure_turns([*compared.settings, "cache.num_pages=600"], compared.rounds)
    columns = ("cluster", "turn", "tokens", "cached ms", "computed ms", "computed / cached", "rounds")
    publish("conversations", columns, rows, compared.json_dir)
    rounds = 20 * compared.rounds
    with_s, without_s = measure_misses(rounds)
    extra = (with_s - without_s) / first_s
    names = ("us/prompt with", "us/prompt without", "first token ms", "extra / first token", "rounds")
    publish("cache_misses", names, [(with_s * 1e6, without_s * 1e6, first_s * 1e3, extra, rounds)], compared.json_dir)


if __name__ == "__main__":
    main()
