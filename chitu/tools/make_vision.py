"""What a made model has beside its text part when its family has vision: the tower, its settings, its special tokens.

A family with vision is a text family (`TEXT_FAMILIES`) whose tensors and settings lie one level deeper, beside those
of a small vision tower (Qwen3-VL: its features enter the embeddings, and two more rows of each the first layers). The
tower's matrices have gain 1, as the text's, so that features are about as large as embeddings and every part of an
image changes the logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chitu.errors import ConfigError

if TYPE_CHECKING:
    from chitu.tools.make_model import ModelShape

VISION_FAMILIES: dict[str, str] = {"qwen3_vl": "Qwen3VLForConditionalGeneration"}
TEXT_FAMILIES = {"qwen3_vl": "qwen3"}
"""Text family of each."""

VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
VISION_TOKENS = (VISION_START, IMAGE_PAD, VIDEO_PAD, VISION_END)

PATCH_SIZE = 16
TEMPORAL_PATCH_SIZE = 2
MERGE_SIZE = 2
MIN_PIXELS = 32 * 32
"""Pixels of one token; a smaller image is enlarged to it."""
MAX_VIDEO_PIXELS = 1 << 20
"""Pixels of the 512 tokens of a video, two frames each."""
TOWER_HEADS = 4
DEEP_LAYERS = (0, 1)
"""Layers of the tower whose output is added behind the first layers of the text part."""
GRID = 16
"""Side of the square of learned positions."""

PART_OF_TEXT = "{{- part.text }}"
PARTS = f"""\
{{%- if part.type in ['image', 'image_url'] or 'image' in part or 'image_url' in part %}}
{{{{- '{VISION_START}{IMAGE_PAD}{VISION_END}' }}}}
{{%- elif part.type in ['video', 'video_url'] or 'video' in part or 'video_url' in part %}}
{{{{- '{VISION_START}{VIDEO_PAD}{VISION_END}' }}}}
{{%- elif 'text' in part %}}
{{{{- part.text }}}}
{{%- endif %}}"""

Array = NDArray[np.float32]


def with_images(chat_template: str) -> str:
    """Return a chat template that also writes a placeholder for each part that is an image or a video."""
    return chat_template.replace(PART_OF_TEXT, PARTS)


def nested(name: str) -> str:
    """Return the name, in a model with vision, of a text model's tensor."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def check_tower(shape: ModelShape) -> None:
    """Raise ConfigError if no such tower can be made."""
    if shape.tower_size < 4 * TOWER_HEADS or shape.tower_size % (4 * TOWER_HEADS):
        raise ConfigError(
            f"tower_size {shape.tower_size} is no multiple of {4 * TOWER_HEADS}: {TOWER_HEADS} heads rotate two axes"
        )
    if shape.tower_depth <= max(DEEP_LAYERS):
        raise ConfigError(f"tower_depth {shape.tower_depth} is below {max(DEEP_LAYERS) + 1}")
    if shape.max_pixels < MIN_PIXELS:
        raise ConfigError(f"max_pixels {shape.max_pixels} is below the {MIN_PIXELS} of one token")


def vision_config(family: str, text: dict[str, Any], ids: dict[str, int], shape: ModelShape) -> dict[str, Any]:
    """Return config.json. `text`: that of the text family, whose keys go into `text_config`."""
    half = shape.resolved_head_dim // 2
    side = half * 5 // 16
    text = {
        **text,
        "model_type": f"{family}_text",
        "rope_scaling": {
            "rope_type": "default",
            **(shape.rope_scaling or {}),
            "mrope_section": [half - 2 * side, side, side],
            "mrope_interleaved": True,
        },
    }
    for key in ("architectures", "torch_dtype", "use_sliding_window", "sliding_window", "max_window_layers"):
        text.pop(key, None)
    return {
        "architectures": [VISION_FAMILIES[family]],
        "model_type": family,
        "torch_dtype": shape.dtype,
        "tie_word_embeddings": shape.tie,
        "image_token_id": ids[IMAGE_PAD],
        "video_token_id": ids[VIDEO_PAD],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "text_config": text,
        "vision_config": {
            "model_type": f"{family}_vision",
            "depth": shape.tower_depth,
            "hidden_size": shape.tower_size,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 2 * shape.tower_size,
            "num_heads": TOWER_HEADS,
            "in_channels": 3,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "out_hidden_size": shape.hidden_size,
            "num_position_embeddings": GRID * GRID,
            "deepstack_visual_indexes": list(DEEP_LAYERS),
            "initializer_range": 0.02,
        },
    }


def write_processor(folder: Path, max_pixels: int) -> None:
    """Write preprocessor_config.json and the same for videos, by which files become patches.

    `max_pixels`: a larger image is made smaller.
    """
    config: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels},
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    videos = {
        **{key: value for key, value in config.items() if key != "image_processor_type"},
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": MIN_PIXELS * TEMPORAL_PATCH_SIZE, "longest_edge": MAX_VIDEO_PIXELS},
    }
    for name, settings in (("preprocessor_config.json", config), ("video_preprocessor_config.json", videos)):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def tower_tensors(
    shape: ModelShape, matrix: Callable[[int, int, float], Array], around: Callable[[float, int], Array]
) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of the tower, drawn by `matrix` (rows, columns, std) and `around` (mean, size)."""
    size, mlp_size = shape.tower_size, 2 * shape.tower_size
    patch = (3, TEMPORAL_PATCH_SIZE, PATCH_SIZE, PATCH_SIZE)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> Iterable[tuple[str, Array]]:
        yield f"{name}.weight", matrix(rows, columns, gain / math.sqrt(columns))
        yield f"{name}.bias", around(0.0, rows)

    def norm(name: str, width: int) -> Iterable[tuple[str, Array]]:
        yield f"{name}.weight", around(1.0, width)
        yield f"{name}.bias", around(0.0, width)

    def merger(name: str, norm_size: int) -> Iterable[tuple[str, Array]]:
        merged = size * MERGE_SIZE**2
        yield from norm(f"{name}.norm", norm_size)
        yield from linear(f"{name}.linear_fc1", merged, merged)
        yield from linear(f"{name}.linear_fc2", shape.hidden_size, merged, 2.0)

    inputs = math.prod(patch)
    yield "model.visual.patch_embed.proj.weight", matrix(size, inputs, 2 / math.sqrt(inputs)).reshape(-1, *patch)
    yield "model.visual.patch_embed.proj.bias", around(0.0, size)
    yield "model.visual.pos_embed.weight", matrix(GRID * GRID, size, 0.5)
    for layer in range(shape.tower_depth):
        block = f"model.visual.blocks.{layer}"
        yield from norm(f"{block}.norm1", size)
        yield from norm(f"{block}.norm2", size)
        yield from linear(f"{block}.attn.qkv", 3 * size, size)
        yield from linear(f"{block}.attn.proj", size, size, 2.0)
        yield from linear(f"{block}.mlp.linear_fc1", mlp_size, size)
        yield from linear(f"{block}.mlp.linear_fc2", size, mlp_size, 2.0)
    yield from merger("model.visual.merger", size)
    for index in range(len(DEEP_LAYERS)):
        yield from merger(f"model.visual.deepstack_merger_list.{index}", size * MERGE_SIZE**2)


def special_tokens(family: str, text_tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the special tokens of a family, in the order of their ids. `text_tokens`: those of every family."""
    return (*text_tokens, *VISION_TOKENS) if family in VISION_FAMILIES else tuple(text_tokens)
