"""LoRA adapters of a model whose modules are those of transformers: behind each adapted linear module, a hook adds to
the rows of a step what their adapters add. A step without such rows passes the hooks by. Step thread only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chitu.errors import Internal, UnsupportedModel
from chitu.models.adapters import AdapterSpec
from chitu.models.lora import AdapterFiles, Cut, LowRank
from chitu.ops.interface import AdapterRows, Batch


class AdaptedModules:
    """Hooks in the modules of a decoder, and the adapters by their numbers. `prefix`: of the modules' names in the
    whole model, with a dot. Construct it before modules are replaced (`fusing.py`)."""

    def __init__(self, decoder: nn.Module, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        self.adapted: tuple[AdapterRows, ...] = ()
        """Of the step that is computed."""
        self.num_rows = 0
        self._dtype, self.device = dtype, device
        self._modules = {
            f"{prefix}{name}": part for name, part in decoder.named_modules() if isinstance(part, nn.Linear)
        }
        self._layers: dict[str, dict[int, LowRank]] = {}
        """What each adapter adds to the result of a layer that has a hook."""

    @property
    def has_any(self) -> bool:
        return any(self._layers.values())

    def read(self, spec: AdapterSpec) -> Mapping[str, LowRank]:
        """Read an adapter into host memory, by layer. Any thread. Raises UnsupportedModel for a layer that is no linear
        module of this decoder, ConfigError as `AdapterFiles` does."""
        found = {}
        with torch.inference_mode(), AdapterFiles(spec, self._dtype, torch.device("cpu")) as files:
            for layer in spec.layers:
                if layer not in self._modules:
                    raise UnsupportedModel(f"{spec.key}: {layer} is no linear module of this model")
                low_rank = files.read([Cut(layer)])
                assert low_rank is not None  # the layer is adapted
                found[layer] = low_rank
        return found

    def put(self, number: int, adapter: Mapping[str, LowRank]) -> None:
        """Compute with what was read. No step is in flight."""
        for layer, low_rank in adapter.items():
            if layer not in self._layers:
                module, self._layers[layer] = self._modules[layer], {}
                module.register_forward_hook(AdapterHook(self, self._layers[layer]))
            self._layers[layer][number] = low_rank.on(self.device)

    def drop(self, number: int) -> None:
        """Give back the memory of an adapter, which no slot has."""
        for low_ranks in self._layers.values():
            low_ranks.pop(number, None)

    def take_over(self, other: AdaptedModules) -> None:
        """Compute with the adapters of a model of the same kind, which this one replaces."""
        for layer, low_ranks in other._layers.items():
            for number, low_rank in low_ranks.items():
                self.put(number, {layer: low_rank})

    def add_to(self, module: nn.Module, x_TI: torch.Tensor, out_TO: torch.Tensor) -> None:
        """Add to a result of a module that was computed without calling it, in place."""
        for hook in module._forward_hooks.values():
            if isinstance(hook, AdapterHook):
                hook(module, (x_TI,), out_TO)

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Let the batch's rows have their adapters until the block ends."""
        self.adapted, self.num_rows = batch.adapters, batch.slots_T.shape[0]
        try:
            yield
        finally:
            self.adapted = ()


class AdapterHook:
    def __init__(self, modules: AdaptedModules, low_ranks: dict[int, LowRank]) -> None:
        self._modules, self._low_ranks = modules, low_ranks

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Add to the output, in place. It has all rows of the step: `[1, T, O]`, or `[T, O]`."""
        for number, rows in self._modules.adapted:
            if number in self._low_ranks:
                x_TI, out_TO = inputs[0].flatten(0, -2), output.flatten(0, -2)
                if x_TI.shape[0] != self._modules.num_rows:
                    raise Internal(f"an adapted module gets {x_TI.shape[0]} rows of {self._modules.num_rows}")
                self._low_ranks[number].add(x_TI, out_TO, rows)
        return output
