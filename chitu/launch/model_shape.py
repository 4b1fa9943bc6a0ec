"""Sizes of a generated model, and checks that they fit. Pure; called by `make_model.py` and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from chitu.errors import ConfigError
from chitu.launch.tiny_tokenizer import SPECIAL_TOKENS

Family = Literal["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
"""Families whose KV cache has one latent row per token."""
NUM_GROUPS = 2
"""Number of groups of experts in deepseek_v3; each token uses experts of one group."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtype names in config.json, with those in a safetensors header."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Sizes of the model; the defaults make a few MB."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int | None = None
    """Size of a head; unset: `hidden_size / heads`."""
    intermediate_size: int | None = None
    """Size of the MLP; unset: 3 x `hidden_size`."""
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    tie: bool = False
    dtype: str = "float32"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling as in config.json, such as Llama 3's `{"rope_type": "llama3", ...}`."""
    experts: int = 8
    """Number of experts; this and the fields below are for families with experts and for DeepSeek."""
    experts_per_token: int = 2
    expert_size: int = 64
    q_lora_rank: int | None = 48
    """Rank of the q projection; None: q is projected in one step."""
    kv_lora_rank: int = 64
    rope_head_dim: int = 16
    nope_head_dim: int = 32
    v_head_dim: int = 24
    shards: int = 1
    """Number of safetensors files; more than one have an index."""

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.heads

    @property
    def resolved_intermediate_size(self) -> int:
        return self.intermediate_size or 3 * self.hidden_size

    def expert_layers(self, family: str) -> range:
        """Return the layers that have experts: in DeepSeek all but the first."""
        if family == "qwen3_moe":
            return range(self.layers)
        return range(1, self.layers) if family in LATENT_FAMILIES else range(0)

    def check(self, family: str) -> None:
        """Raise ConfigError if no such model can be made."""
        if family not in FAMILIES:
            raise ConfigError(f"model family {family!r} is none of {', '.join(FAMILIES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        sizes = (self.layers, self.heads, self.kv_heads, self.hidden_size, self.max_position_embeddings, self.shards)
        if min(*sizes, self.head_dim or 1, self.intermediate_size or 1) < 1:
            raise ConfigError("every size of a model must be at least 1")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is no multiple of heads {self.heads}")
        if family == "qwen2" and self.resolved_head_dim * self.heads != self.hidden_size:
            raise ConfigError(f"qwen2 has head_dim hidden_size / heads, not {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.resolved_head_dim % 2:
            raise ConfigError(f"head_dim {self.resolved_head_dim} is odd, which RoPE cannot rotate")
        if self.expert_layers(family) and not 1 <= self.experts_per_token <= self.experts // NUM_GROUPS:
            raise ConfigError(f"{self.experts_per_token} experts a token, of {self.experts} in {NUM_GROUPS} groups")
        if family == "deepseek_v3" and (self.experts % NUM_GROUPS or self.experts < 2 * NUM_GROUPS):
            raise ConfigError(f"{self.experts} experts cannot be put into {NUM_GROUPS} groups of at least two")
        if family in LATENT_FAMILIES and (self.rope_head_dim % 2 or self.hidden_size % self.heads):
            raise ConfigError(f"rope_head_dim {self.rope_head_dim} is odd, or hidden_size no multiple of heads")
        if self.vocab_size < 256 + len(SPECIAL_TOKENS):
            raise ConfigError(f"vocab_size {self.vocab_size} is less than {256 + len(SPECIAL_TOKENS)}")
