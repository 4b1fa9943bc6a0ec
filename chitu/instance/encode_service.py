"""`EncodeService`: composition root of an E process. Sockets and threads, no policy.

The E's part of what `pd_service.py` does for P and D: it has no pool, no requests, and one role for life. Threads:
`step` (the scheduler and all encoding), `comm` (sockets, protocol), `transfer-N` (writes to P), `heartbeat` (lease and
load), and those of its image source. The main thread builds everything, then waits for a signal or a drain.
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
from chitu.config.schema import DeadlineConfig
from chitu.errors import RankTaken
from chitu.instance.comm import CommLoop
from chitu.instance.encoding import EncodeScheduler
from chitu.instance.heartbeats import Heartbeats, InstanceReport, OnMember
from chitu.instance.image_thread import ImageThread
from chitu.instance.weights import join_orders
from chitu.kv_transfer.kv_manager import KVManager
from chitu.kv_transfer.pulling import EncodeSender
from chitu.net.threads import ServiceThread, Waker
from chitu.protocol import ClusterView, InstanceInfo, Leave, LinkAck, SchedulerMessage
from chitu.protocol.weights import WeightsOrder

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""How long an idle step thread sleeps at most."""
QUIET_S = 1.0
"""Time without work after which an E that drains leaves: by then each P has seen that it drains."""


class EncodeService:
    """An E process. `comm` is bound already, and the tower is loaded. Call `warm_up`, then `run`."""

    def __init__(
        self,
        deadlines: DeadlineConfig,
        info: InstanceInfo,
        comm: CommLoop,
        transfer: KVManager[EncodeSender],
        scheduler: EncodeScheduler,
        waker: Waker,
        prepare_step_thread: Callable[[], None],
        images: ImageThread | None,
    ) -> None:
        """`prepare_step_thread` is called first on the step thread. `images`: the scheduler's source; None if prompts
        cannot have any."""
        self._deadlines = deadlines
        self._info = msgspec.structs.replace(info, control_port=transfer.control_port, ways=transfer.ways)
        self._comm = comm
        self._transfer = transfer
        self._scheduler = scheduler
        self._waker = waker
        self._prepare = prepare_step_thread
        self._images = images
        self._stop, self._stop_step = threading.Event(), threading.Event()
        self._signalled, self._skip_drain = threading.Event(), threading.Event()
        self.was_drained = False
        """Whether an operator drained this instance before any signal."""
        self.rank_was_taken = False
        """Whether the router refused this instance because another process holds its rank."""
        self._exit_code = 0
        self._cache_flush = [0 for _ in comm.routers]
        self._orders = [WeightsOrder() for _ in comm.routers]
        """What the newest view of each router wants of the weights."""
        self._heard: set[int] = set()
        """Routers that are not silent."""
        self._heartbeats = Heartbeats(comm, deadlines, self)
        scheduler.weights.on_news = self._on_weights
        self._step = ServiceThread("step", self._step_loop)
        transfer.side.on_order = scheduler.put_order

    # ----------------------------------------------------------------------------------------------------- main thread

    def warm_up(self) -> None:
        """Start the step thread. An exception in it ends the process."""
        self._step.start()

    def run(self, on_member: OnMember = lambda info, is_member: None) -> int:
        """Serve until `stop`, a refusal or a drain, and return the exit code. `on_member`: as in
        `Heartbeats.start`."""
        comm = ServiceThread("comm", lambda: self._comm.run(self._info, self._transfer.side, self, self._deadlines))
        self._transfer.start()
        if self._images is not None:
            self._images.start()
        comm.start()
        self._heartbeats.start(on_member)
        self._stop.wait()
        self._finish_running()
        self._stop_step.set()
        self._waker.wake()
        self._heartbeats.end()
        self._step.join(timeout=2.0)
        info, reason = self._info, "stopped" if self._signalled.is_set() else "drained"
        self._comm.leave(Leave(info.role, info.engine_rank, info.incarnation, reason))
        if self._images is not None:
            self._images.close()
        comm.join(timeout=2.0)
        self._heartbeats.join(timeout=2.0)
        self._transfer.close()
        if self._step.is_alive():
            logger.warning("shutting down without waiting for the images that are encoded")
            logging.shutdown()
            os._exit(self._exit_code)
        return self._exit_code

    def stop(self) -> None:
        """Drain for at most `drain_s`, then end. Safe in a signal handler; a second call ends without draining."""
        if self._signalled.is_set():
            self._skip_drain.set()
        self._signalled.set()
        self._stop.set()

    def _finish_running(self) -> None:
        """Finish the orders that are here and refuse new ones, within `drain_s` after a signal."""
        if self._exit_code:
            return
        self._scheduler.drain()
        if self._signalled.is_set() and self._scheduler.is_idle:
            return
        logger.info("draining %s", "after a signal" if self._signalled.is_set() else "at an operator's request")
        self._comm.contacts.drain()
        clock = RealClock()
        busy_s, end_s = clock.monotonic(), math.inf
        while (now_s := clock.monotonic()) < end_s and not self._skip_drain.is_set():
            if self._signalled.is_set():
                end_s = min(end_s, now_s + self._deadlines.drain_s)
            if not self._scheduler.is_idle:
                busy_s = now_s
            elif now_s - busy_s >= QUIET_S:
                return
            time.sleep(0.02)  # as in `PDSchedulerService`

    # ----------------------------------------------------------------------------------------------------- step thread

    def _step_loop(self) -> None:
        self._prepare()
        while not self._stop_step.is_set():
            if not self._scheduler.step():
                self._waker.wait(IDLE_WAIT_S)
        self._scheduler.close()

    def _on_weights(self) -> None:
        """Report the weights that are read or serve here at once."""
        self._comm.contacts.weights = self._scheduler.weights.serves
        self._heartbeats.soon()

    # ----------------------------------------------------------------------------------------------------- comm thread

    def on_request(self, message: SchedulerMessage, /) -> None:
        logger.warning("ignored a %s: an E takes no requests", type(message).__name__)

    def on_link_ack(self, ack: LinkAck) -> None:
        pass

    def on_view(self, view: ClusterView, router: int) -> None:
        if view.cache_flush not in (0, self._cache_flush[router]):
            self._cache_flush[router] = view.cache_flush
            self._scheduler.flush()
        self._orders[router] = view.weights
        self._heard.add(router)
        self._order_weights()

    def _order_weights(self) -> None:
        self._scheduler.weights.set_order(join_orders(self._orders, self._heard))
        self._waker.wake()

    def on_new_router(self, router: int) -> None:
        pass

    def on_silence(self, router: int) -> None:
        """Count no more what this router wants of the weights (`CommOwner`)."""
        self._heard.discard(router)
        self._order_weights()

    def on_missing(self) -> None:
        pass

    def on_drain(self, becomes: str) -> None:
        self.was_drained = not self._signalled.is_set()  # else the view reflects our own Drain
        self._stop.set()

    def on_stay(self) -> None:
        pass

    def on_refused(self, code: str, message: str) -> None:
        logger.error("the router refused %s: %s (%s)", self._info.name, message, code)
        self.rank_was_taken = code == RankTaken.code
        self._exit_code = 1
        self._stop.set()

    # ------------------------------------------------------------------------------------------------ heartbeat thread

    def report(self) -> InstanceReport:
        comm, scheduler, transfer = self._comm, self._scheduler, self._transfer
        load = msgspec.structs.replace(
            scheduler.load,
            unknown_frames=comm.bad_frames + comm.unknown_frames + transfer.unknown_frames,
            paths=transfer.side.path_loads,
        )
        return InstanceReport(self._info, load, scheduler.weights)

    def num_turns(self) -> int:
        return self._scheduler.turns

    def on_interval(self) -> None:
        pass

    def on_silent_router(self, router: int, silence_s: float) -> None:
        pass

    def is_leaving(self) -> bool:
        return self._stop.is_set()

    def on_abandoned(self) -> None:
        self._exit_code = 1
        self._stop.set()
