"""LoRA adapters of a model whose modules are those of transformers: behind each adapted linear module, a hook adds to
the rows of a step what their adapters add. A step without such rows passes the hooks by. Step thread only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chitu.errors import Internal, UnsupportedModel
from chitu.models.adapters import AdapterSpec
from chitu.models.lora import AdapterFiles, Cut, LowRank
from chitu.ops.interface import AdapterRows, Batch


class AdaptedModules:
    """Hooks in the modules of a decoder. `prefix`: of its modules' names in the whole model, with a dot."""

    def __init__(
        self, decoder: nn.Module, prefix: str, specs: Sequence[AdapterSpec], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Read the adapters. Raises UnsupportedModel for a layer that is no linear module of this decoder, ConfigError
        as `AdapterFiles` does."""
        self.adapted: tuple[AdapterRows, ...] = ()
        """Of the step that is computed."""
        self.num_rows = 0
        modules = {f"{prefix}{name}": part for name, part in decoder.named_modules() if isinstance(part, nn.Linear)}
        found: dict[str, dict[int, LowRank]] = {}
        for number, spec in enumerate(specs, 1):
            with AdapterFiles(spec, dtype, device) as files:
                for layer in spec.layers:
                    if layer not in modules:
                        raise UnsupportedModel(f"{spec.key}: {layer} is no linear module of this model")
                    low_rank = files.read([Cut(layer)])
                    assert low_rank is not None  # the layer is adapted
                    found.setdefault(layer, {})[number] = low_rank
        for layer, low_ranks in found.items():
            modules[layer].register_forward_hook(_Hook(self, low_ranks))

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Let the batch's rows have their adapters until the block ends."""
        self.adapted, self.num_rows = batch.adapters, batch.slots_T.shape[0]
        try:
            yield
        finally:
            self.adapted = ()


class _Hook:
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
