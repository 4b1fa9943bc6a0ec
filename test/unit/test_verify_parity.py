"""When `chitu verify` calls an answer right, a near-tie or wrong, and which instance it blames."""

from __future__ import annotations

import msgspec
import pytest

from chitu import cli
from chitu.client.verify.parity import DRAW_NOISE, Judgement, blame, compare, unlike_texts
from chitu.client.verify.probe import CheckedRequest, Pair, Score, Served
from chitu.client.verify.report import Judged, Report, report_of
from chitu.client.verify.topology import PairReport, TopologyVerdict
from chitu.protocol import LOGPROB_TOLERANCES
from chitu.protocol.cluster import FP8_E4M3, ITEM_BYTES

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


def test_every_dtype_that_a_cluster_can_have_has_a_tolerance() -> None:
    assert set(LOGPROB_TOLERANCES) == {*ITEM_BYTES, FP8_E4M3}


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


def report(found: list[Judged], reasons: list[str] | None = None, moved: int = 100) -> Report:
    pairs = [PairReport("P0", "D0", 1, 20, moved, 100, True, 1.0)]
    verdict = TopologyVerdict(not reasons, reasons or [], "m", 1, 1, {}, pairs)
    return report_of(verdict, found, [], "float32", 0.01, ["one engine"], [])


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
    assert found.reasons == ["P0-D0: stream, prompt of 20 tokens: token 0 is 4", "D1 is down"]
    assert (found.pairs[0].same, found.pairs[0].wrong) == (1, 1)
    assert report([right], moved=99).guilty == ["P0-D0"]
    texts = report([right, told(right, "b")])
    assert (texts.verdict, texts.guilty) == ("wrong", ["router"])


def told(one: Judged, text: str) -> Judged:
    return msgspec.structs.replace(one, asked=asked(*one.asked.tokens, text=text))


def test_where_nobody_answers_nothing_was_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "http://127.0.0.1:1", "--model", "/nowhere"]) == 2
    assert "no router listens at http://127.0.0.1:1" in capsys.readouterr().err
