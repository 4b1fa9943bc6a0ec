"""The training report: the accuracy table and the loss curve, as a page of the docs. Called after training."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tiny.accuracy import Row
from tiny.model import TinyModel

BEGIN, END = "<!-- written by script/train_tiny.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the training curve."""

    step: int
    tokens: int
    length: int
    loss: float
    right: float
    """Share of the answers' tokens that the model predicted."""


def markdown_table(rows: Sequence[Row]) -> str:
    lines = ["| task | longest prompt, tokens | held-out prompts | right | accuracy |", "|---|---|---|---|---|"]
    lines += [f"| {r.task} | {r.prompt_tokens} | {r.prompts} | {r.right} | {r.share:.1%} |" for r in rows]
    return "\n".join(lines)


def write_report(page: Path, rows: Sequence[Row], curve: Sequence[Point], model: TinyModel, facts: str) -> None:
    """Put table and curve between the two marks of `page`, or at the end of a page without them."""
    image = page.with_suffix(".png")
    drawn = draw_curve(image, curve)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shape = model.shape
    body = [
        BEGIN,
        f"{parameters:,} parameters: {shape.layers} layers, hidden {shape.hidden_size}, {shape.heads} query and "
        f"{shape.kv_heads} key heads of {shape.head_dim}, vocabulary {shape.vocab_size}. {facts} "
        f"torch {torch.__version__}, {platform.machine()}.",
        "",
        markdown_table(rows),
        "",
        *([f"![Loss and share of right tokens over the training]({image.name})", ""] if drawn else []),
        END,
    ]
    old = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}{END}\n"
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(before + "\n".join(body) + (after or "\n"), encoding="utf-8")


def draw_curve(path: Path, curve: Sequence[Point]) -> bool:
    """Draw loss (logarithmic), share of right tokens and document lengths. Return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so there is no picture of the curve")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    millions = [point.tokens / 1e6 for point in curve]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    top.semilogy(millions, [point.loss for point in curve], color="#2563eb", linewidth=1)
    top.set_ylabel("loss on answers")
    bottom.plot(millions, [100 * point.right for point in curve], color="#059669", linewidth=1)
    bottom.set_ylabel("tokens right, %")
    bottom.set_xlabel("million tokens")
    starts = list({point.length: point for point in reversed(curve)}.values())
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        for point in starts:
            axis.axvline(point.tokens / 1e6, color="#9ca3af", linewidth=0.8, linestyle="--")
    for point in starts:
        top.annotate(
            f" {point.length}", (point.tokens / 1e6, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8
        )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
