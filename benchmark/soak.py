"""A long, steady load with faults, to find leaks: `python -m benchmark.soak --minutes 20 [--engine checksum] [...]`.

Starts 2P2D on this machine. Clients send requests without a pause, every answer is checked token by token, and some
clients disconnect in the middle. Every `--accident-s` one process is killed, terminated and restarted, or stopped for a
second. With `--mixed` each process that starts again runs this release or the one before, as drawn, and before each
sample the router starts again, too. Every `--sample-s` the load pauses until no request runs, a sample is taken and a
row printed. At the end the samples are judged, with exit code 1 if one fails: between the first and the last, memory,
threads, file descriptors and sockets of every process are the same within `TOLERANCE`; every page is free at rest;
every request was right or left by its client.

`--engine checksum` (default): almost no CPU, so the rate is the system's own. `--engine tiny`: the embedded model; an
answer is right if the undisturbed cluster gave the same before. Needs the packages of the extra `dev` (httpx, psutil).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.older_release import MixedReleases, older_release
from support.steady_load import LEFT, RIGHT, Ask, SteadyLoad, count_outcomes

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.errors import ChituError
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.launch.router_client import RouterClient
from chitu.process.child import ROUTER
from chitu.tools.bench.report import DEFAULT_DIR, commit, machine


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of one process. Of an instance it is the process that computes, not its parent torchrun."""

    rss_mib: float
    threads: int
    fds: int
    sockets: int


TOLERANCE = {"rss_mib": (0.05, 8.0), "threads": (0.0, 0.0), "fds": (0.0, 3.0), "sockets": (0.0, 3.0)}
"""Growth that counts as flat, by field of `ResourceUsage`: a share and an amount in its unit; the larger applies."""


@dataclass(slots=True)
class Sample:
    """State of the cluster at rest."""

    at_s: float
    usage: dict[str, ResourceUsage]
    pages_not_free: int
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes of the requests since the last sample."""
    accidents: list[str] = field(default_factory=list)


def findings(samples: Sequence[Sample]) -> list[str]:
    """Return a sentence for each resource that grew and each wrong result. The first fifth of the samples (at least
    one) is the warm-up."""
    words = []
    outcomes = sum((sample.outcomes for sample in samples), Counter[str]())
    words += [f"{n} requests: {code}" for code, n in sorted(outcomes.items()) if code not in (RIGHT, LEFT)]
    if not outcomes[RIGHT]:
        words.append("no answer at all was right")
    words += [f"{s.pages_not_free} pages were not free at rest, {s.at_s:.0f} s in" for s in samples if s.pages_not_free]
    judged = samples[max(1, len(samples) // 5) :]
    if len(judged) < 2:
        return [*words, f"{len(samples)} samples are too few to judge by"]
    part = max(1, len(judged) // 4)
    for name in sorted(judged[0].usage.keys() & judged[-1].usage.keys()):
        for what, (share, amount) in TOLERANCE.items():
            before, after = (
                statistics.median(getattr(s.usage[name], what) for s in some if name in s.usage)
                for some in (judged[:part], judged[-part:])
            )
            if after - before > max(share * before, amount):
                words.append(f"{name}: {what} grew from {before:g} to {after:g}")
    return words


def row_of(sample: Sample) -> str:
    outcomes = ", ".join(f"{n} {code}" for code, n in sorted(sample.outcomes.items(), key=lambda item: -item[1]))
    processes = "  ".join(
        f"{name} {u.rss_mib:.0f} MiB {u.threads} thr {u.fds} fds {u.sockets} tcp" for name, u in sample.usage.items()
    )
    accidents = ", ".join(sample.accidents) or "no accident"
    head = f"{sample.at_s:5.0f} s  {sample.outcomes.total()} requests: {outcomes}; {accidents}; "
    return f"{head}{sample.pages_not_free} pages not free\n         {processes}"


def usage_of(pid: int) -> ResourceUsage:
    process = psutil.Process(pid)
    with process.oneshot():
        sockets = len(process.net_connections(kind="tcp"))
        return ResourceUsage(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds(), sockets)


VOCAB_SIZE = 1280
"""Vocabulary of the embedded model and its tokenizer."""
FIRST_ID = 16
PATIENCE_S = 60.0
READY_S = 120.0
REST_S = 20.0
"""Time without requests after which every page must be free."""
ROUTER_KEY = "dp_config.router"
SETTINGS = [
    "model.served_name=m",
    "model.max_model_len=1024",
    "cache.num_pages=320",
    f"{ROUTER_KEY}.prefill_schedulers=[{{}}, {{}}]",
    f"{ROUTER_KEY}.decode_schedulers=[{{}}, {{}}]",
]


class FaultInjector:
    """Random faults, one at a time; the process it hits is back before the next one. The main thread calls `tick`."""

    def __init__(
        self, cluster: LocalCluster, every_s: float, rng: random.Random, mixed: MixedReleases | None = None
    ) -> None:
        self._cluster, self._mixed = cluster, mixed
        self._every_s = every_s
        self._rng = rng
        self._next_s = time.monotonic() + every_s
        self._stopped: tuple[str, float] | None = None
        self.noted: list[str] = []

    def tick(self) -> None:
        """Start or end a fault if it is due."""
        now_s = time.monotonic()
        if self._stopped is not None and now_s >= self._stopped[1]:
            self._cluster.kill(self._stopped[0], signal.SIGCONT)
            self._stopped = None
        if now_s < self._next_s or self._stopped is not None or not self._cluster.ready():
            return
        self._next_s = now_s + self._every_s
        name = self._rng.choice([name for name in self._cluster.members if name != ROUTER])
        kind = self._rng.choice(("killed", "restarted", "stopped for a second"))
        self.noted.append(f"{name} {kind}")
        if kind == "stopped for a second":
            self._cluster.kill(name, signal.SIGSTOP)
            self._stopped = (name, now_s + 1.0)
            return
        self._cluster.kill(name, signal.SIGTERM if kind == "restarted" else signal.SIGKILL)
        self._cluster.wait_exit(name, 30.0)
        self._restart(name)

    def _restart(self, name: str) -> None:
        if self._mixed is not None:
            self.noted.append(f"{name} is the {self._mixed.draw(name, self._rng)} release")
        self._cluster.restart(name)

    def restart_router(self) -> None:
        """Start the router again if releases are mixed. No request runs."""
        if self._mixed is not None:
            self._restart(ROUTER)
            self._cluster.wait_ready(READY_S)

    def settle(self) -> None:
        """Let a stopped process run again, and wait until the cluster is ready."""
        if self._stopped is not None:
            self._cluster.kill(self._stopped[0], signal.SIGCONT)
            self._stopped = None
        self._cluster.wait_ready(READY_S)


def pages_not_free(url: str) -> int:
    """Wait up to REST_S until every page is free. Return the number of pages that are not: a leak."""
    client, pause = RouterClient(url), threading.Event()
    end_s = time.monotonic() + REST_S
    while True:
        instances = client.cluster().instances
        taken = sum(i.load.pages_used + i.load.pages_quarantined for i in instances if i.load is not None)
        if not taken or time.monotonic() > end_s:
            return taken
        pause.wait(0.1)


def take_sample(cluster: LocalCluster, load: SteadyLoad, accidents: FaultInjector, start_s: float) -> Sample:
    accidents.settle()
    load.pause(PATIENCE_S + 10)
    accidents.restart_router()
    usage = {name: usage_of(cluster.pid(name)) for name in cluster.members}
    sample = Sample(time.monotonic() - start_s, usage, pages_not_free(cluster.url))
    sample.outcomes = count_outcomes(load.take_answers())
    sample.accidents, accidents.noted = accidents.noted, []
    load.resume()
    return sample


def soak(
    cluster: LocalCluster,
    load: SteadyLoad,
    *,
    seconds: float,
    sample_s: float,
    accident_s: float,
    clients: int,
    rng: random.Random,
    say: Callable[[str], None],
    mixed: MixedReleases | None = None,
) -> list[Sample]:
    """Run the load and the faults for `seconds` and return the samples. `cluster` is ready and `load` has not started.
    The caller must be the thread that started the cluster."""
    load.start(clients)
    accidents = FaultInjector(cluster, accident_s, rng, mixed)
    samples: list[Sample] = []
    start_s = time.monotonic()
    pause = threading.Event()
    while time.monotonic() - start_s < seconds:
        end_s = time.monotonic() + sample_s
        while time.monotonic() < end_s:
            accidents.tick()
            pause.wait(0.05)
        samples.append(take_sample(cluster, load, accidents, start_s))
        say(row_of(samples[-1]))
    return samples


def checksum_asks(rng: random.Random) -> Ask:
    prompt = tuple(rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(rng.randint(4, 200)))
    leaves = rng.uniform(0.0, 0.3) if rng.random() < 0.15 else None
    return Ask(prompt, rng.randint(4, 60), stream=rng.random() < 0.5, leave_after_s=leaves)


def checksum_right(ask: Ask) -> list[int]:
    return expected_tokens(ask.prompt, ask.max_tokens, VOCAB_SIZE)


class KnownAnswers:
    """Random prompts with the answers of the undisturbed cluster; a later answer must be a prefix of them."""

    MAX_TOKENS = 48

    def __init__(self, rng: random.Random, count: int) -> None:
        self.prompts = [
            tuple(rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(rng.randint(4, 200))) for _ in range(count)
        ]
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def learn(self, url: Callable[[], str]) -> None:
        """Send each prompt once, alone, and keep its answer. Raise ChituError if one gets no answer."""
        load = SteadyLoad(url, "m", self.ask, lambda ask: [], PATIENCE_S)
        for prompt in self.prompts:
            answer = load.send([Ask(prompt, self.MAX_TOKENS)])[0].result()
            if len(answer.tokens) != self.MAX_TOKENS:
                raise ChituError(f"no answer to learn from: {answer.outcome} {answer.detail}")
            self._answers[prompt] = answer.tokens
        load.close()

    def ask(self, rng: random.Random) -> Ask:
        leaves = rng.uniform(0.0, 1.0) if rng.random() < 0.15 else None
        return Ask(
            rng.choice(self.prompts), rng.randint(4, self.MAX_TOKENS), stream=rng.random() < 0.5, leave_after_s=leaves
        )

    def right(self, ask: Ask) -> list[int]:
        return self._answers[ask.prompt][: ask.max_tokens]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--engine", choices=("checksum", "tiny"), default="checksum")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--sample-s", type=float, default=60.0)
    parser.add_argument("--accident-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", action="store_true", help="two releases; with --engine tiny")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys of the topology to set")
    arguments = parser.parse_intermixed_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="chitu-soak-") as folder:
        is_checksum = arguments.engine == "checksum"
        if is_checksum and arguments.mixed:
            parser.error("--mixed: the checksum engine has one release; add --engine tiny")
        mixed = MixedReleases(older_release(Path(folder) / "older")) if arguments.mixed else None
        real = Entries(torchrun=False, popen=mixed) if mixed is not None else Entries()
        model = make_checksum_model(Path(folder) / "m", EngineConfig(0.004, 0.0002)) if is_checksum else TINY_MODEL_DIR
        overrides = [f"model.path={model}", *SETTINGS, *arguments.overrides]
        topology = load_topology("pd_disagg_1p1d_local", overrides)
        with LocalCluster(topology, entries=ENTRIES if is_checksum else real) as cluster:
            cluster.wait_ready()
            known = KnownAnswers(rng, 24)
            if not is_checksum:
                known.learn(lambda: cluster.url)
            next_ask, right = (checksum_asks, checksum_right) if is_checksum else (known.ask, known.right)
            load = SteadyLoad(lambda: cluster.url, "m", next_ask, right, PATIENCE_S, arguments.seed)
            try:
                samples = soak(
                    cluster,
                    load,
                    seconds=60 * arguments.minutes,
                    sample_s=arguments.sample_s,
                    accident_s=arguments.accident_s,
                    clients=arguments.clients,
                    rng=rng,
                    say=lambda text: print(text, flush=True),
                    mixed=mixed,
                )
            finally:
                load.close()
    found = findings(samples)
    write_record(arguments.json_dir, vars(arguments), samples, found)
    for sentence in found:
        print(f"soak: {sentence}", file=sys.stderr)
    if not found:
        print("flat: memory, threads, file descriptors, sockets and pages; every request right or left on purpose")
    return 1 if found else 0


def write_record(folder: Path, arguments: dict[str, object], samples: Sequence[Sample], found: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"soak-{time.strftime('%Y%m%dT%H%M%S')}.json"
    record = {
        "benchmark": "soak",
        "commit": commit(),
        "machine": machine(),
        "arguments": {name: str(value) for name, value in arguments.items()},
        "findings": list(found),
        "samples": msgspec.to_builtins(list(samples)),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
