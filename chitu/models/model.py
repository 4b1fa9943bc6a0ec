"""What the engine needs of a loaded model, and what a model gets of the cache. `layers.DecoderModel` is our own code;
other implementations stand beside it. Called only by the step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from chitu.ops.image_rows import FeatureShape
from chitu.ops.interface import Batch

if TYPE_CHECKING:
    from chitu.models.layers import Shard


AtBlock = Callable[[int, int], None]
"""Called before each block of a vision tower is computed, on its thread: with its number, from 0 on, and the count of
all that the call computes."""


class VisionTower(Protocol):
    """What makes features of images, if a model has that."""

    @property
    def shape(self) -> FeatureShape: ...

    def step_bytes(self, num_rows: int) -> int:
        """Return about the most bytes of numbers that images with so many feature rows need while they are computed."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all that it computes features with, by name."""
        ...

    def block_cost(self) -> tuple[int, float, float]:
        """Return how many blocks it has, and what one costs for each row and for each pair of rows of an image, in
        tokens of a prompt (`TowerCost`)."""
        ...

    def report_blocks(self, report: Callable[[], None]) -> None:
        """Call `report`, in place of any former one, before each block of the tower is computed: features of a large
        image take long."""
        ...

    def encode(
        self,
        images: Sequence[Mapping[str, torch.Tensor]],
        counts: Sequence[int],
        device: torch.device,
        at_block: AtBlock | None = None,
    ) -> list[torch.Tensor]:
        """Return the features `[rows, width]` of each image. `images`: what the image processor makes of each file, by
        name. `counts`: their rows. Raises Internal if an image has another number of rows, and what `at_block` raises.
        One call at a time."""
        ...


def vision_of(model: object) -> VisionTower | None:
    """Return what makes features of images for a model; None if nothing does."""
    tower: VisionTower | None = getattr(model, "vision", None)
    return tower


class KVViews(Protocol):
    """The cache as a model reads and writes it; `KVPool` is one."""

    @property
    def k(self) -> Sequence[torch.Tensor]:
        """Pages of each layer, `[num_pages, kv_heads, page_size, head_dim]`."""
        ...

    @property
    def v(self) -> Sequence[torch.Tensor]: ...

    @property
    def states(self) -> Mapping[tuple[int, str], torch.Tensor]:
        """By layer and name, `[num_state_slots, ...]`; empty if the layout has no state."""
        ...


class Model(Protocol):
    """A loaded model, or one rank's part of it."""

    @property
    def num_positions(self) -> int:
        """Most tokens of a sequence that it was loaded for."""
        ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits on the main rank."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        ...

    @property
    def shard(self) -> Shard | None:
        """This rank among those that compute together; None if it is alone."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this rank gets the logits."""
        ...

    def forward(
        self,
        token_ids_T: torch.Tensor,
        batch: Batch,
        cache: KVViews,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return hidden states `[T, D]` before the final norm or after it, as `logits` expects them, and write K and V
        of all rows into the pages.

        Calls `on_layer(l)` as soon as K and V of layer l are in the pages of every rank that it sums with, in the order
        of the layers.
        """
        ...

    def lend(self) -> None:
        """Take part, without rows, in a step of other ranks among which the experts are spread."""
        ...

    def logits(self, hidden_RD: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return float32 logits `[R, V]` of chosen rows of `forward`'s result, in `out` if that is given; None on all
        ranks but the main one."""
        ...

    def normed(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return chosen rows of `forward`'s result behind the final norm. The next call may reuse the memory."""
        ...
