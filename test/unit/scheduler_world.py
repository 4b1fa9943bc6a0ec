"""A P, a D and a unified instance without processes: `PDScheduler` with an executor that checks every plan, and wires
that a test pumps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from hypothesis import strategies as st
from support.clock import FakeClock
from support.drafts import AllDrafts
from support.executors import LateExecutor
from support.requests import with_options

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import Executor, ExecutorInfo
from chitu.engine.lockstep import LockstepExecutor
from chitu.engine.weights_loader import AdapterFolder, ReadWeights
from chitu.errors import ChituError, Integrity, TransferFailed
from chitu.fake.executor import STATE_ROW_BYTES, FakeExecutor, expected_tokens, fake_logprobs
from chitu.grammars import GrammarStore
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.draft_source import DraftSource
from chitu.instance.roles import DecodeRole, PrefillRole
from chitu.instance.sequences import Sequence as SequenceOfInstance
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, HostRows
from chitu.kv_cache.state_row import StateSlots, StateStamp, read_stamp
from chitu.kv_cache.tiers.prefix_tiers import NoTiers, PrefixTiers
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.kv_transfer.chunks import KVChunk
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.net.threads import ServiceThread
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    DecodeRequest,
    Finish,
    KVLayout,
    PrefillRequest,
    SamplingParams,
    SchedulerMessage,
    UnifiedRequest,
    pack_i32,
    token_codec,
    unpack_logprobs,
)
from chitu.protocol.weights import Weights, WeightsOrder
from chitu.tracing.tracer import Tracer
from chitu.types import Ready, Role

PAGE_SIZE = 4
INFO = ExecutorInfo(num_slots=8, max_model_len=200, vocab_size=1000, num_layers=2, eos_token_ids=(2,))


def make_aux(count: int) -> MetadataBuffers:
    """Return aux slots without room for real logits."""
    return MetadataBuffers(np.zeros((count, 128), np.uint8), 64)


class Silence:
    """A socket that the tracer never uses."""

    def send(self, frame: bytes) -> bool:
        raise AssertionError

    def close(self) -> None: ...


class Weighted(Protocol):
    weights: int


class Folders:
    """Reads weights at once from folders that are named by their numbers, 0 for those that an instance starts with, and
    adapters from folders that are named by their hashes."""

    def __init__(self, executor: Weighted, loaded: set[int] | None = None) -> None:
        """Load for this executor; `loaded`: numbers of the adapters that it computes with."""
        self._executor, self._loaded = executor, set() if loaded is None else loaded
        self._path = ""
        self._adapters: Sequence[AdapterFolder] = ()

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self._path, self._adapters = path, adapters

    def poll(self) -> ReadWeights:
        if not self._path:
            return ReadWeights(adapters=tuple([each.path for each in self._adapters]))
        fingerprint = b"model" if self._path == "0" else self._path.encode()
        return ReadWeights(self._path, fingerprint=fingerprint, feature_mark=int(self._path).to_bytes(8, "big"))

    def change(self) -> None:
        self._loaded |= {each.number for each in self._adapters}
        if self._path:
            self._executor.weights = int(self._path)

    def unload(self, number: int) -> None:
        self._loaded.remove(number)

    def drop(self) -> None: ...


class TracedScheduler(PDScheduler):
    """A scheduler each of whose requests is traced."""

    def submit(self, message: SchedulerMessage) -> None:
        tracer = self._core.tracer
        if tracer is not None and isinstance(message, (PrefillRequest, DecodeRequest, UnifiedRequest)):
            message = with_options(message, trace="records")
            tracer.begin(message, b"")
        super().submit(message)


class Instance:
    """One scheduler with a fake executor, and everything that it returned."""

    def __init__(
        self,
        num_pages: int,
        sender: Wire | None = None,
        receiver: Wire | None = None,
        chunk: int = 5,
        aux_slots: int = 4,
        clock: FakeClock | None = None,
        config: SchedulerConfig | None = None,
        overlap: bool = False,
        executor: type[FakeExecutor] = FakeExecutor,
        late: type[LateExecutor] = LateExecutor,
        grammars: GrammarStore | None = None,
        request_timeout_s: float = math.inf,
        info: ExecutorInfo = INFO,
        page_size: int = PAGE_SIZE,
        state_slots: int = 0,
        tpot_s: float = math.inf,
        draft_source: Callable[[SequenceOfInstance], DraftSource] | None = None,
        join: Callable[[Executor], LockstepExecutor] | None = None,
        lanes: int = 1,
    ) -> None:
        """Make the instance. With `overlap` or two lanes its device returns results late. With `state_slots` its model
        has a recurrent state. With `tpot_s` D computes prompts, too. `join` makes it a member of a group."""
        self.clock = clock or FakeClock()
        self.tokens: dict[bytes, list[int]] = {}
        self.groups: dict[bytes, list[int]] = {}
        """Sizes of the groups in which a room's tokens came."""
        self.has_logprobs: dict[bytes, bool] = {}
        """Whether logprobs came with a room's tokens: with all of them or with none."""
        self.prompts: dict[bytes, bytes] = {}
        """Logprobs of the prompt, by room."""
        self.finishes: dict[bytes, Finish] = {}
        self.cached: dict[bytes, int] = {}
        self.failures: dict[bytes, ChituError] = {}
        self.rooms_of_second: list[bytes] = []
        """Rooms of the tokens for the second of two routers."""
        is_cached = receiver is None or not state_slots
        self.cache = PagedKVCacheManager(num_pages, page_size, b"model" if is_cached else None)
        self.states = StateSlots(state_slots)
        self.aux = make_aux(aux_slots)
        rows = [np.zeros((aux_slots, 128), np.uint8)]
        if state_slots:
            rows.append(np.full((state_slots, STATE_ROW_BYTES), 0xFF, np.uint8))
        self.executor = executor(info, num_pages, page_size, *rows)
        self.late = late(self.executor)
        layout = KVLayout.uniform("m", 1, 1, 2, PAGE_SIZE, "float32", INFO.vocab_size)
        self.tracer = Tracer(Role.UNIFIED, 0, 1, layout, "cpu", lambda: [Silence()], self.clock)
        self.tracer._thread = ServiceThread("trace", lambda: None)  # never started: nothing forgets a room
        config = config or SchedulerConfig(
            max_running_requests=8, max_batched_tokens=16, chunk_size=chunk, reserved_decode_tokens=4
        )
        limits = {"request_timeout_s": request_timeout_s, "tpot_s": tpot_s}
        computes: Executor = self.late if overlap or lanes == 2 else self.executor
        lockstep = join(computes) if join is not None else None
        core = InstanceCore(
            SchedulerSettings(config, DeadlineConfig(), overlap=overlap, **limits),
            LoadedEngine(
                lockstep or computes,
                self.cache,
                self.aux,
                self.make_tiers(),
                self.states,
                grammars=grammars,
                weights=Folders(self.executor, self.executor.adapters),
                lockstep=lockstep,
                lane=self.late if lanes == 2 else None,
            ),
            TokenManager(1, self._take, self._take_of_second),
            self.failures.__setitem__,
            self.clock,
            self.tracer,
        )
        if draft_source is not None:
            core.drafts = AllDrafts(draft_source, info.num_slots, info.vocab_size)
        if sender is not None:
            self.role = PrefillRole(core, sender)
        else:
            self.role = DecodeRole(core, receiver)
        self.scheduler = TracedScheduler(core, self.role)

    def change_weights(self, number: int, folder: int) -> None:
        """Let the cluster serve other weights from now on, for what runs, too."""
        self.scheduler.weights.set_order(WeightsOrder(Weights(number, str(folder), str(folder), is_mixed=True)))

    def make_tiers(self) -> PrefixTiers | NoTiers:
        """Return the tiers behind the prefix cache; a subclass makes some."""
        return NoTiers()

    def _take_of_second(self, frame: bytes) -> bool:
        self.rooms_of_second += token_codec.decode(frame).rooms
        return self._take(frame)

    def _take(self, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        for place, (room, token) in enumerate(zip(batch.rooms, batch.tokens, strict=True)):
            assert room not in self.finishes, "a token after the end"
            self.tokens.setdefault(room, []).append(token)
            assert room not in dict(batch.prompt_logprobs) or len(self.tokens[room]) == 1
            logprobs = dict(batch.logprobs).get(place)
            assert self.has_logprobs.setdefault(room, logprobs is not None) == (logprobs is not None)
            assert logprobs is None or unpack_logprobs(logprobs).logprob == -token, "logprobs of another token"
        for room, tokens in batch.groups:
            assert room not in self.finishes, "tokens after the end"
            assert not self.has_logprobs.setdefault(room, False)
            self.tokens.setdefault(room, []).extend(tokens)
            self.groups.setdefault(room, []).append(len(tokens))
        for room, num_tokens in batch.cached:
            assert len(self.tokens[room]) == 1 and room not in self.cached, "not with the first token"
            self.cached[room] = num_tokens
        for room, lines in batch.prompt_logprobs:
            assert room not in self.prompts, "a prompt's logprobs come once"
            self.prompts[room] = lines
        for finish in batch.finished:
            assert finish.room not in self.finishes, "two ends"
            self.finishes[finish.room] = finish
        return True

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            self.scheduler.step()
            if self.scheduler.is_idle:
                self.scheduler.step()
                return
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler.load}")

    def check_empty(self) -> None:
        self.cache.check_idle()
        self.states.check_idle()
        assert not self.executor.saved_keys
        untold = [room for room, traced in self.tracer.rooms.items() if traced.ended_s is None]
        assert not untold, "rooms that would be traced for ever"
        load = self.scheduler.load
        assert (load.waiting, load.transferring, load.running, load.retracted) == (0, 0, 0, 0)
        assert load.pages_free + load.pages_cached == load.pages_total


class Wire:
    """A transfer between two schedulers that does not fail by itself: both role interfaces, moving aux rows on
    demand."""

    def __init__(self) -> None:
        self.prefill: Instance | None = None
        self.decode: Instance | None = None
        self.announced: dict[bytes, int] = {}
        self.prefix_pages: dict[bytes, int] = {}
        self.requested: set[bytes] = set()
        self.computed: dict[bytes, int] = {}
        self.sent_states: dict[bytes, int] = {}
        self.stamps: dict[bytes, tuple[int, StateStamp]] = {}
        """State row on D, and what the state there must have taken in."""
        self.prompt_logprobs: dict[bytes, bytes | None] = {}
        self.uncached: dict[bytes, bool] = {}
        self.delivered: set[bytes] = set()
        self.dead: set[bytes] = set()
        self.failing: set[bytes] = set()
        self.damaged: set[bytes] = set()
        """Rooms whose rows are damaged on their way."""
        self.unchecked: set[bytes] = set()
        """Rooms whose rows D's steps have yet to check."""
        self.events_p: list[TransferEvent] = []
        self.events_d: list[TransferEvent] = []
        self.side = "P"

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        self.requested.add(room)
        if room in self.announced:
            self.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room))

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        for chunk in chunks:
            assert self.prefill is None or len(chunk.pages) * self.prefill.cache.page_size >= chunk.end

    def layer_done(self, layer: int, ready: Ready | None = None, first_layer: int | None = None) -> None: ...

    def end_step(self) -> None: ...

    def send_rows(
        self,
        room: bytes,
        aux_slot: int,
        prompt_logprobs: bytes | None = None,
        state_slot: int = -1,
        is_uncached: bool = False,
    ) -> None:
        self.computed[room] = aux_slot
        self.sent_states[room] = state_slot
        self.prompt_logprobs[room] = prompt_logprobs
        self.uncached[room] = is_uncached

    def reset(self, room: bytes) -> bool:
        self.computed.pop(room, None)
        return room not in self.announced

    def announce(
        self,
        room: bytes,
        request_id: str,
        pages: Sequence[int],
        aux_slot: int,
        num_tokens: int,
        prefill_rank: int,
        prefill_incarnation: int,
        prefix_pages: int,
        page_sums: bool,
        state_slot: int = -1,
        digest: int = 0,
        is_drawn_unchecked: bool = False,
    ) -> None:
        if is_drawn_unchecked:
            self.unchecked.add(room)
        self.stamps[room] = state_slot, StateStamp(num_tokens, digest)
        needs_kv = self.decode is None or self.decode.scheduler._sequences._all[room].needs_kv
        page_size = PAGE_SIZE if self.decode is None else self.decode.cache.page_size
        assert len(pages) == (-(-num_tokens // page_size) if needs_kv else 0)
        assert prefix_pages <= (num_tokens // page_size if needs_kv else 0)
        self.announced[room], self.prefix_pages[room] = aux_slot, prefix_pages
        if room in self.requested:
            self.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room))

    def row_checked(self, room: bytes, aux_slot: int, found: bytes) -> int | None:
        """Do what the receiver does with a row that a step has checked."""
        assert self.decode is not None
        row = HostRows(self.decode.executor._aux_rows).checked(aux_slot, self.decode.executor.checked_to)
        assert found == row and room in self.unchecked and self.announced[room] == aux_slot
        self.unchecked.discard(room)
        if room not in self.damaged:
            return self.cached_tokens
        self._fail(room, Integrity("the row is damaged"))
        return None

    cached_tokens = 0

    def _fail(self, room: bytes, error: ChituError) -> None:
        if room in self.dead:
            return
        self.dead.add(room)
        for events in (self.events_p, self.events_d):
            events.append(TransferEvent(TransferEventKind.FAILED, room, error))
            events.append(TransferEvent(TransferEventKind.RELEASED, room))

    def abort(self, room: bytes, error: ChituError) -> None:
        self.dead.add(room)
        for events in (self.events_p, self.events_d):
            events.append(TransferEvent(TransferEventKind.RELEASED, room))

    def deliver(self, rng: random.Random) -> None:
        """Deliver some of what is computed and announced; logits and KV sometimes arrive in different steps."""
        assert self.prefill and self.decode
        for room, source in list(self.computed.items()):
            if room in self.dead or room not in self.announced or rng.random() < 0.5:
                continue
            if room in self.failing:
                self._fail(room, TransferFailed("the link broke"))
            elif room not in self.delivered:
                self.delivered.add(room)
                target = self.decode.executor.aux_row(self.announced[room])
                target[:] = self.prefill.executor.aux_row(source)
                if room in self.damaged:
                    target[AUX_HEADER_BYTES + 4] ^= 0xFF
                self.events_d.append(TransferEvent(TransferEventKind.LOGITS_READY, room))
            elif room not in self.unchecked:
                del self.computed[room]
                self._deliver_state(room)
                lines, is_uncached = self.prompt_logprobs[room], self.uncached[room]
                success = TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=100, prompt_logprobs=lines)
                self.events_d.append(replace(success, is_uncached=is_uncached))
                self.events_p.append(TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=100))

    def _deliver_state(self, room: bytes) -> None:
        """Copy a state row as the transfer layer does, which requires that P has computed the whole prompt."""
        assert self.prefill and self.decode
        source, (target, stamp) = self.sent_states[room], self.stamps[room]
        assert (target >= 0) <= (source >= 0)
        if target >= 0:
            row = self.prefill.executor.state_row(source)
            assert read_stamp(bytes(row)) == stamp
            self.decode.executor.state_row(target)[:] = row


class PSide(Wire):
    """P's side of a shared wire, and its feed: `poll` returns P's events."""

    def __init__(self, wire: Wire) -> None:
        self.__dict__ = wire.__dict__

    @property
    def feed(self) -> PSide:
        return self

    def poll(self) -> list[TransferEvent]:
        events = list(self.events_p)
        self.events_p.clear()
        return events


class DSide(Wire):
    """D's side of a shared wire: `poll` returns D's events."""

    def __init__(self, wire: Wire) -> None:
        self.__dict__ = wire.__dict__

    def poll(self) -> list[TransferEvent]:
        events = list(self.events_d)
        self.events_d.clear()
        return events


def room_of(index: int) -> bytes:
    return index.to_bytes(16, "big")


def prompt_of(index: int, length: int) -> list[int]:
    """Return a prompt. Prompts of one family share a prefix, whose length differs from prompt to prompt."""
    family, fork = index % 2, 3 * (index % 6)
    return [((family if at < fork else index + 2) * 31 + at * 7) % INFO.vocab_size for at in range(length)]


loads = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 23)), min_size=1, max_size=20)
"""Prompt length, max_tokens, and the number of tokens that another instance had generated before it was lost."""


def continued(
    index: int, prompt_len: int, max_tokens: int, progress: int
) -> tuple[bytes, SamplingParams, int, list[int]]:
    """Return the tokens to send, their sampling, how many of them are output, and the tokens to come. Every other
    request continues one whose instance was lost."""
    logprobs = (None, 0, 2)[index % 3]
    asked = {"logprobs": logprobs, "prompt_logprobs": 1 if index % 5 < 2 else None}
    sampling = SamplingParams(max_tokens, temperature=float(index % 4 // 2), seed=index, **asked)
    prompt = prompt_of(index, prompt_len)
    tokens = expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)
    num_emitted = progress % max_tokens if index % 2 else 0
    return pack_i32(prompt + tokens[:num_emitted]), sampling, num_emitted, tokens[num_emitted:]


def check_prompt(instance: Instance, index: int, one: tuple[int, int, int]) -> None:
    """Check that a served request has logprobs of every prompt token but the first, once, after any chunks and undone
    steps."""
    _, sampling, num_emitted, _ = continued(index, *one)
    lines = instance.prompts.get(room_of(index))
    if num_emitted or sampling.prompt_logprobs is None:
        assert lines is None
        return
    prompt = prompt_of(index, one[0])
    assert lines == b"".join([fake_logprobs(token, sampling.prompt_logprobs) for token in prompt[1:]])
