"""`script/gpu_check.sh`: what it says when parts are right, wrong, too slow or not reached."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from check_card import SETS, VERDICT, Check, Part, chosen_parts, pack, parts_of

PASSES = "print('test/gpu/a.py::one PASSED'); print('test/gpu/a.py::two SKIPPED')"
FAILS = "print('test/gpu/b.py::one[x y] FAILED'); print('E   assert 1 == 2'); raise SystemExit(1)"
HANGS = "print('test/gpu/c.py::one PASSED', flush=True); import time; time.sleep(60)"


def part(name: str, code: str, limit_s: int = 60) -> Part:
    return Part(name, limit_s, [sys.executable, "-c", code])


def run(out: Path, *stages: list[Part], seconds: float = 100.0) -> tuple[Check, list[str]]:
    said: list[str] = []
    check = Check(out, seconds, {"card": "none"}, said.append)
    for stage in stages:
        check.plan(stage)
    for stage in stages:
        check.run(stage)
    return check, said


def written(out: Path) -> dict[str, dict[str, object]]:
    return {each["name"]: each for each in json.loads((out / "check.json").read_text())["parts"]}


def test_it_says_right_only_if_all_that_decides_came_to_its_end(tmp_path):
    check, said = run(tmp_path, [part("truth", PASSES), part("kernels", PASSES), part("engine", PASSES)])
    assert check.verdict() == "RIGHT: truth, kernels, engine"
    assert len(said) == 3 and all("right, 1 passed, 0 failed" in line for line in said)
    check, _ = run(tmp_path, [part("truth", PASSES), part("kernels", HANGS, limit_s=1)], [part("engine", PASSES)])
    assert check.verdict() == "UNKNOWN: kernels did not come to an end"
    assert written(tmp_path)["kernels"]["outcome"] == "time was up" and written(tmp_path)["kernels"]["passed"] == 1


def test_what_failed_is_named_at_once_and_in_the_file(tmp_path):
    check, said = run(tmp_path, [part("truth", PASSES), part("kernels", FAILS)])
    assert check.verdict() == "WRONG: kernels"
    assert "kernels: FAILED test/gpu/b.py::one[x y]" in said and "    E   assert 1 == 2" in said
    assert written(tmp_path)["kernels"]["failed"] == ["test/gpu/b.py::one[x y]"]
    assert check.summary()[-2:] == ["failed: test/gpu/b.py::one[x y]", "WRONG: kernels"]


def test_a_part_that_dies_is_wrong_though_no_test_failed(tmp_path):
    check, said = run(tmp_path, [part("truth", PASSES + "; import os; print('gone', flush=True); os.abort()")])
    assert check.verdict() == "WRONG: truth" and "    gone" in said


def test_what_the_time_did_not_reach_is_named_and_what_ran_before_is_kept(tmp_path):
    check, said = run(tmp_path, [part("truth", PASSES)], [part("served", PASSES)], seconds=5.0)
    assert said == ["== truth: not reached, 0 s", "== served: not reached, 0 s"]
    assert {each["outcome"] for each in written(tmp_path).values()} == {"not reached"}
    assert check.verdict().startswith("UNKNOWN")


def test_every_part_has_files_that_are_there_and_what_decides_comes_first(tmp_path):
    stages = parts_of("python", tmp_path, is_twin=False)
    names = [part.name for stage in stages for part in stage]
    assert names[:3] == ["truth", "kernels", "engine"] and len(set(names)) == len(names)
    root = Path(__file__).parents[2]
    files = [word for stage in stages for part in stage for word in part.command if word.startswith("test/")]
    assert len(files) > 8 and all((root / file).exists() for file in files)
    every = {f"test/gpu/{path.name}" for path in (root / "test/gpu").glob("test_gpu_*.py")}
    assert every <= set(files), "a file that no part runs"


def test_two_halves_of_ten_minutes_have_all_parts(tmp_path):
    """Parts that run at once take as long as the longest, on a machine with cores for it."""
    stages = parts_of("python", tmp_path, False)
    halves = {name: chosen_parts(name, stages) for name in SETS}
    for stages_of in halves.values():
        alone = [part for stage in stages_of for part in stage if part.name not in VERDICT]
        at_once = [part for stage in stages_of for part in stage if part.name in VERDICT]
        assert sum(part.limit_s for part in alone) + max((part.limit_s for part in at_once), default=0) < 560
    found = {part.name for stages_of in halves.values() for stage in stages_of for part in stage}
    assert found == {part.name for stage in stages for part in stage} - {"memcheck"}
    assert chosen_parts("", stages) == stages
    with pytest.raises(ValueError, match="lunch"):
        chosen_parts("truth,lunch", stages)


def test_one_file_has_all_that_was_found(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run(out, [part("truth", PASSES)])
    pack(out)
    with tarfile.open(tmp_path / "out.tar.xz") as archive:
        assert {"out/check.json", "out/truth.log"} <= {*archive.getnames()}
