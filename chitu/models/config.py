"""What a checkpoint folder says about its model, without torch and without reading weights.

Owns the translation of Hugging Face's config.json (`rope_theta`/`rope_scaling` as well as the newer `rope_parameters`)
into one frozen `ModelSpec`. Called by the engine's loader, and by the router, which needs limits, eos ids and the model
hash but no tensors. Whatever this project cannot compute is refused here, by name, before a byte of weights is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.expert_spec import ExpertSpec, read_expert_spec
from chitu.models.latent_spec import LatentSpec, read_latent_spec, yarn_attention_factor

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
}
"""Architecture name in config.json -> module of `chitu.models`."""
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `factor` is used by all types but `default`; what is below by those it names."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """And `high_freq_factor`: llama3."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """llama3, yarn."""
    beta_fast: float = 32.0
    """And what is below: yarn."""
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0
    """Of cos and sin."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of a decoder-only model."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on q, k and v (Qwen2: always) and, on Llama with `attention_bias`, on o too."""
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    """Of generation_config.json and config.json, without repeats."""
    bos_token_id: int | None
    dtype: str
    """Of the checkpoint: `float32`, `bfloat16` or `float16`."""
    experts: ExpertSpec | None = None
    """None: every layer has a dense MLP."""
    latent: LatentSpec | None = None
    """Latent attention; `num_kv_heads` and `head_dim` are then those of the cache: one, as wide as its rows."""
    num_extra_layers: int = 0
    """Behind the last one in the checkpoint, for predicting several tokens at once (DeepSeek-V3); not used."""

    @property
    def regions_per_layer(self) -> int:
        """Of the KV cache."""
        return 2 if self.latent is None else 1

    @property
    def family(self) -> str:
        """Module of `chitu.models` that builds it."""
        return FAMILIES[self.architecture]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model.path: {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {path} holds no JSON object")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, bool):
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int) and not isinstance(item, bool))
    return ()


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _rope(config: dict[str, Any], max_positions: int) -> RopeSpec:
    scaling = _rope_parameters(config)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported (known: {', '.join(ROPE_TYPES)})")
    if float(scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModel("a partial rotary embedding (partial_rotary_factor < 1) is not supported")
    return RopeSpec(
        type=kind,
        theta=float(scaling.get("rope_theta", config.get("rope_theta", 10_000.0))),
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(scaling.get("original_max_position_embeddings") or max_positions),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        is_truncated=bool(scaling.get("truncate", True)),
        attention_factor=yarn_attention_factor(scaling) if kind == "yarn" else 1.0,
    )


def _refuse_what_we_do_not_compute(config: dict[str, Any], architecture: str, max_positions: int) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{architecture}: hidden_act {config['hidden_act']!r} is not supported (only silu)")
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    if uses_window and window is not None and int(window) < max_positions:
        raise UnsupportedModel(
            f"{architecture}: a sliding window of {window} tokens (below {max_positions} positions) is not supported"
        )
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{architecture}: quantised checkpoints are not supported")


def read_model_spec(path: str | Path, max_model_len: int | None = None) -> ModelSpec:
    """The spec of a checkpoint folder.

    `max_model_len`: tokens that will be served at most; a sliding window at least that long is no window. Raises
    ConfigError for a missing or broken config.json, UnsupportedModel for an architecture or feature we do not compute.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is not a folder")
    config = _read_json(folder / "config.json")
    architecture = str((config.get("architectures") or ["none named"])[0])
    if architecture not in FAMILIES:
        raise UnsupportedModel(f"architecture {architecture!r} is not supported (known: {', '.join(sorted(FAMILIES))})")
    try:
        max_positions = int(config.get("max_position_embeddings", 2048))
        served = min(max_positions, max_model_len or max_positions)
        _refuse_what_we_do_not_compute(config, architecture, served)
        hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim, latent = int(config.get("head_dim") or hidden_size // num_heads), None
        if FAMILIES[architecture] == "deepseek":
            latent = read_latent_spec(config, _rope_parameters(config), architecture == "DeepseekV3ForCausalLM")
            num_kv_heads, head_dim = 1, latent.kv_rank + latent.rope_dim
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        spec = ModelSpec(
            architecture=architecture,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=max_positions,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, max_positions),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=_eos_token_ids(folder, config),
            bos_token_id=next(iter(_token_ids(config.get("bos_token_id"))), None),
            dtype=dtype,
            experts=read_expert_spec(config, FAMILIES[architecture]),
            latent=latent,
            num_extra_layers=int(config.get("num_nextn_predict_layers") or 0) if latent is not None else 0,
        )
    except KeyError as error:
        raise ConfigError(f"model.path: {folder / 'config.json'} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.path: {folder / 'config.json'}: {error}") from error
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} attention heads are no multiple of {num_kv_heads} KV heads")
    rotated = spec.head_dim if latent is None else latent.rope_dim
    if rotated % 2:
        raise UnsupportedModel(f"an odd head_dim ({rotated}) is not supported")
    if dtype not in SUPPORTED_DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported (known: {', '.join(SUPPORTED_DTYPES)})")
    return spec


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    ids = _token_ids(_read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return tuple(dict.fromkeys(ids + _token_ids(config.get("eos_token_id"))))


def weight_files(path: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, in name order. ConfigError where there is none or one is missing."""
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"model.path: {index} has no weight_map")
        files = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
        if any(file.resolve().parent != folder.resolve() and not file.is_symlink() for file in files):
            raise ConfigError(f"model.path: {index} names files outside its folder")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {folder} holds no safetensors file")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"model.path: {file} is missing")
    return files


def model_hash(path: str | Path) -> str:
    """32 hex digits that two folders share exactly when config and weight layout agree.

    Covers config.json and each weight file's name, size and header (names, shapes, dtypes, offsets), not the weights.
    """
    folder = Path(path)
    digest = hashlib.sha256()
    config = _read_json(folder / "config.json")
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in weight_files(folder):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if length > MAX_HEADER_BYTES:
                raise ConfigError(f"model.path: {file} is no safetensors file")
            digest.update(stream.read(length))
    return digest.hexdigest()[:32]
