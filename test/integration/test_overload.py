"""A flood on a real 1P1D whose steps take a fixed time: typed rejections at once, right answers, everything
released."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from completions import instance_loads, is_whole
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.models.config import read_model_spec

OUTPUT_TOKENS = 8
MAX_IN_FLIGHT = 100
OVERRIDES = [
    "model.served_name=m",
    "cache.num_pages=4096",
    f"dp_config.router.max_in_flight={MAX_IN_FLIGHT}",
    "dp_config.router.admission.max_queue_s=0.4",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pace = EngineConfig(step_s=0.010, prompt_token_s=0.0001)
    return make_checksum_model(tmp_path_factory.mktemp("models") / "checksum", pace)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    topology = load_topology("pd_disagg_1p1d_local", [f"model.path={model}", *OVERRIDES])
    with LocalCluster(topology, entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        yield cluster


@dataclass(slots=True, frozen=True)
class Answer:
    prompt: list[int]
    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    seconds: float

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"]) if "error" in self.body else ""


async def ask(port: int, prompt: list[int]) -> Answer:
    """Send one request on its own connection; the time runs from the request to the end of the answer."""
    fields = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    raw = json.dumps({**fields, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start_s = time.monotonic()
    writer.write(head.encode() + raw)
    answer = await reader.read()
    seconds = time.monotonic() - start_s
    writer.close()
    lines, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = lines.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    return Answer(prompt, int(first.split()[1]), headers, json.loads(body), seconds)


async def flood(port: int, prompts: Iterator[list[int]]) -> list[Answer]:
    """Send more requests than may run at once. When the router knows how slowly that queue moves, add ten clients that
    insist."""
    first = [asyncio.create_task(ask(port, next(prompts))) for _ in range(MAX_IN_FLIGHT + 40)]
    tasks = first.copy()
    while not any(task.done() and task.result().code == "overloaded" for task in tasks):
        assert not all(task.done() for task in first), "the queue was gone before the router rejected anything"
        tasks.append(asyncio.create_task(ask(port, next(prompts))))
        await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.ALL_COMPLETED)

    async def insist() -> list[Answer]:
        return [await ask(port, next(prompts)) for _ in range(10)]

    late = await asyncio.gather(*(insist() for _ in range(10)))
    return [*itertools.chain.from_iterable(late), *await asyncio.gather(*tasks)]


def test_a_flood_is_rejected_at_once_and_what_was_admitted_ends_right(cluster: LocalCluster, model: Path) -> None:
    rng = random.Random(5)
    prompts = ([rng.randrange(10, 500) for _ in range(300)] for _ in iter(int, 1))
    answers = asyncio.run(flood(cluster.ports["port"], prompts))

    rejected = [answer for answer in answers if answer.status != 200]
    assert {(a.status, a.code) for a in rejected} == {(429, "capacity"), (503, "overloaded")}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in rejected)
    early = [answer.seconds for answer in rejected if answer.code == "overloaded"]
    assert len(early) > 20
    vocab_size = read_model_spec(model).vocab_size
    served = [answer for answer in answers if answer.status == 200]
    assert len(served) >= MAX_IN_FLIGHT
    assert statistics.median(early) < min(answer.seconds for answer in served), sorted(early)
    for answer in served:
        assert answer.body["choices"][0]["token_ids"] == expected_tokens(answer.prompt, OUTPUT_TOKENS, vocab_size)

    def idle() -> bool:
        loads = instance_loads(cluster.url)
        return all(name in loads and is_whole(loads[name]) for name in ("P0", "D0"))

    wait_until(idle, 15.0, lambda: instance_loads(cluster.url))
    last = asyncio.run(ask(cluster.ports["port"], [1, 2, 3]))
    assert last.status == 200, last.body
