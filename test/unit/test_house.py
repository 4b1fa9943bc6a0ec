"""What a reader may rely on in every file: its constants and its logger stand at its top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import chitu

FOLDER = Path(chitu.__file__).parent
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names_in(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, kind)}


def constants(node: ast.stmt) -> set[str]:
    """Return the constants, or the logger, that a statement assigns."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = set().union(*(names_in(target, ast.Store) for target in targets))
    return {name for name in names if name.isupper() or name == "logger"}


def misplaced(module: ast.Module) -> Iterator[str]:
    """Yield the constants below the first definition that need none of what is defined there."""
    below: set[str] = set()
    for node in module.body:
        if isinstance(node, DEFINITIONS):
            below.add(node.name)
        elif below and not (isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None):
            below |= names_in(node, ast.Store)
        elif below:
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            if names_in(node.value, ast.Load) & below:
                below |= names_in(node, ast.Store)
            else:
                yield from sorted(constants(node))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("A = 1\ndef f(): ...\nB = 2\nlogger = g()\n", ["B", "logger"]),
        ("def f(): ...\nA = f()\nB = {A: 1}\nC = B\n", []),
        ("class C: ...\nT: dict[str, C] = {}\nU = {1: C}\nV = 3\n", ["T", "V"]),
        ("def f(): ...\nx = 1\nY = Union[x, f]\n", []),
    ],
)
def test_a_constant_is_misplaced_unless_it_needs_what_stands_before_it(code: str, found: list[str]) -> None:
    assert list(misplaced(ast.parse(code))) == found


def test_constants_and_loggers_stand_at_the_top() -> None:
    found = {
        str(path.relative_to(FOLDER)): names
        for path in sorted(FOLDER.rglob("*.py"))
        if (names := list(misplaced(ast.parse(path.read_text()))))
    }
    assert not found, f"move them above the first definition: {found}"
