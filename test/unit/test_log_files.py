"""Logs of a launcher's processes: bounded, private, and read from the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chitu.launch.log_files import TAIL_BYTES, LogTaken, claim_log, cut, last_text, make_log_dir, open_private
from chitu.lock_files import is_ours


@pytest.mark.parametrize(("size", "is_cut"), [(0, False), (100, False), (101, True), (300, True)])
def test_a_log_is_cut_beyond_its_bound_and_goes_on_at_its_beginning(tmp_path: Path, size: int, is_cut: bool) -> None:
    log, kept = tmp_path / "P0.log", tmp_path / "P0.log.1"
    with open_private(log) as writer:  # as a child process holds it
        writer.write(b"x" * size)
        assert cut(log, kept, 100) is is_cut
        writer.write(b"on\n")
    assert log.read_bytes() == (b"" if is_cut else b"x" * size) + b"on\n"
    assert (kept.read_bytes() if kept.exists() else b"") == (b"x" * size if is_cut else b"")


def test_the_next_cut_replaces_what_the_last_one_kept(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    for letter in (b"a" * 200, b"b" * 150):
        log.write_bytes(letter)
        assert cut(log, tmp_path / "P0.log.1", 100)
    assert ((tmp_path / "P0.log.1").read_bytes(), log.read_bytes()) == (b"b" * 150, b"")


def test_a_log_that_logrotate_has_renamed_is_not_lost_at_its_limit(tmp_path: Path) -> None:
    log, kept = tmp_path / "P0.log", tmp_path / "P0.log.1"
    with open_private(log) as writer:
        writer.write(b"a" * 101)
        log.rename(kept)
        assert cut(Path(f"/proc/self/fd/{writer.fileno()}"), kept, 100)
    assert kept.read_bytes() == b"a" * 101


def test_a_log_is_cut_though_its_copy_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    log.write_bytes(b"a" * 200)
    kept = tmp_path / "P0.log.1"
    kept.mkdir()
    assert cut(log, kept, 100) and log.stat().st_size == 0
    assert not cut(tmp_path / "missing.log", kept, 100)


def test_last_words_are_read_from_the_end_and_from_this_life_alone(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    log.write_bytes(b"of the last life\n")
    start = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"first\n" + b"." * (2 * TAIL_BYTES) + b"\nlast\n")
    text = last_text(log, start)
    assert len(text) == TAIL_BYTES and text.endswith("\nlast\n") and "first" not in text
    assert last_text(log, log.stat().st_size - 5) == "last\n"
    assert "cannot be read" in last_text(tmp_path / "missing.log", 0)


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = make_log_dir(str(tmp_path / "logs"))
        (folder / "old.log").touch(0o644)
        for name in ("new.log", "old.log"):
            open_private(folder / name).close()
            assert (folder / name).stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_fifo_in_the_place_of_a_log_or_its_lock_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "P0.log")
    os.mkfifo(tmp_path / "P0.lock")
    claim = claim_log(tmp_path / "P0.log")
    assert claim is not None
    with pytest.raises(LogTaken):
        claim_log(tmp_path / "P0.log")
    claim.close()
    with pytest.raises(OSError, match="No such device or address"):
        open_private(tmp_path / "P0.log")
    assert "cannot be read" in last_text(tmp_path / "P0.log", 0)


def test_a_log_whose_lock_was_deleted_is_claimed_anew(tmp_path: Path) -> None:
    claim = claim_log(tmp_path / "P0.log")
    assert claim is not None
    (tmp_path / "P0.lock").unlink()
    with claim, claim_log(tmp_path / "P0.log") as again:  # type: ignore[union-attr]
        assert not is_ours(claim, tmp_path / "P0.lock") and is_ours(again, tmp_path / "P0.lock")
