"""The rows that an image takes in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ImageForm(NamedTuple):
    """How a model's prompts have images, whatever their sizes."""

    placeholder: str
    """What the chat template writes in the place of an image."""
    written: str
    """What replaces the placeholder in the text before it is tokenised. It has the text of `token_id` once."""
    token_id: int
    """The token that the runs of an `ImageLayout` replace in the token ids."""
    fingerprint: bytes
    """16 bytes: hash of all that decides what patches are made of a file. It keys `ImagePart.key`."""


class Run(NamedTuple):
    token_id: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    is_image: bool = True
    """Whether its rows are rows of the image; else they are tokens, such as the end of a line."""


class ImageLayout(NamedTuple):
    """The tokens of one image, in the place of `ImageForm.token_id`."""

    runs: tuple[Run, ...]
    grid: tuple[int, int, int] = (0, 0, 0)
    """As in `ImagePart`."""

    @property
    def num_rows(self) -> int:
        return sum(run.count for run in self.runs if run.is_image)

    @property
    def num_tokens(self) -> int:
        return sum(run.count for run in self.runs)


class ImageSizer(Protocol):
    """The model's image processor, asked for sizes alone. Called in a body process; may block."""

    @property
    def form(self) -> ImageForm: ...

    def layout(self, sizes: Sequence[tuple[int, int]]) -> list[ImageLayout]:
        """Return the layouts of images of these widths and heights (pixels). Raises InvalidRequest for a size that the
        processor refuses; `param` is the index."""
        ...
