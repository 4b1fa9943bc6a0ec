"""A link over a hostile network: a message is taken once and in order, or given up by a sender that knows of it."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from chitu.config.schema import DeadlineConfig
from chitu.net.link import MAX_KEPT, MAX_KEPT_BYTES, MAX_LINKS, LinkReceiver, LinkReceivers, LinkSender
from chitu.protocol import LinkAck, LinkStamp

INTERVAL_S, PATIENCE_S = 0.5, 3.0
DEADLINES = DeadlineConfig(heartbeat_interval_s=INTERVAL_S, lease_s=PATIENCE_S)
LINK = 70


class Pump:
    """A sender and a receiver with connections that break: messages in flight are lost, or arrive after those of the
    next connection."""

    def __init__(self) -> None:
        self.sender: LinkSender[int] = LinkSender(LINK, INTERVAL_S, PATIENCE_S)
        self.receivers = LinkReceivers()
        self.wire: deque[bytes] = deque()
        self.late: deque[bytes] = deque()
        """Frames of an earlier connection."""
        self.now_s = 100.0
        self.num_sent = 0
        self.taken: list[int] = []
        self.given_up: list[int] = []
        self.num_frames = 0
        self.tells = True
        """Whether it sends a message after it has given some up, as every real sender does."""

    def send(self) -> None:
        self.num_sent += 1
        frame = f"{self.sender.number} {self.sender.num_kept} {self.num_sent}".encode()
        self.sender.note(frame, self.num_sent, self.now_s)
        self._put(frame)

    def _put(self, frame: bytes) -> None:
        self.num_frames += 1
        self.wire.append(frame)

    def deliver(self, count: int = 1_000_000, *, twice: bool = False) -> None:
        for _ in range(min(count, len(self.wire))):
            frame = self.wire.popleft()
            for _ in range(1 + twice):
                self._take(frame)

    def deliver_late(self) -> None:
        while self.late:
            self._take(self.late.popleft())

    def _take(self, frame: bytes) -> None:
        number, num_kept, name = map(int, frame.split())
        if self.receivers.take(LinkStamp(LINK, number, num_kept)):
            self.taken.append(name)

    def beat(self, *, is_lost: bool = False, is_reading: bool = True) -> None:
        """Let the receiver acknowledge, one heartbeat interval later."""
        self.now_s += INTERVAL_S
        acks = self.receivers.acks()
        if not is_lost:
            self.take_ack(acks, is_reading)

    def take_ack(self, acks: tuple[LinkAck, ...], is_reading: bool = True) -> None:
        news = self.sender.on_ack(acks[0] if acks else None, is_reading, self.now_s)
        self.given_up += [sent.about for sent in news.given_up]
        for frame in news.repeat:
            self._put(frame)
        if news.given_up and self.tells:
            self.send()

    def alarm(self) -> None:
        if self.receivers.take_alarm():
            self.take_ack(self.receivers.acks())

    def two_beats(self) -> None:
        for _ in range(2):
            self.deliver()
            self.alarm()
            self.deliver()
            self.beat()
        self.deliver()
        self.alarm()
        self.deliver()


OPS = ["send", "send", "send", "deliver", "one", "twice", "cut", "reconnect", "late", "beat", "beat lost", "alarm"]


def run(pump: Pump, script: list[str], *, is_reading: bool) -> None:
    for what in script:
        if what == "send":
            pump.send()
        elif what == "one":
            pump.deliver(1)
        elif what in ("deliver", "twice"):
            pump.deliver(twice=what == "twice")
        elif what == "cut":
            pump.wire.clear()
        elif what == "reconnect":
            pump.late.extend(pump.wire)
            pump.wire.clear()
        elif what == "late":
            pump.deliver_late()
        elif what == "alarm":
            pump.alarm()
        else:
            pump.beat(is_lost=what == "beat lost", is_reading=is_reading)


@given(st.lists(st.sampled_from(OPS), max_size=60))
def test_everything_is_taken_once_and_in_order_two_words_after_the_last_fault(script: list[str]) -> None:
    pump = Pump()
    run(pump, script, is_reading=False)  # a receiver that does not read for long is slow, and nothing is given up
    assert pump.taken == list(range(1, len(pump.taken) + 1)), "out of order, twice, or from behind a gap"
    pump.deliver_late()
    pump.two_beats()
    pump.beat()
    assert pump.taken == list(range(1, pump.num_sent + 1)) and not pump.given_up
    pump.beat()
    assert pump.sender.num_kept == 0 and not pump.wire


@given(st.lists(st.sampled_from([*OPS, *["cut", "beat"] * 6]), max_size=120))
def test_what_does_not_come_through_for_long_is_given_up_and_both_ends_know_it(script: list[str]) -> None:
    pump = Pump()
    run(pump, script, is_reading=True)
    assert pump.taken == sorted(set(pump.taken))
    pump.wire.clear()
    pump.late.clear()
    pump.send()
    pump.two_beats()
    pump.two_beats()
    pump.beat()
    assert pump.taken == sorted(set(pump.taken)) and pump.sender.num_kept == 0
    assert set(pump.taken) | set(pump.given_up) == set(range(1, pump.num_sent + 1)), "lost, and nobody knows"
    (receiver,) = pump.receivers._links.values()
    assert receiver.given_up == pump.num_sent - len(pump.taken)


def test_in_order_and_idle_there_is_not_one_message_more() -> None:
    pump = Pump()
    for _ in range(5):
        pump.send()
        pump.deliver()
        pump.beat()
    for _ in range(5):
        pump.beat()
    assert pump.num_frames == 5


def test_a_receiver_that_is_stopped_or_slow_has_lost_nothing_and_is_sent_nothing_twice() -> None:
    pump = Pump()
    pump.send()
    for _ in range(20):  # its heartbeat thread runs on, the thread that reads does not
        pump.beat(is_reading=False)
    pump.now_s += 60.0  # stopped altogether: no heartbeats
    pump.send()
    pump.beat(is_reading=False)
    pump.deliver()
    pump.beat()
    assert pump.taken == [1, 2] and pump.num_frames == 2 and not pump.given_up


def test_words_that_come_at_once_after_a_silence_attest_nothing() -> None:
    pump = Pump()
    pump.send()
    pump.now_s += PATIENCE_S
    for _ in range(10):
        pump.now_s -= INTERVAL_S - 0.001
        pump.beat()
    assert not pump.given_up


def test_a_receiver_that_is_late_costs_one_frame_a_word_and_a_gap_costs_all_once() -> None:
    pump = Pump()
    for _ in range(9):
        pump.send()
    pump.beat()
    pump.beat()
    assert pump.num_frames == 9 + 2, "nothing says that one of them was lost"
    del pump.wire[0]
    pump.deliver()
    pump.alarm()
    assert pump.num_frames == 11 + 9
    pump.alarm()
    pump.take_ack((LinkAck(LINK, 0, True),))
    assert pump.num_frames == 11 + 9, "they are on the way again"


def test_a_message_is_given_up_when_its_own_patience_ends_and_comes_through_late_but_before_a_later_one() -> None:
    pump = Pump()
    pump.tells = False
    pump.beat()
    pump.send()
    pump.beat()
    pump.send()
    start_s = pump.now_s - INTERVAL_S
    while not pump.given_up:
        pump.beat()
    assert PATIENCE_S <= pump.now_s - start_s <= PATIENCE_S + 2 * INTERVAL_S
    assert pump.given_up == [1], "the other has waited for less"
    pump.beat()
    assert pump.given_up == [1, 2]
    pump.send()
    pump.deliver()
    assert pump.taken == [1, 2, 3], "what was queued comes in the end"


def test_what_a_sender_keeps_is_bounded_in_messages_and_bytes() -> None:
    sender: LinkSender[str] = LinkSender(LINK, INTERVAL_S, PATIENCE_S)
    for number in range(1, MAX_KEPT + 1):
        sender.note(bytes(10), "small", 0.0)
        assert sender.is_full is (number == MAX_KEPT)
    sender.on_ack(LinkAck(LINK, MAX_KEPT), True, 1.0)
    assert not sender.is_full and sender.num_kept == 0
    for size, is_full in ((MAX_KEPT_BYTES - 1, False), (1, True)):
        sender.note(bytes(size), "large", 2.0)
        assert sender.is_full is is_full
    assert [sent.about for sent in sender.give_up(2.0)] == ["large", "large"] and not sender.is_full


def test_what_a_receiver_knows_is_bounded_and_a_forgotten_link_goes_on() -> None:
    receivers = LinkReceivers()
    for number in range(1, 5):
        assert receivers.take(LinkStamp(0, number, 0))
    for link in range(1, MAX_LINKS + 1):
        receivers.take(LinkStamp(link, 1, 0))
    assert [word.link for word in receivers.acks()] == list(range(1, MAX_LINKS + 1))
    assert not receivers.take(LinkStamp(0, 6, 1)) and receivers.take_alarm()
    assert receivers.take(LinkStamp(0, 5, 0)) and receivers.take(LinkStamp(0, 6, 1))
    assert receivers.acks() == (LinkAck(0, 6),) and receivers.acks() == ()


def test_odd_numbers_from_the_wire_change_no_other_link_and_what_has_none_is_taken() -> None:
    receivers = LinkReceivers()
    assert receivers.take(LinkStamp(1, 1, 0))
    assert receivers.take(LinkStamp(LINK, 0, 0)) and receivers.take(LinkStamp(LINK, -1, 0))
    assert receivers.acks() == (LinkAck(1, 1),)
    receiver = LinkReceiver()
    assert receiver.take((1 << 64) - 1, -5) and not receiver.take(3, 1 << 70)
    assert receivers.take(LinkStamp(1, 2, 0))
