"""A model whose modules are those of `transformers`: built from its config without weights, filled by our reader, and
called with rows of many sequences as if they were one.

Owns the modules. The decoder (embedding to final norm) gets all rows of a step as one sequence without a cache of its
own; only attention knows better (`attention.py`). The logits are computed by the library's class for language models,
whose decoder is replaced by a module that passes hidden states on, so its scaling and soft caps apply. Of a model with
parts for images or sound only the text part is loaded. Code of the checkpoint's folder is never run. Built by the
thread that builds the engine, called by the step thread.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from chitu.errors import ConfigError, Internal, UnsupportedModel
from chitu.models.adapters import AdapterSpec
from chitu.models.config import ModelSpec
from chitu.models.generic.attention import PagedAttention
from chitu.models.generic.check import check
from chitu.models.generic.fusing import fuse
from chitu.models.generic.library import library_version
from chitu.models.generic.lora import AdaptedModules
from chitu.models.generic.sharding import Sharding
from chitu.models.generic.states import bind_states
from chitu.models.layers import Shard
from chitu.models.model import KVViews
from chitu.models.weights import WeightSource
from chitu.models.window_state import recurrent_of
from chitu.ops.interface import Batch, Ops

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
    ) -> None:
        self.is_main = sharding is None or sharding.is_main
        self.sharding = sharding
        self.num_positions = spec.max_model_len
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.dtype = dtype
        self.parts = parts
        self.attention = attention
        self.adapters: AdaptedModules | None = None
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
        adapting = self.adapters.step(batch) if self.adapters is not None else nullcontext()
        with self.attention.step(batch, cache, on_layer), self._states.step(batch, cache.states), adapting:
            out = self.parts.decoder(
                input_ids=token_ids_T.unsqueeze(0),
                position_ids=batch.positions_T.unsqueeze(0),
                past_key_values=_Passing(batch.positions_T),
                use_cache=False,
            )
        hidden_TD: torch.Tensor = out.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits `[R, V]` of chosen rows of `forward`'s result; None on all ranks but the main one."""
        return self.own_logits(hidden_RD) if self.is_main else None

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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank compute its part without the sums over the ranks."""
        if self.sharding is None:
            yield
            return
        self.sharding.is_summing = False
        try:
            yield
        finally:
            self.sharding.is_summing = True

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


class _Passed:
    """The output of a decoder that computed nothing: the hidden states it got, and no other output."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PassOn(nn.Module):
    """Stands in for a decoder. It has the decoder's numbers: some heads scale logits by one of these."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(decoder).items() if isinstance(value, int | float)})

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Passed:
        return _Passed(inputs_embeds)


class TextParts:
    """The modules that compute text: the decoder, and the module that makes logits of its result."""

    def __init__(self, model: Any) -> None:
        """Find them by structure: classes nest them differently."""
        parts: list[tuple[str, Any]] = [(name, part) for name, part in model.named_modules() if _is_model(part)]
        # The deepest ones: a class with parts for images passes questions on to its text part.
        heads = [(name, part) for name, part in parts if part.get_output_embeddings() is not None]
        if not heads:
            raise UnsupportedModel(f"{type(model).__name__} has no head for tokens")
        self.head_name, self.head = max(heads, key=lambda item: item[0].count(".") + bool(item[0]))
        embedding = self.head.get_input_embeddings()
        decoders = [
            (name, part)
            for name, part in self.head.named_modules()
            if name and _is_model(part) and any(module is embedding for module in part.modules())
        ]
        if not decoders:
            raise UnsupportedModel(f"{type(model).__name__} has no decoder that could be told apart from its head")
        name, self.decoder = max(decoders, key=lambda item: item[0].count("."))
        self.body_name = name.split(".")[0]
        self.decoder_name = f"{self.head_name}.{name}" if self.head_name else name

        prefix = f"{self.head_name}." if self.head_name else ""
        body = self.head.get_submodule(self.body_name)
        beside = [child for child, part in self.head.named_children() if part is body or _is_model(part)]
        self._prefix, self._elsewhere = prefix, tuple(f"{prefix}{child}." for child in beside)

    def needs(self, name: str) -> bool:
        """Return whether a tensor of the whole model is one of the text part's: the decoder's, or the head's own."""
        if name.startswith(f"{self.decoder_name}."):
            return True
        return name.startswith(self._prefix) and not name.startswith(self._elsewhere)

    def detach(self) -> None:
        """Let the head take hidden states instead of tokens."""
        setattr(self.head, self.body_name, _PassOn(self.head.get_submodule(self.body_name)))


def _is_model(part: nn.Module) -> bool:
    return isinstance(part, transformers.PreTrainedModel)


def build_generic(
    path: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightSource,
    shard: Shard | None = None,
    adapters: Sequence[AdapterSpec] = (),
    ops: Ops | None = None,
) -> GenericModel:
    """Build the model and read its weights, and those of its LoRA adapters. Raises ConfigError (UnsupportedModel) if
    the checkpoint or an adapter does not fit."""
    if adapters and shard is not None:
        raise UnsupportedModel(f"{adapters[0].key}: {spec.architecture} takes LoRA adapters with tp_size 1 only")
    attention = PagedAttention(spec.num_layers, is_alone=shard is None, ops=ops)
    model = empty_model(path, spec, dtype)
    transformers.AttentionInterface.register(attention.name, attention)
    model.set_attn_implementation(attention.name)
    parts = TextParts(model)
    sharding = None
    if shard is not None:
        sharding = Sharding(parts.decoder, f"{parts.decoder_name}.", spec, shard)
    fill(model, parts, weights, device, spec, sharding)
    parts.detach()
    if sharding is not None:
        sharding.add_sums(attention.on_sum)
    built = GenericModel(spec, parts, attention, dtype, sharding)
    layers = {layer for adapter in adapters for layer in adapter.layers}
    adapted = [part for name, part in parts.decoder.named_modules() if f"{parts.decoder_name}.{name}" in layers]
    modules = (*parts.decoder.modules(), *parts.head.modules())
    check(built, spec, device, shard.size if shard is not None else 1, lambda: fuse(modules, ops, adapted))
    if adapters:
        built.adapters = AdaptedModules(parts.decoder, f"{parts.decoder_name}.", adapters, dtype, device)
    return built


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


def fill(
    model: Any,
    parts: TextParts,
    weights: WeightSource,
    device: torch.device,
    spec: ModelSpec,
    sharding: Sharding | None = None,
) -> None:
    """Give the text part its weights, and its constant tensors (frequencies of rotary positions) their values."""
    for name, buffer in list(model.named_buffers()):
        if parts.needs(name):
            _assign(model, name, torch.empty_like(buffer, device=device))
    # The weights are still without memory, so this writes only constants.
    with torch.no_grad():
        model.initialize_weights()
    missing = set(_load(model, parts, weights, spec, sharding))
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for name in sorted(missing):
        if parts.needs(name) and model.get_parameter_or_buffer(name).device.type == "meta":
            raise ConfigError(f"model.path has no tensor for {name!r} of {type(model).__name__}")
    weights.finish()


def _load(
    model: Any, parts: TextParts, weights: WeightSource, spec: ModelSpec, sharding: Sharding | None
) -> Iterator[str]:
    """Read all tensors of the text part. Yield the names of the model's tensors that are not in the checkpoint.

    The library renames tensors of published checkpoints and joins some (experts): its own table and operations are
    used, one tensor of the model at a time.
    """
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = {
        pattern: entry for entry in table if isinstance(entry, WeightConverter) for pattern in entry.source_patterns
    }
    wanted = model.state_dict()
    in_32_bits = _kept_in_32_bits(model)
    pending: dict[str, Any] = {}
    unused: list[str] = []
    shapes = weights.names
    distinct = list({id(entry): entry for entry in converters.values()}.values())
    for source in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, distinct, model.base_model_prefix, wanted)
        if target not in wanted and source in wanted:
            target, pattern = source, None
        if target not in wanted or not parts.needs(target):
            unused.append(source)
            if target not in wanted and not _is_known_as_unused(model, source, target, spec):
                raise UnsupportedModel(f"the checkpoint has a tensor that this model does not use: {source}")
            continue
        dtype = torch.float32 if in_32_bits(target) else wanted[target].dtype
        entry = pending.get(target)
        if entry is None:
            entry = copy.deepcopy(converters[pattern]) if pattern is not None else WeightRenaming(source, target)
            pending[target] = entry
        read: Any = _taking(weights, source, shapes[source], dtype)  # called by `convert`, one tensor after another
        entry.add_tensor(target, source, pattern or source, read)
    weights.leave_out(unused)
    for target in list(pending):
        for name, value in pending.pop(target).convert(target, model=model, config=model.config).items():
            tensor = value[0] if isinstance(value, list) else value
            if tensor.shape != wanted[name].shape:
                raise ConfigError(
                    f"model.path: tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for "
                    f"{tuple(wanted[name].shape)}"
                )
            _assign(model, name, tensor if sharding is None else sharding.cut(name, tensor))
            wanted.pop(name)
    yield from wanted


def _taking(weights: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: weights.take(name, *shape, dtype=dtype)


def _kept_in_32_bits(model: Any) -> Callable[[str], bool]:
    """Return whether the library keeps a tensor in float32 even if the model has fewer bits. It has no public way to
    ask: these attributes of the class are what its own loader reads."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        kept |= set(model._keep_in_fp32_modules or ())
    pattern = re.compile("|".join(re.escape(each).replace(r"\*", ".*") for each in kept)) if kept else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def _is_known_as_unused(model: Any, source: str, target: str, spec: ModelSpec) -> bool:
    """Return whether the library leaves the tensor out by itself: tables of older versions, layers that predict further
    tokens. It has no public way to ask."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    if any(re.search(pattern, name) for pattern in patterns for name in (source, target)):
        return True
    extra = getattr(model.config.get_text_config(decoder=True), "num_nextn_predict_layers", None) or 0
    return any(f".layers.{spec.num_layers + index}." in f".{source}" for index in range(extra))


def _assign(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of one of the same name."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in dict(owner.named_buffers(recurse=False)):
        persistent = name in model.state_dict()
        owner.register_buffer(leaf, tensor, persistent=persistent)
    else:
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
