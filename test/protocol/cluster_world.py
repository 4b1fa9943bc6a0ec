"""A simulated cluster with a router: a plain one that knows every answer, and the real one."""

from __future__ import annotations

import contextlib
import random
from array import array
from dataclasses import dataclass, field

from cluster import MAX_LIVE_REQUESTS, TURN_S, Cluster
from cluster_process import CONFIG, INFO, REQUEST_TIMEOUT_S, LateProcess, Process, SlowProcess, Writes
from pd_node import mixed
from support.keyed_peer import KeyedPeer
from support.requests import decode_request, prefill_request

from chitu.errors import ChituError, NoInstance, Overloaded
from chitu.fake.executor import expected_tokens
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    CancelRequest,
    Finish,
    Heartbeat,
    InstanceInfo,
    RequestFailed,
    SamplingParams,
    SchedulerMessage,
    pack_i32,
    peer_codec,
    scheduler_codec,
    token_codec,
)
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.generation import GenerateRequest, Generation
from chitu.router.loads import EXPIRES
from chitu.router.members import MEMORY_S
from chitu.tracing.trace_files import RouterTrace
from chitu.types import Role

# ----------------------------------------------------------------------------------------------------------------------
# `Cluster` with a plain router that knows every answer: it sends requests, checks each token and end, and never
# retries.


@dataclass
class CheckedRequest:
    """A request in the router's state."""

    room: bytes
    prefill: int
    """Incarnation of the P."""
    decode: int
    prompt: list[int]
    expected: list[int]
    asked_s: float
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """`finished`, or the reason for another end."""
    message: str = ""


class ClusterWorld(Cluster):
    def __init__(self, num_prefill: int = 2, num_decode: int = 2, writes: Writes | None = None) -> None:
        self.requests: dict[bytes, CheckedRequest] = {}
        self.finishes: set[bytes] = set()
        """Rooms that D ended."""
        self._num_rooms = 0
        super().__init__(num_prefill, num_decode, writes)

    # ---------------------------------------------------------------------------------------------------- the script

    def op_ask(self, a: int, b: int) -> None:
        """Send one request; with some `a` one half is lost, as when a connection is cut."""
        if sum(not request.end for request in self.requests.values()) < MAX_LIVE_REQUESTS and self.is_router_alive:
            max_tokens, lost = 1 + b // 22 % 14 * 2, (a // 16 % 12) - 9
            self.ask(a, 1 + b % 22, max_tokens, lost, self._next_turn(b, max_tokens) if a // 8 % 2 else None)

    def _next_turn(self, b: int, max_tokens: int) -> list[int] | None:
        """Return the prompt of a next turn: a finished prompt, its answer and some more tokens. None if no conversation
        can go on."""
        known = [asked.prompt + asked.expected for asked in self.requests.values() if asked.end == "finished"]
        prompts = [[*tokens, *range(b % 7)] for tokens in known if len(tokens) + 6 + max_tokens <= INFO.max_model_len]
        return prompts[b % len(prompts)] if prompts else None

    def op_cancel(self, a: int, b: int) -> None:
        live = [request for request in self.requests.values() if not request.end]
        if live and self.is_router_alive:
            self.end(live[a % len(live)], "cancelled")

    def op_again(self, a: int, b: int) -> None:
        """Let the router cancel a request for the second time, whether it has ended or not."""
        if self.requests:
            asked = list(self.requests.values())[a % len(self.requests)]
            if asked.end:
                self._cancel(asked)

    def op_router(self, a: int, b: int) -> None:
        self.is_router_alive = not self.is_router_alive
        if not self.is_router_alive:
            for request in self.requests.values():
                request.end = request.end or "router gone"
            self.orders.clear()
        else:
            self.router_incarnation = mixed(self.router_incarnation)
            self.end_router()

    # ------------------------------------------------------------------------------------------- router -> instances

    def ask(
        self, pair: int, num_tokens: int, max_tokens: int, lost: int = 0, prompt: list[int] | None = None
    ) -> CheckedRequest | None:
        """Send a request; return None if the router has no P or no D. `lost`: 1 or 2 to lose P's or D's half on the
        way. `prompt`: by default one of `num_tokens`."""
        takes = [p for p in self.processes if p.incarnation in self.members and not self.is_changing(p)]
        prefills = [p for p in takes if p.role is Role.PREFILL]
        decodes = [p for p in takes if p.role is Role.DECODE]
        if not prefills or not decodes:
            return None
        prefill, decode = prefills[pair % len(prefills)], decodes[pair // 2 % len(decodes)]
        self._num_rooms += 1
        room = random.Random(self._num_rooms).randbytes(16)
        # Prompts of one family share a prefix; its length differs.
        family, fork = self._num_rooms % 2, 3 * (self._num_rooms % 6)
        tokens_at = ((family if at < fork else self._num_rooms + 2) * 31 + at * 7 for at in range(num_tokens))
        prompt = prompt or [token % INFO.vocab_size for token in tokens_at]
        tokens, sampling = pack_i32(array("i", prompt)), SamplingParams(max_tokens=max_tokens, temperature=0.0)
        expected = expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)
        asked = CheckedRequest(room, prefill.incarnation, decode.incarnation, prompt, expected, self.clock.monotonic())
        self.requests[room] = asked
        name = f"r{self._num_rooms}"
        if lost != 2:
            half = decode_request(room, name, tokens, sampling, prefill.rank, prefill.incarnation)
            self.orders.append((decode.incarnation, half))
        if lost != 1:
            self.orders.append(
                (prefill.incarnation, prefill_request(room, name, tokens, decode.rank, decode.incarnation))
            )
        return asked

    def end(self, asked: CheckedRequest, end: str, message: str = "") -> None:
        """End a request as `Attempts` does: each end that D did not cause itself is sent to both sides."""
        is_explained = end not in ("integrity", "internal", "bad_frame", "protocol", "step_failed")
        assert is_explained or (end == "integrity" and self.num_flips), f"no fault explains {end}: {message}"
        if not asked.end:
            asked.end, asked.message = end, message
            self._cancel(asked)

    def _cancel(self, asked: CheckedRequest) -> None:
        self.orders.extend((side, CancelRequest(asked.room)) for side in (asked.decode, asked.prefill))

    def on_members(self, new: list[InstanceInfo], lost: list[InstanceInfo]) -> None:
        gone = {info.incarnation for info in lost}
        for request in self.requests.values():
            if request.decode in gone:
                self.end(request, "decode_lost")

    def router_tick(self) -> None:
        for request in self.requests.values():
            if self.clock.monotonic() - request.asked_s > REQUEST_TIMEOUT_S:
                self.end(request, "request_timeout")

    # ------------------------------------------------------------------------------------------- instances -> router

    def take_tokens(self, frame: bytes) -> None:
        self.reports.append(lambda: self._on_tokens(frame))

    def take_failure(self, failed: RequestFailed) -> None:
        assert failed.message, "an error without words"
        self.reports.append(lambda: self.end(self.requests[failed.room], failed.code, failed.message))

    def take_heartbeat(self, beat: Heartbeat) -> None:
        """Do nothing: this router counts no messages and no loads."""

    def on_submit(self, process: Process, message: SchedulerMessage) -> None:
        """Do nothing: a request may come twice here."""

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
            self.end(asked, finish.code, finish.message)

    # ----------------------------------------------------------------------------------------------------------- ends

    def open_requests(self) -> list[str]:
        return [f"request {asked.room.hex()[:6]}" for asked in self.requests.values() if not asked.end]

    def check_it_still_serves(self) -> None:
        """Check that every pair serves a new request, at once and exactly, whatever happened before."""
        asked = [self.ask(pair, 9, 5) for pair in range(4)]
        self.settle_down(3.0)
        assert [request.end for request in asked if request] == ["finished"] * 4


class LateWorld(ClusterWorld):
    process_type = LateProcess


class SlowWorld(ClusterWorld):
    process_type = SlowProcess


# ----------------------------------------------------------------------------------------------------------------------
# `Cluster` with the real `PDRequestRouter`: requests are retried on other pairs, streams continue elsewhere. It checks
# what a client receives: each token once, in order and right, whatever became of its attempts, and exactly one end.
# Token messages and requests may be lost, as with a connection that breaks.


@dataclass
class Client:
    """Client that reads like the HTTP layer: takes what is there at each wake."""

    expected: list[int]
    generation: Generation | None = None
    tokens: list[int] = field(default_factory=list)
    is_cut: bool = False
    """Whether its router died."""

    def wake(self) -> None:
        if self.generation is None:
            return  # the request is being sent now
        self.tokens += self.generation.take()
        assert self.tokens == self.expected[: len(self.tokens)], "a token is wrong, missing or there twice"

    @property
    def end(self) -> str:
        generation = self.generation
        if generation is None or not generation.done:
            return "router gone" if self.is_cut else ""
        return "finished" if generation.error is None else generation.error.code


FORGOTTEN_S = EXPIRES * MEMORY_S[0]
"""Time after which the router forgets the rate of a queue in which nothing has waited."""


class RoutedWorld(Cluster):
    def __init__(self, num_prefill: int = 2, num_decode: int = 2, writes: Writes | None = None) -> None:
        self.clients: list[Client] = []
        self._num_requests = 0
        self.open_peers: set[InstanceKey] = set()
        self.router: PDRequestRouter | None = None
        self.cuts: dict[int, int] = {}
        """Number of its next token messages that a D loses, by incarnation."""
        self.severed: dict[int, int] = {}
        """Number of the router's next messages to a process that get lost, by incarnation."""
        self.muted: dict[int, int] = {}
        """Number of its next failure reports that get lost, by incarnation."""
        self.handed_over: set[tuple[int, bytes]] = set()
        """Request halves that arrived: the receiver's incarnation and the room."""
        self.silence: set[tuple[int, int]] = set()
        """Links between P and D that lose everything: (incarnation of the sender, port of the receiver)."""
        super().__init__(num_prefill, num_decode, writes)

    # ------------------------------------------------------------------------------------------ between P and D

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        if not self.silence or (peer_codec.decode(payload).incarnation, port) not in self.silence:
            super().link(host, port, room, payload)

    # ------------------------------------------------------------------------------------- as the outbox of the router

    def open(self, instance: InstanceInfo) -> KeyedPeer:
        self.open_peers.add(instance_key(instance))
        return KeyedPeer(self, instance_key(instance))

    def send(self, key: InstanceKey, frame: bytes) -> bool:
        if key not in self.open_peers:
            return False
        if self.severed.get(key.incarnation, 0) > 0:
            self.severed[key.incarnation] -= 1
        else:
            self.orders.append((key.incarnation, scheduler_codec.decode(frame)))
        return True

    def close_peer(self, key: InstanceKey) -> None:
        self.open_peers.discard(key)

    def on_submit(self, process: Process, message: SchedulerMessage) -> None:
        if not isinstance(message, CancelRequest):
            half = process.incarnation, message.head.room
            assert half not in self.handed_over, "a request came twice"
            self.handed_over.add(half)

    # ------------------------------------------------------------------------------------------- instances -> router

    def take_heartbeat(self, beat: Heartbeat) -> None:
        self.reports.append(lambda: self.router.on_heartbeat(beat) if self.router else None)

    def take_tokens(self, frame: bytes) -> None:
        incarnation = token_codec.decode(frame).incarnation
        if self.cuts.get(incarnation, 0) > 0:
            self.cuts[incarnation] -= 1
        else:
            self.reports.append(lambda: self.router.on_token_frames([frame]) if self.router else None)

    def take_failure(self, failed: RequestFailed) -> None:
        if self.muted.get(failed.incarnation, 0) > 0:
            self.muted[failed.incarnation] -= 1
        else:
            self.reports.append(lambda: self.router.on_request_failed(failed) if self.router else None)

    def on_members(self, new: list[InstanceInfo], lost: list[InstanceInfo]) -> None:
        assert self.router is not None
        for info in new:
            self.router.on_joined(info)
        self.router.on_view(self.view())
        for info in lost:
            self.router.on_lost(info, "silent", has_died=False)

    def router_tick(self) -> None:
        assert self.router is not None
        self.router.tick()

    def publish(self) -> None:
        if self.is_router_alive and self.router is None:
            trace = RouterTrace(None, None, "router", self.clock)  # type: ignore[arg-type]  # nothing is traced
            self.router = PDRequestRouter(self, self.clock, CONFIG, trace)  # type: ignore[arg-type]
        super().publish()

    # ------------------------------------------------------------------------------------------------------ the script

    def op_ask(self, a: int, b: int) -> None:
        if sum(not client.end for client in self.clients) < MAX_LIVE_REQUESTS and self.router is not None:
            with contextlib.suppress(NoInstance, Overloaded):
                self.request(1 + b % 22, 1 + b // 22 % 14 * 2, (1, 1, 2, 3)[a // 4 % 4], a // 16 % 2 == 0)

    def request(self, num_tokens: int, max_tokens: int, num_choices: int = 1, is_read_singly: bool = True) -> Client:
        """Send a request, whose tokens come in groups unless it is read singly. Return the client of its first choice.
        Raises NoInstance if no instance can serve it, Overloaded if it would wait too long."""
        assert self.router is not None
        self._num_requests += 1
        family = self._num_requests % 3  # prompts of a family share a prefix, up to the end of the shorter one
        prompt = [(family * 31 + at * 7) % INFO.vocab_size for at in range(num_tokens)]
        clients: list[Client] = []
        requests: list[GenerateRequest] = []
        for choice in range(num_choices):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=float(num_choices > 1), seed=choice)
            clients.append(Client(expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)))
            name = f"r{self._num_requests}-{choice}"
            ids = pack_i32(array("i", prompt))
            requests.append(GenerateRequest(name, ids, num_tokens, sampling, wake_per_token=is_read_singly))

        def wake() -> None:
            for client in clients:
                client.wake()

        generations: list[Generation] = []
        try:
            while len(generations) < num_choices:
                generations += self.router.add_choices(requests[len(generations) :], wake)
        except ChituError:
            for generation in generations:
                self.router.cancel(generation)
            raise
        for client, generation in zip(clients, generations, strict=True):
            client.generation = generation
        self.clients += clients
        return clients[0]

    def op_cancel(self, a: int, b: int) -> None:
        live = [client for client in self.clients if not client.end]
        if live and self.router is not None:
            client = live[a % len(live)]
            assert client.generation is not None
            self.router.cancel(client.generation)

    def op_again(self, a: int, b: int) -> None: ...

    def op_cut(self, a: int, b: int) -> None:
        """Break D's connection to the token port, which loses so many of its next messages."""
        decodes = self.of(Role.DECODE)
        if decodes:
            self.cuts[decodes[a % len(decodes)].incarnation] = 1 + b % 3

    def op_mute(self, a: int, b: int) -> None:
        """Break P's connection to the stats port, which loses so many of its next failure reports."""
        prefills = self.of(Role.PREFILL)
        if prefills:
            self.muted[prefills[a % len(prefills)].incarnation] = 1 + b % 3

    def op_sever(self, a: int, b: int) -> None:
        """Break the router's connection to a process, which loses what is in flight, or the next messages."""
        process = self.processes[a % len(self.processes)]
        self.sever(process, 1 + b % 3) if b % 2 else self.lose_orders(process)

    def sever(self, process: Process, count: int) -> None:
        self.severed[process.incarnation] = count

    def lose_orders(self, process: Process) -> None:
        """Lose all messages in flight to a process."""
        left = [order for order in self.orders if order[0] != process.incarnation]
        self.orders.clear()
        self.orders.extend(left)

    def op_crash(self, a: int, b: int) -> None:
        """Let P0 or D0 die and restart; P1 and D1 live."""
        role = (Role.PREFILL, Role.DECODE)[a % 2]
        self.kill(next(process for process in self.of(role) if process.rank == 0))
        self.start(len(self.missing) - 1)

    def op_router(self, a: int, b: int) -> None:
        self.is_router_alive = not self.is_router_alive
        self.router, self.open_peers = None, set()
        self.end_router()
        self.orders.clear()
        self.reports.clear()
        for client in self.clients:
            client.is_cut = True
        self.router_incarnation = mixed(self.router_incarnation)

    # ------------------------------------------------------------------------------------------------------------ ends

    def settle_down(self, limit_s: float = 30.0) -> None:
        self.cuts.clear()
        self.severed.clear()
        self.muted.clear()
        super().settle_down(limit_s)

    def check(self) -> None:
        super().check()
        if self.router is not None:
            attempts = self.router._attempts
            waiting = [attempt for attempt in attempts.rooms.values() if attempt.first_token_s is None]
            assert attempts.num_waiting == len(waiting)
        for client in self.clients:
            assert client.end != "step_failed", "KV of another request, or torn"  # stops only its own step
            if client.end == "finished":
                assert client.tokens == client.expected, "an answer that is not whole"

    def open_requests(self) -> list[str]:
        return [f"a client has {len(c.tokens)} tokens" for c in self.clients if not c.end]

    def leftovers(self) -> list[str]:
        """Return what is left; also a pair whose late writes are over, as long as the router does not know."""
        is_kept_apart = self.router is not None and self.router._members.num_cut_off > 0
        return super().leftovers() or (["a pair that the router keeps apart"] if is_kept_apart else [])

    def check_it_still_serves(self) -> None:
        """Check that a request still finds a pair, even if breakers are open. A client that is refused comes back when
        it is told to: an instance that was stopped for less than its lease, while prompts waited, is slow to the router
        until its queue moves again, or that was `FORGOTTEN_S` ago. The first is never refused: nothing waits."""
        start_s, asked = self.clock.monotonic(), [self.request(9, 5)]
        while len(asked) < 4:
            try:
                asked.append(self.request(9, 5))
            except Overloaded as error:
                assert error.retry_after_s is not None and self.clock.monotonic() - start_s < FORGOTTEN_S
                self.turns(1 + int(error.retry_after_s / TURN_S))
        self.settle_down(6.0)
        assert [client.end for client in asked] == ["finished"] * 4


class LateRoutedWorld(RoutedWorld):
    process_type = LateProcess


class SlowRoutedWorld(RoutedWorld):
    process_type = SlowProcess
