"""Videos as prompts have them: which frames are taken, how large they become, at which times. Pure.

A model sees a video two frames at a time. Each two are a part: one file, with one key, whose features are computed and
cached like those of an image. So a video needs no more room at once than its largest part, and equal beginnings are
computed once. A part's file (`PartFile`) has the frames as they came, or without loss, and the size that they are
brought to; that depends on how many the video has.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.images.layout import Grid

FRAMES = 2
"""Frames of a part."""
FPS = 2.0
"""Frames taken a second where neither the folder nor the request says how many."""
MAX_FPS = 120.0
PART_MAGIC, LIST_MAGIC = b"\x93chitu-part\n", b"\x93chitu-list\n"
_HEAD = struct.Struct("<IIII")
VideoKind = Literal["qwen2", "qwen3", "glm"]
"""By whose rules frames are chosen and resized."""


class VideoSpec(msgspec.Struct, frozen=True):
    """What a folder says of videos: settings of the processor of `transformers` for them."""

    kind: VideoKind
    min_pixels: int
    """Of a frame (`qwen2`) or of all frames, after resizing."""
    max_pixels: int
    factor: int
    """Width and height of a frame are multiples of it: a row's side in pixels."""
    fps: float = FPS
    min_frames: int = 4
    max_frames: int = 768
    max_seconds: float = 300.0
    """Of `glm`: longer ones are sampled more thinly."""
    tokens_per_second: float = 0.0
    """Rotary positions of a second; 0: a part counts as one (`qwen2`)."""
    cap_tokens: int = 0
    """Above 0: `cap_pixels_per_frame` is set, and this is `max_video_tokens`."""


class SampledVideo(msgspec.Struct, frozen=True):
    """A video for the prompt."""

    parts: list[bytes]
    """A `PartFile` each."""
    grid: Grid
    """Of each part, in rows."""
    seconds: list[float]
    """When each part is, as the prompt says it."""
    times: list[int]
    """`ImagePart.time` of each."""

    @property
    def num_rows(self) -> int:
        return len(self.parts) * math.prod(self.grid)


class PartFile(NamedTuple):
    """Two frames of a video, each the file of an image; the second is empty if it is the first once more."""

    width: int
    """Pixels that the frames are brought to."""
    height: int
    frames: tuple[bytes, bytes]

    def pack(self) -> bytes:
        first, second = self.frames
        head = _HEAD.pack(self.width, self.height, len(first), len(second))
        return b"".join((PART_MAGIC, head, first, second))

    @classmethod
    def unpack(cls, data: bytes) -> PartFile:
        """Return what a part's file has. Raises InvalidRequest if the bytes are none."""
        start = len(PART_MAGIC) + _HEAD.size
        if len(data) >= start and data.startswith(PART_MAGIC):
            width, height, first, second = _HEAD.unpack_from(data, len(PART_MAGIC))
            if first and len(data) == start + first + second:
                return cls(width, height, (data[start : start + first], data[start + first :]))
        raise InvalidRequest("the frames of the video are damaged")


_list_decoder = msgspec.msgpack.Decoder(list[bytes])


def pack_list(frames: Sequence[bytes]) -> bytes:
    """Return files of images as the file of a video."""
    return LIST_MAGIC + msgspec.msgpack.encode(list(frames))


def unpack_list(data: bytes) -> list[bytes]:
    """Return the frames of such a file. InvalidRequest if there are none."""
    try:
        return _list_decoder.decode(memoryview(data)[len(LIST_MAGIC) :])
    except msgspec.MsgspecError:
        raise InvalidRequest("the frames of the video are damaged") from None


def chosen_frames(spec: VideoSpec, total: int, source_fps: float, fps: float, most: int) -> list[int]:
    """Return the indices of the frames to take of `total`, at most `most`. `source_fps`: frames a second that there
    are; `fps`: that are to be taken. An odd number of them is filled up with the last one."""
    import numpy as np

    most = max(most, FRAMES)
    match spec.kind:
        case "qwen2":
            largest = min(spec.max_frames, most, total) // FRAMES * FRAMES
            wanted = min(max(total / source_fps * fps, spec.min_frames), largest) // FRAMES * FRAMES
            count = max(1, int(wanted))
            found = [int(i * (total / count)) for i in range(count)]
        case "qwen3":
            count = min(max(int(total / source_fps * fps), spec.min_frames), spec.max_frames, most, total)
            found = np.linspace(0, total - 1, count).round().astype(int).tolist()
        case _:
            found = _of_glm(spec, total, source_fps, fps)
            if len(found) > most:
                found = [found[i] for i in np.linspace(0, len(found) - 1, most).round().astype(int)]
    return found + found[-1:] * (len(found) % FRAMES)


def _of_glm(spec: VideoSpec, total: int, source_fps: float, fps: float) -> list[int]:
    import numpy as np

    last = total - 1
    duration = total / source_fps
    if duration <= spec.max_seconds:
        count = max(int(duration * fps), 1)
        found = [min(last, math.ceil(i * source_fps / fps)) for i in range(count)]
    else:
        count = int(spec.max_seconds * fps)
        if count >= total:
            return list(range(total))
        found = [min(last, math.ceil(each * source_fps)) for each in np.linspace(0, duration, count)]
    return list(dict.fromkeys(found))


def frame_size(
    spec: VideoSpec, resize: Callable[..., tuple[int, int]], size: tuple[int, int], count: int, most_pixels: int
) -> tuple[int, int]:
    """Return the width and height that `count` frames of this width and height are brought to. `resize`: the library's
    `smart_resize`; `most_pixels`: of all frames together, beyond the folder's limits. ValueError if it refuses them."""
    width, height = size
    squared, least = spec.factor**2, int(spec.min_pixels * 1.05)
    largest, of_all = spec.max_pixels, {}
    if spec.kind == "qwen2":
        if spec.cap_tokens:
            largest = max(min(largest, int(spec.cap_tokens * squared * 0.9) * FRAMES // count), least)
        largest = min(largest, max(most_pixels // count, squared))
    else:
        if spec.cap_tokens:
            largest = max(min(spec.cap_tokens * squared, largest // count), least) * count
        largest = min(largest, max(most_pixels, count * squared))
        of_all = {"num_frames": count, "temporal_factor": FRAMES}
    bounds = {"min_pixels": min(spec.min_pixels, largest), "max_pixels": largest}
    high, wide = resize(height=height, width=width, factor=spec.factor, **bounds, **of_all)
    return wide, high


def times_of(spec: VideoSpec, indices: Sequence[int], total: int, source_fps: float) -> tuple[list[float], list[int]]:
    """Return when each part is: in seconds for the prompt, and as `ImagePart.time`."""
    import numpy as np

    firsts, lasts = indices[::FRAMES], indices[FRAMES - 1 :: FRAMES]
    match spec.kind:
        case "qwen2":
            sampled_fps = len(set(indices)) / total * source_fps
            step = (
                np.float32(FRAMES / sampled_fps) * np.float32(spec.tokens_per_second) if spec.tokens_per_second else 1
            )
            times = [int(np.float32(i) * np.float32(step)) for i in range(len(firsts))]
            return [first / source_fps for first in firsts], times
        case "qwen3":
            middles = [(first + last) / 2 / source_fps for first, last in zip(firsts, lasts, strict=True)]
            return middles, [0] * len(firsts)
        case _:
            return [float(int(first / source_fps)) for first in firsts], [0] * len(firsts)
