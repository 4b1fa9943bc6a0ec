"""Checkpoints in the form of DeepSeek-V3 with a layer that drafts: random ones, and such whose drafts are right by
construction behind chosen tokens alone.

The latter have orthonormal embeddings, and layers that add nothing: so the hidden state behind token x is its
embedding, and the head takes it to `follower(x)`, one cycle through the vocabulary. The drafting layer maps its input
to the embedding of another token, and the same head takes that to the draft."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import transformers
from engine_checkpoints import FAMILIES, write_checkpoint
from safetensors.torch import load_file, save_file

from chitu.tools.make_model import train_tokenizer

VOCAB = 320
EOS = 0
NUM_MODEL_LAYERS = 2


def add_draft_layer(folder: Path, joined: Callable[[int], torch.Tensor], norm: Callable[[int], torch.Tensor]) -> None:
    """Make the last of a checkpoint's layers the one that drafts, with copies of embedding and head, as published.
    `joined` returns the projection `[D, 2 D]`, and `norm` the weights of a norm, both for D."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, layer = load_file(file), config["num_hidden_layers"] - 1
    width, prefix = config["hidden_size"], f"model.layers.{layer}"
    tensors |= {f"{prefix}.{name}.weight": norm(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{prefix}.eh_proj.weight"] = joined(width)
    tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config |= {"num_hidden_layers": layer, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def write_random(folder: Path) -> None:
    """Write a random model of `NUM_MODEL_LAYERS`, and a random layer that drafts."""
    write_checkpoint(folder, "deepseek_v3", num_layers=NUM_MODEL_LAYERS + 1)
    add_draft_layer(
        folder,
        lambda width: torch.empty(width, 2 * width).normal_(0, 0.12),
        lambda width: torch.empty(width).uniform_(0.5, 1.5),
    )


def follower(token: int) -> int:
    """Return what the model draws behind a token: never `EOS`, of which the cycle is free."""
    return token % (VOCAB - 1) + 1


def answer_to(prompt: list[int], count: int) -> list[int]:
    tokens = prompt[-1:]
    while len(tokens) <= count:
        tokens.append(follower(tokens[-1]))
    return tokens[1:]


def some_tokens(share: float) -> frozenset[int]:
    return frozenset(random.Random(5).sample(range(1, VOCAB), round(share * (VOCAB - 1))))


def predicted_steps(answer: list[int], right: Collection[int], most: int = 1) -> int:
    """Return in how many steps behind the first token the answer is drawn, if drafts of up to `most` tokens are right
    behind these tokens."""
    known, steps = 1, 0
    while known < len(answer):
        num_right = 0
        while num_right < most and known < len(answer) and answer[known - 1] in right:
            num_right, known = num_right + 1, known + 1
        known, steps = known + 1, steps + 1
    return steps


def write_predictable(folder: Path, right: Collection[int] | None) -> None:
    """Write a model whose drafts are right behind the tokens `right`, by the token alone; None: behind every one, by
    the hidden state before it alone."""
    prefix, extra = FAMILIES["deepseek_v3"]
    config = getattr(transformers, f"{prefix}Config")(
        **{**extra, "rope_scaling": None, "num_attention_heads": 4},
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=32,
        num_hidden_layers=NUM_MODEL_LAYERS + 1,
        max_position_embeddings=1024,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    table = torch.linalg.qr(torch.randn(VOCAB, VOCAB)).Q
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_()
        for token in range(VOCAB):
            model.lm_head.weight[follower(token)] += table[token]
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    train_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))

    def joined(width: int) -> torch.Tensor:
        aims = [follower(token) if right is None or token not in right else token for token in range(VOCAB)]
        mapped = sum((torch.outer(table[aim], table[token]) for token, aim in enumerate(aims)), torch.zeros(1))
        nothing = torch.zeros(width, width)
        return torch.cat([nothing, mapped] if right is None else [mapped, nothing], dim=1)

    add_draft_layer(folder, joined, torch.ones)
