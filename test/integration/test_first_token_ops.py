"""What a device has to do from P's logits to D's first token, counted on twins: copies, launches and waits. And the
kernels of it give the tokens and sums of torch's operations, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
from engine_checkpoints import VOCAB_SIZE, Engine, generate, make_prompt, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import Operations
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from chitu.engine import batch
from chitu.engine.executor import FirstToken, PrefillChunk, StepPlan
from chitu.engine.sampler import Sampler
from chitu.engine.sampling_ops import append_greedy_, greedy
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.errors import Integrity
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, aux_row_bytes, row_weights
from chitu.kv_cache.device_rows import DeviceRows, RowSums
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import SamplingParams
from chitu.types import new_room

pytest.importorskip("triton", reason="triton is in the dev extra")
from triton.runtime.interpreter import GridExecutor

from chitu.ops.kernels.greedy import GreedyKernels
from chitu.ops.kernels.sampling import SamplingKernels

CPU = torch.device("cpu")
CHUNK = 64
MOST_OPERATIONS = 15
UPLOAD = batch.upload
GREEDY = SamplingParams(9, temperature=0.0)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3.0)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(path, "qwen3")
    return path


def kernels_of(num_rows: int, vocab: int, hidden: int = 0, chunk: int = 4096) -> GreedyKernels:
    weights = torch.from_numpy(row_weights(AUX_HEADER_BYTES + 4 * (vocab + hidden)))
    return GreedyKernels(num_rows, vocab, AUX_HEADER_BYTES, weights, chunk)


def logits_of(rows: int, vocab: int, seed: int, marks: list[tuple[int, int]]) -> torch.Tensor:
    """Return logits with ties, and with these special values: (place, index in `SPECIAL`)."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).mul_(4).round_()
    for place, kind in marks:
        logits.view(-1)[place % logits.numel()] = SPECIAL[kind]
    return logits


marks = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, len(SPECIAL) - 1)), max_size=8)


@pytest.mark.engine
@given(st.integers(1, 5), st.sampled_from([1, 37, 63, 64, 130]), st.integers(0, 99), marks, st.booleans())
def test_the_kernels_end_a_decode_as_torch_does(
    rows: int, vocab: int, seed: int, marks: list[tuple[int, int]], is_hopeless: bool
) -> None:
    logits = logits_of(rows, vocab, seed, marks)
    if is_hopeless:
        logits[0] = float("-inf")
    scratch, kernels = 7, kernels_of(8, vocab, 0, CHUNK)
    results = []
    for append in (append_greedy_, kernels.append_):
        rows_2B = torch.tensor([[5, 2, 0, 4, 7][:rows], [3, 0, 9, 1, 0][:rows]])
        token_ids, tokens = torch.full((8, 12), -5), torch.zeros(rows, dtype=torch.int64)
        append(logits, rows_2B, token_ids, tokens, scratch)
        is_drawn = tokens >= 0
        results.append((tokens, rows_2B, token_ids[rows_2B[0], rows_2B[1]][is_drawn]))
        assert (token_ids != -5).sum() <= rows
    for twin, kernel in zip(*results, strict=True):
        assert torch.equal(twin, kernel)
    assert torch.equal(results[0][0], greedy(logits))


@pytest.mark.engine
@given(st.integers(1, 4), st.sampled_from([1, 37, 63, 130]), st.integers(0, 70), st.integers(0, 99), marks)
def test_the_kernels_draw_and_check_rows_as_torch_does(
    rows: int, vocab: int, hidden: int, seed: int, marks: list[tuple[int, int]]
) -> None:
    num_bytes, end = aux_row_bytes(vocab + hidden), AUX_HEADER_BYTES + 4 * (vocab + hidden)
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randint(0, 256, (6, num_bytes), generator=generator, dtype=torch.uint8)
    logits = logits_of(6, vocab, seed, marks)
    aux[:, AUX_HEADER_BYTES : AUX_HEADER_BYTES + 4 * vocab].view(torch.float32)[:] = logits
    places, slots = torch.randperm(6, generator=generator)[:rows], torch.arange(rows)
    numbers = torch.stack([places, torch.full_like(slots, -1), slots, slots + 2])
    token_ids = torch.full((6, 9), -5)
    tokens, found, both = kernels_of(4, vocab, hidden, CHUNK).first_tokens(aux, numbers, token_ids)
    expected = greedy(logits[numbers[0]])
    assert torch.equal(tokens, expected)
    assert torch.equal(found, RowSums(num_bytes, CPU).checked(aux[numbers[0]], end))
    assert torch.equal(both, torch.cat([tokens, found.flatten()]))
    assert torch.equal(token_ids[numbers[2], numbers[3]], expected.clamp(min=0))
    assert (token_ids == -5).sum() == 54 - rows


SAMPLED = (
    {"temperature": 0.0},
    {},
    {"top_k": 4},
    {"top_p": 0.7, "temperature": 1.9},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"min_p": 0.3},
)


@settings(max_examples=20)
@pytest.mark.engine
@given(
    st.lists(st.sampled_from(SAMPLED), min_size=1, max_size=4),
    st.sampled_from([1, 37, 63, 130]),
    st.sampled_from([0, 1, 70]),
    st.integers(0, 99),
    marks,
    st.sampled_from([512, 5]),
)
def test_the_kernels_draw_seeded_rows_as_torch_does(
    batch: list[dict[str, float]], vocab: int, hidden: int, seed: int, marks: list[tuple[int, int]], capacity: int
) -> None:
    """`capacity`: for a whole row, or so small that rows are searched. Twice: a draw depends on the tokens before."""
    num_bytes, end, rows = aux_row_bytes(vocab + hidden), AUX_HEADER_BYTES + 4 * (vocab + hidden), len(batch)
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randint(0, 256, (6, num_bytes), generator=generator, dtype=torch.uint8)
    logits = logits_of(6, vocab, seed, marks)
    aux[:, AUX_HEADER_BYTES : AUX_HEADER_BYTES + 4 * vocab].view(torch.float32)[:] = logits
    twin, sampler = (
        Sampler(8, vocab, CPU, (), kernels) for kernels in (None, SamplingKernels(8, vocab, CPU, CHUNK, capacity))
    )
    places, slots = torch.randperm(6, generator=generator)[:rows], torch.arange(rows) + 3
    for slot, asked in zip(slots.tolist(), batch, strict=True):
        params = SamplingParams(9, seed=seed + slot, **asked)
        twin.admit(slot, torch.arange(5) % vocab, 4, params)
        uploaded = torch.tensor(sampler.numbers_of(params, 5, 4))
        sampler.admit(slot, torch.arange(5) % vocab, 4, params, uploaded if len(uploaded) else None)
    drawn = torch.tensor([sampler.drawn_slot(slot) for slot in slots.tolist()])
    token_ids, kernels = torch.full((8, 9), -5), kernels_of(4, vocab, hidden, CHUNK)
    for position in (2, 3):
        numbers = torch.stack([places, drawn, slots, torch.full_like(slots, position)])
        draws = sampler.draws_of(slots.tolist())
        tokens, found, both = kernels.first_tokens(aux, numbers, token_ids, draws)
        expected = twin.sample(logits[places], slots.tolist())
        assert torch.equal(tokens, expected)
        assert torch.equal(found, RowSums(num_bytes, CPU).checked(aux[places], end))
        assert torch.equal(both, torch.cat([tokens, found.flatten()]))
        assert torch.equal(token_ids[slots, position], expected.clamp(min=0))
    assert (token_ids == -5).sum() == 72 - 2 * rows


# ----------------------------------------------------------------------------------------------------------------------
# The count. A launch of a kernel is one operation, an upload one, the copy to the host one.


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each launch in the `Operations` that count; what the interpreter does for it counts as none."""
    launch = GridExecutor.__call__

    def counted(self: GridExecutor, *args: object, **kwargs: object) -> None:
        for mode in _get_current_dispatch_mode_stack():
            mode.names.append(self.fn.__name__)
        with _disable_current_modes():
            launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)


class Noted:
    """Twin of a mark on a device's queue: counts the waits."""

    waits = 0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Noted.waits += 1


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operations]:
    """Count operations. An upload is one of them, and what it does on a CPU none."""
    operations = Operations()

    def noted(function):
        def upload(*args):
            with _disable_current_modes():
                result = function(*args)
            operations.names.append("upload")
            return result

        return upload

    with monkeypatch.context() as patch:
        patch.setattr(batch, "upload_tensor", noted(batch.upload_tensor))
        for module in ("batch", "model_runner", "sampler"):
            patch.setattr(f"chitu.engine.{module}.upload", noted(UPLOAD))
        with operations:
            yield operations


def engine_of(folder, kernels: GreedyKernels | None) -> tuple[Engine, MetadataBuffers]:
    """Return an engine that checks rows, on a twin of a device with a queue, and the rows."""
    sampler = Sampler(8, VOCAB_SIZE, CPU, (2,), SamplingKernels(8, VOCAB_SIZE, CPU) if kernels is not None else None)
    engine = Engine(folder, ops=TorchOps(), max_model_len=128, sampler=sampler, checks_rows=True, greedy=kernels)
    engine.runner._tokens = type(engine.runner._tokens)(88, Noted, is_pinned=False)
    return engine, MetadataBuffers(DeviceRows(engine.pool.aux), 4 * VOCAB_SIZE)


def alone(logits: torch.Tensor, sampling: SamplingParams) -> list[int]:
    """Return the first token by torch."""
    sampler = Sampler(1, VOCAB_SIZE, CPU, (2,))
    sampler.admit(0, torch.tensor([1]), 1, sampling)
    return sampler.sample(logits[None], [0]).tolist()


def first(engine: Engine, slot: int, aux_slot: int, sampling: SamplingParams, is_checked: bool = True) -> StepPlan:
    admit = engine.admit(slot, make_prompt(20), 32, kv_len=20, sampling=sampling)
    return StepPlan(admit=[admit], first_tokens=[FirstToken(slot, aux_slot, is_checked=is_checked)])


@pytest.mark.parametrize(
    ("sampling", "launched"),
    [
        (GREEDY, ["_scan", "_append"]),
        (SamplingParams(9, seed=7), ["copy_", "_scan", "_measure", "_finish"]),
        (SamplingParams(9, seed=7, top_p=0.9), ["copy_", "_scan", "_measure", "_gather", "_finish"]),
    ],
    ids=["greedy", "seeded", "seeded and cut"],
)
def test_from_ps_logits_to_ds_token_a_device_does_fifteen_things_and_two_threads_wait(
    folder, monkeypatch, sampling, launched
):
    """A seeded request has a row of the sampler's tables, too, which is copied behind the same upload."""
    engine, buffers = engine_of(folder, kernels_of(8, VOCAB_SIZE))
    room = new_room()
    engine.pool.aux_logits[3] = torch.randn(VOCAB_SIZE)
    plan = first(engine, 5, 3, sampling)
    with counted(monkeypatch) as sealed:
        buffers.seal(3, room)
    written = ["upload", "_copy_pieces"]  # `BlockCopier.copy`, for which P's transfer thread waits
    Noted.waits = 0
    with counted(monkeypatch) as drawn:
        step = engine.runner.launch(plan)
    result = step.result()
    assert drawn.names == ["upload", "copy_", "index_put_", *launched, "copy_"]
    assert len(sealed.names) + len(written) + len(drawn.names) <= MOST_OPERATIONS
    assert Noted.waits == 1, "for the token alone"
    assert result.tokens == alone(engine.pool.aux_logits[3], sampling)
    assert buffers.judge(3, room, result.rows[5]) == 0
    assert int(engine.runner._slots.token_ids[5, 20]) == result.tokens[0]


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(9, seed=7, top_k=40),
        SamplingParams(9, temperature=0.0, logprobs=2),
        SamplingParams(9, seed=7, logprobs=2),
        SamplingParams(9, seed=7, logit_bias={4: 3.0}),
        SamplingParams(9, seed=7, repetition_penalty=1.2),
    ],
)
def test_first_tokens_are_those_of_torch_and_what_is_found_too(folder, sampling, is_checked):
    found = []
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    for kernels in (None, kernels_of(8, VOCAB_SIZE)):
        engine, buffers = engine_of(folder, kernels)
        room = b"r" * 16
        for row in range(4):
            engine.pool.aux_logits[row] = logits[row]
            buffers.seal(row, room, cached_tokens=row)
        plans = [first(engine, 5, 3, sampling, is_checked), first(engine, 2, 1, GREEDY)]
        both = StepPlan(admit=[each.admit[0] for each in plans], first_tokens=[each.first_tokens[0] for each in plans])
        result = engine.runner.execute(both)
        assert list(result.rows) == ([5, 2] if is_checked else [2])
        assert buffers.judge(1, room, result.rows[2]) == 1
        found.append((result, engine.runner._slots.token_ids.clone(), engine.runner.execute(StepPlan(decode=[5, 2]))))
    (torchs, ids, decoded), (kernels_, other_ids, other_decoded) = found
    assert msgspec.to_builtins(torchs) == msgspec.to_builtins(kernels_) and torch.equal(ids, other_ids)
    assert msgspec.to_builtins(decoded) == msgspec.to_builtins(other_decoded)


def test_a_damaged_row_is_found_by_its_own_draw(folder):
    engine, buffers = engine_of(folder, kernels_of(8, VOCAB_SIZE))
    room = new_room()
    engine.pool.aux_logits[3] = torch.randn(VOCAB_SIZE)
    buffers.seal(3, room)
    engine.pool.aux[3, 77] ^= 4
    found = engine.runner.execute(first(engine, 5, 3, GREEDY)).rows[5]
    with pytest.raises(Integrity, match="checksum"):
        buffers.judge(3, room, found)
    with pytest.raises(Integrity, match="checksum"):
        buffers.verify(3, room)


def test_a_recorded_decode_that_ends_in_the_kernels_gives_the_tokens_of_one_that_ends_in_torch(folder):
    tokens = []
    for kernels in (None, kernels_of(8, VOCAB_SIZE)):
        recording = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())
        engine = Engine(folder, ops=TorchOps(), max_model_len=128, recording=recording, greedy=kernels)
        prompts = [make_prompt(length) for length in (3, 40, 16)]
        tokens.append(generate(engine, prompts, 8))
    assert tokens[0] == tokens[1]


def test_a_recorded_decode_ends_in_two_launches(folder):
    counts = []
    for kernels in (None, kernels_of(8, VOCAB_SIZE)):
        recording = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())
        engine = Engine(folder, ops=TorchOps(), max_model_len=128, recording=recording, greedy=kernels)
        generate(engine, [make_prompt(20)], 3)
        admit = engine.admit(0, make_prompt(20), 32)
        engine.runner.execute(StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, 20, sample=True)]))
        engine.runner.execute(StepPlan(decode=[0]))
        with Operations() as operations:
            engine.runner.execute(StepPlan(decode=[0]))
        counts.append(operations.names)
    torchs, launched = counts
    at = torchs.index("argmax")
    tail = ["argmax", "add", "index_put_", "amax", "isfinite", "bitwise_not", "masked_fill", "copy_", "ne", "add_"]
    tail.append("copy_")
    assert torchs[at : at + len(tail)] == tail
    assert launched == [*torchs[:at], "_scan", "_append", *torchs[at + len(tail) :]]
