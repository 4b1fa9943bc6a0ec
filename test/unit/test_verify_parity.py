"""When `chitu verify` calls an answer right, a near-tie or wrong, and which instance it blames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from chitu import cli
from chitu.protocol import LEAST_NOISE, LOGPROB_CAPS, logprob_limit
from chitu.protocol.cluster import FP8_E4M3, ITEM_BYTES
from chitu.tools.verify.parity import (
    DRAW_NOISE,
    Judgement,
    Mean,
    Place,
    blame,
    compare,
    is_unsound,
    limit_of,
    pair_name,
    unlike_pairs,
    unlike_texts,
)
from chitu.tools.verify.probe import CheckedRequest, Pair, Score, Served
from chitu.tools.verify.report import Judged, Report, Rounding, report_of
from chitu.tools.verify.topology import PairReport, TopologyVerdict

TOLERANCE = 0.5


def asked(*tokens: int, pair: Pair = ("P0", "D0"), text: str = "", logprobs: tuple[float, ...] = ()) -> CheckedRequest:
    served = Served(*pair, 20, len(tokens), 0, 0, 100, 0.1)
    return CheckedRequest(0, "r", tokens, served=served, text=text, logprobs=logprobs or (-1.0,) * len(tokens))


def scores(*tops: tuple[int, float]) -> list[Score]:
    """Return a score of -1 for each token, and how much likelier the top token is."""
    return [Score(-1.0, top, -1.0 + gap) for top, gap in tops]


def test_a_greedy_token_is_right_nearly_tied_or_wrong_by_how_much_likelier_another_one_is() -> None:
    answer = asked(4, 5, 6)
    assert compare(answer, scores((4, 0), (5, 0), (6, 0)), None, TOLERANCE).outcome == "same"
    tie = compare(answer, scores((4, 0), (9, TOLERANCE), (6, 0)), None, TOLERANCE)
    assert (tie.outcome, tie.place) == ("near-tie", 1)
    wrong = compare(answer, scores((4, 0), (9, TOLERANCE + 0.01), (6, 0)), None, TOLERANCE)
    assert (wrong.outcome, wrong.place) == ("wrong", 1) and "token 1 is 5, where 9 is likelier by 0.51" in wrong.says
    assert compare(answer, scores((4, 0), (9, 0), (6, 0)), None, TOLERANCE).outcome == "same", "two with one logprob"


def test_behind_a_near_tie_nothing_is_excused() -> None:
    judgement = compare(asked(4, 5, 6), scores((9, 0.1), (5, 0), (8, 2.0)), None, TOLERANCE)
    assert (judgement.outcome, judgement.place) == ("wrong", 2)


def test_a_logprob_that_is_off_is_wrong_though_the_token_is_right() -> None:
    right = scores((4, 0), (5, 0))
    near = compare(asked(4, 5, logprobs=(-1.0, -1.5)), right, None, TOLERANCE)
    assert (near.outcome, near.difference) == ("same", 0.5)
    off = compare(asked(4, 5, logprobs=(-1.0, -1.51)), right, None, TOLERANCE)
    assert (off.outcome, off.place) == ("wrong", 1) and "logprob -1.5100, not -1.0000" in off.says


def test_a_draw_that_falls_another_way_is_excused_by_nothing_but_rounding_in_the_same_answer() -> None:
    unlikely = scores((9, 3.0), (9, 3.0))
    assert compare(asked(4, 5), unlikely, (4, 5), TOLERANCE).outcome == "same", (
        "a drawn token need not be the likeliest"
    )
    exact = compare(asked(4, 5), unlikely, (4, 7), TOLERANCE)
    assert (exact.outcome, exact.place) == ("wrong", 1) and "same seed" in exact.says
    rough = asked(4, 5, logprobs=(-1.0, -1.0 - 2 * DRAW_NOISE))
    assert compare(rough, unlikely, (4, 7), TOLERANCE).outcome == "near-tie"
    assert compare(asked(4, 5), unlikely, (4,), TOLERANCE).place == 1, "one that is longer"


def test_the_limit_follows_the_noise_between_a_floor_and_a_cap_that_each_dtype_has() -> None:
    assert set(LOGPROB_CAPS) == set(LEAST_NOISE) == {*ITEM_BYTES, FP8_E4M3}
    assert logprob_limit(2.8e-5, "float32") < 3e-4, "a page of zeros moved logprobs by 0.0045"
    assert logprob_limit(0.0, "bfloat16") == 8 * LEAST_NOISE["bfloat16"] < logprob_limit(0.03, "bfloat16")
    for dtype, most in LOGPROB_CAPS.items():
        assert logprob_limit(9.0, dtype) == logprob_limit(math.inf, dtype) == most
        assert logprob_limit(math.nan, dtype) <= most, "a reference that has no numbers excuses nothing"
    assert logprob_limit(9.0, "float32", "bfloat16") == LOGPROB_CAPS["bfloat16"], "of two engines the coarser counts"


def test_an_engine_passes_itself_but_not_a_reference_that_it_differs_from_in_the_mean() -> None:
    assert limit_of(2.8e-5, "float32") == logprob_limit(2.8e-5, "float32")
    assert limit_of(0.66, "bfloat16") == 1.32, "rounding chose another expert"
    assert not is_unsound(0.66, 0.02, "bfloat16") and not is_unsound(4.4, 0.17, "bfloat16")
    assert not is_unsound(1e-5, 1e-6, "float32") and is_unsound(0.011, 1e-6, "float32")
    for dtype, most in LOGPROB_CAPS.items():
        assert is_unsound(9.0, most, dtype) and is_unsound(math.nan, math.nan, dtype)
    found = report([judged(asked(4, 5), "greedy", Judgement("same"))], transformers=Rounding(0.2, 0.02))
    assert (found.verdict, found.guilty) == ("wrong", ["all"])
    assert "the engine's own answers differ from transformers by 0.02 in the mean" in found.reasons[0]


def test_a_pair_that_differs_more_than_another_one_for_the_same_tokens_is_unlike() -> None:
    """No single difference exceeds a limit of bfloat16."""
    mixed = [Mean(way, ("prompt", (7,)), 0.005 + 0.002 * n) for n, way in enumerate(WAYS)]
    assert unlike_pairs(mixed, 0.001) == {}
    off = [Mean(("P0", "D1"), ("prompt", (8, 9)), 0.06), Mean(("P1", "D0"), ("prompt", (8, 9)), 0.004)]
    found = unlike_pairs([*mixed, *off], 0.001)
    assert list(found) == [("P0", "D1")] and found["P0", "D1"][0] > 4 * found["P0", "D1"][1]
    assert unlike_pairs(off, 0.02) == {}, "rounding here is coarser"
    assert unlike_pairs(off[:1], 0.001) == {}, "nothing to compare it with"
    elsewhere = msgspec.structs.replace(off[1], tokens=("other", (8, 9)))
    assert unlike_pairs([off[0], elsewhere], 0.001) == {}, "other tokens have other rounding"


WAYS = [(f"P{k}", f"D{m}") for k in range(2) for m in range(2)]


@pytest.mark.parametrize(
    ("ways", "wrong", "guilty"),
    [
        (WAYS, {("P1", "D0"): [0], ("P1", "D1"): [0]}, ["P1"]),
        (WAYS, {("P0", "D1"): [1], ("P1", "D1"): [3]}, ["D1"]),
        (WAYS, {("P0", "D1"): [1, 0]}, ["P0-D1"]),
        (WAYS, {("P0", "D1"): [1], ("P1", "D0"): [2]}, ["P0-D1", "P1-D0"]),
        (WAYS, {("P0", "D0"): [1], ("P0", "D1"): [1], ("P1", "D1"): [2]}, ["D1", "P0"]),
        (WAYS, {way: [0] for way in WAYS}, ["all"]),
        (WAYS[:1], {WAYS[0]: [4]}, ["P0-D0"]),
        (WAYS[:1], {WAYS[0]: [0]}, ["P0"]),  # the first token is sampled from P's logits
        (WAYS[:2], {way: [0] for way in WAYS[:2]}, ["P0"]),
        (WAYS[:2], {WAYS[1]: [5]}, ["P0-D1"]),
        (WAYS[::2], {way: [3] for way in WAYS[::2]}, ["D0"]),
        ([(None, "U0"), (None, "U1")], {(None, "U1"): [0]}, ["U1"]),
        ([(None, "U0"), (None, "U1")], {(None, "U0"): [0], (None, "U1"): [0]}, ["all"]),
        (WAYS, {}, []),
    ],
)
def test_who_is_to_blame(ways: list[Pair], wrong: dict[Pair, list[int]], guilty: list[str]) -> None:
    assert blame(wrong, ways) == guilty


def test_the_deltas_of_a_stream_are_the_whole_text() -> None:
    whole, other = asked(4, 5, text="ab"), asked(4, 6, text="ac")
    assert unlike_texts([whole, other, asked(4, 5, text="ab")]) == []
    (reason,) = unlike_texts([whole, other, asked(4, 5, text="a")])
    assert "'ab', 'a'" in reason


def judged(answer: CheckedRequest, kind: str, judgement: Judgement) -> Judged:
    assert answer.served is not None
    return Judged(answer, answer.served, kind, judgement)


def report(
    found: list[Judged],
    reasons: list[str] | None = None,
    moved: int = 100,
    refused: Sequence[Pair] = (),
    **more: Rounding,
) -> Report:
    pairs = [PairReport("P0", "D0", 1, 20, moved, 100, True, 1.0)]
    verdict = TopologyVerdict(not reasons, reasons or [], "m", 1, 1, {}, pairs)
    return report_of(verdict, found, [], "float32", {"one engine": Rounding(2e-5, 1e-6), **more}, 1.6e-4, [], refused)


def test_what_a_cache_had_wrong_is_blamed_on_whom_it_came_from() -> None:
    """P1-D0 is wrong by itself; P0-D0 is wrong only with pages that P1 left on D0."""
    wrong = Judgement("wrong", 1, "token 1 is 4")
    found = [judged(asked(4, 5, pair=(name, "D0")), "greedy", Judgement("same")) for name in ("P0", "P1")]
    stale = judged(asked(4, 5, pair=("P0", "D0")), "cached", wrong)
    assert report([*found, stale]).guilty == ["P0-D0"], "nothing else explains it"
    harmed = judged(asked(4, 5, pair=("P1", "D0")), "greedy", wrong)
    assert report([*found, stale, harmed]).guilty == ["P1-D0"]


def test_what_is_wrong_outweighs_what_could_not_be_judged() -> None:
    right = judged(asked(4, text="a"), "greedy", Judgement("same"))
    wrong = judged(asked(4, text="a"), "stream", Judgement("wrong", 0, "token 0 is 4"))
    assert report([right]).verdict == "right"
    assert report([right], ["D1 is down"]).verdict == "unjudged"
    assert report([]).verdict == "unjudged"
    found = report([right, wrong], ["D1 is down"])
    assert (found.verdict, found.guilty) == ("wrong", ["P0"])
    assert found.reasons == ["P0-D0: request r (stream, prompt of 20 tokens): token 0 is 4", "D1 is down"]
    assert (found.pairs[0].same, found.pairs[0].wrong) == (1, 1)
    assert report([right], moved=99).guilty == ["P0-D0"]
    texts = report([right, told(right, "b")])
    assert (texts.verdict, texts.guilty) == ("wrong", ["router"])


DAMAGE = Place(0, 2, False, "transfer")


def damaged(pair: Pair, kind: str = "greedy") -> Judged:
    one = judged(asked(4, 5, pair=pair), kind, Judgement("wrong", 1, DAMAGE.says))
    return msgspec.structs.replace(one, damage=DAMAGE)


def test_damage_is_of_its_pair_and_outweighs_what_a_cache_made_of_it() -> None:
    found = [judged(asked(4, 5, pair=way), "greedy", Judgement("same")) for way in WAYS]
    stale = judged(asked(4, 5, pair=("P1", "D0")), "cached", Judgement("wrong", 1, "token 1 is 4"))
    verdict = report([*found, damaged(("P0", "D0"), "cached"), stale])
    assert (verdict.verdict, verdict.guilty) == ("wrong", ["P0-D0"]), "P1-D0 read what P0 had left on D0"
    assert "request r (cached" in verdict.reasons[0] and "page 2, layer 0" in verdict.reasons[0], verdict.reasons
    everywhere = report([damaged(way) for way in WAYS])
    assert everywhere.guilty == ["P0-D0", "P0-D1", "P1-D0", "P1-D1"], "the model is right"
    assert report([*found, damaged(("P0", "D1")), damaged(("P1", "D1"))]).guilty == ["D1"]


def test_a_transfer_that_d_refused_is_of_its_pair_though_the_answer_is_right() -> None:
    right = judged(asked(4, 5), "greedy", Judgement("same"))
    tried = msgspec.structs.replace(right, served=msgspec.structs.replace(right.served, refused=(("P0", "D0"),)))
    for verdict in (report([right, tried]), report([right], refused=[("P0", "D0")])):
        assert (verdict.verdict, verdict.guilty, verdict.pairs[0].refused) == ("wrong", ["P0-D0"], 1)
        assert "D rejected 1 transfers" in verdict.reasons[0]
    assert report([right], refused=[("P1", "D1")]).guilty == ["P1-D1"], "a pair that never answered"


def test_a_pair_that_is_unlike_the_others_is_wrong_though_each_answer_is_right() -> None:
    found = [
        msgspec.structs.replace(judged(asked(4, 5, pair=way), "greedy", Judgement("same")), mean=1e-6) for way in WAYS
    ]
    assert report(found).verdict == "right"
    found[2] = msgspec.structs.replace(found[2], mean=9e-5)
    verdict = report(found)
    assert (verdict.verdict, verdict.guilty) == ("wrong", [pair_name(WAYS[2])])
    assert "differ by 9e-05 in the mean" in verdict.reasons[0]


def told(one: Judged, text: str) -> Judged:
    return msgspec.structs.replace(one, asked=asked(*one.asked.tokens, text=text))


def test_where_nobody_answers_nothing_was_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "http://127.0.0.1:1", "--model", "/nowhere"]) == 2
    assert "no router listens at http://127.0.0.1:1" in capsys.readouterr().err
