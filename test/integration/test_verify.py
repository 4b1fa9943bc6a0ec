"""`chitu verify` on a real 2P2D of chitu-tiny: it reports no fault if there is none, and names planted ones.

The clusters compute in float32; the router chooses the pair of each request (the default policy).
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import runpy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from nursery import FORKED
from safetensors.torch import load_file, save_file
from support import planted_scheduler
from support.router_process import wait_until

from chitu import cli
from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive
from chitu.protocol.receipt import Receipt, sealed
from chitu.tools.make_model import make_model
from chitu.tools.replay import Replayed, read_receipts
from chitu.tools.verify.parity import Place, damage_of, num_compared
from chitu.tools.verify.probe import CheckedRequest, Prober
from chitu.tools.verify.report import Report
from chitu.tools.verify.run import VerifyOptions, find_transformers, verify
from chitu.tools.verify.topology import expected_bytes

ROUTER = "dp_config.router"
PAGES = (160, 161)
"""Pool sizes of D0 and D1, by which a transport that is to harm one of them tells them apart. They are small, so that a
run of `chitu verify` uses each page several times."""
PATIENCE_S = 300
TOPOLOGY_CHECK = Path(__file__).parents[1] / "verify_xpyd_topology.py"

pytestmark = pytest.mark.timeout(600)


class World:
    """A cluster with faults on demand, and one undivided engine beside it."""

    def __init__(self, folder: Path, cluster: LocalCluster, engine: LocalCluster) -> None:
        self.folder, self.cluster, self.engine = folder, cluster, engine

    def plant(self, **faults: dict[str, Any]) -> None:
        """Plant faults by instance; restart the instances that had a fault and those that get one."""
        file = self.folder / "planted.json"
        before = json.loads(file.read_text())
        file.write_text(json.dumps(faults))
        for name in sorted({*before, *faults}):
            self.cluster.restart(name)
        self.cluster.wait_ready(PATIENCE_S)
        assert all(self.cluster.alive(name) for name in faults), [self.cluster.logs(name)[-3000:] for name in faults]

    def flush(self) -> None:
        """Empty all prefix caches."""
        client, secrets = RouterClient(self.cluster.url), derive(cluster_key_of(self.cluster.topology))
        assert secrets is not None
        url, headers = f"{self.cluster.url}/admin/cache/flush", {"authorization": f"Bearer {secrets.token}"}
        httpx.post(url, headers=headers, trust_env=False, timeout=60.0)
        wait_until(
            lambda: not any(one.load and one.load.pages_cached for one in client.cluster().instances),
            10.0,
            client.cluster,
        )

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
    entries = replace(FORKED, scheduler="support.planted_scheduler")
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
    """Return chitu-tiny with the sign of one weight of layer 1 flipped, the largest of its value projection."""
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
        pytest.param(*("D0", "weight", "D0", 1), marks=pytest.mark.by_hand),
        ("D1", "kernel", "D1", 2),  # layer 1's attention output is layer 2's input
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
    assert sorted({page.pair for page in report.pages}) == pairs, report
    assert all((page.place.cause == "transfer") == (fault == "flip") == bool(page.request_id) for page in report.pages)
    assert {page.place.layer for page in report.pages} == {layer}, report
    for place in (page.place for page in report.pages):
        if fault == "flip":
            assert (place.page, place.is_alone) == (1, True), report
        else:
            assert (place.page == 0) == (guilty[0] == "P"), "the prompt's pages are P's, those behind it are D's"


def test_a_page_of_zeros_is_found_though_every_token_is_right(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P0's writes into page 2 of either D arrive as zeros: by `chitu verify`, by the topology check, and in a saved
    answer."""
    world.plant(P0={"faults": {"zero_page": 2}})
    world.flush()  # else a cached page may be the one that is harmed
    client = RouterClient(world.cluster.url)
    verdict = runpy.run_path(str(TOPOLOGY_CHECK))["probe"](Prober(client, client.model_name(), 4, 60.0), False, 2, 4)
    said = [reason for reason in verdict.reasons if "K and V differ between P and D" in reason]
    assert said and all("over P0-" in reason and "first in page 2, layer 0" in reason for reason in said), verdict

    body = {"prompt": list(range(5, 105)), "max_tokens": 3, "temperature": 0, "cache_prompt": False, "logprobs": 0}
    body |= {"return_proof": True, "return_receipt": True, "return_page_sums": True}
    for _ in range(20):
        answer = httpx.post(f"{world.cluster.url}/v1/completions", json=body, trust_env=False, timeout=60).json()
        if answer["chitu"]["prefill"] == ["P0"]:
            break
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "answer.json"), "--url", world.engine.url]) == 1
    assert "different: over P0-" in (said_here := capsys.readouterr().out) and "first in page 2" in said_here, said_here

    for _ in range(20):  # until P0 has written this page to either D in one run: what P1 writes there is cached
        world.flush()
        code, report = world.verify(capsys)
        assert (code, report.verdict) == ((1, "wrong") if report.guilty else (0, "right")), report
        assert all(name.startswith("P0") for name in report.guilty), report
        if report.guilty == ["P0"]:
            break
    assert report.guilty == ["P0"], report
    assert {page.place.cause for page in report.pages} == {"transfer"}, report
    assert all(page.request_id in " ".join(report.reasons) for page in report.pages[:3]), report
    sound = [pair for pair in report.pairs if pair.prefill == "P1"]
    assert all(pair.sums_compared and not pair.damaged and not pair.wrong for pair in sound), report
    assert max(pair.largest_difference for pair in sound) <= report.limit < 1e-3, report


def test_a_logits_row_that_d_refused_is_found_though_another_attempt_answered(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.plant(P1={"faults": {"flip_logits_every": 4}})
    code, report = world.verify(capsys)
    assert (code, report.verdict) == (1, "wrong") and all(name.startswith("P1") for name in report.guilty), report
    assert sum(pair.refused for pair in report.pairs if pair.prefill == "P1"), report
    assert not sum(pair.refused for pair in report.pairs if pair.prefill == "P0"), report


PLANTS: dict[str, tuple[dict[str, int], Place]] = {
    "zeros": ({"zero_page": 3}, Place(0, 3, False, "transfer")),
    "neighbour": ({"neighbour_page": 5}, Place(0, 5, False, "transfer")),
    "far": ({"zero_page": 65}, Place(0, 65, False, "transfer")),
}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        pytest.param("bfloat16", 1, marks=pytest.mark.by_hand),
        ("fp8_e4m3", 1),
        pytest.param("bfloat16", 2, marks=pytest.mark.by_hand),
    ],
)
def test_an_answer_shows_what_was_damaged_whatever_its_dtype(dtype: str, size: int, tmp_path: Path) -> None:
    """The tokens are not looked at. D has `size` ranks."""
    file = tmp_path / "planted.json"
    file.write_text("{}")
    settings = [f"model.path={TINY_MODEL_DIR}", "cache.num_pages=100", "scheduler.threads=1"]
    settings += ["cache.kv_dtype=fp8_e4m3"] if dtype == "fp8_e4m3" else [f"model.dtype={dtype}"]
    settings += [f"{ROUTER}.decode_schedulers=[{{port: 0, tp_size: {size}, devices: [{', '.join(['cpu'] * size)}]}}]"]
    topology = load_topology("pd_disagg_1p1d_local.yaml", settings)
    env = {planted_scheduler.ENVIRONMENT: str(file)}
    with LocalCluster(topology, entries=replace(FORKED, scheduler="support.planted_scheduler"), env=env) as cluster:
        cluster.wait_ready(PATIENCE_S)
        client = RouterClient(cluster.url)
        prober = Prober(client, client.model_name(), max_tokens=3, timeout_s=60.0)
        layout = client.cluster().instances[-1].layout
        assert layout is not None

        def damage(num_tokens: int) -> Place | None:
            answer = prober.ask(0, [5 + n % 90 for n in range(num_tokens)], False, return_page_sums=True)
            assert answer.served is not None, answer
            assert num_compared(answer.served) == -(-num_tokens // layout.page_size) * layout.num_layers
            return damage_of(answer.served, layout)

        assert damage(1060) is None
        for faults, place in PLANTS.values() if size == 1 else [PLANTS["far"]]:
            file.write_text(json.dumps({"P0": {"faults": faults}}))
            cluster.restart("P0")
            cluster.wait_ready(PATIENCE_S)
            assert damage(1060) == place, cluster.logs("P0")[-3000:]
            if place.page < 9:
                assert damage(layout.page_size * place.page + 1) == place, "the last page, which D goes on filling"


def test_what_went_wrong_on_its_way_unverified_stays_in_the_cache_until_it_is_flushed(world: World) -> None:
    """`verify_kv` is off here. The planted transport flips the byte once. From then on D1 has it, whatever becomes of
    P0, and no request notices it unless it takes cached pages."""
    past_cache, client = {"cache_prompt": False}, RouterClient(world.cluster.url)
    prober = Prober(client, client.model_name(), max_tokens=12, timeout_s=60.0)
    prompt, layout = prober.token_ids(prober.fitting_prompt(0, 1024)), client.cluster().instances[0].layout
    assert layout is not None

    def ask(wanted: set[str], **options: Any) -> CheckedRequest:
        """Ask over this P and D; each prompt has its own salt unless one is given."""
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
    world.flush()
    assert ask({"D1"}, **salt).tokens == right.tokens


def test_the_references_are_an_engine_that_it_starts_and_transformers(world: World) -> None:
    """The engine and transformers use the folder that the cluster's topology names."""
    world.plant()
    said: list[str] = []
    options = VerifyOptions(world.cluster.url, max_rounds=1, max_tokens=8, entries=FORKED)
    report = verify(options, said.append)
    assert (report.verdict, report.reasons) == ("right", []), report
    assert report.references == ["one engine (float32)", "transformers (float32)"], said


def test_a_transformers_that_computes_a_model_wrongly_is_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "m", "deepseek_v2")
    assert find_transformers(str(model), print) is not None
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.14.1")
    said: list[str] = []
    assert find_transformers(str(model), said.append) is None
    assert "5.14.1 computes deepseek_v2 wrongly, 5.15 is right" in said[0]


def test_receipts_of_the_cluster_are_replayed_by_one_engine(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers are saved as they arrive, whole and streamed, and the command's engine reproduces them. A receipt
    that was changed and sealed anew is found by its first wrong token."""
    world.plant()
    rng = random.Random(7)
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 40},
        {"temperature": 2.0, "seed": 11, "ignore_eos": True, "cache_prompt": False},
        {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "stop": ["e"], "stream": True},
        {"temperature": 0.8, "guided_regex": "[0-9]{3,9}", "bad_words": ["5"], "stream": True},
    ]
    saved = ""
    for body in asked * 3:
        prompt = [rng.randrange(5, 250) for _ in range(rng.choice((3, 20, 60)))]
        body = {"max_tokens": 24, **body, "prompt": prompt, "return_proof": True, "return_receipt": True}
        saved += httpx.post(f"{world.cluster.url}/v1/completions", json=body, trust_env=False, timeout=60).text + "\n"
    receipts = [one.receipt for one in read_receipts("saved", saved)]
    assert len(receipts) == len(asked) * 3
    assert {name for one in receipts for pair in one.served for name in pair.split("-")} >= {"P0", "P1", "D0", "D1"}

    def replay(receipts: list[Receipt]) -> tuple[int, list[Replayed]]:
        file = tmp_path / "receipts.jsonl"
        file.write_bytes(b"\n".join(map(msgspec.json.encode, receipts)))
        capsys.readouterr()
        code = cli.main(["replay", str(file), "--url", world.engine.url, "--json"])
        return code, [msgspec.json.decode(line, type=Replayed) for line in capsys.readouterr().out.splitlines()]

    code, results = replay(receipts)
    assert (code, [one for one in results if one.verdict != "same"]) == (0, []), results
    change = msgspec.structs.replace
    greedy, drawn = receipts[0], receipts[1]
    tokens = [*drawn.token_ids[:3], drawn.token_ids[3] ^ 1, *drawn.token_ids[4:]]
    changed = [
        change(drawn, token_ids=tokens),
        change(drawn, prompt_token_ids=[token ^ 1 for token in drawn.prompt_token_ids]),
        change(drawn, sampling=change(drawn.sampling, seed=drawn.sampling.seed ^ 1)),
        change(greedy, token_ids=greedy.token_ids[:-1]),
    ]
    code, results = replay(changed)
    assert code == 1
    names = ["token_ids", "prompt_token_ids", "sampling.seed", "token_ids"]
    assert [one.says.removeprefix("changed since it was made: ") for one in results] == names, results
    code, results = replay([sealed(one) for one in changed])
    assert (code, [one.verdict for one in results]) == (1, ["different"] * 4), results
    assert (results[0].place, results[3].place) == (3, len(greedy.token_ids) - 1), results
    code, (other,) = replay([sealed(change(greedy, model_hash="0" * 32))])
    assert (code, other.verdict) == (2, "unjudged") and "model_hash" in other.says, other
    code = cli.main(["replay", str(tmp_path / "nothing"), "--url", world.engine.url])
    assert code == 2 and "nothing cannot be read" in capsys.readouterr().err
