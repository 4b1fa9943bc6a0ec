"""`router.balance: act` on real processes: prompts that wait turn a D into a P, and no token is lost."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
from chaos_cluster import VOCAB_SIZE, right_tokens
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until
from support.steady_load import RIGHT, Ask, SteadyLoad

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster

ROUTER = "dp_config.router"
OVERRIDES = [
    *("model.served_name=m", "model.max_model_len=1024", "cache.num_pages=2000", "cache.prefix_cache=false"),
    f"{ROUTER}.decode_schedulers=[{{}}, {{}}, {{}}]",
    f"{ROUTER}.pd_disaggregation.deadlines.heartbeat_interval_s=0.1",
    *(f"{ROUTER}.balance=act", f"{ROUTER}.slo.ttft_s=2.0"),
]


def test_a_d_becomes_a_p_while_prompts_wait(tmp_path: Path) -> None:
    model = make_checksum_model(tmp_path / "model", EngineConfig(step_s=0.002, prompt_token_s=0.0005))
    topology = load_topology("pd_disagg_1p1d_local", [f"model.path={model}", *OVERRIDES])

    def next_ask(rng: random.Random) -> Ask:
        return Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(200)), 4)

    with LocalCluster(topology, entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready(60)

        def roles() -> str:
            shown = httpx.get(f"{cluster.url}/cluster", trust_env=False, timeout=60.0).json()
            return "".join(sorted(i["name"][0] for i in shown["instances"] if i["status"] == "up"))

        load = SteadyLoad(lambda: cluster.url, "m", next_ask, right_tokens, 60.0)
        try:
            load.start(8)
            wait_until(lambda: roles() == "DDPP", 60, lambda: cluster.logs("router"))
            metrics = httpx.get(f"{cluster.url}/metrics", trust_env=False, timeout=60.0).text
            load.pause(60.0)
            answers = load.take_answers()
        finally:
            load.close()
    assert answers and {answer.outcome for answer in answers} == {RIGHT}
    assert 'chitu_balance_role_changes_total{role="prefill"} 1.0' in metrics
    assert 'chitu_wanted_instances{role="prefill"}' in metrics
