"""The load of `chitu bench profile`, and `--model` of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from chitu.tools.bench import profile
from chitu.tools.bench.model_argument import model_folder
from chitu.tools.make_model import make_model

MESSAGES_S = 0.05


class Machine:
    """A P that computes the prompts of a group one after the other; stands in for the threads that send them, too."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._now_s = 0.0
        self.groups: list[tuple[int, float]] = []
        """Requests of each group, and the time of its last first token, in s."""
        self.lengths: set[int] = set()

    def __call__(self, workers: int) -> Machine:
        return self

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, ask: Callable[[list[int]], list[float]], prompts: list[list[int]]) -> list[list[float]]:
        self._now_s = MESSAGES_S
        times_s = [ask(prompt) for prompt in prompts]
        self.groups.append((len(prompts), self._now_s))
        return times_s

    def token_times_s(self, url: str, prompt: list[int], num_tokens: int) -> list[float]:
        self.lengths.add(len(prompt))
        self._now_s += len(prompt) / self._tokens_per_s
        return [self._now_s] * num_tokens


@pytest.mark.parametrize(("tokens_per_s", "most", "longest"), [(20, 8, 64), (250, 64, 512), (100_000, 64, 2048)])
def test_no_group_waits_longer_than_a_request_may(
    tokens_per_s: float, most: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tokens_per_s)
    monkeypatch.setattr(profile, "ThreadPoolExecutor", machine)
    monkeypatch.setattr(profile, "token_times_s", machine.token_times_s)
    profile.run_load("http://p", 64, 4096)
    assert max(time_s for _, time_s in machine.groups) <= profile.GROUP_S + MESSAGES_S
    assert max(count for count, _ in machine.groups) == most and max(machine.lengths) >= longest


def test_benchmarks_take_what_serve_takes_and_say_what_is_wrong(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3", layers=1)
    assert model_folder(str(folder)) == folder
    with pytest.raises(argparse.ArgumentTypeError, match="--model is empty"):
        model_folder("")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(argparse.ArgumentTypeError, match=r"x\.gguf"):
        model_folder(str(tmp_path / "x.gguf"))
