"""Features that not every model has, on the device against torch: experts, latent attention, whole prompts by torch's
library, sampling. Pages of e4m3 are in `test_gpu_kernels.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_batches import PAGE, batch_on
from gpu_errors import relative_error

from chitu.engine.sampler import Sampler
from chitu.ops.fp8_pages import values_of
from chitu.ops.interface import Batch, HeadSpec, LatentHeads, RotaryTable, Routes, Span, tiles_of
from chitu.ops.routing import Router
from chitu.ops.routing_rule import RoutingRule
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import SamplingParams, fp8_head_bytes

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.sampling import SamplingKernels
from chitu.ops.triton_ops import TritonOps
from chitu.ops.whole_prompts import PAD_TOKENS

pytestmark = pytest.mark.engine

TWIN = TorchOps()


@pytest.mark.parametrize("rows", [1, 8, 65, 700])
def test_experts(card, rows):
    """Row counts go from one row that reads few experts up to tiles of 64 pairs, with the sizes of a Qwen3-30B-A3B."""
    if card.is_twin and rows > 8:
        pytest.skip("the interpreter would take a minute")
    ops = TritonOps(card.num_multiprocessors)
    experts, top_k, hidden, inner = (6, 2, 32, 32) if card.is_twin else (128, 8, 2048, 768)
    torch.manual_seed(rows)
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=card.device) * hidden**-0.5).to(card.dtype)
    down = (torch.randn(experts, hidden, inner, device=card.device) * inner**-0.5).to(card.dtype)
    x = torch.randn(rows, hidden, device=card.device).to(card.dtype)
    chosen = torch.rand(rows, experts, device=card.device).topk(top_k).indices
    routes = Routes(chosen, torch.rand(rows, top_k, device=card.device))
    found = ops.mixture(x, routes, ops.prepare_experts(gate_up, down))
    expected = TWIN.mixture(x.float(), routes, TWIN.prepare_experts(gate_up.float(), down.float()))
    assert relative_error(found, expected) < 0.01


@pytest.mark.parametrize("rows", [1, 8, 64, 700])
def test_the_router_has_the_choice_of_its_twin_each_time(card, rows):
    """With whole numbers, whose sums are exact, so many experts are equal. Again and again, since its programs tell
    each other by memory what they did."""
    if card.is_twin and rows > 8:
        pytest.skip("the interpreter would take a minute")
    ops, (experts, width) = TritonOps(card.num_multiprocessors), (20, 32) if card.is_twin else (256, 7168)
    torch.manual_seed(rows)
    weight = torch.randint(-1, 2, (experts, width), device=card.device).float()
    rule = RoutingRule(4, 4, 2, 2, "sigmoid", scale=2.5)
    router = Router(weight, rule, torch.randint(0, 2, (experts,), device=card.device).float())
    for _ in range(card.size(200, 2)):
        x = (torch.randint(-1, 2, (rows, width), device=card.device) / 64).to(card.dtype)
        found, expected = ops.route(x, router), TWIN.route(x, router)
        assert relative_error(found.weights_TA, expected.weights_TA) < 1e-5
        assert (found.experts_TA == expected.experts_TA).all()


@pytest.mark.parametrize("window", [None, 128])
def test_windows_and_sinks(card, window):
    ops, (heads, kv_heads, dim) = TritonOps(card.num_multiprocessors), (8, 2, 32) if card.is_twin else (64, 8, 64)
    batch, num_pages = batch_on(card, 6)
    torch.manual_seed(6)
    spec = HeadSpec(heads, kv_heads, dim, 1e-6, window=window, sinks_H=torch.randn(heads, device=card.device) * 2)
    k, v = torch.randn(2, num_pages, kv_heads, PAGE, dim, device=card.device).to(card.dtype)
    q = torch.randn(len(batch.slots_T), heads, dim, device=card.device).to(card.dtype)
    expected = TWIN.attention(q.float(), spec, batch, k.float(), v.float())
    assert relative_error(ops.attention(q, spec, batch, k, v), expected) < 0.005


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_latent_attention(card, num_heads, is_fp8):
    """Covers append, query, and attention of spans and of decoding rows, with the sizes of a DeepSeek."""
    if card.is_twin and num_heads > 16:
        pytest.skip("the same code")
    ops, num_heads = TritonOps(card.num_multiprocessors), card.size(num_heads, 3)
    latent, rope, nope = (32, 16, 16) if card.is_twin else (512, 64, 128)
    batch, num_pages = batch_on(card, 5, longest=card.size(3000, 40))
    torch.manual_seed(num_heads)
    norm = (torch.rand(latent, device=card.device) + 0.5).to(card.dtype)
    heads = LatentHeads(num_heads, latent, rope, (nope + rope) ** -0.5, 1e-6, norm)
    wide = replace(heads, norm_L=norm.float())
    angles = torch.rand(int(batch.positions_T.max()) + 1, rope // 2, device=card.device) * 6
    rotary = RotaryTable(angles.cos(), angles.sin())
    rows, width = len(batch.slots_T), latent + rope
    if is_fp8:
        raw = torch.zeros(2, num_pages, 1, fp8_head_bytes(PAGE, width), dtype=torch.uint8, device=card.device)
        own, right = (values_of(pages, PAGE, width) for pages in raw)
    else:
        own = torch.zeros(num_pages, 1, PAGE, width, device=card.device, dtype=card.dtype)
        right = own.float()
    for slot in range(batch.page_table.shape[0]):  # every page that the batch's rows read
        positions = torch.arange(int(batch.positions_T.max()) + 1, device=card.device)
        every = replace(batch, slots_T=torch.full_like(positions, slot), positions_T=positions)
        kv = torch.randn(len(positions), width, device=card.device).to(card.dtype)
        ops.latent_append(kv, heads, rotary, every, own)
        TWIN.latent_append(kv.float(), wide, rotary, every, right)
    if not is_fp8:
        assert relative_error(own, right) < 0.005
    q = torch.randn(rows, num_heads, nope + rope, device=card.device).to(card.dtype)
    key = (torch.randn(num_heads, nope, latent, device=card.device) * nope**-0.5).to(card.dtype)
    found = ops.latent_query(q, key, heads, rotary, batch)
    assert relative_error(found, TWIN.latent_query(q.float(), key.float(), wide, rotary, batch)) < 0.01
    seen = own if is_fp8 else own.float()  # the same bytes for both: an appended row may differ in its last bit
    for first_position in (0, 1):  # 1: of a layer that drafts
        own_batch = replace(batch, first_position=first_position)
        expected = TWIN.latent_attention(found.float(), wide, own_batch, seen)
        attended = ops.latent_attention(found, heads, own_batch, own)
        assert relative_error(attended[: batch.decode_row], expected[: batch.decode_row]) < 0.01
        assert relative_error(attended[batch.decode_row :], expected[batch.decode_row :]) < 0.01


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_whole_prompts_of_any_length(card, beyond):
    """Whole prompts go to torch's library, padded, beside a chunk with a prefix; memory behind the prompts' ends is
    NaN."""
    dim, heads, kv_heads = card.size(128, 16), card.size(16, 4), card.size(8, 2)
    lengths, starts = [card.size(4, 1) * PAD_TOKENS + beyond, 70, 2 * PAD_TOKENS], [0, 40, 0]
    pages_each = -(-max(lengths) // PAGE) + 1
    table = torch.randperm(3 * pages_each, device=card.device).view(3, pages_each)
    nan = float("nan")
    k, v = torch.full((2, table.numel(), kv_heads, PAGE, dim), nan, device=card.device, dtype=card.dtype)
    torch.manual_seed(beyond)
    spans: list[Span] = []
    for slot, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        own = torch.arange(start + length, device=card.device)
        for region in (k, v):
            values = torch.randn(len(own), kv_heads, dim, device=card.device).to(card.dtype)
            region[table[slot, own // PAGE], :, own % PAGE] = values
        spans.append(Span(sum(lengths[:slot]), length, slot, start))
    on = card.device
    batch = Batch(
        slots_T=torch.cat([torch.full((span.length,), span.slot, device=on) for span in spans]),
        positions_T=torch.cat([span.start + torch.arange(span.length, device=on) for span in spans]),
        page_table=table,
        spans=tuple(spans),
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64),
        tiles_Y4=torch.tensor(tiles_of(spans), dtype=torch.int64, device=on),
        decode_row=sum(lengths),
        decode_slots=(),
        max_decode_len=0,
    )
    spec = HeadSpec(heads, kv_heads, dim, 1e-6)
    q = torch.randn(sum(lengths), heads, dim, device=on).to(card.dtype)
    found = TritonOps(card.num_multiprocessors, whole_prompt_tokens=PAD_TOKENS - 1).attention(q, spec, batch, k, v)
    expected = TWIN.attention(q.float(), spec, batch, k.float().nan_to_num(), v.float().nan_to_num())
    assert relative_error(found, expected) < 0.005


SAMPLED = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.8},
    {"min_p": 0.05, "presence_penalty": 1.0},
    {"top_p": 0.97, "temperature": 2.0},
    {"repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
)


@pytest.mark.parametrize("std", [3.0, 0.2])
def test_sampled_tokens_are_those_of_the_cpu(card, std):
    """Rows are sharp, or nearly flat so that their candidates do not fit; three tokens each."""
    vocab, repeat = card.size(151_936, 700), card.size(4, 1)
    logits = torch.randn(len(SAMPLED) * repeat, vocab, generator=torch.Generator().manual_seed(1)) * std
    found = []
    for device in (card.device, torch.device("cpu")):
        kernels = SamplingKernels(len(logits), vocab, device) if not found else None
        sampler = Sampler(len(logits), vocab, device, (2,), kernels)
        for slot in range(len(logits)):
            params = SamplingParams(max_tokens=9, seed=slot, **SAMPLED[slot % len(SAMPLED)])
            sampler.admit(slot, torch.arange(5, device=device), 5, params)
        slots = list(range(len(logits)))
        found.append([sampler.sample(logits.to(device), slots).tolist() for _ in range(3)])
    assert found[0] == found[1]
