"""What changed in the cluster between two events of a stream. Pure; loop thread.

The log notes at which version it first saw an instance, its load, or a request's end as it is now. A reader keeps one
number, the version of its last event (0: it has had none), so all readers of one version get the same bytes, and an
instance that changed is encoded once, however many read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from chitu.protocol import NO_IMAGE_LOAD
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.snapshot import InstanceSnapshot

LOAD_FIELDS = (
    *("waiting", "transferring", "running", "retracted", "steps", "tokens", "bytes_moved", "suspended"),
    *("pages_total", "pages_used", "pages_quarantined", "pages_cached", "image_rows", "image_rows_used", "images"),
)
"""What an event says of a load: what the page shows, where it is not zero; where tokens are drafted, `tokens_a_row`,
too, and where images are encoded, `image_load` without its keys."""
FIXED_FIELDS = tuple(field for field in InstanceSnapshot.__struct_fields__ if field not in ("load", "layout"))


@dataclass(slots=True)
class _Entry:
    seen: InstanceSnapshot | None = None
    fixed: tuple[Any, ...] = ()
    load: dict[str, Any] | None = None
    fixed_at: int = 0
    load_at: int = 0
    whole: bytes = b""
    brief: bytes = b""
    """JSON with everything, and with the name and the load."""


class ChangeLog:
    def __init__(self) -> None:
        self.version = 0
        self._instances: dict[str, _Entry] = {}
        self._ended: dict[str, int] = {}
        self._whole_at = 0
        """A reader of an older version knows an instance that is gone."""

    def observe(self, instances: Iterable[InstanceSnapshot], ended: Iterable[RequestSnapshot]) -> None:
        """Note the cluster and all requests that ended lately, as they are now."""
        self.version += 1
        known, self._instances = self._instances, {}
        for instance in instances:
            entry = self._instances[instance.name] = known[instance.name] if instance.name in known else _Entry()
            self._note(entry, instance)
        if known.keys() - self._instances.keys():
            self._whole_at = self.version
        self._ended = {request.room: self._ended.get(request.room, self.version) for request in ended}

    def _note(self, entry: _Entry, instance: InstanceSnapshot) -> None:
        if instance is entry.seen:
            return
        entry.seen, report = instance, instance.load
        fixed = tuple([getattr(instance, field) for field in FIXED_FIELDS])
        load = None if report is None else {name: value for name in LOAD_FIELDS if (value := getattr(report, name))}
        if report is not None and load is not None and report.drafts:
            load["tokens_a_row"] = round(report.rates.tokens_a_row, 1)
        if report is not None and load is not None and report.image_load != NO_IMAGE_LOAD:
            waiting, row_s, hits = report.image_load.waiting_rows, report.image_load.row_s, report.image_load.hits
            load["image_load"] = {"waiting_rows": waiting, "row_s": float(f"{row_s:.3g}"), "hits": hits}
        if load == entry.load and fixed == entry.fixed:
            return
        if fixed != entry.fixed:
            entry.fixed, entry.fixed_at = fixed, self.version
        entry.load, entry.load_at = load, self.version
        shown = dict(zip(FIXED_FIELDS, fixed, strict=True), load=load)
        entry.whole = msgspec.json.encode(shown)
        entry.brief = msgspec.json.encode({"name": instance.name, "load": load})

    def is_whole_after(self, version: int) -> bool:
        """Return whether a reader of this version has to begin anew."""
        return version < self._whole_at or version == 0

    def instances_after(self, version: int) -> bytes:
        """Return JSON of a list of the instances that a reader of this version does not know as they are now."""
        after = 0 if self.is_whole_after(version) else version
        entries = self._instances.values()
        return b"[%b]" % b",".join([e.whole if e.fixed_at > after else e.brief for e in entries if e.load_at > after])

    def is_news(self, request: RequestSnapshot, version: int) -> bool:
        """Return whether a reader of this version has not seen the request as it is: it runs, or ended since."""
        return self.is_whole_after(version) or self._ended.get(request.room, self.version) > version
