"""Work on bodies: decoding JSON, rendering chats, tokenising, judging grammars, and the choice of where it runs.

`BodyWork` is pure. A small body is processed at once, on the event loop. A large one and every grammar go to a process
beside it (`serve/body_pool.py`), where they delay no request's tokens: the same methods, with the same errors. A body
with images is found by the same reading, and read once more in the process that reads their files. So a
task carries what it needs of the cluster (`ClusterFacts`), and its result can be pickled. `BodyReader` is on the loop
thread; it drops work for a client that has left.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from chitu.errors import Capacity, InvalidRequest, NoInstance, PayloadTooLarge
from chitu.grammars import GrammarCompiler
from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.http.ask.decoder import BodyDecoder, BodyTable, warning_header
from chitu.http.ask.images import ImagesWanted
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import ClusterFacts, ParseContext, ParsedRequest, TokensAnswer
from chitu.http.ask.served_model import ServedModel
from chitu.http.wire.exchange import EXCHANGE, Exchange
from chitu.net.http import ClientGone, Scope
from chitu.net.image_fetch import ImageFetcher
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import Grammar
from chitu.router.candidates import Candidates

BODY_S = 30.0
"""Processor time that a body may take. The largest take seconds. One that takes longer has trapped a template, or a
pattern of the tokenizer."""
GRAMMAR_S = 3.0
"""Processor time that a grammar may take. D then compiles it, too, and cannot be interrupted."""
IMAGE_MARKS = (b'image"', b'"image_url"', b'"video_url"')
"""One of these is in each body with an image. A large body with one of them goes to the process that reads images at
once, though it may be a text that has such words."""
MAX_VERDICTS = 64
"""Verdicts on grammars that are kept for later requests with the same grammar."""
T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
Read = Callable[[BodyParser, Any, ParseContext, list[str]], ParsedRequest | TokensAnswer]
"""What an endpoint does with a decoded body. The last argument gets warnings for the client."""


class Reader(NamedTuple):
    """How a body of one endpoint is read."""

    decoder: BodyDecoder[Any]
    read: Read


class ReadBody(msgspec.Struct, frozen=True):
    route: str
    facts: ClusterFacts
    limit_s: float = BODY_S
    fetched: dict[str, bytes] = {}
    """Files of images at URLs."""
    reads_images: bool = False
    """Whether files of images are read, which one process alone does."""


class WantedImages(NamedTuple):
    """Result of a body with images for another process, which is to get the files at these URLs."""

    urls: dict[str, str]
    """With their fields in the body."""


class JudgeGrammar(NamedTuple):
    grammar: Grammar
    vocab_size: int
    limit_s: float = GRAMMAR_S


BodyTask = ReadBody | JudgeGrammar


class BodyWork:
    """Work on bodies and grammars."""

    def __init__(self, model: ServedModel, takes_unknown: bool, readers: Mapping[str, Reader]) -> None:
        """`takes_unknown`: an unknown field causes a warning instead of an error. `readers`: by the endpoint's name."""
        self._model = model
        self._parser = BodyParser(model)
        self._takes_unknown = takes_unknown
        self._readers = readers
        self._compiler: tuple[int, GrammarCompiler] | None = None

    def read(
        self, task: ReadBody, raw: bytes | bytearray, require_client: Callable[[], None]
    ) -> ParsedRequest | TokensAnswer | WantedImages:
        """Parse a body into what its route needs. Calls `require_client` between prompts, which raises if the client no
        longer waits for them. All other errors are for the client."""
        reader, warnings = self._readers[task.route], list[str]()
        if task.facts.adapters is not None:  # another process sees no view
            self._model.adapters = task.facts.adapters
        body = reader.decoder.decode(raw, warnings if self._takes_unknown else None)
        context = ParseContext(task.facts, require_client, task.fetched, task.reads_images)
        try:
            return reader.read(self._parser, body, context, warnings)
        except ImagesWanted as wanted:
            return WantedImages(wanted.urls)

    def judge(
        self, task: JudgeGrammar, limited: Callable[[float], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Raise InvalidRequest if D could not compile the grammar. `limited(seconds)`: a context that ends the process
        if the compilation takes more processor time."""
        try:
            if self._compiler is None or self._compiler[0] != task.vocab_size:
                self._compiler = task.vocab_size, GrammarCompiler(self._model.tokenizer, task.vocab_size)
            with limited(task.limit_s):
                self._compiler[1].compile(task.grammar)
        except InvalidRequest:
            raise
        except BaseException as error:
            # Whatever the library raises, even a panic, fails only this request.
            raise InvalidRequest(f"{task.grammar.kind}: it cannot be compiled ({type(error).__name__})") from None


def too_costly(task: BodyTask) -> InvalidRequest:
    """Return the error of a task that took more processor time than its kind may take."""
    limit = f"{task.limit_s:g} s of processor time"
    if isinstance(task, JudgeGrammar):
        return InvalidRequest(f"{task.grammar.kind}: it takes more than {limit} to compile")
    return InvalidRequest(f"the body takes more than {limit} to read; send less at once")


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
        readers: Mapping[str, Reader],
        fetcher: ImageFetcher | None = None,
    ) -> None:
        """`client_of`: the client in whose turn the executor works for a request. `readers`: see `BodyWork`. `fetcher`
        of images at URLs; None if there are none."""
        self._fetcher = fetcher
        self._model = model
        self._router = router
        self._readers = readers
        self._work = BodyWork(model, takes_unknown, readers)
        self._executor = executor
        self._known: tuple[Candidates, ClusterFacts] | None = None
        self._verdicts: OrderedDict[Grammar, InvalidRequest | None] = OrderedDict()
        self._client_of = client_of
        self._judging: dict[tuple[bytes, Grammar], asyncio.Future[InvalidRequest | None]] = {}
        """Grammars that wait for a verdict, by client: no client waits for the turn of another."""

    async def parse(self, route: str, raw: bytearray, exchange: Exchange) -> ParsedRequest:
        """Return the request of a generation route. Errors are for the client, and raised before it is sent on."""
        facts = self._facts()
        try:
            parsed: ParsedRequest = await self._read(ReadBody(route, facts), raw, exchange)
            grammar = parsed.samplings[0].grammar
            if grammar is not None:
                verdict = self._verdict(JudgeGrammar(grammar, facts.vocab_size), self._client_of(exchange.scope))
                refusal = await _while_wanted(exchange, verdict)
                if refusal is not None:
                    raise parsed.refusal(refusal)
        except (NoInstance, Capacity) as error:
            raise self._router.rejected(error) from None
        return parsed

    async def parse_again(self, route: str, raw: bytearray, fetched: dict[str, bytes]) -> ParsedRequest:
        """Return the parsed request of a body that an earlier router accepted, including its grammar. InvalidRequest if
        this one has no such endpoint. `fetched`: `ParsedRequest.fetched` of that router."""
        if route not in self._readers:
            raise InvalidRequest(f"there is no endpoint {route!r}")
        parsed: ParsedRequest = await self._work_on(ReadBody(route, self._facts(), fetched=fetched), raw, b"")
        return parsed

    async def tokens(self, route: str, raw: bytes | bytearray, exchange: Exchange) -> TokensAnswer:
        """Return the answer of a route that counts or returns tokens."""
        answer: TokensAnswer = await self._read(ReadBody(route, self._facts()), raw, exchange)
        return answer

    def _facts(self) -> ClusterFacts:
        """Return what holds for bodies now; computed once per view."""
        candidates = self._router.candidates
        if self._known is None or self._known[0] is not candidates:
            limits = self._model.limits(candidates)
            why_unusable = candidates.why_unusable() if limits is None else ""
            sees_images = all([instance.sees_images for instance in candidates.serving])
            self._known = (
                candidates,
                ClusterFacts(
                    *(limits, why_unusable, self._model.vocab_size(candidates), sees_images), self._model.adapters
                ),
            )
        return self._known[1]

    async def _read(self, task: ReadBody, raw: bytes | bytearray, exchange: Exchange) -> Any:
        if _is_small(raw):
            found = self._work.read(task, raw, lambda: None)
            if not isinstance(found, WantedImages):
                return found
            work = self._with_images(task, raw, self._client_of(exchange.scope), found)
        else:
            work = self._work_on(task, raw, self._client_of(exchange.scope))
        return await _while_wanted(exchange, work)

    async def _work_on(self, task: ReadBody, raw: bytes | bytearray, client: bytes) -> Any:
        """Return what the body says, wherever it is read."""
        found: Any
        if _is_small(raw):
            found = self._work.read(task, raw, lambda: None)
        else:
            if self._model.has_vision and any(mark in raw for mark in IMAGE_MARKS):
                task = msgspec.structs.replace(task, reads_images=True)
            found = await self._executor.do(task, raw, client)
        if isinstance(found, WantedImages):
            return await self._with_images(task, raw, client, found)
        return found

    async def _with_images(self, task: ReadBody, raw: bytes | bytearray, client: bytes, wanted: WantedImages) -> Any:
        """Return what a body with images says: it is read again, where files are read."""
        task = msgspec.structs.replace(task, reads_images=True)
        urls = {url: where for url, where in wanted.urls.items() if url not in task.fetched}
        if not urls:
            return await self._executor.do(task, raw, client)
        if self._fetcher is None:
            raise InvalidRequest("this server fetches no images")
        async with self._fetcher.files(urls, client) as files:
            task = msgspec.structs.replace(task, fetched={**task.fetched, **files})
            found = await self._executor.do(task, raw, client)
        if isinstance(found, ParsedRequest):
            own = found.files.values()  # the same bytes, which need not be in memory twice
            found.fetched = {url: next((each for each in own if each == data), data) for url, data in files.items()}
        return found

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


async def read_body(request: Request, kind: type[StructT], takes_unknown: bool = False) -> StructT:
    """Return a small body. Unknown fields of it are errors, or warnings if `takes_unknown`."""
    table: BodyTable = request.app.state.bodies
    raw = await request.body()
    if len(raw) > LARGE_BODY_BYTES:
        raise PayloadTooLarge(f"a body of {len(raw)} bytes; at most {LARGE_BODY_BYTES} are accepted here")
    warnings: list[str] = []
    body = table.decoder(kind).decode(raw, warnings if takes_unknown else None)
    if warnings:
        request.scope[EXCHANGE].headers.append(warning_header(warnings))
    return body


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
