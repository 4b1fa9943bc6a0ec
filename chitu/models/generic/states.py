"""Recurrent layers of transformers over state rows of the KV pool.

Owns how a step's rows reach a mixer (Mamba, gated delta net, short convolution). The rows of all sequences are one list
for every other layer; a mixer gets them sequence by sequence, with the state of each: a prefill chunk alone, with views
of its state row, all decoding sequences as one batch of one token each. Called only by the step thread.

A mixer reads and writes its state through five methods of transformers' `Cache`. `_Rows` has these over our rows, so
the rows are the state: nothing else of a sequence survives a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from chitu.errors import Internal, UnsupportedModel
from chitu.models.generic.state_spec import CONV, RECURRENT
from chitu.ops.interface import Batch
from chitu.protocol import StateTensor

StateViews = Mapping[tuple[int, str], torch.Tensor]
"""`[num_state_slots, *shape]` by layer and name, as `KVPool.states`."""
CACHE_ARGUMENTS = ("cache_params", "past_key_values")
STATELESS_SCANS = frozenset({"jamba"})
"""Model types whose scan of several tokens begins with zeros, whatever the state is: in transformers Mamba-1 continues
a sequence only token by token."""


class _Rows:
    """The part of transformers' `Cache` that a mixer calls, over the states `[B, *shape]` of one call's sequences."""

    def __init__(self, conv_BCK: torch.Tensor, recurrent: torch.Tensor | None, *, is_new: bool) -> None:
        """`is_new`: the sequences begin here. The mixer then sees no state, as in transformers, whose form of the first
        token may differ from that of later ones (limits of Mamba's time step)."""
        self._conv_BCK = conv_BCK
        self._recurrent = recurrent
        self._is_new = is_new

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self._is_new else self._conv_BCK

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self._is_new else self._recurrent

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Return the convolution's inputs, old ones first, and keep the newest."""
        kept = self._conv_BCK.shape[-1]
        if self._is_new:
            inputs_BCL = F.pad(conv_states, (max(0, kept - conv_states.shape[-1]), 0))
        else:
            inputs_BCL = torch.cat((self._conv_BCK, conv_states), -1)
        self._conv_BCK.copy_(inputs_BCL[..., -kept:])
        return inputs_BCL

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        if self._recurrent is None:
            raise Internal(f"layer {layer_idx} has a recurrent state that its layout lacks")
        return self._recurrent.copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class RecurrentStates:
    """The step that a model's mixers compute. Outside of a step the mixers behave as those of transformers."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._states: StateViews = {}
        self._decode_rows: slice | torch.Tensor = slice(0)

    @property
    def batch(self) -> Batch | None:
        return self._batch

    @contextmanager
    def step(self, batch: Batch, states: StateViews) -> Iterator[None]:
        """Give the mixers the rows of a forward and the state rows of the pool."""
        self._batch, self._states = batch, states
        self._decode_rows = _rows_of(batch.decode_states, batch.slots_T.device)
        try:
            yield
        finally:
            self._batch, self._states = None, {}

    def run(
        self,
        mixer: Callable[[torch.Tensor, _Rows], torch.Tensor],
        layer: int,
        hidden_1TD: torch.Tensor,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        """Return the mixer's results `[1, T, D]` of all rows, and update their states."""
        batch = self._batch
        if batch is None:
            raise Internal("a mixer runs outside of a step")
        conv, recurrent = self._states[layer, CONV], self._states.get((layer, RECURRENT))
        parts: list[torch.Tensor] = []
        for span in batch.spans:
            own = slice(span.state_slot, span.state_slot + 1)
            rows = _Rows(conv[own], None if recurrent is None else recurrent[own], is_new=span.start == 0)
            width = 1 if by_token and span.start else span.length
            for first in range(span.row, span.row + span.length, width):
                parts.append(mixer(hidden_1TD[:, first : first + width], rows))
        if batch.decode_slots:
            kept = [states for states in (conv, recurrent) if states is not None]
            taken = [_taken(states, self._decode_rows) for states in kept]
            rows = _Rows(taken[0], taken[1] if len(taken) > 1 else None, is_new=False)
            parts.append(mixer(hidden_1TD[0, batch.decode_row :].unsqueeze(1), rows).transpose(0, 1))
            if isinstance(self._decode_rows, torch.Tensor):  # otherwise the mixer wrote to the rows themselves
                for states, new in zip(kept, taken, strict=True):
                    states.index_copy_(0, self._decode_rows, new)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _taken(states: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return these rows: views of a slice, else copies."""
    return states[rows] if isinstance(rows, slice) else states.index_select(0, rows)


def _rows_of(slots: Sequence[int], device: torch.device) -> slice | torch.Tensor:
    """Return the index of these slots: a slice, whose rows are views, if they follow each other."""
    if tuple(slots) == tuple(range(slots[0], slots[0] + len(slots)) if slots else ()):
        return slice(slots[0], slots[-1] + 1) if slots else slice(0)
    return torch.tensor(slots, dtype=torch.int64, device=device)


def bind_states(decoder: nn.Module, model_type: str, state: Sequence[StateTensor]) -> RecurrentStates:
    """Make the decoder's mixers compute by sequence, over state rows, and return the step that they follow.

    A mixer is a module with a layer index and a convolution of its own. Raises UnsupportedModel if the mixers are not
    exactly those that `state` describes.
    """
    step = RecurrentStates()
    shapes = {tensor.layer: tensor.shape for tensor in state if tensor.name == CONV}
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        convolution = next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)
        if not isinstance(layer, int) or convolution is None:
            continue
        shape = (convolution.out_channels, convolution.kernel_size[0])
        if shapes.pop(layer, None) != shape:
            raise UnsupportedModel(
                f"{type(module).__name__} of layer {layer} keeps a convolution state {shape} that {model_type} is not "
                "known to have"
            )
        _bind(module, layer, step, by_token=model_type in STATELESS_SCANS)
    if shapes:
        raise UnsupportedModel(f"{model_type}: layers {sorted(shapes)} have no known recurrent mixer")
    return step


def _bind(module: nn.Module, layer: int, step: RecurrentStates, *, by_token: bool) -> None:
    """Replace the module's forward. The module stays where it is, so that names of weights do not change."""
    forward = module.forward
    cache = next(name for name in CACHE_ARGUMENTS if name in inspect.signature(forward).parameters)

    def by_sequence(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if step.batch is None:
            whole: torch.Tensor = forward(hidden_states, *args, **kwargs)
            return whole
        # Rows of a step are never padding, so there is no mask.
        rest = {name: value for name, value in kwargs.items() if name not in (*CACHE_ARGUMENTS, "attention_mask")}

        def mixer(hidden_BLD: torch.Tensor, rows: _Rows) -> torch.Tensor:
            mixed_BLD: torch.Tensor = forward(hidden_BLD, **rest, **{cache: rows})
            return mixed_BLD

        return step.run(mixer, layer, hidden_states, by_token=by_token)

    module.forward = by_sequence
