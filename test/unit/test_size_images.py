"""Images in `chitu size`: E in virtual time, splits with them, and what is said of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from encode_world import LAYOUT as FEATURES
from rich.console import Console
from router_world import LAYOUT
from test_size import PROFILE

from chitu.config.load import load_topology
from chitu.config.schema import RouterConfig, SLOConfig
from chitu.errors import ConfigError
from chitu.protocol import ImageLoad, LoadReport, StepRates
from chitu.protocol.first_prompt import FirstPrompt
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.simulation.cluster import SimulatedCluster, SimulatedRequest
from chitu.simulation.profile import EngineProfile, ImageCost, read_profile, write_profile
from chitu.tools.bench.profile import describe, images_of, profile_of
from chitu.tools.size.command import SizeOptions, size
from chitu.tools.size.search import Question, Shape, Slo, Split, _limit, search, splits
from chitu.tools.size.workload import Images, Request, Workload, fixed, read_images
from chitu.types import Role

ROW_S, ROWS = 0.002, 300
IMAGES = ImageCost(row_s=ROW_S, row_bytes=4000.0, region_rows=2000)
SEEING = msgspec.structs.replace(PROFILE, images=IMAGES)
PROMPT = 20 + ROWS


def cluster(encode: int, profile: EngineProfile = SEEING, **roles: int) -> SimulatedCluster:
    roles = roles or {"prefill": 1, "decode": 1}
    return SimulatedCluster(profile, encode=encode, **roles)


def seen(world: SimulatedCluster, *at_s: float) -> list[SimulatedRequest]:
    return [world.submit(at, PROMPT, 3, image_rows=(ROWS,)) for at in at_s]


def run(world: SimulatedCluster, *requests: SimulatedRequest) -> None:
    world.run()
    assert all(request.is_right and request.is_whole for request in requests), [each.error for each in requests]


# ------------------------------------------------------------------------------------------------------ the simulation


@pytest.mark.parametrize("roles", [{"prefill": 1, "decode": 1}, {"unified": 1}])
def test_without_e_an_image_is_encoded_before_its_prompt_is_computed(roles: dict[str, int]) -> None:
    plain, seeing = cluster(0, **roles), cluster(0, **roles)
    text = plain.submit(0.0, PROMPT, 3)
    (image,) = seen(seeing, 0.0)
    run(plain, text)
    run(seeing, image)
    own_s = ROWS * ROW_S
    assert text.ttft_s + own_s <= image.ttft_s < text.ttft_s + own_s + 0.1


def test_an_e_takes_the_image_off_p_and_text_does_not_wait_for_it() -> None:
    waits = {}
    for encode in (0, 1):
        world = cluster(encode)
        (image,) = seen(world, 0.0)
        text = world.submit(0.05, 20, 3)
        run(world, image, text)
        waits[encode] = text.ttft_s
        assert [each.num_images for each in world.encoders] == [1] * encode
    assert waits[0] > ROWS * ROW_S > waits[1] + 0.3


def test_e_share_the_images_and_one_is_as_fast_as_it_is_measured() -> None:
    ends = {}
    for encode in (1, 2, 3):
        world = cluster(encode)
        requests = seen(world, 0.0, 0.01, 0.02)
        run(world, *requests)
        ends[encode] = max(request.first_s for request in requests)
        assert sum(each.num_images for each in world.encoders) == 3
    encode_s = ROWS * ROW_S
    assert ends[1] > 3 * encode_s > ends[2] > 2 * encode_s > ends[3] - encode_s > 0


def test_the_router_knows_e_by_their_reports() -> None:
    world = cluster(2)
    requests = seen(world, *(0.7 * number for number in range(6)))
    run(world, *requests)
    world.run(world.clock.now_s + 2.0)
    loads = world.router._members
    assert [info.name for info in world.router.candidates.encode] == ["E0", "E1"]
    for load in loads.encode:
        report = load.newest.image_load
        assert report.row_s == pytest.approx(ROW_S, rel=0.05) and report.num_keys == load.newest.images


def test_a_router_with_an_slo_counts_what_images_take() -> None:
    """U encodes itself, P has E: so a request with images goes to the pair, and text to whichever has less to do."""
    config = RouterConfig(slo=SLOConfig(ttft_s=0.9, tpot_s=1.0))
    world = SimulatedCluster(SEEING, 1, 1, 1, config, encode=1)
    first = seen(world, 0.0)  # before anybody has reported what a row takes
    later = seen(world, 3.0, 4.5, 6.0)
    run(world, *first, *later)
    assert {request.pair for request in later} == {"P0-D0"} or all(request.ttft_s < 1.2 for request in later)


def test_images_of_a_region_that_is_too_small_are_refused_by_name() -> None:
    small = msgspec.structs.replace(SEEING, images=msgspec.structs.replace(IMAGES, region_rows=100))
    world = cluster(1, small)
    (image,) = seen(world, 0.0)
    world.run()
    assert image.error == "capacity"


# ----------------------------------------------------------------------------------------------------- load and splits


def test_images_are_spread_evenly_and_come_on_top_of_the_prompts() -> None:
    load = fixed(100, 8, 5).with_images(Images(0.4, 50))
    assert [request.image_rows for request in load.requests] == [(), (), (50,), (), (50,)]
    assert [request.prompt_tokens for request in load.requests] == [100, 100, 150, 100, 150]
    assert load.mean_image_rows == 20.0 and "0.4 images of 50 rows" in load.name
    assert [request.image_rows for request in fixed(9, 9, 2).with_images(Images(2.5, 7)).requests] == [
        (7,) * 2,
        (7,) * 3,
    ]
    shared = Workload((Request(0.0, 600, 8, (1, 2)),), "trace").with_images(Images(1, 50))
    (arrival,) = shared.arrivals(1.0)
    assert len(arrival.prompt) == 4 * 650 and arrival.prompt[: 4 * 512] == b"\1\0\0\0" * 512  # type: ignore[arg-type]
    assert arrival.image_rows == (50,)


def test_splits_with_e_use_all_devices_and_have_a_name() -> None:
    found = list(splits(4, [Shape()], range(3)))
    assert Split(1, 2, encode=1) in found and Split(1, 1, encode=2) in found
    assert all(split.devices == 4 for split in found) and not any(split.unified and split.encode for split in found)
    assert Split(1, 2, encode=1).name == "1E1P2D"
    assert list(splits(4, [Shape()])) == [split for split in found if not split.encode]


def question(per_request: float = 1.0, count: int = 40, ttft_s: float = 1.2, **fields: Any) -> Question:
    load = fixed(20, 3, count).with_images(Images(per_request, ROWS))
    return Question(load, Slo(ttft_s, 0.3), {Shape(): SEEING}, is_poisson=True, **fields)


def test_more_e_serve_more_images_and_an_estimate_knows_it() -> None:
    asked = question(ttft_s=1.6)
    none, some = Split(1, 1), Split(1, 1, encode=1)
    rate = 0.75
    missed, kept = asked.trial(none, rate), asked.trial(some, rate)
    assert missed.is_cut and kept.attained > 0.9 and kept.by_encoders > 30
    assert asked.estimate(some) > asked.estimate(none)
    assert asked.estimate(Split(1, 1, encode=2)) > asked.estimate(some)
    assert 0.25 < kept.busy["E"] < 0.5 and "E" not in missed.busy


def test_text_beside_images_keeps_its_bound_only_with_e() -> None:
    asked = question(per_request=0.2, ttft_s=0.5)
    asked.slo = Slo(0.5, 0.3, 0.75)  # images take 0.6 s: they miss in any case
    with_e, without = asked.trial(Split(1, 1, encode=1), 1.0), asked.trial(Split(1, 1), 1.0)
    assert with_e.attained >= 0.75 > without.attained, (with_e.attained, without.attained)


def test_what_limits_is_e_if_they_encode_all_the_time_and_one_more_is_measured() -> None:
    sizing = search(question(count=30, encode=1), 3)
    assert sizing.best.split == Split(1, 1, encode=1) and {trial.split.encode for trial in sizing.tried} == {1}
    more = {trial.split.name: trial.rate for trial in sizing.more}
    assert set(more) == {"1E2P1D", "1E1P2D", "2E1P1D"}
    assert more["2E1P1D"] > 1.1 * sizing.best.rate and more["2E1P1D"] > more["1E1P2D"]
    asked = question(count=40)
    best = asked.max_rate(Split(2, 1, encode=1))
    assert _limit(asked, best).startswith(("E: images wait", "P: prompts wait"))


def test_images_that_miss_the_bound_by_themselves_are_named() -> None:
    asked = question(count=20, ttft_s=0.5)
    trial = asked.trial(Split(1, 1), 0.1, is_whole=True)
    assert _limit(asked, trial).startswith("100% of the prompts take longer than ttft")


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(SEEING, path := tmp_path / "p.json")
    assert read_profile(path) == SEEING
    return str(path)


def asked(profile: str, **fields: Any) -> SizeOptions:
    fields = {"lengths": "20:3", "images": f"1:{ROWS}", "requests": 12, **fields}
    return SizeOptions("ttft=1.5,tpot=0.3", 3, (profile,), **fields)


def answer(options: SizeOptions) -> str:
    out = io.StringIO()
    assert size(options, Console(file=out, width=140), lambda text: None) == 0
    return out.getvalue()


def test_the_answer_says_how_many_e(profile: str) -> None:
    numbers = json.loads(answer(asked(profile, encoders=1, is_json=True)))
    best = numbers["best"]
    assert (best["split"], best["encode"], best["prefill"], best["decode"]) == ("1E1P1D", 1, 1, 1)
    assert best["images_encoded_by_e"] > 0 and best["busy"]["E"] > 0
    assert numbers["workload"]["mean_image_rows"] == ROWS and numbers["workload"]["mean_prompt_tokens"] == PROMPT
    text = answer(asked(profile, encoders=1))
    assert "1E1P1D" in text and "1 images of 300 rows" in text and "2E1P1D" in text


def test_a_rate_on_the_command_line_takes_the_place_of_the_profile_s(tmp_path: Path, profile: str) -> None:
    write_profile(PROFILE, blind := tmp_path / "blind.json")
    slow = json.loads(answer(asked(str(blind), encode_rate=400, encoders=1, is_json=True)))
    fast = json.loads(answer(asked(profile, encode_rate=5000, encoders=1, is_json=True)))
    assert fast["best"]["rate"] > 1.2 * slow["best"]["rate"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"images": "1"}, "images in a request (up to 64) and tokens of an image are expected, as in 0.5:2040"),
        ({"images": "0:300"}, "--images is '0:300'"),
        ({"images": "65:300"}, "--images is '65:300'"),
        ({"images": "1:0"}, "--images is '1:0'"),
        ({"images": "1:x"}, "--images is '1:x'"),
        ({"images": "1:2001"}, "an image of 2001 rows; the profile 'unnamed' has room for 2000 (images.region_rows)"),
        ({"encode_rate": 0.0}, "--encode-rate is 0; rows a second above 0 are expected"),
        ({"encode_rate": float("nan")}, "--encode-rate is nan"),
        ({"encoders": -1}, "--encoders is -1; at least 0 is expected"),
        ({"encoders": 3}, "3 devices are too few: an instance of the given profiles has 1, and 3 E one each"),
        ({"images": None, "encode_rate": 5.0}, "--encode-rate and --encoders are about images"),
        ({"images": None, "encoders": 1}, "give --images COUNT:ROWS"),
        ({"images": "60:2000"}, "has a request of"),
    ],
)
def test_what_cannot_be_is_named(profile: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        answer(asked(profile, **fields))
    assert sentence in caught.value.message


def test_a_profile_without_a_time_of_images_is_named_and_a_bad_one_too(tmp_path: Path) -> None:
    write_profile(PROFILE, path := tmp_path / "blind.json")
    with pytest.raises(ConfigError, match=r"no time of images \(images.row_s is 0\).*give --encode-rate"):
        answer(asked(str(path)))
    for wrong, text in (({"row_s": -1.0}, "row_s is -1"), ({"region_rows": 0}, "region_rows is 0")):
        write_profile(msgspec.structs.replace(PROFILE, images=ImageCost(**wrong)), path)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=text):
            read_profile(path)


def test_the_spelling_of_images() -> None:
    assert read_images("0.5:2040") == Images(0.5, 2040) and read_images("2:7") == Images(2.0, 7)


def test_a_profile_of_a_running_cluster_has_what_e_take_and_not_their_layout() -> None:
    rates = StepRates(prompt_token_s=1e-4, decode_step_s=0.01, prompt_steps=99, decode_steps=99)
    of_p = LoadReport(rates=rates, pages_total=64, image_rows=512, image_load=ImageLoad(row_s=0.5))
    of_e = LoadReport(image_rows=512, image_load=ImageLoad(row_s=0.25))
    e0 = ("E0", Role.ENCODE, FEATURES, of_e)
    places = (("P0", Role.PREFILL, LAYOUT, of_p), ("D0", Role.DECODE, LAYOUT, of_p), e0)
    up = tuple(
        InstanceSnapshot(name, str(role), "up", "h", 1, "1", load, layout) for name, role, layout, load in places
    )
    there = [(each, each.load) for each in up if each.load is not None]
    assert images_of(there) == ImageCost(0.25, float(FEATURES.bytes_per_page), 16384)
    assert images_of(there[:2]).row_s == 0.5 and images_of([]) == ImageCost()
    cluster = ClusterSnapshot("m", "1", 512, 16, "shm", 0.0, "1", 0, up, (), FirstPrompt("hello", False))
    found = profile_of(cluster, load_topology(None, []))
    assert found.num_pages == 64 and found.vocab_size == LAYOUT.vocab_size and found.images.row_s == 0.25
    assert "2.5e+05 us a row of an image" in describe(found)
