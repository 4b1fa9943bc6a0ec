"""Limits on what one HTTP client can take of the router's process: connections, heads, bodies, time, unread answers."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from http_server_alone import MAX_BODY, PATIENT, WAIT_S, Client, Echo, get, serving, until

from chitu.http.exchange import EXCHANGE, Exchange
from chitu.http.limits import HTTPLimits
from chitu.net.http import Receive, Scope, Send


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
    async with serving(app, HTTPLimits(head_s=0.3, body_s=20)) as port:
        client = await Client.connect(port)
        start_s = time.monotonic()
        client.send(b"GET / HTTP/1.1\r\n")
        status = asyncio.ensure_future(client.status())
        while not status.done():
            client.send(b"x: y\r\n")
            await asyncio.wait([status], timeout=0.02)
        assert await status == 408
        assert client.code == "slow_request"
        assert time.monotonic() - start_s < 10
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
