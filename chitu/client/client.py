"""HTTP of `chitu chat` and of the quickstart: asks a running router. Blocking; used from the caller's one thread.

Plain `http.client`: there is one request at a time, Ctrl-C must reach the read that waits for a token, and the client
of a serving tool should add no dependency to it. Each call has a connection of its own; closing it in the middle of an
answer is how a request is aborted (the router cancels it on P and D). No proxy is used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from chitu.client.answer import Answer, AnswerReader, ErrorObject
from chitu.client.timeline import TraceAnswer
from chitu.config.schema import Topology
from chitu.errors import ChituError, ConfigError, Internal, ServiceError, Unauthorized, from_code
from chitu.protocol.snapshot import ClusterSnapshot

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0
"""Of a GET; the router answers from memory."""
ANSWER_TIMEOUT_S = 660.0
"""Between two reads of an answer; the router ends a request by itself after `request_timeout_s` (600 s)."""
READ_BYTES = 1 << 16

T = TypeVar("T")


class RouterUnreachable(ServiceError):
    """Nobody listens there, or the connection broke."""

    code = "router_unreachable"


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _Draining(msgspec.Struct, frozen=True):
    incarnation: str


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class RouterClient:
    """`url`: `http://HOST:PORT`, with or without `/v1`. ConfigError where it is none. `flag`: by which it is given."""

    def __init__(self, url: str, api_key: str | None = None, flag: str = "--url") -> None:
        self._flag = flag
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{url!r} is no URL of a router, which looks like http://127.0.0.1:21003")
        self._is_tls = parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("an API key has only printable ASCII characters")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model_name(self) -> str:
        """Id of the served model. RouterUnreachable, Unauthorized, Internal where no router answers."""
        models = self._get("/v1/models", _Models).data
        if not models:
            raise Internal(f"{self.url} serves no model")
        return models[0].id

    def cluster(self) -> ClusterSnapshot:
        return self._get("/cluster", ClusterSnapshot)

    def drain(self, instance: str, force: bool) -> str:
        """Have an instance finish and leave; which incarnation does. UnknownInstance; LastInstance without `force`."""
        return self._ask("POST", "/admin/drain", _Draining, {"instance": instance, "force": force}).incarnation

    def trace(self, request_id: str) -> TraceAnswer:
        """UnknownTrace where there are no records of it."""
        return self._get(f"/trace/{quote(request_id, safe='')}", TraceAnswer)

    def snapshot(self, request_id: str) -> bytes:
        """A file of a request that runs, which runs on. UnknownRequest; InvalidRequest where it cannot be kept."""
        body = {"request_id": request_id}
        path, ident = "/admin/snapshot", uuid.uuid4().hex
        with self._reply("POST", path, REPLY_TIMEOUT_S, ident, body) as reply, self._named_errors():
            return reply.read()

    def topology(self) -> Topology:
        """That of the cluster, with the router's actual ports and without keys."""
        return self._get("/admin/topology", Topology)

    def stream(self, path: str, body: Mapping[str, Any], on_text: Callable[[str], None]) -> Answer:
        """POST a generation request with `stream: true` and hand out its text as it comes.

        Returns in every case: an error is in the answer, behind the text that came ahead of it; Ctrl-C stops the
        request and is no error.
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
        """The answer's pieces; closing the generator closes the connection."""
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

    def _get(self, path: str, kind: type[T]) -> T:
        return self._ask("GET", path, kind, None)

    def _ask(self, method: str, path: str, kind: type[T], body: Mapping[str, Any] | None) -> T:
        with self._reply(method, path, REPLY_TIMEOUT_S, uuid.uuid4().hex, body) as reply:
            with self._named_errors():
                answer = reply.read()
            try:
                return msgspec.json.decode(answer, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Internal(f"{self.url}{path} is not that of this version of chitu: {error}") from error

    @contextlib.contextmanager
    def _reply(
        self, method: str, path: str, timeout_s: float, request_id: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """An open response of status 200; closed with its connection at the end. Else the error that it names."""
        make = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = make(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._named_errors():
                connection.connect()
                connection.sock.settimeout(timeout_s)
                connection.request(method, self._base + path, data, {**self._headers, "X-Request-Id": request_id})
                reply = connection.getresponse()
            with contextlib.closing(reply):
                if reply.status != 200:
                    with self._named_errors():
                        refusal = reply.read()
                    raise self._refusal(path, reply.status, refusal)
                yield reply
        finally:
            connection.close()

    def _refusal(self, path: str, status: int, body: bytes) -> ChituError:
        try:
            refusal = msgspec.json.decode(body, type=_ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Internal(f"{self.url} is no chitu router: {path} answers with status {status}")
        error = from_code(refusal.code or "internal", refusal.message)
        if isinstance(error, Unauthorized):
            return Unauthorized(f"{error.message} (CHITU_API_KEY in the environment)")
        return error

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """What goes wrong on the network, as one sentence."""
        try:
            yield
        except ConnectionRefusedError as error:
            raise RouterUnreachable(
                f"no router listens at {self.url}: start one with `chitu serve`, or name another with {self._flag}"
            ) from error
        except TimeoutError as error:
            raise RouterUnreachable(f"{self.url} does not answer") from error
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: of a host that can be none
            raise RouterUnreachable(f"the connection to {self.url} broke: {error or type(error).__name__}") from error
