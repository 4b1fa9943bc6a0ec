"""Streams that are silent for long: comments keep them open, and every reader of ours and of OpenAI skips them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_server_alone import Client, get
from nursery import forked_router
from support.router_process import RouterUnderTest

from chitu.config.schema import RouterConfig
from chitu.http.wire.limits import HTTPLimits
from chitu.launch.router_client import RouterClient
from chitu.tools.make_model import make_model

COMMENT = ": keep-alive"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello again", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
ITEMS: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 8}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterUnderTest]:
    """Yield a router whose D takes 0.4 s for each token, and whose streams get a comment after 0.15 s."""
    model = make_model(tmp_path_factory.mktemp("model") / "tiny", family="qwen3")
    keys = ("model.served_name=tiny", "dp_config.router.stream_comment_s=0.15", "dp_config.router.keep_alive_s=0.5")
    with forked_router(tmp_path_factory.mktemp("router"), model, keys) as router:
        router.start_worker("P0,D0", "--vocab-size", "100000", "--max-model-len", "512", "--step-s", "0.4")
        yield router


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", BODY), ("chat/completions", CHAT), ("responses", ITEMS)],
    ids=["completions", "chat", "responses"],
)
def test_comments_come_before_the_first_token_and_between_tokens(
    router: RouterUnderTest, path: str, body: dict[str, Any]
) -> None:
    with httpx.stream("POST", f"{router.url}/v1/{path}", json={**body, "stream": True}, timeout=30) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    events = [at for at, line in enumerate(lines) if line.startswith("data: ")]
    comments = [at for at, line in enumerate(lines) if line == COMMENT]
    assert any(at < events[0] for at in comments) and any(events[0] < at < events[-1] for at in comments)
    assert len(lines) == len(events) + len(comments) + sum(line.startswith("event: ") for line in lines)


def test_openais_client_skips_them(router: RouterUnderTest) -> None:
    client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
    whole, streamed = client.completions.create(**BODY), client.completions.create(**BODY, stream=True)
    assert "".join([chunk.choices[0].text for chunk in streamed]) == whole.choices[0].text
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    events = list(client.responses.create(**ITEMS, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"


def test_the_reader_of_chitu_chat_skips_them(router: RouterUnderTest) -> None:
    client = RouterClient(router.url)
    texts: list[str] = []
    answer = client.stream("/v1/completions", BODY, texts.append)
    whole = json.loads(client.post("/v1/completions", BODY, 30)[1])
    assert answer.error is None and answer.is_complete
    assert "".join(texts) == answer.text == whole["choices"][0]["text"]


def test_an_answer_that_is_not_streamed_has_none(router: RouterUnderTest) -> None:
    answer = httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=30)
    assert answer.headers["content-length"] == str(len(answer.content)) and COMMENT.encode() not in answer.content


async def test_an_idle_connection_is_closed_after_the_key_and_by_default_later_than_proxies_do(
    router: RouterUnderTest,
) -> None:
    client = await Client.connect(int(router.url.rpartition(":")[2]))
    client.send(get().replace(b"GET /", b"GET /livez"))
    assert await client.status() == 200
    assert await client.is_closed(), "after 0.5 s"
    assert HTTPLimits.of(RouterConfig()).keep_alive_s > 90
