"""Process entry of P and D with the checksum engine, whose pools count as device memory: the only way between them is
`shm` by segments in D's host memory, with twins of driver and copies (`pin_twin.py`). `python -m pinned_scheduler`"""

from __future__ import annotations

from collections.abc import Sequence

from pin_twin import DeviceBlocks, SecondMappings
from support.checksum_scheduler import build_checksum_rank

from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig, Topology
from chitu.config.staging import staging_prefills
from chitu.config.topology import Instance
from chitu.fake.checksum import ChecksumPool
from chitu.kv_transfer.transports.local import RankPool
from chitu.kv_transfer.transports.segments import DeviceCopier, HostArena, Scatterer, StagingArea
from chitu.kv_transfer.transports.shm import PinnedShmTransport
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd
from chitu.kv_transfer.transports.transport import Transport
from chitu.net.threads import end_process
from chitu.process.progress import ProgressWriter
from chitu.serve.factories import Factories
from chitu.serve.fake_scheduler import FakeRank
from chitu.serve.scheduler import main
from chitu.types import Role


class Card:
    """Device of this process: created with the pool, then asked for its transport and its segments."""

    pool: ChecksumPool
    driver: SecondMappings

    def build_rank(self, topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> FakeRank:
        rank = build_checksum_rank(topology, instance, tp_rank, progress)
        self.pool, self.driver = rank.pool, SecondMappings(rank.pool)
        return rank

    def wrap_transports(
        self,
        transports: Sequence[Transport],
        router: RouterConfig,
        role: Role,
        engine_rank: int,
        instance: InstanceConfig,
        pool: RankPool,
    ) -> list[Transport]:
        """Wrap like `local.py` for GPUs and `transport: shm`."""
        pd, blocks = router.pd_disaggregation, DeviceBlocks(self.driver)
        if role is Role.PREFILL:
            end = StagingEnd(pd.transfer, pool, DeviceCopier(blocks), None, engine_rank)
            return [StagedTransport(transport, end) for transport in transports]
        size = pd.staging_segment_mb << 20
        count = pd.staging_mb // pd.staging_segment_mb
        arena = HostArena(count * size, self.driver)
        area = StagingArea(arena.base, size, count, arena.base, arena.nbytes)
        copier = DeviceCopier(blocks, [arena])
        scatterer = Scatterer(pool, area, copier, staging_prefills(router))
        end = StagingEnd(pd.transfer, pool, copier, area, engine_rank, scatterer, arena)
        return [StagedTransport(transport, end) for transport in transports]

    def open_transports(self, config: PDDisaggregationConfig, host: str, device: str) -> list[Transport]:
        return [PinnedShmTransport(self.driver, DeviceBlocks(self.driver))]


if __name__ == "__main__":
    card = Card()
    end_process(main(factories=Factories(card.build_rank, card.open_transports, card.wrap_transports)))
