"""Reads a `Topology` from a YAML file, dotted overrides (`a.b.0.c=value`) and the environment.

Owns reading: no other module reads environment variables. Called once at the start of every process, before any thread
or model. YAML has the booleans and floats of YAML 1.2, and no duplicate keys. Every problem is a `ConfigError` of one
sentence that names the key, or the part of an override's path that does not exist, and the nearest valid one.
`topology.py` checks whether the values fit together.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as inspection
import yaml

from chitu.config.cluster_key import (
    API_KEYS,
    ENVIRONMENT_KEY,
    SECRETS,
    cluster_key_of,
    secrets_in,
    why_refused,
    with_api_keys,
    with_cluster_key,
)
from chitu.config.devices import with_step_sizes
from chitu.config.key_paths import (
    ROOT,
    explain,
    field_types,
    member_of,
    nearest,
    refuse_unknown_keys,
    unknown_key,
    with_switches,
)
from chitu.config.schema import Topology
from chitu.config.topology import SECTIONS, changed_keys, router_hosts, with_router
from chitu.errors import ConfigError
from chitu.known_types import known

_BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
DEFAULT_TOPOLOGY = "pd_disagg_1p1d_local.yaml"
PACKAGED_DIR = Path(__file__).parent


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
        elif isinstance(below, inspection.StructType | inspection.VarTupleType | inspection.DictType):
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


def packaged_topologies() -> list[str]:
    """Return the names of the topology files in the package."""
    return sorted(path.name for path in PACKAGED_DIR.glob("*.yaml"))


def find_topology(name: str | None) -> Path:
    """Return the file of a path, or of the bare name of a packaged topology (`.yaml` may be left out)."""
    name = name or DEFAULT_TOPOLOGY
    for candidate in (Path(name), PACKAGED_DIR / name, PACKAGED_DIR / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"there is no topology file {name!r}: give a path, or one of {', '.join(packaged_topologies())}"
        + (_nearest_topology(name) or ("; a model is given as --model" if "/" in name else ""))
    )


def _nearest_topology(name: str) -> str:
    """Return `; did you mean ...?`, or "". The suffix does not count, since all names have it."""
    stems = {file.removesuffix(".yaml"): file for file in packaged_topologies()}
    return nearest(Path(name).name.removesuffix(".yaml"), stems).replace("'?", ".yaml'?")


def load_topology(path: str | None, overrides: Sequence[str] = ()) -> Topology:
    """Read `path` (None: the default 1P1D), apply `a.b=c` overrides, check keys, types and ranges.

    For the cluster key and the API keys the environment overrides the file. Overrides may not set them: command lines
    are visible to other users.
    """
    return read_topology(path, overrides)[0]


def read_topology(path: str | None, overrides: Sequence[str] = ()) -> tuple[Topology, frozenset[str]]:
    """Return what `load_topology` does, and the keys of `scheduler` that the file or an override gives: the others may
    still depend on the devices (`with_step_sizes`)."""
    file = find_topology(path)
    try:
        data = read_yaml(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no valid YAML: {one_line(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a mapping with the keys {', '.join(field_types(ROOT))}")
    given = copy.deepcopy(secrets_in(data))
    for override in overrides:
        apply_override(data, override)
        for path, value in secrets_in(data).items():
            if value != given.get(path):
                raise ConfigError(
                    f"{path} is a secret, and `ps` shows command lines to every user: put it into the environment as "
                    f"{SECRETS[path]}, or into a topology file that only you can read"
                )
    topology = parse_topology(data)
    key = cluster_key() or cluster_key_of(topology)
    if key and (problem := why_refused(key)):
        raise ConfigError(problem)
    if keys := api_keys():
        topology = with_api_keys(topology, keys)
    return with_cluster_key(topology, key), frozenset(data.get("scheduler") or {})


def parse_topology(data: dict[str, Any]) -> Topology:
    """Return a `Topology` from plain YAML values."""
    refuse_unknown_keys(data, ROOT, "")
    data = with_switches(data, ROOT)
    try:
        data = _with_lists_of_devices(data)
        topology = msgspec.convert(data, known(Topology))
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), data)) from error
    if hosts := topology.dp_config.router.hosts:
        topology = with_router(topology, host=hosts[0])
    return with_step_sizes(topology, data.get("scheduler") or {})


def _with_lists_of_devices(data: dict[str, Any]) -> dict[str, Any]:
    """Turn a single device into a list: `devices: auto` and `devices: [auto]` are the same, for `ib_device` too."""
    router = (data.get("dp_config") or {}).get("router") if isinstance(data.get("dp_config"), dict) else None
    pd = router.get("pd_disaggregation") if isinstance(router, dict) else None
    if isinstance(pd, dict) and isinstance(pd.get("ib_device"), str):
        pd["ib_device"] = [pd["ib_device"]] if pd["ib_device"] else []
    for section in SECTIONS.values():
        members = router.get(section) if isinstance(router, dict) else None
        for member in members if isinstance(members, list) else ():
            if isinstance(member, dict) and isinstance(member.get("devices"), str):
                member["devices"] = [member["devices"]]
    return data


def dump_topology(topology: Topology) -> str:
    """Return YAML that `load_topology` reads back to an equal value, except the cluster key, which is left out: child
    processes get it through their environment. Keys at their defaults are left out, too, so that a process of the
    release before, which lacks some, reads it as long as none of these is used."""
    topology = with_cluster_key(topology, "")
    # Without allow_unicode, since PyYAML writes unusual line breaks (NEL) in single quotes and folds them when it
    # reads.
    return yaml.dump(changed_keys(topology), Dumper=Dumper, sort_keys=False)


# -------------------------------------------------------------------------------------------------------- environment


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """Rank of this process in its torchrun; (0, 1) if it was started by hand."""

    rank: int
    world_size: int


def torchrun_rank() -> TorchrunRank:
    return TorchrunRank(_env_int("RANK", 0), _env_int("WORLD_SIZE", 1))


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def shown_devices() -> tuple[str, ...]:
    """Return `CHITU_DEVICES`: the topology's names of the GPUs that CUDA_VISIBLE_DEVICES shows to this process, in
    order. Its launcher sets it; empty without one."""
    return tuple(name for name in os.environ.get("CHITU_DEVICES", "").split(",") if name)


def device_environment() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES and Slurm's variables on a job and its GPUs, if set (`process/node_devices.py`)."""
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_ID")
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


def process_mark() -> str | None:
    """Return `CHITU_PROCESS`: the process tree in a local cluster of this process (`process/descendants.py`)."""
    return os.environ.get("CHITU_PROCESS")


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"the environment variable {name} must be an integer, not {text!r}") from None


def pd_master_addr() -> str | None:
    """Return `PD_MASTER_ADDR`, else a `MASTER_ADDR` that the user set.

    torchrun sets MASTER_ADDR in its children for its own rendezvous; that one is not the router's address.
    """
    own = os.environ.get("PD_MASTER_ADDR")
    if own:
        return own
    return None if under_torchrun() else os.environ.get("MASTER_ADDR") or None


def router_host(topology: Topology) -> str:
    """Return the first router's address for P and D: `PD_MASTER_ADDR`, else `MASTER_ADDR`, else
    `dp_config.router.host`."""
    return pd_master_addr() or topology.dp_config.router.host


def reached_hosts(topology: Topology) -> tuple[str, ...]:
    """Return the address of each router for P and D."""
    return router_host(topology), *router_hosts(topology.dp_config.router)[1:]


def progress_file() -> Path | None:
    """Return the file for a scheduler process's start progress, one JSON object a line (`process/progress.py`)."""
    path = os.environ.get("CHITU_PROGRESS_FILE")
    return Path(path) if path else None


def api_key() -> str | None:
    """Return `CHITU_API_KEY`, the API key that `chitu chat` sends. It is not the key of another service, since it goes
    to any address that is given."""
    return os.environ.get("CHITU_API_KEY") or None


def api_keys() -> tuple[str, ...]:
    """Return `CHITU_API_KEYS`: the comma-separated API keys, which override those of the topology file. Without a key
    between its commas (`$A,$B` of unset variables) it is refused, lest the API be open."""
    text = os.environ.get(API_KEYS, "")
    keys = tuple(key for word in text.split(",") if (key := word.strip()))
    if text and not keys:
        raise ConfigError(
            f"the environment variable {API_KEYS} is {text!r}, which has no API key: give some, or unset it"
        )
    return keys


def slurm_node() -> tuple[int, str] | None:
    """Return this node's number and the node list of a Slurm step on several nodes, else None."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None or _env_int("SLURM_STEP_NUM_NODES", 1) < 2:
        return None
    return _env_int("SLURM_NODEID", 0), nodes


def lws_hosts() -> tuple[str, ...] | None:
    """Return the names of the pods of a group of a LeaderWorkerSet, the leader's first, else None. The name of worker k
    is that of the leader with `-k` behind the pod's."""
    leader, size = os.environ.get("LWS_LEADER_ADDRESS", ""), _env_int("LWS_GROUP_SIZE", 1)
    if not leader or size < 2:
        return None
    pod, dot, domain = leader.partition(".")
    return (leader, *(f"{pod}-{index}{dot}{domain}" for index in range(1, size)))


def cluster_key() -> str:
    """Return `CHITU_CLUSTER_KEY`: the cluster's secret, which overrides the one of the topology file; "" if unset."""
    return os.environ.get(ENVIRONMENT_KEY, "")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a child, overridden by `extra`."""
    return {**os.environ, **extra}


def keyless_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the same without the keys of the cluster and its clients, for a child that reads what strangers send."""
    keys = {*SECRETS.values(), "CHITU_API_KEY"}
    return {name: value for name, value in child_environment(extra).items() if name not in keys}
