"""Gain of the prefix cache in a conversation, and its cost if it never hits.

    python -m benchmark.conversations [--model MODEL]

A unified instance, 1P1D and 2P2D run at once, and 1P1D also with a disk cache that brings answers back from D to P.
Each round a conversation of eight turns grows to some 2000 tokens on each of them, one request at a time, streamed: the
prompt of a turn is that of the last one, the model's own answer, and new tokens. Every turn is sent twice, with the
cache and with `cache_prompt: false`, in alternating order. The result is the ratio of the two times to first token,
beside the tokens that P did not compute.

Then the cost of a cache that never hits. Prompts of 2048 random tokens go to a 1P1D with the cache and to one without,
in turn: CPU time of P and D together. The same goes through the step loop of an instance whose executor computes
nothing. Its cache is full, finds nothing, and evicts a page for each one that it inserts: CPU time of the thread for a
prompt, beside the time to first token of such a prompt on the unified instance. Last, an index of a million pages: CPU
time of lookup, insertion and eviction, for each 10,000 tokens of prompts of 100,000.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import httpx
import psutil  # type: ignore[import-untyped]

from benchmark.scheduler import IdleExecutor
from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.load import load_topology
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.errors import ChituError, Internal
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.launch.local import LocalCluster
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import RequestHead, SamplingParams, UnifiedRequest, pack_i32
from chitu.tools.bench.report import publish
from chitu.tools.bench.token_times import comparison, streamed_tokens, token_times_s
from chitu.types import new_room

FIRST_TURN_TOKENS, ANSWER_TOKENS, NEW_TOKENS, TURNS = 1024, 64, 80, 8
"""Sizes with which 93 to 96 % of each later turn repeats the last turn and its answer, 88 to 92 % the prompt alone."""
ANSWERS_COME_BACK = ["cache.host_bytes=400000000", "cache.load_timeout_s=10"]
INDEX_PAGES, INDEX_PROMPT_PAGES = 1_000_000, 6250
MISS_TOKENS, PAGE_SIZE, PROMPTS_AT_ONCE, POOL_PROMPTS = 2048, 16, 4, 8
CLUSTERS: dict[str, tuple[str, list[str]]] = {
    "unified": ("unified_local.yaml", []),
    "1P1D": ("pd_disagg_1p1d_local.yaml", []),
    "1P1D, answers come back": ("pd_disagg_1p1d_local.yaml", ANSWERS_COME_BACK),
    "2P2D, answers come back": (
        "pd_disagg_1p1d_local.yaml",
        [
            *ANSWERS_COME_BACK,
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


Row = tuple[str, int, int, int, float, float, float, float, int]


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(num_tokens)]


def measure_turns(settings: list[str], rounds: int) -> tuple[list[Row], float]:
    """Return a row for each cluster and turn, and the median seconds to the first token of an uncached prompt of
    MISS_TOKENS on a unified instance."""
    times: defaultdict[tuple[str, int], list[tuple[float, float, int]]] = defaultdict(list)
    with ExitStack() as stack:
        urls = {}
        for name, (topology, more) in CLUSTERS.items():
            if more:
                more = [*more, f"cache.disk.path={stack.enter_context(tempfile.TemporaryDirectory())}"]
            cluster = stack.enter_context(LocalCluster(load_topology(topology, [*settings, *more])))
            cluster.wait_ready()
            urls[name] = cluster.url
        for number in range(rounds + 1):
            rng = random.Random(number)
            opening = drawn(rng, FIRST_TURN_TOKENS)
            prompts = {name: opening for name in urls}
            for turn in range(1, TURNS + 1):
                new = drawn(rng, NEW_TOKENS)
                for name, url in urls.items():
                    pair = [0.0, 0.0]
                    for is_off in (number + turn) % 2, (number + turn + 1) % 2:
                        if is_off:
                            pair[is_off] = token_times_s(url, prompts[name], 1, **OFF)[0]
                        else:
                            (pair[is_off], *_), answer = streamed_tokens(url, prompts[name], ANSWER_TOKENS)
                    if number:  # the first round is the warm-up
                        times[name, turn].append((pair[0], pair[1], cached_tokens(url)))
                    prompts[name] = prompts[name] + answer + new
        rng = random.Random(-1)
        misses = [token_times_s(urls["unified"], drawn(rng, MISS_TOKENS), 2, **OFF)[0] for _ in range(rounds)]
    rows = []
    for (name, turn), found in times.items():
        cached_ms, computed_ms = (1e3 * statistics.median(each[is_off] for each in found) for is_off in (0, 1))
        ratios = sorted(computed / cached for cached, computed, _ in found)
        tokens = FIRST_TURN_TOKENS + (turn - 1) * (ANSWER_TOKENS + NEW_TOKENS)
        hit = round(statistics.median(hit for _, _, hit in found))
        rows.append((name, turn, tokens, hit, cached_ms, computed_ms, statistics.median(ratios), ratios[0], len(found)))
    return rows, statistics.median(misses)


def cached_tokens(url: str) -> int:
    """Return the cached tokens of that one of the last two requests that may use the cache."""
    requests = httpx.get(f"{url}/cluster", timeout=10.0, trust_env=False).json()["requests"]
    return max(request["cached_tokens"] or 0 for request in requests[-2:])


def measure_missed_requests(settings: list[str], rounds: int) -> list[tuple[float, float]]:
    """Return CPU seconds of P and D for prompts that no cache holds, as pairs (with the cache, without)."""
    rng, pairs = random.Random(1), []
    with ExitStack() as stack:
        clusters = []
        for is_cached in ("true", "false"):
            more = [*settings, f"cache.prefix_cache={is_cached}"]
            clusters.append(stack.enter_context(LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", more))))
        for cluster in clusters:
            cluster.wait_ready()
        for number in range(rounds + 6):  # the first rounds fill the pool
            seconds = [0.0, 0.0]
            for index in (number % 2, 1 - number % 2):
                cluster = clusters[index]
                start_s = cpu_seconds(cluster)
                token_times_s(cluster.url, drawn(rng, MISS_TOKENS), 2)
                seconds[index] = cpu_seconds(cluster) - start_s
            if number >= 6:
                pairs.append((seconds[0], seconds[1]))
    return pairs


def cpu_seconds(cluster: LocalCluster) -> float:
    times = [psutil.Process(cluster.pid(name)).cpu_times() for name in ("P0", "D0")]
    return float(sum(each.user + each.system for each in times))


class StepLoop:
    """A unified instance that computes nothing."""

    def __init__(self, is_cached: bool) -> None:
        self._executor = IdleExecutor(PROMPTS_AT_ONCE, MISS_TOKENS + 1)
        num_pages = POOL_PROMPTS * MISS_TOKENS // PAGE_SIZE
        self.cache = PagedKVCacheManager(num_pages, PAGE_SIZE, b"model" if is_cached else None)
        core = InstanceCore(
            SchedulerSettings(SchedulerConfig(max_running_requests=PROMPTS_AT_ONCE), DeadlineConfig()),
            LoadedEngine(self._executor, self.cache),
            TokenManager(1, lambda frame: True),
            _refuse,
            RealClock(),
        )
        self._scheduler = PDScheduler(core, DecodeRole(core))

    def cpu_s(self, prompts: list[bytes]) -> float:
        """Return the CPU seconds of one prompt, including its one output token."""
        start_s, computed_s = time.thread_time(), self._executor.cpu_s
        for prompt in prompts:
            self._scheduler.submit(
                UnifiedRequest(RequestHead(new_room(), "r", prompt), SamplingParams(1, ignore_eos=True))
            )
        while not self._scheduler.is_idle:
            self._scheduler.step()
        return (time.thread_time() - start_s - (self._executor.cpu_s - computed_s)) / len(prompts)


def _refuse(room: bytes, error: ChituError) -> None:
    raise Internal(f"a unified scheduler reported a failure: {error}")


def measure_misses(rounds: int) -> tuple[float, float]:
    """Return the median CPU seconds of a prompt, with the cache and without."""
    rng = random.Random(0)
    loops = {True: StepLoop(True), False: StepLoop(False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        prompts = [pack_i32(drawn(rng, MISS_TOKENS)) for _ in range(PROMPTS_AT_ONCE)]
        for is_cached, loop in loops.items():
            seconds[is_cached].append(loop.cpu_s(prompts))
    if loops[True].cache.hit_tokens or not loops[True].cache.evictions:
        raise RuntimeError("the cache should have been full and never hit")
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def measure_index() -> tuple[float, float, float]:
    """Return median ms for each 10,000 tokens: keys and lookup, insertion, eviction for new pages."""
    num_prompts = INDEX_PAGES // INDEX_PROMPT_PAGES
    num_tokens = INDEX_PROMPT_PAGES * PAGE_SIZE
    cache, rng = PagedKVCacheManager(INDEX_PAGES, PAGE_SIZE, b"model"), random.Random(0)
    prompts = [rng.randbytes(4 * num_tokens) for _ in range(num_prompts)]
    found, taken_in, given_up = list[float](), list[float](), list[float]()
    for prompt in prompts:
        room = new_room()
        cache.reserve(room, num_tokens)
        keys = cache.page_keys("")
        taken_in.append(cpu_s(partial(cache.commit, room, keys, prompt, num_tokens)))
        cache.remove_task(room)
    for prompt in prompts:
        room = new_room()
        keys = cache.page_keys("")
        found.append(cpu_s(partial(cache.begin, room, keys, prompt + bytes(4))))
        cache.remove_task(room)
    if cache.hit_tokens != num_prompts * num_tokens:
        raise RuntimeError("the cache should have held every prompt")
    for _ in prompts:
        given_up.append(cpu_s(partial(cache.reserve, new_room(), num_tokens)))
    found_ms, taken_in_ms, given_up_ms = (
        statistics.median(each) * 1e3 / (num_tokens / 10_000) for each in (found, taken_in, given_up)
    )
    return found_ms, taken_in_ms, given_up_ms


def cpu_s(call: Callable[[], object]) -> float:
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def main() -> None:
    with comparison((__doc__ or "").partition("\n")[0], rounds=9) as compared:
        settings = [*compared.settings, "cache.num_pages=600"]
        rows, first_s = measure_turns(settings, compared.rounds)
        columns = ("cluster", "turn", "tokens", "cached", "cached ms", "computed ms", "ratio", "least", "rounds")
        publish("conversations", columns, rows, compared.json_dir)
        pairs = measure_missed_requests(settings, 4 * compared.rounds)
    on_s, off_s = (statistics.median(pair[index] for pair in pairs) for index in (0, 1))
    ratios = sorted(on / off for on, off in pairs)
    names = ("CPU s/request with", "without", "median ratio", "quartiles", "rounds")
    spread = f"{ratios[len(ratios) // 4]:.3f}, {ratios[len(ratios) * 3 // 4]:.3f}"
    missed = (on_s, off_s, statistics.median(ratios), spread, len(pairs))
    publish("cache_missed_requests", names, [missed], compared.json_dir)
    rounds = 20 * compared.rounds
    with_s, without_s = measure_misses(rounds)
    extra = (with_s - without_s) / first_s
    names = ("us/prompt with", "us/prompt without", "first token ms", "extra / first token", "rounds")
    publish("cache_index", ("find ms/10k tokens", "take in", "evict"), [measure_index()], compared.json_dir)
    publish("cache_misses", names, [(with_s * 1e6, without_s * 1e6, first_s * 1e3, extra, rounds)], compared.json_dir)


if __name__ == "__main__":
    main()
