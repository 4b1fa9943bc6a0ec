"""The logits of every checkpoint of the list that loads: undivided = 1P1D = `transformers`, however the prompt is cut
into chunks and the heads among ranks, and whatever happens to a sequence between two tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import transformers
from checkpoint_table import (
    TOLERANCE,
    Checkpoint,
    Instance,
    Link,
    answers_of,
    continued_by,
    divided,
    divided_by,
    error_of,
    forget_all,
    forked_by,
    hand_over,
    make_checkpoint,
    pair,
    prompts,
    retracted_by,
    undivided_by,
)
from support.checkpoints import PUBLISHED, ROWS, Row

from chitu.engine.executor import Admit
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.transports.transport import Transport
from chitu.models.checkpoint import check_checkpoint
from chitu.models.config import read_model_spec

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]
HAS_MODELS = transformers.__version__ >= "5"
"""Whether the library has the classes of the list."""
SERVED = {row.name: row for row in ROWS if not row.refused and (HAS_MODELS or row.code == "own")}
CUT = (
    "Qwen3-32B-FP8",
    "DeepSeek-V3",
    "Qwen3-30B-A3B",
    "Llama-3.1-8B-Instruct",
    "Qwen2.5-32B-Instruct-GPTQ-Int4",
    "Qwen3-32B-AWQ",
    "Kimi-K2-Thinking",
    "DeepSeek-R1-NVFP4",
    "Mixtral-8x7B-v0.1",
    "GLM-4.5",
    "gemma-3-27b-it",
    "Llama-4-Scout-17B-16E-Instruct",
    "gpt-oss-20b",
    "Qwen3-Next-80B-A3B-Instruct",
    "Qwen3.6-35B-A3B-FP8",
    "granite-4.0-h-small",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Kimi-Linear-48B-A3B",
)
"""Rows that are cut for two ranks: K and V of heads, latent rows, experts, blocks and groups of quantised weights,
sinks, states of recurrent layers."""
KINDS = (
    "Qwen3-32B",
    "DeepSeek-V3-bf16",
    "DeepSeek-V3.2",
    "MiMo-V2-Flash",
    "Qwen3-Next-80B-A3B-Instruct",
    "granite-4.0-h-small",
)
"""Rows of each kind of cache: K and V, latent rows, index keys, windows, the states of delta nets and of Mamba-2."""
OVER_MOONCAKE = ("Qwen3-32B", "DeepSeek-V3.2", "Qwen3-Next-80B-A3B-Instruct")
"""Rows whose bytes are a library's memory in CI: pages of K and V, latent rows with index keys, and state rows."""
CUT_BY_HAND = ("Qwen3-Next-80B-A3B-Instruct", "granite-4.0-h-small")
"""Rows of `CUT` whose recurrent layers another row of it has: gated delta nets and Mamba-2. `test_recurrent_tp` cuts
both in both directions."""
OF_FAULTS = "Qwen3-Next-80B-A3B-Instruct"
"""The row whose states are made wrong."""
Tensors = list[torch.Tensor]
WRONG = 1e-3
"""Least error of a planted fault: a hundred times the bound."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def get(row: Row) -> Checkpoint:
        if row.name not in made:
            made[row.name] = make_checkpoint(row, tmp_path_factory.mktemp("checkpoint"))
        return made[row.name]

    return get


Pairs = Callable[[Row], tuple[Checkpoint, Instance, Instance, Link]]


@pytest.fixture(scope="module")
def pairs(checkpoints: Callable[[Row], Checkpoint]) -> Iterator[Pairs]:
    """Yield what gives the checkpoint of a row, P, D and what connects them. Tests share those of `KINDS`, and leave no
    sequence in them."""
    made: dict[str, tuple[Instance, Instance, Link]] = {}
    with ExitStack() as stack:

        def get(row: Row) -> tuple[Checkpoint, Instance, Instance, Link]:
            checkpoint = checkpoints(row)
            if row.name not in made:
                made[row.name] = stack.enter_context(pair(checkpoint.folder))
            return checkpoint, *made[row.name]

        yield get


def served(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "row", [row for name, row in SERVED.items() if name in names], ids=lambda row: row.name
    )


def first_of_each_class() -> list[object]:
    """Return all rows as parameters. Those whose architecture and form of weights earlier rows have are by hand: they
    differ in sizes, which the tables of docs/models.md read."""
    seen: set[str] = set()
    parameters: list[object] = []
    for row in SERVED.values():
        kinds = {PUBLISHED[row.name]["architectures"][0], row.form}
        parameters.append(pytest.param(row, id=row.name, marks=pytest.mark.by_hand if kinds <= seen else ()))
        seen |= kinds
    return parameters


@pytest.mark.parametrize("row", first_of_each_class())
def test_undivided_and_pd_give_the_logits_of_transformers(
    row: Row, checkpoints: Callable[[Row], Checkpoint], pairs: Pairs
) -> None:
    folder = checkpoints(row).folder
    assert check_checkpoint(folder, read_model_spec(folder)).numbers > 0, "as doctor and plan look at it"
    checkpoint, source, target, way = pairs(row)
    answers = {
        "chunks of 1": undivided_by(target, prompts([40]), 1),
        "whole prompts": undivided_by(target, prompts(), 1024),
        "1P1D, chunks of 37": divided_by(source, target, way, prompts(), 37),
    }
    errors = {name: error_of(checkpoint, each) for name, each in answers.items()}
    assert max(errors.values()) < TOLERANCE, errors


def cuts() -> list[object]:
    """Return each row of `CUT` with both directions, one of them by hand."""
    return [
        pytest.param(
            *(SERVED[name], sizes),
            id=f"{name}-{sizes[0]}to{sizes[1]}",
            marks=pytest.mark.by_hand if other or name in CUT_BY_HAND else (),
        )
        for number, name in enumerate(name for name in CUT if name in SERVED)
        for other, sizes in enumerate(((1, 2), (2, 1))[:: 1 if number % 2 else -1])
    ]


@pytest.mark.parametrize(("row", "sizes"), cuts())
def test_heads_that_both_sides_cut_differently_change_no_logits(
    row: Row, sizes: tuple[int, int], checkpoints: Callable[[Row], Checkpoint]
) -> None:
    checkpoint = checkpoints(row)
    assert error_of(checkpoint, divided(checkpoint.folder, prompts(), 37, sizes)) < TOLERANCE


@served(*KINDS)
def test_retracted_continued_and_forked_sequences_have_the_same_logits(row: Row, pairs: Pairs) -> None:
    checkpoint, *way = pairs(row)
    errors = {"retracted": error_of(checkpoint, retracted_by(*way, prompts()))}
    errors["continued"] = error_of(checkpoint, continued_by(*way, prompts()))
    answers = forked_by(*way, prompts([90])[0])
    assert len({tuple(tokens) for _, tokens, _ in answers}) == 3
    errors["forked"] = error_of(checkpoint, answers)
    assert max(errors.values()) < TOLERANCE, errors


def mooncake() -> Transport:
    from chitu.kv_transfer.transports.mooncake import MooncakeTransport

    return MooncakeTransport("127.0.0.1")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(SERVED[name], id=name, marks=() if name in OVER_MOONCAKE else pytest.mark.by_hand)
        for name in KINDS
        if name in SERVED
    ],
)
def test_the_same_over_mooncake(row: Row, checkpoints: Callable[[Row], Checkpoint]) -> None:
    pytest.importorskip("mooncake.engine")
    checkpoint = checkpoints(row)
    assert error_of(checkpoint, divided(checkpoint.folder, prompts(), 37, kind=mooncake)) < TOLERANCE


def no_state(target: KVPool, there: list[Admit], old: Tensors) -> None:
    target.state_rows[there[1].state_slot] = 0


def state_one_chunk_old(target: KVPool, there: list[Admit], old: Tensors) -> None:
    target.state_rows[there[1].state_slot] = old[1]


def slot_of_another_room(target: KVPool, there: list[Admit], old: Tensors) -> None:
    target.state_rows[there[1].state_slot] = target.state_rows[there[2].state_slot]


def swapped_blocks(target: KVPool, there: list[Admit], old: Tensors) -> None:
    """Swap the halves of the first half of each convolution: its keys and its queries."""
    for states in target.states.values():
        if states.dim() == 3:  # channels and taps
            quarter = states.shape[1] // 4
            rows = states[there[1].state_slot]
            rows[: 2 * quarter] = torch.cat((rows[quarter : 2 * quarter], rows[:quarter]))


@pytest.fixture(scope="module")
def old(pairs: Pairs) -> Tensors:
    """Return the state rows of the prompts one chunk before their ends."""
    _, source, target, way = pairs(SERVED[OF_FAULTS])
    cut = [prompt[:-37] if len(prompt) > 37 else prompt for prompt in prompts()]
    there = hand_over(source, target, way, cut, 37)
    rows = [target.pools[0].state_rows[each.state_slot].clone() for each in there]
    forget_all(source, target, cut)
    return rows


@pytest.mark.parametrize("fault", [no_state, state_one_chunk_old, slot_of_another_room, swapped_blocks])
def test_the_comparison_finds_a_state_that_is_wrong(
    fault: Callable[[KVPool, list[Admit], Tensors], None], pairs: Pairs, old: Tensors
) -> None:
    """Tokens may be right nevertheless; and a cluster finds all of these before, by stamp and checksum."""
    checkpoint, source, target, way = pairs(SERVED[OF_FAULTS])
    there = hand_over(source, target, way, prompts(), 37)
    fault(target.pools[0], there, old)
    one_is_wrong(checkpoint, source, target)


def one_is_wrong(checkpoint: Checkpoint, source: Instance, target: Instance) -> None:
    """Assert that the second of the sequences has wrong logits, and the others have not."""
    target.decode(range(3), 2)
    answers = answers_of(target, prompts())
    forget_all(source, target, prompts())
    assert error_of(checkpoint, answers) > WRONG
    assert error_of(checkpoint, [answers[0], answers[2]]) < TOLERANCE


def test_the_comparison_finds_a_page_that_is_stale_or_of_another_request(pairs: Pairs) -> None:
    checkpoint, source, target, way = pairs(SERVED["Qwen3-32B"])
    for source_page, target_page in ((2, 3), (0, 1)):
        there = hand_over(source, target, way, prompts(), 37)[1].pages
        for region in target.pools[0].regions:
            region[there[target_page]] = region[there[source_page]]
        one_is_wrong(checkpoint, source, target)
