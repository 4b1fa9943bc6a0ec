"""Admission predicts the wait from reports, from what was sent and from a clock. It rejects nothing that has room."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import RecordingOutbox
from support.clock import FakeClock
from test_router_requests import World

from chitu.config.schema import AdmissionConfig, DeadlineConfig, PDDisaggregationConfig, RouterConfig, SLOConfig
from chitu.errors import Overloaded
from chitu.net.http import error_headers
from chitu.protocol import ClusterView, Heartbeat, InstanceInfo, KVLayout, LinkAck, LoadReport, SamplingParams, pack_i32
from chitu.router.admission import Admission
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.generation import GenerateRequest
from chitu.router.loads import PRIOR, InstanceLoad
from chitu.router.members import Members
from chitu.types import Role

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)
P0, P1, D0 = (
    InstanceInfo(role, rank, 1, "127.0.0.1", 1, 2, LAYOUT, 512)
    for role, rank in ((Role.PREFILL, 0), (Role.PREFILL, 1), (Role.DECODE, 0))
)
FRESH = InstanceInfo(Role.PREFILL, 2, 7, "127.0.0.1", 1, 2, LAYOUT, 512)


class Door:
    """An admission over some instances, and the running counters of their reports."""

    def __init__(self, *instances: InstanceInfo, max_queue_s: float | None = 10.0, queue_s: float = 600.0) -> None:
        deadlines = DeadlineConfig(queue_s=queue_s, transfer_s=600.0)
        config = RouterConfig(
            admission=AdmissionConfig(max_queue_s=max_queue_s),
            pd_disaggregation=PDDisaggregationConfig(deadlines=deadlines),
        )
        self.clock = FakeClock(100.0)
        self.members = Members(config, RecordingOutbox())
        self.admission = Admission(config, self.members, self.clock)
        self.on_view(instances)
        self._seconds: dict[InstanceKey, float] = {}
        self._work: dict[InstanceKey, int] = {}

    def on_view(self, instances: tuple[InstanceInfo, ...]) -> None:
        for instance in instances:
            self.members.add(instance)
            self.on_report(instance_key(instance), LoadReport())  # as an instance does when it joins
        self.members.on_view(ClusterView(1, 1, instances))

    def on_report(self, key: InstanceKey, load: LoadReport) -> None:
        self.members.on_report(self.members[key], load, self.clock.monotonic())

    def on_sent(self, instance: InstanceInfo, new_tokens: int) -> None:
        self.members[instance_key(instance)].load.on_sent(new_tokens, self.clock.monotonic())

    def on_began(self, instance: InstanceInfo, new_tokens: int) -> None:
        """Count the first token of a request that was sent."""
        self.members[instance_key(instance)].load.on_begun(new_tokens)

    def report(
        self, instance: InstanceInfo, queue: int, seconds: float = 0.0, work: int = 0, running: int = 0, unread: int = 0
    ) -> None:
        """Report a queue of this length, `seconds` more of backlog and `work` done in them."""
        key = instance_key(instance)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._work[key] = self._work.get(key, 0) + work
        is_decode = instance.role is Role.DECODE
        load = LoadReport(
            waiting=queue if is_decode else 1,
            waiting_tokens=0 if is_decode else queue,
            running=running,
            unread=unread,
            backlog_s=self._seconds[key],
            backlog_work=self._work[key],
        )
        self.on_report(key, load)
        self.clock.advance(0.03)  # past the moment for which an answer is kept

    def refusal(self) -> Overloaded | None:
        try:
            self.admission.require()
        except Overloaded as error:
            return error
        return None


def test_without_a_measured_rate_everything_is_admitted() -> None:
    door = Door(P0, D0)
    door.report(P0, queue=10**9)
    door.report(D0, queue=10**6)
    assert door.refusal() is None


def test_a_queue_of_prompt_tokens_is_refused_with_the_time_until_there_is_room() -> None:
    door = Door(P0, D0)
    door.report(P0, queue=9_000, seconds=2.0, work=2_000)  # 1000 tokens a second: 9 s
    assert door.refusal() is None
    door.report(P0, queue=12_500)
    error = door.refusal()
    assert error is not None and error.http_status == 503 and error.code == "overloaded"
    assert error.retry_after_s == pytest.approx(2.5 - 0.03)
    assert error_headers(error) == [(b"retry-after", b"3")]


def test_what_was_sent_since_the_report_counts_at_once_and_what_was_worked_off_since_does_not() -> None:
    door = Door(P0, D0)
    door.report(P0, queue=9_000, seconds=2.0, work=2_000)
    assert door.refusal() is None
    door.on_sent(P0, 1_500)
    assert door.refusal() is not None
    door.clock.advance(0.1)
    assert door.refusal() is not None, "also after another look at all queues"
    door.clock.advance(1.0)
    assert door.refusal() is None, "a second later a thousand of them are done"


def test_the_queue_of_decode_counts_in_requests_and_only_while_there_is_one() -> None:
    door = Door(P0, D0)
    door.report(D0, queue=50, seconds=10.0, work=40, running=64)  # 4 a second
    error = door.refusal()
    assert error is not None and "decode" in error.message and error.retry_after_s == pytest.approx(2.5, abs=0.1)
    door.report(D0, queue=0)
    for _ in range(1000):
        door.on_sent(D0, 0)
    assert door.refusal() is None, "D had room a moment ago"


def test_requests_that_no_step_of_decode_has_looked_at_are_no_queue_however_slow_it_was_once() -> None:
    """After a slow spell the measured rate stays low until there is a queue again."""
    door = Door(P0, D0)
    door.report(D0, 4, seconds=40.0, work=8)
    assert door.refusal() is not None, "4 at 0.2/s"
    door.report(D0, 3, unread=3)
    assert door.refusal() is None
    door.report(D0, 3, unread=2)
    assert door.refusal() is not None, "one was left waiting, and the others come behind it"


def test_a_wave_of_requests_that_end_together_is_no_slow_queue() -> None:
    door = Door(D0, P0)
    door.report(D0, queue=100, seconds=9.5, work=5, running=64)  # the first of 64 requests that began together are done
    assert door.refusal() is None
    door.report(D0, queue=41, seconds=0.5, work=59, running=64)  # 64 in 10 s: 6.4 a second
    assert door.refusal() is None
    door.report(D0, queue=80)
    assert door.refusal() is not None


def test_an_instance_that_never_had_a_queue_has_room() -> None:
    door = Door(P0, P1, D0)
    door.report(P0, queue=1_000_000, seconds=1.0, work=1_000)
    assert door.refusal() is None
    door.report(P1, queue=1_000_000, seconds=1.0, work=1_000)
    assert door.refusal() is not None
    door.on_view((P0, P1, D0, FRESH))
    assert door.refusal() is None, "a third one joined"


def test_a_rate_follows_the_instance() -> None:
    door = Door(P0, D0)
    door.report(P0, queue=0, seconds=60.0, work=600)
    for _ in range(30):
        door.report(P0, queue=5_000, seconds=1.0, work=1_000)
    assert door.refusal() is None, "ten tokens a second were long ago"


def test_the_shorter_the_promised_wait_the_sooner_a_slower_instance_is_seen() -> None:
    refused = []
    for max_queue_s in (1.0, 10.0):
        door = Door(P0, D0, max_queue_s=max_queue_s)
        door.report(P0, queue=0, seconds=100.0, work=100_000)
        for _ in range(4):
            # It runs at a quarter of its speed, so what looked like half the bound is twice the bound.
            door.report(P0, queue=int(500 * max_queue_s), seconds=1.0, work=250)
        refused.append(door.refusal() is not None)
    assert refused == [True, False]


def test_what_is_admitted_does_not_die_in_the_queue_of_the_instance() -> None:
    assert Door(P0, D0, max_queue_s=None, queue_s=30.0).admission.max_wait_s == pytest.approx(20.0)
    assert Door(P0, D0, max_queue_s=30.0, queue_s=30.0).admission.max_wait_s == pytest.approx(20.0)
    assert Door(P0, D0, max_queue_s=1.5, queue_s=30.0).admission.max_wait_s == 1.5


def test_what_an_instance_did_before_it_joined_is_no_rate_of_now() -> None:
    """Found by a script of faults: a P that was stopped, lost and back refused two prompts for 2.6 s, and computed them
    in 20 ms."""
    door = Door(P0, D0)
    door.members.remove(instance_key(P0))
    door.members.add(P0)
    door.members.on_view(ClusterView(1, 2, (P0, D0)))
    door.report(P0, queue=0, seconds=300.0, work=22)
    for _ in range(2):
        door.on_sent(P0, 1_000)
    assert door.refusal() is None
    door.report(P0, queue=2_000, seconds=1.0, work=100)
    assert door.refusal() is not None, "100 a second: since it joined again it is really slow"


def test_a_rate_is_forgotten_some_time_after_the_last_queue() -> None:
    door = Door(P0, D0)
    door.report(P0, queue=0, seconds=10.0, work=100)  # ten tokens a second
    door.report(P0, queue=1_000)
    assert door.refusal() is not None
    for _ in range(60):
        door.clock.advance(0.5)
        door.report(P0, queue=0)
    door.report(P0, queue=1_000)
    assert door.refusal() is None, "that was half a minute ago"
    door.report(P0, queue=1_000, seconds=1.0, work=10)
    assert door.refusal() is not None, "but it is so again"


def test_prompts_in_steps_with_room_for_more_hold_up_nobody() -> None:
    door = Door(P0, D0)
    door.report(P0, queue=0, seconds=1.0, work=1_000)
    load = LoadReport(waiting_tokens=100_000, joinable_tokens=100_000, backlog_s=1.0, backlog_work=1_000)
    door.on_report(instance_key(P0), load)
    door.clock.advance(0.03)
    assert door.refusal() is None


def test_what_d_does_while_p_is_the_bottleneck_is_no_rate_of_d() -> None:
    door = Door(P0, D0)
    key = instance_key(D0)
    for second in range(1, 20):
        door.on_report(key, LoadReport(waiting=50, held_by_prefill=50, backlog_s=second, backlog_work=second))
        door.clock.advance(1.0)
    assert door.refusal() is None, "P's queue shows that wait"
    door.on_report(key, LoadReport(waiting=50, backlog_s=20, backlog_work=39))
    door.clock.advance(0.03)
    assert door.refusal() is None, "20 a second as soon as it is its own"
    door.on_report(key, LoadReport(waiting=500, backlog_s=20, backlog_work=39))
    door.clock.advance(0.03)
    assert door.refusal() is not None


def test_a_unified_instance_has_a_queue_for_steps_and_one_for_slots() -> None:
    unified = InstanceInfo(Role.UNIFIED, 0, 1, "h", 1, 0, LAYOUT, 512)
    door = Door(unified)
    key = instance_key(unified)
    slow_decode = LoadReport(waiting=30, waiting_tokens=30, decode_backlog_s=5.0, decode_backlog_work=10)
    door.on_report(key, slow_decode)
    door.clock.advance(0.03)
    error = door.refusal()
    assert error is not None and "decode" in error.message, "30 at 2/s"
    door.on_report(key, msgspec.structs.replace(slow_decode, waiting=0))
    door.clock.advance(0.03)
    assert door.refusal() is None
    door.on_report(key, LoadReport(waiting_tokens=20_000, backlog_s=1.0, backlog_work=1_000))
    door.clock.advance(0.03)
    error = door.refusal()
    assert error is not None and "computed" in error.message


@given(
    st.lists(
        st.tuples(
            st.sampled_from([P0, P1, D0]), st.integers(0, 10**6), st.floats(0.0, 30.0), st.integers(0, 10**6),
            st.integers(0, 200), st.integers(0, 20_000), st.floats(0.0, 5.0),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_nothing_is_refused_while_nothing_waits(
    steps: list[tuple[InstanceInfo, int, float, int, int, int, float]],
) -> None:
    """Whatever queues there were, once every instance has none, and what was sent since has its first token."""
    door = Door(P0, P1, D0, max_queue_s=0.1)
    for instance, queue, seconds, work, running, sent, pause_s in steps:
        door.report(instance, queue, seconds, work, running)
        computed = 0 if instance is D0 else sent
        door.on_sent(instance, computed)
        door.clock.advance(pause_s)
        door.on_began(instance, computed)
    for instance in (P0, P1, D0):
        computed = 0 if instance is D0 else 100_000
        door.report(instance, queue=0)
        for _ in range(5):
            door.on_sent(instance, computed)
            door.on_began(instance, computed)
    door.admission.require()
    for instance, computed in ((P0, 100_000), (P1, 100_000), (D0, 0), (D0, 0)):
        door.on_sent(instance, computed)
    door.admission.require()


numbers = st.integers(0, 10**6)


@given(numbers, numbers, numbers, st.floats(0.001, 100.0), st.integers(1, 10**5), st.floats(0.0, 5.0))
def test_more_ahead_never_predicts_less(
    queue: int, more: int, sent: int, seconds: float, work: int, age_s: float
) -> None:
    def wait_s(reported: int, sent: int) -> float:
        load = InstanceLoad.of(P0, SLOConfig(), memory_s=10.0)
        load.on_report(LoadReport(), 9.0, PRIOR)
        load.on_report(LoadReport(waiting_tokens=reported, backlog_s=seconds, backlog_work=work), 10.0, PRIOR)
        for tokens in (sent, sent):
            load.on_sent(tokens, 10.0)
        return load.prompt_wait_s(10.0 + age_s)

    base = wait_s(queue, sent)
    assert wait_s(queue + more, sent) >= base >= 0.0
    assert wait_s(queue, sent + more) >= base
    assert wait_s(0, 0) == 0.0, "where nothing waits nobody is rejected"


# ------------------------------------------------------------------------------------------------------ in the router


def beat(world: World, role: Role, load: LoadReport) -> None:
    world.router.on_heartbeat(Heartbeat(role, 0, 1, load))
    world.clock.advance(0.03)


def joined() -> World:
    """Return a world whose P has reported that it has done nothing yet."""
    world = World(Role.PREFILL, Role.DECODE, max_in_flight=1000)
    beat(world, Role.PREFILL, LoadReport())
    return world


def test_the_router_rejects_before_it_sends_anything_and_serves_again_when_the_queue_is_gone() -> None:
    world = joined()
    beat(world, Role.PREFILL, LoadReport(waiting_tokens=10**6, backlog_s=1.0, backlog_work=1000))
    with pytest.raises(Overloaded):
        world.router.require_admission()
    with pytest.raises(Overloaded):
        world.add()
    assert all(isinstance(sent, LinkAck) for _, sent in world.outbox.sent) and world.router.in_flight == 0
    beat(world, Role.PREFILL, LoadReport(backlog_s=2.0, backlog_work=10**6))
    world.router.require_admission()
    world.add()


def test_a_request_of_several_prompts_does_not_wait_for_itself() -> None:
    world = joined()
    beat(world, Role.PREFILL, LoadReport(waiting_tokens=0, backlog_s=10.0, backlog_work=10))  # one token a second
    world.router.require_room_for(20, 60)
    for _ in range(20):
        world.router.add_choices([one_choice()], world.wake, is_admitted=True)
    with pytest.raises(Overloaded):
        world.add()


def one_choice() -> GenerateRequest:
    return GenerateRequest("id", pack_i32([1, 2, 3]), 3, SamplingParams(max_tokens=4))


def test_what_has_its_first_token_waits_no_longer() -> None:
    """Reports are up to a heartbeat old; what the router has received itself is not."""
    world = joined()
    beat(world, Role.PREFILL, LoadReport(waiting_tokens=0, backlog_s=10.0, backlog_work=10))
    rooms = [world.add()[1] for _ in range(7)]
    with pytest.raises(Overloaded):
        world.router.require_admission()
    for room in rooms:
        world.emit(room, 5)
    world.router.require_admission()


def test_what_the_router_itself_sends_fills_the_queue() -> None:
    world = joined()
    beat(world, Role.PREFILL, LoadReport(waiting_tokens=0, backlog_s=10.0, backlog_work=10))  # one token a second
    admitted = 0
    with pytest.raises(Overloaded):
        for _ in range(100):
            world.add()
            admitted += 1
    assert admitted == 7, "three tokens each: the eighth would wait more than 20 s"
