"""The chaos matrix: {SIGKILL, SIGSTOP, connection cut} x {P, D, router} x {queued, prefilling, transferring, decoding}.

A real 2P2D cluster serves a steady load whose every answer is checked token by token. For each cell more requests are
sent and held in the phase, the blow falls when the router shows them there, and then everything must recover by itself:
no request hangs, no token is wrong, no page is lost, and no request fails if a pair survived. Meanwhile the wall clock
of each process jumps by an hour every two seconds: nothing may depend on it. `ALLOWED` lists what clients may see. CI
runs a third of the cells, `--by-hand` all of them; their table is printed at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from chaos_cluster import PATIENCE_S, VOCAB_SIZE, Blow, ChaosCluster
from support.router_process import wait_until
from support.steady_load import HUNG, LOST, REFUSED, RIGHT, WRONG, Ask, CheckedAnswer, count_outcomes
from wrong_clocks import JUMPING, wrong_clocks

pytestmark = pytest.mark.timeout(150)
Phase = Literal["queued", "prefilling", "transferring", "decoding"]
BLOWS: tuple[Blow, ...] = ("SIGKILL", "SIGSTOP", "cut")
TARGETS = ("P0", "D0", "router")
PHASES: tuple[Phase, ...] = ("queued", "prefilling", "transferring", "decoding")
HOLDS = {"queued": "transfer", "prefilling": "prefill", "transferring": "transfer"}
VICTIMS = {"queued": 28, "prefilling": 4, "transferring": 4, "decoding": 4}
"""Number of requests per phase. Requests queue only if 8 aux slots of each instance are taken."""
ALLOWED: dict[tuple[Blow, str], set[str]] = {
    # Connections break with the process; then nothing listens, and then no instance has joined yet.
    ("SIGKILL", "router"): {LOST, REFUSED, "no_instance"},
    # A router without connections loses all instances: no pair is left to retry on.
    ("cut", "router"): {"no_instance", "prefill_lost", "decode_lost"},
}
"""Outcomes that clients may see besides right answers, by blow and process. All other cells allow none."""
RECOVERY_S = 20.0


REACH_S = 2.0
QUEUED_S = 15.0
"""Timeout for queued requests: 28 certainly queue, if late on a busy machine; 28 more would overload the router."""


@dataclass(slots=True)
class Row:
    """Result of one cell of the matrix."""

    blow: Blow
    target: str
    phase: Phase
    outcomes: Counter[str] = field(default_factory=Counter)
    cached: int = 0
    """Prompt tokens that were not computed again."""
    leaked: int = -1
    recovery_s: float = -1.0
    details: list[str] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        failed = {code: n for code, n in self.outcomes.items() if code not in (RIGHT, WRONG, HUNG)}
        return (
            *(self.blow, self.target, self.phase),
            *(str(self.outcomes.total()), str(self.outcomes[RIGHT]), str(self.outcomes[WRONG])),
            ", ".join(f"{n} {code}" for code, n in sorted(failed.items())) or "-",
            *(str(self.outcomes[HUNG]), str(self.cached), str(self.leaked), f"{self.recovery_s:.1f}"),
        )


COLUMNS = ("blow", "to", "while", "sent", "right", "wrong", "failed", "hung", "cached", "pages leaked", "recovery s")


def table(rows: list[Row]) -> str:
    lines = [COLUMNS, *[row.cells() for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


class Arena:
    """One cluster for all cells; it is replaced after a cell that failed."""

    def __init__(self, folder: Path, has_state: bool = False) -> None:
        self._folder = folder
        self._has_state = has_state
        self._cluster: ChaosCluster | None = None
        self._count = itertools.count()
        self.rows: list[Row] = []

    def enter(self) -> ChaosCluster:
        if self._cluster is None:
            folder = self._folder / str(next(self._count))
            clocks = wrong_clocks(folder / "clock", JUMPING)
            self._cluster = ChaosCluster(folder, env=clocks, has_state=self._has_state).__enter__()
        return self._cluster

    def leave(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Arena]:
    with arena_in(tmp_path_factory.mktemp("chaos"), request, has_state=False) as arena:
        yield arena


@pytest.fixture(scope="module")
def state_arena(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Return an arena whose model has a recurrent state, and so a prefix cache of its own kind."""
    with arena_in(tmp_path_factory.mktemp("chaos-state"), request, has_state=True) as arena:
        yield arena


@contextlib.contextmanager
def arena_in(folder: Path, request: pytest.FixtureRequest, has_state: bool) -> Iterator[Arena]:
    arena = Arena(folder, has_state)
    try:
        yield arena
    finally:
        arena.leave()
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            print(f"\n\n{table(arena.rows)}\n")


def victims(phase: Phase, seed: str) -> list[Ask]:
    """Return requests long enough to be observed. Half of them are streamed, so tokens are out when the blow falls.
    Each seed has its own prompts, of which nothing is cached: they are computed in several steps."""
    rng = random.Random(seed)
    return [
        Ask(
            tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(300)),
            max_tokens=300 if phase == "decoding" else 30,
            seed=rng.randrange(1 << 32) if n % 4 == 1 else None,
            stream=n % 2 == 0,
            request_id=f"victim-{n}",
        )
        for n in range(VICTIMS[phase])
    ]


def is_reached(cluster: ChaosCluster, phase: Phase, target: str) -> bool:
    """Return whether the router shows a victim that the target serves in this phase (for the router: that any instance
    serves)."""
    snapshot = cluster.snapshot()
    state = "decode" if phase == "decoding" else "prefill"
    held = [
        {request.prefill, request.decode}
        for request in snapshot.requests
        if request.ended_at_s is None and request.state == state and "victim" in request.request_id
    ]
    pairs = [pair for pair in held if target == "router" or target in pair]
    if not pairs:
        return False
    if phase == "decoding":
        return True
    loads = {i.name: i.load for i in snapshot.instances if i.load is not None}
    for pair in pairs:
        there = [loads[name] for name in sorted(pair) if name in loads and (target in ("router", name))]
        if phase == "prefilling":  # P computes, whichever process is hit
            there = [loads[name] for name in pair if name in loads and name.startswith("P")]
        field = {"queued": "waiting", "prefilling": "running", "transferring": "transferring"}[phase]
        if any(getattr(load, field) for load in there):
            return True
    return False


IN_CI = {
    (blow, TARGETS[(i + j) % 3], phase)
    for i, blow in enumerate(BLOWS)
    for j, phase in enumerate(PHASES)
    if (i + j) % 2 == 0
}
"""Cells with each blow to two targets, in two phases, and each phase."""
CHANGES_IN_CI = {("change", "P0", "transferring"), ("change", "D0", "decoding")}
CELLS = [
    *(
        cell if cell in IN_CI else pytest.param(*cell, marks=pytest.mark.by_hand)
        for cell in itertools.product(BLOWS, TARGETS, PHASES)
    ),
    *(("blink", target, "decoding") for target in ("D0", "router")),  # a blink can lose only tokens
    *(
        cell if cell in CHANGES_IN_CI else pytest.param(*cell, marks=pytest.mark.by_hand)
        for cell in itertools.product(("change", "drain"), ("P0", "D0"), PHASES)
    ),
]


@pytest.mark.parametrize(("blow", "target", "phase"), CELLS)
def test_every_request_survives_or_fails_with_a_word(arena: Arena, blow: Blow, target: str, phase: Phase) -> None:
    row = row_of(arena, blow, target, phase)
    assert row.cached > 0 or target == "router", "the blow was to meet pages that requests share"


STORMS: tuple[tuple[tuple[Blow, str], ...], ...] = (
    (("change", "P0"), ("SIGKILL", "D1")),
    (("change", "D0"), ("drain", "P1")),
    (("change", "P1"), ("SIGKILL", "P1")),
    (("change", "D1"), ("change", "P0")),
    (("change", "D1"), ("SIGSTOP", "P0")),
    (("change", "P0"), ("cut", "D0")),
    (("change", "D0"), ("SIGKILL", "router")),
)
"""Blows at once, of which none leaves the cluster without a pair."""


STORMS_IN_CI = (STORMS[6],)
STORM_CELLS = [storm if storm in STORMS_IN_CI else pytest.param(storm, marks=pytest.mark.by_hand) for storm in STORMS]


@pytest.mark.parametrize("storm", STORM_CELLS, ids=lambda storm: "-".join(f"{blow}-{name}" for blow, name in storm))
def test_a_change_of_role_amid_other_blows_costs_no_request(arena: Arena, storm: tuple[tuple[Blow, str], ...]) -> None:
    cluster = arena.enter()
    load = cluster.load
    load.resume()
    sent = load.send(victims("decoding", str(storm)))
    try:
        for blow, name in storm:
            cluster.strike(blow, name)
        for blow, name in reversed(storm):
            cluster.mend(blow, name)
        cluster.wait_recovered(RECOVERY_S)
        for future in sent:
            future.result(PATIENCE_S + 10)
        load.pause(PATIENCE_S + 10)
        wait_until(lambda: not cluster.not_whole(), 10, lambda: "; ".join(cluster.not_whole()))
    except BaseException:
        arena.leave()
        raise
    answers = load.take_answers()
    allowed = set().union(*(ALLOWED.get(blow, set()) for blow in storm)) | {RIGHT}
    assert set(count_outcomes(answers)) <= allowed, [f"{a.outcome}: {a.detail}" for a in answers if a.outcome != RIGHT]
    assert cluster.pages_not_free() == 0


STATE_IN_CI = {
    ("SIGKILL", "D0", "decoding"),
}
STATE_CELLS = [
    cell if cell in STATE_IN_CI else pytest.param(*cell, marks=pytest.mark.by_hand)
    for cell in itertools.product(BLOWS, TARGETS, PHASES)
]


@pytest.mark.parametrize(("blow", "target", "phase"), STATE_CELLS)
def test_every_request_of_a_model_with_state_survives_or_fails_with_a_word(
    state_arena: Arena, blow: Blow, target: str, phase: Phase
) -> None:
    row = row_of(state_arena, blow, target, phase)
    assert row.cached > 0 or target != "D0", "P was to go on from states that it had kept"


def row_of(arena: Arena, blow: Blow, target: str, phase: Phase) -> Row:
    """Run a cell, and return its result, with no answer that is wrong and nothing that is left."""
    cluster = arena.enter()
    row = Row(blow, target, phase)
    arena.rows.append(row)
    try:
        run_cell(cluster, row)
    except BaseException:
        arena.leave()
        raise
    allowed = ALLOWED.get((blow, target), set()) | {RIGHT}
    assert set(row.outcomes) <= allowed, "\n".join(row.details)
    assert row.outcomes[RIGHT] > 0
    assert row.leaked == 0
    return row


def send_victims(cluster: ChaosCluster, row: Row) -> list[Future[CheckedAnswer]]:
    """Send requests until one of them is where the blow shall hit it; more are sent while chance routes all of them
    elsewhere."""
    sent: list[Future[CheckedAnswer]] = []
    for attempt in range(5):
        sent += cluster.load.send(victims(row.phase, f"{row.blow} {row.target} {row.phase} {attempt}"))
        with contextlib.suppress(TimeoutError):
            reach_s = QUEUED_S if row.phase == "queued" else REACH_S
            wait_until(lambda: is_reached(cluster, row.phase, row.target), reach_s, "")
            return sent
    raise AssertionError(f"no request was {row.phase} on {row.target}")


def run_cell(cluster: ChaosCluster, row: Row) -> None:
    load = cluster.load
    load.resume()
    if row.phase in HOLDS:
        cluster.hold(HOLDS[row.phase])
    sent = send_victims(cluster, row)
    cluster.strike(row.blow, row.target)
    cluster.release()
    cluster.mend(row.blow, row.target)
    try:
        row.recovery_s = cluster.wait_recovered(RECOVERY_S)
        for future in sent:
            future.result(PATIENCE_S + 10)
        load.pause(PATIENCE_S + 10)
    finally:
        answers = load.take_answers()
        row.outcomes = count_outcomes(answers)
        row.cached = sum(answer.cached_tokens for answer in answers)
        row.details = [f"{a.outcome}: {a.detail}" for a in answers if a.outcome != RIGHT]
    try:
        wait_until(lambda: not cluster.not_whole(), 10, lambda: "; ".join(cluster.not_whole()))
    finally:
        row.leaked = cluster.pages_not_free()
