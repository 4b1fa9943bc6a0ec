"""Comparison of token times between clusters: a model, settings, requests one at a time. For `ttft` and `verify_kv`.

Every instance gets all cores, since only one computes at a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chitu.net.client import Server, events_of
from chitu.net.control_groups import usable_cores
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR
from chitu.tools.make_model import make_model


@dataclass(frozen=True, slots=True)
class Comparison:
    rounds: int
    json_dir: Path
    settings: list[str]
    """Overrides of the topology: model, cores, transport."""


@contextmanager
def comparison(description: str, rounds: int) -> Iterator[Comparison]:
    """Read the command line. A model is made if none is given, and lives as long as the context."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP} (default: a random Qwen3 of 34 M)")
    parser.add_argument("--rounds", type=int, default=rounds)
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
        settings = [
            f"model.path={model}",
            "model.served_name=m",
            "dp_config.router.port=0",
            f"scheduler.threads={usable_cores()}",
            f"dp_config.router.pd_disaggregation.transport={arguments.transport}",
        ]
        yield Comparison(arguments.rounds, arguments.json_dir, settings)


def token_times_s(url: str, prompt: list[int], num_tokens: int, **fields: object) -> list[float]:
    """Return the seconds from sending the request to each of its streamed tokens. `fields` are added to its body. Raise
    RuntimeError if their number is not `num_tokens`."""
    return streamed_tokens(url, prompt, num_tokens, **fields)[0]


def streamed_tokens(url: str, prompt: list[int], num_tokens: int, **fields: object) -> tuple[list[float], list[int]]:
    """Return the result of `token_times_s`, and the tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    raw = json.dumps({**body, **fields, "stream": True, "return_token_ids": True}).encode()
    times_s: list[float] = []
    tokens: list[int] = []
    event = ""
    with Server.at(url).connect(120) as connection:
        start_s = time.perf_counter()
        response = connection.send("POST", "/v1/completions", raw)
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[-500:]!r}")
        for event in events_of(response):
            now_s = time.perf_counter()
            if event.startswith("{"):
                for choice in json.loads(event).get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                    times_s += [now_s - start_s] * (len(tokens) - len(times_s))
    if len(times_s) != num_tokens:
        raise RuntimeError(f"{len(times_s)} tokens: {event[-500:]!r}")
    return times_s, tokens
