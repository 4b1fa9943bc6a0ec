"""The accuracy table: held-out examples, decoded greedily, right only if the whole answer matches. Called after
training.

An answer is right if the model's best token is the right one at every position, end of turn included, given the right
tokens before it. Greedy decoding gives exactly such answers, so one forward pass per prompt is enough.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from chitu.assets.tiny_tasks import TASKS, Example, facts_for
from chitu.tools.make_model import BOS, END_OF_TURN, EOS, START_OF_TURN
from tiny.model import TinyModel

TOKENS_PER_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    task: str
    prompt_tokens: int
    """Length of the longest prompt, chat template included."""
    prompts: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.prompts


def chat_text(prompt: str) -> str:
    """Return what the chat template makes of one user message, generation prompt included."""
    return f"{BOS}{START_OF_TURN}user\n{prompt}{END_OF_TURN}\n{START_OF_TURN}assistant\n"


def plain_text(prompt: str) -> str:
    """Return the same question as text to complete."""
    facts, question = prompt.rsplit(". ", 1)
    return f"{BOS}{facts}. Question: {question} Answer:"


@torch.no_grad()
def score(model: TinyModel, tokenizer: Tokenizer, task: str, examples: Sequence[Example], plain: bool = False) -> Row:
    """Return a row with the number of examples that the model answers right."""
    device = next(model.parameters()).device
    pairs: list[tuple[list[int], list[int]]] = []
    for example in examples:
        prompt = plain_text(example.prompt) if plain else chat_text(example.prompt)
        answer = f" {example.answer}{EOS}" if plain else f"{example.answer}{END_OF_TURN}"
        pairs.append(
            (
                tokenizer.encode(prompt, add_special_tokens=False).ids,
                tokenizer.encode(answer, add_special_tokens=False).ids,
            )
        )
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    longest = max(len(prompt) for prompt, _ in pairs)
    right = 0
    while pairs:
        length = len(pairs[-1][0]) + len(pairs[-1][1])
        batch = [pairs.pop() for _ in range(min(len(pairs), max(1, TOKENS_PER_BATCH // length)))]
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        wanted = torch.full((len(batch), length), -1)
        for row, (prompt_ids, answer_ids) in enumerate(batch):
            ids[row, : len(prompt_ids) + len(answer_ids)] = torch.tensor(prompt_ids + answer_ids)
            wanted[row, len(prompt_ids) : len(prompt_ids) + len(answer_ids)] = torch.tensor(answer_ids)
        hidden = model(ids[:, :-1].to(device))
        asked = wanted[:, 1:] >= 0
        best = torch.full_like(wanted[:, 1:], -1)
        best[asked] = model.logits(hidden[asked.to(device)]).argmax(-1).cpu()
        right += int((best == wanted[:, 1:]).all(dim=1).sum())
    return Row(task, longest, len(examples), right)


def table(model: TinyModel, tokenizer: Tokenizer, seed: int = 12345, prompts: int = 500) -> list[Row]:
    """Score every task on held-out names, values and words; recall at four lengths and as text to complete."""
    rng = random.Random(seed)
    rows = []
    for tokens in (256, 512, 1024, 2048):
        examples = [TASKS["recall"](rng, facts_for(tokens), True) for _ in range(prompts)]
        rows.append(score(model, tokenizer, "recall", examples))
    examples = [TASKS["recall"](rng, facts_for(1024), True) for _ in range(prompts // 5)]
    rows.append(score(model, tokenizer, "recall, completion", examples, plain=True))
    for task, facts in (("yes_no", 40), ("absent", 40), ("copy", 0), ("sum", 0), ("sort", 0), ("other", 0)):
        rows.append(score(model, tokenizer, task, [TASKS[task](rng, facts, True) for _ in range(prompts)]))
    return rows
