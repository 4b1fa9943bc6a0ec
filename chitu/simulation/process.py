"""`SimulatedProcess`: one P, D or unified process without threads and sockets, with all of its real parts.

The scheduler, the transfer's side, the contacts with the routers, the numbered links and the change of role are those
of `PDSchedulerService`. What its threads do are methods here, and a world calls them: `step` and `write`, `receive`,
`on_frame`, `take_view`, `take_reply` and `keep_in_touch` (comm), `beat` (heartbeat), `look_at_life` (main). A world is
also the network (`World`). The engine, its memory and the transports come from the world, too: `Hardware`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import ChituError, RoleChanged, TransferFailed
from chitu.instance.build import Composition, build_decode, build_prefill, build_unified
from chitu.instance.contacts import Contacts, SilenceWatch
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.image_source import ImageSource, NoImages
from chitu.instance.requests import FailureReports
from chitu.instance.role_change import QUIET_S, ChangeStep, RoleChange, next_life
from chitu.instance.sequences import Inbox
from chitu.instance.token_manager import Send, TokenManager
from chitu.instance.weights import join_orders
from chitu.kv_cache.state_sums import StateSeals
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.kv_manager import KVManager, NoPeers, TransferSide, manager_of_decode, manager_of_prefill
from chitu.kv_transfer.layout import PagedMemory, PageSums
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.transport import Transport
from chitu.net.link import LinkReceivers
from chitu.net.threads import Waker
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    ClusterView,
    CoordinationReply,
    DecodeRequest,
    Drain,
    Heartbeat,
    InstanceInfo,
    Join,
    Leave,
    LinkAck,
    RequestFailed,
    RequestPortMessage,
    SchedulerMessage,
    ViewMessage,
)
from chitu.protocol.weights import WeightsOrder
from chitu.types import Role


class World(Protocol):
    """What a process needs of the world that it is in."""

    @property
    def clock(self) -> Clock: ...

    @property
    def config(self) -> RouterConfig: ...

    @property
    def num_routers(self) -> int: ...

    def new_incarnation(self) -> int: ...

    def is_pid_alive(self, pid: int) -> bool:
        """Return whether a process of this machine runs."""
        ...

    def to_peer(self, source: SimulatedProcess, host: str, port: int, room: bytes, payload: bytes) -> None:
        """Send a frame between P and D."""
        ...

    def to_token_port(self, source: SimulatedProcess, router: int, frame: bytes) -> bool: ...

    def to_stats_port(self, source: SimulatedProcess, router: int, message: Heartbeat | RequestFailed) -> None: ...

    def to_coordination_port(self, source: SimulatedProcess, router: int, message: Join | Drain | Leave) -> None: ...

    def ask_for_view(self, source: SimulatedProcess, router: int) -> None:
        """Have a router send its whole view."""
        ...

    def on_gone(self, process: SimulatedProcess) -> None:
        """Handle that a process has ended by itself: it left, was refused, or a peer does not answer."""
        ...


@dataclass(slots=True)
class Hardware:
    """What a process has for all of its lives."""

    engine: LoadedEngine
    pool: PagedMemory
    transports: list[Transport]
    control_port: int
    """Port of the messages between P and D."""
    page_sums: PageSums | None = None
    state_seals: StateSeals | None = None
    overlap: bool = False
    images: ImageSource | None = None
    """None: a prompt with images ends with an error."""


class _Wake(Waker):
    """Wakes a step loop that is no thread."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def wake(self) -> None:
        self._process.wake()


class SimulatedProcess:
    quiet_s = QUIET_S

    def __init__(self, world: World, info: InstanceInfo, hardware: Hardware, settings: SchedulerSettings) -> None:
        """`info` describes the process, without what depends on its composition. `settings`: those of its scheduler."""
        self.world = world
        self.hardware = hardware
        self.clock: Clock = self._own_clock()
        self.deadlines = settings.deadlines
        self.is_gone = False
        """Whether it has ended."""
        self.is_frozen = self.is_slow = self.is_deaf = False
        """Whether all threads are stopped; the step thread alone; no views arrive."""
        self.refused = ""
        """Why a router refused it for good."""
        self.becomes = ""
        """What a router has asked it to become (`InstanceInfo.becomes`)."""
        self._is_drained = False
        self._change: RoleChange | None = None
        self.num_changes = 0
        """Changes of role that are done."""
        now_s = self.clock.monotonic()
        self.contacts = Contacts(self, world.num_routers, now_s)
        self.received = LinkReceivers()
        self.num_reads = 0
        self.failures = FailureReports(self._send_failed)
        self._beat_turns = 0
        self.due_s = now_s
        """When the next heartbeat is due that comes anyway; `next_beat_s`: the next one."""
        self.next_beat_s = now_s
        self._watch = SilenceWatch(settings.deadlines, world.num_routers)
        self._orders = [WeightsOrder() for _ in range(world.num_routers)]
        self._heard: set[int] = set()
        self._cache_flush = [0] * world.num_routers
        self._joined: tuple[int, ...] = ()
        self.core = InstanceCore(
            replace(settings, name=info.name, overlap=hardware.overlap),
            hardware.engine,
            self._make_tokens(info.incarnation),
            self._report_failure,
            self.clock,
            image_source=hardware.images or NoImages(),
            inbox=Inbox(_Wake(self)),
        )
        self.core.weights.on_news = self._on_weights
        self._begin(info)
        self.contacts.begin(self.info, self.side, self, settings.deadlines)

    def _own_clock(self) -> Clock:
        return self.world.clock

    # ------------------------------------------------------------------------------------------------------------ lives

    @property
    def role(self) -> Role:
        return self.info.role

    @property
    def rank(self) -> int:
        return self.info.engine_rank

    @property
    def incarnation(self) -> int:
        return self.info.incarnation

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def port(self) -> int:
        """Port of the messages between P and D."""
        return self.info.control_port

    @property
    def side(self) -> TransferSide:
        return self.kv.side

    def _make_tokens(self, incarnation: int) -> TokenManager:
        def send_to(router: int) -> Send:
            return lambda frame: self.world.to_token_port(self, router, frame)

        return TokenManager(
            incarnation,
            *(send_to(router) for router in range(self.world.num_routers)),
            repeat_s=self.deadlines.heartbeat_interval_s,
            patience_s=self.deadlines.lease_s,
        )

    def _begin(self, info: InstanceInfo) -> None:
        """Make what one incarnation has for itself: its side of the transfer, its tokens and its scheduler."""
        composition = self._compose(info)
        self.kv = composition.transfer
        self.scheduler = PDScheduler(self.core, composition.role)
        self.info = msgspec.structs.replace(
            info,
            control_port=self.kv.control_port,
            ways=self.kv.ways,
            computes=composition.role.takes != (DecodeRequest,),
        )

    def _compose(self, info: InstanceInfo) -> Composition:
        hardware, core = self.hardware, self.core
        if info.role is Role.UNIFIED:
            return build_unified(core, KVManager(NoPeers()))
        config = self._transfer_config(info)
        own = OwnMemory(hardware.pool, core.engine.aux, hardware.transports, hardware.page_sums, hardware.state_seals)
        context = TransferContext(self._to_peer, self.wake, self.clock, is_pid_alive=self.world.is_pid_alive)
        if info.role is Role.PREFILL:
            return build_prefill(core, self._make_sender(config, own, context))
        return build_decode(core, manager_of_decode(config, own, context))

    def _transfer_config(self, info: InstanceInfo) -> KVManagerConfig:
        return KVManagerConfig(
            info.engine_rank, info.incarnation, info.host, self.hardware.control_port, info.layout, self.deadlines
        )

    def _make_sender(
        self, config: KVManagerConfig, own: OwnMemory, context: TransferContext
    ) -> KVManager[PrefillSender]:
        return manager_of_prefill(config, own, context)

    def _to_peer(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        self.world.to_peer(self, host, port, room, payload)

    @property
    def is_over(self) -> bool:
        """Whether nothing of this incarnation is left, here or at a peer."""
        return self.scheduler.is_idle

    def look_at_life(self) -> None:
        """Leave, or begin the next life, once it is time to. Call it every few milliseconds while `has_order`."""
        change = self._change
        if change is None:
            return
        match change.turn(self.clock.monotonic(), is_done=self.scheduler.is_done, is_idle=self.is_over):
            case ChangeStep.GIVE_BACK if self.becomes:
                self.scheduler.give_back(RoleChanged(f"{self.name} changes its role"))
            case ChangeStep.UNANSWERED if self.becomes:
                self.end()
            case ChangeStep.BEGIN:
                self._change = None
                if self.becomes:
                    self._begin_again()
                elif self._is_drained:
                    self.leave("drained")

    @property
    def has_order(self) -> bool:
        """Whether it is asked to leave, or to change its role."""
        return self._change is not None

    def _begin_again(self) -> None:
        """Begin the next life in this process: over the same engine, pool, cache, transports and port."""
        old = self.kv
        self.scheduler.close()
        info = msgspec.structs.replace(
            next_life(self.info, self.becomes), incarnation=self.world.new_incarnation(), draining=False, becomes=""
        )
        self.becomes = ""
        self.core.tokens, self.core.inbox = self._make_tokens(info.incarnation), Inbox(_Wake(self))
        self.core.settings = replace(self.core.settings, name=info.name)
        self._begin(info)
        self.contacts.start_again(self.info, self.side)
        old.retire()
        self.num_changes += 1

    def leave(self, reason: str) -> None:
        """Tell the routers that it leaves, and end."""
        for router in range(self.world.num_routers):
            self.world.to_coordination_port(self, router, Leave(self.role, self.rank, self.incarnation, reason))
        self.end()

    def end(self) -> None:
        """End the process."""
        self.is_gone = True
        self.world.on_gone(self)

    # ------------------------------------------------------------------------------------------------------ step thread

    def wake(self) -> None:
        """Wake the step thread, which a world that goes turn by turn does not need."""

    def step(self) -> bool:
        """Take one turn of the step loop. Return whether there was something to do."""
        return self.scheduler.step()

    # ------------------------------------------------------------------------------------------------------ comm thread

    def receive(self, messages: Sequence[RequestPortMessage]) -> None:
        """Take what came to the request port, as `CommLoop` does."""
        for message in messages:
            if isinstance(message, LinkAck):
                self.core.tokens.take_ack(message)
                self.wake()
            elif self.received.take(message.stamp):
                self.on_request(message)
        if self.received.take_alarm():
            self.on_missing()

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Take a message of a peer."""
        self.side.on_frame(room, payload)

    def take_view(self, router: int, message: ViewMessage) -> None:
        """Take a view of a router, or a change of it."""
        if self.contacts.routers[router].feed.take(message):
            self.contacts.take_view(router)

    def take_reply(self, router: int, reply: CoordinationReply) -> None:
        self.contacts.take_reply(router, reply)

    def keep_in_touch(self) -> None:
        """Apply the deadlines of transfers, and repeat what routers do not know. Call it every 50 ms or so."""
        now_s = self.clock.monotonic()
        self.num_reads += 1
        for contact in self.contacts.routers:
            if contact.feed.should_ask(now_s):
                self.world.ask_for_view(self, contact.index)
        self.contacts.keep_in_touch(now_s)
        self.side.tick(now_s)

    def send_coordination(self, router: int, message: Join | Drain) -> None:
        self.world.to_coordination_port(self, router, message)

    def ask_views(self, router: int) -> None:
        """Ask anew: the simulated router speaks one version."""
        self.world.ask_for_view(self, router)

    def renew_view(self, router: int) -> None:
        """Ask anew, as a new connection does."""
        self.world.ask_for_view(self, router)

    def call_soon(self) -> None:
        """Do nothing: the comm thread comes round soon anyway."""

    def on_request(self, message: SchedulerMessage, /) -> None:
        self.scheduler.submit(message)

    def on_link_ack(self, ack: LinkAck) -> None:
        self.core.tokens.take_ack(ack)

    def on_view(self, view: ClusterView, router: int) -> None:
        if view.cache_flush not in (0, self._cache_flush[router]):
            self._cache_flush[router] = view.cache_flush
            self.scheduler.flush_cache()
        self._orders[router] = view.weights
        self._heard.add(router)
        self._order_weights()
        if self.contacts.joined_routers != self._joined:
            self._joined = self.contacts.joined_routers
            self.beat_soon()

    def on_silence(self, router: int) -> None:
        self._heard.discard(router)
        self._order_weights()

    def _order_weights(self) -> None:
        self.scheduler.weights.set_order(join_orders(self._orders, self._heard))
        self.wake()

    def _on_weights(self) -> None:
        self.contacts.weights = self.scheduler.weights.serves
        self.beat_soon()

    def on_new_router(self, router: int) -> None:
        self.scheduler.cancel_all(router)

    def on_missing(self) -> None:
        self.beat_soon()

    def on_drain(self, becomes: str) -> None:
        self.becomes, self._is_drained = becomes, not becomes
        self._change = RoleChange(self.deadlines, self.clock.monotonic(), self.quiet_s)
        self.wake()

    def on_stay(self) -> None:
        self.becomes, self._change = "", None

    def on_refused(self, code: str, message: str) -> None:
        self.refused = message
        self.end()

    # ------------------------------------------------------------------------------------------------- heartbeat thread

    def beat_soon(self) -> None:
        """Send the next heartbeat without delay."""
        self.next_beat_s = self.clock.monotonic()

    def beat(self) -> None:
        """Send a heartbeat to every router, and what belongs to it every `heartbeat_interval_s`."""
        now_s = self.clock.monotonic()
        if now_s >= self.due_s:
            self.due_s = now_s + self.deadlines.heartbeat_interval_s
            self._look()
            for failed in self.failures.repeats():
                self._send_failed(failed)
        self.next_beat_s = self.due_s
        message = self.heartbeat()
        for router in range(self.world.num_routers):
            self.world.to_stats_port(self, router, message)

    def heartbeat(self) -> Heartbeat:
        info, side = self.info, self.side
        load = msgspec.structs.replace(self.scheduler.load, suspended=side.suspended_ranks, paths=side.path_loads)
        return Heartbeat(
            *(info.role, info.engine_rank, info.incarnation, load),
            reads=self.num_reads,
            acks=self.received.acks(),
            silent=side.silent_prefills,
            weights=self.scheduler.weights.report,
            routers=self.contacts.joined_routers,
        )

    def _look(self) -> None:
        """Notice the silence of routers. That the step thread hangs is no matter of a simulation."""
        self._beat_turns += 1
        for router, silence_s in self._watch.look(self.contacts.num_views, self._beat_turns):
            self.scheduler.end_all(silence_s, router)

    def _report_failure(self, room: bytes, error: ChituError) -> None:
        info = self.info
        self.failures.add(RequestFailed(info.role, info.engine_rank, info.incarnation, room, error.code, error.message))
        if isinstance(error, TransferFailed):
            self.beat_soon()

    def _send_failed(self, failed: RequestFailed) -> None:
        for router in range(self.world.num_routers):
            self.world.to_stats_port(self, router, failed)
