"""What a `PDScheduler` is composed of: `pd_service.py` fills it in, or a test or benchmark does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import Executor
from chitu.errors import ChituError
from chitu.grammars import GrammarStore
from chitu.instance.page_sums import FinishedPages
from chitu.instance.scheduling.resources import AuxSlots, NoAuxSlots
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.kv_transfer.events import DecodeReceiverLike, PrefillSenderLike
from chitu.tracing.tracer import Tracer
from chitu.types import Role


@dataclass(slots=True)
class PDSchedulerParts:
    """P has a sender, D a receiver, a unified instance neither."""

    config: SchedulerConfig
    deadlines: DeadlineConfig
    executor: Executor
    cache: PagedKVCacheManager
    tokens: TokenManager
    report_failure: Callable[[bytes, ChituError], None]
    """Tells the router that P failed a room."""
    clock: Clock
    name: str = "this instance"
    """As its errors call it."""
    request_timeout_s: float = math.inf
    aux: AuxSlots = field(default_factory=NoAuxSlots)
    num_aux_slots: int = 0
    sender: PrefillSenderLike | None = None
    receiver: DecodeReceiverLike | None = None
    tiers: PrefixTiers | None = None
    """Behind the prefix cache, of P and unified instances."""
    grammars: GrammarStore | None = None
    """What the executor's sampler finds compiled grammars in; None where none can be followed."""
    finished_pages: FinishedPages | None = None
    """Not on P, and not where nobody can sum them up."""
    tracer: Tracer | None = None
    """What of its requests is traced; None in tests without."""
    wake: Callable[[], None] = lambda: None
    """Of the step thread, where it sleeps; any thread calls it."""
    overlap: bool = False
    """Launch a step before the tokens of the one before are read."""

    @property
    def role(self) -> Role:
        if self.sender is not None:
            return Role.PREFILL
        return Role.UNIFIED if self.receiver is None else Role.DECODE
