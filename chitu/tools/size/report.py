"""What `chitu size` says: the table of splits, what limits, the limits to set, as text or JSON; and a plot of goodput.

Pure, but for the plot, which needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chitu.errors import MissingDependency
from chitu.tools.size.search import Question, Sizing, Split, Trial

CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Rates of a curve, over the best split's."""
COLUMNS = ("split", "goodput/s", "per device", "TTFT p50", "p90 s", "TPOT p50", "p90 ms", "P", "D or U", "cached")


def as_json(question: Question, devices: int, sizing: Sizing) -> dict[str, Any]:
    """Return the result as numbers."""
    slo, best = question.slo, sizing.best
    return {
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "share": slo.share},
        "workload": {
            "name": question.workload.name,
            "requests": len(question.workload.requests),
            "recorded_rate": question.workload.rate,
            "mean_prompt_tokens": question.workload.mean_prompt,
            "mean_output_tokens": question.workload.mean_output,
            "mean_image_rows": question.workload.mean_image_rows,
        },
        "devices": devices,
        "best": _trial(best),
        "tried": [_trial(trial) for trial in sizing.tried],
        "is_short": best.is_short,
        "limit": sizing.limit,
        "one_more": [_trial(trial) for trial in sizing.more],
        "set": {
            "scheduler.max_running_requests": sizing.max_running,
            "dp_config.router.admission.max_queue_s": sizing.max_queue_s,
        },
        "overload": None if sizing.overload is None else [_trial(trial) for trial in sizing.overload],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    split = trial.split
    return {
        "split": split.name,
        "prefill": split.prefill,
        "decode": split.decode,
        "unified": split.unified,
        "encode": split.encode,
        "images_encoded_by_e": trial.by_encoders,
        "prefill_tp": split.prefill_shape.tp,
        "decode_tp": split.decode_shape.tp,
        "prefill_dp": split.prefill_shape.dp,
        "decode_dp": split.decode_shape.dp,
        "rate": trial.rate,
        "goodput": trial.goodput,
        "attained": trial.attained,
        "refused": trial.refused,
        "failed": trial.failed,
        "busy": trial.busy,
        "running": trial.running,
        "pages": trial.pages,
        "cached_share": trial.cached_share,
        **(trial.quantiles() if trial.ttfts_s else {}),
    }


def show(question: Question, devices: int, sizing: Sizing, console: Console) -> None:
    """Print the result."""
    slo, best, workload = question.slo, sizing.best, question.workload
    console.print(
        f"{workload.name}: {len(workload.requests)} requests, {workload.mean_prompt:.0f} prompt and "
        f"{workload.mean_output:.0f} output tokens; {slo.share:.0%} of them within {slo.ttft_s:g} s to the first token "
        f"and {1e3 * slo.tpot_s:g} ms from token to token"
    )
    table = Table(title=f"{devices} devices")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right")
    if workload.mean_image_rows:
        table.add_column("E", justify="right")
    for trial in sorted(sizing.tried, key=lambda trial: trial.rate, reverse=True):
        of_e = [f"{trial.busy['E']:.0%}"] if trial.rate and "E" in trial.busy else []
        table.add_row(*_row(trial, best), *of_e)
    console.print(table)
    console.print(f"take {best.split.name}: {best.rate:.3g} requests/s within the SLO. What limits: {sizing.limit}.")
    if best.is_short:
        console.print(
            f"{len(workload.requests)} requests are too few to judge a higher rate, or other splits: raise --requests"
        )
    for trial in sizing.more:
        gain = trial.rate / best.rate - 1
        what = f"{gain:+.0%}" if gain else "nothing"
        console.print(f"one more ({trial.split.name}): {what}")
    running = f"scheduler.max_running_requests={sizing.max_running}"
    console.print(f"set: {running} dp_config.router.admission.max_queue_s={sizing.max_queue_s:g}")
    if sizing.overload is not None:
        without, with_limit = sizing.overload
        console.print(
            f"at twice that rate: {without.goodput:.3g}/s within the SLO without max_queue_s, "
            f"{with_limit.goodput:.3g}/s with it ({with_limit.refused} requests refused at once)"
        )


def _row(trial: Trial, best: Trial) -> Sequence[str]:
    if not trial.rate:
        return (trial.split.name, "not better", *[""] * (len(COLUMNS) - 2))
    times, split = trial.quantiles(), trial.split
    return (
        split.name + (" *" if trial is best else ""),
        f"{trial.rate:.3g}",
        f"{trial.rate / split.devices:.3g}",
        f"{times['ttft_p50_s']:.2f}",
        f"{times['ttft_p90_s']:.2f}",
        f"{1e3 * times['tpot_p50_s']:.1f}",
        f"{1e3 * times['tpot_p90_s']:.1f}",
        f"{trial.busy['P']:.0%}" if "P" in trial.busy else "",
        f"{trial.busy.get('D', trial.busy.get('U', 0.0)):.0%}, {trial.running:.0f} at once",
        f"{trial.cached_share:.0%}",
    )


def curves(question: Question, sizing: Sizing, most: int = 3) -> dict[Split, list[Trial]]:
    """Run the best splits at rates around the best one."""
    order = sorted(sizing.tried, key=lambda trial: trial.rate, reverse=True)
    return {
        trial.split: [question.trial(trial.split, sizing.best.rate * part, is_whole=True) for part in CURVE]
        for trial in order[:most]
    }


def plot(found: dict[Split, list[Trial]], question: Question, path: Path, say: Callable[[str], None]) -> None:
    """Draw goodput over rate into a PNG file. Raises MissingDependency without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for split, trials in found.items():
        axes.plot([trial.rate for trial in trials], [trial.goodput for trial in trials], marker="o", label=split.name)
    rates = [trial.rate for trials in found.values() for trial in trials]
    axes.plot([0, max(rates)], [0, max(rates)], color="0.8", linewidth=1, label="offered")
    axes.set_xlabel("requests/s offered")
    axes.set_ylabel("requests/s within the SLO")
    axes.set_title(f"{question.workload.name}: TTFT {question.slo.ttft_s:g} s, TPOT {1e3 * question.slo.tpot_s:g} ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    say(f"{path} written")


def require_matplotlib() -> None:
    """Raise MissingDependency if no plot can be drawn, before anything takes long."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependency("a plot needs matplotlib: pip install matplotlib") from error
