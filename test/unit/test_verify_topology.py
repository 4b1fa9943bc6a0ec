"""What chitu verify concludes from answers: of one pair, and of a cluster."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from chitu import cli
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.protocol import LEAST_NOISE, LOGPROB_CAPS, KVLayout, logprob_limit
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.cluster import FP8_E4M3, ITEM_BYTES
from chitu.protocol.first_prompt import first_prompt
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
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
from chitu.tools.verify.probe import CheckedRequest, MovedSums, Pair, Prober, Score, Served, read_answer
from chitu.tools.verify.report import Judged, Report, Rounding, report_of
from chitu.tools.verify.topology import PairReport, TopologyVerdict, expected_bytes, judge

# ----------------------------------------------------------------------------------------------------------------------
# When `chitu verify` calls an answer right, a near-tie or wrong, and which instance it blames.


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


# ----------------------------------------------------------------------------------------------------------------------
# What verify_xpyd_topology demands, on made-up clusters: it reports each thing that can be wrong, and nothing else.


LAYOUT = KVLayout.uniform("hash", 4, 2, 16, 16, "bfloat16", 500)


def load_script() -> ModuleType:
    path = Path(__file__).parents[1] / "verify_xpyd_topology.py"
    spec = importlib.util.spec_from_file_location("verify_xpyd_topology", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


verify = load_script()


def instance(name: str, status: str = "up", layout: KVLayout | None = LAYOUT) -> InstanceSnapshot:
    role = {"P": "prefill", "D": "decode", "U": "unified"}[name[0]]
    return InstanceSnapshot(name, role, status, "h", 1, "1", None, layout)  # type: ignore[arg-type]


def snapshot(*instances: InstanceSnapshot) -> ClusterSnapshot:
    return ClusterSnapshot("m", "1", 512, 16, "shm", 0.0, "1", 0, instances, (), first_prompt("m", True))


def asked_of(number: int, pair: str, request_id: str, prompt_tokens: int = 40, **changes: object) -> CheckedRequest:
    """Return a request that went well, over `pair`."""
    prefill, decode = pair.split("-")
    kv_bytes = expected_bytes(prompt_tokens, LAYOUT)
    served = msgspec.structs.replace(Served(prefill, decode, prompt_tokens, 3, 0, 0, kv_bytes, 0.5), **changes)
    return CheckedRequest(number, request_id, (number, 5, 6), served=served)


def all_pairs(prefills: int = 2, decodes: int = 3) -> tuple[ClusterSnapshot, list[CheckedRequest]]:
    names = [f"P{k}" for k in range(prefills)] + [f"D{m}" for m in range(decodes)]
    pairs = itertools.product(range(2), range(prefills), range(decodes))
    requests = [asked_of(n, f"P{k}-D{m}", f"{n}{k}{m}") for n, k, m in pairs]
    return snapshot(*map(instance, names)), requests


def reasons(
    cluster: ClusterSnapshot, requests: list[CheckedRequest], after: ClusterSnapshot | None = None
) -> list[str]:
    verdict = judge(cluster, after or cluster, requests)
    assert verdict.ok == (not verdict.reasons)
    return list(verdict.reasons)


def test_the_formula_is_that_of_whole_pages_and_a_row_of_whole_cache_lines() -> None:
    # 3 pages of 16 tokens, K and V of 4 layers, 2 heads of 16 bfloat16; 64 bytes of header, 500 float32.
    assert expected_bytes(40, LAYOUT) == 3 * (2 * 4 * 2 * 16 * 16 * 2) + 64 + 2048
    assert expected_bytes(48, LAYOUT) == expected_bytes(33, LAYOUT)
    # Four ranks, two heads: each head goes to two ranks.
    wide = msgspec.structs.replace(LAYOUT, tp_size=4)
    assert expected_bytes(40, wide) == 3 * (2 * 4 * 4 * 16 * 16 * 2) + 64 + 2048


def test_for_the_last_token_alone_no_pages_are_expected() -> None:
    cluster, requests = all_pairs()
    row = expected_bytes(0, LAYOUT)
    last = {"output_tokens": 3, "continued_tokens": 2}
    assert reasons(cluster, [*requests[:-1], asked_of(1, "P1-D2", "last", kv_bytes=row, **last)]) == []
    moved = asked_of(1, "P1-D2", "last", **last)
    assert any(f"not {row}" in reason for reason in reasons(cluster, [*requests[:-1], moved]))


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 3), (4, 2)])
def test_a_cluster_of_which_every_pair_works_passes(prefills: int, decodes: int) -> None:
    cluster, requests = all_pairs(prefills, decodes)
    verdict = judge(cluster, cluster, requests)
    assert verdict.ok and len(verdict.pairs) == prefills * decodes
    assert sum(pair.requests for pair in verdict.pairs) == len(requests)


def test_who_is_not_up_is_named_once_and_alone() -> None:
    cluster, requests = all_pairs()
    served = [one for one in requests if one.pair[1] != "D2"]
    members = cluster.instances[:-1]
    assert reasons(snapshot(*members, instance("D2", "down", None)), served) == ["D2 is down"]
    assert reasons(snapshot(*members, instance("D2", "draining")), served) == ["D2 is draining"]
    assert reasons(cluster, requests, after=snapshot(*members, instance("D2", "down", None))) == ["D2 is down"]


def test_who_got_nothing_is_named_and_so_is_a_pair_that_was_left_out() -> None:
    cluster, requests = all_pairs()
    without_d1 = [one for one in requests if one.pair[1] != "D1"]
    assert reasons(cluster, without_d1) == ["D1 got no request"]
    aslant = [one for one in requests if one.pair != ("P1", "D2")]
    assert reasons(cluster, aslant) == ["no request went over the pair P1-D2"]


def test_wrong_bytes_tokens_ids_and_errors_are_said() -> None:
    cluster, requests = all_pairs()
    more = asked_of(9, "P0-D1", "x1", kv_bytes=77)
    (found,) = reasons(cluster, [*requests, more])
    assert found.startswith("1 of 13 requests of 40 prompt tokens over P0-D1 moved 77 bytes, not ")
    other = CheckedRequest(0, "x2", (0, 5, 7), served=asked_of(0, "P1-D1", "x2").served)
    assert reasons(cluster, [*requests, other]) == ["P1-D1 gave other tokens than other pairs did to the same prompt"]
    assert reasons(cluster, [*requests, requests[0]]) == ["the request id 000 was given more than once"]
    failed = CheckedRequest(0, error="decode_lost: D1 is gone")
    assert reasons(cluster, [*requests, failed]) == ["1 of 13 requests failed: decode_lost: D1 is gone"]
    short = CheckedRequest(9, "x4", (1,), served=asked_of(9, "P0-D0", "x4").served)
    assert reasons(cluster, [*requests, short]) == ["1 of 13 requests got 1 tokens, but the router counted 3"]


def answered(pair: str, request_id: str, *logprobs: float, tokens: tuple[int, ...] = (0, 5, 6)) -> CheckedRequest:
    return dataclasses.replace(asked_of(0, pair, request_id), tokens=tokens, logprobs=logprobs)


def test_what_repeated_answers_of_a_pair_differ_by_is_rounding_and_more_between_pairs_is_not() -> None:
    cluster = snapshot(*map(instance, ("P0", "P1", "D0")))
    found = [answered("P0-D0", "a", -1.0, -2.0, -3.0), answered("P1-D0", "b", -1.0, -2.0, -3.05)]
    assert reasons(cluster, found) == [], "bfloat16"
    found += [answered("P0-D0", "c", -1.0, -2.02, -3.0), answered("P1-D0", "d", -1.0, -2.0, -3.2)]
    assert reasons(cluster, found) == [], "P1 answered well once"
    off = [answered("P0-D0", "a", -1.0, -2.0, -3.0), answered("P1-D0", "b", -1.0, -2.0, -3.2)]
    off += [answered("P1-D0", "c", -1.0, -2.0, -3.21)]
    (reason,) = reasons(cluster, off)
    assert reason == ("P0-D0 and P1-D0 differ by 0.2 in logprobs of the same tokens, where rounding explains 0.08"), (
        reason
    )


def test_another_token_is_right_if_it_was_a_near_tie() -> None:
    cluster = snapshot(*map(instance, ("P0", "P1", "D0")))
    usual = [answered("P0-D0", name, -1.0, -2.0, -3.0) for name in ("a", "b")]
    assert reasons(cluster, [*usual, answered("P1-D0", "c", -1.0, -2.05, -9.0, tokens=(0, 7, 9))]) == []
    (reason,) = reasons(cluster, [*usual, answered("P1-D0", "c", -1.0, -2.5, -9.0, tokens=(0, 7, 9))])
    assert reason == "P1-D0 gave other tokens than other pairs did to the same prompt"


def test_damage_between_p_and_d_is_said_with_its_request_though_all_tokens_are_equal() -> None:
    cluster, requests = all_pairs(1, 1)
    right = MovedSums(0, 4, "0" * 16 * 12, "0" * 16 * 12)
    wrong = msgspec.structs.replace(right, landed="0" * 16 * 4 + "1" * 16 + "0" * 16 * 7)
    sound = asked_of(0, "P0-D0", "s", moved=right)
    assert reasons(cluster, [*requests, sound]) == []
    (reason,) = reasons(cluster, [*requests, sound, asked_of(0, "P0-D0", "hurt", moved=wrong)])
    assert reason.startswith("request hurt over P0-D0: K and V differ between P and D")
    assert "page 1, layer 1, in that layer alone" in reason


def test_a_transfer_that_d_refused_is_said_whether_another_attempt_answered_or_none() -> None:
    cluster, requests = all_pairs(1, 1)
    again = asked_of(0, "P0-D0", "again", refused=(("P0", "D0"),))
    said = ["P0-D0: D rejected 1 transfers: the data was damaged (integrity)"]
    assert reasons(cluster, [*requests, again]) == said
    failed = CheckedRequest(0, "lost", error="integrity: a row")
    record = RequestSnapshot("room", "lost", "P0", "D0", "failed", 9, 0, 0.0, None, 1.0, 0, None, "integrity")
    after = msgspec.structs.replace(cluster, requests=(record,))
    assert reasons(cluster, [*requests, failed], after) == ["1 of 3 requests failed: integrity: a row", *said]


PROOF = (
    '"usage": {"prompt_tokens": 9, "completion_tokens": 4},'
    ' "chitu": {"choices": [{"attempts": [{"prefill": "P1", "decode": "D0", "continued_tokens": 0,'
    ' "cached_tokens": 0, "kv_bytes": 5, "first_token_s": null},'
    ' {"prefill": "P0", "decode": "D0", "continued_tokens": 1, "cached_tokens": 2, "kv_bytes": 7,'
    ' "first_token_s": 6.0}]}]}'
)


def test_an_answer_is_read_with_its_proof_and_one_cut_off_or_with_an_error_is_none() -> None:
    choices = '"choices": [{"text": "ab", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.5, -2]}}]'
    event, last = f"data: {{{choices}}}\n\n".encode(), f'data: {{"choices": [], {PROOF}}}\n\n'.encode()
    served = Served("P0", "D0", 9, 4, 1, 2, 7, 6.0)
    streamed = read_answer(3, "r", event * 2 + last + b"data: [DONE]\n\n", True)
    assert streamed == CheckedRequest(3, "r", (1, 2, 1, 2), "", served, "abab", (-1.5, -2, -1.5, -2))
    assert read_answer(3, "r", f"{{{choices}, {PROOF}}}".encode(), False) == CheckedRequest(
        3, "r", (1, 2), "", served, "ab", (-1.5, -2)
    )
    with pytest.raises(ValueError, match="cut off"):
        read_answer(0, "r", event + last, True)
    with pytest.raises(ValueError, match="decode_lost: gone"):
        failed = b'data: {"error":{"code":"decode_lost","message":"gone"}}\n\ndata: [DONE]\n\n'
        read_answer(0, "r", event + failed, True)
    with pytest.raises(ValueError, match="return_proof"):
        read_answer(0, "r", event + b"data: [DONE]\n\n", True)


def test_a_router_that_is_gone_is_an_error_of_ours_also_where_no_answer_is_checked() -> None:
    """`chitu verify` exits with 2 for these; 1 would say that an answer is wrong."""
    prober = Prober(RouterClient("http://127.0.0.1:1"), "m", max_tokens=1, timeout_s=1.0)
    with pytest.raises(RouterUnreachable):
        prober.token_ids("a")
    assert prober.ask(0, "a", False).error.startswith("router_unreachable: no router listens")


def test_any_python_runs_it_or_says_which_one_does(tmp_path: Path) -> None:
    """-S hides the libraries, as in a Python that is not the project's."""
    script = tmp_path / "test" / "verify_xpyd_topology.py"
    script.parent.mkdir()
    script.write_text(Path(verify.__file__ or "").read_text())
    command = [sys.executable, "-I", "-S", str(script), "--stream"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "script/setup.sh" in done.stderr
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho "taken over: $*"\n')
    own.chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"taken over: {script} --stream\n"


def test_its_hints_name_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--router", "http://127.0.0.1:1"]) == 1
    assert "name another with --router" in capsys.readouterr().out
