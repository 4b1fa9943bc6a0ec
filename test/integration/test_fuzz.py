"""Random and mutated frames on every socket of a live router, P and D: no process dies, and afterwards all is as
before."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq
from completions import complete_all, instance_loads, is_whole
from draws import IS_NIGHTLY, often
from nursery import FORKED
from support.requests import decode_request, prefill_request, unified_request
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive, make_context
from chitu.protocol import (
    PROTOCOL_VERSION,
    AbortAck,
    AbortTransfer,
    AuxReady,
    CancelRequest,
    Drain,
    Finish,
    Heartbeat,
    InstanceInfo,
    Join,
    KVArgsRegisterInfo,
    KVLayout,
    Leave,
    LinkAck,
    LinkStamp,
    LoadReport,
    RankMemory,
    RegisterReply,
    RequestFailed,
    SamplingParams,
    StatusAck,
    TokenBatch,
    TransferInfo,
    TransferStatus,
    TransportMessage,
    TransportSession,
    encode,
    pack_i32,
)
from chitu.types import REGISTRATION_ROOM, Role

PD = "dp_config.router.pd_disaggregation"
NUM_FRAMES = often(30_000)
"""Number of frames over all sockets."""
SEED = random.randrange(1 << 32) if IS_NIGHTLY else 1
ROOM = bytes(range(16))
PROMPTS = [[20, 30, 40, 50, 60], list(range(100, 180))]
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

SAMPLING = SamplingParams(max_tokens=4)
SESSIONS = (TransportSession("shm", "s", {"pid": "1"}),)
MEMORY = RankMemory(0, SESSIONS, 4096, 8192, (4096, 5000), (64, 64), 4, 7000, 64, 2)
REQUESTS = [
    prefill_request(ROOM, "r", pack_i32([1, 2, 3]), 0, 5),
    decode_request(ROOM, "r", pack_i32([1, 2, 3]), SAMPLING, 0, 5),
    decode_request(ROOM, "r", pack_i32([1, 2, 3]), SAMPLING, 0, 5, 1, router=9),
    decode_request(ROOM, "r", pack_i32([1, 2, 3]), SAMPLING, 0, 5, 1, router=-1),
    unified_request(ROOM, "r", pack_i32([1, 2, 3]), SAMPLING),
    msgspec.structs.replace(unified_request(ROOM, "r", pack_i32([1, 2, 3]), SAMPLING), prediction=pack_i32([4, 5])),
    CancelRequest(ROOM),
    CancelRequest(ROOM, LinkStamp(1 << 60, 3)),
    CancelRequest(ROOM, LinkStamp(1 << 60, 9, 2)),
    LinkAck(5, 9, True),
]
CONTROL = [
    RegisterReply(0, 5, 6),
    TransferInfo(5, pack_i32([3, 4]), 2, 20),
    TransferStatus(5, 4, bytes_per_rank=(64,)),
    StatusAck(5, 4),
    AuxReady(5),
    TransportMessage(5, "shm", b"\x95\xa5group\x01\x00\xc4\x00\xc4\x00"),
    AbortTransfer(5, "capacity", "x"),
    AbortAck(5),
]
SAID = (LinkAck(7, 9, True),)
STATS = [Heartbeat(Role.PREFILL, 0, 5, LoadReport(), SAID, 4), RequestFailed(Role.PREFILL, 0, 5, ROOM, "capacity", "x")]
COORDINATION = [Leave(Role.DECODE, 7, 5, "x"), Drain(Role.DECODE, 7, 5)]
TOKENS = [
    TokenBatch(5, [ROOM], [3], [Finish(ROOM, "stop", drafts=(("text", 3, 1),))]),
    TokenBatch(5, [ROOM], [3], [], 4, 9, 2),
]
TOKENS.append(TokenBatch(5, [], [], [Finish(ROOM, "stop")], groups=[(ROOM, [3, 4])]))
ODD_VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        1 << 31,
        -(1 << 31),
        (1 << 63) - 1,
        (1 << 64) - 1,
        65536,
        float("nan"),
        float("inf"),
        -1e308,
    ),
    *("", "x" * 3000, "a b", "[::", "\x00", "../../etc", b"", bytes(16), b"\xff" * 7, [], {}, [[]], {"type": "join"}),
]


def mutated(rng: random.Random, message: Any) -> bytes:
    """Return a frame like that of `message`, or nothing like it."""
    kind = rng.randrange(4)
    frame = bytearray(encode(message))
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        return bytes(frame)
    if kind == 2:
        start = rng.randrange(len(frame))
        return bytes(frame[:start] + rng.randbytes(rng.randrange(3)) + frame[start + rng.randrange(4) :])
    value = msgspec.msgpack.decode(bytes(frame), strict=False)
    _replace_some(rng, value)
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError):
        return b""


def _replace_some(rng: random.Random, node: Any) -> None:
    keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = rng.choice(keys)
    below = node[key]
    if isinstance(below, dict | list) and below and rng.random() < 0.7:
        _replace_some(rng, below)
    elif isinstance(node, dict) and rng.random() < 0.1:
        node["".join(rng.choices(string.ascii_letters, k=5))] = rng.choice(ODD_VALUES)
    else:
        node[key] = rng.randbytes(16) if key == "room" and rng.random() < 0.5 else rng.choice(ODD_VALUES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    short = [f"{PD}.deadlines.{name}=2" for name in ("bootstrap_s", "queue_s", "transfer_s")]
    overrides = [f"model.path={TINY_MODEL_DIR}", "model.served_name=m", "cache.num_pages=200", f"{PD}.transport=shm"]
    with LocalCluster(load_topology(None, [*overrides, *short]), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def layout_of(cluster: LocalCluster) -> KVLayout:
    """Return the real layout, so that frames get as far as they can."""
    instances = httpx.get(f"{cluster.url}/cluster", trust_env=False, timeout=60.0).json()["instances"]
    return msgspec.convert(instances[0]["layout"], KVLayout)


def ports_of(cluster: LocalCluster, name: str) -> list[int]:
    connections = psutil.Process(cluster.pid(name)).net_connections(kind="tcp")
    return sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN})


def test_frames_of_all_kinds_on_every_socket_cost_nobody_anything(cluster: LocalCluster) -> None:
    before = complete_all(cluster.url, PROMPTS, [GREEDY] * len(PROMPTS))
    pids = {name: cluster.pid(name) for name in ("router", "P0", "D0")}
    layout = layout_of(cluster)
    joins = [  # they yield: some get the number 0, and a key holder may replace rank 0
        Join(PROTOCOL_VERSION, InstanceInfo(role, 7, 5, "127.0.0.1", 1, 2, layout, 512, yields=True))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    registration = KVArgsRegisterInfo(PROTOCOL_VERSION, 7, 5, "127.0.0.1", 1, layout, (MEMORY,))
    targets: list[tuple[int, int, list[Any]]] = [
        (zmq.PUSH, cluster.ports["stats_port"], STATS),
        (zmq.PUSH, cluster.ports["token_port"], TOKENS),
        (zmq.DEALER, cluster.ports["coordination_port"], [*joins, *COORDINATION]),
    ]
    for name in ("P0", "D0"):  # request port or control port: it makes no difference here
        targets += [(zmq.PUSH, port, [*REQUESTS, *CONTROL, *[registration] * 6]) for port in ports_of(cluster, name)]
    assert len(targets) == 3 + 4
    rng = random.Random(SEED)
    context = make_context(derive(cluster_key_of(cluster.topology)))
    for kind, port, messages in targets:
        socket = context.socket(kind)
        socket.setsockopt(zmq.SNDTIMEO, 30_000)
        socket.setsockopt(zmq.LINGER, 30_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(-(-NUM_FRAMES // len(targets))):
            message = rng.choice(messages)
            parts = [mutated(rng, message)]
            if message is registration and rng.random() < 0.8:
                parts.insert(0, REGISTRATION_ROOM)
            elif rng.random() < 0.5:
                parts.insert(0, rng.choice([ROOM, bytes(16), rng.randbytes(16), rng.randbytes(3)]))
            socket.send_multipart(parts)
        socket.close()
    context.term()  # returns when everything is sent

    per_target = NUM_FRAMES // len(targets)

    def is_whole_again() -> bool:
        loads = instance_loads(cluster.url)
        if any(loads.get(name, {}).get("unknown_frames", 0) < per_target for name in ("P0", "D0")):
            return False  # still reading: at least half of the frames on two sockets are invalid
        return all(name in loads and is_whole(loads[name]) for name in ("P0", "D0"))

    wait_until(is_whole_again, 60.0, lambda: instance_loads(cluster.url))
    assert {name: cluster.pid(name) for name in pids} == pids, "nobody died"
    for name in pids:
        log = cluster.logs(name)
        for sign in ("Traceback", "died", "handler failed"):
            assert sign not in log, log[max(0, log.index(sign) - 500) : log.index(sign) + 2500]

    def members() -> list[str]:
        return sorted(
            i["name"] for i in httpx.get(f"{cluster.url}/health", trust_env=False, timeout=60.0).json()["instances"]
        )

    # A well-formed join of an instance that does not exist is believed until its lease ends; `cluster_key` prevents it.
    wait_until(lambda: members() == ["D0", "P0"], 30.0, members)
    after = complete_all(cluster.url, PROMPTS, [GREEDY] * len(PROMPTS))
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
