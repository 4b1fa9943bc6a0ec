"""The images that an instance is to encode, those that the tower computes together, and how many blocks a step has.

A step computes the tower for as long as a full chunk of a prompt takes, about, so that nobody waits for a large image:
by the numbers that are multiplied (`TowerCost`), which need no measuring, and are the same for all ranks. Step thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chitu.engine.executor import EncodeImage, TowerCost, TowerTurn
from chitu.protocol import ANY_ENCODER

if TYPE_CHECKING:
    from chitu.instance.images import StoredImage


@dataclass(slots=True, eq=False)
class AskedImage:
    """An image that the source was asked for."""

    num_rows: int
    router: int
    rooms: frozenset[bytes]
    """Prompts that an error of it ends: later ones, and those of other routers, ask for it once more."""
    since_s: float
    patches: str = ""
    """Empty until it is prepared."""
    tried: tuple[int, ...] = ()
    """Incarnations of the E that were asked for it."""
    num_unread: int = 0
    """Batches that encode it and whose last step is not read."""
    encoder: int = ANY_ENCODER
    """As in `RequestHead.encoders`."""
    is_own: bool = False
    """Whether this instance encodes it itself."""


@dataclass(slots=True)
class TowerBatch:
    """Images that the tower computes together, in one step or in turns."""

    cost: TowerCost | None
    """None: in one step."""
    images: list[StoredImage] = field(default_factory=list)
    """Pinned ones, until the step that completes them is launched."""
    encode: list[EncodeImage] = field(default_factory=list)
    asked: list[AskedImage] = field(default_factory=list)
    blocks: int = 0
    """Blocks up to which the newest plan computes."""
    is_complete: bool = False
    """Whether that are all."""

    def turns(self, most_tokens: int) -> list[TowerTurn]:
        """Take the next turn, which costs about as much as so many tokens of a prompt at most, but is of one block at
        least. Return none if the first one has all blocks."""
        if self.cost is None:
            self.is_complete = True
            return []
        is_first = not self.blocks
        block = self.cost.tokens([len(image.rows) for image in self.images])
        left = self.cost.blocks - self.blocks
        self.blocks += max(1, left if block * left <= most_tokens else int(most_tokens / block))
        self.is_complete = self.blocks >= self.cost.blocks
        return [] if is_first and self.is_complete else [TowerTurn(self.blocks, self.cost.blocks)]
