"""FlashInfer would receive the right arguments for a step: its twin, which computes by its documentation, equals the
reference. The library itself runs in `test/gpu` only."""

from __future__ import annotations

import dataclasses
import logging
import os
import select

import pytest
import torch
from engine_checkpoints import Engine, expected_tokens, generate, make_prompt, write_checkpoint
from flashinfer_twin import TwinWrapper
from hypothesis import given
from hypothesis import strategies as st
from ops_batch import NUM_PAGES, PAGE_SIZE, random_batch
from support.reference_ops import ReferenceOps

from chitu.errors import ConfigError, Internal
from chitu.ops.flashinfer_prefill import (
    FlashInferPrefill,
    Limits,
    PrefillShape,
    page_lists,
    run_bounded,
    trial_error,
    try_library,
    why_not,
)
from chitu.ops.interface import HeadSpec, Span
from chitu.ops.select import select_prefill_ops
from chitu.ops.torch_ops import TorchOps

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.triton_ops import TritonOps
from chitu.ops.whole_prompts import NO_WHOLE_PROMPTS

pytestmark = pytest.mark.emulated

CPU = torch.device("cpu")
ANY = Limits((torch.float32, torch.float16), (16, 32, 64), min_rows=1)
SHAPE = PrefillShape(4, 2, 64, 16, torch.bfloat16, torch.bfloat16)


class Library:
    """An installed FlashInfer whose wrappers are twins."""

    def __init__(self, wrapper=TwinWrapper, is_built=True, build=None) -> None:
        self._wrapper, self._is_built, self._build = wrapper, is_built, build

    def is_built(self, shape):
        return self._is_built

    def build(self, shape, limit_s):
        self._build(limit_s)

    def wrapper(self, device):
        return self._wrapper


def twins(limits=ANY, mark=lambda: None):
    """Return a prefill with two twins, and a list of these in the order of their turns."""
    made: list[TwinWrapper] = []

    def make() -> TwinWrapper:
        made.append(TwinWrapper())
        return made[-1]

    return FlashInferPrefill(make, mark, limits), made


def pages_and_queries(batch, heads, dtype=torch.float32):
    """Return random pages and queries; everything that no row of the batch may read is NaN."""
    torch.manual_seed(0)
    k, v = torch.randn(2, NUM_PAGES, heads.num_kv_heads, PAGE_SIZE, heads.head_dim).to(dtype)
    visible = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.bool)
    for slot, position in zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True):
        own = torch.arange(position + 1)
        visible[batch.page_table[slot, own // PAGE_SIZE], own % PAGE_SIZE] = True
    for region in (k, v):
        region.transpose(1, 2)[~visible] = float("nan")
    return torch.randn(len(batch.slots_T), heads.num_heads, heads.head_dim).to(dtype), k, v


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 16, 64]),
)
def test_lists_have_every_page_up_to_the_last_key_and_no_other(sizes, page_size):
    spans, row = [], 0
    for slot, (length, start) in enumerate(sizes):
        spans.append(Span(row, length, slot, start))
        row += length
    lists = page_lists(spans, page_size)
    for i, span in enumerate(spans):
        needed = {position // page_size for position in range(span.start + span.length)}
        assert set(range(lists.page_starts[i + 1] - lists.page_starts[i])) == needed
        in_last = [p for p in range(span.start + span.length) if p // page_size == max(needed)]
        assert lists.last_page_tokens[i] == len(in_last)
        assert range(lists.row_starts[i], lists.row_starts[i + 1]) == range(span.row, span.row + span.length)


def test_rows_that_do_not_follow_each_other_are_refused():
    with pytest.raises(Internal, match="row 5"):
        page_lists([Span(0, 5, 0, 0), Span(6, 2, 1, 0)], 16)


@pytest.mark.parametrize("seed", [2, 16])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((4, 2, 32), torch.float32), ((7, 1, 16), torch.float32), ((4, 4, 64), torch.float16)],
    ids=str,
)
def test_ragged_spans_and_chunks_behind_prefixes_equal_the_reference(seed, heads, dtype):
    batch, spec = random_batch(seed), HeadSpec(*heads, 1e-6)
    prefill, made = twins()
    q, k, v = pages_and_queries(batch, spec, dtype)
    found = TritonOps(2, NO_WHOLE_PROMPTS, prefill).attention(q, spec, batch, k, v)
    expected = ReferenceOps().attention(q.float(), spec, batch, k.float(), v.float())
    assert (found.float() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 0.01)
    assert made[0].num_runs == 1, "the spans were the library's, decoding rows were not"
    assert made[0].sequences[-1][1] == batch.decode_row


def test_a_step_is_planned_once_and_its_neighbours_by_the_other_wrapper():
    """No wrapper is planned again before the copies of its last plan have run."""
    events: list[str] = []

    class Mark:
        def __init__(self) -> None:
            self.name = f"plan {len([e for e in events if e.startswith('plan')])}"
            events.append(self.name)

        def synchronize(self) -> None:
            events.append(f"wait for {self.name}")

    prefill, made = twins(mark=Mark)
    spec, ops = HeadSpec(4, 2, 32, 1e-6), TritonOps(2, NO_WHOLE_PROMPTS, prefill)
    for seed in (2, 16, 29, 2):
        batch = random_batch(seed)
        q, k, v = pages_and_queries(batch, spec)
        for _layer in range(2):
            expected = ReferenceOps().attention(q, spec, batch, k, v)
            torch.testing.assert_close(ops.attention(q, spec, batch, k, v), expected, rtol=1e-5, atol=1e-5)
    assert made[0].log == made[1].log == ["plan", "run", "run"] * 2
    assert events == ["plan 0", "plan 1", "wait for plan 0", "plan 2", "wait for plan 1", "plan 3"]


def test_layers_of_another_shape_are_planned_by_themselves():
    prefill, made = twins()
    batch = random_batch(2)
    for heads in (HeadSpec(4, 2, 32, 1e-6), HeadSpec(4, 1, 32, 1e-6)):
        q, k, v = pages_and_queries(batch, heads)
        expected = ReferenceOps().attention(q, heads, batch, k, v)
        found = TritonOps(2, NO_WHOLE_PROMPTS, prefill).attention(q, heads, batch, k, v)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [wrapper.num_plans for wrapper in made] == [1, 1]


def test_what_it_does_not_take_goes_to_our_own_kernel():
    prefill, _ = twins(Limits(min_rows=100))
    q, k = torch.zeros(200, 4, 64, dtype=torch.bfloat16), torch.zeros(8, 2, 16, 64, dtype=torch.bfloat16)
    spans = [Span(0, 150, 0, 0), Span(150, 50, 1, 7)]
    assert prefill.takes(q, k, spans)
    assert not prefill.takes(q, k, spans[1:]), "few rows"
    assert not prefill.takes(q, k, []), "a recorded step"
    assert not prefill.takes(q.float(), k.float(), spans)
    assert not prefill.takes(q, k.to(torch.float8_e4m3fn), spans), "quantised pages"
    assert not prefill.takes(q[..., :48], k[..., :48], spans)
    assert not prefill.takes(q.expand(200, 4, 64), k, [Span(0, 100, slot, 0) for slot in range(70_000)])


def test_whole_prompts_alone_are_torchs_and_a_mix_is_all_flashinfers():
    prefill, made = twins()
    ops, spec = TritonOps(2, 13, prefill), HeadSpec(4, 2, 32, 1e-6)
    mix = random_batch(2)
    q, k, v = pages_and_queries(mix, spec)
    expected = ReferenceOps().attention(q, spec, mix, k, v)
    torch.testing.assert_close(ops.attention(q, spec, mix, k, v), expected, rtol=1e-5, atol=1e-5)
    assert made[0].num_runs == 1
    span = next(span for span in mix.spans if span.start == 0 and span.length >= 13)
    rows = slice(span.row, span.row + span.length)
    alone = dataclasses.replace(
        mix,
        slots_T=mix.slots_T[rows],
        positions_T=mix.positions_T[rows],
        spans=(dataclasses.replace(span, row=0),),
        decode_row=span.length,
        decode_slots=(),
    )
    found = ops.attention(q[rows], spec, alone, k.nan_to_num(), v.nan_to_num())
    torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-5)
    assert made[0].num_runs == 1 and made[1].num_runs == 0


def test_tokens_of_an_engine_are_those_of_transformers(tmp_path):
    prefill, made = twins()

    class Ops(TorchOps):  # the interpreter would take a minute for the products
        attention = TritonOps(2, NO_WHOLE_PROMPTS, prefill).attention

    reference = write_checkpoint(tmp_path, "llama2", num_layers=2)
    engine = Engine(tmp_path, ops=Ops(), max_model_len=64, num_slots=2)
    prompts = [make_prompt(40), make_prompt(17)]
    assert generate(engine, prompts, 1, chunk_size=24) == [expected_tokens(reference, prompt, 1) for prompt in prompts]
    plans, runs = (sum(getattr(wrapper, name) for wrapper in made) for name in ("num_plans", "num_runs"))
    assert (plans, runs) == (2, 4), "two steps with chunks, two layers each"


# ------------------------------------------------------------------------------------------------ the library itself


def test_the_trial_tells_a_right_library_from_a_wrong_one(caplog):
    assert trial_error(FlashInferPrefill(TwinWrapper, lambda: None), SHAPE, CPU) < 0.01
    assert try_library(Library, SHAPE, CPU, 1) is not None and not caplog.records
    assert trial_error(FlashInferPrefill(lambda: TwinWrapper(error=-1), lambda: None), SHAPE, CPU) > 0.1


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (lambda: Library(lambda: TwinWrapper(error=-1)), "relative error"),
        (lambda: Library(is_built=False, build=lambda limit_s: run_bounded(["false"], limit_s)), "the build failed"),
        (lambda: Library(is_built=False, build=lambda _: run_bounded(["sleep", "60"], 0.05)), "took more than"),
        (lambda: Library(lambda: None), "AttributeError"),
    ],
    ids=["wrong results", "no compiler", "a slow compiler", "another interface"],
)
def test_a_library_that_fails_is_one_warning_and_our_own_kernel(library, said, caplog):
    with caplog.at_level(logging.WARNING):
        assert try_library(library, SHAPE, CPU, 1) is None
    assert len(caplog.records) == 1 and said in caplog.text and "our own kernel" in caplog.text


def test_a_build_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    os.mkfifo(tmp_path / "held")
    with open(os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        with pytest.raises(RuntimeError, match="took more than"):
            run_bounded(["sh", "-c", f"exec 3> {tmp_path}/held; sleep 60 & wait"], 0.5)
        assert select.select([held], [], [], 30)[0], "the end of the last process that had it open"
    run_bounded(["true"], 10)
    with pytest.raises(RuntimeError, match="nvcc is missing"):
        run_bounded(["sh", "-c", "echo one; echo nvcc is missing; exit 1"], 10)


def test_who_it_is_not_for_is_told_why():
    assert why_not(SHAPE, (9, 0), True) is None
    assert "not installed" in str(why_not(SHAPE, (9, 0), False))
    assert "8.9" in str(why_not(SHAPE, (8, 9), True))
    assert "float8_e4m3fn" in str(why_not(dataclasses.replace(SHAPE, kv_dtype=torch.float8_e4m3fn), (9, 0), True))
    assert "80" in str(why_not(dataclasses.replace(SHAPE, head_dim=80), (9, 0), True))


def test_without_a_gpu_it_is_refused_where_it_was_asked_for():
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"model\.prefill_attention is flashinfer"):
        select_prefill_ops(CPU, shape, "flashinfer")
    assert select_prefill_ops(CPU, shape, "auto").name == "torch"
