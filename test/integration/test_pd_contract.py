"""Promises of a real 1P1D besides tokens: log anchors, which processes communicate, layer-wise KV, the official
client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from completions import complete_all, instance_loads
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.http.answer.proof import Proof
from chitu.launch.local import LocalCluster
from chitu.protocol.account import REPORTED_STAGES
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tokenizer import Tokenizer
from chitu.tools.make_model import make_model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = make_model(tmp_path_factory.mktemp("models") / "llama", family="llama")
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=1000"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def anchors(text: str, anchor: str) -> list[str]:
    """Return the request ids in log lines with this anchor."""
    return re.findall(re.escape(anchor) + r" (\S+)", text)


def test_the_bytes_moved_are_those_of_the_pages_and_the_logits_row(cluster: LocalCluster) -> None:
    """Runs first: load reports are up to a heartbeat old, so only a fresh cluster has known counters."""
    prompt = [7] * 100
    complete_all(cluster.url, [prompt], [{"max_tokens": 2}])
    # The default model: 4 layers, 4 KV heads of 16, float32, pages of 16 tokens; 512 logits and a 64 byte header.
    pages = 7 * 4 * 2 * (16 * 4 * 16 * 4)
    row = 64 + 512 * 4

    def moved() -> list[int]:
        loads = instance_loads(cluster.url)
        return [loads[name]["bytes_moved"] for name in ("P0", "D0")]

    wait_until(lambda: all(moved()), 5.0, moved)
    assert moved() == [pages + row, pages + row]


def test_every_anchor_of_s3_appears_once_per_request(cluster: LocalCluster) -> None:
    def created() -> list[str]:
        return re.findall(r"created pd request: (\S+) -> P0-D0", cluster.logs("router"))

    before = len(created())
    complete_all(cluster.url, [[n + 1] * (n * 30 + 1) for n in range(5)], [{"max_tokens": 3}] * 5)
    wait_until(lambda: len(created()) >= before + 5, 5.0, created)  # the router writes its log a moment later
    requests = created()
    assert len(requests) == len(set(requests))
    for name, text in (
        ("P0", "processing prefill request:"),
        ("P0", "finished kv cache transfer for"),
        ("P0", "finished aux transfer for"),
        ("D0", "processing decode request:"),
        ("D0", "received kv cache for"),
    ):
        assert sorted(anchors(cluster.logs(name), text)) == sorted(requests), f"{name}: {text}"
    assert cluster.logs("D0").count("decode endpoint registered to prefill (engine_rank=0)") == 1


def test_the_cluster_tells_where_a_request_went_and_where_its_time_went(
    client: openai.OpenAI, cluster: LocalCluster
) -> None:
    reply = client.completions.with_raw_response.create(model="m", prompt=[9] * 100, max_tokens=8, temperature=0)
    snapshot = msgspec.json.decode(httpx.get(f"{cluster.url}/cluster", timeout=60.0).content, type=ClusterSnapshot)
    (request,) = [r for r in snapshot.requests if r.request_id == reply.headers["x-request-id"]]
    assert (request.prefill, request.decode, request.state) == ("P0", "D0", "finished")
    assert (request.prompt_tokens, request.output_tokens) == (100, reply.parse().usage.completion_tokens)  # type: ignore[union-attr]
    assert request.kv_bytes == 7 * 4 * 2 * (16 * 4 * 16 * 4) + 64 + 512 * 4
    stages = request.stages
    assert stages is not None and request.first_token_s is not None and request.total_s is not None
    spans = dict(stages.known())
    assert tuple(spans) == tuple(name for name in REPORTED_STAGES if name != "confirm")
    # Times on P and on D count from the arrival there. Where P's came later, all that P did lies before D's
    # announcement in the account, and the transfer is part of the admission.
    assert all(spans[name] > 0 for name in ("admission", "compute", "decode", "messages"))
    assert round(sum(spans.values()), 6) == round(request.total_s, 6)
    assert request.first_token_s < request.total_s < snapshot.time_s - request.created_at_s
    assert [(i.name, i.status, i.pid) for i in snapshot.instances] == [
        (name, "up", cluster.pid(name)) for name in ("P0", "D0")
    ]


def test_an_answer_proves_which_pair_served_it_what_moved_and_where_its_time_went(cluster: LocalCluster) -> None:
    page, row = 4 * 2 * (16 * 4 * 16 * 4), 64 + 512 * 4
    text = {"model": "m", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_proof": True}
    chat = {**text, "messages": [{"role": "user", "content": "Say something."}]}
    responses = {"model": "m", "input": "Say something.", "max_output_tokens": 8, "return_proof": True}

    def new(token: int) -> dict[str, Any]:
        """Return a request whose prompt of seven pages is in no cache."""
        return {**text, "prompt": [token] * 100}

    usage_too = {"stream_options": {"include_usage": True}}
    drawn = {"temperature": 1, "seed": 1}
    cases: list[tuple[str, dict[str, Any], int, int | None]] = [
        ("completions", new(20), 1, 7 * page + row),
        ("completions", {**new(21), "stream": True}, 1, 7 * page + row),
        ("completions", {**new(22), "n": 4, "stream": True, **usage_too}, 4, 7 * page + row),
        ("completions", {**new(23), "n": 2, "best_of": 3, **drawn}, 3, 7 * page + row),
        ("completions", {**new(24), "max_tokens": 1}, 1, row),
        ("completions", {**text, "prompt": [[25] * 100, [26] * 33]}, 2, 10 * page + 2 * row),
        ("completions", new(20), 1, None),
        ("chat/completions", chat, 1, None),
        ("chat/completions", {**chat, "stream": True, "n": 2}, 2, None),
        ("responses", responses, 1, None),
        ("responses", {**responses, "stream": True}, 1, None),
    ]
    for route, body, num_choices, kv_bytes in cases:
        asked_s = time.monotonic()
        answer = httpx.post(f"{cluster.url}/v1/{route}", json=body, timeout=60.0, trust_env=False)
        waited_s, case = time.monotonic() - asked_s, f"{route} {body}: {answer.text[-3000:]}"
        assert answer.status_code == 200, case
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        last = events[-1] if body.get("stream") else answer.json()
        proof = msgspec.convert(last.get("response", last)["chitu"], Proof)
        assert (proof.prefill, proof.decode, proof.attempts) == (["P0"], ["D0"], 1), case
        assert 0 < proof.total_s < waited_s, case
        for choice in proof.choices:
            stages = dict(choice.stages.known())
            either = stages.keys() & {"first_step", "confirm"}  # `confirm` of a stream whose P was first
            assert len(either) == 1 and (body.get("stream") or "confirm" not in stages), case
            reported = set(REPORTED_STAGES) - {"first_step", "confirm"}
            assert stages.keys() - either == {"receive", "prepare", "retry", *reported, "answer"}, case
            assert round(sum(stages.values()), 6) == proof.total_s, case
        indices = [choice.index for choice in proof.choices]
        assert sorted(i for i in indices if i is not None) == list(range(len(indices) - indices.count(None))), case
        assert len(indices) == num_choices, case
        assert kv_bytes is None or proof.kv_bytes == kv_bytes, case
        usage = last.get("response", last).get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        assert details is None or details["cached_tokens"] == proof.cached_tokens, case
        if route == "completions" and kv_bytes is None:
            assert proof.cached_tokens > 0 and proof.kv_bytes is not None and proof.kv_bytes <= 7 * page + row, case
        headers = answer.headers
        assert (headers["x-chitu-prefill"], headers["x-chitu-decode"], headers["x-chitu-attempts"]) == ("P0", "D0", "1")
        assert headers["x-chitu-cached-tokens"] == str(proof.cached_tokens), case
        assert headers["server-timing"].startswith("receive;dur="), case
        assert body.get("stream") or headers["x-chitu-kv-bytes"] == str(proof.kv_bytes), case
    unasked = httpx.post(
        f"{cluster.url}/v1/completions", json={**new(27), "return_proof": False}, trust_env=False, timeout=60.0
    )
    assert "chitu" not in unasked.json() and "server-timing" not in unasked.headers


def test_p_and_d_are_connected_to_the_token_port(cluster: LocalCluster) -> None:
    def remote_ports(name: str) -> set[int]:
        connections = psutil.Process(cluster.pid(name)).net_connections(kind="tcp")
        return {connection.raddr.port for connection in connections if connection.raddr}

    token_port, stats_port = cluster.ports["token_port"], cluster.ports["stats_port"]
    assert token_port in remote_ports("D0")
    assert token_port in remote_ports("P0"), "for the early token"
    assert stats_port in remote_ports("P0"), "P does report on the stats port"


def test_the_openai_client_completes_and_streams_the_same_text(client: openai.OpenAI) -> None:
    options = {"model": "m", "prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    usages = [
        answer.usage.model_dump(exclude={"speculation"}) for answer in (chunks[-1], whole)
    ]  # that depends on time
    assert usages[0] == usages[1]
    assert whole.usage.completion_tokens == 24 or whole.choices[0].finish_reason == "stop"


def test_the_openai_client_chats_with_a_stop_string_and_a_seed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    options = {"model": "m", "messages": messages, "max_tokens": 40, "temperature": 1.0, "seed": 5}
    first = client.chat.completions.create(**options).choices[0].message.content  # type: ignore[call-overload]
    again = client.chat.completions.create(**options).choices[0].message.content  # type: ignore[call-overload]
    assert first == again
    stop = first[len(first) // 2 :][:2]
    stopped = client.chat.completions.create(**options, stop=[stop])  # type: ignore[call-overload]
    assert stopped.choices[0].message.content == first[: first.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    deltas = client.chat.completions.create(**options, stop=[stop], stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == first[: first.index(stop)]


def test_what_is_not_allowed_or_a_bad_word_never_comes_the_first_token_included(cluster: LocalCluster) -> None:
    """P's logits row decides the first token."""
    prompt = [5, 9, 33, 70]
    base = {"max_tokens": 24, "ignore_eos": True}
    greedy = {**base, "temperature": 0}
    (plain,) = complete_all(cluster.url, [prompt], [greedy])
    first, allowed = plain.token_ids[0], [40, 41, 42, 43]
    assert first not in allowed
    random = [{**base, "temperature": 1.5, "seed": seed} for seed in range(8)]
    answers = complete_all(
        cluster.url, [prompt] * 9, [{**one, "allowed_token_ids": allowed} for one in (greedy, *random)]
    )
    for one in answers:
        assert len(one.token_ids) == 24 and set(one.token_ids) <= set(allowed), one.token_ids
    assert len({tuple(one.token_ids) for one in answers}) > 1
    # A bad word of one token, and one of two tokens that are adjacent in an answer.
    tokenizer = Tokenizer.load(cluster.topology.model.path)

    def is_word(*ids: int) -> bool:
        text = tokenizer.decode(ids)
        return text.strip() != "" and tokenizer.encode(text, add_special_tokens=False) == list(ids)

    for one in random:
        (free,) = complete_all(cluster.url, [prompt], [one])
        pairs = zip(free.token_ids, free.token_ids[1:], strict=False)
        words = [ids for ids in ((free.token_ids[0],), *pairs) if is_word(*ids)][:4]
        if any(len(word) > 1 for word in words):
            break
    else:
        pytest.fail("no answer has two tokens that are the tokens of their text")
    (kept,) = complete_all(cluster.url, [prompt], [{**one, "bad_words": [tokenizer.decode(word) for word in words]}])
    assert len(kept.token_ids) == 24 and kept.token_ids != free.token_ids
    for word in words:
        seen = [tuple(kept.token_ids[i : i + len(word)]) for i in range(len(kept.token_ids))]
        assert tuple(word) not in seen, (word, kept.token_ids)


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"prompt": "x", "model": "other"}, 404, "model_not_found"),
        ({"prompt": [1] * 5000}, 400, "context_length_exceeded"),
        ({"prompt": "x", "temperature": 9}, 400, "invalid_request"),
        ({"prompt": "x", "logprobs": 21}, 400, "invalid_request"),
    ],
)
def test_wrong_input_is_an_openai_error(
    client: openai.OpenAI, options: dict[str, object], status: int, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": "m", "max_tokens": 4, **options})  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert caught.value.code == code, caught.value.body


def test_the_model_folder_is_named_in_the_card(client: openai.OpenAI, cluster: LocalCluster) -> None:
    card = client.models.list().data[0]
    assert card.id == "m"
    assert Path(card.root).name == "llama"  # type: ignore[attr-defined]
