"""Tiny random checkpoints of models with recurrent layers, whose states are remembered for long."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from checkpoint_table import Checkpoint

COMMON = {
    "vocab_size": 500,
    "hidden_size": 64,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "pad_token_id": None,
}
DELTA_NET = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
HYBRID = {"intermediate_size": 96, "num_hidden_layers": 4, "num_key_value_heads": 2}
LFM2 = {**HYBRID, "layer_types": ["conv", "conv", "full_attention", "conv"]}

GRANITE = {
    **HYBRID,
    **MAMBA_2,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "logits_scaling": 3.0,
}


class Family(NamedTuple):
    """A class of transformers, and its config."""

    name: str
    keys: dict[str, Any]


FAMILIES = {
    "qwen3_next": Family("Qwen3Next", {**HYBRID, **DELTA_NET}),
    "qwen3_5_moe": Family("Qwen3_5Moe", {**HYBRID, **DELTA_NET}),
    "qwen3_5": Family("Qwen3_5", {key: value for key, value in {**HYBRID, **DELTA_NET}.items() if "expert" not in key}),
    "granite_4_h": Family("GraniteMoeHybrid", GRANITE),
    "granite_one_group": Family("GraniteMoeHybrid", {**GRANITE, "mamba_n_groups": 1}),
    "nemotron_3": Family(
        "NemotronH",
        {
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "hybrid_override_pattern": "ME*M-E",
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "kimi_linear": Family(
        "KimiLinear",
        {
            **HYBRID,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "lfm2": Family("Lfm2", LFM2),
    "lfm2_moe": Family("Lfm2Moe", {**LFM2, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "bamba": Family("Bamba", {**HYBRID, **MAMBA_2, "attn_layer_indices": [2]}),
    "falcon_h1": Family("FalconH1", {**HYBRID, **MAMBA_2, "mamba_d_ssm": 96, "mamba_n_heads": 6}),
    "jamba": Family(
        "Jamba",
        {**HYBRID, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8},
    ),
}


def randomise_states(model: transformers.PreTrainedModel) -> None:
    """Draw all weights such that a state is remembered for long and weighs much."""
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(0.05, 0.6, parameter.numel()).view(parameter.shape).log())
            elif name.endswith("dt_bias") or "dt_proj.bias" in name:
                parameter.uniform_(-0.5, 0.5, generator=source)
            elif "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.1)
            elif "conv" in name and parameter.dim() == 3:
                parameter.normal_(0, 0.4, generator=source)
            elif parameter.dim() < 2:
                parameter.normal_(0, 0.2, generator=source)
            else:
                parameter.normal_(0, 0.7 * parameter.shape[-1] ** -0.5, generator=source)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2, generator=source)


def write_family(folder: Path, family: Family) -> Checkpoint:
    """Write a random checkpoint in float32."""
    kind = getattr(transformers, f"{family.name}ForCausalLM")
    torch.manual_seed(5)
    model = kind(kind.config_class(**COMMON, **family.keys)).float().eval()
    randomise_states(model)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return Checkpoint(folder, model)
