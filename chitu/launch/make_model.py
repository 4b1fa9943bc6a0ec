"""`make_model`: makes a small random model with its tokenizer, so that everything can be tried without a download.

Called by the `chitu make-model` command and by tests. Writes a Hugging Face checkpoint folder that transformers can
load, without importing transformers or torch. The folder appears complete or not at all (written under a temporary
name, then renamed). The same arguments give the same weights.

The weights are scaled so that a random model is useful for tests: logits are spread (near-ties are rare, so two
implementations that differ by rounding choose the same token), the text depends on the whole context instead of
repeating one token, and special tokens are rarely generated, so that greedy generation runs to its token limit.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chitu.errors import ConfigError
from chitu.launch.model_shape import FAMILIES as FAMILIES
from chitu.launch.model_shape import LATENT_FAMILIES, NUM_GROUPS
from chitu.launch.model_shape import ModelShape as ModelShape
from chitu.launch.random_weights import save_safetensors, tensors_of
from chitu.launch.tiny_tokenizer import BOS, CHAT_TEMPLATE, END_OF_TURN, EOS, PAD, SPECIAL_TOKENS, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def make_model(
    directory: str | Path, family: str = "qwen3", shape: ModelShape | None = None, *, seed: int = 0, **sizes: Any
) -> Path:
    """Write a checkpoint into a new (or empty) folder and return it.

    `sizes` are fields of `ModelShape` that override those of `shape`. Raise ConfigError if the folder is not empty,
    the sizes do not fit together, or the seed is negative.
    """
    shape = replace(shape or ModelShape(), **sizes)
    shape.check(family)
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative")
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(work, family, shape, seed)
        os.chmod(work, 0o755)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _write(folder: Path, family: str, shape: ModelShape, seed: int) -> None:
    write_settings(folder, family, shape, train_tokenizer(shape.vocab_size))
    _write_weights(folder, family, shape, list(range(len(SPECIAL_TOKENS))), seed)


def write_settings(folder: Path, family: str, shape: ModelShape, tokenizer: Tokenizer) -> None:
    """Write every file of a checkpoint except its weights. The tokenizer is one of `train_tokenizer`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: token_id for token_id, token in enumerate(SPECIAL_TOKENS)}
    _write_json(folder / "config.json", _config(family, shape, ids))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": ids[BOS], "eos_token_id": [ids[END_OF_TURN], ids[EOS]], "pad_token_id": ids[PAD]},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END_OF_TURN,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(family: str, shape: ModelShape, ids: dict[str, int]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.resolved_intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "tie_word_embeddings": shape.tie,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[PAD],
    }
    if family != "qwen2" and family not in LATENT_FAMILIES:
        config["head_dim"] = shape.resolved_head_dim
    if family in ("llama", "qwen3", "qwen3_moe", *LATENT_FAMILIES):
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": shape.layers}
    if family in ("qwen3_moe", *LATENT_FAMILIES):
        config |= {"num_experts_per_tok": shape.experts_per_token, "moe_intermediate_size": shape.expert_size}
    if family == "qwen3_moe":
        config |= {"num_experts": shape.experts, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if family in LATENT_FAMILIES:
        config |= _deepseek_config(family, shape)
    return config


def _deepseek_config(family: str, shape: ModelShape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_rope_head_dim": shape.rope_head_dim,
        "qk_nope_head_dim": shape.nope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    }
    if family == "deepseek_v2":
        return config | {"topk_method": "greedy", "norm_topk_prob": False}
    return config | {"n_group": NUM_GROUPS, "topk_group": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0}


def _write_weights(folder: Path, family: str, shape: ModelShape, special_ids: list[int], seed: int) -> None:
    tensors = dict(tensors_of(family, shape, special_ids, seed))
    if shape.shards == 1:
        save_safetensors(folder / "model.safetensors", tensors, shape.dtype)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shape.shards):
        file = f"model-{shard + 1:05d}-of-{shape.shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard :: shape.shards]}
        save_safetensors(folder / file, part, shape.dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.size for values in tensors.values()) * (4 if shape.dtype == "float32" else 2)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
