"""P's side of the transfer protocol: the shell of `SenderMachine`, which decides what becomes of a room.

`PrefillSender` owns the lock and the outbox, turns what happens into events, and carries out the effects. Beside the
machine it has `ChunkFeed` (what was computed), `PageWriter` (the writes) and `DecodePeers` (which D registered). Three
kinds of threads call it. Step: `add_request`, `feed`, `poll`, `abort`. Comm: `on_frame`, `on_view`, `tick`. Transfer:
`_work`, through the queue. Invariant: the lock is never held across `send_frame`, `wake`, logging or a transport.
"""

from __future__ import annotations

import logging
import threading

from chitu.errors import BadFrame, ChituError, ProtocolError
from chitu.kv_transfer.both_sides import (
    TICK_INTERVAL_S,
    Aborted,
    DropEvents,
    KVManagerConfig,
    Line,
    OwnMemory,
    Send,
    Tick,
    TransferContext,
    TransferEvent,
    TransferEventKind,
    TransferOutbox,
    ViewChanged,
)
from chitu.kv_transfer.chunks import ChunkFeed, TransferJob, TransferQueue
from chitu.kv_transfer.page_writer import PageWriter, SenderTrace
from chitu.kv_transfer.peers import DecodePeer, DecodePeers, PeerView
from chitu.kv_transfer.ranks import FanOut
from chitu.kv_transfer.sender import (
    DecodeDead,
    Event,
    FenceWrites,
    FrameReceived,
    JobDequeued,
    LayersComputed,
    QueueFence,
    Requested,
    SenderMachine,
    StartSending,
    Stop,
    TrackChunks,
    Write,
)
from chitu.kv_transfer.sender_table import SenderState
from chitu.kv_transfer.transports.local import TransportMessages
from chitu.kv_transfer.transports.transport import batch_bytes_of
from chitu.net.threads import ServiceThread
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    ClusterView,
    KVArgsRegisterInfo,
    PathLoad,
    PeerMessage,
    StatusAck,
    TransferInfo,
    TransportMessage,
    peer_codec,
)
from chitu.types import REGISTRATION_ROOM, instance_name, room_text

logger = logging.getLogger(__name__)


class PrefillSender:
    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        context: TransferContext,
        fan_out: FanOut | None = None,
    ) -> None:
        """`fan_out`: lanes to the followers, with several TP ranks."""
        self._config = config
        self._clock = context.clock
        self._lock = threading.Lock()
        self._out = TransferOutbox(context, logger)
        self._view = PeerView(config.reader, config.host, context.is_pid_alive, config.other_readers)
        unit_bytes = max(1, sum(memory.pool.page_bytes) // config.layout.num_layers)
        batch_bytes = batch_bytes_of(memory.transports, config.max_batch_bytes)
        self.queue = TransferQueue(self._work, batch_bytes // unit_bytes)
        self._peers = DecodePeers(config, memory, fan_out, self._view)
        self.machine = SenderMachine(config, self._view)
        self.feed = ChunkFeed(config, context.clock, self.queue, self._lock)
        """Takes computed pages from the step thread."""
        self._trace = None if context.tracer is None else SenderTrace(context.tracer, config.layout, memory.pool)
        self._writer = PageWriter(config, memory, context.clock, self._trace)
        self._messages = TransportMessages(config.incarnation, memory.transports, context.send_frame, self._address_of)
        self._next_tick_s = 0.0
        self.unknown_frames = 0
        """Number of undecodable or misdirected frames so far."""
        self._unregistered_frames = 0

    # ------------------------------------------------------------------------------------------------------ life, state

    def start(self) -> None:
        """Start the transfer threads. Tests call `queue.run_one()` instead."""
        self.queue.start(self._config.transfer_threads, ServiceThread)

    def close(self) -> None:
        """Stop writing. The transports may be closed after this."""
        self.queue.close(self._config.write_timeout_s + 1.0)

    def disconnect(self) -> None:
        """Close the connections to all D, after `close`; a frame that comes late opens none again, as its room is
        over or its D is taken for another one's."""
        with self._lock:
            writers = [peer.writer for peer in self._peers.table.values() if peer.writer is not None]
            for peer in self._peers.table.values():
                peer.writer = None
        for writer in writers:
            writer.close()

    def state(self, room: bytes) -> SenderState | None:
        """Return the room's state, or None if it is unknown or forgotten. For tests, logs and metrics."""
        entry = self.machine.table.get(room)
        return entry.state if entry is not None else None

    @property
    def stale_frames(self) -> int:
        """Number of frames from incarnations that are not (or no longer) registered, or not the D of their room."""
        return self._unregistered_frames + self.machine.stale_frames

    silent_prefills: tuple[int, ...] = ()
    """P has no P as its peer."""

    @property
    def suspended_ranks(self) -> tuple[int, ...]:
        """Engine ranks of the D in the cluster that get no writes until a failed write is fenced."""
        suspended = [peer.info for peer in list(self._peers.table.values()) if peer.is_suspended]
        with self._lock:
            lost = [self._view.is_lost(info.engine_rank, info.incarnation) for info in suspended]
        return tuple(sorted(info.engine_rank for info, is_lost in zip(suspended, lost, strict=True) if not is_lost))

    @property
    def path_loads(self) -> tuple[PathLoad, ...]:
        return self._writer.paths.loads()

    @property
    def decode_kv_args_table(self) -> dict[int, DecodePeer]:
        """Registered D, by incarnation."""
        return self._peers.table

    # ------------------------------------------------------------------------------------------------------ step thread

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        """Take the router's request; the room may have been announced before. Starts the bootstrap deadline."""
        self._handle(Requested(room, request_id, num_tokens, decode_rank, decode_incarnation))

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        """Stop a room and report that to D. Only RELEASED follows. An unknown room is ignored."""
        self._handle(Aborted(room, error))

    # ------------------------------------------------------------------------------------------------------ comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Process one P<->D message. Never raises for bad input: counts it, and fails its own room at most."""
        try:
            self._take(room, peer_codec.decode(payload))
        except ProtocolError as error:
            self.unknown_frames += 1
            name = instance_name(self._config.writer, self._config.engine_rank)
            logger.warning("%s: ignored a frame: %s", name, error.message)

    def on_image_frame(self, room: bytes, payload: bytes) -> None:
        """Count a frame on the port for E: nothing takes features here."""
        self.unknown_frames += 1

    def _take(self, room: bytes, message: PeerMessage) -> None:
        """Take a message. Raises ProtocolError for one that no D sends to a P."""
        if isinstance(message, KVArgsRegisterInfo):
            if room != REGISTRATION_ROOM:
                raise BadFrame(f"a registration in room {room_text(room)}")
            self._on_register(message)
        elif isinstance(message, TransportMessage):
            if peer := self._registered(message.incarnation):
                self._messages.deliver(peer.info.engine_rank, message)
        elif len(room) != 16 or room == REGISTRATION_ROOM:
            raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
        elif isinstance(message, TransferInfo | StatusAck | AbortTransfer):
            if peer := self._registered(message.incarnation):
                # `reconnect` may block on a connection, so it runs without the lock.
                unreachable = self._peers.reconnect(peer) if isinstance(message, TransferInfo) else None
                self._handle(FrameReceived(room, message, peer, unreachable))
        elif not isinstance(message, AbortAck):  # P sends no AbortTransfer, so an ack of one is only late
            raise BadFrame(f"a {type(message).__name__} sent to P")

    def _registered(self, incarnation: int) -> DecodePeer | None:
        """Return the registered D, or None after counting the frame: D repeats unanswered messages."""
        peer = self._peers.table.get(incarnation)
        self._unregistered_frames += peer is None
        return peer

    def _on_register(self, info: KVArgsRegisterInfo) -> None:
        answer = self._peers.answer(info)  # may block on a connection: without the lock
        if answer is None:
            self._unregistered_frames += 1
            return
        reply, new_peer = answer
        with self._lock:
            if new_peer is not None:
                self._peers.add(new_peer)
            self._out.put(Send(info.endpoint, info.dst_port, REGISTRATION_ROOM, reply))
        self._handle(ViewChanged())  # a D that registered and never joined may be lost by now, with its rooms

    def _address_of(self, incarnation: int) -> tuple[str, int] | None:
        peer = self._peers.table.get(incarnation)
        return (peer.info.endpoint, peer.info.dst_port) if peer is not None else None

    def on_view(self, view: ClusterView, router: int = 0) -> None:
        """Take a new cluster view: fail the rooms of incarnations that are gone."""
        with self._lock:
            if not self._view.update(view, router):
                return
        self._handle(ViewChanged())

    def on_silence(self, router: int) -> None:
        """Note that nothing is heard of a router: what it showed of the other instances counts no more."""
        with self._lock:
            self._view.note_silence(router)
        self._handle(ViewChanged())

    def tick(self, now_s: float) -> None:
        """Apply deadlines and repeat messages. Called at least every 50 ms."""
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            has_seen_one_end = self._view.find_ended()
            feared = [peer for peer in self._peers.table.values() if peer.is_suspended]
            dead = [peer for peer in feared if self._view.is_dead(peer.info.engine_rank, peer.info.incarnation)]
        if has_seen_one_end:
            self._handle(ViewChanged())
        for peer in dead:
            self._handle(DecodeDead(peer))
        self._handle(LayersComputed(self.feed.num_layers_done))
        self._handle(Tick())
        with self._lock:
            in_use = [entry.data.destination.peer for _, entry in self.machine.table.items() if entry.data.destination]
            idle = self._peers.detach_idle(in_use)
        for writer in idle:
            writer.close()

    # ------------------------------------------------------------------------------------------------- transfer threads

    def _work(self, job: TransferJob) -> None:
        """Do one write, or one fence attempt, of one room."""
        for effect in self._handle(JobDequeued(job)):
            if isinstance(effect, FenceWrites):
                self._handle(self._writer.fence(effect))
            else:
                self._handle(self._writer.write(effect))
                if self._trace is not None and effect.record.landed_s:
                    self._trace.note_sent(job.room, effect.record)

    # ------------------------------------------------------------------------------------------------------- any thread

    def _handle(self, event: Event) -> list[Write | FenceWrites]:
        """Apply an event and carry out its effects. Return those that the caller carries out without the lock."""
        jobs: list[Write | FenceWrites] = []
        with self._lock:
            for effect in self.machine.handle(event, self._clock.monotonic()):
                match effect:
                    case Write() | FenceWrites():
                        jobs.append(effect)
                    case Send() | TransferEvent() | Line():
                        self._out.put(effect)
                    case DropEvents(room):
                        if TransferEventKind.SUCCESS in self._out.drop_events(room):
                            self._out.put(TransferEvent(TransferEventKind.RELEASED, room))
                    case TrackChunks():
                        self.feed.track(*effect)
                    case StartSending():
                        self.feed.start_sending(*effect)
                    case Stop(room):
                        self.feed.stop(room)
                    case QueueFence(room):
                        self.queue.put_fence(room)
            leaving = self._out.drain()
        self._out.leave(leaving)
        return jobs
