"""`chitu verify URL`: checks that a running cluster answers as one unified engine. Blocking; the caller's thread.

The same prompts go to the cluster, over every pair, and to a unified instance with the model's folder that is started
here, or a running one (`--reference`), which `transformers` in float32 checks, if memory allows.
`client/verify/parity.py` defines what is right. Prompts go without the prefix cache, whole and streamed, greedy and
seeded, and then with it, twice for each of several salts, so that a wrong page of one P is not used in another's check.
Then every pair decodes the same tokens, with no others allowed, so that pages can be compared to find where a wrong
pair went wrong (`client/verify/pages.py`), and gets one long prompt. Each answer brings the checksums of its pages, as
P wrote them and as D has them. The engine's own answers, scored by itself, show what rounding does here.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from chitu.client.client import RouterClient
from chitu.client.verify.pages import damage_of
from chitu.client.verify.parity import Judgement, compare, differences, limit_of
from chitu.client.verify.probe import CheckedRequest, Impossible, Pair, Prober, Score, Served
from chitu.client.verify.report import BEHIND_P, CACHED, FORCED, Judged, Report, Rounding, report_of, wrong_pages
from chitu.client.verify.topology import MIN_ROUNDS, judge, refused_pairs
from chitu.config.load import api_key
from chitu.errors import ChituError
from chitu.launch.reference import Reference, VerifyOptions, layout_of, reference
from chitu.launch.router_calls import credential
from chitu.protocol import KVLayout
from chitu.protocol.snapshot import ClusterSnapshot

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


def verify(options: VerifyOptions, say: Callable[[str], None]) -> Report:
    """Verify the cluster. Raise Impossible if nothing can be compared, and the errors of `RouterClient`."""
    client = RouterClient(options.url, api_key())
    before = client.cluster()
    layout, max_model_len = layout_of(before), before.max_model_len
    if layout is None or max_model_len is None:
        names = ", ".join(instance.name for instance in before.instances)
        raise Impossible(f"{client.url} cannot serve: {names or 'no instance'} is down")
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
    prefills, decodes = ([i.name for i in up if i.role == role] for role in ("prefill", "decode"))
    pairs: set[Pair] = set(itertools.product(prefills, decodes))
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
