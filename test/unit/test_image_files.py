"""Image files of clients: sizes as they are shown, and a sentence for each that is refused."""

from __future__ import annotations

import resource
import time

import pytest
from PIL import Image
from support.image_files import gif_bomb, image_file, jpeg_bomb, png_bomb, saved, webp_bomb

from chitu.config.schema import ImagesConfig
from chitu.errors import InvalidRequest
from chitu.images.files import FORMATS, decode_image, read_image

LIMITS = ImagesConfig()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (301, 20), (20, 301)])
def test_size_of_each_format(form: str, size: tuple[int, int]) -> None:
    file = image_file(*size, form)
    assert read_image(file, LIMITS) == size
    image = decode_image(file, LIMITS)
    assert (image.size, image.mode) == (size, "RGB")


@pytest.mark.parametrize("turned", range(1, 9))
def test_a_turned_image_has_the_size_that_is_shown(turned: int) -> None:
    file = image_file(100, 40, "JPEG", turned=turned)
    assert read_image(file, LIMITS) == decode_image(file, LIMITS).size == ((40, 100) if turned >= 5 else (100, 40))


def test_exif_that_cannot_be_read_is_ignored() -> None:
    file = image_file(100, 40, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40)
    assert read_image(file, LIMITS) == (100, 40)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(form: str) -> None:
    first, second = (Image.new("RGB", (30, 20), color) for color in ("red", "blue"))
    file = saved(first, form, save_all=True, append_images=[second])
    assert read_image(file, LIMITS) == (30, 20)
    red, _, blue = decode_image(file, LIMITS).getpixel((3, 3))  # type: ignore[misc]
    assert red > 250 and blue < 5


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "I;16", "LA"])
def test_other_modes_become_rgb(mode: str) -> None:
    assert decode_image(saved(Image.new(mode, (5, 6)), "PNG"), LIMITS).mode == "RGB"


@pytest.mark.parametrize(
    "bomb",
    [
        png_bomb(60000, 60000),
        gif_bomb(60000, 60000),
        gif_bomb(8, 60000),
        webp_bomb(16384, 16384),
        jpeg_bomb(60000, 60000),
        png_bomb(6001, 6000),
    ],
    ids=["png", "gif", "gif's frame", "webp", "jpeg", "one column too many"],
)
def test_a_bomb_is_refused_by_its_header(bomb: bytes) -> None:
    read_image(image_file(8, 8), LIMITS)  # imports the decoders
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="36000000 pixels allowed: scale it down"):
        read_image(bomb, LIMITS)
    assert time.thread_time() - began_s < 0.01
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


def test_as_many_pixels_as_allowed() -> None:
    limits = ImagesConfig(max_pixels=35)
    assert read_image(image_file(5, 7), limits) == (5, 7)
    with pytest.raises(InvalidRequest, match="has 6 x 6 pixels, more than the 35 pixels allowed"):
        read_image(image_file(6, 6), limits)


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_file_is_found(form: str) -> None:
    file = image_file(200, 150, form)
    with pytest.raises(InvalidRequest, match="damaged or truncated"):
        read_image(file[: len(file) // 2], LIMITS)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "is empty"),
        (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "is an SVG file: send a PNG, JPEG"),
        (saved(Image.new("RGB", (4, 4)), "TIFF"), "is a TIFF file"),
        (saved(Image.new("RGB", (4, 4)), "BMP"), "is a BMP file"),
        (b"\0\0\0\x20ftypavif" + bytes(40), "AVIF, HEIC or video"),
        (b"%PDF-1.7", "a PDF file"),
        (b"hello", "no image that is known here"),
        (b"\x89PNG\r\n\x1a\n", "a damaged PNG file"),
        (png_bomb(0, 5), "PNG file"),
        (bytes((20 << 20) + 1), "at most 20 MiB"),
    ],
)
def test_what_is_no_image_is_refused_by_name(file: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_image(file, LIMITS)


def test_any_damage_is_a_sentence() -> None:
    """Bytes changed at random: an image or an InvalidRequest, never another error."""
    import random

    draw = random.Random(7)
    for form in FORMATS:
        file = image_file(24, 18, form)
        for _ in range(200):
            changed = bytearray(file)
            for _ in range(draw.choice((1, 3, 20))):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            try:
                width, height = read_image(bytes(changed), LIMITS)
            except InvalidRequest as error:
                assert len(error.message) < 400
            else:
                assert width * height <= LIMITS.max_pixels
