"""The shapes of real models on one card, with random weights that are made on the device: no file is read.

A shape has the sizes of a published config.json. Its weights are in 16 bits, or, with `-fp8` behind the name, in e4m3
with a scale for each block of 128 x 128, kept so where the kernels take them. Experts of gpt-oss are in MXFP4, as they
are published.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chitu.errors import ConfigError
from chitu.models.common import build_decoder
from chitu.models.config import ModelSpec, read_model_spec
from chitu.models.dequantize import E2M1
from chitu.models.families import traits_of
from chitu.models.weights import Rows, WeightSource
from chitu.ops.interface import Ops
from chitu.ops.kept import KeptBlocks, Matrix, Weights, below
from chitu.tools.bench.gpu.card import Card, Row
from chitu.tools.bench.gpu.steps import StepBench, Weighed
from chitu.tools.make_model import ModelShape, train_tokenizer, write_settings

QWEN3 = ModelShape(
    head_dim=128, vocab_size=151936, max_position_embeddings=16384, dtype="bfloat16", rope_theta=1e6, kv_heads=8
)
SHAPES: dict[str, tuple[str, ModelShape]] = {
    "0.6b": ("qwen3", replace(QWEN3, hidden_size=1024, layers=28, heads=16, intermediate_size=3072, tie=True)),
    "8b": ("qwen3", replace(QWEN3, hidden_size=4096, layers=36, heads=32, intermediate_size=12288)),
    "30b-a3b": (
        "qwen3_moe",
        replace(
            QWEN3,
            hidden_size=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            intermediate_size=6144,
            experts=128,
            experts_per_token=8,
            expert_size=768,
        ),
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        replace(
            QWEN3,
            hidden_size=2880,
            layers=24,
            heads=64,
            head_dim=64,
            intermediate_size=2880,
            vocab_size=201088,
            rope_theta=150000.0,
            experts=32,
            experts_per_token=4,
        ),
    ),
}
"""Family and sizes: Qwen3-0.6B, Qwen3-8B, Qwen3-30B-A3B, gpt-oss-20b."""
OF_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
NOT_OF_GPT_OSS = ("use_sliding_window", "max_window_layers")
TINY_SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
TINY_SIZES |= {"intermediate_size": 48, "vocab_size": 512, "expert_size": 32, "experts": 8, "experts_per_token": 2}
FP8 = "-fp8"
BLOCK = 128
MXFP4_RUN = 32
SCALE = 0.02
"""Standard deviation of the weights."""
BATCHES, PROMPTS = (1, 8, 64), (512, 8192)


def names() -> list[str]:
    return [*SHAPES, *(name + FP8 for name, (family, _) in SHAPES.items() if family != "gpt_oss")]


def shape_of(card: Card, name: str) -> tuple[str, ModelShape]:
    """Return family and sizes; on a CPU small ones. Raises ConfigError for an unknown name."""
    if name not in names():
        raise ConfigError(f"--shape: {name} is none of {', '.join(names())}")
    family, shape = SHAPES[name.removesuffix(FP8)]
    return family, shape if card.is_gpu else replace(shape, **TINY_SIZES, dtype="float32")


def write_shape(folder: Path, family: str, shape: ModelShape) -> None:
    """Write all files of a checkpoint but its weights."""
    tokenizer = train_tokenizer(shape.vocab_size)
    if family != "gpt_oss":
        write_settings(folder, family, shape, tokenizer)
        return
    write_settings(folder, "qwen3", shape, tokenizer)
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in NOT_OF_GPT_OSS}
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    path.write_text(json.dumps(config | OF_GPT_OSS | experts))


def weights_of(card: Card, name: str) -> tuple[Ops, RandomWeights]:
    """Return the weights of a shape, and operations that keep them as small as they are."""
    is_small = name.endswith(FP8) or SHAPES[name][0] == "gpt_oss"
    ops = card.kernels() if is_small else card.ops()
    return ops, RandomWeights(card, ops if is_small else None, has_e4m3=name.endswith(FP8))


def rows(card: Card, name: str) -> Iterator[Row]:
    """Yield decode steps and prompts of a shape."""
    family, shape = shape_of(card, name)
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), family, shape)
        spec = read_model_spec(folder, code="own")
    ops, weights = weights_of(card, name)
    with torch.inference_mode():
        model = build_decoder(spec, traits_of(spec), weights, ops, card.device, spec.max_model_len)
        bench = StepBench(card, spec, model, weights.weighed(spec))
        yield Row(f"{name}: weights", (weights.num_bytes + weights.expert_bytes) / (1 << 30), "GiB")
        for batch in BATCHES if card.is_gpu else card.sizes.step_batches:
            yield from (row.named(name) for row in bench.decode(batch))
        for tokens in PROMPTS if card.is_gpu else card.sizes.prompts:
            yield from (row.named(name) for row in bench.prefill(tokens))


class RandomWeights(WeightSource):
    """A checkpoint that has every tensor that is asked for. `ops`: whose small forms are kept; None: all is in the
    card's dtype. `has_e4m3`: whether matrices of layers are in e4m3. Stacks of matrices are in MXFP4."""

    def __init__(self, card: Card, ops: Ops | None, has_e4m3: bool = True) -> None:
        self._card, self._ops, self._has_e4m3 = card, ops, has_e4m3
        self.num_bytes = self.numbers = self.expert_bytes = self.expert_numbers = 0
        """What was taken: all but the experts, and the experts."""

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        found = torch.empty(_part(shape, rows, columns), dtype=dtype or self._card.dtype, device=self._card.device)
        found.normal_(0, SCALE)
        self._weigh(name, found.numel(), found.nbytes)
        return found

    def take_rows(self, parts: Sequence[Rows], *rest: int) -> torch.Tensor:
        return torch.cat([self.take(part.name, part.total, *rest, rows=part.rows) for part in parts])

    def take_matrix(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> Matrix:
        if (
            self._ops is None or not self._has_e4m3 or ".layers." not in name
        ):  # embedding and head are published in 16 bits
            return self.take(name, *shape, rows=rows, columns=columns)
        outputs, inputs = _part(shape, rows, columns)
        run = min(BLOCK, inputs)
        if not self._ops.keeps("e4m3", run, inputs):
            return self.take(name, *shape, rows=rows, columns=columns)
        device = self._card.device
        codes = torch.randint(0, 0x7F, (outputs, inputs), dtype=torch.uint8, device=device)  # 0x7F is NaN
        scales = torch.rand(outputs, -(-inputs // run), device=device).mul_(SCALE / 100)
        self._weigh(name, codes.numel(), codes.numel() + scales.nbytes)
        return KeptBlocks("e4m3", codes, scales, run, dtype=self._card.dtype)

    def take_matrices(self, parts: Sequence[Rows], inputs: int) -> Matrix:
        return below([self.take_matrix(part.name, part.total, inputs, rows=part.rows) for part in parts])

    def take_stack(
        self,
        name: str,
        *shape: int,
        matrices: range,
        outputs: range | None = None,
        inputs: range | None = None,
        is_paired: bool = False,
    ) -> Weights:
        outputs, inputs = outputs or range(shape[2]), inputs or range(shape[1])
        sizes, device = (len(outputs), len(inputs)), self._card.device
        if self._ops is None or not self._ops.keeps("e2m1", MXFP4_RUN, len(inputs)):
            return self.take(name, len(matrices), *sizes)
        kept = []
        for _ in matrices:
            codes = torch.randint(0, 16, sizes, dtype=torch.uint8, device=device)
            scales = torch.rand(sizes[0], -(-sizes[1] // MXFP4_RUN), device=device).mul_(SCALE / 3)
            self._weigh(name, codes.numel(), codes.numel() // 2 + scales.nbytes)
            kept.append(
                KeptBlocks("e2m1", codes, scales, MXFP4_RUN, table=(*E2M1, *(-x for x in E2M1)), dtype=self._card.dtype)
            )
        return kept

    def has(self, name: str) -> bool:
        return False

    def leave_out(self, names: Iterable[str]) -> None:
        """Nothing is left."""

    def ignore(self, *suffixes: str) -> None:
        """Nothing is left."""

    def ignore_layers(self, layers: range) -> None:
        """Nothing is left."""

    def finish(self) -> None:
        """Nothing is left."""

    def weighed(self, spec: ModelSpec) -> Weighed:
        """Return what steps read of the weights that were taken."""
        embedding = spec.vocab_size * spec.hidden_size
        tables = embedding * (1 if spec.tie_word_embeddings else 2)
        step_bytes = self.num_bytes - (tables - embedding) * self._card.dtype.itemsize
        experts = spec.experts
        chosen = (experts.num_experts, experts.rule.top_k) if experts is not None else (1, 1)
        return Weighed(step_bytes, self.numbers - tables, self.expert_bytes, self.expert_numbers, *chosen)

    def _weigh(self, name: str, numbers: int, num_bytes: int) -> None:
        if ".experts." in name:
            self.expert_bytes += num_bytes
            self.expert_numbers += numbers
        else:
            self.num_bytes += num_bytes
            self.numbers += numbers


def _part(shape: Sequence[int], rows: range | None, columns: range | None) -> tuple[int, ...]:
    first = len(rows) if rows is not None else shape[0]
    return (first, len(columns), *shape[2:]) if columns is not None else (first, *shape[1:])
