"""Requests that outlive their router (`router.kept_requests.dir`): written at its end, taken up by the next one, read
by `GET /v1/requests/ID`. Owned by `ApiEndpoint`; loop thread, with the folder's files in other threads.

An answer that was taken up continues without a reader. Each reader gets a copy of its output so far, and then what
follows, in a `Generation` of its own: so any number of readers can read it as its first client would have. Several
routers may share the folder, and any may be killed anywhere.

A request with images is continued with the same files, prepared by an equal image processor, or not at all.

Invariants: a written request emits nothing more, so no client has read what is not in its file. A request is taken up
once, by the one router that renamed its file; without a reader it ends by its own limits, and it is dropped when it is
too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from chitu import __version__
from chitu.clock import Clock
from chitu.errors import ChituError, InvalidRequest, NoInstance, RequestCancelled, RequestKept, UnknownRequest
from chitu.http.answer.choice import Choice, ChoiceDecoder, RunningAnswer, Wakeup
from chitu.http.answer.generate import GenerationRoutes
from chitu.http.answer.kept_folder import KeptFolder, NotKept
from chitu.http.ask.parsed import ParsedRequest
from chitu.http.ask.reader import BodyReader
from chitu.http.ask.served_model import ServedModel
from chitu.http.wire.events import EventNumbers, events_read
from chitu.http.wire.exchange import Exchange
from chitu.net.http import Scope
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import Finish, KVLayout, pack_i32, unpack_i32
from chitu.protocol.kept_request import DamagedFile, KeptRequest, pack
from chitu.protocol.receipt import ReceiptSampling, images_told, why_other_images
from chitu.router.generation import GenerateRequest, Generation

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between two looks into the folder."""
BUSY = (429, 503)
"""HTTP statuses of a router that may accept a request later."""


class _News(Wakeup):
    """The wakeup of a choice without a waiter: each `set` calls `on_news`."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        super().__init__()
        self._on_news = on_news

    def set(self) -> None:
        self._on_news()


@dataclass(slots=True, eq=False)
class TakenUp:
    """A request taken up from an earlier router."""

    record: KeptRequest
    parsed: ParsedRequest
    request: GenerateRequest
    decoder: ChoiceDecoder
    """Detects the end of the text; its own text is not used."""
    answer: RunningAnswer
    source: Generation | None = None
    """The generation that continues the request; None until it is sent."""
    error: ChituError | None = None
    is_read: bool = False
    """Whether a client has read the answer to its end."""
    readers: list[Generation] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.decoder.finish_reason is not None or self.error is not None


class KeptRequests:
    def __init__(
        self,
        folder: KeptFolder,
        model: ServedModel,
        router: PDRequestRouter,
        bodies: BodyReader,
        routes: GenerationRoutes,
        require_priority: Callable[[str, int], None],
        clock: Clock,
    ) -> None:
        """`require_priority`: raises InvalidRequest if a tenant may not have a priority."""
        self._require_priority = require_priority
        self._folder = folder
        self._model = model
        self._router = router
        self._bodies = bodies
        self._routes = routes
        self._running = routes.running
        self._clock = clock
        self._wall_minus_clock_s = time.time() - clock.monotonic()
        self._taken: list[TakenUp] = []
        self._looking: asyncio.Task[None] | None = None
        self._next_look_s = 0.0
        self._is_ending = False
        self._has_all = False
        """Whether no request waited in the folder after the last look."""
        self._next_look_over = asyncio.Event()

    # ------------------------------------------------------------------------------------------------ the router's end

    async def write_all(self, timeout_s: float) -> None:
        """Stop and write the running requests. Their clients are told how to go on, or that their request could not be
        written. Requests that must end here (`ParsedRequest.why_not_kept`) run on."""
        self._is_ending = True
        written: list[tuple[RunningAnswer | TakenUp, KeptRequest]] = []
        taken = {id(each.answer): each for each in self._taken}
        for answer in self._running.all():
            if id(answer) not in taken and (record := self._record_of(answer)) is not None:
                answer.shutdown_error = asyncio.get_running_loop().create_future()
                self._router.cancel(answer.choices[0].generation)
                written.append((answer, record))
        if self._looking is not None:  # it may be taking up a request
            await asyncio.wait({self._looking}, timeout=timeout_s / 2)
        for each in self._taken:
            if not each.is_read and each.error is None:
                written.append((each, self._record_again(each)))
                each.error = NoInstance("the server is shutting down")  # which also ends its updates
                if each.source is not None:
                    self._router.cancel(each.source)
        end_s = self._clock.monotonic() + timeout_s
        for what, record in written:
            error = await self._write(record, end_s)
            if isinstance(what, TakenUp):
                what.error = error
                self._tell(what)
            else:
                assert what.shutdown_error is not None
                what.shutdown_error.set_result(error)
                what.wakeup.set()

    async def _write(self, record: KeptRequest, end_s: float) -> ChituError:
        """Write the record and return the error that its client gets."""
        ident = record.request_id
        try:
            await asyncio.wait_for(
                asyncio.to_thread(self._folder.write, record), max(0.0, end_s - self._clock.monotonic())
            )
        except (OSError, NotKept, TimeoutError) as error:
            reason = str(error) or "the folder does not answer"
            logger.error("request %s could not be kept and is lost: %s", ident, reason)
            return NoInstance(f"the server is shutting down, and could not keep this request: {reason}")
        logger.info("request %s is kept after %d tokens", ident, len(record.token_ids))
        return RequestKept(
            f"the server is shutting down, and kept this request: the next one continues it; read its answer with "
            f"GET /v1/requests/{ident} (its rest, of a stream, with the header Last-Event-ID)"
        )

    def _record_of(self, answer: RunningAnswer) -> KeptRequest | None:
        """Return the record of a request; None if it cannot be kept, or has its last token already."""
        layout, origin = self._model.layout, answer.origin
        if origin is None or layout is None or len(answer.choices) != 1 or answer.is_aborted:
            return None
        choice, now_s = answer.choices[0], time.time()
        generation = choice.generation
        if generation.done:
            return None
        sampling = origin.parsed.samplings[0]
        return KeptRequest(
            kept=1,
            chitu=__version__,
            request_id=origin.request_id,
            tenant=answer.tenant,
            route=origin.endpoint.name,
            body=bytes(origin.body).decode(),
            fetched=origin.parsed.fetched,
            created_s=origin.created_s,
            expires_s=now_s + self._folder.config.max_age_s,
            left_s=max(0.001, generation.deadline_s - self._clock.monotonic()),
            model_hash=layout.model_hash,
            adapter_hash=generation.adapter_hash,
            dtype=layout.dtype,
            prompt_token_ids=unpack_i32(choice.prompt.token_ids).tolist(),
            images=images_told(choice.prompt.images, origin.parsed.files, origin.parsed.image_fingerprint),
            sampling=ReceiptSampling(**msgspec.structs.asdict(sampling)),
            token_ids=generation.output.tolist(),
            logprobs=_logprobs_of(generation),
        )

    def _record_again(self, each: TakenUp) -> KeptRequest:
        source, record = each.source, each.record
        if source is None:
            return record
        left_s = record.left_s if each.is_over else max(0.001, source.deadline_s - self._clock.monotonic())
        return msgspec.structs.replace(
            record,
            left_s=left_s,
            token_ids=source.output.tolist(),
            logprobs=_logprobs_of(source),
            finish=cast(Any, source.finish.reason if source.finish is not None else ""),
        )

    def snapshot(self, name: str, tenant: str | None) -> bytes:
        """Return what the router would write of the tenant's (None: any) newest request with this id, which runs on: a
        file that another router can take up. UnknownRequest if none runs, InvalidRequest if such a request cannot be
        kept."""
        taken = {id(each.answer): each for each in self._taken}
        for answer in reversed([each for each in self._running.named(name) if tenant in (None, each.tenant)]):
            each = taken.get(id(answer))
            record = self._record_of(answer) if each is None else self._record_again(each)
            if record is not None:
                return pack(record)
            if answer.choices and answer.origin is None:
                raise InvalidRequest(f"request {name!r} cannot be kept (docs/failures.md lists which cannot)")
        raise UnknownRequest(f"no request {name!r} runs here")

    # -------------------------------------------------------------------------------------------------- the next router

    def tick(self) -> None:
        """Look into the folder every `LOOK_S`, once requests can be served."""
        now_s = self._clock.monotonic()
        if now_s < self._next_look_s or self._is_ending or self._looking is not None:
            return
        self._drop_old(self._now_s())
        limits, layout = self._model.limits(self._router.candidates), self._model.layout
        if limits is not None and layout is not None and not self._router.why_unusable():
            self._next_look_s = now_s + LOOK_S
            for each in [each for each in self._taken if each.source is None and not each.is_over]:
                self._resume(each)
            self._looking = asyncio.ensure_future(self._look(layout))

    async def _look(self, layout: KVLayout) -> None:
        over, self._next_look_over = self._next_look_over, asyncio.Event()
        try:
            found = await asyncio.to_thread(self._folder.found, self._now_s(), layout.model_hash, layout.dtype)
            room = max(0, self._folder.config.max_requests - len(self._taken))
            has_all = len(found) <= room
            self._has_all = self._has_all and not found
            for name, record in found[:room]:
                if self._is_ending:
                    return
                try:
                    each = await self._parsed(await asyncio.to_thread(self._folder.whole, record))
                except DamagedFile as error:
                    await asyncio.to_thread(self._folder.refuse, name, f"{record.request_id}: {error}", ".damaged")
                    continue
                except ChituError as error:
                    if error.http_status in BUSY:
                        has_all = False
                    else:
                        await asyncio.to_thread(self._folder.refuse, name, f"{record.request_id}: {error.message}")
                    continue
                if await asyncio.to_thread(self._folder.take, name):
                    self._taken.append(each)
                    self._running.add(record.request_id, each.answer)
                    logger.info("kept request %s continues after %d tokens", record.request_id, len(record.token_ids))
                    self._resume(each)
            self._has_all = has_all
        except OSError as error:
            self._has_all = False
            logger.error("cannot look for kept requests in their folder: %s", error)
        finally:
            self._looking = None
            over.set()

    async def _parsed(self, record: KeptRequest) -> TakenUp:
        """Return the recorded request, ready to go on. ChituError if this router cannot serve it."""
        parsed = await self._bodies.parse_again(record.route, bytearray(record.body.encode()), record.fetched)
        limits = self._model.limits(self._router.candidates)
        if limits is None:
            raise NoInstance(self._router.candidates.why_unusable())
        if parsed.why_not_kept:
            raise InvalidRequest(f"{parsed.why_not_kept}: such a request is not kept")
        self._require_priority(record.tenant, parsed.asked.priority)
        ids, sampling = record.prompt_token_ids, record.sampling
        if len(ids) + sampling.max_tokens > limits.max_model_len or not ids:
            raise InvalidRequest(f"{len(ids)} + {sampling.max_tokens} tokens; {limits.max_model_len} are served here")
        self._model.require_known([*ids, *record.token_ids], limits, "token_ids", False)
        # What depends on limits and chance stays as it was; the rest of the sampling must equal the body's.
        parsed.samplings = [
            msgspec.structs.replace(parsed.samplings[0], max_tokens=sampling.max_tokens, seed=sampling.seed)
        ]
        if ReceiptSampling(**msgspec.structs.asdict(parsed.samplings[0])) != sampling:
            raise InvalidRequest(
                "sampling: the body of the kept request has different sampling parameters on this router"
            )
        if self._model.layout is None or self._model.layout.adapter_hash(parsed.asked.adapter) != record.adapter_hash:
            raise InvalidRequest(f"model: the kept request began with another LoRA adapter {parsed.asked.adapter!r}")
        parsed.asked = msgspec.structs.replace(parsed.asked, adapter_hash=record.adapter_hash)
        prompt = parsed.prompts[0]
        told = images_told(prompt.images, parsed.files, parsed.image_fingerprint)
        if why := why_other_images(record.images, told):
            raise InvalidRequest(f"images of the kept request: {why}")
        prompt.images = tuple([each.part for each in record.images])
        prompt.token_ids, prompt.num_tokens = pack_i32(ids), len(ids)
        if parsed.asked.cache_salt is not None:
            salt = record.tenant + parsed.asked.cache_salt
            parsed.asked = msgspec.structs.replace(parsed.asked, cache_salt=salt)
        request = GenerateRequest(
            request_id=record.request_id,
            token_ids=prompt.token_ids,
            num_tokens=len(ids),
            sampling=parsed.samplings[0],
            stop_ids=self._model.ends_of(parsed.samplings[0]),
            timeout_s=record.left_s,
            options=parsed.asked,
            prediction=parsed.prediction,
            images=prompt.images,
            files=parsed.files,
            slo=parsed.slo,
            tenant=record.tenant,
        )
        answer = RunningAnswer(record.tenant, self._clock.monotonic())
        each = TakenUp(record, parsed, request, self._routes.decoder_of(parsed, sampling), answer)
        answer.wakeup = _News(partial(self._on_news, each))
        each.decoder.feed(list(record.token_ids), record.finish or None)
        return each

    def _resume(self, each: TakenUp) -> None:
        """Continue the request. If no instance accepts it now, `tick` tries again."""
        record = each.record
        if each.decoder.finish_reason is not None:
            source = Generation(each.request, each.answer.wakeup.set, 0.0, self._clock.monotonic())
            source.tokens = list(record.token_ids)
            source.take()
            if record.finish:
                source.finish = Finish(b"", record.finish)
        else:
            try:
                source = self._router.resume(each.request, record.token_ids, each.answer.wakeup.set)
            except ChituError as error:
                if error.http_status not in BUSY:
                    each.error = error
                    self._tell(each)
                return
        each.source = source
        source.kept_logprobs = list(record.logprobs) if each.parsed.options.logprobs is not None else None
        each.answer.choices = [Choice(source, each.decoder, each.parsed.prompts[0])]
        for reader in each.readers:
            self._copy(source, reader)
        self._on_news(each)

    def _on_news(self, each: TakenUp) -> None:
        source = each.source
        if source is None or each.is_over:
            if each.answer.is_aborted and each.error is None:
                each.error = RequestCancelled("the request was aborted")
                self._tell(each)
            return
        tokens, logprobs = source.take(), source.take_logprobs()
        reason = source.finish.reason if source.finish is not None else None
        each.decoder.feed(tokens, reason)
        for reader in each.readers:
            reader.tokens += tokens
            if each.parsed.options.logprobs is not None:
                reader.logprobs += logprobs
            _copy_end(source, reader)
        if each.decoder.finish_reason is not None:
            self._router.cancel(source, is_complete=True)
        else:
            each.error = source.error
        self._tell(each)

    def _tell(self, each: TakenUp) -> None:
        for reader in each.readers:
            reader.error = each.error
            reader.wake()

    def _now_s(self) -> float:
        """Return the wall time by which requests are too old: that of this router's start and what has passed since. A
        clock that jumps must not remove all of them unread."""
        return self._wall_minus_clock_s + self._clock.monotonic()

    def _drop_old(self, now_s: float) -> None:
        for each in [each for each in self._taken if each.record.expires_s < now_s]:
            self._taken.remove(each)
            self._running.remove(each.record.request_id, each.answer)
            if not each.is_read:
                logger.warning("kept request %s expired: no client read its answer in time", each.record.request_id)
            each.error = each.error or UnknownRequest(f"request {each.record.request_id!r} is too old")
            self._tell(each)

    # ---------------------------------------------------------------------------------------------------------- readers

    async def find(self, name: str, tenant: str) -> TakenUp:
        """Return the tenant's newest request with this id or answer id. UnknownRequest if there is none; NoInstance
        if it may be in the folder. An unknown request waits for the next look: it may have been written just now."""
        each = self._known(name, tenant)
        if each is None and self._has_all and not self._is_ending:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._next_look_over.wait(), 2 * LOOK_S)
                each = self._known(name, tenant)
                if each is None and self._has_all and not self._is_ending:
                    raise UnknownRequest(f"no request {name!r} of an earlier router is kept here for you")
        if each is not None:
            return each
        if self._is_ending:
            raise NoInstance("the server is shutting down; the next one has the kept requests: try again")
        raise NoInstance("not all kept requests are read yet (instances start, or their folder has a fault): try again")

    def _known(self, name: str, tenant: str) -> TakenUp | None:
        names = self._running.bare_names(name)
        known = [each for each in self._taken if each.record.request_id in names and each.record.tenant == tenant]
        return max(known, key=lambda each: each.record.created_s, default=None)

    def reader(self, each: TakenUp, wake: Callable[[], None]) -> Generation:
        """Return a reader of the output from its beginning on. Give it to `leave` at the end."""
        now_s = self._clock.monotonic()
        reader = Generation(each.request, wake, now_s, now_s)
        each.readers.append(reader)
        if each.source is not None:
            self._copy(each.source, reader)
        reader.error = each.error
        return reader

    def leave(self, each: TakenUp, reader: Generation, has_all: bool) -> None:
        each.readers.remove(reader)
        each.is_read = each.is_read or has_all

    def _copy(self, source: Generation, reader: Generation) -> None:
        reader.tokens = list(source.taken)
        reader.logprobs = list(source.kept_logprobs or ())
        _copy_end(source, reader)
        reader.wake()


def _copy_end(source: Generation, reader: Generation) -> None:
    reader.finish, reader.cached_tokens, reader.drafts = source.finish, source.cached_tokens, source.drafts


def _logprobs_of(generation: Generation) -> list[bytes]:
    """Return the logprobs of all its tokens; empty if they are not requested."""
    kept = generation.kept_logprobs
    return [] if kept is None else kept + generation.logprobs


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
        record, parsed = each.record, each.parsed
        reader = self._kept.reader(each, running.wakeup.set)
        running.choices = [self._routes.choice_of(parsed, reader, parsed.prompts[0])]
        running.wakeup.set()

        def on_gone() -> None:
            reader.error = RequestCancelled("the reader has left")
            running.wakeup.set()

        exchange.call_when_gone(on_gone)
        form = self._routes.format_of(self._routes.endpoints[record.route], parsed, record.request_id, record.created_s)
        has_all = False
        try:
            await self._routes.write_answer(exchange, parsed, running, form)
            has_all = reader.error is None and not exchange.is_client_gone
        except ChituError as error:
            exchange.fail(error)
        finally:
            self._kept.leave(each, reader, has_all)
