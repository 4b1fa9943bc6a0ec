"""Which published PD recipes can be served as written, and what keeps the others: `python script/recipes.py`.

Writes docs/recipes.md. Facts of the recipes are in script/recipes/srt_slurm.csv: those of NVIDIA's srt-slurm (commit
c88ef731 of 2026-08-21; each point of a swept list is a recipe), equal ones once with their `count`. Attention of `dp`
ranks is `dp_size` here, experts over them `experts: spread`. Sizes of models and cards are published ones.

What a recipe needs is asked of the project's own checks: its topology is built, and read as `chitu plan` reads one.
"""

from __future__ import annotations

import csv
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test"))

from support.checkpoints import ROWS, write_row_config  # noqa: E402

from chitu.config.load import parse_topology  # noqa: E402
from chitu.config.schema import Topology  # noqa: E402
from chitu.config.topology_checks import problems  # noqa: E402
from chitu.engine.memory_budget import GPU_FRACTION, state_problems  # noqa: E402
from chitu.errors import ConfigError  # noqa: E402
from chitu.launch.plan import plan, plan_text  # noqa: E402
from chitu.models.config import ModelSpec, read_model_spec  # noqa: E402
from chitu.models.draft_layer import with_draft_layer  # noqa: E402

FACTS = ROOT / "script" / "recipes" / "srt_slurm.csv"
PAGE = ROOT / "docs" / "recipes.md"
KEPT_BYTES = {"fp8": 1 + 4 / 128, "fp4": 1 / 2 + 2 / 16, "mxfp4": 1 / 2 + 4 / 32}
"""Of a number that GPUs keep as small as it is stored, with its scales, by `bits` of recipes. Weights of models on
transformers' modules are turned into 16 (docs/gpu.md)."""
CARD_GB = {"h100": 80, "h200": 141, "b200": 180, "b300": 270, "gb200": 186, "gb300": 279}
BITS = {"bf16": 16, "fp8": 8, "fp4": 4, "mxfp4": 4}

HEAD = """# Published recipes

How many of the prefill/decode recipes of NVIDIA's srt-slurm can be written as a topology of this project, and fit their
cards: **{served} of {total}**. Written by `python script/recipes.py`, from facts of the recipes and what the checks of
this code say; run was none of them, for want of the cards.
"""
PLANS = """
## Ten of them

What `chitu plan` says of the first P and D of each: the parallel plan that the authors wrote, in this project's words.
"""


class Model(NamedTuple):
    billions: float
    of_experts: float
    """Billions of weights in its routed experts."""
    like: str
    """Row of test/support/checkpoints.py with a config of this form."""


MODELS = {
    "DeepSeek-R1": Model(671, 654, "DeepSeek-V3"),
    "DeepSeek-V4-Pro": Model(1600, 1550, "DeepSeek-V4-Flash"),
    "GLM-5": Model(744, 725, "GLM-5"),
    "Qwen3.5-397B-A17B": Model(397, 387, "Qwen3.5-122B-A10B"),
    "Qwen3-32B": Model(32.8, 0, "Qwen3-32B"),
}
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
    count: int
    tp: int
    dp: int
    pp: int
    experts: str

    @property
    def cards(self) -> int:
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"] if self.tp > 1 or self.cards == 1 else []
        parts += [f"dp {self.dp}"] if self.dp > 1 else []
        parts += [f"pp {self.pp}"] if self.pp > 1 else []
        parts += ["experts spread"] if self.experts == "spread" else []
        return f"{self.count} x ({', '.join(parts)})"


class Recipe(NamedTuple):
    model: str
    bits: str
    card: str
    cards_of_host: int
    engine: str
    prefill: Side
    decode: Side
    drafts: str
    count: int

    @property
    def sides(self) -> dict[str, Side]:
        return {"prefill_schedulers": self.prefill, "decode_schedulers": self.decode}


CHOSEN = (
    Recipe(
        "DeepSeek-R1", "fp8", "h200", 8, "trtllm", Side(2, 8, 1, 1, "spread"), Side(1, 1, 8, 1, "spread"), "mtp 2", 1
    ),
    Recipe("DeepSeek-R1", "fp8", "b200", 8, "sglang", Side(1, 1, 8, 1, "cut"), Side(4, 8, 1, 1, "cut"), "", 1),
    Recipe(
        "DeepSeek-R1", "fp8", "h100", 8, "trtllm", Side(1, 1, 16, 1, "spread"), Side(1, 1, 16, 1, "spread"), "mtp 3", 1
    ),
    Recipe("DeepSeek-R1", "fp4", "gb200", 4, "trtllm", Side(1, 1, 4, 1, "spread"), Side(1, 1, 32, 1, "spread"), "", 1),
    Recipe("GLM-5", "fp8", "b200", 8, "sglang", Side(1, 1, 8, 1, "cut"), Side(1, 1, 8, 1, "cut"), "", 1),
    Recipe("GLM-5", "fp4", "gb300", 4, "sglang", Side(2, 1, 2, 1, "spread"), Side(1, 1, 16, 1, "spread"), "eagle 2", 1),
    Recipe(
        "Qwen3.5-397B-A17B", "fp8", "gb200", 4, "sglang", Side(1, 4, 1, 1, "cut"), Side(1, 1, 4, 1, "spread"), "", 1
    ),
    Recipe("Qwen3-32B", "bf16", "h100", 8, "sglang", Side(6, 2, 1, 1, "cut"), Side(2, 2, 1, 1, "cut"), "", 1),
    Recipe("gpt-oss-120b", "mxfp4", "b200", 8, "trtllm", Side(4, 1, 1, 1, "cut"), Side(1, 4, 1, 1, "cut"), "", 1),
    Recipe("Kimi-K2", "fp8", "h200", 8, "sglang", Side(4, 1, 32, 1, "spread"), Side(1, 1, 96, 1, "spread"), "", 1),
)
"""Two of them are not of srt-slurm: gpt-oss-120b is Dynamo's, Kimi-K2 that of SGLang's authors for 128 cards."""


def read_recipes() -> list[Recipe]:
    with FACTS.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))

    def side(line: dict[str, str], name: str) -> Side:
        return Side(
            *(int(line[key]) for key in (name, f"{name}_tp", f"{name}_dp", f"{name}_pp")), line[f"{name}_experts"]
        )

    return [
        Recipe(
            *(line["model"], line["bits"], line["card"], int(line["cards_of_host"]), line["engine"]),
            *(side(line, "p"), side(line, "d"), line["drafts"], int(line["count"])),
        )
        for line in lines
    ]


def topology_of(recipe: Recipe, wanted: frozenset[str] = frozenset(NEEDS)) -> dict[str, Any]:
    """Return the topology of a recipe as its YAML has it, with those of its features that are `wanted`. Hosts are
    placeholders, a new one for each instance that does not fit on the last."""
    sections: dict[str, list[dict[str, Any]]] = {}
    number, free = 0, recipe.cards_of_host
    for first_port, (section, side) in zip((12000, 32000), recipe.sides.items(), strict=True):
        entries = sections.setdefault(section, [])
        for _ in range(side.count):
            num_hosts = -(-side.cards // recipe.cards_of_host)
            if side.cards > free:
                number, free = number + (free < recipe.cards_of_host), recipe.cards_of_host
            hosts = [f"10.0.0.{1 + number + place}" for place in range(num_hosts)]
            free -= side.cards
            if free <= 0:
                number, free = number + num_hosts, recipe.cards_of_host
            entry: dict[str, Any] = {"host": hosts[0], "port": first_port + 100 * len(entries), "tp_size": 1}
            if "tp" in wanted:
                entry["tp_size"] = side.tp
            if "dp" in wanted and side.dp > 1:
                entry["dp_size"] = side.dp
            if "experts" in wanted and _is_spread(side):
                entry["experts"] = "spread"
            if "hosts" in wanted and num_hosts > 1:
                del entry["host"]
                entry |= {"hosts": hosts, "rendezvous_port": first_port + 100 * len(entries) + 99}
            if "pp" in wanted and side.pp > 1:
                entry["pp_size"] = side.pp
            entries.append(entry)
    data: dict[str, Any] = {"dp_config": {"router": {"host": "10.0.0.1", **sections}}}
    if "drafts" in wanted and recipe.drafts:
        data["scheduler"] = {"speculation": "mtp"}
    return data


def _is_spread(side: Side) -> bool:
    """Whether the ranks of the instance share the experts; data ranks always do."""
    return side.experts == "spread" or side.dp > 1


def needs_of(recipe: Recipe) -> frozenset[str]:
    """Return the keys of `NEEDS` that keep a recipe from being served as written."""
    model, sides = MODELS[recipe.model], recipe.sides.values()
    spec = spec_of(model.like)
    found = {need for need in ("dp", "experts", "hosts", "pp", "drafts") if list(why_not(recipe, need))}
    if isinstance(spec, str):
        found.add("model")
    elif any(side.tp > 1 for side in sides) and list(state_problems(_topology(recipe, "tp"), spec, ())):
        found.add("tp")
    if recipe.drafts and isinstance(spec, ModelSpec) and not _has_drafts(spec):
        found.add("drafts")
    is_own = isinstance(spec, ModelSpec) and spec.code == "own"
    of_experts = KEPT_BYTES.get(recipe.bits, 2.0) if is_own else 2.0
    needed = (_weight_gb(model, side, of_experts) > GPU_FRACTION * CARD_GB[recipe.card] for side in sides)
    if BITS[recipe.bits] < 16 and any(needed):
        found.add("weights")
    return frozenset(found)


def why_not(recipe: Recipe, need: str) -> Iterator[str]:
    """Yield what the checks of a topology say against one feature of a recipe."""
    try:
        yield from problems(_topology(recipe, need, *(("dp",) if need == "hosts" else ())), need_model=False)
    except ConfigError as error:
        yield str(error)


def _topology(recipe: Recipe, *needs: str) -> Topology:
    return parse_topology(topology_of(recipe, frozenset(needs)))


@functools.cache
def spec_of(name: str) -> ModelSpec | str:
    """Return what the code reads from a published config, or why it refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        write_row_config(next(row for row in ROWS if row.name == name), Path(folder))
        try:
            return read_model_spec(folder)
        except ConfigError as error:
            return error.message


def _has_drafts(spec: ModelSpec) -> bool:
    try:
        with_draft_layer(spec)
    except ConfigError:
        return False
    return True


def _weight_gb(model: Model, side: Side, of_experts: float) -> float:
    """Return GB of weights on a card, with so many bytes of a number of experts, and the others in 16 bits."""
    dense = (model.billions - model.of_experts) / side.tp
    return (2 * dense + of_experts * model.of_experts / (side.tp * side.dp)) / side.pp


def count(needs: dict[Recipe, frozenset[str]], is_meant: Callable[[frozenset[str]], bool]) -> int:
    return sum(recipe.count for recipe, found in needs.items() if is_meant(found))


def page(recipes: list[Recipe]) -> str:
    needs = {recipe: needs_of(recipe) for recipe in recipes}
    lines = [HEAD.format(total=count(needs, lambda _: True), served=count(needs, lambda found: not found))]
    lines += ["| needs | recipes | of which nothing else |", "|---|---|---|"]
    for need, words in NEEDS.items():
        all_of_it = count(needs, lambda found: need in found)  # noqa: B023
        lines.append(f"| {words} | {all_of_it} | {count(needs, lambda found: found == {need})} |")  # noqa: B023
    lines += ["", "| model | recipes | served | and with small weights |", "|---|---|---|---|"]
    for model in dict.fromkeys(recipe.model for recipe in recipes):
        own = {recipe: found for recipe, found in needs.items() if recipe.model == model}
        numbers = count(own, lambda _: True), count(own, lambda found: not found), count(own, {"weights"}.issuperset)
        lines.append(f"| {model} | {' | '.join(map(str, numbers))} |")
    lines.append(PLANS)
    for recipe in CHOSEN:
        lines += [f"* **{recipe.model}**, {recipe.bits} on {recipe.card}: P {recipe.prefill}; D {recipe.decode}", ""]
        lines += [f"      {line}" for line in planned(recipe)] + [""]
    return "\n".join(lines)


def planned(recipe: Recipe) -> Iterator[str]:
    """Yield what `chitu plan` says of its instances, P and D of each kind once."""
    try:
        topology = _topology(recipe, *NEEDS)
    except ConfigError as error:
        yield str(error)
        return
    text, seen = plan_text(topology, plan(topology, "FILE", (), 64), 64, ()), set()
    for line in text.splitlines():
        name, on, _ = line.partition(" on ")
        if on and name[0] in "PD" and name[0] not in seen:
            seen.add(name[0])
            yield line.replace(", devices auto", "")


def main() -> None:
    PAGE.write_text(page(read_recipes()), encoding="utf-8")


if __name__ == "__main__":
    main()
