"""Prefixes of models with recurrent state: a prompt goes on behind the longest chain of cached pages whose end has a
snapshot of the state, and the rows of snapshots never cost a request one. The executor checks each row that it reads.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from draws import often
from scheduler_world import INFO, PAGE_SIZE, Instance, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request
from test_state_scheduling import Poisoned, check_rows, pair, run, tokens_of_forks, with_forks

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import KeepState, PrefillChunk, StepResult
from chitu.errors import Internal
from chitu.fake.executor import FakeExecutor, InvariantViolation, expected_tokens
from chitu.instance.sequences import Resources, Sequence
from chitu.kv_cache.state_row import Snapshot, StateSlots, StateStamp, digest_of, stamp_of
from chitu.protocol import CancelRequest, SamplingParams, pack_i32

GREEDY = SamplingParams(6, temperature=0.0)
NUM_HISTORIES = 1_000
"""A millisecond each."""


def ask(instance: Instance, index: int, prompt: list[int], salt: str | None = "", max_tokens: int = 6) -> list[int]:
    """Submit a request and return its tokens to come."""
    sampling = SamplingParams(max_tokens, temperature=0.0)
    instance.scheduler.submit(unified_request(room_of(index), "r", pack_i32(prompt), sampling, cache_salt=salt))
    return expected_tokens(prompt, max_tokens, INFO.vocab_size)


def cached(instance: Instance, index: int) -> int:
    return instance.cached.get(room_of(index), 0)


def border_of(prompt: list[int]) -> int:
    return (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE


# ------------------------------------------------------------------------------------------------------------ the hits


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_goes_on_behind_the_last_full_page_of_this_one(overlap: bool) -> None:
    instance, prompt, known = Instance(64, state_slots=4, overlap=overlap), prompt_of(1, 21), 0
    for turn in range(4):
        before = instance.scheduler._load.prompt_tokens
        expected = ask(instance, turn, prompt)
        run(instance)
        assert instance.tokens[room_of(turn)] == expected
        assert cached(instance, turn) == known
        assert instance.scheduler._load.prompt_tokens - before == len(prompt) - known
        known = border_of(prompt)
        prompt = [*prompt, *expected, 5, 6, 7]
    assert instance.states.num_snapshots == 3  # the last request had the fourth row


@pytest.mark.parametrize("overlap", [False, True])
def test_p_goes_on_and_sends_all_pages_and_the_state(overlap: bool) -> None:
    """The wire checks the stamp of what P sends."""
    wire, prefill, decode = pair(overlap=overlap)
    prompt, computed = prompt_of(1, 21), []
    for turn in range(3):
        before = prefill.scheduler._load.prompt_tokens
        expected = expected_tokens(prompt, 6, INFO.vocab_size)
        decode.scheduler.submit(decode_request(room_of(turn), "r", pack_i32(prompt), GREEDY, 0, 1))
        prefill.scheduler.submit(prefill_request(room_of(turn), "r", pack_i32(prompt), 0, 1))
        run(prefill, decode, wire=wire, seed=turn)
        assert decode.tokens[room_of(turn)] == expected
        computed.append(prefill.scheduler._load.prompt_tokens - before)
        prompt = [*prompt, *expected, 5, 6, 7]
    assert computed == [21, 30 - 20, 39 - 28] and set(wire.prefix_pages.values()) == {0}


def test_pages_alone_are_no_prefix() -> None:
    """A prompt that leaves the other in the middle has pages of it, and no state."""
    instance, prompt = Instance(64, state_slots=6), prompt_of(1, 30)
    ask(instance, 0, prompt)
    run(instance)
    for index, other in enumerate((prompt[:20], [*prompt[:20], 1, 2, 3], prompt[:28], prompt[:29]), 1):
        expected = ask(instance, index, other)
        run(instance)
        assert instance.tokens[room_of(index)] == expected
    # prompt[:20] kept its state behind 16 tokens; the next one, which has 20 pages and tokens, goes on from there
    assert [cached(instance, index) for index in range(5)] == [0, 0, 16, 20, 28]


def test_salts_logprobs_of_prompts_and_a_flush_are_as_without_state() -> None:
    instance, prompt = Instance(64, state_slots=6), prompt_of(1, 21)
    for index, (salt, hit) in enumerate((("", 0), ("mine", 0), ("mine", 20), ("", 20), (None, 0))):
        ask(instance, index, prompt, salt)
        run(instance)
        assert cached(instance, index) == hit
    sampling = SamplingParams(3, temperature=0.0, prompt_logprobs=1)
    instance.scheduler.submit(unified_request(room_of(8), "r", pack_i32(prompt), sampling))
    run(instance)
    assert cached(instance, 8) == 0 and instance.states.num_snapshots == 2
    instance.scheduler.flush_cache()
    run(instance)
    assert instance.states.num_snapshots == 0 and instance.scheduler.load.pages_cached == 0
    ask(instance, 9, prompt)
    run(instance)
    assert cached(instance, 9) == 0


def test_pages_that_were_evicted_below_a_snapshot_come_back_under_it() -> None:
    instance, prompt = Instance(16, state_slots=4), prompt_of(1, 21)
    for index in range(3):
        expected = ask(instance, index, prompt)
        run(instance)
        assert instance.tokens[room_of(index)] == expected
        if index == 0:
            instance.cache.reserve(b"other", 16 * PAGE_SIZE)
            instance.cache.remove_task(b"other")
    assert [cached(instance, index) for index in range(3)] == [0, 0, 20]


@pytest.mark.parametrize("num_rows", [4, 5, 8])
def test_choices_go_on_behind_a_prefix(num_rows: int) -> None:
    prompt, sampling, forks = with_forks(1, 21, 3)
    instance = Instance(60, state_slots=num_rows)
    ask(instance, 0, prompt)
    run(instance)
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling, forks=forks))
    run(instance)
    expected = tokens_of_forks(prompt, forks)
    assert {room: instance.tokens[room] for room in expected} == expected
    assert instance.cached[forks[0].room] == 20
    assert instance.states.num_snapshots == (num_rows > 4)  # with 4 the prompt took the snapshot's own row


# ------------------------------------------------------------------------------------------------------------ the rows


def test_one_row_is_never_kept() -> None:
    instance = Instance(40, state_slots=1)
    for index in range(3):
        expected = ask(instance, index, prompt_of(1, 21))
        run(instance)
        assert instance.tokens[room_of(index)] == expected and cached(instance, index) == 0


def test_a_request_takes_the_row_of_the_least_recently_used_snapshot() -> None:
    instance = Instance(64, state_slots=3)
    for index in (0, 1, 2):  # the third takes the row of the first
        ask(instance, index, [index] * 9)
        run(instance)
    for index, known in ((3, 1), (4, 2), (5, 0)):
        ask(instance, index, [known] * 9)
        run(instance)
    assert [cached(instance, index) for index in (3, 4, 5)] == [8, 8, 0]


def test_requests_that_need_all_rows_get_them() -> None:
    instance = Instance(64, state_slots=3)
    for index in range(2):
        ask(instance, index, [index] * 9)
        run(instance)
    assert instance.states.num_snapshots == 2
    expected = {room_of(index): ask(instance, index, [index] * 9, max_tokens=20) for index in (5, 6, 7)}
    for _ in range(6):
        instance.scheduler.step()
        check_rows(instance)
    assert len(instance.states._used) == 3
    run(instance)
    assert {room: instance.tokens[room] for room in expected} == expected


def test_a_request_that_takes_the_snapshots_own_row_needs_no_copy() -> None:
    instance = Instance(64, state_slots=2)
    ask(instance, 0, [7] * 9)
    run(instance)
    long = ask(instance, 1, [8] * 5, max_tokens=24)
    for _ in range(3):
        instance.scheduler.step()
    expected = ask(instance, 2, [7] * 9)
    run(instance)
    assert instance.tokens[room_of(1)] == long and instance.tokens[room_of(2)] == expected
    assert cached(instance, 2) in (0, 8)


def test_a_snapshot_that_is_copied_from_is_not_given_away_in_that_plan() -> None:
    states = StateSlots(3)
    first = states.add(b"a", StateStamp(4, 0))
    assert first is not None and states.num_free == 3
    states.settle(first)
    slot, source = states.take_after(b"a", 1)
    assert source == first.row != slot and states.num_free == 1
    states.take()
    with pytest.raises(Internal, match="none is"):
        states.take()
    assert states.add(b"b", StateStamp(4, 1)) is None
    states.unpin()
    assert states.num_free == 1 and states.take() == first.row and not states.holds(b"a")


def test_a_snapshot_that_was_evicted_before_its_step_was_read_stays_away() -> None:
    states = StateSlots(1)
    pending = states.add(b"a", StateStamp(4, 0))
    assert pending is not None and not states.holds(b"a")
    slot = states.take()
    states.settle(pending)
    states.drop(pending)
    assert slot == pending.row and not states.holds(b"a") and states.num_free == 0
    states.free(slot)
    states.check_idle()


# ----------------------------------------------------------------------------------------------- against brute force


class History:
    """Prompts one after the other or two at once, over a cache with few pages and rows. Rows hold the tokens that they
    have taken in, and the snapshots that there must be are a plain list."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.size = rng, rng.choice([1, 2, 3])
        self.cache = PagedKVCacheManager(rng.choice([8, 12, 40]), self.size, b"model")
        self.states = self.cache.states = StateSlots(rng.randint(1, 4))
        self.rows: list[tuple[int, ...]] = [()] * self.states.num_slots
        self.kept: list[tuple[int, ...]] = []
        """Tokens of the settled snapshots, the least recently used first."""
        self.hits = 0

    def serve(self, room: bytes, prompt: tuple[int, ...]) -> int:
        """Compute a prompt, and return its row."""
        tokens, keys = pack_i32(list(prompt)), self.cache.page_keys("")
        assert keys is not None
        names, size = keys.upto(len(prompt) // self.size, tokens), self.size
        cached = 0
        while cached < (len(prompt) - 1) // size and self.cache.holds(names[cached]):
            cached += 1
        wanted = max((len(k) for k in self.kept if k == prompt[: len(k)] and len(k) <= cached * size), default=0)
        assert self.cache.known_tokens(keys, tokens) == wanted
        begun = self.cache.begin(room, keys, tokens)
        assert begun == wanted
        num_empty = len(self.states._free)
        if begun:
            self.hits += 1
            row, source = self.states.take_after(names[begun // size - 1], 1)
            if source >= 0:
                self.kept.remove(prompt[:begun])
                self.kept += [prompt[:begun]]
                if not num_empty:
                    self.kept.pop(0)
                self.rows[row] = self.rows[source]
            else:
                self.kept.remove(prompt[:begun])
            self.states.unpin()
        else:
            row = self.states.take()
            if not num_empty:
                self.kept.pop(0)
            self.rows[row] = ()
        assert self.rows[row] == prompt[:begun]
        self.cache.reserve(room, len(prompt))
        border = (len(prompt) - 1) // size * size
        if border > begun:
            self.rows[row] = prompt[:border]
            name, num_empty = names[border // size - 1], len(self.states._free)
            snapshot = self.states.add(name, stamp_of(tokens, border))
            if snapshot is not None:
                if not num_empty:
                    self.kept.pop(0)
                self.rows[snapshot.row] = self.rows[row]
                if self.rng.random() < 0.1:  # the request is over before its step is read
                    self.states.drop(snapshot)
                else:
                    self.states.settle(snapshot)
                    self.kept.append(prompt[:border])
            if self.states.holds(name):
                self.cache.commit(room, keys, tokens, border)
        self.rows[row] = prompt
        assert sorted(len(k) for k in self.kept) == sorted(s.stamp.num_tokens for s in self.states._by_key.values())
        return row

    def run(self) -> None:
        rng, known = self.rng, [()]
        held: list[tuple[bytes, int]] = []
        for index in range(6):
            stem = rng.choice(known)
            stem = stem[: rng.randint(0, len(stem))] if rng.random() < 0.3 else stem
            prompt = (*stem, *(rng.randrange(2) for _ in range(rng.randint(1, 4))))[:12]
            known.append(prompt)
            room = room_of(index)
            wanted = -(-len(prompt) // self.size)
            while held and (not self.states.num_free or self.cache.num_available_pages < wanted or rng.random() < 0.6):
                self.leave(*held.pop(rng.randrange(len(held))))
            if self.cache.num_available_pages >= wanted:
                held.append((room, self.serve(room, prompt)))
        for each in held:
            self.leave(*each)
        self.cache.check_idle()
        self.states.check_idle()

    def leave(self, room: bytes, row: int) -> None:
        self.cache.remove_task(room)
        self.states.free(row)


def test_a_hit_is_what_brute_force_finds_in_any_history() -> None:
    hits, count = 0, often(NUM_HISTORIES)
    for seed in range(count):
        history = History(random.Random(seed))
        history.run()
        hits += history.hits
    assert hits > 0.3 * count


# --------------------------------------------------------------------------------------- everything at once, and faults


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_conversations_get_their_tokens_and_rows_add_up(seed: int, overlap: bool) -> None:
    """Pages and rows are short, requests are retracted and cancelled, and turns of one conversation overlap."""
    rng = random.Random(seed)
    instance = Instance(rng.choice([20, 40]), state_slots=rng.randint(3, 6), overlap=overlap)
    expected, known = {}, [prompt_of(family, 9) for family in range(3)]
    for index in range(30):
        prompt = rng.choice(known)
        prompt = [*prompt[: rng.randint(1, len(prompt))], *prompt_of(index, rng.randint(1, 6))][-40:]
        expected[room_of(index)] = ask(instance, index, prompt, max_tokens=rng.randint(1, 12))
        known.append(prompt + expected[room_of(index)])
        if rng.random() < 0.15:
            instance.scheduler.submit(CancelRequest(room_of(index)))
            del expected[room_of(index)]
        for _ in range(rng.randint(0, 8)):
            instance.scheduler.step()
            check_rows(instance)
    run(instance)
    assert {room: instance.tokens[room] for room in expected} == expected
    assert instance.cache.hit_tokens > 0


@pytest.mark.parametrize("seed", range(8))
def test_p_and_d_with_turns_that_fail_or_are_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    wire, prefill, decode = pair(rng.randint(20, 40), rng.randint(2, 5), rng.randint(1, 4), overlap=bool(seed % 2))
    expected, known = {}, [prompt_of(1, 12)]
    for index in range(16):
        prompt = [*rng.choice(known), *prompt_of(index, rng.randint(1, 6))][:40]
        tokens, count = pack_i32(prompt), rng.randint(1, 12)
        sampling = SamplingParams(count, temperature=0.0)
        expected[room_of(index)] = expected_tokens(prompt, count, INFO.vocab_size)
        known.append(prompt)
        decode.scheduler.submit(decode_request(room_of(index), "r", tokens, sampling, 0, 1))
        prefill.scheduler.submit(prefill_request(room_of(index), "r", tokens, 0, 1))
        if rng.random() < 0.2:
            del expected[room_of(index)]
            wire.failing.add(room_of(index))
            if rng.random() < 0.5:
                for side in (prefill, decode):
                    side.scheduler.submit(CancelRequest(room_of(index)))
        for _ in range(rng.randint(0, 8)):
            for side in (prefill, decode):
                side.scheduler.step()
                check_rows(side)
            wire.deliver(rng)
    run(prefill, decode, wire=wire, seed=seed)
    assert {room: decode.tokens[room] for room in expected} == expected
    assert prefill.cache.hit_tokens > 0


@pytest.mark.parametrize("num_rows", [3, 8])
@pytest.mark.parametrize("place", ["prefill", "decode"])
@pytest.mark.parametrize("wait", range(4))
def test_a_step_that_raises_leaves_no_snapshot_and_no_wrong_state(num_rows: int, place: str, wait: int) -> None:
    poisoned = type("PoisonedThere", (Poisoned,), {"place": place})
    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=7, reserved_decode_tokens=4)
    instance = Instance(64, executor=poisoned, config=config, state_slots=num_rows)
    first = ask(instance, 0, prompt_of(1, 21))
    run(instance)
    expected = {room_of(0): first}
    for index in (1, 2):
        prompt = [*prompt_of(1, 21), *first, *prompt_of(index, 9)]
        expected[room_of(index)] = ask(instance, index, prompt, max_tokens=12)
    for _ in range(wait):
        instance.scheduler.step()
        check_rows(instance)
    bad = unified_request(room_of(99), "bad", pack_i32([*prompt_of(7, 4), 999]), SamplingParams(9, temperature=0.0))
    instance.scheduler.submit(bad)
    run(instance)
    for index in (3, 4):
        prompt = [*prompt_of(1, 21), *first, *prompt_of(index - 2, 9), 4]
        expected[room_of(index)] = ask(instance, index, prompt)
        run(instance)
    assert isinstance(instance.executor, Poisoned) and instance.executor.raised > 0
    assert instance.finishes.pop(room_of(99)).code == "step_failed"
    assert {room: instance.tokens[room] for room in expected} == expected


class Unsound(FakeExecutor):
    """Planted: numbers behind the poison token are not finite, in the first chunk."""

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        super()._prefill(chunk, result)
        if 999 in self._slots[chunk.slot].tokens and not chunk.sample:
            result.unsound.append(chunk.slot)


def test_the_state_of_a_prompt_that_is_not_finite_is_not_kept() -> None:
    instance = Instance(40, executor=Unsound, state_slots=4, overlap=True)
    for index in range(2):
        ask(instance, index, [999, *prompt_of(1, 8)])
        run(instance)
        assert instance.finishes[room_of(index)].code == "step_failed"
    assert instance.states.num_snapshots == 0 and instance.cache.hit_tokens == 0


class KeepsNothing(FakeExecutor):
    """Planted: the row of a snapshot has what its last owner left."""

    def _keep_state(self, keep: KeepState) -> None: ...


class KeepsLate(FakeExecutor):
    """Planted: the snapshot is copied behind the chunk of the same step."""

    def execute(self, plan, on_layer=None):  # type: ignore[no-untyped-def]
        result = super().execute(msgspec.structs.replace(plan, keep_state=[]), on_layer)
        for keep in plan.keep_state:
            self._state_rows[keep.target] = self._state_rows[self._slots[keep.slot].state_slot]
        return result


class KeepsAnother(FakeExecutor):
    """Planted: the snapshot is of the neighbour's row."""

    def _keep_state(self, keep: KeepState) -> None:
        source = (self._slots[keep.slot].state_slot + 1) % len(self._state_rows)
        self._state_rows[keep.target] = self._state_rows[source]


@pytest.mark.parametrize("executor", [KeepsNothing, KeepsLate, KeepsAnother])
def test_a_snapshot_of_another_state_is_found(executor: type[FakeExecutor]) -> None:
    instance = Instance(40, executor=executor, state_slots=4)
    with pytest.raises(InvariantViolation, match="the state of other tokens"):
        for index in range(2):
            ask(instance, index, prompt_of(1, 21))
            run(instance)


@pytest.mark.parametrize("fault", ["a page early", "a page late", "of another prompt"])
def test_a_snapshot_whose_stamp_is_not_of_the_prompt_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: it is kept under the key of another place or prompt."""
    right = Resources.keep_state

    def keep_state(self: Resources, sequence: Sequence) -> Snapshot | None:
        if fault == "of another prompt":
            key = sequence.holds.keys.key_at(sequence.kv_len // PAGE_SIZE - 1, sequence.head.token_ids)  # type: ignore[union-attr]
            return self.states.add(key, StateStamp(sequence.kv_len, digest_of(pack_i32([5] * sequence.kv_len))))
        place = sequence.kv_len // PAGE_SIZE + (-2 if fault == "a page early" else 0)
        if place * PAGE_SIZE + PAGE_SIZE > sequence.prompt_len:
            return right(self, sequence)
        key = sequence.holds.keys.key_at(place, sequence.head.token_ids)  # type: ignore[union-attr]
        return self.states.add(key, stamp_of(sequence.head.token_ids, sequence.kv_len))

    monkeypatch.setattr(Resources, "keep_state", keep_state)
    monkeypatch.setattr(StateSlots, "holds", lambda self, key: True)  # the pages are cached all the same
    instance, prompt = Instance(40, state_slots=4), prompt_of(1, 24)
    for index in range(2):
        expected = ask(instance, index, prompt)
        run(instance)
        assert instance.tokens[room_of(index)] == expected
    assert instance.states.num_snapshots > 0 and instance.cache.hit_tokens == 0


@pytest.mark.parametrize("fault", ["a page early", "of another prompt"])
def test_without_the_stamp_the_wrong_snapshot_is_found_by_its_state(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the same, with a rule that does not look at stamps."""
    monkeypatch.setattr(StateSlots, "find", lambda self, key, num_tokens, token_ids: key in self._by_key)

    def keep_state(self: Resources, sequence: Sequence) -> Snapshot | None:
        prompt = sequence.head.token_ids if fault == "a page early" else pack_i32(prompt_of(2, 24))
        place = sequence.kv_len // PAGE_SIZE - (2 if fault == "a page early" else 1)
        keys = self.cache.page_keys("")
        assert keys is not None
        return self.states.add(keys.key_at(place, prompt), stamp_of(sequence.head.token_ids, sequence.kv_len))

    instance = Instance(40, state_slots=6)
    ask(instance, 0, prompt_of(2, 24))
    run(instance)
    instance.states.drop_all()
    monkeypatch.setattr(Resources, "keep_state", keep_state)
    monkeypatch.setattr(StateSlots, "holds", lambda self, key: True)
    with pytest.raises(InvariantViolation, match="the state of other tokens"):
        for index in range(1, 3):
            ask(instance, index, prompt_of(1, 24))
            run(instance)
        ask(instance, 3, prompt_of(2, 24))
        run(instance)
