"""Parsing of bodies for the routes, and the choice of where it runs. Loop thread.

A small body is processed at once, on the event loop. A large one, and every grammar, goes to `executor`, where it
delays no request's tokens. Work for a client that has left is dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from chitu.errors import Capacity, InvalidRequest, NoInstance
from chitu.http.body_work import BodyRoute, BodyTask, BodyWork, JudgeGrammar, ReadBody
from chitu.http.exchange import Exchange
from chitu.http.jobs import ClusterFacts, Job
from chitu.http.request_bodies import LARGE_BODY_BYTES
from chitu.http.served_model import ServedModel
from chitu.http.token_counts import TokensAnswer
from chitu.net.http import ClientGone, Scope
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import Grammar
from chitu.router.policies import Candidates

MAX_VERDICTS = 64
"""Verdicts on grammars that are kept for later requests with the same grammar."""

T = TypeVar("T")


class BodyExecutor(Protocol):
    async def do(self, task: BodyTask, raw: bytes | bytearray, client: bytes = b"") -> Any:
        """Return or raise what `BodyWork` does, in the turn of a `client`. Cancel the call if its result is no longer
        wanted."""


class BodyReader:
    def __init__(
        self,
        model: ServedModel,
        router: PDRequestRouter,
        executor: BodyExecutor,
        takes_unknown: bool,
        client_of: Callable[[Scope], bytes],
    ) -> None:
        """`client_of`: the client in whose turn the executor works for a request."""
        self._model = model
        self._router = router
        self._work = BodyWork(model, takes_unknown)
        self._executor = executor
        self._known: tuple[Candidates, ClusterFacts] | None = None
        self._verdicts: OrderedDict[Grammar, InvalidRequest | None] = OrderedDict()
        self._client_of = client_of
        self._judging: dict[tuple[bytes, Grammar], asyncio.Future[InvalidRequest | None]] = {}
        """Grammars that wait for a verdict, by client: no client waits for the turn of another."""

    async def job(self, route: BodyRoute, raw: bytearray, exchange: Exchange) -> Job:
        """Return the job of a generation route. Errors are for the client, and raised before the request is sent on."""
        facts = self._facts()
        try:
            job: Job = await self._read(ReadBody(route, facts), raw, exchange)
            grammar = job.samplings[0].grammar
            if grammar is not None:
                verdict = self._verdict(JudgeGrammar(grammar, facts.vocab_size), self._client_of(exchange.scope))
                refusal = await _while_wanted(exchange, verdict)
                if refusal is not None:
                    raise job.refusal(refusal)
        except (NoInstance, Capacity) as error:
            raise self._router.rejected(error) from None
        return job

    async def job_again(self, route: BodyRoute, raw: bytearray) -> Job:
        """Return the job of a body that an earlier router accepted, including its grammar."""
        task = ReadBody(route, self._facts())
        found: Any = self._work.read(task, raw, lambda: None) if _is_small(raw) else await self._executor.do(task, raw)
        job: Job = found
        return job

    async def tokens(self, route: BodyRoute, raw: bytes, exchange: Exchange) -> TokensAnswer:
        """Return the answer of `/tokenize` or `/detokenize`."""
        answer: TokensAnswer = await self._read(ReadBody(route, self._facts()), raw, exchange)
        return answer

    def _facts(self) -> ClusterFacts:
        """Return what holds for bodies now; computed once per view."""
        candidates = self._router.candidates
        if self._known is None or self._known[0] is not candidates:
            limits = self._model.limits(candidates)
            why_unusable = candidates.why_unusable() if limits is None else ""
            self._known = candidates, ClusterFacts(limits, why_unusable, self._model.vocab_size(candidates))
        return self._known[1]

    async def _read(self, task: ReadBody, raw: bytes | bytearray, exchange: Exchange) -> Any:
        if _is_small(raw):
            return self._work.read(task, raw, lambda: None)
        return await _while_wanted(exchange, self._executor.do(task, raw, self._client_of(exchange.scope)))

    async def _verdict(self, task: JudgeGrammar, client: bytes) -> InvalidRequest | None:
        grammar, key = task.grammar, (client, task.grammar)
        if grammar in self._verdicts:
            self._verdicts.move_to_end(grammar)
            return self._verdicts[grammar]
        if key not in self._judging:
            self._judging[key] = asyncio.ensure_future(self._judge(task, client))
        # Keep it running if the client leaves: other requests may wait for the same grammar.
        return await asyncio.shield(self._judging[key])

    async def _judge(self, task: JudgeGrammar, client: bytes) -> InvalidRequest | None:
        verdict: InvalidRequest | None = None
        try:
            await self._executor.do(task, b"", client)
        except InvalidRequest as error:
            verdict = error
        finally:
            del self._judging[client, task.grammar]
        self._verdicts[task.grammar] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def _is_small(raw: bytes | bytearray) -> bool:
    return len(raw) <= LARGE_BODY_BYTES


async def _while_wanted(exchange: Exchange, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client leaves first, cancel `work` and raise ClientGone."""
    task = asyncio.ensure_future(work)

    def on_gone() -> None:
        task.cancel()

    exchange.call_when_gone(on_gone)
    try:
        return await task
    except asyncio.CancelledError:
        if exchange.is_client_gone:
            raise ClientGone from None
        raise
    finally:
        exchange.call_when_gone(None)
