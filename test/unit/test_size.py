"""`chitu size`: traces, the question's spelling, and the search."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from chitu.errors import ConfigError
from chitu.simulation.profile import EngineProfile, ExchangeCost, LinkCost, StepCost, read_profile, write_profile
from chitu.tools.size.command import SizeOptions, read_slo, size
from chitu.tools.size.search import Question, Shape, Slo, Split, Trial, _limit, search, splits
from chitu.tools.size.workload import fixed, percentile, read_workload

PROFILE = EngineProfile(
    StepCost(prefill_s=0.01, prompt_token_s=0.001, decode_s=0.05, sequence_s=0.002),
    LinkCost(bytes_per_s=1e9, message_s=0.001),
    num_pages=2048,
    kv_bytes_per_token=1000,
    num_layers=2,
    vocab_size=16,
    max_running_requests=4,
)


def question(prompt: int, output: int, count: int = 60, **costs: float) -> Question:
    profile = msgspec.structs.replace(PROFILE, cost=msgspec.structs.replace(PROFILE.cost, **costs))
    return Question(fixed(prompt, output, count), Slo(1.0, 0.15), {Shape(): profile}, is_poisson=True)


@pytest.mark.parametrize(
    ("prompt", "output", "rate", "right", "wrong"),
    [(400, 3, 5.0, Split(3, 1), Split(1, 3)), (20, 20, 8.0, Split(1, 3), Split(3, 1))],
)
def test_long_prompts_take_more_p_and_long_answers_more_d(
    prompt: int, output: int, rate: float, right: Split, wrong: Split
) -> None:
    asked = question(prompt, output)
    kept, missed = asked.trial(right, rate), asked.trial(wrong, rate)
    assert kept.attained > 0.9 and not kept.is_cut
    assert missed.is_cut and missed.attained < 0.9
    assert asked.estimate(right) > asked.estimate(wrong)


def test_what_limits_is_what_one_more_of_helps_against() -> None:
    sizing = search(question(400, 3, count=30), 2)
    assert sizing.best.split == Split(1, 1) and {trial.split.name for trial in sizing.tried} == {"1P1D", "2U"}
    assert sizing.limit.startswith("P: "), sizing.limit
    more_p, more_d = sizing.more
    assert more_p.rate > 1.5 * sizing.best.rate > 1.4 * more_d.rate


def test_prompts_that_miss_the_bound_by_themselves_are_named() -> None:
    asked = question(1200, 3, count=20)
    assert _limit(asked, Trial(Split(1, 1), 0.1, 20)).startswith("100% of the prompts take longer than ttft")


def test_drafts_bring_what_their_acceptance_and_the_price_of_a_row_say() -> None:
    asked = question(20, 60, count=12, sequence_s=0.001)
    plain, split = asked.profiles[Shape()], Split(1, 1)
    drafting = msgspec.structs.replace(plain, draft_acceptance=0.8)
    dear = msgspec.structs.replace(drafting, cost=msgspec.structs.replace(plain.cost, decode_s=0.0, sequence_s=0.01))
    assert plain.token_s(2, 50) == pytest.approx(0.052)
    assert drafting.token_s(2, 50) == pytest.approx(
        min((0.05 + 0.002 * (1 + k)) / sum(0.8**n for n in range(k + 1)) for k in range(16))
    )
    assert dear.token_s(2, 50) == pytest.approx(0.02), "a draft was taken to pay where each row costs a whole step"
    seen = {}
    for name, profile in (("plain", plain), ("drafting", drafting), ("dear", dear)):
        asked.profiles = {Shape(): profile}
        trial = asked.trial(split, 0.05, is_whole=True)  # one at a time
        assert trial.kept == trial.num_requests == 12 and not trial.failed
        seen[name] = percentile(sorted(trial.tpots_s), 0.5)
    assert seen["drafting"] == pytest.approx(drafting.token_s(1, 50), rel=0.2), seen
    assert seen["plain"] > 2.5 * seen["drafting"] and seen["dear"] < 0.0125, seen


def test_a_slow_link_is_named() -> None:
    asked = question(400, 3, count=40)
    asked.profiles = {Shape(): msgspec.structs.replace(PROFILE, link=LinkCost(bytes_per_s=9e5, message_s=0.001))}
    assert _limit(asked, Trial(Split(1, 1), 2.0, 40)).startswith("the link")


def test_every_device_is_used_and_sizes_are_mixed() -> None:
    found = list(splits(4, [Shape(1), Shape(2)]))
    assert Split(1, 3) in found and Split(0, 0, 4) in found
    assert Split(2, 1, 0, Shape(1), Shape(2)) in found and Split(1, 1, 0, Shape(2), Shape(2)) in found
    assert all(split.devices == 4 for split in found if split.decode_shape == Shape() or split.prefill % 2 == 0)
    assert Split(2, 1, 0, Shape(1), Shape(2)).name == "2P1D(tp2)"


def test_groups_of_members_are_instances_of_several_devices() -> None:
    found = list(splits(8, [Shape(1), Shape(1, 2)]))
    two = Split(2, 1, 0, Shape(1, 2), Shape(1, 2))
    assert two.name == "2P(dp2)1D(dp2)" and two.devices == 6 and two not in found
    assert Split(2, 2, 0, Shape(1, 2), Shape(1, 2)) in found and Split(2, 4, 0, Shape(1, 2)) in found
    assert Split(1, 1, 0, Shape(2, 4), Shape(2)).name == "1P(dp4 tp2)1D(tp2)"
    assert {split.devices for split in found if split.decode_shape == Shape()} == {8}


def test_a_group_is_sized_by_what_its_members_serve_together() -> None:
    asked, split = question(400, 3, count=60), Split(2, 1, 0, Shape(1, 2), Shape(1, 2))
    near = msgspec.structs.replace(PROFILE, experts="spread", dp_size=2, exchange=ExchangeCost(0.001, 1e-6))
    far = msgspec.structs.replace(near, exchange=ExchangeCost(0.1, 1e-3))
    kept = {}
    for name, profile in (("near", near), ("far", far)):
        asked.profiles = {Shape(1, 2): profile}
        kept[name] = asked.trial(split, 4.0).attained
    asked.profiles = {Shape(): PROFILE}
    kept["two alone"] = asked.trial(Split(2, 1), 4.5).attained
    assert kept["near"] > 0.9 > kept["two alone"], "two P of two members serve more than two P"
    assert kept["far"] < 0.5, "an exchange that takes longer than the step"


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def line(at_ms: int, prompt: int, output: int, blocks: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": blocks}


def test_a_published_trace_shares_prompts_by_its_blocks(tmp_path: Path) -> None:
    workload = read_workload(write(tmp_path, line(3000, 600, 5, [0, 7]), "", line(0, 512, 9, [0])))
    early, late = workload.requests
    assert (early.at_s, late.at_s, workload.rate) == (0.0, 3.0, 1 / 3)
    first, second = early.prompt(), late.prompt()
    assert isinstance(first, bytes) and isinstance(second, bytes)
    assert (len(first), len(second)) == (4 * 512, 4 * 600)
    assert second[: 4 * 512] == first and second[4 * 512 :] == (7).to_bytes(4, "little") * 88
    assert [arrival.at_s for arrival in workload.arrivals(2.0)] == [0.0, 0.5]


def test_the_routers_own_records_are_a_trace(tmp_path: Path) -> None:
    attempt = {"prompt_tokens": 30, "output_tokens": 4}
    own = {"kind": "request", "arrived_s": 8.0, "choices": [[attempt]]}
    path = write(tmp_path, own, {"kind": "frame"}, {**own, "arrived_s": 9.5}, {**own, "choices": []})
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in read_workload(path).requests] == [
        (8, 30, 4),
        (9.5, 30, 4),
    ]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[1]", "line 2: it is no JSON object"),
        ({"timestamp": 1, "input_length": 5}, "line 2: output_length is missing"),
        (line(1, 0, 5, []), "line 2: input_length is 0"),
        (line(1, 600, 5, [1]), "line 2: 1 hash_ids of 512 tokens do not fit input_length 600"),
        ({**line(1, 5, 5, []), "timestamp": "x"}, "line 2: timestamp is 'x'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: object, text: str) -> None:
    with pytest.raises(ConfigError, match="trace") as caught:
        read_workload(write(tmp_path, line(0, 5, 5, []), bad))
    assert text in caught.value.message


@pytest.mark.parametrize("text", ["", "ttft=2", "ttft=2,tpot=x", "ttft=2;tpot=1", "ttft=0,tpot=1", "ttft=2,tpot=1,x=3"])
def test_an_slo_has_two_bounds(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ttft=2,tpot=0\.05"):
        read_slo(text)


def test_a_question_gets_a_table_or_numbers_and_a_wrong_one_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE
    out = io.StringIO()
    options = SizeOptions("ttft=1,tpot=0.15", 2, (str(path),), lengths="100:8", requests=30)
    assert size(options, Console(file=out, width=120), lambda text: None) == 0
    assert "take " in out.getvalue() and "max_queue_s=" in out.getvalue()
    out = io.StringIO()
    numbers = SizeOptions("ttft=1,tpot=0.15", 2, (str(path),), lengths="100:8", requests=30, is_json=True)
    size(numbers, Console(file=out), lambda text: None)
    found = json.loads(out.getvalue())
    assert found["best"]["rate"] > 1 and found["set"]["scheduler.max_running_requests"] == 4
    for wrong in (
        SizeOptions("ttft=1,tpot=1", 0, (str(path),), lengths="1:1"),
        SizeOptions("ttft=1,tpot=1", 1, (), lengths="1:1"),
        SizeOptions("ttft=1,tpot=1", 1, (str(path), str(path)), lengths="1:1"),
        SizeOptions("ttft=1,tpot=1", 1, (str(path),)),
        SizeOptions("ttft=1,tpot=1", 1, (str(path),), lengths="9"),
        SizeOptions("ttft=1,tpot=1", 1, (str(path),), lengths="99999:1"),
        SizeOptions("ttft=1e-6,tpot=1", 1, (str(path),), lengths="9:9", requests=5),
        SizeOptions("ttft=1,tpot=1", 1, (str(path),), lengths="9:9", draft_acceptance=1.0),
    ):
        with pytest.raises(ConfigError):
            size(wrong, Console(file=out), lambda text: None)
    path.write_text('{"cost": {"decode_s": -1}}')
    with pytest.raises(ConfigError, match="decode_s is -1"):
        read_profile(path)
