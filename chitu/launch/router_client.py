"""`RouterClient`: what the command line (`chitu chat`, `chitu verify`, ...) asks of a running router, over the HTTP
client of `net/client.py`. Blocking, in any thread. Each call opens its own connection.

`AnswerReader` parses a streamed answer: server-sent events -> text, token counts and how it ended. Pure. Invariant: the
pieces that `feed` returns concatenate to `Answer.text`, however the bytes were cut.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from chitu.config.schema import Topology
from chitu.errors import ChituError, ConfigError, Internal, ServiceError, Unauthorized, from_code
from chitu.known_types import known
from chitu.net.client import JSON, NETWORK_ERRORS, READ_BYTES, EventParser, Server
from chitu.protocol.admin import Canary, DrainReply, RoleReply
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tracing.timeline import TraceAnswer
from chitu.types import Role

REPLY_TIMEOUT_S = 10.0
"""Timeout of a GET; the router answers from memory."""
ANSWER_TIMEOUT_S = 660.0
"""Timeout between two reads of an answer; the router itself ends a request after `request_timeout_s` (600 s)."""
T = TypeVar("T")


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Answer:
    """One answer as far as it was received; it keeps its text if the rest is lost."""

    request_id: str
    """The X-Request-Id of the request: its key in `GET /cluster`."""
    text: str = ""
    usage: Usage | None = None
    """Token counts; None until the answer is complete."""
    finish_reason: str | None = None
    """Finish reason: `stop` or `length`."""
    is_complete: bool = False
    """Whether the router sent the end of the answer."""
    is_stopped: bool = False
    """Whether the user stopped the answer (Ctrl-C)."""
    error: ChituError | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """One choice of a chat (`delta`) or of a completion (`text`)."""

    delta: _Delta = _Delta()
    text: str = ""
    finish_reason: str | None = None


class ErrorObject(msgspec.Struct, frozen=True):
    """The error object of the OpenAI API."""

    message: str
    code: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: ErrorObject | None = None


class AnswerReader:
    """Fills an `Answer` from the body of a streamed response."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> str:
        """Return the text that this chunk completes. An error event ends the answer with its error and keeps its text.
        Raise Internal for an event that is no part of an answer."""
        before = len(self._answer.text)
        for data in self._parser.feed(chunk):
            if data == "[DONE]":
                self._answer.is_complete = True
            else:
                self._take(data)
        return self._answer.text[before:]

    def _take(self, data: str) -> None:
        answer = self._answer
        try:
            event = msgspec.json.decode(data, type=known(_Event))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Internal(f"the router sent an event that is no part of an answer: {data[:80]!r} ({error})") from error
        if event.error is not None:
            answer.error = from_code(event.error.code or "internal", event.error.message)
            answer.is_complete = True
            return
        if event.usage is not None:
            answer.usage = event.usage
        for choice in event.choices:
            answer.text += choice.text + (choice.delta.content or "")
            answer.finish_reason = choice.finish_reason or answer.finish_reason


class RouterUnreachable(ServiceError):
    """No router listens at the URL, or the connection broke."""

    code = "router_unreachable"


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class RouterClient:
    """Client of one router. `url` is `http://HOST:PORT`, with or without `/v1`; ConfigError if not. `flag` is the
    option that sets it."""

    def __init__(self, url: str, api_key: str | None = None, flag: str = "--url") -> None:
        self._flag = flag
        try:
            server = Server.at(url)
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from error
        if server.scheme not in ("http", "https") or not server.host:
            raise ConfigError(f"{url!r} is no URL of a router, such as http://127.0.0.1:21003")
        self.server = replace(server, base=server.base.removesuffix("/v1"))
        self.url = self.server.url
        self.headers = dict(JSON)
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("an API key has only printable ASCII characters")
            self.headers["Authorization"] = f"Bearer {api_key}"

    def model_name(self) -> str:
        """Return the id of the served model. Raise RouterUnreachable, Unauthorized, or Internal if it is no router."""
        models = self._get("/v1/models", _Models).data
        if not models:
            raise Internal(f"{self.url} serves no model")
        return models[0].id

    def is_chitu(self) -> bool:
        """Return whether the server says that it is one of this project."""
        return any(model.owned_by == "chitu" for model in self._get("/v1/models", _Models).data)

    def cluster(self) -> ClusterSnapshot:
        return self._get("/cluster", ClusterSnapshot)

    def drain(self, instance: str, force: bool) -> str:
        """Drain an instance and return its incarnation. Raise UnknownInstance, or LastInstance without `force`."""
        return self._post("/admin/drain", {"instance": instance, "force": force}, DrainReply).incarnation

    def set_canary(self, canary: Canary) -> Canary:
        """Set the share of a revision. Raise UnknownInstance if no instance has it."""
        return self._post("/admin/canary", msgspec.structs.asdict(canary), Canary)

    def change_role(self, instance: str, role: Role, force: bool) -> RoleReply:
        """Have an instance change its role. Raise UnknownInstance, RoleRefused, or LastInstance without `force`."""
        body = {"instance": instance, "role": role, "force": force}
        return self._post("/admin/role", body, RoleReply)

    def trace(self, request_id: str) -> TraceAnswer:
        """Return the trace of a request. Raise UnknownTrace if there are no records of it."""
        return self._get(f"/trace/{quote(request_id, safe='')}", TraceAnswer)

    def snapshot(self, request_id: str) -> bytes:
        """Return a snapshot file of a running request, which goes on. Raise UnknownRequest, or InvalidRequest if it
        cannot be kept."""
        return self.post("/admin/snapshot", {"request_id": request_id}, REPLY_TIMEOUT_S)[1]

    def topology(self) -> Topology:
        """Return the topology of the cluster, with the router's actual ports and without keys."""
        return self._get("/admin/topology", Topology)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float, request_id: str = "") -> tuple[str, bytes]:
        """Return the request id and the whole answer of a POST. Raise the error that it names, or RouterUnreachable."""
        request_id = request_id or uuid.uuid4().hex
        with self._reply("POST", path, timeout_s, request_id, body) as reply, self._named_errors():
            return request_id, reply.read()

    def stream(self, path: str, body: Mapping[str, Any], on_text: Callable[[str], None]) -> Answer:
        """POST a generation request with `stream: true` and pass its text to `on_text` as it arrives.

        It always returns: an error is in the answer, beside the text that arrived before it. Ctrl-C stops the request
        and is no error.
        """
        answer = Answer(request_id=uuid.uuid4().hex)
        try:
            with contextlib.closing(self._texts(path, body, answer)) as texts:
                for text in texts:
                    on_text(text)
        except KeyboardInterrupt:
            answer.is_stopped = True
        except ChituError as error:
            answer.error = error
        return answer

    def _texts(self, path: str, body: Mapping[str, Any], answer: Answer) -> Generator[str, None, None]:
        """Yield the pieces of the answer. Closing the generator closes the connection."""
        reader = AnswerReader(answer)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with self._reply("POST", path, ANSWER_TIMEOUT_S, answer.request_id, {**body, **options}) as reply:
            while not answer.is_complete:
                with self._named_errors():
                    chunk = reply.read1(READ_BYTES)
                if not chunk:
                    raise RouterUnreachable(f"the connection to {self.url} ended in the middle of the answer")
                if text := reader.feed(chunk):
                    yield text

    def get(self, path: str, timeout_s: float = REPLY_TIMEOUT_S) -> bytes:
        """Return the whole answer of a GET. Raise the error that it names, or RouterUnreachable."""
        with self._reply("GET", path, timeout_s, uuid.uuid4().hex, None) as reply, self._named_errors():
            return reply.read()

    def _get(self, path: str, kind: type[T]) -> T:
        return self._decoded(path, self.get(path), kind)

    def _post(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        return self._decoded(path, self.post(path, body, REPLY_TIMEOUT_S)[1], kind)

    def _decoded(self, path: str, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=known(kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Internal(f"{self.url}{path} answered in the format of another chitu version: {error}") from error

    @contextlib.contextmanager
    def _reply(
        self, method: str, path: str, timeout_s: float, request_id: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an open response of status 200 and close it with its connection at the end. Raise the error that any
        other response names."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "X-Request-Id": request_id}
        with contextlib.ExitStack() as stack:
            with self._named_errors():
                connection = stack.enter_context(self.server.connect(timeout_s))
                reply = stack.enter_context(contextlib.closing(connection.send(method, path, data, headers)))
            if reply.status != 200:
                with self._named_errors():
                    refusal = reply.read()
                raise self._refusal(path, reply.status, refusal)
            yield reply

    def _refusal(self, path: str, status: int, body: bytes) -> ChituError:
        try:
            refusal = msgspec.json.decode(body, type=known(_ErrorBody)).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Internal(f"{self.url} is no chitu router: {path} answers with status {status}")
        error = from_code(refusal.code or "internal", refusal.message)
        if isinstance(error, Unauthorized):
            return Unauthorized(f"{error.message} (CHITU_API_KEY in the environment)")
        return error

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn errors of the network into RouterUnreachable with one sentence."""
        try:
            yield
        except ConnectionRefusedError as error:
            raise RouterUnreachable(
                f"no router listens at {self.url}: start one with `chitu serve`, or name another with {self._flag}"
            ) from error
        except TimeoutError as error:
            raise RouterUnreachable(f"{self.url} does not answer") from error
        except NETWORK_ERRORS as error:
            raise RouterUnreachable(f"the connection to {self.url} broke: {error or type(error).__name__}") from error
