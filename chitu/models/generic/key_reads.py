"""Which keys of a config.json the installed `transformers` reads, found in its source without importing it.

Owns the rule by which an unknown key has no effect: neither the config class of a model, nor its modeling code, nor the
code that all models share ever looks for its name. A name counts as read if the source takes it from anything that is
called a config (`config.KEY`, `getattr(text_config, "KEY")`, `config_dict.pop("KEY")`), or if a config class mentions
it. The rule errs on the side of *read*: what it misses would be served with other tokens, what it adds is refused.
Names that are put together (`f"{modality}_token_id"`) are missed: none of them matters to a prompt of text.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from chitu.models.generic.library import TRANSFORMERS, find_config, models_folder

OTHER_WORK = re.compile(
    r"(cli|data|decision|exporters|loss|models|pipelines)/"
    r"|(audio|image|video|vision)_|(convert_slow|tokenization|processing|feature_extraction|safetensors_conversion)"
    r"|(trainer|training|optimization|hyperparameter|modelcard|testing|hf_argparser|debug|model_debugging)"
    r"|(modeling_|integrations/)g(guf|gml)"
    r"|integrations/(deepspeed|executorch|fsdp|integration_utils|liger|mistral|neftune|peft|tiktoken)"
    r"|generation/(streamers|watermarking)"
    r"|utils/(attention_visualizer|auto_docstring|chat_|doc|dummy_|notebook|quantization_config|sentencepiece)"
)
"""Files, by the beginnings of their paths, that neither load a folder of safetensors nor compute: tokenizers, images,
training, pipelines, GGUF files, export, the keys of `quantization_config`."""
AUTO = ("configuration_auto.py", "modeling_auto.py", "auto_factory.py")
"""Code in `models/auto` that reads a config before its class is known."""
_CONFIG = re.compile("config|cfg|rope_(?:param|scaling)", re.IGNORECASE)
"""Marks of a name of a config, or of the dictionary in it that describes the rope."""
_ANY_CLASS = re.compile("Config")
_SHARED_CLASSES = re.compile(r"Pre[Tt]rainedConfig$|ConfigMixin$|^GenerationConfig$")
"""Shared classes that take their names from a config.json, unlike those that describe watermarks or compilers."""
_OTHER_MODEL = re.compile(r"^from \.\.(\w+)\.((?:configuration|modeling)_\w+) import", re.MULTILINE)


def keys_read(keys: Collection[str], model_type: str) -> frozenset[str] | None:
    """Return those of the keys that the library reads for this `model_type`; None if that cannot be told, because the
    library or its class for the type is not installed."""
    if importlib.util.find_spec(TRANSFORMERS) is None:
        return None
    own = find_config(model_type)
    if own is None:
        return None
    found = {key for key in keys if key.startswith("__")}  # read by Python itself
    classes = dict.fromkeys(_shared_files(models_folder()), _SHARED_CLASSES) | dict.fromkeys(
        _files_of(own.file.parent), _ANY_CLASS
    )
    for file, pattern in classes.items():
        source = file.read_text(encoding="utf-8")
        if mentioned := {key for key in keys if _has_word(source, key)} - found:  # so few files are parsed
            found |= _names_in(file, pattern) & mentioned
    return frozenset(found)


@functools.cache
def _names_in(file: Path, classes: re.Pattern[str]) -> frozenset[str]:
    """Return the names that a file of the library reads from configs; parsed once, since it takes a tenth of a
    second."""
    return frozenset(_Reader(ast.parse(file.read_text(encoding="utf-8")), classes).names)


def _files_of(folder: Path) -> list[Path]:
    """Return the config classes and the code of a model, and what they import of other models."""
    files = [*sorted(folder.glob("configuration_*.py")), *sorted(folder.glob("modeling_*.py"))]
    for file in files:  # grows
        for name, module in _OTHER_MODEL.findall(file.read_text(encoding="utf-8")):
            other = folder.parent / name / f"{module}.py"
            if name != "auto" and other not in files and other.is_file():
                files.append(other)
    return files


@functools.cache
def _shared_files(models: Path) -> tuple[Path, ...]:
    """Return the code that every model goes through: configs, loading, attention, caches, ropes, generation."""
    library = models.parent
    found = [models / "auto" / name for name in AUTO if (models / "auto" / name).is_file()]
    files = sorted(library.rglob("*.py"))
    return (*found, *(file for file in files if not OTHER_WORK.match(file.relative_to(library).as_posix())))


def _has_word(source: str, key: str) -> bool:
    return key in source and re.search(rf"(?<!\w){re.escape(key)}(?!\w)", source) is not None


def _identifiers(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _texts(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


class _Reader(ast.NodeVisitor):
    """Finds the names that one file reads from configs. `classes`: names of the classes that are configs."""

    def __init__(self, tree: ast.Module, classes: re.Pattern[str]) -> None:
        self.names: set[str] = set()
        self._classes = classes
        self._others = {name for node in ast.walk(tree) for name in self._other_names(node)}
        """Names of variables that hold a config and are not called one."""
        self._constants = {
            text for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for text in _texts(node)
        }
        self._functions: list[ast.AST] = [tree]
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Count every name in a config class: its fields, its arguments, what it takes from `self` or `kwargs`."""
        if self._classes.search(node.name):
            self.names.update(_texts(node), self._mentioned(node))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_config(node.value):
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._is_config(node.value):
            self._take(node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(map(self._is_config, node.comparators)):
            self._take(node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Count texts beside a config: `getattr(config, "KEY")`, `config.pop("KEY")`, `helper(config, "KEY")`."""
        is_getattr = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
        if is_getattr and self._is_config(node.args[0]):
            self._take(node.args[1])
        elif self._is_config(node.func) or any(map(self._is_config, node.args)):
            self.names.update(str(each.value) for each in node.args if isinstance(each, ast.Constant))
        if self._is_config(node.func):
            self.names.update(keyword.arg for keyword in node.keywords if keyword.arg)
        self.generic_visit(node)

    def _take(self, key: ast.expr) -> None:
        """Count a name that is read; if it is a variable, every text that it can be in this function and file."""
        if isinstance(key, ast.Constant):
            self.names.add(str(key.value))
        else:
            self.names.update(_texts(self._functions[-1]), self._constants)

    def _is_config(self, node: ast.expr) -> bool:
        return any(_CONFIG.search(name) or name in self._others for name in _identifiers(node))

    @staticmethod
    def _mentioned(node: ast.ClassDef) -> Iterator[str]:
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute):
                yield each.attr
            elif isinstance(each, ast.arg):
                yield each.arg
            elif isinstance(each, ast.FunctionDef):
                yield each.name
        for line in node.body:
            for target in [*getattr(line, "targets", ()), getattr(line, "target", None)]:
                if isinstance(target, ast.Name):
                    yield target.id

    @staticmethod
    def _other_names(node: ast.AST) -> Iterator[str]:
        """Yield the variables of an assignment such as `part = model.config` or `part = config.get_text_config()`."""
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call):
            is_copy = isinstance(value.func, ast.Attribute | ast.Name) and "copy" in list(_identifiers(value.func))[-1]
            value = value.args[0] if is_copy and value.args else value.func
        last = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
        if not _CONFIG.search(last):
            return
        for target in [*getattr(node, "targets", ()), getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                yield target.id
