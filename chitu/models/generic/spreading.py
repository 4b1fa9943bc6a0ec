"""A rank's own experts of a generic model, if experts are spread over a group: which tensors are cut, and the exchange
in the place of what the library's modules compute.

A module of experts is known by its form: it has `num_experts`, its parameters are stacks of as many, and it is called
with rows, their experts and the weights of these. Called while the model is built; its hooks run on the step thread.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.layers import Compute, Spread
from chitu.ops.interface import Routes

NUM_ARGUMENTS = 3


class SpreadExperts:
    def __init__(self, decoder: nn.Module, prefix: str, spread: Spread, architecture: str) -> None:
        """Find the modules. `prefix`: of the decoder in the whole model. Raises UnsupportedModel if there is none, or
        one of another form."""
        self._prefix, self._spread = prefix, spread
        self.is_alone = False
        """Whether this rank computes its own experts' part alone."""
        self._modules: dict[str, Any] = {}
        strange = [name for name, module in decoder.named_modules() if name.endswith("experts") and _stacks(module)]
        for name, module in decoder.named_modules():
            if _is_experts(module):
                self._modules[name] = module
        if not self._modules or set(strange) - set(self._modules):
            raise UnsupportedModel(
                f"experts is spread: {architecture} has no experts that transformers calls with rows and their routes"
            )
        self._num_experts = {name: int(module.num_experts) for name, module in self._modules.items()}
        for name, count in self._num_experts.items():
            if not spread.own(count):
                raise ConfigError(f"experts is spread: {name} has {count} experts, fewer than the group has ranks")
        self._lent: dict[str, tuple[torch.Tensor, Routes]] = {}
        """No rows, in the form in which each module gets rows."""
        self._computes: dict[str, Compute] = {}

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the model."""
        module = name.removeprefix(self._prefix).rpartition(".")[0]
        if module not in self._modules:
            return tensor
        own = self._spread.own(self._num_experts[module])
        return tensor[own.start : own.stop].contiguous()

    def bind(self) -> None:
        """Let the modules, which have their own experts by now, take part in the exchange."""
        for name, module in self._modules.items():
            module.num_experts = len(self._spread.own(self._num_experts[name]))
            vars(module)["forward"] = self._exchanging(name, module.forward)

    def _exchanging(self, name: str, own_forward: Any) -> Any:
        num_experts, spread = self._num_experts[name], self._spread

        def compute(x_TD: torch.Tensor, routes: Routes) -> torch.Tensor:
            out: torch.Tensor = own_forward(x_TD, routes.experts_TA, routes.weights_TA)
            return out

        def forward(x_TD: torch.Tensor, experts_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
            routes = Routes(experts_TA, weights_TA)
            if self.is_alone:
                self._lent[name] = x_TD[:0].clone(), Routes(experts_TA[:0].clone(), weights_TA[:0].clone())
                return spread.own_part(x_TD, routes, num_experts, compute)
            return spread.mixture(x_TD, routes, num_experts, compute)

        self._computes[name] = compute
        return forward

    def lend(self) -> None:
        """Compute this rank's experts for the rows of others, in the order of the layers."""
        for name, (nothing_0D, routes) in self._lent.items():
            self._spread.mixture(nothing_0D, routes, self._num_experts[name], self._computes[name])


def _stacks(module: nn.Module) -> bool:
    """Return whether a module has joined weights."""
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _is_experts(module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not _stacks(module) or any(each.shape[0] != count for each in parameters):
        return False
    return len(inspect.signature(module.forward).parameters) == NUM_ARGUMENTS
