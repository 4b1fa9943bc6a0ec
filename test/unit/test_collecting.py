"""An answer that is not streamed: other tasks get turns of the event loop while the text of many tokens is made."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from chitu.config.schema import RouterConfig
from chitu.http.choice import ChoiceDecoder
from chitu.http.generate import TOKENS_PER_TURN, GenerationRoutes
from chitu.http.jobs import Job, Prompt
from chitu.http.request_bodies import CompletionBody
from chitu.http.running_answers import Choice, RunningAnswer
from chitu.http.sampling_fields import output_options
from chitu.http.sse import CompletionFormat
from chitu.protocol import Finish, SamplingParams
from chitu.router.generation import GenerateRequest, Generation
from chitu.testing.clock import FakeClock

CHOICES = 8


class Letters:
    """A detokenizer in which every token is one letter."""

    def push(self, tokens: list[int]) -> str:
        return "a" * len(tokens)

    def finish(self) -> str:
        return ""


def finished(num_tokens: int) -> Generation:
    request = GenerateRequest("id", b"", 1, SamplingParams(max_tokens=num_tokens))
    generation = Generation(request, lambda: None, 0.0, 0.0, tokens=[7] * num_tokens)
    generation.finish = Finish(b"", "length")
    return generation


async def collect(num_tokens: int) -> tuple[int, bytes]:
    """Return how many turns of the event loop other tasks had, and the answer."""
    router: Any = SimpleNamespace(cancel=lambda generation, **more: None)
    none: Any = None
    routes = GenerationRoutes(none, router, none, RouterConfig(), FakeClock(), lambda scope: "", none)
    options, prompt = output_options(CompletionBody(n=CHOICES)), Prompt(b"", 1, "")
    running = RunningAnswer("", 0.0)
    for _ in range(CHOICES):
        decoder = ChoiceDecoder(Letters(), None, options, frozenset())  # type: ignore[arg-type]
        running.choices.append(Choice(finished(num_tokens), decoder, prompt))
    running.wakeup.set()
    turns, bodies = 0, []

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.ensure_future(others())
    exchange: Any = SimpleNamespace(answer=lambda status, body, more: bodies.append(body))
    await routes._collect(exchange, Job([prompt], [], options), running, CompletionFormat("id", 0, "m", False))
    task.cancel()
    return turns, bodies[0]


async def test_many_tokens_that_come_at_once_are_made_into_text_in_turns() -> None:
    turns, body = await collect(TOKENS_PER_TURN)
    assert turns >= CHOICES - 2 and body.count(b"a" * TOKENS_PER_TURN) == CHOICES


async def test_few_tokens_cost_no_turn() -> None:
    assert (await collect(4))[0] == 0
