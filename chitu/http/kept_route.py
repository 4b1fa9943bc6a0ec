"""`GET /v1/requests/ID`: the answer of a request that outlived its router, as its first client would have read it.

A hot route beside those of `generate.py`, which writes the answer; loop thread. A stream begins after the events that
the client reports to have. A client that leaves ends nothing: the answer may be read again.
"""

from __future__ import annotations

from collections.abc import Callable

from chitu.clock import Clock
from chitu.errors import ChituError, RequestCancelled
from chitu.http.event_numbers import EventNumbers, events_read
from chitu.http.exchange import Exchange
from chitu.http.generate import GenerationRoutes
from chitu.http.kept_requests import KeptRequests
from chitu.http.running_answers import RunningAnswer
from chitu.net.http import Scope


class KeptRoute:
    def __init__(
        self, kept: KeptRequests, routes: GenerationRoutes, tenant_of: Callable[[Scope], str], clock: Clock
    ) -> None:
        self._kept = kept
        self._routes = routes
        self._tenant_of = tenant_of
        self._clock = clock

    async def answer(self, exchange: Exchange, scope: Scope, name: str) -> None:
        """Send the answer of a kept request. `name`: id of the request or of its answer."""
        running = RunningAnswer(self._tenant_of(scope), self._clock.monotonic())
        running.numbers = EventNumbers(events_read(scope))
        each = await self._kept.find(name, running.tenant)
        if exchange.is_client_gone:
            return
        record, job = each.record, each.job
        reader = self._kept.reader(each, running.wakeup.set)
        running.choices = [self._routes.choice_of(job, reader, job.prompts[0])]
        running.wakeup.set()

        def on_gone() -> None:
            reader.error = RequestCancelled("the reader has left")
            running.wakeup.set()

        exchange.call_when_gone(on_gone)
        form = self._routes.format_of(record.route, job, record.request_id, record.created_s)
        has_all = False
        try:
            await self._routes.write_answer(exchange, job, running, form)
            has_all = reader.error is None and not exchange.is_client_gone
        except ChituError as error:
            exchange.fail(error)
        finally:
            self._kept.leave(each, reader, has_all)
