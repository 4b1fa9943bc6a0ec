"""chitu-tiny answers through 1P1D and 2P3D as in transformers, and visibly worse if one page of D's pool is broken.

`python -m benchmark.recall` does the same with 500 prompts of 2048 tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from nursery import FORKED

from benchmark.recall import (
    PAGE_SIZE,
    PASS_RATE,
    PLANTED,
    TOPOLOGIES,
    Recaller,
    RecallPrompt,
    Run,
    by_cluster,
    by_transformers,
    small_pool,
)
from chitu.assets import TINY_MODEL_DIR

LENGTHS = (100, 250, 500, 1000, 1500, 2048)
"""Maximum lengths of a prompt, in tokens."""
NUM_EACH = 12
BROKEN_PAGE = 5
NUM_ASKED = 6
"""Number of prompts that ask for a value in the broken page, and of prompts that do not."""


@pytest.fixture(scope="module")
def recaller() -> Recaller:
    return Recaller(TINY_MODEL_DIR)


@pytest.fixture(scope="module")
def prompts(recaller: Recaller) -> list[RecallPrompt]:
    rng = random.Random(11)
    return [recaller.prompt(rng, length) for _ in range(NUM_EACH) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts: list[RecallPrompt]) -> Run:
    return by_transformers(TINY_MODEL_DIR, prompts)


@pytest.fixture(params=["shm", pytest.param("mooncake", marks=pytest.mark.by_hand)])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "mooncake":
        try:
            import mooncake.engine  # noqa: F401
        except (ImportError, OSError) as error:
            pytest.skip(f"mooncake does not import here: {error}")
    yield f"dp_config.router.pd_disaggregation.transport={request.param}"


def test_the_prompts_reach_the_full_length(prompts: list[RecallPrompt]) -> None:
    for length, prompt in zip(LENGTHS * NUM_EACH, prompts, strict=True):
        assert 0.9 * length < len(prompt.token_ids) <= length
        assert prompt.example.answer in prompt.example.prompt and prompt.example.value in prompt.example.answer


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.by_hand
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_recall_through_pd_equals_transformers(
    topology: str, recaller: Recaller, prompts: list[RecallPrompt], expected: Run
) -> None:
    run = by_cluster(TINY_MODEL_DIR, prompts, TOPOLOGIES[topology], entries=FORKED)
    assert run.answers == expected.answers
    assert recaller.num_right(prompts, run.answers) >= PASS_RATE * len(prompts)
    assert run.pairs.total() == len(prompts)
    assert {name for pair in run.pairs for name in pair.split("-")} == run.logs.keys() - {"router"}, "all served"
    assert not any("FAULTS ARE ON" in text for text in run.logs.values())


@pytest.fixture(scope="module")
def prompts_for_fault(recaller: Recaller) -> list[RecallPrompt]:
    """Return prompts of which the first half ask for a value in the broken page."""
    rng = random.Random(12)
    asked: list[RecallPrompt] = []
    others: list[RecallPrompt] = []
    while len(asked) < NUM_ASKED or len(others) < NUM_ASKED:
        prompt = recaller.prompt(rng, 2048)
        group = asked if prompt.is_asked_from(BROKEN_PAGE, PAGE_SIZE) else others
        if len(group) < NUM_ASKED:
            group.append(prompt)
    return asked + others


@pytest.fixture(scope="module")
def num_right_of_sound(recaller: Recaller, prompts_for_fault: list[RecallPrompt]) -> int:
    """Return the number of right answers with nothing broken and an equally small pool: only the broken page
    differs."""
    sound = by_cluster(TINY_MODEL_DIR, prompts_for_fault, small_pool(2048), 1, FORKED)
    assert sound.answers == by_transformers(TINY_MODEL_DIR, prompts_for_fault).answers
    return recaller.num_right(prompts_for_fault, sound.answers)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_broken_page_shows_in_the_answers(
    transport: str, recaller: Recaller, prompts_for_fault: list[RecallPrompt], num_right_of_sound: int
) -> None:
    """Shows that the test above can fail: a single wrong page of KV shows in the answers, and only there. Every
    transfer succeeds and no process reports an error."""
    assert num_right_of_sound >= 2 * NUM_ASKED - 1
    entries = replace(FORKED, scheduler=PLANTED.scheduler)
    run = by_cluster(TINY_MODEL_DIR, prompts_for_fault, [*small_pool(2048), transport], 1, entries, BROKEN_PAGE)
    right = [recaller.is_right(p, answer) for p, answer in zip(prompts_for_fault, run.answers, strict=True)]
    assert not any(right[:NUM_ASKED]), "half of all answers are wrong: nobody can know a value from the broken page"
    assert sum(right[NUM_ASKED:]) >= num_right_of_sound - NUM_ASKED - 1, "the other pages are as good as ever"
    for name in ("P0", "D0"):
        warnings = re.findall(rf" {name} [WEC] (.*)", run.logs[name])
        assert len(warnings) == 1 and f"FAULTS ARE ON (zero_page={BROKEN_PAGE})" in warnings[0], warnings
    assert run.logs["P0"].count("finished kv cache transfer for") == len(prompts_for_fault)
