"""Parses the requests of a connection with httptools (only its public API). Pure: bytes in, calls out.

httptools stops at a request that asks for an upgrade to another protocol, and leaves its body to that. No other
protocol is supported, and the upgrade is ignored (RFC 9110, 7.8): the head is parsed again without it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any
from urllib.parse import unquote

import httptools

from chitu.errors import ChituError, HeadersTooLarge, InvalidRequest
from chitu.http.limits import HTTPLimits
from chitu.net.http import Headers, Scope, header


class RequestParser:
    """Parser of one connection. `feed` raises the ChituError that `on_head` raises. `on_end` follows every `on_head`
    once. `on_head` gets the ASGI scope without the addresses, whether more requests may follow, and whether the client
    expects `100 Continue`."""

    def __init__(
        self,
        limits: HTTPLimits,
        on_head: Callable[[Scope, bool, bool], None],
        on_body: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._on_head = on_head
        self._on_body = on_body
        self._on_end = on_end
        self._parser: Any = httptools.HttpRequestParser(self)
        self.is_over = False
        """Whether no request follows: set by the owner, and once `feed` has raised."""
        self.num_begun = 0
        """Requests whose first byte has arrived."""
        self.is_in_head = self._is_in_body = False
        self._has_news = False
        self._held_bytes = 0
        """Bytes since the parser last reported a head or a part of a body. It keeps a header, or a trailer after the
        chunks of a body, until it is complete."""
        self._url = b""
        self._headers: Headers = []
        self._refusal: ChituError | None = None

    def feed(self, data: bytes) -> None:
        """Parse `data`. HeadersTooLarge or InvalidRequest if it is no valid request; then nothing more is taken."""
        self._has_news = False
        self._parse(data)
        if self._has_news or not (self.is_in_head or self._is_in_body):
            self._held_bytes = 0
            return
        self._held_bytes += len(data)
        if self._held_bytes > self._limits.max_head_bytes:
            self.close()
            raise self._too_large()

    def close(self) -> None:
        """Take nothing more."""
        self.is_over, self.is_in_head = True, False

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._parse(self._head_without_upgrade() + data[stop.args[0] :])
        except httptools.HttpParserError:
            if not self.is_over:  # else it is after a request that declared itself the last
                self.close()
                raise self._refusal or InvalidRequest("this is no HTTP request that the server understands") from None

    def _head_without_upgrade(self) -> bytes:
        parser = self._parser
        line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), self._url, parser.get_http_version().encode())
        kept = [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] != b"upgrade"]
        return b"".join((line, *kept, b"\r\n"))

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(f"at most {limits.max_headers} headers and {limits.max_head_bytes} bytes are taken")

    # ------------------------------------------------------------------------------------ calls of the parser; what is
    # raised in these leaves `feed_data` as another exception

    def _refuse(self, error: ChituError) -> ChituError:
        self._refusal = error
        return error

    def on_message_begin(self) -> None:
        if self.is_over:
            raise InvalidRequest("behind the last request")
        self.num_begun += 1
        self.is_in_head, self._held_bytes = True, 0
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_in_head:
            return  # a trailer
        headers = self._headers
        if len(headers) >= self._limits.max_headers:
            raise self._refuse(self._too_large())
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        method = parser.get_method()
        if method == b"CONNECT":
            raise InvalidRequest("no tunnels")
        if parser.should_upgrade():
            return
        if sum(map(len, chain.from_iterable(headers))) > self._limits.max_head_bytes:
            raise self._refuse(self._too_large())
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        version = parser.get_http_version()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": headers,
            "state": {},
        }
        is_new = version == "1.1"
        expects = is_new and (header(scope, b"expect") or b"").lower() == b"100-continue"
        self.is_in_head, self._is_in_body, self._has_news = False, True, True
        try:
            self._on_head(scope, is_new and parser.should_keep_alive(), expects)
        except ChituError as error:
            raise self._refuse(error) from None

    def on_body(self, data: bytes) -> None:
        self._has_news = True
        self._on_body(data)

    def on_message_complete(self) -> None:
        if self._is_in_body:  # else: an upgrade
            self._is_in_body = False
            self._on_end()
