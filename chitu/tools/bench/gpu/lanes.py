"""A recorded chunk of a prompt on a second stream beside recorded decodes: what the decodes lose, and what the chunk.

Decodes have the highest priority. "In turn" is what one lane does: a chunk, then the decodes that waited for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from chitu.engine.step_graphs import Recording
from chitu.ops.cuda_device import on_stream
from chitu.ops.interface import Span
from chitu.tools.bench.gpu.card import Card, Row
from chitu.tools.bench.gpu.steps import StepBench

MOST_SLOWER = 2
ROUNDS = 5
STEPS = 64
"""Decode steps of the measurement without a chunk."""


def rows(card: Card, bench: StepBench) -> Iterator[Row]:
    batch, chunk = card.sizes.beside
    context, steps = card.sizes.step_context, STEPS if card.is_gpu else 2
    limit = context + 4096 if card.is_gpu else context + 64
    with torch.inference_mode():
        table, decodes = bench.lane(batch, context, limit, Recording(card.recorder(), (), ()))
        _, chunks = bench.lane(1, chunk, chunk + 1, Recording(card.recorder(), (), (chunk,)))
        slots, first, second = list(range(batch)), card.stream(True), card.stream(False)

        def decode() -> None:
            decodes.decode(slots, table.advance_decode(slots))
            table.count_tokens(slots)

        def prefill() -> None:
            chunks.prefill([Span(0, chunk, 0, 0)])

        decode()
        prefill()

        def many() -> None:
            for _ in range(steps):
                decode()

        alone_s = card.seconds(many, repeats=1, warm=0) / steps
        chunk_s = card.seconds(prefill)
        found = [_beside(card, decode, prefill, first, second) for _ in range(ROUNDS if card.is_gpu else 1)]
    what = f"{batch} decodes and a chunk of {chunk}"
    yield Row(f"{what}: a decode alone", alone_s * 1e3, "ms")
    yield Row(f"{what}: the chunk alone", chunk_s * 1e3, "ms")
    yield Row(f"{what}: longest decode, in turn", (alone_s + chunk_s) * 1e3, "ms", 1 + chunk_s / alone_s, "alone")
    worst_s = statistics.median(max(steps_s) for steps_s, _ in found)
    middle_s = statistics.median(statistics.median(steps_s) for steps_s, _ in found)
    both_s = statistics.median(took_s for _, took_s in found)
    is_met = middle_s <= MOST_SLOWER * alone_s
    yield Row(
        f"{what}: a decode, at once", middle_s * 1e3, "ms", middle_s / alone_s, "alone", f"<= {MOST_SLOWER}", is_met
    )
    yield Row(f"{what}: longest decode, at once", worst_s * 1e3, "ms", worst_s / alone_s, "alone")
    yield Row(f"{what}: the chunk, at once", both_s * 1e3, "ms", chunk_s / both_s, "alone")


def _beside(
    card: Card,
    decode: Callable[[], None],
    prefill: Callable[[], None],
    first: torch.cuda.Stream | None,
    second: torch.cuda.Stream | None,
) -> tuple[list[float], float]:
    """Return the seconds of each decode that ran while a chunk did, as the host sees them, and those of the chunk."""
    card.synchronize()
    begin_s = time.perf_counter()
    with on_stream(second):
        prefill()
        done = torch.cuda.Event() if second is not None else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
    steps_s: list[float] = []
    while not steps_s or (done is not None and not done.query()):  # type: ignore[no-untyped-call]
        step_s = time.perf_counter()
        with on_stream(first):
            decode()
            if first is not None:
                first.synchronize()
        steps_s.append(time.perf_counter() - step_s)
    took_s = time.perf_counter() - begin_s
    card.synchronize()
    return steps_s, took_s
