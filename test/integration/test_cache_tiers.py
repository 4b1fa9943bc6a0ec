"""Pages that outlive their instance, in real processes: two P, one D, a disk and a Mooncake Store over TCP.

The instances have the checksum engine: every token depends on every byte of KV in the pages.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from completions import complete_all, instance_loads, is_whole, wait_until

from chitu import __version__
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.testing.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from chitu.testing.fake_executor import expected_tokens

PD = "dp_config.router.pd_disaggregation"
ROUTER = "dp_config.router"
VOCAB_SIZE = 1280
PAGE_SIZE = 16
PROMPT_TOKENS = 20 * PAGE_SIZE + 1
PAGES = 20
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Store:
    """A `mooncake_master` and a client that has the memory."""

    master: subprocess.Popen[bytes]
    memory: subprocess.Popen[bytes]
    address: str
    metrics_url: str

    def num_keys(self) -> int:
        text = httpx.get(self.metrics_url, timeout=5.0, trust_env=False).text
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("master_key_count ")))


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    try:
        import mooncake.store  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"mooncake does not import here: {error}")
    folder, bin_folder = tmp_path_factory.mktemp("store"), Path(sys.executable).parent
    master_port, metrics_port = free_port(), free_port()
    address = f"127.0.0.1:{master_port}"
    master = [
        str(bin_folder / "mooncake_master"),
        *("--rpc_address=127.0.0.1", f"--rpc_port={master_port}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}", "--default_kv_lease_ttl=60000"),
    ]
    memory = [
        str(bin_folder / "mooncake_client"),
        *(f"--master_server_address={address}", "--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1"),
        *(f"--port={free_port()}", "--protocol=tcp", "--global_segment_size=64 MB"),
    ]
    with running(master, folder, "master") as master_process:
        url = f"http://127.0.0.1:{metrics_port}/metrics"

        def answers(line: str) -> bool:
            try:
                return line in httpx.get(url, timeout=5.0, trust_env=False).text
            except httpx.HTTPError:
                return False

        def logs() -> str:
            return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))

        wait_until(lambda: answers("master_key_count 0"), PATIENCE_S, logs)
        with running(memory, folder, "memory") as memory_process:
            wait_until(lambda: answers("master_mount_segment_requests_total 1"), PATIENCE_S, logs)
            yield Store(master_process, memory_process, address, url)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def cluster(store: Store, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "model", EngineConfig(0.0, 0.0005))
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
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=ENTRIES) as cluster:
        cluster.wait_ready()
        yield cluster


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]


def ask(cluster: LocalCluster, prompt: list[int]) -> int:
    """Tokens of the prompt that P did not compute; the answer is right."""
    (answer,) = complete_all(cluster.url, [prompt], [{"max_tokens": 4, "temperature": 0, "ignore_eos": True}])
    assert answer.token_ids == expected_tokens(prompt, 4, VOCAB_SIZE)
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


def tokens_of(cluster: LocalCluster, tier: str) -> dict[str, int]:
    loads = instance_loads(cluster.url)
    return {name: loads[name][f"{tier}_tokens"] for name in ("P0", "P1") if name in loads}


def test_pages_outlive_their_instance_and_serve_another(cluster: LocalCluster, store: Store, disk: Path) -> None:
    prompt = prompt_of(1)
    num_keys = store.num_keys()
    assert ask(cluster, prompt) == 0
    wait_until(lambda: store.num_keys() >= num_keys + PAGES, PATIENCE_S, store.num_keys)

    def served_by(tier: str, names: tuple[str, ...]) -> bool:
        """Whichever P is asked: it has the pages itself, or the tier has."""
        assert ask(cluster, prompt) == PAGES * PAGE_SIZE
        tokens = tokens_of(cluster, tier)
        return sum(tokens.get(name, 0) for name in names) == PAGES * PAGE_SIZE

    wait_until(
        lambda: served_by("store", ("P0", "P1")),
        PATIENCE_S,
        lambda: (instance_loads(cluster.url), cluster.logs("P0")[-2000:], cluster.logs("P1")[-2000:]),
    )
    (first,) = [name for name, tokens in tokens_of(cluster, "store").items() if not tokens]
    wait_until(lambda: len(list((disk / first).glob("*.kv"))) >= PAGES, PATIENCE_S, lambda: os.listdir(disk / first))
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
    """A byte of the eleventh page each, of whichever P: it is computed from there on, and the tokens are right."""
    from mooncake.store import MooncakeDistributedStore

    from chitu.kv_cache.page_keys import PageKeys, lasting_fingerprint, layout_fingerprint
    from chitu.protocol import pack_i32
    from chitu.testing.checksum_engine import checksum_layout

    prompt = prompt_of(2)
    layout = layout_fingerprint(checksum_layout(PAGE_SIZE, VOCAB_SIZE))
    fingerprint = lasting_fingerprint(layout, b"", __version__, ("auto", 1024))
    keys = PageKeys.of(fingerprint, PAGE_SIZE).upto(PAGES, pack_i32(prompt))
    num_keys = store.num_keys()
    assert ask(cluster, prompt) == 0
    wait_until(lambda: store.num_keys() >= num_keys + PAGES, PATIENCE_S, store.num_keys)
    wait_until(lambda: list(disk.glob(f"*/{keys[-1].hex()}.kv")) != [], PATIENCE_S, lambda: os.listdir(disk))
    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", store.address) == 0
    name = f"chitu-kv-{keys[10].hex()}"
    record = bytearray(client.get(name))
    record[100] ^= 0xFF
    assert client.remove(name, True) == 0 and client.put(name, record) == 0
    client.close()
    for path in disk.glob(f"*/{keys[10].hex()}.kv"):
        content = bytearray(path.read_bytes())
        content[100] ^= 0xFF
        path.write_bytes(content)
    for name in ("P0", "P1"):  # pool and host memory are empty then
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


def test_a_store_that_hangs_or_is_lost_costs_its_deadline_and_no_request(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Last, as it ends the store: a frozen master, then a dead one."""
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "model", EngineConfig(0.0, 0.0005))
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "model.max_model_len=1024",
        "cache.num_pages=256",
        "cache.host_bytes=20000000",
        f"cache.store.master={store.address}",
        "cache.load_timeout_s=5",
    ]
    with LocalCluster(load_topology("unified_local", settings), entries=ENTRIES) as cluster:
        cluster.wait_ready()
        num_keys, seeds = store.num_keys(), itertools.count(100)

        def keeps_pages() -> bool:
            return ask(cluster, prompt_of(next(seeds))) == 0 and store.num_keys() > num_keys

        wait_until(keeps_pages, PATIENCE_S, lambda: cluster.logs("U0")[-2000:])
        store.master.send_signal(signal.SIGSTOP)
        try:
            for seed in (4, 5, 6):
                assert ask(cluster, prompt_of(seed)) == 0
                assert ask(cluster, prompt_of(seed)) == PAGES * PAGE_SIZE
        finally:
            store.master.send_signal(signal.SIGCONT)
        store.master.kill()
        store.master.wait()
        for seed in (7, 8):
            assert ask(cluster, prompt_of(seed)) == 0
            assert ask(cluster, prompt_of(seed)) == PAGES * PAGE_SIZE
        wait_until(lambda: "goes without store" in cluster.logs("U0"), PATIENCE_S, lambda: cluster.logs("U0")[-2000:])
        wait_until(lambda: is_whole(instance_loads(cluster.url)["U0"]), 15.0, lambda: instance_loads(cluster.url))
        cluster.kill("U0", signal.SIGTERM)  # a thread in a call of the store holds nobody up
        cluster.wait_exit("U0", 30.0)
