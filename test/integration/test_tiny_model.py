"""The embedded model loads unchanged in transformers and gives right answers there (a small sample; the training script
prints the table of hundreds of prompts)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import chitu
from chitu.assets.tiny_tasks import FACT_TOKENS, TASKS, UNKNOWN, Example, facts_for

FOLDER = Path(chitu.__file__).parent / "assets" / "chitu-tiny"
Ask = Callable[[str], str]


@pytest.fixture(scope="module")
def ask() -> Ask:
    """Return a function from a user message to transformers' greedy answer in float32, as text without special
    tokens."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)

    def answer(prompt: str) -> str:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    return answer


def right(ask: Ask, examples: list[Example]) -> int:
    return sum(ask(example.prompt) == example.answer for example in examples)


def test_the_folder_is_small_and_says_qwen3_in_bfloat16() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8 * 2**20
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_key_value_heads"] >= 2
    assert config["max_position_embeddings"] >= 4096
    header_bytes = (FOLDER / "model.safetensors").read_bytes()
    header = json.loads(header_bytes[8 : 8 + int.from_bytes(header_bytes[:8], "little")])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}


def test_every_word_is_one_token_and_a_prompt_has_the_length_it_is_made_for() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    example = TASKS["recall"](random.Random(1), facts_for(2048), True)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": example.prompt}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert 2048 - FACT_TOKENS <= len(ids) <= 2048
    assert len(tokenizer.encode(example.answer, add_special_tokens=False)) == FACT_TOKENS


@pytest.mark.parametrize("tokens", [128, 512, 2048])
def test_recall_of_held_out_names_and_values(ask: Ask, tokens: int) -> None:
    rng = random.Random(tokens)
    examples = [TASKS["recall"](rng, facts_for(tokens), True) for _ in range(10)]
    assert right(ask, examples) >= 9


@pytest.mark.parametrize(("task", "facts"), [("yes_no", 12), ("absent", 12), ("copy", 0), ("sort", 0)])
def test_other_tasks(ask: Ask, task: str, facts: int) -> None:
    rng = random.Random(11)
    assert right(ask, [TASKS[task](rng, facts, True) for _ in range(10)]) >= 8


def test_it_says_politely_that_it_knows_nothing_else(ask: Ask) -> None:
    assert ask("Who was Napoleon?") == UNKNOWN


def test_without_its_list_a_question_is_not_answered_with_a_number(ask: Ask) -> None:
    example = TASKS["recall"](random.Random(12), 30, True)
    question = example.prompt.rsplit(". ", 1)[1]
    assert example.value not in ask(question)
