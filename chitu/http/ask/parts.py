"""Parts of content as the text of a prompt, and the warnings about what a prompt leaves out. Pure; part of `BodyWork`.

Agents have images, sound and files in their histories, and send them again with each request. A part that is no text
becomes a placeholder, and a warning names it. It is refused only if the last turn asks about it: the model would answer
about something that it has not seen. Images are the model's to see if it has vision (`images.py`); if it has none, a
placeholder and a warning tell that, wherever they are.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

from chitu.errors import InvalidRequest
from chitu.http.ask.fields import TEXT_ONLY
from chitu.http.ask.images import SentImages, joined

NOT_RUN = "this server cannot run {}, so the prompt leaves it out"
NOT_SHOWN = "the prompt leaves out {}"
PLACEHOLDER = "this server serves text, so the prompt has a placeholder for {}"
OF_VISION = "the model sees images of the user and of results of tools, so the prompt has a placeholder for {}"
"""In place of `PLACEHOLDER`, if the model has vision."""
_IMAGE = "image"
_WORDS = (("image", _IMAGE), ("screenshot", _IMAGE), ("audio", "sound"), ("video", "video"))
"""What the name of a type contains -> the word for what the model cannot see or hear."""
_NO_TEXT = ("image/", "audio/", "video/", "application/pdf")
"""How media types of files begin that are not read as text."""
_NAMED_PLACES = 4
"""Places that a warning names."""
_NAMED_CHARS = 80


class LeftOut:
    """What a prompt does not have, or has a placeholder for."""

    def __init__(self, images: SentImages | None = None) -> None:
        """`images` gets those of a chat; None if the model has no vision."""
        self.images = images
        self._has_vision = images is not None
        self._kinds: dict[str, dict[str, str]] = {}

    @property
    def without_images(self) -> LeftOut:
        """The same, for turns in which the model sees no images."""
        if self.images is None:
            return self
        twin = LeftOut()
        twin._has_vision, twin._kinds = self._has_vision, self._kinds
        return twin

    def add(self, where: str, kind: str, sentence: str) -> None:
        """Note what is at a place. `sentence`: one of the above."""
        self._kinds.setdefault(sentence, {})[where] = kind

    def placeholder(self, where: str, kind: str, name: str = "") -> str:
        """Return the text in place of a part, block or item of this type."""
        self.add(where, kind, OF_VISION if self._has_vision else PLACEHOLDER)
        word = _word_of(kind)
        told = " ".join([each for each in (word or kind[:_NAMED_CHARS], name[:_NAMED_CHARS]) if each])
        has_reason = word and not self._has_vision
        return f"[{told} left out: this model takes text alone]" if has_reason else f"[{told} left out]"

    def warn(self, warnings: list[str]) -> None:
        """Add a warning for each sentence."""
        for sentence, kinds in self._kinds.items():
            told, places = ", ".join(sorted({kind[:40] for kind in kinds.values()})), [*kinds]
            where = ", ".join(places[:_NAMED_PLACES]) + (", ..." if len(places) > _NAMED_PLACES else "")
            warnings.append(f"{where}: {sentence.format(told)}")


class Reading(NamedTuple):
    """What a part says."""

    text: str | None
    """None: it is no text."""
    name: str = ""
    """What its placeholder names."""
    is_whole: bool = True
    """False: the text is a placeholder, too."""
    image: str | None = None
    """URL of the image that it is."""
    video: str | None = None
    """URL of the video that it is."""
    fps: float | None = None
    """Of the video; as of `SentImage`."""


class Typed(Protocol):
    @property
    def type(self) -> str: ...


TypedT = TypeVar("TypedT", bound=Typed)


def text_of(
    given: str | Sequence[TypedT],
    read: Callable[[TypedT, str], Reading],
    where: str,
    left: LeftOut,
    is_asked: bool = False,
    first: int = 0,
) -> str:
    """Return content as one text: parts are joined by line breaks, as vLLM and llama.cpp do. `read` gets a part and its
    place. `first`: place of the first part. If `is_asked`, raise InvalidRequest for a part that `must_be_text`."""
    if isinstance(given, str):
        return given
    texts = []
    for i, part in enumerate(given, first):
        here = f"{where}[{i}]"
        reading = read(part, here)
        if is_asked and must_be_text(part.type, reading, left):
            if reading.video is not None and left.images is not None:
                raise InvalidRequest(f"{here}: this model sees no videos: {left.images.form.video}", here)
            only = "'text' parts" if left.images is None else "text, and images with data or a URL,"
            raise InvalidRequest(f"{here}: only {only} are supported, not {part.type[:40]!r} ({TEXT_ONLY})", here)
        texts.append(shown(part.type, here, reading, left))
    return joined(texts) if left.images else "\n".join(texts)


def must_be_text(kind: str, reading: Reading, left: LeftOut) -> bool:
    """Return whether a part is none that a question may have: neither text nor an image. A model with vision must get
    the image."""
    if reading.text is not None:
        return False
    if left.images is None:
        return _word_of(kind) != _IMAGE
    return reading.image is None and (reading.video is None or not left.images.takes_videos)


def shown(kind: str, where: str, reading: Reading, left: LeftOut) -> str:
    """Return the text of what was read, the mark of an image that the model gets, or the placeholder."""
    if reading.image is not None and left.images is not None:
        return left.images.mark(where, reading.image)
    if reading.video is not None and left.images is not None and left.images.takes_videos:
        return left.images.mark(where, reading.video, is_video=True, fps=reading.fps)
    if reading.text is None:
        return left.placeholder(where, kind, reading.name)
    if not reading.is_whole:
        left.add(where, kind, PLACEHOLDER)
    return reading.text


def _word_of(kind: str) -> str:
    """Return the word for what the model cannot see or hear; empty for what it can read at best."""
    return next((word for inner, word in _WORDS if inner in kind), "")


def required_text(text: str | None, where: str) -> Reading:
    """Return the text of a part that must have one."""
    if text is None:
        raise InvalidRequest(f"{where}.text is required", f"{where}.text")
    return Reading(text)


def question_start(roles: Sequence[str]) -> int:
    """Return from which message on all are a question of the user: behind the last turn of the model. If results of
    calls are among them, none is: what is beside a result is what a tool has read."""
    start = len(roles)
    while start and roles[start - 1] not in ("assistant", "tool", "function"):
        start -= 1
    return len(roles) if start and roles[start - 1] != "assistant" else start


def read_file(data: object, name: object, media_type: object = "") -> Reading:
    """Return the text of a file: base64, or a data URL. It has none if its bytes are not UTF-8."""
    title = name if isinstance(name, str) else ""
    kind = media_type if isinstance(media_type, str) else ""
    if not isinstance(data, str):
        return Reading(None, title)
    try:
        if data.startswith("data:"):
            head, _, data = data.partition(",")
            kind = head.removeprefix("data:")
            content = b64decode(data, validate=True) if kind.endswith(";base64") else unquote_to_bytes(data)
        else:
            content = b64decode(data, validate=True)
        text = content.decode()
    except ValueError:
        return Reading(None, title)
    if kind.startswith(_NO_TEXT) or text.startswith("%PDF") or "\0" in text:
        return Reading(None, title)
    return Reading(f"{title}\n{text}" if title else text)
