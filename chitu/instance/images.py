"""The features of images on an instance that computes prompts: where they are, and which prompts may go on.

`FeatureStore` has the rows of the executor's feature region, `ImageGate` decides which images are prepared, encoded and
placed, and `PromptImages` is what a sequence knows of its images. Step thread only; no tensor, no socket.

A prompt needs the features of those images of which rows are not in cached pages: known when it is admitted, so a
cached turn asks for nothing. The gate asks the `ImageSource` for them, has them encoded in steps, and places them.
Chunks of the prompt end before the first image that is not placed; the text before it, and all other requests, go on.
Equal images are encoded once.

Why prompts cannot deadlock over rows: an image larger than the region is refused on arrival. A prompt has its images
placed in their order, and gives up the rows of each once these are computed, so it never holds rows for a later image
without those for the first that it waits for. The most urgent prompt gets rows that no prompt has placed, then those of
less urgent prompts, which have them encoded again; while one waits for rows, no less urgent one takes any.

A large image, or several at once, are encoded in turns (`TowerBatch`): each costs about as much as a full chunk of a
prompt, and is a part of a step that also has the chunks and decodes of others. Rows are placed when the tower begins,
and read from the step on that has the last turn.

Images that give way may be kept in host memory (`host_features.py`), and are then loaded, not asked for.

Where there are E (`image_pulls.py`), they are asked before the source, and write features into rows that are lent to
them.

A row is given to another image while a launched step may still read it: steps run in the order of their launches, and
the next image is encoded by a later one. While the lane of prompts is busy, nothing is encoded.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from chitu.clock import Clock, RealClock
from chitu.engine.executor import (
    EncodeImage,
    ExecutorInfo,
    ImageSpan,
    LoadImage,
    PlaceImage,
    StepPlan,
    TowerTurn,
)
from chitu.errors import ChituError, Internal, TransferStalled
from chitu.instance.host_features import HostFeatures
from chitu.instance.image_load import ImageMeter
from chitu.instance.image_pulls import LENT_SHARE, ImagePulls, PullNews
from chitu.instance.image_source import ImageSource, NoImages
from chitu.instance.tower_batch import AskedImage, TowerBatch
from chitu.protocol import (
    IMAGE_KEY_BYTES,
    MAX_REPORTED_KEYS,
    NO_IMAGE_LOAD,
    REPORTED_KEY_BYTES,
    ImageLoad,
    ImagePart,
    RequestHead,
)

if TYPE_CHECKING:
    from chitu.instance.sequences import Sequence as Request

logger = logging.getLogger(__name__)

WhenRead = Callable[[Callable[[], None]], None]
"""Function that calls its argument once the newest launched step is read; at once if it has been."""

MAX_TIME = 1 << 30
"""Largest `ImagePart.time`: positions stay far below what 32 bits hold."""
NO_VISION = ExecutorInfo(0, 0, 0, 0, ())
"""Of an executor that takes no images."""


# --------------------------------------------------------------------------------------------------------- the store


@dataclass(slots=True, eq=False)
class StoredImage:
    """An image with rows of the region."""

    key: bytes
    rows: NDArray[np.int32]
    """A row for each of its feature rows, in order."""
    pins: int = 0
    """Prompts that have it placed; and the tower, while it computes it."""
    is_ready: bool = True
    """Whether the next launched step may read its rows. Not before the last turn of the tower."""
    mark: bytes = b""
    """On an E: mark of the weights that its features were made with."""


class FeatureStore:
    """The rows of the feature region. An image is here from `reserve` on: the step that computes its features, or
    begins to, is the next one launched. It is *pinned* by the prompts that have it placed, and by the tower; the others
    are kept for later prompts, and the least recently used go first."""

    def __init__(self, num_rows: int, num_host_rows: int = 0) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._images: OrderedDict[bytes, StoredImage] = OrderedDict()
        """Images that can be found, the least recently used first."""
        self.num_pinned = 0
        """Rows of pinned images."""
        self.host = HostFeatures(num_host_rows)
        self.evicted: list[StoredImage] = []
        """What gave up its rows in the newest call of `reserve`."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._images

    @property
    def num_free(self) -> int:
        """Rows of no image."""
        return len(self._free)

    @property
    def newest_keys(self) -> bytes:
        """`ImageLoad.keys` of what is here."""
        return b"".join([key[-REPORTED_KEY_BYTES:] for key in islice(reversed(self._images), MAX_REPORTED_KEYS)])

    def find(self, key: bytes) -> StoredImage | None:
        """Return an image that is here."""
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def reserve(self, key: bytes, num_rows: int) -> StoredImage | None:
        """Take rows for an image that is not here. Return None, and take none, if too few are free or unpinned."""
        self.evicted = []
        if num_rows > self.num_rows - self.num_pinned:
            return None
        for idle in [image for image in self._images.values() if not image.pins]:
            if len(self._free) >= num_rows:
                break
            del self._images[idle.key]
            self._give_back(idle)
            self.evicted.append(idle)
        at = len(self._free) - num_rows
        rows = np.array(self._free[at:][::-1], np.int32)
        del self._free[at:]
        image = self._images[key] = StoredImage(key, rows)
        return image

    def lend(self, key: bytes, num_rows: int) -> StoredImage | None:
        """Take rows that an E is to write: pinned, and not found before `keep`. Return None if too few are free or
        unpinned."""
        image = self.reserve(key, num_rows)
        if image is not None:
            self.pin(image)
            del self._images[key]
        return image

    def keep(self, image: StoredImage) -> None:
        """Let a lent image be found: its features came. `unpin` ends a loan without them."""
        if self._images.setdefault(image.key, image) is not image:
            logger.warning("image %s came from an E and was encoded here, too", image.key.hex()[:8])
        self.unpin(image)

    def pin(self, image: StoredImage) -> None:
        """Keep an image for one more prompt."""
        if not image.pins:
            self.num_pinned += len(image.rows)
        image.pins += 1

    def unpin(self, image: StoredImage) -> None:
        """Keep it for one prompt fewer."""
        image.pins -= 1
        if not image.pins:
            self.num_pinned -= len(image.rows)
            if self._images.get(image.key) is not image:
                self._give_back(image)

    def discard(self, image: StoredImage) -> None:
        """Let an image be found no more: what its rows hold is not its features. They are free once nobody pins it."""
        if self._images.get(image.key) is image:
            del self._images[image.key]
            if not image.pins:
                self._give_back(image)

    def drop_all(self) -> None:
        """Let no image be found any more, here and in host memory."""
        self.host.drop_all()
        for image in list(self._images.values()):
            self.discard(image)

    def check_idle(self) -> None:
        """Raise Internal unless nothing is pinned: called when no request is left."""
        num_kept = sum([len(image.rows) for image in self._images.values()])
        if self.num_pinned or self.num_free + num_kept != self.num_rows:
            raise Internal(
                f"{self.num_pinned} rows of features are pinned, {self.num_free} free and {num_kept} kept of "
                f"{self.num_rows}"
            )

    def _give_back(self, image: StoredImage) -> None:
        self._free.extend(image.rows[::-1].tolist())


# -------------------------------------------------------------------------------------------------- images of a prompt


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of a sequence. Rows of those before `first` are computed, or in cached pages; the next ones are
    `placed`, and chunks end before those behind, and before one that is not ready."""

    parts: tuple[ImagePart, ...]
    """All, in order of position."""
    is_whole: bool = False
    """Whether no chunk may end inside one (`ExecutorInfo.whole_images`)."""
    first: int = 0
    placed: list[StoredImage] = field(default_factory=list)
    """Pinned ones, which the executor knows the rows of."""
    spans: list[ImageSpan] = field(default_factory=list)
    """As in `Admit.images`: with rows of the region where an image is placed."""

    def __post_init__(self) -> None:
        self.spans = [
            ImageSpan(start, length, image.grid, time=image.time, continues=image.continues)
            for image in self.parts
            for start, length, _ in image.spans
        ]

    @property
    def missing(self) -> Sequence[ImagePart]:
        """Images whose features are needed and not placed."""
        return self.parts[self.first + len(self.placed) :]

    @property
    def next_missing(self) -> ImagePart | None:
        """The first of them."""
        at = self.first + len(self.placed)
        return self.parts[at] if at < len(self.parts) else None

    @property
    def next_unready(self) -> ImagePart | None:
        """The first whose features no step may read."""
        for at, image in enumerate(self.placed, self.first):
            if not image.is_ready:
                return self.parts[at]
        return self.next_missing

    def pass_computed(self, kv_len: int) -> list[StoredImage]:
        """Note that so many tokens need no computing. Return the images that were placed and whose rows are all among
        them."""
        before = self.first
        while self.first < len(self.parts) and self.parts[self.first].end <= kv_len:
            self._set_rows(self.first, None)
            self.first += 1
        passed, self.placed = self.placed[: self.first - before], self.placed[self.first - before :]
        return passed

    def place(self, image: StoredImage) -> list[tuple[int, bytes]]:
        """Note that the first missing image is placed. Return the places of its spans, and the rows of each."""
        self.placed.append(image)
        return self._set_rows(self.first + len(self.placed) - 1, image)

    def unplace(self) -> StoredImage:
        """Note that the last one that is placed is missing again, and return it."""
        self._set_rows(self.first + len(self.placed) - 1, None)
        return self.placed.pop()

    def chunk_length(self, start: int, length: int, most: int) -> int:
        """Return how long a chunk from `start` may be that would have `length` tokens, and has at most `most`, if it
        has to reach the end of an image; 0: none can be computed now."""
        if (unready := self.next_unready) is not None:
            length = min(length, max(0, unready.start - start))
        if self.is_whole and length:
            end = start + length
            for image in self.parts[self.first :]:
                if image.start < end < image.end:
                    return image.end - start if image.end - start <= most else max(0, image.start - start)
        return length

    def _set_rows(self, index: int, image: StoredImage | None) -> list[tuple[int, bytes]]:
        """Set the rows of the region of all spans of an image."""
        at, changed = sum([len(part.spans) for part in self.parts[:index]]), []
        for place, (_, length, first) in enumerate(self.parts[index].spans, at):
            rows = b"" if image is None else image.rows[first : first + length].astype("<i4").tobytes()
            if rows != self.spans[place].rows:
                self.spans[place] = msgspec.structs.replace(self.spans[place], rows=rows)
                changed.append((place, rows))
        return changed


def wrong_images(images: Sequence[ImagePart], num_tokens: int) -> str:
    """Return why a prompt of so many tokens cannot have these images; empty if it can. The router has checked them
    before."""
    end = 0
    for number, image in enumerate(images):
        if len(image.key) != IMAGE_KEY_BYTES or not image.spans:
            return f"image {number} has a key of {len(image.key)} bytes and {len(image.spans)} spans"
        num_rows = 0
        if not 0 <= image.time <= MAX_TIME or (image.continues and (not number or image.start != end)):
            return f"image {number} goes on at {image.start}, {image.time} behind a video that ends at {end}"
        for start, length, first in image.spans:
            if not (end <= start and length > 0 and start + length <= num_tokens and first == num_rows):
                return f"image {number} has {length} rows from {start} on (of {num_tokens} tokens), behind {end}"
            end, num_rows = start + length, num_rows + length
        if any(image.grid) and math.prod(image.grid) != num_rows:
            return f"image {number} has {num_rows} rows and a grid of {image.grid}"
    return ""


# ----------------------------------------------------------------------------------------------------------- the gate


class ImageGate:
    """The prompts that wait for features, and the store of these."""

    def __init__(
        self,
        info: ExecutorInfo = NO_VISION,
        source: ImageSource | None = None,
        most_rows: int = 1 << 30,
        silence_s: float = math.inf,
        clock: Clock | None = None,
        num_host_rows: int = 0,
    ) -> None:
        """`most_rows`: rows that a step encodes, at most, but for one image alone. `silence_s`: longest time in which
        the source prepares nothing of what it was asked for."""
        self.store = FeatureStore(info.image_rows, num_host_rows)
        self.pulls: ImagePulls | None = None
        """What has E encode images; None if this instance takes none from E."""
        self.is_whole = info.whole_images
        self._source: ImageSource = source or NoImages()
        self._most_rows = most_rows
        self._cost = info.tower
        self._silence_s = silence_s
        self._clock = clock or RealClock()
        self.waiting: dict[bytes, Request] = {}
        """Computing prompts with images that are not computed yet, by room."""
        self.asked: dict[bytes, AskedImage] = {}
        """Images that the source was asked for and that are not dropped, by key."""
        self.batch: TowerBatch | None = None
        """Those that the tower computes, until the step that completes them is launched."""
        self._must_drop = False
        """Whether the executor has a batch that was given up."""
        self._news_s = 0.0
        """When the source or an E had something last, or was seen to work."""
        self._num_signs = 0
        """`ImageSource.num_signs`, as of the last look."""
        self.num_encoded = 0
        """Images encoded since the start."""
        self._meter = ImageMeter(self._clock)
        self.load: ImageLoad = NO_IMAGE_LOAD
        """What there is to encode here, as of the last change."""
        self.num_advances = 0
        """Signs since the start that prompts advance which wait for images: these are prepared, encoded, worked on."""

    @property
    def is_lending(self) -> bool:
        """Whether an E may write to rows here."""
        return bool(self.pulls)

    def images_of(self, parts: tuple[ImagePart, ...]) -> PromptImages | None:
        """Return the images of a new sequence; None if it has none."""
        return PromptImages(parts, self.is_whole) if parts else None

    # -------------------------------------------------------------------------------------------- prompts come and go

    def enter(self, sequence: Request) -> None:
        """Take a prompt that begins to compute behind its `kv_len` cached tokens."""
        images = sequence.images
        assert images is not None and not images.placed
        images.first = 0
        images.pass_computed(sequence.kv_len)
        if images.first < len(images.parts):
            self.waiting[sequence.room] = sequence

    def note_computed(self, sequence: Request, when_read: WhenRead) -> None:
        """Give up the features whose rows are computed by the launched steps."""
        assert sequence.images is not None
        for image in sequence.images.pass_computed(sequence.kv_len):
            self._unpin(image, when_read)
        if sequence.images.first == len(sequence.images.parts):
            self.waiting.pop(sequence.room, None)

    def _unpin(self, image: StoredImage, when_read: WhenRead) -> None:
        """Keep an image for one prompt fewer. An E does not wait for our device: it is lent no rows that an unread step
        reads."""
        if self.pulls is None:
            self.store.unpin(image)
        else:
            when_read(partial(self.store.unpin, image))

    def leave(self, sequence: Request, when_read: WhenRead) -> None:
        """Give up all that a prompt has, which computes no more, or is to begin anew. Idempotent."""
        if self.waiting.pop(sequence.room, None) is None:
            return
        assert sequence.images is not None
        while sequence.images.placed:
            self._unpin(sequence.images.unplace(), when_read)
        if self.batch is not None and not self._is_placed(self.batch):
            self._give_up_batch(self.batch)
        self._drop_unwanted()

    def _is_placed(self, batch: TowerBatch) -> bool:
        """Return whether a prompt has an image of the batch placed. Its pins do not tell: they may outlast a prompt."""
        placed = {id(image) for each in self.waiting.values() if each.images for image in each.images.placed}
        return any(id(image) in placed for image in batch.images)

    def _give_up_batch(self, batch: TowerBatch) -> None:
        """Have the tower stop. Nobody waits for its images, or they are of other weights."""
        self.batch, self._must_drop = None, True
        for image in batch.images:
            self.store.discard(image)
            self.store.unpin(image)
        for asked in batch.asked:
            asked.num_unread -= 1

    def _unplace_all(self, sequence: Request) -> None:
        assert sequence.images is not None
        while sequence.images.placed:
            self.store.unpin(sequence.images.unplace())

    def forget(self) -> None:
        """Drop all features: they are of other weights. Prompts have those that they need encoded again."""
        for sequence in self.waiting.values():
            self._unplace_all(sequence)
        if self.batch is not None:
            self._give_up_batch(self.batch)
        self.store.drop_all()
        self._note_load()
        if self.pulls is not None:
            self.pulls.renew()

    # ------------------------------------------------------------------------------------------------------- a step

    def take(self) -> list[tuple[Request, ChituError]]:
        """Take what the source has prepared. Return the prompts that cannot get an image, and why."""
        now_s, failed = self._clock.monotonic(), list[tuple["Request", ChituError]]()
        if self.pulls is not None:
            self._take_pulled(self.pulls, now_s)
        if (signs := self._source.num_signs) != self._num_signs:
            self._num_signs = signs
            self._note_news(now_s)
        for image in self._source.take():
            self._news_s = now_s
            asked = self.asked.get(image.key)
            if asked is None:
                self._source.drop(image.key)
            elif image.error is not None:
                failed += self._give_up(image.key, image.error)
            else:
                asked.patches = image.patches
                self.num_advances += 1
        late_s = now_s - self._silence_s
        for key, asked in list(self.asked.items()) if self._news_s < late_s else ():
            if not asked.patches and asked.since_s < late_s:
                text = f"an image was not prepared: nothing came for {now_s - max(asked.since_s, self._news_s):.1f} s"
                failed += self._give_up(key, TransferStalled(f"{text} (deadlines.transfer_s)"))
        return failed

    def _note_news(self, now_s: float) -> None:
        """Note that what prompts wait for is worked on."""
        self._news_s = now_s
        self.num_advances += 1

    def _take_pulled(self, pulls: ImagePulls, now_s: float) -> None:
        """Take what E have written, and what they will not write."""
        for kind, image in pulls.take():
            if kind is PullNews.FILLED:
                self.store.keep(image)
                if self.asked.pop(image.key, None) is not None:
                    self._source.drop(image.key)
                self._note_news(now_s)
                self._note_load()
            elif kind is PullNews.ADVANCED:
                self._note_news(now_s)
            elif kind is PullNews.RELEASED:
                self.store.unpin(image)
            elif (asked := self.asked.get(image.key)) is not None:
                asked.since_s = now_s
                self._fetch(image.key, asked)

    def _give_up(self, key: bytes, error: ChituError) -> list[tuple[Request, ChituError]]:
        """Forget an image, and return the prompts that end with this error. Others ask for it once more."""
        rooms = self.asked.pop(key).rooms
        self._source.drop(key)
        self._note_load()
        return [(each, error) for each in self._wanting(key) if each.room in rooms]

    def _wanting(self, key: bytes) -> list[Request]:
        """Return the prompts that wait for this image."""
        return [
            each
            for each in self.waiting.values()
            if each.images is not None and any(image.key == key for image in each.images.missing)
        ]

    def schedule(self, waiting: Sequence[Request], plan: StepPlan, most_tokens: int) -> None:
        """Have images encoded and placed, and ask for those to come. `waiting`: the prompts of that name, the most
        urgent first. `most_tokens`: what a turn of the tower may cost, in tokens of a prompt."""
        may_begin = self.batch is None
        self.store.host.begin_plan()
        if self.batch is None:
            self.batch = TowerBatch(self._cost)
        batch = self.batch
        self._place(waiting, plan, may_begin)
        if plan.load_images:
            self._drop_unwanted()  # what was asked for may have come to be loaded
        if not batch.images:
            self.batch = None
        elif not plan.turn and not batch.is_complete:
            self._take_turn(batch, plan, most_tokens)
        self._ask(waiting)

    def _take_turn(self, batch: TowerBatch, plan: StepPlan, most_tokens: int) -> None:
        """Have the plan compute the tower; the images that it completes may be read in the same step."""
        plan.turn.extend(batch.turns(most_tokens))
        for image in batch.images:
            image.is_ready = batch.is_complete

    def end_plan(self, plan: StepPlan) -> None:
        """Have the tower stop, if it computes what was given up: another batch does that by itself."""
        if self._must_drop and not plan.encode:
            plan.turn.append(TowerTurn(0, 0))
        self._must_drop = False
        self.store.host.end_plan(plan)

    def _place(self, waiting: Sequence[Request], plan: StepPlan, may_encode: bool) -> None:
        """Place images, and put into the batch those that are prepared, if they `may_encode`."""
        most_rows, batch = self._most_rows, self.batch
        assert batch is not None
        for number, sequence in enumerate(waiting, 1):
            images = sequence.images
            assert images is not None
            while (part := images.next_missing) is not None:
                image = self.store.find(part.key)
                if image is None and self.store.host.hold(part.key):
                    image = self._load(part, waiting[number:], plan)
                    if image is None:
                        may_encode = False
                        break
                if image is None:
                    asked = self.asked.get(part.key)
                    if asked is None or not asked.patches or not may_encode:
                        break
                    if part.num_rows <= most_rows or not batch.images:
                        image = self._reserve(part, waiting[number:], plan)
                    if image is None:
                        may_encode = False
                        break
                    most_rows -= part.num_rows
                    self._begin(batch, plan, image, asked)
                self.store.pin(image)
                for place, rows in images.place(image):
                    plan.place.append(PlaceImage(sequence.slot, place, rows))

    def _begin(self, batch: TowerBatch, plan: StepPlan, image: StoredImage, asked: AskedImage) -> None:
        self.store.pin(image)
        batch.images.append(image)
        batch.asked.append(asked)
        batch.encode.append(EncodeImage(asked.patches, image.rows.astype("<i4").tobytes()))
        plan.encode.append(batch.encode[-1])
        asked.num_unread += 1

    def _load(self, part: ImagePart, less_urgent: Sequence[Request], plan: StepPlan) -> StoredImage | None:
        """Have the plan copy an image from host memory. Return None if there are no rows."""
        image = self._reserve(part, less_urgent, plan)
        if image is not None:
            self.store.host.load(part.key, image.rows, plan)
            self.num_advances += 1
        return image

    def _reserve(self, part: ImagePart, less_urgent: Sequence[Request], plan: StepPlan) -> StoredImage | None:
        """Take rows, if need be those that less urgent prompts have placed and wait with. The plan saves what gives
        way."""
        image = self.store.reserve(part.key, part.num_rows)
        for sequence in reversed(less_urgent):
            assert sequence.images is not None
            while image is None and sequence.images.placed:
                self.store.unpin(sequence.images.unplace())
                image = self.store.reserve(part.key, part.num_rows)
        for evicted in self.store.evicted:
            self.store.host.save(evicted.key, evicted.rows, plan)
        return image

    def _ask(self, waiting: Sequence[Request]) -> None:
        """Ask for images in their order, as many as the region has rows for, and for the first in any case: what is
        prepared takes memory, too."""
        num_rows, is_first = sum([asked.num_rows for asked in self.asked.values()]), True
        for sequence in waiting:
            assert sequence.images is not None
            for part in sequence.images.missing:
                is_here = part.key in self.store or part.key in self.store.host
                if part.key not in self.asked and not is_here:
                    if num_rows + part.num_rows > self.store.num_rows and not is_first:
                        return
                    num_rows += part.num_rows
                    self._ask_for(part, sequence.head)
                is_first = False

    def _ask_for(self, part: ImagePart, head: RequestHead) -> None:
        router = head.router
        rooms = frozenset(each.room for each in self._wanting(part.key) if each.head.router == router)
        asked = self.asked[part.key] = AskedImage(part.num_rows, router, rooms, self._clock.monotonic())
        if head.encoders:
            asked.encoder = head.encoders[head.images.index(part)]
        self._fetch(part.key, asked)

    def _fetch(self, key: bytes, asked: AskedImage) -> None:
        """Have an E encode an image, or else have it prepared to be encoded here."""
        pulls = self.pulls
        if pulls is None or not self._pull(pulls, key, asked):
            asked.is_own = True
            self._source.ask(key, asked.router)
            self._note_load()

    def _note_load(self) -> None:
        """Measure the rate of encoding here, and renew `load`."""
        own = [asked for asked in self.asked.values() if asked.is_own]
        self._meter.note(bool(own))
        rows = sum([asked.num_rows for asked in own if not asked.num_unread])
        self.load = ImageLoad(rows, self._meter.row_s, keys=self.store.newest_keys)

    def _pull(self, pulls: ImagePulls, key: bytes, asked: AskedImage) -> bool:
        """Have an E encode an image. Return False if none is to."""
        if pulls.is_pulling(key):
            return True
        encoder = pulls.choose(key, asked.num_rows, asked.tried, asked.encoder)
        if encoder is None or (pulls.num_lent + asked.num_rows) * LENT_SHARE > self.store.num_rows:
            return False
        image = self.store.lend(key, asked.num_rows)
        if image is None:
            return False
        asked.tried += (encoder.incarnation,)
        pulls.begin(image, encoder, asked.router)
        return True

    def after_launch(self, when_read: WhenRead) -> None:
        """Note that the newest plan is launched. Once its step is read, the patches of images that it completes are of
        no use any more."""
        batch = self.batch
        if batch is None:
            return
        self.num_advances += 1
        if not batch.is_complete:
            return
        self.batch = None
        for image in batch.images:
            self._unpin(image, when_read)
        self.num_encoded += len(batch.images)
        when_read(lambda: self._drop_encoded(batch.asked))

    def to_repeat(self) -> list[EncodeImage]:
        """Return the images of the tower, of which a step that raised has computed nothing that counts. The caller has
        each computed in one piece."""
        batch = self.batch
        if batch is None:
            return []
        batch.is_complete = True
        for image in batch.images:
            image.is_ready = True
        return batch.encode

    def _drop_encoded(self, encoded: Sequence[AskedImage]) -> None:
        for asked in encoded:
            asked.num_unread -= 1
            self._meter.note_encoded(asked.num_rows)
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Drop what was asked for and no prompt waits for, unless an unread step encodes it."""
        wanted = {image.key for each in self.waiting.values() if each.images for image in each.images.missing}
        for key, asked in list(self.asked.items()):
            if key not in wanted and not asked.num_unread:
                del self.asked[key]
                self._source.drop(key)
        self._note_load()

    def fail_encoding(self, encode: EncodeImage | LoadImage) -> list[Request]:
        """Forget an image whose encoding or loading raised. Return the prompts that have it placed."""
        lost = [
            each
            for each in self.waiting.values()
            if each.images is not None and any(_has_rows(image, encode.rows) for image in each.images.placed)
        ]
        for sequence in lost:
            assert sequence.images is not None
            for image in sequence.images.placed:
                if _has_rows(image, encode.rows):
                    self.store.discard(image)
        return lost


def _has_rows(image: StoredImage, rows: bytes) -> bool:
    return image.rows.astype("<i4").tobytes() == rows
