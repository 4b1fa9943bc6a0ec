"""The engine alone against `transformers` generate, on CPU: prefill and decode of a small Qwen3 with random weights, or
of the model that is given.

    python -m benchmark.engine [--threads 2] [--rounds 5] [--ops native|torch] [--model MODEL]

Both engines are measured in turn within each round, so a busy machine slows both; the ratio is the median over rounds.
The engine runs through `ModelRunner.execute` with chunked prefill and the default scheduler limits, as a unified
instance does. The tokens of both are compared too: the speed of a wrong engine would mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chitu.config.schema import SchedulerConfig
from chitu.engine.build import load_model
from chitu.engine.executor import Admit, PrefillChunk, StepPlan
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.kv_cache.pool import KVPool
from chitu.models.config import Code, model_hash, read_model_spec
from chitu.models.layers import DecoderModel
from chitu.ops.interface import Ops
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import KVLayout, SamplingParams, pack_i32
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.verify.run import Transformers

PAGE_SIZE = 16
NUM_SLOTS = 16
MAX_MODEL_LEN = 1024
DECODE_PROMPT_TOKENS = 128
DECODE_STEPS = 64
PREFILL_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Timing:
    prefill_s: float
    decode_s: float
    """Seconds of one step."""
    tokens: list[list[int]]


def write_model(folder: Path) -> Any:
    """Write a checkpoint of a Qwen3 with 34 M random parameters and return the transformers model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.float().eval()
    with torch.no_grad():  # the default initialisation is so small that rounding decides between tokens
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.06)
    model.save_pretrained(folder)
    return model


class OwnEngine:
    """chitu's model runner with its KV pool; every sequence owns the same pages in each run.

    Prefill is chunked by the default limits of the scheduler. Without `ops`: those that an instance would choose.
    """

    def __init__(
        self,
        folder: Path,
        ops: Ops | None = None,
        code: Code = "own",
        dtype: str = "float32",
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        spec = read_model_spec(folder, code=code)
        layout = KVLayout(model_hash(folder), PAGE_SIZE, dtype, spec.vocab_size, spec.groups)
        self._pages_each = max_model_len // PAGE_SIZE
        self.vocab_size = spec.vocab_size
        pool = KVPool(layout, NUM_SLOTS * self._pages_each, 1)
        model = load_model(folder, dtype, ops=ops, code=code)
        self.ops_name = model.ops.name if isinstance(model, DecoderModel) else "modules of transformers"
        sampler = Sampler(NUM_SLOTS, spec.vocab_size, torch.device("cpu"), spec.eos_token_ids)
        self._runner = ModelRunner(spec, model, pool, NUM_SLOTS, max_model_len, sampler)
        self._limits = SchedulerConfig()
        self._slots: list[int] = []
        self._runner.warmup()

    def begin(self, prompts: torch.Tensor) -> list[int]:
        """Compute the prompts `[B, L]` and return the first token of each sequence."""
        batch, length = prompts.shape
        params = SamplingParams(max_tokens=self._pages_each * PAGE_SIZE - length, temperature=0.0, ignore_eos=True)
        self._slots = list(range(batch))
        admit = [
            Admit(slot, pack_i32(row), length, 0, tuple(range(slot, NUM_SLOTS * self._pages_each, NUM_SLOTS)), params)
            for slot, row in enumerate(prompts.tolist())
        ]
        size = self._limits.chunk_size
        chunks = [
            PrefillChunk(slot, start, min(size, length - start), start + size >= length)
            for slot in self._slots
            for start in range(0, length, size)
        ]
        self._runner.execute(StepPlan(admit=admit))
        tokens = [0] * batch
        while chunks:
            plan: list[PrefillChunk] = []
            while chunks and sum(chunk.length for chunk in plan) + chunks[0].length <= self._limits.max_batched_tokens:
                plan.append(chunks.pop(0))
            result = self._runner.execute(StepPlan(prefill=plan))
            for slot, token in zip(result.slots, result.tokens, strict=True):
                tokens[slot] = token
        return tokens

    def step(self) -> list[int]:
        """Decode one token of each sequence and return them."""
        return list(self._runner.execute(StepPlan(decode=self._slots)).tokens)

    def end(self) -> None:
        """Release the sequences."""
        self._runner.execute(StepPlan(release=self._slots))

    def run(self, prompts: torch.Tensor, steps: int) -> Timing:
        """Run a prefill of `[B, L]`, then `steps` decode steps."""
        start_s = time.perf_counter()
        tokens = [[token] for token in self.begin(prompts)]
        middle_s = time.perf_counter()
        for _ in range(steps):
            for sequence, token in zip(tokens, self.step(), strict=True):
                sequence.append(token)
        end_s = time.perf_counter()
        self.end()
        return Timing(middle_s - start_s, (end_s - middle_s) / max(1, steps), tokens)


def run_transformers(model: Any, prompts: torch.Tensor, steps: int) -> Timing:
    """Run the same with `generate`. A step's time is the mean cost of the `steps` tokens after the first one."""

    def timed(count: int) -> tuple[float, torch.Tensor]:
        start_s = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - start_s, out[:, prompts.shape[1] :]

    prefill_s, tokens = timed(1)
    if not steps:
        return Timing(prefill_s, 0.0, tokens.tolist())
    total_s, tokens = timed(steps + 1)
    return Timing(prefill_s, (total_s - prefill_s) / steps, tokens.tolist())


def measure(own: OwnEngine, model: Any, rounds: int) -> list[list[object]]:
    """Return the rows of the result table."""
    cases: list[tuple[str, int, int, int, Callable[[Timing], float]]] = [
        (
            "prefill 16 x 512",
            16,
            PREFILL_PROMPT_TOKENS,
            0,
            lambda timing: timing.prefill_s / (16 * PREFILL_PROMPT_TOKENS),
        ),
        ("decode, batch 1", 1, DECODE_PROMPT_TOKENS, DECODE_STEPS, lambda timing: timing.decode_s),
        ("decode, batch 16", 16, DECODE_PROMPT_TOKENS, DECODE_STEPS, lambda timing: timing.decode_s / 16),
    ]
    rows: list[list[object]] = []
    for name, batch, length, steps, seconds_per_token in cases:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(own.vocab_size, (batch, length), generator=generator)
        own.run(prompts[:, :64], 2)
        run_transformers(model, prompts[:, :64], 2)
        ours, theirs, equal = [], [], True
        for _ in range(rounds):
            reference, timing = run_transformers(model, prompts, steps), own.run(prompts, steps)
            theirs.append(1 / seconds_per_token(reference))
            ours.append(1 / seconds_per_token(timing))
            equal = equal and reference.tokens == timing.tokens
        ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
        rows.append([name, statistics.median(theirs), statistics.median(ours), ratio, max(ours) / max(theirs), equal])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ops", choices=("native", "torch", "transformers"), default="native")
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP} (default: a random Qwen3 of 34 M)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.model or Path(name)
        model = Transformers(str(folder)).model if arguments.model else write_model(folder)
        code: Code = "transformers" if arguments.ops == "transformers" else "own"
        own = OwnEngine(folder, TorchOps() if arguments.ops == "torch" else None, code)
        rows = measure(own, model, arguments.rounds)
    columns = [
        "case",
        "transformers tok/s",
        f"chitu ({own.ops_name}) tok/s",
        "ratio (median)",
        "ratio (best)",
        "equal tokens",
    ]
    publish("engine", columns, rows, arguments.out)


if __name__ == "__main__":
    main()
