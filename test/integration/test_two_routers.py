"""Two complete routers (`router.hosts`) over the same instances, each under a load whose every answer is checked: what
hits one of them touches only its own requests, and no page is lost."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import ANY_PORTS, DEADLINES, PATIENCE_S, ROUTER, SETTINGS, STOP_S, right_tokens, short_ask
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until
from support.steady_load import HUNG, LOST, REFUSED, RIGHT, WRONG, Ask, SteadyLoad, count_outcomes

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive

pytestmark = pytest.mark.timeout(150)
NAMES = ("router", "router.1")
ONE_HOST = [
    f"{ROUTER}.hosts=[127.0.0.1, 127.0.0.1]",
    f"{ROUTER}.prefill_schedulers=[{{host: 127.0.0.1}}, {{host: 127.0.0.1}}]",
    f"{ROUTER}.decode_schedulers=[{{host: 127.0.0.1}}, {{host: 127.0.0.1}}]",
    f"{DEADLINES}.drain_s=2",
]


class Pair:
    """The cluster, and a load on each router."""

    def __init__(self, folder: Path) -> None:
        model = make_checksum_model(folder / "model", EngineConfig(0.004, 0.0002, str(folder)))
        settings = [*ANY_PORTS, *(word for word in SETTINGS if "_schedulers=" not in word), *ONE_HOST]
        settings += [f"{ROUTER}.kept_requests.dir={folder / 'kept'}"]
        topology = load_topology(
            "pd_disagg_2p2d_multi_node", [f"model.path={model}", f"{ROUTER}.host=127.0.0.1", *settings]
        )
        self.cluster = LocalCluster(topology, entries=forked(ENTRIES), log_dir=str(folder / "logs"))
        self.cluster.start()
        self.cluster.wait_ready(60)
        self.urls = self.cluster.router_urls
        self.loads = {
            name: SteadyLoad(lambda u=self.urls[name]: u, "m", short_ask, right_tokens, PATIENCE_S) for name in NAMES
        }
        for load in self.loads.values():
            load.start(3)

    def close(self) -> None:
        for load in self.loads.values():
            load.close()
        self.cluster.stop()

    def client(self, name: str) -> RouterClient:
        secrets = derive(cluster_key_of(self.cluster.topology))
        assert secrets is not None
        return RouterClient(self.urls[name], secrets.token)

    def _look(self) -> None:
        for name, load in self.loads.items():
            self._seen[name].update(count_outcomes(load.take_answers()))

    def wait_for(self, name: str, count: int) -> None:
        """Wait for so many right answers more of this router, while both loads go on."""
        self._look()
        wanted = self._seen[name][RIGHT] + count

        def has_enough() -> bool:
            self._look()
            return self._seen[name][RIGHT] >= wanted

        wait_until(has_enough, 30, lambda: str(self._seen))

    def pause(self) -> dict[str, Counter[str]]:
        """Return how the requests of each load ended since `resume`, once everything is at rest."""
        for load in self.loads.values():
            load.pause(PATIENCE_S)
        self._look()
        wait_until(lambda: not self.not_whole(), 20, lambda: "; ".join(self.not_whole()))
        return self._seen

    def resume(self) -> None:
        self._seen = {name: Counter[str]() for name in NAMES}
        for load in self.loads.values():
            load.resume()

    def present(self, name: str) -> set[str]:
        return {i.name for i in self.client(name).cluster().instances if i.status != "down"}

    def not_whole(self) -> list[str]:
        """Describe what differs from a cluster at rest, as any router sees it."""
        words = []
        for name in NAMES:
            snapshot = self.client(name).cluster()
            words += [f"{name}: {i.name} is {i.status}" for i in snapshot.instances if i.status != "up"]
            for instance in snapshot.instances:
                if (load := instance.load) is not None:
                    held = load.pages_total - load.pages_free - load.pages_cached
                    rows = load.aux_total - load.aux_free
                    busy = load.waiting + load.transferring + load.running + load.retracted + load.closing
                    if held or rows or busy:
                        words.append(f"{name}: {instance.name} holds {held} pages, {rows} rows, {busy} requests")
        return words


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("two-routers"))
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("blow", "target"),
    [
        (signal.SIGKILL, "router"),
        pytest.param(signal.SIGSTOP, "router.1", marks=pytest.mark.by_hand),
        pytest.param(signal.SIGKILL, "router.1", marks=pytest.mark.by_hand),
        pytest.param(signal.SIGSTOP, "router", marks=pytest.mark.by_hand),
    ],
)
def test_what_hits_one_router_touches_none_of_the_others_requests(
    pair: Pair, blow: signal.Signals, target: str
) -> None:
    other = next(name for name in NAMES if name != target)
    cluster = pair.cluster
    pair.resume()
    for name in NAMES:
        pair.wait_for(name, 5)
    cluster.kill(target, blow)
    if blow == signal.SIGKILL:
        cluster.wait_exit(target)
        pair.wait_for(other, 20)
        cluster.restart(target)
    else:
        threading.Event().wait(STOP_S)
        pair.wait_for(other, 20)
        cluster.kill(target, signal.SIGCONT)
    wait_until(cluster.ready, 30, lambda: "; ".join(pair.not_whole()))
    pair.wait_for(target, 5)
    found = pair.pause()
    assert set(found[other]) == {RIGHT}, f"the requests of {other}: {found[other]}"
    assert not found[target][WRONG] and not found[target][HUNG], found
    assert set(found[target]) <= {RIGHT, LOST, REFUSED, "no_instance"}, found


def test_an_instance_that_dies_and_starts_again_is_taken_by_both_and_no_page_is_lost(pair: Pair) -> None:
    pair.resume()
    for name in ("D0", "P1"):
        pair.cluster.kill(name)
        pair.cluster.wait_exit(name)
        pair.cluster.restart(name)
        wait_until(pair.cluster.ready, 30, lambda: "; ".join(pair.not_whole()))
    for name in NAMES:
        pair.wait_for(name, 20)
    found = pair.pause()
    assert all(set(outcomes) == {RIGHT} for outcomes in found.values()), found


def test_a_drain_asked_of_one_router_is_known_to_the_other(pair: Pair) -> None:
    pair.resume()
    client = pair.client("router.1")
    client.drain("D1", force=False)
    for name in NAMES:
        wait_until(lambda name=name: "D1" not in pair.present(name), 20, "it stays")
        pair.wait_for(name, 10)
    pair.cluster.wait_exit("D1")
    pair.cluster.restart("D1")
    wait_until(pair.cluster.ready, 30, lambda: "; ".join(pair.not_whole()))
    found = pair.pause()
    assert all(set(outcomes) == {RIGHT} for outcomes in found.values()), found


def test_what_a_router_that_ends_has_kept_the_other_one_continues(pair: Pair) -> None:
    prompt = [20 + n % 50 for n in range(40)]
    ask = {"model": "m", "prompt": prompt, "max_tokens": 700, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**ask, "return_token_ids": True})
    url, told = pair.urls["router.1"], []

    def send() -> None:
        headers = {"Content-Type": "application/json", "X-Request-ID": "kept-1"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)
            ) as reply:
                told.append(reply.read().decode())
        except urllib.error.HTTPError as error:
            told.append(error.read().decode())

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: pair.client("router.1").cluster().in_flight, 10, "")
    pair.cluster.kill("router.1", signal.SIGTERM)
    pair.cluster.wait_exit("router.1")
    thread.join()
    assert "request_kept" in told[0], told

    def answer() -> list[int]:
        try:
            with urllib.request.urlopen(f"{pair.urls['router']}/v1/requests/kept-1", timeout=60) as reply:
                return json.load(reply)["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            assert error.code in (404, 503), error.read()
            return []

    wait_until(answer, 30, "the other router does not continue it")
    assert answer() == right_tokens(Ask(tuple(prompt), 700, None))
    pair.cluster.restart("router.1")
    wait_until(pair.cluster.ready, 30, lambda: "; ".join(pair.not_whole()))
