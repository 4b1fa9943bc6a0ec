"""Mixtures of experts: routing follows its rule, and every implementation gives the same result."""

from __future__ import annotations

import pytest
import torch
from support.reference_ops import ReferenceOps

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config_parts import read_expert_spec
from chitu.ops.interface import Ops, Routes
from chitu.ops.native import NativeOps, load_library
from chitu.ops.routing import Router, route, rows_by_expert
from chitu.ops.routing_rule import RoutingRule
from chitu.ops.torch_ops import TorchOps, stacked

REFERENCE = ReferenceOps()
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
}


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


@pytest.fixture(params=["torch", "native", "triton"])
def ops(request) -> Ops:
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


def random_experts(num_experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_experts, 2 * inner, hidden) / 4, torch.randn(num_experts, hidden, inner) / 4


def random_routes(rows: int, num_experts: int, top_k: int) -> Routes:
    router = Router(torch.randn(num_experts, 12), RoutingRule(top_k))
    return route(torch.randn(rows, 12), router)


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k"), [(1, 8, 3), (2, 3, 3), (37, 5, 2), (90, 4, 2), (150, 4, 2), (11, 40, 1)], ids=str
)
def test_a_mixture_equals_the_reference(ops, rows, num_experts, top_k):
    """Covers fewer rows than experts and more, experts without a row, full tiles and partial ones."""
    hidden, inner = 48, 40
    torch.manual_seed(rows)
    gate_up, down = random_experts(num_experts, hidden, inner)
    x, routes = torch.randn(rows, hidden), random_routes(rows, num_experts, top_k)
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(gate_up, down))
    found = ops.mixture(x, routes, ops.prepare_experts(gate_up, down))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_width_that_no_block_divides(ops):
    torch.manual_seed(1)
    gate_up, down = random_experts(3, 70, 33)
    x, routes = torch.randn(9, 70), random_routes(9, 3, 2)
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(gate_up, down))
    found = ops.mixture(x, routes, ops.prepare_experts(gate_up, down))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_all_rows_may_choose_the_same_expert(ops):
    torch.manual_seed(2)
    gate_up, down = random_experts(6, 32, 24)
    x = torch.randn(70, 32)
    routes = Routes(torch.full((70, 1), 4), torch.rand(70, 1))
    expected = REFERENCE.mixture(x, routes, REFERENCE.prepare_experts(gate_up, down))
    found = ops.mixture(x, routes, ops.prepare_experts(gate_up, down))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_row_is_computed_alike_in_any_company(ops):
    """Other rows, same size class: the sums have the same order."""
    torch.manual_seed(3)
    gate_up, down = random_experts(8, 64, 32)
    experts = ops.prepare_experts(gate_up, down)
    x, routes = torch.randn(12, 64), random_routes(12, 8, 3)
    whole = ops.mixture(x, routes, experts)
    part = ops.mixture(x[5:7], Routes(routes.experts_TA[5:7], routes.weights_TA[5:7]), experts)
    torch.testing.assert_close(whole[5:7], part, rtol=2e-6, atol=2e-6)


@pytest.fixture
def unwritten(monkeypatch):
    """Fill new memory of floats with NaN."""
    original = torch.Tensor.new_empty

    def new_empty(self, *size, **kind):
        found = original(self, *size, **kind)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.parametrize("waits", [True, False])
def test_pairs_of_nobody_have_no_part_and_what_they_would_read_is_not_read(ops, waits, unwritten):
    """As on a rank that has experts 2 to 4 of 7, for rows of which some only pad a batch."""
    torch.manual_seed(5)
    rows, first, num_experts = 21, 2, 3
    gate_up, down = random_experts(7, 48, 40)
    x, routes = torch.randn(rows, 48), random_routes(rows, 7, 3)
    place_TA = routes.experts_TA - first
    is_own_TA = (place_TA >= 0) & (place_TA < num_experts)
    is_own_TA[[4, 20]] = False
    expected = REFERENCE.mixture(
        x, Routes(routes.experts_TA, routes.weights_TA * is_own_TA), REFERENCE.prepare_experts(gate_up, down)
    )
    x[[4, 20]] = float("nan")
    own = Routes(place_TA.masked_fill(~is_own_TA, num_experts), routes.weights_TA * is_own_TA)
    experts = ops.prepare_experts(gate_up[2:5], down[2:5])
    if waits or not isinstance(ops, TorchOps):
        found = ops.mixture(x, own, experts)
    else:
        found = ops._mixture_without_a_wait(x, own, stacked(experts))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert is_own_TA.any(1).sum() > 10 and not found[[4, 20]].any()


def test_without_a_wait_for_the_device_the_result_is_the_same():
    torch.manual_seed(4)
    ops = TorchOps()
    experts = ops.prepare_experts(*random_experts(6, 32, 24))
    x, routes = torch.randn(13, 32), random_routes(13, 6, 2)
    found = ops._mixture_without_a_wait(x, routes, stacked(experts))
    torch.testing.assert_close(found, ops.mixture(x, routes, experts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile_rows", [16, 64, 128])
def test_sorted_pairs_and_tiles_cover_every_pair_once(tile_rows):
    pytest.importorskip("triton", reason="triton is in the dev extra")
    from chitu.ops.kernels.moe import max_tiles, sort_pairs

    for rows, num_experts, top_k in ((1, 9, 2), (50, 7, 3), (700, 3, 2)):
        torch.manual_seed(rows)
        routes = random_routes(rows, num_experts, top_k)
        order, tiles = sort_pairs(routes.experts_TA, num_experts, tile_rows)
        expected = list(rows_by_expert(routes, num_experts))
        assert order.tolist() == torch.cat([pairs for _, pairs in expected]).tolist()
        used = [tile for tile in tiles.tolist() if tile[2]]
        place = 0
        for expert, pairs in expected:
            for first in range(0, len(pairs), tile_rows):
                assert used.pop(0) == [expert, place, min(tile_rows, len(pairs) - first)]
                place += min(tile_rows, len(pairs) - first)
        assert not used
        assert len(tiles) == max_tiles(rows * top_k, num_experts, tile_rows)


def test_weights_are_softmax_scores_normalised_or_not():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    plain = route(logits, Router(torch.eye(4), RoutingRule(2, is_normalised=False)))
    assert plain.experts_TA.tolist() == [[1, 3]]
    torch.testing.assert_close(plain.weights_TA, logits.softmax(-1)[:, [1, 3]])
    scaled = route(logits, Router(torch.eye(4), RoutingRule(2, scale=2.5)))
    torch.testing.assert_close(scaled.weights_TA.sum(), torch.tensor(2.5))


def test_a_bias_counts_for_the_choice_and_not_for_the_weight():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0])
    chosen = route(logits, Router(torch.eye(4), RoutingRule(2, scoring="sigmoid", is_normalised=False), bias))
    assert chosen.experts_TA.tolist() == [[0, 1]]
    torch.testing.assert_close(chosen.weights_TA, logits.sigmoid()[:, [0, 1]])


def test_experts_come_from_the_best_groups_only():
    """Groups are ranked by their best expert or by their best two; the best expert overall may be outside the chosen
    groups."""
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.0, 1.0, 1.0]])
    by_best = route(logits, Router(torch.eye(6), RoutingRule(2, num_groups=3, group_votes=1)))
    assert by_best.experts_TA.tolist() == [[0, 1]]
    by_two = route(logits, Router(torch.eye(6), RoutingRule(2, scoring="sigmoid", num_groups=3, group_votes=2)))
    assert sorted(by_two.experts_TA[0].tolist()) == [2, 3]


def test_deepseek_settings_are_read_by_their_version():
    spec = read_expert_spec(DEEPSEEK, "DeepseekV3ForCausalLM", "m")
    assert spec is not None
    assert spec.rule == RoutingRule(2, 4, 2, group_votes=2, scoring="sigmoid", scale=2.5) and spec.has_choice_bias
    assert spec.layers == {1, 2, 3}
    older = "DeepseekV2ForCausalLM"
    spec = read_expert_spec(DEEPSEEK | {"topk_method": "greedy"}, older, "m")
    assert spec is not None
    assert spec.rule == RoutingRule(2, scale=2.5, is_normalised=False) and not spec.has_choice_bias
    with pytest.raises(UnsupportedModel, match="topk_method 'noaux_tc'"):
        read_expert_spec(DEEPSEEK | {"topk_method": "noaux_tc"}, older, "m")


def test_a_choice_that_cannot_be_made_is_refused():
    for changes in ({"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 5}):
        with pytest.raises(ConfigError):
            read_expert_spec(DEEPSEEK | changes, "DeepseekV3ForCausalLM", "m")
