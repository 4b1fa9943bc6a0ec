"""How many pages an instance gets: the arithmetic, and errors with the numbers if there is no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.config.schema import CacheConfig, InstanceConfig
from chitu.config.topology import find_instance
from chitu.engine.memory_budget import (
    CPU_POOL_LIMIT_BYTES,
    DEFAULT_IMAGE_ROWS,
    GIB,
    DeviceMemory,
    HostMemory,
    ImageMemory,
    PoolPlan,
    device_pages,
    expert_problems,
    held_share,
    kv_layout,
    num_image_rows,
    num_pages_for,
    plan_pool,
    reserve_bytes,
    share_of_device,
)
from chitu.errors import ConfigError
from chitu.models.config import read_model_spec
from chitu.protocol import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from chitu.tools.make_model import make_model
from chitu.types import Role

CARD = DeviceMemory(total_bytes=80 * GIB, free_bytes=60 * GIB, own_bytes=16 * GIB)
PAGE = 2 << 20
ON_ONE_CARD = [f"dp_config.router.{role}_schedulers.0.devices=[cuda:0]" for role in ("prefill", "decode")]


def shares(*overrides: str) -> list[float]:
    """Return the shares of P0 and D0 of a 1P1D on one card."""
    topology = load_topology("pd_disagg_1p1d_local", [*ON_ONE_CARD, *overrides])
    pair = [find_instance(topology, role, 0) for role in (Role.PREFILL, Role.DECODE)]
    return [share_of_device(topology, instance, "cuda:0") for instance in pair]


def test_on_cpu_a_fraction_of_free_memory_is_shared_by_the_instances_of_the_host():
    assert num_pages_for(CacheConfig(), PAGE, 8 * GIB, 2, 10**6) == 512, "a quarter, for two"
    assert num_pages_for(CacheConfig(memory_fraction=0.5), PAGE, 8 * GIB, 2, 10**6) == 1024
    assert num_pages_for(CacheConfig(), PAGE, 1 << 50, 1, 10**6) == CPU_POOL_LIMIT_BYTES // PAGE
    assert num_pages_for(CacheConfig(), PAGE, 8 * GIB, 1, 7) == 7, "more could never be in use"
    with pytest.raises(ConfigError, match="holds no page"):
        num_pages_for(CacheConfig(), PAGE, 100, 1, 7)


def test_a_gpu_is_shared_by_the_instances_on_it_and_not_by_those_of_the_host():
    assert shares() == pytest.approx([0.45, 0.45])
    assert shares("cache.memory_fraction=0.6") == pytest.approx([0.3, 0.3])
    assert shares("dp_config.router.decode_schedulers.0.devices=[cuda:1]") == pytest.approx([0.9, 0.9])
    assert shares("dp_config.router.prefill_schedulers.0.devices=[cuda]") == pytest.approx([0.45, 0.45]), (
        "cuda is cuda:0"
    )


def test_a_rank_of_a_group_that_shares_experts_holds_its_part_of_them(tmp_path: Path):
    folder = make_model(tmp_path / "m", "qwen3_moe", layers=3, experts=8, expert_size=64, hidden_size=128)
    spec = read_model_spec(folder)
    experts, dense = 3 * 8 * 3 * 64 * 128, 500_000
    for config, held in (
        (InstanceConfig(dp_size=4), dense + experts),
        (InstanceConfig(dp_size=4, experts="spread"), dense + experts / 4),
        (InstanceConfig(dp_size=2, tp_size=2, experts="spread"), dense + experts / 2),
        (InstanceConfig(tp_size=4, experts="spread"), dense + experts),
    ):
        assert held_share(spec, dense + experts, config) * (dense + experts) == pytest.approx(held)


def test_experts_that_cannot_be_spread_are_refused_by_name(tmp_path: Path):
    key = "dp_config.router.prefill_schedulers"
    topology = load_topology("pd_disagg_1p1d_local", [f"{key}=[{{dp_size: 3, tp_size: 3, experts: spread}}]"])
    instance = find_instance(topology, Role.PREFILL, 0)
    dense, sparse = read_model_spec(TINY_MODEL_DIR), read_model_spec(make_model(tmp_path / "m", "qwen3_moe"))
    assert list(expert_problems(dense, [instance])) == [
        f"{key}.0.experts is spread, but {dense.architecture} has no experts"
    ]
    assert list(expert_problems(sparse, [instance])) == [
        f"{key}.0.experts is spread, but a layer has 8 experts for the 9 ranks of {key}.0 (dp_size x tp_size)"
    ]


def test_an_own_fraction_comes_first_and_the_others_share_the_rest():
    own = "dp_config.router.{}_schedulers.0.memory_fraction={}"
    assert shares(own.format("prefill", 0.3)) == pytest.approx([0.3, 0.6])
    assert shares(own.format("prefill", 0.3), own.format("decode", 0.7)) == pytest.approx([0.3, 0.7])
    with pytest.raises(ConfigError, match=r"P0, D0 ask for 1\.1 of cuda:0"):
        shares(own.format("prefill", 0.3), own.format("decode", 0.8))
    with pytest.raises(ConfigError, match=r"decode_schedulers\.0\.memory_fraction.*leaves nothing"):
        shares(own.format("prefill", 0.95))


def test_pages_are_what_weights_and_steps_leave_of_the_share():
    assert device_pages(0.5, CARD, 2 * GIB, GIB, PAGE, 10**6) == (40 - 16 - 2 - 1) * GIB // PAGE
    assert device_pages(0.5, CARD, 2 * GIB, GIB, PAGE, 100) == 100
    assert device_pages(0.5, CARD, 2 * GIB, GIB, PAGE, 10**6, transfer_bytes=GIB) == (40 - 16 - 2 - 2) * GIB // PAGE


def test_what_a_slot_keeps_is_counted():
    spec = read_model_spec(TINY_MODEL_DIR, None)
    few, many = (reserve_bytes(spec, 2, 64, num_slots, 1000) for num_slots in (1, 2))
    lists = 12 * (MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_ALLOWED_TOKEN_IDS) + 8 * MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
    token_ids, counts, logits = 1000 * 8, 4 * spec.vocab_size, 4 * spec.vocab_size
    assert many - few >= lists + token_ids + counts + logits


def test_no_room_is_a_sentence_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"0\.2 of the GPU's 80\.0 GiB are 16\.0 GiB: 16\.0 for weights, 2\.0 for steps"
    ):
        device_pages(0.2, CARD, 2 * GIB, GIB, PAGE, 10**6)
    with pytest.raises(ConfigError, match=r"1\.0 for aux rows, 2\.5 for transfers; the rest holds no page"):
        device_pages(0.25, CARD, GIB, GIB, PAGE, 10**6, transfer_bytes=5 * GIB // 2)
    with pytest.raises(ConfigError, match=r"53\.0 for pages, but only 40\.0 GiB are free"):
        device_pages(0.9, DeviceMemory(80 * GIB, 40 * GIB, 16 * GIB), 2 * GIB, GIB, PAGE, 10**6)


def plan(
    role: Role,
    memory: HostMemory | DeviceMemory | None,
    *overrides: str,
    tp_rank: int = 0,
    images: ImageMemory = ImageMemory(),
) -> PoolPlan:
    """Return the plan of an instance of a 1P1D on one card, of the embedded model in float32."""
    topology = load_topology("pd_disagg_1p1d_local", [*ON_ONE_CARD, f"model.path={TINY_MODEL_DIR}", *overrides])
    spec = read_model_spec(TINY_MODEL_DIR, None)
    layout = kv_layout(spec, topology.cache.page_size, "float32", 1, "hash", "float32")
    return plan_pool(topology, find_instance(topology, role, 0), tp_rank, spec, layout, "float32", memory, 64, images)


def test_pages_that_are_asked_for_are_planned_whatever_the_memory_is():
    planned = plan(Role.DECODE, None, "cache.num_pages=77")
    assert (planned.num_pages, planned.num_states) == (77, 0) and planned.num_aux_slots > 0


def test_a_plan_takes_no_more_than_its_part_of_the_memory_and_no_more_than_can_be_in_use():
    page_bytes = kv_layout(read_model_spec(TINY_MODEL_DIR, None), 16, "float32", 1, "hash", "float32").bytes_per_page
    scarce = plan(Role.PREFILL, HostMemory(400 * page_bytes))
    assert scarce.num_pages == 50, "a quarter, for two"
    few = "scheduler.max_running_requests=2"
    plenty = [plan(Role.DECODE, memory, few).num_pages for memory in (HostMemory(64 * GIB), CARD)]
    assert plenty[0] == plenty[1] < CARD.free_bytes // page_bytes, "bounded by what can be in use"


def test_features_of_images_come_out_of_what_pages_would_have():
    page_bytes = kv_layout(read_model_spec(TINY_MODEL_DIR, None), 16, "float32", 1, "hash", "float32").bytes_per_page
    images = ImageMemory(64, 30 * page_bytes, 10 * page_bytes)
    scarce = HostMemory(400 * page_bytes)
    assert plan(Role.PREFILL, scarce, images=images).num_pages == 20, "the tower's own needs are not of the pool"
    card = replace(CARD, total_bytes=8 * GIB, own_bytes=GIB)
    lost = plan(Role.PREFILL, card).num_pages - plan(Role.PREFILL, card, images=images).num_pages
    assert lost in (39, 40, 41)
    assert plan(Role.PREFILL, None, "cache.num_pages=77", images=images).images == images


def test_the_rows_for_features_are_as_many_as_asked_for_or_the_largest_image_has():
    spec = read_model_spec(TINY_MODEL_DIR, None)
    assert num_image_rows(CacheConfig(image_rows=99), spec) == 99
    assert num_image_rows(CacheConfig(), spec) == spec.max_model_len < DEFAULT_IMAGE_ROWS
    assert num_image_rows(CacheConfig(), replace(spec, max_model_len=10**6)) == DEFAULT_IMAGE_ROWS


def test_only_the_main_rank_has_rows_for_logits():
    memory = HostMemory(GIB)
    assert plan(Role.PREFILL, memory).num_aux_slots > 0 == plan(Role.PREFILL, memory, tp_rank=1).num_aux_slots
