"""Staged writes between the two processes of a transfer benchmark: the engine's own gather, write and scatter, with
lines on a pipe in place of the control messages.

The parent has a `StagedLink`, the child answers its lines by `serve_line`. Groups fit a segment; with two or more
segments the gather and write of one go on beside the scatter of another, as in `kv_transfer/staging`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

import msgspec

from chitu.errors import TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.staging.copier import PieceCopier
from chitu.kv_transfer.staging.packing import pack_pages, turned, unit_bytes
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport, gathers
from chitu.protocol import RankMemory

TIMEOUT_S = 30.0


class ScatterCommand(msgspec.Struct, frozen=True):
    """A line to the child; it answers with a line when the pages have their bytes."""

    segment: int
    first_layer: int
    end_layer: int
    pages: list[int]


class PageGroup(NamedTuple):
    layers: range
    first_page: int
    end_page: int


def groups_of(num_pages: int, num_layers: int, num_bytes: int, segment_bytes: int) -> Iterator[PageGroup]:
    """Of `num_pages` pages of all layers, each within a segment; `num_bytes`: of a page of one layer."""
    units = segment_bytes // num_bytes
    if units < 1:
        raise ValueError(f"a segment of {segment_bytes} bytes holds no page of {num_bytes} bytes")
    layers_at_once = max(1, units // num_pages)
    pages_at_once = min(num_pages, units)
    for layer in range(0, num_layers, layers_at_once):
        for page in range(0, num_pages, pages_at_once):
            layers = range(layer, min(num_layers, layer + layers_at_once))
            yield PageGroup(layers, page, min(num_pages, page + pages_at_once))


class StagedLink:
    """`area`: of our own segments; not needed where the transport gathers. Not thread safe."""

    def __init__(
        self,
        pool: PagedMemory,
        memory: RankMemory,
        transport: Transport,
        peer: PeerHandle,
        copier: PieceCopier,
        area: StagingArea | None,
        to_child: IO[str],
        from_child: IO[str],
    ) -> None:
        if memory.staging is None:
            raise TransferFailed(f"{transport.name}: the peer has no segments")
        self._pool = pool
        self._staging = memory.staging
        self._transport = transport
        self._peer = peer
        self._copier = copier
        self._area = None if gathers(transport) else area
        self._to_child = to_child
        self._from_child = from_child

    def write(self, own: Sequence[int], theirs: Sequence[int], num_layers: int, regions_per_layer: int = 2) -> None:
        """KV of pages `own[i]` here is in pages `theirs[i]` there when this returns."""
        num_bytes = unit_bytes(self._pool, regions_per_layer)
        segments = self._staging.num_segments if self._area is None else self._area.num_segments
        segments = min(segments, self._staging.num_segments)
        num_unanswered = 0
        for number, group in enumerate(groups_of(len(own), num_layers, num_bytes, self._staging.segment_bytes)):
            if num_unanswered == segments:
                self._from_child.readline()
                num_unanswered -= 1
            index = number % segments
            part = slice(group.first_page, group.end_page)
            self._send(index, own[part], group.layers, regions_per_layer)
            line = ScatterCommand(index, group.layers.start, group.layers.stop, list(theirs[part]))
            self._to_child.write(msgspec.json.encode(line).decode() + "\n")
            self._to_child.flush()
            num_unanswered += 1
        for _ in range(num_unanswered):
            self._from_child.readline()

    def _send(self, index: int, pages: Sequence[int], layers: range, regions_per_layer: int) -> None:
        target = self._staging.base + index * self._staging.segment_bytes
        if self._area is None:
            pieces = pack_pages(self._pool, pages, layers, target, regions_per_layer)
            self._transport.write(self._peer, pieces, TIMEOUT_S)
            return
        source = self._area.address(index)
        pieces = pack_pages(self._pool, pages, layers, source, regions_per_layer)
        self._copier.copy(pieces)
        self._transport.write(self._peer, CopyList((source,), (target,), (pieces.nbytes,)), TIMEOUT_S)


def serve_line(line: str, pool: PagedMemory, area: StagingArea, copier: PieceCopier, regions_per_layer: int = 2) -> str:
    """The child's answer to a `ScatterCommand` line, once it is done."""
    order = msgspec.json.decode(line, type=ScatterCommand)
    layers = range(order.first_layer, order.end_layer)
    copier.copy(turned(pack_pages(pool, order.pages, layers, area.address(order.segment), regions_per_layer)))
    return "done"
