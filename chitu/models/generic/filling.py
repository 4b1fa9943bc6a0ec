"""Which parts of a library's model are loaded (the text part, with or without that for images), and how our reader
fills them with the weights of a checkpoint.

Each tensor is read, cut and assigned in the model's dtype; what the modules lack or the files have beyond them is an
error that names it. Called by the thread that builds the engine.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import ModelSpec
from chitu.models.generic.vision import names_beside, why_blind
from chitu.models.weights import WeightSource

logger = logging.getLogger(__name__)

Cut = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns this rank's part of a tensor of the model."""


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
        self.body = body
        self._has_text = True
        self.vision_names: list[str] = []
        """With which the names of the tensors of the part for images begin, in the body, if it is loaded, too."""

    def take_vision(self, is_alone: bool = False) -> None:
        """Have the part for images loaded, too, or with `is_alone` nothing else. Raises UnsupportedModel if there is
        none that could be used."""
        if self.body is self.decoder:
            raise UnsupportedModel(f"{type(self.head).__name__} has no body that calls its decoder with features")
        if why := why_blind(self.body):
            raise UnsupportedModel(why)
        self.vision_names, self._has_text = names_beside(self.body, self.decoder), not is_alone

    def is_of_vision(self, name: str) -> bool:
        """Return whether a tensor of the whole model is one of the part for images, if that is loaded."""
        body = f"{self._prefix}{self.body_name}."
        return name.startswith(tuple(f"{body}{each}" for each in self.vision_names))

    def needs(self, name: str) -> bool:
        """Return whether a tensor of the whole model is loaded: the decoder's, the head's own, or one for images."""
        if self.is_of_vision(name) or not self._has_text:
            return self.is_of_vision(name)
        if name.startswith(f"{self.decoder_name}."):
            return True
        return name.startswith(self._prefix) and not name.startswith(self._elsewhere)

    def detach(self) -> None:
        """Let the head take hidden states instead of tokens."""
        setattr(self.head, self.body_name, _PassOn(self.head.get_submodule(self.body_name)))


def _is_model(part: nn.Module) -> bool:
    return isinstance(part, transformers.PreTrainedModel)


def fill(
    model: Any,
    parts: TextParts,
    weights: WeightSource,
    device: torch.device,
    spec: ModelSpec,
    cut: Cut | None = None,
) -> None:
    """Give the text part its weights, or of each tensor what `cut` leaves of it, and its constant tensors (frequencies
    of rotary positions) their values."""
    for name, buffer in list(model.named_buffers()):
        if parts.needs(name):
            _assign(model, name, torch.empty_like(buffer, device=device))
    # The weights are still without memory, so this writes only constants.
    with torch.no_grad():
        model.initialize_weights()
    missing = set(_load(model, parts, weights, spec, cut))
    of_vision = {name for name, _ in model.named_parameters() if parts.is_of_vision(name)}
    if of_vision and of_vision <= missing:
        logger.warning("%s: images are not served: the checkpoint has no tensors for them", spec.architecture)
        parts.vision_names = []
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for name in sorted(missing):
        if parts.needs(name) and model.get_parameter_or_buffer(name).device.type == "meta":
            raise ConfigError(f"model.path has no tensor for {name!r} of {type(model).__name__}")
    weights.finish()


def _load(model: Any, parts: TextParts, weights: WeightSource, spec: ModelSpec, cut: Cut | None) -> Iterator[str]:
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
            _assign(model, name, tensor if cut is None else cut(name, tensor))
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
