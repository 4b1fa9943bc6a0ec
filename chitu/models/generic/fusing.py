"""Our own kernels in the modules of a generic model: linear layers, gated MLPs and RMS norms, where they compute the
same.

Owns which modules are replaced, and their weights from then on: a prepared weight takes the place of the parameter, one
matrix after another. A norm or an MLP is known by what it computes from random numbers, not by its name; what is not
known stays as it is. Only for float32 on a CPU, where our products of few rows are much faster than the library's.
Called while the model is built, between the two sides of the self-check (`check.py`); the modules run on the step
thread. Hooks of ranks and of LoRA adapters stay around what they are around.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from chitu.models.generic.lora import AdaptedModules
from chitu.ops.interface import Ops
from chitu.ops.native import NativeOps, PackedWeight, unpack

EPSILONS = ("variance_epsilon", "eps")
"""Attributes of norms that hold what is added to the mean square."""
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-5
NUM_RANDOM = 5
"""Rows of random numbers."""

logger = logging.getLogger(__name__)


def fuse(modules: Collection[nn.Module], ops: Ops | None, adapters: AdaptedModules | None = None) -> None:
    """Let these modules compute with our kernels. `adapters`: what adds to the results of linear layers in some steps;
    None if nothing does."""
    if not isinstance(ops, NativeOps):
        return
    own, uses = ops.with_new_results(), Counter(id(each) for part in modules for each in part.parameters(recurse=False))
    linears = [part for part in modules if type(part) is nn.Linear and _is_here(part.weight)]
    left = {part for part in linears if uses[id(part.weight)] == 1}  # not tied to the embedding
    num_fused = Counter[str]()
    for part in modules:
        norm = _rms_norm(part, own)
        if norm is not None:
            vars(part)["forward"] = norm
            num_fused["norms"] += 1
        children: list[Any] = [getattr(part, name, None) for name in GATED_MLP]
        gate, up, down = children
        if not {gate, up} <= left or not isinstance(down, nn.Module):
            continue
        if _is_gated_mlp(part, gate, up, down):
            bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))
            both = own.prepare_gate_up(torch.cat((gate.weight, up.weight)), bias)
            vars(part)["forward"] = _gated_mlp(own, both, (gate, up), down, adapters)
            for half, linear in enumerate((gate, up)):
                PreparedLinear.become(linear, own, both, half)
                left.remove(linear)
            num_fused["gated MLPs"] += 1
    for linear in left:
        PreparedLinear.become(linear, own, own.prepare(linear.weight, linear.bias))
        num_fused["linear layers"] += 1
    logger.info("own kernels compute %s", ", ".join(f"{count} {kind}" for kind, count in num_fused.items()) or "none")


class PreparedLinear(nn.Linear):
    """A linear layer whose weight is a prepared one."""

    _ops: NativeOps
    _prepared: PackedWeight
    _half: int | None

    @classmethod
    def become(cls, linear: Any, ops: NativeOps, prepared: PackedWeight, half: int | None = None) -> None:
        """Make a linear layer one of these; its own weight goes. With `half` it is the gate (0) or up (1) of a fused
        weight, whose MLP computes without it."""
        del linear.weight
        linear.__class__ = cls
        linear._ops, linear._prepared, linear._half = ops, prepared, half

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return the weight as it was, for code that reads it without calling the layer."""
        return unpack(self._prepared, self._half)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._half is not None:
            return F.linear(input, self.weight, self.bias)
        # A rank's part of a layer has fewer inputs and outputs than the layer says.
        out = self._ops.linear(_rows(input, self._prepared.in_features), self._prepared)
        return out.view(*input.shape[:-1], self._prepared.out_features)


def _is_here(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return x as `[T, width]`, as the kernels read it."""
    if x.shape[-1] != width or x.dtype != torch.float32:
        raise TypeError(f"a layer for {width} numbers of float32 got {x.shape[-1]} of {x.dtype}")
    return x.reshape(-1, width)


def _random(width: int) -> torch.Tensor:
    """Return rows `[1, T, width]`, some so small that an epsilon shows."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, NUM_RANDOM, width, generator=generator) * torch.logspace(-3, 1, NUM_RANDOM).unsqueeze(1)


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _is_gated_mlp(mlp: nn.Module, gate: nn.Linear, up: nn.Linear, down: nn.Module) -> bool:
    """Return whether a module computes `down(silu(gate) * up)`."""
    is_alike = gate.weight.shape == up.weight.shape and (gate.bias is None) == (up.bias is None)
    if not is_alike or not _takes_one(mlp):
        return False
    x = _random(gate.weight.shape[1])
    mine, theirs = down(F.silu(gate(x)) * up(x)), mlp(x)
    return bool((mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max())


def _gated_mlp(
    ops: NativeOps,
    both: PackedWeight,
    halves: tuple[nn.Module, nn.Module],
    down: nn.Module,
    adapters: AdaptedModules | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x_TI = _rows(x, both.in_features)
        if adapters is not None and adapters.adapted:
            gate_TI, up_TI = ops.gate_and_up(x_TI, both).chunk(2, dim=-1)
            for half, part_TI in zip(halves, (gate_TI, up_TI), strict=True):
                adapters.add_to(half, x_TI, part_TI)
            inner_TI = F.silu(gate_TI).mul_(up_TI)
        else:
            inner_TI = ops.gate_up(x_TI, both)
        out: torch.Tensor = down(inner_TI.view(*x.shape[:-1], both.out_features))
        return out

    return forward


def _rms_norm(norm: nn.Module, ops: NativeOps) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return our form of a module that is an RMS norm over its last dimension; None if it is none."""
    tensors = dict(norm.named_parameters(recurse=False))
    eps = next((vars(norm)[name] for name in EPSILONS if isinstance(vars(norm).get(name), float)), None)
    weight = tensors.pop("weight", None)
    if eps is None or weight is None or tensors or weight.dim() != 1 or not _is_here(weight) or not _takes_one(norm):
        return None
    width = weight.shape[0]
    x = _random(width)
    theirs = norm(x)[0]
    for factors in (weight, weight + 1):  # the second is Gemma's
        if torch.allclose(ops.rms_norm(x[0], factors, eps), theirs, rtol=TOLERANCE, atol=0):
            return lambda x: ops.rms_norm(_rows(x, width), factors, eps).view(x.shape)
    return None
