"""LoRA adapters in a real 1P1D cluster over HTTP: the answers of `transformers` with the adapter that the request
names, pages that only requests of one adapter share, choices of one prompt, receipts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import transformers
from nursery import FORKED
from test_lora import SQL, TONE, linear_layers, merged, sql_layer, tone_layer, write_adapter

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.protocol.receipt import Receipt
from chitu.tools.make_model import make_model
from chitu.tools.replay import ReplayOptions, Saved, replay_receipts

NAMES = ("m", "sql", "tone")
PROMPT = list(range(40, 100))


@dataclass
class World:
    url: str
    model: Path
    adapters: dict[str, str]
    references: dict[str, transformers.PreTrainedModel] = field(default_factory=dict)

    def ask(self, name: str | None, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
        body = {"model": name, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        body |= {"return_token_ids": True, **more}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120.0, trust_env=False)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def error(self, name: str, answer: dict[str, Any], prompt: list[int] = PROMPT) -> float:
        """Return the largest error of the logprobs of its tokens, by `transformers` with this adapter."""
        choice = answer["choices"][0]
        tokens: list[int] = choice["token_ids"]
        with torch.inference_mode():
            logits = self.references[name](torch.tensor([prompt + tokens[:-1]])).logits[0, -len(tokens) :]
        theirs = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        return float((theirs - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("lora")
    model = make_model(folder / "m", family="qwen3", layers=3)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapters, references = {}, {"m": base}
    for name, config, adapted in (("sql", SQL, sql_layer), ("tone", TONE, tone_layer)):
        write_adapter(folder / name, config, linear_layers(base), adapted)
        adapters[name] = str(folder / name)
        references[name] = merged(base, folder / name, adapted)
    settings = [f"model.path={model}", *(f"model.adapters.{name}={path}" for name, path in adapters.items())]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield World(cluster.url, model, adapters, references)


def test_adapters_are_models_with_their_parent(world: World) -> None:
    cards = httpx.get(f"{world.url}/v1/models", trust_env=False, timeout=60.0).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("m", None), ("sql", "m"), ("tone", "m")]
    assert cards[1] == httpx.get(f"{world.url}/v1/models/sql", trust_env=False, timeout=60.0).json()
    assert (cards[1]["root"], cards[1]["max_model_len"]) == (world.adapters["sql"], cards[0]["max_model_len"])
    assert httpx.get(f"{world.url}/v1/models/poems", trust_env=False, timeout=60.0).status_code == 404
    instances = httpx.get(f"{world.url}/cluster", trust_env=False, timeout=60.0).json()["instances"]
    of_p, of_d = (instance["layout"]["adapters"] for instance in instances)
    assert of_p == of_d and [name for name, _ in of_p] == ["sql", "tone"]


def test_a_request_is_computed_by_the_model_that_it_names(world: World) -> None:
    answers = {name: world.ask(name, cache_salt="each") for name in NAMES}
    for name, answer in answers.items():
        assert answer["model"] == name
        assert world.error(name, answer) < 1e-4
        others = [other for other in NAMES if other != name]
        assert min(world.error(other, answer) for other in others) > 1e-3, "no other one would do"
    assert world.ask(None)["model"] == "m"


def test_an_unknown_name_is_a_404_with_the_known_ones(world: World) -> None:
    for route, more in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = httpx.post(f"{world.url}/v1/{route}", json={"model": "poems", **more}, trust_env=False, timeout=60.0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert "this server has 'm', 'sql', 'tone'" in reply.json()["error"]["message"]


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_chats_choose_by_name_too(world: World, route: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "messages": messages}
    if route == "responses":
        body = {"max_output_tokens": 8, "temperature": 0, "input": messages}
    texts = set()
    for name in NAMES:
        given = {"model": name, **body}
        reply = httpx.post(f"{world.url}/v1/{route}", json=given, timeout=60.0, trust_env=False)
        assert (reply.status_code, reply.json()["model"]) == (200, name), reply.text
        answer = reply.json()
        texts.add(repr(answer.get("choices") or answer.get("output") or answer["content"]))
    assert len(texts) == 3


def test_pages_are_shared_by_requests_of_one_adapter_alone(world: World) -> None:
    prompt = list(range(100, 180))
    for round_number in range(2):
        for name in NAMES:
            answer = world.ask(name, prompt)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (64 if round_number else 0), (name, round_number)
            assert world.error(name, answer, prompt) < 1e-4


def test_choices_of_one_prompt_have_its_adapter(world: World) -> None:
    answer = world.ask("tone", n=3, temperature=1.0, seed=5)
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        assert world.error("tone", {"choices": [choice]}) < 1e-4


def test_a_receipt_is_replayed_with_its_adapter_alone(world: World) -> None:
    answer = world.ask("sql", return_proof=True, return_receipt=True, logprobs=None)
    receipt = msgspec.convert(answer["chitu"]["receipt"], Receipt, str_keys=True)
    assert (receipt.model, len(receipt.adapter_hash)) == ("sql", 32)
    for adapters, verdict in (((), "unjudged"), ((world.adapters["tone"], world.adapters["sql"]), "same")):
        options = ReplayOptions(None, str(world.model), adapters, entries=FORKED)
        (result,) = replay_receipts(options, [Saved(receipt)], lambda text: None)
        assert result.verdict == verdict, result.says
    other = msgspec.structs.replace(receipt, adapter_hash="0" * 32)
    (result,) = replay_receipts(ReplayOptions(world.url), [Saved(other)], lambda text: None)
    assert result.says == "changed since it was made: adapter_hash"
