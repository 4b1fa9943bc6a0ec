"""Overrides of a topology from the command line: puts one `a.b.0.c=value` into the plain YAML data. Pure.

Called by `load_topology` for each, before it checks keys, types and ranges of the whole. ConfigError names the part of
the path that does not exist.
"""

from __future__ import annotations

from typing import Any

import msgspec.inspect as inspection
import yaml

from chitu.config.key_paths import ROOT, member_of, unknown_key
from chitu.config.yaml_text import one_line, read_yaml
from chitu.errors import ConfigError


def apply_override(data: dict[str, Any], override: str) -> None:
    """Put one `a.b.0.c=value` into the plain YAML data; the value is parsed as YAML."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"the override {override!r} must look like key.path=value")
    try:
        value = "-" if text == "-" else read_yaml(text)  # YAML's list with one empty entry, which no key takes
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {override!r} is no valid YAML: {one_line(error)}") from error
    parts = path.split(".")
    node: Any = data
    kind: inspection.Type | None = ROOT
    for depth, part in enumerate(parts):
        where = ".".join(parts[: depth + 1])
        below = member_of(kind, part)
        if below is None:
            if isinstance(kind, inspection.VarTupleType):
                raise ConfigError(f"override {where!r}: {part!r} must be an index into a list")
            assert kind is not None
            raise unknown_key("".join(f"{p}." for p in parts[:depth]), part, kind)
        if depth == len(parts) - 1:
            _put(node, part, value, where)
        elif isinstance(below, inspection.StructType | inspection.VarTupleType):
            node = _step(node, part, below, where)
        else:
            raise ConfigError(f"override {path!r}: {where!r} is a value, it has no keys")
        kind = below


def _put(node: Any, part: str, value: Any, where: str) -> None:
    if isinstance(node, list):
        _check_index(node, int(part), where)
        node[int(part) : int(part) + 1] = [value]
    else:
        node[part] = value


def _step(node: Any, part: str, kind: inspection.Type, where: str) -> Any:
    """Return the node one step down; make the section or list if the file leaves it out."""
    empty: Any = [] if isinstance(kind, inspection.VarTupleType) else {}
    if isinstance(node, list):
        index = int(part)
        _check_index(node, index, where)
        if index == len(node):
            node.append(empty)
        child = node[index]
    else:
        child = node.setdefault(part, empty)
        if child is None:
            child = node[part] = empty
    if not isinstance(child, type(empty)):
        raise ConfigError(f"{where} must be a {'list' if empty == [] else 'section'}, not {child!r}")
    return child


def _check_index(node: list[Any], index: int, where: str) -> None:
    if index > len(node):
        raise ConfigError(f"override {where!r}: the list has {len(node)} entries, so the next index is {len(node)}")
