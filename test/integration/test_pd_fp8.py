"""P and D with an fp8 KV cache over shm, with one and with two ranks, every page verified: the tokens of one engine.

The reference computes each prompt in one piece and keeps its own pages; P computes it in chunks of another size. One
cluster has P0 and D0 of one rank, P1 and D1 of two, so four requests in a row reach all pairs of sizes (round robin).
With two ranks each holds one of the two KV heads, so scales move with slices of pages, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from completions import complete_all, instance_loads, is_whole
from engine_checkpoints import Engine, generate
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.tools.make_model import make_model

PD = "dp_config.router.pd_disaggregation"
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
LENGTHS = (1, 16, 37, 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": 500}
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3", **sizes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 480) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(model, max_model_len=512, kv_dtype="fp8_e4m3")
    whole = generate(engine, prompts, GREEDY["max_tokens"], chunk_size=512)
    wide = generate(Engine(model, max_model_len=512), prompts, GREEDY["max_tokens"])
    assert whole != wide, "with these weights 8 bits show: the tokens below can only come from such a cache"
    return whole


def settings(model: Path) -> list[str]:
    own = [f"model.path={model}", "model.served_name=m", "cache.kv_dtype=fp8_e4m3", "scheduler.threads=1"]
    own += ["cache.num_pages=120", "scheduler.chunk_size=7", "scheduler.max_running_requests=8"]
    return [*own, f"{PD}.verify_kv=all", f"{PD}.transport=shm", f"{PD}.deadlines.transfer_s=120"]


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    sizes = []
    for role in ("prefill", "decode"):
        for index, size in enumerate((1, 2)):
            key = f"dp_config.router.{role}_schedulers.{index}"
            sizes += [f"{key}.tp_size={size}", f"{key}.devices=[{','.join(['cpu'] * size)}]"]
    topology = load_topology(
        "pd_disagg_1p1d_local.yaml", [*settings(model), *sizes, "dp_config.router.policy=round_robin"]
    )
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pair_of_sizes_gives_the_tokens_of_one_engine(
    cluster: LocalCluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        answers = complete_all(cluster.url, [prompt] * 4, [GREEDY] * 4)
        assert [answer.token_ids for answer in answers] == [tokens] * 4
    pairs = {(record.prefill, record.decode) for record in RouterClient(cluster.url).cluster().requests}
    assert pairs == {(p, d) for p in ("P0", "P1") for d in ("D0", "D1")}
    wait_until(
        lambda: all(is_whole(load) for load in instance_loads(cluster.url).values()),
        15.0,
        lambda: instance_loads(cluster.url),
    )
    assert "K and V are fp8_e4m3" in cluster.logs("D1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scales_come_through_staged_transfers_of_a_library_too(
    model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pytest.importorskip("mooncake.engine", reason="mooncake does not import here", exc_type=ImportError)
    staged = [f"{PD}.transport=mooncake", f"{PD}.transfer=staged", f"{PD}.staging_mb=8", f"{PD}.staging_segment_mb=1"]
    topology = load_topology("pd_disagg_1p1d_local.yaml", [*settings(model), *staged])
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready(300)
        answers = complete_all(cluster.url, prompts, [GREEDY] * len(prompts))
        assert [answer.token_ids for answer in answers] == expected
        wait_until(lambda: instance_loads(cluster.url)["P0"]["bytes_moved"] > 0, 15.0, lambda: cluster.logs("P0"))
        assert "all writes are staged" in cluster.logs("P0")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_instance_with_another_cache_is_refused_with_both_layouts(cluster: LocalCluster) -> None:
    """As if D0 had another topology file."""
    cluster.kill("D0")
    cluster.wait_exit("D0")
    file = cluster.log_dir / "topology.yaml"
    assert "kv_dtype: fp8_e4m3" in file.read_text()
    file.write_text(file.read_text().replace("kv_dtype: fp8_e4m3", "kv_dtype: auto"))
    cluster.restart("D0")
    wait_until(lambda: "incompatible_layout" in cluster.logs("D0"), 120.0, lambda: cluster.logs("D0")[-3000:])
    line = next(line for line in cluster.logs("D0").splitlines() if "incompatible_layout" in line)
    assert "dtype: float32 != fp8_e4m3" in line, line
    assert "dtype=float32," in line and "dtype=fp8_e4m3," in line, "both layouts are said"
    assert "D0" not in instance_loads(cluster.url)
