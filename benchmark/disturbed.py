"""Delay of other clients' streams by one client's large request: `python -m benchmark.disturbed [--json-dir DIR]`.

Starts the real router and one fake worker process (P0 and D0) whose tokens encode their emission time, and streams
`--streams` answers at one token each `--step-ms`. Meanwhile one client sends, one after the other, requests that are
large to read (400 prompts in a body of 12 MB, a prompt of 100,000 tokens, as many ids, a long chat, texts to count),
large to answer (an echo, 128 choices, logprobs), or that have schemas costly to compile. Measured is the age, from
emission to the client, of the stream tokens that arrive while that client waits for its answer.

Router, worker and clients share the machine with whatever else runs, so an age includes OS scheduling. A row shows the
calmest of several tries, since the cost of a request is in each of them; the last column has the worst p99.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import uvloop
from support.fake_worker import INSTANT_S, INSTANTS
from support.router_process import RouterUnderTest

from benchmark.router import VOCAB_SIZE, WORDS
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.make_model import make_model

MAX_BODY_BYTES = 16 << 20
MAX_LEN = 1 << 17
SETTLE_S = 5.0
"""Time to wait until all streams run."""
_IDS = re.compile(rb'"token_ids":\[([\d,]+)\]')


class Stream(asyncio.Protocol):
    """A stream that runs all the time and appends (arrival, age) of each token to `ages`, in seconds."""

    def __init__(self, request: bytes, ages: list[tuple[float, float]]) -> None:
        self._request = request
        self._ages = ages
        self._rest = b""
        self._emitted: int | None = None
        """Emission time of the last token, in instants."""
        self.failure = ""

    def begin_anew(self) -> None:
        """Take the next token as younger than one period."""
        self._emitted = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n\n")
        for line in lines:
            found = _IDS.search(line)
            for token in map(int, found[1].split(b",")) if found is not None else ():
                # Emissions are less than a period apart, so each token gives its distance from the one before.
                since = int(now_s / INSTANT_S) - len(INSTANTS) + 1 if self._emitted is None else self._emitted
                self._emitted = since + (token - INSTANTS[0] - since) % len(INSTANTS)
                self._ages.append((now_s, now_s - self._emitted * INSTANT_S))

    def connection_lost(self, error: Exception | None) -> None:
        self.failure = self._rest.decode(errors="replace") or "the router closed the connection"


def raw_request(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    fixed = {} if path == "/tokenize" else {"temperature": 0, "ignore_eos": True}
    raw = json.dumps({"model": "bench", **fixed, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def text_of(rng: random.Random, num_chars: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_chars // 3))[:num_chars]


def disturbances(tries: int) -> dict[str, list[bytes]]:
    """Return requests by name, one for each try. No two are equal, since the router caches results."""
    rng, one = random.Random(20), {"max_tokens": 1}
    made: dict[str, list[bytes]] = {}
    for number in range(tries):
        properties = {f"{name}{i}": {"type": "string"} for name in (f"a{number}", "b") for i in range(800)}
        bodies: dict[str, dict[str, object]] = {
            "400 prompts, 12 MB": {**one, "prompt": [text_of(rng, 30_000) for _ in range(400)]},
            "100k tokens": {**one, "prompt": text_of(rng, 380_000)},
            "100k token ids": {**one, "prompt": [rng.randrange(20, 500) for _ in range(100_000)]},
            "chat of 2000 messages": {
                **one,
                "messages": [{"role": "user", "content": text_of(rng, 180)} for _ in range(2000)],
            },
            "1 MB to count": {"prompt": text_of(rng, 1_000_000)},
            "echo of 100k tokens": {**one, "echo": True, "prompt": text_of(rng, 380_000)},
            "128 choices, logprobs": {"max_tokens": 16, "n": 128, "logprobs": 20, "prompt": text_of(rng, 400)},
            "128 choices": {"max_tokens": 16, "n": 128, "temperature": 1, "prompt": text_of(rng, 400)},
            "128 choices, streamed": {"max_tokens": 16, "n": 128, "stream": True, "prompt": text_of(rng, 400)},
            "costly schema": {
                **one,
                "ignore_eos": False,
                "prompt": "a",
                "guided_json": {"type": "object", "properties": properties},
            },
        }
        for name, body in bodies.items():
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            path = "/tokenize" if name.endswith("to count") else path
            made.setdefault(name, []).append(raw_request(body, path))
    return made


async def ask(port: int, request: bytes) -> int:
    """Send the request, read the whole answer and return its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    writer.write(request)
    await writer.drain()
    answer = await reader.read(-1)
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def measure(router: RouterUnderTest, num_streams: int, tries: int) -> list[tuple[object, ...]]:
    loop, port = asyncio.get_running_loop(), router.ports["port"]
    ages: list[tuple[float, float]] = []
    body = {"prompt": "the", "max_tokens": MAX_LEN // 2, "stream": True, "return_token_ids": True}
    streams = [
        (await loop.create_connection(lambda: Stream(raw_request(body), ages), "127.0.0.1", port))[1]
        for _ in range(num_streams)
    ]
    requests = disturbances(tries)
    await asyncio.sleep(SETTLE_S)
    for stream in streams:
        stream.begin_anew()
    ages.clear()
    rows: list[tuple[object, ...]] = []

    def quantiles(begin_s: float) -> tuple[object, ...]:
        """Return p50, p99 and maximum, in ms, of the ages of tokens that arrived since `begin_s`."""
        told = sorted(1e3 * age for arrived_s, age in ages if arrived_s >= begin_s)
        return (told[len(told) // 2], told[len(told) * 99 // 100], told[-1])

    for name, each in {"nothing": [b""] * tries, **requests}.items():
        found: list[tuple[object, ...]] = []
        for request in each:
            await asyncio.sleep(1.0)
            ages.clear()
            begin_s = time.monotonic()
            status = await ask(port, request) if request else await asyncio.sleep(2.0, "")
            waited_s = time.monotonic() - begin_s
            await asyncio.sleep(0.1)  # for late tokens
            found.append((status, waited_s, *quantiles(begin_s)))
        calmest = min(found, key=lambda one: cast(float, one[3]))
        rows.append((name, *calmest, max(cast(float, one[3]) for one in found)))
    failed = {stream.failure for stream in streams if stream.failure}
    if failed:
        raise RuntimeError(f"streams ended: {failed}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.disturbed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0, help="pace of the streams")
    parser.add_argument("--tries", type=int, default=3, help="of each disturbance")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", family="qwen3", vocab_size=VOCAB_SIZE)
        overrides = (f"dp_config.router.max_body_bytes={MAX_BODY_BYTES}", "model.served_name=bench")
        with RouterUnderTest(Path(folder), model, overrides) as router:
            options = ("--step-s", str(args.step_ms / 1e3), "--max-model-len", str(MAX_LEN), "--instants")
            router.start_worker("P0,D0", "--vocab-size", str(VOCAB_SIZE), *options)
            rows = uvloop.run(measure(router, args.streams, args.tries))
    columns = ("one client sends", "status", "s", "age p50 ms", "p99 ms", "max ms", "worst p99 ms")
    publish("disturbed", columns, rows, args.json_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
