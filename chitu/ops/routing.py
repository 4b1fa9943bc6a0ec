"""Expert routing: softmax or sigmoid scores, groups, the best few. Does not wait for a GPU. Also the rows of each
expert, for implementations that iterate over experts.

Shapes: T rows, E experts, A experts of a row, R = T A pairs of a row and one of its experts (row-major), G groups.
Called by the layers and by the operations, on the step thread. Source: DeepSeek-V3, section 2.1.2; Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chitu.ops.interface import Routes
from chitu.ops.routing_rule import ClampedGate, RoutingRule


@dataclass(frozen=True, slots=True)
class Router:
    """Weights and rule of a layer's routing."""

    weight_ED: torch.Tensor
    """Weight of the logits, float32, because precision decides near-ties."""
    rule: RoutingRule
    choice_bias_E: torch.Tensor | None = None
    """Bias added to the scores only for the choice, float32."""
    logit_bias_E: torch.Tensor | None = None
    """Bias of the logits, float32."""


def route(x_TD: torch.Tensor, router: Router) -> Routes:
    """Return the experts of each row, best first, and their weights."""
    rule, logits_TE = router.rule, F.linear(x_TD.float(), router.weight_ED, router.logit_bias_E)
    scores_TE = logits_TE.sigmoid() if rule.scoring == "sigmoid" else logits_TE.softmax(-1)
    chosen_by_TE = scores_TE if router.choice_bias_E is None else scores_TE + router.choice_bias_E
    if rule.num_groups > 1:
        chosen_by_TE = _within_the_best_groups(chosen_by_TE, rule)
    experts_TA = first_of_largest(chosen_by_TE, rule.top_k)
    weights_TA = scores_TE.gather(1, experts_TA)
    if rule.is_normalised:
        # 1e-20 prevents 0 / 0 and does not change any other sum.
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    return Routes(experts_TA, weights_TA * rule.scale)


def _within_the_best_groups(scores_TE: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    groups_TGE = scores_TE.view(scores_TE.shape[0], rule.num_groups, -1)
    votes_TG = groups_TGE.topk(rule.group_votes, dim=-1).values.sum(-1)
    best_TG = torch.zeros_like(votes_TG, dtype=torch.bool)
    best_TG.scatter_(1, first_of_largest(votes_TG, rule.top_groups), True)
    return groups_TGE.masked_fill(~best_TG.unsqueeze(-1), -float("inf")).flatten(1)


def first_of_largest(numbers_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest numbers of each row, float32, best first, and of equal ones the first. Which of
    them torch's `topk` takes is not defined, and differs by device."""
    if numbers_TE.device.type == "cpu":
        found_TA = numbers_TE.topk(min(count + 1, numbers_TE.shape[1]), dim=-1)
        if not bool((found_TA.values[:, 1:] == found_TA.values[:, :-1]).any()):
            return found_TA.indices[:, :count]
    bits_TE = (numbers_TE + 0.0).view(torch.int32)  # 0.0 in place of -0.0
    rank_TE = (bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)).long() << 32
    return (rank_TE - torch.arange(numbers_TE.shape[1], device=numbers_TE.device)).topk(count, dim=-1).indices


def rows_by_expert(routes: Routes, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each expert with rows and its pairs (indices of `experts_TA.flatten()`, rising); at last `num_experts` with
    the pairs of nobody, if there are any. Waits for the device."""
    expert_R = routes.experts_TA.flatten()
    order_R = expert_R.argsort(stable=True)
    start = 0
    for expert, count in enumerate(torch.bincount(expert_R, minlength=num_experts).tolist()):
        if count:
            yield expert, order_R[start : start + count]
        start += count


def weighted_sum(y_RD: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return `[T, D]`: the weighted results of each row's pairs, added in the order of the row's experts."""
    y_TAD = y_RD.view(*routes.experts_TA.shape, -1).float()
    return (y_TAD * routes.weights_TA.unsqueeze(-1)).sum(1).to(y_RD.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, clamp: ClampedGate | None) -> torch.Tensor:
    """Return what a gated MLP projects down. May overwrite its arguments."""
    if clamp is None:
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return torch.sigmoid(gate * clamp.alpha).mul_(gate).mul_(up + 1)
