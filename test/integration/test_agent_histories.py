"""Each kind of what agents send and models write, in the three APIs, streamed and whole: one history, one answer.

The model's answer is scripted: it is the text of the last turn (`support/scripted_template.py`).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest
from support.scripted_template import SCRIPT

from chitu.tokenizer import Tokenizer
from chitu.tools.make_model import make_model

ARGUMENTS = {"path": "a.py", "all": True}
CALL = f'<tool_call>\n{{"name": "read", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
PNG = "iVBORw0KGgo="
Turn = tuple[str, Any]
Piece = tuple[str, Any]
"""`reasoning` or `text` with a text, or `call` with name and arguments."""
SAID: Piece = ("text", "Hi.")
READ: Piece = ("call", ("read", ARGUMENTS))
ASKED: list[Turn] = [("user", "Read it."), ("call", ("call_1", json.dumps({"path": "b.py"})))]


class Kind(NamedTuple):
    turns: list[Turn]
    answer: str
    pieces: list[Piece]
    warning: str = ""
    """What the header X-Chitu-Warning has in it; empty: there is none."""
    fields: dict[str, Any] = {}
    num_tools: int = 1


KINDS = {
    "a later system turn": Kind([("user", "a"), ("text", "b"), ("system", "c")], "Hi.", [SAID]),
    "two system turns": Kind([("system", "a"), ("system", "b"), ("user", "c"), ("text", "d")], "Hi.", [SAID]),
    "text behind a result": Kind([*ASKED, ("result", "code"), ("user", "Well?"), ("text", "b")], "Hi.", [SAID]),
    "an image in a result": Kind([*ASKED, ("image", PNG), ("text", "b")], "Hi.", [SAID], "placeholder"),
    "arguments that were cut": Kind(
        [("user", "a"), ("call", ("call_1", '{"path": "b')), ("result", "?"), ("text", "b")], "Hi.", [SAID]
    ),
    "an unknown field": Kind([], "Hi.", [SAID], "chat_id", {"chat_id": "x", "session_id": "y"}),
    "129 tools": Kind([], CALL, [READ], num_tools=129),
    "a call": Kind([], CALL, [READ]),
    "a call in reasoning that was never closed": Kind([], f"<think>\nHm.\n{CALL}", [("reasoning", "Hm."), READ]),
    "a call without its last brace": Kind([], CALL.replace("}}", "}"), [READ]),
    "a call without its end": Kind([], CALL.removesuffix("\n</tool_call>"), [READ]),
    "a call in Python": Kind([], f"<tool_call>\n{ {'name': 'read', 'arguments': ARGUMENTS} }\n</tool_call>", [READ]),
    "text behind a call": Kind([], f"Look.\n{CALL}\nSo.", [("text", "Look."), READ, ("text", "So.")]),
    "a mark that closes nothing": Kind([], "Hi.\n</tool_call>", [SAID]),
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterUnderTest]:
    folder = tmp_path_factory.mktemp("scripted")
    model = make_model(folder / "model", family="qwen3")
    (model / "chat_template.jinja").write_text(SCRIPT, encoding="utf-8")
    tokenizer = Tokenizer.load(model)
    stop = str(tokenizer.encode(tokenizer.special_tokens["eos_token"], add_special_tokens=False)[0])
    with forked_router(folder, model, ("model.served_name=tiny",)) as router:
        router.start_worker("P0,D0", "--vocab-size", "100000", "--stop-token", stop, "--step-s", "0.001")
        yield router
    shutil.rmtree(model)


def tools_of(kind: Kind) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "read", {"type": "object", "properties": {"path": {"type": "string"}, "all": {"type": "boolean"}}}
    for i in range(1, kind.num_tools):
        yield f"other_{i}", {"type": "object"}


# ------------------------------------------------------------------------------ the same chat in the words of each API


def chat_body(kind: Kind) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for role, told in kind.turns:
        if role in ("system", "user"):
            messages.append({"role": role, "content": told})
        elif role == "text":
            messages.append({"role": "assistant", "content": told})
        elif role == "call":
            function = {"name": "read", "arguments": told[1]}
            call = {"id": told[0], "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            image = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{told}"}}]
            content = told if role == "result" else image
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": content})
    messages.append({"role": "user", "content": kind.answer})
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in tools_of(kind)]
    return {"messages": messages, "tools": tools}


def responses_body(kind: Kind) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for role, told in kind.turns:
        if role in ("system", "user"):
            items.append({"role": role, "content": told})
        elif role == "text":
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": told}]})
        elif role == "call":
            items.append({"type": "function_call", "call_id": told[0], "name": "read", "arguments": told[1]})
        else:
            image = [{"type": "input_image", "image_url": f"data:image/png;base64,{told}"}]
            output = told if role == "result" else image
            items.append({"type": "function_call_output", "call_id": "call_1", "output": output})
    items.append({"role": "user", "content": kind.answer})
    tools = [{"type": "function", "name": n, "parameters": p} for n, p in tools_of(kind)]
    return {"input": items, "tools": tools}


def messages_body(kind: Kind) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for role, told in kind.turns:
        if role in ("system", "user"):
            messages.append({"role": role, "content": told})
        elif role == "text":
            messages.append({"role": "assistant", "content": [{"type": "text", "text": told}]})
        elif role == "call":
            block = {"type": "tool_use", "id": told[0], "name": "read", "input": {"path": told[1]}}
            messages.append({"role": "assistant", "content": [block]})
        else:
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": told}}
            content = told if role == "result" else [image]
            block = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
            messages.append({"role": "user", "content": [block]})
    messages.append({"role": "user", "content": kind.answer})
    tools = [{"name": n, "input_schema": p} for n, p in tools_of(kind)]
    return {"messages": messages, "tools": tools, "max_tokens": 400}


# ----------------------------------------------------------------------------------------------------- what came of it


def pieces_of_chat(message: dict[str, Any]) -> list[Piece]:
    """Return the pieces of a chat's message, which has no order of text and calls."""
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
    named = (("reasoning", message.get("reasoning_content")), ("text", message.get("content")))
    return [
        *((name, text.strip()) for name, text in named if text and text.strip()),
        *(("call", call) for call in calls),
    ]


def pieces_of_responses(output: list[dict[str, Any]]) -> list[Piece]:
    found: list[Piece] = []
    for item in output:
        if item["type"] == "function_call":
            found.append(("call", (item["name"], json.loads(item["arguments"]))))
        else:
            name = "reasoning" if item["type"] == "reasoning" else "text"
            found.append((name, "".join(part["text"] for part in item["content"]).strip()))
    return found


def pieces_of_messages(content: list[dict[str, Any]]) -> list[Piece]:
    found: list[Piece] = []
    for block in content:
        if block["type"] == "tool_use":
            found.append(("call", (block["name"], block["input"])))
        else:
            name, key = ("reasoning", "thinking") if block["type"] == "thinking" else ("text", "text")
            found.append((name, block[key].strip()))
    return found


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def message_of_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning_content"):
            whole[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(whole["tool_calls"]):
                whole["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            whole["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
    return whole


def blocks_of_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            elif delta["type"] != "signature_delta":
                block[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
    return blocks


def answered(api: str, response: httpx.Response, stream: bool) -> list[Piece]:
    if api == "chat":
        told = message_of_chunks(events_of(response)) if stream else response.json()["choices"][0]["message"]
        return pieces_of_chat(told)
    if api == "responses":
        return pieces_of_responses((events_of(response)[-1]["response"] if stream else response.json())["output"])
    return pieces_of_messages(blocks_of_events(events_of(response)) if stream else response.json()["content"])


BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


@pytest.mark.parametrize(("api", "stream"), [*itertools.product(PATHS, (False, True))])
@pytest.mark.parametrize("name", KINDS)
def test_what_agents_send_and_models_write_is_served(
    router: RouterUnderTest, name: str, api: str, stream: bool
) -> None:
    kind = KINDS[name]
    body = {"model": "tiny", "stream": stream, **BODIES[api](kind), **kind.fields}
    response = httpx.post(router.url + PATHS[api], json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    found = answered(api, response, stream)
    expected = kind.pieces
    if api == "chat":
        texts = [text for piece, text in expected if piece == "text"]
        got = [text for piece, text in found if piece == "text"]
        assert "".join("".join(got).split()) == "".join(texts)
        expected, found = ([each for each in pieces if each[0] != "text"] for pieces in (expected, found))
    assert found == expected
    warning = response.headers.get("x-chitu-warning", "")
    assert kind.warning in warning and bool(warning) is bool(kind.warning), warning
