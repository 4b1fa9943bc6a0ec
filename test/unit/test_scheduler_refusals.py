"""What an instance refuses before it computes: impossible requests, token ids, sampling, messages for another role."""

from __future__ import annotations

from array import array

import pytest
from scheduler_world import INFO, DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.instance.requests import wrong_sampling
from chitu.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    DecodeRequest,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)


def test_an_impossible_request_is_refused_and_the_next_one_served() -> None:
    instance = Instance(8)
    instance.scheduler.submit(UnifiedRequest(room_of(1), "big", pack_i32(prompt_of(1, 30)), SamplingParams(10)))
    instance.scheduler.submit(UnifiedRequest(room_of(2), "empty", b"", SamplingParams(10)))
    instance.scheduler.submit(UnifiedRequest(room_of(3), "long", pack_i32(prompt_of(1, 300)), SamplingParams(10)))
    instance.scheduler.submit(UnifiedRequest(room_of(4), "ok", pack_i32(prompt_of(1, 3)), SamplingParams(2)))
    for room, num_emitted in ((5, 3), (6, 4), (7, 2)):  # nothing but output; more than the tokens; max_tokens reached
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
    for place in range(3):  # the last one counts as output of another instance
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
