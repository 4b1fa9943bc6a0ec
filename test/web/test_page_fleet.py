"""The page of small and large clusters, each made up: what is drawn where, what a burst says, what an update costs."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from chat_page import ChatPage
from conftest import OpenPage
from fake_fleet import URL, FakeFleet, feed, show_fleet
from playwright.sync_api import Locator, expect

SIZES = {10: (4, 6), 60: (24, 36), 500: (200, 300)}
WINDOWS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 860}},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
Box = dict[str, float]


@pytest.fixture
def open_fleet(open_page: OpenPage) -> Any:
    def open_one(fleet: FakeFleet, window: str = "desktop") -> ChatPage:
        page = open_page(URL, **WINDOWS[window])
        show_fleet(page, fleet)
        return page

    return open_one


def boxes(page: ChatPage, selector: str) -> dict[str, Box]:
    """Return the boxes of the instances' elements, by instance."""
    script = """(all) => Object.fromEntries(all.map((one) => {
        const { x, y, width, height } = one.querySelector("rect").getBoundingClientRect();
        return [one.dataset.instance, { x, y, width, height }];
    }))"""
    found: dict[str, Box] = page.page.locator(selector).evaluate_all(script)
    return found


def box_of(element: Locator) -> Box:
    box = element.bounding_box()
    assert box is not None
    return cast(Box, box)


FLIGHTS_STAY = """() => {
    // A flight (many frames), a stay and a change of roles end when the test says so, everything else at once.
    globalThis.land = [];
    globalThis.ways = {};
    Element.prototype.animate = function (frames) {
        if (this.dataset.instance) ways[this.dataset.instance] = frames.map(({ transform }) => transform);
        const isStay = frames.every(({ opacity }) => opacity === 1);
        const isHeld = frames.length > 2 || isStay || this.dataset.instance;
        return { finished: isHeld ? new Promise((resolve) => land.push(resolve)) : Promise.resolve() };
    };
}"""


def overlap(a: Box, b: Box) -> bool:
    return all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "width"), ("y", "height")))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [10, pytest.param(60, marks=pytest.mark.by_hand), 500])
def test_at_any_size_every_instance_is_seen_and_a_burst_has_one_label_and_nothing_lies_on_another(
    open_fleet: Any, size: int, window: str
) -> None:
    fleet = FakeFleet(*SIZES[size])
    page = open_fleet(fleet, window)
    fleet.work(0.6)
    feed(page, fleet)
    cells, cards = boxes(page, "#topology .cell"), boxes(page, "#topology .card")
    assert (len(cells), len(cards)) == ((0, 10) if size == 10 else (size, 6 if window == "desktop" else 4))
    picture = page.page.locator("#topology").bounding_box()
    assert picture is not None and picture["height"] < (440 if size == 10 else 450), picture
    width = WINDOWS[window]["viewport"]["width"]
    assert page.page.evaluate("() => document.documentElement.scrollWidth") == width
    placed = cells or cards
    assert max(box["x"] + box["width"] for name, box in placed.items() if name[0] == "P") < min(
        box["x"] for name, box in placed.items() if name[0] == "D"
    )
    for box in [*cells.values(), *cards.values()]:
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and picture["y"] <= box["y"]
    distinct = {(round(box["x"]), round(box["y"])) for box in cells.values()}
    least = min((box["width"] for box in cells.values()), default=0)
    steps = [abs(x - other) for x, y in distinct for other, at in distinct if at == y and other != x]
    assert len(distinct) == len(cells) and all(step > least for step in steps[:5000])
    assert not any(overlap(box, cell) for box in cards.values() for cell in cells.values())

    page.page.evaluate(FLIGHTS_STAY)
    page.page.add_style_tag(content="* { transition: none !important; }")
    label = page.page.locator("#topology .sum:not(.gone)")
    shown = "(all) => all.filter((text) => getComputedStyle(text).opacity > 0.5).map((text) => text.textContent)"

    def move(count: int) -> None:
        requests = [fleet.request(fleet.pick("P"), fleet.pick("D"), "prefill") for _ in range(count)]
        feed(page, fleet)
        fleet.time_s += 0.1
        over = {"state": "finished", "kv_bytes": 3 * 2**19, "ended_at_s": fleet.time_s, "output_tokens": 2}
        for request in requests:
            request.update(first_token_at_s=fleet.time_s, **over)
        feed(page, fleet)

    def labels() -> list[str]:
        found: list[str] = page.page.locator("#topology .dot text").evaluate_all(shown)
        return found

    move(1)
    expect(page.page.locator('#topology .dot[data-phase="transfer"]')).to_have_count(1)
    assert [text.partition(" · ")[0] for text in labels()] == ["1.50 MiB"]
    expect(label).to_have_count(0)
    move(4)
    words = "5 transfers" if window == "desktop" else "5 moves"
    expect(label).to_have_text(re.compile(rf"{words}( · )?7\.50 MiB"))
    assert labels() == [], "labels lie beside their sum"
    page.page.evaluate("() => land.splice(0).forEach((end) => end())")
    expect(page.page.locator('#topology .dot[data-phase="landed"]')).to_have_count(5)
    expect(label).to_have_text(re.compile(rf"{words}( · )?7\.50 MiB"))
    assert labels() == []
    ground = box_of(label.locator("rect"))
    for line in label.locator("text:not(:empty)").all():
        box = box_of(line)
        assert ground["x"] <= box["x"] and box["x"] + box["width"] <= ground["x"] + ground["width"]
    assert not [box for box in [*cards.values(), *cells.values()] if overlap(box, ground)]
    page.page.evaluate("() => land.forEach((end) => end())")
    expect(label).to_have_count(0)


def test_what_is_broken_has_a_card_and_a_mark_and_so_has_the_busiest(open_fleet: Any) -> None:
    fleet = FakeFleet(*SIZES[60])
    page = open_fleet(fleet)
    for name in ("D3", "D4", "D5"):
        fleet.lose(name)
    fleet.instances["P7"] |= {"status": "draining"}
    fleet.instances["P8"]["load"] |= {"suspended": [1]}
    fleet.instances["P20"]["load"] |= {"waiting": 6, "running": 1}
    fleet.instances["D30"]["load"] |= {"running": 9, "pages_used": 3000}
    fleet.instances["D31"]["load"] |= {"running": 9, "pages_used": 3900}
    feed(page, fleet)
    assert set(page.names("#topology .card", "data-instance")) == {"P7", "P8", "P20", "D3", "D4", "D31"}
    marked = dict.fromkeys(("D3", "D4", "D5"), "down") | {"P7": "draining", "P8": "suspended"}
    names, states = (page.names("#topology .cell:has(.mark)", f"data-{of}") for of in ("instance", "status"))
    assert dict(zip(names, states, strict=True)) == marked
    captions = page.page.locator("#topology .caption").all_text_contents()
    assert captions[:2] == ["Prefill · 24 · 1 suspended, 1 draining", "Decode · 36 · 3 down"]
    heats = {
        name: page.page.locator(f'.cell[data-instance="{name}"]').get_attribute("data-heat") for name in fleet.instances
    }
    assert {name: heat for name, heat in heats.items() if heat != "0"} == {"P20": "3", "D30": "3", "D31": "4"}


def test_an_instance_that_changes_its_role_is_seen_on_its_way(open_fleet: Any) -> None:
    fleet = FakeFleet(*SIZES[60])
    page = open_fleet(fleet)
    start = boxes(page, "#topology .cell")["P5"]
    fleet.instances["P5"] |= {"status": "draining", "becomes": "D36"}
    feed(page, fleet)
    assert page.names('.cell[data-status="becoming"]', "data-instance") == ["P5"]
    expect(page.page.locator('.card[data-instance="P5"] .status')).to_have_text("→ D36")
    page.page.evaluate(FLIGHTS_STAY)
    fleet.leave("P5")
    fleet.join("D36")
    feed(page, fleet)
    moving = page.page.locator("#topology .cell[data-flipping]")
    expect(moving).to_have_attribute("data-instance", "D36")
    end = boxes(page, "#topology .cell")["D36"]
    (x0, y0), (x1, y1) = (map(float, re.findall(r"[\d.]+", at)) for at in page.page.evaluate("() => ways.D36"))
    assert (round(x1 - x0), round(y1 - y0)) == (round(end["x"] - start["x"]), round(end["y"] - start["y"]))
    assert x1 - x0 > 300, "from the left side to the right one"
    page.page.evaluate("() => land.forEach((end) => end())")
    expect(moving).to_have_count(0)
    assert page.names('#topology .cell:not([data-status="up"])', "data-instance") == []


TOUCHED = """() => {
    globalThis.chituTestTouched = new Set();
    const note = (records) => records.forEach(({ target }) => chituTestTouched.add(target));
    globalThis.chituTestObserver = new MutationObserver(note);
    chituTestObserver.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
}"""


def test_an_update_touches_what_looks_different_and_nothing_else(open_fleet: Any) -> None:
    fleet = FakeFleet(*SIZES[500])
    page = open_fleet(fleet)
    for _ in range(8):  # rates, and the choice of cards, are of the last seconds
        fleet.time_s += 0.5
        feed(page, fleet, is_whole=False)
    page.page.evaluate(TOUCHED)

    def touched(names: list[str], **load: int) -> int:
        page.page.evaluate("() => (chituTestObserver.takeRecords(), chituTestTouched.clear())")
        fleet.time_s += 0.5
        for name in names:
            fleet.instances[name] = {**fleet.instances[name], "load": {**fleet.instances[name]["load"], **load}}
        size = feed(page, fleet, is_whole=False)
        assert size < 600 + 350 * len(names)
        count: int = page.page.evaluate("() => new Promise((done) => setTimeout(() => done(chituTestTouched.size)))")
        return count

    assert touched([]) == 0
    names = [f"D{rank}" for rank in range(100, 140)]
    assert touched(names, steps=1001) == 0
    # A cell each, and the six cards, the captions and the numbers of the page.
    assert 40 <= touched(names, running=5, pages_used=900) <= 40 + 90
    assert touched(names, running=6, pages_used=901) <= 90, "the colour is the same"
    assert page.names('.cell:not([data-heat="0"])', "data-instance") == names


def test_the_arrows_walk_through_a_field_that_is_one_stop_of_the_tab_key(open_fleet: Any) -> None:
    page = open_fleet(FakeFleet(*SIZES[60]))
    page.page.evaluate("() => document.querySelector('.cell[tabindex=\"0\"]').focus()")
    focused = "() => document.activeElement.dataset.instance"
    seen = [page.page.evaluate(focused)]
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowLeft"):
        page.page.keyboard.press(key)
        seen.append(page.page.evaluate(focused))
    columns = int(seen[2][1:]) - 1
    assert seen == ["P0", "P1", f"P{1 + columns}", f"P{columns}", "P0", "P0"] and columns > 3
    expect(page.page.locator("#detail")).to_have_text(re.compile(r"^P0 prefill, up"))
    assert page.names('.cell[tabindex="0"]', "data-instance") == ["P0", "D0"]


def test_who_comes_first_is_told_what_to_press(open_fleet: Any) -> None:
    fleet = FakeFleet(1, 1)
    page = open_fleet(fleet, "phone")
    starts = page.page.locator("#welcome [data-press]")
    expect(starts.first).to_be_hidden()
    suggested = page.page.locator("#first-prompt")
    for text, is_chat in (("What is the capital of France?", True), ("Once upon a time", False)):
        fleet.first_prompt = {"text": text, "is_chat": is_chat}
        feed(page, fleet)
        expect(suggested).to_have_text(text)
        suggested.locator("button").click()
        expect(page.prompt).to_have_value(text)
        expect(page.page.locator("#mode-chat")).to_be_checked(checked=is_chat)
    page.prompt.fill("")
    page.use_mode("chat")
    fleet.model = "chitu-tiny"
    feed(page, fleet)
    assert starts.all_text_contents() == ["Example", "5 at once"]
    expect(starts.last).to_be_visible()
    expect(suggested).to_be_hidden()
    starts.last.click()
    expect(page.messages).to_contain_text("5 examples at once: 0 of 5 right")  # a fleet answers nothing
    expect(page.page.locator("[data-press]:visible")).to_have_count(0)
    page.failed_loads.clear()
    page.page.locator("#clear").click()
    expect(starts.first).to_be_visible()
    page.page.locator("#commands summary").click()
    expect(page.page.locator("#commands dd").first).to_have_text(f"chitu chat --url {URL}")
    expect(page.page.locator("#detail")).to_have_text("Tap an instance to see more of it.")
    box, composer = page.page.locator("#prompt").bounding_box(), page.page.locator("#composer").bounding_box()
    assert (
        box is not None and composer is not None and composer["y"] + composer["height"] == 844 and box["height"] >= 44
    )


def test_a_number_of_the_past_is_dimmed_and_an_unknown_stage_is_hatched(open_fleet: Any) -> None:
    fleet = FakeFleet(2, 3)
    page = open_fleet(fleet)
    fleet.advice = "Balancer (advise): D2 should become P"
    fleet.request("P0", "D0", "prefill")
    rate = page.page.locator("#total-decode-rate")
    for _ in range(4):
        fleet.work(0.5)
        feed(page, fleet)
    expect(rate).to_have_attribute("data-past", "false")
    bar = page.page.locator("#requests .stage-bar")
    assert "transparent 0% 100%" in (bar.get_attribute("style") or "").replace(".00", "")
    expect(page.page.locator("#advice")).to_have_text(fleet.advice)
    for one in fleet.instances.values():
        one["load"] |= {"running": 0, "waiting": 0, "transferring": 0}
    fleet.requests[0].update(state="decode", first_token_at_s=fleet.time_s)
    feed(page, fleet)
    expect(rate).to_have_attribute("data-past", "true")
    expect(rate).not_to_have_text("–")
    style = bar.get_attribute("style") or ""
    assert "transparent 0" in style and "var(--decode)" in style and "--queue" not in style
    expect(page.page.locator("#advice")).to_be_visible()


PURE = """async () => {
    const { layoutOf, restPoint, wiresOf } = await import("/web/layout.js");
    const { sumLines } = await import("/web/dots.js");
    const { Featured, heatOf } = await import("/web/heat.js");
    const { commandsOf } = await import("/web/commands.js");
    const many = (letter, role, n) => [...Array(n).keys()].map((rank) => ({ name: letter + rank, role, status: "up" }));
    const grids = [[5, 5], [4, 6], [1, 8], [1, 9], [6, 5], [1, 10]].map(([p, d]) =>
        layoutOf(800, [...many("P", "prefill", p), ...many("D", "decode", d)]).isGrid);
    const outside = [];
    for (const width of [320, 560, 747, 1050]) {
        for (const [p, d, u] of [[1, 1, 0], [3, 7, 0], [24, 36, 0], [499, 1, 0], [900, 9, 0], [0, 0, 40], [9, 9, 9]]) {
            const instances = [...many("P", "prefill", p), ...many("D", "decode", d), ...many("U", "unified", u)];
            const layout = layoutOf(width, instances);
            const boxes = [...layout.spots.values(), ...Object.values(layout.places ?? {}).flat()];
            const { height } = layout;
            const fits = (box) =>
                box.x >= 0 && box.x + box.width <= width && box.y >= 0 && box.y + box.height <= height;
            if (layout.spots.size !== instances.length || !boxes.every(fits)) outside.push([width, p, d, u]);
        }
    }
    const large = [...many("P", "prefill", 50), ...many("D", "decode", 50)];
    const wires = [...wiresOf(layoutOf(800, large), large, new Set(["P1", "D2", "P1-D2", "P1-D99"]), "P3")];
    const moved = (...sizes) => sizes.map((kv_bytes) => ({ kv_bytes }));
    const featured = new Featured();
    const load = (running) => ({ running, pages_total: 100, pages_used: running });
    const side = [1, 5, 9, 3, 0].map((n, i) => ({ name: `D${i}`, role: "decode", status: "up", load: load(n) }));
    const choices = [featured.choose(side, 3, 10)];
    side[4].load = load(99);
    choices.push(featured.choose(side, 3, 11), featured.choose(side, 3, 13));
    side[0] = { ...side[0], status: "down", load: null };
    choices.push(featured.choose(side, 3, 13.1));
    return {
        grids, outside, wires, choices: choices.map((names) => names.join(" ")),
        sums: [sumLines(moved(0, 0), 200), sumLines(moved(2 ** 21, 2 ** 20), 200), sumLines(moved(2 ** 21, 0, 0), 200),
            sumLines(moved(2 ** 21, 2 ** 20), 80)],
        heats: [0, 1, 2, 3, 4, 7, 8, 50].map((waiting) => heatOf({ role: "prefill", load: { waiting } })),
        waits: heatOf({ role: "decode", load: { waiting: 1, pages_used: 1, pages_total: 100 } }),
        commands: commandsOf(many("D", "decode", 2), "http://127.0.0.1:21003").map(([, command]) => command),
    };
}"""


def test_layout_labels_and_choices_of_a_cluster(open_fleet: Any) -> None:
    found = open_fleet(FakeFleet(1, 1)).page.evaluate(PURE)
    assert found == {
        "grids": [False, False, False, True, True, True],
        "outside": [],
        "wires": ["P1-D2"],
        "choices": ["D2 D1 D3", "D2 D1 D3", "D4 D2 D1", "D0 D4 D2"],
        "sums": [
            ["2 transfers"],
            ["2 transfers · 3.00 MiB"],
            ["3 transfers · over 2.00 MiB"],
            ["2 transfers", "3.00 MiB"],
        ],
        "heats": [0, 1, 2, 2, 3, 3, 4, 4],
        "waits": 4,
        "commands": [
            *("chitu chat", "chitu join decode", "chitu drain D1", "chitu role D1 prefill"),
            "chitu verify",
        ],
    }


@pytest.mark.parametrize("size", [10, 60])
def test_e_have_their_places_beside_p(open_fleet: Any, size: int) -> None:
    fleet = FakeFleet(*SIZES[size])
    for rank in range(2):
        fleet.join(f"E{rank}")
    page = open_fleet(fleet)
    found = boxes(page, "#topology [data-instance]")
    assert {"E0", "E1"} <= found.keys()
    assert max(found[name]["x"] for name in ("E0", "E1", "P0")) < min(found[name]["x"] for name in ("D0", "D1"))
    expect(page.page.locator("#topology")).to_contain_text("Prefill, encode")


def test_the_card_of_an_e_says_what_waits_how_fast_it_is_and_how_many_images_it_knew(open_fleet: Any) -> None:
    fleet = FakeFleet(1, 1)
    fleet.join("E0")
    seen = {"image_rows": 16384, "image_rows_used": 4096, "images": 30}
    seen["image_load"] = {"waiting_rows": 2040, "row_s": 0.0004, "hits": 10}
    fleet.instances["E0"]["load"] |= seen
    card = open_fleet(fleet).page.locator("#topology [data-instance=E0]")
    for words in ("2040 rows wait · 25 % of images known", "rows/s", "4096 / 16.4k"):
        expect(card).to_contain_text(words)
    described = card.get_attribute("aria-label")
    assert described is not None
    for words in ("2500 image rows a second, 2040 wait", "10 images known", "30 images"):
        assert words in described, described
