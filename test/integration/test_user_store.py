"""The store of examples/page_store.py behind a real cluster: pages outlive it; and a store that never answers."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from completions import complete_all
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples"
VOCAB_SIZE = 1280
NUM_PAGES = 20
PROMPT = random.Random(7).sample(range(16, VOCAB_SIZE), NUM_PAGES * 16 + 1)


class SilentStore:
    """Made in the instances: it never answers."""

    def __init__(self, options: dict[str, object]) -> None: ...

    def store_put(self, keys: object, records: object) -> None: ...

    def store_get(self, keys: object, records: object) -> int:
        while True:
            time.sleep(60)


@contextmanager
def cluster_with(model: Path, *store: str) -> Iterator[LocalCluster]:
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "model.max_model_len=1024",
        "cache.num_pages=256",
        "cache.host_bytes=20000000",
        *(f"cache.store.{each}" for each in store),
        "dp_config.router.pd_disaggregation.transport=shm",
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        yield cluster


def ask(cluster: LocalCluster) -> int:
    """Check the answer; return the number of tokens of the prompt that P did not compute."""
    (answer,) = complete_all(cluster.url, [PROMPT], [{"max_tokens": 4, "temperature": 0, "ignore_eos": True}])
    assert answer.token_ids == expected_tokens(PROMPT, 4, VOCAB_SIZE)
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    # So slow that pages are read however busy the machine is.
    return make_checksum_model(tmp_path / "model", EngineConfig(0.0, 0.002))


def test_pages_in_a_store_of_ones_own_outlive_the_cluster(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    file = tmp_path / "pages.sqlite"
    store = ("plugin=page_store:SQLitePages", f"options={{file: {file}}}")
    with cluster_with(model, *store) as cluster:
        assert ask(cluster) == 0
        with sqlite3.connect(file) as pages:
            count = "SELECT count(*) FROM page"
            wait_until(lambda: pages.execute(count).fetchone()[0] >= NUM_PAGES, 60, "the pages in the file")
        pages.close()
    with cluster_with(model, *store) as cluster:
        assert ask(cluster) == NUM_PAGES * 16


def test_a_store_that_never_answers_costs_one_wait(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with cluster_with(model, f"plugin={__name__}:SilentStore") as cluster:
        assert ask(cluster) == 0
        began_s = time.monotonic()
        assert ask(cluster) == NUM_PAGES * 16, "of the pool"
        assert time.monotonic() - began_s < 30
