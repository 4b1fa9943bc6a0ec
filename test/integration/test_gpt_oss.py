"""gpt-oss by our own code: sinks and windows in every implementation of attention, the gate and the biases of its
experts, which stay in MXFP4, and faults of each that show in the logits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thread_ranks
import torch
from checkpoint_table import Checkpoint, error_of, make_checkpoint, prompts, undivided
from engine_checkpoints import Engine, expected_tokens, generate, logits_of, make_prompt, write_checkpoint
from ops_batch import MAX_PAGES, NUM_PAGES, PAGE_SIZE, random_batch
from support.checkpoints import PUBLISHED, ROWS
from support.reference_ops import ReferenceOps
from thread_ranks import Meeting, ThreadRank

from chitu.engine.build import load_model
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.models import joined_experts
from chitu.models.config import read_model_spec
from chitu.models.joined_experts import inner_part
from chitu.models.layers import AttentionLayer, DecoderModel, MixtureMLP
from chitu.ops.interface import Batch, ExpertBiases, HeadSpec, Ops, Routes
from chitu.ops.native import NativeOps, PackedExperts, load_library
from chitu.ops.routing import Router, route
from chitu.ops.routing_rule import ClampedGate, RoutingRule
from chitu.ops.torch_ops import TorchOps

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

TOLERANCE, WRONG = 1e-5, 1e-3
"""Bound on the error of a logit as a share of the largest one, and the least error of a fault."""
REFERENCE = ReferenceOps()
ROW = {row.name: row for row in ROWS}
GATE = ClampedGate(1.4, 0.8)


@pytest.fixture(params=["torch", "native", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is in the dev extra")
        from chitu.ops.triton_ops import TritonOps

        return TritonOps(132)
    library = load_library()
    if library is None:
        pytest.skip("no C compiler here")
    return NativeOps(library)


# ------------------------------------------------------------------------------------------------------- the operations


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 24, 64, 500])
def test_windows_and_sinks_equal_the_reference(ops: Ops, window: int | None, has_sinks: bool) -> None:
    """Chunks longer and shorter than the window, behind prefixes, and decodes; what no row sees may be NaN."""
    torch.manual_seed(window or 0)
    for seed, (num_heads, kv_heads) in ((0, (4, 2)), (3, (6, 2))):
        batch = random_batch(seed)
        spec = HeadSpec(num_heads, kv_heads, 32, 1e-6, window=window)
        if has_sinks:
            spec = dataclasses.replace(spec, sinks_H=torch.randn(num_heads) * 2)
        k, v = torch.randn(2, NUM_PAGES, kv_heads, PAGE_SIZE, 32)
        q = torch.randn(len(batch.slots_T), num_heads, 32)
        expected = REFERENCE.attention(q, spec, batch, k, v)
        torch.testing.assert_close(ops.attention(q, spec, batch, k, v), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("splits", "window"), [(1, None), (2, None), (8, None), (2, 130), (8, 3)])
def test_the_sink_counts_once_however_many_splits_there_are(splits: int, window: int | None) -> None:
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.kernels.attention import decode_attention
    from chitu.ops.kernels.router import counters

    torch.manual_seed(splits)
    table = torch.randperm(NUM_PAGES)[: 6 * MAX_PAGES].view(6, MAX_PAGES)
    positions, slots = torch.tensor([0, 63, 64, 130, MAX_PAGES * PAGE_SIZE - 1]), torch.tensor([4, 0, 5, 2, 1])
    k, v = torch.randn(2, NUM_PAGES, 2, PAGE_SIZE, 32)
    q, out, sinks = torch.randn(5, 4, 32), torch.full((5, 4, 32), float("nan")), torch.randn(4) * 2
    decode_attention(q, k, v, slots, positions, table, out, splits, counters(q.device), window, sinks)
    none = torch.zeros(0, 4, dtype=torch.int64)
    batch = Batch(slots, positions, table, (), none, none, 0, tuple(slots.tolist()), 224)
    spec = HeadSpec(4, 2, 32, 1e-6, window=window, sinks_H=sinks)
    expected = REFERENCE.attention(q, spec, batch, k, v)
    torch.testing.assert_close(out.view(5, -1), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("has_down", [True, False], ids=["main rank", "another rank"])
@pytest.mark.parametrize("rows", [1, 37, 90])
def test_experts_with_biases_and_a_clamped_gate_equal_the_reference(ops: Ops, rows: int, has_down: bool) -> None:
    torch.manual_seed(rows)
    gate_up, down = torch.randn(5, 80, 48) / 4, torch.randn(5, 48, 40) / 4
    biases = ExpertBiases(torch.randn(5, 80), torch.randn(5, 48) if has_down else None)
    x, routes = torch.randn(rows, 48), route(torch.randn(rows, 12), Router(torch.randn(5, 12), RoutingRule(2)))
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(gate_up, down, biases, GATE))
    found = ops.mixture(x, routes, ops.prepare_experts(gate_up, down, biases, GATE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    loose = ops.prepare_experts(gate_up, down, biases, GATE._replace(limit=100.0))
    assert (ops.mixture(x, routes, loose) - expected).abs().max() > 0.1, "the limit matters"


def test_a_bias_of_the_logits_counts_for_choice_and_weight() -> None:
    router = Router(torch.eye(4), RoutingRule(2), logit_bias_E=torch.tensor([0.0, 0.0, 3.0, 0.0]))
    routes = route(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), router)
    assert routes.experts_TA.tolist() == [[2, 1]]
    torch.testing.assert_close(routes.weights_TA, torch.tensor([[4.0, 3.0]]).softmax(-1))


# ------------------------------------------------------------------------------------------------------------ the model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(ROW["gpt-oss-20b"], tmp_path_factory.mktemp("models") / "m")


def test_it_is_our_own_code_unless_transformers_is_asked_for(checkpoint: Checkpoint) -> None:
    spec, theirs = read_model_spec(checkpoint.folder), read_model_spec(checkpoint.folder, code="transformers")
    assert spec.code == "own" and theirs.code == "transformers"
    assert spec.windows == (24, None, 24, None) and spec.groups == theirs.groups
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    apart = logits_of(checkpoint.folder) - logits_of(checkpoint.folder, code="transformers")
    assert apart.abs().max() < 1e-4


def test_the_config_as_it_is_published_is_read(tmp_path: Path) -> None:
    """With its sizes, which the list of checkpoints has smaller."""
    sizes = {"num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 32}
    sizes |= {"num_experts_per_tok": 4, "experts_per_token": 4, "vocab_size": 201088, "initial_context_length": 4096}
    config: dict[str, Any] = {**PUBLISHED["gpt-oss-20b"], **sizes, "max_position_embeddings": 131072}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 12
    config["rope_scaling"] = {**config["rope_scaling"], "original_max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path)
    assert spec.code == "own" and spec.max_model_len == 131072 and spec.windows == (128, None) * 12
    assert spec.experts is not None and spec.experts.gate == ClampedGate(1.702, 7.0)
    assert spec.rope is not None and not spec.rope.is_truncated and spec.rope.theta == 150000
    assert spec.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)


@pytest.mark.parametrize("family", ["torch", "triton"])
def test_every_implementation_has_the_same_logits(family: str, tmp_path: Path) -> None:
    if family == "triton":
        pytest.importorskip("triton", reason="triton is in the dev extra")
        from chitu.ops.triton_ops import TritonOps
    write_checkpoint(tmp_path, "gpt_oss", num_layers=2)
    expected = logits_of(tmp_path)
    found = logits_of(tmp_path, ops=TorchOps() if family == "torch" else TritonOps(132))
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_recorded_steps_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Prompts and decodes by our kernels, in buckets; one prompt and its tokens exceed the window."""
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import TritonOps

    reference = write_checkpoint(tmp_path, "gpt_oss", num_layers=2)
    asked = [make_prompt(length) for length in (3, 30)]
    recording = Recording(EagerRecorder(), decode_sizes=(1, 2), prefill_sizes=(64,))
    engine = Engine(tmp_path, ops=TritonOps(132), recording=recording, max_model_len=64, num_pages=16, num_slots=2)
    assert generate(engine, asked, 4) == [expected_tokens(reference, prompt, 4) for prompt in asked]


def experts_of(model: DecoderModel) -> list[PackedExperts]:
    found = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MixtureMLP)]
    return [each for each in found if isinstance(each, PackedExperts)]


@pytest.mark.parametrize("size", [1, 2])
def test_experts_stay_in_mxfp4_with_the_bits_of_dequantised_ones(checkpoint: Checkpoint, size: int) -> None:
    if load_library() is None:
        pytest.skip("no C compiler here")
    shard = ThreadRank(Meeting(size), size - 1) if size > 1 else None
    small, wide = (
        load_model(checkpoint.folder, "float32", shard=shard, weights=form)  # type: ignore[arg-type]
        for form in ("keep", "dequantise")
    )
    assert isinstance(small, DecoderModel) and isinstance(wide, DecoderModel)
    x = torch.randn(9, 64)
    routes = Routes(torch.randint(8, (9, 2)), torch.rand(9, 2))
    for mine, theirs in zip(experts_of(small), experts_of(wide), strict=True):
        weights = (*mine.gate_up, *mine.down)
        assert {each.codes.form for each in weights if each.codes is not None} == {"e2m1"} and mine.num_experts == 8
        numbers = sum(each.out_features * each.in_features for each in mine.down)
        assert sum(each.num_bytes for each in mine.down) == numbers // 2 + numbers // 32 * 4
        assert torch.equal(small.ops.mixture(x, routes, mine), wide.ops.mixture(x, routes, theirs))


@pytest.mark.parametrize("size", [1, 2])
def test_gpus_keep_them_in_mxfp4_too(checkpoint: Checkpoint, size: int) -> None:
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.triton_ops import CardExperts, TritonOps

    shard = ThreadRank(Meeting(size), size - 1) if size > 1 else None
    small, wide = (
        load_model(checkpoint.folder, "float32", shard=shard, weights=form, ops=ops)  # type: ignore[arg-type]
        for form, ops in (("keep", TritonOps(132)), ("dequantise", TorchOps()))
    )
    assert isinstance(small, DecoderModel) and isinstance(wide, DecoderModel)
    x, routes = torch.randn(9, 64), Routes(torch.randint(8, (9, 2)), torch.rand(9, 2))
    for layer, other in zip(small.layers, wide.layers, strict=True):
        assert isinstance(layer.mlp, MixtureMLP) and isinstance(other.mlp, MixtureMLP)
        mine = layer.mlp.experts
        assert isinstance(mine, CardExperts) and not isinstance(mine.down_EDI, torch.Tensor)
        expected = wide.ops.mixture(x, routes, other.mlp.experts)
        torch.testing.assert_close(small.ops.mixture(x, routes, mine), expected, rtol=1e-4, atol=1e-4)


def test_ranks_get_whole_blocks_of_an_expert_if_each_gets_one() -> None:
    assert [inner_part(2880, 4, rank) for rank in range(4)] == [
        *(range(0, 704), range(704, 1440), range(1440, 2144), range(2144, 2880)),
    ]
    assert [inner_part(96, 2, rank) for rank in range(2)] == [range(32), range(32, 96)]
    assert [inner_part(32, 2, rank) for rank in range(2)] == [range(16), range(16, 32)]


# ------------------------------------------------------------------------------------------------------- planted faults


def changed(model: Any, attention: Callable[[int, HeadSpec], HeadSpec]) -> Any:
    """Return the model with other heads in each layer."""
    layers = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer.attention, AttentionLayer)
        heads = attention(index, layer.attention.heads)
        layers.append(dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, heads=heads)))
    return dataclasses.replace(model, layers=layers)


def with_window(model: Any, more: int) -> Any:
    def other(index: int, heads: HeadSpec) -> HeadSpec:
        return dataclasses.replace(heads, window=None if heads.window is None else heads.window + more)

    return changed(model, other)


def without_limit(model: Any) -> Any:
    layers = []
    for layer in model.layers:
        experts = layer.mlp.experts
        experts = dataclasses.replace(experts, gate=experts.gate._replace(limit=1e9))
        layers.append(dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, experts=experts)))
    return dataclasses.replace(model, layers=layers)


@pytest.mark.parametrize(
    "fault",
    [lambda model: with_window(model, 1), lambda model: with_window(model, -1), without_limit],
    ids=["a window of one more", "a window of one less", "no limit of the gate"],
)
def test_a_wrong_window_or_gate_shows_in_the_logits(fault: Callable[[Any], Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt_oss", num_layers=2)
    right = logits_of(tmp_path)
    assert (logits_of(tmp_path, plant=fault) - right).abs().max() > WRONG * right.abs().max()


class EveryRank:
    """Equal to every rank."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("fault", ["sinks of the other rank", "a bias of every rank"])
def test_a_wrong_part_of_a_rank_shows_in_the_logits(
    fault: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts()[:2]
    assert error_of(checkpoint, undivided(checkpoint.folder, asked, 37, 2)) < TOLERANCE
    if fault == "a bias of every rank":
        monkeypatch.setattr(joined_experts, "MAIN_RANK", EveryRank())
    else:
        sinks: list[list[torch.Tensor | None]] = []

        def load(*args: Any, **options: Any) -> Any:
            model = load_model(*args, **options)
            assert isinstance(model, DecoderModel)
            sinks.append([layer.attention.heads.sinks_H for layer in model.layers])  # type: ignore[union-attr]
            return changed(model, lambda index, heads: dataclasses.replace(heads, sinks_H=sinks[0][index]))

        monkeypatch.setattr(thread_ranks, "load_model", load)
    assert error_of(checkpoint, undivided(checkpoint.folder, asked, 37, 2)) > WRONG
