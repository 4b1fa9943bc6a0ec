"""A cluster of real processes of two releases: every pair is right, and a rolling upgrade loses nothing."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import httpx
import pytest
from nursery import FORKED, popen
from support.older_release import MixedReleases, older_release
from support.steady_load import RIGHT, Ask, SteadyLoad

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.launch.router_calls import drain
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive
from chitu.protocol import PROTOCOL_VERSION
from chitu.tools.verify.run import VerifyOptions, verify

ROUTER = "dp_config.router"
PATIENCE_S = 300
REST_S = 0.25
"""Rest of a client between two requests: most of the test waits for processes that start."""
ALL = ("router", "P0", "P1", "D0", "D1")

pytestmark = pytest.mark.timeout(600)


class UpgradedCluster:
    """A 2P2D whose processes change to this release one by one, under a load whose every answer is checked."""

    def __init__(self, cluster: LocalCluster, mixed: MixedReleases, engine: LocalCluster) -> None:
        self.cluster, self.mixed, self.engine = cluster, mixed, engine
        prompts = [tuple(random.Random(seed).choices(range(5, 500), k=40 + 9 * seed)) for seed in range(6)]
        self.asks = [Ask(prompt, 24, stream=bool(number % 2)) for number, prompt in enumerate(prompts)]
        self.right = {ask: self._answer(ask) for ask in self.asks}
        self.load = SteadyLoad(
            lambda: cluster.url,
            "chitu-tiny",
            lambda rng: rng.choice(self.asks),
            lambda ask: self.right[ask],
            120.0,
            rest_s=REST_S,
        )

    def _answer(self, ask: Ask) -> list[int]:
        body = {"model": "chitu-tiny", "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{self.engine.url}/v1/completions", json=body, timeout=120, trust_env=False)
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def client(self) -> RouterClient:
        secrets = derive(cluster_key_of(self.cluster.topology))
        assert secrets is not None
        return RouterClient(self.cluster.url, secrets.token)

    def upgrade(self, *names: str) -> None:
        """Drain instances of the older release, one after the other, and start them with this one."""
        for name in names:
            drain(self.client(), [name], force=False, wait=True, say=lambda text: None)
            self.cluster.wait_exit(name)
            self._restart(name)

    def upgrade_router(self) -> None:
        """Restart the router with this release, while no client asks: those of one router alone lose their answers."""
        self.load.pause(60.0)
        self._restart("router")
        self.load.resume()

    def _restart(self, name: str) -> None:
        self.mixed.names.discard(name)
        self.cluster.restart(name)
        self.cluster.wait_ready(PATIENCE_S)

    def check(self, protocols: dict[str, int]) -> None:
        """Check every pair of P and D, and what the router knows of the versions of its members."""
        options = VerifyOptions(self.cluster.url, str(TINY_MODEL_DIR), self.engine.url, has_transformers=False)
        report = verify(options, lambda text: None)
        assert report.verdict == "right", report
        assert {f"{pair.prefill}-{pair.decode}" for pair in report.pairs} == {"P0-D0", "P0-D1", "P1-D0", "P1-D1"}
        assert {one.name: one.protocol for one in self.client().cluster().instances} == protocols

    def end(self) -> None:
        self.load.pause(60.0)
        outcomes = Counter(answer.outcome for answer in self.load.take_answers())
        assert set(outcomes) == {RIGHT}, outcomes


@pytest.mark.by_hand
def test_a_rolling_upgrade_under_load_with_every_mixed_pair_right(tmp_path: Path) -> None:
    try:
        mixed = MixedReleases(older_release(tmp_path / "older"), ALL, newer=popen)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    settings = [f"model.path={TINY_MODEL_DIR}", "cache.num_pages=400", "scheduler.threads=1"]
    pairs = [f"{ROUTER}.{role}_schedulers=[{{port: 0}}, {{port: 0}}]" for role in ("prefill", "decode")]
    entries = Entries(torchrun=False, popen=mixed)
    with (
        LocalCluster(load_topology("unified_local.yaml", settings), entries=FORKED) as engine,
        LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", [*settings, *pairs]), entries=entries) as cluster,
    ):
        cluster.wait_ready(PATIENCE_S)
        engine.wait_ready(PATIENCE_S)
        world = UpgradedCluster(cluster, mixed, engine)
        world.load.start(2)
        try:
            world.upgrade("D0", "P1")
            world.check(dict.fromkeys(("P0", "P1", "D0", "D1"), 0))
            world.upgrade_router()
            world.check({"P0": 20, "P1": PROTOCOL_VERSION, "D0": PROTOCOL_VERSION, "D1": 20})
            world.upgrade("P0", "D1")
            world.check(dict.fromkeys(("P0", "P1", "D0", "D1"), PROTOCOL_VERSION))
            world.end()
        finally:
            world.load.close()
