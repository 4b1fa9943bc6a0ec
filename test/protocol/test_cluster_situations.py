"""Single situations of the whole cluster: the minimal cases that the scripts of faults once found, and which process
learns of a death, when, and from which source."""

from __future__ import annotations

import msgspec
import pytest
from cluster import Op
from cluster_process import DEADLINES, Process
from cluster_world import CheckedRequest, ClusterWorld
from pd_node import AUX_ROW_BYTES, NUM_LAYERS, PAGE_BYTES
from support.fake_transport import Fault, FaultKind

from chitu.cache_manager import PagedKVCacheManager
from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.errors import Internal
from chitu.instance.sequences import SequenceState
from chitu.kv_cache.prefix_index import PageKeys
from chitu.kv_transfer.receiver import ReceiverState
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    KVArgsRegisterInfo,
    RegisterReply,
    StatusAck,
    TransferInfo,
    TransferStatus,
    encode,
    peer_codec,
)
from chitu.protocol.wire import Wire
from chitu.types import Role


def pair(
    num_prefill: int = 1, num_decode: int = 1, make: type[ClusterWorld] = ClusterWorld
) -> tuple[ClusterWorld, Process, Process]:
    world = make(num_prefill, num_decode)
    return world, world.of(Role.PREFILL)[0], world.of(Role.DECODE)[0]


def ask(
    world: ClusterWorld, num_tokens: int = 22, max_tokens: int = 8, lost: int = 0, prompt: list[int] | None = None
) -> CheckedRequest:
    asked = world.ask(0, num_tokens, max_tokens, lost, prompt)
    assert asked is not None
    return asked


def until(world: ClusterWorld, process: Process, state: SequenceState) -> None:
    for _ in range(300):
        if state in [sequence.state for sequence in process.sequences().values()]:
            return
        world.turns(1)
    raise AssertionError(f"{process.name} never came to {state.name}")


# -------------------------------------------------------------------------------------------- found by the scripts


def test_a_request_whose_announcement_failed_before_p_took_it_ends_on_p_too() -> None:
    """P's step thread was slow, D gave up, the status was not acknowledged yet: P once kept the request forever."""
    world = ClusterWorld(2, 2)
    world.play([Op("slow", 1), Op("ask", 1), Op("run", 1), Op("pass", 3), Op("lose", 2)])
    world.settle_down()
    world.check_it_still_serves()


@pytest.mark.parametrize("is_closing", [False, True], ids=["live", "closing"])
def test_a_request_that_comes_twice_is_one_request(is_closing: bool) -> None:
    """On D the second copy once announced a live room again, which ended the step thread; on P it hid the first."""
    world, p, d = pair()
    asked = ask(world)
    halves = list(world.orders)
    until(world, d, SequenceState.TRANSFER)
    if is_closing:
        p.is_frozen = True  # so D's pages stay where they are
        world.end(asked, "cancelled")
        until(world, d, SequenceState.CLOSING)
    world.orders.extend(halves)
    world.turns(2)
    assert len(d.sequences()) == 1
    world.settle_down()
    assert asked.end == ("cancelled" if is_closing else "finished")


# ------------------------------------------------------------------------------------------------- what a repeat heals


class Losing(ClusterWorld):
    """One P and one D on a network that loses the first message of one kind."""

    def __init__(self, kind: type) -> None:
        self._kind, self.has_lost = kind, False
        super().__init__(1, 1)

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        if not self.has_lost and isinstance(peer_codec.decode(payload), self._kind):
            self.has_lost = True
        else:
            super().link(host, port, room, payload)


@pytest.mark.parametrize("kind", [KVArgsRegisterInfo, RegisterReply, TransferInfo, AuxReady, TransferStatus, StatusAck])
def test_any_message_of_a_transfer_may_be_lost_and_costs_no_more_than_a_repeat(kind: type) -> None:
    world = Losing(kind)
    asked = ask(world)
    world.settle_down(2 * DEADLINES.retry_interval_s)
    assert world.has_lost and asked.end == "finished"


@pytest.mark.parametrize("kind", [AbortTransfer, AbortAck])
def test_an_abort_that_is_lost_either_way_frees_the_pages_after_a_repeat(kind: type) -> None:
    world = Losing(kind)
    (p,), (d,) = world.of(Role.PREFILL), world.of(Role.DECODE)
    asked = ask(world, lost=1)  # only D has the request, so P reports nothing by itself
    until(world, d, SequenceState.TRANSFER)
    world.turns(3)
    world.end(asked, "cancelled")
    world.settle_down(2 * DEADLINES.retry_interval_s)
    assert world.has_lost and not p.sequences() and d.cache.allocator.num_quarantined == 0


@pytest.mark.parametrize(
    "message", [TransferStatus(99, 4), TransferStatus(99, 0), AbortAck(99), AbortTransfer(99), AuxReady(99)]
)
def test_a_message_of_another_incarnation_than_the_rooms_own_changes_nothing_on_d(message: Wire) -> None:
    world, p, d = pair()
    asked = ask(world)
    until(world, d, SequenceState.TRANSFER)
    p.is_frozen = True
    state = d.kv.side.state(asked.room)  # type: ignore[union-attr]
    d.on_frame(asked.room, encode(message))
    d.step()
    assert d.kv.side.state(asked.room) is state is ReceiverState.WAITING  # type: ignore[union-attr]
    world.end(asked, "cancelled")
    world.turns(2)
    d.on_frame(asked.room, encode(message))
    d.step()
    assert d.cache.allocator.num_quarantined == 6
    world.settle_down()


@pytest.mark.parametrize("message", [StatusAck(99, 4), StatusAck(99, 0), AbortTransfer(99)])
def test_a_message_of_another_incarnation_than_the_rooms_own_changes_nothing_on_p(message: Wire) -> None:
    world, p, _ = pair(1, 2)
    asked = ask(world)
    until(world, p, SequenceState.INFLIGHT)
    other = world.of(Role.DECODE)[1].incarnation
    before = p.kv.side.state(asked.room)  # type: ignore[union-attr]
    p.on_frame(asked.room, encode(msgspec.structs.replace(message, incarnation=other)))
    assert p.kv.side.state(asked.room) is before  # type: ignore[union-attr]
    world.settle_down()
    assert asked.end == "finished"


# ------------------------------------------------------------------------------------------------ who learns of a death


@pytest.mark.parametrize("is_router_alive", [True, False], ids=["router", "no_router"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=str)
def test_a_killed_peer_is_known_at_once_on_the_same_machine_with_and_without_a_router(
    role: Role, is_router_alive: bool
) -> None:
    world, p, d = pair()
    ask(world)
    until(world, d, SequenceState.TRANSFER)
    until(world, p, SequenceState.COMPUTING)
    if not is_router_alive:
        world.op_router(0, 0)
    dead, other = (p, d) if role is Role.PREFILL else (d, p)
    world.kill(dead)
    world.turns(5)
    assert not other.sequences() and not len(other.table)
    other.check_empty()


def test_a_d_that_is_silent_while_the_router_is_away_costs_p_its_transfer_deadline_and_nothing_more() -> None:
    """P cannot tell a stopped D from a slow one; it still releases its own pages."""
    world, p, d = pair()
    ask(world)
    until(world, p, SequenceState.COMPUTING)
    world.op_router(0, 0)
    d.is_frozen = True
    p.write = lambda: False  # type: ignore[method-assign]  # as if the wire to D stood still
    world.turns(20)
    assert p.sequences()
    world.advance(DEADLINES.transfer_s)
    world.turns(2)
    assert not p.sequences(), "pages and aux slot are back"
    world.advance(DEADLINES.transfer_s)
    world.turns(1)
    p.check_empty()


def test_the_pages_of_a_frozen_p_stay_quarantined_until_it_runs_again_or_is_dead() -> None:
    world, p, d = pair()
    ask(world)
    until(world, d, SequenceState.TRANSFER)
    p.is_frozen = True
    for _ in range(100):
        world.turns(1)
        world.advance(1.0)
    assert [s.state for s in d.sequences().values()] == [SequenceState.CLOSING]
    assert d.cache.allocator.num_quarantined == 6
    world.kill(p)
    world.turns(5)
    assert d.cache.allocator.num_quarantined == 0
    d.check_empty()


def test_a_new_incarnation_of_p_frees_what_the_old_one_held_on_another_machine() -> None:
    """A pid on another machine cannot be checked, so only the successor shows that the old incarnation is dead."""
    world = ClusterWorld(2, 1)
    old, d = world.of(Role.PREFILL)[1], world.of(Role.DECODE)[0]
    world.ask(1, 22, 8)
    until(world, d, SequenceState.TRANSFER)
    world.kill(old)
    for _ in range(50):
        world.turns(1)
        world.advance(1.0)
    assert d.cache.allocator.num_quarantined == 6
    world.start(0)
    world.settle_down()
    world.check_it_still_serves()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_what_p_held_on_another_machine_is_free_when_its_launcher_says_that_it_is_dead(is_killed: bool) -> None:
    world = ClusterWorld(2, 1)
    p, d = world.of(Role.PREFILL)[1], world.of(Role.DECODE)[0]
    world.ask(1, 22, 8)
    until(world, d, SequenceState.TRANSFER)
    if is_killed:
        world.kill(p)
    else:
        p.is_frozen = True
    world.turns(5)
    world.advance(DEADLINES.lease_s + 1.0)
    world.turns(5)
    assert d.cache.allocator.num_quarantined == 6, "silence proves nothing"
    world.play([Op("tell")])
    world.turns(5)
    assert d.cache.allocator.num_quarantined == (0 if is_killed else 6)
    world.settle_down()
    world.check_it_still_serves()


def test_a_write_that_may_still_land_keeps_the_source_pages_too() -> None:
    world, p, d = pair()
    world.fabric.inject(Fault(FaultKind.LATE))
    asked = ask(world)
    until(world, p, SequenceState.CLOSING)
    for _ in range(50):
        world.turns(1)
        world.advance(1.0)
    assert asked.end == "transfer_failed"
    assert [s.state for s in p.sequences().values()] == [SequenceState.CLOSING]
    assert len(p.cache.get_page_indices(asked.room)) == 6 and d.cache.allocator.num_quarantined == 6
    assert world.fabric.release_late_writes() == 1
    world.settle_down()


def test_requests_of_a_router_that_was_replaced_end_on_both_sides_and_the_new_one_serves() -> None:
    world, p, d = pair()
    ask(world, max_tokens=30)
    until(world, d, SequenceState.RUNNING)
    ask(world, max_tokens=30)
    world.op_router(0, 0)
    world.turns(3)
    world.op_router(0, 0)
    world.turns(6)
    assert not p.sequences() and not d.sequences()
    asked = ask(world)
    world.settle_down(3.0)
    assert asked.end == "finished"


@pytest.mark.parametrize("lost", [1, 2], ids=["P's half", "D's half"])
def test_a_half_that_never_came_ends_the_other_within_its_deadline(lost: int) -> None:
    world, *_ = pair()
    asked = ask(world, lost=lost)
    world.settle_down(DEADLINES.queue_s + DEADLINES.bootstrap_s + DEADLINES.transfer_s + DEADLINES.transfer_s)
    assert asked.end == ("transfer_timeout" if lost == 1 else "bootstrap_timeout")
    assert " waited " in asked.message and (" in REQUESTED for D0's" in asked.message or "P0" in asked.message)


def test_cached_pages_leave_before_the_rest_of_the_prompt_is_computed() -> None:
    world, prefill, decode = pair()
    sender, execute = prefill.kv.side, prefill.executor.execute
    assert sender is not None
    moved: list[int] = []

    def behind_a_fast_transfer_thread(plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        while prefill.write():
            pass
        if plan.prefill:
            moved.append(sender.machine.bytes_moved)
        return execute(plan, on_layer)

    world._num_rooms = 4
    ask(world)
    world.settle_down()
    decode.scheduler.flush_cache()
    prefill.executor.execute = behind_a_fast_transfer_thread  # type: ignore[method-assign]
    world._num_rooms = 10  # their prompts share 15 tokens
    ask(world)
    prefill.is_slow = True
    world.turns(5)  # D's announcement arrives before the first chunk
    prefill.is_slow = False
    world.settle_down()
    bytes_per_page = 2 * NUM_LAYERS * PAGE_BYTES
    whole = 6 * bytes_per_page + AUX_ROW_BYTES
    assert moved[0] == whole + 3 * bytes_per_page
    assert sender.machine.bytes_moved == 2 * whole
    assert prefill.scheduler.load.cached_tokens == 12
    world.check_it_still_serves()


# ------------------------------------------------------------------------------------------- what D has of a prompt


def page_bytes(num_pages: int) -> int:
    return num_pages * 2 * NUM_LAYERS * PAGE_BYTES


@pytest.mark.parametrize("is_flushed", [False, True])
def test_d_caches_nothing_of_a_prompt_during_which_p_flushed_its_cache(is_flushed: bool) -> None:
    world, p, d = pair()
    asked = ask(world)
    until(world, p, SequenceState.COMPUTING)
    if is_flushed:
        p.scheduler.flush_cache()
    world.settle_down()
    assert (asked.end, d.scheduler.load.pages_cached) == ("finished", 0 if is_flushed else 7)
    world.check_it_still_serves()


def test_the_next_turn_moves_its_new_pages_and_the_row() -> None:
    world, _, d = pair()
    first = ask(world)
    world.settle_down()
    assert d.scheduler.load.bytes_moved == page_bytes(6) + AUX_ROW_BYTES
    turn = ask(world, prompt=[*first.prompt, *first.expected, 5, 6, 7])  # 33 tokens; K and V of 29 are on D: 7 pages
    world.settle_down()
    assert turn.end == "finished"
    load = d.scheduler.load
    assert load.bytes_moved == page_bytes(6 + 2) + 2 * AUX_ROW_BYTES
    assert (load.bytes_saved, load.cached_tokens) == (page_bytes(7), 28)


@pytest.mark.parametrize("event", ["P is replaced", "D is replaced", "the transfer fails", "cancelled"])
def test_what_d_has_outlives_whatever_ends_a_request_that_uses_it(event: str) -> None:
    """D's pages survive every event except D's own death. The same prompt is sent again, as the router does."""
    world, p, d = pair()
    first = ask(world)
    world.settle_down()
    prompt = [*first.prompt, *first.expected, 5, 6, 7]
    interrupted = ask(world, prompt=prompt)
    until(world, d, SequenceState.TRANSFER)
    if event == "the transfer fails":
        world.fabric.inject(Fault(FaultKind.DROP))
    elif event == "cancelled":
        world.end(interrupted, "cancelled")
    else:
        world.kill(p if event.startswith("P") else d)
        world.start(0)
    for _ in range(300):
        if not interrupted.end:
            world.turns(1)
    world.settle_down()
    assert interrupted.end not in ("", "finished")
    again = ask(world, prompt=prompt)
    world.settle_down()
    assert again.end == "finished"
    (d,) = world.of(Role.DECODE)
    assert d.scheduler.load.cached_tokens == (0 if event.startswith("D") else 2 * 28)


class EarlyUnpin(PagedKVCacheManager):
    """Cache manager that unpins the prefix of a room at once."""

    def begin(self, room: bytes, keys: PageKeys | None, prompt: bytes, to_compute: int = 1) -> int:
        cached_tokens = super().begin(room, keys, prompt, to_compute)
        found = self._rooms.get(room)
        if found is not None and to_compute == 0:
            idle, _ = self._index.unpin(found.pinned)
            found.pinned.clear()
            self.allocator.cache(idle)
        return cached_tokens


class Pinning(Process):
    """A process whose pages are not counted: only the bytes are compared."""

    def check(self) -> None: ...


class EarlyUnpinning(Pinning):
    cache_type = EarlyUnpin


class PinningWorld(ClusterWorld):
    process_type = Pinning


class EarlyUnpinningWorld(ClusterWorld):
    process_type = EarlyUnpinning


@pytest.mark.parametrize("planted", [PinningWorld, EarlyUnpinningWorld])
def test_a_pin_that_is_let_go_too_early_would_be_noticed(planted: type[ClusterWorld]) -> None:
    """Between announcement and end other requests need every available page; P is slow meanwhile."""
    world, p, d = pair(make=planted)
    first = ask(world)
    world.settle_down()
    p.is_frozen = True
    ask(world, prompt=[*first.prompt, 5, 6, 7])
    until(world, d, SequenceState.TRANSFER)
    ask(world, num_tokens=22, max_tokens=42)
    ask(world, num_tokens=22, max_tokens=42)
    world.turns(3)
    p.is_frozen = False
    if planted is PinningWorld:
        world.settle_down()
    else:
        with pytest.raises(
            (AssertionError, Internal), match=r"KV of another request|in the prefix index already|that are not in use"
        ):
            world.settle_down()


def test_the_next_life_on_another_machine_frees_ds_pages_though_the_router_ended_before_d_saw_it() -> None:
    world = ClusterWorld(2, 1)
    p, d = world.of(Role.PREFILL)[1], world.of(Role.DECODE)[0]
    world.ask(1, 22, 8)
    until(world, d, SequenceState.TRANSFER)
    world.kill(p)
    d.is_deaf = True
    world.start(0)
    world.turns(5)
    world.play([Op("router"), Op("router")])
    d.is_deaf = False
    world.turns(5)
    assert world.told_dead == () and d.cache.allocator.num_quarantined == 0
    world.settle_down()
    world.check_it_still_serves()
