"""Time to first token of 1P1D divided by that of one unified instance, in one interleaved run.

    python -m chitu.tools.bench.ttft [--model MODEL]

Both clusters run at once. Streamed requests go to them in turn, one at a time, with different prompts of 512 and 2048
tokens. 1P1D adds the hand-over: two messages, the logits row, a wake-up of D.
"""

from __future__ import annotations

import random
import statistics

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.bench.report import publish
from chitu.tools.bench.token_times import comparison, token_times_s

LENGTHS = (512, 2048)


def main() -> None:
    with (
        comparison(__doc__ or "", rounds=15) as compared,
        LocalCluster(load_topology("unified_local.yaml", compared.settings)) as unified,
        LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", compared.settings)) as divided,
    ):
        unified.wait_ready()
        divided.wait_ready()
        rows = [measure(length, compared.rounds, unified.url, divided.url) for length in LENGTHS]
        columns = ("prompt tokens", "unified ms", "1P1D ms", "1P1D / unified", "rounds")
        publish("ttft", columns, rows, compared.json_dir)


def measure(length: int, rounds: int, unified_url: str, divided_url: str) -> tuple[int, float, float, float, int]:
    """Return the prompt length, the medians in ms, the median of the per-round ratios and the rounds."""
    rng = random.Random(length)
    unified: list[float] = []
    divided: list[float] = []
    for number in range(rounds + 2):
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        order = [(unified_url, unified), (divided_url, divided)]
        for url, times in order if number % 2 else reversed(order):
            times.append(token_times_s(url, prompt, 2)[0])
    unified, divided = unified[2:], divided[2:]  # the first rounds are the warm-up
    ratio = statistics.median(d / u for d, u in zip(divided, unified, strict=True))
    return length, statistics.median(unified) * 1e3, statistics.median(divided) * 1e3, ratio, rounds


if __name__ == "__main__":
    main()
