"""Docstrings read as engineers write: a function's begins with a verb, and processes are not persons.

ruff's D401 finds `Returns ...`; it takes a fragment that begins with no verb at all (`Of the next message.`) for right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "chitu"
PERSONS = re.compile(r"\b(nobody|somebody|everybody|whoever|whom)\b", re.IGNORECASE)
FRAGMENTS = re.compile(
    r"(An?|All|As|At|By|Every|For|From|How|In|Its?|None|Nothing|Of|On|One|That|The|These|Those|To|Until|What|Where|Whether"
    r"|Whose?|Why|With|Without)\b"
)


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def functions(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of each function that has one; a property says what it is."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if (text := ast.get_docstring(node)) and not is_property:
                yield node.lineno, text


@pytest.mark.parametrize("room", sorted({path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}))
def test_docstrings_are_in_plain_english(room: str) -> None:
    path = PACKAGE / room
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    found = [
        f"{file}:{line}: {text.splitlines()[0]}"
        for file in files
        for line, text in [
            *(item for item in docstrings(file) if PERSONS.search(item[1])),
            *(item for item in functions(file) if FRAGMENTS.match(item[1])),
        ]
    ]
    assert not found, "\n".join(found)
