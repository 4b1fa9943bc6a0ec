"""Which neighbours are asked for weights, which way is taken, and the share of its time that a source gives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.clock import FakeClock

from chitu.config.load import load_topology
from chitu.config.topology import find_instance
from chitu.instance import weights_pieces
from chitu.instance.neighbours import VIEW_S, ask_view, pieces_of, sources_in
from chitu.instance.weights_pieces import BUSY_S, WINDOW_BYTES, Neighbour, NeighbourPieces, SourceFault
from chitu.instance.weights_share import MOST_READERS, REST, WeightsShare
from chitu.kv_transfer.transports.transport import CopyList
from chitu.models.served_folder import ServedFolder
from chitu.models.weights import opened_pieces
from chitu.net.view_feed import Readers
from chitu.protocol import (
    PROTOCOL_VERSION,
    ClusterView,
    InstanceInfo,
    KVLayout,
    RankMemory,
    TransportSession,
    Wire,
    encode,
    encode_for,
)
from chitu.protocol.neighbour import (
    MAX_PIECE_BYTES,
    ClosePieces,
    OpenPieces,
    Piece,
    PiecesOpened,
    WantPiece,
    source_codec,
)
from chitu.protocol.weights import Weights
from chitu.types import Role

HOST = "127.0.0.1"
LAYOUT = KVLayout.uniform("first", 2, 2, 16, 16, "float32", 100)
PIECE_S = 0.004


def member(rank: int, host: str = "other", **more: Any) -> InstanceInfo:
    fields: dict[str, Any] = {"layout": LAYOUT, "max_model_len": 64, "protocol": PROTOCOL_VERSION, "weights_port": 7000}
    return InstanceInfo(Role.PREFILL, rank, 100 + rank, host, 5000, 6000, **{**fields, **more})


def test_sources_are_those_that_serve_these_weights_and_send_them_the_nearest_first() -> None:
    members = (
        member(0),
        member(1, rack="r"),
        member(2, "mine"),
        member(3, protocol=20),  # of the release before: cannot be asked, whatever it says
        member(4, weights_port=0),
        member(5, weights=Weights(3, "second", "/second")),
        member(6, layout=msgspec.structs.replace(LAYOUT, model_hash="second")),
    )
    view = ClusterView(1, 1, members)
    assert [each.name for each in sources_in(view, "first", "mine", "r")] == ["P2", "P1", "P0"]
    assert {each.name for each in sources_in(view, "second", "mine", "r")} == {"P5", "P6"}
    assert [each.port for each in sources_in(view, "first", "mine", "r")] == [7000] * 3


def test_equal_sources_are_asked_in_random_order() -> None:
    view = ClusterView(1, 1, tuple(member(rank) for rank in range(8)))
    assert len({sources_in(view, "first", "mine", "")[0].name for _ in range(60)}) > 3


def test_a_process_of_the_release_before_hears_nothing_of_the_port() -> None:
    frame = msgspec.msgpack.decode(encode_for(20, ClusterView(1, 1, (member(0),))))
    assert "weights_port" not in frame["instances"][0]


def test_without_the_key_and_with_pages_that_outlast_the_cluster_nobody_is_asked(tmp_path: Path) -> None:
    def opens(*settings: str) -> bool:
        topology = load_topology("pd_disagg_1p1d_local", [f"model.path={tmp_path}", *settings])
        return pieces_of(topology, find_instance(topology, Role.PREFILL, 0)) is not None

    assert not opens()
    assert opens("model.weights_from=auto") and opens("model.weights_from=neighbour")
    assert not opens("model.weights_from=auto", "cache.host_bytes=1000000", f"cache.disk.path={tmp_path}")


# ------------------------------------------------------------------------------------------------------------- the view


def test_a_view_comes_from_a_router_before_the_instance_has_joined() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.XPUB)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    view, readers = ClusterView(9, 4, (member(0),)), Readers()

    def answer() -> None:
        while not readers.take(router.recv()):
            pass
        for topic in readers.waiting:
            router.send_multipart((topic, encode(view)))

    thread = threading.Thread(target=answer)
    thread.start()
    assert ask_view(context, [(HOST, unused_port()), (HOST, port)], 20.0) == view
    thread.join()
    context.destroy(0)


def unused_port() -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    port = socket.bind_to_random_port(f"tcp://{HOST}")
    socket.close(0)
    context.term()
    return port


def test_routers_that_are_not_there_cost_next_to_nothing_and_mute_ones_less_than_a_second() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    begun_s = time.monotonic()
    assert ask_view(context, [(HOST, unused_port())] * 3, 60.0) is None
    assert time.monotonic() - begun_s < 30
    mute = context.socket(zmq.XPUB)
    port = mute.bind_to_random_port(f"tcp://{HOST}")
    assert ask_view(context, [(HOST, port)], 0.1) is None
    assert VIEW_S < 1
    context.destroy(0)


# -------------------------------------------------------------------------------------------------------------- the way


class Session:
    """A source of zeros, each megabyte of which takes `s_per_mib`."""

    way = "fake"

    def __init__(self, opener: Opener, source: Neighbour) -> None:
        self._opener, self.source = opener, source

    def read_into(self, buffer: memoryview, file: str, offset: int, ahead: int, on_bytes: Any) -> None:
        self._opener.clock.advance(len(buffer) / (1 << 20) * self._opener.s_per_mib)
        on_bytes(len(buffer))

    def close(self) -> None: ...


class Opener:
    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.s_per_mib, self.is_busy, self.asked = clock, 0.1, False, 0

    def open(self, source: Neighbour) -> Session:
        self.asked += 1
        self.clock.advance(0.01)
        if self.is_busy:
            raise SourceFault("it sends weights to D3 and D4", is_busy=True, may_write=False)
        return Session(self, source)

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class Loading:
    """A load of runs of 4 MiB, whose folder takes `s_per_mib` for each."""

    def __init__(self, compares: bool) -> None:
        self.clock = FakeClock()
        self.opener, self.s_per_mib = Opener(self.clock), 0.1
        source = Neighbour("P0", 1, HOST, 1)
        self.pieces = NeighbourPieces(lambda: [source], self.opener, compares, self.clock)  # type: ignore[arg-type]

    def read(self, runs: int) -> int:
        """Read so many runs, and return how many came from the neighbour."""
        count = 0
        for _ in range(runs):
            buffer = memoryview(bytearray(4 << 20))
            done = self.pieces.read_into(buffer, "f", 0, 0)
            count += done == len(buffer)
            if not done:
                self.clock.advance(4 * self.s_per_mib)
                self.pieces.on_file_read(len(buffer), 4 * self.s_per_mib)
        return count


@pytest.mark.parametrize(("folder_s", "neighbour_s", "expected"), [(0.5, 0.1, 96), (0.1, 0.5, 4)])
def test_auto_takes_what_was_quicker_after_a_window_of_each(folder_s: float, neighbour_s: float, expected: int) -> None:
    loading = Loading(compares=True)
    loading.s_per_mib, loading.opener.s_per_mib = folder_s, neighbour_s
    assert WINDOW_BYTES // 4 == 4 << 20
    assert loading.read(100) == expected
    if neighbour_s < folder_s:  # the source becomes slow: the folder again
        loading.opener.s_per_mib = 5.0
        assert loading.read(100) <= 2


def test_neighbour_never_reads_the_folder_while_a_source_is_left() -> None:
    loading = Loading(compares=False)
    loading.opener.s_per_mib = 9.0
    assert loading.read(20) == 20


def test_a_load_waits_for_busy_sources_for_a_minute_in_all_and_auto_not_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    loading = Loading(compares=False)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        loading.clock.advance(seconds)

    monkeypatch.setattr(weights_pieces, "pause", wait)
    loading.opener.is_busy = True
    assert loading.read(3) == 0
    assert sum(waits) == pytest.approx(BUSY_S, rel=0.1) and loading.opener.asked > 100
    assert "all instances that serve them were busy" in caplog.text

    comparing = Loading(compares=True)
    comparing.opener.is_busy = True
    assert comparing.read(10) == 0 and comparing.clock.monotonic() == pytest.approx(10 * 0.4, abs=0.2)
    comparing.opener.is_busy = False
    assert comparing.read(10) > 0


# ----------------------------------------------------------------------------------------------------------- the source


class CountingTransport:
    """A transport that copies nothing, and whose writes take `PIECE_S` of a clock that stands still otherwise."""

    name = "counting"

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.writes: list[float] = []
        """Times at which they began."""

    def register(self, base: int, nbytes: int) -> None: ...

    def can_reach(self, session: TransportSession) -> bool:
        return True

    def connect(self, memory: RankMemory, session: TransportSession) -> object:
        return object()

    def write(self, peer: object, copies: CopyList, timeout_s: float) -> None:
        self.writes.append(self._clock.monotonic())
        self._clock.advance(PIECE_S)

    def disconnect(self, peer: object) -> None: ...

    def close(self) -> None: ...


class SourceUnderTest:
    """A source that is driven by the test, in its time."""

    def __init__(self, folder: Path) -> None:
        stamp = (("f", 64 << 20, (folder / "f").stat().st_mtime_ns),)
        self.served: ServedFolder | None = Whole(str(folder), "first", stamp)
        self.clock, self.context = FakeClock(), zmq.Context()
        self.transport = CountingTransport(self.clock)
        self.share = WeightsShare(
            self.context, HOST, lambda: self.served, lambda: [self.transport], self.clock, self.clock.advance  # type: ignore[list-item]
        )  # fmt: skip

    def reader(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(f"tcp://{HOST}:{self.share.port}")
        return socket

    def ask(self, socket: zmq.Socket[bytes], *messages: Wire) -> list[Any]:
        """Send messages, and return the answers to them."""
        for message in messages:
            socket.send(encode(message))
        for _ in messages:
            assert self.share.turn(10_000)
        wanted = [message for message in messages if not isinstance(message, ClosePieces)]
        return [source_codec.decode(socket.recv()) for _ in wanted]

    def opened(self, joiner: str, model_hash: str = "first") -> tuple[zmq.Socket[bytes], PiecesOpened]:
        memory = RankMemory(0, (TransportSession("counting", "x"),), 4096, 16 << 20, (), (), 0, 0, 0, 0)
        socket = self.reader()
        (reply,) = self.ask(socket, OpenPieces(PROTOCOL_VERSION, joiner, model_hash, memory))
        return socket, reply


class Whole(ServedFolder):
    """A folder whose one file is its weights, whatever it is."""

    __slots__ = ()

    def is_unchanged(self) -> bool:
        return True

    def share_in_memory(self, descriptors: Mapping[str, int]) -> float:
        return 1.0


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SourceUnderTest]:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(64 << 20)
    made = SourceUnderTest(tmp_path)
    yield made
    made.context.destroy(0)


def wants(count: int, first: int = 1) -> list[WantPiece]:
    return [WantPiece(first + at, "f", at * MAX_PIECE_BYTES, MAX_PIECE_BYTES, 0) for at in range(count)]


def test_while_requests_run_readers_get_a_share_of_the_time_and_a_token_waits_for_one_piece(
    source: SourceUnderTest,
) -> None:
    """Two readers want all they can at once. Tokens of a stream that need the core and the link come every 10 ms."""
    source.share.follow(lambda: False)
    readers = [source.opened(f"D{number}")[0] for number in range(2)]
    for number in range(20):
        for socket in readers:
            (piece,) = source.ask(socket, *wants(1, number))
            assert piece.code == "" and piece.number == number
    starts = source.transport.writes
    assert len(starts) == 40
    assert all(later - one >= (1 + REST) * PIECE_S - 1e-9 for one, later in itertools.pairwise(starts))
    share = len(starts) * PIECE_S / (source.clock.monotonic() - starts[0])
    assert share == pytest.approx(1 / (1 + REST), rel=0.05)
    due = [starts[0] + 0.010 * tick for tick in range(int((starts[-1] - starts[0]) / 0.010))]
    came = [max([at, *(one + PIECE_S for one in starts if one <= at < one + PIECE_S)]) for at in due]
    gaps = [later - one for one, later in itertools.pairwise(came)]
    assert 0.010 < max(gaps) <= 0.010 + PIECE_S + 1e-9


def test_without_requests_readers_wait_for_nothing(source: SourceUnderTest) -> None:
    source.share.follow(lambda: True)
    socket, _ = source.opened("D0")
    source.ask(socket, *wants(20))
    assert source.clock.monotonic() == pytest.approx(20 * PIECE_S)


def test_a_third_instance_is_told_that_the_source_is_busy_until_one_has_ended(source: SourceUnderTest) -> None:
    assert MOST_READERS == 2
    first, _ = source.opened("D0")
    assert [source.opened(joiner)[1].code for joiner in ("D0", "D1", "D1")] == [""] * 3  # ranks of two instances
    assert source.opened("D2")[1].code == "busy"
    source.ask(first, ClosePieces())
    assert source.opened("D2")[1].code == "busy"  # the other rank of D0 reads on
    source.clock.advance(31)
    source.share.turn(0)  # forgets readers that want nothing
    assert source.opened("D2")[1].code == ""


@pytest.mark.parametrize(
    ("want", "why"),
    [
        (WantPiece(1, "../f", 0, 10, 0), "there is no file"),
        (WantPiece(1, "f", 0, MAX_PIECE_BYTES + 1, 0), "no place of the arena"),
        (WantPiece(1, "f", 0, 10, (16 << 20) - 9), "no place of the arena"),
        (WantPiece(1, "f", 0, 10, -1), "no place of the arena"),
        (WantPiece(1, "f", -1, 10, 0), "there is no file"),
        (WantPiece(1, "f", (64 << 20) - 9, 10, 0), "ends before byte"),
        (WantPiece(1, "f", (1 << 64) - 1, 10, 0), "OverflowError"),
    ],
)
def test_a_want_of_what_is_not_there_is_refused_and_the_source_goes_on(
    source: SourceUnderTest, want: WantPiece, why: str
) -> None:
    socket, _ = source.opened("D0")
    (piece,) = source.ask(socket, want)
    assert isinstance(piece, Piece) and piece.code == "refused" and why in piece.message
    (again,) = source.ask(socket, *wants(1))
    assert "knows nothing of this reader" in again.message and not source.transport.writes
    socket.send(b"\xff\x00")
    assert source.share.turn(10_000)
    assert source.opened("D1")[1].code == ""


def test_weights_that_serve_no_more_are_not_sent(source: SourceUnderTest) -> None:
    assert source.opened("D0", "second")[1].code == "other_weights"
    socket, reply = source.opened("D0")
    assert reply.way == "counting" and source.ask(socket, *wants(1))[0].code == ""
    source.served = None
    assert source.ask(socket, *wants(1))[0].code == "other_weights"
    assert source.opened("D1")[1].code == "other_weights"


def test_tensors_that_a_manifest_names_are_not_sent_and_not_asked_for(source: SourceUnderTest, tmp_path: Path) -> None:
    """Folders of one hash may have these at different places."""
    stamp = (("f", 64 << 20, 1), ("chitu_tensors.json", "5f"))
    source.served = Whole(str(tmp_path), "first", stamp)
    assert "trainer" in source.opened("D0")[1].message
    opened: list[str] = []

    def opens(path: str, model_hash: str) -> Any:
        opened.append(path)
        return Loading(compares=False).pieces

    with opened_pieces(opens, str(tmp_path), "first") as pieces:
        assert pieces is not None
    (tmp_path / "chitu_tensors.json").touch()
    with opened_pieces(opens, str(tmp_path), "first") as pieces:
        assert pieces is None and len(opened) == 1


def test_a_file_that_is_written_meanwhile_is_not_sent(source: SourceUnderTest, tmp_path: Path) -> None:
    socket, _ = source.opened("D0")
    with (tmp_path / "f").open("r+b") as file:
        file.write(b"x")
    (piece,) = source.ask(socket, *wants(1))
    assert piece.code == "refused" and "was written since" in piece.message and not source.transport.writes
