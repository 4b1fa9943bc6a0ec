"""An API process of a router that is several: `python -m chitu.serve.worker PARENT_PID FEED CHANNEL`.

Started by `WorkerPool` alone, with two inherited socket pairs: the feed (what happens in the cluster, questions and
answers) and the channel that connections come through. It has a token port, a `PDRequestRouter` and the HTTP API, and
knows of the cluster what the feed says. It ends when it is told to, or with the process that started it; a signal is
passed on, because the router ends as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
import uvloop

from chitu.clock import RealClock
from chitu.config.cluster_key import cluster_key_of
from chitu.config.schema import Topology
from chitu.config.topology import router_ports
from chitu.errors import ChituError, Internal, from_code
from chitu.http.cluster_source import Draining, Loads, RouterRecord, report_of
from chitu.http.limits import HTTPLimits
from chitu.http.served_model import ServedModel
from chitu.http.server import HTTPServer
from chitu.launch.process import die_with_parent
from chitu.log import setup_logging
from chitu.net.curve import derive, make_context
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import ClusterView, Heartbeat, LoadReport, RequestFailed
from chitu.router.metrics import CoordinationMetrics
from chitu.serve.api_endpoint import ApiEndpoint, settle_memory, share_of
from chitu.serve.connection_handover import ConnectionIntake
from chitu.serve.lifetime import Ending, keep_ticking
from chitu.serve.worker_feed import (
    ConnectionsClosed,
    DrainAnswer,
    DrainAsked,
    EndAsked,
    EndWorkers,
    Feed,
    FlushAsked,
    InstanceJoined,
    InstanceLost,
    RecordAsked,
    RecordReply,
    ReportAsked,
    ToWorker,
    Welcome,
    WorkerReady,
    WorkerStartFailed,
    to_worker_codec,
)
from chitu.types import Role

log = logging.getLogger(__name__)

REPORT_S = 0.5
ANSWER_S = 2.0
"""Longest wait for the process that coordinates."""
EXIT_NOT_STARTED = 2
EXIT_ORPHAN = 71


class RemoteCluster:
    """`ClusterSource` of an API process: the view and loads as the feed brought them, the rest by asking."""

    def __init__(self, router: PDRequestRouter, index: int, feed: Feed[ToWorker], ports: Mapping[str, int]) -> None:
        """`ports`: of the membership, by short key name."""
        self._router = router
        self._index = index
        self._feed = feed
        self._ports = ports
        self._loads: dict[tuple[Role, int], LoadReport] = {}
        self._answers: dict[int, asyncio.Future[RecordReply | DrainAnswer]] = {}
        self._num_questions = 0
        self.view = ClusterView(0, 0, ())

    def loads(self) -> Loads:
        return self._loads

    def ports(self) -> Mapping[str, int]:
        return self._ports

    async def version(self) -> int:
        return sum(worker.version for worker in (await self.record()).workers)

    async def record(self) -> RouterRecord:
        """As it is when this is called or later. Without the others' share where nobody answers."""
        number = self._next_number()
        try:
            reply = await self._ask(number, RecordAsked(number))
        except TimeoutError:
            log.warning("the coordinating process does not answer")
            return RouterRecord((report_of(self._router, self._index),), CoordinationMetrics())
        assert isinstance(reply, RecordReply)
        workers = sorted((report_of(self._router, self._index), *reply.workers), key=lambda worker: worker.index)
        return RouterRecord(tuple(workers), reply.coordination)

    async def drain(self, instance: str, force: bool) -> Draining:
        number = self._next_number()
        try:
            reply = await self._ask(number, DrainAsked(number, instance, force))
        except TimeoutError:
            raise Internal("the coordinating process does not answer") from None
        assert isinstance(reply, DrainAnswer)
        if reply.code:
            raise from_code(reply.code, reply.message)
        return Draining(reply.name, reply.incarnation)

    async def flush_caches(self) -> None:
        self._feed.send(FlushAsked())

    def take(self, message: ToWorker) -> None:
        """A message of the feed that is about the cluster."""
        router = self._router
        if isinstance(message, Heartbeat):
            self._loads[message.role, message.engine_rank] = message.load
            router.on_heartbeat(message)
        elif isinstance(message, ClusterView):
            self.view = message
            members = {(instance.role, instance.engine_rank) for instance in message.instances}
            self._loads = {key: self._loads.get(key, LoadReport()) for key in members}
            router.on_view(message)
        elif isinstance(message, RequestFailed):
            router.on_request_failed(message)
        elif isinstance(message, InstanceJoined):
            router.on_joined(message.instance)
        elif isinstance(message, InstanceLost):
            router.on_lost(message.instance, message.reason, message.has_died)
        elif isinstance(message, ReportAsked):
            self._feed.send(report_of(router, self._index, message.number))
        elif isinstance(message, RecordReply | DrainAnswer):
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def report(self) -> None:
        """Unasked: a sign of life, and what is left of this process if it dies."""
        self._feed.send(report_of(self._router, self._index))

    def _next_number(self) -> int:
        self._num_questions += 1
        return self._num_questions

    async def _ask(self, number: int, question: RecordAsked | DrainAsked) -> RecordReply | DrainAnswer:
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._feed.send(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                reply: RecordReply | DrainAnswer = await answer
                return reply
        finally:
            del self._answers[number]


class WorkerProcess:
    """Everything that the process holds, on its loop."""

    def __init__(self, welcome: Welcome, feed: Feed[ToWorker], channel: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._feed = feed
        topology = _with_share(welcome.topology, welcome.index)
        self._deadlines = topology.dp_config.router.pd_disaggregation.deadlines
        handler = setup_logging(
            f"router.{welcome.index}", topology.log.level, topology.log.modules, topology.log.format, deferred=True
        )
        self._flush_log: Callable[[], None] = handler.flush
        model = ServedModel.load(topology.model, welcome.created_s)
        secrets = derive(cluster_key_of(topology))
        context = make_context(secrets)

        named = router_ports(welcome.topology.dp_config.router)
        ports = {key.rpartition(".")[2]: port for key, port in named.items()}

        def cluster_of(router: PDRequestRouter) -> RemoteCluster:
            self.cluster = RemoteCluster(router, welcome.index, feed, ports)
            return self.cluster

        me = (welcome.index, welcome.incarnation)
        self._api = ApiEndpoint(topology, model, context, RealClock(), cluster_of, me, secrets)
        limits = HTTPLimits(max_total_body_bytes=topology.dp_config.router.max_total_body_bytes)
        self._http = HTTPServer(self._api.app, None, [("x-chitu-worker", str(welcome.index))], limits)
        self._intake = ConnectionIntake(
            self._loop, channel, self._http, lambda count: feed.send(ConnectionsClosed(count))
        )
        self._ending = Ending()
        self._next_report_s = 0.0

    async def run(self) -> None:
        """Serve until told to end; then drain and close."""
        self._api.start()
        keep_ticking(self._api.tick, self._report, self._flush_log)
        await self._http.start()
        self._intake.start()
        settle_memory()
        self._feed.send(WorkerReady(self._api.token_port))
        await self._ending.is_due.wait()
        self._intake.stop()
        await self._api.drain(self._deadlines.drain_s, self._ending)
        await self._http.stop(1.0)
        self._api.close()
        self._flush_log()
        await self._feed.finish()

    async def flush_caches(self) -> None:
        self._feed.send(FlushAsked())

    def take(self, message: ToWorker) -> None:
        """A message of the feed."""
        if isinstance(message, EndWorkers):
            self._ending.ask()
        else:
            self.cluster.take(message)

    def _report(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + REPORT_S
            self.cluster.report()


def _with_share(topology: Topology, index: int) -> Topology:
    router = share_of(topology.dp_config.router, index)
    return msgspec.structs.replace(topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router))


def _on_orphaned() -> None:
    """The coordinating process is gone, and with it whoever could say what happens in the cluster."""
    os._exit(EXIT_ORPHAN)


async def _serve(feed_fd: int, channel_fd: int) -> int:
    inbox: asyncio.Queue[ToWorker] = asyncio.Queue()
    take: Callable[[ToWorker], None] = inbox.put_nowait
    feed = await Feed.open(socket.socket(fileno=feed_fd), to_worker_codec, lambda message: take(message), _on_orphaned)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, feed.send, EndAsked())
    channel = socket.socket(fileno=channel_fd)
    channel.setblocking(False)
    welcome = await inbox.get()
    assert isinstance(welcome, Welcome), welcome
    try:
        process = WorkerProcess(welcome, feed, channel)
    except ChituError as error:
        feed.send(WorkerStartFailed(error.message))
        await feed.finish()
        return EXIT_NOT_STARTED
    # What came while the model was loaded, then everything as it comes.
    while not inbox.empty():
        process.take(inbox.get_nowait())
    take = process.take
    await process.run()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parent, feed, channel = (int(word) for word in (sys.argv[1:] if argv is None else argv))
    die_with_parent(parent)
    return uvloop.run(_serve(feed, channel))


if __name__ == "__main__":
    sys.exit(main())
