"""A generated checkpoint is a real one: transformers loads it and agrees with our tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from chitu.errors import ConfigError, InvalidRequest
from chitu.tokenizer import Tokenizer
from chitu.tools.make_model import FAMILIES, ModelShape, make_model

SMALL = ModelShape(hidden_size=64, layers=2, heads=4, kv_heads=2, vocab_size=384)
TEXTS = [
    "",
    "The quick brown fox",
    " leading and trailing ",
    "zwölf 你好 🙂👩‍👩‍👧 e\u0301",
    "line\n\nline\ttab",
    "<|im_start|>user\nhi<|im_end|>",
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)


def greedy(folder: Path, prompt: str, count: int) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens, and the distance between the best two logits of each step."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt_ids = torch.tensor([Tokenizer.load(folder).encode(prompt)])
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=count,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.scores)[:, 0].topk(2).values
    return output.sequences[0, prompt_ids.shape[1] :].tolist(), best[:, 0] - best[:, 1]


def test_transformers_loads_every_weight(checkpoint: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert type(model).__name__ == FAMILIES[checkpoint.name]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 8_000_000


def test_greedy_text_varies_depends_on_the_prompt_and_runs_to_its_limit(checkpoint: Path) -> None:
    first, gaps = greedy(checkpoint, "The quick brown fox", 48)
    second, _ = greedy(checkpoint, "The quick brown cat", 48)
    assert len(first) == 48  # no eos came out
    assert len(set(first)) > 12
    assert first[:8] != second[:8]
    assert float(gaps.min()) > 1e-4


def test_transformers_loads_a_model_with_vision_and_its_image_processor(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3-vl", SMALL)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    inputs = processor(images=[np.zeros((40, 100, 3), np.uint8)], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 6]]
    ids = tokenizer("<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>What?", return_tensors="pt")
    assert ids["input_ids"][0, 1:6].tolist() == [5, *[model.config.image_token_id] * 3, 8]
    kinds = (ids["input_ids"] == model.config.image_token_id).int()
    with torch.inference_mode():
        seen = model(**ids, **inputs, mm_token_type_ids=kinds).logits[0, -1]
        inputs["pixel_values"] += 0.3
        other = model(**ids, **inputs, mm_token_type_ids=kinds).logits[0, -1]
    assert float((seen - other).abs().max()) > 0.1


def test_the_template_writes_a_placeholder_in_the_place_of_an_image(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_vl", SMALL)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "in "}, image, {"type": "image"}, {"type": "text", "text": "out"}]
    messages = [{"role": "user", "content": parts}]
    ours = Tokenizer.load(folder).apply_chat_template(messages, None, False)
    assert "user\nin " + "<|vision_start|><|image_pad|><|vision_end|>" * 2 + "out<|im_end|>" in ours
    assert ours == AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)


def test_tied_embeddings_do_not_end_in_one_repeated_token(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tied", "llama", tie=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    tokens, _ = greedy(folder, "The quick brown fox", 48)
    assert len(tokens) == 48
    assert len(set(tokens)) > 8


def test_our_token_ids_and_text_are_those_of_transformers(checkpoint: Path) -> None:
    ours, theirs = Tokenizer.load(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.vocab_size == len(theirs)
    assert theirs.eos_token_id in ours.eos_token_ids
    assert len(ours.eos_token_ids) == 2


def test_a_checkpoint_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen2", SMALL)
    expected = Tokenizer.load(folder).encode("The quick 你好", add_special_tokens=False)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.model.save(str(folder))  # vocab.json and merges.txt, the format of GPT-2 and of early Qwen
    (folder / "tokenizer.json").unlink()
    converted = Tokenizer.load(folder)
    assert converted.encode("The quick 你好", add_special_tokens=False) == expected
    assert converted.decode(expected) == "The quick 你好"


CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": "你好 🙂"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "go on"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f<x>", "description": "ä", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_template_renders_as_in_transformers(
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    add_generation_prompt: bool,
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path / "m", "qwen3", SMALL)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    ours = Tokenizer.load(folder).apply_chat_template(messages, tools, add_generation_prompt)
    assert ours == theirs
    assert "Hi" in ours or "你好" in ours or "parts" in ours


def test_a_role_that_the_template_refuses_is_the_clients_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_model(tmp_path / "m", "qwen3", SMALL))
    with pytest.raises(InvalidRequest, match="unknown role wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}])


def test_shards_hold_the_same_weights_as_one_file(tmp_path: Path) -> None:
    whole = load_file(make_model(tmp_path / "one", "llama", SMALL) / "model.safetensors")
    folder = make_model(tmp_path / "many", "llama", SMALL, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    parts = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    assert len(parts) == 3
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(parts[file][name], whole[name])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_rounded_as_torch_rounds(dtype: str, tmp_path: Path) -> None:
    whole = load_file(make_model(tmp_path / "full", "qwen2", SMALL) / "model.safetensors")
    half = load_file(make_model(tmp_path / "half", "qwen2", SMALL, dtype=dtype) / "model.safetensors")
    for name, tensor in whole.items():
        assert torch.equal(half[name], tensor.to(getattr(torch, dtype)))


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = [
        load_file(make_model(tmp_path / name, "qwen3", SMALL, seed=seed) / "model.safetensors")["lm_head.weight"]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_folder_with_files_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_model(tmp_path, "llama", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert (make_model(tmp_path / "m", "llama", SMALL) / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("gpt2", {}, "gpt2"),
        ("llama", {"hidden_size": 100, "heads": 3, "kv_heads": 1}, "multiple of heads"),
        ("llama", {"head_dim": -2}, "at least 1"),
        ("llama", {"intermediate_size": -2}, "at least 1"),
        ("llama", {"seed": -1}, "seed -1 is negative"),
        ("llama", {"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        ("llama", {"kv_heads": 0}, "at least 1"),
        ("llama", {"vocab_size": 100}, "vocab_size 100"),
        ("llama", {"head_dim": 7}, "odd"),
        ("qwen2", {"head_dim": 64}, "qwen2"),
        ("llama", {"dtype": "int8"}, "int8"),
        ("qwen3_moe", {"experts": 4, "experts_per_token": 5}, "5 experts a token, of 4"),
        ("deepseek_v3", {"experts": 5}, "5 experts cannot be put"),
        ("deepseek_v2", {"rope_head_dim": 5}, "rope_head_dim 5"),
        ("qwen3_vl", {"head_dim": 6}, "head_dim 6 is below 8"),
        ("qwen3_vl", {"vocab_size": 264}, "vocab_size 264 is less than 265"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(
    family: str, sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(tmp_path / "m", family, **sizes)
    assert not any(tmp_path.iterdir())
