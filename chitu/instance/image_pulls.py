"""P's half of having images encoded by E: which E is asked, and what becomes of the rows meanwhile.

An image goes to the E that its router chose, which knows what all E have to do and which images they have. Without a
choice it goes to the E that a hash of its key prefers, so that E have different images in their caches, and an image
that comes again is found where it was encoded; to the next one if that has much to do. Several images of a prompt so go
to several E. An attempt ends when its E is silent for a share of `bootstrap_s`: an E that computes has time. What has
not come, and what an E refuses, is asked of another E once; then P encodes the image itself, as it does without E. A
prompt without images knows nothing of this.

Only E with the weights of this instance are asked, as the newest view has them. What comes names the image and bears
the mark of the weights that it was made with, so features of others are never used, whatever an E says of itself.

Rows of an attempt are *lent*: pinned, and not found by anybody, until all of them came and were verified, or E can
write to them no more, whatever becomes of the prompts that wait. Step thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.errors import Capacity, ChituError, Integrity, RequestError, TransferStalled, WeightsChanged
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.protocol import ANY_ENCODER, IMAGE_KEY_BYTES, NO_ENCODER, EncodeOrder, InstanceInfo, encoder_preference
from chitu.protocol.weights import Weights
from chitu.types import new_room

if TYPE_CHECKING:
    from chitu.instance.images import StoredImage

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""E that are asked for an image, one after the other."""
ATTEMPT_SHARE = 0.5
"""Share of `deadlines.bootstrap_s`, or of `transfer_s` if that is shorter, that the E of an attempt may be silent."""
BATCHES_AHEAD = 4
"""An E that has as many steps of rows to do for this instance is passed over while another one has less."""
LENT_SHARE = 2
"""One part in so many of the region may be lent: the rest is for images that P encodes itself, whatever an E does."""


class FeatureReceiver(Protocol):
    """`EncodeReceiver`, as it is used here."""

    def encoders(self) -> list[InstanceInfo]: ...

    def announce(
        self,
        room: bytes,
        request_id: str,
        pages: Sequence[int],
        aux_slot: int,
        num_tokens: int,
        prefill_rank: int,
        prefill_incarnation: int,
        prefix_pages: int,
    ) -> None: ...

    def order(self, room: bytes, encoder: InstanceInfo, order: EncodeOrder) -> None: ...

    def poll(self) -> list[TransferEvent]: ...

    def num_advances(self, room: bytes) -> int: ...

    def abort(self, room: bytes, error: ChituError) -> None: ...


class ServedWeights(Protocol):
    """`WeightsKeeper`, as it is used here."""

    @property
    def serves(self) -> Weights: ...
    @property
    def feature_mark(self) -> bytes: ...


class PullNews(Enum):
    FILLED = auto()
    """The features are in the rows, as E computed them. The rows are lent no more."""
    ADVANCED = auto()
    """E is not done, and it computes."""
    FAILED = auto()
    """They will not come. The rows may still be written."""
    RELEASED = auto()
    """Nothing writes to the rows any more: they are lent no more."""


class PullEvent(NamedTuple):
    kind: PullNews
    image: StoredImage


@dataclass(slots=True)
class ImagePull:
    """An attempt, until its rows are lent no more."""

    image: StoredImage
    encoder: InstanceInfo
    aux_slot: int
    heard_s: float
    """When it began, or E advanced last."""
    num_advances: int = 0
    has_failed: bool = False


class ImagePulls:
    def __init__(
        self,
        receiver: FeatureReceiver,
        aux: MetadataBuffers,
        place: tuple[int, int],
        deadlines: DeadlineConfig,
        most_rows: int,
        clock: Clock,
        weights: ServedWeights,
    ) -> None:
        """`aux`: of the feature pool. `place`: engine rank and incarnation of this instance. `most_rows`: rows that a
        step of an E encodes. `weights`: what this instance computes with, now and later; call `renew` once they are
        others."""
        self._receiver = receiver
        self._aux = aux
        self._engine_rank, self._incarnation = place
        self._attempt_s = ATTEMPT_SHARE * min(deadlines.bootstrap_s, deadlines.transfer_s)
        self._rest_s = deadlines.bootstrap_s
        self._full_s = deadlines.retry_interval_s
        self._most_rows = most_rows
        self._clock = clock
        self._weights = weights
        self._pulls: dict[bytes, ImagePull] = {}
        """By room."""
        self._rests: dict[int, float] = {}
        """Until when an E is not asked, by incarnation."""
        self._pending: list[PullEvent] = []
        self.num_filled = self.num_failed = 0
        """Images that came, and attempts that failed, since the start."""

    def __len__(self) -> int:
        """Return the number of attempts whose rows are lent."""
        return len(self._pulls)

    @property
    def num_lent(self) -> int:
        """Rows that are lent."""
        return sum(len(pull.image.rows) for pull in self._pulls.values())

    def is_pulling(self, key: bytes) -> bool:
        """Return whether an attempt for this image is under way."""
        return any(pull.image.key == key and not pull.has_failed for pull in self._pulls.values())

    def choose(
        self, key: bytes, num_rows: int, tried: Collection[int] = (), wanted: int = ANY_ENCODER
    ) -> InstanceInfo | None:
        """Return the E that is to encode an image; None: P does it itself. `tried`: incarnations of those that failed.
        `wanted`: the router's choice, as in `RequestHead.encoders`; if that E cannot be asked, another one is."""
        if wanted == NO_ENCODER or len(tried) >= ATTEMPTS or not self._aux.num_free:
            return None
        now_s = self._clock.monotonic()
        self._rests = {each: until_s for each, until_s in self._rests.items() if until_s > now_s}
        able = [
            each
            for each in self._receiver.encoders()
            if each.incarnation not in tried
            and each.incarnation not in self._rests
            and each.weights == self._weights.serves
        ]
        if not able:
            return None
        named = next((encoder for encoder in able if encoder.engine_rank == wanted), None)
        if named is not None:
            return named
        able.sort(key=lambda encoder: encoder_preference(key, encoder.engine_rank), reverse=True)
        rows = {encoder.incarnation: self._outstanding(encoder.incarnation) for encoder in able}
        most = BATCHES_AHEAD * self._most_rows
        return next(
            (each for each in able if not rows[each.incarnation] or rows[each.incarnation] + num_rows <= most),
            min(able, key=lambda each: rows[each.incarnation]),
        )

    def _outstanding(self, incarnation: int) -> int:
        return sum(
            len(pull.image.rows)
            for pull in self._pulls.values()
            if pull.encoder.incarnation == incarnation and not pull.has_failed
        )

    def begin(self, image: StoredImage, encoder: InstanceInfo, router: int) -> None:
        """Have an E write the features of an image, whose rows are lent from now on. `router`: one that has the
        file."""
        slot = self._aux.allocate()
        assert slot is not None, "`choose` saw a free one"
        room, num_rows = new_room(), len(image.rows)
        self._pulls[room] = ImagePull(image, encoder, slot, self._clock.monotonic())
        to = encoder.engine_rank, encoder.incarnation
        self._receiver.announce(room, f"image {image.key.hex()[:8]}", image.rows.tolist(), slot, num_rows, *to, 0)
        order = EncodeOrder(self._incarnation, self._engine_rank, image.key, num_rows, router)
        self._receiver.order(room, encoder, order)

    def take(self) -> list[PullEvent]:
        """Return what has become of the attempts, and give up those whose E are silent."""
        found, self._pending = self._pending, []
        for event in self._receiver.poll():
            pull = self._pulls.get(event.room)
            if pull is not None:
                found += self._on_event(event, pull)
        now_s = self._clock.monotonic()
        for room, pull in self._pulls.items():
            if pull.has_failed:
                continue
            if (advances := self._receiver.num_advances(room)) > pull.num_advances:
                pull.heard_s, pull.num_advances = now_s, advances
                found.append(PullEvent(PullNews.ADVANCED, pull.image))
            elif pull.heard_s <= now_s - self._attempt_s:
                text = f"{pull.encoder.name} has not advanced with an image for {self._attempt_s:g} s"
                found += self._give_up(room, pull, TransferStalled(text))
        return found

    def renew(self) -> None:
        """Give up what is under way: this instance has other weights by now."""
        for room, pull in self._pulls.items():
            if not pull.has_failed:
                self._pending += self._give_up(room, pull, Capacity("this instance has other weights by now"))

    def _on_event(self, event: TransferEvent, pull: ImagePull) -> list[PullEvent]:
        image = pull.image
        if event.kind is TransferEventKind.FAILED:
            return self._fail(pull, event.error)
        if event.kind not in (TransferEventKind.SUCCESS, TransferEventKind.RELEASED):
            return []
        is_right = event.kind is TransferEventKind.SUCCESS and not pull.has_failed
        failed: list[PullEvent] = []
        if is_right and (wrong := self._why_others(pull)) is not None:
            is_right, failed = False, self._fail(pull, wrong)
        del self._pulls[event.room]
        self._aux.free(pull.aux_slot)
        if is_right:
            self.num_filled += 1
        return [*failed, PullEvent(PullNews.FILLED if is_right else PullNews.RELEASED, image)]

    def _why_others(self, pull: ImagePull) -> ChituError | None:
        """Return what is wrong with the features that came: which image, or which weights they are of; None if they are
        the right ones."""
        name = self._aux.get(pull.aux_slot).tobytes()
        key, mark = name[:IMAGE_KEY_BYTES], name[IMAGE_KEY_BYTES:]
        if key != pull.image.key:
            return Integrity(f"features of image {key.hex()[:8]} came for image {pull.image.key.hex()[:8]}")
        if mark != (wanted := self._weights.feature_mark):
            serves = self._weights.serves.number
            return WeightsChanged(
                f"its features are of other weights (mark {mark.hex()}) than those that this instance has "
                f"(number {serves}, mark {wanted.hex()})"
            )
        return None

    def _give_up(self, room: bytes, pull: ImagePull, error: ChituError) -> list[PullEvent]:
        self._receiver.abort(room, error)
        return self._fail(pull, error)

    def _fail(self, pull: ImagePull, error: ChituError | None) -> list[PullEvent]:
        """Note that an attempt failed. An E rests after it, unless the image was at fault."""
        if pull.has_failed:
            return []
        pull.has_failed = True
        self.num_failed += 1
        if error is not None:
            logger.warning("%s does not encode an image: %s (%s)", pull.encoder.name, error.message, error.code)
        if not isinstance(error, RequestError):
            rest_s = self._full_s if isinstance(error, Capacity) else self._rest_s
            self._rests[pull.encoder.incarnation] = self._clock.monotonic() + rest_s
        return [PullEvent(PullNews.FAILED, pull.image)]
