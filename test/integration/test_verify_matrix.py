"""`chitu verify` on clusters of many kinds: 21 sound ones are right, and each planted damage is named, in each dtype of
pages. What CI has of it is in `test_verify.py`; by hand:
`.venv/bin/python -m pytest test/integration/test_verify_matrix.py --by-hand`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nursery import FORKED
from support import planted_scheduler

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model
from chitu.tools.verify.report import Report
from chitu.tools.verify.run import VerifyOptions, verify

ROUTER = "dp_config.router"
PD = f"{ROUTER}.pd_disaggregation"
PATIENCE_S = 300
TWO_BY_TWO = tuple(f"{ROUTER}.{role}_schedulers=[{{port: 0}}, {{port: 0}}]" for role in ("prefill", "decode"))
MOONCAKE = (f"{PD}.transport=mooncake", f"{PD}.mooncake_protocol=tcp")
STAGED = (*MOONCAKE, f"{PD}.transfer=staged")

pytestmark = [pytest.mark.timeout(900), pytest.mark.by_hand]


def tp(prefill: int, decode: int) -> tuple[str, ...]:
    each = (("prefill", prefill), ("decode", decode))
    return tuple(
        f"{ROUTER}.{role}_schedulers=[{{port: 0, tp_size: {size}, devices: [{', '.join(['cpu'] * size)}]}}]"
        for role, size in each
    )


SOUND: list[tuple[str, str, tuple[str, ...]]] = [
    ("tiny", "float32", TWO_BY_TWO),
    ("tiny", "bfloat16", TWO_BY_TWO),
    ("tiny", "fp8_e4m3", TWO_BY_TWO),
    ("tiny", "float32", tp(2, 1)),
    ("tiny", "float32", tp(1, 2)),
    ("tiny", "bfloat16", tp(2, 2)),
    ("tiny", "fp8_e4m3", tp(2, 2)),
    ("tiny", "float16", (f"{PD}.verify_kv=all",)),
    ("llama", "float32", STAGED),
    ("llama", "bfloat16", MOONCAKE),
    ("llama", "fp8_e4m3", STAGED),
    ("qwen2", "float32", (*TWO_BY_TWO, "cache.page_size=4", "cache.num_pages=1200")),
    ("qwen2", "bfloat16", tp(1, 2)),
    ("qwen3", "float32", MOONCAKE),
    ("qwen3", "fp8_e4m3", (*TWO_BY_TWO, "scheduler.chunk_size=64")),
    ("mistral", "float32", (*STAGED, "cache.page_size=32")),
    ("mistral", "bfloat16", TWO_BY_TWO),
    ("qwen3_moe", "float32", TWO_BY_TWO),
    ("qwen3_moe", "bfloat16", (*MOONCAKE, *TWO_BY_TWO)),
    ("deepseek_v2", "float32", TWO_BY_TWO),
    ("deepseek_v3", "bfloat16", ("cache.page_size=128", "cache.num_pages=60")),
]


def settings_of(model: str, dtype: str) -> list[str]:
    own = "cache.kv_dtype=fp8_e4m3" if dtype == "fp8_e4m3" else f"model.dtype={dtype}"
    return [f"model.path={model}", "cache.num_pages=400", "scheduler.threads=1", own]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {"tiny": str(TINY_MODEL_DIR)}
    for family in {family for family, _, _ in SOUND} - made.keys():
        made[family] = str(make_model(tmp_path_factory.mktemp("models") / family, family))
    return made


@pytest.mark.parametrize(("family", "dtype", "more"), SOUND)
def test_a_sound_cluster_is_right(family: str, dtype: str, more: tuple[str, ...], folder_of: dict[str, str]) -> None:
    settings = [*settings_of(folder_of[family], dtype), *more]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready(PATIENCE_S)
        report = verify(VerifyOptions(cluster.url, model=folder_of[family], entries=FORKED), print)
    print(report.rounding, report.pairs)
    assert (report.verdict, report.reasons) == ("right", []), report
    assert all(pair.sums_compared and not pair.near_ties for pair in report.pairs) or dtype != "float32", report
    assert sum(pair.cached for pair in report.pairs), report


class World:
    """A 1P1D of chitu-tiny with faults on demand, and an engine beside it."""

    def __init__(self, folder: Path, cluster: LocalCluster, engine: LocalCluster) -> None:
        self.folder, self.cluster, self.engine = folder, cluster, engine

    def verify(self, **faults: Any) -> Report:
        (self.folder / "planted.json").write_text(json.dumps({"P0": {"faults": faults}}))
        for name in ("P0", "D0"):  # D0 too, so that its pages are where a fresh one has them
            self.cluster.restart(name)
        self.cluster.wait_ready(PATIENCE_S)
        options = VerifyOptions(self.cluster.url, reference=self.engine.url, has_transformers=False)
        return verify(options, print)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "fp8_e4m3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "planted.json").write_text("{}")
    settings = settings_of(str(TINY_MODEL_DIR), request.param)
    env = {planted_scheduler.ENVIRONMENT: str(folder / "planted.json")}
    entries = replace(FORKED, scheduler="support.planted_scheduler")
    with (
        LocalCluster(load_topology("unified_local.yaml", settings), entries=FORKED) as engine,
        LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=entries, env=env) as cluster,
    ):
        cluster.wait_ready(PATIENCE_S)
        engine.wait_ready(PATIENCE_S)
        yield World(folder, cluster, engine)


@pytest.mark.parametrize("page", [*range(10), 66])
@pytest.mark.parametrize("plant", ["zero_page", "neighbour_page"])
def test_a_page_that_arrives_as_another_is_found(world: World, plant: str, page: int) -> None:
    report = world.verify(**{plant: page})
    assert (report.verdict, report.guilty) == ("wrong", ["P0-D0"]), report
    assert any(place.place.cause == "transfer" and place.place.page <= page for place in report.pages), report
    assert all(place.request_id and place.place.layer == 0 for place in report.pages), report


def test_one_byte_of_one_page_is_found(world: World) -> None:
    report = world.verify(flip_byte_every=7)
    assert (report.verdict, report.guilty) == ("wrong", ["P0-D0"]), report
    assert report.pages and all(place.place.is_alone and place.place.num_pages == 1 for place in report.pages), report


@pytest.mark.parametrize("every", [1, 7])
def test_a_logits_row_is_found(world: World, every: int) -> None:
    """With each row damaged no answer comes, and the router's own records name the pair."""
    report = world.verify(flip_logits_every=every)
    assert (report.verdict, report.guilty) == ("wrong", ["P0-D0"]), report
    assert any("D rejected" in reason for reason in report.reasons), report


def test_nothing_planted_is_right(world: World) -> None:
    report = world.verify()
    assert (report.verdict, report.reasons) == ("right", []), report
