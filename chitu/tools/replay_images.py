"""Where `chitu replay` finds the images of a prompt: a receipt names them and has no files. Blocking."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path

from chitu.protocol.receipt import ReceiptImage
from chitu.tools.verify.probe import Impossible


class KnownFiles:
    """Files that may be images of receipts."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        """`folders`: those whose files are looked at, without what is in folders below. Raises Impossible for one that
        cannot be read."""
        self._paths: dict[int, list[Path]] = {}
        """By size (bytes)."""
        for folder in folders:
            try:
                for path in sorted(Path(folder).iterdir()):
                    if path.is_file():
                        self._paths.setdefault(path.stat().st_size, []).append(path)
            except OSError as error:
                raise Impossible(f"the images in {folder} cannot be read: {error.strerror}") from error

    def urls(self, images: Sequence[ReceiptImage], beside: Iterable[bytes]) -> tuple[str, ...]:
        """Return the images as data URLs. `beside`: files that came with the receipt. Raise Impossible, with the first
        that is missing."""
        others = list(beside)
        return tuple([self._url(number, image, others) for number, image in enumerate(images, 1)])

    def _url(self, number: int, image: ReceiptImage, others: Sequence[bytes]) -> str:
        try:
            paths = self._paths.get(image.num_bytes, ())
            data = next((data for data in (*others, *map(Path.read_bytes, paths)) if image.is_of(data)), None)
        except ValueError:
            raise Impossible(f"image {number} of its prompt has a key that is no hex number") from None
        except OSError as error:
            raise Impossible(f"the image {error.filename} cannot be read: {error.strerror}") from error
        if data is None:
            raise Impossible(
                f"its prompt has images, and a receipt only names them: image {number} (key {image.key}, "
                f"{image.num_bytes} bytes) is missing; give a folder with its file (--images DIR)"
            )
        return f"data:;base64,{b64encode(data).decode()}"
