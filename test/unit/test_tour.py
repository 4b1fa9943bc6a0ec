"""The stations of docs/tour.md and the places that CONTRIBUTING.md names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIONS = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "docs/tour.md").read_text(encoding="utf-8"))


def names_in(path: Path) -> set[str]:
    """Return the names of functions and classes, and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name"))}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_the_tour_has_its_stations() -> None:
    assert len(STATIONS) > 20


@pytest.mark.parametrize(("path", "name"), STATIONS)
def test_a_station_is_there(path: str, name: str) -> None:
    assert name in names_in(ROOT / "chitu" / path)


def test_places_named_to_contributors_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    where = text[text.index("* **Where**") :].split("\n* ")[0]
    places = re.findall(r"`([\w/]+(?:\.py|/))`", where)
    assert len(places) >= 6
    names = [path.relative_to(ROOT / "chitu") for path in (ROOT / "chitu").rglob("*")]
    missing = [place for place in places if not any(f"/{path}".endswith(f"/{place.rstrip('/')}") for path in names)]
    assert not missing
