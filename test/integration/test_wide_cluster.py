"""Groups of real processes that share experts: tokens, weights that change under load, deaths, drains."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import complete_all
from engine_checkpoints import Engine, generate
from support.router_process import wait_until
from test_member_groups import GREEDY, OUTPUT_TOKENS, client_of, prompts_of, started, up

from chitu.config.cluster_key import cluster_key_of
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
PROMPT_LENGTHS = (1, 20, 65, 150)
SPREAD = "{dp_size: 2, experts: spread, devices: [cpu, cpu]}"
SPREAD_TP = "{dp_size: 2, tp_size: 2, experts: spread, devices: [cpu, cpu, cpu, cpu]}"
TP = "{tp_size: 2, devices: [cpu, cpu]}"
TP_SPREAD = "{tp_size: 2, experts: spread, devices: [cpu, cpu]}"
SIZES: dict[str, Any] = {"layers": 2, "max_position_embeddings": 512, "hidden_size": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two checkpoints with experts, of the same form."""
    return [
        make_model(tmp_path_factory.mktemp("models") / str(seed), "qwen3_moe", seed=seed, **SIZES) for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[list[int]]]:
    """Return the tokens of one engine, of each checkpoint."""
    prompts = prompts_of(PROMPT_LENGTHS, 7)
    return [generate(Engine(folder, max_model_len=512), prompts, OUTPUT_TOKENS) for folder in folders]


def answers(cluster: LocalCluster, times: int = 1) -> list[list[int]]:
    prompts = prompts_of(PROMPT_LENGTHS, 7) * times
    return [answer.token_ids for answer in complete_all(cluster.url, prompts, [GREEDY] * len(prompts))]


def turns_of(cluster: LocalCluster, name: str) -> list[int]:
    """Return how many steps a member has computed and lent, from its log."""
    said = re.findall(r"(\d+) steps computed and (\d+) lent, in (\d+) waves", cluster.log(name))
    return [int(number) for number in said[-1]]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(TP, SPREAD), (SPREAD, TP_SPREAD), (SPREAD, SPREAD_TP)],
    ids=["tp-to-spread", "spread-to-spread-tp-1", "spread-to-spread-over-4"],
)
def test_members_that_share_experts_give_the_tokens_of_one_engine(
    prefill: str, decode: str, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    with started(folders[0], [prefill], [decode]) as cluster:
        cluster.wait_ready(120)
        assert answers(cluster, 2) == expected[0] * 2
        assert answers(cluster) == expected[0], "a wave behind others"
        began_s = time.monotonic()
        assert set(cluster.stop().values()) == {0}
        assert time.monotonic() - began_s < 30
