"""SmolLM2, served by one P and one D: the numbers of its file, its tokens and logprobs, what it says by each API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from nursery import run_chitu
from published import LIMIT, Judge, post
from tilted import merged

from chitu.launch.local import LocalCluster
from chitu.models.gguf_names import read_gguf
from chitu.models.weights import WeightSource
from chitu.net.client import EventParser

pytestmark = pytest.mark.timeout(600)
NUM_TENSORS = 272
NUMBERS = "326729eb7c3d653384cb95c1ef1ea6c6906c2eaad9031181b32ce76a2bf11970"
"""Digest of all names, shapes and numbers of the file, dequantised to float32, as the `gguf` package has them."""
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
FOREIGN = "Repeat exactly: 你好，世界！北京是中国的首都。👩‍👩‍👧 🎉🚀"
README = Path(__file__).parents[2] / "README.md"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def digests(folder: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Return a line of each tensor, or of those that are named: its name, its shape and a digest of its numbers."""
    found = {}
    with WeightSource(folder, torch.float32, torch.device("cpu"), None) as source:
        for name in names or sorted(source.names):
            shape = source.names[name]
            numbers = source.take(name, *shape).contiguous().numpy()
            found[name] = f"{name} {list(shape)} {hashlib.sha256(numbers).hexdigest()}\n"
    return found


def whole(lines: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def test_the_file_has_the_numbers_that_were_recorded_and_a_changed_scale_is_found(
    smollm2: Path, tmp_path: Path
) -> None:
    lines = digests(smollm2)
    assert len(lines) == NUM_TENSORS and whole(lines) == NUMBERS

    changed, name = tmp_path / "changed", "model.layers.7.mlp.up_proj.weight"
    shutil.copytree(smollm2, changed)
    tensor = dict(read_gguf([changed / "model.gguf"]))[name]
    with (changed / "model.gguf").open("r+b") as file:
        file.seek(tensor.offset)
        low = file.read(1)[0]
        file.seek(tensor.offset)
        file.write(bytes([low ^ 1]))  # the last bit of the first block's scale
    assert whole(lines | digests(changed, [name])) != NUMBERS


@pytest.mark.parametrize("length", [8, 90, 300])
def test_tokens_and_logprobs_are_those_of_transformers(cluster: LocalCluster, judge: Judge, length: int) -> None:
    answer = judge.judged(cluster, judge.prompt(length))
    assert answer.judgement.outcome == "same", answer.judgement.says
    assert answer.judgement.difference <= LIMIT


def test_an_adapter_is_the_model_that_has_it_merged(cluster: LocalCluster, judge: Judge, adapter: Path) -> None:
    prompt = judge.prompt(60)
    choice = post(
        cluster, "/v1/completions", model="tilted", prompt=prompt, max_tokens=16, logprobs=0, return_token_ids=True
    )["choices"][0]
    found, tokens = choice["logprobs"]["token_logprobs"], choice["token_ids"]

    def error() -> float:
        scores = judge.scorer.scores([*prompt, *tokens], len(tokens))
        return max(abs(own - score.logprob) for own, score in zip(found, scores, strict=True))

    with merged(judge.scorer.model, adapter):
        scores = judge.scorer.scores([*prompt, *tokens], len(tokens))
        assert [score.top for score in scores] == tokens
        assert error() <= LIMIT
    assert error() > 0.05, "the adapter changes nothing"


# ------------------------------------------------------------------------------------------ what it says, by each API


def texts_of_stream(cluster: LocalCluster, path: str, **body: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the events of a streamed answer but `[DONE]`, and the body as it came."""
    body = {"model": "m", "temperature": 0, "stream": True, **body}
    reply = httpx.post(f"{cluster.url}{path}", json=body, timeout=60.0, trust_env=False)
    assert reply.status_code == 200, reply.text
    events = EventParser().feed(reply.content)
    return [json.loads(event) for event in events if event != "[DONE]"], reply.text


def test_it_knows_the_capital_of_france_by_every_api_streamed_and_whole(cluster: LocalCluster) -> None:
    chat = post(cluster, "/v1/chat/completions", messages=[user(QUESTION)], max_tokens=20)["choices"][0]
    assert (chat["message"]["content"], chat["finish_reason"]) == (ANSWER, "stop")
    message = post(cluster, "/v1/messages", messages=[user(QUESTION)], max_tokens=20)
    assert ([part["text"] for part in message["content"]], message["stop_reason"]) == ([ANSWER], "end_turn")
    response = post(cluster, "/v1/responses", input=QUESTION, max_output_tokens=20)
    assert [part["text"] for item in response["output"] for part in item["content"]] == [ANSWER]

    events, _ = texts_of_stream(cluster, "/v1/chat/completions", messages=[user(QUESTION)], max_tokens=20)
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == ANSWER and len(list(filter(None, deltas))) > 3
    events, _ = texts_of_stream(cluster, "/v1/messages", messages=[user(QUESTION)], max_tokens=20)
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == ANSWER
    events, _ = texts_of_stream(cluster, "/v1/responses", input=QUESTION, max_output_tokens=20)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == ANSWER


def test_chat_in_a_terminal_answers_and_readmes_request_is_streamed(cluster: LocalCluster) -> None:
    argv = [sys.executable, "-m", "chitu.cli", "chat", "--url", cluster.url, QUESTION]
    done = run_chitu(argv, {**os.environ, "NO_COLOR": "1"}, 60)
    assert done.returncode == 0 and done.stdout.strip() == ANSWER, done.stdout + done.stderr

    found = re.search(r"^curl (\S+) -H '(.+?): (.+?)' \\\n  -d '(.+?)'$", README.read_text(), re.MULTILINE)
    assert found is not None, "README.md has no request"
    url, header, value, body = found.groups()
    path = url.removeprefix("http://127.0.0.1:21003")
    reply = httpx.post(cluster.url + path, content=body, headers={header: value}, timeout=60.0, trust_env=False)
    *events, last = EventParser().feed(reply.content)
    assert (reply.status_code, last) == (200, "[DONE]"), reply.text
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length")  # at the temperature of 1 anything may be said


def test_it_continues_what_a_client_has_begun(cluster: LocalCluster) -> None:
    messages = [user("What is the capital of Italy?"), {"role": "assistant", "content": "The capital of Italy is"}]
    chat = post(cluster, "/v1/chat/completions", messages=messages, max_tokens=8, continue_final_message=True)
    assert chat["choices"][0]["message"]["content"] == " Rome."
    message = post(cluster, "/v1/messages", messages=messages, max_tokens=8)
    assert message["content"][0]["text"] == " Rome."
    text = post(cluster, "/v1/completions", prompt="The capital of Italy is", max_tokens=8)["choices"][0]["text"]
    assert text.startswith(" Rome.")


@pytest.mark.parametrize(
    "roles", [["user"], ["system", "user"], ["user", "assistant", "system", "user"], ["system", "system", "user"]]
)
def test_prompts_of_chats_are_those_of_the_published_template(
    cluster: LocalCluster, judge: Judge, roles: list[str]
) -> None:
    messages = [{"role": role, "content": f"Turn {place}: who am I?"} for place, role in enumerate(roles)]
    expected = judge.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = judge.tokenizer.encode(expected, add_special_tokens=False)
    assert post(cluster, "/tokenize", messages=messages)["tokens"] == ids
    answer = post(cluster, "/v1/chat/completions", messages=messages, max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_chinese_and_emoji_are_streamed_in_whole_characters(cluster: LocalCluster) -> None:
    asked: dict[str, Any] = {"messages": [user(FOREIGN)], "max_tokens": 80}
    whole_text = post(cluster, "/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
    assert all(part in whole_text for part in ("你好，世界", "北京是中国的首都", "👩‍👩‍👧", "🚀")), whole_text
    events, raw = texts_of_stream(cluster, "/v1/chat/completions", **asked)
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == whole_text
    assert "\N{REPLACEMENT CHARACTER}" not in raw and "ufffd" not in raw.lower()


def test_an_answer_follows_its_json_schema(cluster: LocalCluster) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "country": {"enum": ["France", "Italy"]},
            "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        },
        "required": ["city", "country", "population"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    question = "Which city is the capital of Italy? Answer with the city, its country and its population."
    choice = post(cluster, "/v1/chat/completions", messages=[user(question)], max_tokens=80, response_format=wanted)[
        "choices"
    ][0]
    answer = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop" and list(answer) == ["city", "country", "population"]
    assert answer["country"] == "Italy" and 0 <= answer["population"] <= 99_999_999 and len(answer["city"]) <= 20
