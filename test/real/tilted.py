"""A LoRA adapter in PEFT's format, of random numbers, and the model with it merged into its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "down_proj")
SIZE = 0.02
"""Of the numbers of B: the model says something else, in words."""


def write_adapter(model: Path, folder: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes = {
        "self_attn.q_proj": (head_dim * config["num_attention_heads"], hidden),
        "self_attn.v_proj": (head_dim * config["num_key_value_heads"], hidden),
        "mlp.down_proj": (hidden, inner),
    }
    source, tensors = torch.Generator().manual_seed(5), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(RANK, inputs, generator=source) / math.sqrt(inputs)
            tensors[f"{stem}B.weight"] = torch.randn(outputs, RANK, generator=source) * SIZE
    folder.mkdir()
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps({**given, "target_modules": list(TARGETS)}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def merged(model: Any, adapter: Path) -> Iterator[None]:
    """Add the adapter to the weights of a model of `transformers`; afterwards it has its own again."""
    tensors, before = load_file(adapter / "adapter_model.safetensors"), {}
    for name, module in model.named_modules():
        stem = f"base_model.model.{name}.lora_"
        if f"{stem}A.weight" in tensors:
            before[module] = module.weight.data
            a, b = (tensors[f"{stem}{part}.weight"].double() for part in "AB")
            module.weight.data = (module.weight.data.double() + ALPHA / RANK * b @ a).float()
    assert 2 * len(before) == len(tensors)
    try:
        yield
    finally:
        for module, weight in before.items():
            module.weight.data = weight
