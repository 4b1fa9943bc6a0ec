"""docs/recipes.md says what the checks of this code say of the published recipes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from chitu.models.generic.library import library_version

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(library_version() < "5", reason="transformers 4 has fewer models")
def test_the_page_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "recipes.py"))
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == tool["page"](tool["read_recipes"]()), "call script/recipes.py"
