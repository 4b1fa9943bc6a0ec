"""The parts of a `PDScheduler`, filled in by `pd_service.py`, a test or a benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import Executor
from chitu.errors import ChituError
from chitu.grammars import GrammarStore
from chitu.instance.page_sums import FinishedPages
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.tracing.tracer import Tracer
from chitu.types import Role


@dataclass(slots=True)
class PDSchedulerParts:
    """The parts of a `PDScheduler`. P has a sender, D a receiver, a unified instance neither."""

    config: SchedulerConfig
    deadlines: DeadlineConfig
    executor: Executor
    cache: PagedKVCacheManager
    tokens: TokenManager
    report_failure: Callable[[bytes, ChituError], None]
    """Reports to the router that P failed a room."""
    clock: Clock
    name: str = "this instance"
    """Name of the instance in errors."""
    request_timeout_s: float = math.inf
    aux: MetadataBuffers = field(default_factory=lambda: MetadataBuffers(np.zeros((0, 128), np.uint8), 64))
    """Aux slots; by default none, with which no logits can be handed over."""
    sender: PrefillSender | None = None
    receiver: DecodeReceiver | None = None
    tiers: PrefixTiers | None = None
    """Tiers behind the prefix cache of the instance."""
    grammars: GrammarStore | None = None
    """Compiled grammars for the executor's sampler; None if this instance does not support grammars."""
    finished_pages: FinishedPages | None = None
    """Checksums of finished requests' pages; None on P, and if pages cannot be summed."""
    tracer: Tracer | None = None
    """Tracer of requests; None in tests without one."""
    wake: Callable[[], None] = lambda: None
    """Wakes the step thread if it sleeps; called by any thread."""
    overlap: bool = False
    """Whether to launch a step before the tokens of the previous one are read."""

    @property
    def role(self) -> Role:
        if self.sender is not None:
            return Role.PREFILL
        return Role.UNIFIED if self.receiver is None else Role.DECODE
