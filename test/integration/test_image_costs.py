"""Hostile images at a real router while other streams run: each gets a clear error, no stream's tokens wait for them,
and the memory of the router and of the process that decodes stays bounded."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator

import pytest
from loop_prober import Prober, peak_bytes
from nursery import forked_router
from support.image_files import image_file, png_bomb, saved
from support.router_process import RouterUnderTest

from chitu.tools.make_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_STALL_S = 0.05
MAX_GROWTH_BYTES = 384 << 20
"""Bound on the growth of the router's peak resident size, by bodies of 32 MiB."""
MAX_PROCESS_BYTES = 1200 << 20
"""Bound on the process that decodes."""
TRIES = 4
BODY_BYTES = 32 << 20
PATH = "/v1/chat/completions"
PICTURE = image_file(64, 64, seed=9)


class SlowHost:
    """A server on the loopback that sends one picture, and says nothing of what else it is asked."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.num_sent = 0
        self._silent: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                if connection.recv(1000).startswith(b"GET /picture HTTP/1.1"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + PICTURE)
                    connection.close()
                    self.num_sent += 1
                else:
                    self._silent.append(connection)


@pytest.fixture(scope="module")
def slow_host() -> Iterator[SlowHost]:
    host = SlowHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, slow_host: SlowHost) -> Iterator[RouterUnderTest]:
    folder = tmp_path_factory.mktemp("router")
    model = make_model(folder / "model", "qwen3_vl")
    images = "dp_config.router.images"
    overrides = (
        *("model.served_name=m", f"{images}.hosts=['127.0.0.1:{slow_host.port}']", f"{images}.fetch_timeout_s=1"),
        "dp_config.router.admission.requests_per_s=0",
    )
    with forked_router(folder, model, overrides) as router:
        router.start_worker("P0,D0", "--max-model-len", "16384", "--vocab-size", "100000", "--step-s", "0.004")
        yield router


def asked(*urls: str, num_tokens: int = 1) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps(
        {"model": "m", "max_tokens": num_tokens, "messages": [{"role": "user", "content": parts}]}
    ).encode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def plain(side: int) -> bytes:
    """Return a small file of a large image."""
    from PIL import Image

    return saved(Image.new("RGB", (side, side), (9, 9, 9)), "PNG")


def filled(num_bytes: int) -> bytes:
    """Return a body of this many bytes with a broken image."""
    empty = asked("data:image/png;base64,")
    return empty.replace(b"base64,", b"base64," + b"A" * (num_bytes - len(empty)))


def hostile(slow_host: SlowHost) -> dict[str, tuple[bytes, int, str]]:
    """Return bodies with the status and words of their answers."""
    noise = image_file(2600, 2600)
    assert 20 << 20 > len(noise) > 19 << 20
    slow = f"http://127.0.0.1:{slow_host.port}/"
    return {
        "as large as is taken": (asked(url(noise)), 200, "usage"),
        "two in 32 MiB": (asked(url(image_file(2000, 2000)), url(image_file(1950, 1950, seed=1))), 200, "usage"),
        "truncated": (asked(url(noise[:-1000])), 400, "damaged or truncated"),
        "file too large": (asked(url(noise + bytes(2 << 20))), 400, "more than 20 MiB"),
        "base64 of 32 MiB": (filled(BODY_BYTES), 400, "more than 20 MiB"),
        "base64 that breaks": (asked(url(noise) + "%"), 400, "no valid base64"),
        "no image": (asked(url(bytes(19 << 20))), 400, "no image that is known"),
        "svg": (asked(url(b"<svg>" + b" " * (19 << 20))), 400, "an SVG file"),
        "one byte too many": (filled(BODY_BYTES + 1), 413, "max_body_bytes"),
        "200 images": (asked(*[url(image_file(20, 20))] * 200), 400, "100 images at most"),
        "100 images": (asked(*[url(image_file(40, 40, seed=i)) for i in range(100)]), 200, "usage"),
        "bombs": (asked(*[url(png_bomb(60_000, 60_000 + i)) for i in range(100)]), 400, "36000000 pixels"),
        "bombs by their data": (asked(*[url(png_bomb(6000, 5990 + i)) for i in range(7)]), 400, "damaged"),
        "large images": (asked(*[url(plain(6000 - i)) for i in range(3)]), 200, "usage"),
        "too many large images": (asked(*[url(plain(5990 - i)) for i in range(9)]), 400, "8 times"),
        "slow hosts": (asked(*[f"{slow}{i}" for i in range(50)]), 400, "within 1 s"),
        "text of 31 MiB": (
            json.dumps({"model": "m", "messages": [{"role": "user", "content": "a " * (31 << 19)}]}).encode(),
            400,
            "context",
        ),
    }


def ask(router: RouterUnderTest, raw: bytes, path: str = PATH) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", router.ports["port"], timeout=120)
    try:
        connection.request("POST", path, raw, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.by_hand
def test_an_image_at_a_url_counts_as_the_same_image_in_the_body(router: RouterUnderTest, slow_host: SlowHost) -> None:
    at_url = f"http://127.0.0.1:{slow_host.port}/picture"
    answers = [ask(router, asked(*urls)) for urls in ([url(PICTURE)] * 2, [at_url] * 2, [at_url, url(PICTURE)])]
    assert [status for status, _ in answers] == [200] * 3 and slow_host.num_sent == 2
    assert len({json.loads(answer)["usage"]["prompt_tokens"] for _, answer in answers}) == 1
    status, answer = ask(router, asked("http://127.0.0.1:1/picture"))
    assert (status, json.loads(answer)["error"]["param"]) == (400, "messages[0].content[0]")
    status, answer = ask(router, json.dumps({"messages": json.loads(asked(at_url))["messages"]}).encode(), "/tokenize")
    assert status == 200 and json.loads(answer)["count"] < 100


@pytest.mark.by_hand
def test_no_image_stops_the_tokens_of_others_or_takes_memory(router: RouterUnderTest, slow_host: SlowHost) -> None:
    bodies = hostile(slow_host)
    assert ask(router, asked(url(image_file(9, 9))))[0] == 200  # all is loaded
    before_bytes = peak_bytes(router.pid)
    stalls: dict[str, float] = {}
    took: dict[str, float] = {}
    with Prober(router.ports["port"], router.pid) as prober:
        for name, (raw, status, words) in bodies.items():
            for _ in range(TRIES):
                prober.take()
                began_s = time.monotonic()
                reply = ask(router, raw)
                took[name] = time.monotonic() - began_s
                assert reply[0] == status and words.encode() in reply[1], (name, reply[0], reply[1][:500])
                stalls[name] = min(stalls.get(name, 60.0), prober.take())
                if stalls[name] < MAX_STALL_S:
                    break
    grown_bytes = peak_bytes(router.pid) - before_bytes
    helpers = [peak_bytes(pid) >> 20 for pid in router.pids[1:]]
    print({name: f"{took[name]:.2f} s, stall {stalls[name] * 1e3:.0f} ms" for name in bodies})
    print(f"the router grew by {grown_bytes >> 20} MiB; its processes have {helpers} MiB")
    assert {name: s for name, s in stalls.items() if s >= MAX_STALL_S} == {}
    assert grown_bytes <= MAX_GROWTH_BYTES and max(helpers) <= MAX_PROCESS_BYTES >> 20
