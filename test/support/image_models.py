"""Folders with what decides the images of a model: configuration and added tokens, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 1003520,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_HALF,
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 112, "width": 112}, **_HALF},
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}, "patch_size": 14},
    "llava": {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 1024}, "patch_size": 16},
    "glm4v_moe": {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 56, "width": 56},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
    },
}
_TOKENS = {
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "llava": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "glm4v_moe": ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>"),
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_token_index": 502, "boi_token_index": 500, "eoi_token_index": 501, "mm_tokens_per_image": 64},
    "mistral3": {"image_token_index": 500, "spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
    "llava": {"image_token_index": 500, "vision_config": {"model_type": "pixtral", "patch_size": 16}},
    "internvl": {"image_token_id": 502, "image_seq_length": 4},
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "mistral3": {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
}
IMAGE_FAMILIES = tuple(_PREPROCESSORS)


def write_image_model(folder: Path, family: str, **preprocessor: Any) -> Path:
    """Write a folder of the family, with changes to its preprocessor_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _TOKENS.get(family, _QWEN_TOKENS)
    added = [{"id": 500 + index, "content": text, "special": True} for index, text in enumerate(tokens)]
    config = {"model_type": family, "vision_config": {"depth": 2}, "image_token_id": 502, **_CONFIGS.get(family, {})}
    _write(folder / "config.json", config)
    _write(folder / "preprocessor_config.json", {**_PREPROCESSORS[family], **preprocessor})
    _write(folder / "tokenizer.json", {"added_tokens": added})
    if family in _PROCESSORS:
        _write(folder / "processor_config.json", _PROCESSORS[family])
    return folder


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
