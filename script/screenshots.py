#!/usr/bin/env python3
"""Take the pictures of the web page in docs/images: a real 2P3D cluster under load, rendered by headless Chromium, and
the page over a made-up cluster of sixty instances.

    .venv/bin/python script/screenshots.py [--model PATH] [--out docs/images]

The page asks one of its own examples while other clients keep the cluster busy, so pairs light up and requests are in
flight. Run it by hand when the page changes; nothing else calls it.
"""

from __future__ import annotations

import argparse
import io
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, FloatRect, expect

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(ROOT / "test" / "web")]

from chat_page import ChatPage  # noqa: E402
from fake_fleet import URL, FakeFleet, feed, show_fleet  # noqa: E402
from headless import headless_browser  # noqa: E402
from support.router_process import wait_until  # noqa: E402

from chitu.assets import TINY_MODEL_DIR  # noqa: E402
from chitu.assets.tiny_tasks import facts_for, recall  # noqa: E402
from chitu.config.load import load_topology  # noqa: E402
from chitu.launch.local import LocalCluster  # noqa: E402
from chitu.launch.router_client import RouterClient  # noqa: E402
from chitu.protocol.account import RequestSnapshot  # noqa: E402

CLIENTS = 4
MAX_BYTES = 300_000
ACTIVE_PAIRS = '#topology [data-pair][data-active="true"]'
DOTS = "#topology [data-dot]"
DOTS_ON_THE_WAY = f'{DOTS}[data-phase="transfer"]'


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: a name, the browser window and how much of the page it shows."""

    name: str
    window: dict[str, Any]
    width: int
    height: int
    """Height of the picture in CSS pixels; may exceed the window's."""


DESKTOP = {"viewport": {"width": 1280, "height": 860}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 390, "height": 1180}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
PICTURES = (
    Picture("page-light", {**DESKTOP, "color_scheme": "light"}, 1280, 860),
    Picture("page-dark", {**DESKTOP, "color_scheme": "dark"}, 1280, 860),
    Picture("page-phone", {**PHONE, "color_scheme": "light"}, 390, 1180),
)


def ask_on_and_on(url: str, model: str, seed: int, stop: threading.Event) -> None:
    """Run one client until `stop`: recall questions over lists of many lengths, each with a long answer."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        while not stop.is_set():
            example = recall(rng, facts_for(rng.choice((200, 500, 900, 1400))))
            body = {
                "model": model,
                "messages": [{"role": "user", "content": example.prompt}],
                "max_tokens": rng.randrange(60, 400),
                "ignore_eos": True,
                "stream": True,
            }
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        break


@contextmanager
def busy_cluster(model: Path) -> Iterator[LocalCluster]:
    """Yield a 2P3D cluster on this machine with `CLIENTS` busy clients."""
    settings = [f"model.path={model}", f"model.served_name={model.name}", "cache.num_pages=1000", "log.level=WARNING"]
    with tempfile.TemporaryDirectory() as logs:
        topology = load_topology("pd_disagg_2p3d_multi_node.yaml", [*settings, f"log.dir={logs}"])
        with LocalCluster(topology) as cluster:
            cluster.wait_ready(timeout_s=300.0)
            stop = threading.Event()
            arguments = [(cluster.url, model.name, seed, stop) for seed in range(CLIENTS)]
            clients = [threading.Thread(target=ask_on_and_on, args=one) for one in arguments]
            for client in clients:
                client.start()
            try:
                yield cluster
            finally:
                stop.set()
                for client in clients:
                    client.join()


def converse(page: ChatPage, is_long: bool) -> None:
    """Hold one exchange. With the embedded model it is an example; if the picture has room, several at once."""
    if not page.page.locator("body.has-examples").count():
        page.set(max_tokens=80)
        page.send("Tell me something that nobody expects.")
        page.expect_done()
        return
    page.press("example")
    expect(page.prompt).not_to_have_value("")
    page.response_to(page.send_button.click)
    page.expect_done()
    expect(page.answer.locator(".trace")).to_contain_text("total")
    if is_long:
        page.press("burst")
        expect(page.messages.locator("[data-right]")).to_be_visible()


def take(browser: Browser, url: str, picture: Picture) -> bytes:
    """Return a PNG of the page after an exchange, at a moment when several pairs are at work."""
    context = browser.new_context(**picture.window)
    try:
        page = ChatPage(context, url)
        page.open_live()
        converse(page, is_long=picture.width > 390)
        page.page.mouse.move(0, 0)

        def is_lively() -> bool:
            counts = [page.page.locator(selector).count() for selector in (ACTIVE_PAIRS, DOTS, DOTS_ON_THE_WAY)]
            return all(count >= least for count, least in zip(counts, (3, 4, 1), strict=True))

        expect(page.page.locator("#totals")).not_to_contain_text("–")
        wait_until(is_lively, 60.0, "the cluster is too quiet for a picture")
        clip: FloatRect = {"x": 0, "y": 0, "width": picture.width, "height": picture.height}
        png = page.page.screenshot(full_page=True, clip=clip)
        if page.problems:
            raise SystemExit(f"the page has problems: {page.problems}")
        return png
    finally:
        context.close()


def take_fleet(browser: Browser) -> bytes:
    """Return a PNG of the live part of the page over 24P36D: a burst, a D that is down, a P that becomes a D."""
    context = browser.new_context(
        viewport={"width": 1440, "height": 860}, device_scale_factor=1.5, color_scheme="light"
    )
    try:
        page, fleet = ChatPage(context, URL), FakeFleet(24, 36)
        show_fleet(page, fleet)
        fleet.lose("D21")
        fleet.instances["P14"] |= {"status": "draining", "becomes": "D36"}
        for _ in range(6):
            fleet.work(0.45)
            feed(page, fleet)
        requests = [fleet.request(fleet.pick("P"), fleet.pick("D"), "prefill") for _ in range(16)]
        feed(page, fleet)
        fleet.work(0.45, 0.1)
        for request in requests:
            request.update(state="decode", first_token_at_s=fleet.time_s, output_tokens=1)
        for request in requests[:9]:
            request.update(state="finished", kv_bytes=request["prompt_tokens"] * 2**17, ended_at_s=fleet.time_s)
        feed(page, fleet)
        page.page.wait_for_timeout(450)  # the dots are on their way
        return page.page.locator(".live").screenshot()
    finally:
        context.close()


def take_timeline(browser: Browser, cluster: LocalCluster, model: str) -> bytes:
    """Return a PNG of the timeline of a request whose D is killed in the middle of it."""
    name, client = "a-story-of-two-attempts", RouterClient(cluster.url)
    body = {"model": model, "prompt": recall(random.Random(1), facts_for(900)).prompt, "max_tokens": 300}
    headers = {"X-Request-Id": name, "X-Chitu-Trace": "1"}

    def ask() -> None:
        httpx.post(f"{cluster.url}/v1/completions", json={**body, "ignore_eos": True}, headers=headers, timeout=120.0)

    def of_it() -> list[RequestSnapshot]:
        return [each for each in client.cluster().requests if each.request_id == name]

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: any(each.output_tokens > 60 for each in of_it()), 60.0, of_it)
    cluster.kill(of_it()[-1].decode, signal.SIGKILL)
    asking.join()
    context = browser.new_context(viewport={"width": 1680, "height": 1600}, color_scheme="light")
    try:
        page = ChatPage(context, f"{cluster.url}/#trace={name}").page
        page.goto(f"{cluster.url}/#trace={name}")
        expect(page.locator('#timeline g[data-what="tokens"]')).to_have_count(2)
        expect(page.locator("#life-notes")).to_contain_text("same on both sides")
        return page.locator("#life").screenshot()
    finally:
        context.close()


def optimised(png: bytes) -> bytes:
    """Return the same picture with a palette: a page has few colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


def save(path: Path, png: bytes) -> None:
    small = optimised(png)
    if len(small) > MAX_BYTES:
        raise SystemExit(f"{path.name} has {len(small)} bytes, more than {MAX_BYTES}")
    path.write_bytes(small)
    print(f"{path}: {len(small) / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description="takes the pictures of the web page")
    parser.add_argument("--model", type=Path, default=TINY_MODEL_DIR, help="checkpoint folder (default: chitu-tiny)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    parser.add_argument("--only-timeline", action="store_true", help="the time line of a traced request alone")
    parser.add_argument("--only-fleet", action="store_true", help="the picture of a large cluster alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=60_000)
    with headless_browser() as browser:
        save(options.out / "page-fleet.png", take_fleet(browser))
    if options.only_fleet:
        return
    with busy_cluster(options.model) as cluster, headless_browser() as browser:
        for picture in () if options.only_timeline else PICTURES:
            save(options.out / f"{picture.name}.png", take(browser, cluster.url, picture))
        save(options.out / "timeline.png", take_timeline(browser, cluster, options.model.name))


if __name__ == "__main__":
    main()
