"""What an answer reports about how it was served: stages that add up, attempts, and bytes if they are known."""

from __future__ import annotations

import json

import msgspec
from router_world import World, pair, two_pairs

from chitu.http.answer.formats import AnswerHead, Delta, FinishedChoice, UsageCount
from chitu.http.answer.proof import HEADERS, ChoiceSums, Proof, ProofSums, headers_of, proof_of
from chitu.http.ask.parsed import OutputOptions
from chitu.http.dialects.openai.answers import ChatFormat, CompletionFormat
from chitu.http.dialects.responses.answers import ResponsesFormat
from chitu.http.dialects.responses.bodies import ResponsesBody
from chitu.http.dialects.responses.chat import Repeated
from chitu.http.table import BODIES
from chitu.protocol import Finish, SamplingParams, TokenBatch, TransferSums
from chitu.protocol.account import Moments, PrefillTimes, StageTimes
from chitu.router.generation import Generation
from chitu.types import Role

STAGES = StageTimes(PrefillTimes(0.5, 1.0, 0.25), 0.125, 2.0, 2.5, 6.0)

ECHO = Repeated.of(BODIES.decoder(ResponsesBody).decode(b'{"input": "a"}'), SamplingParams(max_tokens=1))
HEAD = AnswerHead("id", 1, "m")


def micros(span_s: float) -> int:
    return round(1e6 * span_s)


def spans_us(proof: Proof) -> list[int]:
    """Return the sum of all stages of each choice, in microseconds."""
    spans = [msgspec.structs.asdict(choice.stages).values() for choice in proof.choices]
    return [sum(micros(span_s) for span_s in each if span_s is not msgspec.UNSET) for each in spans]


def proof(world: World, *generations: Generation, kept: tuple[int, ...] = (0,)) -> Proof:
    """Return the proof of a request whose body came 2 s after its head, 1 s before the clock of the world began."""
    records = [generation.attempts() for generation in generations]
    sums = [ChoiceSums.of(generation.finish) for generation in generations]
    return proof_of(Moments(-3.0, -1.0, world.clock.monotonic()), records, kept, cached_tokens=2, page_sums=sums)


def finish(world: World, room: bytes, token: int, kv_bytes: int = 4096) -> None:
    """Send the last token, and D's report of the request's end."""
    world.router.on_tokens(TokenBatch(1, [room], [token], [Finish(room, "length", "", "", kv_bytes, STAGES)]))
    world.router.flush()


def test_checksums_of_pages_are_in_the_proof_of_the_own_answer_and_in_no_record() -> None:
    world = pair()
    generation, room = world.add()
    other, other_room = world.add()
    world.router.on_tokens(
        TokenBatch(
            1,
            [room],
            [7],
            [Finish(room, "length", page_sums=b"\x01\xff", transfer_sums=TransferSums(3, 1, b"\x02", b"\x03"))],
        )
    )
    world.router.on_tokens(TokenBatch(1, [other_room], [7], [Finish(other_room, "length")]))
    made = proof(world, generation, other, kept=(0, 1))
    assert [choice.attempts[-1].page_sums for choice in made.choices] == ["01ff", msgspec.UNSET]
    assert [choice.attempts[-1].transfer_sums for choice in made.choices] == [
        ProofSums(3, 1, "02", "03"),
        msgspec.UNSET,
    ]
    assert b"01ff" not in msgspec.json.encode([*world.router.journal.ended, *generation.ended])


def test_a_request_tells_its_pair_its_bytes_and_where_its_time_went() -> None:
    world = pair()
    generation, room = world.add()
    world.clock.advance(2.0)
    world.emit(room, 7)
    assert [attempt.state for attempt in proof(world, generation).choices[0].attempts] == ["decode"]
    world.clock.advance(4.0)
    finish(world, room, 8)
    world.clock.advance(0.5)
    made = proof(world, generation)
    assert (made.prefill, made.decode, made.attempts, made.kv_bytes, made.cached_tokens) == (["P0"], ["D0"], 1, 4096, 2)
    assert msgspec.structs.asdict(made.choices[0].stages) == {
        **{"receive_s": 2.0, "prepare_s": 1.0, "retry_s": 0.0, "prefill_s": msgspec.UNSET, "admission_s": 0.125},
        **{"queue_s": 0.375, "compute_s": 1.0, "transfer_s": 0.75, "first_step_s": 0.25, "decode_s": 3.5},
        **{"messages_s": 0.0, "answer_s": 0.5, "confirm_s": msgspec.UNSET},
    }
    assert made.total_s == 9.5
    (attempt,) = made.choices[0].attempts
    assert (attempt.state, attempt.kv_bytes, attempt.first_token_s) == ("finished", 4096, 2.0)
    headers = dict(headers_of(made))
    assert set(headers) == set(HEADERS)
    assert (headers[b"x-chitu-prefill"], headers[b"x-chitu-kv-bytes"]) == (b"P0", b"4096")
    timing = [part.split(";dur=") for part in headers[b"server-timing"].decode().split(", ")]
    assert timing[-1] == ["total", "9500.000"] and sum(float(span_ms) for _, span_ms in timing[:-1]) == 9500


def test_attempts_that_failed_are_named_with_what_they_took() -> None:
    world = two_pairs()
    generation, room = world.add(stop_ids=frozenset({99}))
    lost = world.pair(generation)
    world.clock.advance(1.0)
    world.emit(room, 7)
    world.clock.advance(1.0)
    world.lose(Role.DECODE, int(lost[-1]))
    room = world.room(generation)
    world.clock.advance(2.0)
    finish(world, room, 8)
    made = proof(world, generation)
    first, second = made.choices[0].attempts
    assert (made.attempts, made.kv_bytes, made.choices[0].stages.retry_s) == (2, 4096, 2.0)
    assert (first.state, first.error, first.kv_bytes, f"{first.prefill}-{first.decode}") == (
        *("retried", "decode_lost", None),
        lost,
    )
    assert (second.state, second.continued_tokens, [second.decode]) == ("finished", 1, made.decode)
    assert second.decode != first.decode
    assert spans_us(made) == [micros(made.total_s)]


def test_bytes_that_d_did_not_report_are_not_known() -> None:
    """A stop string ends a request at the router."""
    world = pair()
    generation, room = world.add()
    world.emit(room, 7)
    world.router.cancel(generation, is_complete=True)
    made = proof(world, generation)
    (attempt,) = made.choices[0].attempts
    assert (attempt.state, attempt.kv_bytes, made.kv_bytes) == ("finished", None, None)
    assert b"x-chitu-kv-bytes" not in dict(headers_of(made))
    unified = World(Role.UNIFIED)
    generation, room = unified.add()
    unified.emit(room, 7)
    unified.router.cancel(generation, is_complete=True)
    made = proof(unified, generation)
    assert (made.prefill, made.decode, made.kv_bytes) == ([], ["U0"], 0)
    assert b"x-chitu-prefill" not in dict(headers_of(made))


def test_an_end_that_d_never_told_has_no_bytes_either() -> None:
    """D was lost after it had sent every token."""
    world = two_pairs()
    generation, room = world.add()
    world.emit(room, 7, 8, 9, 10)
    world.lose(Role.DECODE, int(world.pair(generation)[-1]))
    (attempt,) = proof(world, generation).choices[0].attempts
    assert (attempt.state, attempt.kv_bytes) == ("finished", None)


def test_choices_share_their_bytes_and_those_left_out_have_no_index() -> None:
    world = pair()
    generations = world.add_choices(3)
    for i, room in enumerate([world.room(generation) for generation in generations]):
        finish(world, room, 7, kv_bytes=0 if i else 4096)
    made = proof(world, *generations, kept=(2, 0))
    assert [choice.index for choice in made.choices] == [1, None, 0]
    assert (made.kv_bytes, made.attempts, made.prefill) == (4096, 1, ["P0"])
    assert [choice.attempts[0].kv_bytes for choice in made.choices] == [4096, 0, 0]


def test_every_form_of_an_answer_has_it_whole_or_streamed() -> None:
    world = pair()
    generation, room = world.add()
    finish(world, room, 7)
    made = proof(world, generation)
    told, usage = json.loads(msgspec.json.encode(made)), UsageCount(3, 1, 0)
    for make in (CompletionFormat, ChatFormat):
        form = make(HEAD, OutputOptions(1, False, False, (), False, True, False))
        assert json.loads(b"".join(form.full([FinishedChoice("a", "stop", None)], usage, made)))["chitu"] == told
        event = json.loads(form.usage(None, made).removeprefix(b"data: "))
        assert (event["choices"], event["chitu"], "usage" in event) == ([], told, False)
        event = json.loads(form.usage(usage, made).removeprefix(b"data: "))
        assert (event["choices"], event["chitu"], event["usage"]["total_tokens"]) == ([], told, 4)
        assert "chitu" not in json.loads(b"".join(form.full([FinishedChoice("a", "stop", None)], usage)))
    response = ResponsesFormat(HEAD, ECHO)
    assert json.loads(b"".join(response.full([FinishedChoice("a", "stop", None)], usage, made)))["chitu"] == told
    streamed = ResponsesFormat(HEAD, ECHO)
    streamed.last(0, Delta("a", [], reason="stop"))
    completed = json.loads(streamed.usage(usage, made).rsplit(b"data: ", 1)[1])
    assert (completed["type"], completed["response"]["chitu"]) == ("response.completed", told)
