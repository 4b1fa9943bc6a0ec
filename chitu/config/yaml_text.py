"""YAML of topologies: with the booleans and floats of YAML 1.2, no duplicate keys. Pure; used by `load.py` and
`overrides.py`."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """SafeLoader with the booleans of YAML 1.2 (so that `off` stays a string) and its floats (so that `1e9` is one). It
    refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)  # the base class refuses a key that is no string
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the scalar. Refuse `"\\0"` and lone surrogates, which no path, name or message can have."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise yaml.constructor.ConstructorError(
                None, None, f"the text {value!a} has a character that no text can have", node.start_mark
            )
        return value


class Dumper(yaml.SafeDumper):
    """SafeDumper without short booleans, so that `off` is written as a plain string and read back as one."""


_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Return the value of YAML text. Raise yaml.YAMLError if it is invalid."""
    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, TypeError, OverflowError, AttributeError) as error:  # from a constructor of a date or a number
        raise yaml.YAMLError(f"it has an invalid value ({error})") from error


def one_line(error: yaml.YAMLError) -> str:
    """Return the error and its line as one sentence."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem
