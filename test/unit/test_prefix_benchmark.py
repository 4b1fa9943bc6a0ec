"""The replay of a trace: numbers that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.prefix import BLOCK_TOKENS, best_hits, main, read_trace, replay


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace: two turns of two conversations (2 blocks, then 3), and a prompt of 4 blocks that comes once."""
    rows = [(0, [1, 2]), (10, [3, 4]), (20, [5, 6, 7, 8]), (30, [1, 2, 9]), (40, [3, 4, 10])]
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": at_s * 1000, "input_length": len(ids) * BLOCK_TOKENS + 1, "output_length": 1, "hash_ids": ids}
        for at_s, ids in rows
    ]
    for record in records:
        record["hash_ids"] = [*record["hash_ids"], 99]  # type: ignore[misc]  # the block that has one token
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_the_best_possible_keeps_what_is_wanted_again(trace: Path) -> None:
    asks = read_trace(trace)
    found = 4 * BLOCK_TOKENS / sum(ask.num_tokens for ask in asks)
    assert best_hits(asks, 100) == pytest.approx(found)
    assert best_hits(asks, 4) == pytest.approx(found), "the long prompt is not taken in"
    assert best_hits(asks, 2) == pytest.approx(found / 2)


def test_a_replay_finds_what_fits_and_computes_the_rest(trace: Path) -> None:
    asks = read_trace(trace)
    total = sum(ask.num_tokens for ask in asks)
    assert replay(asks, "round_robin", 1, 100, 1000.0).hit_share == pytest.approx(4 * BLOCK_TOKENS / total)
    assert replay(asks, "round_robin", 1, 5, 1000.0).hit_share == 0, "the long prompt pushes all others out"
    uncached = replay(asks, "round_robin", 1, 0, 1000.0)
    assert uncached.hit_share == 0 and uncached.mean_s == pytest.approx(total / 5 / 1000)


def test_the_table_has_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(trace), "--prefills", "2", "--pages", "8"])
    out = capsys.readouterr().out
    assert out.count("% of it)") == 4 and "prefix_affinity" in out
