"""The checks of a GPU in the order in which they say most, each under its own limit: `script/gpu_check.sh`.

First whether it is right: 1P1D against transformers (`truth`), the kernels, the engine; together if there are cores for
it, since none of it is timed. Then the benchmarks, alone on the card, whose rows are printed as they come. Clusters and
tools that need minutes come last. If something is wrong, what helps to find it runs before the benchmarks.

Prints a line for each part as it ends. OUT has a log for each, and `check.json`, written again after each part: so
whatever ends a run, what it found is there, and in OUT.tar.xz, too. Needs no library but Python's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTS = "chitu.serve.api_server, chitu.serve.scheduler, chitu.tools.bench.gpu.__main__, pytest, hypothesis"
SETS = {
    "first": "truth,kernels,engine,steps,served",
    "second": "shapes,hops,budget,transfer,staging,clusters",
}
"""Halves that end within ten minutes each."""
LEAST_S = 12
"""A part with less time left is not begun."""
GRACE_S = 4
"""From a part's end by its limit to that by SIGKILL."""
POLL_S = 0.1
VERDICT = ("truth", "kernels", "engine")
"""Parts that decide whether the card computes what it should."""
_TEST = re.compile(r"^(test/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)")
_NUMBER = re.compile(r"-?\d+\.\d{4,}(e[-+]?\d+)?")
_FIGURE = re.compile(r"^NOT MEASURED|  (GB/s|TFLOP/s|us|ms|k tok/s|x)  ")


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: int
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    shown: re.Pattern[str] | None = None
    """Which lines of its log are printed as they come."""


@dataclass
class Result:
    name: str
    outcome: str = "not reached"
    """`right`, `wrong`, `time was up`, or `not reached`."""
    seconds: float = 0.0
    limit_s: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)

    def line(self) -> str:
        counts = f"{self.passed} passed, {len(self.failed)} failed, " if self.passed or self.failed else ""
        word = self.outcome.upper() if self.outcome == "wrong" else self.outcome
        return f"== {self.name}: {word}, {counts}{self.seconds:.0f} s"


@dataclass
class _Running:
    part: Part
    result: Result
    process: subprocess.Popen[bytes]
    log: Path
    begin_s: float
    limit_s: float
    read: int = 0
    is_ended: bool = False

    def new_lines(self) -> list[str]:
        """Return the whole lines that its log has got since the last call."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self.read += len(data)
        return data.decode(errors="replace").splitlines()


class Check:
    """A run of parts within `seconds`, with results in `out`."""

    def __init__(self, out: Path, seconds: float, facts: dict[str, str], say: Callable[[str], None]) -> None:
        self._out = out
        self._end_s = time.monotonic() + seconds
        self._facts = facts
        self._say = say
        self.results: dict[str, Result] = {}

    def plan(self, parts: Sequence[Part]) -> None:
        """Name parts that will run, so that those that are not reached are named, too."""
        for part in parts:
            self.results.setdefault(part.name, Result(part.name))
        self._write()

    def run(self, parts: Sequence[Part]) -> None:
        """Run parts at once, each until its limit or that of the whole run."""
        self.plan(parts)
        running = [started for part in parts if (started := self._start(part)) is not None]
        while running:
            time.sleep(POLL_S)
            for each in list(running):
                code = each.process.poll()
                if code is None and time.monotonic() - each.begin_s > each.limit_s:
                    self._end(each)
                    code = each.process.wait()
                for line in each.new_lines():
                    self._note(each, line)
                if code is not None:
                    running.remove(each)
                    self._finish(each, code)

    def verdict(self) -> str:
        """Return RIGHT, WRONG or UNKNOWN, with the parts that say so."""
        deciding = [self.results[name] for name in VERDICT if name in self.results]
        wrong = [each.name for each in self.results.values() if each.outcome == "wrong"]
        open_ends = [each.name for each in deciding if each.outcome in ("not reached", "time was up")]
        if wrong:
            return f"WRONG: {', '.join(wrong)}"
        if open_ends or not deciding:
            return f"UNKNOWN: {', '.join(open_ends) or 'nothing that decides it'} did not come to an end"
        return f"RIGHT: {', '.join(each.name for each in deciding)}"

    def summary(self) -> list[str]:
        lines = [each.line() for each in self.results.values()]
        lines += [f"failed: {name}" for each in self.results.values() for name in each.failed]
        return [*lines, self.verdict()]

    def _start(self, part: Part) -> _Running | None:
        left_s = self._end_s - time.monotonic()
        if left_s < LEAST_S:
            self._say(self.results[part.name].line())
            return None
        log = self._out / f"{part.name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                list(part.command),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **part.env},
                start_new_session=True,
            )
        return _Running(
            part, self.results[part.name], process, log, time.monotonic(), min(part.limit_s, left_s - GRACE_S)
        )

    def _end(self, running: _Running) -> None:
        running.is_ended = True
        os.killpg(running.process.pid, signal.SIGTERM)
        try:
            running.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.process.pid, signal.SIGKILL)

    def _note(self, running: _Running, line: str) -> None:
        result = running.result
        if found := _TEST.match(line):
            result.passed += found[2] == "PASSED"
            result.skipped += found[2] == "SKIPPED"
            if found[2] in ("FAILED", "ERROR"):
                result.failed.append(found[1])
                self._say(f"{result.name}: {found[2]} {found[1]}")
        elif running.part.shown is not None and running.part.shown.search(line):
            self._say(_NUMBER.sub(lambda found: f"{float(found[0]):.4g}", line)[:160])

    def _finish(self, running: _Running, code: int) -> None:
        result = running.result
        result.seconds, result.limit_s = time.monotonic() - running.begin_s, running.limit_s
        if result.failed or (code != 0 and not running.is_ended):
            result.outcome = "wrong"
            for line in _reasons(running.log):
                self._say(f"    {line}")
        else:
            result.outcome = "time was up" if running.is_ended else "right"
        self._say(result.line())
        self._write()

    def _write(self) -> None:
        found = {**self._facts, "verdict": self.verdict(), "parts": [asdict(each) for each in self.results.values()]}
        path = self._out / "check.json"
        path.with_suffix(".new").write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".new").replace(path)


def _reasons(log: Path) -> list[str]:
    """Return the errors in a log, or its end."""
    lines = log.read_text(errors="replace").splitlines()
    found = [line[:200] for line in lines if line.startswith(("E  ", "NOT MEASURED"))]
    return found[:8] or [line[:200] for line in lines[-5:]]


def parts_of(python: str, out: Path, is_twin: bool) -> list[list[Part]]:
    """Return the parts, those that run at once together."""

    def tests(name: str, seconds: int, *arguments: str, prefix: Sequence[str] = (), **env: str) -> Part:
        options = ["-v", "--tb=short", "-p", "no:cacheprovider", "--durations=5", "-o", "faulthandler_timeout=100"]
        return Part(name, seconds, [*prefix, python, "-m", "pytest", *options, *arguments], env)

    def bench(name: str, seconds: int, only: str) -> Part:
        here = ["--device", "cpu", "--tiny"] if is_twin else []
        sizes = ["--only", only, "--minutes", f"{seconds / 60:.2f}", "--json-dir", str(out)]
        return Part(name, seconds, [python, "-m", "chitu.tools.bench.gpu", *sizes, *here], shown=_FIGURE)

    gpu = "test/gpu/test_gpu_"
    kernels = [f"{gpu}kernels.py", f"{gpu}families.py"]
    staged = f"{gpu}staging.py"
    right = [
        tests("truth", 200, "-rP", f"{gpu}truth.py"),
        tests("kernels", 190, *kernels),
        tests(
            "engine",
            190,
            *(f"{gpu}{name}.py" for name in ("engine", "overlap", "tiers")),
            staged,
            "-k",
            "not tokens_do",
        ),
    ]
    stages = [right] if (os.cpu_count() or 1) >= 8 else [[part] for part in right]
    stages += [[bench("steps", 130, "attention,steps")], [bench("served", 180, "served")]]
    stages += [
        [bench("shapes", 138, "lanes,shapes")],
        [bench("hops", 40, "hops")],
        [bench("budget", 90, "budget")],
        [bench("transfer", 50, "transfer")],
    ]
    stages += [
        [tests("staging", 90, staged, "-k", "tokens_do")],
        [tests("clusters", 150, f"{gpu}clusters.py", f"{gpu}trainer.py")],
    ]
    if not is_twin and shutil.which("compute-sanitizer"):
        tool = ["compute-sanitizer", "--tool", "memcheck", "--print-limit", "20"]
        stages.append([tests("memcheck", 60, kernels[0], "-k", "rotation or scattered", prefix=tool)])
    return stages


def chosen_parts(given: str, stages: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Return the stages with the parts of `--parts` alone. Raise ValueError with the names that are none."""
    names = set(filter(None, ",".join(SETS.get(each, each) for each in given.split(",")).split(",")))
    if unknown := names - {part.name for stage in stages for part in stage}:
        raise ValueError(", ".join(sorted(unknown)))
    return [[part for part in stage if not names or part.name in names] for stage in stages]


def pack(out: Path) -> None:
    """Put the logs and results into one file beside their folder, for machines that give few files back."""
    target = out.with_name(f"{out.name}.tar.xz")
    with tarfile.open(target.with_suffix(".new"), "w:xz") as archive:
        archive.add(out, out.name)
    target.with_suffix(".new").replace(target)


def causes(check: Check, python: str, is_twin: bool) -> list[Part]:
    """Return what helps to find why something is wrong: the bad access or the race of a kernel; else steps one
    launch at a time."""
    wrong = {name for name, result in check.results.items() if result.outcome == "wrong"}
    run = [python, "-m", "pytest", "-v", "--tb=long", "-p", "no:cacheprovider"]
    if is_twin or not wrong & set(VERDICT):
        return []
    if "kernels" not in wrong:
        blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
        return [Part("engine-one-by-one", 70, [*run, "-x", "test/gpu/test_gpu_engine.py"], blocking)]
    if not shutil.which("compute-sanitizer"):
        return []
    names = [name.rpartition("::")[2] for name in check.results["kernels"].failed][:4]
    chosen = " or ".join(re.split(r"\W", name)[0] for name in names)
    return [
        Part(f"{tool}-of-failed", 70, ["compute-sanitizer", "--tool", tool, *run, "test/gpu", "-k", chosen])
        for tool in ("memcheck", "racecheck")
    ]


def facts_of(python: str) -> dict[str, str]:
    """Return what the results were found on. Raise SystemExit if a library is missing."""
    asked = f"import {IMPORTS}, torch; print(torch.__version__, torch.cuda.is_available())"
    found = subprocess.run([python, "-c", asked], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"gpu_check: a library is missing: {found.stderr.strip().splitlines()[-1]}")
    version, _, has_cuda = found.stdout.strip().rpartition(" ")
    facts = {"torch": version, "cuda": has_cuda, "python": sys.version.split()[0]}
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        facts["card"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu-check"))
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (10)")
    parser.add_argument("--parts", default="", help="names in check.json, or first, or second (all)")
    options = parser.parse_args(argv)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
    }
    begin_s = time.monotonic()
    facts = facts_of(sys.executable)
    is_twin = os.environ.get("CHITU_GPU_TWIN") == "1" or facts["cuda"] != "True"
    if is_twin:
        os.environ["CHITU_GPU_TWIN"] = "1"
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    left_s = options.minutes * 60 - (time.monotonic() - begin_s)
    check = Check(out, left_s, facts, lambda line: print(line, flush=True))
    stages = parts_of(sys.executable, out, is_twin)
    try:
        stages = chosen_parts(options.parts, stages)
    except ValueError as unknown:
        parser.error(f"--parts: {unknown} is no part here")
    for stage in stages:
        check.plan(stage)
    decided = False
    for stage in stages:
        check.run(stage)
        pack(out)
        is_right_done = all(check.results[name].outcome != "not reached" for name in VERDICT if name in check.results)
        if not decided and is_right_done:
            decided = True
            print(check.verdict(), flush=True)
            check.run(causes(check, sys.executable, is_twin))
    print("== summary")
    for line in check.summary():
        print(line, flush=True)
    pack(out)
    return 0 if all(result.outcome == "right" for result in check.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
