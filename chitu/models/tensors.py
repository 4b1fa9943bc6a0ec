"""The tensors of a loaded model, whatever it is made of: to compare two, and to give one the numbers of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from chitu.models.model import Model


def tensors_of(value: Any, name: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a model, with the way to it, in an order that depends only on the kind of model. One that
    is in two places (a tied embedding) comes twice."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{each}", tensor) for each, tensor in value.named_parameters(remove_duplicate=False))
        yield from ((f"{name}.{each}", tensor) for each, tensor in value.named_buffers(remove_duplicate=False))
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors_of(value[key], f"{name}[{key}]")
    elif isinstance(value, tuple | list):
        for at, each in enumerate(value):
            yield from tensors_of(each, f"{name}[{at}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in ("ops", "shard"):
                yield from tensors_of(getattr(value, field.name), f"{name}.{field.name}")
    elif hasattr(value, "parts"):  # `GenericModel`, whose modules are the library's
        yield from tensors_of([value.parts.decoder, value.parts.head], f"{name}.parts")


def why_unlike(serving: Model, new: Model) -> str:
    """Return how the tensors of two models differ beyond their numbers; empty if they do not."""
    mine, theirs = list(tensors_of(serving)), list(tensors_of(new))
    for (name, old), (other, tensor) in zip(mine, theirs, strict=False):
        if (name, old.shape, old.dtype, old.stride()) != (other, tensor.shape, tensor.dtype, tensor.stride()):
            shapes = tuple(tensor.shape), tuple(old.shape)
            return f"{other} is {tensor.dtype} {shapes[0]}, and {name} that serves is {old.dtype} {shapes[1]}"
    return "" if len(mine) == len(theirs) else f"it has {len(theirs)} tensors, and the model that serves {len(mine)}"


def copy_numbers(serving: Model, new: Model) -> None:
    """Copy the numbers of a model to the tensors of one like it."""
    done: set[int] = set()
    for (_, old), (_, tensor) in zip(list(tensors_of(serving)), list(tensors_of(new)), strict=True):
        if old.data_ptr() not in done or old.numel() == 0:
            done.add(old.data_ptr())
            old.copy_(tensor)
