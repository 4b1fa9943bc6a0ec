"""Greedy tokens of the engine equal those of `transformers`, whatever the chunking, the pages and the company."""

from __future__ import annotations

import pytest
import torch
from engine_checkpoints import FAMILIES, Engine, expected_tokens, generate, make_prompt, write_checkpoint

LENGTHS = (1, 15, 16, 17, 37, 150, 333, 600)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_in_a_mixed_batch(family, tmp_path):
    reference = write_checkpoint(tmp_path, family)
    prompts = [make_prompt(length) for length in LENGTHS]
    engine = Engine(tmp_path)
    expected = [expected_tokens(reference, prompt, 12) for prompt in prompts]
    assert generate(engine, prompts, 12) == expected
