"""Mooncake between hosts whose wires are slow, then silent, then sound again: the pairs recover by themselves.

A slow write misses every deadline, so a P stops writing to a D. It resumes when the writes are known to be over. TCP
retries only after as long as the trouble lasted, and may have taken that for the round trip, so that another packet
waits as long again. `HEALED_S` later all serve and no page is kept. No thread waits busily.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path

import psutil
import pytest
from chaos_cluster import DEADLINES, PATIENCE_S, VOCAB_SIZE
from silence_cluster import KEY, SilenceCluster
from support.router_process import wait_until
from support.steady_load import RIGHT, Ask, count_outcomes

SLOW_BYTES_S = 2000
"""Bandwidth from P to D alone: announcements arrive at once, and the KV of one prompt takes half a minute."""
PROMPT = 900
SUSPENDED_S = 40.0
"""Time until a write of 5 s has failed, even if it starts late on a busy machine."""
SILENT_S = 6.0
HEALED_S = 10.0
"""Time for fence attempts and breakers."""
SETTINGS = [
    f"{KEY}.pd_disaggregation.transport=mooncake",
    f"{KEY}.pd_disaggregation.staging_mb=4",
    f"{KEY}.pd_disaggregation.staging_segment_mb=1",
    f"{DEADLINES}.bootstrap_s=2",
    f"{DEADLINES}.queue_s=4",
    f"{DEADLINES}.transfer_s=4",
    f"{DEADLINES}.heartbeat_interval_s=0.2",
    f"{DEADLINES}.retry_interval_s=0.2",
]
PREFILLS = ("P0", "P1")
WIRES = list(itertools.product(PREFILLS, ("D0", "D1")))

pytestmark = pytest.mark.timeout(300)


def cpu_s(cluster: SilenceCluster, name: str) -> float:
    child = cluster.processes.members[name].child
    assert child is not None
    parent = psutil.Process(child.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (parent, *parent.children(recursive=True)))


@pytest.mark.by_hand
@pytest.mark.parametrize(("transfer", "round_trip_s"), [("direct", 0.002), ("staged", 0.04)])
def test_pairs_that_a_slow_and_then_silent_network_suspended_serve_again_when_it_is_back(
    tmp_path: Path, transfer: str, round_trip_s: float
) -> None:
    pytest.importorskip("mooncake.engine")
    with SilenceCluster(tmp_path, *SETTINGS, f"{KEY}.pd_disaggregation.transfer={transfer}") as cluster:
        load, network = cluster.load, cluster.net
        for p, d in WIRES:
            network.set(p, d, delay_s=round_trip_s / 2)
        cluster.check_all_serve()
        started_s = time.monotonic()
        for p, d in WIRES:
            network.set(p, d, one_way=True, rate_bytes_s=SLOW_BYTES_S)
        rng = random.Random(0)
        asks = [Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(PROMPT)), 8) for _ in range(16)]
        answers = load.send(asks)
        wait_until(lambda: any(map(cluster.suspended, PREFILLS)), SUSPENDED_S, "no pair is suspended")
        for p, d in WIRES:
            network.drop(p, d)  # at once, while the slow writes are in flight
        before = {p: cpu_s(cluster, p) for p in PREFILLS}
        threading.Event().wait(SILENT_S)
        assert all(cpu_s(cluster, p) - before[p] < SILENT_S / 2 for p in before), "a thread is busy with waiting"
        assert any(map(cluster.suspended, PREFILLS)), "what is silent cannot be fenced"
        network.heal()
        limit_s = 2 * (time.monotonic() - started_s) + HEALED_S
        healed_s = wait_until(lambda: not cluster.not_at_rest(), limit_s, lambda: "; ".join(cluster.not_at_rest()))
        assert not any(map(cluster.suspended, PREFILLS))
        outcomes = count_outcomes(answer.result(PATIENCE_S) for answer in answers)
        assert not outcomes.keys() & {"wrong", "hung"}, outcomes
        cluster.check_all_serve()
        print(f"\nat rest {healed_s:.1f} s after the heal; before: {outcomes}, {RIGHT} after")
