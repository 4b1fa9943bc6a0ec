"""What the installed `transformers` says about an architecture, read from its source without importing it: importing
its configs costs torch and half a gigabyte, which the control plane must not pay.

Owns the look into the library's files: which class computes an architecture, which defaults and alternative names the
keys of a config have. Nothing of it is executed; what is no constant in the source is unknown here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRANSFORMERS = "transformers"
LEAST_VERSION = (5, 23)
"""Oldest version whose way to name and join the tensors of checkpoints is known to be as `model.py` uses it."""
_UNKNOWN = object()


def library_version() -> str:
    """Return the version of the installed `transformers`."""
    return importlib.metadata.version(TRANSFORMERS)


def is_too_old(version: str) -> bool:
    """Return whether a version lacks what `model.py` needs."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return tuple(numbers) < LEAST_VERSION


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """A config class of the library: what can be read of it."""

    file: Path
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name in the library -> name in the file, for keys that older files spell differently."""
    text_type: str = ""
    """`model_type` of the text part of a model of several; empty if it is one."""


def models_folder() -> Path:
    """Return the folder of the library's models. Does not import the library."""
    found = importlib.util.find_spec(TRANSFORMERS)
    assert found is not None and found.origin is not None  # a dependency
    return Path(found.origin).parent / "models"


def _files(model_type: str, kind: str) -> Iterator[Path]:
    """Yield the files of this kind, those of the folder named like the type first."""
    folder = models_folder()
    names = dict.fromkeys((model_type, model_type.removesuffix("_text"), model_type.removesuffix("_moe_text")))
    likely = [file for name in names if name for file in sorted((folder / name).glob(f"{kind}_*.py"))]
    yield from likely
    yield from (file for file in sorted(folder.glob(f"*/{kind}_*.py")) if file not in likely)


def find_config(model_type: str) -> ConfigClass | None:
    """Return the config class of a `model_type`; None if the library has none."""
    mark = re.compile(rf'^    model_type = "{re.escape(model_type)}"$', re.MULTILINE)
    for file in _files(model_type, "configuration"):
        source = file.read_text(encoding="utf-8")
        if mark.search(source):
            classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
            for node in classes.values():
                values = dict(_assigned(node))
                if _constant(values.get("model_type")) == model_type:
                    return _config_class(file, values, classes)
    return None


def is_known(model_type: object, key: str) -> bool:
    """Return whether the library's config class for this `model_type` has the key."""
    found = find_config(model_type) if isinstance(model_type, str) else None
    return found is not None and key in found.defaults


def has_class(architecture: str, model_type: str) -> bool:
    """Return whether the library has a model class of this name."""
    mark = f"\nclass {architecture}("
    return any(mark in file.read_text(encoding="utf-8") for file in _files(model_type, "modeling"))


def code_has(config: ConfigClass, mark: str) -> bool:
    """Return whether this text is in the code beside a config class."""
    return any(mark in file.read_text(encoding="utf-8") for file in config.file.parent.glob("modeling_*.py"))


def _config_class(file: Path, values: Mapping[str, ast.expr], classes: Mapping[str, ast.ClassDef]) -> ConfigClass:
    constants = {name: _constant(value) for name, value in values.items()}
    defaults = {name: value for name, value in constants.items() if value is not _UNKNOWN}
    aliases = defaults.pop("attribute_map", None)
    return ConfigClass(
        file=file,
        defaults=defaults,
        aliases=aliases if isinstance(aliases, dict) else {},
        text_type=_text_type(values.get("sub_configs_defaults", values.get("sub_configs")), classes),
    )


def _text_type(parts: ast.expr | None, classes: Mapping[str, ast.ClassDef]) -> str:
    """Return the `model_type` of `text_config` among the parts of a config; empty if there is none."""
    if not isinstance(parts, ast.Dict):
        return ""
    for key, value in zip(parts.keys, parts.values, strict=True):
        if not (isinstance(key, ast.Constant) and key.value == "text_config"):
            continue
        if isinstance(value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            if isinstance(stated := _constant(given.get("model_type")), str):
                return stated
            value = given.get("config_class", value.args[0] if value.args else value)
        if isinstance(value, ast.Name) and value.id in classes:
            stated = _constant(dict(_assigned(classes[value.id])).get("model_type"))
            return stated if isinstance(stated, str) else ""
    return ""


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
            yield line.target.id, line.value
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            yield line.targets[0].id, line.value


def _constant(node: ast.expr | None) -> Any:
    """Return the value of a constant expression, products of numbers among them, or `_UNKNOWN`."""
    if node is None:
        return _UNKNOWN
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _constant(node.left), _constant(node.right)
        return left * right if isinstance(left, int) and isinstance(right, int) else _UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _UNKNOWN
