"""A broken connection between D and the router takes tokens with it: every stream gets exactly its tokens."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from chaos_cluster import PATIENCE_S, VOCAB_SIZE, ChaosCluster
from support.router_process import wait_until
from support.steady_load import Ask

from chitu.config.schema import RetryConfig

EACH_S = 1.0
FROZEN_S = 0.1
"""Time in which nothing passes before the connections break, so that something is in flight then."""


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

        wait_until(is_streaming, 20.0, lambda: cluster.snapshot().requests)
        cluster.strike("blink", "D0")
        cluster.mend("blink", "D0")
        answers = [future.result(PATIENCE_S) for future in futures]
        assert [answer.outcome for answer in answers] == ["right"] * len(asks), answers
        logs = cluster.processes.logs("router")
        assert "a token message of D0 was lost" in logs, "no token was lost, so nothing was shown"
        assert "(tokens_lost: " not in logs
        wait_until(lambda: not cluster.not_whole(), 20.0, cluster.not_whole)


def test_connections_that_all_break_each_second_cost_no_request(tmp_path: Path) -> None:
    """No instance is at fault and every pair is alive: lost messages are sent again, and no request reaches
    `retry.max_attempts` because of them."""
    rng = random.Random(6)
    asks = [
        Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(40)), 600, seed, stream=seed % 2 == 0)
        for seed in range(6)
    ]
    everybody = ("router", "P0", "P1")  # each connection has one of these at an end
    with ChaosCluster(tmp_path, clients=2) as cluster:
        cluster.load.resume()
        futures = cluster.load.send(asks)
        num_breaks = 0
        while not all(future.done() for future in futures):
            threading.Event().wait(EACH_S - FROZEN_S)
            for name in everybody:
                cluster.wires.freeze(name)
            threading.Event().wait(FROZEN_S)
            for name in everybody:
                cluster.wires.cut(name)
                cluster.wires.heal(name)
            num_breaks += 1
            assert num_breaks * EACH_S < PATIENCE_S
        cluster.load.pause(PATIENCE_S)
        answers = cluster.load.take_answers()
        most = max(request.attempt for request in cluster.snapshot().requests)
        logs = cluster.processes.logs("router")
        num_repeats = logs.count("sent again")
        print(f"\n{num_breaks} breaks, {num_repeats} repeats, {len(answers)} requests, up to {most} attempts")
        assert {answer.outcome for answer in answers} == {"right"}, [a for a in answers if a.outcome != "right"]
        assert num_repeats > RetryConfig().max_attempts, "no request was cut often enough, so nothing was shown"
        assert "(tokens_lost: " not in logs and "(request_lost: " not in logs
        wait_until(lambda: not cluster.not_whole(), 20.0, cluster.not_whole)
