"""Print which variants of Triton's kernels a GPU would compile for the steps of an engine, without a GPU and without
compiling: JSON, the number of variants by kernel after the warm-up, and those that later steps still add.

A stand-in takes the place of Triton's driver, and a hook that of its compiler, so launches end where a kernel would be
compiled: with the key that the launcher made of its arguments. Kernels compute nothing; products give zeros, so that
logits are finite. Runs in a process of its own without the interpreter: `python kernel_variants.py FOLDER FAMILY`;
the family `drafts` is that of a model with a layer that drafts, `fp8` that of Qwen3 with weights in blocks of e4m3,
`int4` that with integers of 4 bits and zero points.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import torch
import triton
from engine_checkpoints import Engine, write_checkpoint
from mtp_checkpoints import write_random
from support.quantised_weights import FORMS, quantise_folder
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from chitu.engine.executor import PrefillChunk, StepPlan
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.ops.kernels import small_linear
from chitu.ops.triton_ops import TritonOps

MOST_ROWS = 64
"""Rows of the largest step that our own products take."""


class Variants:
    """The variants that launches asked for so far."""

    def __init__(self) -> None:
        self._keys: dict[str, set[str]] = {}
        target = GPUTarget("cuda", 90, 32)
        driver.set_active(
            SimpleNamespace(
                get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
            )
        )
        triton.knobs.runtime.jit_cache_hook = self._note

    def _note(self, *, key: str, fn: object, **_: object) -> bool:
        self._keys.setdefault(fn.name.rpartition(".")[2], set()).add(key)  # type: ignore[attr-defined]
        return True  # so Triton compiles and launches nothing

    def count(self) -> Counter[str]:
        return Counter({name: len(keys) for name, keys in self._keys.items()})


def main() -> None:
    variants = Variants()
    small_linear._small_linear.add_pre_run_hook(lambda *_, **given: given["out_ptr"].zero_())
    folder, family = Path(sys.argv[1]), sys.argv[2]
    has_drafts = family == "drafts"
    if has_drafts:
        write_random(folder)
    elif family == "fp8":
        write_checkpoint(folder / "plain", "qwen3", num_layers=2)
        config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
        quantise_folder(folder / "plain", folder / "small", folder / "large", "fp8_block", config)
        folder /= "small"
    elif family == "int4":
        write_checkpoint(folder / "plain", "qwen3", num_layers=2)
        config = FORMS["int4 zeros"](np.random.default_rng(0), 8, 32).config
        quantise_folder(folder / "plain", folder / "small", folder / "large", "int4_zeros", config)
        folder /= "small"
    else:
        write_checkpoint(folder, family, num_layers=2)
    engine = Engine(
        folder,
        ops=TritonOps(132),
        recording=Recording(EagerRecorder(), decode_sizes=(1, 2, 4, 8, 16, 32, 48), prefill_sizes=(64, 128)),
        max_model_len=160,
        num_slots=MOST_ROWS,
        num_pages=4 * MOST_ROWS,
        drafts=has_drafts,
    )
    engine.runner.warmup()
    started = variants.count()
    prompt = engine.admit(0, [7] * 3, 8)
    # Prompts that end together: as many rows of logits as prompts. Then as many decodes, recorded and not.
    for count in (1, 2, 5, 17, 33, 47, 48, MOST_ROWS):
        prompts = [msgspec.structs.replace(prompt, slot=slot, pages=(slot,)) for slot in range(count)]
        chunks = [PrefillChunk(slot, 0, 3, sample=True) for slot in range(count)]
        engine.runner.execute(StepPlan(admit=prompts, prefill=chunks))
        engine.runner.execute(StepPlan(decode=list(range(count))))
        engine.runner.execute(StepPlan(release=list(range(count))))
    print(json.dumps({"started": started, "added": variants.count() - started}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
