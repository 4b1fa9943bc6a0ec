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
from mtp_checkpoints import VOCAB, write_random
from support.router_process import wait_until
from test_member_groups import GREEDY, OUTPUT_TOKENS, client_of, prompts_of, started, up

from chitu.config.cluster_key import cluster_key_of
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tools.make_model import make_model, train_tokenizer

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
    """Return how many steps a member has computed and lent, and in how many waves, from its log."""
    line = rf" {name} .*?(\d+) steps computed and (\d+) lent, in (\d+) waves"
    return [int(number) for number in re.findall(line, cluster.logs("P0-P1"))[-1]]


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
        turns = [turns_of(cluster, name) for name in ("P0", "P1")] if prefill is SPREAD else []
        assert not turns or (turns[0][2] == turns[1][2] > 1 and sum(turns[0][:2]) == sum(turns[1][:2]))


def test_a_member_drafts_by_the_model_without_a_turn_of_the_others(tmp_path: Path) -> None:
    write_random(tmp_path)
    train_tokenizer(VOCAB).save(str(tmp_path / "tokenizer.json"))
    prompts = [[1 + token % (VOCAB - 1) for token in prompt] for prompt in prompts_of(PROMPT_LENGTHS, 7)]
    right = generate(Engine(tmp_path, max_model_len=512), prompts, OUTPUT_TOKENS)
    settings = ("scheduler.speculation=mtp",)
    with started(tmp_path, ["{devices: [cpu]}"], [SPREAD], settings=settings) as cluster:
        cluster.wait_ready(120)
        found = complete_all(cluster.url, prompts * 2, [GREEDY] * len(prompts) * 2)
        assert [answer.token_ids for answer in found] == right * 2
        wait_until(
            lambda: drafted_by(cluster) == {"D0", "D1"}, 10, lambda: "both members compute what the layer guesses"
        )


def drafted_by(cluster: LocalCluster) -> set[str]:
    """Return the members whose last report has tokens that the draft layer guessed."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=60.0).text.splitlines()
    return {line.split('"')[1] for line in lines if 'source="mtp"' in line and not line.endswith(" 0.0")}


@pytest.fixture(scope="module")
def cluster(folders: list[Path]) -> Iterator[LocalCluster]:
    with started(folders[0], ["{devices: [cpu]}"], [SPREAD], restart=True) as made:
        made.wait_ready(120)
        yield made


def test_weights_change_on_all_members_under_load(
    cluster: LocalCluster, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    headers = {"Authorization": f"Bearer {secrets.token}"}
    for version in (1, 0):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answers, cluster, 3)
            reply = httpx.post(
                f"{cluster.url}/admin/weights",
                json={"path": str(folders[version])},
                headers=headers,
                trust_env=False,
                timeout=60,
            )
            assert reply.status_code == 200 and reply.json()["missing"] == [], reply.text
            assert all(
                tokens in (expected[0][at % 4], expected[1][at % 4]) for at, tokens in enumerate(running.result())
            )
        assert answers(cluster) == expected[version]


def test_a_member_that_is_killed_in_a_wave_takes_the_group_along_and_all_come_back(
    cluster: LocalCluster, expected: list[list[list[int]]]
) -> None:
    before = up(cluster)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete_all, cluster.url, prompts_of((9, 9), 5), [{**GREEDY, "max_tokens": 300}] * 2)
        time.sleep(0.3)
        os.kill(cluster.pid("D1"), signal.SIGKILL)
        wait_until(
            lambda: len(now := up(cluster)) == 3 and now["D0"] != before["D0"], 60, lambda: f"{before} {up(cluster)}"
        )
        running.cancel()
    after = up(cluster)
    assert {name for name, number in after.items() if before[name] != number} == {"D0", "D1"}
    assert answers(cluster) == expected[0]


def test_a_member_that_drains_lends_until_the_others_are_done(
    cluster: LocalCluster, expected: list[list[list[int]]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answers, cluster, 2)
        client_of(cluster).drain("D1", force=True)
        cluster.wait_exit("D0-D1", 60)
        assert running.result() == expected[0] * 2
