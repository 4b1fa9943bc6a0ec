"""Factories of a scheduler process's engine and transports: the real ones, or those of a test or benchmark.

`serve/scheduler.py` calls them on its main thread; `support/checksum_scheduler.py` passes its own. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig, Topology
from chitu.config.topology import Instance
from chitu.engine.executor import Executor, PromptLane
from chitu.grammars import GrammarStore
from chitu.instance.encoding import FeatureMaker
from chitu.kv_transfer.transports.local import RankPool, open_transports, wrap_transports
from chitu.kv_transfer.transports.transport import Transport
from chitu.process.progress import ProgressWriter
from chitu.types import Role

if TYPE_CHECKING:
    from chitu.engine.rank_groups import RankGroup
    from chitu.engine.weights import RankWeights
    from chitu.kv_cache.feature_pool import FeaturePool


class BuiltRank(Protocol):
    """The part of the result of `engine.build.build_rank` that an instance needs."""

    @property
    def group(self) -> RankGroup | None: ...
    @property
    def members(self) -> RankGroup | None: ...
    @property
    def pool(self) -> RankPool: ...
    @property
    def runner(self) -> Executor: ...
    @property
    def lane(self) -> PromptLane | None: ...
    @property
    def grammars(self) -> GrammarStore | None: ...
    def begin_sampling(self) -> GrammarStore | None: ...
    def report_blocks(self, report: Callable[[], None], /) -> None: ...
    def prepare_thread(self) -> None: ...
    def weights_digest(self) -> bytes: ...
    @property
    def weights(self) -> RankWeights | None: ...
    @property
    def features(self) -> FeaturePool | None: ...


class BuiltEncoder(FeatureMaker, Protocol):
    """The part of the result of `engine.encoder.build_encoder` that an E needs."""

    @property
    def pool(self) -> FeaturePool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def weights(self) -> RankWeights | None: ...
    def prepare_thread(self) -> None: ...
    def report_blocks(self, report: Callable[[], None]) -> None: ...


def build_real_rank(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> BuiltRank:
    """Build the rank. Imports torch only now, after the configuration has been checked."""
    from chitu.engine.build import build_rank
    from chitu.instance.neighbours import pieces_of

    return build_rank(topology, instance, tp_rank, progress, pieces_of(topology, instance))


def build_real_encoder(topology: Topology, instance: Instance, progress: ProgressWriter) -> BuiltEncoder:
    """Build what an E computes with. Imports torch only now."""
    from chitu.engine.encoder import build_encoder
    from chitu.instance.neighbours import pieces_of

    return build_encoder(topology, instance, progress, pieces_of(topology, instance))


@dataclass(frozen=True, slots=True)
class Factories:
    build_rank: Callable[[Topology, Instance, int, ProgressWriter], BuiltRank] = build_real_rank
    open_transports: Callable[[PDDisaggregationConfig, str, str], list[Transport]] = open_transports
    wrap_transports: Callable[
        [Sequence[Transport], RouterConfig, Role, int, InstanceConfig, RankPool], list[Transport]
    ] = wrap_transports
    build_encoder: Callable[[Topology, Instance, ProgressWriter], BuiltEncoder] = build_real_encoder
