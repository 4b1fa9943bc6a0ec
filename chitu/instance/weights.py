"""The change of an instance to other weights: what to read, and when to change. Pure but for the loader.

Any thread gives `set_order` what the newest view says. The step thread calls `turn` while `is_settled` is False, and
`change` between two steps. Invariants: an instance never goes back to older weights; it changes only to what it has
read whole and checked, if that has the hash of the order; and unless the change is mixed, only while no request runs
here. An arrival for other weights than `serves` is refused, so no request is computed with two of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import msgspec

from chitu.clock import Clock
from chitu.engine.weights_loader import ReadWeights, WeightsLoader
from chitu.protocol import FEATURE_MARK_BYTES
from chitu.protocol.weights import Weights, WeightsOrder, WeightsReport

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Pause before a folder that could not be read is tried again, if the cluster serves it."""


def join_orders(orders: Sequence[WeightsOrder], heard: Collection[int]) -> WeightsOrder:
    """Return what several routers want together: each serves the newest weights that it has seen any instance serve, so
    an older order is one that has not been renewed yet. `heard`: indices of the routers that are not silent. Of the
    others only `serve` counts, which nobody can take back, unless all are silent."""
    present = [order for index, order in enumerate(orders) if index in heard] or orders
    prepares = [order.prepare for order in present if order.prepare is not None]
    return WeightsOrder(
        max((order.serve for order in orders), key=lambda weights: weights.age),
        max(prepares, key=lambda weights: (weights.number, weights.path)) if prepares else None,
        holds=any(order.holds for order in present),
        pause=max((order.pause for order in present), key=lambda pause: pause.age),
    )


class WeightsKeeper:
    def __init__(
        self,
        loader: WeightsLoader,
        clock: Clock,
        on_news: Callable[[], None] = lambda: None,
        feature_mark: bytes = bytes(FEATURE_MARK_BYTES),
    ) -> None:
        """`on_news` is called, on the step thread, when there is something new to report. `feature_mark`: of the
        weights at the start."""
        self._loader = loader
        self._clock = clock
        self.on_news = on_news
        self.serves = Weights()
        """Any thread may read it, as `report`."""
        self.feature_mark = feature_mark
        """Mark of the weights that features of images are made with here (`models/feature_mark.py`)."""
        self.report = WeightsReport()
        self.accepts = 0
        """Number of the weights for which requests are accepted: those of `serves`, or -1 for none, because the cluster
        has newer ones."""
        self.is_settled = True
        """Whether there is nothing to do until the next order."""
        self.freezes = False
        """Whether no step may start."""
        self.is_drained = False
        """Whether no request runs here; see `note_drained`."""
        self._order = WeightsOrder()
        self._reading: Weights | None = None
        """What the loader reads or has read."""
        self._read: ReadWeights | None = None
        self._unreadable: Weights | None = None
        """What the cluster serves, if it could not be read here the last time."""
        self._retry_s = 0.0

    def set_order(self, order: WeightsOrder) -> None:
        """Take the order of the newest view. Any thread."""
        if order != self._order:
            self._order, self.freezes = order, order.freezes
            self.is_settled = False

    def note_drained(self, is_drained: bool) -> None:
        """Report whether no request runs here, if routers have new ones wait. The step thread says so with every
        turn."""
        if is_drained != self.is_drained:
            self.is_drained = is_drained
            self._set_report(self.report)

    def turn(self) -> Weights | None:
        """Read what is wanted. Return weights that are read and are to serve now: `change` to them once this is
        possible."""
        self.is_settled = True  # before the order is read: a new one makes it False again
        order = self._order
        self._set_report(self.report)
        is_due = order.serve.age > self.serves.age
        self.accepts = -1 if is_due else self.serves.number
        if is_due and self._unreadable == order.serve and order.prepare is not None:
            is_due = False  # the cluster goes on to others, which may be there: a trainer's memory has only the newest
        wanted = order.serve if is_due else order.prepare
        if wanted is None or (not is_due and wanted.number <= self.serves.number):
            if self._reading is not None:
                self._loader.drop()
                self._forget()
            return None
        if self._reading is None or (self._reading.number, self._reading.path) != (wanted.number, wanted.path):
            logger.info("reading the weights in %s", wanted.path)
            self._forget()
            self._reading = wanted
            self._loader.begin(wanted.path)
        if self._read is None:
            self._read = self._loader.poll()
            if self._read is None:
                self.is_settled = False
                return None
            self._note_read(wanted, self._read)
        if not is_due:
            return None
        read = self._read
        if not read.error and read.model_hash != wanted.model_hash:
            read = self._read = ReadWeights(
                error=f"{wanted.path} has the model_hash {read.model_hash}, and the cluster serves {wanted.model_hash}"
            )
            self._note_read(wanted, read)
        self.is_settled = False
        self._unreadable = wanted if read.error else None
        if not read.error:
            return wanted
        if self._clock.monotonic() >= self._retry_s:
            self._forget(keeps_report=True)
        return None

    def change(self, weights: Weights) -> bytes | None:
        """Put what `turn` returned in the place of the weights that serve. No step is in flight. Return the fingerprint
        for the keys of cached pages."""
        assert self._read is not None
        fingerprint, self.feature_mark = self._read.fingerprint, self._read.feature_mark
        self._loader.change()
        self.serves, self.accepts = weights, weights.number
        self._forget()
        self.is_settled = False  # the order may have more
        logger.info("serves the weights in %s (model_hash %s)", weights.path, weights.model_hash)
        return fingerprint

    def _note_read(self, wanted: Weights, read: ReadWeights) -> None:
        if read.error:
            logger.error("cannot change to the weights in %s: %s", wanted.path, read.error)
        self._retry_s = self._clock.monotonic() + RETRY_S
        prepared = msgspec.structs.replace(wanted, model_hash=wanted.model_hash or read.model_hash)
        self._set_report(WeightsReport(self.serves, prepared, read.error))

    def _forget(self, keeps_report: bool = False) -> None:
        self._reading = self._read = None
        if not keeps_report:
            self._set_report(WeightsReport(self.serves))

    def _set_report(self, report: WeightsReport) -> None:
        order = self._order
        is_drained = order.holds and self.is_drained
        report = msgspec.structs.replace(report, holds=order.holds, pause=order.pause, is_drained=is_drained)
        if report != self.report:
            self.report = report
            self.on_news()
