"""Steps and time of a token with drafts and without, on one model with the same requests in turn.

    python -m benchmark.drafts [--model FOLDER|FILE.gguf|smollm2] [--batches 1 4 16 64] [--rounds 2] [--json-dir DIR]

Two schedulers of unified instances share a loaded model: one drafts nothing, one as `scheduler.speculation: text` does.
In each round both serve the same requests, all at once: copying, a change to code, a question about a text, JSON, and
ordinary English. Time is CPU time from the last first token to the end, on one thread, so other work on the machine
counts little. Exits with code 1 if a token of an answer differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.build import load_model
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.pool import KVPool
from chitu.models.config import ModelSpec, model_hash, read_model_spec
from chitu.models.model import Model
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import KVLayout, RequestHead, SamplingParams, UnifiedRequest, pack_i32, token_codec
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish

PAGE_SIZE = 16
MAX_MODEL_LEN = 1024
ANSWER_TOKENS = 96
MAX_DRAFT_TOKENS = 12
FACTS = (
    "The harbour of Lindvik was built in 1874 by the engineer Ada Holm. It has three piers: the long pier in the "
    "north, the coal pier, and the fishing pier in the south. In 1921 a storm destroyed the coal pier, and it was "
    "built again of stone. Today ferries leave from the long pier every forty minutes, and the fishing pier has a "
    "museum."
)
CODE = (
    "def total_price(items, tax):\n    result = 0.0\n    for item in items:\n        if item.count > 0:\n"
    "            result += item.price * item.count\n    return result * (1 + tax)\n"
)
KINDS = {
    "copying": f"Repeat this text word by word, with nothing before or after it:\n\n{FACTS}",
    "code": f"Here is a function:\n\n{CODE}\nWrite it again with `price_sum` in place of `result`.",
    "retrieval": f"{FACTS}\n\nWhat does the text say about the coal pier and about the ferries? Quote the sentences.",
    "JSON": 'Write a JSON list of ten people, each as {"name": "...", "age": 0, "city": "..."}, and nothing else.',
    "English": "Explain why the sky is blue and why the sea is salty, to a child.",
}


@dataclass
class Answers:
    tokens: dict[bytes, list[int]] = field(default_factory=dict)
    num_ended: int = 0

    def take(self, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        for room, token in zip(batch.rooms, batch.tokens, strict=True):
            self.tokens.setdefault(room, []).append(token)
        self.num_ended += len(batch.finished)
        return True


class Served:
    """A unified instance over a loaded model, with the pages for `most` requests."""

    def __init__(self, folder: Path, model: Model, spec: ModelSpec, most: int, max_draft_tokens: int) -> None:
        num_pages = most * MAX_MODEL_LEN // PAGE_SIZE
        layout = KVLayout(model_hash(folder), PAGE_SIZE, "float32", spec.vocab_size, spec.groups)
        pool = KVPool(layout, num_pages, 1)
        sampler = Sampler(most, spec.vocab_size, torch.device("cpu"), spec.eos_token_ids)
        runner = ModelRunner(spec, model, pool, most, MAX_MODEL_LEN, sampler)
        self.answers = Answers()
        settings = SchedulerSettings(
            SchedulerConfig(max_running_requests=most), DeadlineConfig(), max_draft_tokens=max_draft_tokens
        )
        engine = LoadedEngine(runner, PagedKVCacheManager(num_pages, PAGE_SIZE))
        tokens = TokenManager(1, self.answers.take)
        core = InstanceCore(settings, engine, tokens, lambda _room, _error: None, RealClock())
        self._scheduler = PDScheduler(core, DecodeRole(core))

    def run(self, prompts: list[bytes]) -> tuple[float, int, list[list[int]]]:
        """Serve these prompts at once. Return seconds and steps behind the last first token, and the answers."""
        self.answers.tokens.clear()
        self.answers.num_ended = 0
        rooms = [number.to_bytes(16, "big") for number in range(len(prompts))]
        sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0)
        for room, prompt in zip(rooms, prompts, strict=True):
            self._scheduler.submit(UnifiedRequest(RequestHead(room, room.hex(), prompt), sampling))
        while len(self.answers.tokens) < len(rooms):
            self._scheduler.step()
        began_s, steps = time.process_time(), self._scheduler.load.steps
        while self.answers.num_ended < len(rooms):
            self._scheduler.step()
        took_s, steps = time.process_time() - began_s, self._scheduler.load.steps - steps
        return took_s, steps, [self.answers.tokens[room] for room in rooms]


@dataclass
class Cell:
    """What was measured of one kind of text at one batch size, without drafts and with them."""

    seconds: tuple[float, float] = (0.0, 0.0)
    steps: tuple[int, int] = (0, 0)
    tokens: int = 0
    num_different: int = 0

    def add(self, without: tuple[float, int, list[list[int]]], drafted: tuple[float, int, list[list[int]]]) -> None:
        self.seconds = self.seconds[0] + without[0], self.seconds[1] + drafted[0]
        self.steps = self.steps[0] + without[1], self.steps[1] + drafted[1]
        self.tokens += sum(map(len, without[2])) - len(without[2])
        self.num_different += sum(a != b for a, b in zip(without[2], drafted[2], strict=True))


def prompts_of(tokenizer: object, text: str, count: int) -> list[bytes]:
    """Return so many prompts, no two of which begin alike."""
    prompts = []
    for number in range(count):
        messages = [{"role": "system", "content": f"You are assistant {number}."}, {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)  # type: ignore[attr-defined]
        prompts.append(pack_i32(ids["input_ids"] if not isinstance(ids, list) else ids))
    return prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, default="smollm2", help=MODEL_HELP)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.model
    spec, tokenizer = read_model_spec(folder), AutoTokenizer.from_pretrained(folder)
    model = load_model(folder, "float32")
    served = [Served(folder, model, spec, max(options.batches), most) for most in (0, MAX_DRAFT_TOKENS)]
    rows, num_different = [], 0
    for count in options.batches:
        for kind in options.kinds:
            prompts, cell = prompts_of(tokenizer, KINDS[kind], count), Cell()
            for each in served:
                each.run(prompts[:1])
            for turn in range(options.rounds):
                first = turn % 2
                found = {which: served[which].run(prompts) for which in (first, 1 - first)}
                cell.add(found[0], found[1])
            num_different += cell.num_different
            row_ms = [1e3 * seconds * count / cell.tokens for seconds in cell.seconds]
            rows.append(
                (kind, count, *row_ms, row_ms[1] / row_ms[0], cell.steps[0] / cell.steps[1], cell.num_different)
            )
            print(*[f"{each:.3g}" if isinstance(each, float) else each for each in rows[-1]], flush=True)
    columns = [
        "text",
        "requests",
        "ms a token without",
        "with drafts",
        "ratio",
        "steps without / with",
        "answers that differ",
    ]
    publish("drafts", columns, rows, options.json_dir)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
