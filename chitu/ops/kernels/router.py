"""The router of a mixture in one launch: logits in float32, scores, groups, the best few, their weights. Its twin is
`routing.route`, with the same choice if scores are equal: of equal ones the first.

Up to `MAX_ROWS` rows, programs divide the experts' logits among themselves, since one multiprocessor would take long to
read the weight. The last one that is done with its rows chooses: each program adds one to a counter behind its stores,
and who finds all others counted reads what they stored. The counters are zero before and after each launch, so no two
launches with the same ones may run at once. For more rows torch multiplies, and a program a row chooses.

Shapes as in `routing.py`. A row of NaN gets places of experts, whatever they are, so nothing behind it reads elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from chitu.ops.interface import Routes
from chitu.ops.routing import Router

MAX_ROWS = 64
"""Most rows whose logits the kernel computes itself."""
FEW_ROWS = 8
"""Most rows that are each computed by programs of their own, without a tile for several."""
TILE = 16
"""Rows and experts of a program's tile above them."""
NO_PLACE = tl.constexpr(1 << 30)


@triton.jit
def _largest(numbers, places):
    """Return the largest number of each row, and the first place that has it."""
    top = tl.max(numbers, 1)
    return top, tl.min(tl.where(numbers == top[:, None], places, NO_PLACE), 1)


@triton.jit
def _in_the_best_groups(
    chosen_by,
    e,
    ROWS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    VOTES: tl.constexpr,
):
    """Return what experts are chosen by, with -inf for those of other groups."""
    of = e // OF_GROUP
    g = tl.arange(0, GROUPS_PAD)[None, :]
    votes = tl.full([ROWS, GROUPS_PAD], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(of == group, chosen_by, -float("inf"))
        vote = tl.zeros([ROWS], tl.float32)
        for _ in tl.static_range(VOTES):
            top, place = _largest(own, e)
            vote += top
            own = tl.where(e == place[:, None], -float("inf"), own)
        votes = tl.where(g == group, vote[:, None], votes)
    is_best = chosen_by != chosen_by
    for _ in tl.static_range(TOP_GROUPS):
        top, best = _largest(votes, g)
        votes = tl.where(g == best[:, None], -float("inf"), votes)
        is_best = is_best | (of == best[:, None])
    return tl.where(is_best, chosen_by, -float("inf"))


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    x_ptr,
    weight_ptr,
    logit_bias_ptr,
    choice_bias_ptr,
    logits_ptr,
    arrived_ptr,
    experts_ptr,
    weights_ptr,
    num_rows,
    scale,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    VOTES: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
):
    """Program (rows, experts): logits of OUT experts for ROWS rows, and the choice of these rows if it is the last one.
    With logits, the choice alone."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_last = True
    if not HAS_LOGITS:
        o = tl.program_id(1) * OUT + tl.arange(0, OUT)
        is_out = o < EXPERTS
        if ROWS == 1:
            products = tl.zeros([OUT, IN], tl.float32)
        else:
            sums = tl.zeros([ROWS, OUT], tl.float32)
        for start in range(0, WIDTH, IN):
            c = start + tl.arange(0, IN)
            is_in = (c < WIDTH)[None, :]
            at = rows.to(tl.int64)[:, None] * WIDTH + c[None, :]
            x = tl.load(x_ptr + at, mask=is_row[:, None] & is_in, other=0.0).to(tl.float32)
            w = tl.load(weight_ptr + o[:, None] * WIDTH + c[None, :], mask=is_out[:, None] & is_in, other=0.0)
            if ROWS == 1:
                products += x * w
            else:
                sums += tl.dot(x, tl.trans(w), input_precision="ieee")
        if ROWS == 1:
            sums = tl.sum(products, 1)[None, :]
        if HAS_LOGIT_BIAS:
            sums += tl.load(logit_bias_ptr + o, mask=is_out, other=0.0)[None, :]
        tl.store(logits_ptr + rows[:, None] * EXPERTS + o[None, :], sums, mask=is_row[:, None] & is_out[None, :])
        tl.debug_barrier()  # all threads have stored before one of them says so
        others = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        is_last = others == tl.num_programs(1) - 1
    if is_last:
        if not HAS_LOGITS:
            tl.store(arrived_ptr + tl.program_id(0), 0)
        e = tl.arange(0, EXPERTS_PAD)[None, :]
        is_expert = is_row[:, None] & (e < EXPERTS)
        # From the cache that multiprocessors share, where the other programs' stores are.
        at = rows.to(tl.int64)[:, None] * EXPERTS + e
        logits = tl.load(logits_ptr + at, mask=is_expert, other=0.0, cache_modifier=".cg")
        if IS_SIGMOID:
            scores = tl.sigmoid(logits)
        else:
            largest = tl.max(tl.where(is_expert, logits, -float("inf")), 1)
            largest = tl.where(is_row, largest, 0.0)
            scores = tl.where(is_expert, tl.exp(logits - largest[:, None]), 0.0)
            scores = scores / tl.where(is_row, tl.sum(scores, 1), 1.0)[:, None]
        chosen_by = scores
        if HAS_CHOICE_BIAS:
            chosen_by += tl.load(choice_bias_ptr + e, mask=e < EXPERTS, other=0.0)
        chosen_by = tl.where(is_expert & (chosen_by == chosen_by), chosen_by, -float("inf"))
        if GROUPS > 1:
            chosen_by = _in_the_best_groups(
                chosen_by, e, ROWS, EXPERTS // GROUPS, GROUPS, GROUPS_PAD, TOP_GROUPS, VOTES
            )
        k = tl.arange(0, TOP_PAD)[None, :]
        experts = tl.zeros([ROWS, TOP_PAD], tl.int32)
        weights = tl.zeros([ROWS, TOP_PAD], tl.float32)
        for at_k in tl.static_range(TOP_K):
            _, place = _largest(chosen_by, e)
            is_place = e == place[:, None]
            weight = tl.sum(tl.where(is_place, scores, 0.0), 1)
            experts = tl.where(k == at_k, place[:, None], experts)
            weights = tl.where(k == at_k, weight[:, None], weights)
            chosen_by = tl.where(is_place, -float("inf"), chosen_by)
        if IS_NORMALISED:
            weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
        to = rows[:, None] * TOP_K + k
        is_chosen = is_row[:, None] & (k < TOP_K)
        tl.store(experts_ptr + to, experts.to(tl.int64), mask=is_chosen)
        tl.store(weights_ptr + to, weights * scale, mask=is_chosen)


def counters(device: torch.device, count: int = MAX_ROWS) -> torch.Tensor:
    """Return counters for launches of which no two run at once."""
    return torch.zeros(max(count, MAX_ROWS), dtype=torch.int32, device=device)


def tile_for(num_rows: int, num_experts: int, num_multiprocessors: int) -> tuple[int, int, int]:
    """Return rows, experts and inputs of a program: so many experts that all multiprocessors have some to read."""
    if num_rows > FEW_ROWS:
        return TILE, TILE, 64
    return 1, triton.next_power_of_2(triton.cdiv(num_experts, num_multiprocessors)), 1024


def route(x_TD: torch.Tensor, router: Router, arrived: torch.Tensor, num_multiprocessors: int) -> Routes:
    """Return what `routing.route` does. `arrived`: from `counters`."""
    num_rows, (num_experts, width), rule = x_TD.shape[0], router.weight_ED.shape, router.rule
    experts_TA = torch.empty(num_rows, rule.top_k, dtype=torch.int64, device=x_TD.device)
    weights_TA = torch.empty(num_rows, rule.top_k, dtype=torch.float32, device=x_TD.device)
    rows, out, inputs = tile_for(num_rows, num_experts, num_multiprocessors)
    if num_rows > MAX_ROWS:
        rows, logits_TE = 1, F.linear(x_TD.float(), router.weight_ED, router.logit_bias_E)
    else:
        logits_TE = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x_TD.device)
    blocks = 1 if num_rows > MAX_ROWS else triton.cdiv(num_experts, out)
    kernel: Any = _route[(triton.cdiv(num_rows, rows), blocks)]
    kernel(
        x_TD.contiguous(),
        router.weight_ED,
        router.logit_bias_E if router.logit_bias_E is not None else router.weight_ED,
        router.choice_bias_E if router.choice_bias_E is not None else router.weight_ED,
        logits_TE,
        arrived,
        experts_TA,
        weights_TA,
        num_rows,
        rule.scale,
        WIDTH=width,
        EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        ROWS=rows,
        OUT=out,
        IN=inputs,
        TOP_K=rule.top_k,
        TOP_PAD=triton.next_power_of_2(rule.top_k),
        GROUPS=rule.num_groups,
        GROUPS_PAD=triton.next_power_of_2(rule.num_groups),
        TOP_GROUPS=rule.top_groups,
        VOTES=rule.group_votes,
        IS_SIGMOID=rule.scoring == "sigmoid",
        IS_NORMALISED=rule.is_normalised,
        HAS_LOGIT_BIAS=router.logit_bias_E is not None,
        HAS_CHOICE_BIAS=router.choice_bias_E is not None,
        HAS_LOGITS=num_rows > MAX_ROWS,
        num_warps=4,
    )
    return Routes(experts_TA, weights_TA)
