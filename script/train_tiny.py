"""Train chitu-tiny, the embedded model: one command from nothing to a checkpoint with its report.

    python script/train_tiny.py --output chitu/assets/chitu-tiny --report docs/chitu-tiny.md

The script generates its data (no outside text). The initial weights hold an induction head (`tiny/wiring.py`). The
curriculum begins with short lists, where the model learns to look at names, and lengthens them up to the full 2048
tokens. The plan is a number of steps per length, so the same seed gives the same training on the same number of
threads. If the machine is too slow for `--seconds`, the script shortens the plan and says so.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny.accuracy import Row, table
from tiny.checkpoint import save
from tiny.documents import VOCAB_SIZE, Mix, Writer, tiny_tokenizer
from tiny.model import Shape, TinyModel
from tiny.optimizer import Optimizer
from tiny.report import Point, write_report
from tiny.workers import Workers


@dataclass(frozen=True, slots=True)
class Stage:
    """Documents of one length."""

    length: int
    steps: int
    documents: int
    mix: Mix


EARLY = Mix(plain=0.4, side=0.05, checks=0.2)
PLAN = (
    Stage(128, 150, 32, EARLY),
    Stage(256, 200, 16, EARLY),
    Stage(512, 200, 8, Mix()),
    Stage(1056, 200, 4, Mix()),
    Stage(2112, 260, 4, Mix()),
)
SIDE = Stage(128, 0, 16, Mix(plain=0.0, side=1.0))
"""Stage that supplies every second step: tasks without a list need many short examples."""
WARM_UP_STEPS = 50
DECAY_SHARE = 0.4
"""Share of the plan, at its end, over which the learning rate falls."""


def rate_at(progress: float, step: int) -> float:
    """Return the share of the full learning rate: warm-up, constant, then a cosine to 2 %."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    if progress < 1 - DECAY_SHARE:
        return warm
    falling = (progress - (1 - DECAY_SHARE)) / DECAY_SHARE
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, falling))))


def train(model: TinyModel, writer: Writer, seconds: float, threads: int) -> list[Point]:
    """Run the plan and return the loss curve. If the plan is behind the clock, move on to a later stage."""
    optimizer, workers = Optimizer(model), Workers(model, threads)
    tokens_of = [stage.steps * stage.documents * stage.length for stage in PLAN]
    total, curve, tokens, step = sum(tokens_of), [], 0, 0
    started = time.monotonic()
    for index, stage in enumerate(PLAN):
        ends_at = sum(tokens_of[: index + 1]) / total
        for _ in range(stage.steps):
            elapsed = time.monotonic() - started
            progress = max(tokens / total, elapsed / seconds)
            if progress >= ends_at + 1e-9:
                break
            loss, right = workers.gradients(writer.batch(stage.documents, stage.length + 1, stage.mix))
            optimizer.step(rate_at(progress, step))
            if step % 2:
                workers.gradients(writer.batch(SIDE.documents, SIDE.length + 1, SIDE.mix))
                optimizer.step(rate_at(progress, step))
            tokens += stage.documents * stage.length
            step += 1
            if step % 25 == 0:
                curve.append(Point(step, tokens, stage.length, loss, right))
                print(
                    f"{elapsed:5.0f} s  step {step:5d}  length {stage.length:4d}  {tokens / 1e6:6.2f} M tokens  "
                    f"loss {loss:.4f}  right {right:.4f}",
                    flush=True,
                )
    if tokens < total:
        print(f"the time was up before the plan: {tokens / 1e6:.1f} of {total / 1e6:.1f} M tokens", flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1700, help="upper limit of the training itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--report", type=Path, help="markdown file; the loss curve is written beside it as PNG")
    parser.add_argument("--prompts", type=int, default=500, help="held-out prompts for each line of the table")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    started = time.monotonic()
    tokenizer = tiny_tokenizer()
    model = TinyModel(Shape(VOCAB_SIZE)).to(args.device)
    writer = Writer(tokenizer, random.Random(args.seed))
    curve = train(model, writer, args.seconds, args.threads)
    trained_s = time.monotonic() - started
    # The table describes what is shipped: weights rounded to bfloat16, computed in float32.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    save(model, tokenizer, args.output)
    print(f"trained in {trained_s:.0f} s, {args.output} written", flush=True)
    rows: list[Row] = table(model, tokenizer, prompts=args.prompts)
    for row in rows:
        print(f"{row.task:20s} {row.prompt_tokens:5d} tokens  {row.right:4d} of {row.prompts:4d}  {row.share:7.2%}")
    if args.report:
        write_report(
            args.report, rows, curve, model, f"Trained in {trained_s:.0f} s, seed {args.seed}, {args.threads} threads."
        )


if __name__ == "__main__":
    main()
