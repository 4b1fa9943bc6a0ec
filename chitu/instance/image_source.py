"""What brings the patches of images to an instance that computes prompts.

The step thread asks for the images that a prompt needs and that it has no features of; whoever implements `ImageSource`
gets their files from the router, has patches made of them in a process beside this one, and wakes the step thread.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from chitu.errors import ChituError, IncompatibleLayout


class PreparedImage(NamedTuple):
    key: bytes
    patches: str = ""
    """Path of a safetensors file in memory (`/dev/shm`) with the arguments of the vision tower, by their names in
    `transformers` (`pixel_values`, `image_grid_thw`, ...), of this one image. It stays until `drop`."""
    error: ChituError | None = None
    """Why there are none."""


class ImageSource(Protocol):
    """Step thread. No call blocks."""

    def ask(self, key: bytes, router: int) -> None:
        """Have this image prepared, of which a request of this router has the file. Does nothing if it is being
        prepared, or is prepared and not dropped."""
        ...

    @property
    def num_signs(self) -> int:
        """Signs since the start that images are worked on: a part of a file came, the process that makes patches
        computed. The owner is woken by each."""
        ...

    def take(self) -> list[PreparedImage]:
        """Return what has become ready, or has failed, since the last call. The owner is woken when there is
        something."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget an image, whatever became of it; its patches are removed."""
        ...


class NoImages:
    """The source of an instance that prepares no images. A prompt with one comes only if the router's folder of the
    model tells more of images than this one's: it ends with an error, as that of another processor."""

    num_signs = 0

    def __init__(self) -> None:
        self._asked: dict[bytes, None] = {}

    def ask(self, key: bytes, router: int) -> None:
        self._asked[key] = None

    def take(self) -> list[PreparedImage]:
        asked, self._asked = self._asked, {}
        error = IncompatibleLayout("this instance prepares no images: its model folder is not that of the router")
        return [PreparedImage(key, error=error) for key in asked]

    def drop(self, key: bytes) -> None:
        self._asked.pop(key, None)
