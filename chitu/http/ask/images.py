"""The images of a chat, from the parts of its messages to rows of its prompt. Pure but for what reads files; part of
`BodyWork`.

Until its template renders a chat, the content of a message is text: an image in it is a mark, which no JSON can have,
around its number. So all that joins, moves and forms turns need not know of images. `image_turns.py` gives the template
parts in place of the marks. Each placeholder that the template writes becomes the one token of an image, and that
token, in the ids, the rows of the image (`ImageLayout`).

Files are read, and sizes asked for, in one process alone (`serve/body_pool.py`). Elsewhere a body with an image ends in
`ImagesWanted`, before its chat is rendered, and is read again there: text pays nothing for that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chitu.config.schema import ImagesConfig
from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import MAX_TOKENS
from chitu.http.ask.image_files import ImageReader, ReadFile, SentImage, require_allowed
from chitu.images.layout import ImageForm, ImageLayout, VideoForm
from chitu.net.image_urls import is_http
from chitu.protocol import ImagePart

if TYPE_CHECKING:
    from chitu.http.ask.served_model import ModelLimits

MARK = "\udfff"
"""Half a character: decoders of JSON refuse it, so no text of a client has it."""
VIDEO = "v"
"""Behind the number in the mark of a video."""
MARKED = re.compile(f"{MARK}(\\d+{VIDEO}?){MARK}")
_BREAK = "\n"


class ImagesWanted(Exception):
    """The body has images, and this process reads none, or has not got those at the URLs."""

    def __init__(self, urls: dict[str, str]) -> None:
        super().__init__(urls)
        self.urls = urls
        """URLs that are to be fetched, with their fields in the body."""


@dataclass(slots=True)
class ServedVision:
    """What a model with vision needs of images."""

    form: ImageForm
    limits: ImagesConfig
    reader: ImageReader | None = None
    """None in a process that reads no files."""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """What the chat template writes for an image, and for a video if the model sees some."""
        video = self.form.video
        return (self.form.placeholder,) if isinstance(video, str) else (self.form.placeholder, video.placeholder)


def marked(number: int, is_video: bool = False) -> str:
    """Return the mark of an image or a video."""
    return f"{MARK}{number}{VIDEO * is_video}{MARK}"


def joined(texts: Sequence[str], between: str = _BREAK) -> str:
    """Return texts as one. Nothing comes between an image and what is beside it, as in templates."""
    found = texts[0] if texts else ""
    for text in texts[1:]:
        found += text if found.endswith(MARK) or text.startswith(MARK) else between + text
    return found


class SentImages:
    """The images of one chat."""

    def __init__(self, vision: ServedVision, fetched: Mapping[str, bytes], is_here: bool) -> None:
        """Make an empty set. `fetched`: files by URL. `is_here`: whether this process reads files."""
        self.form = vision.form
        self._limits = vision.limits
        self._reader = vision.reader if is_here else None
        self._fetched = fetched
        self._sent: list[SentImage] = []
        self._files: list[tuple[ReadFile, ...]] = []
        self._order: list[int] = []
        self._spans: list[tuple[tuple[int, int, int], ...]] = []

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def takes_videos(self) -> bool:
        """Whether the model sees videos."""
        return isinstance(self.form.video, VideoForm)

    def mark(self, where: str, url: str, is_video: bool = False, fps: float | None = None) -> str:
        """Return the text in the place of an image, or a video, whose `fps` is as of `SentImage`. InvalidRequest if
        there are too many, or if it may not be had."""
        if len(self._sent) == self._limits.max_images:
            raise InvalidRequest(
                f"{where}: a request may have {self._limits.max_images} images at most (router.images.max_images)",
                where,
            )
        sent = SentImage(where, url, is_video, fps)
        require_allowed(sent, self._limits)
        self._sent.append(sent)
        return marked(len(self._sent) - 1, is_video)

    def where(self, index: int) -> str:
        """Return the field of an image."""
        return self._sent[index].where

    def read(self, limits: ModelLimits | None) -> None:
        """Read the files, and how many rows each image has. Once, ahead of rendering. InvalidRequest names the image
        that is at fault; ImagesWanted if that is not for this process."""
        if self._files or not self._sent:
            return
        wanted: dict[str, str] = {}
        for image in self._sent:
            if is_http(image.url):
                wanted.setdefault(image.url, image.where)
        if self._reader is None or not wanted.keys() <= self._fetched.keys():
            raise ImagesWanted(wanted)
        most = MAX_TOKENS if limits is None else limits.max_model_len
        self._files = self._reader.read(self._sent, self._fetched, most)

    @property
    def parts(self) -> tuple[ImagePart, ...]:
        """The images of the prompt, and the parts of its videos, in order."""
        placed = zip(self._pieces, self._spans, strict=True)
        return tuple(
            [ImagePart(each.key, spans, each.layout.grid, each.time, each.continues) for each, spans in placed]
        )

    @property
    def files(self) -> dict[bytes, bytes]:
        """Files of the images of the prompt, by key."""
        return {each.key: each.data for each in self._pieces}

    @property
    def _pieces(self) -> list[ReadFile]:
        """All files of the prompt, in order."""
        return [each for i in self._order for each in self._files[i]]

    # ----------------------------------------------------------------------------------------------------------- prompt

    def place(self, order: Sequence[int]) -> None:
        """Note which images the turns have, in this order."""
        self._order = list(order)

    def written(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a rendered chat with what stands for its images before it is tokenised. InvalidRequest if it has more
        placeholders than images: some text has one."""
        wanted = [(self.form.placeholder, [i for i in self._order if not self._sent[i].is_video])]
        if isinstance(self.form.video, VideoForm) and len(wanted[0][1]) < len(self._order):
            wanted.append((self.form.video.placeholder, [i for i in self._order if self._sent[i].is_video]))
        for placeholder, numbers in wanted:
            if text.count(placeholder) != len(numbers):
                raise _literal(placeholder, messages)
            written = ["".join([each.written for each in self._files[i]]) for i in numbers]
            if written != [placeholder] * len(numbers):
                pieces = zip(text.split(placeholder), [*written, ""], strict=True)
                text = "".join([piece + each for piece, each in pieces])
        return text

    def find(self, ids: Sequence[int]) -> None:
        """Note where the rows of all images are in a prompt of token ids that has them already, each behind the last
        one. What looks like a row behind them all is a token. InvalidRequest if the prompt does not have them."""
        self.place(range(len(self)))
        self._spans, at = [], 0
        for i in self._order:
            layout = self._files[i][0].layout
            rows = [run.token_id for run in layout.runs for _ in range(run.count)]
            start = next((place for place in range(at, len(ids)) if ids[place] == rows[0]), len(ids))
            if list(ids[start : start + len(rows)]) != rows:
                where = self.where(i)
                raise InvalidRequest(f"{where}: the prompt does not have its {len(rows)} tokens in its place", where)
            self._spans.append(_spans(layout, start))
            at = start + len(rows)

    def expanded(
        self, ids: list[int], literal: Callable[[int], str], messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the ids with the rows of the images. `literal` returns the text of a token that stands for one.
        InvalidRequest if there are more of these than images."""
        pieces, found, at = self._pieces, list[int](), 0
        for token, count in Counter([each.token_id for each in pieces]).items():
            if ids.count(token) != count:
                raise _literal(literal(token), messages)
        self._spans = []
        for each in pieces:
            end = ids.index(each.token_id, at)
            found += ids[at:end]
            at = end + 1
            self._spans.append(_spans(each.layout, len(found)))
            for run in each.layout.runs:
                found += [run.token_id] * run.count
        return found + ids[at:]


def _spans(layout: ImageLayout, start: int) -> tuple[tuple[int, int, int], ...]:
    """Return the rows of an image whose tokens begin at a position, as in `ImagePart`."""
    spans, at, row = list[tuple[int, int, int]](), start, 0
    for run in layout.runs:
        if run.is_image:
            first, length, first_row = spans[-1] if spans else (0, 0, 0)
            if length and first + length == at:
                spans[-1] = (first, length + run.count, first_row)
            else:
                spans.append((at, run.count, row))
            row += run.count
        at += run.count
    return tuple(spans)


def _literal(literal: str, messages: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Return the error of a text that has what stands for an image."""
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), str) and literal in content:
            where = f"messages[{i}].content"
            return InvalidRequest(
                f"{where}: its text has {literal!r}, which stands for an image in this model's prompts; write it "
                "otherwise, or send no images beside it",
                where,
            )
    return InvalidRequest(
        f"messages: the prompt has {literal!r} elsewhere than for an image; it stands for one in this model's prompts",
        "messages",
    )
