"""The part of an instance that is the same in every role: its engine, its settings and its ways to the router.

`serve/scheduler.py`, a test or a benchmark fills it in. With one of the three roles of `roles.py` it makes a
`PDScheduler`, which alone uses the sequences here. Step thread only, except the inbox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import Clock, RealClock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import MAX_DRAFT, Executor, Lockstep, PromptLane, StepSizes
from chitu.engine.weights_loader import NoLoader, WeightsLoader
from chitu.errors import ChituError
from chitu.grammars import GrammarStore
from chitu.instance.adapters import AdapterTable
from chitu.instance.drafts import Drafts
from chitu.instance.image_source import ImageSource, NoImages
from chitu.instance.images import ImageGate
from chitu.instance.page_sums import FinishedPages
from chitu.instance.profiling import Profiling
from chitu.instance.scheduler_trace import SchedulerTrace
from chitu.instance.sequences import Inbox, Resources, Sequences
from chitu.instance.token_manager import TokenManager
from chitu.instance.weights import WeightsKeeper
from chitu.kv_cache.kv_events import KVEventFeed
from chitu.kv_cache.state_row import StateSlots
from chitu.kv_cache.tiers.prefix_tiers import NoTiers, PrefixTiers
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.protocol import FEATURE_MARK_BYTES
from chitu.tracing.tracer import Tracer


@dataclass(slots=True)
class LoadedEngine:
    """The executor with a loaded model, and the memory in which it computes."""

    executor: Executor
    cache: PagedKVCacheManager
    aux: MetadataBuffers = field(default_factory=lambda: MetadataBuffers(np.zeros((0, 128), np.uint8), 64))
    """Aux slots; by default none, with which no logits can be handed over."""
    tiers: PrefixTiers | NoTiers = field(default_factory=NoTiers)
    """Tiers behind the prefix cache."""
    states: StateSlots = field(default_factory=StateSlots)
    """State rows; none if the model has no recurrent state."""
    grammars: GrammarStore | None = None
    """Compiled grammars for the executor's sampler; None if this instance does not support grammars."""
    finished_pages: FinishedPages | None = None
    """Checksums of finished requests' pages; None on P, and if pages cannot be summed."""
    prepare_step_thread: Callable[[], None] = lambda: None
    """Called first on the step thread: per-thread settings of the math library."""
    weights: WeightsLoader = field(default_factory=NoLoader)
    """Changes the weights of the executor's model."""
    lockstep: Lockstep | None = None
    """The executor of a member of a group that shares experts; None if it steps alone."""
    lane: PromptLane | None = None
    """The executor, if a unified instance computes prompts beside its decode steps (`scheduler.lanes`)."""
    events: KVEventFeed | None = None
    """Publishes what enters and leaves the cache; None: nobody asks."""

    host_image_rows: int = 0
    """Rows of features that are kept in host memory (`cache.host_image_bytes`)."""

    report_blocks: Callable[[Callable[[], None]], None] = lambda report: None
    """Has a function called before each block of the vision tower is computed, within `launch`."""
    feature_mark: bytes = bytes(FEATURE_MARK_BYTES)
    """Mark of the weights that it makes features of images with at the start."""
    profiling: Profiling = field(default_factory=lambda: Profiling(None, None, 0, RealClock()))
    """Records what is computed when an operator asks (`POST /admin/profile`)."""

    @property
    def others(self) -> Sequence[StepSizes]:
        """What the other members of its group compute in the newest turn; nothing if it steps alone."""
        return () if self.lockstep is None else self.lockstep.others

    def close(self) -> None:
        """Free what the engine holds. No step runs any longer."""
        self.executor.close()
        if self.grammars is not None:
            self.grammars.close()


@dataclass(slots=True, frozen=True)
class SchedulerSettings:
    config: SchedulerConfig
    deadlines: DeadlineConfig
    name: str = "this instance"
    """Name of the instance in errors."""
    request_timeout_s: float = math.inf
    overlap: bool = False
    """Whether to launch a step before the tokens of the previous one are read."""
    tpot_s: float = math.inf
    """Longest step with prompt tokens beside requests that decode (`router.slo.tpot_s`); infinite: there is no bound,
    and D computes no prompts."""
    max_draft_tokens: int = 0
    """Most tokens of a draft; 0: there are none."""

    @property
    def computes(self) -> bool:
        """Whether D may compute prompts."""
        return self.tpot_s < math.inf


@dataclass(slots=True)
class InstanceCore:
    settings: SchedulerSettings
    engine: LoadedEngine
    tokens: TokenManager
    report_failure: Callable[[bytes, ChituError], None]
    """Reports to the router that P failed a room."""
    clock: Clock
    tracer: Tracer | None = None
    """Tracer of requests; None in tests without one."""
    image_source: ImageSource = field(default_factory=NoImages)
    inbox: Inbox = field(default_factory=Inbox)
    trace: SchedulerTrace = field(init=False)
    sequences: Sequences = field(init=False)
    weights: WeightsKeeper = field(init=False)
    drafts: Drafts = field(init=False)
    """The drafts of a role that decodes; tests replace them."""

    def __post_init__(self) -> None:
        self.trace = SchedulerTrace(self.tracer, self.engine.cache)
        engine, info = self.engine, self.engine.executor.info
        most = min(self.settings.max_draft_tokens, info.most_drafts)
        self.drafts = Drafts(most, max(info.num_slots, MAX_DRAFT + 1), info.vocab_size)
        most_rows, silence_s = self.settings.config.max_batched_tokens, self.settings.deadlines.transfer_s
        images = ImageGate(info, self.image_source, most_rows, silence_s, self.clock, engine.host_image_rows)
        resources = Resources(engine.cache, info.num_slots, engine.aux, engine.states, images)
        self.sequences = Sequences(resources, self.trace.end)
        adapters = AdapterTable(info.adapters)
        self.weights = WeightsKeeper(engine.weights, self.clock, feature_mark=engine.feature_mark, adapters=adapters)
