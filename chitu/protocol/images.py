"""Images of a prompt: what every part of a request carries of them, and how an instance gets their files."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from chitu.protocol.wire import Wire

IMAGE_KEY_BYTES = 16
FEATURE_MARK_BYTES = 8
"""Length of the mark of the weights that features are made with (`models/feature_mark.py`)."""
REPORTED_KEY_BYTES = 8
"""The end of an image's key that load reports have: enough to tell one image from all others of a cluster."""
MAX_REPORTED_KEYS = 256
ANY_ENCODER, NO_ENCODER = -1, -2
"""In the place of an E's engine rank in `RequestHead.encoders`: whoever computes the prompt chooses, or encodes the
image itself."""


class ImagePart(Wire, frozen=True, array_like=True):
    """An image of a prompt. All instances of a request have it, so that its pages have the same keys everywhere."""

    key: bytes
    """`IMAGE_KEY_BYTES`: hash of its file, keyed with the fingerprint of the image processor (`chitu/images`). Equal
    keys are equal features."""
    spans: tuple[tuple[int, int, int], ...]
    """Its rows in the prompt, in order: position of the first, number of rows, number of its first feature row. Other
    tokens may lie between (Pixtral ends each line of an image with one)."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Feature rows by time, height and width, by which a model with M-RoPE rotates them; their product is the number of
    feature rows then."""
    time: int = 0
    """Of frames of a video: their rotary position by time, beyond that at which the video begins."""
    continues: bool = False
    """Whether these frames go on with the part before them, with no token between: they begin at its position."""

    @property
    def num_rows(self) -> int:
        """Number of its feature rows."""
        return max([first + length for _, length, first in self.spans], default=0)

    @property
    def start(self) -> int:
        """Position of its first row."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """Position behind its last row."""
        start, length, _ = self.spans[-1]
        return start + length


def image_key(file: bytes | bytearray, fingerprint: bytes) -> bytes:
    """Return `ImagePart.key` of a file, for an image processor with this fingerprint."""
    return blake2b(file, digest_size=IMAGE_KEY_BYTES, key=fingerprint).digest()


def encoder_preference(key: bytes, engine_rank: int) -> bytes:
    """Return by how much an image prefers an E, if nothing else tells them apart (rendezvous hashing): a lost E moves
    its own images alone."""
    return blake2b(key + engine_rank.to_bytes(8, "little"), digest_size=8).digest()


def page_marks(images: Iterable[ImagePart]) -> list[tuple[int, bytes]]:
    """Return what images add to the keys of the pages with their rows: position of each span, and the image's key with
    the number of the span's first feature row; of frames that go on with others, also their time."""
    return [
        (
            start,
            image.key + first.to_bytes(4, "little") + (image.time.to_bytes(4, "little") if image.continues else b""),
        )
        for image in images
        for start, _, first in image.spans
    ]


class ImageLoad(Wire, frozen=True):
    """What an E, or an instance that encodes its images itself, has to do for images, and how fast it is. Rows are
    feature rows."""

    waiting_rows: int = 0
    """Rows that were asked for and are not encoded yet. Of images that E encode for it an instance counts none."""
    row_s: float = 0.0
    """Seconds of a row while any was wanted, from the order of its image on: with the fetch of the file, and with what
    else the instance does meanwhile. 0: it has encoded none."""
    hits: int = 0
    """E: images since start that were asked for and here already."""
    keys: bytes = b""
    """The ends, `REPORTED_KEY_BYTES` each, of the keys of images whose features are here: at most
    `MAX_REPORTED_KEYS`, those used last."""

    @property
    def num_keys(self) -> int:
        """Images in `keys`."""
        return len(self.keys) // REPORTED_KEY_BYTES

    def has(self, key: bytes) -> bool:
        """Return whether the features of an image are here."""
        reported = key[-REPORTED_KEY_BYTES:]
        at = self.keys.find(reported)
        while at > 0 and at % REPORTED_KEY_BYTES:  # across two others
            at = self.keys.find(reported, at + 1)
        return at >= 0


NO_IMAGE_LOAD = ImageLoad()


class FetchImage(Wire, frozen=True, tag="fetch_image"):
    """Instance -> router (coordination port, through a connection of its own): the file of an image of a running
    request, or a part of it."""

    key: bytes
    start: int = 0
    """First byte of the part."""
    most_bytes: int = 0
    """Most bytes of it; 0: all."""


class ImageFile(Wire, frozen=True, tag="image_file"):
    """The answer."""

    key: bytes
    data: bytes = b""
    is_here: bool = True
    """False: no running request of this router has it."""
    start: int = 0
    """First byte of `data` in the file."""
    num_bytes: int = 0
    """Bytes of the whole file; 0: `data` is all of it."""
