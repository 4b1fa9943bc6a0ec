"""Kubernetes manifests of Dynamo (DynamoGraphDeployment) and llm-d (DisaggregatedSet, LeaderWorkerSet, ...). Pure.

A *worker* is a pod template whose container runs an engine: `vllm serve`, `python3 -m dynamo.sglang`, ... Its command
line gives the options, behind variables of its environment; files of options are looked up in the ConfigMaps.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from chitu.errors import ConfigError
from chitu.tools.recipes.models import CARD_GB
from chitu.tools.recipes.options import SideWords, plain, read_options
from chitu.tools.recipes.read import ReadRecipe

ENGINES = {
    r"vllm serve|dynamo\.vllm|vllm\.entrypoints\.\S+": "vllm",
    r"dynamo\.sglang|sglang\.launch_server": "sglang",
    r"dynamo\.trtllm|trtllm-serve": "trtllm",
}
"""What runs an engine, as it stands in a command line."""
FILES = ("extra_engine_args", "config")
"""Options that name a file with further ones."""
KINDS = ("DynamoGraphDeployment", "DisaggregatedSet", "LeaderWorkerSet", "Deployment", "StatefulSet")
ROLE_LABELS = ("llm-d.ai/role", "nvidia.com/dynamo-sub-component-type")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


class Worker(NamedTuple):
    role: str
    """`prefill`, `decode`, `encode`, or empty if the manifest does not say."""
    instances: int
    nodes: int
    """Pods of one instance."""
    pod: Mapping[str, Any]
    """Its pod's spec."""
    cards: int
    """Cards of one pod; 0: not said."""


def is_manifest(documents: Sequence[Any]) -> bool:
    return any(isinstance(each, Mapping) and each.get("kind") in KINDS for each in documents)


def read_manifest(documents: Sequence[Mapping[str, Any]]) -> ReadRecipe:
    """Return the facts of a deployment. Raises ConfigError if no container of it runs a known engine."""
    files = _config_files(documents)
    sides: dict[str, SideWords] = {}
    engine, name, unknown, left_out = "", "", list[str](), list[str]()
    cards, pods = set[str](), list[int]()
    for document in documents:
        if document.get("kind") not in KINDS:
            if document.get("kind") != "ConfigMap":
                left_out.append(f"{document.get('kind')}: no part of a topology")
            continue
        name = name or str(document.get("metadata", {}).get("name", ""))
        for worker in _workers(document):
            found = _engine_options(worker, files)
            if found is None:
                continue
            engine, options = found
            words = read_options(engine, options, worker.instances)
            role = _role(worker, options)
            if worker.cards and words.side.cards != worker.cards * worker.nodes:
                words.unknown["resources"] = (
                    f"{worker.nodes} pods with {worker.cards} cards, while the options say {words.side.cards} cards"
                )
            if role in sides:
                raise ConfigError(f"the manifest has two kinds of workers for {role}")
            sides[role] = words
            cards |= set(_card_names(worker.pod))
            pods.append(worker.cards)
    if not sides:
        raise ConfigError("no container of the manifest runs vLLM, SGLang or TensorRT-LLM")
    if "prefill" in sides and "aggregated" in sides:
        sides["decode"] = sides.pop("aggregated")
    model = next((words.model for words in sides.values() if words.model), "")
    card = cards.pop() if len(cards) == 1 else ""
    bits = next((words.quantization for words in sides.values() if words.quantization), "")
    of_host = 4 if card.startswith("gb") else max(8, *pods)
    return ReadRecipe(name, model, bits, card, of_host, engine, sides, unknown, left_out)


def _config_files(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the YAML files of all ConfigMaps by their names."""
    files = {}
    for document in documents:
        if document.get("kind") == "ConfigMap":
            for name, text in (document.get("data") or {}).items():
                if name.endswith((".yaml", ".yml")):
                    files[name] = yaml.safe_load(text)
    return files


def _workers(document: Mapping[str, Any]) -> Iterator[Worker]:
    spec, kind = document.get("spec") or {}, document["kind"]
    if kind == "DynamoGraphDeployment":
        parts = [{"name": name, **part} for name, part in (spec.get("services") or {}).items()]
        for part in [*parts, *(spec.get("components") or [])]:
            yield _dynamo_worker(part)
    elif kind == "DisaggregatedSet":
        for role in spec.get("roles") or []:
            yield _lws_worker(role.get("spec") or {}, str(role.get("name", "")), _count(spec, "slices"))
    elif kind == "LeaderWorkerSet":
        yield _lws_worker(spec, _labelled(document.get("metadata") or {}), 1)
    else:
        template = spec.get("template") or {}
        role = _labelled(template.get("metadata") or {}) or _labelled(document.get("metadata") or {})
        pod = template.get("spec") or {}
        yield Worker(role, _count(spec, "replicas"), 1, pod, _cards(pod))


def _dynamo_worker(part: Mapping[str, Any]) -> Worker:
    pod = dict(part.get("extraPodSpec") or (part.get("podTemplate") or {}).get("spec") or {})
    if "mainContainer" in pod:
        pod["containers"] = [pod["mainContainer"]]
    limits = (part.get("resources") or {}).get("limits") or {}
    role = str(part.get("subComponentType") or part.get("type") or part.get("componentType") or "")
    if role not in ("prefill", "decode", "encode"):
        role = next((each for each in ("prefill", "decode", "encode") if each in str(part["name"]).lower()), "")
    nodes = _count(part.get("multinode") or {}, "nodeCount")
    return Worker(role, _count(part, "replicas"), nodes, pod, int(limits.get("gpu") or 0) or _cards(pod))


def _lws_worker(spec: Mapping[str, Any], role: str, slices: int) -> Worker:
    template = spec.get("leaderWorkerTemplate") or {}
    worker = template.get("workerTemplate") or {}
    pod = worker.get("spec") or {}
    count = slices * _count(spec, "replicas")
    role = role or _labelled(worker.get("metadata") or {})
    return Worker(role, count, _count(template, "size"), pod, _cards(pod))


def _count(section: Mapping[str, Any], name: str) -> int:
    value = section.get(name, 1)
    if not re.fullmatch(r"\d+", str(value)):
        raise ConfigError(f"{name} is {value!r}, which is no number: give the manifest as kustomize or helm renders it")
    return int(value)


def _labelled(metadata: Mapping[str, Any]) -> str:
    labels = metadata.get("labels") or {}
    return next((str(labels[name]) for name in ROLE_LABELS if name in labels), "")


def _cards(pod: Mapping[str, Any]) -> int:
    limits = [(each.get("resources") or {}).get("limits") or {} for each in pod.get("containers") or []]
    return sum(int(each.get("nvidia.com/gpu") or 0) for each in limits)


def _card_names(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cards that the pod's node must have."""
    text = yaml.safe_dump([pod.get("nodeSelector"), pod.get("affinity")]).lower()
    for card in sorted(CARD_GB, key=len, reverse=True):
        if re.search(rf"\b{card}\b", text):
            yield card
            return


def _role(worker: Worker, options: Mapping[str, Any]) -> str:
    flat = {plain(name): value for name, value in options.items()}
    role = str(flat.get("disaggregation_mode") or worker.role)
    if flat.get("is_prefill_worker"):
        return "prefill"
    return role if role in ("prefill", "decode", "encode") else "aggregated"


def _engine_options(worker: Worker, files: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the engine that the pod runs, with its options; None if it runs none."""
    for container in worker.pod.get("containers") or []:
        line = " ".join(_line(container, worker.nodes))
        for pattern, engine in ENGINES.items():
            if match := re.search(rf"(?:{pattern})(?=\s|$)", line):
                try:
                    options = _options(shlex.split(line[match.end() :], comments=True))
                except ValueError as error:
                    raise ConfigError(f"the command line of {engine} cannot be read: {error}") from error
                for name in FILES:
                    given = files.get(PurePosixPath(str(options.get(name, ""))).name)
                    if isinstance(given, Mapping):
                        options = {**{plain(key): value for key, value in given.items()}, **options}
                return engine, options
    return None


def _line(container: Mapping[str, Any], nodes: int) -> Iterator[str]:
    """Yield the words of a container's command line; those of a shell's script as they stand in it."""
    variables = {each["name"]: str(each["value"]) for each in container.get("env") or [] if "value" in each}
    variables.setdefault("LWS_GROUP_SIZE", str(nodes))
    command, arguments = list(container.get("command") or []), list(container.get("args") or [])
    is_script = any(re.fullmatch(r"-l?c", str(word)) for word in (*command, *arguments))
    for word in (*command, *arguments):
        text = str(word)
        if is_script:
            text = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
        text = _filled(text, variables)
        yield text if is_script else shlex.quote(text)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables that are known, also in products such as `$((A * B))`."""

    def product(match: re.Match[str]) -> str:
        numbers = [variables.get(name.strip(" ${}"), name.strip(" ${}")) for name in match[1].split("*")]
        if not all(number.isdigit() for number in numbers):
            return match[0]
        result = 1
        for number in numbers:
            result *= int(number)
        return str(result)

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return VARIABLE.sub(value, re.sub(r"\$\(\(([^()]*)\)\)", product, text))


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line; those without a value are True. A word that is none is the model."""
    found: dict[str, Any] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--"):
            if word in ("&", "&&", ";", "|", "||", "exec"):
                break
            if not word.startswith("$"):  # a variable whose value is not known may be empty
                found.setdefault("model", word)
            continue
        name, has_value, value = word.partition("=")
        if not has_value and place < len(words) and not words[place].startswith("--"):
            value, has_value = words[place], "="
            place += 1
        found[plain(name)] = value if has_value else True
    return found
