"""Images at URLs: which are fetched, and what a client cannot make the router do."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from chitu.config.schema import ImagesConfig
from chitu.errors import Capacity, InvalidRequest
from chitu.net.image_fetch import MAX_FETCHES, MAX_HEAD_BYTES, MAX_REDIRECTS, ImageFetcher
from chitu.net.image_urls import AllowedHosts, ImageURL, URLRefused, is_public

FILE = b"\x89PNG" + bytes(5000)
WHERE = "messages[0].content[1]"
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
"""Gets the head of a request."""


def ok(body: bytes = FILE, kind: str = "image/png", more: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def moved(target: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()


SILENT = None
"""The answer of a server that waits until its client leaves."""


class Site:
    """A server on the loopback, and what it was asked."""

    def __init__(self, answer: bytes | Answer | None, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self.num_open = 0
        self.port = 0
        self._tls = tls

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            if self.answer is None:
                await reader.read()  # until the client leaves
            elif isinstance(self.answer, bytes):
                writer.write(self.answer)
                await writer.drain()
            else:
                await self.answer(head, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


class Names:
    """A resolver of `img.example` and others, which says each time what comes next."""

    def __init__(self, **addresses: Any) -> None:
        self.addresses = {name.replace("_", "."): told for name, told in addresses.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        told = self.addresses[host]
        return [told.pop(0)] if isinstance(told, list) else [told]


def fetched(
    answer: bytes | Answer, url: str = "http://img.example:{}/a.png?b=1", names: Names | None = None, **limits: Any
) -> bytes:
    """Return what is fetched from a site on the loopback, which its operator lists."""

    async def scenario() -> bytes:
        async with Site(answer).running() as site:
            return await fetched_from(site, url, names, **limits)

    return asyncio.run(scenario())


async def fetched_from(site: Site, url: str, names: Names | None = None, **limits: Any) -> bytes:
    port = site.port
    hosts = limits.pop("hosts", ("img.example:{}", "127.0.0.1:{}"))
    listed = ImagesConfig(hosts=tuple(host.format(port) for host in hosts), **limits)
    resolve = names or Names(img_example="127.0.0.1")
    fetcher = ImageFetcher(listed, 1 << 30, resolve)
    asked = url.format(port)
    try:
        async with fetcher.files({asked: WHERE}, b"client") as files:
            assert fetcher.held_bytes == len(files[asked])
            return files[asked]
    finally:
        assert not fetcher.held_bytes


def refused(answer: bytes | Answer, url: str = "http://img.example:{}/a.png", **more: Any) -> str:
    """Return why nothing is fetched."""
    with pytest.raises(InvalidRequest) as raised:
        fetched(answer, url, **more)
    assert raised.value.param == WHERE and raised.value.message.startswith(f"{WHERE}: the image ")
    assert "127.0.0.1" not in raised.value.message  # nothing of the network here
    return raised.value.message


def test_a_file_comes_whole_however_it_is_sent() -> None:
    assert fetched(ok()) == FILE
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in (FILE[:7], FILE[7:])
    )
    assert fetched(chunked + b"0\r\n\r\n") == FILE
    assert fetched(b"HTTP/1.0 200 OK\r\nContent-Type: image/png\r\n\r\n" + FILE) == FILE
    assert fetched(b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + ok()) == FILE


def test_the_request_has_nothing_but_what_it_asks_for() -> None:
    async def scenario() -> list[bytes]:
        async with Site(ok()).running() as site:
            assert await fetched_from(site, "http://IMG.Example.:{}/\u00fc a%20b?c=d#e".replace(" ", "")) == FILE
            return [each.replace(b"%d" % site.port, b"PORT") for each in site.asked]

    [head] = asyncio.run(scenario())
    assert head == (
        b"GET /%C3%BCa%20b?c=d HTTP/1.1\r\nHost: img.example:PORT\r\nUser-Agent: chitu\r\nAccept: image/*\r\n"
        b"Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
    )


def test_a_name_is_resolved_once_and_connected_to_by_that_address() -> None:
    names = Names(img_example=["127.0.0.1", "127.0.0.2"])  # which changes at the second look
    assert fetched(ok(), names=names) == FILE
    assert names.asked == ["img.example"]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
        *("169.254.169.254", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "100.100.100.200"),
        *("168.63.129.16", "192.0.0.192", "224.0.0.1", "ff02::1", "240.0.0.1", "255.255.255.255", "198.18.0.1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1"),
        *("2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "100::1", "no address"),
    ],
)
def test_addresses_that_are_not_public_are_refused_of_any_name(address: str) -> None:
    with pytest.raises(URLRefused, match="not public"):
        AllowedHosts(("img.example",)).require_address(address, 443)

    async def scenario() -> None:
        fetcher = ImageFetcher(ImagesConfig(hosts=("img.example",)), 1 << 20, Names(img_example=address))
        async with fetcher.files({"http://img.example/a": WHERE}, b""):
            raise AssertionError

    with pytest.raises(InvalidRequest, match="whose address is not public"):
        asyncio.run(scenario())


def test_public_addresses_and_listed_ones_are_not() -> None:
    for address in ("1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::"):
        assert is_public(ip_address(address))
    hosts = AllowedHosts(("10.0.0.7", "[fd00::1]:8080", "::1"))
    hosts.require_address("10.0.0.7", 80)
    hosts.require_address("fd00::1", 8080)
    hosts.require_address("::1", 443)
    for address, port in (("10.0.0.7", 8080), ("fd00::1", 80), ("10.0.0.8", 80), ("::ffff:10.0.0.7", 80)):
        with pytest.raises(URLRefused):
            hosts.require_address(address, port)


def test_one_address_that_is_not_public_is_enough() -> None:
    async def both(host: str, port: int) -> list[str]:
        return ["1.1.1.1", "10.0.0.1"]

    async def scenario() -> None:
        fetcher = ImageFetcher(ImagesConfig(hosts=("img.example",)), 1 << 20, both)
        async with fetcher.files({"http://img.example/a": WHERE}, b""):
            raise AssertionError

    with pytest.raises(InvalidRequest, match="whose address is not public"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "hosts", "is_allowed"),
    [
        ("https://a.example/x", ("a.example",), True),
        ("http://A.EXAMPLE.:80/x", ("a.example",), True),
        ("https://b.a.example/x", ("a.example",), False),
        ("https://b.a.example/x", ("*.a.example",), True),
        ("https://c.b.a.example/x", ("*.A.example",), True),
        ("https://a.example/x", ("*.a.example",), False),
        ("https://xa.example/x", ("*.a.example",), False),
        ("https://a.example:8443/x", ("a.example",), False),
        ("https://a.example:8443/x", ("a.example:8443",), True),
        ("https://a.example/x", ("a.example:8443",), False),
        ("http://127.0.0.1/x", ("a.example",), False),
        ("http://127.0.0.1/x", ("127.0.0.1",), True),
        ("http://127.0.0.1:8080/x", ("127.0.0.1",), False),
        ("http://[::1]/x", ("::1",), True),
        ("http://[::1]:81/x", ("[::1]:81",), True),
        ("http://2130706433/x", ("127.0.0.1",), False),
        ("http://0x7f.1/x", ("127.0.0.1",), False),
    ],
)
def test_hosts_and_ports_are_those_that_the_operator_lists(url: str, hosts: tuple[str, ...], is_allowed: bool) -> None:
    try:
        AllowedHosts(hosts).require(ImageURL.parse(url))
    except URLRefused:
        assert not is_allowed
    else:
        assert is_allowed


@pytest.mark.parametrize(
    "url",
    [
        *("http://user@a.example/", "http://user:word@a.example/", "http://a.example\\@evil/", "http://a.exa mple/"),
        *("http://a.example/\r\nX: y", "http://a.example/\ta", "http:///a", "http://", "http://a.example:x/"),
        *(
            "ftp://a.example/",
            "http://[::1/",
            "http://a.example:99999/",
            "http://" + "a" * 9000,
            "http://\u2024\u2024/",
        ),
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(URLRefused):
        ImageURL.parse(url)


# ----------------------------------------------------------------------------------------------------------- redirects


def test_redirects_are_followed_a_few_times() -> None:
    async def scenario() -> None:
        async def hop(head: bytes, writer: asyncio.StreamWriter) -> None:
            left = int(head.split()[1].removeprefix(b"/"))
            writer.write(ok() if not left else moved(f"/{left - 1}", (301, 302, 303, 307, 308)[left % 5]))

        async with Site(hop).running() as site:
            assert await fetched_from(site, "http://img.example:{}/" + str(MAX_REDIRECTS)) == FILE
            with pytest.raises(InvalidRequest, match=f"redirected more than {MAX_REDIRECTS} times"):
                await fetched_from(site, "http://img.example:{}/" + str(MAX_REDIRECTS + 1))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://127.0.0.1:1/", "not fetched from"),
        ("http://127.0.0.1/", "not fetched from"),
        ("http://localhost/", "not fetched from"),
        ("http://[::ffff:127.0.0.1]/", "not fetched from"),
        ("http://169.254.169.254/latest/meta-data", "not fetched from"),
        ("//inner.example/", "address is not public"),
        ("http://evil.example/", "not fetched from"),
        ("http://a@img.example/", "user or password"),
        ("file:///etc/passwd", "no URL of http"),
        ("gopher://img.example/", "no URL of http"),
        ("", "redirected more than"),
    ],
)
def test_a_redirect_is_a_url_with_the_same_checks(target: str, says: str) -> None:
    names = Names(img_example="127.0.0.1", inner_example="10.0.0.5")
    hosts = ("img.example:{}", "127.0.0.1:{}", "inner.example", "img.example")
    assert says in refused(moved(target), names=names, hosts=hosts)


def test_a_name_that_points_inwards_at_a_redirect_is_found() -> None:
    names = Names(img_example=["127.0.0.1", "10.0.0.1"])
    assert "not public" in refused(moved("/b.png"), names=names)


# -------------------------------------------------------------------------------------------------------------- bounds


async def slowly(head: bytes, writer: asyncio.StreamWriter) -> None:
    for byte in ok():
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def endless_head(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"a" * 1000 + b"\r\n")
        await writer.drain()


async def endless_body(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


def test_a_slow_server_has_the_time_of_one_fetch() -> None:
    for answer in (slowly, SILENT):
        loop_time = asyncio.new_event_loop().time
        start_s = loop_time()
        assert "within 0.3 s" in refused(answer, fetch_timeout_s=0.3)
        assert loop_time() - start_s < 5


def test_what_a_server_may_send_is_bounded() -> None:
    megabyte = 1 << 20
    assert len(fetched(ok(bytes(megabyte)), max_file_mb=1)) == megabyte
    assert "more than 1048576 bytes" in refused(ok(bytes(megabyte + 1)), max_file_mb=1)
    assert "more than 1048576 bytes" in refused(endless_body, max_file_mb=1)
    assert "max_total_mb" in refused(endless_body, max_file_mb=5, max_total_mb=1)
    assert "too many headers" in refused(endless_head)
    assert MAX_HEAD_BYTES < 1 << 17


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret", "status 404"),
        (ok(kind="text/html"), "no image"),
        (ok(kind="application/json"), "no image"),
        (ok(more="Content-Encoding: gzip\r\n"), "an encoding"),
        (ok()[:-1], "breaks off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "breaks off"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "could not be fetched from its host"),
        (b"", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "could not be fetched"),
    ],
)
def test_what_is_no_image_of_http_is_refused(answer: bytes, says: str) -> None:
    message = refused(answer)
    assert says in message and "secret" not in message


def test_a_host_that_is_not_there_says_nothing_of_the_network() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("inner details")

    async def scenario(resolve: Any, hosts: tuple[str, ...], url: str) -> None:
        async with ImageFetcher(ImagesConfig(hosts=hosts), 1 << 20, resolve).files({url: WHERE}, b""):
            raise AssertionError

    for resolve, hosts, url in (
        (unknown, ("img.example",), "http://img.example/"),
        (Names(), ("127.0.0.1:1",), "http://127.0.0.1:1/"),
    ):
        resolve = Names(**{"127.0.0.1": "127.0.0.1"}) if isinstance(resolve, Names) else resolve
        with pytest.raises(InvalidRequest) as raised:
            asyncio.run(scenario(resolve, hosts, url))
        assert raised.value.message == f"{WHERE}: the image could not be fetched from its host"


def test_fetches_and_bytes_of_all_are_bounded_and_given_back() -> None:
    async def scenario() -> None:
        async with Site(SILENT).running() as site:
            listed = ImagesConfig(hosts=(f"img.example:{site.port}", f"127.0.0.1:{site.port}"), fetch_timeout_s=20)
            fetcher = ImageFetcher(listed, 1 << 20, Names(img_example="127.0.0.1"))

            async def ask(count: int) -> None:
                urls = {f"http://img.example:{site.port}/{i}": WHERE for i in range(count)}
                async with fetcher.files(urls, b"one"):
                    pass

            asking = asyncio.ensure_future(ask(MAX_FETCHES + 5))
            while site.num_open < MAX_FETCHES:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert site.num_open == MAX_FETCHES
            with pytest.raises(Capacity, match="too many of your images"):
                await ask(1000)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while site.num_open:
                await asyncio.sleep(0.01)
            site.answer = endless_body
            with pytest.raises(Capacity, match="too many bytes"):
                await ask(1)
            assert not fetcher.held_bytes
            site.answer = ok()
            await ask(MAX_FETCHES + 5)

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------------------- HTTPS


of_certificates = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def certificate(folder: Path, name: str) -> Path:
    """Write a key and a certificate of a host that signs itself."""
    file = folder / f"{name}.pem"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
    files = ("-keyout", str(folder / "key.pem"), "-out", str(file), "-addext", f"subjectAltName=DNS:{name}")
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (folder / "key.pem").read_bytes())
    return file


@of_certificates
def test_certificates_are_those_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = certificate(tmp_path, "img.example"), certificate(tmp_path, "other.example")

    async def scenario(shown: Path, trusted: Path | None) -> bytes:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(shown)
        if trusted is not None:
            monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        async with Site(ok(), tls).running() as site:
            return await fetched_from(site, "https://img.example:{}/a.png")

    for shown, trusted in ((own, None), (other, other)):
        with pytest.raises(InvalidRequest, match="could not be fetched from its host"):
            asyncio.run(scenario(shown, trusted))
    assert asyncio.run(scenario(own, own)) == FILE


@of_certificates
def test_a_redirect_from_https_to_http_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = certificate(tmp_path, "img.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(own))

    async def scenario() -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(own)
        async with Site(moved("http://img.example/a.png"), tls).running() as site:
            await fetched_from(site, "https://img.example:{}/a.png")

    with pytest.raises(InvalidRequest, match="redirected to what is no https"):
        asyncio.run(scenario())
