"""Pages that outlive their instance, in real processes: two Ps, one D, a disk and a Mooncake Store over TCP.

The instances have the checksum engine: every token depends on every byte of KV in the pages.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from completions import complete_all, instance_loads, is_whole
from mooncake_store import Store, mooncake_store
from nursery import forked
from support.checksum_scheduler import ENTRIES, MODEL_HASH, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu import __version__
from chitu.config.load import load_topology
from chitu.fake.checksum import checksum_layout
from chitu.fake.executor import expected_tokens
from chitu.kv_cache.prefix_index import PageKeys, lasting_fingerprint, layout_fingerprint
from chitu.launch.local import LocalCluster
from chitu.protocol import pack_i32

PD = "dp_config.router.pd_disaggregation"
ROUTER = "dp_config.router"
VOCAB_SIZE = 1280
PAGE_SIZE = 16
PROMPT_TOKENS = 20 * PAGE_SIZE + 1
PAGES = 20
ANSWER_TOKENS = 40
TIERS = ("disk", "store")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with mooncake_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def cluster(store: Store, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    # Slow enough that pages are read however busy the machine is: only pages that are cheaper than computing are read.
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "model", EngineConfig(0.0, 0.002))
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "model.max_model_len=1024",
        "cache.num_pages=256",
        "cache.host_bytes=20000000",
        f"cache.disk.path={disk}",
        f"cache.store.master={store.address}",
        f"cache.load_timeout_s={PATIENCE_S}",
        f"{ROUTER}.policy=round_robin",
        f"{ROUTER}.prefill_schedulers=[{{}},{{}}]",
        f"{PD}.transport=shm",
        f"{PD}.deadlines.heartbeat_interval_s=0.2",
        f"{PD}.deadlines.transfer_s=120",
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        yield cluster


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]


def ask(cluster: LocalCluster, prompt: list[int], max_tokens: int = 4) -> int:
    """Check the answer to a prompt; return the number of its tokens that P did not compute."""
    (answer,) = complete_all(cluster.url, [prompt], [{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}])
    assert answer.token_ids == expected_tokens(prompt, max_tokens, VOCAB_SIZE)
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


def keys_of(tokens: list[int]) -> list[bytes]:
    """Return the keys of the tokens' full pages."""
    layout = layout_fingerprint(checksum_layout(PAGE_SIZE, VOCAB_SIZE, model_hash=MODEL_HASH))
    fingerprint = lasting_fingerprint(layout, b"", __version__, ("auto", 1024))
    return PageKeys.of(fingerprint, PAGE_SIZE).upto(len(tokens) // PAGE_SIZE, pack_i32(tokens))


def files_of(disk: Path, tokens: list[int]) -> list[Path]:
    """Return the files of the tokens' full pages, in all folders."""
    names = {f"{key.hex()}.kv" for key in keys_of(tokens)}
    return [path for path in disk.glob("*/*.kv") if path.name in names]


def wait_for_files(disk: Path, tokens: list[int]) -> None:
    """Wait until each full page of the tokens is on disk."""
    wanted = len(tokens) // PAGE_SIZE

    def found() -> set[str]:
        return {path.name for path in files_of(disk, tokens)}

    wait_until(lambda: len(found()) == wanted, PATIENCE_S, lambda: f"{len(found())} of {wanted} pages")


def wait_for_store(store: Store, tokens: list[int]) -> None:
    """Wait until each full page of the tokens can be read from the store, which counts a key before its page is
    there."""
    names = [f"chitu-kv-{key.hex()}" for key in keys_of(tokens)]
    with store.client() as client:
        wait_until(lambda: set(client.batch_is_exist(names)) == {1}, PATIENCE_S, lambda: client.batch_is_exist(names))


def seen(cluster: LocalCluster) -> str:
    """Return loads and logs, to explain a failure."""
    loads = "\n".join(f"{name}: {load}" for name, load in instance_loads(cluster.url).items())
    return "\n".join([loads, *(cluster.logs(name)[-2000:] for name in ("P0", "P1", "D0"))])


def tokens_of(cluster: LocalCluster, tier: str) -> dict[str, int]:
    loads = instance_loads(cluster.url)
    return {name: loads[name][f"{tier}_tokens"] for name in ("P0", "P1") if name in loads}


def test_pages_outlive_their_instance_and_serve_another(cluster: LocalCluster, store: Store, disk: Path) -> None:
    prompt = prompt_of(1)
    assert ask(cluster, prompt) == 0
    wait_for_store(store, prompt)
    wait_for_files(disk, prompt)
    for path in files_of(disk, prompt):  # as if each P had its own machine
        path.unlink()

    def served_by(tier: str, names: tuple[str, ...]) -> bool:
        """Ask again and return whether all pages came from the tier; otherwise the P had them itself."""
        assert ask(cluster, prompt) == PAGES * PAGE_SIZE, seen(cluster)
        tokens = tokens_of(cluster, tier)
        return sum(tokens.get(name, 0) for name in names) == PAGES * PAGE_SIZE

    wait_until(
        lambda: served_by("store", ("P0", "P1")),
        PATIENCE_S,
        lambda: (instance_loads(cluster.url), cluster.logs("P0")[-2000:], cluster.logs("P1")[-2000:]),
    )
    prompt = prompt_of(3)
    assert ask(cluster, prompt) == 0
    wait_for_files(disk, prompt)
    (first,) = {path.parent.name for path in files_of(disk, prompt)}
    cluster.kill(first)
    cluster.wait_exit(first)
    cluster.restart(first)
    cluster.wait_ready()
    wait_until(
        lambda: served_by("disk", (first,)),
        PATIENCE_S,
        lambda: (instance_loads(cluster.url), cluster.logs(first)[-2000:]),
    )
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=5.0, trust_env=False).text
    line = f'chitu_instance_tier_tokens_total{{instance="{first}",role="prefill",tier="disk"}} {PAGES * PAGE_SIZE}.0'
    assert line in metrics, [text for text in metrics.splitlines() if "tier_tokens" in text]


def test_flipped_bytes_on_disk_and_in_the_store_are_misses(cluster: LocalCluster, store: Store, disk: Path) -> None:
    """The eleventh page has a flipped byte in both places. Either P computes from there on, and the tokens are
    right."""
    prompt = prompt_of(2)
    keys = keys_of(prompt)
    assert ask(cluster, prompt) == 0
    wait_for_store(store, prompt)
    wait_for_files(disk, prompt)
    with store.client() as client:
        name = f"chitu-kv-{keys[10].hex()}"
        record = bytearray(client.get(name))
        record[100] ^= 0xFF
        assert client.remove(name, True) == 0 and client.put(name, record) == 0
    for path in disk.glob(f"*/{keys[10].hex()}.kv"):
        content = bytearray(path.read_bytes())
        content[100] ^= 0xFF
        path.write_bytes(content)
    for name in ("P0", "P1"):  # to empty pool and host memory
        cluster.kill(name)
        cluster.wait_exit(name)
        cluster.restart(name)
    cluster.wait_ready()
    assert ask(cluster, prompt) == 10 * PAGE_SIZE
    wait_until(
        lambda: any(load["bad_pages"] for load in instance_loads(cluster.url).values()),
        PATIENCE_S,
        lambda: instance_loads(cluster.url),
    )


def test_a_turn_computes_what_is_new_and_answers_come_back_from_d(
    cluster: LocalCluster, store: Store, disk: Path
) -> None:
    """Whichever P is asked, pages come from disk, from the store alone, and after a kill of a P and of the D that wrote
    them."""
    prompt, known = prompt_of(9), 0

    def has_served(tier: str, before: int) -> bool:
        return tier not in TIERS or sum(tokens_of(cluster, tier).values()) > before

    for source in ("", "disk", "store", "killed"):
        before = sum(tokens_of(cluster, source).values()) if source in TIERS else 0
        assert ask(cluster, prompt, ANSWER_TOKENS) == known // PAGE_SIZE * PAGE_SIZE, f"{source}: {seen(cluster)}"
        tokens = prompt + expected_tokens(prompt, ANSWER_TOKENS, VOCAB_SIZE)
        known = len(tokens) - 1  # the newest token has no K and V yet
        wait_for_store(store, tokens[:known])
        wait_until(partial(has_served, source, before), PATIENCE_S, lambda: instance_loads(cluster.url))
        if not source:
            wait_for_files(disk, tokens[:known])
        elif source == "disk":
            for path in disk.glob("*/*.kv"):
                path.unlink()
        elif source == "store":
            for name in ("P0", "D0"):
                cluster.kill(name)
                cluster.wait_exit(name)
                cluster.restart(name)
            cluster.wait_ready()
        prompt = tokens + [7] * 30


def test_a_store_that_hangs_or_is_lost_costs_its_deadline_and_no_request(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs last, because it ends the store: first the master is frozen, then killed."""
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "model", EngineConfig(0.0, 0.0005))
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "model.max_model_len=1024",
        "cache.num_pages=256",
        "cache.host_bytes=20000000",
        f"cache.store.master={store.address}",
        "cache.load_timeout_s=5",
        f"{PD}.transport=shm",
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        num_keys, seeds = store.num_keys(), itertools.count(100)

        def keeps_pages() -> bool:
            return ask(cluster, prompt_of(next(seeds))) == 0 and store.num_keys() > num_keys

        wait_until(keeps_pages, PATIENCE_S, lambda: cluster.logs("P0")[-2000:])
        store.master.send_signal(signal.SIGSTOP)
        for seed in (4, 5, 6):
            assert ask(cluster, prompt_of(seed), ANSWER_TOKENS) == 0
            assert ask(cluster, prompt_of(seed), ANSWER_TOKENS) == PAGES * PAGE_SIZE
            if seed == 4:  # D starts without the store
                cluster.kill("D0")
                cluster.wait_exit("D0")
                cluster.restart("D0")
                cluster.wait_ready()
        store.master.kill()
        store.master.wait()
        for seed in (7, 8):
            assert ask(cluster, prompt_of(seed), ANSWER_TOKENS) == 0
            assert ask(cluster, prompt_of(seed), ANSWER_TOKENS) == PAGES * PAGE_SIZE

        def logs() -> list[str]:
            return [cluster.logs(name)[-4000:] for name in ("P0", "D0")]

        def rests() -> bool:
            return all(map(is_whole, instance_loads(cluster.url).values()))

        wait_until(lambda: all("does not use store" in text for text in logs()), PATIENCE_S, logs)
        wait_until(rests, 15.0, lambda: instance_loads(cluster.url))
        for name in ("P0", "D0"):
            cluster.kill(name, signal.SIGTERM)  # a thread inside a store call must not delay the shutdown
            cluster.wait_exit(name, 30.0)
