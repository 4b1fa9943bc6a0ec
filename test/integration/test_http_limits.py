"""The HTTP server at its edges: what a slow, greedy or odd client costs, and what it gets."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable

import pytest
import uvloop
from http_server_alone import MAX_BODY, PATIENT, WAIT_S, Client, Echo, get, serving, until

from chitu.http.wire.exchange import EXCHANGE, Exchange
from chitu.http.wire.limits import FREE_BODY_BYTES, LINGER_BYTES, PROBE_CONNECTIONS, HTTPLimits
from chitu.net.http import Receive, Scope, Send

# ----------------------------------------------------------------------------------------------------------------------
# Limits on what one HTTP client can take of the router's process: connections, heads, bodies, time, unread answers.


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(get(*(b"x-%d: y" % i for i in range(200))), id="many headers"),
        pytest.param(get(b"x: " + b"y" * 20_000), id="a long one"),
        pytest.param(get(*(b"x-%d: %s" % (i, b"y" * 3000) for i in range(5))), id="long ones"),
        pytest.param(b"GET /" + b"y" * 20_000, id="an endless path"),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000, id="an endless header"),
    ],
)
async def test_a_large_head_is_refused_and_the_connection_closed(request_: bytes) -> None:
    app = Echo()
    async with serving(app, HTTPLimits(max_head_bytes=10_000)) as port:
        client = await Client.connect(port)
        client.send(request_)
        assert await client.status() == 431
        assert client.code == "headers_too_large"
        assert await client.is_closed()
        assert app.started == 0


@pytest.mark.parametrize(
    "rest", [b"0\r\nx: ", b"0\r\n" + b"x: y\r\n" * 500, b"1;x="], ids=["a trailer", "trailers", "chunk"]
)
async def test_what_stands_between_the_chunks_of_a_body_has_the_bound_of_a_head(rest: bytes) -> None:
    """The parser keeps a trailer until it is complete."""
    async with serving(Echo(), HTTPLimits(max_head_bytes=10_000)) as port:
        client = await Client.connect(port)
        client.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n" + rest)
        status = asyncio.ensure_future(client.status())
        while not status.done():
            client.send(b"y" * 1000)
            await asyncio.wait([status], timeout=0.02)
        assert await status == 431
        assert client.code == "headers_too_large"
        assert await client.is_closed()


async def test_a_head_that_trickles_is_ended_and_one_byte_more_does_not_help() -> None:
    app = Echo()
    async with serving(app, HTTPLimits(head_s=0.3, body_s=600)) as port:
        client = await Client.connect(port)
        client.send(b"GET / HTTP/1.1\r\n")
        status = asyncio.ensure_future(client.status())
        while not status.done():
            client.send(b"x: y\r\n")
            await asyncio.wait([status], timeout=0.02)
        assert await status == 408
        assert client.code == "slow_request"
        assert app.started == 0


async def test_the_second_request_of_a_connection_has_the_same_deadline() -> None:
    async with serving(Echo(), HTTPLimits(head_s=0.3, body_s=20)) as port:
        client = await Client.connect(port)
        client.send(get())
        assert await client.status() == 200
        client.send(b"GET / HT")
        assert await client.status() == 408
        assert await client.is_closed()


async def test_a_connection_that_asks_for_nothing_is_closed() -> None:
    async with serving(Echo(), HTTPLimits(head_s=0.2)) as port:
        assert await (await Client.connect(port)).is_closed()


async def test_a_body_that_trickles_is_ended_and_its_handler_with_it() -> None:
    app = Echo()
    async with serving(app, HTTPLimits(head_s=20, body_s=0.3)) as port:
        client = await Client.connect(port)
        client.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n")
        status = asyncio.ensure_future(client.status())
        while not status.done():
            client.send(b"x")
            await asyncio.wait([status], timeout=0.02)
        assert await status == 408
        await until(lambda: app.started == app.ended == 1)


async def test_a_body_of_several_packets_within_its_time_is_taken() -> None:
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nab")
        await client.writer.drain()
        await asyncio.sleep(0)
        client.send(b"cde")
        assert await client.status() == 200 and client.body == b"5"
        client.send(get())
        assert await client.status() == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_beyond_the_bound_is_refused_announced_or_in_chunks(announced: bool) -> None:
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        if announced:
            client.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000000\r\n\r\n")
        else:
            client.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(MAX_BODY // 1000 + 1):
                client.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert await client.status() == 413


async def test_no_more_connections_than_allowed_are_open() -> None:
    async with serving(Echo(), HTTPLimits(max_connections=3)) as port:
        held = [await Client.connect(port) for _ in range(3)]
        for client in held:
            client.send(get())
            assert await client.status() == 200
        late = await Client.connect(port)
        assert await late.status() == 503
        assert await late.is_closed()
        held[0].writer.close()
        await held[0].writer.wait_closed()
        async with asyncio.timeout(WAIT_S):
            while True:  # the server notices the end a moment later
                client = await Client.connect(port)
                client.send(get())
                if await client.status() == 200:
                    break


@pytest.mark.parametrize("way", ["asgi", "exchange"])
async def test_a_client_that_does_not_read_is_cut_off_and_what_is_kept_for_it_stays_small(way: str) -> None:
    sent_bytes = 0
    is_over = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent_bytes
        exchange: Exchange = scope[EXCHANGE]
        if way == "asgi":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        while not exchange.is_client_gone:
            if way == "asgi":
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
            else:
                if exchange.is_full:
                    await exchange.drained()
                exchange.stream(b"x" * 10_000, is_last=False)
                await asyncio.sleep(0)
            sent_bytes += 10_000
        is_over.set()

    async with serving(flood, HTTPLimits(write_s=0.5)) as port:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(sock, get())
        async with asyncio.timeout(WAIT_S):
            await is_over.wait()
        sock.close()
    # Of an endless answer: what the kernel's buffers took (some MiB at most), and 64 KiB of ours.
    assert sent_bytes < 16 << 20


async def test_a_client_that_reads_slowly_but_reads_is_served_to_the_end() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        scope[EXCHANGE].answer(200, b"x" * (4 << 20))

    async with serving(large, HTTPLimits(write_s=5.0)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 14)
        writer.write(get())
        await reader.readuntil(b"\r\n\r\n")
        left = 4 << 20
        while left:
            left -= len(await reader.read(1 << 14))
            await asyncio.sleep(0)
        writer.close()


# ----------------------------------------------------------------------------------------------------------------------
# HTTP edge cases: upgrades, half-closed connections, bodies that the server does not want, HTTP/1.0; and what one
# client's connections and bodies may cost other clients: probes, the budget of bodies, accepting.


UPGRADE = b"POST /%s HTTP/1.1\r\nhost: h\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n%s\r\n\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST / HTTP/1.1", b"host: h", b"content-length: %d" % len(body), *headers)
    return b"\r\n".join([*lines, b"", body])


class Held:
    """Reads each body, and answers once it is released."""

    def __init__(self, max_body_bytes: int = 1 << 30) -> None:
        self.may_answer = asyncio.Event()
        self.is_cancelled = False
        self.max_body_bytes = max_body_bytes
        self.num_read = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.call_when_gone(self._on_gone)
        body = await exchange.body(self.max_body_bytes)
        self.num_read += 1
        await self.may_answer.wait()
        exchange.answer(200, b"%d" % len(body))
        exchange.call_when_gone(None)

    def _on_gone(self) -> None:
        self.is_cancelled = True


# ------------------------------------------------------------------------------------------------------------- upgrade


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("cut", ["whole", "behind the head", "bytes"])
async def test_an_upgrade_is_ignored_and_its_body_and_the_next_request_are_served(framing: str, cut: str) -> None:
    if framing == "length":
        request = UPGRADE % (b"a", b"http2-settings: AAMAAABk\r\ncontent-length: 5") + b"hello"
    else:
        request = UPGRADE % (b"a", b"transfer-encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n"
    data = request + UPGRADE % (b"b", b"content-length: 0") + post(b"abc")
    at = {"whole": len(data), "behind the head": request.index(b"\r\n\r\n") + 4, "bytes": 1}[cut]
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(data), at):
            client.send(data[begin : begin + at])
            await asyncio.sleep(0)
        answers = [(await client.status(), client.body) for _ in range(3)]
        assert answers == [(200, b"5"), (200, b"0"), (200, b"3")]


async def test_a_tunnel_is_refused() -> None:
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.send(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\nabc")
        assert await client.status() == 400
        assert await client.is_closed()


# --------------------------------------------------------------------------------------------- the end of a connection


@pytest.mark.parametrize("headers", [(b"connection: close",), ()], ids=["close", "keep-alive"])
async def test_a_client_that_sends_a_body_beyond_the_bound_to_its_end_still_reads_the_413(
    headers: tuple[bytes, ...],
) -> None:
    """The body exceeds all buffers on the way, so the server must read it."""
    answers: list[bytes] = []

    def send_all(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
            client.sendall(post(b"x" * (24 << 20), *headers))
            answers.append(client.recv(1 << 16))

    async with serving(Echo(), PATIENT) as port:
        await asyncio.to_thread(send_all, port)
    assert answers[0].startswith(b"HTTP/1.1 413 "), answers
    assert (b"connection: close" in answers[0]) == bool(headers)


@pytest.mark.parametrize("cut", [0, 20])
async def test_a_compressed_body_is_refused_by_its_coding_and_the_next_request_is_served(cut: int) -> None:
    data = post(b"\x1f\x8b" * 50, b"content-encoding: gzip")

    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.send(data[: len(data) - cut])
        assert await client.status() == 415 and client.code == "unsupported_encoding"
        client.send(data[len(data) - cut :] + post(b"abc", b"Content-Encoding: Identity"))
        assert await client.status() == 200
        client.send(get(b"content-encoding: gzip"))
        assert await client.status() == 200, "it has no body"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: h\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n", 413),
        (b"no HTTP at all\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: ", 431),
    ],
)
async def test_what_comes_behind_the_last_answer_is_thrown_away_for_a_while(data: bytes, status: int) -> None:
    async with serving(Echo(), HTTPLimits(linger_s=0.3)) as port:
        client = await Client.connect(port)
        client.send(data)
        chunk = b"%x\r\n%b\r\n" % (200_000, b"x" * 200_000)
        client.send(chunk)
        assert await client.status() == status
        assert await client.reader.read() == b"", "our side is closed"
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ConnectionError):
                while True:  # until the time is up
                    client.send(b"x")
                    await client.writer.drain()
                    await asyncio.sleep(0.01)


async def test_what_is_thrown_away_has_a_bound() -> None:
    sent = 0

    def send_on(port: int) -> None:
        nonlocal sent
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client, pytest.raises(ConnectionError):
            client.sendall(b"no HTTP at all\r\n\r\n")
            while sent < LINGER_BYTES + (32 << 20):  # buffers on the way hold some more
                sent += client.send(b"x" * (1 << 20))

    async with serving(Echo(), HTTPLimits(linger_s=30)) as port:
        await asyncio.to_thread(send_on, port)
    assert sent > LINGER_BYTES


async def test_a_refused_head_does_not_harm_the_answer_before_it() -> None:
    app = Held()
    async with serving(app, PATIENT) as port:
        client = await Client.connect(port)
        client.send(post(b"abc"))
        await until(lambda: app.num_read == 1)
        client.send(b"no HTTP at all\r\n\r\n")
        for _ in range(100):  # turns of the loop, in which the server reads it
            await asyncio.sleep(0)
        app.may_answer.set()
        assert await client.status() == 200 and client.body == b"3"
        assert await client.status() == 400
        assert await client.is_closed()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_closed_its_side_gets_its_answer(version: bytes) -> None:
    app = Held()
    async with serving(app, PATIENT) as port:
        client = await Client.connect(port)
        client.send(post(b"abc").replace(b"HTTP/1.1", b"HTTP/" + version))
        client.writer.write_eof()
        if version == b"1.1":  # proves that the server saw the end
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await until(lambda: app.num_read == 1)
        app.may_answer.set()
        assert await client.status() == 200 and client.body == b"3"
        assert await client.is_closed()
        assert not app.is_cancelled


async def test_requests_sent_ahead_are_answered_after_the_end() -> None:
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.send(post(b"a") + post(b"ab") + post(b"abc") + b"GET / HT")
        client.writer.write_eof()
        data = await client.reader.read()
        assert [part[:1] for part in data.split(b"\r\n\r\n")[-3:]] == [b"1", b"2", b"3"]
        assert data.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("head", [b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"transfer-encoding: gzip\r\n\r\n"])
async def test_a_body_whose_framing_is_wrong_is_refused_at_once(head: bytes) -> None:
    async with serving(Echo(), HTTPLimits(body_s=1000)) as port:
        client = await Client.connect(port)
        client.send(b"POST / HTTP/1.1\r\nhost: h\r\n" + head)
        assert await client.status() == 400
        assert client.code == "invalid_request"
        assert await client.is_closed()


async def test_a_body_that_ends_too_early_is_refused() -> None:
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.send(post(b"abcde")[:-1])
        client.writer.write_eof()
        assert await client.status() == 400 and b"before the body did" in client.body
        assert await client.is_closed()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_left_is_told_from_one_that_waits(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        app = Held()
        async with serving(app, PATIENT) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(post(b"abc"))
                await until(lambda: app.num_read == 1)
            await until(lambda: app.is_cancelled)
            app.may_answer.set()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), WAIT_S))


# ------------------------------------------------------------------------------------------------------------ HTTP/1.0


async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream an answer without a length, by the exchange or by ASGI as the path says."""
    exchange: Exchange = scope[EXCHANGE]
    if scope["path"] == "/exchange":
        for part in (b"one", b"two", b""):
            exchange.stream(part, is_last=not part)
            await asyncio.sleep(0)
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for part in (b"one", b"two", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})


@pytest.mark.parametrize("path", [b"/exchange", b"/asgi"])
async def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection(path: bytes) -> None:
    async with serving(streaming, PATIENT) as port:
        for request, body in (
            (b"GET %b HTTP/1.0\r\n\r\n", b"onetwo"),
            (b"GET %b HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", b"onetwo"),
            (b"GET %b HTTP/1.1\r\nconnection: close\r\n\r\n", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        ):
            client = await Client.connect(port)
            client.send(request % path)
            async with asyncio.timeout(WAIT_S):
                head, _, rest = (await client.reader.read()).partition(b"\r\n\r\n")
            assert rest == body
            assert (b"transfer-encoding" in head) == (b"HTTP/1.1" in request)
            assert b"connection: close" in head and b"content-length" not in head


async def test_an_answer_to_head_has_no_body_and_the_connection_goes_on() -> None:
    async with serving(streaming, PATIENT) as port:
        client = await Client.connect(port)
        client.send(b"HEAD /asgi HTTP/1.1\r\nhost: h\r\n\r\n" * 2)
        for _ in range(2):
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    async with serving(Echo(), PATIENT) as port:
        client = await Client.connect(port)
        client.send(b"HEAD / HTTP/1.0\r\n\r\n")
        data = await client.reader.read()
        assert data.endswith(b"content-length: 1\r\n\r\n")


# -------------------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_probes_are_answered_at_the_bound_on_connections_whoever_crowds_there(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> None:
        async with serving(Echo(), HTTPLimits(max_connections=3)) as port:
            held = [await Client.connect(port) for _ in range(3)]
            for client in held:
                client.send(get())
                assert await client.status() == 200
            crowd = [await Client.connect(port) for _ in range(2 * PROBE_CONNECTIONS)]
            for path in (b"/livez", b"/health"):
                probe = await Client.connect(port)
                probe.send(get().replace(b" / ", b" %b " % path))
                assert await probe.status() == 200
                assert await probe.is_closed()
            other = await Client.connect(port)
            other.send(get())
            assert await other.status() == 503 and other.code == "capacity"
            for client in crowd:
                assert await client.status() == 503, "nobody keeps that room"
                assert await client.is_closed()
            held[0].send(get())
            assert await held[0].status() == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 4 * WAIT_S))


# -------------------------------------------------------------------------------------------------------------- bodies

SIZE = 1 << 20
ROOM_FOR_TWO = HTTPLimits(max_total_body_bytes=2 * (SIZE - FREE_BODY_BYTES))


async def held_bodies(port: int, count: int) -> list[Client]:
    """Return clients whose bodies lack their last byte."""
    clients = [await Client.connect(port) for _ in range(count)]
    for client in clients:
        client.send(post(b"x" * SIZE)[:-1])
        await client.writer.drain()
    return clients


async def test_bodies_have_a_budget_together_and_small_ones_pass_beside_it() -> None:
    app = Held()
    app.may_answer.set()
    async with serving(app, ROOM_FOR_TWO) as port:
        first, second = await held_bodies(port, 2)
        small = await Client.connect(port)
        too_large = post(b"x" * (FREE_BODY_BYTES + 3))  # one byte too large: the other clients lack two
        while True:  # the server reads the other clients' data a moment later
            late = await Client.connect(port)
            late.send(too_large)
            if await late.status() == 503:
                break
        assert late.code == "capacity" and b"max_total_body_bytes" in late.body
        small.send(post(b"x" * FREE_BODY_BYTES))
        assert await small.status() == 200
        for client in (first, second):  # at the bound
            client.send(b"x")
            assert await client.status() == 200 and client.body == b"%d" % SIZE
        small.send(post(b"x" * SIZE))
        assert await small.status() == 200, "what was held is free again"


@pytest.mark.parametrize("end", ["answered", "left", "too slow", "too large", "never read"])
async def test_a_body_is_in_the_budget_until_its_request_ends_whatever_ends_it(end: str) -> None:
    limits = HTTPLimits(max_total_body_bytes=2 * (SIZE - FREE_BODY_BYTES), body_s=0.3 if end == "too slow" else 20)
    app = Echo(SIZE // 2 if end == "too large" else SIZE)

    async def ignore(scope: Scope, receive: Receive, send: Send) -> None:
        scope[EXCHANGE].answer(401, b"no")

    async with serving(ignore if end == "never read" else app, limits) as port:
        for _ in range(3):  # each round uses the whole budget
            clients = await held_bodies(port, 2)
            for client in clients:
                if end == "left":
                    client.writer.close()
                elif end == "too slow":
                    assert await client.status() == 408
                else:
                    client.send(b"x")
                    expected = {"answered": 200, "too large": 413, "never read": 401}[end]
                    assert await client.status() == expected
            if end == "left":
                await until(lambda: app.started == app.ended)


# ----------------------------------------------------------------------------------------------------------- accepting


def test_clients_that_come_together_do_not_wait_a_turn_of_the_loop_each() -> None:
    """uvloop's own server accepts one client per turn; on a busy loop a turn is 10 ms."""

    async def scenario() -> None:
        app = Echo()
        async with serving(app, PATIENT) as port:
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]  # none is accepted meanwhile
            for client in clients:
                client.sendall(get())
            turns = 0
            while app.started < len(clients):
                turns += 1
                await asyncio.sleep(0)
            for client in clients:
                client.close()
        assert turns <= 20

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), WAIT_S))


async def test_a_server_without_descriptors_accepts_again_once_it_has_some() -> None:
    async with serving(Echo(), PATIENT) as port:
        client = socket.socket()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = client.fileno() + 1
        with open("/dev/null") as lowest_free:
            spare = max(spare, lowest_free.fileno())
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            await asyncio.get_running_loop().run_in_executor(None, client.connect, ("127.0.0.1", port))
            for _ in range(20):
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(get())
        client.settimeout(WAIT_S)
        assert (await asyncio.to_thread(client.recv, 100)).startswith(b"HTTP/1.1 200 ")
        client.close()


async def test_a_request_that_the_end_of_the_server_interrupts_gets_an_error_that_says_so() -> None:
    app = Held()
    async with serving(app, PATIENT) as port:
        client = await Client.connect(port)
        client.send(post(b"x"))
        await until(lambda: app.num_read == 1)
    assert await client.status() == 503 and client.code == "no_instance"
