"""The page on a phone, with the keyboard alone, in light and dark mode, and with reduced motion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import pytest
from chat_page import ChatPage
from conftest import OpenPage
from playwright.sync_api import expect
from support.router_process import wait_until

from chitu.launch.local import LocalCluster


def test_a_phone_needs_no_sideways_scrolling(open_page: OpenPage, cluster: LocalCluster) -> None:
    phone = open_page(cluster.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    phone.open_live()
    phone.set(max_tokens=3000)
    phone.send("x" * 400)  # a word wider than the screen
    heights = {"send": 0.0, "stop": box_of(phone, "stop")["height"]}  # they take turns
    phone.stop_button.click()
    phone.expect_done()
    heights["send"] = box_of(phone, "send")["height"]
    assert min(heights.values()) >= 32, f"too low for a thumb: {heights}"
    sizes = phone.page.evaluate(
        "() => [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth, visualViewport.scale]"
    )
    assert sizes == [360, 360, 360, 1], sizes
    for name in ("prompt", "send", "topology", "requests", "messages"):
        box = box_of(phone, name)
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, f"{name}: {box}"


def box_of(page: ChatPage, name: str) -> Mapping[str, float]:
    box = page.page.locator(f"#{name}").bounding_box()
    assert box is not None, name
    return cast(Mapping[str, float], box)


def focused(page: ChatPage) -> str:
    name: str = page.page.evaluate("() => document.activeElement.id")
    return name


FOCUS_SHOWS = """() => {
    const element = document.activeElement;
    if (element === document.body) return true;
    // What draws the mark may be the element, a part of it, or (for a radio) the element beside it.
    const drawn = [element, element.nextElementSibling, ...element.querySelectorAll("*")].filter(Boolean);
    const look = () => drawn.map((one) => {
        const s = getComputedStyle(one);
        return [s.outlineStyle, s.outlineWidth, s.boxShadow, s.borderColor, s.backgroundColor, s.strokeWidth].join();
    }).join("|");
    const focused = look();
    element.blur();
    const blurred = look();
    element.focus({ focusVisible: true });
    return focused !== blurred;
}"""


def tab_to(page: ChatPage, name: str, at_most: int) -> None:
    """Press Tab until the element has the focus. Each element on the way must show its focus."""
    way: list[str] = []
    while focused(page) != name:
        assert len(way) < at_most, f"Tab did not reach {name}: {way}"
        page.page.keyboard.press("Tab")
        way.append(focused(page))
        assert page.page.evaluate(FOCUS_SHOWS), f"nothing shows that {way[-1] or 'an element'} has the focus: {way}"


def test_the_keyboard_alone_is_enough(chat: ChatPage) -> None:
    chat.set(max_tokens=3500)
    chat.page.evaluate("() => document.activeElement.blur()")
    tab_to(chat, "prompt", at_most=40)
    chat.page.keyboard.type("a long story")
    tab_to(chat, "send", at_most=2)
    chat.response_to(lambda: chat.page.keyboard.press("Enter"))
    expect(chat.stop_button).to_be_enabled()
    assert focused(chat) != "", "the focus was lost when Send was disabled"
    tab_to(chat, "stop", at_most=2)
    chat.page.keyboard.press("Enter")
    expect(chat.answer).to_have_attribute("data-stopped", "true")
    expect(chat.stop_button).to_be_disabled()
    assert focused(chat) != "", "the focus was lost when Stop was disabled"


def test_everything_that_can_be_used_has_a_name_and_the_log_is_announced(chat: ChatPage) -> None:
    chat.page.locator("details", has=chat.page.locator("#max-tokens")).locator("summary").click()
    controls = chat.page.locator("button:visible, input:visible, textarea:visible, summary:visible")
    assert controls.count() >= 8
    for control in controls.all():
        expect(control).to_have_accessible_name(re.compile(r"\S"))
    expect(chat.messages).to_have_attribute("aria-live", "polite")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colour_scheme_of_the_system_is_used_until_the_toggle_says_otherwise(
    open_page: OpenPage, cluster: LocalCluster, scheme: str
) -> None:
    page = open_page(cluster.url, color_scheme=scheme)
    page.open_live()
    root, other = page.page.locator("html"), {"light": "dark", "dark": "light"}[scheme]
    expect(root).to_have_attribute("data-theme", scheme)
    assert (brightness(page) > 0.5) == (scheme == "light")
    page.page.locator("#theme").click()
    expect(root).to_have_attribute("data-theme", other)
    wait_until(lambda: (brightness(page) > 0.5) == (other == "light"), 5.0, lambda: brightness(page))
    page.open_live()
    expect(root).to_have_attribute("data-theme", other)


def brightness(page: ChatPage) -> float:
    """Return the brightness of the page's background, 0 to 1."""
    script = """() => {
        const of = (element) => getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).map(Number);
        const [r, g, b, alpha = 1] = of(document.body);
        const [red, green, blue] = alpha > 0 ? [r, g, b] : of(document.documentElement);
        return (red + green + blue) / 765;
    }"""
    value: float = page.page.evaluate(script)
    return value


def test_who_wants_little_motion_sees_dots_jump(open_page: OpenPage, cluster: LocalCluster) -> None:
    page = open_page(cluster.url, reduced_motion="reduce")
    page.open_live()
    page.record_dots()
    page.set(max_tokens=3000)
    response = page.send("quiet please")
    row = page.row(response.headers["x-request-id"])
    expect(row).to_have_attribute("data-state", "decode")
    room = row.get_attribute("data-room") or ""

    def places() -> set[tuple[int, int]]:
        return {(round(x), round(y)) for x, y in page.dot_track(room)}

    wait_until(lambda: len(places()) == 2, 10.0, places)
    endless = "() => document.getAnimations().filter((one) => one.effect.getTiming().iterations === Infinity).length"
    assert page.page.evaluate(endless) == 0
    page.stop_button.click()
    page.expect_done()
    expect(page.page.locator("#topology [data-dot]")).to_have_count(0)
    assert len(places()) == 2
