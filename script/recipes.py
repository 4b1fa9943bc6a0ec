"""Which published PD recipes can be served as written, and what keeps the others: `python script/recipes.py`.

Writes docs/recipes.md. Facts of the recipes are in script/recipes/srt_slurm.csv: those of NVIDIA's srt-slurm (commit
c88ef731 of 2026-08-21; each point of a swept list is a recipe), equal ones once with their `count`. Attention of `dp`
ranks is `dp_size` here, experts over them `experts: spread`. Sizes of models and cards are published ones. Beside it
are those of the prefill/decode recipes of Dynamo and llm-d for NVIDIA's cards (copies of up to November 2026; plans by
their manifests, or by the tables of their READMEs where a manifest leaves a number open).

What a recipe needs is asked of the project's own checks: its topology is built, and read as `chitu plan` reads one.
"""

from __future__ import annotations

import csv
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test"))

from support.checkpoints import ROWS, write_row_config  # noqa: E402

from chitu.engine.memory_budget import state_problems  # noqa: E402
from chitu.errors import ConfigError  # noqa: E402
from chitu.launch.plan import plan, plan_text  # noqa: E402
from chitu.models.config import ModelSpec, read_model_spec  # noqa: E402
from chitu.models.draft_layer import with_draft_layer  # noqa: E402
from chitu.tools.recipes.models import MODELS  # noqa: E402
from chitu.tools.recipes.recipe import NEEDS, Recipe, Side, fits, topology_with, why_not  # noqa: E402

FACTS = ROOT / "script" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"
HEAD = """# Published recipes

How many of the prefill/decode recipes of NVIDIA's srt-slurm can be written as a topology of this project, and fit their
cards: **{served} of {total}**. Written by `python script/recipes.py`, from facts of the recipes and what the checks of
this code say; run was none of them, for want of the cards.
"""
IMPORT = """
[`chitu import FILE`](#import-a-recipe) writes the topology of a recipe, or says what keeps it from running here.
"""
OTHERS = """
## Of Dynamo and llm-d

| recipes of | recipes | can be written, and fit |
|---|---|---|
"""
OF_OTHERS = {"Dynamo": "dynamo", "llm-d": "llm_d"}
SHORT = {"weights": "weights", "model": "model", "tp": "tp", "dp": "dp", "experts": "experts", "hosts": "tp over hosts"}
SHORT |= {"pp": "pipeline", "drafts": "drafts"}
IMPORTING = """
## Import a recipe

```bash
chitu import recipe.yaml --output cluster.yaml          # srt-slurm: one of a file with a base by --variant NAME
chitu import deploy.yaml --card h200 --hosts a,b        # a manifest of Dynamo or llm-d, which may name no card
```

It reads srt-slurm's YAML (SGLang, vLLM, TensorRT-LLM; `override_` and `zip_override_` variants), and manifests with a
DynamoGraphDeployment, a DisaggregatedSet, LeaderWorkerSets or Deployments, as kustomize or helm renders them, with the
files of options in their ConfigMaps. Each option is a part of the plan, a key of the topology, or named in a comment at
the head of the file: *by hand* (changes of config.json), *left out* (kernels, logs, ports, and why), *unknown*. A value
that P and D have in common here, and not in the recipe, is named with both. If something keeps the recipe from running,
nothing is written: each reason is a line, and the exit code is 1. The file passes `chitu plan`, given a model's folder.
Weights are counted by published sizes of the models above; `chitu plan --model FOLDER` counts those of any other.
"""
PLANS = """
## Ten of them

What `chitu plan` says of the first P and D of each: the parallel plan that the authors wrote, in this project's words.
"""


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


def read_recipes(name: str = "srt_slurm") -> list[Recipe]:
    with (FACTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
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


def needs_of(recipe: Recipe) -> frozenset[str]:
    """Return the keys of `NEEDS` that keep a recipe from being served as written."""
    sides = recipe.sides.values()
    spec = spec_of(MODELS[recipe.model].like)
    found = {need for need in ("dp", "experts", "hosts", "pp", "drafts") if list(why_not(recipe, need))}
    if isinstance(spec, str):
        found.add("model")
    elif any(side.tp > 1 for side in sides) and list(state_problems(topology_with(recipe, "tp"), spec, ())):
        found.add("tp")
    if "beside" in recipe.drafts or (recipe.drafts and isinstance(spec, ModelSpec) and not has_drafts(spec)):
        found.add("drafts")
    if not fits(recipe, isinstance(spec, ModelSpec) and spec.code == "own"):
        found.add("weights")
    return frozenset(found)


@functools.cache
def spec_of(name: str) -> ModelSpec | str:
    """Return what the code reads from a published config, or why it refuses it; without a name, that none is known."""
    if not name:
        return "no config of this form is known"
    with tempfile.TemporaryDirectory() as folder:
        write_row_config(next(row for row in ROWS if row.name == name), Path(folder))
        try:
            return read_model_spec(folder)
        except ConfigError as error:
            return error.message


def has_drafts(spec: ModelSpec) -> bool:
    try:
        with_draft_layer(spec)
    except ConfigError:
        return False
    return True


def count(needs: dict[Recipe, frozenset[str]], is_meant: Callable[[frozenset[str]], bool]) -> int:
    return sum(recipe.published for recipe, found in needs.items() if is_meant(found))


def page(recipes: list[Recipe]) -> str:
    needs = {recipe: needs_of(recipe) for recipe in recipes}
    lines = [HEAD.format(total=count(needs, lambda _: True), served=count(needs, lambda found: not found)) + IMPORT]
    lines += ["| needs | recipes | of which nothing else |", "|---|---|---|"]
    for need, words in NEEDS.items():
        all_of_it = count(needs, lambda found: need in found)  # noqa: B023
        lines.append(f"| {words} | {all_of_it} | {count(needs, lambda found: found == {need})} |")  # noqa: B023
    lines += ["", "| model | recipes | served | and with small weights |", "|---|---|---|---|"]
    for model in dict.fromkeys(recipe.model for recipe in recipes):
        own = {recipe: found for recipe, found in needs.items() if recipe.model == model}
        numbers = count(own, lambda _: True), count(own, lambda found: not found), count(own, {"weights"}.issuperset)
        lines.append(f"| {model} | {' | '.join(map(str, numbers))} |")
    lines.append(others().rstrip("\n"))
    lines.append(IMPORTING.rstrip("\n"))
    lines.append(PLANS)
    for recipe in CHOSEN:
        lines += [f"* **{recipe.model}**, {recipe.bits} on {recipe.card}: P {recipe.prefill}; D {recipe.decode}", ""]
        lines += [f"      {line}" for line in planned(recipe)] + [""]
    return "\n".join(lines)


def others() -> str:
    """Return the part of the page about the recipes of other projects."""
    found = {name: {each: needs_of(each) for each in read_recipes(file)} for name, file in OF_OTHERS.items()}
    text = OTHERS
    for name, needs in found.items():
        text += f"| {name} | {count(needs, lambda _: True)} | {count(needs, lambda each: not each)} |\n"
    text += "\n| of | model | plan | lacks here |\n|---|---|---|---|\n"
    for name, needs in found.items():
        for recipe, lacking in needs.items():
            plan_of_it = f"{recipe.bits} on {recipe.card}: P {recipe.prefill}; D {recipe.decode}"
            shown = ", ".join(words for need, words in SHORT.items() if need in lacking) or "nothing"
            text += f"| {name} | {recipe.model} | {plan_of_it} | {shown} |\n"
    return text


def planned(recipe: Recipe) -> Iterator[str]:
    """Yield what `chitu plan` says of its instances, P and D of each kind once."""
    try:
        topology = topology_with(recipe, *NEEDS)
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
