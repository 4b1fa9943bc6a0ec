"""What the images of a request add to the cost of a way, and which E encodes each of them. Pure, but for what was sent.

Whoever computes the prompt lacks the features of its images, unless it reports that it has them, or their rows are in
its cached pages. It gets them from an E, or encodes them itself (`instance/image_pulls.py`). The router names an E for
each image, because it knows of all that they have to do, and for whom.

* **An E** is done when what waits there (its report, or what was sent there since, if that is more) and this image are
  encoded at its measured rate, and the features were moved over that link. An image that it has already is only moved.
  What it does while the prompt waits to be computed, and while the text before the first image is, delays nobody.
* **Encoding by itself** takes an instance the time of the image at its own rate, which this prompt waits for, and all
  others there, at least the next one. So E are passed over only where they take longer than all of that: if all are
  full.
* **Choice**: the E that is done first, so one that has the image, else the least loaded one; among equal ones the one
  that a hash of the image's key prefers, so that an image that comes again finds its features.

A request of text comes here with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chitu.protocol import ANY_ENCODER, NO_ENCODER, ImagePart, encoder_preference
from chitu.router.candidates import InstanceKey
from chitu.router.costs import Asked, Cost, usual_s_per_byte
from chitu.router.loads import InstanceLoad

PRIOR_ROW_S = 4e-4
"""Seconds of a feature row while nobody has encoded any: about what preparing a screenshot takes."""
ON_ITS_WAY_S = 2.0
"""Time, beside the queue of who computes the prompt, after which an image that was sent to an E is in its reports."""


class ImagePlan(NamedTuple):
    """Who encodes the images of a request, and what that costs."""

    encoders: tuple[int, ...] = ()
    """As in `RequestHead.encoders`."""
    seconds: float = 0.0
    """By how much the first token comes later."""
    own_s: float = 0.0
    """Seconds of it in steps of the instance that computes the prompt."""


NO_PLAN = ImagePlan()


@dataclass(slots=True)
class EncoderQueue:
    """An E as one choice sees it."""

    rank: int
    rows: int
    """Rows that wait there."""
    row_s: float
    moved_row_s: float
    """Seconds of a row on the link from there."""
    load: InstanceLoad
    sent: dict[bytes, tuple[int, float]]
    """Images that were sent there and that no report shows: rows, and until when they are on their way."""

    def done_s(self, image: ImagePart, ahead_s: float) -> float:
        """Return the seconds from now + `ahead_s`, when it is asked, until it has sent the features of an image."""
        moved_s = self.moved_row_s * image.num_rows
        if self.load.newest.image_load.has(image.key):
            return moved_s
        rows = 0 if image.key in self.sent else image.num_rows
        return max(rows * self.row_s, (self.rows + rows) * self.row_s - ahead_s) + moved_s


def plan_images(
    images: Sequence[ImagePart],
    num_cached: int,
    computes: InstanceLoad,
    encoders: Sequence[EncoderQueue],
    usual_row_s: float,
    now_s: float,
) -> ImagePlan:
    """Return who encodes images of a prompt of which `computes` has `num_cached` tokens in pages. `encoders`: those
    that it can ask; their queues have the images of the plan afterwards. `usual_row_s`: its own rate, if it has not
    measured one."""
    own = computes.newest.image_load
    own_row_s, own_rows = own.row_s or usual_row_s, own.waiting_rows
    missing = [image for image in images if image.end > num_cached and not own.has(image.key)]
    if not missing:
        return NO_PLAN
    num_others = max(1, computes.own.prompts)
    ahead_s, text = computes.queue_s(now_s), max(0, missing[0].start - num_cached)
    before_s = computes.prompt_s(text, num_cached) if text else 0.0
    named: dict[bytes, int] = {}
    late_s = own_s = 0.0
    for image in missing:
        if image.key in named:
            continue
        rows = image.num_rows
        itself_s = (own_rows + rows) * own_row_s
        best, done_s = _first_done(image, encoders, ahead_s)
        if best is None or done_s - before_s > itself_s + num_others * rows * own_row_s:
            named[image.key], own_s, own_rows = NO_ENCODER, itself_s, own_rows + rows
            continue
        named[image.key], late_s = best.rank, max(late_s, done_s - before_s)
        if not best.load.newest.image_load.has(image.key) and image.key not in best.sent:
            best.rows += rows
    ranks = tuple(named.get(image.key, ANY_ENCODER) for image in images) if encoders else ()
    return ImagePlan(ranks, late_s + own_s, own_s)


def _first_done(
    image: ImagePart, encoders: Sequence[EncoderQueue], ahead_s: float
) -> tuple[EncoderQueue | None, float]:
    if not encoders:
        return None, 0.0
    times = [each.done_s(image, ahead_s) for each in encoders]
    least_s = min(times)
    equal = [each for each, done_s in zip(encoders, times, strict=True) if done_s == least_s]
    return max(equal, key=lambda each: encoder_preference(image.key, each.rank)), least_s


def usual_row_s(loads: Sequence[InstanceLoad]) -> float:
    """Return the seconds of a feature row on an instance that has measured none: the mean of those that have."""
    known = [row_s for load in loads if (row_s := load.newest.image_load.row_s)]
    return sum(known) / len(known) if known else PRIOR_ROW_S


def with_images(asked: Asked, plan: ImagePlan) -> Asked:
    """Return what is asked of a way that has so much less time for all but the images."""
    return asked._replace(ttft_s=asked.ttft_s - plan.seconds)


def add_images(cost: Cost, plan: ImagePlan, num_streams: float) -> Cost:
    """Return the cost of a way with its images, which delay so many requests that decode where they are encoded."""
    return cost._replace(seconds=cost.seconds + plan.seconds + num_streams * plan.own_s)


@dataclass(slots=True)
class EncodersSent:
    """What was sent to E and is in no report of theirs yet. Owned by `Selector`, on the loop thread."""

    _sent: dict[InstanceKey, dict[bytes, tuple[int, float]]] = field(default_factory=dict)

    def queues(self, encode: Sequence[InstanceLoad], computes: InstanceLoad, now_s: float) -> list[EncoderQueue]:
        """Return the E that an instance can ask."""
        if not computes.info.image_port:
            return []
        usual_s, queues = usual_row_s((*encode, computes)), []
        for load in encode:
            report, sent = load.newest.image_load, self._of(load, now_s)
            rank = computes.info.engine_rank
            byte_s = load.link_s_per_byte(rank) or usual_s_per_byte(load.info, computes.info)
            rows = max(report.waiting_rows, sum([rows for rows, _ in sent.values()]))
            moved_row_s = byte_s * load.kv_token_bytes
            queues.append(EncoderQueue(load.info.engine_rank, rows, report.row_s or usual_s, moved_row_s, load, sent))
        return queues

    def _of(self, load: InstanceLoad, now_s: float) -> dict[bytes, tuple[int, float]]:
        """Return what is on its way to an E."""
        sent = self._sent.get(load.key)
        if not sent:
            return {}
        report = load.newest.image_load
        kept = {key: value for key, value in sent.items() if value[1] > now_s and not report.has(key)}
        self._sent[load.key] = kept
        return kept

    def note(
        self,
        images: Sequence[ImagePart],
        plan: ImagePlan,
        encode: Sequence[InstanceLoad],
        computes: InstanceLoad,
        now_s: float,
    ) -> None:
        """Note that a plan is carried out."""
        by_rank = {load.info.engine_rank: load for load in encode}
        self._sent = {load.key: sent for load in encode if (sent := self._sent.get(load.key))}
        until_s = now_s + computes.queue_s(now_s) + ON_ITS_WAY_S
        for image, rank in zip(images, plan.encoders, strict=False):  # without E none is named
            load = by_rank.get(rank)
            if load is not None and not load.newest.image_load.has(image.key):
                sent = self._sent.setdefault(load.key, {})
                sent[image.key] = image.num_rows, max(until_s, sent.get(image.key, (0, 0.0))[1])
