"""A request that kills the processes that compute it is not sent to a third one, and later requests are served."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from chaos_cluster import DEADLINES, PATIENCE_S, VOCAB_SIZE, ChaosCluster, short_ask
from support.router_process import wait_until
from support.steady_load import Ask

LONG = [f"{DEADLINES}.{name}=60" for name in ("queue_s", "transfer_s")]
"""Deadlines long enough that the request is held until its P is killed."""


def prefill_of(cluster: ChaosCluster, attempt: int) -> str:
    """Return the P that has this attempt of the suspect; empty if that attempt is not running."""
    for request in cluster.snapshot().requests:
        if "suspect" in request.request_id and request.attempt == attempt and request.ended_at_s is None:
            return request.prefill or ""
    return ""


def test_a_request_that_two_processes_died_under_is_not_sent_to_a_third(tmp_path: Path) -> None:
    rng = random.Random(3)
    suspect = Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(90)), 8, request_id="suspect")
    with ChaosCluster(tmp_path, *LONG, clients=1) as cluster:
        cluster.hold("prefill")  # P does not finish it
        (future,) = cluster.load.send([suspect])
        for attempt in (1, 2):
            wait_until(lambda attempt=attempt: prefill_of(cluster, attempt) != "", 10, "not sent")  # type: ignore[misc]
            victim = prefill_of(cluster, attempt)
            cluster.processes.kill(victim, signal.SIGKILL)
            cluster.mend("SIGKILL", victim)
            wait_until(cluster.processes.ready, 60, lambda: "; ".join(cluster.not_whole()))
        answer = future.result(PATIENCE_S)
        assert answer.outcome == "poison_request", answer
        log = cluster.processes.logs("router")
        assert log.count("suspect -> ") == 2
        assert "2 instances died one after the other while they had this request" in log
        cluster.release()
        answers = [future.result(PATIENCE_S) for future in cluster.load.send([short_ask(rng) for _ in range(4)])]
        assert [answer.outcome for answer in answers] == ["right"] * 4
        wait_until(lambda: not cluster.not_whole(), 20, cluster.not_whole)
