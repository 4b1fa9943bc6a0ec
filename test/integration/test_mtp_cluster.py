"""A real 1P1D whose model drafts: its layer's pages arrive and are verified as those of any other, and fewer steps draw
the same tokens. And what cannot draft is refused at the start, by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import complete_all, instance_loads, is_whole
from mtp_checkpoints import NUM_MODEL_LAYERS, VOCAB, answer_to, write_predictable
from nursery import FORKED
from safetensors.torch import load_file, save_file
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.engine.build import load_model
from chitu.engine.memory_budget import kv_layout
from chitu.errors import ConfigError, IncompatibleLayout
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.kv_cache.prefix_index import layout_fingerprint
from chitu.kv_transfer.layout import check_compatible
from chitu.launch.local import LocalCluster
from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import read_model_spec
from chitu.models.draft_layer import with_draft_layer
from chitu.protocol import encode

PD = "dp_config.router.pd_disaggregation"
MTP = "scheduler.speculation=mtp"
NUM_TOKENS, PAGE_SIZE = 120, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose drafts are always right if the hidden states are those of the positions before."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    write_predictable(folder, None)
    return folder


@pytest.fixture(scope="module", params=["", "dp_config.router.decode_schedulers.0"], ids=["tp1", "d_tp2"])
def cluster(model: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    settings = [f"model.path={model}", "model.served_name=m", MTP, "scheduler.threads=1", "cache.num_pages=200"]
    settings += [
        "scheduler.chunk_size=20",
        f"{PD}.verify_kv=all",
        f"{PD}.transport=shm",
        f"cache.page_size={PAGE_SIZE}",
    ]
    if request.param:
        settings += [f"{request.param}.tp_size=2", f"{request.param}.devices=[cpu,cpu]"]
        settings += ["scheduler.mtp_tokens=3"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def prompt_of(length: int) -> list[int]:
    return [1 + (7 * length + 13 * place) % (VOCAB - 1) for place in range(length)]


def test_fewer_steps_draw_the_tokens_of_the_model(cluster: LocalCluster) -> None:
    before = instance_loads(cluster.url)["D0"]
    prompt = prompt_of(45)
    options = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    (answer,) = complete_all(cluster.url, [prompt], [options])
    assert answer.token_ids == answer_to(prompt, NUM_TOKENS)
    wait_until(lambda: instance_loads(cluster.url)["D0"]["steps"] > before["steps"], 10, "a report of D")
    wait_until(lambda: is_whole(instance_loads(cluster.url)["D0"]), 10, "all is free again")
    after = instance_loads(cluster.url)["D0"]
    # How many are drafted is a matter of measured prices, so of how busy the machine is; that they are right is not.
    # The first token takes a step, too.
    drafted, accepted = after["drafts"]["mtp"]
    assert drafted == accepted > 0 and after["steps"] - before["steps"] <= 1 + NUM_TOKENS - accepted


def test_requests_beside_each_other_and_follow_ups(cluster: LocalCluster) -> None:
    prompts = [prompt_of(length) for length in (1, 15, 16, 17, 33, 100)]
    options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answers = complete_all(cluster.url, prompts, [options | {"n": 1}] * len(prompts))
    assert [answer.token_ids for answer in answers] == [answer_to(prompt, 40) for prompt in prompts]
    turns = [prompt + answer.token_ids[:30] for prompt, answer in zip(prompts, answers, strict=True)]
    again = complete_all(cluster.url, turns, [options] * len(turns))
    assert [answer.token_ids for answer in again] == [answer_to(turn, 40) for turn in turns]
    assert again[-1].usage["prompt_tokens_details"]["cached_tokens"] >= 100 // PAGE_SIZE * PAGE_SIZE


def test_the_layers_pages_are_sent_and_verified_but_not_compared_between_requests(cluster: LocalCluster) -> None:
    prompt = [319 - token for token in prompt_of(70)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    body |= {"return_proof": True, "return_page_sums": True}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30.0, trust_env=False)
    attempt = response.json()["chitu"]["choices"][0]["attempts"][-1]
    moved, left = attempt["transfer_sums"], attempt["page_sums"]
    assert moved["layers"] == NUM_MODEL_LAYERS + 1 and moved["sent"] == moved["landed"]
    num_pages = len(moved["sent"]) // 16 // moved["layers"]
    own = moved["sent"][-16 * num_pages :]
    assert num_pages == 5 and all(own[at : at + 16].strip("0") for at in range(0, len(own), 16))
    full = (len(prompt) + 29) // PAGE_SIZE
    assert len(left) == 16 * full * NUM_MODEL_LAYERS, "without the layer that drafts"


def test_what_cannot_draft_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    spec = read_model_spec(model)
    for change, words in (
        ({"num_extra_layers": 0}, "num_nextn_predict_layers"),
        ({"code": "transformers"}, "is not one whose drafts"),
        ({"latent": None}, "is not one whose drafts"),
    ):
        with pytest.raises(ConfigError, match=f"speculation is mtp.*{words}"):
            with_draft_layer(dataclasses.replace(spec, **change))
    (tmp_path / "config.json").write_text(json.dumps(config))
    prefix = f"model.layers.{NUM_MODEL_LAYERS}."
    tensors = {name: each for name, each in load_file(model / "model.safetensors").items() if prefix not in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for refuses in (
        lambda: load_model(tmp_path, drafts=True),
        lambda: check_checkpoint(tmp_path, with_draft_layer(read_model_spec(tmp_path))),
    ):
        with pytest.raises(ConfigError, match=rf"{prefix}(eh_proj|enorm)"):
            refuses()


def test_with_and_without_it_the_pages_are_unlike(model: Path) -> None:
    spec = read_model_spec(model)
    plain, drafting = (kv_layout(each, 16, "float32", 1, "hash") for each in (spec, with_draft_layer(spec)))
    with pytest.raises(IncompatibleLayout, match=r"groups: .*draft_hidden: 0 != 320"):
        check_compatible(plain, drafting)
    assert layout_fingerprint(plain) != layout_fingerprint(drafting)
    assert aux_row_bytes(drafting.aux_numbers) - aux_row_bytes(plain.aux_numbers) == 4 * 320
    assert (plain.num_summed_layers, drafting.num_summed_layers, drafting.num_layers) == (2, 2, 3)
    assert b"draft_hidden" not in encode(plain), "records without it are those of before"
