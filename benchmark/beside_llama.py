"""The engine beside llama.cpp on the same GGUF file, one thread of CPU each.

    python -m benchmark.beside_llama [--model smollm2|FILE.gguf] [--python PYTHON] [--also float32 bfloat16]

PYTHON is one that has the package `llama-cpp-python`; it computes in a child process (`llama_peer.py`). A decode step
of 1 and of 16 sequences (prompts of 128 tokens), and a prompt of 512 tokens, each from tokens to the most likely next
ones, in CPU time. Both take turns, some steps at a time, and medians count, so that other work on the machine slows
both. The first round is the warm-up. The engine keeps weights as `chitu serve` does; `--also` measures it once more
with weights widened to float32, or in bfloat16. Exits with code 1 and the reason if there is no llama.cpp, or behind
the table if the two begin to continue a short text differently.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmark.engine import OwnEngine
from chitu.errors import ConfigError
from chitu.launch.gguf_folder import first_files
from chitu.models.config import read_model_spec
from chitu.ops.native import NativeOps, load_library
from chitu.tokenizer import Tokenizer
from chitu.tools.bench.model_argument import model_folder
from chitu.tools.bench.report import DEFAULT_DIR, publish

LLAMA = "llama.cpp"
CONTEXT_TOKENS = 640
TEXT = "The capital of France is"
TEXT_TOKENS = 4
"""So many must be equal. llama.cpp rounds what a product reads to 8 bits, the engine does not: long texts part."""
DECODE_PROMPT_TOKENS = 128
PREFILL_PROMPT_TOKENS = 512
STEPS = 8
"""Decode steps of a turn."""
AIMS = {"decode, batch 1": 1.0, "decode, batch 16": 2.0, "prefill of 512": 2.0}
"""Time of llama.cpp over ours."""


class Absent(Exception):
    """There is no llama.cpp to compare with. The message says why."""


class Side(Protocol):
    """One of those that take turns. Seconds are CPU time, of each step."""

    def begin(self, prompts: torch.Tensor) -> tuple[list[float], list[list[int]]]:
        """Compute prompts `[B, L]`. Return seconds and the first tokens `[1, B]`."""
        ...

    def steps(self, count: int) -> tuple[list[float], list[list[int]]]:
        """Return seconds and tokens `[count, B]`."""
        ...

    def end(self) -> None: ...


class Own:
    """The engine in this process, whose form of weights is `kept`, `float32` or `bfloat16`."""

    def __init__(self, folder: Path, form: str) -> None:
        dtype = "bfloat16" if form == "bfloat16" else "float32"
        ops = Widened.new() if form == "float32" else None
        self._engine = OwnEngine(folder, ops, dtype=dtype, max_model_len=CONTEXT_TOKENS)

    def begin(self, prompts: torch.Tensor) -> tuple[list[float], list[list[int]]]:
        began_s = time.process_time()
        tokens = self._engine.begin(prompts)
        return [time.process_time() - began_s], [tokens]

    def steps(self, count: int) -> tuple[list[float], list[list[int]]]:
        seconds, tokens = [], []
        for _ in range(count):
            began_s = time.process_time()
            tokens.append(self._engine.step())
            seconds.append(time.process_time() - began_s)
        return seconds, tokens

    def end(self) -> None:
        self._engine.end()


class Widened(NativeOps):
    """The C kernels, with every weight in float32."""

    keeps_small = False

    @classmethod
    def new(cls) -> Widened:
        """Return them. Raises ConfigError without a C compiler."""
        library = load_library()
        if library is None:
            raise ConfigError("no C compiler here: the engine computes with torch's operations alone")
        return cls(library)


class Llama:
    """llama.cpp in a child process, until it is left."""

    def __init__(self, python: str, file: Path) -> None:
        command = [python, str(Path(__file__).with_name("llama_peer.py")), str(file), str(CONTEXT_TOKENS)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise Absent(f"{python} cannot be started: {error.strerror}") from error
        self.version = str(self._answer()["version"])

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def tokenize(self, text: str) -> list[int]:
        return list(self._ask({"tokenize": text})["tokens"])

    def begin(self, prompts: torch.Tensor) -> tuple[list[float], list[list[int]]]:
        answer = self._ask({"begin": prompts.tolist()})
        return answer["seconds"], answer["tokens"]

    def steps(self, count: int) -> tuple[list[float], list[list[int]]]:
        answer = self._ask({"steps": count})
        return answer["seconds"], answer["tokens"]

    def end(self) -> None:
        self._ask({"end": True})

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Absent(f"llama.cpp ended with code {self._process.wait()} (below 0: the signal)")
        answer: dict[str, Any] = json.loads(line)
        if "why" in answer:
            self._process.communicate()
            raise Absent(answer["why"])
        return answer


def continued(side: Side, prompt: list[int]) -> list[int]:
    """Return the most likely tokens behind a prompt."""
    _, first = side.begin(torch.tensor([prompt]))
    _, others = side.steps(TEXT_TOKENS - 1)
    side.end()
    return [tokens[0] for tokens in first + others]


def decode_times(sides: dict[str, Side], prompts: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a decode step by side and round. All sides have contexts of the same length."""
    for side in sides.values():
        side.begin(prompts)
    times = in_turn(sides, rounds, lambda side: side.steps(STEPS)[0])
    for side in sides.values():
        side.end()
    return times


def prefill_times(sides: dict[str, Side], prompts: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of whole prompts by side and round."""

    def once(side: Side) -> list[float]:
        seconds, _ = side.begin(prompts)
        side.end()
        return seconds

    return in_turn(sides, rounds, once)


def in_turn(sides: dict[str, Side], rounds: int, turn: Callable[[Side], list[float]]) -> dict[str, list[float]]:
    """Return the median of the seconds of each turn, by side and round, without those of the warm-up."""
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in list(sides.items())[:: 1 if number % 2 else -1]:
            medians[name].append(statistics.median(turn(side)))
    return {name: times[1:] for name, times in medians.items()}


def rows_of(sides: dict[str, Side], vocab_size: int, rounds: int) -> list[list[object]]:
    """Return the rows of the table: the case, its aim, milliseconds of llama.cpp, then of each form with the ratio."""
    generator, rows = torch.Generator().manual_seed(0), list[list[object]]()
    for case, aim in AIMS.items():
        is_prefill = case.startswith("prefill")
        shape = (1, PREFILL_PROMPT_TOKENS) if is_prefill else (int(case.split()[-1]), DECODE_PROMPT_TOKENS)
        measure = prefill_times if is_prefill else decode_times
        times = measure(sides, torch.randint(vocab_size, shape, generator=generator), rounds)
        theirs = times.pop(LLAMA)
        row: list[object] = [case, aim, statistics.median(theirs) * 1e3]
        for ours in times.values():
            ratio = statistics.median(other / mine for other, mine in zip(theirs, ours, strict=True))
            row += [statistics.median(ours) * 1e3, ratio]
        rows.append(row)
    return rows


def why_different(llama: Llama, own: Side, tokenizer: Tokenizer) -> str:
    """Return how the two continue a short text if they do not agree, else ""."""
    prompt, same = llama.tokenize(TEXT), tokenizer.encode(TEXT)
    if prompt != same:
        return f"the tokens of {TEXT!r} are {prompt} for llama.cpp and {same} for chitu"
    theirs, ours = (tokenizer.decode(continued(side, prompt)) for side in (llama, own))
    return "" if theirs == ours else f"{TEXT!r} goes on with {theirs!r} by llama.cpp and with {ours!r} by chitu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, default="smollm2", help="of a GGUF file")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--also", nargs="+", choices=("float32", "bfloat16"), default=[])
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR)
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        folder = options.model
        files = first_files(sorted(folder.glob("*.gguf")))
        if len(files) != 1:
            raise ConfigError(f"{folder} is not made of a GGUF file")
        with Llama(options.python, files[0]) as llama:
            forms = {form: Own(folder, form) for form in ("kept", *options.also)}
            why = why_different(llama, forms["kept"], Tokenizer.load(folder))
            rows = rows_of({LLAMA: llama, **forms}, read_model_spec(folder).vocab_size, options.rounds)
    except (Absent, ConfigError) as error:
        print(f"nothing to compare with: {error}")
        return 1
    columns = ["CPU time, one thread", "aim", f"llama.cpp ({llama.version}) ms"]
    columns += [word for form in forms for word in (f"chitu, {form} ms", "times as fast")]
    publish("beside_llama", columns, rows, options.out)
    print(why or f"both continue {TEXT!r} alike")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
