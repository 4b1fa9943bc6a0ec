"""From a YAML file, dotted overrides and the environment to a `Topology`.

Owns reading: this is the only module that looks at environment variables. Called once at the start of every process,
before any thread or model. Every problem is a `ConfigError` of one sentence that names the key and the nearest right
one. What the values mean together is checked by `topology.py`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as inspection
import yaml

from chitu.config.cluster_key import ENVIRONMENT_KEY, KEY_PATH, cluster_key_of, why_refused, with_cluster_key
from chitu.config.schema import Topology
from chitu.errors import ConfigError

DEFAULT_TOPOLOGY = "pd_disagg_1p1d_local.yaml"
PACKAGED_DIR = Path(__file__).parent


def packaged_topologies() -> list[str]:
    """Names of the topology files that come with the package."""
    return sorted(path.name for path in PACKAGED_DIR.glob("*.yaml"))


def find_topology(name: str | None) -> Path:
    """The file of a path, or of the bare name of a packaged topology (`.yaml` may be left out)."""
    name = name or DEFAULT_TOPOLOGY
    for candidate in (Path(name), PACKAGED_DIR / name, PACKAGED_DIR / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"there is no topology file {name!r}: give a path, or one of {', '.join(packaged_topologies())}"
        + _nearest(Path(name).name, packaged_topologies())
    )


def load_topology(path: str | None, overrides: Sequence[str] = ()) -> Topology:
    """Read `path` (None: the default 1P1D), put `a.b=c` overrides over it, check keys, types and ranges.

    The cluster's key comes from the environment before the file, and from no override: those stand in command lines.
    """
    file = find_topology(path)
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no valid YAML: {_one_line(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a mapping with the keys {', '.join(_field_types(_ROOT))}")
    for override in overrides:
        if override.partition("=")[0].strip() == KEY_PATH:
            raise ConfigError(
                f"{KEY_PATH} is a secret, and `ps` shows command lines to everybody: put it into the environment as "
                f"{ENVIRONMENT_KEY}, or into a topology file that only you can read"
            )
        _apply(data, override)
    topology = parse_topology(data)
    key = cluster_key() or cluster_key_of(topology)
    if key and (problem := why_refused(key)):
        raise ConfigError(problem)
    return with_cluster_key(topology, key)


def parse_topology(data: dict[str, Any]) -> Topology:
    """A `Topology` from plain YAML values."""
    _refuse_unknown_keys(data, _ROOT, "")
    try:
        return msgspec.convert(data, Topology)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), data)) from error


def dump_topology(topology: Topology) -> str:
    """YAML that `load_topology` reads back to an equal value, but for the cluster's key, which is left out: it goes to
    child processes by their environment."""
    topology = with_cluster_key(topology, "")
    # Without allow_unicode: PyYAML writes odd line breaks (NEL) in single quotes and folds them away when it reads.
    return yaml.dump(msgspec.to_builtins(topology), Dumper=_Dumper, sort_keys=False)


# -------------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans (so that `off` stays a word); a key given twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that knows no short booleans either, so `off` is written as a plain word and read back as one."""


_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


# ------------------------------------------------------------------------------------------------- schema by key path


def _plain(kind: inspection.Type) -> inspection.Type:
    """The type behind Annotated metadata and `| None`."""
    while isinstance(kind, inspection.Metadata):
        kind = kind.type
    if isinstance(kind, inspection.UnionType):
        others = [_plain(member) for member in kind.types if not isinstance(member, inspection.NoneType)]
        if len(others) == 1:
            return others[0]
    return kind


def _field_types(kind: inspection.Type) -> dict[str, inspection.Type]:
    return {field.name: _plain(field.type) for field in kind.fields} if isinstance(kind, inspection.StructType) else {}


_ROOT = _plain(inspection.type_info(Topology))


def known_keys(kind: inspection.Type = _ROOT, prefix: str = "") -> Iterator[str]:
    """Every key path of the schema; members of lists appear with index 0."""
    for name, member in _field_types(kind).items():
        yield prefix + name
        yield from known_keys(member, f"{prefix}{name}.")
        if isinstance(member, inspection.VarTupleType):
            yield from known_keys(_plain(member.item_type), f"{prefix}{name}.0.")


def _member(kind: inspection.Type | None, part: str) -> inspection.Type | None:
    """The type one step down a key path; None where the schema has nothing there."""
    if isinstance(kind, inspection.VarTupleType) and part.isdigit():
        return _plain(kind.item_type)
    return _field_types(kind).get(part) if kind is not None else None


def _type_at(path: str) -> inspection.Type | None:
    kind: inspection.Type | None = _ROOT
    for part in path.split("."):
        kind = _member(kind, part)
    return kind


def _nearest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def _unknown(prefix: str, key: str, kind: inspection.Type) -> ConfigError:
    """Nearest key: in this section first, then one of the same name elsewhere, then the most similar whole path."""
    path = f"{prefix}{key}"
    siblings = list(_field_types(kind))
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return ConfigError(f"unknown key {path!r}; did you mean {prefix + near[0]!r}?")
    everywhere = list(known_keys())
    same_name = [known for known in everywhere if known.split(".")[-1] == key]
    hint = f"; did you mean {same_name[0]!r}?" if same_name else _nearest(path, everywhere)
    return ConfigError(f"unknown key {path!r}{hint or '; known here: ' + ', '.join(siblings)}")


def _refuse_unknown_keys(value: Any, kind: inspection.Type | None, prefix: str) -> None:
    if isinstance(kind, inspection.StructType) and isinstance(value, dict):
        types = _field_types(kind)
        for key, member in value.items():
            if key not in types:
                raise _unknown(prefix, str(key), kind)
            _refuse_unknown_keys(member, types[key], f"{prefix}{key}.")
    elif isinstance(kind, inspection.VarTupleType) and isinstance(value, list):
        for index, member in enumerate(value):
            _refuse_unknown_keys(member, _plain(kind.item_type), f"{prefix}{index}.")


# ---------------------------------------------------------------------------------------------------------- overrides


def _apply(data: dict[str, Any], override: str) -> None:
    """Put one `a.b.0.c=value` into the plain YAML data; the value is parsed as YAML."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"the override {override!r} must look like key.path=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {override!r} is no valid YAML: {_one_line(error)}") from error
    parts = path.split(".")
    node: Any = data
    kind: inspection.Type | None = _ROOT
    for depth, part in enumerate(parts):
        where = ".".join(parts[: depth + 1])
        below = _member(kind, part)
        if below is None:
            if isinstance(kind, inspection.VarTupleType):
                raise ConfigError(f"override {where!r}: {part!r} must be an index into a list")
            assert kind is not None
            raise _unknown("".join(f"{p}." for p in parts[:depth]), part, kind)
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
    """One step down, making the section or list where the file leaves it out."""
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


# ------------------------------------------------------------------------------------------------------- explanations

_AT = re.compile(r"^(?P<what>.*?) - at `\$(?P<path>.*)`$", re.DOTALL)
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "array": "a list",
    "object": "a section",
    "bool": "true or false",
}


def _explain(text: str, data: dict[str, Any]) -> str:
    """msgspec's message as one sentence with the key path and the value that was given."""
    match = _AT.match(text)
    if match is None:
        return f"the topology is wrong: {text}"
    path = re.sub(r"\[(\d+)\]", r".\1", match["path"]).lstrip(".")
    value: Any = data
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    kind = _type_at(path)
    if isinstance(kind, inspection.LiteralType):
        words = [str(word) for word in kind.values]
        return f"{path} must be one of {', '.join(words)}, not {value!r}{_nearest(str(value), words)}"
    if path == KEY_PATH:
        return f"{path} must be a text (in quotes, if it looks like a number)"
    expected = re.match(r"Expected `(\w+)(?: \| null)?`(?: (?P<range>[<>]=? \S+))?", match["what"])
    if expected is None:
        return f"{path}: {match['what']}, not {value!r}"
    bound = f" {expected['range']}" if expected["range"] else ""
    return f"{path} must be {_NAMES.get(expected[1], expected[1])}{bound}, not {value!r}"


# -------------------------------------------------------------------------------------------------------- environment


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """Where this process stands in its torchrun; (0, 0, 1) when it was started by hand."""

    rank: int
    local_rank: int
    world_size: int


def torchrun_rank() -> TorchrunRank:
    return TorchrunRank(_env_int("RANK", 0), _env_int("LOCAL_RANK", 0), _env_int("WORLD_SIZE", 1))


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def process_mark() -> str | None:
    """`CHITU_PROCESS`: which tree of a local cluster this process belongs to (`launch/process.py`)."""
    return os.environ.get("CHITU_PROCESS")


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"the environment variable {name} must be an integer, not {text!r}") from None


def pd_master_addr() -> str | None:
    """`PD_MASTER_ADDR`, else a `MASTER_ADDR` that someone set on purpose.

    torchrun sets MASTER_ADDR in its children for its own rendezvous; that one says nothing about the router.
    """
    own = os.environ.get("PD_MASTER_ADDR")
    if own:
        return own
    return None if under_torchrun() else os.environ.get("MASTER_ADDR") or None


def router_host(topology: Topology) -> str:
    """Address at which P and D reach the router: `PD_MASTER_ADDR`, then `MASTER_ADDR`, then `dp_config.router.host`."""
    return pd_master_addr() or topology.dp_config.router.host


def progress_file() -> Path | None:
    """Where a scheduler process writes its start progress, one JSON object a line (`launch/progress.py`)."""
    path = os.environ.get("CHITU_PROGRESS_FILE")
    return Path(path) if path else None


def api_key() -> str | None:
    """`CHITU_API_KEY`: what `chitu chat` shows a router that asks for a key. Not the key of another service, which
    would leave for any address that is given."""
    return os.environ.get("CHITU_API_KEY") or None


def cluster_key() -> str:
    """`CHITU_CLUSTER_KEY`: the cluster's secret, over the one of the topology file; empty where there is none."""
    return os.environ.get(ENVIRONMENT_KEY, "")


def cache_dir() -> Path:
    """Folder for what the project makes and keeps: `$XDG_CACHE_HOME/chitu`, else `~/.cache/chitu`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chitu"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child, with `extra` over it."""
    return {**os.environ, **extra}
