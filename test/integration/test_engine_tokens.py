"""Greedy tokens of the engine equal those of `transformers`, whatever the chunking, the pages and the other
sequences."""

from __future__ import annotations

import json

import pytest
import torch
from engine_checkpoints import FAMILIES, Engine, expected_tokens, generate, make_prompt, write_checkpoint
from support.reference_ops import ReferenceOps

from chitu.engine.build import load_model
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.checkpoint import read_entries
from chitu.models.config import weight_files
from chitu.ops.torch_ops import TorchOps

LENGTHS = (1, 15, 16, 17, 37, 150, 333, 600)


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_in_a_mixed_batch(family, tmp_path):
    reference = write_checkpoint(tmp_path, family)
    prompts = [make_prompt(length) for length in LENGTHS]
    engine = Engine(tmp_path)
    expected = [expected_tokens(reference, prompt, 12) for prompt in prompts]
    assert generate(engine, prompts, 12) == expected


def test_the_plain_operations_give_the_same_tokens(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3")
    prompts = [make_prompt(length, seed=1) for length in (3, 40, 130)]
    expected = [expected_tokens(reference, prompt, 8) for prompt in prompts]
    assert generate(Engine(tmp_path, ops=TorchOps()), prompts, 8) == expected
    assert generate(Engine(tmp_path, ops=ReferenceOps()), prompts, 8) == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_kernels_of_the_gpu_give_the_same_tokens(family, tmp_path):
    """Runs under the interpreter; DeepSeek's one layer is a dense one."""
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    reference = write_checkpoint(tmp_path, family, num_layers=1)
    prompts = [make_prompt(20), make_prompt(3)]
    expected = [expected_tokens(reference, prompt, 2) for prompt in prompts]
    assert generate(Engine(tmp_path, ops=TritonOps(4), max_model_len=64), prompts, 2, chunk_size=12) == expected


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "deepseek_v2"])
def test_a_chunk_size_changes_nothing(family, tmp_path):
    reference = write_checkpoint(tmp_path, family)
    prompts = [make_prompt(300), make_prompt(47)]
    expected = [expected_tokens(reference, prompt, 6) for prompt in prompts]
    engine = Engine(tmp_path)
    for size in (1024, 100, 16, 7):
        assert generate(engine, prompts, 6, chunk_size=size) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_half_precision_runs_and_agrees_with_float32_at_first(family, dtype, tmp_path):
    reference = write_checkpoint(tmp_path, family)
    prompts = [make_prompt(length) for length in (5, 50)]
    outputs = generate(Engine(tmp_path, dtype=dtype), prompts, 4)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            ranked = reference(torch.tensor([prompt])).logits[0, -1].topk(5).indices.tolist()
        assert len(output) == 4
        assert output[0] in ranked


def test_a_sharded_checkpoint_loads_and_reports_progress(tmp_path):
    reference = write_checkpoint(tmp_path, "llama2", max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    prompt = make_prompt(33)
    assert generate(Engine(tmp_path), [prompt], 6) == [expected_tokens(reference, prompt, 6)]
    seen: list[tuple[int, int]] = []
    load_model(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(entry.num_bytes for entry in read_entries(weight_files(tmp_path)).values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(seen) > 20


def test_tensors_that_the_model_would_not_use_are_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias|k_proj\.bias"):
        load_model(tmp_path)
    config["intermediate_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"gate_proj.*shape"):
        load_model(tmp_path)
