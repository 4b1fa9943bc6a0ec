"""How P's rooms begin: the router's half (`add_request`) and D's half (TransferInfo) meet, in either order.

Owned by `PrefillSender`, called under its lock: `add_request` from the step thread, `on_transfer_info` from the comm
thread. Invariants: a room goes on only if both halves name the same D and the same prompt length; page and slot numbers
become remote addresses, so each is checked against D's registered memory before anything is kept; a TransferInfo that
is not taken is answered with a Failed status, and D's repeats of it with another one.
"""

from __future__ import annotations

import logging
from array import array

from chitu.clock import Clock
from chitu.errors import BadFrame, ChituError, DecodeLost, TransferFailed, from_code
from chitu.kv_transfer.events import TransferEvent, TransferEventKind
from chitu.kv_transfer.parts import KVManagerConfig, TransferOutbox
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.sender.chunk_feed import ChunkFeed
from chitu.kv_transfer.sender.registration import DecodePeer
from chitu.kv_transfer.sender.send_rooms import WRITABLE_STATES, SendEntry, SendRoom, SendRooms
from chitu.protocol import RankMemory, TransferInfo, TransferStatus, unpack_i32
from chitu.protocol.states import KVPoll, SenderEvent, SenderState
from chitu.types import room_text


class Announcements:
    def __init__(
        self,
        config: KVManagerConfig,
        clock: Clock,
        view: PeerView,
        rooms: SendRooms,
        feed: ChunkFeed,
        out: TransferOutbox,
    ) -> None:
        self._config = config
        self._clock = clock
        self._view = view
        self._rooms = rooms
        self._table = rooms.table
        self._feed = feed
        self._out = out

    # ------------------------------------------------------------------------------------------------ the router's half

    def add_request(self, room: bytes, request_id: str, num_tokens: int, rank: int, incarnation: int) -> None:
        tombstone = self._table.tombstone(room)
        if tombstone is not None:
            # D gave up before the router's half came (or the room is used twice): the step thread must not wait for it.
            error = from_code(tombstone.code or "protocol", tombstone.message or "this room ended already")
            self._out.event(TransferEvent(TransferEventKind.FAILED, room, error))
            self._out.event(TransferEvent(TransferEventKind.RELEASED, room))
            return
        transition = self._table.apply(room, SenderEvent.ADD_REQUEST, self._clock.monotonic(), SendRoom())
        if transition is None:
            self._add_too_late(room, request_id, num_tokens)
            return
        entry, record = transition.entry, transition.entry.data
        record.request_id, record.num_tokens, record.requested_s = request_id, num_tokens, self._clock.monotonic()
        record.decode_rank, record.decode_incarnation = rank, incarnation
        if record.info is not None:  # announced first
            assert record.peer is not None
            if record.peer.info.incarnation != incarnation:
                error = BadFrame("the room was announced by another D than its own")
                self._rooms.fail(room, SenderEvent.REFUSED, error)
            elif record.info.num_tokens != num_tokens:
                self._rooms.fail(room, SenderEvent.REFUSED, _other_length(record.info.num_tokens, num_tokens))
            else:
                self._go_on(room, entry)
            return
        if self._view.is_lost(rank, incarnation):
            self._rooms.fail(room, SenderEvent.PEER_LOST, DecodeLost(f"D{rank} is gone"))

    def _add_too_late(self, room: bytes, request_id: str, num_tokens: int) -> None:
        """The room is not over yet, but it cannot begin: what D announced failed before the router's half came."""
        entry = self._table.get(room)
        assert entry is not None
        record = entry.data
        if record.num_tokens or record.error is None:
            self._out.log(logging.WARNING, "room %s was added twice", room_text(room))
            return
        record.request_id, record.num_tokens = request_id, num_tokens
        self._out.event(TransferEvent(TransferEventKind.FAILED, room, record.error))
        if entry.state is SenderState.RELEASED:  # else RELEASED follows when the room has settled
            self._out.event(TransferEvent(TransferEventKind.RELEASED, room))

    # --------------------------------------------------------------------------------------------------------- D's half

    def on_transfer_info(
        self, room: bytes, info: TransferInfo, peer: DecodePeer, unreachable: ChituError | None
    ) -> None:
        """`unreachable`: why no connection to this D could be opened."""
        entry = self._table.get(room)
        if entry is not None and entry.data.info is not None:
            self._announced_again(room, info, peer, entry.data)
            return
        tombstone = self._table.tombstone(room)
        if tombstone is not None:
            self._refuse(room, peer, from_code(tombstone.code or "protocol", tombstone.message or "the room is over"))
            return
        if entry is not None and entry.state is not SenderState.REQUESTED:
            assert entry.data.error is not None
            self._refuse(room, peer, entry.data.error)
            return
        if entry is not None and entry.data.decode_incarnation != info.incarnation:
            self._refuse(room, peer, BadFrame("the router gave this room to another D"))
            return
        try:
            if self._view.is_lost(peer.info.engine_rank, info.incarnation):
                raise DecodeLost(f"D{peer.info.engine_rank} is not in the cluster view")
            if unreachable is not None:
                raise unreachable
            num_tokens = entry.data.num_tokens if entry is not None else info.num_tokens
            dst_pages = self._check(info, peer.memory, num_tokens)
            self._require_unclaimed(info, peer, dst_pages)
        except ChituError as error:
            self._refuse(room, peer, error)
            self._rooms.fail(room, SenderEvent.REFUSED, error)
            return
        self._accept(room, info, peer, dst_pages)

    def _announced_again(self, room: bytes, info: TransferInfo, peer: DecodePeer, record: SendRoom) -> None:
        """The same again is D's repeat and changes nothing; another one is refused, whoever sent it."""
        if record.info == info and record.peer is peer:
            return
        is_settled = record.peer is not peer  # nothing was ever written to a D that this room is not for
        self._refuse(room, peer, TransferFailed("this room was announced already"), is_settled)

    def _accept(self, room: bytes, info: TransferInfo, peer: DecodePeer, dst_pages: array[int]) -> None:
        transition = self._table.apply(room, SenderEvent.ANNOUNCE, self._clock.monotonic(), SendRoom())
        assert transition is not None
        entry, record = transition.entry, transition.entry.data
        record.info, record.peer, record.dst_pages = info, peer, dst_pages
        peer.aux_rooms[info.dst_aux_index] = room
        peer.page_rooms.update(dict.fromkeys(dst_pages[info.prefix_pages :], room))
        record.units_left = self._config.layout.num_layers * (len(dst_pages) - info.prefix_pages)
        if entry.state is SenderState.WAITING:
            self._go_on(room, entry)

    def _check(self, info: TransferInfo, memory: RankMemory, num_tokens: int) -> array[int]:
        """Destination pages, every one a page of D (`memory`), or none: D wants the logits row alone. BadFrame for
        anything else. `num_tokens`: by the router."""
        dst_pages = unpack_i32(info.dst_kv_indices)
        if info.num_tokens < 1 or len(dst_pages) not in (0, self._config.num_pages(info.num_tokens)):
            raise BadFrame(f"{len(dst_pages)} pages announced for {info.num_tokens} tokens")
        if info.num_tokens != num_tokens:
            raise _other_length(info.num_tokens, num_tokens)
        if dst_pages and (min(dst_pages) < 0 or max(dst_pages) >= memory.num_pages):
            raise BadFrame(f"pages {min(dst_pages)} to {max(dst_pages)} announced of {memory.num_pages}")
        if len(set(dst_pages)) != len(dst_pages):
            raise BadFrame("a page is announced twice")
        if not 0 <= info.dst_aux_index < memory.num_aux_slots:
            raise BadFrame(f"aux slot {info.dst_aux_index} announced of {memory.num_aux_slots}")
        num_full = min(len(dst_pages), info.num_tokens // self._config.layout.page_size)
        if not 0 <= info.prefix_pages <= num_full:
            raise BadFrame(f"{info.prefix_pages} prefix pages of {num_full} full ones")
        return dst_pages

    def _require_unclaimed(self, info: TransferInfo, peer: DecodePeer, dst_pages: array[int]) -> None:
        """BadFrame where something of this announcement may still be written for another room of the same D: it gives
        nothing to a request, and keeps nothing for later ones, before it heard that we stopped."""
        self._require_free("aux slot", info.dst_aux_index, peer, peer.aux_rooms.get(info.dst_aux_index))
        for page in dst_pages:
            self._require_free("page", page, peer, peer.page_rooms.get(page))

    def _require_free(self, what: str, number: int, peer: DecodePeer, room: bytes | None) -> None:
        """BadFrame where `room`, the last one that this was announced for, may still be written to."""
        entry = self._table.get(room) if room is not None else None
        if room is not None and entry is not None and entry.data.peer is peer and entry.state in WRITABLE_STATES:
            raise BadFrame(f"{what} {number} is announced for room {room_text(room)}")

    def _refuse(self, room: bytes, peer: DecodePeer, error: ChituError, is_settled: bool = True) -> None:
        """One Failed status; D's repeats of TransferInfo get another one."""
        status = TransferStatus(self._config.incarnation, KVPoll.Failed, is_settled, error.code, error.message)
        self._out.frame(peer.info.endpoint, peer.info.dst_port, room, status)

    # ------------------------------------------------------------------------------------------------------ both halves

    def _go_on(self, room: bytes, entry: SendEntry) -> None:
        """The room can be delivered: tell the step thread, and let go of what was computed so far."""
        self._out.event(TransferEvent(TransferEventKind.ANNOUNCED, room))
        self._feed.let_go(room, entry)


def _other_length(announced: int, mine: int) -> BadFrame:
    return BadFrame(f"D announced {announced} prompt tokens, the router's half has {mine}")
