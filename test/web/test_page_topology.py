"""The live topology: pairs light up, requests travel, instances and a router die and come back."""

from __future__ import annotations

import re

from chat_page import ChatPage
from conftest import OpenPage
from playwright.sync_api import expect
from support.router_process import wait_until

from chitu.launch.local import LocalCluster

ALL = ["D0", "D1", "D2", "P0", "P1"]


def statuses(page: ChatPage) -> dict[str, str]:
    nodes = "#topology [data-instance]"
    return dict(zip(page.names(nodes, "data-instance"), page.names(nodes, "data-status"), strict=True))


def is_framed_red(page: ChatPage, name: str) -> bool:
    """Return whether the largest shape of an instance has an outline that is clearly red, not just warm."""
    script = """(node) => {
        const area = (shape) => shape.getBoundingClientRect().width * shape.getBoundingClientRect().height;
        const frame = [...node.querySelectorAll("rect, path")].sort((a, b) => area(b) - area(a))[0];
        const [r, g, b] = getComputedStyle(frame).stroke.match(/[\\d.]+/g).map(Number);
        return r > g + 60 && r > b + 60 && Math.abs(g - b) < 40;
    }"""
    is_red: bool = page.instance(name).evaluate(script)
    return is_red


def come_back(cluster: LocalCluster, page: ChatPage, name: str) -> None:
    """Let the supervisor work until the page shows the instance again."""

    def is_up() -> bool:
        cluster.poll()
        return statuses(page).get(name) == "up"

    wait_until(is_up, 60.0, lambda: statuses(page))
    cluster.wait_ready()


def test_two_requests_light_up_two_pairs(open_page: OpenPage, cluster: LocalCluster) -> None:
    pages = [open_page(cluster.url) for _ in range(2)]
    for page in pages:
        page.open_live()
        page.set(max_tokens=3500)
    watched = pages[0]
    for page in pages:
        page.send("a long story")
    active = '#topology [data-pair][data-active="true"]'
    wait_until(
        lambda: len(set(watched.names(active, "data-pair"))) >= 2,
        20.0,
        lambda: watched.names("#topology [data-pair]", "data-active"),
    )
    pairs = [pair.split("-") for pair in watched.names(active, "data-pair")]
    assert all(re.fullmatch(r"P[01]", prefill) and re.fullmatch(r"D[012]", decode) for prefill, decode in pairs)
    assert len({prefill for prefill, _ in pairs}) == 2
    assert len({decode for _, decode in pairs}) == 2
    for name in {name for pair in pairs for name in pair}:
        expect(watched.instance(name)).to_have_attribute("data-active", "true")
    for page in pages:
        page.stop_button.click()
        page.expect_done()
    # The pairs go dark again: nothing runs any more.
    expect(watched.page.locator(active)).to_have_count(0)
    expect(watched.page.locator('#topology [data-instance][data-active="true"]')).to_have_count(0)


def test_a_request_travels_from_its_p_to_its_d(chat: ChatPage) -> None:
    chat.record_dots()
    chat.set(max_tokens=2500)
    response = chat.send("far " * 300)
    row = chat.row(response.headers["x-request-id"])
    expect(row).to_have_attribute("data-state", "decode")
    room = row.get_attribute("data-room") or ""
    expect(chat.page.locator(f'#topology [data-dot="{room}"]')).to_have_count(1)
    pair = chat.page.locator('#topology [data-pair][data-active="true"]').get_attribute("data-pair") or ""
    prefill, decode = pair.split("-")
    wait_until(lambda: inside(chat, chat.dot_track(room)[-1], decode), 10.0, lambda: chat.dot_track(room)[-3:])
    track = chat.dot_track(room)
    assert inside(chat, track[0], prefill), f"it began at {track[0]}, beside its P"
    assert len({(round(x), round(y)) for x, y in track}) >= 4, f"it jumped: {track[:3]} ... {track[-3:]}"
    chat.stop_button.click()
    chat.expect_done()
    expect(chat.page.locator("#topology [data-dot]")).to_have_count(0)


def inside(page: ChatPage, point: tuple[float, float], name: str) -> bool:
    box = page.instance(name).bounding_box()
    assert box is not None
    return box["x"] <= point[0] <= box["x"] + box["width"] and box["y"] <= point[1] <= box["y"] + box["height"]


def test_a_killed_decode_instance_turns_red_and_comes_back(chat: ChatPage, cluster: LocalCluster) -> None:
    assert statuses(chat) == dict.fromkeys(ALL, "up")
    assert not is_framed_red(chat, "D0")
    cluster.kill("D0")
    expect(chat.instance("D0")).to_have_attribute("data-status", "down")
    assert statuses(chat) == {**dict.fromkeys(ALL, "up"), "D0": "down"}
    wait_until(lambda: is_framed_red(chat, "D0"), 5.0, "D0 is down and not red")
    assert not is_framed_red(chat, "D1")
    chat.set(max_tokens=3)
    for _ in range(3):  # long enough for every D to get a request
        chat.send("who is left?")
        chat.expect_done()
        expect(chat.answer.locator(".trace")).to_contain_text(re.compile(r"P\d → D[12]"))
    come_back(cluster, chat, "D0")
    assert statuses(chat) == dict.fromkeys(ALL, "up")
    wait_until(lambda: not is_framed_red(chat, "D0"), 5.0, "D0 is up and still red")


def test_the_page_finds_a_restarted_router_again_by_itself(chat: ChatPage, cluster: LocalCluster) -> None:
    chat.set(max_tokens=3)
    chat.send("before")
    chat.expect_done()
    cluster.kill("router")
    chat.expect_connection("reconnecting")
    chat.submit("during")
    expect(chat.answer).to_have_attribute("data-error", "network")

    def is_live() -> bool:
        cluster.poll()
        return chat.connection.get_attribute("data-state") == "live"

    wait_until(is_live, 60.0, lambda: chat.connection.get_attribute("data-state"))
    cluster.wait_ready()
    wait_until(lambda: statuses(chat) == dict.fromkeys(ALL, "up"), 20.0, lambda: statuses(chat))
    chat.send("after")
    chat.expect_done()
    assert chat.answer.get_attribute("data-error") is None
    assert [answer.get_attribute("data-error") for answer in chat.answers.all()] == [None, "network", None]


SUSPENDED_TWICE = """async () => {
    const { Card } = await import("/web/card.js");
    const { layoutOf } = await import("/web/layout.js");
    const instance = { name: "P0", role: "prefill", status: "up", host: "h", pid: 1, load: { suspended: [0, 2] } };
    const { form, spots } = layoutOf(600, [instance]);
    const card = new Card(instance);
    const seen = [];
    const look = () => seen.push(card.element.querySelector(".status").textContent, card.element.ariaLabel);
    card.place(spots.get("P0"), form, false);
    card.update(instance, 0, false);
    look();
    card.update({ ...instance, load: {} }, 0, false);
    look();
    return seen;
}"""


def test_a_p_that_does_not_write_to_a_d_says_so(chat: ChatPage) -> None:
    word, label, later_word, later_label = chat.page.evaluate(SUSPENDED_TWICE)
    assert (word, later_word) == ("suspended", "up")
    assert "no writes to D0, D2" in label and "no writes" not in later_label


DRAFTING = """async () => {
    const { Card } = await import("/web/card.js");
    const { layoutOf } = await import("/web/layout.js");
    const load = { pages_total: 4096, tokens: 9, tokens_a_row: 2.1 };
    const instance = { name: "D0", role: "decode", status: "up", host: "h", pid: 1, load };
    const { form, spots } = layoutOf(700, [instance]);
    const card = new Card(instance);
    document.querySelector("#topology").append(card.element);
    card.place(spots.get("D0"), form, false);
    card.update(instance, 1234, false);
    const [status, rate] = [".status", ".rate"].map((name) => card.element.querySelector(name));
    const seen = [status.textContent, card.element.ariaLabel, status.getBBox(), rate.getBBox()];
    card.update({ ...instance, load: { pages_total: 4096 } }, 1234, false);
    seen.push(status.textContent);
    card.element.remove();
    return [seen[0], seen[1], seen[2].x + seen[2].width, seen[3].x, seen[4]];
}"""


def test_an_instance_that_drafts_shows_the_tokens_of_a_row(chat: ChatPage) -> None:
    status, label, status_end, rate_start, later_status = chat.page.evaluate(DRAFTING)
    assert (status, later_status) == ("up ×2.1", "up") and "2.1 tokens a row" in label
    assert status_end < rate_start, "the smallest wide card has room for both"


def test_the_picture_says_what_moves_kv_and_not_what_was_configured(chat: ChatPage) -> None:
    expect(chat.page.locator("#topology .caption", has_text="KV cache")).to_have_text("KV cache · shm")
