"""The router as several processes (`router.workers` above 1): this one keeps the cluster together, the others serve.

It owns the membership and the listening socket; an API process (`worker.py`) owns a token port, a `PDRequestRouter` and
the connections that it was given. What the membership hears goes to all of them at once, as the messages that it came
in. Questions about the whole router (`GET /cluster`, `/metrics`, `POST /admin/drain`) come here from whichever was
asked, and are answered from all of them as they are now. Loop thread; nothing here waits for an API process without a
bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chitu.clock import RealClock
from chitu.config.cluster_key import cluster_key_of
from chitu.config.schema import Topology
from chitu.config.topology import listening_host, with_router_ports
from chitu.errors import ChituError
from chitu.http.cluster_source import WorkerReport
from chitu.http.server import listen
from chitu.net.curve import derive, make_context
from chitu.protocol import ClusterView, Heartbeat, InstanceInfo, RequestFailed, Wire
from chitu.protocol.snapshot import RequestSnapshot
from chitu.router.metrics import RouterMetrics, add_up
from chitu.router.request_journal import KEPT_RECORDS
from chitu.serve.connection_handover import ConnectionGate
from chitu.serve.lifetime import Ending, keep_ticking
from chitu.serve.membership import Membership
from chitu.serve.own_cluster import drain_instance, flush_caches
from chitu.serve.worker_feed import (
    DrainAnswer,
    DrainAsked,
    EndAsked,
    FlushAsked,
    InstanceJoined,
    InstanceLost,
    RecordAsked,
    RecordReply,
    ReportAsked,
    ToCoordinator,
)
from chitu.serve.worker_pool import PoolEvents, Worker, WorkerPool

log = logging.getLogger(__name__)

ANSWER_S = 0.5
"""Who has not reported by then is shown as it last did."""
END_S = 2.0
"""What API processes may take to end beyond `drain_s`."""


@dataclass(slots=True, eq=False)
class _Question:
    """A record that an API process asked for, while the others report."""

    asker: Worker
    number: int
    """Of the asker's question."""
    waiting: set[Worker]
    due_s: float


@dataclass(slots=True)
class EndedWorkers:
    """What API processes that are no more had counted and remembered: counters must not fall when one dies."""

    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    requests: deque[RequestSnapshot] = field(default_factory=lambda: deque(maxlen=KEPT_RECORDS))
    version: int = 0

    def add(self, report: WorkerReport) -> None:
        self.metrics = add_up([self.metrics, report.metrics])
        # Not counters, but what was true at a moment that is over.
        self.metrics.in_flight, self.metrics.breakers = {}, {}
        self.requests.extend(report.ended)
        self.version += report.version + 1

    def report(self) -> WorkerReport:
        return WorkerReport(-1, 0, 0, self.version, (), tuple(self.requests), self.metrics)


class Coordinator:
    """Construct, `start`, `run_until_signal`, all on the loop; see `api_server.RouterLike`."""

    def __init__(self, topology: Topology, created_s: int, flush_log: Callable[[], None]) -> None:
        config = topology.dp_config.router
        self._config = config
        self._flush_log = flush_log
        secrets = derive(cluster_key_of(topology))
        context = make_context(secrets)
        self._membership = Membership(config, context, RealClock(), _ToAll(self._broadcast), secrets)
        self._gate = ConnectionGate(
            asyncio.get_running_loop(), listen(listening_host(config), config.port, "dp_config.router.port")
        )
        events = PoolEvents(self._greeting, self._on_incarnations, self._on_message, self._on_ended)
        topology = with_router_ports(topology, self._membership.port_table())
        self._pool = WorkerPool(topology, created_s, self._gate, events)
        self._questions: dict[int, _Question] = {}
        self._num_questions = 0
        self._ended = EndedWorkers()
        self._ending = Ending()

    async def start(self) -> None:
        keep_ticking(self._membership.tick, self._pool.tick, self._answer_late, self._flush_log)
        await self._membership.start()
        await self._pool.start()

    def port_table(self) -> dict[str, int]:
        # Each API process has its own token port; requests carry it.
        return {"port": self._gate.port, "token_port": self._config.token_port, **self._membership.port_table()}

    def on_signal(self) -> None:
        self._ending.ask()

    async def run_until_signal(self) -> None:
        await self._ending.is_due.wait()
        drain_s = self._config.pd_disaggregation.deadlines.drain_s
        log.info("ending: the API processes finish what they run; at most %g s", drain_s)
        self._gate.close()
        self._pool.end()
        end_s = time.monotonic() + drain_s + END_S
        was_hurried = False
        while not self._pool.has_ended and time.monotonic() < end_s:
            if self._ending.is_hurried.is_set() and not was_hurried:
                was_hurried = True
                self._pool.end()
            await asyncio.sleep(0.02)
        self._pool.kill()
        await self._membership.stop(1.0)
        log.info("ended")

    def _answer_late(self) -> None:
        """Questions that somebody has not answered in time: without his share."""
        now_s = time.monotonic()
        for question in [q for q in self._questions.items() if q[1].due_s <= now_s]:
            self._answer(*question)

    # -------------------------------------------------------------------------------------------------- to the workers

    def _broadcast(self, message: Wire) -> None:
        self._pool.broadcast(message)

    def _greeting(self) -> list[Wire]:
        coordination = self._membership.coordination
        view, loads = coordination.view, coordination.loads()
        beats = [Heartbeat(i.role, i.engine_rank, i.incarnation, loads[i.role, i.engine_rank]) for i in view.instances]
        return [*(InstanceJoined(instance) for instance in view.instances), view, *beats]

    def _on_incarnations(self, incarnations: tuple[int, ...]) -> None:
        self._membership.coordination.set_workers(incarnations)

    def _on_ended(self, worker: Worker) -> None:
        if worker.report is not None:
            self._ended.add(worker.report)
        for number, question in list(self._questions.items()):
            if question.asker is worker:
                del self._questions[number]
            else:
                self._note_reported(number, question, worker)

    # ------------------------------------------------------------------------------------------------ from the workers

    def _on_message(self, worker: Worker, message: ToCoordinator) -> None:
        if isinstance(message, WorkerReport):
            question = self._questions.get(message.number)
            if question is not None:
                self._note_reported(message.number, question, worker)
        elif isinstance(message, RecordAsked):
            self._ask_others(worker, message.number)
        elif isinstance(message, DrainAsked):
            worker.send(self._drain(message))
        elif isinstance(message, FlushAsked):
            flush_caches(self._membership)
        elif isinstance(message, EndAsked):
            self._ending.is_due.set()  # each API process may pass the same signal on

    def _drain(self, asked: DrainAsked) -> DrainAnswer:
        try:
            draining = drain_instance(self._membership, asked.instance, asked.force)
        except ChituError as error:
            return DrainAnswer(asked.number, code=error.code, message=error.message)
        return DrainAnswer(asked.number, draining.name, draining.incarnation)

    def _ask_others(self, asker: Worker, number: int) -> None:
        others = {worker for worker in self._pool.ready() if worker is not asker}
        self._num_questions += 1
        question = _Question(asker, number, others, time.monotonic() + ANSWER_S)
        self._questions[self._num_questions] = question
        self._pool.send_to(others, ReportAsked(self._num_questions))
        if not others:
            self._answer(self._num_questions, question)

    def _note_reported(self, number: int, question: _Question, worker: Worker) -> None:
        question.waiting.discard(worker)
        if not question.waiting:
            self._answer(number, question)

    def _answer(self, number: int, question: _Question) -> None:
        del self._questions[number]
        others = (worker.report for worker in self._pool.ready() if worker is not question.asker)
        reports = (*(report for report in others if report is not None), self._ended.report())
        question.asker.send(RecordReply(question.number, reports, self._membership.metrics()))


class _ToAll:
    """`MembershipListener` that tells every API process."""

    def __init__(self, broadcast: Callable[[Wire], None]) -> None:
        self._broadcast = broadcast

    def on_joined(self, instance: InstanceInfo) -> None:
        self._broadcast(InstanceJoined(instance))

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        self._broadcast(InstanceLost(instance, reason, has_died))

    def on_view(self, view: ClusterView) -> None:
        self._broadcast(view)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._broadcast(heartbeat)

    def on_request_failed(self, failed: RequestFailed) -> None:
        """Whose room it is only its API process knows; the others ignore it."""
        self._broadcast(failed)
