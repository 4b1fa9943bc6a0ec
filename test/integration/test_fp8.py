"""An fp8 KV cache: its pages, and an engine that has one."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch
from engine_checkpoints import GREEDY, Engine, chunks_of, generate, make_prompt, write_checkpoint
from ops_batch import MAX_PAGES, NUM_PAGES, PAGE_SIZE, random_batch
from support.reference_ops import ReferenceOps

from chitu.config.schema import CacheConfig
from chitu.engine.executor import Admit, FirstToken, Offload, Restore, StepPlan
from chitu.engine.memory_budget import kv_dtype_of
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.errors import ConfigError, IncompatibleLayout
from chitu.kv_cache.checksum import page_sums_of
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import check_compatible
from chitu.ops.fp8_pages import E4M3, put_rows, quantised, scales_of, take_pages, values_of
from chitu.ops.interface import Batch, HeadSpec, LatentHeads, Ops, RotaryTable
from chitu.ops.native import NativeOps, load_library
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import KVLayout, fp8_head_bytes, pack_i32

# ----------------------------------------------------------------------------------------------------------------------
# Pages of e4m3: the bytes that rows become, whichever operations write them, and attention that reads them. What is
# right is stated here by hand (the table of e4m3, the nearest number, ties to even) and by the reference twin over the
# same numbers as plain float32 pages. Scales of neighbouring rows differ widely, so that a scale of the wrong row, or a
# missing one, shows.


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]
REFERENCE = ReferenceOps()
CODES = [(1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) if code >= 8 else code * 2.0**-9 for code in range(127)]
"""The non-negative numbers of e4m3 by code; the last is 448."""


@pytest.fixture(params=["torch", "triton"])
def ops(request) -> Ops:
    if request.param == "torch":
        return TorchOps()
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    return TritonOps(num_multiprocessors=4, whole_prompt_tokens=64)


def empty_pages(kv_heads: int, dim: int, byte: int = 0) -> torch.Tensor:
    raw = torch.full((NUM_PAGES, kv_heads, fp8_head_bytes(PAGE_SIZE, dim)), byte, dtype=torch.uint8)
    return values_of(raw, PAGE_SIZE, dim)


def full_pages(kv_heads: int, dim: int) -> torch.Tensor:
    """Return pages with every row filled and scales spread over a factor of a thousand."""
    rows = torch.randn(NUM_PAGES * PAGE_SIZE, kv_heads, dim) * 10 ** (
        3 * torch.rand(NUM_PAGES * PAGE_SIZE, kv_heads, 1)
    )
    pages = empty_pages(kv_heads, dim)
    each = torch.arange(NUM_PAGES).repeat_interleave(PAGE_SIZE)
    put_rows(pages, each, torch.arange(PAGE_SIZE).repeat(NUM_PAGES), rows / 100)
    return pages


def widened(pages: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as plain pages."""
    return pages.float() * scales_of(pages).unsqueeze(-1)


def bytes_of(pages: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers and scales."""
    return torch.cat((pages.reshape(-1).view(torch.uint8), scales_of(pages).reshape(-1).view(torch.uint8)))


def code_of(number: float) -> int:
    """Return the code of the nearest number; of two equally near ones, the even code."""
    above = bisect.bisect_left(CODES, abs(number))
    below = max(above - 1, 0)
    distance = CODES[min(above, 126)] - abs(number) - (abs(number) - CODES[below])
    code = min(above, 126) if distance < 0 or (distance == 0 and above % 2 == 0) else below
    return code | (0x80 if math.copysign(1, number) < 0 else 0)


def awkward_numbers() -> list[float]:
    """Return all numbers of e4m3, the midpoints between them, and their neighbours in float32, with both signs."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(CODES)]
    exact = torch.tensor([*CODES, *middles, 1e-30])
    up = torch.nextafter(exact, torch.tensor(1000.0))
    down = torch.nextafter(exact, torch.tensor(-1000.0))
    numbers = [x for x in torch.cat((exact, up, down)).tolist() if abs(x) <= 448]
    return numbers + [-x for x in numbers]


def batch_of_one(length: int) -> Batch:
    table = torch.arange(NUM_PAGES).unsqueeze(0)
    none = torch.zeros(0, 4, dtype=torch.int64)
    return Batch(torch.zeros(length, dtype=torch.int64), torch.arange(length), table, (), none, none, 0, (), 0)


def append_values(ops: Ops, rows_TN: torch.Tensor) -> torch.Tensor:
    """Append row t as the value of position t; return the pages."""
    length, dim = rows_TN.shape
    k, v = empty_pages(1, dim), empty_pages(1, dim)
    rotary = RotaryTable(torch.ones(length, dim // 2), torch.zeros(length, dim // 2))
    qkv = torch.cat((rows_TN, rows_TN, rows_TN), dim=1)
    ops.rope_append(qkv, HeadSpec(1, 1, dim, 1e-6), rotary, batch_of_one(length), k, v)
    return v


def test_a_row_becomes_the_nearest_numbers_of_e4m3(ops):
    numbers = awkward_numbers()
    dim = 256
    rows = torch.zeros(-(-len(numbers) // (dim - 1)), dim)
    rows[:, 0] = 448.0  # makes the scale 1
    for index, number in enumerate(numbers):
        rows[index // (dim - 1), 1 + index % (dim - 1)] = number
    pages = append_values(ops, rows)
    found = pages.view(torch.uint8)[:, 0].reshape(-1, dim)[: len(rows)]
    expected = torch.tensor([[code_of(x) for x in row] for row in rows.tolist()], dtype=torch.uint8)
    assert torch.equal(found, expected)
    assert scales_of(pages)[:, 0].reshape(-1)[: len(rows)].tolist() == [1.0] * len(rows)


def test_bytes_are_the_same_whoever_writes_them(ops):
    """Rows of every size: zeros, the smallest float32, the largest, with NaN or infinity."""
    torch.manual_seed(0)
    rows = torch.randn(40, 48) * torch.exp(3 * torch.randn(40, 48)) * 10 ** torch.linspace(-36, 35, 40).unsqueeze(1)
    rows[3], rows[4], rows[5, 7], rows[6, 9], rows[7, 0] = 0, -0.0, float("nan"), float("inf"), float("-inf")
    rows[8] = torch.linspace(-1, 1, 48) * 1e-41
    pages = append_values(ops, rows)
    assert torch.equal(bytes_of(pages), bytes_of(append_values(REFERENCE, rows)))
    scales = scales_of(pages)[:, 0].reshape(-1)
    assert scales[5:8].isnan().all() and scales[3:5].tolist() == [1, 1] and scales[8] == 2.0**-126
    values = pages.view(torch.uint8)[:, 0].reshape(-1, 48)
    assert not values[5:8].any(), "nothing of a row that is not finite is kept"
    finite = [row for row in range(40) if row not in (3, 4, 5, 6, 7, 8)]
    assert (pages[:, 0].reshape(-1, 48)[finite].float().abs().amax(-1) == 448).all()


def test_a_row_loses_a_sixteenth_of_its_numbers_at_most_and_its_largest_nothing():
    torch.manual_seed(0)
    rows = torch.randn(2000, 64, dtype=torch.float64).float()
    values, scales = quantised(rows)
    back = values.float() * scales.unsqueeze(-1)
    tiny = rows.abs() < scales.unsqueeze(-1) * 2.0**-6
    assert ((back - rows).abs()[~tiny] <= rows.abs()[~tiny] * (1 / 16 + 1e-6)).all()
    assert ((back - rows).abs() <= scales.unsqueeze(-1) * 2.0**-10 + rows.abs() * (1 / 16 + 1e-6)).all()
    torch.testing.assert_close(back.abs().amax(-1), rows.abs().amax(-1), rtol=1e-6, atol=0)
    error = (back - rows).norm() / rows.norm()
    assert 0.02 < error < 0.03, error


@pytest.mark.parametrize(
    ("heads", "dtype", "seed"), [((4, 2, 32), torch.float32, 3), ((6, 1, 48), torch.float16, 16)], ids=str
)
def test_attention_equals_that_over_plain_pages_of_the_same_numbers(ops, heads, dtype, seed):
    """Batches mix whole prompts, chunks and decodes."""
    num_heads, kv_heads, dim = heads
    torch.manual_seed(seed)
    spec, batch = HeadSpec(num_heads, kv_heads, dim, 1e-6), random_batch(seed)
    assert batch.spans and batch.decode_slots
    k, v = full_pages(kv_heads, dim), full_pages(kv_heads, dim)
    q = torch.randn(len(batch.slots_T), num_heads, dim).to(dtype)
    found = ops.attention(q, spec, batch, k, v).float()
    expected = REFERENCE.attention(q.float(), spec, batch, widened(k), widened(v))
    eps = torch.finfo(dtype).eps
    assert ((found - expected).norm(dim=-1) <= (4 * eps + 1e-5) * expected.norm(dim=-1)).all()
    torch.testing.assert_close(
        REFERENCE.attention(q, spec, batch, k, v).float(), expected, rtol=4 * eps + 1e-5, atol=1e-5
    )


def test_rows_and_attention_of_a_latent_cache(ops):
    """A row, latent and rotated key together, has one scale."""
    torch.manual_seed(2)
    heads, batch = LatentHeads(5, 40, 8, 0.17, 1e-6, torch.rand(40) + 0.5), random_batch(2)
    angles = torch.rand(MAX_PAGES * PAGE_SIZE, 4) * 6
    rotary, rows = RotaryTable(angles.cos(), angles.sin()), len(batch.slots_T)
    kv = torch.randn(rows, 10 + 48)[:, 10:]
    own, right = empty_pages(1, 48), empty_pages(1, 48)
    ops.latent_append(kv, heads, rotary, batch, own)
    REFERENCE.latent_append(kv, heads, rotary, batch, right)
    # The norm may sum in another order, which changes the last bit of a scale, or a number between two codes.
    assert (bytes_of(own) != bytes_of(right)).sum() < rows
    assert (widened(own) - widened(right)).norm() < 0.003 * widened(right).norm() > 0
    pages, q = full_pages(1, 48), torch.randn(rows, 5, 48)
    expected = REFERENCE.latent_attention(q, heads, batch, widened(pages))
    # Sums of 48 products have another order on each CPU: 2.6e-5 apart with AVX2.
    torch.testing.assert_close(ops.latent_attention(q, heads, batch, pages), expected, rtol=2e-5, atol=5e-5)
    torch.testing.assert_close(REFERENCE.latent_attention(q, heads, batch, pages), expected, rtol=2e-5, atol=2e-5)


def test_nothing_is_read_past_the_end_of_a_sequence_and_nan_stays_with_its_own(ops):
    """Everything else is NaN, scales as well. A sequence with a NaN of its own has NaN, as it would without e4m3."""
    torch.manual_seed(1)
    batch, spec = random_batch(16), HeadSpec(4, 2, 32, 1e-6)
    angles = torch.rand(MAX_PAGES * PAGE_SIZE, 16) * 6
    rotary = RotaryTable(angles.cos(), angles.sin())
    k, v = full_pages(2, 32), full_pages(2, 32)
    visible = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.bool)
    for slot, position in zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True):
        for p in range(position + 1):
            visible[batch.page_table[slot, p // PAGE_SIZE], p % PAGE_SIZE] = True
    for region in (k, v):
        region.view(torch.uint8).transpose(1, 2)[~visible] = 0x7F
        scales_of(region).transpose(1, 2)[~visible] = float("nan")
    qkv = torch.randn(len(batch.slots_T), 8 * 32)
    qkv[-1, 7 * 32] = float("nan")  # a value of the second KV head of the last row, which decodes
    q = ops.rope_append(qkv, spec, rotary, batch, k, v)
    is_bad = ops.attention(q, spec, batch, k, v).view(-1, 4, 32).isnan()
    assert not is_bad[:-1].any() and not is_bad[-1, :2].any() and is_bad[-1, 2:].all()


def test_the_kernels_of_the_cpu_leave_e4m3_to_torch():
    library = load_library()
    if library is None:
        pytest.skip("no C compiler")
    torch.manual_seed(4)
    batch, spec, native = random_batch(4), HeadSpec(4, 2, 32, 1e-6), NativeOps(library)
    angles = torch.rand(MAX_PAGES * PAGE_SIZE, 16) * 6
    rotary, qkv = RotaryTable(angles.cos(), angles.sin()), torch.randn(len(batch.slots_T), 8 * 32)
    results = []
    for each in (native, TorchOps()):
        k, v = empty_pages(2, 32), empty_pages(2, 32)
        q = each.rope_append(qkv, spec, rotary, batch, k, v)
        results.append((q.clone(), bytes_of(k), bytes_of(v), each.attention(q, spec, batch, k, v)))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert results[0][1].any()


def test_a_head_of_a_page_is_one_piece_with_its_scales():
    layout = KVLayout.uniform("m", 2, 4, 8, 16, "fp8_e4m3", 10, tp_size=2)
    pool = KVPool(layout, 5, 0, has_scratch=True)
    assert pool.page_bytes == (2 * 16 * (8 + 4),) * 4
    put_rows(pool.k[1], torch.tensor([3]), torch.tensor([15]), torch.full((1, 2, 8), 56.0))
    head = pool.regions[2][3, 1]
    assert pool.regions[2].data_ptr() == pool.region_bases[2] == pool.k[1].data_ptr()
    assert head[: 16 * 8].view(E4M3)[-8:].tolist() == [448.0] * 8 and not head[: 15 * 8].any()
    assert head[16 * 8 :].view(torch.float32).tolist() == [0.0] * 15 + [0.125]
    assert take_pages(pool.k[1], torch.tensor([3]), torch.float16)[0, 1, 15].tolist() == [56.0] * 8
    wide = KVLayout.uniform("m", 2, 4, 8, 16, "bfloat16", 10, tp_size=2)
    with pytest.raises(IncompatibleLayout, match="dtype: fp8_e4m3 != bfloat16") as caught:
        check_compatible(layout, wide)
    assert str(layout) in caught.value.message and str(wide) in caught.value.message


def test_what_cannot_be_had_is_refused_at_the_start(tmp_path):
    from engine_checkpoints import write_checkpoint

    from chitu.models.config import read_model_spec

    write_checkpoint(tmp_path, "mistral", num_layers=1)
    spec, wanted = read_model_spec(tmp_path), CacheConfig(kv_dtype="fp8_e4m3")
    assert kv_dtype_of(CacheConfig(), spec, "bfloat16", (8, 0)) == "bfloat16"
    assert [kv_dtype_of(wanted, spec, "bfloat16", each) for each in (None, (8, 9), (9, 0))] == ["fp8_e4m3"] * 3
    with pytest.raises(ConfigError, match=r"kv_dtype: .* has 8\.0"):
        kv_dtype_of(wanted, spec, "bfloat16", (8, 0))
    with pytest.raises(ConfigError, match=r"5 tokens of 16 numbers .* has 100 bytes"):
        kv_dtype_of(CacheConfig(kv_dtype="fp8_e4m3", page_size=5), spec, "bfloat16", None)


# ----------------------------------------------------------------------------------------------------------------------
# Engines with pages of e4m3, and float16: tokens do not depend on how a prompt was cut, which instance computed it or
# where its pages have been, and logits stay near those of float32.


FP8 = {"kv_dtype": "fp8_e4m3"}
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")


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
        pytest.param("qwen3", "float16", "float16", marks=pytest.mark.by_hand),  # in CI in test_triton_ops
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
