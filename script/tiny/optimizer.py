"""Muon for the matrices of the layers, Adam for the rest. Used by the training loop.

Muon (Keller Jordan, 2024) replaces a matrix's momentum by the nearest orthogonal matrix, so that every direction learns
at the same speed. Heads that match content appear several times earlier with it than with Adam alone. It is written
here in float32, because torch's own runs in bfloat16, which is slow on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def orthogonal(gradient: Tensor, steps: int = 5) -> Tensor:
    """Return approximately the nearest orthogonal matrix, by Newton-Schulz iterations with Muon's coefficients."""
    x = gradient / (gradient.norm() + 1e-7)
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Optimizer:
    """Both optimizers over one model; `step` takes the share of the full learning rate."""

    def __init__(self, model: nn.Module, muon_lr: float = 0.01, adam_lr: float = 2e-3, momentum: float = 0.95) -> None:
        named = list(model.named_parameters())
        self._matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        matrix_ids = {id(p) for p in self._matrices}
        self._adam = torch.optim.AdamW(
            [p for _, p in named if id(p) not in matrix_ids], lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._parameters = [p for _, p in named]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        self._muon_lr, self._adam_lr, self._momentum = muon_lr, adam_lr, momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step along the gradients (clipped to norm 1) and clear them. `rate` is between 0 and 1."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * rate
        self._adam.step()
        lr = self._muon_lr * rate
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            assert matrix.grad is not None
            momentum.mul_(self._momentum).add_(matrix.grad)
            direction = orthogonal(matrix.grad + self._momentum * momentum)
            matrix.mul_(1 - 0.02 * lr)
            matrix.add_(direction, alpha=-lr * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
        for parameter in self._parameters:
            parameter.grad = None
