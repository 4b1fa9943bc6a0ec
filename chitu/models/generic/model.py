"""A model whose modules are those of `transformers`: built from its config without weights, filled by our reader, and
called with rows of many sequences as if they were one.

Owns the modules. The decoder (embedding to final norm) gets all rows of a step as one sequence without a cache of its
own; only attention knows better (`attention.py`). The logits are computed by the library's class for language models,
whose decoder is replaced by a module that passes hidden states on, so its scaling and soft caps apply. Of a model with
parts for images or sound the text part is loaded, and what makes features of images (`vision.py`) if it is wanted and
`image_check.py` finds no fault; rows of images then take features in the place of embeddings. Code of the checkpoint's
folder is never run. Built by the thread that builds the engine, called by the step thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from chitu.errors import ConfigError, Internal, UnsupportedModel
from chitu.models.adapters import AdapterSpec
from chitu.models.config import ModelSpec
from chitu.models.generic.attention import PagedAttention
from chitu.models.generic.check import check
from chitu.models.generic.filling import TextParts, fill
from chitu.models.generic.fusing import fuse
from chitu.models.generic.image_check import check_images
from chitu.models.generic.library import library_version
from chitu.models.generic.lora import AdaptedModules
from chitu.models.generic.sharding import Sharding
from chitu.models.generic.spreading import SpreadExperts
from chitu.models.generic.states import bind_states
from chitu.models.generic.vision import Vision, numbers_a_token
from chitu.models.layers import Shard, Spread
from chitu.models.model import KVViews
from chitu.models.weights import WeightSource
from chitu.models.window_state import recurrent_of
from chitu.ops.interface import Batch, ImageRows, Ops

logger = logging.getLogger(__name__)

LIBRARY_ERRORS = (
    AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
    StrictDataclassError, ZeroDivisionError,
)  # fmt: skip
"""What the library raises for a config that it cannot use."""


class GenericModel:
    """A `Model` over modules of transformers, on one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        parts: TextParts,
        attention: PagedAttention,
        dtype: torch.dtype,
        sharding: Sharding | None = None,
        experts: SpreadExperts | None = None,
    ) -> None:
        self.is_main = sharding is None or sharding.is_main
        self.shard = sharding.shard if sharding is not None else None
        self.sharding = sharding
        self._experts = experts
        self.num_positions = spec.max_model_len
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.dtype = dtype
        self.parts = parts
        self.attention = attention
        self.adapters: AdaptedModules | None = None
        """None: it takes none."""
        self.vision: Vision | None = None
        """What makes features of images; None if only text is served."""
        self._states = bind_states(parts.decoder, parts.decoder.config.model_type, recurrent_of(spec.state))
        self._has_state = bool(recurrent_of(spec.state))

    def forward(
        self,
        token_ids_T: torch.Tensor,
        batch: Batch,
        cache: KVViews,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return hidden states `[T, D]` after the final norm, and write K and V of all rows into the pages. Calls
        `on_layer(l)` when K and V of layer l are in the pages, before its attention is computed."""
        adapting = self._adapting(batch) if batch.adapters else nullcontext()
        with self.attention.step(batch, cache, on_layer), self._states.step(batch, cache.states), adapting:
            rope = batch.positions_T.unsqueeze(0) if batch.rope_3T is None else batch.rope_3T.unsqueeze(1)
            out = self.parts.decoder(
                **self._inputs(token_ids_T, batch.images),
                position_ids=rope,
                past_key_values=_Passing(batch.positions_T),
                use_cache=False,
            )
        hidden_TD: torch.Tensor = out.last_hidden_state[0]
        return hidden_TD

    def _adapting(self, batch: Batch) -> AbstractContextManager[None]:
        if self.adapters is None:
            raise Internal(f"rows with LoRA adapters ({batch.adapters}), and none is loaded")
        return self.adapters.step(batch)

    def _inputs(self, token_ids_T: torch.Tensor, images: ImageRows | None) -> dict[str, Any]:
        """Return what the decoder takes for the rows: tokens, or embeddings some of which are features of images."""
        if images is None:
            return {"input_ids": token_ids_T.unsqueeze(0)}
        known_T = token_ids_T.index_fill(0, images.rows_M, 0)  # a placeholder may be no row of the table
        embeds_TD = self.parts.decoder.get_input_embeddings()(known_T)
        embeds_TD[images.rows_M] = images.features_MD.to(embeds_TD.dtype)
        inputs: dict[str, Any] = {"inputs_embeds": embeds_TD.unsqueeze(0)}
        if images.deeper:
            is_image_T = torch.zeros_like(token_ids_T, dtype=torch.bool).index_fill_(0, images.rows_M, True)
            inputs |= {"visual_pos_masks": is_image_T.unsqueeze(0), "deepstack_visual_embeds": list(images.deeper)}
        return inputs

    def lend(self) -> None:
        """Take part, without rows, in a step of other ranks among which the experts are spread."""
        assert self._experts is not None
        self._experts.lend()

    def logits(self, hidden_RD: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return float32 logits `[R, V]` of chosen rows of `forward`'s result, in `out` if that is given; None on all
        ranks but the main one."""
        if not self.is_main:
            return None
        logits_RV = self.own_logits(hidden_RD)
        return logits_RV if out_RV is None else out_RV.copy_(logits_RV)

    def normed(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return the rows: the library's decoder ends with the norm."""
        return hidden_RD

    def own_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return the logits on any rank: each has the whole head."""
        out = self.parts.head(inputs_embeds=hidden_RD.unsqueeze(0), use_cache=False)
        logits_RV: torch.Tensor = out.logits[0].float()
        return logits_RV

    def reference(self, token_ids_T: torch.Tensor, num_single: int) -> torch.Tensor:
        """Return hidden states `[T, D]` of one sequence by the library's own attention, without pages. With recurrent
        layers it computes the last `num_single` tokens one by one with its own cache, as while it generates: Mamba's
        single step does not limit the time step as its scan does."""
        decoder, num_tokens = self.parts.decoder, token_ids_T.shape[0]
        first, cache = num_tokens, None
        if self._has_state:
            first, cache = num_tokens - num_single, transformers.DynamicCache(config=decoder.config)
        decoder.set_attn_implementation("eager")
        try:
            parts = []
            for start, end in ((0, first), *((row, row + 1) for row in range(first, num_tokens))):
                out = decoder(
                    input_ids=token_ids_T[None, start:end],
                    position_ids=torch.arange(start, end, device=token_ids_T.device).unsqueeze(0),
                    past_key_values=cache,
                    use_cache=cache is not None,
                )
                parts.append(out.last_hidden_state[0])
        finally:
            decoder.set_attn_implementation(self.attention.name)
        return torch.cat(parts)

    def image_reference(
        self, token_ids_T: torch.Tensor, grids: Sequence[tuple[int, int, int]], features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return hidden states `[T, D]` of one sequence with images by the whole body of the library, without pages.
        `features`: `[rows, width]` of each image. Its rows have the body's placeholder (`Vision.placeholder`)."""
        assert self.vision is not None
        decoder = self.parts.decoder
        decoder.set_attn_implementation("eager")
        try:
            return self.vision.reference(token_ids_T, grids, features)
        finally:
            decoder.set_attn_implementation(self.attention.name)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank compute its part without the sums over the ranks, and without other ranks' experts."""
        if self.sharding is not None:
            self.sharding.is_summing = False
        if self._experts is not None:
            self._experts.is_alone = True
        try:
            yield
        finally:
            if self.sharding is not None:
                self.sharding.is_summing = True
            if self._experts is not None:
                self._experts.is_alone = False

    def parts_with_limits(self) -> list[Any]:
        """Return the decoder's modules and their configs."""
        modules = list(self.parts.decoder.modules())
        configs = {id(part.config): part.config for part in modules if hasattr(part, "config")}
        return [*modules, *configs.values()]


class _Passing:
    """The cache that the modules see: it keeps nothing. Some modules count positions from its length instead of taking
    those that they are given, so its length differs by row."""

    def __init__(self, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return, by row, what its position is more than its index."""
        return self._positions_T - torch.arange(self._positions_T.shape[0], device=self._positions_T.device)

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def build_generic(
    path: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightSource,
    shard: Shard | None = None,
    adapters: Sequence[AdapterSpec] = (),
    ops: Ops | None = None,
    spread: Spread | None = None,
    images: bool = False,
) -> GenericModel:
    """Build the model and read its weights, and those of its LoRA adapters. `images`: with what makes features of
    images, if the model has that. Raises ConfigError (UnsupportedModel) if
    the checkpoint or an adapter does not fit."""
    if adapters and shard is not None:
        raise UnsupportedModel(f"{adapters[0].key}: {spec.architecture} takes LoRA adapters with tp_size 1 only")
    if spread is not None and shard is not None:
        raise UnsupportedModel(f"experts is spread: {spec.architecture} takes that with tp_size 1 only")
    attention = PagedAttention(spec.num_layers, is_alone=shard is None, ops=ops)
    model = empty_model(path, spec, dtype)
    transformers.AttentionInterface.register(attention.name, attention)
    parts = TextParts(model)
    parts.decoder.set_attn_implementation(attention.name)  # not the tower's
    if images:
        _take_vision(parts, spec)
    sharding = None
    if shard is not None:
        sharding = Sharding(parts.decoder, f"{parts.decoder_name}.", spec, shard)
    experts = None
    if spread is not None:
        experts = SpreadExperts(parts.decoder, f"{parts.decoder_name}.", spread, spec.architecture)
    cuts = experts or sharding
    fill(model, parts, weights, device, spec, cuts.cut if cuts is not None else None)
    parts.detach()
    if experts is not None:
        experts.bind()
    if sharding is not None:
        sharding.add_sums(attention.on_sum)
    built = GenericModel(spec, parts, attention, dtype, sharding, experts)
    if shard is None:
        built.adapters = AdaptedModules(parts.decoder, f"{parts.decoder_name}.", dtype, device)
    modules = (*parts.decoder.modules(), *parts.head.modules())
    token_numbers = numbers_a_token(parts.decoder) if parts.vision_names else 0.0  # fused matrices are no parameters
    check(built, spec, device, shard.size if shard is not None else 1, lambda: fuse(modules, ops, built.adapters))
    if parts.vision_names:
        _add_vision(built, spec, device, token_numbers)
    for number, adapter in enumerate(adapters, 1):
        assert built.adapters is not None  # there is no shard
        built.adapters.put(number, built.adapters.read(adapter))
    return built


def build_tower(
    path: str | Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: WeightSource
) -> Vision:
    """Build what makes features of images, and read its weights alone. No self-check: an instance that has the decoder,
    too, decides whether its features are right. Raises ConfigError (UnsupportedModel) if there is none."""
    model = empty_model(path, spec, dtype)
    parts = TextParts(model)
    parts.take_vision(is_alone=True)
    fill(model, parts, weights, device, spec)
    if not parts.vision_names:
        raise UnsupportedModel(f"model.path: {path} has no tensors for images")
    return Vision(parts.body, parts.vision_names, spec.hidden_size, dtype)


def _take_vision(parts: TextParts, spec: ModelSpec) -> None:
    """Have what makes features of images loaded, if there is such a part and it can be used."""
    if not spec.is_text_part:
        return
    try:
        parts.take_vision()
    except UnsupportedModel as error:
        logger.warning("%s: images are not served: %s", spec.architecture, error.message)


def _add_vision(built: GenericModel, spec: ModelSpec, device: torch.device, token_numbers: float) -> None:
    """Let the model make features of images, if rows of such are computed as the library does."""
    parts = built.parts
    built.vision = Vision(parts.body, parts.vision_names, built.hidden_size, built.dtype, token_numbers)
    try:
        check_images(built, built.vision, spec, device)
    except UnsupportedModel as error:
        built.vision = None
        logger.warning("%s: images are not served: %s", spec.architecture, error.message)


def empty_model(path: str | Path, spec: ModelSpec, dtype: torch.dtype) -> Any:
    """Return the library's model on the device `meta`: shapes and dtypes without memory."""
    model_class = getattr(transformers, spec.architecture, None)
    if model_class is None:
        raise UnsupportedModel(f"architectures: {spec.architecture!r} is not in transformers {library_version()}")
    # It knows how a number that JSON lacks is written.
    keys, _ = model_class.config_class.get_config_dict(str(path), local_files_only=True)
    keys.pop("quantization_config", None)  # our reader gives dequantised weights
    try:
        config = model_class.config_class.from_dict(keys)
    except LIBRARY_ERRORS as error:
        raise ConfigError(f"model.path: {path}/config.json: transformers cannot use it: {one_line(error)}") from error
    wanted = model_class.config_class.model_type
    if wanted != keys.get("model_type"):
        raise UnsupportedModel(
            f"model.path: {path}: {spec.architecture} has the model_type {wanted!r}, not {keys.get('model_type')!r}"
        )
    text = config.get_text_config(decoder=True)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype, part.output_router_logits = dtype, False  # router logits are for training
    _compare(spec, text)
    try:
        with _default_dtype(dtype), torch.device("meta"):
            return model_class(config).eval()
    except LIBRARY_ERRORS as error:
        raise ConfigError(f"model.path: {path}/config.json: transformers cannot use it: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the library's sentence, which may have several lines."""
    return " ".join(str(error).split())


def _compare(spec: ModelSpec, text: Any) -> None:
    """Raise Internal if the library reads other sizes from the config than we do."""
    read = {
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }
    for key, value in read.items():
        if getattr(text, key, value) != value:
            raise Internal(f"{spec.architecture}: {key} is {getattr(text, key)} in transformers and {value} here")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
