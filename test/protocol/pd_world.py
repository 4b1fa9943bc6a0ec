"""P and D joined in fake time, for single situations of a transfer: `World` joins nodes by a reliable network; `Pair`
is one P and one D. `cluster.py` runs whole processes under scripts of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pd_node import AUX_ROW_BYTES, NUM_AUX, NUM_PAGES, PAGE_BYTES, POISON, Kind, Node, mixed
from support.clock import FakeClock
from support.fake_transport import FakeFabric
from support.faults import FaultConfig

from chitu.kv_transfer.layout import VerifyKV
from chitu.kv_transfer.shard_writer import ShardWriter
from chitu.kv_transfer.transports.staged import StagedTransport, TransferWay
from chitu.kv_transfer.transports.transport import CopyList
from chitu.protocol import ClusterView, TransferStatus, peer_codec
from chitu.types import Role, new_room


@dataclass(frozen=True)
class Frame:
    port: int
    room: bytes
    payload: bytes


class World:
    """Nodes on a reliable network. `seed` decides the order of pages, chunks and threads. `verify_kv` None: chosen by
    the seed."""

    checks_in_steps = False
    """Whether D's steps check the rows that they draw from."""

    def __init__(
        self,
        seed: int,
        num_prefill: int = 1,
        num_decode: int = 1,
        verify_kv: VerifyKV | None = None,
        way: TransferWay = "direct",
        faults: FaultConfig | None = None,
        has_state: bool = False,
    ) -> None:
        self.way = way
        self.has_state = has_state
        self.num_prefill = num_prefill
        self.rng = random.Random(seed)
        self.clock = FakeClock(100.0)
        self.fabric = FakeFabric()
        self.max_batch_bytes = self.rng.choice([1, 4 * PAGE_BYTES, 1 << 20])
        modes: list[VerifyKV] = ["off", "sample", "all"]
        self.verify_kv = verify_kv or self.rng.choice(modes)
        self.segment_bytes = self.rng.choice([AUX_ROW_BYTES, 5 * 2 * PAGE_BYTES, 1 << 12]) if way != "direct" else 0
        self.gathers = way != "direct" and self.rng.random() < 0.5
        """Whether P's transport puts pieces into D's segments by itself."""
        self.fabric.on_land = self._check_landing
        self.faults = faults
        self.frames: list[Frame] = []
        self._incarnations = 0
        self._view_version = 0
        self._dead_pids: set[int] = set()
        self.nodes = [Node(self, Role.PREFILL, k) for k in range(num_prefill)]
        self.nodes += [Node(self, Role.DECODE, m) for m in range(num_decode)]
        self.buried: list[Node] = []

    def _check_landing(self, session: str, copies: CopyList) -> None:
        """Check that nothing but a segment is written if all writes are staged."""
        if self.way != "staged":
            return
        (node,) = (node for node in [*self.nodes, *self.buried] if node.session == session)
        area = node.memory.area
        assert area is not None
        for address, length in zip(copies.dst, copies.length, strict=True):
            assert area.base <= address and address + length <= area.base + area.nbytes, "a write beside the segments"

    # ------------------------------------------------------------------------------------------------------------ parts

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return mixed(self._incarnations)

    def is_pid_alive(self, pid: int) -> bool:
        return pid not in self._dead_pids

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        assert host == "h"
        self.frames.append(Frame(port, room, payload))

    def of(self, role: Role) -> list[Node]:
        return [node for node in self.nodes if node.role is role]

    # ---------------------------------------------------------------------------------------------------------- network

    def churn(self, turns: int) -> None:
        """Deliver some frames, and let transfer threads do some work."""
        for _ in range(turns):
            if self.frames:
                self.deliver_one()
            for node in self.of(Role.PREFILL):
                if not node.is_frozen and self.rng.random() < 0.5:
                    node.sender.queue.run_one()
            for node in self.of(Role.DECODE):
                if not node.is_frozen and self.rng.random() < 0.5:
                    node.verify_one()
                if self.way != "direct" and not node.is_frozen and self.rng.random() < 0.5:
                    node.scatter_one()

    def wait_turn(self) -> None:
        """Deliver frames and let D scatter while a transfer thread waits for its peer."""
        for _ in range(len(self.frames)):
            self.deliver_one()
        for node in self.of(Role.DECODE):
            if not node.is_frozen:
                node.scatter_one()

    def deliver_one(self) -> None:
        frame = self.frames.pop(0)
        for node in self.nodes:
            if node.port == frame.port:
                if node.is_frozen:
                    self.frames.append(frame)
                else:
                    node.kv.side.on_frame(frame.room, frame.payload)

    def publish_view(self) -> None:
        self._view_version += 1
        members = tuple(node.info for node in self.nodes if node.is_in_view and node.is_alive)
        view = ClusterView(1, self._view_version, members)
        for node in self.nodes:
            if not node.is_frozen:
                node.kv.side.on_view(view)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for node in self.nodes:
            if not node.is_frozen:
                node.kv.side.tick(self.clock.monotonic())
                node.poll()

    def restart(self, node: Node) -> Node:
        """Kill a node (kill -9) and start a new incarnation; its requests are lost."""
        self._dead_pids.add(node.pid)
        self.fabric.kill(node.session)
        self.nodes.remove(node)
        self.buried.append(node)
        fresh = Node(self, node.role, node.rank)
        self.nodes.append(fresh)
        return fresh

    def kill(self, node: Node) -> None:
        """Kill a node (kill -9) without a restart."""
        self._dead_pids.add(node.pid)
        self.fabric.kill(node.session)
        self.nodes.remove(node)
        self.buried.append(node)

    def settle_down(self, limit_s: float = 20.0) -> float:
        """End all faults and let every node run: every room must end. Return the fake seconds that this took."""
        self.fabric._faults.clear()
        for node in self.nodes:
            node.is_frozen, node.is_in_view = False, True
        self.publish_view()
        start_s = self.clock.monotonic()
        while self.clock.monotonic() - start_s < limit_s:
            for _ in range(1000):
                is_moving = any([n.sender.queue.run_one() for n in self.of(Role.PREFILL)])
                is_moving |= any([n.scatter_one() for n in self.of(Role.DECODE)])
                if not self.frames and not is_moving:
                    break
                if self.frames:
                    self.deliver_one()
            for node in self.of(Role.PREFILL):
                node.compute()
            while any(node.verify_one() for node in self.of(Role.DECODE)):
                pass
            self.fabric.release_late_writes()
            self.advance(0.1)
            if self.is_quiet():
                return self.clock.monotonic() - start_s
        raise AssertionError(f"not quiet after {limit_s} s: {self.leftovers()}")

    def is_quiet(self) -> bool:
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        left = []
        for node in self.nodes:
            role = node.kv.side
            left += [f"{node.session} {r.room.hex()[:6]} {r.seen}" for r in node.requests.values() if not r.is_over]
            if len(role.machine.table):
                left.append(f"{node.session} keeps {[entry.state for _, entry in role.machine.table.items()]}")
            if node.role is Role.PREFILL:
                left += [f"{node.session} keeps segments: {busy}" for busy in busy_segments(node)]
        return left

    def check_all_returned(self) -> None:
        for node in self.nodes:
            assert sorted(node.memory.free) == list(range(NUM_PAGES))
            assert node.memory.aux.num_free == NUM_AUX
            assert len(node.memory.free_states) == node.memory.num_state_slots
            assert (node.memory.states == POISON).all(), "a state row was written after it was given back"
            for page in node.memory.free:
                node.memory.check_poison(page)


def busy_segments(node: Node) -> list[str]:
    """Describe each segment that is not free, over all Ds that a P knows."""
    if not isinstance(node.transport, StagedTransport):
        return []
    busy: list[str] = []
    for peer in node.sender.decode_kv_args_table.values():
        assert peer.writer is None or isinstance(peer.writer, ShardWriter)
        for rank in peer.writer._ranks if isinstance(peer.writer, ShardWriter) else ():
            segments = rank.handle.segments  # type: ignore[attr-defined]
            if segments is not None:
                busy += ["doubtful"] * len(segments.doubtful) + ["given up"] * len(segments.given_up)
    return busy


class Pair:
    """One P and one D connected to each other, and one room of 10 tokens."""

    def __init__(
        self,
        seed: int = 1,
        verify_kv: VerifyKV = "off",
        way: TransferWay = "direct",
        faults: FaultConfig | None = None,
        has_state: bool = False,
    ) -> None:
        self.world = World(seed, verify_kv=verify_kv, way=way, faults=faults, has_state=has_state)
        self.p: Node = self.world.of(Role.PREFILL)[0]
        self.d: Node = self.world.of(Role.DECODE)[0]
        self.room = new_room()

    def join(self) -> Pair:
        self.world.publish_view()
        self.pump()
        return self

    def pump(self) -> None:
        """Deliver, write, scatter and verify everything that waits."""
        p, d = self.p, self.d
        while self.world.frames or p.sender.queue.run_one() or d.scatter_one() or d.verify_one():
            if self.world.frames:
                self.world.deliver_one()
        self.p.poll()
        self.d.poll()

    def both_halves(self, num_tokens: int = 10, needs_kv: bool = True, page_sums: bool = False) -> None:
        assert self.d.decode(self.room, num_tokens, self.p, needs_kv, page_sums)
        assert self.p.prefill(self.room, num_tokens, self.d)
        self.pump()

    def compute_all(self) -> None:
        while self.p.requests[self.room].computed < self.p.requests[self.room].num_tokens:
            self.p.compute()
        self.pump()

    def seen(self, node: Node) -> list[Kind]:
        return self.p.requests[self.room].seen if node is self.p else self.d.requests[self.room].seen

    def statuses(self) -> list[TransferStatus]:
        messages = [peer_codec.decode(f.payload) for f in self.world.frames if f.room == self.room]
        return [message for message in messages if isinstance(message, TransferStatus)]

    def error(self, node: Node) -> Exception:
        node.poll()
        error = node.requests[self.room].error
        assert error is not None
        return error
