"""Logprobs and grammars through a real cluster, for the official client in both forms. Logprobs are those of
transformers' float32 logits, tokens those of a plain loop over them, and every answer to a schema is valid.

P and D over shm and over Mooncake, a D of two ranks, and a unified instance: the first token comes from the row that P
hands over, all others from D's own steps.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema_rs
import msgspec
import numpy as np
import openai
import pydantic
import pytest
import torch
import transformers
from completions import complete_all, instance_loads, is_whole
from nursery import FORKED
from random_schemas import random_schema
from support.router_process import wait_until
from thinking_model import BIAS, make_thinking_model

from chitu.config.load import load_topology
from chitu.engine.sampler import Sampler
from chitu.grammars import GrammarCompiler
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.launch.local import LocalCluster
from chitu.protocol import Grammar, KVLayout, Reasoning, SamplingParams
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tokenizer import Tokenizer

VOCAB = 500
TOP = 5
CLOSE = 1e-4
KINDS = ["shm", "mooncake", "tp", "unified"]
FULL = [("mooncake", 96), ("tp", 96)]
"""Choices by hand: full pages are shared in D's tables, whatever brought them; the other length copies a page, too."""
PD = "dp_config.router.pd_disaggregation"
PROMPTS = [[7, 8, 9] * 30, list(range(20, 70)), [11]]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"temperature": 0.7, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"30": 4}},
]


ON_D = pytest.mark.parametrize("cluster", ["shm", "tp", "unified"], indirect=True, scope="module")
"""A grammar is D's alone, and no transport knows of it: what Mooncake brings is in the tests above, and in the
tokens of seeds."""
OF_ONE_RANK = pytest.mark.parametrize(
    "cluster",
    ["shm", pytest.param("tp", marks=pytest.mark.by_hand), "unified"],
    indirect=True,
    scope="module",
)
"""Of what the router and D's main rank do alone: the tests of plain loops above show that ranks change no token."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": VOCAB}
    return make_thinking_model(tmp_path_factory.mktemp("models") / "qwen3", **sizes)


@pytest.fixture(scope="module")
def reference(model: Path) -> transformers.PreTrainedModel:
    loaded: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module", params=KINDS)
def cluster(request: pytest.FixtureRequest, model: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=400", "scheduler.chunk_size=40"]
    name = "unified_local.yaml" if request.param == "unified" else "pd_disagg_1p1d_local.yaml"
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine")
        settings.append(f"{PD}.transport=mooncake")
    elif request.param == "tp":
        settings += [f"dp_config.router.decode_schedulers.0.{field}" for field in ("tp_size=2", "devices=[cpu,cpu]")]
    with LocalCluster(load_topology(name, settings), entries=FORKED) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def right_logprobs(reference: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return float32 `[len(output), V]`: logprobs of the model's unmodified logits."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_they_are_those_of_the_raw_logits_whatever_the_sampling(
    client: openai.OpenAI, reference: transformers.PreTrainedModel
) -> None:
    for sampling in SAMPLINGS:
        sampling = {**sampling}
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(
            model="m", prompt=PROMPTS, max_tokens=12, logprobs=TOP, extra_body=extra, **sampling
        )
        for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
            tokens: list[int] = choice.token_ids  # type: ignore[attr-defined]
            right = right_logprobs(reference, prompt, tokens)
            logprobs = choice.logprobs
            assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
            own = right.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(logprobs.token_logprobs), own, atol=CLOSE), (sampling, choice)
            for row, token, top in zip(right, tokens, logprobs.top_logprobs, strict=True):
                best = row.topk(TOP)
                with_own = best.values.tolist() + ([] if token in best.indices else [row[token].item()])
                assert sorted(top.values(), reverse=True) == pytest.approx(with_own, abs=CLOSE), (sampling, top)
            assert logprobs.tokens is not None and logprobs.text_offset is not None
            assert len(logprobs.tokens) == len(logprobs.text_offset) == 12
            assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)


@OF_ONE_RANK
@pytest.mark.slow
def test_the_official_client_streams_what_it_gets_at_once(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2).choices[0]
    assert whole.logprobs is not None and whole.logprobs.top_logprobs is not None
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, logprobs=2, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for part in parts if part.logprobs is not None for value in getattr(part.logprobs, field)]
        assert streamed == getattr(whole.logprobs, field), field
    only_own = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert only_own is not None and only_own.token_logprobs == whole.logprobs.token_logprobs
    assert [list(top) for top in only_own.top_logprobs or []] == [[token] for token in only_own.tokens or []]

    chat: dict[str, Any] = {"model": "m", "max_tokens": 16, "temperature": 1.0, "seed": 3, "logprobs": True}
    chat["messages"] = [{"role": "user", "content": "Say something."}]
    entries = client.chat.completions.create(**chat, top_logprobs=3).choices[0].logprobs
    assert entries is not None and entries.content and {len(entry.top_logprobs) for entry in entries.content} == {3}
    for entry in entries.content:
        assert entry.bytes is None or bytes(entry.bytes).decode(errors="ignore") in entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and entry.logprob <= values[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, top_logprobs=3, stream=True)]
    assert [e for c in chunks if c.logprobs is not None for e in c.logprobs.content or []] == entries.content
    plain = client.chat.completions.create(**chat).choices[0].logprobs
    assert plain is not None and [entry.logprob for entry in plain.content or []] == [
        entry.logprob for entry in entries.content
    ]


@pytest.mark.slow
def test_a_prompt_that_is_repeated_has_the_logprobs_of_every_position(
    client: openai.OpenAI, reference: transformers.PreTrainedModel
) -> None:
    """Prompts of several chunks, of one token, and (the second time) prompts that are in the prefix cache."""
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPTS, "logprobs": 2, "echo": True, "temperature": 0}
    asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    for max_tokens in (1, 4, 4):
        answer = client.completions.create(**asked, max_tokens=max_tokens)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0, "no position may be skipped"
        for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
            tokens, logprobs = [*prompt, *choice.token_ids], choice.logprobs
            right = right_logprobs(reference, prompt[:1], tokens[1:])
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            own = right.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            assert torch.allclose(torch.tensor(logprobs.token_logprobs[1:]), own, atol=CLOSE), choice
            for row, top in zip(right, logprobs.top_logprobs[1:], strict=True):
                assert max(top.values()) == pytest.approx(row.max().item(), abs=CLOSE) and len(top) in (2, 3)
            assert len(logprobs.tokens) == len(logprobs.text_offset) == len(tokens)
            assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
            for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
                if not token.startswith(("bytes:", "token_id:", "<")):
                    assert choice.text[at : at + len(token)] == token, choice
    streamed: dict[int, list[Any]] = {}
    texts: dict[int, str] = {}
    for chunk in client.completions.create(**asked, max_tokens=4, stream=True):
        part = chunk.choices[0]
        texts[part.index] = texts.get(part.index, "") + part.text
        streamed.setdefault(part.index, []).extend(part.logprobs.token_logprobs if part.logprobs else [])
    assert streamed == {choice.index: choice.logprobs.token_logprobs for choice in answer.choices}
    assert texts == {choice.index: choice.text for choice in answer.choices}


@OF_ONE_RANK
@pytest.mark.slow
def test_prompt_logprobs_are_those_of_the_prompt_in_vllms_form(
    client: openai.OpenAI, cluster: LocalCluster, reference: transformers.PreTrainedModel
) -> None:
    prompt = PROMPTS[1]
    body: dict[str, Any] = {"model": "m", "max_tokens": 2, "temperature": 0, "prompt_logprobs": 3}
    reply = httpx.post(f"{cluster.url}/v1/completions", json={**body, "prompt": prompt}, timeout=60)
    (choice,) = reply.json()["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    right = right_logprobs(reference, prompt[:1], prompt[1:])
    for row, token, entry in zip(right, prompt[1:], others, strict=True):
        best = row.topk(3).indices.tolist()
        assert set(map(int, entry)) == {token, *best}
        for other, value in entry.items():
            assert value["logprob"] == pytest.approx(row[int(other)].item(), abs=CLOSE)
            assert value["rank"] == (best.index(int(other)) + 1 if int(other) in best else None)
    messages = [{"role": "user", "content": "Say something."}]
    chat = httpx.post(f"{cluster.url}/v1/chat/completions", json={**body, "messages": messages}, timeout=60).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and "logprobs" in chat["choices"][0]
    refused = httpx.post(f"{cluster.url}/v1/completions", json={**body, "prompt": prompt, "stream": True}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.slow
def test_of_a_request_for_one_token_the_logits_row_moves_alone(client: openai.OpenAI, cluster: LocalCluster) -> None:
    for sampling in SAMPLINGS:
        asked: dict[str, Any] = {"model": "m", "prompt": PROMPTS[0], "logprobs": 1, **sampling}
        asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
        longer = client.completions.create(**asked, max_tokens=3).choices[0]
        reply = client.completions.with_raw_response.create(**asked, max_tokens=1)
        answer = reply.parse()
        (one,) = answer.choices
        assert one.token_ids == longer.token_ids[:1] and one.finish_reason == "length"
        assert one.logprobs.token_logprobs == longer.logprobs.token_logprobs[:1]
        cached = answer.usage.prompt_tokens_details
        assert cached is not None and cached.cached_tokens == 80, "P had the full pages, and says so"
        snapshot = msgspec.json.decode(httpx.get(f"{cluster.url}/cluster", timeout=60.0).content, type=ClusterSnapshot)
        (request,) = [r for r in snapshot.requests if r.request_id == reply.headers["x-request-id"]]
        assert request.kv_bytes == (aux_row_bytes(VOCAB) if request.prefill else 0), request
    wait_until(
        lambda: all(map(is_whole, instance_loads(cluster.url).values())), 30.0, lambda: instance_loads(cluster.url)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "length"),
    [
        pytest.param(kind, length, id=f"{kind}-{name}", marks=pytest.mark.by_hand if (kind, length) in FULL else ())
        for kind in KINDS
        for length, name in ((93, "a page is shared in part"), (96, "full pages"))
    ],
    indirect=["cluster"],
    scope="module",
)
def test_choices_are_those_of_single_requests_with_their_seeds_from_one_transfer(
    client: openai.OpenAI, cluster: LocalCluster, length: int
) -> None:
    prompt, count = [(7 * at + length) % VOCAB for at in range(length)], 4
    layout = httpx.get(f"{cluster.url}/cluster", timeout=60.0).json()["instances"][-1]["layout"]
    mixtures = ({"top_p": 0.9}, {"presence_penalty": 1.0, "echo": True}, {"max_tokens": 1})
    for options, cached in zip(mixtures, (True, False, False), strict=True):
        extra = {"return_token_ids": True, "cache_prompt": cached, "ignore_eos": True, "min_tokens": 1}
        asked: dict[str, Any] = {"model": "m", "prompt": prompt, "logprobs": 2, "max_tokens": 8, "extra_body": extra}
        asked |= options
        single = [client.completions.create(**asked, seed=50 + i).choices[0] for i in range(count)]
        reply = client.completions.with_raw_response.create(**asked, seed=50, n=count)
        answer = reply.parse()
        assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in single], options
        assert [choice.logprobs for choice in answer.choices] == [choice.logprobs for choice in single], options
        assert [choice.text for choice in answer.choices] == [choice.text for choice in single], options
        texts = [""] * count
        for chunk in client.completions.create(**asked, seed=50, n=count, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in single], options
        snapshot = msgspec.json.decode(httpx.get(f"{cluster.url}/cluster", timeout=60.0).content, type=ClusterSnapshot)
        name = reply.headers["x-request-id"]
        moved = [r.kv_bytes for r in snapshot.requests if r.request_id.startswith(f"{name}-") and r.prefill]
        if moved and not cached:  # a unified instance moves nothing
            num_pages = -(-length // 16) if asked["max_tokens"] > 1 else 0
            of_rank = msgspec.convert(layout, KVLayout)
            page_bytes = of_rank.tp_size * of_rank.bytes_per_page
            assert sum(moved) == num_pages * page_bytes + aux_row_bytes(VOCAB), (options, moved)
    wait_until(
        lambda: all(map(is_whole, instance_loads(cluster.url).values())), 30.0, lambda: instance_loads(cluster.url)
    )


# ------------------------------------------------------------------------------------------------------------ grammars

WORDS = {"guided_regex": "([a-f]{1,5} ){3,9}[a-f]{3}"}
FOLLOWING: list[tuple[dict[str, Any], Grammar]] = [
    (WORDS, Grammar("regex", WORDS["guided_regex"])),
    ({"guided_choice": ["yes", "no", "yellow"]}, Grammar("choice", '["yes","no","yellow"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+ "z"'}}, Grammar("lark", 'root ::= "a" [0-9]+ "z"')),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
]


class PlainLoop:
    """Samples from logits of the whole text at each step, with the mask as -inf, without grammar support. Answers that
    all clusters have to give are computed once."""

    def __init__(self, reference: transformers.PreTrainedModel, tokenizer: Tokenizer) -> None:
        self._reference = reference
        self._compiler = GrammarCompiler(tokenizer, VOCAB)
        self._known: dict[bytes, list[int]] = {}
        self.eos = tokenizer.eos_token_ids

    def tokens(self, grammar: Grammar | None, prompt: list[int], sampling: SamplingParams) -> list[int]:
        key = msgspec.json.encode((grammar, prompt, sampling))
        if key not in self._known:
            self._known[key] = self._sample(grammar, prompt, sampling)
        return self._known[key]

    def _sample(self, grammar: Grammar | None, prompt: list[int], sampling: SamplingParams) -> list[int]:
        sampler = Sampler(1, VOCAB, torch.device("cpu"), self.eos)
        matcher = self._compiler.compile(grammar).matcher() if grammar else None
        sampler.admit(0, torch.tensor(prompt), len(prompt), sampling)
        tokens: list[int] = []
        while len(tokens) < sampling.max_tokens and not set(self.eos) & set(tokens):
            with torch.inference_mode():
                logits = self._reference(torch.tensor([prompt + tokens])).logits[0, -1:].float()
            if matcher is not None:
                flags = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:VOCAB]
                logits = logits.masked_fill(torch.from_numpy(flags == 0), -torch.inf)
            tokens += sampler.sample(logits, [0]).tolist()
            if matcher is not None:
                matcher.consume(tokens[-1:])
        return tokens


@pytest.fixture(scope="module")
def loop(reference: transformers.PreTrainedModel, model: Path) -> PlainLoop:
    return PlainLoop(reference, Tokenizer.load(model))


SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.6, "logit_bias": {"42": 4.0, "43": -100.0}},
    {"temperature": 0.9, "min_p": 0.05, "frequency_penalty": 1.1},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


def seeded(seed: int) -> tuple[list[int], dict[str, Any]]:
    """Return prompt and options of this seed."""
    prompt = [(7 * at + 13 * seed) % (VOCAB - 20) + 10 for at in range(1 + 9 * (seed % 7))]
    return prompt, {**SEEDED[seed % len(SEEDED)], "seed": seed, "max_tokens": 12}


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.by_hand)])
def test_seeds_have_the_tokens_of_a_plain_loop(cluster: LocalCluster, loop: PlainLoop, count: int) -> None:
    """Each mixture of options comes with four lengths of prompts, each length with three of the mixtures or two."""
    prompts, options = map(list, zip(*map(seeded, range(count)), strict=True))
    answers = complete_all(cluster.url, prompts, options)
    for prompt, asked, answer in zip(prompts, options, answers, strict=True):
        bias = {int(token): value for token, value in asked.get("logit_bias", {}).items()}
        right = loop.tokens(None, prompt, SamplingParams(**{**asked, "logit_bias": bias}))
        assert answer.token_ids == right, (prompt, asked)


@ON_D
@pytest.mark.slow
def test_what_follows_a_grammar_has_the_tokens_of_a_plain_loop_over_masked_logits(
    client: openai.OpenAI, loop: PlainLoop
) -> None:
    asked: list[dict[str, Any]] = [{"temperature": 0}]
    asked += [{"temperature": 0.9, "seed": 6, "presence_penalty": 1.0, "logit_bias": {"30": 4}}]
    for fields, grammar in FOLLOWING:
        for sampling in asked:
            extra = {"return_token_ids": True, **fields}
            answer = client.completions.create(
                model="m", prompt=PROMPTS[1], max_tokens=14, n=2, logprobs=0, extra_body=extra, **sampling
            )
            bias = {int(token): float(value) for token, value in sampling.get("logit_bias", {}).items()}
            for index, choice in enumerate(answer.choices):
                values = {**sampling, "logit_bias": bias, "seed": sampling.get("seed", 0) + index}
                right = loop.tokens(grammar, PROMPTS[1], SamplingParams(14, **values))
                assert choice.token_ids == right, (fields, sampling)  # type: ignore[attr-defined]
                ended = right[-1] in loop.eos
                assert choice.finish_reason == ("stop" if ended else "length")


@OF_ONE_RANK
@pytest.mark.slow
def test_a_grammar_behind_a_reasoning_has_the_tokens_of_a_plain_loop(
    client: openai.OpenAI, loop: PlainLoop, model: Path
) -> None:
    tokenizer = Tokenizer.load(model)
    prompt = tokenizer.encode("abc<think>\n", add_special_tokens=False)
    close, asked = tokenizer.added_token_ids["</think>"], {"guided_regex": "[ab]{2,4}[0-9]z"}
    grammar = Grammar("regex", asked["guided_regex"], Reasoning("<think>", "</think>", True))
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "abc"}]}
    # With the bias the model ends its reasoning soon; without, never.
    for bias, ends, max_tokens in ((BIAS, True, 60), (-100.0, False, 20)):
        for sampling in ({"temperature": 1.0, "seed": 6}, {"temperature": 0.8, "seed": 9, "presence_penalty": 1.0}):
            fields = {**chat, **sampling, "max_tokens": max_tokens, "logit_bias": {str(close): bias}}
            answer = client.chat.completions.create(**fields, n=2, extra_body={"return_token_ids": True, **asked})
            thought = 0
            for index, choice in enumerate(answer.choices):
                values = {**sampling, "seed": sampling["seed"] + index}
                params = SamplingParams(max_tokens, logit_bias={close: bias}, **values)
                right = loop.tokens(grammar, prompt, params)
                assert choice.token_ids == right, (sampling, index)  # type: ignore[attr-defined]
                thought += right.index(close) + 1 if ends else len(right)
                assert choice.finish_reason == ("stop" if ends else "length"), choice
                text = choice.message.content or ""
                assert re.fullmatch(asked["guided_regex"] if ends else "", text), choice
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            assert answer.usage.completion_tokens_details.reasoning_tokens == thought, answer
            assert thought > 2 * len(answer.choices), "too little of it: raise the seed or lower the bias"
    extra = {**asked, "chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(**chat, seed=6, max_tokens=60, extra_body=extra)
    assert re.fullmatch(asked["guided_regex"], answer.choices[0].message.content or ""), answer


@pytest.fixture(scope="module")
def of_schemas() -> dict[int, list[str]]:
    """Return the dictionary that keeps the answers of the first cluster, by their number."""
    return {}


@OF_ONE_RANK
@pytest.mark.slow
@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.by_hand)])
async def test_every_answer_to_random_schemas_is_valid(
    cluster: LocalCluster, request: pytest.FixtureRequest, of_schemas: dict[int, list[str]], count: int
) -> None:
    """Answers are the same whether P and D are split or one instance. Two ranks round differently, so they get only
    some of the schemas."""
    is_split = request.node.callspec.params["cluster"] == "tp"
    seeds = range(0, count, 10 if is_split else 1)

    async def ask(client: httpx.AsyncClient, seed: int) -> str:
        schema = random_schema(seed)
        body = {"model": "m", "prompt": PROMPTS[seed % 3], "max_tokens": 900, "temperature": 1.0, "seed": seed}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, (response.text, schema)
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop", (choice, schema)
        value = json.loads(choice["text"])
        assert jsonschema_rs.validator_for(schema).is_valid(value), (choice, schema)
        return str(choice["text"])

    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300, trust_env=False, limits=limits) as client:
        answers = await asyncio.gather(*(ask(client, seed) for seed in seeds))
    assert len(set(answers)) > len(seeds) // 2, "the schemas say what the answers are, and nothing is drawn"
    if not is_split:
        assert answers == of_schemas.setdefault(count, answers)


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


@OF_ONE_RANK
@pytest.mark.slow
def test_enforced_calls_and_parsed_answers_fit_what_the_official_client_made_of_a_class(client: openai.OpenAI) -> None:
    names = ("weather", "forecast")
    tools = [openai.pydantic_function_tool(Weather, name=name) for name in names]
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "temperature": 1.0}
    chat["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = {**chat, "seed": 0, "tools": tools, "max_tokens": 900}
    named = {"type": "function", "function": {"name": "forecast"}}
    for choice, parallel in (("required", False), ("required", True), (named, False)):
        body = {**asked, "tool_choice": choice, "parallel_tool_calls": parallel}
        with client.chat.completions.stream(**body) as stream:
            streamed = stream.until_done().get_final_completion()
        for answer in (client.chat.completions.parse(**body), streamed):
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            assert message.tool_calls and not message.content and reason == "tool_calls", answer
            assert parallel or len(message.tool_calls) == 1
            for call in message.tool_calls:
                assert isinstance(call.function.parsed_arguments, Weather)
                assert call.function.name in (names if choice == "required" else names[1:])
    parsed = client.chat.completions.parse(**chat, seed=0, max_tokens=900, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    response = client.responses.parse(
        model="m", input="abc", max_output_tokens=900, text_format=Weather, extra_body=chat["extra_body"]
    )
    assert isinstance(response.output_parsed, Weather), response


@OF_ONE_RANK
@pytest.mark.slow
def test_a_request_whose_grammar_leaves_nothing_ends_alone(cluster: LocalCluster, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
    before = client.completions.create(**asked).choices[0].text
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        client.completions.create(**asked, extra_body={"guided_regex": "[ab]{30}", "allowed_token_ids": [9]})
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.completions.create(**asked, extra_body={"guided_json": {"type": "array", "uniqueItems": True}})
    assert client.completions.create(**asked).choices[0].text == before
    wait_until(
        lambda: all(is_whole(load) for load in instance_loads(cluster.url).values()),
        60,
        lambda: instance_loads(cluster.url),
    )


@OF_ONE_RANK
@pytest.mark.slow
def test_best_of_returns_the_choices_with_the_highest_logprob_a_token(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPTS[:2], "max_tokens": 8, "seed": 3}
    made = client.completions.create(**asked, n=4, logprobs=0)
    best = client.completions.create(**asked, n=2, best_of=4)
    wanted: list[str] = []
    for choices in (made.choices[:4], made.choices[4:]):
        numbers = [choice.logprobs.token_logprobs for choice in choices if choice.logprobs is not None]
        means = [sum(filter(None, column)) / len(column) for column in numbers if column is not None]
        order = sorted(range(4), key=lambda i: -means[i])
        wanted += [choices[i].text for i in order[:2]]
    assert [choice.text for choice in best.choices] == wanted
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3] and best.choices[0].logprobs is None
    assert best.usage is not None and made.usage is not None
    assert best.usage.completion_tokens == made.usage.completion_tokens, "all of them are used"
