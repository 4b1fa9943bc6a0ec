"""Time to the first token of 1P1D over that of one undivided instance, in one interleaved run.

    python -m chitu.bench.ttft [--model DIR]

Both clusters are up; requests go to them in turn, one at a time, streamed, with different prompts of 512 and 2048
tokens. What 1P1D adds is the hand-over: two messages, the logits row, a wake-up of D. Every instance gets all cores,
since only one computes at a time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from chitu.bench.report import DEFAULT_DIR, publish
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.make_model import make_model

LENGTHS = (512, 2048)


def first_token_s(url: str, prompt: list[int]) -> float:
    """Seconds from sending the request to the first streamed token."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True})
    connection.connect()
    start_s = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    elapsed_s = time.perf_counter() - start_s
    if response.status != 200 or not line.startswith(b"data: "):
        raise RuntimeError(f"{response.status}: {line.decode(errors='replace')}{response.read().decode()}")
    response.read()
    connection.close()
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder; a random 34 M Qwen3 where unset")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or make_model(
            Path(scratch) / "qwen3",
            family="qwen3",
            hidden_size=512,
            layers=8,
            heads=8,
            kv_heads=4,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=8192,
        )
        common = [
            f"model.path={model}",
            "model.served_name=m",
            "dp_config.router.port=0",
            f"scheduler.threads={os.cpu_count() or 1}",
            f"dp_config.router.pd_disaggregation.transport={arguments.transport}",
        ]
        with (
            LocalCluster(load_topology("unified_local.yaml", common)) as unified,
            LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", common)) as divided,
        ):
            unified.wait_ready()
            divided.wait_ready()
            rows = [measure(length, arguments.rounds, unified.url, divided.url) for length in LENGTHS]
    columns = ("prompt tokens", "unified ms", "1P1D ms", "1P1D / unified", "rounds")
    publish("ttft", columns, rows, arguments.json_dir)


def measure(length: int, rounds: int, unified_url: str, divided_url: str) -> tuple[int, float, float, float, int]:
    """Medians in ms and the median of the per-round ratios."""
    rng = random.Random(length)
    unified: list[float] = []
    divided: list[float] = []
    for number in range(rounds + 2):
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        order = [(unified_url, unified), (divided_url, divided)]
        for url, times in order if number % 2 else reversed(order):
            times.append(first_token_s(url, prompt))
    unified, divided = unified[2:], divided[2:]  # the first rounds warm both up
    ratio = statistics.median(d / u for d, u in zip(divided, unified, strict=True))
    return length, statistics.median(unified) * 1e3, statistics.median(divided) * 1e3, ratio, rounds


if __name__ == "__main__":
    main()
