"""The made-up tasks: seeded, answerable from the prompt alone, and with held-out words that training does not use."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.prefix import BLOCK_TOKENS, best_hits, main, read_trace, replay
from chitu.assets.tiny_tasks import (
    ADJECTIVES,
    FACT_TOKENS,
    NOUNS,
    OVERHEAD_TOKENS,
    TASKS,
    UNKNOWN,
    draw_facts,
    facts_for,
    is_held_out,
    recall,
    say_list,
)

LISTS = ("recall", "absent", "yes_no")


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_examples_and_another_seed_others(task: str) -> None:
    def examples(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [TASKS[task](rng, 5 if task in LISTS else 0, True) for _ in range(20)]

    assert examples(1) == examples(1)
    assert examples(1) != examples(2)


@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_contains_the_value(task: str) -> None:
    rng = random.Random(3)
    for _ in range(100):
        example = TASKS[task](rng, 8 if task in LISTS else 0, True)
        assert example.task == task
        assert example.value in example.answer
        assert example.prompt


def test_recall_asks_for_one_fact_of_the_list_which_the_answer_repeats() -> None:
    rng = random.Random(4)
    asked = set()
    for _ in range(300):
        example = recall(rng, 12)
        sentences = example.prompt.split(". ")
        assert len(sentences) == 13
        assert sentences[example.fact_index] + "." == example.answer
        name = " ".join(example.answer.split()[1:3])
        assert name in sentences[-1]
        assert sum(f"The {name} " in sentence for sentence in sentences[:-1]) == 1, "a name is on the list once"
        asked.add(example.fact_index)
    assert asked == set(range(12)), "every place of the list is asked for"


def test_held_out_names_and_values_are_never_drawn_for_training() -> None:
    rng = random.Random(5)
    training = draw_facts(rng, 2000, held_out=False)
    held_out = draw_facts(rng, 2000, held_out=True)
    assert not {fact.name for fact in training} & {fact.name for fact in held_out}
    assert not {fact.value for fact in training} & {fact.value for fact in held_out}


def test_enough_names_and_values_are_held_out_but_training_sees_every_word() -> None:
    names = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    share = sum(map(is_held_out, names)) / len(names)
    assert 0.2 < share < 0.3
    seen = {word for name in names if not is_held_out(name) for word in name.split()}
    assert seen == {*ADJECTIVES, *NOUNS}


def test_no_word_is_both_an_adjective_and_a_noun() -> None:
    assert not {*ADJECTIVES} & {*NOUNS}
    assert len({*ADJECTIVES}) == len(ADJECTIVES)
    assert len({*NOUNS}) == len(NOUNS)


def test_an_absent_name_is_not_on_the_list() -> None:
    rng = random.Random(6)
    for _ in range(100):
        example = TASKS["absent"](rng, 20, True)
        name = " ".join(example.answer.split()[1:3])
        *facts, question = example.prompt.split(". ")
        assert name in question
        assert not any(name in fact for fact in facts)


def test_yes_no_answers_are_true_and_balanced() -> None:
    rng = random.Random(7)
    values = []
    for _ in range(400):
        example = TASKS["yes_no"](rng, 10, True)
        *facts, question = example.prompt.split(". ")
        words = question.rstrip("?").split()
        name = f"{words[2]} {words[3]}"
        about = [fact for fact in facts if name in fact]
        if question.startswith("Is "):
            true = bool(about)
        else:
            true = about[0].endswith(words[-1])
        assert example.value == ("so yes" if true else "so no")
        values.append(true)
    assert 0.4 < sum(values) / len(values) < 0.6


def test_sums_and_sorted_words_are_right() -> None:
    rng = random.Random(8)
    for _ in range(100):
        total = TASKS["sum"](rng, 0, True)
        first, _, second = total.prompt.removeprefix("What is ").rstrip("?").split()
        assert int(total.value) == int(first) + int(second)
        words = TASKS["sort"](rng, 0, True)
        assert words.value.split(", ") == sorted(words.prompt.removeprefix("Sort: ").split(", "))


def test_everything_else_gets_the_polite_answer() -> None:
    assert TASKS["other"](random.Random(9), 0, True).answer == UNKNOWN


@pytest.mark.parametrize("tokens", [64, 256, 1000, 2048])
def test_a_list_fills_the_tokens_it_is_made_for(tokens: int) -> None:
    facts = facts_for(tokens)
    assert facts * FACT_TOKENS + OVERHEAD_TOKENS <= tokens < (facts + 1) * FACT_TOKENS + OVERHEAD_TOKENS
    assert say_list(draw_facts(random.Random(1), facts)).count(".") == facts


def test_the_tasks_need_no_torch() -> None:
    code = "import chitu.assets.tiny_tasks, sys; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# The replay of a trace: numbers that can be counted by hand.


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace: two turns of two conversations (2 blocks, then 3), and a prompt of 4 blocks that comes once."""
    rows = [(0, [1, 2]), (10, [3, 4]), (20, [5, 6, 7, 8]), (30, [1, 2, 9]), (40, [3, 4, 10])]
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": at_s * 1000, "input_length": len(ids) * BLOCK_TOKENS + 1, "output_length": 1, "hash_ids": ids}
        for at_s, ids in rows
    ]
    for record in records:
        record["hash_ids"] = [*record["hash_ids"], 99]  # type: ignore[misc]  # the block that has one token
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_the_best_possible_keeps_what_is_wanted_again(trace: Path) -> None:
    asks = read_trace(trace)
    found = 4 * BLOCK_TOKENS / sum(ask.num_tokens for ask in asks)
    assert best_hits(asks, 100) == pytest.approx(found)
    assert best_hits(asks, 4) == pytest.approx(found), "the long prompt is not taken in"
    assert best_hits(asks, 2) == pytest.approx(found / 2)


def test_a_replay_finds_what_fits_and_computes_the_rest(trace: Path) -> None:
    asks = read_trace(trace)
    total = sum(ask.num_tokens for ask in asks)
    assert replay(asks, "round_robin", 1, 100, 1000.0).hit_share == pytest.approx(4 * BLOCK_TOKENS / total)
    assert replay(asks, "round_robin", 1, 5, 1000.0).hit_share == 0, "the long prompt pushes all others out"
    uncached = replay(asks, "round_robin", 1, 0, 1000.0)
    assert uncached.hit_share == 0 and uncached.mean_s == pytest.approx(total / 5 / 1000)


def test_the_table_has_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(trace), "--prefills", "2", "--pages", "8"])
    out = capsys.readouterr().out
    assert out.count("% of it)") == 4 and "prefix_affinity" in out
