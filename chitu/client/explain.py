"""`chitu explain`: observe a running cluster for a while, or read a saved observation, and report its bottleneck."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from chitu.client.bottleneck import Explanation, explain
from chitu.client.client import RouterClient
from chitu.errors import ConfigError
from chitu.protocol.snapshot import ClusterSnapshot

PAUSE_S = 0.2
"""Time between two snapshots. The router keeps its last 64 requests, so at more than 300 a second some are missed."""


def explain_cluster(
    source: str, credential: str | None = None, seconds: float = 10.0, save: str | None = None, as_json: bool = False
) -> int:
    """Print the explanation and return exit code 0. `source` is the URL of a router, or the path of a file that `save`
    wrote. `credential`: an API key, which shows its tenant's requests, or the cluster's token, which shows all. Ctrl-C
    ends the observation. Raise ConfigError if the file is unreadable, ChituError if no router answers."""
    if "://" in source:
        snapshots = _watch(RouterClient(source, credential), seconds)
    else:
        snapshots = _read(Path(source))
    if save is not None:
        Path(save).write_bytes(msgspec.json.Encoder().encode_lines(snapshots))
    explanation = explain(snapshots)
    if as_json:
        sys.stdout.write(msgspec.json.encode(explanation).decode() + "\n")
    else:
        _show(explanation, Console(highlight=False))
    return 0


def _watch(client: RouterClient, seconds: float) -> list[ClusterSnapshot]:
    snapshots = [client.cluster()]
    end_s = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):  # explain the snapshots taken so far
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(PAUSE_S, left_s))
            snapshots.append(client.cluster())
    return snapshots


def _read(path: Path) -> list[ClusterSnapshot]:
    try:
        snapshots = msgspec.json.Decoder(ClusterSnapshot).decode_lines(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{os.fspath(path)!r} is neither a file nor a URL such as http://127.0.0.1:21003") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)!r} is no file of `chitu explain --save`: {error}") from error
    if not snapshots:
        raise ConfigError(f"{os.fspath(path)!r} is empty")
    return snapshots


def _show(explanation: Explanation, console: Console) -> None:
    console.print(
        f"{explanation.span_s:.1f} s: {explanation.num_ended} attempts ended, {explanation.num_failed} of them failed, "
        f"{explanation.num_running} run; first token after {1000 * explanation.first_token_s:.4g} ms, "
        f"{explanation.tokens_per_s:.4g} tokens/s",
        soft_wrap=True,
    )
    if explanation.stages:
        table = Table("stage", box=None, pad_edge=False)
        for name in ("mean ms", "p95 ms", "share"):
            table.add_column(name, justify="right")
        for stage in explanation.stages:
            numbers = f"{1000 * stage.mean_s:.1f}", f"{1000 * stage.p95_s:.1f}", f"{stage.share:.0%}"
            table.add_row(stage.name, *numbers)
        console.print(table)
    console.print(f"{explanation.bottleneck}: {explanation.says}", style="bold", soft_wrap=True, markup=False)
    console.print(explanation.advice, soft_wrap=True, markup=False)
