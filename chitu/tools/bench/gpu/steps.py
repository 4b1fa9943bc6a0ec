"""Whole steps of the model: decode against the bytes that it must read, prefill against the rate of a matrix product.

Decode is timed three ways. The device's time is that of recorded steps, one after the other. The executor's time is
that of `ModelRunner.execute`, including the tokens' copy to the host. The scheduler's time is a whole turn of an
instance (`host_share.py`), with each step launched before the previous one is read (overlap) and without. The
differences are the host's share.

A prompt longer than the recorded steps is timed as an instance computes it, and by our own kernel alone, by which its
last chunk is timed, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from chitu.engine.batch import SlotTable
from chitu.engine.build import greedy_kernels, load_model
from chitu.engine.executor import Admit, PrefillChunk, StepPlan
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import Recording, StepGraphs
from chitu.kv_cache.pool import KVPool
from chitu.models.checkpoint import count_weights
from chitu.models.config import ModelSpec, read_model_spec
from chitu.models.layers import DecoderModel
from chitu.ops.interface import Ops
from chitu.ops.whole_prompts import NO_WHOLE_PROMPTS
from chitu.protocol import KVLayout, SamplingParams, pack_i32
from chitu.tools.bench.gpu.card import PAGE_SIZE, Card, Row, at_least, at_most
from chitu.tools.bench.gpu.host_share import step_seconds

DECODE_AIMS = {1: 0.50, 8: 0.60, 64: 0.85}
PREFILL_AIM = 0.60
SHORT_PROMPT_AIM_MS = {512: 3.0}
MODEL_HASH = "0" * 32
"""Of pools that no other instance sees."""
STEPS = 64
"""Decode steps of a measurement, by which each sequence grows."""


class Weighed(NamedTuple):
    """What steps read of a model's weights."""

    step_bytes: int
    """Of a decode step, but for the experts."""
    layer_numbers: int
    """Numbers by which each row of a prompt is multiplied, but for the experts'."""
    expert_bytes: int = 0
    expert_numbers: int = 0
    num_experts: int = 1
    num_chosen: int = 1
    """Experts of a row."""

    def bytes_of(self, batch: int) -> float:
        """Return what a decode step of so many rows reads if each expert is chosen as often as the others."""
        share = 1 - (1 - self.num_chosen / self.num_experts) ** batch
        return self.step_bytes + share * self.expert_bytes

    @property
    def numbers(self) -> float:
        return self.layer_numbers + self.num_chosen / self.num_experts * self.expert_numbers


class StepBench:
    """A model on the device, with a pool and a runner for every case."""

    def __init__(self, card: Card, spec: ModelSpec, model: DecoderModel, weighed: Weighed) -> None:
        self._card = card
        self.spec = spec
        self.model = model
        self._weighed = weighed
        self._recorder = card.recorder()

    @classmethod
    def of_folder(cls, card: Card, folder: Path) -> StepBench:
        """Return that of a dense checkpoint whose head is its embedding."""
        spec = read_model_spec(folder, code="own")
        model = load_model(folder, card.sizes.dtype, str(card.device), ops=card.ops(), code="own")
        assert isinstance(model, DecoderModel)
        numbers = count_weights(folder)
        embedding = spec.vocab_size * spec.hidden_size
        return cls(card, spec, model, Weighed(numbers * card.dtype.itemsize, numbers - embedding))

    def rows(self) -> Iterator[Row]:
        with torch.inference_mode():
            for batch in self._card.sizes.step_batches:
                yield from self.decode(batch)
            for tokens in self._card.sizes.prompts:
                yield from self.prefill(tokens)
            tokens, own = max(self._card.sizes.prompts), self._card.ops(NO_WHOLE_PROMPTS)
            yield from self.prefill(tokens, own, ", own kernel")
            yield from self.prefill(tokens, own, ", own kernel", chunk=self._card.sizes.last_chunk)

    def decode(self, batch: int) -> Iterator[Row]:
        card, context, steps = self._card, self._card.sizes.step_context, STEPS if self._card.is_gpu else 2
        # The sequences pass `context` in the middle of the measurement.
        start, limit = context - steps // 2, context + 3 * steps
        pool = self._pool(batch * -(-limit // PAGE_SIZE))
        kv_bytes = 2 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim * pool.k[0].itemsize
        floor_s = (self._weighed.bytes_of(batch) + batch * context * kv_bytes) / card.ceilings.copy_bytes_per_s
        slots = list(range(batch))
        admits = [self._admit(slot, start, limit, kv_len=start - 1) for slot in slots]
        table, graphs = self.graphs(pool, admits, limit, Recording(self._recorder, (), ()))

        def many() -> None:
            for _ in range(steps):
                graphs.decode(slots, table.advance_decode(slots))
                table.count_tokens(slots)

        graphs.decode(slots, table.advance_decode(slots))
        table.count_tokens(slots)
        device_s = card.seconds(many, repeats=1, warm=0) / steps
        what = f"decode step, batch {batch}, context {context}"
        aim = DECODE_AIMS.get(batch)
        yield at_least(f"{what}: device", device_s * 1e3, "ms", floor_s / device_s, "byte floor", aim)

        runner = self._runner(pool, batch, limit, Recording(self._recorder, (), ()))
        runner.execute(StepPlan(admit=admits, decode=slots))
        wall_s = card.wall_seconds(lambda: runner.execute(StepPlan(decode=slots)), repeats=steps)
        yield at_least(f"{what}: executor", wall_s * 1e3, "ms", floor_s / wall_s, "byte floor", aim)
        yield Row(f"{what}: host's share", (wall_s - device_s) * 1e3, "ms", 1 - device_s / wall_s, "executor's time")
        runner.execute(StepPlan(release=slots))
        for overlap in (False, True):
            turn_s = step_seconds(card, runner, start, steps, overlap)
            name = f"{what}: scheduler, overlap {'on' if overlap else 'off'}"
            yield at_least(name, turn_s * 1e3, "ms", floor_s / turn_s, "byte floor", aim if overlap else None)
            yield Row(f"{name}: host's share", (turn_s - device_s) * 1e3, "ms", 1 - device_s / turn_s, "turn's time")

    def prefill(self, tokens: int, ops: Ops | None = None, route: str = "", chunk: int | None = None) -> Iterator[Row]:
        """Measure a whole prompt as one chunk, or its last `chunk` tokens after the rest, until the first token is on
        the host. `ops` replaces an instance's ops and is named by `route`; such steps are not recorded."""
        card, spec, rows = self._card, self.spec, chunk or tokens
        start = tokens - rows
        pool = self._pool(-(-(tokens + 1) // PAGE_SIZE))
        recorded = card.sizes.recorded_prefills if ops is None else ()
        runner = self._runner(pool, 1, tokens + 1, Recording(self._recorder, (), recorded), ops)
        admit = self._admit(0, tokens, tokens + 1, kv_len=start)

        def once() -> None:
            plan = StepPlan(admit=[admit], prefill=[PrefillChunk(0, start, rows, sample=True)])
            runner.execute(plan)
            runner.execute(StepPlan(release=[0]))

        once()
        seconds = card.wall_seconds(once)
        is_recorded = rows <= max(recorded, default=0)
        what = f"prefill {rows} tokens" + (f" behind {start}" if start else "") + route
        what += ", recorded" if is_recorded else ""
        if rows in SHORT_PROMPT_AIM_MS and ops is None:
            yield at_most(what, seconds * 1e3, "ms", SHORT_PROMPT_AIM_MS[rows])
        pairs = tokens**2 - start**2  # twice the pairs of a query and a key that it sees
        flops = 2 * rows * self._weighed.numbers + 2 * spec.num_heads * spec.head_dim * pairs * spec.num_layers
        aim = None if is_recorded or ops is not None else PREFILL_AIM
        ratio = flops / seconds / card.ceilings.flops_per_s
        yield at_least(what, rows / seconds / 1e3, "k tok/s", ratio, "matmul rate", aim)

    def lane(self, count: int, tokens: int, limit: int, recording: Recording) -> tuple[SlotTable, StepGraphs]:
        """Return recorded steps of `count` sequences of so many tokens, with pages of their own."""
        admits = [self._admit(slot, tokens, limit, kv_len=tokens - 1) for slot in range(count)]
        return self.graphs(self._pool(count * -(-limit // PAGE_SIZE)), admits, limit, recording)

    def graphs(
        self, pool: KVPool, admits: list[Admit], limit: int, recording: Recording
    ) -> tuple[SlotTable, StepGraphs]:
        table = SlotTable(len(admits), limit, PAGE_SIZE, pool.num_pages, self._card.device, pool.scratch_page)
        table.admit(admits)
        kernels = greedy_kernels(len(admits), pool)
        return table, StepGraphs(self.model, table, pool, recording, greedy=kernels)

    def _pool(self, num_pages: int) -> KVPool:
        spec = self.spec
        layout = KVLayout.uniform(
            MODEL_HASH,
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            PAGE_SIZE,
            self._card.sizes.dtype,
            spec.vocab_size,
        )
        pool = KVPool(layout, num_pages, 1, str(self._card.device), has_scratch=True)
        for region in (*pool.k, *pool.v):
            region.normal_()
        return pool

    def _runner(
        self, pool: KVPool, num_slots: int, limit: int, recording: Recording, ops: Ops | None = None
    ) -> ModelRunner:
        model = self.model if ops is None else dataclasses.replace(self.model, ops=ops)
        sampler = Sampler(num_slots, self.spec.vocab_size, pool.device, self.spec.eos_token_ids)
        kernels = greedy_kernels(num_slots, pool)
        return ModelRunner(self.spec, model, pool, num_slots, limit, sampler, recording, greedy=kernels)

    def _admit(self, slot: int, tokens: int, limit: int, kv_len: int) -> Admit:
        """Return an admission of `tokens` token ids, with pages for `limit` tokens that no other slot has and that are
        not in ascending order."""
        pages_each = -(-limit // PAGE_SIZE)
        ids = [(7 * index + slot) % self.spec.vocab_size for index in range(tokens)]
        pages = tuple(range(slot * pages_each, (slot + 1) * pages_each))
        params = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True)
        return Admit(slot, pack_i32(ids), tokens, kv_len, pages[::-1], params)
