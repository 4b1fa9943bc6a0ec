"""Recipes of NVIDIA's srt-slurm: one YAML a recipe, or a `base` with variants of it. Pure.

`override_NAME` is merged into the base; a null deletes a key. The lists of `zip_override_NAME` have a value for each of
several variants, a list of one value stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chitu.errors import ConfigError
from chitu.tools.recipes.options import SideWords, read_options
from chitu.tools.recipes.read import ReadRecipe

_LAUNCHER = (
    "name dynamo frontend health_check infra sbatch_directives slurm setup_script profiling identity extra_mount "
    "environment observability benchmark"
)
LAUNCHER = frozenset(_LAUNCHER.split())
"""Sections that say how their launcher starts, probes and measures; nothing of them is a plan."""
_OF_BACKEND = "type prefill_environment decode_environment aggregated_environment connector kv_events_config"
OF_BACKEND = frozenset(_OF_BACKEND.split())
_OF_RESOURCES = (
    "gpu_type gpus_per_node prefill_nodes prefill_workers decode_nodes decode_workers gpus_per_prefill "
    "gpus_per_decode agg_nodes agg_workers gpus_per_agg"
)
OF_RESOURCES = frozenset(_OF_RESOURCES.split())
ROLES = {"prefill": "prefill", "decode": "decode", "agg": "aggregated"}


def is_srt_slurm(data: Any) -> bool:
    return isinstance(data, dict) and ("base" in data or ("resources" in data and "backend" in data))


def variants(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the recipes of a file by name; the only one of a plain file has none."""
    if "base" not in data:
        return {"": dict(data)}
    found = {"base": dict(data["base"])}
    for name, override in data.items():
        if name.startswith("override_"):
            found[name] = merged(data["base"], override)
        elif name.startswith("zip_override_"):
            for place in range(_length(override)):
                found[f"{name}[{place}]"] = merged(data["base"], _at(override, place))
    return found


def merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in override.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            below = result.get(key)
            result[key] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def _length(override: Any) -> int:
    if isinstance(override, Mapping):
        return max([1, *map(_length, override.values())])
    return len(override) if isinstance(override, list) else 1


def _at(override: Any, place: int) -> Any:
    if isinstance(override, Mapping):
        return {key: _at(value, place) for key, value in override.items()}
    if isinstance(override, list) and override:
        return override[place] if len(override) > 1 else override[0]
    return override


def read_srt_slurm(data: Mapping[str, Any]) -> ReadRecipe:
    """Return the facts of one recipe. Raises ConfigError if it is none, or its numbers contradict each other."""
    model, resources, backend = (_section(data, name) for name in ("model", "resources", "backend"))
    engine = str(backend.get("type", "sglang"))
    if engine not in ("sglang", "trtllm", "vllm"):
        raise ConfigError(f"backend.type is {engine}, which serves no model")
    config, sides, unknown = backend.get(f"{engine}_config") or {}, dict[str, SideWords](), _unknown(data, engine)
    for short, role in ROLES.items():
        count = int(resources.get(f"{short}_workers") or 0)
        if count:
            sides[role] = read_options(engine, config.get(role) or {}, count)
            _check_cards(resources, short, sides[role])
    if not sides:
        raise ConfigError("the recipe has no workers (resources.prefill_workers, decode_workers, agg_workers)")
    identity = (data.get("identity") or {}).get("model") or {}
    names = [identity.get("repo"), *(words.model for words in sides.values()), str(model.get("path", ""))]
    return ReadRecipe(
        str(data.get("name", "")),
        next((str(name) for name in names if name and not str(name).startswith("/")), ""),
        str(model.get("precision", "")).lower(),
        str(resources.get("gpu_type", "")).lower(),
        int(resources.get("gpus_per_node") or 8),
        engine,
        sides,
        unknown,
        [f"how srt-slurm starts, probes or measures: {', '.join(sorted(LAUNCHER & data.keys() - {'name'}))}"]
        + [f"backend.{name} (of that engine)" for name in sorted(backend) if name.endswith("_environment")],
    )


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(f"the recipe has no section {name!r}")
    return section


def _unknown(data: Mapping[str, Any], engine: str) -> list[str]:
    known = {"": LAUNCHER | {"model", "resources", "backend"}, "model": {"path", "container", "precision"}}
    known |= {"resources": OF_RESOURCES, "backend": OF_BACKEND | {f"{engine}_config"}}
    return [".".join(filter(None, (where, key))) for where, keys in known.items() for key in _keys(data, where) - keys]


def _keys(data: Mapping[str, Any], where: str) -> set[str]:
    return set(data[where] if where else data)


def _check_cards(resources: Mapping[str, Any], short: str, words: SideWords) -> None:
    said = resources.get(f"gpus_per_{short}")
    if said and int(said) != words.side.cards:
        words.unknown[f"gpus_per_{short}"] = f"{said}, while the plan of the engine has {words.side.cards} cards"


def every(data: Mapping[str, Any]) -> Iterator[tuple[str, ReadRecipe]]:
    for name, variant in variants(data).items():
        yield name, read_srt_slurm(variant)
