"""Profiles that an operator asks for: one at a time, bounded in steps, seconds and bytes; nothing is due otherwise."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from support.clock import FakeClock

from chitu.engine.profiler import RankProfiler
from chitu.instance.profiling import Profiling
from chitu.protocol.profile import ProfileOrder


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, stem: str, max_bytes: int) -> None:
        self.calls.append(stem)

    def end(self) -> None:
        self.calls.append("end")


def make() -> tuple[Profiling, _Recorder, FakeClock]:
    recorder, clock = _Recorder(), FakeClock()
    return Profiling(recorder, "/folder", 1 << 20, clock), recorder, clock


def test_steps_that_compute_end_a_profile_and_another_may_follow() -> None:
    profiling, recorder, _ = make()
    assert not profiling.is_due
    for label in ("a", "b"):
        profiling.ask(ProfileOrder(1, label, 5.0, 2), "P0")
        profiling.ask(ProfileOrder(1, "ignored", 5.0, 2), "P0")
        for has_stepped in (True, True, False, False, True):
            assert profiling.is_due
            profiling.turn(has_stepped)
        assert not profiling.is_due
    assert recorder.calls == ["/folder/a-P0", "end", "/folder/b-P0", "end"]


def test_an_idle_instance_ends_its_profile_in_time() -> None:
    profiling, recorder, clock = make()
    profiling.ask(ProfileOrder(1, "a", 5.0, 1000), "P0")
    profiling.turn(True)
    clock.advance(4.9)
    profiling.turn(False)
    assert recorder.calls == ["/folder/a-P0"]
    clock.advance(0.2)
    profiling.turn(False)
    assert recorder.calls == ["/folder/a-P0", "end"] and not profiling.is_due


def test_the_end_of_the_instance_ends_its_profile() -> None:
    profiling, recorder, _ = make()
    profiling.close()
    assert recorder.calls == []
    profiling.ask(ProfileOrder(1, "a", 5.0, 1000), "P0")
    profiling.turn(True)
    profiling.close()
    assert recorder.calls == ["/folder/a-P0", "end"]


def test_without_a_folder_nothing_is_due() -> None:
    profiling = Profiling(None, None, 0, FakeClock())
    profiling.ask(ProfileOrder(1, "a", 5.0, 2), "P0")
    assert not profiling.is_due


def test_a_rank_writes_what_it_computed_between_begin_and_end(tmp_path: Path) -> None:
    profiler = RankProfiler(3)
    torch.zeros(3).cos()
    profiler.begin(str(tmp_path / "new" / "a-P0"), 1 << 20)
    torch.zeros(3).sin()
    profiler.end()
    torch.zeros(3).tan()
    profiler.end()  # there is nothing any more
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "a-P0.3.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::sin" in names and not names & {"aten::cos", "aten::tan"}


def test_a_file_that_is_too_large_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = RankProfiler(0)
    profiler.begin(str(tmp_path / "a"), 10)
    torch.zeros(3).sin()
    profiler.end()
    assert [*tmp_path.iterdir()] == [] and "not kept" in caplog.text


def test_a_folder_that_cannot_be_made_costs_the_profile_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    profiler = RankProfiler(0)
    profiler.begin(str(tmp_path / "file" / "a"), 1 << 20)
    torch.zeros(3).sin()
    profiler.end()
    assert "nothing is profiled" in caplog.text
