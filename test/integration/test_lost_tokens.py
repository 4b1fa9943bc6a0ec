"""A connection between D and the router that breaks takes tokens with it: every stream gets exactly its tokens."""

from __future__ import annotations

import random
from pathlib import Path

from chaos_cluster import PATIENCE_S, VOCAB_SIZE, ChaosCluster, wait_for

from chitu.bench.steady_load import Ask


def test_streams_are_right_and_whole_when_the_tokens_of_their_d_are_lost(tmp_path: Path) -> None:
    rng = random.Random(5)
    asks = [
        Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(40)), 900, seed, stream=True)
        for seed in (None, 7, None, 8, None, 9, None, 10)
    ]
    with ChaosCluster(tmp_path, clients=1) as cluster:
        futures = cluster.load.send(asks)

        def is_streaming() -> bool:
            running = [r for r in cluster.snapshot().requests if r.ended_at_s is None and r.state == "decode"]
            return sum(request.decode == "D0" for request in running) >= 2

        wait_for(is_streaming, 20.0, lambda: str(cluster.snapshot().requests))
        cluster.strike("blink", "D0")
        cluster.mend("blink", "D0")
        answers = [future.result(PATIENCE_S) for future in futures]
        assert [answer.outcome for answer in answers] == ["right"] * len(asks), answers
        assert "(tokens_lost: " in cluster.processes.logs("router"), "no token was lost, so nothing was shown"
        wait_for(lambda: not cluster.not_whole(), 20.0, lambda: str(cluster.not_whole()))
