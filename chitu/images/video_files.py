"""Files of videos as clients send them: their frames, for the prompt.

Only in processes of their own, as `files.py`. A list of frames and an animation are read by Pillow. All else is read by
PyAV, an optional package that the first such video imports; it is told to use one thread, and to open nothing but the
bytes that it is given.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from chitu.config.schema import ImagesConfig
from chitu.errors import ContextLengthExceeded, InvalidRequest
from chitu.images.files import check_size, decode_image, opened
from chitu.images.videos import (
    FRAMES,
    LIST_MAGIC,
    PartFile,
    SampledVideo,
    VideoSpec,
    chosen_frames,
    frame_size,
    times_of,
    unpack_list,
)

if TYPE_CHECKING:
    from PIL import Image

ANIMATIONS = (b"GIF8", b"RIFF")
SHORTEST_MS, DEFAULT_MS = 20, 100
"""An animation's frame that is shown for less is shown for `DEFAULT_MS`, as browsers do."""
MAX_FRAMES_OF_FILE = 1 << 20
NEEDS_AV = "a video needs the package `av` on the router (pip install av)"
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpegts"
"""Names of the formats that PyAV may read, as it names them. It has some hundreds more."""
_FAST: dict[str, Any] = {"format": "PNG", "compress_level": 1}
"""How a frame is kept without loss."""


class VideoSource(NamedTuple):
    """A video that is open."""

    total: int
    """Frames that it has, by its header."""
    fps: float
    frames: Callable[[Sequence[int]], Iterator[tuple[Image.Image, bytes]]]
    """Yields the frames of these indices, which rise: the pixels, and the frame's file if it has one of its own."""
    is_sampled: bool = False
    """Whether its frames were chosen by who sent them."""


class Wanted(NamedTuple):
    """How a video is asked for."""

    fps: float | None
    """Frames to take a second; of a list of frames: how many it has. None: as the folder says."""
    most_rows: int


def sample_video(
    data: bytes,
    spec: VideoSpec,
    limits: ImagesConfig,
    wanted: Wanted,
    resize: Callable[..., tuple[int, int]],
    resample: int,
) -> SampledVideo:
    """Return a video's frames for the prompt. `resize`: the library's `smart_resize`; `resample`: Pillow's filter.

    Raises InvalidRequest if it is damaged, is of a kind that is not read, or exceeds a limit, ContextLengthExceeded
    (message alone) for more rows than `wanted.most_rows`. Nothing is decoded beyond the first frame of what exceeds
    one.
    """
    source = _source(data, spec, limits, wanted)
    _check(source, limits)
    if source.is_sampled:
        indices = list(range(source.total))
        indices += indices[-1:] * (source.total % FRAMES)
    else:
        indices = chosen_frames(spec, source.total, source.fps, wanted.fps or spec.fps, limits.max_frames)
    size: tuple[int, int] | None = None
    files: dict[int, bytes] = {}
    first_size = (0, 0)
    num_bytes = 0
    order = sorted(set(indices))
    for index, (image, file) in zip(order, source.frames(order), strict=False):
        if size is None:
            first_size = image.size
            size = frame_size(spec, resize, image.size, len(indices), limits.max_video_pixels)
            rows = (size[0] // spec.factor) * (size[1] // spec.factor) * (len(indices) // FRAMES)
            if rows > wanted.most_rows:
                raise ContextLengthExceeded(
                    f"this model's maximum context length is {wanted.most_rows} tokens and the video alone has {rows}; "
                    "send a shorter or smaller one, or ask for fewer frames a second (fps)"
                )
        if image.size != first_size:
            raise InvalidRequest(
                f"frame {index} of the video has {image.size[0]} x {image.size[1]} pixels, and the first one "
                f"{first_size[0]} x {first_size[1]}"
            )
        files[index] = file or _kept(image, size, resample)
        num_bytes += len(files[index])
        if num_bytes > limits.max_total_mb << 20:
            raise InvalidRequest(
                f"the frames of the video have more than {limits.max_total_mb} MiB (router.images.max_total_mb): send "
                "a shorter one, or ask for fewer frames a second (fps)"
            )
    if size is None or len(files) < len(order):
        raise InvalidRequest(
            f"the video is damaged or truncated: it has {len(files)} of the {len(order)} frames asked for"
        )
    seconds, times = times_of(spec, indices, source.total, source.fps)
    pairs = zip(indices[::FRAMES], indices[1::FRAMES], strict=True)
    parts = [PartFile(*size, (files[a], b"" if a == b else files[b])).pack() for a, b in pairs]
    return SampledVideo(parts, (1, size[1] // spec.factor, size[0] // spec.factor), seconds, times)


def decode_part(data: bytes, limits: ImagesConfig, resample: int) -> list[Image.Image]:
    """Return the pixels of a part's frames, as RGB, as large as the part says. Raises what `decode_image` raises."""
    part = PartFile.unpack(data)
    check_size((part.width, part.height), limits)
    images = [_resized(decode_image(frame, limits), part[:2], resample) for frame in part.frames if frame]
    return images if len(images) == FRAMES else images * FRAMES


def _resized(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    return image if image.size == size else image.resize(size, resample=resample)


def _kept(image: Image.Image, size: tuple[int, int], resample: int) -> bytes:
    file = io.BytesIO()
    _resized(image, size, resample).save(file, **_FAST)
    return file.getvalue()


def _check(source: VideoSource, limits: ImagesConfig) -> None:
    if source.total < 1 or not source.fps > 0:
        raise InvalidRequest("the video has no frames")
    if (seconds := source.total / source.fps) > limits.max_video_s:
        raise InvalidRequest(
            f"the video has {seconds:.0f} s; at most {limits.max_video_s:g} s are allowed (router.images.max_video_s)"
        )
    if source.is_sampled and source.total > limits.max_frames:
        raise InvalidRequest(
            f"the video has {source.total} frames; a list may have {limits.max_frames} at most "
            "(router.images.max_frames)"
        )


def _source(data: bytes, spec: VideoSpec, limits: ImagesConfig, wanted: Wanted) -> VideoSource:
    if not data:
        raise InvalidRequest("the video is empty")
    if data.startswith(LIST_MAGIC):
        return _of_list(unpack_list(data), limits, wanted.fps or spec.fps)
    if data.startswith(ANIMATIONS[0]) or (data.startswith(ANIMATIONS[1]) and data[8:12] == b"WEBP"):
        return _of_animation(data, limits)
    return _of_container(data, limits)


def _of_list(files: Sequence[bytes], limits: ImagesConfig, fps: float) -> VideoSource:
    def frames(indices: Sequence[int]) -> Iterator[tuple[Image.Image, bytes]]:
        for index in indices:
            try:
                yield decode_image(files[index], limits), files[index]
            except InvalidRequest as error:
                raise InvalidRequest(f"frame {index} of the video: {error.message}") from None

    return VideoSource(len(files), fps, frames, is_sampled=True)


def _of_animation(data: bytes, limits: ImagesConfig) -> VideoSource:
    image: Any = opened(data, limits, is_decoded=False)
    try:
        total = min(int(image.n_frames), MAX_FRAMES_OF_FILE)
        shown_ms = 0
        for index in range(total):
            image.seek(index)
            if image.format == "WEBP":
                image.load()  # only then Pillow knows for how long
            shown = int(image.info.get("duration", 0))
            shown_ms += shown if shown >= SHORTEST_MS else DEFAULT_MS
            if shown_ms > 1000 * limits.max_video_s:
                return VideoSource(total, 1000 * (index + 1) / shown_ms, lambda _: iter(()))
    except Exception as error:  # a decoder's own
        raise _damaged(error) from None

    def frames(indices: Sequence[int]) -> Iterator[tuple[Image.Image, bytes]]:
        for index in indices:
            try:
                image.seek(index)
                pixels = image.convert("RGB")
            except Exception as error:
                raise _damaged(error) from None
            yield pixels, b""

    return VideoSource(total, 1000 * total / max(shown_ms, 1), frames)


def _of_container(data: bytes, limits: ImagesConfig) -> VideoSource:
    try:
        import av
    except ImportError as error:
        raise InvalidRequest(f"{NEEDS_AV}; lists of JPEG frames and animated GIF or WEBP files need none") from error
    av.logging.set_level(None)
    try:
        container = av.open(io.BytesIO(data), mode="r", options={"protocol_whitelist": ""})
        if container.format.name not in CONTAINERS:
            raise InvalidRequest(f"the video is a file of the format {container.format.name[:40]!r}: send MP4 or WEBM")
        if not container.streams.video:
            raise InvalidRequest("the video's file has no video in it")
        stream = container.streams.video[0]
        check_size((stream.codec_context.width, stream.codec_context.height), limits)
        stream.codec_context.thread_count = 1
        total = stream.frames or _counted(container, stream)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    except InvalidRequest:
        raise
    except MemoryError:
        raise
    except Exception as error:  # of libav, of which there are dozens
        raise _damaged(error) from None

    def frames(indices: Sequence[int]) -> Iterator[tuple[Image.Image, bytes]]:
        left = iter(indices)
        index = next(left)
        try:
            decoded: Iterator[Any] = container.decode(stream)
            for number, frame in enumerate(decoded):
                if number == index:
                    check_size((frame.width, frame.height), limits)
                    yield _turned(frame.to_image(), getattr(frame, "rotation", 0)), b""
                    if (following := next(left, None)) is None:
                        return
                    index = following
        except (InvalidRequest, MemoryError, GeneratorExit):
            raise
        except Exception as error:
            raise _damaged(error) from None

    return VideoSource(total, fps, frames)


def _counted(container: Any, stream: Any) -> int:
    """Return the number of frames of a file whose header does not say it."""
    count = sum(1 for packet in container.demux(stream) if packet.size)
    container.seek(0)
    return count


def _turned(image: Image.Image, degrees: int) -> Image.Image:
    """Return a frame as its camera was held. `degrees`: counterclockwise."""
    return image.rotate(degrees, expand=True) if degrees % 90 == 0 and degrees % 360 else image


def _damaged(error: Exception) -> InvalidRequest:
    if isinstance(error, InvalidRequest):
        return error
    return InvalidRequest(f"the video is damaged or truncated: {str(error)[:200] or type(error).__name__}")
