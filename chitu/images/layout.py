"""The rows that an image takes in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Grid = tuple[int, int, int]
"""Rows by time, height and width."""


class VideoForm(NamedTuple):
    """How a model's prompts have videos, part by part."""

    placeholder: str
    """What the chat template writes in the place of a video."""
    written: str
    """What stands for a part in the text before it is tokenised, with a field `seconds` for `str.format`. It has the
    text of `token_id` once."""
    token_id: int
    """The token that a part's rows replace in the token ids."""
    is_run: bool
    """Whether nothing lies between the parts, which all are rotated by where the video begins."""


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
    video: VideoForm | str = "its prompts have none"
    """Or why they have no videos."""


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


class VideoParts(Protocol):
    """A video for the prompt: `SampledVideo`."""

    @property
    def parts(self) -> Sequence[bytes]:
        """The file of each part."""
        ...

    @property
    def grid(self) -> Grid:
        """Of each part, in rows."""
        ...

    @property
    def seconds(self) -> Sequence[float]:
        """When each part is, as the prompt says it."""
        ...

    @property
    def times(self) -> Sequence[int]:
        """`ImagePart.time` of each."""
        ...


class ImageSizer(Protocol):
    """The model's image processor, asked for sizes, and for the frames of videos. Called in a body process; may
    block."""

    @property
    def form(self) -> ImageForm: ...

    def layout(self, sizes: Sequence[tuple[int, int]]) -> list[ImageLayout]:
        """Return the layouts of images of these widths and heights (pixels). Raises InvalidRequest for a size that the
        processor refuses; `param` is the index."""
        ...

    def video(self, data: bytes, fps: float | None, most_rows: int) -> VideoParts:
        """Return the frames of a video's file. `fps`: frames to take a second, or those that a list of frames has;
        None: as the model's folder says. Raises InvalidRequest for a file that is none or exceeds a limit,
        ContextLengthExceeded if it has more than `most_rows` rows."""
        ...
