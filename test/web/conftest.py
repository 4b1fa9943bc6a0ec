"""A 2P3D cluster and a browser per module of tests of the web page, a fresh context per page.

Neither is per session: while playwright runs, its event loop owns the main thread, and other tests need `asyncio.run`
there; and six processes would run beside all tests that come later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_page import PATIENCE_MS, ChatPage
from headless import NoBrowser, headless_browser
from nursery import FORKED
from playwright.sync_api import Browser, expect

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

OpenPage = Callable[..., ChatPage]

PD = "dp_config.router.pd_disaggregation"
LOCAL_PORTS = [
    *(f"dp_config.router.{name}=0" for name in ("stats_port", "token_port")),
    *(f"{PD}.{name}=0" for name in ("coordination_port", "metadata_sync_port", "bootstrap_port")),
    *(f"dp_config.router.prefill_schedulers.{rank}.port=0" for rank in range(2)),
    *(f"dp_config.router.decode_schedulers.{rank}.port=0" for rank in range(3)),
]
"""Settings that let every port be any free one, so that parallel runs do not collide."""


@pytest.fixture(scope="session")
def a_browser_starts() -> None:
    """Skip the tests if no browser starts. In CI that is a failure: a run that skips everything proves nothing.

    Cluster fixtures request this too: without a browser no test waits for a cluster to start.
    """
    try:
        with headless_browser():
            pass
    except NoBrowser as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def browser(a_browser_starts: None) -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with headless_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model. It hardly ever ends an answer by itself, so a test decides how long an answer gets."""
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3")


@pytest.fixture(scope="module")
def cluster(a_browser_starts: None, random_model: Path) -> Iterator[LocalCluster]:
    """Yield a 2P3D cluster on this machine. Dead processes restart in `cluster.poll()`, so a test sees the time in
    between."""
    settings = [f"model.path={random_model}", "model.served_name=random", "cache.num_pages=1000"]
    topology = load_topology("pd_disagg_2p3d_multi_node.yaml", [*settings, "log.level=WARNING", *LOCAL_PORTS])
    with LocalCluster(topology, restart=True, entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Yield `open_page(url, color_scheme="dark")`, which opens the page in a new context. At the end no page may have
    had a problem."""
    pages: list[ChatPage] = []

    def open_one(url: str, **options: Any) -> ChatPage:
        page = ChatPage(browser.new_context(**options), url)
        pages.append(page)
        return page

    yield open_one
    for page in pages:
        page.context.close()
    assert [problem for page in pages for problem in page.problems] == []


@pytest.fixture
def chat(open_page: OpenPage, cluster: LocalCluster) -> ChatPage:
    """Return the page, live."""
    page = open_page(cluster.url)
    page.open_live()
    return page
