"""YAML as topologies are written: 1.2's booleans, no key twice. Pure; used by `load.py` and `overrides.py`."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans (so that `off` stays a word); a key given twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)  # of one that is no text the base class complains
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """`"\\0"` and halves of characters can be written and are no text: no path, name or message can have them."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise yaml.constructor.ConstructorError(
                None, None, f"the text {value!a} has a character that no text can have", node.start_mark
            )
        return value


class Dumper(yaml.SafeDumper):
    """SafeDumper that knows no short booleans either, so `off` is written as a plain word and read back as one."""


_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))


def read_yaml(text: str) -> Any:
    """Its value; yaml.YAMLError for anything that is none."""
    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, TypeError, OverflowError, AttributeError) as error:  # of a constructor, of a date or a number
        raise yaml.YAMLError(f"a value of it is none ({error})") from error


def one_line(error: yaml.YAMLError) -> str:
    """What is wrong, and where."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem
