"""Our kernels in the modules of transformers: which modules get them, that their weights are there once and readable,
and that the self-check finds kernels that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_table import make_checkpoint
from support.checkpoints import ROWS
from torch import nn

from chitu.engine.build import load_model
from chitu.errors import UnsupportedModel
from chitu.models.generic.fusing import PreparedLinear, fuse
from chitu.models.generic.model import GenericModel
from chitu.ops.interface import LinearWeight
from chitu.ops.native import NativeOps, load_library

LIBRARY = load_library()
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(LIBRARY is None, reason="needs a C compiler"),
]
ROW = {row.name: row for row in ROWS}


def load(name: str, folder: Path, ops: type[NativeOps] = NativeOps) -> GenericModel:
    if not list(folder.iterdir()):
        make_checkpoint(ROW[name], folder)
    assert LIBRARY is not None
    model = load_model(folder, "float32", ops=ops(LIBRARY), code="transformers")
    assert isinstance(model, GenericModel)
    return model


def test_all_products_and_norms_are_ours_and_weights_are_there_once(tmp_path: Path) -> None:
    name = "EXAONE-4.0-32B"
    parts = load(name, tmp_path).parts
    for part in (*parts.decoder.modules(), *parts.head.modules()):
        assert type(part) is not nn.Linear
        assert "RMSNorm" not in type(part).__name__ or "forward" in vars(part)
    left = {name.rpartition(".")[2] for name, each in parts.decoder.named_parameters() if each.dim() > 1}
    assert left == {"weight"} and sum(each.dim() > 1 for each in parts.decoder.parameters()) == 1, "the embedding"
    mlp = parts.decoder.layers[0].mlp
    assert mlp.gate_proj._prepared is mlp.up_proj._prepared


def test_a_weight_can_still_be_read(tmp_path: Path) -> None:
    model = load("EXAONE-4.0-32B", tmp_path)
    right = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    own = {name: part for name, part in model.parts.decoder.named_modules() if isinstance(part, PreparedLinear)}
    theirs = {name: part for name, part in right.model.named_modules() if isinstance(part, nn.Linear)}
    assert own.keys() == theirs.keys()
    for name, part in own.items():
        assert torch.equal(part.weight, theirs[name].weight), name


def test_a_matrix_that_the_embedding_shares_stays_as_it_is(tmp_path: Path) -> None:
    parts = load("gemma-3-1b-it", tmp_path).parts
    assert parts.head.lm_head.weight is parts.decoder.embed_tokens.weight


class Mlp(nn.Module):
    def __init__(self, act: Any, swapped: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj, self.act_fn, self.swapped = nn.Linear(48, 32), act, swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: torch.Tensor = self.down_proj(self.act_fn(up) * gate if self.swapped else self.act_fn(gate) * up)
        return out


class Norm(nn.Module):
    def __init__(self, offset: float, centred: bool = False, said: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps, self.offset, self.centred = nn.Parameter(torch.rand(32)), said, offset, centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.offset)


@pytest.mark.parametrize(
    ("module", "is_fused"),
    [
        (Mlp(nn.SiLU()), True),
        (Mlp(nn.GELU(approximate="tanh")), False),
        (Mlp(nn.SiLU(), swapped=True), False),
        (Norm(0.0), True),
        (Norm(1.0), True),
        (Norm(0.5), False),
        (Norm(0.0, centred=True), False),
        (Norm(0.0, said=1e-5), False),
    ],
    ids=["SiLU", "GELU", "gate and up swapped", "RMS", "RMS 1 + w", "RMS 0.5 + w", "layer norm", "another epsilon"],
)
def test_only_what_computes_the_same_is_replaced(module: nn.Module, is_fused: bool) -> None:
    assert LIBRARY is not None
    with torch.inference_mode():
        x = torch.randn(1, 7, 32)
        before = module(x)
        fuse(list(module.modules()), NativeOps(LIBRARY))
        assert ("forward" in vars(module)) == is_fused
        torch.testing.assert_close(module(x), before)
        first, kept = module(x), module(x).clone()
        module(x + 1)
        assert torch.equal(first, kept), "a result stays when the next one is computed"


class Overwriting(NativeOps):
    """Results of two norms or linear layers are in the same buffer."""

    def with_new_results(self) -> NativeOps:
        return self


class UpFirst(NativeOps):
    """Gate and up are mixed up."""

    def with_new_results(self) -> NativeOps:
        return self.__class__(self._library, reuses_buffers=False)

    def gate_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        gate_TI, up_TI = self.gate_and_up(x_TD, weight).chunk(2, dim=1)
        return torch.nn.functional.silu(up_TI) * gate_TI


@pytest.mark.parametrize("fault", [Overwriting, UpFirst])
def test_the_self_check_finds_wrong_kernels(fault: type[NativeOps], tmp_path: Path) -> None:
    load("Seed-OSS-36B-Instruct", tmp_path)
    with pytest.raises(UnsupportedModel, match="of the largest away from those of transformers"):
        load("Seed-OSS-36B-Instruct", tmp_path, fault)
