"""The timeline of a traced request as the page draws it."""

from __future__ import annotations

import json
import urllib.request

from conftest import OpenPage
from playwright.sync_api import expect

from chitu.launch.local import LocalCluster

TOKENS = 12


def ask(cluster: LocalCluster, name: str) -> dict[str, str]:
    body = {"prompt": "one two three four", "max_tokens": TOKENS, "ignore_eos": True, "return_proof": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": name, "X-Chitu-Trace": "1"}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        proof = json.loads(reply.read())["chitu"]
    return {"P": proof["prefill"][0], "D": proof["decode"][0]}


def test_a_traced_request_is_drawn_and_one_that_is_not_is_said(open_page: OpenPage, cluster: LocalCluster) -> None:
    name = "drawn & <b>odd</b>".replace(" ", "_")
    pair = ask(cluster, name)
    shown = open_page(cluster.url)
    shown.open_live()
    page = shown.page
    expect(page.locator("#life")).to_be_hidden()
    page.locator(f'#requests a.id[title="{name}"]').click()
    for where, what in ((pair["P"], "compute"), (pair["D"], "KV comes"), (pair["D"], "tokens"), ("router", "prepare")):
        expect(page.locator(f'#timeline g[data-where="{where}"][data-what="{what}"]')).to_have_count(1)
    expect(page.locator("#timeline .token")).to_have_count(TOKENS)
    expect(page.locator("#timeline")).to_contain_text("finished, 12 tokens")
    expect(page.locator("#life-title")).to_contain_text(name)
    expect(page.locator("#life-notes")).to_contain_text("same on both sides")
    page.locator("#life-close").click()
    expect(page.locator("#life")).to_be_hidden()
    page.goto(f"{cluster.url}/#trace=nobody")
    expect(page.locator("#life-notes")).to_contain_text("there are no trace records of request 'nobody'")
    shown.failed_loads.clear()
