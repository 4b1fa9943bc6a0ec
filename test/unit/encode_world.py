"""Instances of role E around one that sees: `image_world` over the fake transport, where a test pumps all threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from image_world import SEEING, Seeing
from scheduler_world import Folders
from support.clock import FakeClock
from support.fake_transport import FakeFabric, FakePeer, FakeTransport
from support.images import PumpedSource, feature

from chitu.config.schema import DeadlineConfig
from chitu.engine.executor import EncodeImage, ExecutorInfo
from chitu.instance.encoding import EncodeScheduler
from chitu.instance.image_pulls import ImagePulls
from chitu.instance.images import FeatureStore
from chitu.instance.weights import WeightsKeeper
from chitu.kv_cache.checksum import page_sums_of
from chitu.kv_cache.feature_pool import FeaturePool, feature_layout
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.kv_manager import manager_of_encode, receiver_of_features
from chitu.kv_transfer.layout import MetadataBuffers, rank_memory
from chitu.kv_transfer.pulling import feature_config
from chitu.kv_transfer.ranks import FanOut, ShardFollower
from chitu.kv_transfer.transports.local import register_memory
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle
from chitu.net.threads import Waker
from chitu.protocol import ClusterView, InstanceInfo, LostInstance, unpack_i32
from chitu.protocol.weights import Weights, WeightsOrder
from chitu.types import Role

LAYOUT = feature_layout("m", 2, "float32")
ROW_BYTES = LAYOUT.bytes_per_page
DEADLINES = DeadlineConfig()
P_PORT, E_PORT = 1000, 2000


class BendingTransport(FakeTransport):
    """Writes as `bend` says: to plant a fault of a transport."""

    bend: Callable[[CopyList], CopyList] | None = None

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        assert isinstance(peer, FakePeer)
        super().write(peer, self.bend(copies) if self.bend is not None else copies, timeout_s)


class ToyTower:
    """Writes what `support.images` takes for features. Implements `FeatureMaker`."""

    weights = 0
    """As of an executor: features depend on them."""

    def __init__(self, pool: FeaturePool) -> None:
        self._pool = pool
        self.encoded: list[bytes] = []
        self.bad: set[bytes] = set()
        self.num_blocks = 0
        self.on_block: Callable[[], None] = lambda: None
        """Called after each of so many blocks of an image: the time that it takes."""

    def encode(self, images: Sequence[EncodeImage]) -> None:
        for image in images:
            if bytes.fromhex(image.patches) in self.bad:
                raise ValueError("no such patches")
        for _ in range(self.num_blocks * len(images)):
            self.on_block()
        for image in images:
            key, rows = bytes.fromhex(image.patches), unpack_i32(image.rows)
            region_of(self._pool)[rows] = [feature(key, row, self.weights) for row in range(len(rows))]
            self.encoded.append(key)

    @property
    def mark(self) -> bytes:
        return self.weights.to_bytes(8, "big")

    def name_row(self, slot: int, key: bytes, mark: bytes) -> None:
        self._pool.name_row(slot, key, mark)


def region_of(pool: FeaturePool) -> np.ndarray:
    """Return the first number of each row, as bits."""
    numbers: np.ndarray = pool.features.view(torch.int32).numpy().view(np.uint32)[:, 0]
    return numbers


class ToyEncoder:
    """An E without threads."""

    def __init__(self, world: EncodeWorld, rank: int, num_rows: int = 64, most_rows: int = 16) -> None:
        self.rank, self.incarnation, self.port = rank, 100 + rank, E_PORT + rank
        self.pool = FeaturePool(LAYOUT, num_rows, num_aux_slots=4)
        self.transport = BendingTransport(world.fabric, f"E{rank}")
        memory, config, context = world.ends(self.pool, self.transport, rank, self.incarnation, self.port)
        self.manager = manager_of_encode(config, memory, context)
        self.sender = self.manager.side
        self.tower, self.source, self.store = ToyTower(self.pool), PumpedSource(), FeatureStore(num_rows)
        self.scheduler = EncodeScheduler(
            self.sender,
            self.source,
            self.tower,
            self.store,
            memory.aux,
            most_rows,
            Waker(),
            WeightsKeeper(Folders(self.tower), world.clock),
            world.clock,
        )
        self.sender.on_order = self.scheduler.put_order
        self.is_deaf = self.is_slow = self.is_dead = False
        self.is_busy = False
        """Whether its step thread is in a step, while other threads go on."""

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(
            Role.ENCODE,
            self.rank,
            self.incarnation,
            "127.0.0.1",
            1,
            self.port,
            LAYOUT,
            64,
            ways=("fake",),
            weights=self.scheduler.weights.serves,
        )

    def change_weights(self, number: int) -> None:
        """Have it serve those of the folder of this number."""
        weights = Weights(number, str(number), str(number), is_mixed=True)
        self.scheduler.weights.set_order(WeightsOrder(weights))
        self.scheduler.step()

    def turn(self, now_s: float) -> None:
        if self.is_dead:
            return
        self.sender.tick(now_s)
        if not self.is_busy:
            self._step()
        while self.sender.queue.run_one():
            pass

    def _step(self) -> None:
        if not self.is_slow:
            self.source.prepare()
        self.is_busy = True
        self.scheduler.step()
        self.is_busy = False


class FeatureRank:
    """Rank 1 of the P: its feature region, and the thread that sums it up."""

    def __init__(self, fabric: FakeFabric, image_rows: int) -> None:
        layout = msgspec.structs.replace(LAYOUT, tp_size=2)
        self.pool = FeaturePool(layout, image_rows, num_aux_slots=8)
        self.fan_out = FanOut(1, 0)
        sums = page_sums_of(self.pool, 1)
        lanes = self.fan_out.base, self.fan_out.num_lanes
        self._follower = ShardFollower(layout, 1, self.pool, [], *lanes, feature_sums=sums)
        self._follower.start(lambda name, target: threading.Thread(target=target, name=name))
        self.fan_out.wait_connected()
        self.memory = rank_memory(self.pool, 1, register_memory(self.pool, [BendingTransport(fabric, "P.1")]))

    def close(self) -> None:
        self.fan_out.close()
        self._follower.close()


class EncodeWorld:
    def __init__(
        self, num_encoders: int = 2, image_rows: int = 128, has_ranks: bool = False, overlap: bool = False, **kw: int
    ) -> None:
        """`has_ranks`: the P has two TP ranks; close the second one (`rank`)."""
        self.fabric, self.clock = FakeFabric(), FakeClock()
        self._frames: deque[tuple[int, bytes, bytes]] = deque()
        info: ExecutorInfo = msgspec.structs.replace(SEEING, image_rows=image_rows)
        self.p = Seeing(info=info, clock=self.clock, overlap=overlap)
        self.layout = msgspec.structs.replace(LAYOUT, tp_size=2) if has_ranks else LAYOUT
        self.pool = FeaturePool(self.layout, image_rows, num_aux_slots=8)
        self.p.executor.region = region_of(self.pool)
        memory, config, context = self.ends(self.pool, BendingTransport(self.fabric, "P"), 0, 1, P_PORT)
        self.rank = FeatureRank(self.fabric, image_rows) if has_ranks else None
        ranks = (self.rank.fan_out, [self.rank.memory]) if self.rank is not None else (None, [])
        self.receiver = receiver_of_features(config, memory, context, *ranks)
        self.pulls = ImagePulls(self.receiver, memory.aux, (0, 1), DEADLINES, 16, self.clock, self.p.scheduler.weights)
        self.p.gate.pulls = self.pulls
        self.encoders = [ToyEncoder(self, rank, **kw) for rank in range(num_encoders)]
        self._version = 0
        self.show()

    def ends(
        self, pool: FeaturePool, transport: FakeTransport, rank: int, incarnation: int, port: int
    ) -> tuple[OwnMemory, KVManagerConfig, TransferContext]:
        aux = MetadataBuffers(pool.aux_rows, 4 * LAYOUT.aux_numbers)
        memory = OwnMemory(pool, aux, [transport], page_sums_of(pool, 0))
        base = KVManagerConfig(rank, incarnation, "127.0.0.1", port, pool.layout, DEADLINES)
        context = TransferContext(self._send, lambda: None, self.clock, is_pid_alive=lambda pid: True)
        return memory, feature_config(base, pool.layout, port), context

    def _send(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        self._frames.append((port, room, payload))

    def show(self, *dead: ToyEncoder) -> None:
        """Have all see the cluster as it is. `dead` are known to have ended."""
        self._version += 1
        p = InstanceInfo(Role.PREFILL, 0, 1, "127.0.0.1", 1, 0, LAYOUT, 64, image_port=P_PORT)
        here = tuple(each.info for each in self.encoders if not each.is_dead)
        gone = tuple(each.incarnation for each in dead)
        lost = tuple(LostInstance(each, "killed", True) for each in gone)
        view = ClusterView(1, self._version, (p, *here), dead=gone, lost=lost)
        self.receiver.on_view(view)
        for each in self.encoders:
            each.sender.on_view(view)
        for _ in range(3):  # until all have registered
            self.turn()

    def turn(self) -> None:
        now_s = self.clock.monotonic()
        self.receiver.tick(now_s)
        for each in self.encoders:
            each.turn(now_s)
        self.p.step()
        verifier = self.receiver.verifier
        assert verifier is not None
        while verifier.run_one():
            pass
        for _ in range(len(self._frames)):
            port, room, payload = self._frames.popleft()
            if port == P_PORT:
                self.receiver.on_frame(room, payload)
                continue
            encoder = self.encoders[port - E_PORT]
            if not (encoder.is_dead or encoder.is_deaf):
                encoder.sender.on_frame(room, payload)

    def run(self, limit: int = 500, step_s: float = 0.0, lends: bool = False) -> None:
        """Turn until P is idle; each turn takes `step_s`. With `lends` an E may have rows of it still."""
        for _ in range(limit):
            self.turn()
            self.clock.advance(step_s)
            if self.p.scheduler.is_idle or (
                lends and self.p.scheduler.is_done and not len(self.p.scheduler._sequences)
            ):
                return
        raise AssertionError(f"still busy after {limit} turns: {self.p.scheduler.load}")

    def check_empty(self) -> None:
        self.p.check_empty()
        assert not len(self.pulls) and self.pulls._aux.num_free == 8
        for each in self.encoders:
            if not each.is_dead:
                for _ in range(5):
                    self.turn()
                assert each.scheduler.is_idle and not each.store.num_pinned and not each.source.open
