"""`chitu verify URL`: checks that a running cluster answers as one unified engine. Blocking; the caller's thread.

The same prompts go to the cluster, over every pair, and to references: a unified instance with the model's folder that
is started here, or a running one (`--reference`); and `transformers` in float32, if memory allows.
`client/verify/parity.py` defines what is right. Prompts go without the prefix cache, whole and streamed, greedy and
seeded, and then with it, twice for each of several salts, so that a wrong page of one P is not used in another's check.
At last every pair decodes the same tokens, with no others allowed, so that pages can be compared to find where a wrong
pair went wrong (`client/verify/pages.py`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from chitu.client.client import RouterClient
from chitu.client.verify.parity import OUTCOMES, Judgement, compare
from chitu.client.verify.probe import CheckedRequest, Impossible, Pair, Prober, Score
from chitu.client.verify.report import CACHED, FORCED, Judged, Report, report_of, wrong_pages
from chitu.client.verify.topology import MIN_ROUNDS, judge
from chitu.config.load import api_key
from chitu.errors import ChituError
from chitu.launch.drain import credential
from chitu.launch.reference import Reference, VerifyOptions, layout_of, reference
from chitu.protocol import LOGPROB_TOLERANCES
from chitu.protocol.snapshot import ClusterSnapshot

DRAWN = ("seeded", FORCED)
"""Kinds whose tokens must equal those of the engine with the same request, likely or not."""
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "greedy": (False, {}),
    "stream": (True, {}),
    "seeded": (True, {"temperature": 0.8}),
    CACHED: (False, {"cache_prompt": True}),
    FORCED: (False, {"return_page_sums": True}),
}
"""Kinds of requests: whether they are streamed, and their other options."""


def verify(options: VerifyOptions, say: Callable[[str], None]) -> Report:
    """Verify the cluster. Raise Impossible if nothing can be compared, and the errors of `RouterClient`."""
    client = RouterClient(options.url, api_key())
    before = client.cluster()
    layout, max_model_len = layout_of(before), before.max_model_len
    if layout is None or max_model_len is None:
        names = ", ".join(instance.name for instance in before.instances)
        raise Impossible(f"nothing serves at {client.url}: {names or 'no instance'} is down")
    dtype = layout.dtype
    if options.model is None:
        options = replace(options, model=_served_folder(options.url))
    prober = Prober(client, before.model, options.max_tokens, options.timeout_s)
    with reference(options, layout, max_model_len, say) as right, ThreadPoolExecutor(options.concurrency) as pool:
        say(f"asking {client.url}, {options.concurrency} requests at once")
        asking, ways = _VerifyRun(prober, right, LOGPROB_TOLERANCES[dtype], layout.page_size), _ways(before)
        for number in range(max(MIN_ROUNDS, options.max_rounds)):
            asking.round(number, max_model_len, max(2, len(ways)), pool)
            if number + 1 >= MIN_ROUNDS and ways <= asking.seen:
                break
    after = client.cluster()
    past_cache = [one.asked for one in asking.judged if one.kind != CACHED and one.pair not in _alone(before)]
    verdict = judge(before, after, [*past_cache, *asking.failed], compares_tokens=False)
    alone = [instance for instance in after.instances if instance.role == "unified"]
    missing = [f"{instance.name} is {instance.status}" for instance in alone if instance.status != "up"]
    missing += [f"{instance.name} got no request" for instance in alone if (None, instance.name) not in asking.seen]
    layouts = {i.name: i.layout for i in (*after.instances, *before.instances) if i.layout is not None}
    pages = wrong_pages(asking.judged, layouts, asking.alone, right.layout)
    return report_of(verdict, asking.judged, missing, dtype, asking.tolerance, list(right.scorers), pages)


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
    prefills, decodes = ([i.name for i in up if i.role == role] for role in ("prefill", "decode"))
    pairs: set[Pair] = set(itertools.product(prefills, decodes))
    return pairs | {(None, instance.name) for instance in up if instance.role == "unified"}


@dataclass(slots=True)
class _VerifyRun:
    """Sends requests to the cluster and the references, and judges each answer."""

    prober: Prober
    right: Reference
    tolerance: float
    page_size: int
    judged: list[Judged] = field(default_factory=list)
    failed: list[CheckedRequest] = field(default_factory=list)
    scores: dict[tuple[str, int, tuple[int, ...]], list[Score]] = field(default_factory=dict)
    """Scores by reference, prompt and answer, kept since most answers are equal."""
    alone: dict[int, str] = field(default_factory=dict)
    """Checksums of the engine's pages, by prompt."""
    salt: str = field(default_factory=secrets.token_hex)
    """Salt of this run, so that it does not hit pages of other runs."""

    @property
    def seen(self) -> set[Pair]:
        """Pairs that served requests without the cache and requests with page checksums."""
        forced = {one.pair for one in self.judged if one.kind == FORCED}
        return forced & {one.pair for one in self.judged if one.kind not in (CACHED, FORCED)}

    def round(self, number: int, max_model_len: int, copies: int, pool: ThreadPoolExecutor) -> None:
        """Send one prompt `copies` times in each kind, with the cache twice as often: the first of each salt misses."""
        prompt = self.prober.token_ids(self.prober.fitting_prompt(number, max_model_len))
        for kind, (stream, kind_options) in KINDS.items():
            options = {**kind_options, "logprobs": 0, "seed": number}
            if kind == FORCED:
                most = min(2 * self.page_size + 1, max_model_len - len(prompt))
                options |= {"allowed_token_ids": prompt[:1], "max_tokens": most}
            drawn = self._drawn(number, prompt, options) if kind in DRAWN else None
            each = [options] * copies
            if kind == CACHED:
                each = [{**options, "cache_salt": f"{self.salt}-{copy}"} for copy in range(copies)] * 2
            asked: list[Future[CheckedRequest]] = []
            for one in each:
                asked.append(pool.submit(self.prober.ask, number, prompt, stream, **one))
                if kind == FORCED:
                    wait(asked)  # in sequence, so that on an idle cluster each takes the next pair
            for answer in [future.result() for future in asked]:
                if answer.error or answer.served is None:
                    self.failed.append(answer)
                else:
                    self.judged.append(Judged(answer, answer.served, kind, self._judge(prompt, answer, drawn)))

    def _drawn(self, number: int, prompt: Sequence[int], options: dict[str, Any]) -> tuple[int, ...]:
        alone = self.right.engine.ask(number, prompt, False, **options)
        if alone.error:
            raise Impossible(f"the reference failed: {alone.error}")
        if alone.served is not None and alone.served.page_sums:
            self.alone[number] = alone.served.page_sums
        return alone.tokens

    def _judge(self, prompt: Sequence[int], answer: CheckedRequest, drawn: tuple[int, ...] | None) -> Judgement:
        """Judge an answer by all references and return the worst judgement."""
        judgements = []
        for name, scorer in self.right.scorers.items():
            key = (name, answer.prompt, answer.tokens)
            if key not in self.scores:
                self.scores[key] = scorer.scores([*prompt, *answer.tokens], len(answer.tokens))
            judgement = compare(answer, self.scores[key], drawn, self.tolerance)
            says = f"{judgement.says}, by {name}" if judgement.says else ""
            judgements.append(msgspec.structs.replace(judgement, says=says))
        return max(judgements, key=lambda judgement: OUTCOMES.index(judgement.outcome))
