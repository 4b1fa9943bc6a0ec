"""`SimulatedInstance`: a process whose steps take the time of an engine's profile, driven by events.

A turn of its step loop is two events: `_begin_turn` when it may start, `_end_turn` when the step that it waits for is
done. Invariant: what an instance does at a virtual moment depends only on what reached it before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import MAX_DRAFT, ExecutorInfo, StepHandle
from chitu.engine.weights_loader import AdapterFolder, GivenBack, ReadWeights
from chitu.instance.build import Composition
from chitu.instance.core import LoadedEngine, SchedulerSettings
from chitu.instance.image_pulls import ImagePulls
from chitu.kv_cache.aux_row import num_aux_rows
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.kv_manager import KVManager
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.local import register_memory, ways_of
from chitu.net.process_deaths import pid_namespace
from chitu.protocol import InstanceInfo, KVLayout, RequestPortMessage
from chitu.protocol.weights import SleepLevel
from chitu.simulation.encoders import EncodedFeatures, EncoderWorld, PreparedAtOnce
from chitu.simulation.engine import TimedExecutor, TimedStep
from chitu.simulation.events import Events, InstanceClock
from chitu.simulation.group import SimulatedGroup
from chitu.simulation.process import Hardware, SimulatedProcess, World
from chitu.simulation.profile import EngineProfile
from chitu.simulation.transfers import HeaderRows, PageAddresses, Receiving, TimedSender, TimedTransport
from chitu.types import Role

MAX_LAYERS = 4
"""Parts in which the KV of a chunk leaves at most. More would cost events and change little: it is the last part that
a request waits for."""
ANY_TOKEN = (1 << 31) - 1
FIRST_PORT = 1024


class TimedWorld(World, Protocol):
    """What an instance needs beside what any process does."""

    @property
    def events(self) -> Events: ...

    def at(self, when_s: float, act: Callable[..., object], *values: object) -> None: ...

    def receiver_of(self, incarnation: int) -> Receiving | None: ...

    def rate_to(self, source: int, target: int) -> float: ...

    @property
    def asked_encoders(self) -> EncoderWorld | None:
        """The world of E, if there are any."""
        ...

    def note_life(self, process: SimulatedProcess) -> None:
        """Note the incarnation of a process that has begun a life."""
        ...


class TimedLoader:
    """Loader of weights (`WeightsLoader`), which takes virtual time. A folder's name is its hash; `bad` has none. It
    loads no adapters."""

    def __init__(self, clock: InstanceClock, read_s: float = 0.5) -> None:
        self._clock = clock
        self.read_s = read_s
        self._path = ""
        self._done_s = math.inf

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self._path, self._done_s = "bad" if adapters else path, self._clock.monotonic() + self.read_s

    def poll(self) -> ReadWeights | None:
        if self._clock.monotonic() < self._done_s:
            return None
        if self._path == "bad":
            return ReadWeights(error="there is no model in this folder")
        return ReadWeights(self._path, fingerprint=self._path.encode())

    def change(self) -> None: ...

    def unload(self, number: int) -> None: ...

    def drop(self) -> None:
        self._done_s = math.inf

    def begin_again(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self.begin(path)

    def why_no_sleep(self, level: SleepLevel) -> str:
        return ""

    def sleep(self, level: SleepLevel) -> GivenBack:
        return GivenBack(1)


class SimulatedInstance(SimulatedProcess):
    world: TimedWorld
    clock: InstanceClock

    def __init__(
        self,
        world: TimedWorld,
        role: Role,
        rank: int,
        profile: EngineProfile,
        scheduler: SchedulerConfig,
        *,
        is_here: bool = True,
        group: SimulatedGroup | None = None,
    ) -> None:
        """`is_here`: it runs on the machine of the routers, which sees its death. `group`: of which it is the next
        member."""
        self.profile = profile
        self.speed = 1.0
        """Its steps take the profile's time divided by this."""
        self._own = InstanceClock(world.events.clock)
        incarnation, num_slots = world.new_incarnation(), scheduler.max_running_requests
        num_layers = min(MAX_LAYERS, profile.num_layers)
        width = max(1, round(profile.kv_bytes_per_token / (4 * num_layers)))
        layout = KVLayout.uniform(
            "simulated", num_layers, 1, width, profile.page_size, "float32", profile.vocab_size, regions_per_layer=1
        )
        num_aux = num_aux_rows(None, num_slots, role)
        self.rows = HeaderRows(num_aux)
        self.ingress_free_s = 0.0
        max_len = min(profile.max_model_len, profile.num_pages * profile.page_size)
        most_drafts = MAX_DRAFT if profile.draft_acceptance else 0
        facts = ExecutorInfo(
            num_slots,
            max_len,
            ANY_TOKEN,
            num_layers,
            (),
            most_drafts=most_drafts,
            guesses=most_drafts,
            image_rows=profile.images.region_rows,
            tower=profile.tower,
        )
        self.group = group
        together = group if group is not None and group.steps_together else None
        self.executor = TimedExecutor(facts, profile, self._own, lambda: self.speed, together)
        self.cache = PagedKVCacheManager(profile.num_pages, profile.page_size, b"simulated")
        lockstep = None if together is None else self.executor.lockstep
        engine = LoadedEngine(self.executor, self.cache, self.rows, weights=TimedLoader(self._own), lockstep=lockstep)
        port = FIRST_PORT + incarnation % (65536 - FIRST_PORT)
        hardware = Hardware(
            engine,
            PageAddresses(layout, profile.num_pages, num_aux),
            [TimedTransport(incarnation)],
            port,
            overlap=profile.overlap,
            images=PreparedAtOnce(self.wake),
        )
        tpot_s = world.config.slo.tpot_s
        settings = SchedulerSettings(
            scheduler,
            world.config.pd_disaggregation.deadlines,
            request_timeout_s=world.config.request_timeout_s,
            tpot_s=math.inf if tpot_s is None else tpot_s,
            max_draft_tokens=scheduler.max_draft_tokens,
        )
        info = InstanceInfo(
            *(role, rank, incarnation, "simulated", FIRST_PORT, port, layout, max_len, incarnation),
            pid_namespace=pid_namespace() if is_here else "",
            num_slots=num_slots,
            num_pages=profile.num_pages,
            roles=() if role is Role.UNIFIED else (Role.PREFILL, Role.DECODE),
            group=None if group is None else group.place(incarnation),
            image_port=0 if world.asked_encoders is None else port,
        )
        if group is not None:
            group.members.append(self)
        self._together = together
        self._is_busy = self._is_due = self._is_woken = False
        super().__init__(world, info, hardware, settings)
        # Heartbeats of different processes are spread.
        self.due_s = self.clock.monotonic() + self.deadlines.heartbeat_interval_s * (incarnation * 0.381966 % 1.0)
        self.beat_soon()

    def _compose(self, info: InstanceInfo) -> Composition:
        composition, world = super()._compose(info), self.world.asked_encoders
        if info.role is not Role.DECODE and world is not None:
            features, place = EncodedFeatures(world, self.wake), (info.engine_rank, info.incarnation)
            most_rows = self.core.settings.config.max_batched_tokens
            gate = self.core.sequences.resources.images
            core = self.core
            gate.pulls = ImagePulls(features, features.aux, place, self.deadlines, most_rows, self.clock, core.weights)
        return composition

    def _own_clock(self) -> InstanceClock:
        return self._own

    def _transfer_config(self, info: InstanceInfo) -> KVManagerConfig:
        threads = self.world.config.pd_disaggregation.transfer_threads
        return replace(super()._transfer_config(info), transfer_threads=threads)

    def _make_sender(
        self, config: KVManagerConfig, own: OwnMemory, context: TransferContext
    ) -> KVManager[PrefillSender]:
        sessions = register_memory(own.pool, own.transports)
        own = OwnMemory(own.pool, own.aux, own.transports, sessions=sessions)
        sender = TimedSender(config, own, self.rows, context, self.world, self.profile.link, self.profile.overlap)
        return KVManager(sender, None, own.transports, ways_of(sessions), config.control_port)

    @property
    def sender(self) -> TimedSender | None:
        """P's side of the transfer."""
        return self.side if isinstance(self.side, TimedSender) else None

    # ------------------------------------------------------------------------------------------------------ its threads

    def receive(self, messages: Sequence[RequestPortMessage]) -> None:
        if not self.is_gone:
            super().receive(messages)

    def on_frame(self, room: bytes, payload: bytes) -> None:
        if not self.is_gone:
            super().on_frame(room, payload)
            self.pump()

    def _begin_again(self) -> None:
        super()._begin_again()
        self.world.note_life(self)

    def keep_in_touch(self) -> None:
        super().keep_in_touch()
        self.pump()
        if not self.scheduler.is_idle:
            self.wake()

    def beat_soon(self) -> None:
        super().beat_soon()
        self.world.at(self.next_beat_s, self.beat_if_due)

    def beat_if_due(self) -> None:
        """Send a heartbeat, unless one has gone since this was planned."""
        if not (self.is_gone or self.is_frozen) and self.world.events.clock.now_s >= self.next_beat_s:
            self.beat()

    def beat(self) -> None:
        super().beat()
        self.world.at(self.next_beat_s, self.beat_if_due)

    def wake(self) -> None:
        """Begin a turn now, or after the one that runs."""
        self._is_woken = True
        if self._together is not None:
            self._together.wake()
        elif not (self._is_busy or self._is_due or self.is_gone):
            self._is_due = True
            self.world.at(self.clock.monotonic(), self._begin_turn)

    def _begin_turn(self) -> None:
        if self.is_frozen or self.is_slow:
            self._is_due = False
            return
        self._is_due = False
        self._is_busy = True
        step = self.begin_turn()
        self.pump()
        now_s = self.clock.monotonic()
        end_s = now_s if not isinstance(step, TimedStep) else max(now_s, step.end_s)
        if end_s > self.world.events.clock.now_s:
            self.world.at(end_s, self._end_turn)
        else:
            self._end_turn()

    def begin_turn(self) -> StepHandle | None:
        """Begin a turn of the step loop. Return the step that has to be done before `end_turn`."""
        self._is_woken = False
        return self.scheduler.begin()

    def _end_turn(self) -> None:
        if self.is_gone:
            return
        goes_on = self.end_turn()
        self._is_busy = False
        if goes_on and not self.is_gone:
            self._is_due = True
            self.world.at(self.clock.monotonic(), self._begin_turn)

    def end_turn(self) -> bool:
        """End a turn. Return whether the next one may begin at once."""
        if self.sender is not None and self.sender.timed_feed is not None:
            self.sender.timed_feed.finish_step()
        has_worked = self.scheduler.end()
        self.pump()
        return has_worked or self._is_woken

    def pump(self) -> None:
        """Begin the writes that may begin."""
        if self.sender is not None:
            self.sender.pump()
