"""`KVManager`: the transfer layer of one instance behind one name; picks one role object at construction.

Built by the service's main thread once the pool exists: buffers are registered only then, once. `sender` or
`receiver` is what the step thread uses, `comm_side` what the comm thread uses. A blocking `recv_kv_cache_and_insert`
is `receiver.announce` followed by `poll`: nothing here ever blocks the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from chitu.clock import Clock
from chitu.errors import ChituError, ConfigError
from chitu.kv_transfer.checksums import PageSums, head_copies
from chitu.kv_transfer.events import CommSide, PeerLink, TransferEvent, Wake
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.parts import AuxRows, KVManagerConfig, RoleParts
from chitu.kv_transfer.peer_view import PidAlive, pid_alive
from chitu.kv_transfer.receiver.decode_receiver import DecodeReceiver
from chitu.kv_transfer.register_memory import register_memory, ways_of
from chitu.kv_transfer.sender.prefill_sender import PrefillSender
from chitu.kv_transfer.tensor_parallel.fan_out import FannedPageSums, FanOut
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import RankMemory, TransportSession
from chitu.tracing.tracer import Tracer
from chitu.types import Role

__all__ = ["KVManager", "KVManagerConfig"]


class KVManager:
    """`transports` in order of preference; those that cannot register the memory are left out with a warning.

    On an instance of several TP ranks this lives on the main rank: D needs the memory of its followers, P a way to make
    its followers write, and both a way to make them sum up pages where `verify_kv` is not off. `page_sums`: of the main
    rank's own pages.
    """

    def __init__(
        self,
        role: Role,
        config: KVManagerConfig,
        *,
        memory: PagedMemory,
        aux: AuxRows,
        transports: Sequence[Transport],
        link: PeerLink,
        wake: Wake,
        clock: Clock,
        is_pid_alive: PidAlive = pid_alive,
        follower_memories: Sequence[RankMemory] = (),
        fan_out: FanOut | None = None,
        page_sums: PageSums | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        if role is Role.UNIFIED:
            raise ConfigError("a unified instance transfers nothing and has no KVManager")
        num_followers = len(follower_memories) if role is Role.DECODE else fan_out.num_followers if fan_out else 0
        if num_followers != config.layout.tp_size - 1:
            raise ConfigError(f"tp_size {config.layout.tp_size} with {num_followers} followers")
        if config.verify_kv != "off" and (page_sums is None or (num_followers and fan_out is None)):
            raise ConfigError(f"verify_kv {config.verify_kv} without a way to sum up the pages of all ranks")
        if page_sums is not None and fan_out is not None:
            page_sums = FannedPageSums(fan_out, page_sums, head_copies(config.layout), role is Role.DECODE)
        self._role = role
        self._config = config
        self._memory = memory
        self._fan_out = fan_out
        self._transports = list(transports)
        sessions = self.register_buffer_to_engine()
        self.ways = ways_of(sessions)
        """Of which a peer must have one, too."""
        parts = RoleParts(memory, sessions, aux, self._transports, link, wake, clock, is_pid_alive)
        parts.follower_memories, parts.fan_out, parts.page_sums = follower_memories, fan_out, page_sums
        parts.tracer = tracer
        self.sender = PrefillSender(config, parts) if role is Role.PREFILL else None
        self.receiver = DecodeReceiver(config, parts) if role is Role.DECODE else None

    def register_buffer_to_engine(self) -> tuple[TransportSession, ...]:
        """Make the arena known to every transport; idempotent. TransferFailed where none can use it."""
        return register_memory(self._memory, self._transports)

    @property
    def comm_side(self) -> CommSide:
        """What the comm thread feeds."""
        side = self.sender or self.receiver
        assert side is not None
        return side

    @property
    def unknown_frames(self) -> int:
        role = self.sender or self.receiver
        assert role is not None
        return role.unknown_frames + role.stale_frames

    @property
    def suspended_ranks(self) -> tuple[int, ...]:
        """P: engine ranks of the D that it does not write to until a failed write has settled."""
        return self.sender.suspended_ranks if self.sender is not None else ()

    @property
    def silent_prefills(self) -> tuple[int, ...]:
        """D: incarnations of P that do not answer it."""
        return self.receiver.silent_prefills() if self.receiver is not None else ()

    def start(self) -> None:
        """Start P's transfer threads, D's verifying thread."""
        if self.sender is not None:
            self.sender.start()
        if self.receiver is not None:
            self.receiver.start()

    def close(self) -> None:
        """After the step and comm threads ended: join the transfer threads, then close the transports."""
        self.comm_side.close()
        if self._fan_out is not None:
            self._fan_out.close()
        for transport in self._transports:
            transport.close()

    def poll(self) -> list[TransferEvent]:
        role = self.sender or self.receiver
        assert role is not None
        return role.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        role = self.sender or self.receiver
        assert role is not None
        role.abort(room, error)

    # ------------------------------------------------------------------------------------------- P sends, D is told

    def send_kv_cache(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None = None) -> None:
        """P: the room's prompt is computed and its logits row is in `aux_slot`."""
        assert self.sender is not None
        self.sender.send_kv_cache(room, aux_slot, prompt_logprobs)
