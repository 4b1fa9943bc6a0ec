"""Forms of uploads, cut anywhere: the same parts as when they come whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import InvalidRequest
from chitu.http.wire.multipart import FormParser, PartBegins, boundary_of

BOUNDARY = b"ab-"


def form(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    whole = b""
    for name, filename, content in parts:
        more = f'; filename="{filename}"' if filename is not None else ""
        head = f'Content-Disposition: form-data; name="{name}"{more}\r\nContent-Type: text/plain'
        whole += b"--" + BOUNDARY + b"\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return whole + b"--" + BOUNDARY + b"--\r\n"


def parsed(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    parser = FormParser(BOUNDARY)
    found: list[tuple[str, str | None, bytes]] = []
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, PartBegins):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, content = found[-1]
                found[-1] = name, filename, content + event
    parser.close()
    return found


names = st.text("abc[]_é", min_size=1, max_size=6)
# Contents that look like the beginning of a boundary.
contents = st.lists(st.sampled_from([b"\r", b"\n", b"--", b"ab", b"-", b"x", b"\xff"])).map(b"".join)


@given(st.lists(st.tuples(names, st.none() | names, contents), max_size=4), st.data())
def test_a_form_cut_anywhere_has_the_same_parts(
    parts: list[tuple[str, str | None, bytes]], data: st.DataObject
) -> None:
    parts = [part for part in parts if b"\r\n--ab-" not in b"\r\n" + part[2] + b"\r\n"]
    whole = form(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert parsed(pieces) == parts


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--ab-",
        b"--ab-\r\n",
        form([("a", None, b"x")])[:-6],
        b"--ab-x" + form([]),
        b"--ab-\r\nContent-Type: text/plain\r\n\r\nx\r\n--ab---",
        b"--ab-\r\n" + b"x" * 9000 + b"\r\n\r\n",
        b"--ab-\r\n" + b"x" * 9000,
        form([("a", None, b"")] * 17),
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="form"):
        parsed([body])


def named(parameters: str) -> PartBegins:
    head = f"Content-Disposition: form-data; {parameters}"
    events = list(FormParser(BOUNDARY).feed(b"--ab-\r\n" + head.encode() + b"\r\n\r\n"))
    assert isinstance(events[0], PartBegins)
    return events[0]


@pytest.mark.parametrize(
    ("parameters", "filename"),
    [
        ("name=a; filename=b.txt", "b.txt"),
        (r'name="a"; filename="b;\"c\\d"', r'b;"c\d'),
        (r'name="a"; filename="C:\b\c";', r"C:\b\c"),
        ("name=a; filename=b; filename*=UTF-8'en'%C3%A9%20f", "é f"),
        ("name=a; filename*=iso-8859-1''%E9", "é"),
    ],
)
def test_a_file_is_named_as_clients_write_it(parameters: str, filename: str) -> None:
    assert named(parameters) == ("a", filename)


@pytest.mark.parametrize("charset", ["idna", "undefined", "punycode", "utf-16", "hex", "\0", "", "9" * 5000])
@pytest.mark.parametrize("text", ["a%ffb", "a.b", "%", "a" * 70])
def test_a_name_in_an_odd_charset_is_refused(charset: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match="charsets"):
        named(f"name=file; filename*={charset}''{text}")


@pytest.mark.parametrize("parameter", ["filename*=utf-8''%ff", "filename*=us-ascii''%80", "filename*=a", "b"])
@pytest.mark.parametrize("more", ["", "; filename*0=x", "; name*" + "9" * 5000 + "=x"])
def test_a_name_that_cannot_be_read_is_refused(parameter: str, more: str) -> None:
    with pytest.raises(InvalidRequest, match="form is broken"):
        named(f"name=file; {parameter}{more}")


@given(st.binary(max_size=60))
def test_noise_is_refused_or_has_no_parts(noise: bytes) -> None:
    parser = FormParser(BOUNDARY)
    try:
        list(parser.feed(b"--ab-\r\n" + noise))
        parser.close()
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    "kind",
    [
        *("", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 71),
        "multipart/form-data; boundary*" + "9" * 5000 + "=b",
    ],
)
def test_a_body_that_is_no_form_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(kind)


def test_the_boundary_may_be_quoted() -> None:
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
