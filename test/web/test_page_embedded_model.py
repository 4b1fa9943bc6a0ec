"""The page of `chitu serve` with its defaults: the embedded model on 1P1D, with its examples, here behind an API
key."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import pytest
from chat_page import ChatPage
from conftest import OpenPage
from nursery import FORKED
from playwright.sync_api import Route, expect

from chitu.assets import TINY_MODEL_DIR
from chitu.assets.tiny_tasks import facts_for, recall
from chitu.config.cluster_key import with_api_keys
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster

KEY = "sk-test-of-the-page"


@pytest.fixture(scope="module")
def locked_cluster(a_browser_starts: None) -> Iterator[LocalCluster]:
    settings = [f"model.path={TINY_MODEL_DIR}", "cache.num_pages=1000", "log.level=WARNING"]
    topology = with_api_keys(load_topology("pd_disagg_1p1d_local.yaml", settings), (KEY,))
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def with_known_examples(page: ChatPage) -> None:
    """Have the page show examples that the model answers rightly: of those that the router draws, it does not know one
    in 500."""
    seeds = itertools.count()

    def known(route: Route) -> None:
        example = recall(random.Random(next(seeds)), facts_for(300))
        route.fulfill(json={"prompt": example.prompt, "answer": example.answer, "value": example.value})

    page.page.route("**/demo/example*", known)


@pytest.fixture
def tiny(open_page: OpenPage, locked_cluster: LocalCluster) -> ChatPage:
    """Return the page, live, with the key filled in."""
    page = open_page(locked_cluster.url)
    page.open()
    page.expect_connection("unauthorized")
    page.set(api_key=KEY)
    page.expect_connection("live")
    with_known_examples(page)
    return page


def test_without_a_key_the_page_says_so_and_with_it_it_works(open_page: OpenPage, locked_cluster: LocalCluster) -> None:
    page = open_page(locked_cluster.url)
    page.open()
    page.expect_connection("unauthorized")
    expect(page.page.locator("#topology [data-instance]")).to_have_count(0)
    page.set(max_tokens=4)
    page.submit("may I?")
    expect(page.answer).to_have_attribute("data-error", "invalid_api_key")

    page.set(api_key="sk-wrong")
    page.expect_connection("unauthorized")
    page.set(api_key=KEY)
    page.expect_connection("live")
    expect(page.instance("P0")).to_have_attribute("data-status", "up")
    page.send("may I?")
    page.expect_done()
    assert page.answer.get_attribute("data-error") is None
    expect(page.answer.locator(".trace")).to_contain_text("P0 → D0")
    assert KEY not in page.page.url


def test_an_example_is_answered_rightly_and_ticked(tiny: ChatPage) -> None:
    tiny.press("example")
    expect(tiny.prompt).to_have_value(re.compile(r"(The .+\d{4}\.\s+){10,}.*\?", re.DOTALL))
    tiny.response_to(tiny.send_button.click)
    tiny.expect_done()
    expect(tiny.answer).to_have_attribute("data-correct", "true")
    expect(tiny.answer).to_contain_text("✓")
    expect(tiny.answer.locator(".text")).to_contain_text(re.compile(r"\b\d{4}\b"))


def test_an_answer_without_the_expected_value_gets_a_cross_and_the_value(tiny: ChatPage) -> None:
    """The model is right, so the expectation is changed to a wrong one on its way to the browser."""

    def with_another_value(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "value": "0000"})

    tiny.page.route("**/demo/example*", with_another_value)
    tiny.press("example")
    expect(tiny.prompt).not_to_have_value("")
    tiny.response_to(tiny.send_button.click)
    tiny.expect_done()
    expect(tiny.answer).to_have_attribute("data-correct", "false")
    expect(tiny.answer).to_contain_text("✗")
    expect(tiny.answer).to_contain_text("0000")


def test_an_edited_example_is_an_ordinary_question(tiny: ChatPage) -> None:
    tiny.press("example")
    expect(tiny.prompt).not_to_have_value("")
    tiny.send("How are you?")
    tiny.expect_done()
    assert tiny.answer.get_attribute("data-correct") is None


def test_below_an_answer_stands_what_was_cached_computed_and_moved(tiny: ChatPage) -> None:
    """The second prompt begins like the first: P and D have those pages, so fewer are moved."""
    shown = []
    for _ in range(2):
        tiny.send("Seven grey geese flew over the long lake at noon, and nobody had seen them since. " * 4)
        tiny.expect_done()
        article = tiny.messages.locator("article").last
        expect(article).to_contain_text(re.compile(r"prompt \d+ tokens.*KV [\d.]+ [KM]iB.*total"))
        shown.append(article.inner_text().replace("\n", " "))
    assert "cached" not in shown[0], shown
    match = re.search(r"prompt (\d+) tokens, (\d+) cached", shown[1])
    assert match is not None and 0 < int(match[2]) < int(match[1]) and int(match[2]) % 16 == 0, shown


def test_several_examples_at_once_are_all_right(tiny: ChatPage) -> None:
    tiny.press("burst")
    expect(tiny.messages.locator("[data-right]")).to_have_attribute("data-right", "5")


def test_a_phone_shows_the_numbers_of_several_answers_whole(open_page: OpenPage, locked_cluster: LocalCluster) -> None:
    page = open_page(locked_cluster.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.open()
    page.set(api_key=KEY)
    page.expect_connection("live")
    with_known_examples(page)
    page.press("burst")
    expect(page.messages.locator("[data-right]")).to_have_attribute("data-right", "5")
    cut = "(cells) => cells.filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"
    assert page.messages.locator(".burst .answer").evaluate_all(cut) == []
