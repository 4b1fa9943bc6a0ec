"""The tables of docs/models.md are made from the list of checkpoints."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from support.checkpoints import ROWS

from chitu.models.generic.library import library_version

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(library_version() < "5", reason="transformers 4 has fewer models")
def test_the_tables_of_models_are_those_of_the_list() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "models_reference.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page == tool["reference"](page), "call script/models_reference.py"
    for row in ROWS:
        assert row.name in page
