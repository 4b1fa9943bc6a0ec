"""The step loop with an executor that checks every plan: right tokens, nothing leaked, whatever comes and goes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import ExecutorInfo
from chitu.errors import BadFrame, ChituError, TransferFailed
from chitu.grammars import GrammarStore
from chitu.instance.request_arrivals import wrong_sampling
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.kv_transfer.events import KVChunk, TransferEvent, TransferEventKind
from chitu.pd_scheduler import PDScheduler, PDSchedulerParts
from chitu.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    CancelRequest,
    DecodeRequest,
    Finish,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
    token_codec,
    unpack_logprobs,
)
from chitu.testing.clock import FakeClock
from chitu.testing.fake_executor import FakeExecutor, expected_tokens, fake_logprobs
from chitu.testing.late_executor import LateExecutor
from chitu.types import Ready

PAGE_SIZE = 4
INFO = ExecutorInfo(num_slots=8, max_model_len=200, vocab_size=1000, num_layers=2, eos_token_ids=(2,))


class Slots:
    """Aux slots, and nothing else of `MetadataBuffers`."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)


class Instance:
    """One scheduler with a fake executor, and what came out of it."""

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
        with_aux: bool = False,
        grammars: GrammarStore | None = None,
    ) -> None:
        """`overlap`: on a device that is late."""
        self.clock = clock or FakeClock()
        self.tokens: dict[bytes, list[int]] = {}
        self.has_logprobs: dict[bytes, bool] = {}
        """Whether logprobs came with the tokens of a room: with all of them, or with none."""
        self.prompts: dict[bytes, bytes] = {}
        """Logprobs of prompts."""
        self.finishes: dict[bytes, Finish] = {}
        self.cached: dict[bytes, int] = {}
        self.failures: dict[bytes, ChituError] = {}
        self.ports: dict[int, list[bytes]] = {}
        """Rooms of the messages that went to token ports of API processes."""
        self.open_ports: list[int] = []
        self.cache = PagedKVCacheManager(num_pages, PAGE_SIZE, b"model")
        self.aux = Slots(aux_slots)
        self.executor = executor(INFO, num_pages, PAGE_SIZE, aux_slots)
        self.late = late(self.executor)
        self.scheduler = PDScheduler(
            PDSchedulerParts(
                config=config
                or SchedulerConfig(
                    max_running_requests=8, max_batched_tokens=16, chunk_size=chunk, reserved_decode_tokens=4
                ),
                deadlines=DeadlineConfig(),
                executor=self.late if overlap else self.executor,
                cache=self.cache,
                tokens=TokenManager(1, self._take, self._open_port),
                report_failure=self.failures.__setitem__,
                clock=self.clock,
                aux=self.aux if sender or receiver or with_aux else None,
                num_aux_slots=aux_slots,
                sender=sender,
                receiver=receiver,
                tiers=self.make_tiers(),
                overlap=overlap,
                grammars=grammars,
            )
        )

    def make_tiers(self) -> PrefixTiers | None:
        """Behind the prefix cache."""
        return None

    def _open_port(self, port: int) -> Port:
        if not 0 < port < 65536:
            raise BadFrame(f"{port} is no port")
        self.open_ports.append(port)
        return Port(port, self)

    def _take(self, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        for place, (room, token) in enumerate(zip(batch.rooms, batch.tokens, strict=True)):
            assert room not in self.finishes, "a token after the end"
            self.tokens.setdefault(room, []).append(token)
            assert room not in dict(batch.prompt_logprobs) or len(self.tokens[room]) == 1
            logprobs = dict(batch.logprobs).get(place)
            assert self.has_logprobs.setdefault(room, logprobs is not None) == (logprobs is not None)
            assert logprobs is None or unpack_logprobs(logprobs).logprob == -token, "logprobs of another token"
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
        assert not self.executor.saved_keys
        load = self.scheduler.load
        assert (load.waiting, load.transferring, load.running, load.retracted) == (0, 0, 0, 0)
        assert load.pages_free + load.pages_cached == load.pages_total


@dataclass
class Port:
    """Token port of one API process of the router."""

    number: int
    instance: Instance

    def send(self, frame: bytes) -> bool:
        self.instance.ports.setdefault(self.number, []).extend(token_codec.decode(frame).rooms)
        return self.instance._take(frame)

    def close(self) -> None:
        self.instance.open_ports.remove(self.number)


class Wire:
    """A perfect transfer between two schedulers: both role interfaces, moving aux rows when the test says so."""

    def __init__(self) -> None:
        self.prefill: Instance | None = None
        self.decode: Instance | None = None
        self.announced: dict[bytes, int] = {}
        self.prefix_pages: dict[bytes, int] = {}
        self.requested: set[bytes] = set()
        self.computed: dict[bytes, int] = {}
        self.prompt_logprobs: dict[bytes, bytes | None] = {}
        self.delivered: set[bytes] = set()
        self.dead: set[bytes] = set()
        self.failing: set[bytes] = set()
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
            assert len(chunk.pages) * PAGE_SIZE >= chunk.end

    def on_layer_done(self, layer: int, ready: Ready | None = None) -> None: ...

    def end_step(self) -> None: ...

    def send_kv_cache(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None = None) -> None:
        self.computed[room] = aux_slot
        self.prompt_logprobs[room] = prompt_logprobs

    def reset_chunks(self, room: bytes) -> bool:
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
    ) -> None:
        needs_kv = self.decode is None or self.decode.scheduler._decode.transfer[room].needs_kv
        assert len(pages) == (-(-num_tokens // PAGE_SIZE) if needs_kv else 0)
        assert prefix_pages <= (num_tokens // PAGE_SIZE if needs_kv else 0)
        self.announced[room], self.prefix_pages[room] = aux_slot, prefix_pages
        if room in self.requested:
            self.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room))

    def abort(self, room: bytes, error: ChituError) -> None:
        self.dead.add(room)
        for events in (self.events_p, self.events_d):
            events.append(TransferEvent(TransferEventKind.RELEASED, room))

    def deliver(self, rng: random.Random) -> None:
        """Move some of what is computed and announced, logits and KV sometimes in different steps."""
        assert self.prefill and self.decode
        for room, source in list(self.computed.items()):
            if room in self.dead or room not in self.announced or rng.random() < 0.5:
                continue
            if room in self.failing:
                error = TransferFailed("the link broke")
                self.dead.add(room)
                for events in (self.events_p, self.events_d):
                    events.append(TransferEvent(TransferEventKind.FAILED, room, error))
                    events.append(TransferEvent(TransferEventKind.RELEASED, room))
            elif room not in self.delivered:
                self.delivered.add(room)
                target = self.decode.executor.aux_row(self.announced[room])
                target[:] = self.prefill.executor.aux_row(source)
                self.events_d.append(TransferEvent(TransferEventKind.LOGITS_READY, room))
            else:
                del self.computed[room]
                lines = self.prompt_logprobs[room]
                self.events_d.append(
                    TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=100, prompt_logprobs=lines)
                )
                self.events_p.append(TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=100))


class PSide(Wire):
    """`poll` of P on a shared wire."""

    def __init__(self, wire: Wire) -> None:
        self.__dict__ = wire.__dict__

    def poll(self) -> list[TransferEvent]:
        events = list(self.events_p)
        self.events_p.clear()
        return events


class DSide(Wire):
    """`poll` of D on a shared wire."""

    def __init__(self, wire: Wire) -> None:
        self.__dict__ = wire.__dict__

    def poll(self) -> list[TransferEvent]:
        events = list(self.events_d)
        self.events_d.clear()
        return events


def room_of(index: int) -> bytes:
    return index.to_bytes(16, "big")


def prompt_of(index: int, length: int) -> list[int]:
    """Prompts of one family begin alike, each up to another place."""
    family, fork = index % 2, 3 * (index % 6)
    return [((family if at < fork else index + 2) * 31 + at * 7) % INFO.vocab_size for at in range(length)]


loads = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 23)), min_size=1, max_size=20)
"""Prompt length, max_tokens, and how far another instance had come with the request before it was lost."""


def continued(
    index: int, prompt_len: int, max_tokens: int, progress: int
) -> tuple[bytes, SamplingParams, int, list[int]]:
    """Every other request goes on where another instance was lost: tokens to send, how they are sampled, how many of
    them are output, and what is to come."""
    logprobs = (None, 0, 2)[index % 3]
    asked = {"logprobs": logprobs, "prompt_logprobs": 1 if index % 5 < 2 else None}
    sampling = SamplingParams(max_tokens, temperature=float(index % 4 // 2), seed=index, **asked)
    prompt = prompt_of(index, prompt_len)
    tokens = expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)
    num_emitted = progress % max_tokens if index % 2 else 0
    return pack_i32(prompt + tokens[:num_emitted]), sampling, num_emitted, tokens[num_emitted:]


def check_prompt(instance: Instance, index: int, one: tuple[int, int, int]) -> None:
    """Of a served request: every token of the prompt but the first, once, whatever chunks, caches and undone steps."""
    _, sampling, num_emitted, _ = continued(index, *one)
    lines = instance.prompts.get(room_of(index))
    if num_emitted or sampling.prompt_logprobs is None:
        assert lines is None
        return
    prompt = prompt_of(index, one[0])
    assert lines == b"".join([fake_logprobs(token, sampling.prompt_logprobs) for token in prompt[1:]])


@settings(max_examples=150, deadline=None)
@given(loads, st.integers(17, 60), st.integers(1, 16))
def test_unified_tokens_are_right_and_every_page_comes_back(
    load: list[tuple[int, int, int]], num_pages: int, chunk: int
) -> None:
    instance = Instance(num_pages, chunk=chunk)
    for index, one in enumerate(load):
        token_ids, sampling, num_emitted, _ = continued(index, *one)
        instance.scheduler.submit(UnifiedRequest(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    instance.run()
    for index, one in enumerate(load):
        assert instance.tokens[room_of(index)] == continued(index, *one)[3]
        assert instance.finishes[room_of(index)].reason == "length"
        assert instance.has_logprobs[room_of(index)] == (index % 3 > 0)
        check_prompt(instance, index, one)
    instance.check_empty()


@settings(max_examples=150, deadline=None)
@given(loads, st.integers(17, 50), st.integers(17, 50), st.integers(1, 4), st.randoms(use_true_random=False))
def test_pd_tokens_are_right_with_cancels_and_failures_and_nothing_leaks(
    load: list[tuple[int, int, int]], pages_p: int, pages_d: int, aux_slots: int, rng: random.Random
) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), aux_slots=aux_slots)
    decode = wire.decode = Instance(pages_d, receiver=DSide(wire), aux_slots=aux_slots)
    cancelled: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.7:
            index, one = pending.pop(0)
            prompt, sampling, num_emitted, _ = continued(index, *one)
            decode.scheduler.submit(DecodeRequest(room_of(index), f"r{index}", prompt, sampling, 0, 1, num_emitted))
            asked = None if num_emitted else sampling.prompt_logprobs
            half = PrefillRequest(room_of(index), f"r{index}", prompt, 0, 1, prompt_logprobs=asked)
            prefill.scheduler.submit(half)
            fate = rng.random()
            if fate < 0.15:
                wire.failing.add(room_of(index))
        if rng.random() < 0.05 and len(pending) < len(load):
            room = room_of(rng.randrange(len(load) - len(pending)))
            if room not in decode.finishes:
                cancelled.add(room)
                prefill.scheduler.submit(CancelRequest(room))
                decode.scheduler.submit(CancelRequest(room))
        for instance in (prefill, decode) if rng.random() < 0.5 else (decode, prefill):
            if rng.random() < 0.8:
                instance.scheduler.step()
        wire.deliver(rng)
        if not pending and prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    prefill.run()
    decode.run()
    for index, one in enumerate(load):
        room = room_of(index)
        expected = continued(index, *one)[3]
        tokens = decode.tokens.get(room, [])
        if room in cancelled or (room in wire.failing and decode.finishes[room].reason == "error"):
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert decode.finishes[room].reason == "length"
            check_prompt(decode, index, one)
    prefill.check_empty()
    decode.check_empty()
    assert not prefill.tokens, "P never samples"


def test_a_stop_id_ends_a_request_at_once_and_ignore_eos_overrides_only_eos() -> None:
    prompt = prompt_of(1, 6)
    tokens = expected_tokens(prompt, 10, INFO.vocab_size)
    instance = Instance(32)
    sampling = SamplingParams(10, temperature=0.0, stop_token_ids=(tokens[3],))
    instance.scheduler.submit(UnifiedRequest(room_of(1), "r", pack_i32(prompt), sampling))
    instance.run()
    end = tokens.index(tokens[3]) + 1
    assert instance.tokens[room_of(1)] == tokens[:end]
    assert instance.finishes[room_of(1)].reason == "stop"


def test_an_impossible_request_is_refused_and_the_next_one_served() -> None:
    instance = Instance(8)
    instance.scheduler.submit(UnifiedRequest(room_of(1), "big", pack_i32(prompt_of(1, 30)), SamplingParams(10)))
    instance.scheduler.submit(UnifiedRequest(room_of(2), "empty", b"", SamplingParams(10)))
    instance.scheduler.submit(UnifiedRequest(room_of(3), "long", pack_i32(prompt_of(1, 300)), SamplingParams(10)))
    instance.scheduler.submit(UnifiedRequest(room_of(4), "ok", pack_i32(prompt_of(1, 3)), SamplingParams(2)))
    for room, num_emitted in ((5, 3), (6, 4), (7, 2)):  # nothing but output; more than that; all that was asked for
        prompt = pack_i32(prompt_of(1, 3))
        instance.scheduler.submit(UnifiedRequest(room_of(room), "bad", prompt, SamplingParams(2), num_emitted))
    instance.run()
    codes = [instance.finishes[room_of(n)].code for n in range(1, 8)]
    assert codes == ["capacity", "invalid_request", "invalid_request", "", *["invalid_request"] * 3]


VOCAB = INFO.vocab_size
WRONG_SAMPLING = [
    SamplingParams(4, logit_bias={VOCAB: 1.0}),
    SamplingParams(4, logit_bias={-1: 1.0}),
    SamplingParams(4, logit_bias={1: float("nan")}),
    SamplingParams(4, logit_bias={token: 1.0 for token in range(MAX_LOGIT_BIAS + 1)}),
    SamplingParams(4, stop_token_ids=(1, VOCAB)),
    SamplingParams(4, stop_token_ids=(-1,)),
    SamplingParams(4, stop_token_ids=(1 << 63,)),
    SamplingParams(4, stop_token_ids=(3,) * (MAX_STOP_TOKEN_IDS + 1)),
    SamplingParams(4, allowed_token_ids=(1, VOCAB)),
    SamplingParams(4, allowed_token_ids=(3,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
    SamplingParams(4, bad_words=((1, 2), (-1,))),
    SamplingParams(4, bad_words=((1, 2), ())),
    SamplingParams(4, bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
    SamplingParams(4, bad_words=((1,),) * (MAX_BAD_WORDS + 1)),
    SamplingParams(4, temperature=float("inf")),
    SamplingParams(4, presence_penalty=float("nan")),
    SamplingParams(4, logprobs=MAX_LOGPROBS + 1),
    SamplingParams(4, logprobs=-1),
    SamplingParams(4, prompt_logprobs=MAX_LOGPROBS + 1),
]


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
@pytest.mark.parametrize("token", [VOCAB, -1, 2**31 - 1, -(2**31)])
def test_a_token_id_beyond_the_vocabulary_is_refused_wherever_it_stands(role: str, token: int) -> None:
    wire = Wire()
    side: dict[str, Wire] = {"prefill": {"sender": PSide(wire)}, "decode": {"receiver": DSide(wire)}}.get(role, {})
    instance = Instance(8, **side)  # type: ignore[arg-type]
    for place in range(3):  # the last one is said to be output of another instance
        ids, sampling = [1, VOCAB - 1, 0], SamplingParams(8)
        ids[place] = token
        room, prompt = room_of(place), pack_i32(ids)
        instance.scheduler.submit(
            PrefillRequest(room, "r", prompt, 0, 1)
            if role == "prefill"
            else DecodeRequest(room, "r", prompt, sampling, 0, 1, num_emitted=1)
            if role == "decode"
            else UnifiedRequest(room, "r", prompt, sampling, num_emitted=1)
        )
    instance.scheduler.step()
    ends = instance.failures if role == "prefill" else instance.finishes
    assert [ends[room_of(place)].code for place in range(3)] == ["invalid_request"] * 3
    assert f"{token} is no token id" in ends[room_of(0)].message
    assert instance.scheduler.is_idle


@pytest.mark.parametrize("sampling", WRONG_SAMPLING, ids=range(len(WRONG_SAMPLING)))
def test_sampling_that_a_step_could_not_take_is_refused(sampling: SamplingParams) -> None:
    instance = Instance(8)
    instance.scheduler.submit(UnifiedRequest(room_of(1), "r", pack_i32([1, 2]), sampling))
    instance.run()
    assert instance.finishes[room_of(1)].code == "invalid_request"


def test_lists_at_their_bounds_are_taken() -> None:
    bias = {token: 1.0 for token in range(MAX_LOGIT_BIAS)}
    assert not wrong_sampling(SamplingParams(4, logit_bias=bias), MAX_LOGIT_BIAS)
    assert not wrong_sampling(SamplingParams(4, stop_token_ids=(2,) * MAX_STOP_TOKEN_IDS), 3)
    assert not wrong_sampling(SamplingParams(4, allowed_token_ids=(2,) * MAX_ALLOWED_TOKEN_IDS), 3)
    assert not wrong_sampling(SamplingParams(4, bad_words=((2,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS), 3)
    assert not wrong_sampling(SamplingParams(4, logprobs=MAX_LOGPROBS), 3)


def test_half_requests_on_the_wrong_role_are_refused() -> None:
    wire = Wire()
    prefill, unified = Instance(8, sender=PSide(wire)), Instance(8)
    prompt = pack_i32(array("i", [1, 2]))
    unified.scheduler.submit(PrefillRequest(room_of(1), "r", prompt, 0, 1))
    unified.scheduler.submit(DecodeRequest(room_of(2), "r", prompt, SamplingParams(1), 0, 1))
    prefill.scheduler.submit(UnifiedRequest(room_of(3), "r", prompt, SamplingParams(1)))
    unified.run()
    prefill.run()
    assert unified.failures[room_of(1)].code == "invalid_request"
    assert unified.finishes[room_of(2)].code == "invalid_request"
    assert prefill.finishes[room_of(3)].code == "invalid_request"


@pytest.mark.parametrize("role", ["decode", "unified"])
def test_waiting_for_pages_has_a_deadline(role: str) -> None:
    wire = Wire()
    clock = FakeClock()
    instance = Instance(8, receiver=DSide(wire) if role == "decode" else None, clock=clock)
    prompt = pack_i32(prompt_of(1, 20))
    for index in (1, 2):
        if role == "decode":
            instance.scheduler.submit(DecodeRequest(room_of(index), "r", prompt, SamplingParams(12), 0, 1))
        else:
            instance.scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, SamplingParams(12)))
    instance.scheduler.step()
    clock.advance(30.5)
    instance.scheduler.step()
    assert instance.finishes[room_of(2)].code == "queue_timeout"
    assert room_of(1) not in instance.finishes


def test_a_new_router_ends_everything_of_the_old_one() -> None:
    instance = Instance(32)
    for index in range(5):
        prompt = pack_i32(prompt_of(index, 9))
        instance.scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, SamplingParams(50)))
    for _ in range(3):
        instance.scheduler.step()
    instance.scheduler.cancel_all()
    instance.scheduler.step()
    instance.run()
    assert not instance.finishes
    instance.check_empty()


@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
def test_who_waits_with_the_lowest_priority_is_first_and_of_equals_who_came_first(role: str) -> None:
    one_at_once = SchedulerConfig(max_running_requests=1, max_batched_tokens=16, chunk_size=8, reserved_decode_tokens=4)
    priorities = [0, 7, -3, 0, -(1 << 31) + 1, (1 << 31) - 1, 7]
    expected = sorted(range(len(priorities)), key=lambda i: (priorities[i], i))
    prompt, sampling = pack_i32(range(16)), SamplingParams(3)
    wire = Wire()
    side: dict[str, Any] = {"prefill": {"sender": PSide(wire)}, "decode": {"receiver": DSide(wire)}}.get(role, {})
    instance = Instance(40, config=one_at_once, aux_slots=len(priorities), **side)
    for i, priority in enumerate(priorities):
        instance.scheduler.submit(
            PrefillRequest(room_of(i), "r", prompt, 0, 1, priority=priority)
            if role == "prefill"
            else DecodeRequest(room_of(i), "r", prompt, sampling, 0, 1, priority=priority)
            if role == "decode"
            else UnifiedRequest(room_of(i), "r", prompt, sampling, priority=priority)
        )
    for _ in range(50 * len(priorities)):
        instance.scheduler.step()
        if role == "decode":  # nobody delivers: each is given up as soon as it was announced
            for room in wire.announced:
                if room not in wire.dead:
                    instance.scheduler.submit(CancelRequest(room))
    order = {"prefill": wire.computed, "decode": wire.announced, "unified": instance.finishes}[role]
    assert list(order) == [room_of(i) for i in expected]


def test_retraction_really_happens_and_loses_no_token() -> None:
    instance = Instance(num_pages=17)
    for index in range(6):
        prompt = pack_i32(prompt_of(index, 7))
        sampling = SamplingParams(40, temperature=0.0, logprobs=1)
        instance.scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, sampling))
    instance.run()
    assert len(instance.has_logprobs) == 6 and all(instance.has_logprobs.values())
    assert instance.scheduler.load.retractions > 0
    for index in range(6):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 7), 40, INFO.vocab_size)
    instance.check_empty()


def test_speculative_prompts_give_their_pages_to_announced_ones() -> None:
    wire = Wire()
    prefill = Instance(num_pages=8, sender=PSide(wire))
    speculative, promised = prompt_of(1, 30), prompt_of(2, 20)
    prefill.scheduler.submit(PrefillRequest(room_of(1), "speculative", pack_i32(speculative), 0, 1))
    for _ in range(8):
        prefill.scheduler.step()
    assert room_of(1) in wire.computed
    wire.announced[room_of(2)] = 0
    prefill.scheduler.submit(PrefillRequest(room_of(2), "promised", pack_i32(promised), 0, 1))
    for _ in range(8):
        prefill.scheduler.step()
    assert room_of(2) in wire.computed
    assert room_of(1) not in wire.computed, "its pages went to the announced request; it waits to be computed again"
    assert prefill.scheduler.load.waiting == 1
