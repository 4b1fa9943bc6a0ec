"""Talking to the cluster through the page: streaming, stopping, errors, and that text stays text."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from chat_page import ChatPage
from conftest import OpenPage
from playwright.sync_api import Route, expect
from support.router_process import wait_until

from chitu.launch.local import LocalCluster

PAIR = r"P\d → D\d"
MARKUP = '<img src="x" onerror="document.title = \'broken\'"><b>bold</b> & <script>document.title = "broken"</script>'


def cluster_snapshot(cluster: LocalCluster) -> dict[str, Any]:
    snapshot: dict[str, Any] = httpx.get(f"{cluster.url}/cluster", timeout=10.0, trust_env=False).json()
    return snapshot


def test_the_page_loads_whole_and_live(open_page: OpenPage, cluster: LocalCluster) -> None:
    page = open_page(cluster.url)
    policies: dict[str, str] = {}
    page.page.on("response", lambda r: policies.update({r.url: r.headers.get("content-security-policy", "")}))
    page.open_live()
    assert page.failed_loads == []
    assert "default-src 'self'" in policies[cluster.url + "/"]
    assert "unsafe" not in policies[cluster.url + "/"]
    expect(page.page.locator("#topology [data-instance]")).to_have_count(5)
    assert sorted(page.names("#topology [data-instance]", "data-instance")) == ["D0", "D1", "D2", "P0", "P1"]
    assert set(page.names("#topology [data-instance]", "data-status")) == {"up"}
    expect(page.page.locator("body")).to_contain_text("random")
    expect(page.page.locator("#example")).to_be_hidden()  # the served model has no such examples


def test_an_answer_grows_before_the_eyes_and_its_trace_says_what_the_router_measured(
    chat: ChatPage, cluster: LocalCluster
) -> None:
    chat.set(max_tokens=300)
    chat.record_growth()
    response = chat.send("one two three " * 60)
    chat.expect_done()
    lengths = chat.growth()
    assert lengths == sorted(lengths), "text was taken back"
    assert len(lengths) >= 10, f"the text was seen at {len(lengths)} lengths only: {lengths}"
    expect(chat.messages.locator('article[data-role="user"]').last).to_contain_text("one two three")
    text = chat.answer.locator(".text").inner_text()
    assert len(text) > 100

    request_id = response.headers["x-request-id"]
    record = next(r for r in cluster_snapshot(cluster)["requests"] if r["request_id"] == request_id)
    expect(chat.answer.locator(".trace")).to_contain_text(f"{record['prefill']} → {record['decode']}")
    expect(chat.answer.locator(".trace")).to_contain_text(str(record["prompt_tokens"]))
    expect(chat.answer.locator(".trace")).to_contain_text(re.compile(r"\d [KM]iB"))
    row = chat.row(request_id)
    expect(row).to_have_attribute("data-state", "finished")
    expect(row).to_have_attribute("data-room", record["room"])
    expect(row).to_contain_text(re.compile(PAIR))
    expect(row).to_contain_text(str(record["prompt_tokens"]))
    expect(row).to_contain_text(str(record["output_tokens"]))
    assert record["output_tokens"] == 300
    assert record["kv_bytes"] > 0


def test_enter_sends_and_shift_enter_makes_a_line(chat: ChatPage) -> None:
    chat.set(max_tokens=5)
    chat.prompt.click()
    chat.page.keyboard.type("first")
    chat.page.keyboard.press("Shift+Enter")
    chat.page.keyboard.type("second")
    assert chat.prompt.input_value() == "first\nsecond"
    expect(chat.messages.locator("article")).to_have_count(0)
    chat.response_to(lambda: chat.page.keyboard.press("Enter"))
    chat.expect_done()
    assert chat.prompt.input_value() == ""
    expect(chat.messages.locator('article[data-role="user"] .text')).to_have_text("first\nsecond")


def test_a_conversation_is_sent_whole_until_it_is_cleared(chat: ChatPage) -> None:
    chat.set(max_tokens=4)
    assert [message["content"] for message in chat.body_of("red")["messages"]] == ["red"]
    messages = chat.body_of("green")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [message["content"] for message in messages][::2] == ["red", "green"]
    chat.page.locator("#clear").click()
    expect(chat.messages.locator("article")).to_have_count(0)
    assert [message["content"] for message in chat.body_of("blue")["messages"]] == ["blue"]


def test_completion_mode_sends_the_text_as_it_is(chat: ChatPage) -> None:
    chat.use_mode("completion")
    chat.set(max_tokens=6, temperature=0.5)
    body = chat.body_of("The list begins")
    assert body["prompt"] == "The list begins"
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (6, 0.5, True)
    expect(chat.answer.locator(".trace")).to_contain_text(re.compile(PAIR))


def test_stop_ends_a_long_answer_here_and_in_the_cluster(chat: ChatPage, cluster: LocalCluster) -> None:
    expect(chat.stop_button).to_be_disabled()
    chat.set(max_tokens=3500)
    response = chat.send("tell me everything")
    expect(chat.answer.locator(".text")).not_to_be_empty()
    expect(chat.stop_button).to_be_enabled()
    chat.stop_button.click()
    expect(chat.answer).to_have_attribute("data-stopped", "true")
    expect(chat.stop_button).to_be_disabled()
    expect(chat.streaming).to_have_count(0)
    expect(chat.answer.locator(".text")).not_to_be_empty()
    expect(chat.row(response.headers["x-request-id"])).to_have_attribute("data-state", "cancelled")

    def busy() -> list[str]:
        snapshot = cluster_snapshot(cluster)
        work = ("waiting", "transferring", "running")
        return ["router"] * snapshot["in_flight"] + [
            instance["name"] for instance in snapshot["instances"] if any(instance["load"][key] for key in work)
        ]

    wait_until(lambda: not busy(), 10.0, busy)
    chat.set(max_tokens=3)
    chat.send("and now")
    chat.expect_done()
    assert chat.answer.get_attribute("data-stopped") is None


def test_an_error_is_shown_with_its_code_and_the_next_request_works(chat: ChatPage) -> None:
    chat.use_mode("completion")
    chat.submit("far too long " * 3000)
    expect(chat.answer).to_have_attribute("data-error", "context_length_exceeded")
    expect(chat.answer).to_contain_text("context_length_exceeded")
    expect(chat.answer).to_contain_text("4096")
    expect(chat.stop_button).to_be_disabled()
    assert len(chat.failed_loads) == 1
    chat.set(max_tokens=3)
    chat.send("short")
    chat.expect_done()
    assert chat.answer.get_attribute("data-error") is None
    expect(chat.answer.locator(".trace")).to_contain_text(re.compile(PAIR))


def test_markup_of_the_user_and_of_a_model_is_shown_as_text(chat: ChatPage) -> None:
    """The random model writes no markup, so its answer is replaced on the way to the browser."""

    def hostile(route: Route) -> None:
        choice = '{"index": 0, "delta": {"content": %s}, "finish_reason": null}'
        escaped = json.dumps(MARKUP)
        events = (
            'data: {"id": "x", "object": "chat.completion.chunk", "choices": [' + choice % escaped + "]}\n\n"
            'data: {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
            "data: [DONE]\n\n"
        )
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=events)

    title = chat.page.title()
    chat.page.route("**/v1/chat/completions", hostile)
    chat.send(MARKUP)
    chat.expect_done()
    expect(chat.answer.locator(".text")).to_have_text(MARKUP)
    expect(chat.messages.locator('article[data-role="user"] .text')).to_have_text(MARKUP)
    for tag in ("img", "b", "script"):
        expect(chat.messages.locator(f".text {tag}")).to_have_count(0)
    assert chat.page.title() == title
