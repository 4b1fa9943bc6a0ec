"""`chitu verify URL`: checks that a running cluster answers as one unified engine. Blocking, in the caller's thread,
which must outlive the processes that it starts. `chitu replay` uses the engine that is started here, too.

The same prompts go to the cluster, over every pair, and to a unified instance with the model's folder that is started
here, or a running one (`--reference`), which `transformers` in float32 checks, if memory allows.
`tools/verify/parity.py` defines what is right. Prompts go without the prefix cache, whole and streamed, greedy and
seeded, and then with it, twice for each of several salts, so that a wrong page of one P is not used in another's check.
Then every pair decodes the same tokens, with no others allowed, so that pages can be compared to find where a wrong
pair went wrong (`tools/verify/parity.py`), and gets one long prompt. Each answer brings the checksums of its pages, as
P wrote them and as D has them. The engine's own answers, scored by itself, show what rounding does here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from chitu.config.load import api_key, load_topology
from chitu.errors import ChituError
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.launch.router_calls import credential
from chitu.launch.router_client import RouterClient
from chitu.models.checkpoint import count_weights
from chitu.models.config import read_model_spec, weight_files
from chitu.models.gguf import SUFFIX
from chitu.protocol import KVLayout
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tools.verify.parity import Judgement, compare, damage_of, differences, limit_of
from chitu.tools.verify.probe import CheckedRequest, Impossible, Pair, Prober, Score, Served
from chitu.tools.verify.report import BEHIND_P, CACHED, FORCED, Judged, Report, Rounding, report_of, wrong_pages
from chitu.tools.verify.topology import MIN_ROUNDS, fakes, judge, pairs_among, refused_pairs

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
LONG = "long"
"""Kind of request whose prompt has many pages. Each pair gets one."""
LONG_TOKENS, LONG_PAGES = 1100, 12
"""Most tokens and pages of a long prompt, whichever are more."""
DRAWN = ("seeded", FORCED)
"""Kinds whose tokens must equal those of the engine with the same request, likely or not."""
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "greedy": (False, {}),
    "stream": (True, {}),
    "seeded": (True, {"temperature": 0.8}),
    CACHED: (False, {"cache_prompt": True}),
    FORCED: (False, {}),
    LONG: (False, {"max_tokens": 2}),
}
"""Kinds of requests: whether they are streamed, and their other options."""


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
    folder: str,
    device: str,
    shape: EngineShape,
    entries: Entries | None,
    say: Callable[[str], None],
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RouterClient]:
    """Start a unified engine and yield its client. `adapters`: folders of its LoRA adapters, by name. Raise ConfigError
    or StartFailed as `LocalCluster`."""
    say(f"starting one unified engine of {folder} on {device}")
    topology = load_topology("unified_local.yaml", _settings(folder, device, shape, adapters))
    with LocalCluster(topology, entries=entries) as own:
        own.wait_ready(READY_TIMEOUT_S)
        keys = own.topology.dp_config.router.api_keys
        yield RouterClient(own.url, keys[0] if keys else None)
    own.supervisor.remove_logs()


def layout_of(cluster: ClusterSnapshot) -> KVLayout | None:
    """Return the layout of any instance that reports one, or None."""
    return next((instance.layout for instance in cluster.instances if instance.layout is not None), None)


def _settings(folder: str, device: str, shape: EngineShape, adapters: Mapping[str, str]) -> list[str]:
    """Return the overrides of the engine, with pages for one longest request and SPARE_PAGES."""
    dtype, page_size = shape.dtype, shape.page_size
    pages = -(-shape.max_model_len // page_size) + SPARE_PAGES
    return [
        f"model.path={msgspec.json.encode(folder).decode()}",
        "model.served_name=reference",
        f"model.adapters={msgspec.json.encode(dict(adapters)).decode()}",
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


def find_transformers(folder: str, say: Callable[[str], None]) -> Transformers | None:
    """Return the scorer by `transformers`, or None after passing the reason to `say`."""
    if importlib.util.find_spec("transformers") is None:
        say("no second reference: transformers is not installed")
        return None
    from chitu.engine.memory_budget import available_cpu_bytes

    quantization = read_model_spec(folder).quantization
    if quantization is not None:
        say(f"no second reference: transformers would also quantise activations ({quantization.words})")
        return None
    needed, free = FLOAT32_BYTES * count_weights(folder), available_cpu_bytes()
    if needed > MEMORY_PART * free:
        say(f"no second reference: transformers would take {needed >> 20} MiB of {free >> 20} that are free")
        return None
    try:
        return Transformers(folder)
    except (OSError, ValueError, KeyError) as error:
        say(f"no second reference: transformers does not serve {folder}: {error}")
        return None


class Transformers:
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
        if weight_files(folder)[0].suffix == SUFFIX:
            self.model: Any = _of_gguf(folder)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def scores(self, token_ids: Sequence[int], count: int) -> list[Score]:
        import torch

        with torch.inference_mode():
            rows = self.model(torch.tensor([token_ids])).logits[0, -count - 1 : -1].float().log_softmax(-1)
            tops, ids = rows.max(-1)
            own = rows.gather(1, torch.tensor(token_ids[-count:])[:, None])[:, 0]
        return [Score(*one) for one in zip(own.tolist(), ids.tolist(), tops.tolist(), strict=True)]


def _of_gguf(folder: str) -> Any:
    """Return the model of transformers with the numbers of a GGUF file, which it would read another way."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from chitu.models.weights import WeightSource

    config = AutoConfig.from_pretrained(folder)
    with WeightSource(folder, torch.float32, torch.device("cpu"), None) as source:
        tensors = {name: source.take(name, *shape) for name, shape in source.names.items()}
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)


def verify(options: VerifyOptions, say: Callable[[str], None]) -> Report:
    """Verify the cluster. Raise Impossible if nothing can be compared, and the errors of `RouterClient`."""
    client = RouterClient(options.url, api_key())
    before = client.cluster()
    layout, max_model_len = layout_of(before), before.max_model_len
    if layout is None or max_model_len is None:
        names = ", ".join(instance.name for instance in before.instances)
        raise Impossible(f"{client.url} cannot serve: {names or 'no instance'} is down")
    if named := fakes(before):
        raise Impossible(f"{', '.join(named)} of {client.url} compute no model: they are fake (chitu serve --fake)")
    if options.model is None:
        options = replace(options, model=_served_folder(options.url))
    prober = Prober(client, before.model, options.max_tokens, options.timeout_s)
    with reference(options, layout, max_model_len, say) as right, ThreadPoolExecutor(options.concurrency) as pool:
        say(f"asking {client.url}, {options.concurrency} requests at once")
        run, ways = _VerifyRun(prober, right, layout, max_model_len, _most_tokens(before, max_model_len)), _ways(before)
        for number in range(max(MIN_ROUNDS, options.max_rounds)):
            run.round(number, max(2, len(ways)), pool)
            if number + 1 >= MIN_ROUNDS and ways <= run.seen:
                break
        after = client.cluster()
        layouts = {i.name: i.layout for i in (*after.instances, *before.instances) if i.layout is not None}
        rounding = run.rounding()
        noise = next(iter(rounding.values())).noise  # of the engine
        limit = limit_of(noise, layout.dtype, right.layout.dtype)
        judged = [run.judged(one, limit, layouts) for one in run.answers]
    past_cache = [one.asked for one in judged if one.kind != CACHED and one.pair not in _alone(before)]
    verdict = judge(before, after, [*past_cache, *run.failed], compares=False)
    alone = [instance for instance in after.instances if instance.role == "unified"]
    missing = [f"{instance.name} is {instance.status}" for instance in alone if instance.status != "up"]
    missing += [f"{instance.name} got no request" for instance in alone if (None, instance.name) not in run.seen]
    pages = wrong_pages(judged, layouts, run.alone, right.layout)
    return report_of(verdict, judged, missing, layout.dtype, rounding, limit, pages, refused_pairs(run.failed, after))


def _served_folder(url: str) -> str | None:
    """Return the cluster's model folder, if this machine has it."""
    try:
        path = RouterClient(url, credential(url)).topology().model.path
    except ChituError:  # the router wants the cluster key
        return None
    return path if path and Path(path, "config.json").is_file() else None


def _alone(snapshot: ClusterSnapshot) -> set[Pair]:
    return {(None, instance.name) for instance in snapshot.instances if instance.role == "unified"}


def _ways(snapshot: ClusterSnapshot) -> set[Pair]:
    """Return the pairs that can serve requests now."""
    up = [instance for instance in snapshot.instances if instance.status == "up"]
    pairs: set[Pair] = set(pairs_among(up))
    return pairs | {(None, instance.name) for instance in up if instance.role == "unified"}


def _most_tokens(snapshot: ClusterSnapshot, max_model_len: int) -> int:
    """Return the longest context that fits into the pages of each instance."""
    pools = [i.load.pages_total * snapshot.page_size for i in snapshot.instances if i.load and i.load.pages_total]
    return min([max_model_len, *pools])


class _Answered(NamedTuple):
    """An answer that is not judged yet."""

    asked: CheckedRequest
    served: Served
    kind: str
    prompt: Sequence[int]
    drawn: tuple[int, ...] | None
    """The engine's answer, if the tokens must equal it."""


@dataclass(slots=True)
class _VerifyRun:
    """Sends requests to the cluster and the references, and judges each answer once all are there."""

    prober: Prober
    right: Reference
    layout: KVLayout
    max_model_len: int
    most_tokens: int
    """Longest context that the cluster has pages for."""
    answers: list[_Answered] = field(default_factory=list)
    failed: list[CheckedRequest] = field(default_factory=list)
    own: list[tuple[str, Sequence[int], CheckedRequest]] = field(default_factory=list)
    """Kinds, prompts and answers of requests to the engine, which show what rounding does."""
    scores: dict[tuple[int, tuple[int, ...]], list[Score]] = field(default_factory=dict)
    """The engine's scores by prompt and answer, kept since most answers are equal."""
    alone: dict[int, str] = field(default_factory=dict)
    """Checksums of the engine's pages, by prompt."""
    salt: str = field(default_factory=secrets.token_hex)
    """Salt of this run, so that it does not hit pages of other runs."""

    @property
    def seen(self) -> set[Pair]:
        """Pairs that served requests without the cache, requests with the same tokens, and long ones."""
        forced, long = self._pairs_of(FORCED), self._pairs_of(LONG)
        return forced & long & self._pairs_of(*(kind for kind in KINDS if kind not in (CACHED, FORCED, LONG)))

    def _pairs_of(self, *kinds: str) -> set[Pair]:
        return {(one.served.prefill, one.served.decode) for one in self.answers if one.kind in kinds}

    def round(self, number: int, copies: int, pool: ThreadPoolExecutor) -> None:
        """Send one prompt `copies` times in each kind, with the cache twice as often: the first of each salt misses."""
        prompt = self.prober.token_ids(self.prober.fitting_prompt(number, self.max_model_len))
        for kind, (stream, kind_options) in KINDS.items():
            sent, prompt_number = prompt, number
            options = {**kind_options, "logprobs": 0, "seed": number, "return_page_sums": True}
            if kind == FORCED:
                most = min(2 * self.layout.page_size + 1, self.max_model_len - len(prompt))
                options |= {"allowed_token_ids": prompt[:1], "max_tokens": most}
            elif kind == LONG:
                if number and self._pairs_of(LONG) >= self._pairs_of(FORCED):
                    continue
                most = max(LONG_TOKENS, LONG_PAGES * self.layout.page_size)
                most = min(most, self.most_tokens - options["max_tokens"])
                sent, prompt_number = list(itertools.islice(itertools.cycle(prompt), most)), -1 - number
            drawn = self._drawn(kind, number, prompt, options) if kind in DRAWN else None
            each = [options] * copies
            if kind == CACHED:
                each = [{**options, "cache_salt": f"{self.salt}-{copy}"} for copy in range(copies)] * 2
            asked: list[Future[CheckedRequest]] = []
            for one in each:
                asked.append(pool.submit(self.prober.ask, prompt_number, sent, stream, **one))
                if kind in (FORCED, LONG):
                    wait(asked)  # in sequence, so that on an idle cluster each takes the next pair
            for answer in [future.result() for future in asked]:
                if answer.error or answer.served is None:
                    self.failed.append(answer)
                else:
                    self.answers.append(_Answered(answer, answer.served, kind, sent, drawn))

    def _drawn(self, kind: str, number: int, prompt: Sequence[int], options: dict[str, Any]) -> tuple[int, ...]:
        alone = self.right.engine.ask(number, prompt, False, **options)
        if alone.error:
            raise Impossible(f"the reference failed: {alone.error}")
        self.own.append((kind, prompt, alone))
        if alone.served is not None and alone.served.page_sums:
            self.alone[number] = alone.served.page_sums
        return alone.tokens

    def rounding(self) -> dict[str, Rounding]:
        """Return what rounding does, by reference: the engine's own answers against their scores. Only the engine
        itself scores forced tokens: they are unlikely, and rounding is coarse there."""
        found = {}
        for name, scorer in self.right.scorers.items():
            if scorer is self.right.engine:
                each = [differences(own, self._scores(prompt, own)) for _, prompt, own in self.own]
            else:
                each = [
                    differences(own, scorer.scores([*prompt, *own.tokens], len(own.tokens)))
                    for kind, prompt, own in self.own
                    if kind != FORCED
                ]
            found[name] = Rounding(max(map(max, each)), fmean(itertools.chain(*each)))
        return found

    def judged(self, answer: _Answered, limit: float, layouts: Mapping[str, KVLayout]) -> Judged:
        """Judge an answer by its checksums and by the engine."""
        asked, served, kind, prompt, drawn = answer
        scores = self._scores(prompt, asked)
        judgement = compare(asked, scores, drawn, limit)
        damage = damage_of(served, layouts[served.decode])
        if damage is not None:
            place = judgement.place if judgement.outcome == "wrong" else BEHIND_P
            judgement = Judgement("wrong", place, damage.says, judgement.difference)
        return Judged(asked, served, kind, judgement, damage, fmean(differences(asked, scores)))

    def _scores(self, prompt: Sequence[int], answer: CheckedRequest) -> list[Score]:
        """Return the engine's scores of an answer."""
        key = (answer.prompt, answer.tokens)
        if key not in self.scores:
            self.scores[key] = self.right.engine.scores([*prompt, *answer.tokens], len(answer.tokens))
        return self.scores[key]
