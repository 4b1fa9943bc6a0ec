"""Random valid requests by number, their answers in one form however they came, and what must be equal between two.

`request_of` draws a request, `ask` sends many, `differences` compares the answers of two clusters, and `Recomputation`
compares an answer with logits of `transformers`. Used by `integration/test_random_requests.py`, also by hand for more
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import torch
import transformers

from chitu.config.schema import ModelConfig
from chitu.engine.sampler import Sampler
from chitu.grammars import GrammarCompiler
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import BodyWork, ReadBody
from chitu.http.ask.sampling import with_seed
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.table import READERS
from chitu.protocol import SamplingParams, unpack_i32

CLOSE = 2e-3
"""Largest difference of two logprobs (nats): batches and chunks round differently."""
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a lazy",
    "dog,",
    "then",
    "sleeps.",
    "ü",
    "日本",
    "\n",
    "def f(x):",
]
BREAKS = 10
"""Broken connections of a request, if there are several routers."""
SHARED = " ".join(WORDS * 3)
"""Prompts that begin with it share cached pages."""
TOOLS: list[dict[str, Any]] = [
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
]
GRAMMARS: list[dict[str, Any]] = [
    {"guided_regex": "([a-f]{1,5} ){1,4}[a-f]{3}"},
    {"guided_choice": ["yes", "no", "yellow"]},
    {"structured_outputs": {"grammar": 'root ::= "a" [0-9]+ "z"'}},
    {"response_format": {"type": "json_object"}},
    {"guided_json": {"type": "object", "properties": {"k": {"enum": ["red", 3, None]}}, "required": ["k"]}},
]


@dataclass(frozen=True, slots=True)
class Drawn:
    number: int
    route: str
    body: dict[str, Any]
    streams: bool
    """Whether the answer may be streamed: some fields cannot be."""


@dataclass(slots=True)
class Choice:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    finish_reason: str = ""
    logprobs: list[float | None] = field(default_factory=list)
    """Of each token, then those of the most likely ones in order."""
    prompt_logprobs: Any = None


@dataclass(slots=True)
class Answer:
    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""


# -------------------------------------------------------------------------------------------------------- the generator


def request_of(number: int, vocab_size: int, end_of_thought: int) -> Drawn:
    """Draw a request, always the same one for a number. `end_of_thought`: the token that ends a reasoning."""
    rng = random.Random(number)
    body: dict[str, Any] = {"model": "m", "return_token_ids": True, "seed": _seed(rng), **_sampling(rng, vocab_size)}
    is_chat = rng.random() < 0.45
    body |= _chat(rng, end_of_thought) if is_chat else _completion(rng, vocab_size)
    if "tools" in body or ("allowed_token_ids" not in body and rng.random() < 0.2):
        for name in ("allowed_token_ids", "ignore_eos", "min_tokens"):  # a grammar says itself where an answer ends
            body.pop(name, None)
        if "tools" not in body:
            body |= rng.choice(GRAMMARS)
    streams = not body.get("prompt_logprobs") and body.get("best_of", 0) <= body.get("n", 1)
    return Drawn(number, "/v1/chat/completions" if is_chat else "/v1/completions", body, streams)


def _seed(rng: random.Random) -> int:
    return rng.choice([rng.randrange(1000), -(1 << 63), (1 << 63) - 1, rng.randrange(-(1 << 63), 1 << 63)])


def _sampling(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": rng.choice([0, 0, 0.3, 0.8, 1.0, 1.5, 2.0])}
    fields["max_tokens"] = rng.choice([1, 2, 5, 12, 24, 40])
    tokens = [rng.randrange(10, vocab_size) for _ in range(8)]
    optional: list[dict[str, Any]] = [
        {"top_p": rng.choice([0.1, 0.8, 0.95])},
        {"top_k": rng.choice([-1, 1, 5, 50])},
        {"min_p": rng.choice([0.0, 0.02, 0.2])},
        {"presence_penalty": rng.uniform(-2, 2)},
        {"frequency_penalty": rng.uniform(-2, 2)},
        {"repetition_penalty": rng.choice([0.5, 1.1, 2.0, 10.0])},
        {"logit_bias": {str(token): rng.choice([-100, -3, 4.5, 20]) for token in tokens[:3]}},
        {"min_tokens": rng.randrange(fields["max_tokens"] + 1)},
        {"stop_token_ids": tokens[:4]},
        {"stop": rng.choice(["e", ["th", "\n"], [" a", "ü", "xyz"]])},
        {"ignore_eos": True},
        {"allowed_token_ids": [rng.randrange(10, vocab_size) for _ in range(40)]},
        {"bad_words": ["the", [tokens[0], tokens[1]]]},
        {"n": rng.randrange(1, 5)},
        {"truncate_prompt_tokens": rng.choice([1, 7, 40, -1])},
        {"cache_salt": rng.choice(["a", "b"])},
        {"cache_prompt": False},
        {"skip_special_tokens": False},
        {"include_stop_str_in_output": True},
    ]
    for some in rng.sample(optional, rng.randrange(0, 6)):
        fields |= some
    return fields


def _completion(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    ids = [rng.randrange(10, vocab_size) for _ in range(rng.choice([1, 3, 17, 60, 120]))]
    prompt = rng.choice(
        [_text(rng), SHARED + _text(rng), ids, [SHARED + _text(rng), _text(rng)], [ids, [*ids[:9], 50]]]
    )
    fields: dict[str, Any] = {"prompt": prompt}
    if rng.random() < 0.4:
        fields["logprobs"] = rng.choice([0, 1, 5, 20])
    if rng.random() < 0.2:
        fields["echo"] = True
    if rng.random() < 0.1:
        fields["best_of"] = 4
    if rng.random() < 0.15:
        fields["prompt_logprobs"] = rng.choice([1, 3])
    return fields


def _chat(rng: random.Random, end_of_thought: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": rng.choice([SHARED, ""]) + _text(rng)}]
    if rng.random() < 0.4:
        turns += [{"role": "assistant", "content": _text(rng)}, {"role": "user", "content": _text(rng)}]
    fields: dict[str, Any] = {"messages": turns, "chat_template_kwargs": {"enable_thinking": rng.random() < 0.5}}
    if fields["chat_template_kwargs"]["enable_thinking"]:
        fields["logit_bias"] = {str(end_of_thought): 5}  # else a random model thinks to the end
    if rng.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": rng.choice([0, 3])}
    if rng.random() < 0.4:
        named: Any = {"type": "function", "function": {"name": rng.choice(TOOLS)["name"]}}
        fields["tools"] = [{"type": "function", "function": {**tool, "strict": rng.random() < 0.5}} for tool in TOOLS]
        fields["tool_choice"] = rng.choice(["auto", "none", "required", named])
        fields["parallel_tool_calls"] = rng.random() < 0.5
        fields["max_tokens"] = 100
    return fields


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 4, 20, 40])))


# ----------------------------------------------------------------------------------------------------------- the runner


def ask(url: str, drawn: Sequence[Drawn], at_once: int, streamed: float, others: Sequence[str] = ()) -> list[Answer]:
    """Return the answers in order. A share `streamed` of the requests that allow it is streamed. With `others`, the
    requests go to all these routers in turn, and each to the next one if its connection breaks."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(at_once)
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(httpx.AsyncClient(base_url=each, timeout=170.0, trust_env=False))
                for each in (url, *others)
            ]

            async def one(each: Drawn) -> Answer:
                async with gate:
                    send = _streamed if each.streams and random.Random(-each.number).random() < streamed else _whole
                    for attempt in itertools.count(each.number):
                        try:
                            return await send(clients[attempt % len(clients)], each)
                        except httpx.TransportError:
                            if attempt == each.number + BREAKS * len(others):
                                raise
                            await asyncio.sleep(0.05)
                    raise AssertionError

            return await asyncio.gather(*map(one, drawn))

    return asyncio.run(run())


async def _whole(client: httpx.AsyncClient, drawn: Drawn) -> Answer:
    reply = await client.post(drawn.route, json=drawn.body)
    if reply.status_code != 200:
        return Answer(reply.status_code, error=reply.text)
    answer = Answer(200)
    _add(answer, reply.json())
    return answer


async def _streamed(client: httpx.AsyncClient, drawn: Drawn) -> Answer:
    body = {**drawn.body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", drawn.route, json=body) as reply:
        if reply.status_code != 200:
            return Answer(reply.status_code, error=(await reply.aread()).decode())
        answer = Answer(200)
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                record = json.loads(line.removeprefix("data: "))
                if "error" in record:
                    answer.error = line
                _add(answer, record)
    return answer


def _add(answer: Answer, record: dict[str, Any]) -> None:
    answer.usage = record.get("usage") or answer.usage
    for part in record.get("choices", ()):
        choice = answer.choices.setdefault(part["index"], Choice())
        said = part.get("message") or part.get("delta") or {}
        choice.tokens += part.get("token_ids") or []
        choice.text += part.get("text") or said.get("content") or ""
        choice.reasoning += said.get("reasoning_content") or ""
        for call in said.get("tool_calls") or ():
            function, index = call["function"], call.get("index", len(choice.calls))
            if index == len(choice.calls):
                choice.calls.append((function["name"], ""))
            name, arguments = choice.calls[index]
            choice.calls[index] = name, arguments + (function.get("arguments") or "")
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        choice.logprobs += _logprobs(part.get("logprobs") or {})
        choice.prompt_logprobs = part.get("prompt_logprobs", record.get("prompt_logprobs")) or choice.prompt_logprobs


def _logprobs(given: dict[str, Any]) -> list[float | None]:
    """Return the token's own logprobs and those of the most likely ones, token by token, of either route."""
    if "content" in given:
        lines = given["content"] or ()
        return [value for one in lines for value in (one["logprob"], *(top["logprob"] for top in one["top_logprobs"]))]
    owns, tops = given.get("token_logprobs") or (), given.get("top_logprobs") or ()
    return [
        value
        for own, top in zip(owns, tops, strict=True)
        for value in (own, *sorted((top or {}).values(), reverse=True))
    ]


# --------------------------------------------------------------------------------------------------------- the comparer


def differences(drawn: Drawn, right: Answer, found: Answer) -> list[str]:
    """Return what differs from the right answer to a request: tokens, texts, calls, reasons, logprobs, usage."""
    if (found.status, found.error) != (right.status, right.error):
        return [f"{found.status} {found.error} for {right.status} {right.error}"]
    wrong = [f"choices {sorted(found.choices)}"] if found.choices.keys() != right.choices.keys() else []
    for index, one in right.choices.items():
        other = found.choices.get(index, Choice())
        for name in ("tokens", "text", "reasoning", "calls", "finish_reason"):
            if getattr(one, name) != getattr(other, name):
                wrong.append(f"{name} of {index}: {getattr(other, name)!r} for {getattr(one, name)!r}")
        if not _are_close(one.logprobs, other.logprobs):
            wrong.append(f"logprobs of {index}: {other.logprobs} for {one.logprobs}")
        pairs = _numbers(one.prompt_logprobs), _numbers(other.prompt_logprobs)
        if not _are_close(*pairs):
            wrong.append(f"prompt_logprobs of {index}")
    for name in ("prompt_tokens", "completion_tokens"):
        if right.usage.get(name) != found.usage.get(name):
            wrong.append(f"{name}: {found.usage.get(name)} for {right.usage.get(name)}")
    return wrong


def _numbers(prompt_logprobs: Any) -> list[float | None]:
    lines = prompt_logprobs or ()
    return [entry["logprob"] for line in lines for _, entry in sorted((line or {}).items())]


def _are_close(ones: list[float | None], others: list[float | None]) -> bool:
    if len(ones) != len(others):
        return False
    return all(
        one == other or (one is not None and other is not None and abs(one - other) <= CLOSE)
        for one, other in zip(ones, others, strict=True)
    )


# --------------------------------------------------------------------------------------------------------- transformers


class Recomputation:
    """Recomputes answers from logits that `transformers` computes over prompt and answer at once, in float32."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        model = ServedModel.load(ModelConfig(path=str(folder), served_name="m"), 0)
        self._model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._vocab_size = self._model.config.vocab_size
        self._eos = model.tokenizer.eos_token_ids
        self._work = BodyWork(model, False, READERS)
        facts = ClusterFacts(ModelLimits(max_model_len, self._vocab_size), "", self._vocab_size)
        self._facts = facts
        self._compiler = GrammarCompiler(model.tokenizer, self._vocab_size)

    def differences(self, drawn: Drawn, answer: Answer) -> list[str]:
        """Return what differs. Of `best_of`, nothing is known of the choices that were not returned."""
        if answer.status != 200:
            return []
        raw = json.dumps(drawn.body).encode()
        name = "chat" if drawn.route.endswith("chat/completions") else "completion"
        parsed = self._work.read(ReadBody(name, self._facts), raw, lambda: None)
        assert isinstance(parsed, ParsedRequest)
        wrong = []
        if parsed.options.num_returned:
            return []
        for index, choice in answer.choices.items():
            prompt = parsed.prompts[index // parsed.options.n]
            sampling = with_seed(parsed.samplings[index // parsed.options.n], index % parsed.options.n)
            says = self._difference(unpack_i32(prompt.token_ids).tolist(), sampling, choice)
            wrong += [f"choice {index}: {says}"] if says else []
        return wrong

    def _difference(self, prompt: list[int], sampling: SamplingParams, choice: Choice) -> str:
        with torch.inference_mode():
            rows = self._model(torch.tensor([prompt + choice.tokens])).logits[0, len(prompt) - 1 : -1].float()
        sampler = Sampler(1, self._vocab_size, torch.device("cpu"), self._eos)
        sampler.admit(0, torch.tensor(prompt), len(prompt), msgspec.structs.replace(sampling, grammar=None))
        matcher = self._compiler.compile(sampling.grammar).matcher() if sampling.grammar is not None else None
        for place, (row, token) in enumerate(zip(rows, choice.tokens, strict=True)):
            logits = row[None].clone()
            if matcher is not None:
                flags = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: self._vocab_size]
                logits.masked_fill_(torch.from_numpy(flags == 0), -torch.inf)
                matcher.consume([token])
            drawn = sampler.sample(logits, [0]).item()
            if drawn != token:
                return f"token {place} is {token}, {drawn} from the logits of transformers"
        if choice.logprobs and sampling.logprobs is not None:
            own = rows.log_softmax(-1).gather(1, torch.tensor(choice.tokens)[:, None])[:, 0].tolist()
            missing = [value for value in own if not any(_are_close([value], [other]) for other in choice.logprobs)]
            return f"no logprob is {missing}" if missing else ""
        return ""
