"""docs/recipes.md says what the checks of this code say of the published recipes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

from chitu.config.load import parse_topology
from chitu.launch.plan import plan, plan_text
from chitu.models.generic.library import library_version
from chitu.tools.recipes.recipe import topology_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(library_version() < "5", reason="transformers 4 has fewer models")
def test_the_page_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "recipes.py"))
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == tool["page"](tool["read_recipes"]()), "call script/recipes.py"


class Meant(NamedTuple):
    """What the authors of a recipe wrote, for one side."""

    instances: int
    members: int
    hosts: int
    cards: int
    """Of one instance."""


AUTHORS = (
    ("DeepSeek-R1", Meant(2, 1, 1, 8), Meant(1, 8, 1, 8)),
    ("DeepSeek-R1", Meant(1, 8, 1, 8), Meant(4, 1, 1, 8)),
    ("DeepSeek-R1", Meant(1, 16, 2, 16), Meant(1, 16, 2, 16)),
    ("DeepSeek-R1", Meant(1, 4, 1, 4), Meant(1, 32, 8, 32)),
    ("GLM-5", Meant(1, 8, 1, 8), Meant(1, 8, 1, 8)),
    ("GLM-5", Meant(2, 2, 1, 2), Meant(1, 16, 4, 16)),
    ("Qwen3.5-397B-A17B", Meant(1, 1, 1, 4), Meant(1, 4, 1, 4)),
    ("Qwen3-32B", Meant(6, 1, 1, 2), Meant(2, 1, 1, 2)),
    ("gpt-oss-120b", Meant(4, 1, 1, 1), Meant(1, 1, 1, 4)),
    ("Kimi-K2", Meant(4, 32, 4, 32), Meant(1, 96, 12, 96)),
)
PLANNED = re.compile(
    r"(?P<role>[PD])\d+(-[PD]\d+)? on (?P<host>\S+): (tp_size (?P<alone>\d+)|dp (?P<dp>\d+) x tp (?P<tp>\d+))"
    r"(, experts spread over (?P<over>\d+))?, devices auto"
    r"(, part (?P<part>\d+) of a group of (?P<size>\d+) on (?P<hosts>\d+) hosts)?$"
)


def said(lines: list[str], role: str) -> Meant:
    """Return what lines of a plan say of a role; the parts of a group on several hosts are one instance."""
    found = [match for line in lines if (match := PLANNED.match(line)) and match["role"] == role]
    firsts = [match for match in found if not int(match["part"] or 0)]
    shapes = set()
    for match in firsts:
        members = int(match["size"] or match["dp"] or 1)
        each = int(match["alone"] or match["tp"])
        assert match["over"] in (None, str(members * each)), match[0]
        shapes.add((members, int(match["hosts"] or 1), members * each))
    (shape,) = shapes
    cards = sum(int(match["dp"] or 1) * int(match["alone"] or match["tp"]) for match in found)
    assert cards == len(firsts) * shape[2], "parts of a group are missing"
    assert len({match["host"] for match in found}) >= shape[1]
    return Meant(len(firsts), *shape)


def test_the_plan_of_ten_recipes_says_what_their_authors_wrote() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "recipes.py"))
    assert len(tool["CHOSEN"]) == len(AUTHORS) == 10
    for recipe, (model, prefill, decode) in zip(tool["CHOSEN"], AUTHORS, strict=True):
        topology = parse_topology(topology_of(recipe))
        lines = plan_text(topology, plan(topology, "FILE", (), 64), 64, ()).splitlines()
        assert (recipe.model, said(lines, "P"), said(lines, "D")) == (model, prefill, decode)


def test_the_ten_recipes_are_among_the_facts() -> None:
    """But for two, which others published."""
    tool = runpy.run_path(str(ROOT / "script" / "recipes.py"))
    facts = {each[:8] for each in tool["read_recipes"]()}
    elsewhere = [each.model for each in tool["CHOSEN"] if each[:8] not in facts]
    assert elsewhere == ["gpt-oss-120b", "Kimi-K2"]
