"""The hot routes, those of all APIs that generate or count, as plain ASGI on the router's loop.

A request costs one task (of its connection), a token neither task, queue nor timer. The writer of a stream is woken
once per loop turn and sends all events that are due at once, or in parts if these are large. Whatever ends the handler
(answer, error, client gone, cancellation) cancels the generations that still run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import cast

import msgspec

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.config.topology import max_body_bytes
from chitu.errors import ChituError, NoInstance, RequestCancelled
from chitu.http.answer.choice import (
    Choice,
    ChoiceDecoder,
    Origin,
    RunningAnswer,
    RunningAnswers,
    append_events,
    read_tokens,
)
from chitu.http.answer.dialect import Endpoint
from chitu.http.answer.formats import COMMENT, AnswerFormat, AnswerHead, FinishedChoice, UsageCount, WholeFormat
from chitu.http.answer.proof import FAKE, ChoiceSums, ChoiceTokens, Proof, headers_of, proof_of, receipt_of
from chitu.http.answer.spans import RequestSpan, request_span
from chitu.http.answer.token_logprobs import LogprobTables, PromptAnswer
from chitu.http.ask.decoder import warning_header
from chitu.http.ask.parsed import OutputOptions, ParsedRequest, Prompt, client_timeout_s
from chitu.http.ask.reader import BodyReader
from chitu.http.ask.sampling import with_seed
from chitu.http.ask.served_model import ServedModel
from chitu.http.messages.call_objects import joined
from chitu.http.wire.events import EventNumbers
from chitu.http.wire.exchange import JSON, Exchange, HotRoute
from chitu.net.http import ClientGone, Headers, Scope, header
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import MAX_PRIORITY, SamplingParams, prompt_lines, unpack_i32
from chitu.protocol.account import Moments, total_drafts
from chitu.protocol.receipt import images_told
from chitu.router.generation import GenerateRequest, Generation
from chitu.tokenizer import StopScanner

ABORTED = "the request was aborted"
STARTS_PER_TURN = 16
"""Requests that begin in one turn of the loop: a few milliseconds, for which tokens wait. With fewer, tokens that come
without a pause take more writes."""
CHOICES_PER_TURN = 4
"""Choices of one request that are sent before the loop serves other requests; more if they are sent together."""
TOKENS_PER_TURN = 1024
"""Tokens of one request made into text before the loop serves other requests; more if an unstreamed choice has more.
Each entry of logprobs counts as one."""
PART_BYTES = 256 << 10
"""A larger answer that is not streamed is written in parts of about this size, without announcing its length."""
SILENT_TURNS = 4
"""Looks at a stream, `stream_comment_s` in all, that find nothing new in it before it gets a sign of life."""


class Starts:
    """Lets requests begin in the order of their arrival, `STARTS_PER_TURN` in a turn of the loop: the tokens of streams
    that run already come between the turns."""

    def __init__(self) -> None:
        self._num_left = STARTS_PER_TURN
        self._is_due = False
        """Whether the next turn lets more begin."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return when the caller may begin."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_left:
            self._num_left -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _begin_turn(self) -> None:
        self._num_left = STARTS_PER_TURN
        while self._waiting and self._num_left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its request was cancelled
                waiter.set_result(None)
                self._num_left -= 1
        self._is_due = self._num_left < STARTS_PER_TURN
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._begin_turn)


class GenerationRoutes:
    """Handlers of the generation routes."""

    def __init__(
        self,
        model: ServedModel,
        router: PDRequestRouter,
        bodies: BodyReader,
        config: RouterConfig,
        clock: Clock,
        tenant_salt: Callable[[Scope], str],
        require_priority: Callable[[Scope, int], None],
        trace: Callable[[Scope, float, Callable[[], RequestSpan]], None] | None = None,
        endpoints: Mapping[str, Endpoint] = MappingProxyType({}),
    ) -> None:
        """`clock`: the router's. `tenant_salt`: prefix of a request's own `cache_salt`. `require_priority`: see
        `Access`. `trace` gets every request that is over: its arrival, and a function that makes its spans if needed.
        `endpoints`: all, by name."""
        self._model = model
        self._router = router
        self._bodies = bodies
        self._max_body_bytes = max_body_bytes(config, model.has_vision)
        self._clock = clock
        self._tenant_salt = tenant_salt
        self._require_priority = require_priority
        self._trace = trace
        self._starts = Starts()
        self.endpoints = endpoints
        prefixes = [each.id_prefix for each in endpoints.values() if each.id_prefix]
        self.running = RunningAnswers(router.cancel, prefixes)
        self.keeps = False
        """Whether requests may outlive the router."""
        self.draining = False
        """Whether the process is ending and rejects new requests."""
        self._look_s = config.stream_comment_s / SILENT_TURNS
        self._next_look_s = 0.0
        self._streams: dict[Exchange, tuple[ParsedRequest, RunningAnswer, AnswerFormat]] = {}
        """Streams that wait for events."""

    @cached_property
    def _logprobs(self) -> LogprobTables:
        return LogprobTables(self._model.tokenizer)

    def hot_routes(self, is_batch: bool = False) -> dict[str, HotRoute]:
        """Return the routes by path: for clients all, and for batches those that generate. `is_batch`: see `answer`."""
        routes: dict[str, HotRoute] = {}
        for each in self.endpoints.values():
            if each.answer is not None:
                answer = partial(self.answer, endpoint=each, is_batch=is_batch)
                routes |= dict.fromkeys((each.path, *each.aliases), HotRoute(answer, each.errors))
            elif each.reply is not None and not is_batch:
                routes[each.path] = HotRoute(partial(self.answer_tokens, endpoint=each), each.errors)
        return routes

    async def answer(
        self, exchange: Exchange, scope: Scope, request_id: str, endpoint: Endpoint, is_batch: bool = False
    ) -> None:
        """Answer a request. `is_batch`: a line of a batch, which comes last unless its body has a priority, and which
        the next router sends again."""
        running = RunningAnswer(self._tenant_salt(scope), self._clock.monotonic())
        self.running.add(request_id, running)
        failed: type[ChituError] | None = None
        try:
            raw = await exchange.body(self._max_body_bytes)
            running.received_s = self._clock.monotonic()
            await self._starts.turn()
            self._require_open()
            self._router.require_admission()  # before the costly part: a rejection must be fast under any load
            timeout_s = client_timeout_s(scope)
            running.trace = self._router.trace.level(header(scope, b"x-chitu-trace"))
            parsed = await self._bodies.parse(endpoint.name, raw, exchange)
            if parsed.asked.priority < 0:
                self._require_priority(scope, parsed.asked.priority)
            self._require_open()  # again: a large body or a grammar takes time
            created_s = int(time.time())
            if is_batch:
                priority = parsed.asked.priority or MAX_PRIORITY
                parsed.asked = msgspec.structs.replace(parsed.asked, priority=priority)
                exchange.release_body()
            elif self.keeps and not parsed.why_not_kept:  # its body counts as being read until it is over
                running.origin = Origin(request_id, endpoint, raw, parsed, created_s)
                running.numbers = EventNumbers()
            else:
                exchange.release_body()
            del raw
            parsed.timeout_s = timeout_s
            if parsed.warnings:
                exchange.headers.append(warning_header(parsed.warnings))
            salt = None if parsed.asked.cache_salt is None else running.tenant + parsed.asked.cache_salt
            parsed.asked = msgspec.structs.replace(parsed.asked, cache_salt=salt, trace=running.trace)
            if (served := self._model.layout) is not None and served.is_fake:
                exchange.headers += FAKE
            if exchange.is_client_gone:
                raise ClientGone
            exchange.call_when_gone(partial(self.running.end, running))
            await self._start(parsed, request_id, running, exchange)
            form = self.format_of(endpoint, parsed, request_id, created_s)
            await self.write_answer(exchange, parsed, running, form)
        except ClientGone:
            failed = RequestCancelled
        except ChituError as error:
            failed = type(error)
            if not (exchange.is_client_gone and isinstance(error, RequestCancelled)):
                exchange.fail(error)
        finally:
            self.running.remove(request_id, running)
            if running.trace:
                self._note_request(scope, request_id, running, failed)
            if self._trace is not None:
                make_span = partial(self._request_span, scope, request_id, running, failed)
                self._trace(scope, running.arrived_s, make_span)

    async def answer_tokens(self, exchange: Exchange, scope: Scope, request_id: str, endpoint: Endpoint) -> None:
        """Answer a request whose answer is made of its body alone."""
        raw = await exchange.body(self._max_body_bytes)
        body, warnings = await self._bodies.tokens(endpoint.name, raw, exchange)
        if warnings:
            exchange.headers.append(warning_header(warnings))
        exchange.answer(200, body)

    def tick(self) -> None:
        """Write a sign of life to each stream that was silent for `stream_comment_s`, so that no proxy cuts it off.
        Call it several times in that time."""
        now_s = self._clock.monotonic()
        if not self._look_s or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._look_s
        for exchange, (parsed, running, form) in self._streams.items():
            exchange.silent_turns += 1
            if exchange.silent_turns >= SILENT_TURNS and not exchange.is_full:
                sign = form.sign_of_life
                # A blank line after it would be an event of its own for some readers once an event has had an id.
                if sign is COMMENT and running.numbers is None:
                    sign += b"\n"
                self._write(exchange, parsed, running, sign)

    def _require_open(self) -> None:
        if self.draining:
            raise self._router.rejected(NoInstance("the server is shutting down"))

    def _note_request(
        self, scope: Scope, request_id: str, running: RunningAnswer, failed: type[ChituError] | None
    ) -> None:
        attempts = [choice.generation.attempts() for choice in running.choices]
        error = "" if failed is None else failed.code
        self._router.trace.note_request(
            request_id, scope["path"], running.tenant, running.arrived_s, running.received_s, error, attempts
        )

    def _request_span(
        self, scope: Scope, request_id: str, running: RunningAnswer, failed: type[ChituError] | None
    ) -> RequestSpan:
        """Return the request's span. Attributes have OpenTelemetry's names if it defines one."""
        prompts = {id(choice.prompt): choice.prompt.num_tokens for choice in running.choices}
        attributes = {
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "http.response.status_code": 200 if failed is None else failed.http_status,
            "gen_ai.request.model": next((c.generation.request.options.adapter for c in running.choices), "")
            or self._model.name,
            "gen_ai.usage.input_tokens": sum(prompts.values()),
            "chitu.request_id": request_id,
        }
        records = [choice.generation.attempts() for choice in running.choices]
        return request_span(attributes, self._moments(running), records, "" if failed is None else failed.code)

    # -------------------------------------------------------------------------------------------------------- choices

    async def _start(self, parsed: ParsedRequest, request_id: str, running: RunningAnswer, exchange: Exchange) -> None:
        """Send every choice; all or none. Fills `running.choices` as it goes, so that the caller can cancel them. The
        loop serves other requests in between. RequestCancelled if the request was aborted by then."""
        options, model, choices = parsed.options, self._model, running.choices
        if running.is_aborted:
            raise RequestCancelled(ABORTED)
        total = len(parsed.prompts) * options.n
        if total > 1:  # for one, `add_request` checks the same
            num_tokens = options.n * sum([prompt.num_tokens for prompt in parsed.prompts])
            self._router.require_room_for(total, num_tokens)
        if self._router.is_held:
            num_tokens = options.n * sum([prompt.num_tokens for prompt in parsed.prompts])
            await self._router.released(total, num_tokens, parsed.timeout_s)
            if exchange.is_client_gone:
                raise ClientGone
            if running.is_aborted:
                raise RequestCancelled(ABORTED)
        plan = parsed.plan
        ends_early = bool(options.stops) or (plan is not None and not plan.is_parallel)
        per_token = options.stream or ends_early or options.logprobs is not None or bool(options.num_returned)
        num_new = 0
        for prompt, sampling in zip(parsed.prompts, parsed.samplings, strict=True):
            ends, of_prompt = model.ends_of(sampling), self._prompt_answer(prompt, parsed)
            requests = [
                GenerateRequest(
                    request_id if total == 1 else f"{request_id}-{len(choices) + i}",
                    *(prompt.token_ids, prompt.num_tokens, with_seed(sampling, i), per_token, ends),
                    timeout_s=parsed.timeout_s,
                    options=parsed.asked,
                    prediction=parsed.prediction,
                    images=prompt.images,
                    files=parsed.files,
                    slo=parsed.slo,
                    tenant=running.tenant,
                )
                for i in range(options.n)
            ]
            while requests:
                sent = self._router.add_choices(requests, running.wakeup.set, is_admitted=total > 1)
                requests = requests[len(sent) :]
                for generation in sent:
                    choices.append(self.choice_of(parsed, generation, prompt, of_prompt))
                    if running.origin is not None and options.logprobs is not None:
                        generation.kept_logprobs = []
                num_new += len(sent)
                if num_new >= CHOICES_PER_TURN:
                    num_new = 0
                    await asyncio.sleep(0)
                    if exchange.is_client_gone:
                        raise ClientGone
                    if running.is_aborted:
                        raise RequestCancelled(ABORTED)

    def _prompt_answer(self, prompt: Prompt, parsed: ParsedRequest) -> PromptAnswer | None:
        """Return what is to be filled with the logprobs of a prompt, or its pooled states; None if neither was
        requested."""
        answer, options = PromptAnswer(is_pooled=parsed.is_pooled), parsed.options
        if options.echo and options.logprobs is not None:
            answer.repeated = self._logprobs.of_repeated(options.skip_special_tokens, prompt.num_added)
        if options.prompt_logprobs is not None:
            answer.field = self._logprobs.of_prompt(options.prompt_logprobs)
        return answer if answer.repeated is not None or answer.field is not None or answer.is_pooled else None

    def choice_of(
        self, parsed: ParsedRequest, generation: Generation, prompt: Prompt, of_prompt: PromptAnswer | None = None
    ) -> Choice:
        """Return a choice that is to be read from its first token on. `of_prompt` is that of all choices of the
        prompt."""
        options, logprobs = parsed.options, None
        if options.logprobs is not None or options.num_returned:
            offset = len(prompt.echo) if of_prompt is not None and of_prompt.repeated is not None else 0
            logprobs = self._logprobs.of_choice(parsed.is_chat, options.skip_special_tokens, offset)
        return Choice(generation, self.decoder_of(parsed, generation.request.sampling), prompt, logprobs, of_prompt)

    def decoder_of(self, parsed: ParsedRequest, sampling: SamplingParams) -> ChoiceDecoder:
        options, model, plan = parsed.options, self._model, parsed.plan
        skips_special = options.skip_special_tokens and (plan is None or model.may_skip_special(plan))
        return ChoiceDecoder(
            model.tokenizer.detokenizer(skips_special),
            StopScanner(options.stops, options.include_stop, options.special_stops if skips_special else {})
            if options.stops
            else None,
            options,
            model.stop_ids_of(sampling),
            plan.parser() if plan is not None else None,
        )

    def _usage(self, parsed: ParsedRequest, choices: list[Choice]) -> UsageCount:
        prompt_tokens = sum([prompt.num_tokens for prompt in parsed.prompts])
        # The choices of a prompt share it: it counts once, with the cached tokens of its first choice.
        cached_tokens = sum([choice.generation.cached_tokens for choice in choices[:: parsed.options.n]])
        completion_tokens = reasoning_tokens = 0
        for choice in choices:
            completion_tokens += choice.decoder.num_tokens
            reasoning_tokens += choice.decoder.num_reasoning_tokens
        drafts = total_drafts([choice.generation.drafts for choice in choices])
        counts_prediction = all([choice.generation.counts_prediction for choice in choices])
        return UsageCount(prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, drafts, counts_prediction)

    def _moments(self, running: RunningAnswer) -> Moments:
        return Moments(running.arrived_s, running.received_s, self._clock.monotonic())

    def _proof(self, parsed: ParsedRequest, running: RunningAnswer, kept: Iterable[int] | None = None) -> Proof:
        """Return the proof as of now. `kept`: indices of the choices that are returned, if all have ended."""
        records = [choice.generation.attempts() for choice in running.choices]
        cached_tokens, receipt = self._usage(parsed, running.choices).cached_tokens, None
        if parsed.options.return_receipt and kept is not None and self._model.layout is not None:
            (choice,) = running.choices
            told = images_told(choice.prompt.images, parsed.files, parsed.image_fingerprint)
            receipt = receipt_of(
                self._model.name, self._model.layout, choice.generation, choice.decoder.num_tokens, told
            )
        wants_sums = parsed.samplings[0].page_sums
        sums = [ChoiceSums.of(choice.generation.finish) for choice in running.choices] if wants_sums else ()
        has_tokens = parsed.options.return_token_ids and kept is not None
        tokens = [
            ChoiceTokens.of(
                *(choice.generation, choice.decoder.num_tokens),
                has_tokens=has_tokens,
                has_prompt=i % parsed.options.n == 0,
            )
            for i, choice in enumerate(running.choices)
        ]
        return proof_of(self._moments(running), records, kept or (), cached_tokens, receipt, sums, tokens)

    # ------------------------------------------------------------------------------------------------------- answering

    def write_answer(
        self, exchange: Exchange, parsed: ParsedRequest, running: RunningAnswer, form: WholeFormat
    ) -> Awaitable[None]:
        """Write the answer of choices that were sent. Raises errors that the client gets as an HTTP error."""
        if parsed.options.stream:
            return self._stream(exchange, parsed, running, cast(AnswerFormat, form))
        return self._collect(exchange, parsed, running, form)

    def format_of(self, endpoint: Endpoint, parsed: ParsedRequest, request_id: str, created_s: int) -> WholeFormat:
        assert endpoint.answer is not None
        name = parsed.asked.adapter or self._model.name
        return endpoint.answer(AnswerHead(request_id, created_s, name, endpoint.id_prefix), parsed)

    async def _collect(
        self, exchange: Exchange, parsed: ParsedRequest, running: RunningAnswer, form: WholeFormat
    ) -> None:
        options, choices, wakeup = parsed.options, running.choices, running.wakeup
        open_choices, num_new = choices, 0
        per_turn = _tokens_per_turn(options.logprobs)
        most = None if options.logprobs is None else per_turn
        while open_choices:
            await wakeup.wait()
            if running.shutdown_error is not None:
                raise await running.shutdown_error
            for choice in open_choices:
                generation = choice.generation
                if num_new >= per_turn:
                    num_new = 0
                    await asyncio.sleep(0)
                if generation.prompt_logprobs is not None:
                    await self._write_prompt(choice, generation.prompt_logprobs, options)
                num_new += len(generation.tokens)
                while not read_tokens(choice, most):
                    if generation.tokens:
                        await asyncio.sleep(0)
                    elif generation.error is not None:
                        raise await _failure_of(running, generation.error)
                    else:
                        break
                else:
                    self._router.cancel(generation, is_complete=True)
            open_choices = [choice for choice in open_choices if choice.decoder.finish_reason is None]
        kept = _best(choices, options) if options.num_returned else range(len(choices))
        proof = self._proof(parsed, running, kept) if options.return_proof else None
        pieces = form.full((_finished(choices[i], options) for i in kept), self._usage(parsed, choices), proof)
        await _write_whole(exchange, pieces, headers_of(proof) if proof is not None else [])

    async def _stream(
        self, exchange: Exchange, parsed: ParsedRequest, running: RunningAnswer, form: AnswerFormat
    ) -> None:
        """Stream the answer. Its head leaves with the first event or comment, so an earlier failure is still an HTTP
        error."""
        self._streams[exchange] = parsed, running, form
        try:
            await self._write_events(exchange, parsed, running, form)
        finally:
            del self._streams[exchange]

    async def _write_events(
        self, exchange: Exchange, parsed: ParsedRequest, running: RunningAnswer, form: AnswerFormat
    ) -> None:
        choices, wakeup, options = running.choices, running.wakeup, parsed.options
        open_choices = list(enumerate(choices))
        most = _tokens_per_turn(options.logprobs)
        while open_choices:
            await wakeup.wait()
            events: list[bytes] = []
            has_ended, num_due = False, 0
            failure = await running.shutdown_error if running.shutdown_error is not None else None
            for i, choice in open_choices if failure is None else ():
                generation = choice.generation
                if num_due >= most:
                    num_due = 0
                    await self._write_part(exchange, parsed, running, events)
                # Behind that wait: its first token, which opens the choice, may have come meanwhile.
                if generation.prompt_logprobs is not None:
                    await self._write_prompt(choice, generation.prompt_logprobs, options)
                num_due += len(generation.tokens) if choice.is_open or not choice.prompt.echo else most
                while not append_events(events, i, choice, form, options, most):
                    if generation.tokens:
                        await self._write_part(exchange, parsed, running, events)
                    elif generation.error is not None and failure is None:
                        failure = await _failure_of(running, generation.error)
                    else:
                        break
                else:
                    has_ended = True
                    self._router.cancel(generation, is_complete=True)
            if failure is not None and not exchange.is_started:
                raise failure
            if has_ended:
                open_choices = [(i, choice) for i, choice in open_choices if choice.decoder.finish_reason is None]
                if not open_choices:
                    usage = self._usage(parsed, choices) if options.include_usage else None
                    proof = self._proof(parsed, running, range(len(choices))) if options.return_proof else None
                    if usage is not None or proof is not None:
                        events.append(form.usage(usage, proof))
                    events.append(form.done)
            data = b"".join(events)
            if running.numbers is not None:
                data = running.numbers.apply(data)
            if failure is not None:
                data += form.error(failure)  # without a number: it is not an event of the answer
                open_choices = []
            if not data and open_choices:
                continue
            if exchange.is_full:
                await exchange.drained()
            if exchange.is_started:
                exchange.stream(data, not open_choices)  # as `_write` does, whose call costs a twentieth of a token
            else:
                self._write(exchange, parsed, running, data, is_last=not open_choices)

    async def _write_part(
        self, exchange: Exchange, parsed: ParsedRequest, running: RunningAnswer, events: list[bytes]
    ) -> None:
        """Write the events of an answer that has more, and clear their list. The loop serves other requests."""
        data = b"".join(events)
        events.clear()
        if running.numbers is not None:
            data = running.numbers.apply(data)
        await asyncio.sleep(0)
        if exchange.is_full:
            await exchange.drained()
        if data:
            self._write(exchange, parsed, running, data)

    def _write(
        self, exchange: Exchange, parsed: ParsedRequest, running: RunningAnswer, data: bytes, *, is_last: bool = False
    ) -> None:
        if parsed.options.return_proof and not exchange.is_started:
            exchange.headers += headers_of(self._proof(parsed, running))
        exchange.stream(data, is_last)

    async def _write_prompt(self, choice: Choice, data: bytes, options: OutputOptions) -> None:
        """Write the prompt's logprobs, ahead of its first token, unless another choice did. This may take long, so the
        loop serves other requests in between."""
        prompt, answer = choice.prompt, choice.of_prompt
        choice.generation.prompt_logprobs = None
        if answer is None or answer.is_written:
            return
        if answer.is_pooled:
            answer.pooled = data
            return
        answer.is_written = True
        token_ids, lines = unpack_i32(prompt.token_ids), prompt_lines(prompt.num_tokens, data)
        per_turn = _tokens_per_turn(options.prompt_logprobs, options.logprobs if options.echo else None)
        for start in range(0, len(token_ids), per_turn):
            part = slice(start, start + per_turn)
            if answer.repeated is not None:
                answer.repeated.write_prompt(token_ids[part], lines[part], options.logprobs or 0)
            if answer.field is not None:
                answer.field.write(token_ids[part], lines[part])
            await asyncio.sleep(0)


def _tokens_per_turn(*candidates: int | None) -> int:
    """Return how many tokens to write before the loop serves other requests. `candidates` of each of their lists of
    logprobs; None: there is no such list."""
    return TOKENS_PER_TURN // (1 + sum([1 + count for count in candidates if count is not None]))


async def _failure_of(running: RunningAnswer, error: ChituError) -> ChituError:
    """Return the error for the client of a failed generation: a request that is kept was stopped on purpose."""
    return error if running.shutdown_error is None else await running.shutdown_error


async def _write_whole(exchange: Exchange, pieces: Iterator[bytes], headers: Headers) -> None:
    """Write an answer that is not streamed. The loop serves other requests between the parts of a large one."""
    part: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        part.append(piece)
        num_bytes += len(piece)
        if num_bytes >= PART_BYTES:
            if not exchange.is_started:
                exchange.headers += headers
            exchange.stream(b"".join(part), False, JSON)
            part, num_bytes = [], 0
            await asyncio.sleep(0)
            if exchange.is_full:
                await exchange.drained()
            if exchange.is_client_gone:
                return
    if exchange.is_started:
        exchange.stream(b"".join(part), True, JSON)
    else:
        exchange.answer(200, b"".join(part), headers)


def _finished(choice: Choice, options: OutputOptions) -> FinishedChoice:
    logprobs = choice.logprobs if options.logprobs is not None else None
    return FinishedChoice(
        joined([choice.prompt.echo, *choice.texts]),
        choice.decoder.finish_reason or "stop",
        choice.token_ids if options.return_token_ids else None,
        logprobs.pieces(choice.of_prompt) if logprobs is not None else (b"null",),
        choice.of_prompt.field if choice.of_prompt is not None else None,
        choice.decoder.stop_text,
        choice.of_prompt.pooled if choice.of_prompt is not None else b"",
    )


def _best(choices: list[Choice], options: OutputOptions) -> list[int]:
    """Return the indices of the choices to return: of each prompt the best first, equal ones in their order."""
    means = [choice.logprobs.mean if choice.logprobs is not None else 0.0 for choice in choices]
    kept: list[int] = []
    for first in range(0, len(choices), options.n):
        ranked = sorted(range(first, first + options.n), key=lambda i: -means[i])
        kept += ranked[: options.num_returned]
    return kept
