"""Fields that say where an answer ends and what it looks like, on real processes: 1P1D with the embedded model, whose
chat template is replaced by one with Llama 3's calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from nursery import FORKED, forked_router
from support.scripted_template import HERMES, SCRIPT

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tokenizer import Tokenizer

MARK = "<|im_start|>"
[MARK_ID] = Tokenizer.load(TINY_MODEL_DIR).encode(MARK, add_special_tokens=False)
LLAMA3 = '<|start_header_id|> "parameters"'
EOS_ID = Tokenizer.load(TINY_MODEL_DIR).eos_token_ids[0]
TEMPLATE = """{#- <|start_header_id|> "parameters" -#}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY_MODEL_DIR, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = [f"model.path={model}", "model.served_name=m"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster.url


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a router whose model answers with the text of the last turn, and calls as Llama 3."""
    folder = tmp_path_factory.mktemp("scripted")
    shutil.copytree(TINY_MODEL_DIR, folder / "tiny")
    (folder / "tiny" / "chat_template.jinja").write_text(SCRIPT.replace(HERMES, LLAMA3))
    with forked_router(folder, folder / "tiny", ("model.served_name=m",)) as router:
        router.start_worker("P0,D0", "--vocab-size", "100000", "--stop-token", str(EOS_ID), "--step-s", "0.001")
        yield router.url


def asked(url: str, route: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """Return the answer that is not streamed, after comparing it with that of a stream."""
    if route == "chat/completions":
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = "hello"
    body = {"temperature": 0, "return_token_ids": True, **fields}
    reply = httpx.post(f"{url}/v1/{route}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    events = httpx.post(f"{url}/v1/{route}", json={**body, **streaming}, timeout=120)
    assert events.status_code == 200, events.text
    parts = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
    choices = [part["choices"][0] for part in parts if part["choices"]]
    [choice] = whole["choices"]
    if "text" in choice:
        assert "".join(part["text"] for part in choices) == choice["text"]
    else:
        shown = "".join(part["delta"].get("content") or "" for part in choices)
        assert shown == (choice["message"]["content"] or "")
        calls = [call["function"] for part in choices for call in part["delta"].get("tool_calls") or ()]
        assert calls == [call["function"] for call in choice["message"].get("tool_calls") or ()]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert [token for part in choices for token in part.get("token_ids") or ()] == choice["token_ids"]
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize(
    ("stop", "num_tokens"),
    [(MARK, 1), (["never", MARK], 1), ([MARK * 2, "never"], 2), ([MARK * 3, MARK * 2], 2), (["a" + MARK], 6)],
)
def test_a_stop_string_may_have_special_tokens(
    url: str, route: str, skips: bool, included: bool, stop: Any, num_tokens: int
) -> None:
    fields = {"stop": stop, "skip_special_tokens": skips, "include_stop_str_in_output": included}
    logprobs = {"logprobs": True} if route.startswith("chat") else {"logprobs": 0}
    choice = asked(url, route, max_tokens=6, allowed_token_ids=[MARK_ID], **fields, **logprobs)
    assert choice["token_ids"] == [MARK_ID] * num_tokens
    assert choice["finish_reason"] == ("length" if num_tokens == 6 else "stop")
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    assert text == ("" if skips and num_tokens == 6 else MARK * num_tokens if included or num_tokens == 6 else "")
    entries = choice["logprobs"].get("content") or choice["logprobs"]["tokens"]
    assert len(entries) == num_tokens


def test_at_a_stop_string_that_is_a_special_token_nothing_more_is_computed(url: str) -> None:
    for fields, finish in (({"stop": MARK}, "stop"), ({"stop_token_ids": [MARK_ID]}, "stop"), ({"stop": "l"}, "text")):
        allowed = {"allowed_token_ids": [MARK_ID]} if finish == "stop" else {"guided_regex": "hello"}
        body = {"prompt": "hello", "max_tokens": 9, "return_proof": True, "return_receipt": True, **fields, **allowed}
        body["logprobs"] = 1  # so that D alone draws the first token: the router may end an answer at P's
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["chitu"]["receipt"]["finish"] == finish, answer  # whether D or the router ended it


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "parameters": null}', {}),
        ('{"name": "f", "parameters": {"a": "x\n\ty"}}', {"a": "x\n\ty"}),
        ('```json\n[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]\n```', {}),
        ('{"name": "f", "parameters": {"a": "x"y"}}', None),
        ('{"answer": 5}', None),
    ],
)
def test_a_call_is_the_same_streamed_and_not(scripted: str, text: str, arguments: dict[str, Any] | None) -> None:
    choice = asked(scripted, "chat/completions", text, tools=[TOOL], max_tokens=200)
    if arguments is None:
        assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    else:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == arguments
        assert not choice["message"]["content"] and choice["finish_reason"] == "tool_calls"
    asked(scripted, "chat/completions", text, tools=[TOOL], max_tokens=12)  # cut off


def test_a_schema_is_obeyed_under_any_type_and_an_annotation_refuses_nothing(url: str) -> None:
    secret = {"type": "string", "format": "password", "maxLength": 5}
    schema = {"type": "object", "properties": {"zz": secret}, "required": ["zz"], "additionalProperties": False}
    for given in ({"schema": schema}, {"json_schema": {"schema": schema}}):
        wanted = {"type": "json_object", **given}
        choice = asked(url, "chat/completions", response_format=wanted, max_tokens=60)
        assert json.loads(choice["message"]["content"]).keys() == {"zz"}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    choice = asked(url, "chat/completions", tools=[tool], tool_choice="required", max_tokens=100)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]).keys() == {"zz"}
    tool["function"]["parameters"] = {"properties": {"a": {"not": {}}}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL, tool], "tool_choice": "required"}
    tool["function"]["name"] = "g"
    error = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0).json()["error"]
    assert error["param"] == "tools[1].function.parameters.properties.a" and "'g'" in error["message"], error


def test_a_digit_of_a_regular_expression_is_ascii(url: str) -> None:
    for seed in range(8):
        body = {"prompt": "a", "guided_regex": r"^\d{4}$", "temperature": 1, "seed": seed, "max_tokens": 40}
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
        assert len(text) == 4 and text.isascii() and text.isdigit()
