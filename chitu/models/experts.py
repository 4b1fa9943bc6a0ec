"""Builds a layer's mixture of experts from a checkpoint's tensors. Called by `common.py` while a model is loaded.

Tensor parallelism: a rank has a part of every expert's inner dimension, as of a dense MLP's, and the whole router.
"""

from __future__ import annotations

import torch

from chitu.config.tensor_parallel import share_of
from chitu.errors import ConfigError
from chitu.layers.decoder import GatedMLP, MixtureMLP
from chitu.models.config import ModelSpec
from chitu.models.expert_spec import ExpertSpec
from chitu.models.weights import Rows, WeightSource
from chitu.ops.interface import Ops
from chitu.ops.routing import Router


def build_mixture(
    spec: ModelSpec, experts: ExpertSpec, weights: WeightSource, ops: Ops, prefix: str, rank: int, size: int
) -> MixtureMLP:
    """Build the mixture. `prefix`: of the layer's MLP. ConfigError if an expert cannot be split over `size` ranks."""
    hidden = spec.hidden_size
    bias_E = None
    if experts.has_choice_bias:
        bias_E = weights.take(f"{prefix}.gate.e_score_correction_bias", experts.num_experts, dtype=torch.float32)
    router = Router(
        weight_ED=weights.take(f"{prefix}.gate.weight", experts.num_experts, hidden, dtype=torch.float32),
        rule=experts.rule,
        choice_bias_E=bias_E,
    )
    names = [f"{prefix}.experts.{index}" for index in range(experts.num_experts)]
    gate_up_EGD, down_EDI = _stacked(weights, names, experts.intermediate_size, hidden, rank, size)
    shared = None
    if experts.shared_intermediate_size:
        shared_name = [f"{prefix}.shared_experts"]
        gate_up, down = _stacked(weights, shared_name, experts.shared_intermediate_size, hidden, rank, size)
        shared = GatedMLP(ops.prepare_gate_up(gate_up[0], None), ops.prepare(down[0], None))
    return MixtureMLP(router, ops.prepare_experts(gate_up_EGD, down_EDI), shared)


def _stacked(
    weights: WeightSource, names: list[str], inner: int, hidden: int, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up `[N, 2 I, D]` and down `[N, D, I]` of these MLPs. At most one MLP is in memory twice."""
    if inner < size:
        raise ConfigError(f"tp_size {size}: {inner} rows of an expert cannot be split over {size} ranks")
    own = share_of(inner, size, rank)
    for index, name in enumerate(names):
        rows = [Rows(f"{name}.{part}_proj.weight", inner, own) for part in ("gate", "up")]
        gate_up_GD = weights.take_rows(rows, hidden)
        down_DI = weights.take(f"{name}.down_proj.weight", hidden, inner, columns=own)
        if index == 0:
            gate_up = gate_up_GD.new_empty(len(names), *gate_up_GD.shape)
            down = down_DI.new_empty(len(names), *down_DI.shape)
        gate_up[index], down[index] = gate_up_GD, down_DI
    return gate_up, down
