"""Silence: packets between hosts vanish, without a reset, for longer than leases and than TCP's patience.

Then they pass again, and every instance serves (after HEALED_S at most on a free machine), nothing hangs, nothing is
wrong, no page and no descriptor is lost. By hand, for every pair of processes, both ways and one way, each for so many
seconds:

    SILENCE_S=5,20,120 pytest -s test/integration/test_silent_network.py
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from chaos_cluster import PATIENCE_S
from silence_cluster import INSTANCES, SilenceCluster
from support.router_process import wait_until
from support.steady_load import RIGHT, count_outcomes

from chitu.net.sockets import CONNECT_TIMEOUT_MS, TCP_SILENCE_MS

SILENT_S = 11.0
"""Duration of a silence, longer than TCP's patience."""
HEALED_S = (TCP_SILENCE_MS + CONNECT_TIMEOUT_MS) / 1000 + 8
"""Time to recover on a busy machine: half-open connections are given up, new ones established, and a view arrives.
TCP's own patience would be minutes."""
ALL = ",".join(f"router-{name}" for name in INSTANCES)
CELLS = [(SILENT_S, ALL)]
if times := os.environ.get("SILENCE_S"):
    PAIRS = ("router", "P0"), ("router", "D0"), ("P0", "D0")
    WAYS = [way for a, b in PAIRS for way in (f"{a}-{b}", f"{a}>{b}", f"{b}>{a}")]
    CELLS = [(float(seconds), way) for seconds in times.split(",") for way in (*WAYS, ALL)]

pytestmark = pytest.mark.timeout(max(seconds for seconds, _ in CELLS) + 180)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SilenceCluster]:
    with SilenceCluster(tmp_path_factory.mktemp("silence")) as cluster:
        cluster.check_all_serve()
        yield cluster


@pytest.fixture(scope="module")
def most_descriptors(cluster: SilenceCluster) -> dict[str, int]:
    """Return each process's descriptors with every connection open; some are only opened on demand."""
    return cluster.descriptors()


@pytest.mark.parametrize(("seconds", "wires"), CELLS)
def test_after_a_silence_everything_is_as_before(
    cluster: SilenceCluster, most_descriptors: dict[str, int], seconds: float, wires: str
) -> None:
    """Wires are written `a-b` if silent both ways, and `a>b` if silent one way."""
    load, network = cluster.load, cluster.net
    load.resume()
    for wire in wires.split(","):
        a, separator, b = wire.partition(">") if ">" in wire else wire.partition("-")
        network.drop(a, b, one_way=separator == ">")
    threading.Event().wait(seconds)
    network.heal()
    healed_s = wait_until(lambda: not cluster.away(), HEALED_S, lambda: "; ".join(cluster.away()))
    load.pause(PATIENCE_S + 10)
    outcomes = count_outcomes(load.take_answers())
    # If a pair is left, it serves everything; otherwise clients get an error.
    assert set(outcomes) <= {RIGHT} | ({"no_instance", "prefill_lost", "decode_lost"} if wires == ALL else set())
    cluster.check_all_serve()
    rest_s = wait_until(lambda: not cluster.not_at_rest(), HEALED_S, lambda: "; ".join(cluster.not_at_rest()))
    times = f"all back after {healed_s:.1f} s, at rest {rest_s:.1f} s later"
    print(f"\n{wires} silent for {seconds:g} s: {times}; {dict(outcomes)}")

    def leaked() -> dict[str, int]:
        return {name: n for name, n in cluster.descriptors().items() if n > most_descriptors[name]}

    wait_until(lambda: not leaked(), HEALED_S, lambda: f"{leaked()} descriptors, {most_descriptors} before")
