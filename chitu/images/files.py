"""Image files as clients send them: which are read, how large they are, and their pixels.

Only in processes of their own: bytes of strangers are decoded here, by Pillow, which is imported by the first image.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from chitu.config.schema import ImagesConfig
from chitu.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Names of the formats in Pillow. It has some forty more, with decoders that nobody here needs."""
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""EXIF tag by which a camera says how it was held, and the values that exchange width and height."""
_STARTS = (
    (b"\x89PNG", "a damaged PNG file"),
    (b"\xff\xd8", "a damaged JPEG file"),
    (b"GIF8", "a damaged GIF file"),
    (b"II*\x00", "a TIFF file"),
    (b"MM\x00*", "a TIFF file"),
    (b"BM", "a BMP file"),
    (b"%PDF", "a PDF file"),
    (b"PK", "a ZIP file"),
    (b"RIFF", "a RIFF file"),
)
_SVG_BYTES = 1024
"""An SVG file names itself within its first bytes."""


def read_image(data: bytes, limits: ImagesConfig) -> tuple[int, int]:
    """Return width and height (pixels) of an image as it is shown: turned as its EXIF data says, the first frame of an
    animation. The whole file is decoded once, so that a damaged one is found.

    Raises InvalidRequest if it is none of `FORMATS`, is damaged, or exceeds a limit; nothing is decoded of a file that
    exceeds one.
    """
    image = opened(data, limits)
    width, height = image.size
    return (height, width) if _orientation(image) in TURNED else (width, height)


def stored_size(data: bytes, limits: ImagesConfig) -> tuple[int, int]:
    """Return width and height (pixels) by the header alone, not turned. Raises what `read_image` raises of a file that
    exceeds a limit or is none of `FORMATS`."""
    size: tuple[int, int] = opened(data, limits, is_decoded=False).size
    return size


def decode_image(data: bytes, limits: ImagesConfig) -> Image.Image:
    """Return the pixels of the same image, as RGB. Raises what `read_image` raises."""
    from PIL import ImageOps

    image = opened(data, limits)
    if _orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB")


def opened(data: bytes, limits: ImagesConfig, is_decoded: bool = True) -> Image.Image:
    """Return the image, decoded or only its header. Raises what `read_image` raises."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise InvalidRequest("the image is empty")
    if len(data) > limits.max_file_mb << 20:
        raise InvalidRequest(
            f"the image's file has {len(data)} bytes; at most {limits.max_file_mb} MiB are allowed: send a smaller one"
        )
    # Pillow refuses twice as many, also where a frame or a decoder is larger than the header says.
    Image.MAX_IMAGE_PIXELS = -(-limits.max_pixels // 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(image.size, limits)
            if is_decoded:
                image.load()
    except InvalidRequest:
        raise
    except Image.DecompressionBombError:
        raise _too_large("more", limits) from None
    except UnidentifiedImageError:
        raise InvalidRequest(
            f"the image is {what_is(data)}: send a PNG, JPEG, WEBP or GIF file (its bytes decide, not its type)"
        ) from None
    except MemoryError:
        raise InvalidRequest("the image needs too much memory to be decoded: send a smaller one") from None
    except Exception as error:  # a decoder's own: OSError, SyntaxError, ValueError, struct.error, ...
        raise InvalidRequest(f"the image is damaged or truncated: {str(error)[:200] or type(error).__name__}") from None
    return image


def check_size(size: tuple[int, int], limits: ImagesConfig) -> None:
    """Raise InvalidRequest for a width and height (pixels) that are refused."""
    width, height = size
    if width * height > limits.max_pixels:
        raise _too_large(f"{width} x {height}", limits)
    if width < 1 or height < 1:
        raise InvalidRequest(f"the image has {width} x {height} pixels: there is nothing to see")


def _too_large(size: str, limits: ImagesConfig) -> InvalidRequest:
    than = "than" if size == "more" else "pixels, more than"
    return InvalidRequest(f"the image has {size} {than} the {limits.max_pixels} pixels allowed: scale it down")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # EXIF data that cannot be read says nothing
        return 1


def what_is(data: bytes) -> str:
    """Return what a file seems to be, by its bytes."""
    if b"<svg" in data[:_SVG_BYTES].lower():
        return "an SVG file"
    if data[4:8] == b"ftyp":
        return "an AVIF, HEIC or video file"
    if data[8:12] == b"WEBP":
        return "a damaged WEBP file"
    return next((name for start, name in _STARTS if data.startswith(start)), "no image that is known here")
