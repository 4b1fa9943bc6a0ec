"""KV events: whoever reads the stream has the index of the instance, with the tokens of every page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from ports import free_ports
from support.kv_event_reader import DECODERS, BlockRemoved, EventReader, EventSubscriber

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.load import load_topology
from chitu.config.topology import bound_ports, instances
from chitu.config.topology_checks import problems
from chitu.kv_cache import kv_events
from chitu.kv_cache.kv_events import Encoding, KVEventFeed, KVEventLog, block_hash, encode_batch
from chitu.kv_cache.prefix_index import PageKeys
from chitu.protocol import pack_i32

NUM_PAGES, PAGE_SIZE = 10, 2
ROUTER = "dp_config.router"


class ForgetfulLog(KVEventLog):
    """A log with a mistake: evictions leave no trace."""

    def removed(self, names: list[bytes]) -> None: ...


class CutOffLog(KVEventLog):
    """A log with a mistake: it names the page itself as its parent."""

    def stored(self, keys: PageKeys, names: Any, positions: Any, token_ids: bytes) -> None:
        super().stored(keys, [names[0], *names[:-1]], positions, token_ids)


class World:
    """Requests that come and go on a small cache, and a reader of its events."""

    def __init__(self, log: type[KVEventLog] = KVEventLog, encoding: Encoding = "map") -> None:
        self.cache = PagedKVCacheManager(NUM_PAGES, PAGE_SIZE, b"model")
        self.cache.events = self.log = log(PAGE_SIZE)
        self.reader = EventReader(encoding)
        self.rooms: dict[bytes, tuple[PageKeys | None, list[int]]] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        """By hash of each page that was ever cached: all tokens up to its end."""
        self.count = 0

    def begin(self, salt: str, tokens: list[int], to_compute: int = 1) -> None:
        keys, prompt = self.cache.page_keys(salt), pack_i32(tokens)
        if self.cache.pages_wanted(keys, prompt, to_compute) > self.cache.num_available_pages:
            return
        self.count += 1
        room = self.count.to_bytes(16, "little")
        self.cache.begin(room, keys, prompt, to_compute)
        self.cache.reserve(room, len(tokens))
        self.rooms[room] = keys, tokens

    def commit(self, number: int) -> None:
        if self.rooms:
            room = list(self.rooms)[number % len(self.rooms)]
            keys, tokens = self.rooms[room]
            self.cache.commit(room, keys, pack_i32(tokens), len(tokens))
            assert keys is not None
            for page, key in enumerate(keys.upto(len(tokens) // PAGE_SIZE, pack_i32(tokens))):
                self.tokens[block_hash(key)] = tuple(tokens[: (page + 1) * PAGE_SIZE])

    def end(self, number: int) -> None:
        if self.rooms:
            room = list(self.rooms)[number % len(self.rooms)]
            del self.rooms[room]
            self.cache.remove_task(room)

    def flush(self, _number: int) -> None:
        self.cache.flush()

    def check(self) -> None:
        changes, is_short = self.log.take()
        assert not is_short
        for events in self.log.batches(changes):
            self.reader.read(encode_batch(1.0, events, 0, self.reader.encoding))
        cached = {block_hash(key) for key in self.cache._index._pages}
        assert self.reader.tokens == {key: self.tokens[key] for key in cached}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(["", "a"]), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
        st.tuples(st.sampled_from(["commit", "commit", "end", "end", "flush"]), st.integers(0, 9)),
    ),
    min_size=10,
    max_size=60,
)


def play(world: World, operations: list[tuple[Any, ...]]) -> None:
    for name, *arguments in operations:
        getattr(world, name)(*arguments)
        world.check()


@given(OPERATIONS, st.sampled_from(["map", "array"]))
def test_a_reader_has_the_index_of_the_instance_and_its_tokens(
    operations: list[tuple[Any, ...]], encoding: Encoding
) -> None:
    play(World(encoding=encoding), operations)


FULL = [
    *[("begin", "", [n] * 8) for n in (1, 2)],
    *[("commit", n) for n in (0, 1)],
    *[("end", 0), ("end", 0)],
    ("begin", "", [3] * 8),
    ("commit", 0),
]
"""Two prompts of four pages in a cache of ten, then a third one."""


@pytest.mark.parametrize("log", [ForgetfulLog, CutOffLog])
def test_a_log_with_a_mistake_is_found(log: type[KVEventLog]) -> None:
    play(World(), FULL)
    with pytest.raises((AssertionError, KeyError)):
        play(World(log), FULL)


def test_pages_tell_what_enters_their_keys_beside_tokens() -> None:
    log, reader, tokens = KVEventLog(2), EventReader(), pack_i32(range(8))
    for index, (salt, adapter, images) in enumerate(
        [("", "", ()), ("secret", "", ()), ("", "style", ()), ("secret", "style", ((2, b"i" * 20), (7, b"j" * 20)))]
    ):
        keys = PageKeys.of(b"model", 2, salt, "ab" * 16 if adapter else "", 0, images, adapter)
        log.stored(keys, keys.upto(4, tokens), range(4), tokens)
        assert keys.copy() == keys
        for events in log.batches(log.take()[0]):
            payload = encode_batch(1.0, events, 3, "map")
            reader.read(payload)
            assert b"secret" not in payload, "salts are not published"
        batch = DECODERS["map"].decode(payload)
        event = batch.events[0]
        assert batch.data_parallel_rank == 3, "readers expect all three fields"
        assert event.lora_name == (adapter or None) and event.medium == "GPU"
        if not index:
            assert event.extra_keys is None
    first, second, third, fourth = event.extra_keys
    assert first == ("style", keys.root.hex()) and len(keys.root.hex()) == 32
    assert second[0] == "style" and len(second[1]) == 64 and third == ("style",)
    assert len(fourth) == 2 and fourth[1] != second[1]
    assert len(reader.tokens) == 16, "no two of these sequences share a page"


def test_a_long_prompt_is_spread_over_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BATCH_TOKENS", 8)
    log, reader, tokens = KVEventLog(2), EventReader(), pack_i32(range(50))
    keys = PageKeys.of(b"model", 2)
    names = keys.upto(25, tokens)
    log.stored(keys, names, [*range(7), *range(8, 25)], tokens)
    batches = list(log.batches(log.take()[0]))
    assert all(sum(len(event.token_ids) for event in batch) <= 8 for batch in batches)  # type: ignore[union-attr]
    reader.tokens[block_hash(names[7])] = tuple(range(16))  # what another request had stored
    for batch in batches:
        reader.read(encode_batch(1.0, batch, 0, "map"))
    assert {reader.tokens[block_hash(key)][-1] for key in names} == set(range(1, 50, 2))
    log.removed(names)
    assert [len(event.block_hashes) for batch in log.batches(log.take()[0]) for event in batch] == [8, 8, 8, 1]  # type: ignore[union-attr]


def test_nothing_is_noted_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.cache.events = None
    for name in ("stored", "removed", "cleared"):
        monkeypatch.setattr(KVEventLog, name, None)
    for name, *arguments in [*FULL, ("flush", 0)]:
        getattr(world, name)(*arguments)
    assert world.log.take() == ([], False)


# ------------------------------------------------------------------------------------------------------------- sockets


@pytest.fixture
def open_feed() -> Iterator[Callable[..., tuple[KVEventFeed, EventSubscriber]]]:
    opened: list[Any] = []

    def open_(**more: Any) -> tuple[KVEventFeed, EventSubscriber]:
        feed = KVEventFeed("127.0.0.1", 0, *free_ports(1), topic="kv@P0@m", page_size=2, **more)
        opened.append(feed)
        sub = EventSubscriber(feed.port, feed.replay_port)
        opened.insert(0, sub)
        return feed, sub

    yield open_
    for each in opened:
        each.close()


def subscribe(feed: KVEventFeed, sub: EventSubscriber) -> int:
    """Publish until the subscription has arrived. Return the number of the newest message."""
    feed.start(lambda name, target: threading.Thread(target=target, name=name))
    for _ in range(1000):
        feed.log.cleared()
        if sub.sub.poll(20):
            break
    feed.log.removed([b"last"])
    while True:
        _, number, payload = sub.next()
        if BlockRemoved([block_hash(b"last")], "GPU") in DECODERS["map"].decode(payload).events:
            return number


def test_a_reader_gets_what_is_published_and_again_what_it_missed(
    open_feed: Callable[..., tuple[KVEventFeed, EventSubscriber]],
) -> None:
    feed, sub = open_feed(most_kept=5)
    number = subscribe(feed, sub)
    for count in range(1, 8):
        feed.log.removed([count.to_bytes(16, "big")])
        topic, seen, payload = sub.next()
        assert (topic, seen) == (b"kv@P0@m", number + count)
        assert DECODERS["map"].decode(payload).events == [BlockRemoved([count], "GPU")]
    assert [seen for seen, _ in sub.again(0)] == list(range(number + 3, number + 8)), "the newest five"
    assert [DECODERS["map"].decode(payload).events[0].block_hashes for _, payload in sub.again(number + 6)] == [
        [6],
        [7],
    ]
    assert sub.again(number + 100) == []
    sub.ask.send_multipart([b"", b"no number"])
    sub.ask.send_multipart([b"", b"", b"", b""])
    assert len(sub.again(0)) == 5, "what is no question is passed over"


def test_dropped_events_leave_a_number_out(
    open_feed: Callable[..., tuple[KVEventFeed, EventSubscriber]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_WAITING_PAGES", 4)
    feed, sub = open_feed()
    number = subscribe(feed, sub)
    waiting, feed.log.take = feed.log.take, lambda: ([], False)  # type: ignore[method-assign]
    for count in range(6):
        feed.log.removed([count.to_bytes(16, "big")])
    feed.log.take = waiting  # type: ignore[method-assign]
    feed._wake()
    assert DECODERS["map"].decode(sub.next()[2]).events == [BlockRemoved([count], "GPU") for count in range(4)]
    feed.log.cleared()
    assert sub.next()[1] == number + 3, "number + 2 was left out"
    assert [seen for seen, _ in sub.again(number + 1)] == [number + 1, number + 3], "and cannot be had again"


def test_a_taken_port_is_a_clear_error_and_leaks_nothing() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.ZMQError, match=f"127.0.0.1:{port}: Address already in use"):
            KVEventFeed("127.0.0.1", 0, port, topic="", page_size=2)


# ------------------------------------------------------------------------------------------------------------ topology


def topology_problems(*overrides: str) -> list[str]:
    topology = load_topology("pd_disagg_1p1d_local", list(overrides))
    return [*problems(topology, need_model=False)]


def test_each_member_of_a_group_has_ports_of_its_own() -> None:
    entry = "{dp_size: 2, port: 100, kv_events_port: 200, kv_events_replay_port: 300, devices: [cpu, cpu]}"
    topology = load_topology("pd_disagg_1p1d_local", [f"{ROUTER}.decode_schedulers=[{entry}]"])
    assert [instance.config.kv_events_port for instance in instances(topology)] == [0, 200, 201]
    ports = {key.rpartition("schedulers.")[2]: port for key, _, port in bound_ports(topology)}
    assert ports["0.kv_events_port (+1)"] == 201 and ports["0.kv_events_replay_port"] == 300


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["prefill_schedulers.0.kv_events_replay_port=7000"], "kv_events_port is 0: nothing is published"),
        (["prefill_schedulers.0.kv_events_port=7000", "port=7000"], "are both port 7000"),
    ],
)
def test_ports_that_cannot_work_are_named(overrides: list[str], says: str) -> None:
    assert says in "\n".join(topology_problems(*(f"{ROUTER}.{each}" for each in overrides)))


def test_keys_that_cannot_work_are_named() -> None:
    port = f"{ROUTER}.decode_schedulers.0.kv_events_port=7000"
    assert not topology_problems(port)
    assert "cache.prefix_cache is off" in "\n".join(topology_problems(port, "cache.prefix_cache=false"))
    for topic in ("{pod}", "{", "{0}"):
        assert "other than host, port, name and model" in "\n".join(topology_problems(f"cache.events.topic='{topic}'"))
