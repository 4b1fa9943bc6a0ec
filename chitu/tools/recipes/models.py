"""Models and cards that published recipes name: sizes as published, and what this code does with a model of that form.

What is said of the code (`own`, `drafts`, `refused`) is compared with the code itself by a test, for the config that
`like` names in test/support/checkpoints.py.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "fp4": 4, "mxfp4": 4}
KEPT_BYTES = {"fp8": 1 + 4 / 128, "fp4": 1 / 2 + 2 / 16, "mxfp4": 1 / 2 + 4 / 32}
"""Of a number that GPUs keep as small as it is stored, with its scales, by `bits` of recipes. Weights of models on
transformers' modules are turned into 16 (docs/gpu.md)."""
CARD_GB = {"a100": 80, "h100": 80, "h200": 141, "b200": 180, "b300": 270, "gb200": 186, "gb300": 279}
NO_FORM = "no architecture of its form is known here"


class KnownModel(NamedTuple):
    billions: float
    of_experts: float
    """Billions of weights in its routed experts."""
    like: str
    """Row of test/support/checkpoints.py with a config of this form; empty if there is none."""
    pattern: str
    """Matches the names of its checkpoints, in lower case with `-` for every other sign."""
    is_own: bool = True
    """Whether our own code computes it."""
    drafts: bool = False
    """Whether its checkpoint has a layer that drafts here (`speculation: mtp`)."""
    refused: str = ""
    """Why this project refuses it; empty: it does not."""


MODELS = {
    "DeepSeek-R1": KnownModel(
        671, 654, "DeepSeek-V3", r"deepseek-(r1|v3)(?!-2|-distill)|^dsr1|^dsfp[48]$", drafts=True
    ),
    "DeepSeek-V3.2": KnownModel(671, 654, "DeepSeek-V3.2", r"deepseek-v3-?2"),
    "DeepSeek-V4-Pro": KnownModel(
        *(1600, 1550, "DeepSeek-V4-Flash", r"(deepseek-?v4|dsv4)-?(?!.*flash)"), refused="sparse attention by an index"
    ),
    "DeepSeek-V4-Flash": KnownModel(
        *(284, 271, "DeepSeek-V4-Flash", r"deepseek-?v4-?1?.*flash"), refused="sparse attention by an index"
    ),
    "GLM-5": KnownModel(744, 725, "GLM-5", r"glm-?5(?!-2)"),
    "GLM-5.2": KnownModel(744, 725, "GLM-5", r"glm-?5-2"),
    "Qwen3.5-397B-A17B": KnownModel(397, 387, "Qwen3.5-122B-A10B", r"qwen3-5(-397b|-fp8|-nvfp4)", is_own=False),
    "Qwen3.5-122B-A10B": KnownModel(122, 116, "Qwen3.5-122B-A10B", r"qwen3-5-122b", is_own=False),
    "Qwen3.8-2.4T-A95B": KnownModel(2400, 2350, "", r"qwen3-8-2-4t", is_own=False, refused=NO_FORM),
    "Qwen3-32B": KnownModel(32.8, 0, "Qwen3-32B", r"qwen3-32b"),
    "Qwen3-235B-A22B": KnownModel(235, 227, "Qwen3-235B-A22B-FP8", r"qwen3-235b"),
    "Qwen3-VL-32B": KnownModel(33, 0, "Qwen3-VL-8B-Instruct", r"qwen3-vl-32b", is_own=False),
    "gpt-oss-120b": KnownModel(117, 114, "gpt-oss-120b", r"gpt-oss-120b"),
    "Llama-3.3-70B": KnownModel(70.6, 0, "Llama-3.3-70B-Instruct-FP8-dynamic", r"llama-3-?[13]?-70b"),
    "Llama-3.1-8B": KnownModel(8, 0, "Llama-3.1-8B-Instruct", r"llama-3-1-8b"),
    "Kimi-K2": KnownModel(1026, 1012, "Kimi-K2-Instruct", r"kimi-k2(?!-?[56])"),
    "Kimi-K2.5": KnownModel(1026, 1012, "", r"kimi-k2-?[56]", refused=NO_FORM),
    "Kimi-K3": KnownModel(2500, 2450, "", r"kimi-k3", refused=NO_FORM),
    "Nemotron-3-Super": KnownModel(120, 108, "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", r"nemotron-3-super", is_own=False),
    "Nemotron-3-Ultra": KnownModel(550, 520, "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", r"nemotron-3-ultra", is_own=False),
}


def known_name(name: str) -> str:
    """Return the key of `MODELS` that a name of a checkpoint means, or the name itself without its owner."""
    last = name.rstrip("/").rpartition("/")[2] or name
    plain = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
    return next((key for key, model in MODELS.items() if re.search(model.pattern, plain)), last)
