"""Answers of the generation routes that are being made: their choices, who waits for news of them, and who may abort
them. Loop thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from chitu.errors import ChituError
from chitu.http.body_work import BodyRoute
from chitu.http.choice import ChoiceDecoder
from chitu.http.event_numbers import EventNumbers
from chitu.http.jobs import Job, Prompt
from chitu.http.sse import ID_PREFIXES
from chitu.http.token_logprobs import ChoiceLogprobs, PromptLogprobs
from chitu.protocol import TraceLevel
from chitu.router.generation import Generation


class Wakeup:
    """A one-waiter event that costs nothing while it is set already."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns after the next `set` (or at once after one that nobody waited for), and clears it."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_set = False


@dataclass(slots=True)
class Choice:
    generation: Generation
    decoder: ChoiceDecoder
    prompt: Prompt
    logprobs: ChoiceLogprobs | None = None
    """None where they were not asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the field; the same."""
    num_shown: int = 0
    """Tokens that its events stand for, where these say so."""
    is_open: bool = False
    """Its first event was written."""
    has_prompt: bool = False
    """The prompt's logprobs were written. Another attempt may bring them again."""


class Origin(NamedTuple):
    """What a request can be made of again, where it may outlive the router."""

    request_id: str
    route: BodyRoute
    body: bytearray
    job: Job
    created_s: int


@dataclass(slots=True, eq=False)
class RunningAnswer:
    tenant: str
    arrived_s: float
    """When its request's head was there; on the router's clock, as the next."""
    received_s: float = 0.0
    """When its whole body was."""
    choices: list[Choice] = field(default_factory=list)
    """Those that were sent on their way."""
    wakeup: Wakeup = field(default_factory=Wakeup)
    is_aborted: bool = False
    trace: TraceLevel = ""
    origin: Origin | None = None
    numbers: EventNumbers | None = None
    """Of its stream, where that may be read on."""
    parting: asyncio.Future[ChituError] | None = None
    """It stopped, and this is what its client is told in the end."""


def bare_names(name: str) -> set[str]:
    """Ids of requests that are meant by one, or by an answer's."""
    return {name, next((name.removeprefix(prefix) for prefix in ID_PREFIXES if name.startswith(prefix)), name)}


class RunningAnswers:
    """By request id, which clients may give to several. `cancel` ends a generation; idempotent."""

    def __init__(self, cancel: Callable[[Generation], None]) -> None:
        self._cancel = cancel
        self._answers: dict[str, list[RunningAnswer]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def all(self) -> list[RunningAnswer]:
        return [answer for known in self._answers.values() for answer in known]

    def named(self, name: str) -> list[RunningAnswer]:
        """By the id of a request, or of an answer; the newest last."""
        return [answer for each in bare_names(name) for answer in self._answers.get(each, ())]

    def add(self, request_id: str, answer: RunningAnswer) -> None:
        self._answers.setdefault(request_id, []).append(answer)

    def remove(self, request_id: str, answer: RunningAnswer) -> None:
        """It is over, with whatever of it still runs."""
        known = self._answers[request_id]
        known.remove(answer)
        if not known:
            del self._answers[request_id]
        for choice in answer.choices:
            self._cancel(choice.generation)

    def abort(self, name: str, tenant: str) -> int:
        """End what runs under this request id, or as the answer of this id, for that tenant, as if its client were
        gone; the client is told. How many requests: none where they ended already, or nobody knows them. Idempotent."""
        found = [answer for answer in self.named(name) if answer.tenant == tenant and not answer.is_aborted]
        for answer in found:
            answer.is_aborted = True
            self.end(answer)
        return len(found)

    def end(self, answer: RunningAnswer) -> None:
        """Nobody waits for it any more."""
        for choice in answer.choices:
            self._cancel(choice.generation)
        answer.wakeup.set()
