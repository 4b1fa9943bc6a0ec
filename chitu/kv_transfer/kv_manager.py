"""`KVManager`: the transfer layer of one instance; picks one role object at construction.

Built by the service's main thread once the pool exists: buffers are registered only then, once. In place of a blocking
`recv_kv_cache_and_insert` there is `receiver.announce` followed by `poll`: nothing here ever blocks the step thread.
"""

from __future__ import annotations

from chitu.errors import ConfigError
from chitu.kv_transfer.checksums import head_copies
from chitu.kv_transfer.parts import KVManagerConfig, RoleParts
from chitu.kv_transfer.ranks import TPPageSums
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.local import register_memory, ways_of
from chitu.types import Role

__all__ = ["KVManager", "KVManagerConfig", "TransferSide"]

TransferSide = PrefillSender | DecodeReceiver
"""Role object that the comm thread feeds, and the step thread uses as `sender` or `receiver`."""


class KVManager:
    """Transfer layer of one instance. Transports that cannot register the memory are left out with a warning.

    On an instance of several TP ranks this lives on the main rank: D needs the memory of its followers, P a way to make
    its followers write, and both a way to make them compute checksums unless `verify_kv` is off. `parts.page_sums` is
    of the main rank's own pages.
    """

    def __init__(self, role: Role, config: KVManagerConfig, parts: RoleParts) -> None:
        if role is Role.UNIFIED:
            raise ConfigError("a unified instance transfers nothing and has no KVManager")
        fan_out, page_sums = parts.fan_out, parts.page_sums
        num_followers = len(parts.follower_memories) if role is Role.DECODE else fan_out.num_followers if fan_out else 0
        if num_followers != config.layout.tp_size - 1:
            raise ConfigError(f"tp_size {config.layout.tp_size} with {num_followers} followers")
        if config.verify_kv != "off" and (page_sums is None or (num_followers and fan_out is None)):
            raise ConfigError(f"verify_kv {config.verify_kv} without a way to sum up the pages of all ranks")
        if page_sums is not None and fan_out is not None:
            parts.page_sums = TPPageSums(fan_out, page_sums, head_copies(config.layout), role is Role.DECODE)
        self._parts = parts
        parts.sessions = register_memory(parts.memory, parts.transports)
        self.ways = ways_of(parts.sessions)
        """Ways to reach this instance (`ways_of`), of which a peer must share one."""
        is_prefill = role is Role.PREFILL
        self.side: TransferSide = (PrefillSender if is_prefill else DecodeReceiver)(config, parts)

    @property
    def sender(self) -> PrefillSender | None:
        return self.side if isinstance(self.side, PrefillSender) else None

    @property
    def receiver(self) -> DecodeReceiver | None:
        return self.side if isinstance(self.side, DecodeReceiver) else None

    @property
    def unknown_frames(self) -> int:
        return self.side.unknown_frames + self.side.stale_frames

    @property
    def suspended_ranks(self) -> tuple[int, ...]:
        """Engine ranks of the D that P does not write to until a failed write is fenced."""
        return self.sender.suspended_ranks if self.sender is not None else ()

    @property
    def silent_prefills(self) -> tuple[int, ...]:
        """Incarnations of P that do not answer D."""
        return self.receiver.silent_prefills() if self.receiver is not None else ()

    def start(self) -> None:
        """Start P's transfer threads, or D's verifying thread."""
        self.side.start()

    def close(self) -> None:
        """Join the transfer threads, then close the transports, after the step and comm threads ended."""
        self.side.close()
        if self._parts.fan_out is not None:
            self._parts.fan_out.close()
        for transport in self._parts.transports:
            transport.close()
