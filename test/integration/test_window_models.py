"""Models with windows whose window layers keep K and V in the state row (`cache.window_state`): the logits are those of
`transformers`, alone and as 1P1D, and a ring that is wrong shows in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from checkpoint_table import (
    NUM_DECODES,
    TOLERANCE,
    Checkpoint,
    answers_of,
    continued_by,
    divided,
    divided_by,
    error_of,
    hand_over,
    make_checkpoint,
    pair,
    prompts,
    retracted_by,
    undivided_by,
)
from completions import instance_loads, is_whole
from nursery import WITH_TRANSFORMERS
from support.checkpoints import ROWS
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.launch.local import LocalCluster
from chitu.models.window_state import KEYS
from chitu.protocol import KVLayout
from chitu.tools.make_model import make_model

NAMES = ["gpt-oss-20b", "gemma-3-1b-it", "MiMo-V2-Flash", pytest.param("Olmo-3-32B-Think", marks=pytest.mark.by_hand)]
"""Sinks and every second layer; another rope for windows; other heads for windows; three of four layers."""


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    (row,) = (row for row in ROWS if row.name == request.param)
    yield make_checkpoint(row, tmp_path_factory.mktemp("models") / "m")


@pytest.mark.parametrize("chunk", [1, 37, 1000])
def test_windows_in_state_rows_give_the_logits_of_transformers(checkpoint: Checkpoint, chunk: int) -> None:
    asked = prompts()[: 2 if chunk == 1 else 3]
    with pair(checkpoint.folder, window_state=True) as (source, target, way):
        assert error_of(checkpoint, undivided_by(target, asked, chunk)) < TOLERANCE
        assert error_of(checkpoint, divided_by(source, target, way, asked, chunk)) < TOLERANCE


def test_they_are_right_after_a_retraction_and_on_another_d(checkpoint: Checkpoint) -> None:
    asked = prompts()
    with pair(checkpoint.folder, window_state=True) as way:
        assert error_of(checkpoint, retracted_by(*way, asked)) < TOLERANCE
        assert error_of(checkpoint, continued_by(*way, asked)) < TOLERANCE


@pytest.mark.parametrize("checkpoint", ["EXAONE-4.0-32B"], indirect=True)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=["1to2", "2to1", "2to2"])
def test_rings_are_cut_by_heads(checkpoint: Checkpoint, sizes: tuple[int, int]) -> None:
    answers = divided(checkpoint.folder, prompts(), 37, sizes, window_state=True)
    assert error_of(checkpoint, answers) < TOLERANCE


@pytest.mark.parametrize("fault", ["one place off", "of another request", "one chunk old"])
def test_the_comparison_finds_a_wrong_ring(checkpoint: Checkpoint, fault: str) -> None:
    asked = prompts()[1:]
    with pair(checkpoint.folder, window_state=True) as (source, target, way):
        there = hand_over(source, target, way, asked, 37)
        pool, (first, second) = target.pools[0], (admit.state_slot for admit in there)
        rings = [tensor for (_, name), tensor in pool.states.items() if name == KEYS]
        assert rings and all(ring[first].isfinite().all() and ring[first].any() for ring in rings)
        for ring in rings:
            if fault == "one place off":
                ring[first] = ring[first].roll(1, dims=1)
            elif fault == "of another request":
                ring[first] = ring[second]
            else:
                ring[first, :, :5] = 0.0
        target.decode(range(2), NUM_DECODES)
        wrong, right = answers_of(target, asked)
        assert error_of(checkpoint, [wrong]) > 100 * TOLERANCE, "it shows in the logits"
        assert error_of(checkpoint, [right]) < TOLERANCE


@pytest.mark.parametrize("checkpoint", ["gemma-3-1b-it"], indirect=True)
def test_a_cluster_serves_them_with_the_logprobs_of_transformers_and_moves_one_window(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Requests of several choices and the bytes that P moved, over real processes."""
    words = make_model(tmp_path / "words", vocab_size=500)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, checkpoint.folder / name)
    settings = [
        *(f"model.path={checkpoint.folder}", "model.served_name=m", "model.max_model_len=512", "model.dtype=float32"),
        *("cache.window_state=true", "cache.num_pages=40", "scheduler.chunk_size=37", "scheduler.threads=1"),
        "dp_config.router.pd_disaggregation.verify_kv=all",
    ]
    asked, length = prompts((7, 90, 203, 150, 31, 64)), 12
    options = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready()

        def ask(prompt: list[int], **more: Any) -> Any:
            body = {"model": "m", "prompt": prompt, **options, **more}
            reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120.0)
            assert reply.status_code == 200, reply.text
            return reply.json()

        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(partial(ask, return_proof=True), asked))
        forks = ask(asked[2], n=2)["choices"]
        turn = [*asked[2], *answers[2]["choices"][0]["token_ids"], *asked[0]]
        answers.append(ask(turn, return_proof=True))
        asked = [*asked, turn]
        (decode,) = (
            one
            for one in httpx.get(f"{cluster.url}/cluster", timeout=60.0).json()["instances"]
            if one["role"] == "decode"
        )
        layout = msgspec.convert(decode["layout"], KVLayout)
        wait_until(lambda: all(map(is_whole, instance_loads(cluster.url).values())), 30.0, "whole pools")
    assert layout.state_bytes
    assert [fork["token_ids"] for fork in forks] == [answers[2]["choices"][0]["token_ids"]] * 2
    for prompt, answer in zip(asked, answers, strict=True):
        (choice,) = answer["choices"]
        expected = checkpoint.logits(prompt, choice["token_ids"]).log_softmax(-1)
        taken = expected[range(length), choice["token_ids"]]
        assert (taken - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max() < 1e-4
        known = (203 - 1) // layout.page_size * layout.page_size if prompt is turn else 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == known
        pages = -(-len(prompt) // layout.page_size) * layout.bytes_per_page
        assert answer["chitu"]["kv_bytes"] == pages + layout.state_bytes + aux_row_bytes(layout.vocab_size)
