"""Write the trained model as a Hugging Face folder; `load` reads it back for the accuracy table."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from chitu.tools.make_model import ModelShape, write_settings
from tiny.model import Shape, TinyModel


def save(model: TinyModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write bfloat16 weights with the names of Qwen3, config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    write_settings(
        folder,
        "qwen3",
        ModelShape(
            hidden_size=shape.hidden_size,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.max_position_embeddings,
            tie=True,
            dtype="bfloat16",
            rope_theta=shape.rope_theta,
        ),
        tokenizer,
    )
    weights = {f"model.{name}": value.to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, shape: Shape) -> tuple[TinyModel, Tokenizer]:
    """Return the model in float32 and its tokenizer."""
    model = TinyModel(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))
