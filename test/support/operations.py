"""Counts what a device would be asked to do: torch's operations, without those that only make views or get memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ON_THE_HOST = frozenset(
    {
        *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty"),
        *("permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "view"),
        *("is_pinned", "resolve_conj", "resolve_neg", "unsqueeze"),
    }
)
_COPIES = ("copy_", "_to_copy", "to", "clone")


class Operations(TorchDispatchMode):
    """`with Operations() as operations:` fills `names`, and `copied` with the bytes of each copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.copied: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _ON_THE_HOST or (name == "to" and result is args[0]):
            return result
        self.names.append(name)
        if name in _COPIES and isinstance(result, torch.Tensor):
            self.copied.append(result.nbytes)
        return result
