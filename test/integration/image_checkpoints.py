"""Tiny random models with vision of several families, written by `transformers`, and requests with images for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from chitu.engine.executor import ImageSpan

VOCAB = 500
IMAGE, VIDEO, START, END = 490, 491, 492, 493
FIRST_SPECIAL = 480
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
QWEN_TOWER: dict[str, Any] = {
    **TOWER,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
PATCH_NUMBERS = 3 * 2 * 4 * 4
PLAIN_TOWER: dict[str, Any] = {**TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}
INTERLEAVED = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}


def _qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tower = {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=tower, **IDS)


def _qwen3_vl(**text: Any) -> Any:
    config = transformers.Qwen3VLMoeConfig if text else transformers.Qwen3VLConfig
    tower = {**QWEN_TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
    return config(text_config={**TEXT, **INTERLEAVED, **text}, vision_config=tower, **IDS)


def _qwen3_5() -> Any:
    linear = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    rope = {**INTERLEAVED["rope_parameters"], "partial_rotary_factor": 1.0}
    return transformers.Qwen3_5Config(
        text_config={**TEXT, **INTERLEAVED, **linear, "rope_parameters": rope},
        vision_config={**QWEN_TOWER, "num_position_embeddings": 256},
        **IDS,
    )


def _gemma3() -> Any:
    text = {**TEXT, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}
    return transformers.Gemma3Config(
        text_config={**text, "layer_types": ["sliding_attention", "full_attention"] * 2},
        vision_config={**PLAIN_TOWER, "image_size": 56},
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )


def _mistral3() -> Any:
    return transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None),
        vision_config=transformers.PixtralVisionConfig(**PLAIN_TOWER, head_dim=16, image_size=448),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _glm4v_moe() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    others = {"image_start_token_id": 494, "image_end_token_id": 495, "video_start_token_id": 496}
    return transformers.Glm4vMoeConfig(
        text_config={**TEXT, **experts, "head_dim": 16, "rope_parameters": rope, "pad_token_id": 0},
        vision_config={**QWEN_TOWER, "image_size": 64},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        video_end_token_id=497,
        **others,
    )


def _internvl() -> Any:
    return transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT),
        vision_config={**PLAIN_TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        image_token_id=IMAGE,
        image_seq_length=4,
    )


@dataclass(frozen=True)
class Picture:
    """An image as the image process leaves it, and its place in a prompt."""

    patches: dict[str, torch.Tensor]
    tokens: list[int]
    spans: list[tuple[int, int, int]]
    """Place of its runs of rows among `tokens`, their lengths, and their first feature rows."""
    grid: tuple[int, int, int]

    @property
    def num_rows(self) -> int:
        return sum(length for _, length, _ in self.spans)


Size = tuple[int, int]
"""Height and width, in feature rows."""


def _qwen_picture(size: Size, generator: torch.Generator) -> Picture:
    height, width = size
    count = height * width
    patches = {
        "pixel_values": torch.randn(4 * count, PATCH_NUMBERS, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2 * height, 2 * width]]),
    }
    return Picture(patches, [START, *[IMAGE] * count, END], [(1, count, 0)], (1, height, width))


def _gemma_picture(_size: Size, generator: torch.Generator) -> Picture:
    patches = {"pixel_values": torch.randn(1, 3, 56, 56, generator=generator), "num_crops": torch.tensor([0])}
    return Picture(patches, [START, *[IMAGE] * 16, END], [(1, 16, 0)], (1, 4, 4))


def _pixtral_picture(size: Size, generator: torch.Generator) -> Picture:
    height, width = size
    pixels = torch.randn(1, 3, 28 * height, 28 * width, generator=generator)
    tokens, spans = [], []
    for row in range(height):
        spans.append((len(tokens), width, row * width))
        tokens += [*[IMAGE] * width, END if row == height - 1 else START]
    return Picture(
        {"pixel_values": pixels, "image_sizes": torch.tensor([[28 * height, 28 * width]])}, tokens, spans, (0, 0, 0)
    )


def _tiled_picture(size: Size, generator: torch.Generator) -> Picture:
    tiles = 1 + size[0] % 3
    patches = {"pixel_values": torch.randn(tiles, 3, 28, 28, generator=generator)}
    return Picture(patches, [START, *[IMAGE] * 4 * tiles, END], [(1, 4 * tiles, 0)], (0, 0, 0))


def _joined(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Return the arguments of a whole model for these images."""
    parts = {name: [picture.patches[name] for picture in pictures] for name in pictures[0].patches}
    if "image_sizes" in parts:  # padded to the largest
        sizes = [each.shape[2:] for each in parts["pixel_values"]]
        most = max(h for h, _ in sizes), max(w for _, w in sizes)
        pads = [(0, most[1] - w, 0, most[0] - h) for h, w in sizes]
        images = zip(parts["pixel_values"], pads, strict=True)
        parts["pixel_values"] = [torch.nn.functional.pad(each, pad) for each, pad in images]
    parts.pop("num_crops", None)
    return {name: torch.cat(each) for name, each in parts.items()}


@dataclass(frozen=True)
class ImageFamily:
    architecture: str
    config: Callable[[], Any]
    picture: Callable[[Size, torch.Generator], Picture] = _qwen_picture
    kinds: str = "mm_token_type_ids"
    """Argument of the whole model that says which tokens are of images; empty if there is none."""


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES_WITH_VISION = {
    "qwen2_5_vl": ImageFamily("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3_vl": ImageFamily("Qwen3VLForConditionalGeneration", _qwen3_vl),
    "qwen3_vl_moe": ImageFamily("Qwen3VLMoeForConditionalGeneration", lambda: _qwen3_vl(**MOE)),
    "qwen3_5": ImageFamily("Qwen3_5ForConditionalGeneration", _qwen3_5),
    "gemma3": ImageFamily("Gemma3ForConditionalGeneration", _gemma3, _gemma_picture, "token_type_ids"),
    "mistral3": ImageFamily("Mistral3ForConditionalGeneration", _mistral3, _pixtral_picture, ""),
    "glm4v_moe": ImageFamily("Glm4vMoeForConditionalGeneration", _glm4v_moe),
    "internvl": ImageFamily("InternVLForConditionalGeneration", _internvl, _tiled_picture, ""),
}


def write_vision_checkpoint(folder: Path, name: str) -> Any:
    """Write a random float32 model and return transformers' own, with eager attention. Biases and norms are random,
    too, and features about as large as embeddings."""
    family = FAMILIES_WITH_VISION[name]
    config = family.config()
    config.tie_word_embeddings = False
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, family.architecture)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 if "embed" in key else parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(1.0 if "norm" in key and "bias" not in key else 0.0, 0.1)
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model


@dataclass
class PictureRequest:
    """A prompt with images, text before, between (of none to a few tokens) and behind them."""

    family: ImageFamily
    pictures: list[Picture]
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, ImageSpan]] = field(default_factory=list)
    """Each with the number of its picture."""
    firsts: list[int] = field(default_factory=list)
    """First feature row of each span."""

    @classmethod
    def of(cls, name: str, sizes: Sequence[Size], seed: int, lead: int) -> PictureRequest:
        source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        family = FAMILIES_WITH_VISION[name]
        request = cls(family, [family.picture(size, generator) for size in sizes])
        request.tokens += [source.randrange(FIRST_SPECIAL) for _ in range(lead)]
        for number, picture in enumerate(request.pictures):
            at = len(request.tokens)
            for start, length, first in picture.spans:
                request.spans.append((number, ImageSpan(at + start, length, picture.grid)))
                request.firsts.append(first)
            request.tokens += [*picture.tokens, *(source.randrange(FIRST_SPECIAL) for _ in range(source.randrange(21)))]
        request.tokens += [source.randrange(FIRST_SPECIAL) for _ in range(7)]
        return request

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        return tuple(span for _, span in self.spans)

    def reference(self, model: Any, generated: Sequence[int]) -> torch.Tensor:
        """Return the logits `[T, V]` of the whole model's own forward."""
        ids = torch.tensor([[*self.tokens, *generated]])
        given: dict[str, torch.Tensor] = {}
        if self.pictures:
            given = _joined(self.pictures)
            if self.family.kinds:
                given[self.family.kinds] = (ids == IMAGE).int()
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        with torch.inference_mode():
            logits_TV: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits[0]
        return logits_TV


def write_patches(folder: Path, pictures: Sequence[Picture]) -> list[str]:
    """Write the file of each image, as the image process does."""
    paths = []
    for number, picture in enumerate(pictures):
        path = folder / f"{number}.safetensors"
        save_file(picture.patches, path)
        paths.append(str(path))
    return paths
