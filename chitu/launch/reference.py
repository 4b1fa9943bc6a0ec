"""References for answers of a cluster: one unified engine, started here or already running, and `transformers`.

Used by `chitu verify` and, for the engine, by `chitu replay`. Blocking, in the caller's thread, which must outlive the
processes that it starts.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from chitu.client.client import RouterClient
from chitu.client.verify.probe import Impossible, Prober, Score
from chitu.config.load import api_key, load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.models.checkpoint import count_weights
from chitu.protocol import KVLayout
from chitu.protocol.snapshot import ClusterSnapshot

READY_TIMEOUT_S = 1800.0
"""Timeout of the engine's start: a large model is read from disk first."""
SPARE_PAGES = 64
"""Pages in addition to those of one request of the longest context."""
MEMORY_PART = 0.5
"""Share of the free memory that the weights of `transformers` may take."""
FLOAT32_BYTES = 4
RIGHT_SINCE = {"deepseek_v2": (5, 15), "deepseek_v3": (5, 0)}
"""First version of `transformers` that computes a model type correctly: earlier ones omitted YaRN's scale of the
attention (V2), or chose experts of excluded groups (V3)."""


class Scorer(Protocol):
    def scores(self, token_ids: Sequence[int], count: int) -> list[Score]:
        """Return the scores of the last `count` tokens. Raise Impossible if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    engine: Prober
    layout: KVLayout
    scorers: dict[str, Scorer]
    """Scorers by name: the engine, which scores the cluster, and `transformers` if available, which scores the
    engine."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `chitu verify`."""

    url: str
    model: str | None = None
    """Checkpoint folder; None: that of the cluster's topology, if it is on this machine."""
    reference: str | None = None
    """URL of a running unified engine."""
    device: str = "cpu"
    """Device of the engine that is started."""
    has_transformers: bool = True
    """Whether to use `transformers`, too, if there is memory for it."""
    max_rounds: int = 8
    """Maximum number of prompts until every pair was hit."""
    concurrency: int = 2
    """Number of requests at once; the cluster may serve other clients."""
    max_tokens: int = 40
    timeout_s: float = 120.0
    """Timeout of one answer."""
    entries: Entries | None = None


class EngineShape(NamedTuple):
    dtype: str
    """Dtype of K and V, and of the model unless it is fp8."""
    max_model_len: int
    page_size: int


@contextlib.contextmanager
def reference(
    options: VerifyOptions, like: KVLayout, max_model_len: int, say: Callable[[str], None]
) -> Iterator[Reference]:
    """Yield the reference for the model, the context and the dtype of the cluster. Raise Impossible if there is none,
    and ConfigError and StartFailed as `LocalCluster` does."""
    if options.reference is not None:
        yield _reference(options, RouterClient(options.reference, api_key(), flag="--reference"), like, say)
        return
    if options.model is None:
        raise Impossible(
            "the model's folder is not known, or not on this machine: name it with --model DIR, or a running unified "
            "engine with --reference URL"
        )
    shape = EngineShape(like.dtype, max_model_len, like.page_size)
    with engine(options.model, options.device, shape, options.entries, say) as client:
        yield _reference(options, client, like, say)


@contextlib.contextmanager
def engine(
    folder: str, device: str, shape: EngineShape, entries: Entries | None, say: Callable[[str], None]
) -> Iterator[RouterClient]:
    """Start a unified engine and yield its client. Raise ConfigError or StartFailed as `LocalCluster`."""
    say(f"starting one unified engine of {folder} on {device}")
    topology = load_topology("unified_local.yaml", _settings(folder, device, shape))
    with LocalCluster(topology, entries=entries) as own:
        own.wait_ready(READY_TIMEOUT_S)
        keys = own.topology.dp_config.router.api_keys
        yield RouterClient(own.url, keys[0] if keys else None)
    own.supervisor.remove_logs()


def layout_of(cluster: ClusterSnapshot) -> KVLayout | None:
    """Return the layout of any instance that reports one, or None."""
    return next((instance.layout for instance in cluster.instances if instance.layout is not None), None)


def _settings(folder: str, device: str, shape: EngineShape) -> list[str]:
    """Return the overrides of the engine, with pages for one longest request and SPARE_PAGES."""
    dtype, page_size = shape.dtype, shape.page_size
    pages = -(-shape.max_model_len // page_size) + SPARE_PAGES
    return [
        f"model.path={msgspec.json.encode(folder).decode()}",
        "model.served_name=reference",
        "cache.kv_dtype=fp8_e4m3" if dtype == "fp8_e4m3" else f"model.dtype={dtype}",
        f"model.max_model_len={shape.max_model_len}",
        f"cache.page_size={page_size}",
        f"cache.num_pages={pages}",
        f"dp_config.router.unified_schedulers.0.devices=[{msgspec.json.encode(device).decode()}]",
    ]


def _reference(options: VerifyOptions, client: RouterClient, like: KVLayout, say: Callable[[str], None]) -> Reference:
    own = layout_of(snapshot := client.cluster())
    if own is None or any(instance.role != "unified" for instance in snapshot.instances):
        raise Impossible(f"{client.url} is no unified engine that serves")
    if own.model_hash != like.model_hash:
        raise Impossible("the reference has another model than the cluster: config.json or the weight files differ")
    engine = Prober(client, client.model_name(), options.max_tokens, options.timeout_s)
    scorers: dict[str, Scorer] = {f"one engine ({own.dtype})": engine}
    if options.model is not None and options.has_transformers:
        twin = find_transformers(options.model, say)
        scorers |= {"transformers (float32)": twin} if twin is not None else {}
    return Reference(engine, own, scorers)


def find_transformers(folder: str, say: Callable[[str], None]) -> Scorer | None:
    """Return the scorer by `transformers`, or None after passing the reason to `say`."""
    if importlib.util.find_spec("transformers") is None:
        say("no second reference: transformers is not installed")
        return None
    from chitu.engine.memory_budget import available_cpu_bytes

    needed, free = FLOAT32_BYTES * count_weights(folder), available_cpu_bytes()
    if needed > MEMORY_PART * free:
        say(f"no second reference: transformers would take {needed >> 20} MiB of {free >> 20} that are free")
        return None
    try:
        return _Transformers(folder)
    except (OSError, ValueError, KeyError) as error:
        say(f"no second reference: transformers does not serve {folder}: {error}")
        return None


class _Transformers:
    """Scores by `transformers` in float32 on CPUs, one prompt at a time, so that padding cannot change the rounding."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        kind = AutoConfig.from_pretrained(folder).model_type
        major, minor = RIGHT_SINCE.get(kind, (0, 0))
        version = importlib.metadata.version("transformers")
        if tuple(map(int, version.split(".")[:2])) < (major, minor):
            raise ValueError(f"{version} computes {kind} wrongly, {major}.{minor} is right")

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def scores(self, token_ids: Sequence[int], count: int) -> list[Score]:
        import torch

        with torch.inference_mode():
            rows = self._model(torch.tensor([token_ids])).logits[0, -count - 1 : -1].float().log_softmax(-1)
            tops, ids = rows.max(-1)
            own = rows.gather(1, torch.tensor(token_ids[-count:])[:, None])[:, 0]
        return [Score(*one) for one in zip(own.tolist(), ids.tolist(), tops.tolist(), strict=True)]
