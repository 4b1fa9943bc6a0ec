"""How an answer is written: other tasks get turns of the event loop while it is made and sent, a prompt's logprobs are
written once for all its choices, a silent stream gets comments."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.clock import FakeClock
from test_openai_output import ByteDetokenizer

from chitu.config.schema import RouterConfig
from chitu.errors import ChituError, DecodeLost
from chitu.http.answer.choice import Choice, ChoiceDecoder, RunningAnswer
from chitu.http.answer.formats import AnswerHead
from chitu.http.answer.generate import PART_BYTES, TOKENS_PER_TURN, GenerationRoutes
from chitu.http.answer.token_logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptAnswer,
    PromptLogprobs,
    chat_texts,
    completion_texts,
)
from chitu.http.ask.bodies import ChatBody, CompletionBody, GenerationBody
from chitu.http.ask.parsed import ParsedRequest, Prompt
from chitu.http.ask.sampling import output_options
from chitu.http.dialects.openai.answers import ChatFormat, CompletionFormat
from chitu.http.wire.events import EventNumbers
from chitu.protocol import Finish, SamplingParams, pack_i32, pack_logprobs
from chitu.router.generation import GenerateRequest, Generation
from chitu.tokenizer import StopScanner

CHOICES = 8
TOP = 20
BLIND: Any = SimpleNamespace(has_vision=False)
"""A model without vision."""
LETTER = ord("a")


class Client:
    """A stand-in for an `Exchange` that records what is written."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_started = self.is_complete = self.is_full = self.is_client_gone = False
        self.silent_turns = 0

    def answer(self, status: int, body: bytes, more: object) -> None:
        self.stream(body, True)

    def stream(self, data: bytes, is_last: bool, kind: bytes = b"") -> None:
        assert not self.is_complete
        self.parts.append(data)
        self.is_started, self.is_complete, self.silent_turns = True, is_last, 0

    async def drained(self) -> None:
        self.is_full = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class World:
    """Choices of one prompt whose tokens have come, and the writer of their answer."""

    def __init__(self, body: GenerationBody, num_tokens: int, prompt_tokens: int = 1) -> None:
        router: Any = SimpleNamespace(cancel=lambda generation, **more: None)
        none: Any = None
        self.clock = FakeClock()
        self.routes = GenerationRoutes(BLIND, router, none, RouterConfig(), self.clock, lambda scope: "", none)
        self.options = options = output_options(body)
        ids = [LETTER] * prompt_tokens
        self.prompt = Prompt(pack_i32(ids), prompt_tokens, "a" * prompt_tokens if options.echo else "")
        self.running = RunningAnswer("", 0.0)
        self.client = Client()
        self.num_texts = 0
        """How often the text of a token was asked for."""
        is_chat, text_of = isinstance(body, ChatBody), completion_texts(lambda token: bytes([token]))

        def texts(token: int) -> bytes:
            self.num_texts += 1
            return text_of(token)

        of_prompt = PromptAnswer(
            CompletionLogprobs(texts, ByteDetokenizer()) if options.echo and options.logprobs is not None else None,
            PromptLogprobs(texts, options.prompt_logprobs) if options.prompt_logprobs is not None else None,
        )
        line = pack_logprobs(-1.0, [(token, -1.0) for token in range(40, 40 + TOP)])
        for _ in range(options.n):
            request = GenerateRequest("id", b"", 1, SamplingParams(max_tokens=num_tokens))
            generation = Generation(request, self.running.wakeup.set, 0.0, 0.0, tokens=[LETTER] * num_tokens)
            generation.finish = Finish(b"", "length")
            generation.prompt_logprobs = line * (prompt_tokens - 1)
            decoder = ChoiceDecoder(ByteDetokenizer(), None, options, frozenset())
            logprobs: Any = None
            if options.logprobs is not None:
                generation.logprobs = [line] * num_tokens
                offset = len(self.prompt.echo)
                logprobs = (
                    ChatLogprobs(chat_texts(lambda token: bytes([token])))
                    if is_chat
                    else CompletionLogprobs(texts, ByteDetokenizer(), offset)
                )
            self.running.choices.append(Choice(generation, decoder, self.prompt, logprobs, of_prompt))
        self.running.wakeup.set()
        self.form = (ChatFormat if is_chat else CompletionFormat)(AnswerHead("id", 0, "m"), options)
        self.parsed = ParsedRequest([self.prompt], [], options, is_chat=is_chat)

    async def write(self) -> int:
        """Write the answer; return how many turns of the event loop other tasks had."""
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.ensure_future(others())
        exchange: Any = self.client
        try:
            await self.routes.write_answer(exchange, self.parsed, self.running, self.form)
        finally:
            task.cancel()
        return turns

    def events(self) -> list[dict[str, Any]]:
        lines = self.client.body.decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def test_many_tokens_that_come_at_once_are_made_into_text_in_turns() -> None:
    world = World(CompletionBody(n=CHOICES), TOKENS_PER_TURN)
    assert await world.write() >= CHOICES - 2
    assert world.client.body.count(b"a" * TOKENS_PER_TURN) == CHOICES


async def test_few_tokens_cost_no_turn() -> None:
    world = World(CompletionBody(n=CHOICES), 4)
    assert await world.write() == 0 and len(world.client.parts) == 1


@pytest.mark.parametrize(
    "body",
    [
        CompletionBody(n=CHOICES, prompt_logprobs=TOP),
        CompletionBody(n=CHOICES, logprobs=TOP, echo=True),
        CompletionBody(n=CHOICES, logprobs=TOP, echo=True, stream=True),
        CompletionBody(n=2, best_of=CHOICES, prompt_logprobs=TOP),
        ChatBody(n=CHOICES, prompt_logprobs=TOP),
    ],
    ids=["prompt_logprobs", "echo", "streamed echo", "best_of", "chat"],
)
async def test_logprobs_of_a_prompt_are_written_once_for_all_its_choices(body: GenerationBody) -> None:
    length = 300
    world = World(body, 1, length)
    turns = await world.write()
    options, is_chat = world.options, world.parsed.is_chat
    assert length * TOP < world.num_texts < (length + options.n) * (TOP + 2)
    assert turns >= length // (TOKENS_PER_TURN // (2 + TOP))
    if options.stream:
        shown = [e["choices"][0]["logprobs"] for e in world.events() if e["choices"][0]["text"] == "a" * length]
        assert [len(each["tokens"]) for each in shown] == [length] * CHOICES
        return
    answer = json.loads(world.client.body)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(options.num_returned or options.n))
    if options.echo:
        for choice in choices:
            shown = choice["logprobs"]
            assert {len(column) for column in shown.values()} == {length + 1}
            assert shown["text_offset"] == list(range(length + 1)) and choice["text"] == "a" * (length + 1)
            assert shown["token_logprobs"] == [None, *[-1.0] * length]
    else:
        given = [answer["prompt_logprobs"]] if is_chat else [choice["prompt_logprobs"] for choice in choices]
        assert all(each[0] is None and len(each) == length for each in given)
        assert not is_chat or not any("prompt_logprobs" in choice for choice in choices)


@pytest.mark.parametrize("body", [CompletionBody(n=CHOICES, prompt_logprobs=TOP), ChatBody(n=1, prompt_logprobs=TOP)])
async def test_a_large_answer_leaves_in_parts_while_others_have_turns(body: GenerationBody) -> None:
    world = World(body, 1, 1000)
    world.client.is_full = True
    await world.write()
    total = len(world.client.body)
    assert total > 2 * PART_BYTES and not world.client.is_full, "it waited for a slow reader"
    assert len(world.client.parts) >= total // (2 * PART_BYTES)
    assert max(map(len, world.client.parts)) < 3 * PART_BYTES
    assert json.loads(world.client.body)["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
async def test_logprobs_of_many_tokens_that_come_at_once_are_written_in_turns(
    kind: type[GenerationBody], stream: bool
) -> None:
    fields: Any = {"logprobs": TOP} if kind is CompletionBody else {"logprobs": True, "top_logprobs": TOP}
    num_tokens, per_turn = 500, TOKENS_PER_TURN // (2 + TOP)
    world = World(kind(stream=stream, **fields), num_tokens)
    assert await world.write() >= num_tokens // per_turn - 1
    if stream:
        assert len(world.client.parts) >= num_tokens // per_turn
        entries = [e["choices"][0]["logprobs"] for e in world.events()]
    else:
        entries = [json.loads(world.client.body)["choices"][0]["logprobs"]]
    key = "token_logprobs" if kind is CompletionBody else "content"
    assert sum([len(each[key]) for each in entries if each]) == num_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_tokens_without_text_are_written_as_they_come(stream: bool) -> None:
    """They are all due with the last token."""
    world = World(CompletionBody(stream=stream, logprobs=TOP), 0)
    [choice] = world.running.choices
    silent: Any = SimpleNamespace(push=lambda tokens: "", finish=lambda: "")
    choice.decoder = ChoiceDecoder(silent, None, world.options, frozenset())
    choice.generation.finish = None
    task = asyncio.ensure_future(world.write())
    for _ in range(100):
        choice.generation.tokens.append(LETTER)
        choice.generation.logprobs.append(pack_logprobs(-1.0, [(token, -1.0) for token in range(40, 40 + TOP)]))
        world.running.wakeup.set()
        while choice.generation.tokens:
            await asyncio.sleep(0)
    written = world.num_texts
    assert not world.client.parts and written >= 100 * TOP
    choice.generation.finish = Finish(b"", "length")
    world.running.wakeup.set()
    await task
    assert world.num_texts == written and world.client.body.count(b"-1.0") >= 100


async def test_a_streams_tokens_of_the_turn_in_which_its_request_fails_are_written() -> None:
    world = World(CompletionBody(stream=True, n=2), 3)
    for choice in world.running.choices:
        choice.generation.finish = None
    task = asyncio.ensure_future(world.write())
    while not world.client.is_started:
        await asyncio.sleep(0)
    for choice in world.running.choices:
        choice.generation.tokens += [LETTER] * 2
        choice.generation.error = DecodeLost("it died")
    world.running.wakeup.set()
    await task
    *events, error = world.events()
    assert "".join([event["choices"][0]["text"] for event in events]) == "a" * 10
    assert error["error"]["code"] == "decode_lost" and world.client.is_complete


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_is_complete_in_that_turn_has_not_failed(stream: bool) -> None:
    world = World(CompletionBody(stream=stream, stop="aa"), 3)
    [choice] = world.running.choices
    choice.decoder = ChoiceDecoder(ByteDetokenizer(), StopScanner(("aa",), False), world.options, frozenset())
    choice.generation.finish, choice.generation.error = None, DecodeLost("it died")
    await world.write()
    assert b'"finish_reason":"stop"' in world.client.body


async def test_a_failure_before_the_first_part_is_an_http_error_and_tokens_of_that_turn_are_not_sent() -> None:
    world = World(CompletionBody(stream=True), 3)
    [choice] = world.running.choices
    choice.generation.finish, choice.generation.error = None, DecodeLost("it died")
    with pytest.raises(ChituError, match="it died"):
        await world.write()
    assert not world.client.parts


@pytest.mark.parametrize("is_numbered", [False, True])
async def test_a_silent_stream_gets_a_comment_and_its_head_leaves_with_it(is_numbered: bool) -> None:
    world = World(CompletionBody(stream=True), 0)
    [choice] = world.running.choices
    choice.generation.finish = None
    if is_numbered:
        world.running.numbers = EventNumbers()
    task = asyncio.ensure_future(world.write())
    await asyncio.sleep(0)

    def wait(seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            world.clock.advance(0.1)
            world.routes.tick()

    wait(7)
    assert not world.client.is_started, "a refusal can still be an HTTP error"
    wait(3.1)
    comment = b": keep-alive\n" if is_numbered else b": keep-alive\n\n"
    assert world.client.parts == [comment]
    wait(30)
    assert world.client.parts == [comment] * 4
    world.client.is_full = True
    wait(30)
    assert world.client.parts == [comment] * 4, "what a slow client did not read yet keeps the connection alive"
    world.client.is_full = False
    choice.generation.tokens.append(LETTER)
    world.running.wakeup.set()
    while len(world.client.parts) == 4:
        await asyncio.sleep(0)
    wait(7)
    assert len(world.client.parts) == 5 and world.events()[0]["choices"][0]["text"] == "a"
    choice.generation.finish = Finish(b"", "stop")
    world.running.wakeup.set()
    await task
    wait(60)
    assert len(world.client.parts) == 6 and world.client.body.endswith(b"[DONE]\n\n")


async def test_no_comment_is_written_if_the_key_is_0() -> None:
    none: Any = None
    world, router = World(CompletionBody(stream=True), 0), SimpleNamespace(cancel=none)
    config: Any = RouterConfig(stream_comment_s=0)
    routes = GenerationRoutes(BLIND, router, none, config, world.clock, lambda scope: "", none)  # type: ignore[arg-type]
    exchange: Any = world.client
    routes._streams[exchange] = world.parsed, world.running
    for _ in range(100):
        world.clock.advance(10)
        routes.tick()
    assert not world.client.parts
