"""Several choices of one prompt on an instance: one prefill, one transfer, then one request for each choice."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.protocol import (
    MAX_FORKS,
    CancelRequest,
    DecodeRequest,
    Fork,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)
from chitu.testing.fake_executor import expected_tokens, fake_logprobs

groups = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 6), st.booleans()), min_size=1, max_size=8
)
"""Prompt length, max_tokens, number of choices, and whether pages may be cached."""


def prompt_room(index: int) -> bytes:
    return room_of(1000 + index)


def choice_room(index: int, choice: int) -> bytes:
    return room_of(index * 10 + choice)


def sampling_of(index: int, max_tokens: int) -> SamplingParams:
    asked = {"logprobs": (None, 0, 2)[index % 3], "prompt_logprobs": 1 if index % 3 == 1 else None}
    return SamplingParams(max_tokens, temperature=1.0, seed=100 * index, **asked)


def forks_of(index: int, count: int) -> tuple[Fork, ...]:
    return tuple(Fork(choice_room(index, i), f"r{index}-{i}", 100 * index + i) for i in range(count))


def expected(index: int, prompt: list[int], max_tokens: int, choice: int) -> list[int]:
    sampling = SamplingParams(max_tokens, temperature=1.0, seed=100 * index + choice)
    return expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)


def check_group(instance: Instance, index: int, group: tuple[int, int, int, bool], over: set[bytes]) -> None:
    """Check that each choice has the tokens of a request with its seed, or the first of them if it is in `over`."""
    length, max_tokens, count, _ = group
    prompt = prompt_of(index, length)
    for choice in range(count):
        room = choice_room(index, choice)
        tokens, wanted = instance.tokens.get(room, []), expected(index, prompt, max_tokens, choice)
        if room in over:
            assert tokens == wanted[: len(tokens)]
        else:
            assert tokens == wanted, f"choice {choice} of request {index}"
            assert instance.finishes[room].reason == "length"
    sampling = sampling_of(index, max_tokens)
    lines = instance.prompts.get(prompt_room(index))
    if sampling.prompt_logprobs is None:
        assert lines is None
    elif not all(choice_room(index, choice) in over for choice in range(count)):
        assert lines == b"".join([fake_logprobs(token, 1) for token in prompt[1:]])


@settings(max_examples=60)
@given(groups, st.integers(24, 70), st.integers(1, 16), st.booleans(), st.randoms(use_true_random=False))
def test_choices_on_a_unified_instance_are_those_of_single_requests(
    load: list[tuple[int, int, int, bool]], num_pages: int, chunk: int, overlap: bool, rng: random.Random
) -> None:
    instance = Instance(num_pages, chunk=chunk, overlap=overlap)
    over: set[bytes] = set()
    for index, (length, max_tokens, count, is_cached) in enumerate(load):
        message = UnifiedRequest(
            *(prompt_room(index), f"r{index}", pack_i32(prompt_of(index, length)), sampling_of(index, max_tokens)),
            cache_salt="" if is_cached else None,
            forks=forks_of(index, count),
        )
        instance.scheduler.submit(message)
        for _ in range(rng.randrange(4)):
            instance.scheduler.step()
        if rng.random() < 0.4:
            gone = [choice_room(index, choice) for choice in range(count) if rng.random() < 0.6]
            over.update(gone)
            for room in gone:
                instance.scheduler.submit(CancelRequest(room))
    instance.run()
    for index, group in enumerate(load):
        check_group(instance, index, group, over)
    instance.check_empty()
    assert instance.aux.num_free == 4


@settings(max_examples=60)
@given(
    groups, st.integers(17, 50), st.integers(24, 60), st.integers(1, 4), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_choices_between_p_and_d_are_those_of_single_requests_whatever_ends_some_of_them(
    load: list[tuple[int, int, int, bool]],
    pages_p: int,
    pages_d: int,
    aux_slots: int,
    overlap: bool,
    rng: random.Random,
) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), aux_slots=aux_slots)
    decode = wire.decode = Instance(pages_d, receiver=DSide(wire), aux_slots=aux_slots, overlap=overlap)
    over: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.7:
            index, (length, max_tokens, count, is_cached) = pending.pop(0)
            prompt, sampling = pack_i32(prompt_of(index, length)), sampling_of(index, max_tokens)
            room, salt = prompt_room(index), "" if is_cached else None
            half = DecodeRequest(
                room, f"r{index}", prompt, sampling, 0, 1, cache_salt=salt, forks=forks_of(index, count)
            )
            decode.scheduler.submit(half)
            asked = sampling.prompt_logprobs
            prefill.scheduler.submit(PrefillRequest(room, f"r{index}", prompt, 0, 1, prompt_logprobs=asked))
            if rng.random() < 0.15:
                wire.failing.add(room)
        if rng.random() < 0.1 and len(pending) < len(load):
            index = rng.randrange(len(load) - len(pending))
            count = load[index][2]
            for choice in range(count) if rng.random() < 0.3 else (rng.randrange(count),):
                if choice_room(index, choice) not in decode.finishes:
                    over.add(choice_room(index, choice))
                    decode.scheduler.submit(CancelRequest(choice_room(index, choice)))
            if all(choice_room(index, choice) in over for choice in range(count)):
                prefill.scheduler.submit(CancelRequest(prompt_room(index)))
        for instance in (prefill, decode) if rng.random() < 0.5 else (decode, prefill):
            if rng.random() < 0.8:
                instance.scheduler.step()
        wire.deliver(rng)
        if not pending and prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    prefill.run()
    decode.run()
    for index, group in enumerate(load):
        rooms = [choice_room(index, choice) for choice in range(group[2])]
        over |= {room for room in rooms if room in decode.finishes and decode.finishes[room].code == "transfer_failed"}
        check_group(decode, index, group, over)
    prefill.check_empty()
    decode.check_empty()
    assert decode.aux.num_free == prefill.aux.num_free == aux_slots


def test_a_group_that_can_never_start_together_is_refused_and_one_that_can_waits_for_all_its_slots() -> None:
    prompt, sampling = pack_i32(prompt_of(1, 9)), SamplingParams(4, temperature=1.0)
    num_pages = 3 + INFO.num_slots  # the prompt's pages, and for each choice its own copy of the last one
    for count, pages, code in (
        (INFO.num_slots, num_pages, ""),
        (INFO.num_slots, num_pages - 1, "capacity"),
        (INFO.num_slots + 1, 60, "capacity"),
        (MAX_FORKS + 1, 60, "invalid_request"),
    ):
        instance = Instance(pages)
        first = UnifiedRequest(room_of(1), "first", pack_i32(prompt_of(2, 5)), SamplingParams(3, temperature=0.0))
        forks = tuple(Fork(room_of(2000 + i), "r", i) for i in range(count))
        instance.scheduler.submit(first)
        instance.scheduler.submit(UnifiedRequest(room_of(2), "r", prompt, sampling, forks=forks))
        instance.run()
        assert instance.finishes[room_of(1)].reason == "length"
        assert {instance.finishes[fork.room].code for fork in forks} == {code}, (count, pages)
        instance.check_empty()
    behind_output = UnifiedRequest(room_of(3), "r", prompt, sampling, 2, forks=forks_of(1, 2))
    instance.scheduler.submit(behind_output)
    instance.run()
    assert instance.finishes[choice_room(1, 0)].code == "invalid_request"


def test_a_page_is_copied_only_where_the_prompt_ends_within_it() -> None:
    for length, num_pages in ((2 * PAGE_SIZE, 2), (2 * PAGE_SIZE + 1, 2 + 3), (PAGE_SIZE - 1, 3)):
        instance = Instance(40)
        prompt = pack_i32(prompt_of(1, length))
        sampling = SamplingParams(20, temperature=1.0)
        instance.scheduler.submit(UnifiedRequest(room_of(1), "r", prompt, sampling, forks=forks_of(1, 3)))
        while not instance.tokens:
            instance.scheduler.step()
        tables = [set(instance.cache.get_page_indices(choice_room(1, choice))) for choice in range(3)]
        assert len(set.union(*tables)) == num_pages, length
        assert len(set.intersection(*tables)) == length // PAGE_SIZE, "full pages are shared"
        instance.run()
        instance.check_empty()
