"""`Cluster` with a plain router that knows every answer: it sends requests, checks each token and end, and never
retries."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from cluster import MAX_LIVE_REQUESTS, Cluster
from cluster_process import DEADLINES, INFO, REQUEST_TIMEOUT_S, LateProcess, Process
from cluster_writes import Writes
from pd_node import mixed
from support.fake_executor import expected_tokens

from chitu.errors import ChituError
from chitu.protocol import (
    CancelRequest,
    ClusterView,
    DecodeRequest,
    Finish,
    LinkAck,
    PrefillRequest,
    RequestPortMessage,
    SamplingParams,
    pack_i32,
    token_codec,
)
from chitu.types import Role


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
        self._members: tuple[int, ...] = ()
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
            self._members = self.told_dead = ()

    # ------------------------------------------------------------------------------------------- router -> instances

    def ask(
        self, pair: int, num_tokens: int, max_tokens: int, lost: int = 0, prompt: list[int] | None = None
    ) -> CheckedRequest | None:
        """Send a request; return None if the router has no P or no D. `lost`: 1 or 2 to lose P's or D's half on the
        way. `prompt`: by default one of `num_tokens`."""
        prefills = [p for p in self.of(Role.PREFILL) if p.incarnation in self._members]
        decodes = [p for p in self.of(Role.DECODE) if p.incarnation in self._members]
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
            half = DecodeRequest(room, name, tokens, sampling, prefill.rank, prefill.incarnation)
            self.orders.append((decode.incarnation, half))
        if lost != 1:
            self.orders.append(
                (prefill.incarnation, PrefillRequest(room, name, tokens, decode.rank, decode.incarnation))
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

    def hand_over(self, process: Process, message: RequestPortMessage) -> None:
        assert not isinstance(message, LinkAck), "this router does not count"
        process.submit(message)

    def publish(self) -> None:
        if not self.is_router_alive:
            return
        now_s = self.clock.monotonic()
        joined = [p for p in self.processes if p.router == self.router_incarnation]
        present = [p for p in joined if now_s - p.beat_s < DEADLINES.lease_s]
        members = tuple(sorted(p.incarnation for p in present))
        if members != self._members:
            for request in self.requests.values():
                if request.decode in set(self._members) - set(members):
                    self.end(request, "decode_lost")
            self._members = members
        for request in self.requests.values():
            if now_s - request.asked_s > REQUEST_TIMEOUT_S:
                self.end(request, "request_timeout")
        members_info = tuple(p.info for p in present)
        self.show(ClusterView(self.router_incarnation, 0, members_info, dead=self.told_dead))

    # ------------------------------------------------------------------------------------------- instances -> router

    def take_tokens(self, frame: bytes) -> bool:
        self.reports.append(lambda: self._on_tokens(frame))
        return True

    def take_failure(self, process: Process, room: bytes, error: ChituError) -> None:
        assert error.message, "an error without words"
        self.reports.append(lambda: self.end(self.requests[room], error.code, error.message))

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
