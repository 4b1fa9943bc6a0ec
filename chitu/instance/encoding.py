"""What an E does: images that P asks for become features, and these go to P. Sans IO, without a tensor.

A P orders an image (`EncodeOrder`) and announces the rows of its own region that the features go to. E gets the file as
P would, from the router (`ImageSource`), computes the features in rows of its region, and writes them as P writes KV:
rows are pages, an image is a prompt, and the sender's machine has all states, deadlines and fences. Features stay for
later orders until others need their rows.

Step thread only, but `put_order`, `flush`, `drain` and `load`. Invariants: rows are pinned from the first write of them
until the room succeeded or is released; an order is answered once, by the end of its room, however often it comes; an
image that nobody waits for any more is dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from chitu.clock import Clock
from chitu.engine.executor import EncodeImage
from chitu.errors import Capacity, ChituError, Internal
from chitu.instance.image_load import ImageMeter
from chitu.instance.image_source import ImageSource
from chitu.instance.images import FeatureStore, StoredImage
from chitu.instance.weights import WeightsKeeper
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.kv_transfer.chunks import KVChunk
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.pulling import EncodeSender
from chitu.net.threads import Waker
from chitu.protocol import EncodeOrder, ImageLoad, LoadReport
from chitu.types import Ready

logger = logging.getLogger(__name__)

MOST_WAITING = 8
"""Batches of images that may wait: an order beyond them is refused, and P turns to another E, or computes the image
itself, sooner than it would come to its turn here."""


class FeatureMaker(Protocol):
    """Computes features into rows of the region of this instance."""

    def encode(self, images: Sequence[EncodeImage]) -> Ready | None:
        """Compute these images together. Return what reading their rows waits for, if that is not over. Any exception:
        none of them is computed."""
        ...

    @property
    def mark(self) -> bytes:
        """Mark of the weights that it computes with (`models/feature_mark.py`)."""
        ...

    def name_row(self, slot: int, key: bytes, mark: bytes) -> None:
        """Write the key of an image, and the mark of the weights of its features, into an aux row (`FeaturePool`)."""
        ...


@dataclass(slots=True)
class OrderedImage:
    """An order that is not over."""

    room: bytes
    order: EncodeOrder
    image: StoredImage | None = None
    """Its features, pinned, once they are sent."""
    aux_slot: int = -1
    is_hit: bool = False
    """Whether its features were here when it came."""
    is_asked: bool = False
    """Whether the source was told that its router has the file."""
    has_failed: bool = False
    """Whether only its release is awaited."""

    @property
    def waits(self) -> bool:
        """Whether its features are to be computed, or found here."""
        return self.image is None and not self.has_failed


class EncodeScheduler:
    def __init__(
        self,
        sender: EncodeSender,
        source: ImageSource,
        maker: FeatureMaker,
        store: FeatureStore,
        aux: MetadataBuffers,
        most_rows: int,
        waker: Waker,
        weights: WeightsKeeper,
        clock: Clock | None = None,
    ) -> None:
        """`most_rows`: rows that a step encodes at most, but for one image alone."""
        self._sender = sender
        self._source = source
        self._maker = maker
        self._store = store
        self._aux = aux
        self._most_rows = most_rows
        self._waker = waker
        self.weights = weights
        """Any thread may give it an order, and read what it reports."""
        self._inbox: deque[tuple[bytes, EncodeOrder]] = deque()
        self._orders: dict[bytes, OrderedImage] = {}
        """By room, in the order of their arrival."""
        self._patches: dict[bytes, str] = {}
        """Images that the source was asked for, by key: where their patches are, empty until they are there."""
        self._num_signs = 0
        """`ImageSource.num_signs`, as of the last look."""
        self._is_draining = self._must_flush = False
        self._num_steps = self._num_rows = self._num_images = self._num_hits = 0
        self._meter = ImageMeter(clock)
        self.turns = 0
        """Calls of `step`, and blocks of the tower that were computed, as a large image takes long; any thread may read
        it."""
        self.load = LoadReport(image_rows=store.num_rows)
        """Load after the last step; any thread may read it."""

    # ------------------------------------------------------------------------------------------------------- any thread

    def put_order(self, room: bytes, order: EncodeOrder) -> None:
        """Queue an order for the next step. It may have come before."""
        self._inbox.append((room, order))
        self._waker.wake()

    def flush(self) -> None:
        """Forget all features that no order needs."""
        self._must_flush = True
        self._waker.wake()

    def drain(self) -> None:
        """Refuse new orders from now on."""
        self._is_draining = True

    @property
    def is_idle(self) -> bool:
        """Whether no order is left."""
        return not (self._orders or self._inbox)

    # ---------------------------------------------------------------------------------------------------------- a step

    def step(self) -> bool:
        """Run one turn. Return False if nothing was computed or sent."""
        self.turns += 1
        if not self.weights.is_settled:
            self._turn_weights()
        if self._must_flush:
            self._must_flush = False
            self._store.drop_all()
        self._take_orders()
        for event in self._sender.poll():
            self._on_event(event)
        self._take_prepared()
        self._ask()
        batch = self._choose()
        ready = self._encode(batch) if batch else None
        num_sent = self._send(ready, {image.key for image in batch})
        self._drop_unwanted()
        self.load = self._report()
        return bool(batch or num_sent)

    def _turn_weights(self) -> None:
        """Read the weights that the cluster wants, and change to them as soon as they are to serve. What is under way
        is of the old ones, and named so."""
        self.weights.note_drained(True)
        weights = self.weights.turn()
        if level := self.weights.sleep_due:
            self.weights.is_settled = False
            if self.is_idle:
                self._store.drop_all()
                self.weights.sleep(level)
        elif weights is not None:
            keeps_base = self.weights.keeps_base(weights)
            self.weights.change(weights)
            if not keeps_base:
                self._store.drop_all()

    def note_block(self) -> None:
        """Note that the tower computes: a sign of life, also of the orders that come meanwhile."""
        self.turns += 1
        self._take_orders()
        self._sender.feed.note_advance()

    def close(self) -> None:
        """Drop what is prepared. After all steps."""
        for key in list(self._patches):
            self._drop(key)

    # ---------------------------------------------------------------------------------------------------------- orders

    def _take_orders(self) -> None:
        while self._inbox:
            self._take_order(*self._inbox.popleft())

    def _take_order(self, room: bytes, order: EncodeOrder) -> None:
        if room in self._orders:
            return
        waiting = [each.order.num_rows for each in self._orders.values() if each.waits]
        self._orders[room] = OrderedImage(room, order)
        name = f"image {order.key.hex()[:8]}"
        self._sender.add_request(room, name, order.num_rows, order.engine_rank, order.incarnation)
        if self._is_draining:
            self._refuse(room, Capacity("this E drains"))
        elif self.weights.serves.sleep:
            self._refuse(room, Capacity("this E sleeps"))
        elif order.num_rows > self._store.num_rows:
            self._refuse(room, Capacity(f"the region has {self._store.num_rows} rows, the image {order.num_rows}"))
        elif waiting and sum(waiting) + order.num_rows > MOST_WAITING * self._most_rows:
            self._refuse(room, Capacity(f"{len(waiting)} images with {sum(waiting)} rows wait"))

    def _refuse(self, room: bytes, error: ChituError) -> None:
        """End an order with an error that P gets."""
        self._orders[room].has_failed = True
        self._sender.abort(room, error)

    def _on_event(self, event: TransferEvent) -> None:
        ordered = self._orders.get(event.room)
        if ordered is None:
            return
        if event.kind is TransferEventKind.FAILED:
            ordered.has_failed = True
        elif event.kind in (TransferEventKind.SUCCESS, TransferEventKind.RELEASED):
            del self._orders[event.room]
            if ordered.image is not None:
                self._store.unpin(ordered.image)
                self._aux.free(ordered.aux_slot)

    # ---------------------------------------------------------------------------------------------------------- images

    def _take_prepared(self) -> None:
        if (signs := self._source.num_signs) != self._num_signs:
            self._num_signs = signs
            self._sender.feed.note_advance()
        for prepared in self._source.take():
            key = prepared.key
            if key not in self._patches:
                self._source.drop(key)
            elif prepared.error is None:
                self._patches[key] = prepared.patches
            else:
                self._drop(key)
                self._fail(key, prepared.error)

    def _fail(self, key: bytes, error: ChituError) -> None:
        for ordered in self._orders.values():
            if ordered.waits and ordered.order.key == key:
                self._refuse(ordered.room, error)

    def _ask(self) -> None:
        """Ask for the images that wait, as many as the region has rows for, and for the first in any case: patches take
        memory, too."""
        num_rows, seen = 0, set[bytes]()
        for ordered in self._orders.values():
            key = ordered.order.key
            if not ordered.waits or key in self._store:
                continue
            if key not in seen:
                num_rows += ordered.order.num_rows
                if seen and num_rows > self._store.num_rows:
                    return
                seen.add(key)
                self._patches.setdefault(key, "")
            if not ordered.is_asked:
                ordered.is_asked = True
                self._source.ask(key, ordered.order.router)

    def _choose(self) -> list[StoredImage]:
        """Take rows for the images that are encoded now, the first that wait."""
        chosen: list[StoredImage] = []
        num_rows = 0
        for ordered in self._orders.values():
            key, count = ordered.order.key, ordered.order.num_rows
            if not ordered.waits or key in self._store or not self._patches.get(key):
                continue
            if chosen and num_rows + count > self._most_rows:
                break
            image = self._store.reserve(key, count)
            if image is None:
                break
            self._store.pin(image)  # another one of the batch must not take its rows
            chosen.append(image)
            num_rows += count
        return chosen

    def _encode(self, batch: Sequence[StoredImage]) -> Ready | None:
        """Compute a batch; if that raises, each image of it alone, so that one ends no order of another."""
        try:
            ready = self._maker.encode([self._plan_of(image) for image in batch])
        except Exception as error:
            if len(batch) > 1:
                readies = [self._encode([image]) for image in batch]
                return next((ready for ready in reversed(readies) if ready is not None), None)
            image, key = batch[0], batch[0].key
            logger.error("image %s cannot be encoded: %s", key.hex()[:8], error)
            self._store.discard(image)
            self._store.unpin(image)
            self._drop(key)
            self._fail(key, error if isinstance(error, ChituError) else Internal(f"encoding: {error}"))
            return None
        self._num_steps += 1
        for image in batch:
            self._store.unpin(image)
            self._drop(image.key)
            image.mark = self._maker.mark
            self._num_images += 1
            self._num_rows += len(image.rows)
            self._meter.note_encoded(len(image.rows))
        return ready

    def _plan_of(self, image: StoredImage) -> EncodeImage:
        return EncodeImage(self._patches[image.key], image.rows.astype("<i4").tobytes())

    def _send(self, ready: Ready | None, encoded: Set[bytes]) -> int:
        """Send what is here and waits. Return how many images. `encoded`: keys of those that this step computed."""
        sent: list[OrderedImage] = []
        for ordered in self._orders.values():
            if not ordered.waits:
                continue
            image = self._store.find(ordered.order.key)
            if image is None:
                continue
            if len(image.rows) != ordered.order.num_rows:
                error = f"the image has {len(image.rows)} feature rows, P asked for {ordered.order.num_rows}"
                self._refuse(ordered.room, Internal(error))
                continue
            slot = self._aux.allocate()
            if slot is None:
                break
            self._store.pin(image)
            ordered.image, ordered.aux_slot, ordered.is_hit = image, slot, image.key not in encoded
            self._num_hits += ordered.is_hit
            self._maker.name_row(slot, image.key, image.mark)
            sent.append(ordered)
        if sent:
            feed = self._sender.feed
            images = [(each, each.image) for each in sent]
            feed.begin_step([KVChunk(o.room, i.rows.tolist(), 0, len(i.rows)) for o, i in images if i is not None])
            feed.layer_done(0, ready)
            feed.end_step()
            for each in sent:
                feed.send_rows(each.room, each.aux_slot)
        return len(sent)

    def _drop_unwanted(self) -> None:
        wanted = {ordered.order.key for ordered in self._orders.values() if ordered.waits}
        for key in [key for key in self._patches if key not in wanted]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        if self._patches.pop(key, None) is not None:
            self._source.drop(key)
            for ordered in self._orders.values():
                ordered.is_asked &= ordered.order.key != key

    def _report(self) -> LoadReport:
        waiting = [each.order.num_rows for each in self._orders.values() if each.waits]
        moving = [each for each in self._orders.values() if each.image is not None and not each.has_failed]
        store, aux = self._store, self._aux
        # On a GPU the features of an image that moves may still be computed.
        self._meter.note(bool(waiting) or not all(each.is_hit for each in moving))
        return LoadReport(
            waiting=len(waiting),
            waiting_tokens=sum(waiting),
            transferring=len(moving),
            closing=len(self._orders) - len(waiting) - len(moving),
            aux_total=aux.num_slots,
            aux_free=aux.num_free,
            steps=self._num_steps,
            tokens=self._num_rows,
            backlog_s=self._meter.busy_s,
            backlog_work=self._num_rows,
            images=self._num_images,
            image_rows=store.num_rows,
            image_rows_used=store.num_pinned,
            bytes_moved=self._sender.machine.bytes_moved,
            image_load=ImageLoad(sum(waiting), self._meter.row_s, self._num_hits, store.newest_keys),
        )
