"""Proves from the outside that every P, every D and every pair of a running cluster takes part, and does it right.

    python test/verify_xpyd_topology.py --router http://HOST:21003 --model M --concurrency 6 --max_tokens 64 --stream

Sends rounds of one prompt each, a request per pair, until every pair was hit, and looks each request up in the
router's `GET /cluster`. Then it demands: every instance of the topology is up and had requests; so had every pair;
every request id is unique; P moved as many bytes as the pages and the logits row of the prompt have (the prefix cache
is not used); all answers to one prompt (greedy) have the same tokens. Works with any model and any topology that has
pairs. A table for people, `--json` for machines; exit code 0, or 1 with the reasons, or 2 for wrong arguments. Any
Python will do: the project's takes over.

Needs a router that pairs evenly enough: `round_robin` hits every pair in the first round, other policies take more.
Other clients may be served meanwhile, as long as they end fewer than 64 requests while this looks one up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from chitu.client.answer import EventParser
    from chitu.client.client import RouterClient
    from chitu.config.load import api_key
    from chitu.errors import ChituError
    from chitu.kv_cache.aux_row import aux_row_bytes
    from chitu.protocol import KVLayout
    from chitu.protocol.snapshot import ClusterSnapshot, RequestSnapshot
except ImportError as missing:  # another Python than the project's
    own = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    if own.is_file() and os.path.abspath(sys.executable) != str(own):
        os.execv(own, [str(own), *sys.argv])
    sys.exit(f"{sys.executable} does not have what this needs ({missing}): script/setup.sh makes {own}, which does")

MIN_ROUNDS = 2
LOOKUPS = 40
"""Times that a request is looked up in /cluster, every 50 ms, before it counts as not to be found."""

Pair = tuple[str, str]


class Impossible(ChituError):
    """There is nothing to check, or nothing to check it with."""

    code = "impossible"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as its client saw it and as the router remembers it."""

    prompt: int
    """Number of its prompt: answers to one prompt must be equal."""
    request_id: str = ""
    tokens: tuple[int, ...] = ()
    error: str = ""
    record: RequestSnapshot | None = None

    @property
    def pair(self) -> Pair | None:
        record = self.record
        return (record.prefill, record.decode) if record is not None and record.prefill is not None else None


class PairReport(msgspec.Struct, frozen=True):
    prefill: str
    decode: str
    requests: int
    prompt_tokens: int
    kv_bytes: int
    """Bytes that P moved into D's memory, over all its requests; `expected_bytes` is the formula's."""
    expected_bytes: int
    tokens_equal: bool
    """Its answers are those of the other pairs to the same prompts."""
    ttft_ms: float
    """Median; from the dispatch to the first token, on the router."""


class Verdict(msgspec.Struct, frozen=True):
    ok: bool
    reasons: list[str]
    """Why not; empty where ok."""
    model: str
    prompts: int
    requests: int
    instances: dict[str, int]
    """Requests by instance of the topology."""
    pairs: list[PairReport]
    """All of the topology, hit or not."""


# ------------------------------------------------------------------------------------------------------ what must hold


def expected_bytes(prompt_tokens: int, layout: KVLayout) -> int:
    """Bytes that a prompt moves to a D of this layout: whole pages of K and V of all layers, and one logits row.

    Each rank of D gets the KV heads that it holds. Where there are fewer heads than ranks, a rank holds one that others
    have too, and gets a copy of its own.
    """
    pages = -(-prompt_tokens // layout.page_size)
    heads = max(layout.num_kv_heads, layout.tp_size)
    page = layout.regions_per_layer * layout.num_layers * heads * layout.head_bytes
    return pages * page + aux_row_bytes(layout.vocab_size)


def prefilled_tokens(record: RequestSnapshot) -> int:
    """What P computed: the prompt, and what an attempt before had emitted when its instance was lost."""
    return record.prompt_tokens + record.continued_tokens


def bytes_of(record: RequestSnapshot, layout: KVLayout) -> int:
    """Bytes that its last attempt moves. For one token that needs no KV, the logits row is enough."""
    is_row_alone = record.output_tokens - record.continued_tokens == 1
    return expected_bytes(0 if is_row_alone else prefilled_tokens(record), layout)


def judge(before: ClusterSnapshot, after: ClusterSnapshot, asked: Sequence[Asked]) -> Verdict:
    """Pure. `before` and `after`: the cluster around the requests."""
    layouts = {i.name: i.layout for i in (*after.instances, *before.instances) if i.layout is not None}
    status = {i.name: i.status for i in before.instances}
    status |= {i.name: i.status for i in after.instances if i.status != "up"}
    names = {role: [i.name for i in before.instances if i.role == role] for role in ("prefill", "decode")}
    answers: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for one in asked:
        if not one.error:
            answers[one.prompt][one.tokens] += 1
    usual = {prompt: tokens.most_common(1)[0][0] for prompt, tokens in answers.items()}
    pairs = [
        _pair_report(pair, [one for one in asked if one.pair == pair], usual, layouts)
        for pair in itertools.product(names["prefill"], names["decode"])
    ]
    counts = Counter({name: 0 for name in (*names["prefill"], *names["decode"])})
    for report in pairs:
        counts[report.prefill] += report.requests
        counts[report.decode] += report.requests
    reasons = [f"{name} is {status[name]}" for name in counts if status[name] != "up"]
    reasons += [f"{name} got no request" for name, count in counts.items() if not count and status[name] == "up"]
    missed = [r for r in pairs if not r.requests and counts[r.prefill] and counts[r.decode]]
    reasons += [f"no request went over the pair {r.prefill}-{r.decode}" for r in missed]
    reasons += _request_reasons(asked, layouts)
    reasons += [
        f"{r.prefill}-{r.decode} gave other tokens than other pairs did to the same prompt"
        for r in pairs
        if not r.tokens_equal
    ]
    return Verdict(
        ok=not reasons,
        reasons=reasons,
        model=before.model,
        prompts=len({one.prompt for one in asked}),
        requests=len(asked),
        instances=dict(counts),
        pairs=pairs,
    )


def _pair_report(
    pair: Pair, asked: list[Asked], usual: dict[int, tuple[int, ...]], layouts: dict[str, KVLayout]
) -> PairReport:
    done = [(one, one.record) for one in asked if one.record is not None and not one.error]
    delays_s = [r.first_token_at_s - r.created_at_s for _, r in done if r.first_token_at_s is not None]
    return PairReport(
        prefill=pair[0],
        decode=pair[1],
        requests=len(done),
        prompt_tokens=sum(prefilled_tokens(record) for _, record in done),
        kv_bytes=sum(record.kv_bytes for _, record in done),
        expected_bytes=sum(bytes_of(record, layouts[pair[1]]) for _, record in done),
        tokens_equal=all(one.tokens == usual[one.prompt] for one, _ in done),
        ttft_ms=round(1e3 * statistics.median(delays_s), 1) if delays_s else 0.0,
    )


def _request_reasons(asked: Sequence[Asked], layouts: dict[str, KVLayout]) -> list[str]:
    """What is wrong with single requests, each kind once with its number."""
    reasons: Counter[str] = Counter(f"failed: {one.error}" for one in asked if one.error)
    for one in asked:
        record = one.record
        if one.error:
            continue
        if record is None:
            reasons["answered, but not to be found in /cluster (many other requests at the same time?)"] += 1
            continue
        if one.pair is None:
            reasons["served by a unified instance, not by a pair"] += 1
            continue
        right = bytes_of(record, layouts[record.decode])
        if record.kv_bytes != right:
            pair = f"{record.prefill}-{record.decode}"
            reasons[
                f"of {prefilled_tokens(record)} prompt tokens over {pair} moved {record.kv_bytes} bytes, not {right}"
            ] += 1
        if not one.tokens or len(one.tokens) != record.output_tokens:
            reasons[f"got {len(one.tokens)} tokens where the router counted {record.output_tokens}"] += 1
    lines = [f"{count} of {len(asked)} requests {reason}" for reason, count in reasons.items()]
    twice = [name for name, count in Counter(one.request_id for one in asked if one.request_id).items() if count > 1]
    return lines + [f"the request id {name} was given more than once" for name in twice]


# --------------------------------------------------------------------------------------------------------- the asking


@dataclass(slots=True)
class Prober:
    """Asks the router. `ask` is called by several threads at once; each call has connections of its own."""

    client: RouterClient
    api_key: str | None
    model: str
    max_tokens: int
    stream: bool
    timeout_s: float
    opener: urllib.request.OpenerDirector = field(
        default_factory=lambda: urllib.request.build_opener(urllib.request.ProxyHandler({}))
    )

    def ask(self, number: int, prompt: str) -> Asked:
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": self.stream, "cache_prompt": False}
        try:
            request_id, reply = self._post("/v1/completions", body)
            tokens = _tokens(reply, self.stream)
        except urllib.error.HTTPError as error:
            with error:
                return Asked(number, error=_error_text(error.code, error.read()))
        except (OSError, ValueError) as error:
            return Asked(number, error=str(error) or type(error).__name__)
        return Asked(number, request_id, tokens, record=self._look_up(request_id))

    def fitting_prompt(self, number: int, max_model_len: int) -> str:
        """A list of numbers that begins anew: any model has a clear favourite for what comes next. Lengths differ, from
        less than a page to several, and leave room for the answer."""
        rng = random.Random(number)
        count = (60, 3, 20, 120)[number % 4]
        while count:
            numbers = " ".join(str(rng.randrange(1000)) for _ in range(count))
            prompt = f"{number}: {numbers}\n{number}: {numbers[:12]}"
            reply = json.loads(self._post("/tokenize", {"model": self.model, "prompt": prompt})[1])
            if reply["count"] + self.max_tokens <= max_model_len:
                return prompt
            count //= 2
        raise Impossible(
            f"max_tokens is {self.max_tokens}, which leaves no room for a prompt: {self.model} takes {max_model_len} "
            "tokens, prompt and answer together"
        )

    def _look_up(self, request_id: str) -> RequestSnapshot | None:
        """Its record. The first look finds it, unless the router has several processes."""
        for attempt in range(LOOKUPS):
            if attempt:
                time.sleep(0.05)
            for record in self.client.cluster().requests:
                # One that was retried is not over: the record of its last attempt is the request's.
                is_over = record.ended_at_s is not None and record.state != "retried"
                if record.request_id == request_id and is_over:
                    return record
        return None

    def _post(self, path: str, body: dict[str, Any]) -> tuple[str, bytes]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.client.url + path, json.dumps(body).encode(), headers)
        with self.opener.open(request, timeout=self.timeout_s) as reply:
            return reply.headers["X-Request-Id"], reply.read()


def _tokens(reply: bytes, is_stream: bool) -> tuple[int, ...]:
    """Token ids of an answer. ValueError where it is none, or ends with an error."""
    events = EventParser().feed(reply) if is_stream else [reply.decode()]
    if is_stream and events[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream was cut off: ...{reply[-80:].decode(errors='replace')!r}")
    tokens: list[int] = []
    for event in events[:-1] if is_stream else events:
        record = json.loads(event)
        if "error" in record:
            raise ValueError(f"{record['error']['code']}: {record['error']['message']}")
        for choice in record["choices"]:
            tokens += choice["token_ids"]
    return tuple(tokens)


def _error_text(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def probe(prober: Prober, concurrency: int, max_rounds: int) -> Verdict:
    """Impossible where there are no pairs; ChituError where no router answers."""
    before = prober.client.cluster()
    roles = {role: [i for i in before.instances if i.role == role] for role in ("prefill", "decode", "unified")}
    if not roles["prefill"] and not roles["decode"]:
        names = ", ".join(i.name for i in roles["unified"])
        raise Impossible(f"this cluster has no pairs of P and D to check, only unified instances: {names or 'none'}")
    up = {role: [i.name for i in found if i.status == "up"] for role, found in roles.items()}
    wanted = set(itertools.product(up["prefill"], up["decode"]))
    asked: list[Asked] = []
    if wanted and before.max_model_len is not None:
        with ThreadPoolExecutor(concurrency) as pool:
            for number in range(max_rounds):
                prompt = prober.fitting_prompt(number, before.max_model_len)
                copies = max(2, len(wanted))
                asked += pool.map(prober.ask, [number] * copies, [prompt] * copies)
                if number + 1 >= MIN_ROUNDS and wanted <= {one.pair for one in asked}:
                    break
    return judge(before, prober.client.cluster(), asked)


# --------------------------------------------------------------------------------------------------------- the telling


def show(verdict: Verdict, console: Console) -> None:
    table = Table(title=f"{verdict.model}: {verdict.requests} requests, {verdict.prompts} prompts")
    for name in ("pair", "requests", "prompt tokens", "bytes moved", "formula", "tokens", "TTFT ms"):
        table.add_column(name, justify="left" if name == "pair" else "right")
    for pair in verdict.pairs:
        name, tokens = f"{pair.prefill}-{pair.decode}", "equal" if pair.tokens_equal else "DIFFERENT"
        if pair.requests:
            row = (pair.requests, pair.prompt_tokens, pair.kv_bytes, pair.expected_bytes, tokens, pair.ttft_ms)
            table.add_row(name, *map(str, row))
        else:
            table.add_row(name, "0", *["-"] * 5)
    console.print(table)
    console.print("requests by instance: " + ", ".join(f"{name} {n}" for name, n in verdict.instances.items()))
    hit = sum(pair.requests > 0 for pair in verdict.pairs)
    if verdict.ok:
        console.print(f"ok: {hit} of {len(verdict.pairs)} pairs took part, bytes and tokens are right")
    for reason in verdict.reasons:
        console.print(f"FAILED: {reason}", markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--router", default="http://127.0.0.1:21003", metavar="URL")
    parser.add_argument("--model", help="as in the API (default: the one that is served)")
    parser.add_argument("--concurrency", type=int, default=6, help="requests at once")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--stream", action="store_true", help="ask for streams of tokens")
    parser.add_argument("--rounds", type=int, default=12, help="prompts at most, until every pair was hit")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--api-key", default=api_key(), help="default: CHITU_API_KEY, which `ps` does not show")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if min(args.concurrency, args.max_tokens, args.rounds) < 1:
        parser.error("--concurrency, --max_tokens and --rounds are at least 1")
    try:
        client = RouterClient(args.router, args.api_key, flag="--router")
        model = args.model or client.model_name()
        prober = Prober(client, args.api_key, model, args.max_tokens, args.stream, args.timeout)
        verdict = probe(prober, args.concurrency, max(args.rounds, MIN_ROUNDS))
    except urllib.error.HTTPError as error:
        with error:
            return _refuse(args.json, _error_text(error.code, error.read()))
    except ChituError as error:
        return _refuse(args.json, error.message)
    except OSError as error:
        return _refuse(args.json, f"the connection to {args.router} broke: {error}")
    if args.json:
        print(msgspec.json.encode(verdict).decode())
    else:
        show(verdict, Console(width=None if sys.stdout.isatty() else 120))
    return 0 if verdict.ok else 1


def _refuse(as_json: bool, reason: str) -> int:
    print(json.dumps({"ok": False, "reasons": [reason]}) if as_json else f"FAILED: {reason}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
