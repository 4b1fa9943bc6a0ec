"""The compositions of an instance: its role and its transfer layer, made for each other.

`serve/scheduler.py` picks one. It is built over an `InstanceCore`, which does not know it. So the core gets another one
when the instance changes its role, once no request is left (`pd_service.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chitu.grammars import GrammarStore
from chitu.instance.core import InstanceCore
from chitu.instance.image_pulls import ImagePulls
from chitu.instance.page_sums import FinishedPages
from chitu.instance.roles import DecodeRole, InstanceRole, PrefillRole
from chitu.kv_transfer.alone import NoPeers, PullingAlone
from chitu.kv_transfer.kv_manager import KVManager, TransferSide
from chitu.kv_transfer.pulling import EncodeReceiver, PullingSender
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.protocol import InstanceInfo


@dataclass(slots=True, frozen=True)
class Composition:
    role: InstanceRole
    transfer: KVManager[TransferSide]
    grammars: GrammarStore | None = None
    """Compiled grammars of a role that samples."""
    finished_pages: FinishedPages | None = None
    """Checksums of finished requests' pages; None on P, and if pages cannot be summed."""
    caches_prefixes: bool = True
    """Whether prefixes are cached; once they are not, they never are again in this process."""


Build = Callable[[InstanceCore, InstanceInfo], Composition]
"""Makes the composition of the role and incarnation that the info has: on the main thread at the start, on the step
thread when the instance changes its role. The engine of the core then samples if that role does."""


def build_prefill(core: InstanceCore, transfer: KVManager[PrefillSender]) -> Composition:
    """Compose P, which computes prompts and sends them, and has images encoded by E."""
    side = transfer.side
    _set_pulls(core, side.images if isinstance(side, PullingSender) else None)
    return Composition(PrefillRole(core, side), transfer)


def build_decode(core: InstanceCore, transfer: KVManager[DecodeReceiver]) -> Composition:
    """Compose D, which receives prompts and decodes them. If it may, it computes some itself."""
    _set_pulls(core, None)
    core.sequences.resources.images.store.drop_all()  # of the P that it was
    return Composition(DecodeRole(core, transfer.side), transfer)


def build_unified(core: InstanceCore, transfer: KVManager[NoPeers]) -> Composition:
    """Compose a unified instance, which has no peers but E."""
    side = transfer.side
    _set_pulls(core, side.images if isinstance(side, PullingAlone) else None)
    return Composition(DecodeRole(core), transfer)


def _set_pulls(core: InstanceCore, receiver: EncodeReceiver | None) -> None:
    """Have images encoded by the E that `receiver` reaches; None: here alone."""
    gate, settings = core.sequences.resources.images, core.settings
    gate.pulls = None
    if receiver is not None:
        most_rows, aux = settings.config.max_batched_tokens, receiver.aux
        place, deadlines = receiver.place, settings.deadlines
        gate.pulls = ImagePulls(receiver, aux, place, deadlines, most_rows, core.clock, core.weights)
