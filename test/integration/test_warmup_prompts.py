"""Which prompts warm up a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_checkpoints import write_checkpoint

from chitu.config.load import load_topology
from chitu.config.topology import instances
from chitu.engine.build import warmup_prompts
from chitu.models.config import read_model_spec
from chitu.types import Role


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    found = {}
    for family in ("qwen3", "deepseek_v2"):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(folder, family, num_layers=1)
        found[family] = read_model_spec(folder)
    return found


def warmed(specs, role, longest_recorded, *overrides, family="qwen3", device="cuda:0"):
    topology = load_topology(None, ["scheduler.chunk_size=4100", "scheduler.max_batched_tokens=4500", *overrides])
    instance = next(instance for instance in instances(topology) if instance.role is role)
    spec = replace(specs[family], max_model_len=32768)
    return warmup_prompts(topology, instance, spec, torch.device(device), longest_recorded)


def test_a_gpu_warms_up_with_every_length_that_prompts_are_padded_to(specs):
    alone = [(2560,), (3072,), (3584,), (4096,), (4100,)]
    assert warmed(specs, Role.PREFILL, 2048) == [(1024, 1025), (1536, 513), (2048, 1), *alone]
    assert warmed(specs, Role.PREFILL, 0) == [(1024,), (1536,), (2048,), *alone], "nothing is recorded"
    small = ["scheduler.chunk_size=2048", "scheduler.max_batched_tokens=2048"]
    assert warmed(specs, Role.PREFILL, 2048, *small) == [], "every step is recorded"


def test_without_torchs_library_one_prompt_beyond_the_recordings_is_enough(specs):
    assert warmed(specs, Role.PREFILL, 2048, "model.prefill_attention=paged") == [(2049,)]
    assert warmed(specs, Role.PREFILL, 2048, family="deepseek_v2") == [(2049,)]
    assert warmed(specs, Role.DECODE, 2048) == warmed(specs, Role.PREFILL, 2048, device="cpu") == []
