"""The change of an instance to other weights and LoRA adapters: what to read, and when to change. Pure but for the
loader.

Any thread gives `set_order` what the newest view says. The step thread calls `turn` while `is_settled` is False, and
`change` between two steps. Invariants: an instance never goes back to older weights; it changes only to what it has
read whole and checked, if that has the hash of the order; and unless the change is mixed, only while no request runs
here. An arrival for other weights than `serves` is refused, so no request is computed with two of them. A change of
adapters alone reads no weights, and what runs keeps its adapter (`AdapterTable`).

An instance that sleeps has no weights to serve until it has read them again, and refuses every arrival. It sleeps until
a newer word about pauses says otherwise, whatever router said that, so a router that starts again wakes nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from chitu.clock import Clock
from chitu.engine.weights_loader import AdapterFolder, GivenBack, ReadWeights, WeightsLoader
from chitu.instance.adapters import AdapterTable
from chitu.protocol import FEATURE_MARK_BYTES
from chitu.protocol.weights import Pause, SleepLevel, Weights, WeightsOrder, WeightsReport

logger = logging.getLogger(__name__)

FIRST_FOLDER = "the folder of the start"
RETRY_S = 10.0
"""Pause before a folder that could not be read is tried again, if the cluster serves it."""


def join_orders(orders: Sequence[WeightsOrder], heard: Collection[int]) -> WeightsOrder:
    """Return what several routers want together: each serves the newest weights that it has seen any instance serve, so
    an older order is one that has not been renewed yet. `heard`: indices of the routers that are not silent. Of the
    others only `serve` counts, which nobody can take back, unless all are silent."""
    present = [order for index, order in enumerate(orders) if index in heard] or orders
    prepares = [order.prepare for order in present if order.prepare is not None]
    pause = max((order.pause for order in present), key=lambda pause: pause.age)
    return WeightsOrder(
        max((order.serve for order in orders), key=lambda weights: weights.age),
        max(prepares, key=lambda weights: weights.key) if prepares else None,
        holds=any(order.holds for order in present),
        pause=pause,
        may_sleep=any(order.may_sleep and order.pause == pause for order in present),
    )


class WeightsKeeper:
    def __init__(
        self,
        loader: WeightsLoader,
        clock: Clock,
        on_news: Callable[[], None] = lambda: None,
        feature_mark: bytes = bytes(FEATURE_MARK_BYTES),
        adapters: AdapterTable | None = None,
    ) -> None:
        """`on_news` is called, on the step thread, when there is something new to report. `feature_mark`: of the
        weights at the start. `adapters`: None on an E, which has none."""
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
        self._slept = Pause()
        """Word that it sleeps by."""
        self._given = GivenBack()
        """What it has given back."""
        self._reading: Weights | None = None
        """What the loader reads or has read."""
        self._read: ReadWeights | None = None
        self._unreadable: Weights | None = None
        """What the cluster serves, if it could not be read here the last time."""
        self._retry_s = 0.0
        self.adapters = adapters or AdapterTable()
        self._has_adapters = adapters is not None
        self._folders: list[AdapterFolder] = []
        """Adapters among what the loader reads or has read."""
        self._leaving: tuple[tuple[str, int], ...] = ()

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
        order, word = self._order, self._word
        if self.serves.sleep and word.sleep:
            self._slept = word
        elif self.serves.sleep == 1:
            self._wake()
        is_asleep = bool(self.serves.sleep and word.sleep)
        self._set_report(self.report)
        is_due = order.serve.age > self.serves.age or bool(self.serves.sleep)
        self.accepts = -1 if is_due else self.serves.number
        if is_due and self._unreadable == order.serve and order.prepare is not None:
            is_due = False  # the cluster goes on to others, which may be there: a trainer's memory has only the newest
        wanted = max(order.serve, self.serves.awake, key=lambda each: each.age) if is_due else order.prepare
        if wanted is None or (not is_due and wanted.number <= self.serves.number) or is_asleep:
            if self._reading is not None:
                self._loader.drop()
                self._forget()
            return None
        if self._reading is None or self._reading.key != wanted.key:
            self._begin(wanted)
        if self._read is None:
            self._read = self._loader.poll()
            if self._read is None:
                self.is_settled = False
                return None
            self._note_read(wanted, self._read)
        if not is_due:
            return None
        read = self._read
        if not read.error and (why := self._why_other(wanted, read)):
            read = self._read = ReadWeights(error=why)
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
        for the keys of cached pages, unless `keeps_base` says that they stay."""
        assert self._read is not None
        fingerprint = self._read.fingerprint
        if not self.keeps_base(weights):
            self.feature_mark = self._read.feature_mark
        self._loader.change()
        if self._has_adapters:
            for number in self.adapters.change(weights.adapters, {each.name: each.number for each in self._folders}):
                self._loader.unload(number)
        self._wake()
        self.serves, self.accepts = weights, weights.number
        self._forget()
        self.is_settled = False  # the order may have more
        names = "" if weights.adapters is None else f"; LoRA adapters: {', '.join(self.adapters.names) or 'none'}"
        folder = weights.path or FIRST_FOLDER
        logger.info("serves the weights in %s (model_hash %s)%s", folder, weights.model_hash, names)
        return fingerprint

    @property
    def _word(self) -> Pause:
        """The last word about pauses: that of the order, or an older router's by which it sleeps."""
        return max(self._order.pause, self._slept, key=lambda pause: pause.age)

    def keeps_base(self, weights: Weights) -> bool:
        """Return whether weights differ from those that serve, or that it gave back, in their adapters alone. Two
        changes of one number, of two routers, differ in their hashes."""
        serves = self.serves
        return (weights.base_number, weights.model_hash) == (serves.base_number, serves.model_hash)

    @property
    def sleep_due(self) -> SleepLevel:
        """Level at which to sleep as soon as nothing at all is left here; 0: none."""
        level = self._word.sleep
        may = self._order.may_sleep and level > self.serves.sleep and not self._loader.why_no_sleep(level)
        return level if may else 0

    def sleep(self, level: SleepLevel) -> None:
        """Give memory back. No step is in flight, and nothing is cached in the pool."""
        self._loader.drop()
        given = self._loader.sleep(level)
        self._given = GivenBack(self._given.num_bytes + given.num_bytes, given.keeps)
        self._slept = self._word
        self.serves, self.accepts = msgspec.structs.replace(self.serves, sleep=level), -1
        self._forget()
        logger.info("sleeps at level %d: %d bytes given back", level, self._given.num_bytes)

    def _wake(self) -> None:
        if self.serves.sleep:
            logger.info("awake again")
        self._slept, self._given, self.serves = Pause(), GivenBack(), self.serves.awake

    def note_requests(self, num_requests: Mapping[int, int]) -> None:
        """Give back the memory of adapters that serve no more and that no request has. `num_requests`: by the number of
        their adapter. The step thread says so in every turn while an adapter leaves."""
        for number in self.adapters.take_unused(num_requests):
            self._loader.unload(number)
        self._leaving = self.adapters.leaving(num_requests)
        self._set_report(self.report)

    def _begin(self, wanted: Weights) -> None:
        folders = self.adapters.to_read(wanted.adapters) if self._has_adapters else []
        for each in folders:
            logger.info("reading the LoRA adapter %s in %s", each.name, each.path)
        keeps_base, is_gone = self.keeps_base(wanted), self.serves.sleep == 2
        if is_gone or not keeps_base:
            logger.info("reading the weights in %s", wanted.path or FIRST_FOLDER)
        self._forget()
        self._reading, self._folders = wanted, folders
        if keeps_base and is_gone:
            self._loader.begin_again(wanted.path, folders)
        else:
            self._loader.begin("" if keeps_base else wanted.path, folders)

    def _why_other(self, wanted: Weights, read: ReadWeights) -> str:
        """Return why what was read is not what the cluster serves; empty if it is."""
        if wanted.model_hash and read.model_hash not in ("", wanted.model_hash):
            return f"{wanted.path} has the model_hash {read.model_hash}, and the cluster serves {wanted.model_hash}"
        hashes = {each.name: each.hash for each in wanted.adapters or ()}
        for folder, found in zip(self._folders, read.adapters, strict=True):
            if found != hashes[folder.name]:
                return (
                    f"the LoRA adapter {folder.name} in {folder.path} has the hash {found}, and the cluster serves "
                    f"{hashes[folder.name]}"
                )
        return ""

    def _note_read(self, wanted: Weights, read: ReadWeights) -> None:
        if read.error:
            logger.error("cannot change to the weights in %s: %s", wanted.path or FIRST_FOLDER, read.error)
        self._retry_s = self._clock.monotonic() + RETRY_S
        prepared = msgspec.structs.replace(wanted, model_hash=wanted.model_hash or read.model_hash)
        if wanted.adapters is not None and not read.error:
            hashes = dict(zip([each.name for each in self._folders], read.adapters, strict=True))
            named = [msgspec.structs.replace(one, hash=one.hash or hashes.get(one.name, "")) for one in wanted.adapters]
            prepared = msgspec.structs.replace(prepared, adapters=tuple(named))
        self._set_report(WeightsReport(self.serves, prepared, read.error))

    def _forget(self, keeps_report: bool = False) -> None:
        self._reading = self._read = None
        if not keeps_report:
            self._set_report(WeightsReport(self.serves))

    def _set_report(self, report: WeightsReport) -> None:
        pause = self._word
        holds = self._order.holds or bool(pause.sleep)
        no_sleep = self._loader.why_no_sleep(pause.sleep) if pause.sleep > self.serves.sleep else ""
        report = msgspec.structs.replace(
            report,
            serves=self.serves,
            holds=holds,
            pause=pause,
            is_drained=holds and self.is_drained,
            freed_bytes=self._given.num_bytes,
            keeps=self._given.keeps,
            no_sleep=no_sleep,
            leaving=self._leaving,
        )
        if report != self.report:
            self.report = report
            self.on_news()
