"""Images of the page's conversation: chosen or pasted, seen small, and sent with their question alone."""

from __future__ import annotations

import json
import re
import struct
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from conftest import OpenPage
from fake_fleet import URL, FakeFleet, feed, show_fleet
from playwright.sync_api import Request, Route, expect

PASTE = """(data) => {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "", { type: "image/png" }));
    const event = new ClipboardEvent("paste", { clipboardData: transfer, cancelable: true, bubbles: true });
    document.getElementById("prompt").dispatchEvent(event);
}"""


def png(width: int, height: int) -> bytes:
    """Return a black image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\0" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(data).decode()}"}}


@pytest.fixture
def fleet() -> FakeFleet:
    fleet = FakeFleet(1, 1)
    for one in fleet.instances.values():
        one["load"] |= {"image_rows": 16384, "image_rows_used": 300}
    return fleet


@pytest.fixture
def page(open_page: OpenPage, fleet: FakeFleet) -> ChatPage:
    """Open the page over a fleet whose router answers each chat with "seen"."""
    page = open_page(URL)
    show_fleet(page, fleet)

    def answer(route: Route) -> None:
        event = json.dumps({"choices": [{"delta": {"content": "seen"}, "finish_reason": "stop"}]})
        body = f"data: {event}\n\ndata: [DONE]\n\n"
        route.fulfill(status=200, headers={"content-type": "text/event-stream", "x-request-id": "r"}, body=body)

    page.page.route("**/v1/**", answer)
    return page


def choose(page: ChatPage, *files: Path) -> None:
    with page.page.expect_file_chooser() as chooser:
        page.page.locator("#attach").click()
    chooser.value.set_files([str(file) for file in files])


def test_images_are_chosen_pasted_removed_and_sent_with_their_question(page: ChatPage, tmp_path: Path) -> None:
    first, second, pasted = png(300, 200), png(40, 80), png(10, 10)
    (tmp_path / "first.png").write_bytes(first)
    (tmp_path / "second.png").write_bytes(second)
    asked: list[Any] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            asked.append(request.post_data_json["messages"])

    page.page.on("request", note)
    choose(page, tmp_path / "first.png", tmp_path / "second.png")
    attached = page.page.locator("#attached canvas")
    expect(attached).to_have_count(2)
    page.page.evaluate(PASTE, b64encode(pasted).decode())
    expect(attached).to_have_count(3)
    box = attached.first.bounding_box()
    assert box is not None and box["width"] <= 56 and abs(box["width"] / box["height"] - 1.5) < 0.1
    page.page.get_by_label("Remove second.png").click()
    expect(attached).to_have_count(2)
    page.send("what is it?")
    page.expect_done()
    expect(attached).to_have_count(0)
    question = page.messages.locator('article[data-role="user"]').last
    assert page.names('article[data-role="user"] canvas', "aria-label") == ["first.png", "pasted image"]
    expect(question).to_contain_text("what is it?")
    page.send("and now?")
    page.expect_done()
    shown = {"role": "user", "content": [part(first), part(pasted), {"type": "text", "text": "what is it?"}]}
    assert asked == [
        [shown],
        [shown, {"role": "assistant", "content": "seen"}, {"role": "user", "content": "and now?"}],
    ]


def test_what_is_no_image_is_named_and_not_sent(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_bytes(b"some text")
    choose(page, tmp_path / "notes.png")
    expect(page.page.locator("#composer-note")).to_have_text("notes.png is no image that can be shown")
    expect(page.page.locator("#attached li")).to_have_count(0)


def test_a_model_without_vision_is_offered_none_and_a_completion_has_none(page: ChatPage, fleet: FakeFleet) -> None:
    button = page.page.locator("#attach")
    expect(button).to_be_visible()
    expect(page.instance("P0")).to_have_attribute("aria-label", re.compile("image rows 300 of 16.384"))
    page.use_mode("completion")
    expect(button).to_be_hidden()
    page.use_mode("chat")
    for one in fleet.instances.values():
        one["load"] |= {"image_rows": 0}
    feed(page, fleet)
    expect(button).to_be_hidden()
