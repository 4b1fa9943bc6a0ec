"""`chitu import`: a published recipe as a topology of this project, or what keeps it from running here.

The topology is checked as `chitu plan` checks one, but for the model's folder, which is given when it starts. Weights
are counted by published sizes of the model (`models.py`); of a model that is not there nothing is said. What the recipe
says and the topology does not is named at its head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from chitu.config.load import parse_topology
from chitu.config.topology_checks import problems
from chitu.engine.memory_budget import GPU_FRACTION
from chitu.errors import ConfigError
from chitu.tools.recipes.manifests import is_manifest, read_manifest
from chitu.tools.recipes.models import BITS, CARD_GB, MODELS, known_name
from chitu.tools.recipes.options import DRAFTS, SideWords
from chitu.tools.recipes.read import ReadRecipe
from chitu.tools.recipes.recipe import (
    DECODE,
    ENCODE,
    NEEDS,
    NONE,
    PREFILL,
    UNIFIED,
    Recipe,
    fits,
    num_hosts,
    topology_of,
    weight_gb,
)
from chitu.tools.recipes.srt_slurm import is_srt_slurm, read_srt_slurm, variants

PLACEHOLDERS = "node{}.example"
OF_PROMPTS = ("scheduler.max_batched_tokens", "scheduler.chunk_size", "cache.prefix_cache")
"""Keys of the whole topology that P's value decides; D's decides the others."""
SECTION_ROLES = {PREFILL: "prefill", DECODE: "decode", UNIFIED: "aggregated", ENCODE: "encode"}
UNEVEN = "hosts cannot share evenly"
"""What the checks say of tensor parallelism over several hosts, which is named for the whole role."""
BITS_OF_NAMES = {r"nvfp4|fp4|mxfp4|gpt-oss": "fp4", r"fp8|deepseek-(r1|v3)|kimi-k2": "fp8"}
"""Bits of the weights by the model's name, where a recipe does not say them."""


class Imported(NamedTuple):
    recipe: Recipe
    topology: dict[str, Any]
    """As its YAML has it."""
    obstacles: list[str]
    """What keeps it from running here."""
    notes: list[str]
    """What to do by hand, and what the recipe says and the topology does not."""


def import_recipe(
    path: Path, variant: str, card: str, hosts: Sequence[str], output: Path | None, say: Callable[[str], None]
) -> int:
    """Write the topology to `output`, or as `say` prints. Return 1, and write nothing, if something keeps the recipe
    from running here; each obstacle is a line. Raises ConfigError if the file is no recipe."""
    imported = imported_from(path.read_text(encoding="utf-8"), variant, card, hosts)
    if imported.obstacles:
        for obstacle in imported.obstacles:
            say(f"cannot run here: {obstacle}")
        return 1
    text = text_of(imported, path.name)
    if output is None:
        say(text.rstrip("\n"))
    else:
        output.write_text(text, encoding="utf-8")
        say(f"{output}: {imported.recipe.model}, {' and '.join(map(str, imported.recipe.sides.values()))}")
    return 0


def imported_from(text: str, variant: str = "", card: str = "", hosts: Sequence[str] = ()) -> Imported:
    """Return what the text of a file says. `card` where it does not say it; without `hosts` placeholders are used."""
    return imported_recipe(read_recipe(text, variant), card, hosts)


def read_recipe(text: str, variant: str = "") -> ReadRecipe:
    """Return the facts of a file. Raises ConfigError if it is no recipe of a known form, or has several variants and
    none is chosen."""
    try:
        return _read([each for each in yaml.safe_load_all(text) if each is not None], variant)
    except yaml.YAMLError as error:
        raise ConfigError(f"the file is no YAML: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a list in place of a section, and the like
        raise ConfigError(f"a part of the recipe has another form than such recipes have: {error}") from error


def _read(documents: list[Any], variant: str) -> ReadRecipe:
    if is_manifest(documents):
        return read_manifest([each for each in documents if isinstance(each, dict)])
    if len(documents) != 1 or not is_srt_slurm(documents[0]):
        raise ConfigError(
            "the file is no recipe that is known: neither one of srt-slurm (with resources and backend), nor a "
            "manifest of Dynamo or llm-d (DynamoGraphDeployment, DisaggregatedSet, LeaderWorkerSet)"
        )
    found = variants(documents[0])
    if variant and variant not in found:
        raise ConfigError(f"the file has no variant {variant!r}; it has {', '.join(filter(None, found)) or 'none'}")
    if not variant and len(found) > 1:
        raise ConfigError(f"the file has several variants; choose one by --variant: {', '.join(found)}")
    return read_srt_slurm(found[variant or next(iter(found))])


def imported_recipe(read: ReadRecipe, card: str = "", hosts: Sequence[str] = ()) -> Imported:
    recipe = facts_of(read, card)
    addresses = hosts or _placeholders(recipe)
    data = topology_of(recipe, frozenset(NEEDS) - {"drafts"}, addresses)
    _add_keys(data, read.sides)
    obstacles = [*_obstacles(read, recipe), *_problems(data)]
    return Imported(recipe, data, list(dict.fromkeys(obstacles)), list(_notes(read, recipe)))


def facts_of(read: ReadRecipe, card: str = "") -> Recipe:
    sides = {role: words.side for role, words in read.sides.items()}
    drafts = next((words.drafts for role, words in read.sides.items() if words.drafts), "")
    return Recipe(
        known_name(read.model),
        _bits(read),
        read.card or card.lower(),
        read.cards_of_host,
        read.engine,
        sides.get("prefill", NONE),
        sides.get("decode", NONE),
        drafts,
        published=1,
        unified=sides.get("aggregated", NONE),
        encode=sides.get("encode", NONE),
    )


def _bits(read: ReadRecipe) -> str:
    said = read.bits.lower()
    if said in BITS:
        return said
    words = f"{said} {read.model.lower()}"
    return next((bits for pattern, bits in BITS_OF_NAMES.items() if re.search(pattern, words)), "bf16")


def _placeholders(recipe: Recipe) -> list[str]:
    count = num_hosts(recipe)
    return ["127.0.0.1"] if count == 1 else [PLACEHOLDERS.format(number) for number in range(count)]


def _add_keys(data: dict[str, Any], sides: dict[str, SideWords]) -> None:
    """Put the keys of the recipe's options into the topology."""
    router = data["dp_config"]["router"]
    for section, role in SECTION_ROLES.items():
        fraction = sides[role].keys.get("memory_fraction") if role in sides else None
        for entry in router.get(section, []) if fraction else []:
            entry["memory_fraction"] = fraction
    for key in sorted({key for words in sides.values() for key in words.keys} - {"memory_fraction"}):
        value = decided(key, sides)
        if key == "transport":
            router["pd_disaggregation"] = {"transport": value}
        else:
            section, _, name = key.partition(".")
            data.setdefault(section, {})[name] = value
    scheduler = data.get("scheduler", {})
    if "chunk_size" in scheduler:
        scheduler["max_batched_tokens"] = max(scheduler["chunk_size"], scheduler.get("max_batched_tokens", 0))
    drafts = next((words.drafts for words in sides.values() if words.drafts), "").split()
    if drafts and drafts[0] in DRAFTS:
        data.setdefault("scheduler", {})["speculation"] = DRAFTS[drafts[0]]
        if DRAFTS[drafts[0]] == "mtp":
            data["scheduler"]["mtp_tokens"] = int(drafts[-1])


def decided(key: str, sides: dict[str, SideWords]) -> Any:
    """Return the value of a key that the whole topology has: P's for what concerns prompts, else D's; the larger one of
    lengths."""
    found = {role: words.keys[key] for role, words in sides.items() if key in words.keys}
    if key == "model.max_model_len":
        return max(found.values())
    order = ("prefill", "decode") if key in OF_PROMPTS else ("decode", "prefill")
    return next(found[role] for role in (*order, "aggregated", "encode") if role in found)


def _obstacles(read: ReadRecipe, recipe: Recipe) -> Iterator[str]:
    """Yield what the facts say against running it here."""
    for role, words in read.sides.items():
        for name, reason in words.refused.items():
            yield f"{role}: {name}: {reason}"
        side, of_host = words.side, read.cards_of_host
        if side.pp > 1:
            yield f"{role}: pipeline stages (pp {side.pp})"
        elif side.tp > of_host:
            yield f"{role}: tensor parallelism over several hosts (tp {side.tp}, hosts of {of_host} cards)"
    if recipe.encode.cards > 1:
        yield f"encode: {recipe.encode}; here each is one process on one card"
    model = MODELS.get(recipe.model)
    if model is not None and model.refused:
        yield f"{recipe.model}: {model.refused}"
    method = recipe.drafts.rpartition(" ")[0]
    if method and method not in DRAFTS:
        yield f"drafts by {method}: only a layer of the checkpoint (MTP) or earlier text drafts here"
    elif method and DRAFTS[method] == "mtp" and model is not None and not model.drafts and not model.refused:
        yield f"drafts by {method}: {recipe.model} has no layer that drafts here (docs/speculation.md)"
    if model is not None and recipe.card in CARD_GB and not model.refused and not fits(recipe, model.is_own):
        most = max(weight_gb(recipe, side, model.is_own) for side in recipe.sides.values())
        kept = "experts alone stay in fewer bits" if model.is_own else "all are turned into 16 bits"
        limit = GPU_FRACTION * CARD_GB[recipe.card]
        yield f"weights: {most:.0f} GB a card ({recipe.bits}; {kept}), and {recipe.card} has {limit:.0f} GB for them"


def _problems(data: dict[str, Any]) -> Iterator[str]:
    """Yield what the checks of a topology say, but for its hosts' names, which may be placeholders."""
    try:
        topology = parse_topology(_with_addresses(data))
    except ConfigError as error:
        if "pp_size" not in error.message:
            yield error.message
        return
    yield from (each for each in problems(topology, need_model=False) if UNEVEN not in each)


def _with_addresses(data: Any) -> Any:
    """Return the topology with an address for each placeholder."""
    text = msgspec.json.encode(data).decode()
    found = re.sub(r"node(\d+)\.example", lambda match: f"10.0.0.{1 + int(match[1])}", text)
    return msgspec.json.decode(found)


def _notes(read: ReadRecipe, recipe: Recipe) -> Iterator[str]:
    """Yield what to do by hand, and what the topology leaves out."""
    if recipe.model not in MODELS:
        yield f"not checked: whether {recipe.model or 'the model'} is served and fits (chitu plan --model FOLDER does)"
    elif recipe.card not in CARD_GB:
        yield "not checked: whether the weights fit, as the recipe names no card; give --card"
    for role, words in read.sides.items():
        for name, change in words.by_hand.items():
            yield f"by hand, {role}: {name}: make this change in the folder's config.json: {change}"
    for key in sorted({key for words in read.sides.values() for key in words.keys} - {"memory_fraction"}):
        values = {role: words.keys[key] for role, words in read.sides.items() if key in words.keys}
        if len(set(map(str, values.values()))) > 1:
            shown = ", ".join(f"{role} {value}" for role, value in values.items())
            yield f"one value for all instances: {key} is {decided(key, read.sides)} (the recipe: {shown})"
    for name in read.unknown:
        yield f"unknown: {name}"
    for role, words in read.sides.items():
        for name, value in words.unknown.items():
            yield f"unknown, {role}: {name} ({value})"
    reasons: dict[str, dict[str, None]] = {}
    for words in read.sides.values():
        for name, reason in words.left_out.items():
            reasons.setdefault(reason, {})[name] = None
    for reason, names in reasons.items():
        yield f"left out ({reason}): {', '.join(names)}"
    for name in read.left_out:
        yield f"left out: {name}"


def text_of(imported: Imported, source: str) -> str:
    """Return the YAML with its notes as comments."""
    recipe = imported.recipe
    sides = "; ".join(f"{section.partition('_')[0]} {side}" for section, side in recipe.sides.items())
    head = [f"Imported from {source}: {recipe.model}, {recipe.bits} on {recipe.card or 'cards that it does not name'}"]
    head += [f"{sides}. Give the folder of the model with --model, the machines with --hosts.", *imported.notes]
    comment = "".join(f"# {' '.join(line.split())}\n" for line in head)
    return comment + yaml.safe_dump(imported.topology, sort_keys=False, width=1000)
