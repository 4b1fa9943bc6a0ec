"""The three compositions of an instance: its role and its side of the transfer, made for each other.

`serve/scheduler.py` picks one. It is built over an `InstanceCore`, which does not know it. So the core could get
another one once no request is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chitu.instance.core import InstanceCore
from chitu.instance.roles import DecodeRole, InstanceRole, PrefillRole, UnifiedRole
from chitu.kv_transfer.kv_manager import KVManager, NoPeers, TransferSide, manager_of_decode, manager_of_prefill
from chitu.kv_transfer.parts import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.ranks import FanOut
from chitu.protocol import RankMemory


@dataclass(slots=True, frozen=True)
class Composition:
    role: InstanceRole
    transfer: KVManager[TransferSide]
    control_port: int = 0
    """Port of the messages between P and D; 0 on a unified instance."""


Build = Callable[[InstanceCore], Composition]


def build_prefill(
    core: InstanceCore,
    config: KVManagerConfig,
    memory: OwnMemory,
    context: TransferContext,
    fan_out: FanOut | None = None,
) -> Composition:
    """Compose P: it computes prompts and sends them. The memory is registered now and must not move."""
    transfer = manager_of_prefill(config, memory, context, fan_out)
    return Composition(PrefillRole(core, transfer.side), transfer, config.control_port)


def build_decode(
    core: InstanceCore,
    config: KVManagerConfig,
    memory: OwnMemory,
    context: TransferContext,
    fan_out: FanOut | None = None,
    followers: Sequence[RankMemory] = (),
) -> Composition:
    """Compose D: it receives prompts and decodes them. The memory is registered now and must not move."""
    transfer = manager_of_decode(config, memory, context, fan_out, followers)
    return Composition(DecodeRole(core, transfer.side), transfer, config.control_port)


def build_unified(core: InstanceCore, fan_out: FanOut | None = None) -> Composition:
    """Compose a unified instance, which has no peers. `fan_out`: lanes to the followers, with tiers."""
    return Composition(UnifiedRole(core), KVManager(NoPeers(), fan_out=fan_out))
