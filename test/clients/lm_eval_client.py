"""Run lm-eval over the API and over transformers' own model in float32. Run by test_clients.py, which passes a
folder."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

CLOSE = 1e-4
FACTS = [
    {
        "q": f"Alice has {i} apples. Bob has {i + 1} pears. How many apples has Alice? She has",
        "choices": [f" {i}", f" {i + 1}", " none"],
        "gold": 0,
    }
    for i in range(2, 8)
]


def tasks(facts: Path) -> list[dict[str, Any]]:
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(facts)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choose = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}]}
    write = {
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }
    whole = {"doc_to_text": "", "doc_to_target": "{{q}}", "metric_list": [{"metric": "word_perplexity"}]}
    return [
        {**common, **choose, "task": "choose", "output_type": "multiple_choice"},
        {**common, **write, "task": "write", "output_type": "generate_until"},
        {**common, **whole, "task": "whole", "output_type": "loglikelihood_rolling"},
    ]


def answers(model: str, model_args: dict[str, Any], facts: Path) -> dict[str, list[Any]]:
    manager = TaskManager(include_defaults=False)
    done = lm_eval.simple_evaluate(
        model=model, model_args=model_args, tasks=tasks(facts), task_manager=manager, bootstrap_iters=0
    )
    return {task: [sample["resps"] for sample in samples] for task, samples in done["samples"].items()}


def compare(served: Any, right: Any, where: str) -> int:
    """Return the number of log probabilities compared. Texts and greedy flags must be equal."""
    if isinstance(right, (list, tuple)):
        assert len(served) == len(right), (where, served, right)
        return sum(compare(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(served, right, strict=True)))
    if isinstance(right, float):
        # transformers sums in float32, whose steps at 500 and above are 6e-5.
        assert math.isclose(served, right, rel_tol=1e-6, abs_tol=CLOSE), (where, served, right)
        return 1
    assert served == right, (where, served, right)
    return 0


def main(folder: Path) -> None:
    facts = folder / "facts.jsonl"
    facts.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS), encoding="utf-8")
    right = answers(
        "hf", {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "add_bos_token": True}, facts
    )
    api = {"base_url": os.environ["OPENAI_BASE_URL"] + "/completions", "model": "tiny", "tokenizer": str(folder)}
    served = answers("local-completions", {**api, "num_concurrent": 4, "add_bos_token": True}, facts)
    assert served["write"][0][0][0], served["write"]
    num_floats = sum(compare(served[task], right[task], task) for task in right)
    assert num_floats >= 4 * len(FACTS), (num_floats, right)
    print("equal")


main(Path(sys.argv[1]))
