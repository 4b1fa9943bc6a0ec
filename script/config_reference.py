"""Write docs/configuration.md from the schema: `python script/config_reference.py`. A test fails if the page is out of
date."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from chitu.config import schema

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration: every key

Generated from `chitu/config/schema.py` by `script/config_reference.py`; edit there. A topology file is YAML with these
keys, each with a default; an unknown key is refused with the nearest known one. Any key can be set on a command line,
after the options: `chitu serve TOPOLOGY dp_config.router.port=8000 dp_config.router.decode_schedulers.0.tp_size=2`.
Seconds are more than 0 and at most 10^9.
"""
TYPES = {
    "Port": "port",
    "Positive": "1 or more",
    "Parallel": "1 to 4096",
    "Seconds": "seconds",
    "NotNegative": "0 to 10^9",
    "Fraction": "above 0, to 1",
    "Share": "0 to 1",
    "Priority": "0 or less",
    "str": "text",
    "dict[str, str]": "names with texts",
    "dict[str, str | int]": "names with texts or numbers",
    "bool": "`true`, `false`",
    "int": "number",
    "float": "number",
    "None": "unset",
    "tuple[str, ...]": "list of text",
    "tuple[Priority, ...]": "list, each 0 or less",
}


def main() -> None:
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """Return the whole page."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    }
    return HEAD + "".join(_section(classes, aliases, "Topology", ""))


def _section(classes: dict[str, ast.ClassDef], aliases: dict[str, ast.expr], name: str, path: str) -> Iterator[str]:
    """Yield a table of the section's own keys, then the sections below it."""
    keys = list(_keys(classes[name]))
    below = [(f"{path}{key}", kind) for key, _, kind, _ in keys if _section_of(kind, classes)]
    own = [row for row in keys if not _section_of(row[2], classes)]
    if own:
        yield f"\n## `{path.removesuffix('.')}`\n\n"
        if text := _flat(ast.get_docstring(classes[name])):
            yield f"{text}\n\n"
        yield "| key | value | default | meaning |\n|---|---|---|---|\n"
        for key, default, kind, meaning in own:
            yield f"| `{key}` | {_values(kind, aliases)} | {default} | {meaning} |\n"
    for key, kind in below:
        many = ".N" if isinstance(kind, ast.Subscript) else ""
        yield from _section(classes, aliases, _section_of(kind, classes), f"{key}{many}.")


def _keys(node: ast.ClassDef) -> Iterator[tuple[str, str, ast.expr, str]]:
    """Yield name, default, type and meaning of each field."""
    values = getattr(schema, node.name)()
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = _flat(str(after.value.value))
            key = statement.target.id
            yield key, _default(getattr(values, key)), statement.annotation, text


def _section_of(kind: ast.expr, classes: dict[str, ast.ClassDef]) -> str:
    """Return the section that a field holds, alone or in a list; empty for a plain value."""
    return next((word.id for word in ast.walk(kind) if isinstance(word, ast.Name) and word.id in classes), "")


def _values(kind: ast.expr, aliases: dict[str, ast.expr]) -> str:
    if isinstance(kind, ast.BinOp):
        return f"{_values(kind.left, aliases)}, or {_values(kind.right, aliases)}"
    text = ast.unparse(kind)
    if text in TYPES:
        return TYPES[text]
    kind = aliases.get(text, kind)
    assert isinstance(kind, ast.Subscript), text
    if ast.unparse(kind.value) == "Literal":
        assert isinstance(kind.slice, ast.Tuple)
        return ", ".join(f"`{ast.literal_eval(value)}`" for value in kind.slice.elts)
    if bounds := re.search(r"int, Meta\(ge=(\d+), le=(\d+)\)", text):
        return f"integer from {bounds[1]} to {bounds[2]}"
    assert "Meta(ge=0)" in text, text
    return "0 or more"


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if value in ("", (), {}):
        return "empty"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{msgspec.json.encode(value).decode().strip(chr(34))}`"


def _flat(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
