"""`chitu explain`: observe a running cluster for a while, or read a saved observation, and report its bottleneck.

`explain` is pure. All times are those that the router reports with its requests; nothing is measured here.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from chitu.errors import ConfigError
from chitu.launch.router_client import RouterClient
from chitu.protocol import LoadReport
from chitu.protocol.account import REPORTED_STAGES, RequestSnapshot
from chitu.protocol.snapshot import ClusterSnapshot

WAITS = 0.2
"""Share of a request's time from which a stage that only waits is the bottleneck."""
WAITS_FIRST = 0.5
"""Share of the time to first token above which such a stage is the bottleneck."""
OUTLIER = 2.0
"""Factor by which an instance or pair must be slower than the others to be reported."""
OUTLIER_REQUESTS = 5
"""Minimum number of requests of each instance or pair that is compared."""
OUTLIER_SHARE = 0.05
"""Minimum share of the time of all requests that the pace of the others would save."""
FAILS = 0.05
"""Share of attempts that fail, from which failures are reported."""
RETRACTS = 0.1
"""Retractions per request, from which the page pool is too small."""
FULL = 0.1
"""Share of pages that are free or cached, up to which a pool counts as full."""
MIN_REQUESTS = 3
SHARED = 2.0
"""Mean number of prompts at once on a P from which they delay each other."""
MORE_PREFILL = "Add a P (`chitu join prefill`), or give prompts a common beginning, which is computed once."
WAITING = ("admission", "queue", "transfer", "first_step", "messages")
"""Stages of an attempt (`protocol/account.py`) in which nothing is computed."""
BEFORE_FIRST = ("admission", "queue", "compute", "first_step")
CODES = (
    *(
        "no_requests",
        "no_instance",
        "failures",
        "pages",
        "logits_slots",
        "state_slots",
        "admission",
        "prefill_queue",
        "prefill_instance",
    ),
    *("prefill_compute", "transfer_pair", "transfer", "running_requests", "decode_instance", "decode", "router"),
)
PAUSE_S = 0.2
"""Time between two snapshots. The router keeps its last 64 requests, so at more than 300 a second some are missed."""


@dataclass(frozen=True, slots=True)
class StageShare:
    """One stage of a request. Its stages follow each other and add up to its time at the router."""

    name: str
    mean_s: float
    p95_s: float
    share: float
    """Share of the time of all requests."""


@dataclass(frozen=True, slots=True)
class Explanation:
    span_s: float
    """Time between the first snapshot and the last one."""
    num_ended: int
    num_failed: int
    num_running: int
    """Number of running requests at the last snapshot."""
    first_token_s: float
    """Mean time from the router's dispatch to the first token at the router."""
    tokens_per_s: float
    """Output tokens a second of the requests that finished."""
    stages: tuple[StageShare, ...]
    bottleneck: str
    """Code of the bottleneck, one of `CODES`."""
    says: str
    """The bottleneck in one sentence."""
    advice: str


def explain(snapshots: Sequence[ClusterSnapshot]) -> Explanation:
    """Explain the requests that ended between the first and the last snapshot. `snapshots` are of one router, oldest
    first, at least one."""
    first, last = snapshots[0], snapshots[-1]
    since_s = first.time_s if len(snapshots) > 1 else float("-inf")
    records = {record.room: record for snapshot in snapshots for record in snapshot.requests}
    ended = [r for r in records.values() if r.ended_at_s is not None and r.ended_at_s >= since_s]
    finished = [r for r in ended if r.state == "finished" and r.stages and r.stages.is_reported and r.output_tokens]
    failed = [r for r in ended if r.state in ("failed", "retried")]
    total_s = _total_s(finished)
    stages = {name: _share(name, finished, total_s) for name in REPORTED_STAGES} if finished else {}
    code, says, advice = _verdict(snapshots, finished, ended, failed, stages)
    span_s = last.time_s - first.time_s
    return Explanation(
        span_s=span_s,
        num_ended=len(ended),
        num_failed=len(failed),
        num_running=sum(record.ended_at_s is None for record in last.requests),
        first_token_s=_first_tokens_s(finished) / len(finished) if finished else 0.0,
        tokens_per_s=sum(record.output_tokens for record in finished) / span_s if span_s > 0 else 0.0,
        stages=tuple(stages.values()),
        bottleneck=code,
        says=says,
        advice=advice,
    )


def _share(name: str, finished: Sequence[RequestSnapshot], total_s: float) -> StageShare:
    of_all = sorted(_span_s(record, name) for record in finished)
    p95_s = of_all[int(0.95 * (len(of_all) - 1))]
    return StageShare(name, statistics.fmean(of_all), p95_s, sum(of_all) / total_s if total_s else 0.0)


def _span_s(record: RequestSnapshot, stage: str) -> float:
    return (record.stages.span_s(stage) if record.stages is not None else None) or 0.0


def _total_s(finished: Iterable[RequestSnapshot]) -> float:
    return sum(record.total_s or 0.0 for record in finished)


def _first_tokens_s(finished: Iterable[RequestSnapshot]) -> float:
    return sum(record.first_token_s or 0.0 for record in finished)


# ------------------------------------------------------------------------------------------------------------- verdict


def _verdict(
    snapshots: Sequence[ClusterSnapshot],
    finished: Sequence[RequestSnapshot],
    ended: Sequence[RequestSnapshot],
    failed: Sequence[RequestSnapshot],
    stages: dict[str, StageShare],
) -> tuple[str, str, str]:
    last = snapshots[-1]
    down = [instance.name for instance in last.instances if instance.status == "down"]
    roles = {instance.role for instance in last.instances}
    lost = [role for role in sorted(roles) if all(i.status == "down" for i in last.instances if i.role == role)]
    if lost:
        return "no_instance", f"No {lost[0]} instance is up ({', '.join(down)} down).", "Start it; see its log for why."
    if len(failed) >= max(1.0, FAILS * len(ended)) and len(ended) >= MIN_REQUESTS:
        return _failures(failed, len(ended), down)
    if len(finished) < MIN_REQUESTS:
        return (
            "no_requests",
            f"Only {len(finished)} requests ended during the observation.",
            "Watch for longer (--seconds), or send some load.",
        )
    retracted = sum(_grown(snapshots, lambda load: load.retractions).values())
    if retracted >= RETRACTS * len(finished):
        return _small_pool(snapshots, f"{retracted} requests were moved out of D's pages and back")
    total_s = _total_s(finished)
    slow = _outlier(finished, total_s)
    if slow is not None:
        return slow
    first_s = _first_tokens_s(finished)
    worst = max((stages[name] for name in WAITING), key=lambda stage: stage.share)
    waits_s = worst.share * total_s
    if worst.share >= WAITS or (worst.name in BEFORE_FIRST and waits_s > WAITS_FIRST * first_s):
        return _waiting(snapshots, finished, worst)
    return _working(snapshots, finished, stages)


def _failures(failed: Sequence[RequestSnapshot], num_ended: int, down: Sequence[str]) -> tuple[str, str, str]:
    codes = Counter(record.error for record in failed)
    pairs = Counter(name for record in failed for name in (record.prefill, record.decode) if name is not None)
    code, name = codes.most_common(1)[0][0], pairs.most_common(1)[0][0]
    says = f"{len(failed)} of {num_ended} attempts failed, most with {code}, most often with {name}."
    missing = f" {', '.join(down)}: down." if down else ""
    return "failures", says, f"See its log, and docs/troubleshooting.md for {code}.{missing}"


_WorkOf = Callable[[RequestSnapshot], tuple[float, float]]
"""Seconds of a request and how many units of work were done in them."""


def _outlier(finished: Sequence[RequestSnapshot], total_s: float) -> tuple[str, str, str] | None:
    """Return the verdict on an instance or pair that is much slower at the same work than the others of its kind."""
    kinds: tuple[tuple[str, Callable[[RequestSnapshot], str | None], _WorkOf, str, str], ...] = (
        ("prefill_instance", lambda s: s.prefill, _compute_of, "a prompt token", "Compare its host and device"),
        ("decode_instance", lambda s: s.decode, _decode_of, "a token", "Compare its host and device"),
        ("transfer_pair", _pair_of, _transfer_of, "a byte of KV", "Check the network between the two"),
    )
    found = []
    for code, name_of, work_of, what, advice in kinds:
        groups: dict[str, list[tuple[float, float]]] = {}
        for record in finished:
            name, work = name_of(record), work_of(record)
            if name is not None and work[1]:
                groups.setdefault(name, []).append(work)
        paces = {n: _pace(works) for n, works in groups.items() if len(works) >= OUTLIER_REQUESTS}
        if len(paces) < 2:
            continue
        slowest = max(paces, key=paces.__getitem__)
        others = statistics.median(pace for name, pace in paces.items() if name != slowest)
        spent_s = sum(span_s for span_s, _ in groups[slowest])
        saved_s = spent_s * (1 - others / paces[slowest]) if paces[slowest] else 0.0
        # All of its requests must be slow, since on a busy machine some are slow anywhere.
        is_always = min(span_s / units for span_s, units in groups[slowest]) > others
        if is_always and paces[slowest] >= OUTLIER * others and saved_s >= OUTLIER_SHARE * total_s:
            times = f"{paces[slowest] / others:.1f} times as long" if others else "far longer"
            says = f"{slowest} takes {times} for {what} as the others."
            found.append((saved_s, (code, says, f"{advice}; `chitu drain` takes an instance out.")))
    return max(found)[1] if found else None


def _pace(works: Iterable[tuple[float, float]]) -> float:
    """Return the seconds per unit of the median request, so that a single slow request does not count."""
    return statistics.median(span_s / units for span_s, units in works)


def _compute_of(record: RequestSnapshot) -> tuple[float, float]:
    return _span_s(record, "compute"), record.prompt_tokens + record.continued_tokens - record.cached_tokens


def _decode_of(record: RequestSnapshot) -> tuple[float, float]:
    return _span_s(record, "decode"), max(0, record.output_tokens - 1 - record.continued_tokens)


def _transfer_of(record: RequestSnapshot) -> tuple[float, float]:
    return _span_s(record, "transfer"), record.kv_bytes


def _pair_of(record: RequestSnapshot) -> str | None:
    return None if record.prefill is None else f"{record.prefill} -> {record.decode}"


def _waiting(
    snapshots: Sequence[ClusterSnapshot], finished: Sequence[RequestSnapshot], stage: StageShare
) -> tuple[str, str, str]:
    share = f"{stage.share:.0%} of a request's time ({_ms(stage.mean_s)})"
    if stage.name == "queue" and not _is_held_by_decoding(snapshots):
        tokens = round(sum(_compute_of(record)[1] for record in _prompts(finished)))
        waiting = max((_sum(snapshot, lambda load: load.waiting_tokens, "P", "U") for snapshot in snapshots), default=0)
        says = f"Prompts wait for P: {share}, with up to {waiting} prompt tokens queued and {tokens} computed."
        return "prefill_queue", says, MORE_PREFILL
    if stage.name == "transfer":
        moved, spent_s = (sum(column) for column in zip(*map(_bytes_and_s, finished), strict=True))
        rate = f"{moved / spent_s / 1e9:.3g} GB/s" if spent_s else "-"
        says = f"KV transfer over {snapshots[-1].transport} takes {share}, at {rate} a request."
        return "transfer", says, "Compare with `chitu bench transfer`; RDMA, more transfer_threads, or fp8 pages."
    if stage.name == "first_step":
        return _few_slots(snapshots, f"Requests whose logits are there wait for a step of D: {share}")
    if stage.name == "messages":
        says = f"Messages and the router take {share}."
        return (
            "router",
            says,
            "If the router's core is busy, add one (router.hosts); else check the network to it.",
        )
    loads = [load for snapshot in snapshots for load in _loads(snapshot, "D", "U")]
    if any(load.pages_free + load.pages_cached <= FULL * load.pages_total for load in loads):
        return _small_pool(snapshots, f"Requests wait for pages of D: {share}")
    if any(not load.aux_free and load.aux_total for load in loads):
        says = f"Requests wait for room for a row of logits on D: {share}."
        return "logits_slots", says, "Raise cache.num_aux_slots (unset: twice scheduler.max_running_requests)."
    if any(not load.states_free and load.states_total for load in loads):
        says = f"Requests wait for room for a row of recurrent state on D: {share}."
        return "state_slots", says, "Raise cache.num_state_slots, or the memory for pages (half of it holds such rows)."
    return _few_slots(snapshots, f"D has free pages but no free request slot: {share}")


def _is_held_by_decoding(snapshots: Sequence[ClusterSnapshot]) -> bool:
    """Return whether the prompts that wait at unified instances wait for requests that decode there, rather than for
    other prompts."""
    held_s = sum(_grown(snapshots, lambda load: load.decode_backlog_s, "U").values())
    return held_s > sum(_grown(snapshots, lambda load: load.backlog_s, "U").values())


def _few_slots(snapshots: Sequence[ClusterSnapshot], what: str) -> tuple[str, str, str]:
    running = max((load.running for snapshot in snapshots for load in _loads(snapshot, "D", "U")), default=0)
    says = f"{what}; up to {running} run on one."
    return "running_requests", says, "Raise scheduler.max_running_requests, or add a D (`chitu join decode`)."


def _small_pool(snapshots: Sequence[ClusterSnapshot], what: str) -> tuple[str, str, str]:
    used = [
        1 - (load.pages_free + load.pages_cached) / load.pages_total for s in snapshots for load in _loads(s, "D", "U")
    ]
    says = f"{what}: its pages are in use up to {max(used, default=0):.0%}."
    return "pages", says, "Give D more pages (cache.num_pages, memory_fraction, fp8 pages), or add a D."


def _working(
    snapshots: Sequence[ClusterSnapshot], finished: Sequence[RequestSnapshot], stages: dict[str, StageShare]
) -> tuple[str, str, str]:
    """Return the verdict if no stage waits long."""
    if stages["compute"].share >= stages["decode"].share:
        at_once = _prompts_at_once(finished)
        if at_once >= SHARED:
            says = f"Prompts share P: {stages['compute'].share:.0%} of a request's time, {at_once:.0f} at once on each."
            return "prefill_queue", says, MORE_PREFILL
        computed_s, tokens = (sum(column) for column in zip(*map(_compute_of, finished), strict=True))
        pace = f", {_ms(computed_s / tokens)} a prompt token" if tokens else ""
        says = f"No stage waits long; most of the time P computes: {stages['compute'].share:.0%}{pace}."
        return (
            "prefill_compute",
            says,
            "Use faster GPUs or tensor parallelism for P; more P do not shorten a prompt.",
        )
    decoded_s, tokens = (sum(column) for column in zip(*map(_decode_of, finished), strict=True))
    running = max((_sum(snapshot, lambda load: load.running, "D", "U") for snapshot in snapshots), default=0)
    pace = f", {_ms(decoded_s / tokens)} a token with up to {running} requests at once" if tokens else ""
    says = f"No stage waits long; most of the time D generates tokens: {stages['decode'].share:.0%}{pace}."
    return "decode", says, "If that is too slow, add a D, so that each has fewer requests at once."


def _prompts(finished: Sequence[RequestSnapshot]) -> list[RequestSnapshot]:
    """Return one request for each prompt: what several choices share was computed once."""
    return list({record.prompt_room or record.room: record for record in finished}.values())


def _prompts_at_once(finished: Sequence[RequestSnapshot]) -> float:
    """Return the mean number of prompts at once on a P that has any. The number in a load report is as old as the
    instance's last step, so it is derived from the stage times."""
    span_s = max(s.created_at_s for s in finished) - min(s.created_at_s for s in finished)
    prompts = _prompts(finished)
    spent_s = sum(_span_s(record, "compute") for record in prompts)
    span_s += spent_s / len(prompts)
    return spent_s / span_s / len({record.prefill for record in finished}) if span_s else 0.0


def _bytes_and_s(record: RequestSnapshot) -> tuple[float, float]:
    return record.kv_bytes, _span_s(record, "transfer")


def _loads(snapshot: ClusterSnapshot, *letters: str) -> list[LoadReport]:
    return [i.load for i in snapshot.instances if i.load is not None and i.name[0] in letters and i.load.pages_total]


def _sum(snapshot: ClusterSnapshot, of: Callable[[LoadReport], int], *letters: str) -> int:
    return sum(of(load) for load in _loads(snapshot, *letters))


def _grown(snapshots: Sequence[ClusterSnapshot], of: Callable[[LoadReport], float], *letters: str) -> dict[str, float]:
    """Return by how much a counter grew, by instance. A restarted instance counts from zero."""
    grown: dict[str, float] = {}
    before: dict[str, tuple[str, float]] = {}
    for snapshot in snapshots:
        for instance in snapshot.instances:
            if instance.load is None or (letters and instance.name[0] not in letters):
                continue
            now = instance.incarnation, of(instance.load)
            life, count = before.get(instance.name, now)
            grown[instance.name] = grown.get(instance.name, 0) + now[1] - (count if life == now[0] else 0)
            before[instance.name] = now
    return grown


def _ms(span_s: float) -> str:
    return f"{1000 * span_s:.3g} ms" if span_s < 1 else f"{span_s:.3g} s"


def explain_cluster(
    source: str, credential: str | None = None, seconds: float = 10.0, save: str | None = None, as_json: bool = False
) -> int:
    """Print the explanation and return exit code 0. `source` is the URL of a router, or the path of a file that `save`
    wrote. `credential`: an API key, which shows its tenant's requests, or the cluster's token, which shows all. Ctrl-C
    ends the observation. Raise ConfigError if the file is unreadable, ChituError if no router answers."""
    if "://" in source:
        snapshots = _watch(RouterClient(source, credential), seconds)
    else:
        snapshots = _read(Path(source))
    if save is not None:
        Path(save).write_bytes(msgspec.json.Encoder().encode_lines(snapshots))
    explanation = explain(snapshots)
    if as_json:
        sys.stdout.write(msgspec.json.encode(explanation).decode() + "\n")
    else:
        _show(explanation, Console(highlight=False))
    return 0


def _watch(client: RouterClient, seconds: float) -> list[ClusterSnapshot]:
    snapshots = [client.cluster()]
    end_s = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):  # explain the snapshots taken so far
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(PAUSE_S, left_s))
            snapshots.append(client.cluster())
    return snapshots


def _read(path: Path) -> list[ClusterSnapshot]:
    try:
        snapshots = msgspec.json.Decoder(ClusterSnapshot).decode_lines(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{os.fspath(path)!r} is neither a file nor a URL such as http://127.0.0.1:21003") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)!r} is no file of `chitu explain --save`: {error}") from error
    if not snapshots:
        raise ConfigError(f"{os.fspath(path)!r} is empty")
    return snapshots


def _show(explanation: Explanation, console: Console) -> None:
    console.print(
        f"{explanation.span_s:.1f} s: {explanation.num_ended} attempts ended, {explanation.num_failed} of them failed, "
        f"{explanation.num_running} run; first token after {1000 * explanation.first_token_s:.4g} ms, "
        f"{explanation.tokens_per_s:.4g} tokens/s",
        soft_wrap=True,
    )
    if explanation.stages:
        table = Table("stage", box=None, pad_edge=False)
        for name in ("mean ms", "p95 ms", "share"):
            table.add_column(name, justify="right")
        for stage in explanation.stages:
            numbers = f"{1000 * stage.mean_s:.1f}", f"{1000 * stage.p95_s:.1f}", f"{stage.share:.0%}"
            table.add_row(stage.name, *numbers)
        console.print(table)
    console.print(f"{explanation.bottleneck}: {explanation.says}", style="bold", soft_wrap=True, markup=False)
    console.print(explanation.advice, soft_wrap=True, markup=False)
