"""`PDSchedulerService`: composition root of a P, D or unified process. Sockets and threads, no policy.

Threads: `step` (the scheduler and all computing), `comm` (sockets, protocol), `transfer-N` (P's writes), `tiers`
(copies between pool and host memory, if `cache.host_bytes` is set), `images` (files and patches of images, if the model
has vision), `kv-events` (if it publishes them), `weights-share` (if it sends its weights to instances that load) and
`heartbeat` (lease and load). The main thread builds everything,
then waits for a signal. Ports are bound before the model loads, so a clash is found within a second. The instance joins
the router after the warm-up, so no request arrives before it can be served.

What the process is to others is a `_Life`: role, rank and incarnation, with the composition that serves them. It ends
with the process, or when the instance changes its role. Then the next one begins over the same engine, sockets and
registered memory: the step thread builds it between two turns, once nothing of the old one is left, here or at a peer;
then the comm thread takes it and joins with it. Every thread reads `_life` anew each time.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from chitu.clock import RealClock
from chitu.errors import ChituError, ConfigError, Internal, RankTaken, RoleChanged, TransferFailed
from chitu.instance.build import Build
from chitu.instance.comm import CommLoop
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.heartbeats import Heartbeats, InstanceReport, OnMember
from chitu.instance.image_source import NoImages
from chitu.instance.image_thread import ImageThread
from chitu.instance.requests import FailureReports
from chitu.instance.role_change import QUIET_S, ChangeStep, QuietTime, RoleChange, next_life
from chitu.instance.sequences import Inbox
from chitu.instance.token_manager import TokenManager
from chitu.instance.weights import join_orders
from chitu.instance.weights_share import WeightsShare
from chitu.kv_transfer.alone import PullingAlone
from chitu.kv_transfer.kv_manager import KVManager, TransferSide
from chitu.kv_transfer.pulling import PullingSender
from chitu.log import rename_process
from chitu.net.sockets import PushSocket
from chitu.net.threads import ServiceThread, Waker
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    ClusterView,
    DecodeRequest,
    InstanceInfo,
    Leave,
    LinkAck,
    RequestFailed,
    SchedulerMessage,
)
from chitu.protocol.profile import ProfileOrder
from chitu.protocol.weights import WeightsOrder
from chitu.types import Role, instance_name, place_of

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1
"""How long an idle step thread sleeps before it checks its queue deadlines."""
SIGNAL_QUIET_S = 0.5
"""Time without work after which an instance leaves on a signal: by then the router has read the last tokens. Leave
takes another connection; if it arrived before these tokens, it would fail a request that has just finished."""
CHANGE_TIMEOUT_S = 30.0
"""Time for a thread to take the next life. It is idle, so this takes milliseconds."""


@dataclass(slots=True, frozen=True)
class _Life:
    info: InstanceInfo
    tokens: TokenManager
    scheduler: PDScheduler
    transfer: KVManager[TransferSide]


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
        begin_end: Callable[[bool], Callable[[], bool | None]] | None = None,
        images: ImageThread | None = None,
        share: WeightsShare | None = None,
    ) -> None:
        """`info` describes the process, without what depends on its composition, which `build` makes. `waker` wakes the
        step thread, as `images` does. `begin_end`: that of its group (`member_group.py`), if it is in one. `images`:
        None if requests have none here. `share`: None if it sends its weights to nobody."""
        self._deadlines = settings.deadlines
        self._comm = comm
        comm.on_profile = self._on_profile
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
        self._heartbeats = Heartbeats(comm, self._deadlines, self)
        self._token_sockets: list[PushSocket] = []
        """To the token ports of the routers; none as long as it was only a P that draws no first tokens."""
        self._build = build
        self._begin_end = begin_end
        self._images = images
        self._share = share
        tokens = self._make_tokens(info)
        self._core = core = InstanceCore(
            *(settings, engine, tokens, self._report_failure, RealClock(), comm.tracer),
            image_source=images or NoImages(),
            inbox=Inbox(waker),
        )
        core.weights.on_news = self._on_weights
        self._life = self._make_life(info)
        self._becomes = ""
        """What a router has asked this instance to become (`InstanceInfo.becomes`), until it has."""
        self._next: InstanceInfo | None = None
        """Life that the step thread is to begin."""
        self._has_begun = threading.Event()
        self._cache_flush = [0 for _ in comm.routers]
        """Number of the last cache flush that a view of each router requested."""
        self._orders = [WeightsOrder() for _ in comm.routers]
        """What the newest view of each router wants of the weights."""
        self._heard: set[int] = set()
        """Indices of the routers that are not silent."""
        self._joined: tuple[int, ...] = ()
        """`joined_routers` of the comm thread at the last view."""

    def _make_tokens(self, info: InstanceInfo) -> TokenManager:
        if not self._token_sockets and (info.role is not Role.PREFILL or self._engine.executor.info.samples):
            addresses = [router.address for router in self._comm.routers]
            self._token_sockets = [
                PushSocket(self._comm.context, a.host, a.token_port) for a in addresses if a.token_port
            ]
        return TokenManager(
            info.incarnation,
            *(socket.send for socket in self._token_sockets),
            repeat_s=self._deadlines.heartbeat_interval_s,
            patience_s=self._deadlines.lease_s,
        )

    def _make_life(self, info: InstanceInfo) -> _Life:
        composition = self._build(self._core, info)
        transfer, engine = composition.transfer, self._engine
        if composition.grammars is not None:
            engine.grammars = composition.grammars
        engine.finished_pages = composition.finished_pages
        if not composition.caches_prefixes:
            engine.cache.stop_caching()
        info = msgspec.structs.replace(
            info,
            control_port=transfer.control_port,
            image_port=self._comm.image_port if isinstance(transfer.side, PullingSender | PullingAlone) else 0,
            ways=transfer.ways,
            computes=composition.role.takes != (DecodeRequest,),
        )
        return _Life(info, self._core.tokens, PDScheduler(self._core, composition.role), transfer)

    @property
    def _scheduler(self) -> PDScheduler:
        return self._life.scheduler

    # ----------------------------------------------------------------------------------------------------- main thread

    def warm_up(self) -> None:
        """Start the step thread and wait for its warm-up, which runs there as libraries keep handles and plans for each
        thread. Raise ConfigError if the model cannot be served; any other exception in it ends the process."""
        self._step.start()
        if self._images is not None and self._life.info.role is not Role.DECODE:
            self._images.load()
        self._is_warm.wait()
        if self._problem is not None:
            raise self._problem

    def run(self, on_member: OnMember = lambda info, is_member: None) -> int:
        """Serve until `stop`, a refusal or a drain, and return the exit code. By then no thread computes, writes or
        owns an open socket of the protocol.

        `on_member` is called, on the heartbeat thread, when this instance has become a member that takes requests, and
        when it is none any more, with its record."""
        step = self._step
        comm = ServiceThread("comm", self._comm_loop)
        self._engine.tiers.start(ServiceThread)
        if self._engine.events is not None:
            self._engine.events.start(ServiceThread)
        if self._images is not None:
            self._images.start()
        self._life.transfer.start()
        if self._share is not None:
            self._share.start(ServiceThread, lambda: self._scheduler.is_idle)
        comm.start()
        self._heartbeats.start(on_member)
        self._stop.wait()
        while not self._must_end and self._change_role():
            self._stop.wait()
        self._finish_running()
        self._await_members()
        self._stop_step.set()
        self._waker.wake()
        self._heartbeats.end()
        step.join(timeout=2.0)
        if self._comm.tracer is not None:
            self._comm.tracer.close()
        self._leave()
        if self._images is not None:
            self._images.close()
        if self._share is not None:
            self._share.close()
        comm.join(timeout=2.0)
        self._heartbeats.join(timeout=2.0)
        if self._engine.events is not None:
            self._engine.events.close()
        self._engine.tiers.close()  # its copies may need the lanes to other ranks
        self._life.transfer.close()
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
        self._comm.contacts.drain()
        clock = RealClock()
        now_s, end_s = clock.monotonic(), math.inf
        quiet = QuietTime(now_s)
        while now_s < end_s and not self._skip_drain.is_set():
            time.sleep(0.02)  # a signal handler may not set what its own thread waits for: that holds the lock at times
            now_s = clock.monotonic()
            is_signalled = self._signalled.is_set()
            if is_signalled:
                end_s = min(end_s, now_s + self._deadlines.drain_s)
            is_done = self._scheduler.is_done
            quiet_s = quiet.look(now_s, is_done)
            if is_done and self._scheduler.is_idle:
                if quiet_s >= (SIGNAL_QUIET_S if is_signalled else QUIET_S):
                    return
            elif quiet_s >= self._deadlines.transfer_s:
                logger.warning("leaving without an answer from a peer that may still access pages of this instance")
                return

    def _await_members(self) -> None:
        """Wait until the other members of the group have finished, too. Meanwhile this one is a member that drains, by
        which the routers ask the others to. It waits for none if it ends for a reason of its own, which ends them."""
        if self._begin_end is None or self._exit_code:
            return
        self._comm.contacts.drain()  # one that was idle has told nobody yet
        may_stay_away = self._begin_end(self._signalled.is_set())
        while (found := may_stay_away()) is None and not self._skip_drain.is_set():
            time.sleep(0.02)
        self.was_drained = self.was_drained and found is not False

    @property
    def _must_end(self) -> bool:
        return self._signalled.is_set() or self.was_drained or bool(self._exit_code)

    def _change_role(self) -> bool:
        """Finish the running requests, or give them back after `role_change_s`; then begin the life that a router has
        asked for, unless that router takes it back. Return False if the process is to end instead: it is asked to, or a
        peer does not answer that may write to pages of this instance, or to whose pages this one may still write."""
        info, becomes = self._life.info, self._becomes
        if not becomes:
            return self._go_on()
        name = instance_name(*place_of(becomes))
        logger.info("%s will become %s", info.name, name)
        clock = RealClock()
        began_s = now_s = clock.monotonic()
        change = RoleChange(self._deadlines, began_s)
        while (step := self._turn(change, now_s)) is not ChangeStep.BEGIN:
            if self._must_end:
                return False
            if self._becomes != becomes:
                return self._go_on()
            if step is ChangeStep.UNANSWERED:
                logger.error("a peer that may still access pages, or is still written to, does not answer: ending")
                self._exit_code = 1
                return False
            if step is ChangeStep.GIVE_BACK:
                self._scheduler.give_back(RoleChanged(f"{info.name} becomes {name}"))
            time.sleep(0.02)
            now_s = clock.monotonic()
        old, self._next, self._becomes = self._life, next_life(info, becomes), ""
        self._waker.wake()
        while not self._has_begun.wait(QUIET_S):  # a request came after all
            self._scheduler.give_back(RoleChanged(f"{info.name} becomes {name}"))
            if clock.monotonic() - now_s > CHANGE_TIMEOUT_S:
                raise Internal(f"the step thread did not begin as {name} within {CHANGE_TIMEOUT_S:g} s")
        self._has_begun.clear()
        life = self._life
        life.transfer.start()
        if not self._comm.change(life.info, life.transfer.side, CHANGE_TIMEOUT_S):
            raise Internal(f"the comm thread did not become {name} within {CHANGE_TIMEOUT_S:g} s")
        old.transfer.retire()
        logger.info("%s became %s in %.2f s", info.name, name, clock.monotonic() - began_s)
        return self._go_on()

    def _turn(self, change: RoleChange, now_s: float) -> ChangeStep:
        return change.turn(now_s, is_done=self._scheduler.is_done, is_idle=self._scheduler.is_idle)

    def _go_on(self) -> bool:
        """Serve on after a change of role, or after one that was taken back. Return True."""
        self._stop.clear()
        if self._becomes or self._must_end:  # meanwhile
            self._stop.set()
        return True

    def _leave(self) -> None:
        info = self._life.info
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
        lockstep, profiling = self._engine.lockstep, self._engine.profiling
        while not self._stop_step.is_set() or (lockstep is not None and lockstep.must_step):
            is_busy = self._scheduler.step()
            if profiling.is_due:
                profiling.turn(is_busy)
            if self._next is not None and self._scheduler.is_idle:
                self._begin(self._next)
            elif not is_busy:
                self._waker.wait(IDLE_WAIT_S)
        profiling.close()
        self._scheduler.close()
        for socket in self._token_sockets:
            socket.close()

    def _begin(self, info: InstanceInfo) -> None:
        """End the present life, of which nothing is left, and begin another one. What came for the old one meanwhile is
        lost: the router takes it for lost with the old incarnation."""
        self._scheduler.close()
        core = self._core
        core.tokens, core.inbox = self._make_tokens(info), Inbox(self._waker)
        core.settings = replace(core.settings, name=info.name)
        if core.tracer is not None:
            core.tracer.rename(info.role, info.engine_rank, info.incarnation)
        rename_process(info.name)
        self._life, self._next = self._make_life(info), None
        self._has_begun.set()

    def _on_weights(self) -> None:
        """Report the weights that are read or serve here at once."""
        self._comm.contacts.weights = self._scheduler.weights.serves
        self._heartbeats.soon()

    def _report_failure(self, room: bytes, error: ChituError) -> None:
        info = self._life.info
        self._failures.add(
            RequestFailed(info.role, info.engine_rank, info.incarnation, room, error.code, error.message)
        )
        if isinstance(error, TransferFailed):
            self._heartbeats.soon()  # it may name a D that gets no writes now: a retry must not go there again

    # ----------------------------------------------------------------------------------------------------- comm thread

    def _comm_loop(self) -> None:
        self._comm.run(self._life.info, self._life.transfer.side, self, self._deadlines)

    def on_request(self, message: SchedulerMessage, /) -> None:
        self._life.scheduler.submit(message)

    def on_link_ack(self, ack: LinkAck) -> None:
        self._life.tokens.take_ack(ack)
        self._waker.wake()

    def on_view(self, view: ClusterView, router: int) -> None:
        if view.cache_flush not in (0, self._cache_flush[router]):
            self._cache_flush[router] = view.cache_flush
            self._scheduler.flush_cache()
        self._orders[router] = view.weights
        self._heard.add(router)
        self._order_weights()
        if self._comm.contacts.joined_routers != self._joined:  # what routers decide depends on it
            self._joined = self._comm.contacts.joined_routers
            self._heartbeats.soon()

    def _on_profile(self, order: ProfileOrder) -> None:
        info = self._life.info
        if order.incarnation == info.incarnation:
            self._engine.profiling.ask(order, info.name)
            self._waker.wake()

    def on_silence(self, router: int) -> None:
        """Count no more what this router wants of the weights (`CommOwner`)."""
        self._heard.discard(router)
        self._order_weights()

    def _order_weights(self) -> None:
        self._scheduler.weights.set_order(join_orders(self._orders, self._heard))
        self._waker.wake()

    def on_new_router(self, router: int) -> None:
        """Cancel all requests of the one that it replaced (`CommOwner`)."""
        self._scheduler.cancel_all(router)

    def on_missing(self) -> None:
        """Report a lost request at once (`CommOwner`)."""
        self._heartbeats.soon()

    def on_drain(self, becomes: str) -> None:
        self._becomes = becomes
        if not becomes:
            self.was_drained = not self._signalled.is_set()  # else the view reflects our own Drain
        self._stop.set()

    def on_stay(self) -> None:
        logger.info("%s stays what it is", self._life.info.name)
        self._becomes = ""
        self._stop.set()

    def on_refused(self, code: str, message: str) -> None:
        info = self._life.info
        logger.error("the router refused %s: %s (%s)", info.name, message, code)
        self.rank_was_taken = code == RankTaken.code and not info.former  # it was started for another one
        self._exit_code = 1
        self._stop.set()

    # ------------------------------------------------------------------------------------------------ heartbeat thread

    def report(self) -> InstanceReport:
        life, comm = self._life, self._comm
        side, scheduler = life.transfer.side, life.scheduler
        load = msgspec.structs.replace(
            scheduler.load,
            unknown_frames=comm.bad_frames + comm.unknown_frames + life.transfer.unknown_frames,
            suspended=side.suspended_ranks,
            paths=side.path_loads,
        )
        return InstanceReport(life.info, load, scheduler.weights, side.silent_prefills)

    def num_turns(self) -> int:
        return self._scheduler.turns

    def on_interval(self) -> None:
        for failed in self._failures.repeats():
            self._comm.send_stats(failed)

    def on_silent_router(self, router: int, silence_s: float) -> None:
        logger.error("nothing received from the router for %.1f s: ending its requests", silence_s)
        self._scheduler.end_all(silence_s, router)

    def is_leaving(self) -> bool:
        return self._stop.is_set()

    def on_abandoned(self) -> None:
        self._exit_code = 1
        self._stop.set()
