"""The schema by key path (`dp_config.router.port`): which keys exist, which one was meant, what a value must be.

Pure; used by `load.py` and `load.py`. Every error of a topology becomes one sentence here that names the key and
the nearest valid one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec.inspect as inspection

from chitu.config.cluster_key import KEY_PATH
from chitu.config.schema import Topology
from chitu.errors import ConfigError

REMOVED = {
    "dp_config.router.workers": "is gone: name complete routers in dp_config.router.hosts, a host once for each "
    "router that it runs (docs/deploy.md)"
}
"""Keys of earlier versions, and what to do instead."""
_WORDS = {True: "on", False: "off"}
_AT = re.compile(r"^(?P<what>.*?) - at `\$(?P<path>.*)`$", re.DOTALL)
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "array": "a list",
    "object": "a section",
    "bool": "true or false",
}


def is_number(text: str) -> bool:
    """Return whether the text has only digits that `int` reads; `2²` has others."""
    return text.isascii() and text.isdigit()


def plain(kind: inspection.Type) -> inspection.Type:
    """Return the type without Annotated metadata and `| None`."""
    while isinstance(kind, inspection.Metadata):
        kind = kind.type
    if isinstance(kind, inspection.UnionType):
        others = [plain(member) for member in kind.types if not isinstance(member, inspection.NoneType)]
        if len(others) == 1:
            return others[0]
    return kind


def field_types(kind: inspection.Type) -> dict[str, inspection.Type]:
    """Return the keys of a section and their types, or {} if it is no section."""
    return {field.name: plain(field.type) for field in kind.fields} if isinstance(kind, inspection.StructType) else {}


ROOT = plain(inspection.type_info(Topology))
"""Type of a topology."""


def known_keys(kind: inspection.Type = ROOT, prefix: str = "") -> Iterator[str]:
    """Yield every key path of the schema; members of lists have index 0."""
    for name, member in field_types(kind).items():
        yield prefix + name
        yield from known_keys(member, f"{prefix}{name}.")
        if isinstance(member, inspection.VarTupleType):
            yield from known_keys(plain(member.item_type), f"{prefix}{name}.0.")


def member_of(kind: inspection.Type | None, part: str) -> inspection.Type | None:
    """Return the type one step down a key path, or None if the schema has nothing there."""
    if isinstance(kind, inspection.VarTupleType) and is_number(part):
        return plain(kind.item_type)
    if isinstance(kind, inspection.DictType):
        return plain(kind.value_type)
    return field_types(kind).get(part) if kind is not None else None


def _type_at(path: str) -> inspection.Type | None:
    kind: inspection.Type | None = ROOT
    for part in path.split("."):
        kind = member_of(kind, part)
    return kind


def nearest(word: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?`, or ""."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown_key(prefix: str, key: str, kind: inspection.Type) -> ConfigError:
    """Return an error with the nearest key: in this section, else elsewhere."""
    path = f"{prefix}{key}"
    if cure := REMOVED.get(path):
        return ConfigError(f"{path} {cure}")
    siblings = list(field_types(kind))
    paths = {known.rpartition(".")[2]: known for known in reversed(list(known_keys()))}
    for named, cutoff in (({name: prefix + name for name in siblings}, 0.6), (paths, 0.8)):
        near = difflib.get_close_matches(key, named, n=1, cutoff=cutoff)
        near += [name for name in named if name.startswith(f"{key}_")]  # `tp`: tp_size
        if near:
            return ConfigError(f"unknown key {path!r}; did you mean {named[near[0]]!r}?")
    return ConfigError(f"unknown key {path!r}; known here: {', '.join(siblings)}")


def refuse_unknown_keys(value: Any, kind: inspection.Type | None, prefix: str) -> None:
    """Raise ConfigError for the first key of plain YAML data that is not in the schema. `prefix` is `value`'s path."""
    if isinstance(kind, inspection.StructType) and isinstance(value, dict):
        types = field_types(kind)
        for key, member in value.items():
            if key not in types:
                raise unknown_key(prefix, str(key), kind)
            refuse_unknown_keys(member, types[key], f"{prefix}{key}.")
    elif isinstance(kind, inspection.VarTupleType) and isinstance(value, list):
        for index, member in enumerate(value):
            refuse_unknown_keys(member, plain(kind.item_type), f"{prefix}{index}.")


def with_switches(value: Any, kind: inspection.Type | None) -> Any:
    """Return plain YAML data with `on` and `off` as the schema has them. YAML 1.1 tools read them as booleans and write
    `verify_kv: off` as `false`; users write `off` for a boolean."""
    if isinstance(kind, inspection.StructType) and isinstance(value, dict):
        types = field_types(kind)
        return {key: with_switches(member, types.get(key)) for key, member in value.items()}
    if isinstance(kind, inspection.VarTupleType) and isinstance(value, list):
        return [with_switches(member, plain(kind.item_type)) for member in value]
    if isinstance(kind, inspection.LiteralType) and isinstance(value, bool) and _WORDS[value] in kind.values:
        return _WORDS[value]
    if isinstance(kind, inspection.BoolType) and value in ("on", "off"):
        return value == "on"
    return value


def explain(text: str, data: dict[str, Any]) -> str:
    """Return msgspec's message as one sentence with the key path and the given value."""
    match = _AT.match(text)
    if match is None:
        return f"the topology is wrong: {text}"
    path, is_in_names, _ = re.sub(r"\[(\d+)\]", r".\1", match["path"]).lstrip(".").partition("[...]")
    value: Any = data
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    if is_in_names:
        return f"{path} must be names with texts, not {value!r}"
    kind = _type_at(path)
    if isinstance(kind, inspection.LiteralType):
        words = [str(word) for word in kind.values]
        return f"{path} must be one of {', '.join(words)}, not {value!r}{nearest(str(value), words)}"
    if path == KEY_PATH:
        return f"{path} must be a text (in quotes, if it looks like a number)"
    expected = re.match(r"Expected `(\w+)(?: \| null)?`(?: (?P<range>[<>]=? \S+))?", match["what"])
    if expected is None:
        return f"{path}: {match['what']}, not {value!r}"
    bound = f" {expected['range']}" if expected["range"] else ""
    return f"{path} must be {_NAMES.get(expected[1], expected[1])}{bound}, not {value!r}"
