"""Decode beside a long prompt: chunks in the decode steps against layer groups between them, on CPU.

    python -m benchmark.multiplex [--rounds 3] [--streams 8] [--plot FILE.png]

A unified instance computes chunks of prompts in the steps that decode ("chunk 32"), so a step reads each weight once
for both. The alternative that this measures is PD multiplexing: the forward of a chunk stops after each few layers, a
decode step of its own runs, and the forward goes on ("512 tokens, 2 layers"). The engine has no support for it. Here
the decode step runs while the prefill's forward fetches its next layer (`PausingLayers`), so the call stack keeps the
hidden states. It could not run within a layer: the operations reuse their buffers (`--plant` shows it).

All variants compute the same window of a prompt (tokens 1536 to 2560, what a prompt of 4096 tokens has on average
behind it) beside the same streams, in turn within each round. Times are CPU seconds of the only thread that computes,
so waiting for a busy machine does not count. Columns, as medians over the rounds:

* ITL p50, p99: time between two tokens of a stream, over that of a decode step without a prompt, of the same round;
* prompt tokens/s, while the streams decode;
* work: time that the same steps and prompt tokens need apart, in chunks of 512, over the measured time;
* gain: prompt tokens/s over those of the best chunks in decode steps with at most this ITL (p50, or p99), less 1.

The logits of the window's last token and the tokens of all streams are compared with those of the parts computed apart;
`--plant` makes a fault that this must find.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chitu.engine.build import load_model
from chitu.engine.executor import Admit, PrefillChunk, StepPlan
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.errors import Internal
from chitu.kv_cache.pool import KVPool
from chitu.models.config import model_hash, read_model_spec
from chitu.models.layers import DecoderLayer, DecoderModel
from chitu.protocol import KVLayout, SamplingParams, pack_i32
from chitu.tools.bench.report import DEFAULT_DIR, publish

PAGE_SIZE = 16
NUM_LAYERS = 16
VOCAB_SIZE = 4096
PREFIX_TOKENS, END_TOKENS = 1536, 2560
STREAM_TOKENS = 256
MAX_MODEL_LEN = 4096
CHUNKS = (4, 8, 12, 16, 32, 64, 128, 512)
GROUPS = ((64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 1), (256, 2), (512, 1), (1024, 1))
"""Tokens of a chunk, layers of a group."""
ALONE = 512
"""Tokens of a chunk without streams."""
TOLERANCE = 1e-5
"""Of logits, relative to the largest."""


@dataclass(slots=True)
class Variant:
    name: str
    chunk: int
    group: int
    """Layers between two decode steps; 0: the decode is in the step of the chunk."""
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)


def write_model(folder: Path) -> None:
    """Write a checkpoint of a Qwen3 with 32 M random parameters in many layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.06)
    model.save_pretrained(folder)


Quantile = Callable[[Variant], list[float]]
P50: Quantile = operator.attrgetter("p50")
P99: Quantile = operator.attrgetter("p99")


class PausingLayers(Sequence[DecoderLayer]):
    """Layers of a model, which call `pause` before each layer but the first of the next forward, with its index."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = layers
        self.pause: Callable[[int], None] | None = None
        self.skips_one = False
        """Planted fault: a forward that pauses has no layer 1."""

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __iter__(self) -> Iterator[DecoderLayer]:
        pause, self.pause = self.pause, None
        for index, layer in enumerate(self._layers):
            if index and pause is not None:
                pause(index)
            if not (self.skips_one and pause is not None and index == 1):
                yield layer


class Engine:
    """A model runner with `streams` sequences that decode, and one slot for the prompt."""

    def __init__(self, folder: Path, streams: int, window: int, plant: str | None = None) -> None:
        spec = read_model_spec(folder)
        layout = KVLayout(model_hash(folder), PAGE_SIZE, "float32", spec.vocab_size, spec.groups)
        self.end = PREFIX_TOKENS + window
        self._stream_pages = 2 * STREAM_TOKENS // PAGE_SIZE
        self._prompt_pages = tuple(range(self.end // PAGE_SIZE))
        pool = KVPool(layout, len(self._prompt_pages) + streams * self._stream_pages, 1)
        self._pool = pool
        sampler = Sampler(streams + 1, spec.vocab_size, torch.device("cpu"), spec.eos_token_ids)
        model = load_model(folder, "float32")
        if not isinstance(model, DecoderModel):
            raise Internal(f"a model of our own code is needed, this is a {type(model).__name__}")
        self._layers = PausingLayers(model.layers)
        self._layers.skips_one = plant == "skipped"
        self._pauses_within = plant == "within"
        model = dataclasses.replace(model, layers=self._layers)
        self.runner = ModelRunner(spec, model, pool, streams + 1, MAX_MODEL_LEN, sampler)
        self.streams = list(range(1, streams + 1))
        generator = torch.Generator().manual_seed(1)
        self._prompt = torch.randint(VOCAB_SIZE, (self.end,), generator=generator).tolist()
        self._texts = torch.randint(VOCAB_SIZE, (streams, STREAM_TOKENS), generator=generator).tolist()
        self.tokens: list[list[int]] = []
        """Of each step, in order."""
        self._admit(0, 0)
        for start in range(0, PREFIX_TOKENS, ALONE):
            self.alone(PrefillChunk(0, start, ALONE))
        for slot in self.streams:
            self.alone(PrefillChunk(slot, 0, STREAM_TOKENS - 1))
        self.end_all()

    def _admit(self, prompt_kv: int, stream_kv: int) -> None:
        """Admit the prompt and the streams; the first tokens of each are in the pages since an earlier admission."""
        first, each = len(self._prompt_pages), self._stream_pages
        params = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True)
        admits = [Admit(0, pack_i32(self._prompt), self.end, prompt_kv, self._prompt_pages, None)]
        for slot, text in zip(self.streams, self._texts, strict=True):
            pages = tuple(range(first + (slot - 1) * each, first + slot * each))
            admits.append(Admit(slot, pack_i32(text), len(text), stream_kv, pages, params))
        self.runner.execute(StepPlan(admit=admits))

    def begin(self) -> None:
        """Admit the prompt behind its prefix, and the streams before their first token."""
        self._admit(PREFIX_TOKENS, STREAM_TOKENS - 1)
        self._pool.aux_logits[0].fill_(float("nan"))
        self.tokens = []

    def end_all(self) -> torch.Tensor:
        """Release everything, and return the logits `[V]` of the window's last token."""
        self.runner.execute(StepPlan(release=[0, *self.streams]))
        return self._pool.aux_logits[0].clone()

    def chunks(self, size: int) -> list[PrefillChunk]:
        starts = range(PREFIX_TOKENS, self.end, size)
        return [PrefillChunk(0, s, min(size, self.end - s), aux_slot=0 if s + size >= self.end else -1) for s in starts]

    def decode(self) -> None:
        self.tokens.append(self.runner.execute(StepPlan(decode=self.streams)).tokens)

    def mixed(self, chunk: PrefillChunk) -> None:
        self.tokens.append(self.runner.execute(StepPlan(prefill=[chunk], decode=self.streams)).tokens)

    def alone(self, chunk: PrefillChunk, pause: Callable[[int], None] | None = None) -> None:
        """Compute a chunk without the streams, and call `pause` between its layers."""
        if self._pauses_within and pause is not None:
            within = pause
            self.runner.execute(StepPlan(prefill=[chunk]), lambda layer, ready=None, first=None: within(layer))
            return
        self._layers.pause = pause
        self.runner.execute(StepPlan(prefill=[chunk]))


def run(engine: Engine, variant: Variant) -> tuple[list[float], torch.Tensor]:
    """Compute the window. Return the times between decode steps, and the window's logits."""
    engine.begin()
    times: list[float] = []
    since_s = time.thread_time()

    def note() -> None:
        nonlocal since_s
        now_s = time.thread_time()
        times.append(now_s - since_s)
        since_s = now_s

    for chunk in engine.chunks(variant.chunk):
        if not variant.group:
            engine.mixed(chunk)
            note()
            continue

        def pause(layer: int) -> None:
            if layer % variant.group == 0:
                engine.decode()
                note()

        engine.alone(chunk, pause)
        engine.decode()
        note()
    return times, engine.end_all()


def apart(engine: Engine, steps: int) -> tuple[list[float], float, torch.Tensor, list[list[int]]]:
    """Compute decode steps, then the window alone. Return the time of each step, that of the window, its logits and
    the tokens."""
    engine.begin()
    times: list[float] = []
    for _ in range(steps):
        since_s = time.thread_time()
        engine.decode()
        times.append(time.thread_time() - since_s)
    since_s = time.thread_time()
    for chunk in engine.chunks(ALONE):
        engine.alone(chunk)
    return times, time.thread_time() - since_s, engine.end_all(), engine.tokens


def check(engine: Engine, variant: Variant, logits: torch.Tensor, right: torch.Tensor, tokens: list[list[int]]) -> None:
    """Raise Internal unless the variant computed what the parts compute apart."""
    error = float((logits - right).abs().max() / right.abs().max())
    count = min(len(tokens), len(engine.tokens))
    if not error <= TOLERANCE or engine.tokens[:count] != tokens[:count]:
        raise Internal(f"{variant.name}: logits differ by {error:.1e}, or the streams have other tokens")


def measure(
    engine: Engine, idle: Variant, variants: list[Variant], rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Fill the variants, and `idle` from steps without a prompt. Return the time of a decode step, and of the window
    alone, of each round."""
    step_s: list[float] = []
    window_s: list[float] = []
    for number in range(rounds):
        times, alone_s, right, tokens = apart(engine, steps)
        undisturbed_s = statistics.median(times)
        idle.p50.append(1.0)
        idle.p99.append(float(np.percentile(times, 99)) / undisturbed_s)
        step_s.append(undisturbed_s)
        window_s.append(alone_s)
        for variant in variants if number % 2 == 0 else variants[::-1]:
            intervals, logits = run(engine, variant)
            check(engine, variant, logits, right, tokens)
            variant.p50.append(float(np.percentile(intervals, 50)) / undisturbed_s)
            variant.p99.append(float(np.percentile(intervals, 99)) / undisturbed_s)
            variant.rate.append((engine.end - PREFIX_TOKENS) / sum(intervals))
            variant.work.append((len(intervals) * undisturbed_s + alone_s) / sum(intervals))
    return step_s, window_s


def gain(variant: Variant, quantile: Quantile, chunks: Sequence[Variant]) -> object:
    """Return the prompt tokens/s over those of the best chunks in decode steps whose ITL is at most as high, less 1;
    empty if there is none. The best is interpolated between sizes."""
    median = statistics.median
    curve = sorted((median(quantile(each)), median(each.rate)) for each in chunks)
    itl = median(quantile(variant))
    if not variant.group or not curve[0][0] <= itl <= curve[-1][0]:
        return ""
    best = np.maximum.accumulate([rate for _, rate in curve]).tolist()
    return median(variant.rate) / float(np.interp(itl, [each for each, _ in curve], best)) - 1


def rows_of(variants: list[Variant]) -> list[list[object]]:
    """Return the table."""
    median = statistics.median
    chunks = [each for each in variants if not each.group]
    return [
        [
            *(each.name, median(each.p50), median(each.p99), min(each.p99), max(each.p99)),
            *(median(each.rate), median(each.work), gain(each, P50, chunks), gain(each, P99, chunks)),
        ]
        for each in variants
    ]


def plot(variants: list[Variant], path: Path) -> None:
    """Draw prompt tokens a second over ITL p50 and p99."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axes, name, quantile in ((both[0], "p50", P50), (both[1], "p99", P99)):
        for label, marker, chosen in (
            ("chunks in the decode steps", "o-", [each for each in variants if not each.group]),
            ("tokens x layers between decode steps", "s", [each for each in variants if each.group]),
        ):
            points = [(statistics.median(quantile(each)), statistics.median(each.rate)) for each in chosen]
            points.sort()
            axes.plot([x for x, _ in points], [y for _, y in points], marker, label=label)
            for each in chosen:
                text = f"{each.chunk} x {each.group}" if each.group else str(each.chunk)
                at = statistics.median(quantile(each)), statistics.median(each.rate)
                place = (-6, 5) if each.group else (5, -9)
                side = "right" if each.group else "left"
                axes.annotate(text, at, textcoords="offset points", xytext=place, fontsize=7, ha=side)
        axes.axvline(1.3, color="grey", linestyle=":")
        axes.set_xscale("log")
        ticks = (1, 1.3, 2, 3, 5, 10, 20, 40)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_xlabel(f"ITL {name} over a decode step without a prompt")
    both[0].set_ylabel("prompt tokens a second of CPU")
    both[0].legend(loc="lower right")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--window", type=int, default=END_TOKENS - PREFIX_TOKENS, help="tokens of the prompt")
    parser.add_argument("--plant", choices=("within", "skipped"), help="a fault that the comparison must find")
    parser.add_argument("--plot", type=Path, help="file of a picture, which needs matplotlib")
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    idle = Variant("no prompt", 0, 0)
    variants = [Variant(f"chunk {size}", size, 0) for size in CHUNKS]
    variants += [
        Variant(f"{size} tokens, {group} layer{'s' * (group > 1)}", size, group)
        for size, group in GROUPS
        if size <= arguments.window
    ]
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        engine = Engine(Path(name), arguments.streams, arguments.window, arguments.plant)
        steps = max(4, min(64, arguments.window // 16))
        step_s, window_s = measure(engine, idle, variants, arguments.rounds, steps)
    columns = ["variant", "ITL p50", "ITL p99", "least", "most", "prompt tokens/s", "work", "gain at p50", "at p99"]
    idle_row = [idle.name, 1.0, statistics.median(idle.p99), min(idle.p99), max(idle.p99), *[""] * 4]
    publish("multiplex", columns, [idle_row, *rows_of(variants)], arguments.out)
    print(
        f"decode step of {arguments.streams} streams {1e3 * statistics.median(step_s):.1f} ms; "
        f"prompt alone {arguments.window / statistics.median(window_s):.0f} tokens/s"
    )
    if arguments.plot is not None:
        plot(variants, arguments.plot)


if __name__ == "__main__":
    main()
