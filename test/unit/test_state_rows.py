"""State rows: their layout, and an engine whose logits depend on them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from support.running_sum import HIDDEN, SPEC, TAPS, VOCAB_SIZE, RunningSum

from chitu.config.load import load_topology
from chitu.config.schema import CacheConfig
from chitu.config.topology import find_instance
from chitu.engine.executor import Admit, Offload, PrefillChunk, Restore, StepPlan
from chitu.engine.memory_budget import kv_layout, num_state_rows, state_problems
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.errors import ConfigError, Internal
from chitu.kv_cache.device_checksum import DeviceStateSeals
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.state_row import (
    NO_STAMP,
    STAMP_BYTES,
    StateRow,
    StateStamp,
    digest_of,
    line_copies,
    read_stamp,
    state_bytes_of,
)
from chitu.kv_cache.state_sums import HostStateSeals
from chitu.protocol import SamplingParams, StateTensor, pack_i32
from chitu.types import Role

PAGE_SIZE = 4
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
LAYOUT = kv_layout(SPEC, PAGE_SIZE, "float32", 1, "m")


class Engine:
    """An engine that samples, with an aux row and a state row for each slot."""

    def __init__(self, num_states: int = 4) -> None:
        self.model = RunningSum()
        self.pool = KVPool(LAYOUT, 64, 4, num_state_slots=num_states)
        self.pool.state_rows.fill_(255)  # NaN in every float32
        sampler = Sampler(4, VOCAB_SIZE, torch.device("cpu"), ())
        self.runner = ModelRunner(SPEC, self.model, self.pool, 4, 200, sampler)

    def admit(self, slot: int, tokens: list[int], state_slot: int, kv_len: int = 0) -> Admit:
        pages = tuple(range(16 * slot, 16 * slot + 16))
        return Admit(slot, pack_i32(tokens), len(tokens), kv_len, pages, GREEDY, state_slot)

    def logits(self, slot: int) -> torch.Tensor:
        return self.pool.aux_logits[slot].clone()

    def stamp(self, state_slot: int) -> StateStamp:
        return read_stamp(self.pool.state_rows[state_slot, :STAMP_BYTES].numpy().tobytes())


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def error_of(found_V: torch.Tensor, right_V: torch.Tensor) -> float:
    return float((found_V - right_V).abs().max() / right_V.abs().max())


def chunks_of(length: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(size, length - start)) for start in range(0, length, size))


def test_a_row_has_a_stamp_and_the_part_of_each_tensor_that_a_rank_holds() -> None:
    row = StateRow.of(LAYOUT)
    assert [part.offset for part in row.parts] == [STAMP_BYTES, STAMP_BYTES + 4 * HIDDEN * 4]
    assert row.row_bytes == STAMP_BYTES + LAYOUT.state_bytes
    halves = StateRow.of(msgspec.structs.replace(LAYOUT, tp_size=2))
    assert [part.shape for part in halves.parts] == [(HIDDEN // 2, 4), (2 * HIDDEN, TAPS)]
    assert sum(part.nbytes for part in halves.parts) * 2 == LAYOUT.state_bytes


def test_every_tensor_of_a_row_is_aligned() -> None:
    odd = tuple(StateTensor(layer, "c", "bfloat16", (6, 3)) for layer in range(3))
    row = StateRow.of(msgspec.structs.replace(LAYOUT, state=odd))
    assert [part.offset % 64 for part in row.parts] == [0, 0, 0] and row.row_bytes % 64 == 0


def test_a_state_that_the_ranks_cannot_cut_is_refused_by_name() -> None:
    blocks = StateTensor(3, "conv", "float32", (14, 4), (6, 6, 2))
    with pytest.raises(ConfigError, match=r"6 \+ 6 \+ 2 rows of the state 'conv' of layer 3 cannot be cut for 4 ranks"):
        StateRow.of(msgspec.structs.replace(LAYOUT, state=(blocks,), tp_size=4))
    heads = msgspec.structs.replace(blocks, heads=(3, 3, 1))
    with pytest.raises(
        ConfigError, match=r"3 \+ 3 \+ 1 heads of the state 'conv' of layer 3 cannot be cut for 2 ranks"
    ):
        StateRow.of(msgspec.structs.replace(LAYOUT, state=(heads,), tp_size=2))


@pytest.mark.parametrize(("tp_size", "lines"), [(1, 14), (2, 8), (4, 6)])
def test_ranks_hold_copies_of_heads_that_are_fewer(tp_size: int, lines: int) -> None:
    """Of 8, 4 and 2 lines that belong to 4 heads, to 2 and to 1."""
    heads = StateTensor(3, "conv", "float32", (14, 4), (8, 4, 2), (4, 2, 1))
    layout = msgspec.structs.replace(LAYOUT, state=(heads,), tp_size=tp_size)
    assert [part.shape for part in StateRow.of(layout).parts] == [(lines, 4)]
    assert state_bytes_of(layout) == tp_size * lines * 4 * 4
    assert line_copies(layout) == tp_size


def test_the_tensors_of_a_pool_are_views_of_its_rows() -> None:
    pool = KVPool(LAYOUT, 2, 1, num_state_slots=3)
    assert {key: tuple(tensor.shape) for key, tensor in pool.states.items()} == {
        (0, "sum"): (3, HIDDEN, 4),
        (1, "window"): (3, 4 * HIDDEN, TAPS),
    }
    pool.states[1, "window"][2] = 1.0
    assert int(pool.state_rows[:2].sum()) == 0 and int(pool.state_rows[2].sum()) > 0
    assert pool.state_base + 3 * pool.state_row_bytes <= pool.arena_base + pool.arena_bytes
    assert not KVPool(msgspec.structs.replace(LAYOUT, state=()), 2, 1, num_state_slots=3).num_state_slots


@pytest.mark.parametrize("size", [1, 7, 100])
def test_logits_of_chunks_are_those_of_the_whole_prompt(size: int) -> None:
    engine, prompts = Engine(), [prompt_of(1, 33), prompt_of(2, 12)]
    plan = StepPlan(admit=[engine.admit(slot, prompt, 3 - slot) for slot, prompt in enumerate(prompts)])
    steps = itertools.zip_longest(*(chunks_of(len(prompt), size) for prompt in prompts))
    for parts in steps:
        for slot, part in enumerate(parts):
            if part is not None:
                plan.prefill.append(PrefillChunk(slot, *part, aux_slot=slot))
        engine.runner.execute(plan)
        plan = StepPlan()
    for slot, prompt in enumerate(prompts):
        assert error_of(engine.logits(slot), engine.model.reference(prompt)) < 1e-6
        assert engine.stamp(3 - slot) == StateStamp(len(prompt), digest_of(pack_i32(prompt)))
    assert engine.stamp(0) == NO_STAMP


def test_decoding_continues_the_state_of_the_prompt() -> None:
    engine, prompts = Engine(), [prompt_of(3, 9), prompt_of(4, 5)]
    admitted = [engine.admit(slot, prompt, slot) for slot, prompt in enumerate(prompts)]
    chunks = [PrefillChunk(slot, 0, len(prompt), sample=True) for slot, prompt in enumerate(prompts)]
    found = [engine.runner.execute(StepPlan(admit=admitted, prefill=chunks)).tokens]
    found += [engine.runner.execute(StepPlan(decode=[0, 1])).tokens for _ in range(7)]
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [engine.model.tokens(p, 8) for p in prompts]


def test_a_row_that_was_used_before_starts_from_zero() -> None:
    """`Engine` fills the rows with NaN."""
    engine, prompt = Engine(), prompt_of(5, 6)
    for _ in range(2):
        plan = StepPlan(admit=[engine.admit(0, prompt, 1)], prefill=[PrefillChunk(0, 0, 6, aux_slot=0)])
        engine.runner.execute(plan)
        assert error_of(engine.logits(0), engine.model.reference(prompt)) < 1e-6
        engine.runner.execute(StepPlan(release=[0]))


def test_a_retracted_sequence_gets_its_state_back_in_another_row() -> None:
    engine, prompt = Engine(), prompt_of(6, 10)
    engine.runner.execute(StepPlan(admit=[engine.admit(0, prompt, 2)], prefill=[PrefillChunk(0, 0, 10, sample=True)]))
    found = engine.model.tokens(prompt, 1)
    found += engine.runner.execute(StepPlan(decode=[0])).tokens
    engine.runner.execute(StepPlan(offload=[Offload(0, 7)]))
    engine.pool.state_rows.fill_(255)
    for region in engine.pool.regions:
        region.fill_(torch.nan)
    back = engine.admit(1, prompt + found, 0, kv_len=len(prompt) + 1)
    found += engine.runner.execute(StepPlan(admit=[back], restore=[Restore(1, 7)], decode=[1])).tokens
    found += engine.runner.execute(StepPlan(decode=[1])).tokens
    assert found == engine.model.tokens(prompt, 4)


@pytest.mark.parametrize("state_slots", [(4,), (1, 1)], ids=["out of range", "two of one row"])
def test_a_state_row_that_is_not_free_is_a_bug(state_slots: tuple[int, ...]) -> None:
    engine = Engine()
    with pytest.raises(Internal, match=f"state row {state_slots[-1]} is not free"):
        engine.runner.execute(StepPlan(admit=[engine.admit(s, [1], row) for s, row in enumerate(state_slots)]))


def test_no_sequence_computes_without_a_row() -> None:
    engine = Engine()
    with pytest.raises(Internal, match="without a state row"):
        engine.runner.execute(StepPlan(admit=[engine.admit(0, [1, 2], -1)], prefill=[PrefillChunk(0, 0, 2)]))


def test_the_warm_up_uses_no_more_state_rows_than_there_are() -> None:
    engine = Engine(num_states=2)
    engine.runner.warmup()
    assert engine.runner.execute(StepPlan()).slots == []


FAULTS: dict[str, Any] = {
    "no state": lambda rows: rows.zero_(),
    "state of a shorter prompt": lambda rows: rows.copy_(rows[[1, 1]]),
}
"""What becomes of two rows: of the whole prompt, and of the prompt without its last chunk."""


@pytest.mark.parametrize("fault", FAULTS)
def test_logits_show_a_wrong_state(fault: str) -> None:
    engine, prompt = Engine(), prompt_of(7, 20)
    plan = StepPlan(
        admit=[engine.admit(0, prompt, 0), engine.admit(1, prompt[:-5], 1)],
        prefill=[PrefillChunk(0, 0, 20, aux_slot=0), PrefillChunk(1, 0, 15, aux_slot=1)],
    )
    engine.runner.execute(plan)
    FAULTS[fault](engine.pool.state_rows[:2])
    again = engine.admit(2, [*prompt, 1], 2, kv_len=20)
    engine.pool.state_rows[2] = engine.pool.state_rows[0]
    engine.runner.execute(StepPlan(release=[0, 1], admit=[again], prefill=[PrefillChunk(2, 20, 1, aux_slot=2)]))
    assert error_of(engine.logits(2), engine.model.reference([*prompt, 1])) > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("counts_copies", [True, False])
def test_a_device_has_the_checksums_of_the_host(dtype: str, tp_size: int, counts_copies: bool) -> None:
    """The second block of `b` has two groups."""
    state = (StateTensor(0, "a", dtype, (8, 3, 5)), StateTensor(1, "b", dtype, (16, 3), (4, 4, 8), (4, 2, 4)))
    layout = msgspec.structs.replace(LAYOUT, state=state, tp_size=tp_size)
    for rank in range(tp_size):
        pool = KVPool(layout, 2, 1, num_state_slots=3)
        pool.state_rows.copy_(torch.randint(0, 256, pool.state_rows.shape, dtype=torch.uint8))
        host = HostStateSeals(layout, rank, pool.state_base, 3, counts_copies)
        device = DeviceStateSeals(pool, rank, counts_copies)
        assert [host.seal(slot) for slot in range(3)] == [device.seal(slot) for slot in range(3)]


def test_the_number_of_rows_is_that_of_the_requests_that_may_hold_one_in_half_of_the_memory() -> None:
    config = CacheConfig()
    assert num_state_rows(config, Role.PREFILL, 16, 100) == 32
    assert num_state_rows(config, Role.DECODE, 16, 100) == 16 + 8
    assert num_state_rows(config, Role.UNIFIED, 4, 100) == 4 + 4
    assert num_state_rows(config, Role.DECODE, 16, 100, pool_bytes=2000) == 10
    assert num_state_rows(config, Role.DECODE, 16, 100, pool_bytes=10) == 1
    assert num_state_rows(config, Role.DECODE, 16, 0, pool_bytes=2000) == 0
    assert num_state_rows(CacheConfig(num_state_slots=7), Role.DECODE, 16, 100, pool_bytes=2000) == 7


def test_settings_that_keep_pages_alone_are_refused_for_a_model_with_state() -> None:
    topology = load_topology("unified_local.yaml", ["cache.host_bytes=1000000"])
    instance = find_instance(topology, Role.UNIFIED, 0)
    (problem,) = state_problems(topology, SPEC, [instance])
    assert "cache.host_bytes is 1000000" in problem and "recurrent state" in problem
    assert not list(state_problems(topology, dataclasses.replace(SPEC, state=()), [instance]))
    cut = dataclasses.replace(SPEC, state=(StateTensor(2, "conv", "float32", (3, 4)),))
    wide = msgspec.structs.replace(instance.config, tp_size=2)
    plain = load_topology("unified_local.yaml", [])
    (problem,) = state_problems(plain, cut, [dataclasses.replace(instance, config=wide)])
    assert "tp_size is 2, but 3 rows of the state 'conv' of layer 2" in problem
