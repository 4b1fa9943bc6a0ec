"""Running answers of the generation routes: their choices, their wakeups, and which tenant may abort them. Loop
thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from chitu.errors import ChituError
from chitu.http.body_work import BodyRoute
from chitu.http.choice import ChoiceDecoder
from chitu.http.event_numbers import EventNumbers
from chitu.http.jobs import Job, Prompt
from chitu.http.messages.delta import MessageDelta
from chitu.http.sse import ID_PREFIXES
from chitu.http.token_logprobs import ChoiceLogprobs, PromptAnswer
from chitu.protocol import TraceLevel
from chitu.router.request import Generation


class Wakeup:
    """An event for one waiter. It costs nothing while it is set already."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return after the next `set`, or at once after a `set` that had no waiter. Clears the event."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_set = False


class Choice(msgspec.Struct, eq=False):
    generation: Generation
    decoder: ChoiceDecoder
    prompt: Prompt
    logprobs: ChoiceLogprobs | None = None
    """Logprobs of the choice; None if they were not requested."""
    of_prompt: PromptAnswer | None = None
    """Logprobs of the prompt, which its choices share; None if they were not requested."""
    texts: list[str | MessageDelta] = []
    """Text of a whole answer, as far as it is decoded, in parts."""
    token_ids: list[int] = []
    """Tokens of these parts."""
    num_shown: int = 0
    """Tokens that its events have reported as usage, if they do so."""
    is_open: bool = False
    """Whether its first event was written."""


class Origin(NamedTuple):
    """What a request can be rebuilt from, if it may outlive the router."""

    request_id: str
    route: BodyRoute
    body: bytearray
    job: Job
    created_s: int


class RunningAnswer(msgspec.Struct, eq=False):
    tenant: str
    arrived_s: float
    """Time when the request's head was complete, on the router's clock."""
    received_s: float = 0.0
    """Time when the request's body was complete, on the router's clock."""
    choices: list[Choice] = []
    """Choices that were sent to instances."""
    wakeup: Wakeup = msgspec.field(default_factory=Wakeup)
    is_aborted: bool = False
    trace: TraceLevel = ""
    origin: Origin | None = None
    numbers: EventNumbers | None = None
    """Event numbers of its stream, if a client may resume it."""
    shutdown_error: asyncio.Future[ChituError] | None = None
    """Set once the answer has stopped; its result is the error that the client gets in the end."""


def bare_names(name: str) -> set[str]:
    """Return the request ids that `name` may mean, as the id of a request or of an answer."""
    return {name, next((name.removeprefix(prefix) for prefix in ID_PREFIXES if name.startswith(prefix)), name)}


class RunningAnswers:
    """The running answers by request id, which several may share. `cancel` ends a generation; idempotent."""

    def __init__(self, cancel: Callable[[Generation], None]) -> None:
        self._cancel = cancel
        self._answers: dict[str, list[RunningAnswer]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def all(self) -> list[RunningAnswer]:
        return [answer for known in self._answers.values() for answer in known]

    def named(self, name: str) -> list[RunningAnswer]:
        """Return the answers with this id of a request or of an answer; the newest last."""
        return [answer for each in bare_names(name) for answer in self._answers.get(each, ())]

    def add(self, request_id: str, answer: RunningAnswer) -> None:
        self._answers.setdefault(request_id, []).append(answer)

    def remove(self, request_id: str, answer: RunningAnswer) -> None:
        """Remove an answer that is over, and cancel what of it still runs."""
        known = self._answers[request_id]
        known.remove(answer)
        if not known:
            del self._answers[request_id]
        for choice in answer.choices:
            self._cancel(choice.generation)

    def abort(self, name: str, tenant: str) -> int:
        """End the tenant's requests with this request id or answer id, as if their client were gone; the client gets an
        error. Return their number: 0 if they have ended already or are unknown. Idempotent."""
        found = [answer for answer in self.named(name) if answer.tenant == tenant and not answer.is_aborted]
        for answer in found:
            answer.is_aborted = True
            self.end(answer)
        return len(found)

    def end(self, answer: RunningAnswer) -> None:
        """Cancel what runs of an answer that is not wanted any more."""
        for choice in answer.choices:
            self._cancel(choice.generation)
        answer.wakeup.set()
