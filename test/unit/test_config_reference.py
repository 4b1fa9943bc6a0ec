"""The page of all keys is made from the schema, and each key has a description."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_all_keys_is_that_of_the_schema() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "config_reference.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page == tool["reference"](), "call script/config_reference.py"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []
