"""`KVManager`: the transfer layer of one instance, with the side that its role has.

Built by the service's main thread once the pool exists: buffers are registered only then, once. In place of a blocking
`recv_kv_cache_and_insert` there is `receiver.announce` followed by `poll`: nothing here ever blocks the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from chitu.errors import ConfigError
from chitu.kv_transfer.alone import NoPeers
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.pulling import EncodeReceiver, EncodeSender, PullingSender
from chitu.kv_transfer.ranks import FanOut, TPPageSums, TPStateSeals
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.local import register_memory, ways_of
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import RankMemory

__all__ = [
    "KVManager",
    "KVManagerConfig",
    "NoPeers",
    "TransferSide",
    "manager_of_decode",
    "manager_of_encode",
    "manager_of_prefill",
    "receiver_of_features",
]


TransferSide = PrefillSender | DecodeReceiver | NoPeers
"""Object that the comm thread feeds. The step thread uses P's as `sender` and D's as `receiver`."""
Side = TypeVar("Side", bound=TransferSide, covariant=True)


class KVManager(Generic[Side]):
    """Transfer layer of one instance; on one of several TP ranks it lives on the main rank."""

    def __init__(
        self,
        side: Side,
        fan_out: FanOut | None = None,
        transports: Sequence[Transport] = (),
        ways: tuple[str, ...] = (),
        control_port: int = 0,
    ) -> None:
        """`ways`: ways to reach this instance (`ways_of`), of which a peer must share one. `control_port`: port of the
        messages between P and D; 0 on a unified instance."""
        self.side: Side = side
        self.ways = ways
        self.control_port = control_port
        self._transports = transports
        self._fan_out = fan_out

    @property
    def unknown_frames(self) -> int:
        return self.side.unknown_frames + self.side.stale_frames

    def start(self) -> None:
        """Start P's transfer threads, or D's verifying thread."""
        self.side.start()

    def retire(self) -> None:
        """End this side, where the instance changes its role: threads, and connections of its own to peers. The next
        side uses the transports and lanes. No room is left."""
        self.side.close()
        if isinstance(self.side, PrefillSender):
            self.side.disconnect()

    def close(self) -> None:
        """Join the transfer threads, then close the transports, after the step and comm threads ended."""
        self.side.close()
        if self._fan_out is not None:
            self._fan_out.close()
        for transport in self._transports:
            transport.close()


def manager_of_prefill(
    config: KVManagerConfig,
    memory: OwnMemory,
    context: TransferContext,
    fan_out: FanOut | None = None,
    images: EncodeReceiver | None = None,
) -> KVManager[PrefillSender]:
    """Build P's layer. On several TP ranks `fan_out` makes the followers write and compute checksums. `images`: its
    receiver of features, if it takes them from E."""
    num_followers = fan_out.num_followers if fan_out is not None else 0
    memory = _registered(config, memory, fan_out, num_followers, is_decode=False)
    sender = (
        PrefillSender(config, memory, context, fan_out)
        if images is None
        else PullingSender(config, memory, context, fan_out, images)
    )
    return KVManager(sender, fan_out, memory.transports, ways_of(memory.sessions), config.control_port)


def manager_of_decode(
    config: KVManagerConfig,
    memory: OwnMemory,
    context: TransferContext,
    fan_out: FanOut | None = None,
    followers: Sequence[RankMemory] = (),
) -> KVManager[DecodeReceiver]:
    """Build D's layer. On several TP ranks `followers` are the memories of ranks 1, 2, ...; `fan_out` makes them
    compute checksums."""
    memory = _registered(config, memory, fan_out, len(followers), is_decode=True)
    receiver = DecodeReceiver(config, memory, context, followers)
    return KVManager(receiver, fan_out, memory.transports, ways_of(memory.sessions), config.control_port)


def manager_of_encode(config: KVManagerConfig, memory: OwnMemory, context: TransferContext) -> KVManager[EncodeSender]:
    """Build E's layer. `config`: a `feature_config`."""
    memory = _registered(config, memory, None, 0, is_decode=False)
    sender = EncodeSender(config, memory, context)
    return KVManager(sender, None, memory.transports, ways_of(memory.sessions), config.control_port)


def receiver_of_features(
    config: KVManagerConfig,
    memory: OwnMemory,
    context: TransferContext,
    fan_out: FanOut | None = None,
    followers: Sequence[RankMemory] = (),
) -> EncodeReceiver:
    """Build what P receives features with. `config`: a `feature_config`. On several TP ranks E writes every row to each
    of them: `followers` are the feature regions of ranks 1, 2, ..., which `fan_out` has summed up. Raises
    TransferFailed if no transport can use the memory of the features."""
    memory = _registered(config, memory, fan_out, len(followers), is_decode=True, of_features=True)
    return EncodeReceiver(config, memory, context, followers)


def _registered(
    config: KVManagerConfig,
    memory: OwnMemory,
    fan_out: FanOut | None,
    num_followers: int,
    *,
    is_decode: bool,
    of_features: bool = False,
) -> OwnMemory:
    """Return the memory of the main rank with its sessions, and with the checksums of all ranks. A transport that
    cannot register it gets no session, and a warning. `of_features`: the memory is a feature region."""
    if num_followers != config.layout.tp_size - 1:
        raise ConfigError(f"tp_size {config.layout.tp_size} with {num_followers} followers")
    page_sums = memory.page_sums
    if config.verify_kv != "off" and (page_sums is None or (num_followers and fan_out is None)):
        raise ConfigError(f"verify_kv {config.verify_kv} without a way to sum up the pages of all ranks")
    if page_sums is not None and fan_out is not None:
        page_sums = TPPageSums(fan_out, page_sums, of_features)
    state_seals = memory.state_seals
    if config.layout.state and (state_seals is None or (num_followers and fan_out is None)):
        raise ConfigError("the layout has state, and there is no way to sum up the state rows of all ranks")
    if state_seals is not None and fan_out is not None:
        state_seals = TPStateSeals(fan_out, state_seals, has_stamps=not is_decode)
    sessions = register_memory(memory.pool, memory.transports)
    return replace(memory, page_sums=page_sums, state_seals=state_seals, sessions=sessions)
