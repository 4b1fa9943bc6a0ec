"""The checkpoints that users of prefill/decode disaggregation run, as rows: what a folder is, and what becomes of it.

`published_configs.json` has the `config.json` of each with all keys of the published file and small sizes: windows, the
lengths of ropes, chunks, groups and blocks are shorter than the tests' prompts, so that a prompt exceeds them. A row
says in which form the weights are, and either which code computes the model or words that its refusal has. The docs'
table of models is made of these rows. No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

PUBLISHED: Final[dict[str, dict[str, Any]]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
"""Name -> config.json."""

Form = Literal["", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp4", "nvfp4", "awq", "gptq", "int4_packed", "int8"]


class Row(NamedTuple):
    name: str
    """Key of `PUBLISHED`."""
    form: Form = ""
    """How the weights are quantised; empty: they are not."""
    code: Literal["own", "transformers"] = "own"
    """Whose code computes the model, if it loads."""
    refused: str = ""
    """Words of the refusal, which name what is missing; empty: it loads."""
    max_model_len: int | None = None


NOT_SUPPORTED = "architectures: .* is not supported"
ROWS: Final = (
    Row("DeepSeek-V3", "fp8_block"),
    Row("DeepSeek-V3.1", "fp8_block"),
    Row("DeepSeek-V3-bf16"),
    Row("Moonlight-16B-A3B-Instruct"),
    Row("DeepSeek-V2-Lite-Chat"),
    Row("DeepSeek-R1-NVFP4", "nvfp4"),
    Row("DeepSeek-R1-AWQ", "awq"),
    Row("DeepSeek-V3.2", "fp8_block"),
    Row("DeepSeek-V4-Flash", "fp8_block", refused="sparse attention by an index"),
    Row("Kimi-K2-Instruct", "fp8_block"),
    Row("Kimi-K2-Instruct-BF16"),
    Row("Kimi-K2-Thinking", "int4_packed"),
    Row("Kimi-K2.5", "int4_packed"),
    Row("Kimi-Linear-48B-A3B", code="transformers"),
    Row("Qwen3-0.6B"),
    Row("Qwen3-32B"),
    Row("Qwen3-30B-A3B"),
    Row("Qwen3-Coder-480B-A35B-Instruct"),
    Row("QwQ-32B"),
    Row("Qwen2.5-7B-Instruct"),
    Row("Qwen3-32B-FP8", "fp8_block"),
    Row("Qwen3-235B-A22B-FP8", "fp8_block"),
    Row("Qwen3-32B-AWQ", "awq"),
    Row("Qwen2.5-72B-Instruct-AWQ", "awq"),
    Row("Qwen2.5-32B-Instruct-GPTQ-Int4", "gptq"),
    Row("DeepSeek-R1-0528-Qwen3-8B", refused="attn_factor .* write attention_factor"),
    Row("Qwen3-Next-80B-A3B-Instruct", code="transformers"),
    Row("Qwen3.5-122B-A10B", code="transformers"),
    Row("Qwen3.6-35B-A3B-FP8", "fp8_block", code="transformers"),
    Row("Qwen3-VL-235B-A22B-Thinking", code="transformers"),
    Row("Qwen3-VL-8B-Instruct", code="transformers"),
    Row("Qwen2.5-VL-7B-Instruct", code="transformers"),
    Row("gpt-oss-20b", "mxfp4"),
    Row("gpt-oss-120b", "mxfp4"),
    Row("Llama-3.1-8B-Instruct"),
    Row("Llama-3.2-1B-Instruct"),
    Row("DeepSeek-R1-Distill-Llama-8B"),
    Row("Llama-3.3-70B-Instruct-FP8-dynamic", "fp8_channel"),
    Row("Llama-3.3-70B-Instruct-FP8 (modelopt)", "fp8_tensor"),
    Row("Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "int8"),
    Row("Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "awq"),
    Row("Llama-4-Scout-17B-16E-Instruct", code="transformers"),
    Row("Mistral-7B-Instruct-v0.3"),
    Row("Mistral-Small-24B-Instruct-2501"),
    Row("Devstral-Small-2507"),
    Row("Ministral-8B-Instruct-2410"),
    Row("Mistral-7B-v0.1", code="transformers"),
    Row("Mistral-Small-3.2-24B-Instruct-2506", code="transformers"),
    Row("Ministral-3-8B-Instruct-2512", code="transformers"),
    Row("Mixtral-8x7B-v0.1", code="transformers"),
    Row("GLM-4.5", code="transformers"),
    Row("GLM-4.6-FP8", "fp8_channel", code="transformers"),
    Row("GLM-4-9B-0414", code="transformers"),
    Row("GLM-4.7-Flash"),
    Row("GLM-5"),
    Row("MiniMax-M2", "fp8_block", code="transformers"),
    Row("gemma-3-1b-it", code="transformers"),
    Row("gemma-3-27b-it", code="transformers"),
    Row("phi-4", code="transformers"),
    Row("Phi-4-mini-instruct", code="transformers", refused="longest sequence of a batch"),
    Row("OLMo-2-1124-13B-Instruct", code="transformers"),
    Row("Olmo-3-32B-Think", code="transformers"),
    Row("granite-3.3-8b-instruct", code="transformers"),
    Row("granite-4.0-h-small", code="transformers"),
    Row("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", code="transformers"),
    Row("Llama-3_3-Nemotron-Super-49B-v1", refused=NOT_SUPPORTED),
    Row("Hunyuan-A13B-Instruct", code="transformers"),
    Row("Seed-OSS-36B-Instruct", code="transformers"),
    Row("EXAONE-4.0-32B", code="transformers"),
    Row("MiMo-V2-Flash", "fp8_block", code="transformers"),
    Row("Step-3.5-Flash", refused=NOT_SUPPORTED),
)
"""The list. Most keys are those of a public repository of configs. From memory are Kimi-K2-Thinking and -Linear,
Qwen3-Next, Qwen2.5-VL, the forms that third parties quantised, Mistral 3, Ministral 3, GLM-4, Gemma 3, Phi-4, OLMo,
Granite, Hunyuan, Seed-OSS, EXAONE and Step-3.5."""

HF_QUANT: Final[dict[str, dict[str, Any]]] = {
    form: {
        "producer": {"name": "modelopt", "version": "0.23.0"},
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
            **sizes,
        },
    }
    for form, algorithm, sizes in (("fp8_tensor", "FP8", {}), ("nvfp4", "NVFP4", {"group_size": 16}))
}
"""`hf_quant_config.json` of NVIDIA's folders, whose config.json says nothing of it."""


def config_of(row: Row) -> dict[str, Any]:
    """Return the row's config.json with windows and original lengths of ropes that the tests' prompts exceed."""
    config: dict[str, Any] = json.loads(json.dumps(PUBLISHED[row.name]))
    for part in (config, config.get("text_config", {})):
        window = part.get("sliding_window")
        if window is not None and window < part.get("max_position_embeddings", window + 1):
            part["sliding_window"] = min(window, 24)
        for key in ("rope_scaling", "rope_parameters"):
            rope = part.get(key) or {}
            if "original_max_position_embeddings" in rope:
                rope["original_max_position_embeddings"] = 64
    return config


def write_row_config(row: Row, folder: Path) -> None:
    """Write config.json, and what says how the weights are quantised if config.json does not."""
    config = config_of(row)
    (folder / "config.json").write_text(json.dumps(config))
    if row.form in HF_QUANT and "quantization_config" not in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(HF_QUANT[row.form]))
