"""Files of images: where a client may have them, and their bytes. Part of `BodyWork`, in the one process that reads
files; what is to be fetched from hosts was fetched before (`net/image_fetch.py`)."""

from __future__ import annotations

import math
import os
import stat
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from chitu.config.schema import ImagesConfig
from chitu.errors import ContextLengthExceeded, InvalidRequest
from chitu.images.files import read_image, stored_size
from chitu.images.forms import key_of
from chitu.images.layout import ImageLayout, ImageSizer, Run, VideoParts
from chitu.images.videos import pack_list
from chitu.net.image_urls import AllowedHosts, ImageURL, URLRefused, is_http
from chitu.protocol import IMAGE_KEY_BYTES

DATA, FILE = "data:", "file:"
_BASE64 = ";base64"
_SPACES = str.maketrans("", "", "\r\n\t ")
_BYTES = ("application/octet-stream", "binary/octet-stream")
_MEDIA_TYPES = ("image/", *_BYTES)
_VIDEO_TYPES = ("video/", "image/gif", "image/webp", *_BYTES)
_FRAMES_TYPE = "video/jpeg"
"""Of a data URL with several frames, separated by commas; vLLM's name."""
ALL_PIXELS = 8
"""Images of the largest size that the pixels of all images of a request may make: decoding takes as long."""
MAX_VIDEO_BYTES = 64 << 20
"""Frames of videos that are remembered: agents send the same ones with each request."""
MAX_KNOWN = 1 << 14
"""Files whose sizes are remembered: agents send the same ones with each request."""


class SentImage(NamedTuple):
    where: str
    """Its field in the body."""
    url: str
    """`data:`, `http(s)://` or `file://`."""
    is_video: bool = False
    fps: float | None = None
    """Frames of a video to take a second; of a list of frames: how many it has. None: as the model's folder says."""

    @property
    def word(self) -> str:
        return "video" if self.is_video else "image"


class ReadFile(NamedTuple):
    """An image, or a part of a video."""

    key: bytes
    """As in `ImagePart`."""
    data: bytes
    layout: ImageLayout
    written: str
    """What stands for it in the text before it is tokenised."""
    token_id: int
    """The token that its rows replace in the token ids."""
    time: int = 0
    continues: bool = False
    """Both as in `ImagePart`."""


def require_allowed(image: SentImage, limits: ImagesConfig) -> None:
    """Raise InvalidRequest for a URL that this server gets no images from."""
    url = image.url
    scheme = url[:8].lower()
    if scheme.startswith(DATA):
        return
    if is_http(url):
        if not limits.hosts:
            raise _refused(image, "is at a URL, and this server fetches none; send it as a data URL")
        try:
            AllowedHosts(limits.hosts).require(ImageURL.parse(url))
        except URLRefused as error:
            raise _refused(image, str(error)) from None
    elif not scheme.startswith(FILE):
        raise _refused(image, "is no data URL, and none of http, https or file")
    elif limits.dir is None:
        raise _refused(image, "is a file of this server, which has no folder for images; send it as a data URL")


class ImageReader:
    """Reads files, and asks the model's image processor for their rows."""

    def __init__(self, limits: ImagesConfig, make_sizer: Callable[[], ImageSizer]) -> None:
        """`make_sizer` is called for the first image."""
        self._limits = limits
        self._make_sizer = make_sizer
        self._sizer: ImageSizer | None = None
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Sizes of files that were decoded whole, by key."""
        self._videos: OrderedDict[bytes, VideoParts] = OrderedDict()
        """Videos that were decoded, by their files and fps."""

    def read(
        self, images: Sequence[SentImage], fetched: Mapping[str, bytes], most_tokens: int
    ) -> list[tuple[ReadFile, ...]]:
        """Return the file of each image, and those of the parts of each video. What would have more than `most_tokens`
        rows, by the headers, is not decoded. Errors name the image that is at fault."""
        if self._sizer is None:
            self._sizer = self._make_sizer()
        form, stills, files = self._sizer.form, list[SentImage](), list[tuple[bytes, bytes]]()
        videos: dict[int, bytes] = {}
        total = 0
        for i, image in enumerate(images):
            data = fetched[image.url] if is_http(image.url) else self._bytes_of(image)
            total = self._counted(image, total, len(data))
            if image.is_video:
                videos[i] = data
            else:
                stills.append(image)
                files.append((key_of(data, form), data))
        left = most_tokens - self._check_cost(stills, files, most_tokens)
        parts: dict[int, tuple[ReadFile, ...]] = {}
        for i, data in videos.items():
            parts[i] = self._parts(images[i], data, left)
            left -= sum([part.layout.num_tokens for part in parts[i]])
            total = self._counted(images[i], total, sum([len(part.data) for part in parts[i]]))
        sizes = [self._decoded(image, *file) for image, file in zip(stills, files, strict=True)]
        found = zip(files, self._layouts(stills, sizes), strict=True)
        read = iter([(ReadFile(*file, layout, form.written, form.token_id),) for file, layout in found])
        return [parts[i] if image.is_video else next(read) for i, image in enumerate(images)]

    def _counted(self, image: SentImage, total: int, num_bytes: int) -> int:
        """Return how many bytes the files of a request have with these, too. InvalidRequest if they are too many."""
        if total + num_bytes > self._limits.max_total_mb << 20:
            raise _refused(
                image,
                f"makes the files of the request larger than {self._limits.max_total_mb} MiB "
                "(router.images.max_total_mb)",
            )
        return total + num_bytes

    def _parts(self, image: SentImage, data: bytes, most_rows: int) -> tuple[ReadFile, ...]:
        """Return the parts of a video."""
        assert self._sizer is not None
        form = self._sizer.form
        if isinstance(form.video, str):
            raise _refused(image, f"cannot be seen by this model: {form.video}")
        key = blake2b(data, digest_size=IMAGE_KEY_BYTES, person=b"video").digest() + repr(image.fps).encode()
        video = self._videos.pop(key, None)
        if video is None or len(video.parts) * math.prod(video.grid) > most_rows:
            try:
                video = self._sizer.video(data, image.fps, most_rows)
            except InvalidRequest as error:
                raise type(error)(f"{image.where}: {error.message}", image.where) from None
        self._videos[key] = video
        while sum([len(part) for each in self._videos.values() for part in each.parts]) > MAX_VIDEO_BYTES:
            self._videos.popitem(last=False)
        layout = ImageLayout((Run(form.video.token_id, math.prod(video.grid)),), video.grid)
        return tuple(
            ReadFile(
                key_of(part, form),
                part,
                layout,
                form.video.written.format(seconds=seconds),
                form.video.token_id,
                time if form.video.is_run else 0,
                form.video.is_run and i > 0,
            )
            for i, (part, seconds, time) in enumerate(zip(video.parts, video.seconds, video.times, strict=True))
        )

    def _check_cost(self, images: Sequence[SentImage], files: Sequence[tuple[bytes, bytes]], most_tokens: int) -> int:
        """Return the tokens of images. Raise InvalidRequest for those that together cost too much, by their headers."""
        sizes, pixels = [], 0
        for image, (key, data) in zip(images, files, strict=True):
            size = self._known.get(key) or _told(image, stored_size, data, self._limits)
            pixels += size[0] * size[1]
            if pixels > ALL_PIXELS * self._limits.max_pixels:
                raise _refused(
                    image,
                    f"makes the images of the request larger than {ALL_PIXELS} times router.images.max_pixels "
                    f"({self._limits.max_pixels})",
                )
            sizes.append(size)
        num_tokens = sum([layout.num_tokens for layout in self._layouts(images, sizes)])
        if num_tokens > most_tokens:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {most_tokens} tokens and the images alone have {num_tokens}; "
                "send fewer or smaller ones"
            )
        return num_tokens

    def _decoded(self, image: SentImage, key: bytes, data: bytes) -> tuple[int, int]:
        if key not in self._known:
            self._known[key] = _told(image, read_image, data, self._limits)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _layouts(self, images: Sequence[SentImage], sizes: Sequence[tuple[int, int]]) -> list[ImageLayout]:
        assert self._sizer is not None
        try:
            return self._sizer.layout(sizes)
        except InvalidRequest as error:
            image = images[int(error.param)] if error.param is not None else images[0]
            raise InvalidRequest(f"{image.where}: {error.message}", image.where) from None

    def _bytes_of(self, image: SentImage) -> bytes:
        if image.url[: len(DATA)].lower() == DATA:
            if image.is_video and image.url[len(DATA) :].lower().startswith(_FRAMES_TYPE):
                return _of_frames(image, self._limits)
            return _of_data_url(image, self._limits.max_file_mb << 20)
        return _of_folder(image, self._limits)


def _of_frames(image: SentImage, limits: ImagesConfig) -> bytes:
    """Return the file of a video whose frames are in a data URL, one behind the other."""
    head, _, data = image.url[len(DATA) :].partition(",")
    if not head.rstrip().lower().endswith(_BASE64):
        raise _refused(image, "is a data URL of frames without ';base64'")
    if (count := data.count(",") + 1) > limits.max_frames:
        raise _refused(
            image, f"has {count} frames; a list may have {limits.max_frames} at most (router.images.max_frames)"
        )
    if len(data) * 3 // 4 > limits.max_total_mb << 20:
        raise _refused(image, f"has more than {limits.max_total_mb} MiB (router.images.max_total_mb)")
    try:
        return pack_list([b64decode(frame.translate(_SPACES), validate=True) for frame in data.split(",")])
    except ValueError:
        raise _refused(image, "is no valid base64") from None


def _of_data_url(image: SentImage, max_bytes: int) -> bytes:
    head, comma, data = image.url[len(DATA) :].partition(",")
    if not comma:
        raise _refused(image, "is a data URL without data")
    kind = head.partition(";")[0].strip().lower()
    if kind and not kind.startswith(_VIDEO_TYPES if image.is_video else _MEDIA_TYPES):
        raise _refused(image, f"is no {image.word}: its data URL says {kind[:40]!r}")
    is_base64 = head.rstrip().lower().endswith(_BASE64)
    if len(data) * 3 // 4 > max_bytes + len(_BASE64):
        raise _refused(image, f"has a file of more than {max_bytes >> 20} MiB (router.images.max_file_mb)")
    if not is_base64:
        return unquote_to_bytes(data)
    try:
        return b64decode(data, validate=True)
    except ValueError:
        try:
            return b64decode(data.translate(_SPACES), validate=True)
        except ValueError:
            raise _refused(image, "is no valid base64") from None


def _of_folder(image: SentImage, limits: ImagesConfig) -> bytes:
    """Return a file below `router.images.dir`. What is elsewhere is told apart from what is nowhere by nothing."""
    assert limits.dir is not None
    parts = urlsplit(image.url)
    path, max_bytes = unquote(parts.path), limits.max_file_mb << 20
    if parts.netloc not in ("", "localhost"):
        raise _refused(image, "is a file of another host")
    try:
        folder = Path(limits.dir).expanduser().resolve(strict=True)
        if ".." in Path(path).parts:
            raise ValueError
        found = Path(path).resolve(strict=True)
        found.relative_to(folder)
        handle = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            # Again, of what is open: a link may have been put there meanwhile.
            Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(folder)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ValueError
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError):
        raise _refused(image, "is no file below the folder of images (router.images.dir)") from None
    if len(data) > max_bytes:
        raise _refused(image, f"has a file of more than {limits.max_file_mb} MiB (router.images.max_file_mb)")
    return data


def _told(
    image: SentImage, read: Callable[[bytes, ImagesConfig], tuple[int, int]], data: bytes, limits: ImagesConfig
) -> tuple[int, int]:
    """Return what `read` says of the size; an error names the image."""
    try:
        return read(data, limits)
    except InvalidRequest as error:
        raise InvalidRequest(f"{image.where}: {error.message}", image.where) from None


def _refused(image: SentImage, why: str) -> InvalidRequest:
    return InvalidRequest(f"{image.where}: the {image.word} {why}", image.where)
