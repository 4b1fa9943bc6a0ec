"""Whole P and D, a router and the network between them, in one thread and fake time, driven by a script of faults.

A script is a list of `Op`; the same script gives the same run, so hypothesis can shrink it and print it. Nothing else
is random. P<->D frames may be lost, doubled, delayed and reordered; processes are killed, started anew, stopped, slow
or deaf; views are lost; writes fail, come late and land whenever; the router cancels, dies and comes back.
`settle_down` ends all faults: then everything must end within the deadlines, and every page come back.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from cluster_process import DEADLINES, INFO, REQUEST_TIMEOUT_S, Process
from pd_node import NUM_PAGES, PAGE_BYTES
from pd_world import Frame

from chitu.clock import FakeClock
from chitu.engine.fake import expected_tokens
from chitu.errors import ChituError
from chitu.kv_transfer.fake.transfer_engine import FakeFabric, Fault, FaultKind
from chitu.kv_transfer.transport import CopyList
from chitu.messages import (
    CancelRequest,
    ClusterView,
    DecodeRequest,
    Finish,
    PrefillRequest,
    RequestMark,
    RequestPortMessage,
    SamplingParams,
    pack_i32,
    token_codec,
)
from chitu.types import Role

TURN_S = 0.01
MAX_LIVE_REQUESTS = 12


@dataclass(frozen=True)
class Op:
    """One line of a script; `a` and `b` choose among what is there, whatever their size."""

    kind: str
    a: int = 0
    b: int = 0


@dataclass
class Asked:
    """A request as the router holds it."""

    room: bytes
    prefill: int
    """Incarnation."""
    decode: int
    expected: list[int]
    asked_s: float
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """`finished`, or why not."""
    message: str = ""


class ClusterWorld:
    def __init__(self, num_prefill: int = 2, num_decode: int = 2, max_batch_bytes: int = 4 * PAGE_BYTES) -> None:
        self.clock = FakeClock(100.0)
        self.fabric = FakeFabric()
        self.fabric.on_write, self.fabric.on_land = self._note_write, self._check_landing
        self.max_batch_bytes = max_batch_bytes
        self.writing = b""
        self.frames: list[Frame] = []
        self.orders: deque[tuple[int, RequestPortMessage]] = deque()
        """Router -> instances, by incarnation."""
        self.reports: deque[Callable[[], None]] = deque()
        """Instances -> router: tokens and failures, in order; they wait while it is away."""
        self.requests: dict[bytes, Asked] = {}
        self.finishes: set[bytes] = set()
        """Rooms that D ended."""
        self.is_router_alive = True
        self._router_incarnation = 1
        self._view_version = 0
        self._members: tuple[int, ...] = ()
        self._incarnations = 0
        self._num_rooms = 0
        self._dead_pids: set[int] = set()
        """An incarnation is its pid here."""
        self._told_dead: tuple[int, ...] = ()
        """What launchers told the present router."""
        self._writes: dict[int, tuple[bytes, CopyList]] = {}
        self._stepping: list[Process] = []
        self._is_inside_write = False
        self.missing: list[tuple[Role, int]] = []
        self.processes = [Process(self, Role.PREFILL, k) for k in range(num_prefill)]
        self.processes += [Process(self, Role.DECODE, m) for m in range(num_decode)]
        self.publish()
        self.turns(6)

    # ------------------------------------------------------------------------------------------ what processes call

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def is_pid_alive(self, pid: int) -> bool:
        return pid not in self._dead_pids

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        self.frames.append(Frame(port, room, payload))

    def take_tokens(self, frame: bytes) -> bool:
        self.reports.append(lambda: self._on_tokens(frame))
        return True

    def take_failure(self, process: Process, room: bytes, error: ChituError) -> None:
        assert error.message, "an error without words"
        self.reports.append(lambda: self._end(self.requests[room], error.code, error.message))

    def meanwhile(self) -> None:
        """Between two layers of a step: the comm and transfer threads go on."""
        self._deliver(0)
        for process in self.processes:
            if not process.is_frozen:
                process.write()

    # --------------------------------------------------------------------------------------------------- the script

    def play(self, script: list[Op]) -> None:
        for op in script:
            getattr(self, f"op_{op.kind}")(op.a, op.b)
            self.check()

    def op_ask(self, a: int, b: int) -> None:
        """One request; with `a` some halves go lost, as they do when a connection is cut."""
        if sum(not request.end for request in self.requests.values()) < MAX_LIVE_REQUESTS and self.is_router_alive:
            self.ask(a, 1 + b % 22, 1 + b // 22 % 14 * 2, lost=(a // 16 % 12) - 9)

    def op_run(self, a: int, b: int) -> None:
        self.turns(1 + a % 8)

    def op_pass(self, a: int, b: int) -> None:
        """Time passes without a turn for anybody but the clocks."""
        self.advance((0.1, 0.3, 1.0, 3.1)[a % 4])

    def op_lose(self, a: int, b: int) -> None:
        if self.frames:
            self.frames.pop(a % len(self.frames))

    def op_double(self, a: int, b: int) -> None:
        if self.frames:
            self.frames.insert(b % (len(self.frames) + 1), self.frames[a % len(self.frames)])

    def op_delay(self, a: int, b: int) -> None:
        if self.frames:
            self.frames.append(self.frames.pop(a % len(self.frames)))

    def op_hasten(self, a: int, b: int) -> None:
        if self.frames:
            self._deliver(a % len(self.frames))

    def op_fault(self, a: int, b: int) -> None:
        self.fabric.inject(Fault((FaultKind.LATE, FaultKind.DROP)[a % 2]))

    def op_land(self, a: int, b: int) -> None:
        self.fabric.release_late_writes()

    def op_cancel(self, a: int, b: int) -> None:
        live = [request for request in self.requests.values() if not request.end]
        if live and self.is_router_alive:
            self._end(live[a % len(live)], "cancelled")

    def op_again(self, a: int, b: int) -> None:
        """The router cancels something for the second time, be it over or not."""
        if self.requests:
            asked = list(self.requests.values())[a % len(self.requests)]
            if asked.end:
                self.orders.extend((side, CancelRequest(asked.room)) for side in (asked.decode, asked.prefill))

    def op_kill(self, a: int, b: int) -> None:
        if len(self.processes) > 2:
            self.kill(self.processes[a % len(self.processes)])

    def op_start(self, a: int, b: int) -> None:
        if self.missing:
            self.start(a % len(self.missing))

    def op_replace(self, a: int, b: int) -> None:
        """Killed, and there again before anybody noticed."""
        self.kill(self.processes[a % len(self.processes)])
        self.start(len(self.missing) - 1)

    def op_tell(self, a: int, b: int) -> None:
        """Launchers tell the router which processes have ended."""
        if self.is_router_alive and self._told_dead != tuple(sorted(self._dead_pids)):
            self._told_dead = tuple(sorted(self._dead_pids))
            self._view_version += 1

    def op_freeze(self, a: int, b: int) -> None:
        process = self.processes[a % len(self.processes)]
        process.is_frozen = not process.is_frozen

    def op_slow(self, a: int, b: int) -> None:
        process = self.processes[a % len(self.processes)]
        process.is_slow = not process.is_slow

    def op_deafen(self, a: int, b: int) -> None:
        process = self.processes[a % len(self.processes)]
        process.is_deaf = not process.is_deaf

    def op_router(self, a: int, b: int) -> None:
        self.is_router_alive = not self.is_router_alive
        if not self.is_router_alive:
            for request in self.requests.values():
                request.end = request.end or "router gone"
            self.orders.clear()
        else:
            self._router_incarnation += 1
            self._members = self._told_dead = ()

    # --------------------------------------------------------------------------------------------------- processes

    def of(self, role: Role) -> list[Process]:
        return [process for process in self.processes if process.role is role]

    def kill(self, process: Process) -> None:
        self._dead_pids.add(process.pid)
        self.fabric.kill(process.session)
        self.processes.remove(process)
        self.missing.append((process.role, process.rank))

    def start(self, index: int) -> Process:
        role, rank = self.missing.pop(index)
        self.processes.append(Process(self, role, rank))
        self.publish()
        return self.processes[-1]

    # ---------------------------------------------------------------------------------------------------- the router

    def ask(self, pair: int, num_tokens: int, max_tokens: int, lost: int = 0) -> Asked | None:
        """None where the router knows no P or no D. `lost`: 1 or 2 to lose P's or D's half on the way."""
        prefills = [p for p in self.of(Role.PREFILL) if p.incarnation in self._members]
        decodes = [p for p in self.of(Role.DECODE) if p.incarnation in self._members]
        if not prefills or not decodes:
            return None
        prefill, decode = prefills[pair % len(prefills)], decodes[pair // 2 % len(decodes)]
        self._num_rooms += 1
        room = random.Random(self._num_rooms).randbytes(16)
        prompt = [(self._num_rooms * 31 + at * 7) % INFO.vocab_size for at in range(num_tokens)]
        tokens, sampling = pack_i32(array("i", prompt)), SamplingParams(max_tokens=max_tokens, temperature=0.0)
        expected = expected_tokens(prompt, max_tokens, INFO, sampling)
        asked = Asked(room, prefill.incarnation, decode.incarnation, expected, self.clock.monotonic())
        self.requests[room] = asked
        name = f"r{self._num_rooms}"
        if lost != 2:
            half = DecodeRequest(room, name, tokens, sampling, prefill.rank, prefill.incarnation)
            self.orders.append((decode.incarnation, half))
        if lost != 1:
            self.orders.append(
                (prefill.incarnation, PrefillRequest(room, name, tokens, decode.rank, decode.incarnation))
            )
        return asked

    def _on_tokens(self, frame: bytes) -> None:
        batch = token_codec.decode(frame)
        for room, token in zip(batch.rooms, batch.tokens, strict=True):
            assert room not in self.finishes, "a token behind the end"
            asked = self.requests[room]
            asked.tokens.append(token)
            assert asked.tokens == asked.expected[: len(asked.tokens)], "a wrong token"
        for finish in batch.finished:
            self._on_finish(finish)

    def _on_finish(self, finish: Finish) -> None:
        asked = self.requests[finish.room]
        assert finish.room not in self.finishes, "a request ended twice"
        self.finishes.add(finish.room)
        if finish.reason == "length":
            assert asked.tokens == asked.expected
            asked.end = asked.end or "finished"
        else:
            assert finish.message, "an error without words"
            self._end(asked, finish.code, finish.message)

    def _end(self, asked: Asked, end: str, message: str = "") -> None:
        """As `PDRequestRouter`: each end that D did not bring about itself is told to both sides."""
        assert end not in ("integrity", "internal", "bad_frame", "protocol"), f"no fault explains {end}: {message}"
        if not asked.end:
            asked.end, asked.message = end, message
            self.orders.extend((side, CancelRequest(asked.room)) for side in (asked.decode, asked.prefill))

    def publish(self) -> None:
        """Leases and the view; every turn of the clock, as the real one repeats it."""
        if not self.is_router_alive:
            return
        now_s = self.clock.monotonic()
        joined = [p for p in self.processes if p.router == self._router_incarnation]
        present = [p for p in joined if now_s - p.beat_s < DEADLINES.lease_s]
        members = tuple(sorted(p.incarnation for p in present))
        if members != self._members:
            for request in self.requests.values():
                if request.decode in set(self._members) - set(members):
                    self._end(request, "decode_lost")
            self._members = members
            self._view_version += 1
        for request in self.requests.values():
            if now_s - request.asked_s > REQUEST_TIMEOUT_S:
                self._end(request, "request_timeout")
        members_info = tuple(p.info for p in present)
        view = ClusterView(self._router_incarnation, self._view_version, members_info, dead=self._told_dead)
        for process in self.processes:
            if not process.is_frozen and not process.is_deaf:
                process.on_view(view)

    # ---------------------------------------------------------------------------------------------------- the network

    def turns(self, count: int) -> bool:
        """Everybody does something; False where nobody had anything to do."""
        worked = False
        for _ in range(count):
            worked = bool(self.frames or self.orders or self.reports)
            for _ in range(min(3, len(self.orders))):
                self._deliver_order()
            for _ in range(min(3, len(self.frames))):
                self._deliver(0)
            for process in list(self.processes):
                if not process.is_frozen:
                    worked |= process.write()
                    worked |= not process.is_slow and self._step(process)
            while self.reports and self.is_router_alive:
                self.reports.popleft()()
            self.advance(TURN_S)
        return worked

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now_s = self.clock.monotonic()
        for process in self.processes:
            if not process.is_frozen:
                process.beat_s = now_s
        self.publish()
        for process in self.processes:
            if not process.is_frozen:
                process.tick(now_s)

    def _deliver(self, index: int) -> None:
        if not self.frames:
            return
        frame = self.frames.pop(index)
        process = next((p for p in self.processes if p.port == frame.port), None)
        if process is not None and process.is_frozen:
            self.frames.append(frame)
        elif process is not None:
            process.on_frame(frame.room, frame.payload)

    def _deliver_order(self) -> None:
        """The oldest one of a process that reads; those of one that is stopped wait in their order."""
        living = {process.incarnation: process for process in self.processes}
        for at, (incarnation, message) in enumerate(self.orders):
            process = living.get(incarnation)
            if process is None or not process.is_frozen:
                del self.orders[at]
                if process is not None:
                    self.hand_over(process, message)
                return

    def hand_over(self, process: Process, message: RequestPortMessage) -> None:
        assert not isinstance(message, RequestMark), "the router of this world does not count"
        process.submit(message)

    def _note_write(self, target: str, copies: CopyList) -> None:
        self._writes[id(copies)] = self.writing, copies
        if len(self._writes) % 3 == 0 and not self._is_inside_write:
            self._in_the_middle_of_a_write()

    def _in_the_middle_of_a_write(self) -> None:
        """Which takes long: the comm threads and the step threads of D go on, and those of P hear of it."""
        self._is_inside_write = True
        for process in self.of(Role.DECODE):
            if not process.is_frozen and not process.is_slow and process not in self._stepping:
                self._step(process)
        for _ in range(min(2, len(self.frames))):
            self._deliver(0)
        for process in self.of(Role.PREFILL):
            if not process.is_frozen:
                process.tick(self.clock.monotonic())
        self._is_inside_write = False

    def _step(self, process: Process) -> bool:
        self._stepping.append(process)
        worked = process.step()
        self._stepping.remove(process)
        return worked

    def _check_landing(self, target: str, copies: CopyList) -> None:
        """No byte of a room moves but between what is in that room's hands."""
        room = self._writes[id(copies)][0]
        for process in self.processes:
            memory, is_source = process.memory, process.role is Role.PREFILL
            if not is_source and process.session != target:
                continue
            at = np.asarray(copies.src if is_source else copies.dst, dtype=np.int64)
            inside = (at >= memory.arena_base) & (at < memory.arena_base + memory.arena_bytes)
            if not inside.any():
                continue
            region_bytes = NUM_PAGES * PAGE_BYTES
            length = np.asarray(copies.length, dtype=np.int64)
            pages: set[int] = set()
            slots: set[int] = set()
            for start, count in zip(at - memory.arena_base, length, strict=True):
                if start < memory.aux_base - memory.arena_base:
                    first = int(start % region_bytes) // PAGE_BYTES
                    pages |= set(range(first, first + -(-int(count) // PAGE_BYTES)))
                else:
                    slots.add(int(start - memory.aux_base + memory.arena_base) // memory.aux_row_bytes)
            process.check_landing(room, pages, slots, is_source)

    # ----------------------------------------------------------------------------------------------------------- ends

    def check(self) -> None:
        for process in self.processes:
            process.check()

    def settle_down(self, limit_s: float = 30.0) -> None:
        """No more faults, all alive: every request must end, and everything come back."""
        self.is_router_alive or self.op_router(0, 0)
        while self.missing:
            self.start(0)
        for process in self.processes:
            process.is_frozen = process.is_slow = process.is_deaf = False
        self.fabric._faults.clear()
        self.turns(3)  # all join again
        start_s = self.clock.monotonic()
        while self.leftovers():
            assert self.clock.monotonic() - start_s < limit_s, f"not quiet after {limit_s} s: {self.leftovers()}"
            self.fabric.release_late_writes()
            self.turns(3) or self.advance(0.2)
            self.check()
        for process in self.processes:
            process.check_empty()

    def leftovers(self) -> list[str]:
        left = [f"request {asked.room.hex()[:6]}" for asked in self.requests.values() if not asked.end]
        for process in self.processes:
            if not process.scheduler.is_idle:
                left.append(f"{process.session} has {[s.state.name for s in process.sequences().values()]}")
            if len(process.table):
                left.append(f"{process.session} keeps {[entry.state.name for _, entry in process.table.items()]}")
        return left or (["messages"] if self.frames or self.orders or self.reports else [])

    def check_it_still_serves(self) -> None:
        """Whatever happened: every pair serves a new request, at once and exactly."""
        asked = [self.ask(pair, 9, 5) for pair in range(4)]
        self.settle_down(3.0)
        assert [request.end for request in asked if request] == ["finished"] * 4
