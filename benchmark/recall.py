"""Recall of a fact from a long list, through 1P1D and 2P3D, against `transformers`; then with one broken KV page.

    python -m benchmark.recall [--model MODEL] [--prompts 500] [--tokens 2048] [--zero-page 5]

The noise of a random model would hide a wrong KV cache; chitu-tiny's answers are right or visibly wrong. All answers
are greedy, in float32, to the same token ids. Exits with code 1 unless transformers and both topologies answer 99 % of
the prompts right and give the same tokens, and the broken page (`faults.zero_page`) costs answers.

The broken page: one D with a pool for one request, and requests of more than half the pool, so that each runs alone and
gets the pages 0, 1, ... Page n then holds the prompt's tokens from n * PAGE_SIZE on, so the prompts whose asked value
lies there are known beforehand.

Parts of it are used by test/integration/test_recall.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from support.faults import ENVIRONMENT, FaultConfig

from chitu.assets import TINY_MODEL_DIR
from chitu.assets.tiny_tasks import Example, facts_for, recall
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.launch.router_client import RouterClient
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish

PASS_RATE = 0.99
PLANTED = Entries(scheduler="support.planted_scheduler")
PAGE_SIZE = 128
"""Tokens for each page in the run with the broken page."""
MAX_OUTPUT_TOKENS = 24
"""Limit of an answer's tokens; a right answer has 12, including the end token."""
TOPOLOGIES = {
    "1P1D": [],
    "2P3D": [
        "dp_config.router.prefill_schedulers=[{}, {}]",
        "dp_config.router.decode_schedulers=[{}, {}, {}]",
        "dp_config.router.policy=round_robin",
    ],
}
"""Overrides of the packaged 1P1D for each topology."""
PATIENCE = [
    "dp_config.router.pd_disaggregation.deadlines.queue_s=300",
    "dp_config.router.pd_disaggregation.deadlines.transfer_s=300",
]
"""Overrides with long deadlines: the machine may be slow, since answers are compared, not times."""


@dataclass(frozen=True, slots=True)
class RecallPrompt:
    example: Example
    token_ids: list[int]
    """Token ids of the prompt, including the chat template."""
    value_at: range
    """Positions in `token_ids` of the asked value, where the list states it."""

    def is_asked_from(self, page: int, page_size: int) -> bool:
        """Return whether this page of the prompt holds the value or a part of it."""
        return self.value_at.start < (page + 1) * page_size and self.value_at.stop > page * page_size


@dataclass(frozen=True, slots=True)
class Run:
    """Answers of one engine or cluster to the prompts."""

    answers: list[list[int]]
    """Token ids of each answer, including the end of turn."""
    seconds: float
    pairs: Counter[str] = field(default_factory=Counter)
    """Number of requests by the pair that served them, such as `P0-D1`."""
    logs: dict[str, str] = field(default_factory=dict)
    """Log of each process."""


class Recaller:
    """A checkpoint folder with its tokenizer; makes prompts and reads answers as transformers does."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self.model = model
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def prompt(self, rng: random.Random, max_tokens: int) -> RecallPrompt:
        """Return a question over a list that nearly fills `max_tokens`, with held-out names and values."""
        num_facts = facts_for(max_tokens)
        while True:
            prompt = self._encode(recall(rng, num_facts))
            if len(prompt.token_ids) <= max_tokens:
                return prompt
            num_facts = min(num_facts - 1, num_facts * max_tokens // len(prompt.token_ids))

    def _encode(self, example: Example) -> RecallPrompt:
        messages = [{"role": "user", "content": example.prompt}]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start = text.index(example.answer) + example.answer.index(example.value)
        inside = [
            position
            for position, (low, high) in enumerate(encoded["offset_mapping"])
            if low < start + len(example.value) and high > start
        ]
        return RecallPrompt(example, encoded["input_ids"], range(inside[0], inside[-1] + 1))

    def is_right(self, prompt: RecallPrompt, answer: Sequence[int]) -> bool:
        """Return whether the answer is the whole expected sentence, not only the value."""
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip() == prompt.example.answer

    def num_right(self, prompts: Sequence[RecallPrompt], answers: Sequence[Sequence[int]]) -> int:
        return sum(self.is_right(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))


def by_transformers(model: Path, prompts: Sequence[RecallPrompt]) -> Run:
    """Answer greedily in float32, one prompt at a time, so that padding cannot change the rounding."""
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start_s = time.perf_counter()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt.token_ids])
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_OUTPUT_TOKENS, do_sample=False
            )
            answers.append(out[0, ids.shape[1] :].tolist())
    return Run(answers, time.perf_counter() - start_s)


def by_cluster(
    model: Path,
    prompts: Sequence[RecallPrompt],
    overrides: Sequence[str] = (),
    concurrency: int = 8,
    entries: Entries = PLANTED,
    zero_page: int | None = None,
) -> Run:
    """Answer through a fresh cluster on this machine, `concurrency` requests at a time; `zero_page` is broken on D."""
    settings = [f"model.path={model}", "model.served_name=m", "model.dtype=float32", *PATIENCE, *overrides]
    env = {ENVIRONMENT: msgspec.json.encode(FaultConfig(zero_page=zero_page)).decode()}
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=entries, env=env) as cluster:
        cluster.wait_ready()
        client, start_s = RouterClient(cluster.url), time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda prompt: _complete(client, prompt.token_ids), prompts))
        seconds = time.perf_counter() - start_s
    logs = {name: cluster.logs(name) for name in cluster.members}
    created = [line for line in logs["router"].splitlines() if "created pd request: " in line]
    return Run(answers, seconds, Counter(line.split()[-1] for line in created), logs)


def small_pool(max_tokens: int) -> list[str]:
    """Return the overrides of a 1P1D whose D has a pool for one request; see the module's docstring."""
    num_pages = -(-(max_tokens + MAX_OUTPUT_TOKENS) // PAGE_SIZE)
    return [
        f"cache.page_size={PAGE_SIZE}",
        f"cache.num_pages={num_pages}",
        "cache.prefix_cache=false",  # cached pages would move the next prompt to other pages
    ]


def _complete(client: RouterClient, prompt: list[int]) -> list[int]:
    """Return the token ids of the greedy answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": MAX_OUTPUT_TOKENS, "temperature": 0, "return_token_ids": True}
    answer: list[int] = json.loads(client.post("/v1/completions", body, 600)[1])["choices"][0]["token_ids"]
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=model_folder, default=TINY_MODEL_DIR, help=f"{MODEL_HELP} (default: chitu-tiny)"
    )
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2048, help="maximum number of tokens of a prompt")
    parser.add_argument("--zero-page", type=int, default=5, help=f"the broken page of {PAGE_SIZE} tokens")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} is no checkpoint folder")
    page: int = arguments.zero_page
    if not 0 <= page < arguments.tokens // PAGE_SIZE:
        parser.error(f"--zero-page {page}: a prompt of {arguments.tokens} tokens fills {arguments.tokens // PAGE_SIZE}")
    recaller = Recaller(arguments.model)
    rng = random.Random(arguments.seed)
    prompts = [recaller.prompt(rng, arguments.tokens) for _ in range(arguments.prompts)]
    asked = [prompt.is_asked_from(page, PAGE_SIZE) for prompt in prompts]
    transport = f"dp_config.router.pd_disaggregation.transport={arguments.transport}"

    runs = {"transformers": by_transformers(arguments.model, prompts)}
    for name, overrides in TOPOLOGIES.items():
        runs[name] = by_cluster(arguments.model, prompts, [*overrides, transport])
    broken = f"1P1D, page {page} broken"
    runs[broken] = by_cluster(arguments.model, prompts, [*small_pool(arguments.tokens), transport], 1, zero_page=page)

    reference = runs["transformers"].answers
    rows = []
    for name, run in runs.items():
        right = [recaller.is_right(prompt, answer) for prompt, answer in zip(prompts, run.answers, strict=True)]
        same = sum(mine == theirs for mine, theirs in zip(run.answers, reference, strict=True))
        right_there = sum(ok for ok, there in zip(right, asked, strict=True) if there)
        rows.append((name, sum(right), same, f"{right_there} of {sum(asked)}", len(prompts), run.seconds))
    columns = ("through", "right", "as transformers", f"asked from page {page}: right", "prompts", "seconds")
    publish("recall", columns, rows, arguments.json_dir)
    counts = {str(row[0]): (int(row[1]), int(row[2])) for row in rows}
    failures = [
        f"{name}: {right} right, {same} as transformers"
        for name, (right, same) in counts.items()
        if name != broken and (right < PASS_RATE * len(prompts) or same < len(prompts))
    ]
    if any(asked) and counts[broken][0] >= counts["1P1D"][0]:
        failures.append("the broken page cost no answer: this benchmark would not notice a wrong KV cache")
    for failure in failures:
        print(f"recall: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
