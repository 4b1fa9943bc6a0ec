"""Time between tokens beside long prompts: one lane, with chunks in the decode steps, against two, on CPU.

    chitu bench lanes [--rounds 3] [--streams 8] [--prompt 4000] [--plot FILE.png]

A whole scheduler over the real engine, without processes. Streams decode; prompts come one after the other and end
with their first token. Variants take turns within a round; before each the same streams decode alone. Columns, as
medians over the rounds:

* step ms: median time between two tokens of the streams without a prompt, with all threads;
* alone p99: the same as p99 without a prompt, which a busy machine has, too;
* p50, p99: time between two tokens of a stream beside the prompts, over that;
* prompt tokens/s, stream tokens/s: while prompts are there;
* work: the time that these tokens need apart, each kind alone with all threads, over the measured time.

The tokens of all variants are compared.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.build import load_model
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.errors import Internal
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.pool import KVPool
from chitu.models.config import model_hash, read_model_spec
from chitu.net.control_groups import usable_cores
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import KVLayout, RequestHead, SamplingParams, UnifiedRequest, pack_i32, token_codec
from chitu.tools.bench.model_argument import MODEL_HELP, model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.make_model import make_model

PAGE_SIZE = 16
STREAM_PROMPT, PROMPTS, ALONE_STEPS = 256, 2, 100
CONTEXT = 4096
"""Most tokens of a sequence."""
MOST_STEPS = CONTEXT - STREAM_PROMPT
CHUNKS_OF_ONE = (32, 64, 128, 256, 512)
CHUNKS_OF_TWO = (128, 512)


@dataclass(slots=True)
class Variant:
    lanes: int
    chunk: int
    step_ms: list[float] = field(default_factory=list)
    alone_p99: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    prompt_rate: list[float] = field(default_factory=list)
    stream_rate: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)


class BenchInstance:
    """A unified instance, and the tokens of its requests with their times."""

    def __init__(self, runner: ModelRunner, num_pages: int, slots: int, variant: Variant) -> None:
        self.tokens: dict[bytes, list[int]] = {}
        self.times_s: dict[bytes, list[float]] = {}
        self.ended: set[bytes] = set()
        config = SchedulerConfig(max_running_requests=slots, chunk_size=variant.chunk, max_batched_tokens=variant.chunk)
        core = InstanceCore(
            SchedulerSettings(config, DeadlineConfig(queue_s=3600)),
            LoadedEngine(
                runner, PagedKVCacheManager(num_pages, PAGE_SIZE), lane=runner if variant.lanes == 2 else None
            ),
            TokenManager(1, self._take),
            lambda room, error: None,
            RealClock(),
        )
        self.scheduler = PDScheduler(core, DecodeRole(core))

    def _take(self, frame: bytes) -> bool:
        batch, now_s = token_codec.decode(frame), time.perf_counter()
        for room, token in zip(batch.rooms, batch.tokens, strict=True):
            self.tokens.setdefault(room, []).append(token)
            self.times_s.setdefault(room, []).append(now_s)
        self.ended.update(finish.room for finish in batch.finished)
        return True

    def submit(self, number: int, prompt: Sequence[int], max_tokens: int) -> bytes:
        room = number.to_bytes(16, "big")
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.submit(UnifiedRequest(RequestHead(room, str(number), pack_i32(list(prompt))), sampling))
        return room


class Bench:
    def __init__(self, folder: Path, num_streams: int, prompt_len: int) -> None:
        self._num_streams, self._prompt_len = num_streams, prompt_len
        self._num_pages = -(-CONTEXT // PAGE_SIZE) * (num_streams + PROMPTS)
        spec = read_model_spec(folder, CONTEXT)
        layout = KVLayout(model_hash(folder), PAGE_SIZE, "float32", spec.vocab_size, spec.groups)
        pool = KVPool(layout, self._num_pages, 1)
        self._slots = num_streams + PROMPTS
        sampler = Sampler(self._slots, spec.vocab_size, torch.device("cpu"), spec.eos_token_ids)
        model = load_model(folder, "float32", max_model_len=CONTEXT)
        self._runner = ModelRunner(spec, model, pool, self._slots, CONTEXT, sampler)
        self._runner.use_lanes(torch.get_num_threads())
        generator = torch.Generator().manual_seed(1)

        def texts(count: int, length: int) -> list[list[int]]:
            return torch.randint(10, spec.vocab_size, (count, length), generator=generator).tolist()

        self._streams, self._prompts = texts(num_streams, STREAM_PROMPT), texts(PROMPTS, prompt_len)
        self._right: dict[bytes, list[int]] = {}

    def _serve(self, variant: Variant) -> tuple[BenchInstance, list[bytes]]:
        """Return an instance whose streams all decode."""
        served = BenchInstance(self._runner, self._num_pages, self._slots, variant)
        streams = [served.submit(index, text, MOST_STEPS) for index, text in enumerate(self._streams)]
        while any(room not in served.tokens for room in streams):
            served.scheduler.step()
        return served, streams

    def _end(self, served: BenchInstance) -> None:
        served.scheduler.cancel_all()
        while not served.scheduler.is_idle:
            served.scheduler.step()
        served.scheduler.step()
        self._runner.forget(range(self._slots))

    def alone_s(self) -> float:
        """Return the seconds of the prompts without streams, with all threads."""
        served = BenchInstance(self._runner, self._num_pages, self._slots, Variant(1, max(CHUNKS_OF_ONE)))
        since_s = time.perf_counter()
        self._prompts_to_end(served)
        end_s = time.perf_counter()
        self._end(served)
        return end_s - since_s

    def _prompts_to_end(self, served: BenchInstance) -> None:
        for number, prompt in enumerate(self._prompts, 1000):
            room = served.submit(number, prompt, 1)
            while room not in served.ended:
                served.scheduler.step()

    def measure(self, variant: Variant, prompts_alone_s: float) -> None:
        served, streams = self._serve(variant)
        for _ in range(ALONE_STEPS):
            served.scheduler.step()
        alone = np.diff(served.times_s[streams[0]])[-ALONE_STEPS + 1 :]
        undisturbed_s = float(np.median(alone))
        before = [len(served.tokens[room]) for room in streams]
        since_s = time.perf_counter()
        self._prompts_to_end(served)
        for _ in range(2):
            served.scheduler.step()  # the last pause ends with a token
        spent_s = time.perf_counter() - since_s
        pauses = np.concatenate(
            [np.diff(served.times_s[room][count - 1 :]) for room, count in zip(streams, before, strict=True)]
        )
        drawn = sum(len(served.tokens[room]) for room in streams) - sum(before)
        self._check(served, variant)
        self._end(served)
        variant.step_ms.append(1e3 * undisturbed_s)
        variant.alone_p99.append(float(np.percentile(alone, 99)) / undisturbed_s)
        variant.p50.append(float(np.percentile(pauses, 50)) / undisturbed_s)
        variant.p99.append(float(np.percentile(pauses, 99)) / undisturbed_s)
        variant.prompt_rate.append(PROMPTS * self._prompt_len / spent_s)
        variant.stream_rate.append(drawn / spent_s)
        variant.work.append((prompts_alone_s + drawn / len(streams) * undisturbed_s) / spent_s)

    def _check(self, served: BenchInstance, variant: Variant) -> None:
        """Raise Internal unless the tokens are those of the first variant, as far as both go."""
        for room, tokens in served.tokens.items():
            right = self._right.setdefault(room, tokens)
            count = min(len(right), len(tokens))
            if right[:count] != tokens[:count]:
                raise Internal(f"{variant.lanes} lanes, chunks of {variant.chunk}: other tokens")


def plot(variants: Sequence[Variant], path: Path) -> None:
    """Draw the work over p99, for both numbers of lanes."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for lanes, label, marker in ((1, "one lane: chunks in the decode steps", "o-"), (2, "two lanes", "s")):
        chosen = [each for each in variants if each.lanes == lanes]
        points = [(statistics.median(each.p99), statistics.median(each.work)) for each in chosen]
        axes.plot([x for x, _ in points], [y for _, y in points], marker, label=label)
        for each, at in zip(chosen, points, strict=True):
            axes.annotate(str(each.chunk), at, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set_xscale("log")
    ticks = (1, 2, 3, 5, 10, 20, 50)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("ITL p99 over a decode step without a prompt")
    axes.set_ylabel("time needed apart over time taken")
    axes.legend()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, help=f"{MODEL_HELP} (default: a random Qwen3 of 34 M)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--plot", type=Path, help="file of a picture, which needs matplotlib")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    variants = [Variant(1, chunk) for chunk in CHUNKS_OF_ONE] + [Variant(2, chunk) for chunk in CHUNKS_OF_TWO]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or make_model(
            Path(scratch) / "qwen3",
            family="qwen3",
            hidden_size=512,
            layers=8,
            heads=8,
            kv_heads=4,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=8192,
        )
        bench = Bench(folder, arguments.streams, arguments.prompt)
        for number in range(arguments.rounds):
            prompts_alone_s = bench.alone_s()
            for variant in variants if number % 2 == 0 else variants[::-1]:
                bench.measure(variant, prompts_alone_s)
    rows: list[list[object]] = []
    for each in variants:
        found = each.step_ms, each.alone_p99, each.p50, each.p99, each.prompt_rate, each.stream_rate, each.work
        rows.append([each.lanes, each.chunk, *map(statistics.median, found)])
    columns = ["lanes", "chunk", "step ms", "alone p99", "p50", "p99", "prompt tokens/s", "stream tokens/s", "work"]
    publish("lanes", columns, rows, arguments.json_dir)
    if arguments.plot is not None:
        plot(variants, arguments.plot)


if __name__ == "__main__":
    main()
