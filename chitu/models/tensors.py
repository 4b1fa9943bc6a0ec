"""The tensors of a loaded model or of a part of it, whatever it is made of, without its LoRA adapters: to compare two,
and to give one the numbers of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from chitu.ops.native import PackedWeight


def tensors_of(value: Any, name: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a model, with the way to it, in an order that depends only on the kind of model. One that
    is in two places (a tied embedding) comes twice."""
    for place, leaf in _leaves(value, name):
        if isinstance(leaf, torch.Tensor):
            yield place, leaf
        else:
            codes = leaf.codes
            parts = (leaf.panels, leaf.bias, *(() if codes is None else (codes.scales, codes.added)))
            yield from ((f"{place}[{at}]", part) for at, part in enumerate(parts) if part is not None)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
    """Yield the tensors of a model, and whole the weights that our kernels keep in a form that depends on numbers."""
    if isinstance(value, torch.Tensor | PackedWeight):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{each}", tensor) for each, tensor in value.named_parameters(remove_duplicate=False))
        yield from ((f"{name}.{each}", tensor) for each, tensor in value.named_buffers(remove_duplicate=False))
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name}[{key}]")
    elif isinstance(value, tuple | list):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{name}[{at}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in ("ops", "shard", "adapters"):
                yield from _leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif hasattr(value, "parts"):  # `GenericModel`, whose modules are the library's
        yield from _leaves([value.parts.decoder, value.parts.head], f"{name}.parts")
        if value.vision is not None:
            yield from _leaves(value.vision.tensors(), f"{name}.vision")


def why_unlike(serving: Any, new: Any) -> str:
    """Return how the tensors of two models differ beyond their numbers; empty if they do not. A weight that our kernels
    keep small is like any of the same shape."""
    mine, theirs = list(_leaves(serving, "model")), list(_leaves(new, "model"))
    for (name, old), (other, leaf) in zip(mine, theirs, strict=False):
        if (name, *_form(old)) != (other, *_form(leaf)):
            (now, shape), (then, size) = _form(old)[:2], _form(leaf)[:2]
            return f"{other} is {then} {size}, and {name} that serves is {now} {shape}"
    return "" if len(mine) == len(theirs) else f"it has {len(theirs)} tensors, and the model that serves {len(mine)}"


def _form(leaf: torch.Tensor | PackedWeight) -> tuple[object, ...]:
    """Return the dtype and the shape of a tensor, and whatever else must be alike."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride()
    return "a weight", (leaf.out_features, leaf.in_features), leaf.bias is None


def copy_numbers(serving: Any, new: Any) -> None:
    """Copy the numbers of a model to the tensors of one like it."""
    done: set[int] = set()
    for (_, old), (_, tensor) in zip(list(tensors_of(serving)), list(tensors_of(new)), strict=True):
        if old.data_ptr() not in done or old.numel() == 0:
            done.add(old.data_ptr())
            old.copy_(tensor)
