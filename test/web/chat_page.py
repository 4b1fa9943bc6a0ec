"""The router's web page as a user sees it: what to click, what to read. The ids are the page's contract with its tests.

Used by the tests and by `script/screenshots.py`, in the thread that runs playwright. Every wait is for a condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Request, Response, expect

PATIENCE_MS = 30_000
"""Timeout of every wait. Two busy cores may need long; no wait lasts longer than its condition takes."""


class ChatPage:
    """The page in its own browser context. `problems` collects what no test wants to see."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.context = context
        self.problems: list[str] = []
        """Script errors, browser complaints (of its content policy, for instance) and requests to other servers."""
        self.failed_loads: list[str] = []
        """Complaints about a status of 400 or more, or an unreachable server; some tests provoke them."""
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        self.page.on("request", self._on_request)
        self.messages = self.page.locator("#messages")
        self.answers = self.messages.locator('article[data-role="assistant"]')
        self.prompt = self.page.locator("#prompt")
        self.send_button = self.page.locator("#send")
        self.stop_button = self.page.locator("#stop")
        self.connection = self.page.locator("#connection")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and message.text.startswith("Failed to load resource"):
            self.failed_loads.append(message.text)
        elif message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        target = urlsplit(request.url)
        if target.scheme not in ("data", "blob") and target.netloc != urlsplit(self.url).netloc:
            self.problems.append(f"request to another server: {request.url}")

    # ------------------------------------------------------------------------------------------------------- doing

    def open(self) -> None:
        self.page.goto(self.url)

    def open_live(self) -> None:
        """Open the page and wait until the event stream shows the cluster."""
        self.open()
        self.expect_connection("live")

    def press(self, start: str) -> None:
        """Press `example` or `burst`: in the empty conversation, or beside the prompt."""
        self.page.locator(f'[data-press="{start}"]:visible').click()

    def use_mode(self, mode: str) -> None:
        """Select `chat` or `completion`. Clicks the label: the radio itself may be drawn by its label."""
        self.page.locator(f"label:has(#mode-{mode}), label[for=mode-{mode}]").first.click()
        expect(self.page.locator(f"#mode-{mode}")).to_be_checked()

    def set(self, **settings: object) -> None:
        """Fill settings by id: `set(max_tokens=5)` fills `#max-tokens`. They are in a <details>; Escape closes it. The
        page opens it by itself where a key is missing, which may be just now."""
        for name, value in settings.items():
            field = self.page.locator("#" + name.replace("_", "-"))
            fold = self.page.locator("details", has=field)
            while not field.is_visible():
                if fold.get_attribute("open") is None:
                    fold.locator("summary").click()
            field.fill(str(value))
            field.press("Escape")

    def send(self, text: str) -> Response:
        """Send by the button and return the response when its head has arrived; its status must be good."""
        response = self.response_to(lambda: self.submit(text))
        assert response.ok, f"status {response.status}: {response.text()}"
        return response

    def submit(self, text: str) -> None:
        """Send by the button, whatever the outcome."""
        self.prompt.fill(text)
        self.send_button.click()

    def response_to(self, action: Callable[[], None]) -> Response:
        """Return the response to the generation that `action` starts."""
        with self.page.expect_response(re.compile(r"/v1/(chat/)?completions$")) as waiting:
            action()
        return waiting.value

    def body_of(self, text: str) -> Any:
        """Send, wait until the answer has ended, and return the request body that the page sent to the router."""
        body = self.send(text).request.post_data_json
        self.expect_done()
        return body

    # ----------------------------------------------------------------------------------------------------- reading

    @property
    def answer(self) -> Locator:
        """Last answer; if it is being streamed, what has arrived so far."""
        return self.answers.last

    @property
    def streaming(self) -> Locator:
        return self.messages.locator('article[data-streaming="true"]')

    def expect_done(self, timeout_ms: int = PATIENCE_MS) -> None:
        """Wait until the last answer has ended, in whatever way."""
        expect(self.answer).to_be_visible()
        expect(self.streaming).to_have_count(0, timeout=timeout_ms)

    def expect_connection(self, state: str, timeout_ms: int = PATIENCE_MS) -> None:
        expect(self.connection).to_have_attribute("data-state", state, timeout=timeout_ms)

    def instance(self, name: str) -> Locator:
        return self.page.locator(f'#topology [data-instance="{name}"]')

    def pair(self, name: str) -> Locator:
        return self.page.locator(f'#topology [data-pair="{name}"]')

    def row(self, request_id: str) -> Locator:
        return self.page.locator(f'#requests tbody tr[data-request-id="{request_id}"]')

    def names(self, selector: str, attribute: str) -> list[str]:
        """Return an attribute's values over all matching elements, in document order."""
        script = "(all, name) => all.map((element) => element.getAttribute(name))"
        found: list[str] = self.page.locator(selector).evaluate_all(script, attribute)
        return found

    # ------------------------------------------------------------------------------------------------- in the page

    def record_growth(self) -> None:
        """Record every length of the running answer's text from now on."""
        self.page.evaluate(
            """() => {
                const lengths = (globalThis.chituTestLengths = []);
                const look = () => {
                    const text = document.querySelector('#messages article[data-streaming="true"] .text');
                    const length = text ? text.textContent.length : 0;
                    if (length > 0 && length !== lengths.at(-1)) lengths.push(length);
                };
                const all = {subtree: true, childList: true, characterData: true, attributes: true};
                new MutationObserver(look).observe(document.querySelector("#messages"), all);
            }"""
        )

    def growth(self) -> list[int]:
        lengths: list[int] = self.page.evaluate("() => globalThis.chituTestLengths")
        return lengths

    def record_dots(self) -> None:
        """Record the place of every dot in every frame from now on."""
        self.page.evaluate(
            """() => {
                const seen = (globalThis.chituTestDots = {});
                const look = () => {
                    for (const dot of document.querySelectorAll("#topology [data-dot]")) {
                        const box = (dot.querySelector("circle") ?? dot).getBoundingClientRect();
                        (seen[dot.dataset.dot] ??= []).push([box.x + box.width / 2, box.y + box.height / 2]);
                    }
                    requestAnimationFrame(look);
                };
                look();
            }"""
        )

    def dot_track(self, room: str) -> list[tuple[float, float]]:
        """Return the places of a request's dot in CSS pixels of the window, one per frame."""
        points = self.page.evaluate("(room) => globalThis.chituTestDots[room] ?? []", room)
        return [(x, y) for x, y in points]
