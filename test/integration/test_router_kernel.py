"""The router of a mixture in one launch has the choice and the weights of its twin, `routing.route`, for all rules that
models have, and the same choice of experts that are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chitu.ops.routing import Router, first_of_largest, route
from chitu.ops.routing_rule import RoutingRule

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.moe import columns_for, tile_rows_for
from chitu.ops.kernels.router import MAX_ROWS, counters, tile_for
from chitu.ops.kernels.router import route as route_at_once
from chitu.ops.triton_ops import TritonOps

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

RULES = {
    "Qwen3-MoE": (RoutingRule(3), False, False),
    "not normalised": (RoutingRule(3, is_normalised=False), False, False),
    "gpt-oss": (RoutingRule(4), True, False),
    "DeepSeek-V2": (RoutingRule(3, 4, 2, is_normalised=False, scale=16.0), False, False),
    "DeepSeek-V3": (RoutingRule(4, 4, 2, 2, "sigmoid", scale=2.5), False, True),
    "GLM-4.7": (RoutingRule(2, scoring="sigmoid", scale=1.8), False, True),
    "one": (RoutingRule(1), False, False),
    "all of a group": (RoutingRule(5, 4, 1, 2, "sigmoid"), False, True),
}
"""Rule, and whether logits and the choice have a bias."""


def router_of(name: str, num_experts: int, width: int, *, is_coarse: bool = False) -> Router:
    """Return a router with random numbers. `is_coarse`: of few values, so that many scores are equal."""
    rule, has_logit_bias, has_choice_bias = RULES[name]
    weight, bias = torch.randn(num_experts, width) / 4, torch.randn(2, num_experts) / 4
    if is_coarse:
        weight, bias = torch.randint(-1, 2, weight.shape).float(), torch.randint(0, 2, bias.shape).float()
    return Router(weight, rule, bias[0] if has_choice_bias else None, bias[1] if has_logit_bias else None)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40, MAX_ROWS, MAX_ROWS + 7])
@pytest.mark.parametrize("name", RULES)
def test_choice_and_weights_are_those_of_the_twin(name: str, rows: int) -> None:
    """20 experts and 5 a group: no power of two. The counters are zero again."""
    torch.manual_seed(rows)
    router, x, arrived = router_of(name, 20, 70), torch.randn(rows, 70), counters(torch.device("cpu"))
    found, expected = route_at_once(x, router, arrived, 132), route(x, router)
    assert torch.equal(found.experts_TA, expected.experts_TA) and not arrived.any()
    torch.testing.assert_close(found.weights_TA, expected.weights_TA, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_of_equal_experts_and_groups_the_first_are_chosen(name: str) -> None:
    torch.manual_seed(5)
    router, x = router_of(name, 20, 3, is_coarse=True), torch.randint(-1, 2, (33, 3)).float()
    expected = route(x, router)
    scores = x @ router.weight_ED.T + (router.logit_bias_E if router.logit_bias_E is not None else 0.0)
    assert all(len(set(row.tolist())) < 12 for row in scores), "many are equal"
    for num_multiprocessors in (4, 132):
        found = route_at_once(x, router, counters(x.device), num_multiprocessors)
        assert torch.equal(found.experts_TA, expected.experts_TA)


def test_the_twin_takes_the_first_of_equal_ones_as_a_stable_sort_does() -> None:
    torch.manual_seed(1)
    for numbers in (torch.randint(-2, 3, (50, 12)) / 2, torch.tensor([[0.0, -0.0, -torch.inf, 1.0] * 3]).float()):
        order = numbers.sort(dim=-1, descending=True, stable=True).indices
        assert all(torch.equal(first_of_largest(numbers, count), order[:, :count]) for count in (1, 3, 12))


def test_rows_that_are_not_finite_name_experts_that_are_there() -> None:
    """What reads the experts' weights by these numbers must not read elsewhere."""
    torch.manual_seed(2)
    for name in RULES:
        x = torch.randn(9, 16)
        x[4] = float("nan")
        x[6] = float("inf")
        router = router_of(name, 20, 16)
        found = route_at_once(x, router, counters(x.device), 132)
        assert ((found.experts_TA >= 0) & (found.experts_TA < 20)).all()
        sound = [0, 1, 2, 3, 5, 7, 8]
        assert torch.equal(found.experts_TA[sound], route(x[sound], router).experts_TA)


def test_operations_of_a_gpu_route_as_others_do() -> None:
    torch.manual_seed(3)
    router, x = router_of("DeepSeek-V3", 20, 48), torch.randn(11, 48)
    ops = TritonOps(132)
    for _ in range(2):
        assert torch.equal(ops.route(x, router).experts_TA, route(x, router).experts_TA)


def test_tiles_grow_with_the_pairs_of_an_expert_and_few_tiles_are_cut_narrower() -> None:
    experts = 128
    assert [tile_rows_for(pairs, experts) for pairs in (8, 16 * 128, 16 * 128 + 1, 64 * 128, 64 * 128 + 1)] == [
        *(16, 16, 64, 64, 128),
    ]
    assert tile_rows_for(1 << 20, experts, is_scaled=True) == 64 and tile_rows_for(1 << 20, experts, narrow=True) == 16
    # Qwen3-30B-A3B, 768 inner numbers: at batch 1, 8 experts are read; 96 programs would be fewer than multiprocessors.
    programs = [8 * -(-768 // columns_for(768, 16, 8, 132, is_gated=True)), 64 * -(-768 // 64)]
    assert programs[0] == 384 and columns_for(768, 16, 64, 132, is_gated=True) == 64
    assert [columns_for(768, 128, 128, 132, is_gated=gated) for gated in (True, False)] == [64, 128]
    assert (
        tile_for(1, 128, 132)[:2] == (1, 1) and tile_for(1, 256, 132)[:2] == (1, 2) and tile_for(9, 256, 132)[0] == 16
    )


COUNTED = """
import json, sys
import torch
from types import SimpleNamespace
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from torch.utils._python_dispatch import TorchDispatchMode
from chitu.ops.routing import Router, route
from chitu.ops.routing_rule import RoutingRule
from chitu.ops.triton_ops import TritonOps

target = GPUTarget("cuda", 90, 32)
facts = {"get_current_device": lambda: 0, "get_current_stream": lambda d: 0, "get_current_target": lambda: target}
driver.set_active(SimpleNamespace(**facts))
counts = {}

def note(*, key, fn, **_):
    name = fn.name.rpartition(".")[2]
    counts[name] = counts.get(name, 0) + 1
    return True

triton.knobs.runtime.jit_cache_hook = note
FREE = (
    "empty", "new_empty", "reshape", "unsqueeze", "expand", "slice", "select", "transpose", "split", "detach", "t.",
)

class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not name.startswith(FREE) and "view" not in name:
            counts["torch"] = counts.get("torch", 0) + 1
        return func(*args, **(kwargs or {}))

ops, found = TritonOps(132), {}
experts = ops.prepare_experts(torch.randn(8, 64, 32).bfloat16(), torch.randn(8, 32, 32).bfloat16())
router = Router(torch.randn(8, 32), RoutingRule(2, 4, 2, 2, "sigmoid", scale=2.5), torch.randn(8))
for rows in (1, 64, 65):
    x = torch.randn(rows, 32).bfloat16()
    counts.clear()
    with Count():
        routes = ops.route(x, router)
        ops.mixture(x, routes, experts)
    found[rows] = dict(counts)
counts.clear()
with Count():
    route(x, router)
found["twin"] = dict(counts)
print(json.dumps(found))
"""


def test_a_mixture_is_five_launches_of_which_the_router_is_one(tmp_path: Path) -> None:
    """By a process without the interpreter, in which nothing is compiled and torch's calls are counted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", COUNTED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    mixture = {"_sort_pairs": 1, "_grouped_product": 2, "_weighted_sum": 1}
    assert found["1"] == found["64"] == {"_route": 1, **mixture}
    assert found["65"] == {"_route": 1, **mixture, "torch": 2}, "more rows: to float32, and their product"
    assert found["twin"]["torch"] > 12
