"""`chitu verify` on a real 2P2D of chitu-tiny: it finds nothing wrong where nothing is, and names what is planted.

The clusters compute in float32; which pair gets which request is the router's (the default policy)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import planted_scheduler
import pytest
from chaos_cluster import wait_for
from nursery import FORKED
from safetensors.torch import load_file, save_file

from chitu import cli
from chitu.assets import TINY_MODEL_DIR
from chitu.client.client import RouterClient
from chitu.client.verify.asking import Asked, Prober
from chitu.client.verify.report import Report
from chitu.client.verify.topology import expected_bytes
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.verify import VerifyOptions, verify
from chitu.net.curve import derive

ROUTER = "dp_config.router"
PD = f"{ROUTER}.pd_disaggregation"
PAGES = (400, 401)
"""Of D0 and D1: by it a transport that is to harm one of them knows them apart."""
PATIENCE_S = 300

pytestmark = pytest.mark.timeout(600)


class World:
    """A cluster with faults on demand, and one undivided engine beside it."""

    def __init__(self, folder: Path, cluster: LocalCluster, engine: LocalCluster) -> None:
        self.folder, self.cluster, self.engine = folder, cluster, engine

    def plant(self, **faults: dict[str, Any]) -> None:
        """By instance; those that had one and those that get one start anew."""
        file = self.folder / "planted.json"
        before = json.loads(file.read_text())
        file.write_text(json.dumps(faults))
        for name in sorted({*before, *faults}):
            self.cluster.restart(name)
        self.cluster.wait_ready(PATIENCE_S)
        assert all(self.cluster.alive(name) for name in faults), [self.cluster.logs(name)[-3000:] for name in faults]

    def verify(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Report]:
        capsys.readouterr()
        argv = ["verify", self.cluster.url, "--reference", self.engine.url, "--no-transformers", "--json", *words]
        code = cli.main(argv)
        printed = capsys.readouterr()
        assert printed.out, printed.err
        return code, msgspec.json.decode(printed.out, type=Report)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "planted.json").write_text("{}")
    settings = [f"model.path={TINY_MODEL_DIR}", "cache.num_pages=400", "scheduler.threads=1"]
    pairs = [f"{ROUTER}.prefill_schedulers=[{{port: 0}}, {{port: 0}}]"]
    pairs += [f"{ROUTER}.decode_schedulers=[{{port: 0, num_pages: {PAGES[0]}}}, {{port: 0, num_pages: {PAGES[1]}}}]"]
    env = {planted_scheduler.ENVIRONMENT: str(folder / "planted.json")}
    entries = replace(FORKED, scheduler="planted_scheduler")
    with (
        LocalCluster(load_topology("unified_local.yaml", settings), entries=FORKED) as engine,
        LocalCluster(
            load_topology("pd_disagg_1p1d_local.yaml", [*settings, *pairs]), entries=entries, env=env
        ) as cluster,
    ):
        cluster.wait_ready(PATIENCE_S)
        engine.wait_ready(PATIENCE_S)
        yield World(folder, cluster, engine)


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """chitu-tiny with the sign of one weight of layer 1 flipped, the largest of its value projection."""
    folder = tmp_path_factory.mktemp("models") / "broken"
    shutil.copytree(TINY_MODEL_DIR, folder)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.self_attn.v_proj.weight"]
    weight.view(-1)[weight.abs().argmax()] *= -1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_cluster_in_which_all_is_right(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.plant()
    code, report = world.verify(capsys)
    assert (code, report.verdict, report.reasons, report.guilty) == (0, "right", [], []), report
    assert {(pair.prefill, pair.decode) for pair in report.pairs} == {(f"P{k}", f"D{m}") for k in "01" for m in "01"}
    assert all(pair.same + pair.near_ties and pair.kv_bytes == pair.expected_bytes for pair in report.pairs), report
    assert sum(pair.cached for pair in report.pairs) > 0, report


@pytest.mark.parametrize(
    ("name", "fault", "guilty", "layer"),
    [
        ("P1", "weight", "P1", 1),
        ("D0", "weight", "D0", 1),
        ("D1", "kernel", "D1", 2),  # what comes out of the attention of layer 1 goes into it
        ("P0", "flip", "P0-D1", 1),
    ],
)
def test_the_guilty_one_is_named_and_the_layer_and_page_where_it_begins(
    name: str, fault: str, guilty: str, layer: int, world: World, broken_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "weight": {"model": broken_model},
        "kernel": {"kernel": 1},
        "flip": {"flip": {"num_pages": PAGES[1], "layer": 1, "page": 1}},
    }
    world.plant(**{name: kinds[fault]})
    code, report = world.verify(capsys)
    assert (code, report.verdict, report.guilty) == (1, "wrong", [guilty]), report
    pairs = [f"P{k}-D{m}" for k in "01" for m in "01" if guilty in (f"P{k}", f"D{m}", f"P{k}-D{m}")]
    assert sorted(page.pair for page in report.pages) == pairs, report
    assert {page.place.layer for page in report.pages} == {layer}, report
    for place in (page.place for page in report.pages):
        if fault == "flip":
            assert (place.page, place.is_alone) == (1, True), report
        else:
            assert (place.page == 0) == (guilty[0] == "P"), "the prompt's pages are P's, those behind it are D's"


def test_what_went_wrong_on_its_way_unverified_stays_in_the_cache_until_it_is_flushed(world: World) -> None:
    """`verify_kv` is off here. The byte is flipped by the planted transport once; D1 has it from then on, whatever
    becomes of P0, and nobody sees it who takes no cached pages."""
    url, past_cache = world.cluster.url, {"cache_prompt": False}
    client = RouterClient(url)
    prober = Prober(client, None, client.model_name(), max_tokens=12, timeout_s=60.0)
    prompt, layout = prober.token_ids(prober.fitting_prompt(0, 1024)), client.cluster().instances[0].layout
    assert layout is not None

    def ask(wanted: set[str], **options: Any) -> Asked:
        """Over this P and D; each prompt has a salt of its own unless one is given."""
        for number in range(20):
            answer = prober.ask(number, prompt, False, **{"cache_prompt": True, "cache_salt": str(number)} | options)
            assert answer.pair is not None, answer
            if wanted <= set(answer.pair):
                return answer
        raise AssertionError(f"no request in 20 went over {wanted}")

    right = ask({"P1", "D1"}, **past_cache)
    world.plant(P0={"flip": {"num_pages": PAGES[1], "layer": 1, "page": 1}})
    harmed = ask({"P0", "D1"})
    salt = {"cache_salt": str(harmed.prompt)}
    assert harmed.tokens != right.tokens, "the planted fault was to harm it"
    world.plant()
    stale = ask({"D1"}, **salt)
    assert stale.tokens == harmed.tokens and stale.served is not None
    assert stale.served.kv_bytes == expected_bytes(0, layout), "nobody moved a page: D1 had the wrong one"
    assert ask({"D1"}, **past_cache).tokens == ask({"D0"}, **salt).tokens == right.tokens
    secrets = derive(cluster_key_of(world.cluster.topology))
    assert secrets is not None
    httpx.post(f"{url}/admin/cache/flush", headers={"authorization": f"Bearer {secrets.token}"}, trust_env=False)
    wait_for(
        lambda: not any(one.load and one.load.pages_cached for one in client.cluster().instances), 10.0, client.cluster
    )
    assert ask({"D1"}, **salt).tokens == right.tokens


def test_the_references_are_an_engine_that_it_starts_and_transformers(world: World) -> None:
    """Of the folder that the cluster's topology names."""
    world.plant()
    said: list[str] = []
    options = VerifyOptions(world.cluster.url, max_rounds=1, max_tokens=8, entries=FORKED)
    report = verify(options, said.append)
    assert (report.verdict, report.reasons) == ("right", []), report
    assert report.references == ["one engine (float32)", "transformers (float32)"], said


def test_a_p_with_a_wrong_weight_is_found_by_the_other_one_and_drains(tmp_path: Path, broken_model: str) -> None:
    """`verify_compute`: the very request that it served, or that it was the second one for, names it."""
    (tmp_path / "planted.json").write_text(json.dumps({"P1": {"model": broken_model}}))
    env = {planted_scheduler.ENVIRONMENT: str(tmp_path / "planted.json")}
    settings = [f"model.path={TINY_MODEL_DIR}", "cache.num_pages=400", "scheduler.threads=1"]
    settings += [f"{ROUTER}.prefill_schedulers=[{{port: 0}}, {{port: 0}}]", f"{PD}.verify_compute=all"]
    topology = load_topology("pd_disagg_1p1d_local.yaml", settings)
    with LocalCluster(topology, entries=replace(FORKED, scheduler="planted_scheduler"), env=env) as cluster:
        cluster.wait_ready(PATIENCE_S)
        client = RouterClient(cluster.url)
        body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 3}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["logprobs"] is None, "its reader knows nothing of it"

        def statuses() -> dict[str, str]:
            return {instance.name: instance.status for instance in client.cluster().instances}

        wait_for(lambda: statuses()["P1"] != "up", 60, lambda: cluster.logs("router")[-3000:])
        assert "P1 differs from D, too: its weights or kernels are wrong" in cluster.logs("router")
        assert statuses()["P0"] == "up"
