"""A tiny model whose logits depend on its recurrent state: a decaying sum of embeddings, and a window of the last
tokens as a convolution has one, in three blocks. It writes K and V as well, so pages move too; its logits do not read
them. `reference` computes the same from all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from chitu.models.config import ModelSpec
from chitu.models.config_parts import RopeSpec
from chitu.models.model import KVViews
from chitu.ops.interface import Batch
from chitu.protocol import CacheGroup, StateTensor

VOCAB_SIZE = 64
HIDDEN = 8
TAPS = 3
STATE = (
    StateTensor(0, "sum", "float32", (HIDDEN, 4)),
    StateTensor(1, "window", "float32", (4 * HIDDEN, TAPS), (HIDDEN, HIDDEN, 2 * HIDDEN)),
)
"""Layer 0 has a matrix, layer 1 the inputs of a convolution: keys, keys and values of twice the width."""
SPEC = ModelSpec(
    architecture="RunningSum",
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    hidden_size=HIDDEN,
    intermediate_size=HIDDEN,
    vocab_size=VOCAB_SIZE,
    max_model_len=256,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
    dtype="float32",
    groups=(CacheGroup((0, 1), 2, (4, 4)),),
    state=STATE,
)


class RunningSum:
    """A `Model` of one rank."""

    num_positions = SPEC.max_model_len
    vocab_size = VOCAB_SIZE
    hidden_size = 5 * HIDDEN
    dtype = torch.float32
    is_main = True
    shard = None

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._in_VW = torch.randn(VOCAB_SIZE, 4 * HIDDEN, generator=generator)
        self._key_V4 = torch.randn(VOCAB_SIZE, 4, generator=generator)
        self._taps_WX = torch.randn(4 * HIDDEN, TAPS, generator=generator)
        self._head_DV = torch.randn(self.hidden_size, VOCAB_SIZE, generator=generator) / self.hidden_size**0.5

    def forward(
        self,
        token_ids_T: torch.Tensor,
        batch: Batch,
        cache: KVViews,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        pages = batch.page_table[batch.slots_T, batch.positions_T // cache.k[0].shape[2]]
        offsets = batch.positions_T % cache.k[0].shape[2]
        for layer in range(SPEC.num_layers):
            rows = self._in_VW[token_ids_T, : SPEC.num_kv_heads * SPEC.head_dim].view(-1, SPEC.num_kv_heads, 4)
            cache.k[layer][pages, :, offsets] = rows + layer
            cache.v[layer][pages, :, offsets] = rows - layer
            if on_layer is not None:
                on_layer(layer)
        runs = [(span.state_slot, span.row, span.length) for span in batch.spans]
        runs += [(slot, batch.decode_row + index, 1) for index, slot in enumerate(batch.decode_states)]
        out_TD = torch.empty(len(token_ids_T), self.hidden_size)
        for slot, row, length in runs:
            state = {key: tensor[slot] for key, tensor in cache.states.items()}
            for index in range(row, row + length):
                out_TD[index] = self._advance(state, int(token_ids_T[index]))
        return out_TD

    def logits(self, hidden_RD: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(hidden_RD, self._head_DV, out=out_RV)

    def reference(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits `[V]` behind these tokens."""
        state = {(each.layer, each.name): torch.zeros(each.shape) for each in STATE}
        for token in token_ids:
            hidden_D = self._advance(state, token)
        return self.logits(hidden_D[None])[0]

    def tokens(self, prompt: Iterable[int], count: int) -> list[int]:
        """Return the greedy tokens behind a prompt."""
        ids = list(prompt)
        first = len(ids)
        for _ in range(count):
            ids.append(int(self.reference(ids).argmax()))
        return ids[first:]

    def _advance(self, state: dict[tuple[int, str], torch.Tensor], token: int) -> torch.Tensor:
        """Take a token into a state, in place, and return its hidden numbers."""
        total_H4, window_WX = state[0, "sum"], state[1, "window"]
        rows_W = self._in_VW[token]
        total_H4.mul_(0.875).add_(torch.outer(rows_W[:HIDDEN], self._key_V4[token]))
        window_WX.copy_(torch.cat((window_WX[:, 1:], rows_W[:, None]), 1))
        return torch.cat((total_H4.sum(1), torch.tanh((window_WX * self._taps_WX).sum(1))))
