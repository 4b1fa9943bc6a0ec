"""A published recipe in a few facts (model, bits, cards, plan), and the topology that says the same. Pure.

`chitu import` reads recipes of other projects into these facts; `script/recipes.py` has a table of them and counts how
many can be served. Attention of `dp` ranks is `dp_size` here, experts over all ranks are `experts: spread`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from chitu.config.load import parse_topology
from chitu.config.schema import Topology
from chitu.config.topology_checks import problems
from chitu.engine.memory_budget import GPU_FRACTION
from chitu.errors import ConfigError
from chitu.tools.recipes.models import BITS, CARD_GB, KEPT_BYTES, MODELS

PREFILL, DECODE, UNIFIED = "prefill_schedulers", "decode_schedulers", "unified_schedulers"
ENCODE = "encode_schedulers"
FIRST_PORTS = {PREFILL: 12000, DECODE: 32000, UNIFIED: 22000, ENCODE: 42000}
NEEDS = {
    "weights": "more weights kept small on GPUs (on transformers' modules, of latent attention), to fit",
    "model": "the model, refused today",
    "tp": "tensor parallelism of this model",
    "dp": "data-parallel attention",
    "experts": "experts spread over ranks",
    "hosts": "tensor parallelism over several hosts",
    "pp": "pipeline stages",
    "drafts": "drafts by the model, or by heads beside it",
}


class Side(NamedTuple):
    """The instances of one role, which are alike."""

    instances: int
    tp: int
    dp: int
    pp: int
    experts: str
    """`spread` or `cut`."""

    @property
    def cards(self) -> int:
        """Cards of one instance."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"] if self.tp > 1 or self.cards == 1 else []
        parts += [f"dp {self.dp}"] if self.dp > 1 else []
        parts += [f"pp {self.pp}"] if self.pp > 1 else []
        parts += ["experts spread"] if self.experts == "spread" else []
        return f"{self.instances} x ({', '.join(parts)})"


NONE = Side(0, 1, 1, 1, "cut")


class Recipe(NamedTuple):
    model: str
    """Name as published, without its owner; a key of `MODELS` if it is known."""
    bits: str
    """A key of `BITS`."""
    card: str
    """A key of `CARD_GB`; empty if the recipe does not say."""
    cards_of_host: int
    engine: str
    prefill: Side
    decode: Side
    drafts: str
    """Kind and number of draft tokens, such as `mtp 2`; empty: none."""
    published: int
    """Number of published recipes with these facts."""
    unified: Side = NONE
    encode: Side = NONE
    """Instances that encode images; each is one process on one card here."""

    @property
    def sides(self) -> dict[str, Side]:
        """The sides that have instances, by their section in a topology."""
        found = {PREFILL: self.prefill, DECODE: self.decode, UNIFIED: self.unified, ENCODE: self.encode}
        return {section: side for section, side in found.items() if side.instances}


def topology_of(
    recipe: Recipe, wanted: frozenset[str] = frozenset(NEEDS), host_names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the topology of a recipe as its YAML has it, with those of its features that are `wanted`. Without
    `host_names` hosts are placeholders. Instances fill a host before the next one; the router is on the first."""
    sections: dict[str, list[dict[str, Any]]] = {}
    number, free = 0, recipe.cards_of_host
    hosts_of = Hosts(host_names)
    for section, side in recipe.sides.items():
        entries = sections.setdefault(section, [])
        for _ in range(side.instances):
            num_hosts = math.ceil(side.cards / recipe.cards_of_host)
            if side.cards > free:
                number, free = number + (free < recipe.cards_of_host), recipe.cards_of_host
            hosts = [hosts_of[number + place] for place in range(num_hosts)]
            free -= side.cards
            if free <= 0:
                number, free = number + num_hosts, recipe.cards_of_host
            port = FIRST_PORTS[section] + 100 * len(entries)
            entry: dict[str, Any] = {"host": hosts[0], "port": port, "tp_size": 1}
            if "tp" in wanted:
                entry["tp_size"] = side.tp
            if "dp" in wanted and side.dp > 1:
                entry["dp_size"] = side.dp
            if "experts" in wanted and is_spread(side):
                entry["experts"] = "spread"
            if "hosts" in wanted and num_hosts > 1:
                del entry["host"]
                entry |= {"hosts": hosts, "rendezvous_port": port + 99}
            if "pp" in wanted and side.pp > 1:
                entry["pp_size"] = side.pp
            entries.append(entry)
    data: dict[str, Any] = {"dp_config": {"router": {"host": hosts_of[0], **sections}}}
    if "drafts" in wanted and recipe.drafts:
        data["scheduler"] = {"speculation": "mtp"}
    return data


class Hosts:
    """Addresses by number: the given ones, or placeholders if none are given."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __getitem__(self, number: int) -> str:
        if not self._names:
            return f"10.0.0.{1 + number}"
        if number >= len(self._names):
            raise ConfigError(f"the recipe needs more than the {len(self._names)} hosts that --hosts names")
        return self._names[number]


def num_hosts(recipe: Recipe) -> int:
    """Return the number of hosts that `topology_of` uses."""
    entries = [entry for section in recipe.sides for entry in topology_of(recipe)["dp_config"]["router"][section]]
    return len({host for entry in entries for host in entry.get("hosts", [entry.get("host")])})


def is_spread(side: Side) -> bool:
    """Return whether the ranks of an instance share the experts; data ranks always do."""
    return side.experts == "spread" or side.dp > 1


def why_not(recipe: Recipe, need: str) -> Iterator[str]:
    """Yield what the checks of a topology say against one feature of a recipe."""
    try:
        yield from problems(topology_with(recipe, need, *(("dp",) if need == "hosts" else ())), need_model=False)
    except ConfigError as error:
        yield str(error)


def topology_with(recipe: Recipe, *needs: str) -> Topology:
    return parse_topology(topology_of(recipe, frozenset(needs)))


def weight_gb(recipe: Recipe, side: Side, is_own: bool) -> float:
    """Return GB of weights on a card, if experts stay as small as they are stored (with our own code) and others have
    16 bits."""
    model = MODELS[recipe.model]
    of_experts = KEPT_BYTES.get(recipe.bits, 2.0) if is_own else 2.0
    dense = (model.billions - model.of_experts) / side.tp
    return (2 * dense + of_experts * model.of_experts / (side.tp * side.dp)) / side.pp


def fits(recipe: Recipe, is_own: bool) -> bool:
    """Return whether the weights fit on the cards of each side. Recipes with 16 bits fit as their authors say."""
    limit = GPU_FRACTION * CARD_GB[recipe.card]
    return BITS[recipe.bits] >= 16 or all(weight_gb(recipe, side, is_own) <= limit for side in recipe.sides.values())
