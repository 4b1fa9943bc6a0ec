"""What the parser of requests holds back counts against the bound of what it belongs to."""

from __future__ import annotations

from chitu.http.connection import RequestParser
from chitu.http.limits import HTTPLimits


def test_trailers_do_not_count_against_the_next_head() -> None:
    paths: list[str] = []
    parser = RequestParser(
        HTTPLimits(max_head_bytes=1000),
        lambda scope, _may_follow, _expects: paths.append(scope["path"]),
        lambda _data: None,
        lambda: None,
    )
    many = b"y" * 700
    parser.feed(b"POST /1 HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    parser.feed(b"0\r\nt: " + many)
    parser.feed(b"\r\n\r\nGET /2 HTTP/1.1\r\nz: " + many)
    parser.feed(b"\r\n\r\n")
    assert paths == ["/1", "/2"]
