"""What coding agents send and read, with a real router whose model output is scripted, as in test_http_tools.py: the
answer is the last user's message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from nursery import forked_router
from support.agent_requests import PATCH, anthropic_agent, codex_agent
from support.router_process import RouterUnderTest
from support.scripted_template import SCRIPT

from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.tokenizer import Tokenizer
from chitu.tools.make_model import make_model

THOUGHT = "<think>\nHm.\n</think>\n\nLet me look."
ARGUMENTS = {"path": 'a "b"/ü.py', "limit": None}
CALL = f'<tool_call>\n{{"name": "read", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
KEY = "sk-agents-0123456789"
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    model = make_model(tmp_path_factory.mktemp("scripted") / "model", family="qwen3")
    (model / "chat_template.jinja").write_text(SCRIPT, encoding="utf-8")
    yield model
    shutil.rmtree(model)


def worker_options(model: Path) -> list[str]:
    tokenizer = Tokenizer.load(model)
    stop = str(tokenizer.encode(tokenizer.special_tokens["eos_token"], add_special_tokens=False)[0])
    return ["--vocab-size", "100000", "--stop-token", stop, "--step-s", "0.001"]


@pytest.fixture(scope="module")
def router(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterUnderTest]:
    env = {"CHITU_API_KEYS": KEY}
    with forked_router(tmp_path_factory.mktemp("router"), model, ("model.served_name=tiny",), env=env) as router:
        router.start_worker("P0,D0", *worker_options(model))
        yield router


def post(router: RouterUnderTest, body: Any, path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return httpx.post(router.url + path, json=body, headers={**HEADERS, **headers}, timeout=60, trust_env=False)


def says(text: str, **fields: Any) -> dict[str, Any]:
    """Return an agent's body to which the model answers with this text."""
    body = anthropic_agent(**fields)
    body["messages"].append({"role": "user", "content": [{"type": "text", "text": text}]})
    body["messages"][-2]["content"] = body["messages"][-2]["content"][:1]  # results alone, so that the text is a turn
    return body


def message_of(response: httpx.Response) -> dict[str, Any]:
    """Return the message that a stream adds up to."""
    assert response.headers["content-type"].startswith("text/event-stream")
    whole: dict[str, Any] = {}
    for event in response.text.split("\n\n")[:-1]:
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        told = json.loads(lines[1].removeprefix("data: "))
        assert lines[0] == f"event: {told['type']}"
        kind = told["type"]
        if kind == "message_start":
            whole = told["message"]
        elif kind == "content_block_start":
            whole["content"].append(told["content_block"])
        elif kind == "content_block_delta":
            block, delta = whole["content"][told["index"]], told["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "message_delta":
            whole |= told["delta"]
            whole["usage"] = told["usage"]
    assert kind == "message_stop"
    return whole


def test_an_agents_request_is_answered_whole_and_streamed(router: RouterUnderTest) -> None:
    body = says(f"{THOUGHT}\n{CALL}\n{CALL}")
    assert len(json.dumps(body)) > LARGE_BODY_BYTES, "read in a process beside the loop"
    answers = []
    for stream in (False, True):
        response = post(router, {**body, "stream": stream})
        assert response.status_code == 200, response.text
        assert response.headers["request-id"] == response.headers["x-request-id"]
        assert "web_search_20250305" in response.headers["x-chitu-warning"]
        answers.append(message_of(response) if stream else response.json())
    for answer in answers:
        assert answer["id"].startswith("msg_") and answer["type"] == "message" and answer["role"] == "assistant"
        thinking, text, *calls = answer["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.") and thinking["signature"]
        assert text == {"type": "text", "text": "Let me look."}
        assert [(call["name"], call["input"]) for call in calls] == [("read", ARGUMENTS)] * 2
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    usages = [answer["usage"] for answer in answers]
    assert usages[0]["output_tokens"] == usages[1]["output_tokens"] > 0
    sums = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
    counting = {name: value for name, value in body.items() if name not in ("stream", "max_tokens", "temperature")}
    counted = post(router, {**counting, "metadata": None}, "/v1/messages/count_tokens")
    assert counted.status_code == 200 and "metadata" in counted.headers["x-chitu-warning"], "of messages alone"
    del counting["metadata"]
    counted = post(router, counting, "/v1/messages/count_tokens")
    assert sums == [counted.json()["input_tokens"]] * 2, counted.text


def test_why_an_answer_ends_is_told(router: RouterUnderTest) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one two three four five six seven"}]}
    for fields, reason, stop, text in (
        ({"max_tokens": 99}, "end_turn", None, "one two three four five six seven"),
        ({"max_tokens": 99, "stop_sequences": ["xx", " four"]}, "stop_sequence", " four", "one two three"),
        ({"max_tokens": 99, "stop_sequences": ["<|endoftext|>", "<|im_end|>"]}, "", "", None),
        ({"max_tokens": 2}, "max_tokens", None, None),
        ({"max_tokens": 1 << 30}, "end_turn", None, "one two three four five six seven"),
    ):
        whole = post(router, {**body, **fields})
        streamed = post(router, {**body, **fields, "stream": True})
        assert whole.status_code == 200, whole.text
        answer = whole.json()
        for each in (answer, message_of(streamed)):
            if reason:
                assert (each["stop_reason"], each["stop_sequence"]) == (reason, stop), each
            else:  # the text of the token that ends the model's turn is a stop string, too
                assert each["stop_reason"] == "stop_sequence" and each["stop_sequence"] in fields["stop_sequences"]
            if text is not None:
                assert [block["text"] for block in each["content"]] == [text]


def test_errors_are_anthropics(router: RouterUnderTest, model: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": "a"}
    body = {"model": "tiny", "max_tokens": 9, "messages": [message]}
    state = {"type": "browser_state", "tabs": [], "state_changes": []}
    for sent, headers, status, kind, text in (
        (body, {"x-api-key": "wrong"}, 401, "authentication_error", "API key"),
        (body, {"x-api-key": ""}, 401, "authentication_error", "API key"),
        ({**body, "model": "gone"}, {}, 404, "not_found_error", "'gone'"),
        ({**body, "messages": [{"role": "user", "content": [state]}]}, {}, 400, "invalid_request_error", "images"),
        ({**body, "max_tokens": "9"}, {}, 400, "invalid_request_error", "max_tokens"),
        ({**body, "tool_choice": {"type": "any"}}, {}, 400, "invalid_request_error", "tool_choice"),
        (
            {**body, "messages": [{**message, "content": "a " * 9999}]},
            {},
            400,
            "invalid_request_error",
            "too long",
        ),
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            if path.endswith("tokens") and text in ("too long", "max_tokens"):
                continue
            counted = {name: value for name, value in sent.items() if name != "max_tokens"}
            response = post(router, sent if path == "/v1/messages" else counted, path, **headers)
            told = response.json()
            assert (response.status_code, told["type"], told["error"]["type"]) == (status, "error", kind), response.text
            assert text in told["error"]["message"] and told["request_id"] == response.headers["request-id"]
    wrong = httpx.get(f"{router.url}/v1/messages", headers=HEADERS, trust_env=False, timeout=60.0)
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert post(router, body, **{"x-api-key": "", "authorization": f"Bearer {KEY}"}).status_code == 200
    large = {"type": "text", "text": "x" * 3000}
    settings = ("dp_config.router.max_body_bytes=2000",)
    with forked_router(tmp_path, model, settings) as alone:
        response = post(alone, {**body, "messages": [{"role": "user", "content": [large]}]})
        assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
        response = post(alone, {**body, "model": None})
        assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error"), "nothing serves"
        assert int(response.headers["retry-after"]) >= 1


def test_a_silent_stream_that_has_begun_gets_pings(model: Path, tmp_path: Path) -> None:
    slow = [*worker_options(model)[:-1], "0.3"]
    with forked_router(tmp_path, model, ("dp_config.router.stream_comment_s=0.1",)) as router:
        router.start_worker("P0,D0", *slow)
        body = {"max_tokens": 4, "messages": [{"role": "user", "content": "a b c d e"}], "stream": True}
        response = post(router, body)
    events = [event.split("\n")[0] for event in response.text.split("\n\n")[:-1]]
    start = events.index("event: message_start")
    assert "event: ping" in events[start:] and "event: ping" not in events[:start]
    assert 'data: {"type":"ping"}' in response.text and events[-1] == "event: message_stop"


def test_a_request_of_the_codex_cli_is_answered_whole_and_streamed(router: RouterUnderTest) -> None:
    patch = f'<tool_call>\n{{"name": "apply_patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>'
    body = codex_agent()
    text = f"{THOUGHT}\n{patch}"
    body["input"].append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
    stream = body.pop("stream")
    body["extra_body"] = {"client_metadata": body.pop("client_metadata")}  # no field of OpenAI's client
    with openai.OpenAI(base_url=router.url + "/v1", api_key=KEY, max_retries=0) as client:
        raw = client.responses.with_raw_response.create(**body)
        assert "local_shell, web_search" in raw.headers["x-chitu-warning"]
        assert "tools[2].format: calls need not follow" in raw.headers["x-chitu-warning"]
        whole = raw.parse()
        events = list(client.responses.create(**body, stream=stream))
    for answer in (whole, events[-1].response):
        assert answer.status == "completed" and answer.truncation == "disabled"
        reasoning, message, call = answer.output
        assert reasoning.content[0].text == "Hm." and reasoning.encrypted_content.startswith("chitu1.")
        assert message.content[0].text == "Let me look."
        assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    kinds = [event.type for event in events]
    assert kinds.count("response.custom_tool_call_input.delta") == 1
    assert kinds.count("response.custom_tool_call_input.done") == 1
    # What the client sends back of it: of the reasoning only the part that it does not look at.
    body["input"][-1]["content"][0]["text"] = "Fix it."
    body["input"] += [
        {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content},
        {"type": "custom_tool_call", "call_id": call.call_id, "name": call.name, "input": call.input},
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done!"},
        {"type": "message", "role": "user", "content": "So?"},
    ]
    with openai.OpenAI(base_url=router.url + "/v1", api_key=KEY, max_retries=0) as client:
        assert client.responses.create(**body).output_text == "So?"
        for fields, param in (
            ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
            ({"tool_choice": {"type": "custom", "name": "web_search"}}, "tool_choice"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ):
            with pytest.raises(openai.BadRequestError) as raised:
                client.responses.create(**{**body, **fields})
            assert raised.value.param == param
