"""Engines with pages of e4m3, and float16: tokens do not depend on how a prompt was cut, which instance computed it or
where its pages have been, and logits stay near those of float32."""

from __future__ import annotations

import pytest
import torch
from engine_checkpoints import GREEDY, Engine, chunks_of, generate, make_prompt, write_checkpoint
from support.reference_ops import ReferenceOps

from chitu.engine.executor import Admit, FirstToken, Offload, Restore, StepPlan
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.kv_cache.checksum import page_sums_of
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import pack_i32

FP8 = {"kv_dtype": "fp8_e4m3"}
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_checkpoint(folder, request.param, num_layers=2)


def test_a_chunk_size_changes_nothing(checkpoint):
    prompts = [make_prompt(150), make_prompt(47), make_prompt(1)]
    engine = Engine(checkpoint[0], **FP8)
    expected = generate(engine, prompts, 8, chunk_size=512)
    assert generate(engine, prompts, 8, chunk_size=16) == expected
    assert generate(engine, prompts, 8, chunk_size=7) == expected
    assert generate(Engine(checkpoint[0], ops=ReferenceOps(), **FP8), prompts[1:], 3) == [x[:3] for x in expected[1:]]


def test_logits_stay_near_those_of_float32(checkpoint):
    """Random weights amplify errors more than trained ones; docs/benchmarks.md has the errors of chitu-tiny."""
    folder, reference = checkpoint
    errors = []
    for length in (20, 100, 200):
        engine, prompt = Engine(folder, sampling=False, **FP8), make_prompt(length)
        chunks = list(chunks_of(0, length, 512, aux_slot=0))
        engine.runner.execute(StepPlan(admit=[engine.admit(0, prompt, length, sampling=None)], prefill=chunks))
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        errors.append(float((engine.pool.aux_logits[0] - expected).norm() / (expected - expected.mean()).norm()))
    print(f"{folder.name}: error of logits of 20, 100, 200 tokens:", " ".join(f"{error:.4f}" for error in errors))
    assert 1e-4 < max(errors) < 0.1


def test_pages_go_elsewhere_and_a_sequence_goes_away_and_comes_back(checkpoint):
    """Pages go from P to D with other page numbers, then to host memory and back; the tokens are those of one
    engine."""
    folder, _ = checkpoint
    prompt = make_prompt(45)
    expected = generate(Engine(folder, **FP8), [prompt], 7)[0]
    sender, receiver = Engine(folder, sampling=False, **FP8), Engine(folder, **FP8)
    source = sender.admit(0, prompt, 45, sampling=None)
    sender.runner.execute(StepPlan(admit=[source], prefill=list(chunks_of(0, 45, 16, aux_slot=3))[:1]))
    for chunk in list(chunks_of(0, 45, 16, aux_slot=3))[1:]:
        sender.runner.execute(StepPlan(prefill=[chunk]))
    target = receiver.admit(5, prompt, 64, kv_len=45)
    receiver.pool.aux_logits[1] = sender.pool.aux_logits[3]
    there = list(target.pages[: len(source.pages)])
    for mine, theirs in zip(sender.pool.regions, receiver.pool.regions, strict=True):
        theirs[there] = mine[list(source.pages)]
    layers = range(receiver.spec.num_layers)
    sums = page_sums_of(receiver.pool, 0).sums(layers, there)
    assert sums.tolist() == page_sums_of(sender.pool, 0).sums(layers, source.pages).tolist()
    receiver.pool.regions[0][there[0], 0, -1] ^= 1  # a bit of a scale
    assert sums[0] != page_sums_of(receiver.pool, 0).sums(layers, there)[0], "checksums see scales"
    receiver.pool.regions[0][there[0], 0, -1] ^= 1
    tokens = receiver.runner.execute(StepPlan(admit=[target], first_tokens=[FirstToken(5, 1)])).tokens
    for _ in range(3):
        tokens += receiver.runner.execute(StepPlan(decode=[5])).tokens
    receiver.runner.execute(StepPlan(offload=[Offload(5, key=9)]))
    for region in receiver.pool.regions:
        region[list(target.pages)] = 0x7F
    known = prompt + tokens
    back = Admit(2, pack_i32(known), 45, len(known) - 1, receiver.pages(64), GREEDY)
    tokens += receiver.runner.execute(StepPlan(admit=[back], restore=[Restore(2, key=9)], decode=[2])).tokens
    for _ in range(2):
        tokens += receiver.runner.execute(StepPlan(decode=[2])).tokens
    assert tokens == expected


def test_a_continuation_gives_the_rest(checkpoint):
    """Does what a retry after the first token asks for: prefill of the prompt and of the tokens already emitted."""
    folder, _ = checkpoint
    prompt = make_prompt(60)
    whole = generate(Engine(folder, **FP8), [prompt], 10)[0]
    assert generate(Engine(folder, **FP8), [prompt + whole[:4]], 6, chunk_size=19)[0] == whole[4:]


@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("qwen3", "float32", "fp8_e4m3"),  # every two of the three are combined
        ("qwen3", "float16", "float16"),
        pytest.param("deepseek_v3", "float16", "fp8_e4m3", marks=pytest.mark.slow),
    ],
)
def test_recorded_steps_and_the_kernels_of_the_gpu(family, dtype, kv_dtype, tmp_path):
    """Runs under the interpreter, so with one layer. Experts do not touch the cache, so no family with experts is
    needed."""
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    write_checkpoint(tmp_path, family, num_layers=1)
    prompt = make_prompt(14)
    dtypes = {"dtype": dtype, "kv_dtype": kv_dtype}
    plain = generate(Engine(tmp_path, ops=TorchOps(), **dtypes), [prompt], 2, chunk_size=10)
    recording = Recording(EagerRecorder(), decode_sizes=(1,), prefill_sizes=(10,))
    engine = Engine(tmp_path, ops=TritonOps(1), recording=recording, max_model_len=32, num_slots=1, **dtypes)
    assert generate(engine, [prompt], 2, chunk_size=10) == plain


def test_a_hidden_state_near_the_end_of_float16_is_normed_before_it_is_multiplied():
    """A fused product applies the norm's factor last; multiplied by the norm's weight first, these numbers would be
    infinite."""
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    torch.manual_seed(0)
    x, norm = torch.randn(2, 64).clamp(-2, 2).half() * 30000, torch.full((64,), 8.0, dtype=torch.float16)
    weight = (torch.randn(32, 64) / 8).half()
    reference, ops = ReferenceOps(), TritonOps(4)
    plain, fast = reference.prepare(weight, None), ops.prepare(weight, None)
    expected = reference.norm_linear(x, norm, 1e-6, plain)
    assert expected.isfinite().all()
    torch.testing.assert_close(ops.norm_linear(x, norm, 1e-6, fast), expected, rtol=1e-2, atol=2e-2)
    gated = reference.norm_gate_up(x, norm, 1e-6, reference.prepare_gate_up(weight, None))
    found = ops.norm_gate_up(x, norm, 1e-6, ops.prepare_gate_up(weight, None))
    torch.testing.assert_close(found, gated, rtol=2e-2, atol=5e-2)
    for rows in (1, 2):
        assert ops.rms_norm(x[:rows], norm, 1e-6).isfinite().all()
