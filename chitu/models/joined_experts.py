"""Builds the mixture of checkpoints that have all experts of a layer in one tensor, as gpt-oss has: `[E, inputs,
outputs]`, rows of gate and up in turn, with biases, and a router that has one. Called by `common.py`.

A tensor-parallel rank takes its part of each expert's inner numbers, in whole blocks of MXFP4 if each rank gets one, so
that the parts stay small where the operations keep such. Only the main rank adds the bias behind the projection down.
"""

from __future__ import annotations

import torch

from chitu.config.tensor_parallel import MAIN_RANK, share_of
from chitu.errors import ConfigError
from chitu.models.config_parts import ExpertSpec
from chitu.models.layers import MixtureMLP, Spread
from chitu.models.weights import WeightSource
from chitu.ops.interface import ExpertBiases, Ops
from chitu.ops.kept import Weights
from chitu.ops.routing import Router

BLOCK = 32
"""Numbers of MXFP4 that have a common scale."""


def build_joined(
    hidden: int,
    experts: ExpertSpec,
    weights: WeightSource,
    ops: Ops,
    prefix: str,
    rank: int,
    size: int,
    spread: Spread | None = None,
) -> MixtureMLP:
    """Build the mixture: see `common.build_mixture`."""
    count, inner, name = experts.num_experts, experts.intermediate_size, f"{prefix}.experts"
    router = Router(
        weight_ED=weights.take(f"{prefix}.router.weight", count, hidden, dtype=torch.float32),
        rule=experts.rule,
        logit_bias_E=weights.take(f"{prefix}.router.bias", count, dtype=torch.float32),
    )
    matrices, is_main = range(count), rank == MAIN_RANK
    if spread is not None:
        matrices, rank, size, is_main = spread.own(count), MAIN_RANK, 1, True
    own = inner_part(inner, size, rank)
    both = range(2 * own.start, 2 * own.stop)
    of_gate_up = weights.take(f"{name}.gate_up_proj_bias", count, 2 * inner, rows=matrices, columns=both)
    of_down = weights.take(f"{name}.down_proj_bias", count, hidden, rows=matrices)
    biases = ExpertBiases(torch.cat((of_gate_up[:, 0::2], of_gate_up[:, 1::2]), dim=1), of_down if is_main else None)
    gate_up_EGD: Weights = weights.take_stack(
        f"{name}.gate_up_proj", count, hidden, 2 * inner, matrices=matrices, outputs=both, is_paired=True
    )
    down_EDI: Weights = weights.take_stack(f"{name}.down_proj", count, inner, hidden, matrices=matrices, inputs=own)
    return MixtureMLP(router, ops.prepare_experts(gate_up_EGD, down_EDI, biases, experts.gate), None, spread)


def inner_part(inner: int, size: int, rank: int) -> range:
    """Return a rank's inner numbers of each expert. ConfigError if there are fewer than ranks."""
    if inner < size:
        raise ConfigError(f"tp_size {size}: {inner} rows of an expert cannot be split over {size} ranks")
    unit = BLOCK if inner % BLOCK == 0 and inner // BLOCK >= size else 1
    part = share_of(inner // unit, size, rank)
    return range(part.start * unit, part.stop * unit)
