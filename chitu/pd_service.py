"""`PDSchedulerService`: composition root of a P, D or unified process. Sockets and threads, no policy.

Threads: `step` (the scheduler and all computing), `comm` (sockets, protocol), `transfer-N` (P's writes), `tiers`
(copies between pool and host memory, if `cache.host_bytes` is set) and `heartbeat` (lease and load). The main thread
builds everything, then waits for a signal. Ports are bound before the model loads, so a clash is found within a second.
The instance joins the router after the warm-up, so no request arrives before it can be served.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

import msgspec

from chitu.clock import RealClock
from chitu.errors import ChituError, ConfigError, RankTaken, TransferFailed
from chitu.instance.build import Build
from chitu.instance.comm import CommLoop, HeartbeatSocket, SilenceWatch
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.requests import FailureReports
from chitu.instance.sequences import Inbox
from chitu.instance.token_manager import TokenManager
from chitu.instance.weights import join_orders
from chitu.net.sockets import PushSocket
from chitu.net.threads import ServiceThread, Waker
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    ClusterView,
    Heartbeat,
    InstanceInfo,
    Leave,
    LinkAck,
    RequestFailed,
    encode,
)
from chitu.protocol.weights import WeightsOrder

logger = logging.getLogger(__name__)

SHORTEST_BEAT_S = 0.05
"""Shortest time between two heartbeats, however much there is to report."""
IDLE_WAIT_S = 0.1
"""How long an idle step thread sleeps before it checks its queue deadlines."""
QUIET_S = 1.0
"""Time without work after which a drained instance leaves: by then no request from the router is in flight."""
SIGNAL_QUIET_S = 0.5
"""Time without work after which an instance leaves on a signal: by then the router has read the last tokens. Leave
takes another connection; if it arrived before these tokens, it would fail a request that has just finished."""


class PDSchedulerService:
    """A P, D or unified process. `comm` is bound already; `engine` is loaded. Call `warm_up`, then `run`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        info: InstanceInfo,
        comm: CommLoop,
        engine: LoadedEngine,
        waker: Waker,
        build: Build,
    ) -> None:
        """`info` describes the process, without what depends on its composition, which `build` makes. `waker` wakes the
        step thread."""
        self._deadlines = settings.deadlines
        self._name = settings.name
        self._comm = comm
        self._engine = engine
        self._waker = waker
        self._stop = threading.Event()
        """Set by a signal, a refusal or a drain: `run` ends."""
        self._signalled = threading.Event()
        self._skip_drain = threading.Event()
        self.was_drained = False
        """Whether an operator drained this instance before any signal."""
        self.rank_was_taken = False
        """Whether the router refused this instance because another process holds its rank."""
        self._step = ServiceThread("step", self._step_loop)
        self._is_warm = threading.Event()
        self._stop_step = threading.Event()
        self._exit_code = 0
        self._problem: ConfigError | None = None
        """Why the model cannot be served, as its warm-up has found."""
        self._failures = FailureReports(comm.send_stats)
        self._heartbeat_wake = Waker()
        """Sends the next heartbeat at once."""
        self._token_sockets = [
            PushSocket(comm.context, router.address.host, router.address.token_port)
            for router in comm.routers
            if router.address.token_port
        ]
        self._tokens = TokenManager(
            info.incarnation,
            *(socket.send for socket in self._token_sockets),
            open_port=self._open_token_port,
            repeat_s=self._deadlines.heartbeat_interval_s,
            patience_s=self._deadlines.lease_s,
        )
        core = InstanceCore(
            settings, engine, self._tokens, self._report_failure, RealClock(), comm.tracer, Inbox(waker)
        )
        composition = build(core)
        self._transfer = composition.transfer
        self._scheduler = PDScheduler(core, composition.role)
        self._scheduler.weights.on_news = self._on_weights
        self.on_request = self._scheduler.submit
        self._cache_flush = [0 for _ in comm.routers]
        """Number of the last cache flush that a view of each router requested."""
        self._orders = [WeightsOrder() for _ in comm.routers]
        """What the newest view of each router wants of the weights."""
        self._info = msgspec.structs.replace(info, control_port=self._transfer.control_port, ways=self._transfer.ways)

    # ----------------------------------------------------------------------------------------------------- main thread

    def warm_up(self) -> None:
        """Start the step thread and wait for its warm-up, which runs there as libraries keep handles and plans for each
        thread. Raise ConfigError if the model cannot be served; any other exception in it ends the process."""
        self._step.start()
        self._is_warm.wait()
        if self._problem is not None:
            raise self._problem

    def run(self, on_member: Callable[[bool], None] = lambda is_member: None) -> int:
        """Serve until `stop`, a refusal or a drain, and return the exit code. By then no thread computes, writes or
        owns an open socket of the protocol.

        `on_member` is called, on the heartbeat thread, when this instance has become a member that takes requests, and
        when it is none any more."""
        step = self._step
        threads = [
            ServiceThread("comm", self._comm_loop),
            ServiceThread("heartbeat", lambda: self._heartbeat_loop(on_member)),
        ]
        self._engine.tiers.start(ServiceThread)
        self._transfer.start()
        for thread in threads:
            thread.start()
        self._stop.wait()
        self._finish_running()
        self._stop_step.set()
        self._waker.wake()
        self._heartbeat_wake.wake()
        step.join(timeout=2.0)
        if self._comm.tracer is not None:
            self._comm.tracer.close()
        self._leave()
        for thread in threads:
            thread.join(timeout=2.0)
        self._engine.tiers.close()  # its copies may need the lanes to other ranks
        self._transfer.close()
        if step.is_alive():
            # A forward pass that exceeds its grace period still uses the model: do not finalize the interpreter.
            logger.warning("shutting down without waiting for the running step")
            logging.shutdown()
            os._exit(self._exit_code)
        self._engine.close()
        return self._exit_code

    def stop(self) -> None:
        """Drain for at most `drain_s`, then end. Safe in a signal handler; a second call ends without draining."""
        if self._signalled.is_set():
            self._skip_drain.set()
        self._signalled.set()
        self._stop.set()

    def _finish_running(self) -> None:
        """Finish the running requests and accept no new ones: within `drain_s` after a signal, without a limit if
        an operator drains the instance (each request has its own deadlines). A silent peer delays the end by
        `transfer_s`."""
        if self._exit_code or (self._signalled.is_set() and self._scheduler.is_idle):
            return
        logger.info("draining %s", "after a signal" if self._signalled.is_set() else "at an operator's request")
        self._comm.drain()
        clock = RealClock()
        now_s = busy_s = clock.monotonic()
        end_s = math.inf
        while now_s < end_s and not self._skip_drain.is_set():
            time.sleep(0.02)  # a signal handler may not set what its own thread waits for: that holds the lock at times
            now_s = clock.monotonic()
            is_signalled = self._signalled.is_set()
            if is_signalled:
                end_s = min(end_s, now_s + self._deadlines.drain_s)
            if not self._scheduler.is_done:
                busy_s = now_s
            elif self._scheduler.is_idle:
                if now_s - busy_s >= (SIGNAL_QUIET_S if is_signalled else QUIET_S):
                    return
            elif now_s - busy_s >= self._deadlines.transfer_s:
                logger.warning("leaving without an answer from a peer that may still access pages of this instance")
                return

    def _leave(self) -> None:
        info = self._info
        reason = "stopped" if self._signalled.is_set() else "drained"
        self._comm.leave(Leave(info.role, info.engine_rank, info.incarnation, reason))

    # ----------------------------------------------------------------------------------------------------- step thread

    def _step_loop(self) -> None:
        self._engine.prepare_step_thread()
        try:
            self._engine.executor.warmup()
        except ConfigError as error:
            self._problem = error
            self._is_warm.set()
            return
        self._is_warm.set()  # not behind any other error, which ends the process
        while not self._stop_step.is_set():
            if not self._scheduler.step():
                self._waker.wait(IDLE_WAIT_S)
        self._scheduler.close()
        for socket in self._token_sockets:
            socket.close()

    def _open_token_port(self, port: int) -> PushSocket:
        return PushSocket(self._comm.context, self._comm.routers[0].address.host, port)

    def _on_weights(self) -> None:
        """Report the weights that are read or serve here at once."""
        self._comm.weights = self._scheduler.weights.serves
        self._heartbeat_wake.wake()

    def _report_failure(self, room: bytes, error: ChituError) -> None:
        info = self._info
        self._failures.add(
            RequestFailed(info.role, info.engine_rank, info.incarnation, room, error.code, error.message)
        )
        if isinstance(error, TransferFailed):
            self._heartbeat_wake.wake()  # it may name a D that gets no writes now: a retry must not go there again

    # ----------------------------------------------------------------------------------------------------- comm thread

    def _comm_loop(self) -> None:
        self._comm.run(self._info, self._transfer.side, self, self._deadlines)

    def on_link_ack(self, ack: LinkAck) -> None:
        self._tokens.take_ack(ack)
        self._waker.wake()

    def on_view(self, view: ClusterView, router: int) -> None:
        if view.cache_flush not in (0, self._cache_flush[router]):
            self._cache_flush[router] = view.cache_flush
            self._scheduler.flush_cache()
        self._orders[router] = view.weights
        self._scheduler.weights.set_order(join_orders(self._orders))
        self._waker.wake()

    def on_new_router(self, router: int) -> None:
        """Cancel all requests of the one that it replaced (`CommOwner`)."""
        self._scheduler.cancel_all(router)

    def on_worker_gone(self, incarnation: int) -> None:
        """Cancel the requests of an API process (`CommOwner`)."""
        self._scheduler.cancel_worker(incarnation)

    def on_missing(self) -> None:
        """Report a lost request at once (`CommOwner`)."""
        self._heartbeat_wake.wake()

    def on_drain(self) -> None:
        self.was_drained = not self._signalled.is_set()  # else the view reflects our own Drain
        self._stop.set()

    def on_refused(self, code: str, message: str) -> None:
        logger.error("the router refused %s: %s (%s)", self._name, message, code)
        self.rank_was_taken = code == RankTaken.code
        self._exit_code = 1
        self._stop.set()

    # ---------------------------------------------------------------------------------------------------- other threads

    def _heartbeat_loop(self, on_member: Callable[[bool], None]) -> None:
        info = self._info
        clock = RealClock()
        sockets = [HeartbeatSocket(self._comm.context, router.address, clock) for router in self._comm.routers]
        watch = SilenceWatch(self._deadlines, len(sockets))
        was_member = False
        due_s = clock.monotonic() + self._deadlines.heartbeat_interval_s
        while not self._stop_step.wait(SHORTEST_BEAT_S):
            self._heartbeat_wake.wait(max(0.0, due_s - clock.monotonic()))
            if self._stop_step.is_set():
                break
            if clock.monotonic() >= due_s:
                due_s = clock.monotonic() + self._deadlines.heartbeat_interval_s
                self._look(watch)
                for failed in self._failures.repeats():
                    self._comm.send_stats(failed)
            if (is_member := self._comm.joined and not self._stop.is_set()) != was_member:
                was_member = is_member
                on_member(is_member)
            load = msgspec.structs.replace(
                self._scheduler.load,
                unknown_frames=self._comm.bad_frames + self._comm.unknown_frames + self._transfer.unknown_frames,
                suspended=self._transfer.side.suspended_ranks,
                paths=self._transfer.side.path_loads,
            )
            message = Heartbeat(
                info.role,
                info.engine_rank,
                info.incarnation,
                load,
                # Evaluated in this order: `acks` covers all messages that those reads took.
                reads=self._comm.num_reads,
                acks=self._comm.received.acks(),
                silent=self._transfer.side.silent_prefills,
                weights=self._scheduler.weights.report,
                routers=self._comm.joined_routers,
            )
            frame = encode(message)
            for socket in sockets:
                socket.send(frame, self._deadlines.lease_s)
        for socket in sockets:
            socket.close()

    def _look(self, watch: SilenceWatch) -> None:
        for router, silence_s in watch.look(self._comm.num_views, self._scheduler.turns):
            logger.error("nothing received from the router for %.1f s: ending its requests", silence_s)
            self._scheduler.end_all(silence_s, router)
        if self._info.yields and watch.is_abandoned and not self._stop.is_set():
            logger.error("nothing received from the router for %.0f s: this added instance ends", watch.silence_s)
            self._exit_code = 1
            self._stop.set()
