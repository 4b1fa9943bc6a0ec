"""1P1D against a unified instance on one card: time to first token, and the pauses of running streams while long
prompts arrive. Both are real clusters, up at once and called over HTTP in turn.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.client import NETWORK_ERRORS, Server, events_of
from chitu.tools.bench.gpu.card import Card, Row
from chitu.tools.bench.token_times import token_times_s
from chitu.tools.bench.ttft import measure

TTFT_AIM = 1.05
STREAM_PROMPT = 64
PROMPT_IDS = (10, 500)
"""Range of token ids in prompts: words, no special tokens."""


def topology_overrides(card: Card, model: Path, topology: str) -> list[str]:
    device = f"[{card.device}]"
    sections = ("unified",) if topology == "unified_local.yaml" else ("prefill", "decode")
    transport = "cuda_ipc" if card.is_gpu else "shm"
    return [
        f"model.path={model}",
        "model.served_name=m",
        f"cache.num_pages={card.sizes.served_pages}",
        f"scheduler.max_running_requests={2 * card.sizes.streams}",
        "dp_config.router.port=0",
        f"dp_config.router.pd_disaggregation.transport={transport}",
        *(f"dp_config.router.{section}_schedulers.0.devices={device}" for section in sections),
    ]


def rows(card: Card, model: Path) -> Iterator[Row]:
    with ExitStack() as stack:
        clusters = {
            topology: stack.enter_context(
                LocalCluster(load_topology(topology, topology_overrides(card, model, topology)))
            )
            for topology in ("unified_local.yaml", "pd_disagg_1p1d_local.yaml")
        }
        for cluster in clusters.values():
            cluster.wait_ready(300)
        unified, divided = (cluster.url for cluster in clusters.values())
        for length in card.sizes.served_prompts:
            yield from _first_tokens(length, card.sizes.served_rounds, unified, divided)
        yield from _pauses(card, unified, divided)


def _first_tokens(length: int, rounds: int, unified_url: str, divided_url: str) -> Iterator[Row]:
    _, alone_ms, pair_ms, ratio, _ = measure(length, rounds, unified_url, divided_url)
    yield Row(f"first token, {length} tokens, unified", alone_ms, "ms")
    what = f"first token, {length} tokens, 1P1D"
    yield Row(what, pair_ms, "ms", ratio, "unified", f"<= {TTFT_AIM}", ratio <= TTFT_AIM)


def _pauses(card: Card, unified_url: str, divided_url: str) -> Iterator[Row]:
    found: dict[str, dict[str, float]] = {}
    for name, url in (("unified", unified_url), ("1P1D", divided_url)):
        found[name] = quiet_and_busy(card, url)
        for state, p99_s in found[name].items():
            yield Row(f"{card.sizes.streams} streams, {state}: p99 between tokens, {name}", p99_s * 1e3, "ms")
    ratio = found["1P1D"]["long prompts"] / found["unified"]["long prompts"]
    yield Row("p99 between tokens with long prompts, 1P1D", ratio, "x", ratio, "unified", "< 1", ratio < 1)


@dataclass(slots=True)
class Stream:
    """Streamed completions, one after another, with the arrival time of each token."""

    times_s: list[list[float]] = field(default_factory=list)
    """Arrival times, a list for each completion, since the stream's own prefill lies between two completions."""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.times_s))

    def pauses_s(self, start_s: float, end_s: float) -> list[float]:
        """Return the pauses between tokens of one completion that overlap a window of time."""
        pairs = [pair for times_s in self.times_s for pair in pairwise(times_s)]
        return [later - earlier for earlier, later in pairs if earlier < end_s and later > start_s]


def quiet_and_busy(card: Card, url: str) -> dict[str, float]:
    """Return the p99 pause of running streams: alone for a while, then with long prompts one after another."""
    streams = [Stream() for _ in range(card.sizes.streams)]
    stop = threading.Event()
    threads = [
        threading.Thread(target=_follow, args=(url, number, card, stream, stop))
        for number, stream in enumerate(streams)
    ]
    rng = random.Random(3)
    for thread in threads:
        thread.start()
    try:
        _wait_for_tokens(streams, 10)
        quiet_s = time.perf_counter()
        _wait_for_tokens(streams, 200 if card.is_gpu else 10)
        busy_s = time.perf_counter()
        num_sent = 0
        while num_sent < card.sizes.long_prompts or not _pauses_s(streams, busy_s):
            token_times_s(url, [rng.randrange(*PROMPT_IDS) for _ in range(card.sizes.long_prompt)], 2)
            num_sent += 1
            _check(streams)
        end_s = time.perf_counter()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return {"alone": _p99(streams, quiet_s, busy_s), "long prompts": _p99(streams, busy_s, end_s)}


def _wait_for_tokens(streams: list[Stream], count: int) -> None:
    """Wait until each stream has `count` more tokens than now."""
    wanted = [stream.num_tokens + count for stream in streams]
    while any(stream.num_tokens < number for stream, number in zip(streams, wanted, strict=True)):
        _check(streams)
        time.sleep(0.01)


def _check(streams: list[Stream]) -> None:
    for stream in streams:
        if stream.error:
            raise RuntimeError(f"a stream ended too early: {stream.error}")


def _pauses_s(streams: list[Stream], start_s: float, end_s: float = math.inf) -> list[float]:
    return [pause for stream in streams for pause in stream.pauses_s(start_s, end_s)]


def _p99(streams: list[Stream], start_s: float, end_s: float) -> float:
    pauses = sorted(_pauses_s(streams, start_s, end_s))
    return pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]


def _follow(url: str, number: int, card: Card, stream: Stream, stop: threading.Event) -> None:
    """Record the time of every token until `stop` is set, then close the connection."""
    rng = random.Random(number)
    prompt = [rng.randrange(*PROMPT_IDS) for _ in range(min(STREAM_PROMPT, card.sizes.long_prompt // 4))]
    max_tokens = card.sizes.model.max_position_embeddings - len(prompt)
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    raw = json.dumps({**body, "stream": True}).encode()
    try:
        with Server.at(url).connect(120) as connection:
            while not stop.is_set() and not stream.error:
                stream.times_s.append([])
                response = connection.send("POST", "/v1/completions", raw)
                stream.error = _read(response, stream.times_s[-1], stop)
    except NETWORK_ERRORS as error:
        stream.error = str(error)


def _read(response: http.client.HTTPResponse, times_s: list[float], stop: threading.Event) -> str:
    """Read one completion to its end, or until `stop` is set. Return what went wrong, or ""."""
    if response.status != 200:
        return response.read().decode(errors="replace").strip()
    for event in events_of(response):
        if stop.is_set():
            return ""
        if event == "[DONE]":
            response.read()
            return ""
        if event.startswith('{"error"'):
            return event
        times_s.append(time.perf_counter())
    return "the connection was closed"
