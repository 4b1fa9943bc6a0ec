"""Links of the documents lead somewhere: each link between them with its heading, each decision that sources name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
DECISIONS = ROOT / "docs" / "adr"


def _text(page: Path) -> str:
    """Return the page without code, in which brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _dead_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert not list(_dead_links(page))


def test_every_decision_has_a_number_of_its_own_and_is_found_by_it() -> None:
    numbers = [path.name[:4] for path in DECISIONS.glob("*.md")]
    assert len(numbers) == len(set(numbers)), sorted(numbers)
    for path in DECISIONS.glob("*.md"):
        assert path.read_text().startswith(f"# {int(path.name[:4])}. "), path.name
    sources = [path for folder in ("chitu", "test", "script") for path in (ROOT / folder).rglob("*.py")]
    named = {number for path in sources for number in re.findall(r"docs/adr/(\d{4})", path.read_text())}
    assert named and named <= set(numbers)
