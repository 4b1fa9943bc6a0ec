"""A real 2P2D that loses an instance under load: every answer equals the one without the loss."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from nursery import FORKED
from thinking_model import BIAS, CLOSE, make_thinking_model

from chitu.config.load import load_topology
from chitu.config.topology import instances, on_one_host, router_ports
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.protocol.account import RequestSnapshot
from chitu.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(420)
"""Timeout for nine processes that start on as few as two cores."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = make_thinking_model(tmp_path_factory.mktemp("models") / "qwen3")
    topology = on_one_host(load_topology("pd_disagg_2p2d_multi_node.yaml"))
    any_port = [f"{key}=0" for key in router_ports(topology.dp_config.router)]
    any_port += [f"{instance.key}.port=0" for instance in instances(topology)]
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=2000", "scheduler.threads=1", *any_port]
    with LocalCluster(load_topology("pd_disagg_2p2d_multi_node.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready(300)
        yield cluster


class Answer:
    """State of an answer so far: tokens, texts and finish reasons by choice, and the usage."""

    def __init__(self) -> None:
        self.status = 0
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self.proof: dict[str, Any] = {}
        """Proof of how it was served: the only part that may differ."""

    def add(self, record: dict[str, Any]) -> None:
        assert "error" not in record, record
        for choice in record["choices"]:
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice.get("token_ids") or [])
            said = choice.get("message") or choice.get("delta") or {}
            text = choice.get("text") or (said.get("reasoning_content") or "") + (said.get("content") or "")
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]
        self.usage = record.get("usage") or self.usage
        self.proof = record.get("chitu") or self.proof
        self.usage.pop("prompt_tokens_details", None)  # a second attempt may find what the first one cached
        self.usage.pop("speculation", None)  # depends on how long steps take

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and {**vars(self), "proof": other.proof} == vars(other)

    def __repr__(self) -> str:
        return f"{self.status} {self.reasons} {self.usage} {self.tokens}"


async def ask(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    options = {"include_usage": True} if body.get("stream") else None
    whole = {"model": "m", "return_token_ids": True, "return_proof": True, **body, "stream_options": options}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.stream("POST", path, json=whole) as response:
        answer.status = response.status_code
        if not body.get("stream"):
            answer.add(json.loads(await response.aread()))
            return
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                answer.add(json.loads(line[6:]))


def ask_all(
    cluster: LocalCluster,
    bodies: list[dict[str, Any]],
    disturb: Callable[[], None] | None = None,
    when: Callable[[list[Answer], tuple[RequestSnapshot, ...]], bool] = lambda answers, requests: True,
) -> list[Answer]:
    """Send all requests at once. `disturb` runs once, as soon as `when` holds, which must be before the last answer."""
    answers = [Answer() for _ in bodies]
    if disturb is not None:
        bodies = [body | {"cache_salt": "disturbed"} for body in bodies]  # recompute what was asked before
    router = RouterClient(cluster.url)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=150.0, trust_env=False) as client:
            tasks = [asyncio.create_task(ask(client, body, a)) for body, a in zip(bodies, answers, strict=True)]
            if disturb is not None:
                while not when(answers, (await asyncio.to_thread(router.cluster)).requests):
                    assert not all(task.done() for task in tasks), "all answered before it was time to disturb"
                    await asyncio.sleep(0.005)
                disturb()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    return answers


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


def attempts(cluster: LocalCluster, since_s: float = 0.0) -> list[RequestSnapshot]:
    """Return the attempts that the router remembers, begun since this time of its clock."""
    return [r for r in RouterClient(cluster.url).cluster().requests if r.created_at_s >= since_s]


GREEDY = {"temperature": 0, "ignore_eos": True}
DRAWN = {"temperature": 1.2, "top_p": 0.95, "frequency_penalty": 0.8, "presence_penalty": 0.4, "ignore_eos": True}
FOLLOWING = {"temperature": 1.0, "guided_regex": "([a-z]{2,5} ){800,900}"}
LONG = {"max_tokens": 300}


def test_a_killed_d_changes_no_answer_in_midstream(cluster: LocalCluster) -> None:
    bodies: list[dict[str, Any]] = []
    for seed in range(2):
        bodies += [
            {"prompt": prompt(seed, 50), **LONG, **GREEDY, "stream": True},
            {"prompt": prompt(seed, 70), **LONG, **DRAWN, "seed": seed, "stream": True},
            {"prompt": prompt(seed, 30), **LONG, **DRAWN, "seed": seed, "n": 2, "stream": bool(seed)},
            {"prompt": prompt(seed, 90), **LONG, **GREEDY},
            {"prompt": prompt(seed, 40), **LONG, **FOLLOWING, "seed": seed, "stream": True},
        ]
    close = Tokenizer.load(cluster.topology.model.path).added_token_ids[CLOSE]
    thinking = {"messages": [{"role": "user", "content": "abc"}], "logit_bias": {str(close): BIAS}}
    bodies += [{**thinking, **LONG, **FOLLOWING, "seed": seed, "stream": True} for seed in range(4)]
    undisturbed = ask_all(cluster, bodies)
    assert all(3 < answer.tokens[0].index(close) < 200 for answer in undisturbed[-4:]), "it thinks, and then answers"
    assert all(re.search(r"([a-z]{2,5} ){9}$", answer.texts[0] + " ") for answer in undisturbed[-4:])
    for stop in (12, 250):  # characters of the text: such a stop string comes before the kill, or long after it
        text = undisturbed[1].texts[0]
        bodies.append({**bodies[1], "stop": [text[len(text) * stop // 300 :][:4]]})
    undisturbed += ask_all(cluster, bodies[-2:])
    assert all(answer.status == 200 for answer in undisturbed)

    def all_have_begun(answers: list[Answer], requests: tuple[RequestSnapshot, ...]) -> bool:
        streams = [a for a, body in zip(answers, bodies, strict=True) if body.get("stream")]
        decoding = [r for r in requests if r.state == "decode" and r.decode == "D0" and r.output_tokens > 8]
        have_thought = all(
            close in a.tokens.get(0, []) for a, body in zip(answers, bodies, strict=True) if "messages" in body
        )
        return len(decoding) >= 3 and all(a.tokens for a in streams) and have_thought

    answers = ask_all(cluster, bodies, lambda: cluster.kill("D0", signal.SIGKILL), all_have_begun)
    assert answers == undisturbed
    moved = [request for request in attempts(cluster) if request.continued_tokens]
    assert len(moved) >= 3 and {request.decode for request in moved} == {"D1"}
    assert all(request.state == "finished" and request.attempt == 2 for request in moved)
    thought = [
        choice
        for answer in answers
        if answer.usage.get("completion_tokens_details")
        for choice in answer.proof["choices"]
    ]
    assert any(choice["attempts"][-1]["continued_tokens"] for choice in thought), (
        "one with a grammar behind its reasoning"
    )
    # Every answer reports it.
    choices = [(answer.proof, choice) for answer in answers for choice in answer.proof["choices"]]
    assert all(round(sum(c["stages"].values()), 6) == proof["total_s"] for proof, c in choices), choices
    told = {
        attempt["room"]: c["attempts"] for _, c in choices for attempt in c["attempts"] if attempt["continued_tokens"]
    }
    assert {request.room for request in moved} <= set(told)
    for first, second in told.values():
        assert (first["state"], first["error"], first["decode"]) == ("retried", "decode_lost", "D0")
        assert (second["state"], second["decode"]) == ("finished", "D1") and first["room"] != second["room"]
    cluster.wait_exit("D0")
    cluster.restart("D0")
    cluster.wait_ready(300)


def test_a_killed_p_changes_no_answer_while_it_prefills(cluster: LocalCluster) -> None:
    bodies = [
        {"prompt": prompt(seed, 1500), "max_tokens": 8, **(DRAWN if seed % 2 else GREEDY), "seed": seed}
        for seed in range(16)
    ]
    undisturbed = ask_all(cluster, bodies)

    def is_prefilling(answers: list[Answer], requests: tuple[RequestSnapshot, ...]) -> bool:
        return sum(r.state == "prefill" and r.prefill == "P0" for r in requests) >= 4

    start_s = RouterClient(cluster.url).cluster().time_s
    answers = ask_all(cluster, bodies, lambda: cluster.kill("P0", signal.SIGKILL), is_prefilling)
    assert answers == undisturbed
    retried = [request for request in attempts(cluster, start_s) if request.state == "retried"]
    assert retried and {request.prefill for request in retried} == {"P0"}
    assert {request.error for request in retried} <= {"prefill_lost", "transfer_failed"}
    cluster.wait_exit("P0")
    cluster.restart("P0")
    cluster.wait_ready(300)
