"""Process entry of a fake instance: `chitu serve --fake prefill` starts it. Never used otherwise.

Sockets, threads, scheduler, transports and KV are real (`serve/scheduler.py`); the engine is the one of
`fake/checksum.py`, which computes no model: it needs the tokenizer and `config.json` of the model's folder, no weights
and no torch. Its model hash is `FAKE_MODEL`, so that it pairs with fakes alone, and the router says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chitu.config.schema import Topology
from chitu.config.staging import pool_bytes_of
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance
from chitu.engine.executor import ExecutorInfo
from chitu.engine.memory_budget import num_state_rows
from chitu.errors import ConfigError
from chitu.fake.checksum import ChecksumExecutor, ChecksumPool, Pace, checksum_layout
from chitu.kv_cache.aux_row import num_aux_rows
from chitu.kv_cache.state_row import StateRow
from chitu.models.config import read_model_spec
from chitu.net.threads import end_process
from chitu.process.progress import ProgressWriter
from chitu.serve.factories import Factories
from chitu.serve.scheduler import main
from chitu.types import FAKE_MODEL

if TYPE_CHECKING:
    from chitu.engine.rank_groups import RankGroup

logger = logging.getLogger(__name__)

NUM_PAGES = 1024
"""Pages of a fake's pool, if no key says how many."""


@dataclass(frozen=True, slots=True)
class FakeRank:
    """Implements `serve.factories.BuiltRank`."""

    pool: ChecksumPool
    runner: ChecksumExecutor
    members: RankGroup | None = None
    group: None = None
    grammars: None = None
    weights: None = None
    lane: None = None
    features: None = None

    def begin_sampling(self) -> None:
        """Do nothing: the executor samples in any role."""

    def report_blocks(self, report: Callable[[], None]) -> None:
        """Do nothing: there is no vision tower."""

    def prepare_thread(self) -> None:
        """Do nothing: there is no math library."""

    def weights_digest(self) -> bytes:
        """Return b"": there are no weights."""
        return b""


def build_fake_rank(
    topology: Topology,
    instance: Instance,
    progress: ProgressWriter,
    *,
    model_hash: str = FAKE_MODEL,
    has_state: bool = False,
    pace: Pace = Pace(),
    hold: Callable[[str], None] = lambda what: None,
    members: RankGroup | None = None,
) -> FakeRank:
    """Build the engine. `has_state`: whether its tokens depend on a recurrent state, too. `hold`: see the executor."""
    progress.state("loading")
    spec = read_model_spec(Path(topology.model.path), topology.model.max_model_len)
    num_slots = topology.scheduler.max_running_requests
    num_aux_slots = num_aux_rows(topology.cache.num_aux_slots, num_slots, instance.role)
    page_size = topology.cache.page_size
    layout = checksum_layout(page_size, spec.vocab_size, has_state=has_state, model_hash=model_hash)
    num_states = num_state_rows(topology.cache, instance.role, num_slots, StateRow.of(layout).row_bytes)
    num_pages = instance.config.num_pages or topology.cache.num_pages or NUM_PAGES
    transfer_bytes = pool_bytes_of(topology.dp_config.router, instance.role, instance.config)
    pool = ChecksumPool(layout, num_pages, num_aux_slots, transfer_bytes, num_states)
    max_len = min(spec.max_model_len, pool.num_pages * page_size)
    info = ExecutorInfo(num_slots, max_len, spec.vocab_size, layout.num_layers, spec.eos_token_ids)
    return FakeRank(pool, ChecksumExecutor(info, pool, pace, hold), members)


def _build(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> FakeRank:
    logger.warning("%s is FAKE: it computes no model, and its tokens mean nothing (chitu serve --fake)", instance.name)
    if tp_rank != MAIN_RANK or instance.config.num_devices > 1:
        raise ConfigError(f"{instance.key}: a fake instance has one rank")
    return build_fake_rank(topology, instance, progress)


if __name__ == "__main__":
    end_process(main(factories=Factories(_build)))
