"""A request as spans: each within its parent, one after the other, on the instance that did the work."""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, pair, two_pairs

from chitu.http.answer.spans import MAX_CHOICES, RequestSpan, request_span
from chitu.protocol import Finish, TokenBatch
from chitu.protocol.account import Moments, PrefillTimes, RequestSnapshot, StageTimes, attempt_stages
from chitu.router.generation import Generation
from chitu.types import Role

SPAN_S = st.floats(0, 1e4)
DRAFTS = (("text", 3, 1), ("grammar", 2, 2))
STAGES = StageTimes(PrefillTimes(0.5, 1.0, 0.25), 0.125, 2.0, 2.5, 6.0)


def spans(world: World, *generations: Generation, error: str = "") -> RequestSpan:
    """Return the spans of a request whose body came 2 s after its head, 1 s before the clock of the world began."""
    records = [generation.attempts() for generation in generations]
    return request_span({}, Moments(-3.0, -1.0, world.clock.monotonic()), records, error)


def named(span: RequestSpan) -> list[tuple[str, str, float, float]]:
    return [(part.name, part.instance, part.start_s, part.end_s) for part in span.parts]


def test_a_request_is_laid_out_over_router_p_and_d() -> None:
    world = pair()
    generation, room = world.add()
    world.clock.advance(2.0)
    world.emit(room, 7)
    world.clock.advance(4.0)
    world.router.on_tokens(TokenBatch(1, [room], [8], [Finish(room, "length", "", "", 4096, STAGES, drafts=DRAFTS)]))
    world.router.flush()
    world.clock.advance(0.5)
    made = spans(world, generation)
    assert named(made) == [("receive", "", -3.0, -1.0), ("prepare", "", -1.0, 0.0), ("attempt", "", 0.0, 6.0)]
    assert named(made.parts[-1]) == [
        ("admission", "D0", 0.0, 0.125),
        ("queue", "P0", 0.125, 0.5),
        ("compute", "P0", 0.5, 1.5),
        ("transfer", "P0", 1.5, 2.25),
        ("first_step", "D0", 2.25, 2.5),
        ("decode", "D0", 2.5, 6.0),
    ]
    assert (made.start_s, made.end_s, made.error) == (-3.0, 6.5, "")
    assert made.attributes == {"chitu.choices": 1, "chitu.attempts": 1, "gen_ai.usage.output_tokens": 2}
    assert made.parts[-1].parts[3].attributes == {"chitu.kv_bytes": 4096}
    drafts = {"chitu.drafted_tokens": 5, "chitu.accepted_tokens": 3}
    assert made.parts[-1].parts[5].attributes == {"gen_ai.usage.output_tokens": 2, **drafts}


def test_each_attempt_has_a_span_and_the_failed_ones_their_code() -> None:
    world = two_pairs()
    generation, room = world.add(stop_ids=frozenset({99}))
    lost = world.pair(generation)
    world.emit(room, 7)
    world.clock.advance(1.0)
    world.lose(Role.DECODE, int(lost[-1]))
    world.clock.advance(2.0)
    world.router.cancel(generation)
    made = spans(world, generation, error="cancelled")
    first, second = made.parts[2:]
    assert (first.error, first.start_s, first.end_s) == ("decode_lost", 0.0, 1.0)
    assert f"{first.attributes['chitu.prefill']}-{first.attributes['chitu.decode']}" == lost
    assert (second.start_s, second.end_s, second.attributes["chitu.continued_tokens"]) == (1.0, 3.0, 1)
    assert second.attributes["chitu.state"] == "cancelled" and made.error == "cancelled"


def test_a_request_that_was_refused_has_its_head_and_its_code() -> None:
    made = request_span({}, Moments(1.0, 0.0, 2.0), [], "overloaded")
    assert named(made) == [("receive", "", 1.0, 1.0)] and made.error == "overloaded" and made.end_s == 2.0


def test_a_request_of_many_choices_has_spans_of_the_first() -> None:
    world = pair()
    made = spans(world, *world.add_choices(4) * 5)
    assert [part.name for part in made.parts].count("attempt") == MAX_CHOICES
    assert made.attributes["chitu.choices"] == 20 > MAX_CHOICES


@given(
    st.lists(SPAN_S, min_size=7, max_size=7),
    st.booleans(),
    st.none() | st.tuples(SPAN_S, SPAN_S, SPAN_S),
    st.sampled_from(["P0", None]),
)
def test_no_span_leaves_its_parent_whatever_p_and_d_report(
    widths: list[float], has_token: bool, on_p: tuple[float, float, float] | None, prefill: str | None
) -> None:
    start, received, first_sent, last_sent, first, ended, now = accumulate(widths)
    first_s = first if has_token else None
    report = None if on_p is None else StageTimes(PrefillTimes(*on_p), total_s=on_p[0])
    stages = attempt_stages(last_sent, first_s, ended, report, is_pair=prefill is not None)
    last = RequestSnapshot("room", "id", prefill, "D0", "finished", 3, 4, last_sent, first_s, ended, 0, stages, "")
    attempts = [msgspec.structs.replace(last, created_at_s=first_sent), last]

    def check(span: RequestSpan) -> None:
        assert span.start_s <= span.end_s + 1e-5
        for part in span.parts:
            assert span.start_s - 1e-5 <= part.start_s and part.end_s <= span.end_s + 1e-5
            check(part)

    made = request_span({}, Moments(start, received, now), [attempts], "")
    check(made)
    follow = made.parts[-1].parts
    assert all(abs(before.end_s - after.start_s) <= 1e-5 for before, after in pairwise(follow))
