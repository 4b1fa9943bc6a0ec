"""What an instance process makes of one engine: the composition of each role that its memory can serve.

`Compositions` keeps what all of them share: pool, transports with their registered memory, and lanes to TP followers.
`build` is the service's `Build`: called on the main thread at the start, on the step thread at a change of role.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from chitu.clock import RealClock
from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, Topology
from chitu.config.staging import plan_staging
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.config.topology import Instance
from chitu.errors import ChituError
from chitu.instance.build import Composition, build_decode, build_prefill, build_unified
from chitu.instance.comm import CommLoop
from chitu.instance.core import InstanceCore, LoadedEngine
from chitu.instance.page_sums import FinishedPages
from chitu.kv_cache.checksum import optional_page_sums_of, page_sums_of
from chitu.kv_cache.state_sums import state_seals_of
from chitu.kv_transfer.alone import NoPeers, PullingAlone
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.kv_manager import (
    KVManager,
    manager_of_decode,
    manager_of_prefill,
    receiver_of_features,
)
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.pulling import READERS, EncodeReceiver, feature_config
from chitu.kv_transfer.ranks import FanOut
from chitu.kv_transfer.transports.transport import Transport
from chitu.net.threads import Waker
from chitu.protocol import InstanceInfo, RankMemory
from chitu.serve.factories import BuiltRank, Factories
from chitu.types import Role

if TYPE_CHECKING:
    from chitu.kv_cache.feature_pool import FeaturePool
    from chitu.kv_cache.pool import KVPool

logger = logging.getLogger(__name__)


class Compositions:
    def __init__(
        self,
        topology: Topology,
        instance: Instance,
        rank: BuiltRank,
        comm: CommLoop,
        engine: LoadedEngine,
        waker: Waker,
        fan_out: FanOut | None,
        followers: Sequence[RankMemory],
        features: Sequence[RankMemory],
        factories: Factories,
    ) -> None:
        """`instance`: as the process was started. `followers`: registered memory of TP ranks 1, 2, ...;
        `features`: their feature regions."""
        self._topology = topology
        self._instance = instance
        self._rank = rank
        self._comm = comm
        self._engine = engine
        self._waker = waker
        self._fan_out = fan_out
        self._followers = followers
        self._features = features
        self._factories = factories
        self._transports: list[Transport] = []
        self._feature_memory: OwnMemory | None = None

    def build(self, core: InstanceCore, info: InstanceInfo) -> Composition:
        samples = info.role is not Role.PREFILL
        grammars = self._rank.begin_sampling() if samples else None
        return replace(
            self._composed(core, info),
            grammars=grammars,
            finished_pages=self._finished_pages() if samples else None,
            # D gets whole recurrent states from P, and none of a prefix.
            caches_prefixes=not (self._rank.pool.layout.state and info.role is Role.DECODE),
        )

    def _composed(self, core: InstanceCore, info: InstanceInfo) -> Composition:
        """Compose the role with its transfer layer."""
        role = info.role
        pd = self._topology.dp_config.router.pd_disaggregation
        config = KVManagerConfig(
            engine_rank=info.engine_rank,
            incarnation=info.incarnation,
            host=info.host,
            control_port=self._comm.control_port,
            layout=self._rank.pool.layout,
            deadlines=pd.deadlines,
            transfer_threads=pd.transfer_threads,
            verify_kv=pd.verify_kv,
        )
        context = TransferContext(
            self._comm.send_peer, self._waker.wake, RealClock(), self._comm.tracer, self._comm.version_of
        )
        images = self._feature_receiver(config, role, context) if role in READERS else None
        if role is Role.UNIFIED:
            side = NoPeers() if images is None else PullingAlone(images)
            return build_unified(core, KVManager(side, self._fan_out, self._transports))
        memory = self._own_memory(role)
        if role is Role.PREFILL:  # its followers have memory too, but only E write to it, to feature regions
            return build_prefill(core, manager_of_prefill(config, memory, context, self._fan_out, images))
        return build_decode(core, manager_of_decode(config, memory, context, self._fan_out, self._followers))

    def _feature_receiver(self, config: KVManagerConfig, role: Role, context: TransferContext) -> EncodeReceiver | None:
        """Return what this role receives features with; None if it takes none from E."""
        features, own = self._rank.features, self._instance.config
        if features is None or not self._comm.image_port or len(self._features) != own.tp_size - 1:
            return None
        pd = self._topology.dp_config.router.pd_disaggregation
        try:
            if self._feature_memory is None:
                self._feature_memory = feature_memory(features, self._factories, pd, own)
            config = feature_config(config, features.layout, self._comm.image_port, role)
            return receiver_of_features(config, self._feature_memory, context, self._fan_out, self._features)
        except ChituError as error:
            logger.warning("features of images are computed here, not by E: %s", error.message)
            return None

    def _finished_pages(self) -> FinishedPages | None:
        pool = cast("KVPool", self._rank.pool)
        sums = optional_page_sums_of(pool, MAIN_RANK)
        return None if sums is None else FinishedPages(sums, self._engine.cache, pool.layout)

    def _own_memory(self, role: Role) -> OwnMemory:
        """Return the memory of the main rank, with the transports that could reach it. They are opened once."""
        router, config, pool = self._topology.dp_config.router, self._instance.config, self._rank.pool
        pd = router.pd_disaggregation
        if not self._transports:
            opened = self._factories.open_transports(pd, config.host, config.devices[MAIN_RANK])
            rank = self._instance.engine_rank
            self._transports = self._factories.wrap_transports(opened, router, role, rank, config, pool)
        # `verify_kv` reports why checksums are impossible; the hashes of trace records can be left out.
        sums_of = optional_page_sums_of if pd.verify_kv == "off" else page_sums_of
        kv_pool = cast("KVPool", pool)
        counts_copies = role is not Role.PREFILL
        sums = sums_of(kv_pool, MAIN_RANK, counts_copies)
        seals = state_seals_of(kv_pool, MAIN_RANK, counts_copies)
        return OwnMemory(pool, self._engine.aux, self._transports, sums, seals)


def feature_memory(
    pool: FeaturePool, factories: Factories, pd: PDDisaggregationConfig, config: InstanceConfig
) -> OwnMemory:
    """Return the feature region with transports of its own, on either side. Raises ConfigError if its rows cannot be
    verified, and what opening a transport raises."""
    transports = factories.open_transports(pd, config.host, config.devices[MAIN_RANK])
    sums, aux = page_sums_of(pool, MAIN_RANK), MetadataBuffers(pool.aux_rows, 4 * pool.layout.aux_numbers)
    return OwnMemory(pool, aux, transports, sums, None)


def roles_of(topology: Topology, instance: Instance, rank: BuiltRank) -> tuple[tuple[Role, ...], str]:
    """Return the roles that an instance can have, its own among them, and why not others."""
    found = tuple(_other_roles(topology, instance, rank))
    refused = {role: reason for role, reason in found if reason}
    possible = (instance.role, *(role for role, reason in found if not reason))
    return possible, "; ".join(f"not {role}: {reason}" for role, reason in refused.items())


def _other_roles(topology: Topology, instance: Instance, rank: BuiltRank) -> Iterator[tuple[Role, str]]:
    """Yield the roles other than its own, each with the reason why it cannot have it, or ""."""
    router, config, layout = topology.dp_config.router, instance.config, rank.pool.layout
    is_staged = any(plan_staging(router, role, config) for role in Role)
    is_shared = any(group.num_kv_heads < config.tp_size for group in layout.groups)
    for role in Role:
        if role is instance.role:
            continue
        if role is Role.ENCODE:
            yield role, "it is loaded with the vision tower alone, and has no pages"
        elif is_staged:
            yield role, "transfers are staged in segments that are granted by the ranks of the topology"
        elif config.tp_size > 1 and Role.UNIFIED in (role, instance.role):
            yield role, f"tp_size {config.tp_size}: followers of a unified instance have no part in transfers"
        elif config.tp_size > 1 and is_shared:
            yield role, f"tp_size {config.tp_size}: ranks have copies of KV heads, which P and D sum up differently"
        else:
            yield role, ""
