"""Files of videos, each with frames that have no like."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def frames_of(count: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    """Return frames of smooth noise, which decoders of moving pictures keep about as it is."""
    source = np.random.default_rng(seed)
    size = (-(-height // 8), -(-width // 8), 3)
    frames = [Image.fromarray(source.integers(0, 255, size, dtype=np.uint8)) for _ in range(count)]
    return [frame.resize((width, height), Image.Resampling.BILINEAR) for frame in frames]


def saved_frame(frame: Image.Image, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    frame.save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


def list_url(files: Sequence[bytes]) -> str:
    """Return the data URL of frames, as vLLM takes it."""
    return "data:video/jpeg;base64," + ",".join(b64encode(file).decode() for file in files)


def animation(frames: Sequence[Image.Image], kind: str, shown_ms: int) -> bytes:
    """Return a GIF or WEBP file."""
    file = io.BytesIO()
    more: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=shown_ms, loop=0, **more)
    return file.getvalue()


def mp4(frames: Sequence[Image.Image], fps: int, kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    """Return a file of a container that PyAV writes."""
    import av

    file = io.BytesIO()
    video_frame: Any = av.VideoFrame
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        for frame in frames:
            for packet in stream.encode(video_frame.from_image(frame)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
