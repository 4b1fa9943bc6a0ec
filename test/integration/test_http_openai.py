"""The router process over HTTP with the official client: real process, real sockets, fake tokens."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest, wait_until

from chitu.launch.router_client import RouterClient
from chitu.tools.make_model import make_model

PROMPT = "hello wörld 😀, again and again"

API_KEYS = {"CHITU_API_KEYS": "secret"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", family="qwen3")


@pytest.fixture(scope="module")
def router(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterUnderTest]:
    folder = tmp_path_factory.mktemp("router")
    with forked_router(folder, model, ("model.served_name=tiny",)) as router:
        router.start_worker("P0,D0", "--vocab-size", "100000", "--max-model-len", "512", "--step-s", "0.002")
        yield router


@pytest.fixture(scope="module")
def client(router: RouterUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)


def test_completion_streamed_and_whole_are_equal(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, extra_body={"return_token_ids": True})
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    assert whole.choices[0].text.startswith(PROMPT)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 40 == len(whole.choices[0].token_ids)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [t for c in chunks if c.choices for t in c.choices[0].token_ids] == whole.choices[0].token_ids
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


async def test_chat_with_the_async_client(router: RouterUnderTest) -> None:
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": PROMPT}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=30)
        stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert PROMPT[:10] in whole.choices[0].message.content
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert [d.role for d in deltas if d.role] == ["assistant"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_and_cancels_both_halves(
    client: openai.OpenAI, router: RouterUnderTest, include: bool
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "stop": ["😀", "ld 😀, a"]}
    extra = {"include_stop_str_in_output": include, "return_token_ids": True}
    whole = client.completions.create(**body, extra_body=extra)
    streamed = list(client.completions.create(**body, stream=True, extra_body=extra))
    expected = PROMPT[: PROMPT.index("😀") + (1 if include else 0)]
    assert whole.choices[0].text == expected
    assert "".join(c.choices[0].text for c in streamed) == expected
    assert whole.choices[0].finish_reason == streamed[-1].choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(whole.choices[0].token_ids) < 400
    wait_until(lambda: router.health()["in_flight"] == 0, 2, "nothing in flight")


def test_lists_n_and_echo_fan_out(client: openai.OpenAI) -> None:
    ids = httpx.post(
        str(client.base_url).replace("/v1/", "/tokenize"), json={"prompt": "abc def"}, timeout=60.0
    ).json()["tokens"]
    two = client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=3, echo=True)
    assert [c.index for c in two.choices] == [0, 1, 2, 3]
    assert [c.text[:3] for c in two.choices] == ["one", "one", "two", "two"]
    assert two.usage.completion_tokens == 12
    from_ids = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=len(ids))
    assert [c.text for c in from_ids.choices] == ["abc def"] * 2
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=3, stream=True):
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    whole = client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=3)
    assert streamed == {c.index: c.text for c in whole.choices}


ERRORS = [
    ({"temperature": 3}, 400, "temperature", "invalid_request"),
    ({"top_p": 0}, 400, "top_p", "invalid_request"),
    ({"n": 0}, 400, "n", "invalid_request"),
    ({"n": "x"}, 400, "n", "invalid_request"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_request"),
    ({"max_tokens": 512}, 400, None, "context_length_exceeded"),
    ({"prompt": "x " * 2000}, 400, None, "context_length_exceeded"),
    ({"prompt": []}, 400, "prompt", "invalid_request"),
    ({"prompt": [1, "a"]}, 400, "prompt", "invalid_request"),
    ({"prompt": [10**9]}, 400, "prompt", "invalid_request"),
    ({"prompt": [-1]}, 400, "prompt", "invalid_request"),
    ({"prompt": "", "add_special_tokens": False}, 400, "prompt", "invalid_request"),
    ({"logprobs": 21}, 400, "logprobs", "invalid_request"),
    ({"logprobs": True}, 400, "logprobs", "invalid_request"),
    ({"top_logprobs": 1}, 400, "top_logprobs", "invalid_request"),
    ({"best_of": 3, "stream": True}, 400, "best_of", "invalid_request"),
    ({"suffix": "x"}, 400, "suffix", "invalid_request"),
    ({"stop_regex": "a+"}, 400, "stop_regex", "invalid_request"),
    ({"max_tokens": -2}, 400, "max_tokens", "invalid_request"),
    ({"typical_p": 0.5}, 400, "typical_p", "invalid_request"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", "invalid_request"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "invalid_request"),
    ({"truncate_prompt_tokens": 513}, 400, "truncate_prompt_tokens", "invalid_request"),
    ({"structured_outputs": {}}, 400, "structured_outputs", "invalid_request"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", "invalid_request"),
    ({"stop": [""]}, 400, "stop", "invalid_request"),
    ({"stream_options": {}}, 400, "stream_options", "invalid_request"),
    ({"model": "other"}, 404, None, "model_not_found"),
]


@pytest.mark.parametrize(("change", "status", "param", "code"), ERRORS)
def test_wrong_input_is_an_openai_error_object(
    router: RouterUnderTest, change: dict[str, object], status: int, param: str | None, code: str
) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, **change}
    reply = httpx.post(router.url + "/v1/completions", json=body, timeout=60.0)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code), error
    assert param is None or error["param"] == param
    assert error["message"] and error["type"] == "invalid_request_error"


def test_other_errors(router: RouterUnderTest) -> None:
    url = router.url
    for reply, status in (
        (httpx.post(url + "/v1/completions", content=b"{", timeout=60.0), 400),
        (httpx.post(url + "/v1/completions", content=b"\xff", timeout=60.0), 400),
        (httpx.get(url + "/v1/chat/completions", timeout=60.0), 405),
        (httpx.get(url + "/tokenize", timeout=60.0), 405),
        (httpx.get(url + "/nothing", timeout=60.0), 404),
        (httpx.post(url + "/tokenize", json={}, timeout=60.0), 400),
        (httpx.post(url + "/detokenize", json={"tokens": ["a"]}, timeout=60.0), 400),
    ):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    neutral = {"logprobs": False, "best_of": 1, "tools": [], "response_format": {"type": "text"}, "user": "me"}
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "suffix": "", **neutral}
    reply = httpx.post(url + "/v1/completions", json=body, headers={"X-Request-Id": "my-id"}, timeout=60.0)
    assert reply.status_code == 200 and reply.headers["x-request-id"] == "my-id"
    assert "/v1/chat/completions" in httpx.get(url + "/openapi.json", timeout=60.0).json()["paths"]
    assert httpx.get(url + "/v1/models", timeout=60.0).json()["data"][0]["id"] == "tiny"
    ids = httpx.post(url + "/tokenize", json={"prompt": PROMPT}, timeout=60.0).json()["tokens"]
    assert httpx.post(url + "/detokenize", json={"tokens": ids}, timeout=60.0).json()["prompt"].endswith(PROMPT)


def test_a_request_needs_no_model_and_developers_speak_as_the_system(router: RouterUnderTest) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ):
        reply = httpx.post(router.url + path, json=body, timeout=60.0)
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny")
    counted = [
        httpx.post(
            router.url + "/tokenize", json={"messages": [{"role": role, "content": "Be brief."}]}, timeout=60.0
        ).json()
        for role in ("system", "developer", "user")
    ]
    assert counted[0]["tokens"] == counted[1]["tokens"] != counted[2]["tokens"]


def test_head_is_get_without_its_body(router: RouterUnderTest) -> None:
    for path in ("/health", "/livez", "/v1/models", "/metrics", "/", "/cluster", "/web/style.css", "/v1/models/no"):
        got, head = httpx.get(router.url + path, timeout=60.0), httpx.head(router.url + path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]
        assert "content-length" in head.headers
    for path in ("/cluster/events", "/tokenize", "/v1/completions"):
        assert httpx.head(router.url + path).status_code == 405


def test_a_client_may_have_a_time_out_of_its_own(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ("model.served_name=tiny",)) as router:
        router.start_worker("U0", "--step-s", "0.05")
        url, body = router.url + "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3000}
        for wrong in ("0", "-1", "soon", "nan", "inf", "1_0", ""):
            reply = httpx.post(url, json=body, headers={"X-Request-Timeout": wrong}, timeout=60.0)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "X-Request-Timeout")
        reply = httpx.post(url, json=body, headers={"X-Request-Timeout": "0.4"}, timeout=30)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
        assert "0.4 s (X-Request-Timeout)" in reply.json()["error"]["message"]
        reply = httpx.post(url, json={**body, "max_tokens": 2}, headers={"X-Request-Timeout": "60"}, timeout=60.0)
        assert reply.status_code == 200


def test_every_event_may_say_what_its_choice_used_so_far(router: RouterUnderTest) -> None:
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": ["one", "two words"], "n": 2, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}),
    ]
    for path, body in bodies:
        for include_usage in (False, True):
            options = {"continuous_usage_stats": True, "include_usage": include_usage}
            asked = {**body, "max_tokens": 7, "ignore_eos": True, "return_token_ids": True, "stream": True}
            reply = httpx.post(router.url + path, json={**asked, "stream_options": options}, timeout=60.0)
            events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
            shown: Counter[int] = Counter()
            of_choices = [event for event in events if event["choices"]]
            for event in of_choices:
                [choice] = event["choices"]
                shown[choice["index"]] += len(choice.get("token_ids") or [])
                usage = event["usage"]
                assert usage["completion_tokens"] == shown[choice["index"]], (path, event)
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert set(shown.values()) == {7} and len(shown) == (4 if "prompt" in body else 1)
            assert len(events) - len(of_choices) == include_usage
            if include_usage:
                assert events[-1]["usage"]["completion_tokens"] == 7 * len(shown)


def test_pages_of_configured_origins_alone_may_use_the_api(
    router: RouterUnderTest, model: Path, tmp_path: Path
) -> None:
    page, other = "https://page.example:8443", "https://other.example"
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    allow = "access-control-allow-origin"
    plain = httpx.options(router.url + "/v1/models", headers={"origin": page, **asking})
    assert plain.status_code == 405 and allow not in plain.headers
    assert allow not in httpx.get(router.url + "/v1/models", headers={"origin": page}, timeout=60.0).headers
    settings = [f'dp_config.router.cors_origins=["{page}"]', "model.served_name=tiny"]
    with forked_router(tmp_path, model, settings, API_KEYS) as router:
        url = router.url + "/v1/chat/completions"
        preflight = httpx.options(url, headers={"origin": page, **asking})
        assert (preflight.status_code, preflight.headers[allow]) == (200, page)
        assert preflight.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        odd = httpx.options(url, headers={"origin": page, **asking, "access-control-request-headers": "a;b"})
        assert odd.headers["access-control-allow-headers"] == "authorization, content-type"
        assert allow not in httpx.options(url, headers={"origin": other, **asking}).headers
        refused = httpx.post(url, json={}, headers={"origin": page}, timeout=60.0)
        assert (refused.status_code, refused.headers[allow]) == (401, page), "scripts read errors, too"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        for path, origin in (("/v1/models", other), ("/admin/topology", page)):
            reply = httpx.get(router.url + path, headers={"origin": origin}, timeout=60.0)
            assert allow not in reply.headers and reply.headers["vary"] == "origin"
        assert httpx.options(url, headers={"origin": page}).status_code in (401, 405), "no preflight"


def test_a_router_warns_of_fields_that_nobody_knows(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ["model.served_name=tiny"]) as router:
        router.start_worker("U0")
        bodies: list[tuple[str, dict[str, object]]] = [
            ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
            ("/tokenize", {"prompt": "hi"}),
            ("/detokenize", {"tokens": [20]}),
        ]
        for path, body in bodies:
            plain = httpx.post(router.url + path, json=body, timeout=60.0)
            assert plain.status_code == 200 and "x-chitu-warning" not in plain.headers, (path, plain.text)
            odd = httpx.post(router.url + path, json={**body, "m\u00f6del": 1}, timeout=60.0)
            assert odd.status_code == 200, (path, odd.text)
            assert "m\\xf6del: " in odd.headers["x-chitu-warning"], (path, odd.headers)
            refused = httpx.post(router.url + path, json={**body, "model": 1}, timeout=60.0)
            assert refused.status_code == 400, (path, refused.text)
        reply = httpx.post(router.url + "/v1/completions", json={"prompt": "hi", "stop_regex": "a"}, timeout=60.0)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stop_regex")


def test_limits_keys_and_no_instance(model: Path, tmp_path: Path) -> None:
    limits = (
        "dp_config.router.max_body_bytes=2000",
        "dp_config.router.max_in_flight=2",
        "model.served_name=tiny",
    )
    with forked_router(tmp_path, model, limits, API_KEYS) as router:
        auth = {"Authorization": "Bearer secret"}
        url = router.url + "/v1/completions"
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
        assert httpx.get(router.url + "/livez", timeout=60.0).status_code == 200
        assert httpx.get(router.url + "/health", timeout=60.0).status_code == 503
        assert httpx.post(url, json=body, timeout=60.0).status_code == 401
        none = httpx.post(url, json=body, headers=auth, timeout=60.0)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_instance")
        assert none.headers["retry-after"] == "1"
        assert httpx.post(url, json={**body, "prompt": "x" * 3000}, headers=auth, timeout=60.0).status_code == 413
        router.start_worker("U0")
        assert httpx.get(router.url + "/health", timeout=60.0).status_code == 200
        many = httpx.post(url, json={**body, "n": 3}, headers=auth, timeout=60.0)
        assert many.status_code == 429 and many.headers["retry-after"] == "1"
        assert httpx.post(url, json=body, headers=auth, timeout=60.0).status_code == 200


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_the_cluster_is_streamed_at_every_change_until_the_router_ends(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ["model.served_name=tiny"], API_KEYS) as router:
        auth = {"Authorization": "Bearer secret"}
        for path in ("/cluster", "/cluster/events"):
            assert httpx.get(router.url + path, timeout=60.0).status_code == 401
        assert httpx.get(router.url + "/demo/example", headers=auth, timeout=60.0).status_code == 404, (
            "only chitu-tiny can answer it"
        )
        router.start_worker("P0,D0", "--step-s", "0.02")
        with httpx.stream("GET", router.url + "/cluster/events", headers=auth, timeout=10) as stream:
            events = _events(stream)
            assert {i["name"]: i["status"] for i in next(events)["instances"]} == {"P0": "up", "D0": "up"}
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 30}
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(httpx.post, router.url + "/v1/completions", json=body, headers=auth)
                states = [r["state"] for r in next(e for e in events if e["requests"])["requests"]]
                assert states in (["prefill"], ["decode"])
                ended = next(e for e in events if any(r["state"] == "finished" for r in e["requests"]))
            assert ended["requests"][0]["request_id"] == answer.result().headers["x-request-id"]
            assert ended["requests"][0]["output_tokens"] == 30
            router.signal(signal.SIGTERM)
            assert [e["in_flight"] for e in events][-1:] in ([], [0]), "the stream ends by itself"
        assert router.process.wait(60) == 0


def test_the_page_loads_nothing_from_elsewhere_and_needs_no_key(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, env=API_KEYS) as router:
        page = httpx.get(router.url + "/", timeout=60.0)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        files = re.findall(r'(?:src|href)="(web/[^"]+)"', page.text)
        assert len(files) >= 2
        for file in files:
            served = httpx.get(f"{router.url}/{file}", timeout=60.0)
            assert served.status_code == 200 and "content-security-policy" in served.headers, file
        assert httpx.get(router.url + "/web/../pyproject.toml", timeout=60.0).status_code in (401, 404)
        assert httpx.get(router.url + "/web/%2e%2e/app.py", timeout=60.0).status_code == 404


def _traced(trace: Path, kind: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_both_halves(model: Path, tmp_path: Path, stream: bool) -> None:
    with forked_router(tmp_path, model, ("model.served_name=tiny",)) as router:
        trace = tmp_path / "trace.jsonl"
        router.start_worker("P0,D0", "--step-s", "0.05", "--trace", str(trace))
        raw = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 4000, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", router.ports["port"])) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
            )
            wait_until(lambda: _traced(trace, "DecodeRequest"), 5, "the request at D")
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: len(_traced(trace, "CancelRequest")) == 2, 5, "the cancellation at P and D")
        assert {line["instance"] for line in _traced(trace, "CancelRequest")} == {"P0", "D0"}


def test_a_pair_without_writes_is_refused_at_once_and_named_until_another_serves(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ("model.served_name=tiny",)) as router:
        router.start_worker("P0", "--suspended")
        router.start_worker("D0")
        url, body = router.url + "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 2}
        wait_until(
            lambda: "write" in httpx.get(router.url + "/health", timeout=60.0).json()["reason"], 5, "a heartbeat of P0"
        )
        health, refused = httpx.get(router.url + "/health", timeout=60.0), httpx.post(url, json=body, timeout=60.0)
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        assert health.json()["reason"].startswith("no pair can serve: P0 does not write to D0")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == health.json()["reason"]
        snapshot = RouterClient(router.url).cluster()
        assert not snapshot.requests
        assert {i.name: i.load.suspended for i in snapshot.instances if i.load} == {"P0": (0,), "D0": ()}
        router.start_worker("D1")
        assert httpx.get(router.url + "/health", timeout=60.0).status_code == 200
        for _ in range(3):
            assert httpx.post(url, json=body, timeout=60.0).status_code == 200
        served = RouterClient(router.url).cluster().requests
        assert {(record.prefill, record.decode, record.attempt) for record in served} == {("P0", "D1", 1)}


def test_failures_reach_the_client_and_the_cluster_heals(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ("model.served_name=tiny",)) as router:
        client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        router.start_worker("P0")
        decode = router.start_worker("D0", "--step-s", "0.05")
        stream = client.completions.create(model="tiny", prompt="hi", max_tokens=3000, stream=True)
        next(iter(stream))
        decode.kill()
        with pytest.raises(openai.APIError) as lost:
            for _ in stream:
                pass
        assert lost.value.code == "decode_lost"
        wait_until(lambda: httpx.get(router.url + "/health", timeout=60.0).status_code == 503, 5, "no pair")
        router.start_worker("D0", "--fail-decode", "transfer_timeout")
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="tiny", prompt="hi", max_tokens=30)
        assert failed.value.status_code == 503 and failed.value.code == "transfer_timeout"
        router.start_worker("D1")
        text = [client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30).choices[0].text for _ in range(6)]
        assert len(set(text)) == 1, "D1 goes on where D0 fails"
        states = [record.state for record in RouterClient(router.url).cluster().requests]
        assert states.count("finished") == 6 and "retried" in states


def test_a_restarted_router_gets_its_workers_back(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ("model.served_name=tiny",)) as router:
        router.start_worker("P0,D0")
        router.signal(signal.SIGKILL)
        router.process.wait()
        router.start()
        wait_until(lambda: router.members() == {"P0", "D0"}, 5, "the workers to join again")
        client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        assert client.completions.create(model="tiny", prompt="hi", max_tokens=2).choices[0].text


def test_a_prefill_that_left_is_gone_from_the_bootstrap_directory_at_once(model: Path, tmp_path: Path) -> None:
    lease = "dp_config.router.pd_disaggregation.deadlines.lease_s=60"
    with forked_router(tmp_path, model, (lease,)) as router:
        worker = router.start_worker("P0,D0")
        directory = f"http://127.0.0.1:{router.ports['bootstrap_port']}/route"
        assert len(httpx.get(directory, timeout=60.0).json()) == 1
        minimal = {"role": "prefill", "rank_ip": "10.0.0.7", "rank_port": 5100, "engine_rank": 7}
        assert httpx.put(directory, json=minimal, timeout=60.0).status_code == 200
        assert httpx.get(directory, params={"engine_rank": 7}, timeout=60.0).json() == minimal
        worker.terminate()
        wait_until(
            lambda: httpx.get(directory, timeout=60.0).json() == [minimal],
            10,
            "the entry to go, and the other one to stay",
        )


def test_sigterm_lets_running_requests_finish(model: Path, tmp_path: Path) -> None:
    with forked_router(tmp_path, model, ("model.served_name=tiny",)) as router:
        router.start_worker("P0,D0", "--step-s", "0.02")
        client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        stream = iter(client.completions.create(model="tiny", prompt="hi", max_tokens=50, stream=True))
        chunks = [next(stream)]
        router.signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert router.process.wait(60) == 0


def test_start_is_fast_and_without_torch(model: Path, tmp_path: Path) -> None:
    with RouterUnderTest(tmp_path, model) as router:
        maps = Path(f"/proc/{router.pid}/maps").read_text()
        assert "libtorch" not in maps and "/torch/" not in maps
