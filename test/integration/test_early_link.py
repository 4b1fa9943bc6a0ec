"""P's early token over slow links: it waits for no packet of D, and no connection for it is made where it is off."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from host_cluster import CONFIG, HostCluster
from network import Network

from chitu.assets import TINY_MODEL_DIR
from chitu.tools.bench.token_times import streamed_tokens

pytestmark = pytest.mark.timeout(300)
DELAY_S = 0.5
"""One way. Far above what else a request costs, so that times in delays are counts of packets waited for."""
HOSTS = ["r", "p", "d"]
TOKEN_PORT = 29700
ESTABLISHED = "01"


def connections(net: Network, name: str, host: str, port: int) -> int:
    """Return how many connections a host has to this port of another."""
    process = net.popen(name, ["cat", "/proc/net/tcp"], stdout=-1, text=True)
    table = process.communicate(timeout=30)[0]
    address = "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{port:04X}"
    rows = [line.split() for line in table.splitlines()[1:]]
    return sum(row[2] == address and row[3] == ESTABLISHED for row in rows)


@pytest.mark.parametrize("is_on", [True, False], ids=["early", "off"])
def test_token_1_waits_for_no_packet_of_a_far_d_and_p_connects_to_the_router_for_it_alone(
    tmp_path: Path, is_on: bool
) -> None:
    with Network(HOSTS) as net:
        settings = [f"model.path={TINY_MODEL_DIR}", "model.served_name=m", "cache.num_pages=300", "scheduler.threads=1"]
        settings += [
            f"{CONFIG}.pd_disaggregation.early_token={str(is_on).lower()}",
            f"{CONFIG}.token_port={TOKEN_PORT}",
        ]
        settings += [
            f"{CONFIG}.{role}_schedulers=[{{host: {net.address(name)}, devices: [cpu]}}]"
            for role, name in (("prefill", "p"), ("decode", "d"))
        ]
        with HostCluster(tmp_path, net, HOSTS, settings) as cluster:
            rng = random.Random(1)
            prompts = [[rng.randrange(16, 480) for _ in range(100)] for _ in range(2)]
            near = [streamed_tokens(cluster.url, prompt, 3)[1] for prompt in prompts]
            assert connections(net, "d", net.address("r"), TOKEN_PORT) == 1
            assert connections(net, "p", net.address("r"), TOKEN_PORT) == is_on
            for name in ("r", "p"):
                net.set(name, "d", delay_s=DELAY_S)
            firsts, gaps = [], []
            for prompt, expected in zip(prompts, near, strict=True):
                times_s, tokens = streamed_tokens(cluster.url, prompt, 3)
                assert tokens == expected
                firsts.append(times_s[0] / DELAY_S)
                gaps.append((times_s[1] - times_s[0]) / DELAY_S)
    # Without it, D is told, announces its pages, gets the row, and answers.
    assert min(firsts) < 1 if is_on else min(firsts) > 3
    assert min(gaps) > 2 if is_on else min(gaps) < 2, "the last pages follow the row"
