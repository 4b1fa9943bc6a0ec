"""CPU cost of a request and of a streamed token on the router: `python -m benchmark.router [--json-dir DIR]`.

`--beside CHECKOUT` measures this router's cost over that of another checkout: both run, and slices of load alternate
between them, since a machine drifts by more than the difference between two whole runs.

Starts the real router and one fake worker process (P0 and D0), sends completions over kept-alive connections from this
process, and reads the CPU time of all threads of the router from the kernel. The prompt (text) is tokenised, validated
and routed; the answer is detokenised. Rates are what this machine reached with load generator and workers beside the
router; CPU per request and per token are the router's alone.

Prompts are 400 characters of common English words, except one word in forty, which is random and so new to the router.
The tokenizer is trained for this benchmark (byte-level BPE, 8192 tokens), so that a token has about as many characters
as with a real model.

The decode instance of `--step-ms 0` emits as fast as it can: its batches hold one or two tokens, which is the worst
case (one message for each token). With a pause between steps a batch holds one token of every running request, as in a
real instance.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import uvloop
from support.router_process import RouterUnderTest, cpu_seconds

from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish

PROMPT_CHARS = 400
PROMPTS = 4096
"""Number of different prompts before they repeat."""
VOCAB_SIZE = 8192
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man even most made after also did many before must well back through years much where your way down should
because long each just state those people too how little good make very own see men work here get both between
life being under never day same another know while last might great year since against go come right used take
""".split()  # noqa: SIM905


@dataclass(slots=True)
class Result:
    stream: bool
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    cpu_us_per_request: float
    cpu_us_per_token: float
    tokens_per_cpu_s: float
    """Tokens a second that one core of the router could stream: the inverse of the cost of a token."""
    latency_p50_ms: float
    latency_p99_ms: float


class LoadConnection(asyncio.Protocol):
    """One kept-alive connection that sends the next request as soon as the answer is complete."""

    def __init__(self, requests: Iterator[bytes], stream: bool, ends_at_s: float) -> None:
        self._requests = requests
        self._end = b"\r\n0\r\n\r\n" if stream else None
        self._ends_at_s = ends_at_s
        self._buffer = b""
        self._sent_s = 0.0
        self._transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()
        self.latencies_s: list[float] = []
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_s = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._end is not None:
            if not self._buffer.endswith(self._end):
                return
            if b"data: [DONE]" not in self._buffer[-64:]:
                self._fail(self._buffer)
                return
            self.events += self._buffer.count(b'"finish_reason"')
        else:
            head, found, body = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            if len(body) < length:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(self._buffer)
                return
        self._buffer = b""
        now_s = time.perf_counter()
        self.latencies_s.append(now_s - self._sent_s)
        if now_s < self._ends_at_s:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(b"the router closed the connection")

    def _fail(self, what: bytes) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(what[:500].decode(errors="replace")))


def make_requests(model: str, max_tokens: int, stream: bool, count: int = PROMPTS) -> Iterator[bytes]:
    """Return an endless iterator of HTTP requests with `count` different prompts, the same ones in every run."""
    rng = random.Random(20)
    requests = [make_request(model, _prompt(rng), max_tokens, stream) for _ in range(count)]
    return itertools.cycle(requests)


def _prompt(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=PROMPT_CHARS // 3)
    for place in range(rng.randrange(40), len(words), 40):
        words[place] = "".join(rng.choices("abcdefghijklmnoprstuvwyz", k=5))
    return " ".join(words)[:PROMPT_CHARS]


def make_request(model: str, prompt: str, max_tokens: int, stream: bool) -> bytes:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    raw = json.dumps({**body, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    )
    return head.encode() + b"\r\n\r\n" + raw


async def load(
    port: int, pids: Sequence[int], requests: Iterator[bytes], stream: bool, concurrency: int, duration_s: float
) -> Result:
    loop = asyncio.get_running_loop()
    ends_at_s = time.perf_counter() + duration_s
    cpu_before_s, begin_s = sum(map(cpu_seconds, pids)), time.perf_counter()
    pairs = [
        await loop.create_connection(lambda: LoadConnection(requests, stream, ends_at_s), "127.0.0.1", port)
        for _ in range(concurrency)
    ]
    connections = [connection for _, connection in pairs]
    async with asyncio.timeout(duration_s + 30):
        await asyncio.gather(*(connection.done for connection in connections))
    seconds, cpu_s = time.perf_counter() - begin_s, sum(map(cpu_seconds, pids)) - cpu_before_s
    for transport, _ in pairs:
        transport.close()
    latencies = sorted(latency for connection in connections for latency in connection.latencies_s)
    count = len(latencies)
    tokens = sum(connection.events for connection in connections)
    return Result(
        stream=stream,
        concurrency=concurrency,
        requests=count,
        tokens=tokens,
        seconds=seconds,
        requests_per_s=count / seconds,
        tokens_per_s=tokens / seconds,
        cpu_us_per_request=cpu_s / count * 1e6,
        cpu_us_per_token=cpu_s / tokens * 1e6 if tokens else 0.0,
        tokens_per_cpu_s=tokens / cpu_s if tokens else 0.0,
        latency_p50_ms=latencies[count // 2] * 1e3,
        latency_p99_ms=latencies[count * 99 // 100] * 1e3,
    )


async def measure(router: RouterUnderTest, model: str, args: argparse.Namespace) -> list[Result]:
    results = []
    for stream in (False, True):
        requests = make_requests(model, args.tokens, stream)
        await load(router.ports["port"], router.pids, requests, stream, 4, 0.3)  # warm
        for concurrency in args.concurrency:
            result = await load(router.ports["port"], router.pids, requests, stream, concurrency, args.seconds)
            results.append(result)
    return results


async def compare(routers: Sequence[RouterUnderTest], model: str, args: argparse.Namespace) -> list[tuple[object, ...]]:
    """Return a row for each load: CPU of the first router over that of the second, as quartiles of the rounds."""
    rows: list[tuple[object, ...]] = []
    for stream, concurrency in [(stream, count) for stream in (False, True) for count in args.concurrency]:
        requests = make_requests(model, args.tokens, stream)
        costs: list[list[Result]] = []
        for number in range(args.rounds + 1):
            order = routers if number % 2 else routers[::-1]
            turn = [
                await load(router.ports["port"], router.pids, requests, stream, concurrency, args.seconds)
                for router in order
            ]
            costs.append(turn if number % 2 else turn[::-1])
        del costs[0]  # caches were cold
        ratios = [one.cpu_us_per_request / other.cpu_us_per_request for one, other in costs]
        low, middle, high = quantiles(ratios, n=4)
        ours, theirs = (median(turn[i].cpu_us_per_request for turn in costs) for i in (0, 1))
        late, late_theirs = (median(turn[i].latency_p99_ms for turn in costs) for i in (0, 1))
        ratio = [round(x, 3) for x in (middle, low, high)]
        rows.append(
            ("stream" if stream else "whole", concurrency, *ratio, round(ours), round(theirs), late, late_theirs)
        )
        print(*rows[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.router", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP}, for its tokenizer (default: one is made)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per request")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each row")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--step-ms", type=float, default=0.0, help="pace of the fake decode instance; 0: no pause")
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--beside", type=Path, help="checkout whose router is measured beside this one, in slices")
    parser.add_argument("--rounds", type=int, default=10, help="slices of --seconds of each router, with --beside")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or _small_model(Path(folder))
        overrides = (f"dp_config.router.policy={args.policy}", "model.served_name=bench")
        any_model = ("--step-s", str(args.step_ms / 1e3), "--vocab-size", str(1 << 20))
        if args.beside is not None:
            (Path(folder) / "beside").mkdir()
            path = f"{args.beside}:{args.beside / 'test'}"
            popen = cast(Callable[..., "subprocess.Popen[bytes]"], partial(subprocess.Popen, cwd=args.beside))
            other = RouterUnderTest(Path(folder) / "beside", model, overrides, {"PYTHONPATH": path}, popen)
            with RouterUnderTest(Path(folder), model, overrides) as router, other:
                for each in (router, other):
                    each.start_worker("P0,D0", *any_model)
                rows = uvloop.run(compare((router, other), "bench", args))
            names = ("mode", "clients", "ratio", "q1", "q3", "CPU us/req", "other us/req", "p99 ms", "other p99 ms")
            publish("router_beside", names, rows, args.json_dir)
            return 0
        with RouterUnderTest(Path(folder), model, overrides) as router:
            router.start_worker("P0,D0", *any_model)
            results = uvloop.run(measure(router, "bench", args))
    columns = ("mode", "clients", "req/s", "tok/s", "CPU us/req", "CPU us/tok", "tok/CPU-s", "p50 ms", "p99 ms")
    rows = [
        (
            "stream" if result.stream else "whole",
            result.concurrency,
            round(result.requests_per_s),
            round(result.tokens_per_s),
            round(result.cpu_us_per_request),
            result.cpu_us_per_token,
            round(result.tokens_per_cpu_s),
            result.latency_p50_ms,
            result.latency_p99_ms,
        )
        for result in results
    ]
    publish("router", columns, rows, args.json_dir)
    return 0


def _small_model(folder: Path) -> Path:
    from chitu.tools.make_model import make_model

    make_model(folder / "model", family="qwen3", vocab_size=VOCAB_SIZE)
    return folder / "model"


if __name__ == "__main__":
    sys.exit(main())
