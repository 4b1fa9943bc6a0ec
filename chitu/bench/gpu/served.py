"""1P1D against an undivided instance, on one card: the first token, and the pauses of running streams while long
prompts arrive. Real clusters over HTTP, both up, asked in turn."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chitu.bench.gpu.card import Card, Row
from chitu.bench.token_times import token_times_s
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster

TTFT_AIM = 1.05
STREAM_PROMPT = 64
PROMPT_IDS = (10, 500)
"""Token ids of prompts: words, no special tokens."""


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
    rng = random.Random(length)
    times: dict[str, list[float]] = {unified_url: [], divided_url: []}
    for number in range(rounds + 2):
        prompt = [rng.randrange(*PROMPT_IDS) for _ in range(length)]
        for url in (unified_url, divided_url) if number % 2 else (divided_url, unified_url):
            times[url].append(token_times_s(url, prompt, 2)[0])
    alone, pair = times[unified_url][2:], times[divided_url][2:]  # the first rounds warm both up
    ratio = statistics.median(p / a for a, p in zip(alone, pair, strict=True))
    yield Row(f"first token, {length} tokens, unified", statistics.median(alone) * 1e3, "ms")
    what, measured = f"first token, {length} tokens, 1P1D", statistics.median(pair) * 1e3
    yield Row(what, measured, "ms", ratio, "unified", f"<= {TTFT_AIM}", ratio <= TTFT_AIM)


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
    """A running completion; `times_s`: when each event came."""

    times_s: list[float] = field(default_factory=list)
    error: str = ""


def quiet_and_busy(card: Card, url: str) -> dict[str, float]:
    """p99 of the pauses of running streams: alone for a while, then with long prompts one after another."""
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
        _wait_for_tokens(streams, 10 + (200 if card.is_gpu else 10))
        busy_s = time.perf_counter()
        for _ in range(card.sizes.long_prompts):
            token_times_s(url, [rng.randrange(*PROMPT_IDS) for _ in range(card.sizes.long_prompt)], 2)
        end_s = time.perf_counter()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return {"alone": _p99(streams, quiet_s, busy_s), "long prompts": _p99(streams, busy_s, end_s)}


def _wait_for_tokens(streams: list[Stream], count: int) -> None:
    while any(len(stream.times_s) < count for stream in streams):
        for stream in streams:
            if stream.error:
                raise RuntimeError(f"a stream ended too early: {stream.error}")
        time.sleep(0.01)


def _p99(streams: list[Stream], start_s: float, end_s: float) -> float:
    """Of the pauses that ended in this window."""
    gaps = sorted(
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times_s, stream.times_s[1:], strict=False)
        if start_s <= later <= end_s
    )
    if not gaps:
        raise RuntimeError("no stream had a token while the long prompts were computed")
    return gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]


def _follow(url: str, number: int, card: Card, stream: Stream, stop: threading.Event) -> None:
    """Note the time of every event until told to stop, then hang up."""
    host, port = url.removeprefix("http://").split(":")
    rng = random.Random(number)
    prompt = [rng.randrange(*PROMPT_IDS) for _ in range(min(STREAM_PROMPT, card.sizes.long_prompt // 4))]
    max_tokens = card.sizes.model.max_position_embeddings - len(prompt)
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        while not stop.is_set():
            line = response.readline()
            if not line.startswith(b"data: {") and line.strip():
                stream.error = line.decode(errors="replace").strip()
                return
            if not line:
                stream.error = "the connection was closed"
                return
            if line.startswith(b"data: "):
                stream.times_s.append(time.perf_counter())
    except (OSError, http.client.HTTPException) as error:
        stream.error = str(error)
    finally:
        connection.close()
