"""Images at URLs: fetched by the router, from hosts that its operator lists.

On the loop, not in the process that reads bodies: a server that answers slowly keeps nobody there from their turn. What
is read is bytes in a buffer; nobody looks into them here. Each name is resolved once, all of its addresses are checked,
and the connection goes to one of these, so a name cannot change in between. A redirect is a new URL with the same
checks. Bounds: time of all of a fetch, bytes of a file, of a request and of all that are held, and fetches at a time,
in which clients take turns. No proxy is used, nothing is sent but the request itself, and answers that are encoded or
say that they are no image are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urljoin

import httptools

from chitu.config.schema import ImagesConfig
from chitu.errors import Capacity, InvalidRequest
from chitu.net.fair_share import NoPlace, Turns
from chitu.net.image_urls import AllowedHosts, ImageURL, URLRefused

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host, given with the port."""
MAX_REDIRECTS = 3
MAX_HEAD_BYTES = 32 << 10
"""Headers of an answer."""
READ_BYTES = 64 << 10
MAX_FETCHES = 16
"""Fetches at a time."""
MAX_WAITING = 1024
"""Fetches that run or wait, shared as `Places` are."""
MAX_ADDRESSES = 2
"""Addresses of a host that are tried."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_OK = 200
_IMAGE_TYPES = ("image/", "video/", "application/octet-stream", "binary/octet-stream")
_HEAD = "GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: chitu\r\nAccept: image/*\r\nAccept-Encoding: identity\r\n"
_CLOSE = "Connection: close\r\n\r\n"


async def resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class ImageFetcher:
    """The fetches of one router."""

    def __init__(self, limits: ImagesConfig, max_held_bytes: int, resolve: Resolve = resolved) -> None:
        """`max_held_bytes`: of all files that are being fetched, or are held by `files`."""
        self._limits = limits
        self._hosts = AllowedHosts(limits.hosts)
        self._resolve = resolve
        self._turns: Turns[bytes] = Turns(MAX_WAITING, MAX_FETCHES)
        self._max_held_bytes = max_held_bytes
        self.held_bytes = 0
        self._tls: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def files(self, wanted: Mapping[str, str], client: bytes) -> AsyncIterator[dict[str, bytes]]:
        """Yield the files at URLs, which count as held as long as the context lasts. `wanted`: the field of each URL.
        InvalidRequest names the field; Capacity if too many bytes are held, or too many fetches of the client wait."""
        budget = _Budget(self, self._limits.max_total_mb << 20)
        try:
            yield await self._fetched(wanted, client, budget)
        finally:
            self.held_bytes -= budget.num_bytes

    async def _fetched(self, wanted: Mapping[str, str], client: bytes, budget: _Budget) -> dict[str, bytes]:
        async def one(url: str, where: str) -> None:
            try:
                async with self._turns.turn(client), asyncio.timeout(self._limits.fetch_timeout_s):
                    found[url] = await self._fetch(url, budget)
            except URLRefused as error:
                raise InvalidRequest(f"{where}: the image {error}", where) from None
            except NoPlace:
                raise Capacity("too many of your images wait to be fetched already") from None
            except TimeoutError:
                limit = f"{self._limits.fetch_timeout_s:g} s (router.images.fetch_timeout_s)"
                raise InvalidRequest(f"{where}: the image could not be fetched within {limit}", where) from None
            except (OSError, ssl.SSLError, httptools.HttpParserError, ValueError):
                raise InvalidRequest(f"{where}: the image could not be fetched from its host", where) from None

        found: dict[str, bytes] = {}
        tasks = [asyncio.ensure_future(one(url, where)) for url, where in wanted.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def _fetch(self, text: str, budget: _Budget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            url = ImageURL.parse(text)
            self._hosts.require(url)
            answer = await self._answer(url, budget)
            if answer.status not in _REDIRECTS:
                break
            target = urljoin(text, answer.headers.get("location", ""))
            if url.scheme == "https" and not target.lower().startswith("https://"):
                raise URLRefused("is redirected to what is no https")
            text = target
        else:
            raise URLRefused(f"is redirected more than {MAX_REDIRECTS} times")
        if answer.status != _OK:
            raise URLRefused(f"could not be fetched: its host answers with the status {answer.status}")
        if not answer.is_over:
            raise URLRefused("could not be fetched: its host breaks off")
        return bytes(answer.body)

    async def _answer(self, url: ImageURL, budget: _Budget) -> _Answer:
        answer = _Answer(self._limits.max_file_mb << 20, budget)
        reader, writer = await self._connected(url)
        try:
            writer.write((_HEAD.format(url.target, url.authority) + _CLOSE).encode())
            while not answer.is_over and (data := await reader.read(READ_BYTES)):
                answer.feed(data)
            answer.end()
        finally:
            writer.transport.abort()
        return answer

    async def _connected(self, url: ImageURL) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to an address of the host; all of them may be had."""
        addresses = await self._resolve(url.host, url.port)
        for address in addresses:
            self._hosts.require_address(address, url.port)
        secured: dict[str, Any] = {}
        if url.scheme == "https":
            if self._tls is None:  # the system's certificates take a while to read
                self._tls = await asyncio.to_thread(ssl.create_default_context)
            secured = {"ssl": self._tls, "server_hostname": url.host}
        failed: OSError = ConnectionError()
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await asyncio.open_connection(address, url.port, limit=READ_BYTES, **secured)
            except OSError as error:
                failed = error
        raise failed


class _Budget:
    """Bytes of one request's files."""

    def __init__(self, fetcher: ImageFetcher, max_bytes: int) -> None:
        self._fetcher = fetcher
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        fetcher = self._fetcher
        if self.num_bytes + num_bytes > self._max_bytes:
            raise URLRefused("makes the files of the request too large (router.images.max_total_mb)")
        if fetcher.held_bytes + num_bytes > fetcher._max_held_bytes:
            raise Capacity("too many bytes of images are fetched at once (router.max_total_body_bytes)")
        self.num_bytes += num_bytes
        fetcher.held_bytes += num_bytes


class _Answer:
    """An answer of HTTP/1, as far as it was read."""

    def __init__(self, max_bytes: int, budget: _Budget) -> None:
        self._max_bytes = max_bytes
        self._budget = budget
        self._parser: Any = httptools.HttpResponseParser(self)
        self._num_head_bytes = 0
        self._has_head = False
        self._refusal: Exception | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_over = False

    def feed(self, data: bytes) -> None:
        if not self._has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            raise self._refusal
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            raise URLRefused("could not be fetched: its host answers with too many headers")

    def end(self) -> None:
        """Note that the host sends no more: the end of a body without a length."""
        if self._has_head and "content-length" not in self.headers and "transfer-encoding" not in self.headers:
            self.is_over = True

    # ------------------------------------------------------------------------------------------- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip())

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if 100 <= self.status < _OK:  # of the answer that follows
            self.headers.clear()
            return
        self._has_head = True
        if self.status != _OK:
            self.is_over = True
            return
        length, kind = self.headers.get("content-length", "0"), self.headers.get("content-type", "image/")
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            self._refuse(URLRefused("could not be fetched: its host answers with an encoding"))
        elif not kind.lower().startswith(_IMAGE_TYPES):
            self._refuse(URLRefused("could not be fetched: its host answers with what is no image or video"))
        elif not length.isdecimal() or len(length) > 18 or int(length) > self._max_bytes:
            self._refuse(self._too_large())

    def on_body(self, data: bytes) -> None:
        if self.is_over or self._refusal is not None:
            return
        if len(self.body) + len(data) > self._max_bytes:
            self._refuse(self._too_large())
            return
        try:
            self._budget.take(len(data))
        except (URLRefused, Capacity) as error:
            self._refuse(error)
            return
        self.body += data

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_over = True

    def _refuse(self, error: Exception) -> None:
        self._refusal = error

    def _too_large(self) -> URLRefused:
        return URLRefused(f"is a file of more than {self._max_bytes} bytes (router.images.max_file_mb)")
