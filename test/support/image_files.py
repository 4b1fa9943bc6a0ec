"""Image files for tests: usual ones, and ones that a stranger might send."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any


def image_file(width: int, height: int, form: str = "PNG", *, seed: int = 0, turned: int = 1, **options: Any) -> bytes:
    """Return an image of random pixels. `turned`: its EXIF orientation."""
    from PIL import Image

    pixels = Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
    if turned != 1:
        exif = pixels.getexif()
        exif[0x0112] = turned
        options["exif"] = exif
    return saved(pixels, form, **options)


def saved(pixels: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    pixels.save(file, form, **options)
    return file.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG file of about 70 bytes whose header says that it is as large."""
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"IDAT", zlib.compress(bytes(1000))),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def gif_bomb(screen: int, frame: int) -> bytes:
    """Return a GIF file whose screen and first frame are squares of these sizes."""
    head = b"GIF89a" + struct.pack("<HHBBB", screen, screen, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + b"," + struct.pack("<HHHHB", 0, 0, frame, frame, 0) + b"\x02\x02\x44\x01\x00;"


def webp_bomb(width: int, height: int) -> bytes:
    """Return an animated WEBP file of 8x8 frames on a canvas of this size."""
    frame = bytes(6) + _u24(7) + _u24(7) + b"\x64\0\0\0" + image_file(8, 8, "WEBP", lossless=True)[12:]
    head = b"\2\0\0\0" + _u24(width - 1) + _u24(height - 1)
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(data)) + data
        for name, data in ((b"VP8X", head), (b"ANIM", bytes(6)), (b"ANMF", frame))
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _u24(number: int) -> bytes:
    return struct.pack("<I", number)[:3]


def jpeg_bomb(width: int, height: int) -> bytes:
    file = bytearray(image_file(8, 8, "JPEG"))
    place = file.index(b"\xff\xc0") + 5
    file[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(file)
