"""The part of a generic model that makes features of images: the modules of `transformers` beside the decoder.

Owned by the model, called between the forwards of its decoder. The body of the whole model is kept for its method
`get_image_features`, whose arguments are those that the model's image processor makes of a file. Images are computed
together where their arguments have equal shapes behind the first dimension, along which the library joins images. What
no attribute tells (`is_whole`) is found by the self-check (`image_check.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from chitu.errors import Internal, UnsupportedModel
from chitu.models.model import AtBlock
from chitu.ops.image_rows import FeatureShape

FEATURES = "get_image_features"
GIVEN_FEATURES = "mm_encoder_outputs"
"""Parameter by which a body takes features of images in the place of patches."""
PLACEHOLDERS = ("image_token_id", "image_token_index")
"""Attributes of a config that name the token of a row of an image."""
SPECIAL_ENDINGS = ("_token_id", "_token_index")
"""Ends of the names of a config's attributes that hold tokens with a meaning."""

Patches = Mapping[str, torch.Tensor]
"""Arguments of `get_image_features` for one image, by name."""


class _Encoded:
    """What a tower gives: features, and no other output."""

    def __init__(self, pooler_output: Any, deepstack_features: list[list[torch.Tensor]]) -> None:
        self.pooler_output, self.deepstack_features = pooler_output, deepstack_features

    def __getattr__(self, name: str) -> None:
        return None


class Vision:
    """The body of the whole model, asked for features alone."""

    def __init__(
        self, body: Any, names: Sequence[str], hidden_size: int, dtype: torch.dtype, token_numbers: float = 0.0
    ) -> None:
        """`names`: with which the names of the tensors begin, in the body, that features are made with.
        `token_numbers`: as in `numbers_a_token`; 0 without a decoder."""
        self.body = body
        self.names = names
        self.is_whole = False
        """Whether rows of an image attend to all of it."""
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._arguments = frozenset(inspect.signature(getattr(body, FEATURES)).parameters)
        self._report: Callable[[], None] | None = None
        self._at_block: AtBlock | None = None
        self._num_begun = self._num_blocks = 0
        """Blocks of the present call of `encode`: those that it has begun, and all."""
        self._token_numbers = token_numbers

    @property
    def shape(self) -> FeatureShape:
        deep = getattr(self.config, "deepstack_visual_indexes", None) or ()
        has_grid = hasattr(self.body, "get_rope_index")
        return FeatureShape(self._hidden_size, len(deep), has_grid, self.is_whole)

    @property
    def config(self) -> Any:
        """The config of the tower."""
        return self.body.config.vision_config

    @property
    def placeholder(self) -> int:
        """The token that the library takes for a row of an image. Raises UnsupportedModel if its config names none."""
        for name in PLACEHOLDERS:
            if isinstance(token := getattr(self.body.config, name, None), int):
                return token
        raise UnsupportedModel(f"its config has none of {', '.join(PLACEHOLDERS)}")

    def special_tokens(self) -> set[int]:
        """Return the tokens that the config gives a meaning."""
        config = vars(self.body.config).items()
        named = {value for name, value in config if name.endswith(SPECIAL_ENDINGS) and isinstance(value, int)}
        return {self.placeholder} | named

    def reference(
        self, token_ids_T: torch.Tensor, grids: Sequence[tuple[int, int, int]], features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the hidden states `[T, D]` of a sequence by the whole body, with features `[rows, width]` of images
        in the place of what the tower makes."""
        ids_1T, shape, side = (
            token_ids_T.unsqueeze(0),
            self.shape,
            getattr(self.config, "spatial_merge_size", None) or 1,
        )
        is_image_1T = (ids_1T == self.placeholder).long()
        offered = {
            "image_grid_thw": torch.tensor([(t, h * side, w * side) for t, h, w in grids], device=ids_1T.device),
            "mm_token_type_ids": is_image_1T,
            "token_type_ids": is_image_1T,
        }
        taken = inspect.signature(self.body.forward).parameters
        given = {name: value for name, value in offered.items() if name in taken}
        layers = list(zip(*(each.chunk(1 + shape.num_deep, dim=1) for each in features), strict=True))

        def hidden(pooled: Any) -> torch.Tensor:
            encoded = {GIVEN_FEATURES: {"image": _Encoded(pooled, [list(layer) for layer in layers[1:]])}}
            out = self.body(input_ids=ids_1T, use_cache=False, **encoded, **given)
            states_TD: torch.Tensor = out.last_hidden_state[0]
            return states_TD

        try:
            return hidden(list(layers[0]))
        except (AttributeError, TypeError):  # some take the images joined
            return hidden(torch.cat(layers[0]).unsqueeze(0))
        finally:
            if hasattr(self.body, "rope_deltas"):
                self.body.rope_deltas = None  # kept from one call to the next

    @cached_property
    def _blocks(self) -> list[torch.nn.Module]:
        """The blocks of the tower, each of which says when it is computed."""
        blocks = [
            block
            for name, part in self.body.named_modules()
            if name.startswith(tuple(self.names)) and isinstance(part, torch.nn.ModuleList)
            for block in part
        ]
        for block in blocks:
            block.register_forward_pre_hook(self._begin_block)
        return blocks

    def report_blocks(self, report: Callable[[], None]) -> None:
        """Call `report`, in place of any former one, before each block of the tower is computed."""
        self._report = report
        assert self._blocks is not None

    def _begin_block(self, _block: torch.nn.Module, _args: object) -> None:
        if self._at_block is not None:
            self._at_block(self._num_begun, self._num_blocks)
            self._num_begun += 1
        if self._report is not None:
            self._report()

    def block_cost(self) -> tuple[int, float, float]:
        """Return how many blocks the tower has, and what one costs for each row and for each pair of rows of an image,
        in tokens of a prompt: by the numbers that are multiplied."""
        blocks, token, patches = self._blocks, max(1.0, self._token_numbers), self._patches_a_row
        numbers = sum([tensor.numel() for block in blocks for tensor in block.parameters()]) / max(1, len(blocks))
        pairs = 2 * (getattr(self.config, "hidden_size", None) or 0) * patches**2
        return len(blocks), patches * numbers / token, pairs / token

    @property
    def _patches_a_row(self) -> int:
        """About how many patches become one row."""
        merged = getattr(self.body.config, "mm_tokens_per_image", None)
        if merged and isinstance(side := self.config.image_size, int):
            return max(1, int(side // self.config.patch_size) ** 2 // int(merged))
        return int(getattr(self.config, "spatial_merge_size", None) or 2) ** 2

    def step_bytes(self, num_rows: int) -> int:
        """Return about the most bytes of numbers that images with so many feature rows need while they are computed."""
        config = self.config
        hidden, inner = (getattr(config, name, None) or 0 for name in ("hidden_size", "intermediate_size"))
        patches = num_rows * self._patches_a_row
        return patches * max(10 * hidden, 3 * hidden + 2 * inner) * self._dtype.itemsize

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the modules that no text passes, by name."""
        prefixes = tuple(self.names)
        named = *self.body.named_parameters(), *self.body.named_buffers()
        return {name: tensor for name, tensor in named if name.startswith(prefixes)}

    def encode(
        self, images: Sequence[Patches], counts: Sequence[int], device: torch.device, at_block: AtBlock | None = None
    ) -> list[torch.Tensor]:
        """Return the features `[rows, width]` of each image. `counts`: their rows. Raises Internal if it has others."""
        found: dict[int, torch.Tensor] = {}
        alike: dict[object, list[int]] = {}
        for index, patches in enumerate(images):
            form = tuple((name, each.dtype, each.shape[1:]) for name, each in sorted(patches.items()))
            alike.setdefault(form, []).append(index)
        self._at_block, self._num_begun, self._num_blocks = at_block, 0, len(self._blocks) * len(alike)
        try:
            for group in alike.values():
                if [counts[index] for index in group] == [1]:
                    group = group * 2  # some classes drop the dimension of a lone row
                joined = {name: torch.cat([images[index][name] for index in group]) for name in images[group[0]]}
                features_MW = self._features(joined, [counts[index] for index in group], device)
                found |= zip(group, features_MW, strict=True)
        finally:
            self._at_block = None
        return [found[index] for index in range(len(images))]

    def _features(self, patches: Patches, counts: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        given = {name: self._moved(each, device) for name, each in patches.items() if name in self._arguments}
        out = getattr(self.body, FEATURES)(**given, return_dict=True)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        parts = [self._split(layer, counts) for layer in layers]
        return [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]

    def _split(self, layer: Any, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the rows of each image. `layer`: of all, or a tensor of each."""
        if not isinstance(layer, torch.Tensor):
            lengths = [each.shape[:-1].numel() for each in layer]
            if len(lengths) == len(counts) and lengths != list(counts):
                raise Internal(f"images have {lengths} feature rows, and {list(counts)} placeholders")
            layer = torch.cat([each.reshape(-1, each.shape[-1]) for each in layer])
        rows_MD = layer.reshape(-1, layer.shape[-1])
        if rows_MD.shape[0] != sum(counts):
            raise Internal(f"images have {rows_MD.shape[0]} feature rows, and {list(counts)} placeholders")
        return list(rows_MD.split(list(counts)))

    def _moved(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return values.to(device, self._dtype if values.is_floating_point() else None)


def numbers_a_token(decoder: Any) -> float:
    """Return about how many numbers of a decoder's matrices a token of a prompt is multiplied with."""
    chosen, total = getattr(decoder.config, "num_experts_per_tok", None) or 1, 0.0
    if isinstance(chosen, Sequence):  # by layer
        chosen = max(chosen)
    for name, tensor in decoder.named_parameters():
        if tensor.ndim == 3:  # of each expert
            total += tensor.numel() * min(1.0, chosen / tensor.shape[0])
        elif tensor.ndim == 2 and "embed" not in name:
            total += tensor.numel()
    return total


def names_beside(body: Any, decoder: Any) -> list[str]:
    """Return with which the names of a body's tensors begin that are not its decoder's."""
    children = [
        f"{name}." for name, part in body.named_children() if all(module is not decoder for module in part.modules())
    ]
    return children + [name for name, _ in body.named_parameters(recurse=False)]


def why_blind(body: Any) -> str:
    """Return why a body makes no features that could be given to its decoder; empty if it does."""
    if not hasattr(body, FEATURES):
        return f"{type(body).__name__} has no {FEATURES}"
    if GIVEN_FEATURES not in inspect.signature(body.forward).parameters:
        return f"{type(body).__name__} takes no features ({GIVEN_FEATURES}): a newer transformers may"
    return ""
