"""Golden frames of the present protocol version, read back by the `msgpack` package, and what decoders refuse.

The hex strings are also printed in docs/protocol.md: a change here is a change of the wire.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from chitu.errors import BadFrame, UnknownKind
from chitu.protocol import (
    MAX_GRAMMAR_CHARS,
    AbortAck,
    AbortTransfer,
    AuxReady,
    CancelRequest,
    Codec,
    DecodeRequest,
    FetchImage,
    Finish,
    Fork,
    Grammar,
    Heartbeat,
    ImageFile,
    ImagePart,
    KVArgsRegisterInfo,
    KVLayout,
    KVSums,
    LinkAck,
    LinkStamp,
    LoadReport,
    PrefillRequest,
    PromptOutput,
    RankMemory,
    RegisterReply,
    RequestHead,
    RequestOptions,
    SamplingParams,
    StateSeal,
    StatusAck,
    TokenBatch,
    TraceLines,
    TransferInfo,
    TransferProgress,
    TransferStatus,
    TransferSums,
    TransportMessage,
    UnifiedRequest,
    ViewChange,
    coordination_codec,
    coordination_reply_codec,
    encode,
    pack_i32,
    pack_logprobs,
    peer_codec,
    peer_frames,
    scheduler_codec,
    stats_codec,
    token_codec,
    unpack_i32,
    view_codec,
)
from chitu.protocol.account import PrefillTimes, StageTimes
from chitu.protocol.profile import ProfileOrder
from chitu.types import Role

ROOM = bytes(range(16))
PROTOCOL_MD = Path(__file__).parents[2] / "docs" / "protocol.md"

IMAGE = ImagePart(ROOM, ((1, 4, 0),), (1, 2, 2))
LAYOUT = KVLayout.uniform("m", 1, 1, 2, 1, "float32", 8)
NO_LOAD = {
    **dict.fromkeys(LoadReport.__struct_fields__, 0),
    **{"suspended": [], "paths": [], "rates": {}, "drafts": {}, "image_load": {}},
}
GOLDEN: list[tuple[msgspec.Struct, Codec[Any], str, object]] = [
    (
        TraceLines(Role.DECODE, 1, 7, b"{}\n", 2),
        stats_codec,
        "86a474797065ab74726163655f6c696e6573a4726f6c65a66465636f6465ab656e67696e655f72616e6b01ab696e6361726e6174696f6e07a56c696e6573c4037b7d0aab6e756d5f64726f7070656402",
        {
            "type": "trace_lines",
            "role": "decode",
            "engine_rank": 1,
            "incarnation": 7,
            "lines": b"{}\n",
            "num_dropped": 2,
        },
    ),
    (
        ViewChange(7, 5, 4, left=((Role.DECODE, 3),), dead=(9,)),
        view_codec,
        "86a474797065ab766965775f6368616e6765b2726f757465725f696e6361726e6174696f6e07a776657273696f6e05a5616674657204a46c6566749192a66465636f646503a4646561649109",
        {
            "type": "view_change",
            "router_incarnation": 7,
            "version": 5,
            "after": 4,
            "left": [["decode", 3]],
            "dead": [9],
        },
    ),
    (
        TransferInfo(7, pack_i32([3, 4, 260]), 2, 40),
        peer_codec,
        "85a474797065ad7472616e736665725f696e666fab696e6361726e6174696f6e07ae6473745f6b765f696e6469636573c40c030000000400"
        "000004010000ad6473745f6175785f696e64657802aa6e756d5f746f6b656e7328",
        {
            "type": "transfer_info",
            "incarnation": 7,
            "dst_kv_indices": b"\x03\0\0\0\x04\0\0\0\x04\x01\0\0",
            "dst_aux_index": 2,
            "num_tokens": 40,
        },
    ),
    (
        TransferInfo(7, pack_i32([3, 4, 260]), 2, 40, page_sums=True),
        peer_codec,
        "86a474797065ad7472616e736665725f696e666fab696e6361726e6174696f6e07ae6473745f6b765f696e6469636573c40c030000000400"
        "000004010000ad6473745f6175785f696e64657802aa6e756d5f746f6b656e7328a9706167655f73756d73c3",
        {
            "type": "transfer_info",
            "incarnation": 7,
            "dst_kv_indices": b"\x03\0\0\0\x04\0\0\0\x04\x01\0\0",
            "dst_aux_index": 2,
            "num_tokens": 40,
            "page_sums": True,
        },
    ),
    (
        TransferStatus(9, 4, bytes_per_rank=(4096,)),
        peer_codec,
        "84a474797065af7472616e736665725f737461747573ab696e6361726e6174696f6e09a4706f6c6c04ae62797465735f7065725f72616e6b"
        "91cd1000",
        {"type": "transfer_status", "incarnation": 9, "poll": 4, "bytes_per_rank": [4096]},
    ),
    (
        TransferStatus(9, 4, bytes_per_rank=(4096,), uncached=True),
        peer_codec,
        "85a474797065af7472616e736665725f737461747573ab696e6361726e6174696f6e09a4706f6c6c04ae62797465735f7065725f72616e6b"
        "91cd1000a8756e636163686564c3",
        {"type": "transfer_status", "incarnation": 9, "poll": 4, "bytes_per_rank": [4096], "uncached": True},
    ),
    (
        TransferStatus(
            9, 4, bytes_per_rank=(4096,), kv_sums=KVSums(pack_i32([0, 2]), struct.pack("<2q", 7, -1), "shm")
        ),
        peer_codec,
        "85a474797065af7472616e736665725f737461747573ab696e6361726e6174696f6e09a4706f6c6c04ae62797465735f7065725f72616e6b"
        "91cd1000a76b765f73756d7383a9706f736974696f6e73c4080000000002000000a473756d73c4100700000000000000ffffffffffffffff"
        "a97472616e73706f7274a373686d",
        {
            "type": "transfer_status",
            "incarnation": 9,
            "poll": 4,
            "bytes_per_rank": [4096],
            "kv_sums": {
                "positions": b"\0\0\0\0\x02\0\0\0",
                "sums": b"\x07\0\0\0\0\0\0\0" + b"\xff" * 8,
                "transport": "shm",
            },
        },
    ),
    (
        TransferStatus(9, 4, bytes_per_rank=(4096,), state=StateSeal(40, 7, -1)),
        peer_codec,
        "85a474797065af7472616e736665725f737461747573ab696e6361726e6174696f6e09a4706f6c6c04ae62797465735f7065725f72616e6b"
        "91cd1000a5737461746583aa6e756d5f746f6b656e7328a664696765737407a373756dff",
        {
            "type": "transfer_status",
            "incarnation": 9,
            "poll": 4,
            "bytes_per_rank": [4096],
            "state": {"num_tokens": 40, "digest": 7, "sum": -1},
        },
    ),
    (
        TransferInfo(7, pack_i32([3]), 2, 4, dst_state_index=5),
        peer_codec,
        "86a474797065ad7472616e736665725f696e666fab696e6361726e6174696f6e07ae6473745f6b765f696e6469636573c40403000000ad64"
        "73745f6175785f696e64657802aa6e756d5f746f6b656e7304af6473745f73746174655f696e64657805",
        {
            "type": "transfer_info",
            "incarnation": 7,
            "dst_kv_indices": b"\x03\0\0\0",
            "dst_aux_index": 2,
            "num_tokens": 4,
            "dst_state_index": 5,
        },
    ),
    (
        TransferStatus(9, 0, False, "transfer_failed", "x"),
        peer_codec,
        "86a474797065af7472616e736665725f737461747573ab696e6361726e6174696f6e09a4706f6c6c00a7736574746c6564c2a4636f6465af"
        "7472616e736665725f6661696c6564a76d657373616765a178",
        {
            "type": "transfer_status",
            "incarnation": 9,
            "poll": 0,
            "settled": False,
            "code": "transfer_failed",
            "message": "x",
        },
    ),
    (
        StatusAck(7, 4),
        peer_codec,
        "83a474797065aa7374617475735f61636bab696e6361726e6174696f6e07a4706f6c6c04",
        {"type": "status_ack", "incarnation": 7, "poll": 4},
    ),
    (
        AuxReady(9),
        peer_codec,
        "82a474797065a96175785f7265616479ab696e6361726e6174696f6e09",
        {"type": "aux_ready", "incarnation": 9},
    ),
    (
        TransferProgress(9, 300),
        peer_codec,
        "83a474797065b17472616e736665725f70726f6772657373ab696e6361726e6174696f6e09a66e756d626572cd012c",
        {"type": "transfer_progress", "incarnation": 9, "number": 300},
    ),
    (
        AbortTransfer(7),
        peer_codec,
        "82a474797065ae61626f72745f7472616e73666572ab696e6361726e6174696f6e07",
        {"type": "abort_transfer", "incarnation": 7},
    ),
    (
        AbortAck(9),
        peer_codec,
        "82a474797065a961626f72745f61636bab696e6361726e6174696f6e09",
        {"type": "abort_ack", "incarnation": 9},
    ),
    (
        TransportMessage(9, "mooncake", b"\x01\x02"),
        peer_codec,
        "84a474797065b17472616e73706f72745f6d657373616765ab696e6361726e6174696f6e09a97472616e73706f7274a86d6f6f6e63616b"
        "65a77061796c6f6164c4020102",
        {"type": "transport_message", "incarnation": 9, "transport": "mooncake", "payload": b"\x01\x02"},
    ),
    (
        KVArgsRegisterInfo(3, 0, 7, "h", 5, LAYOUT, (RankMemory(0, (), 0, 99, (0,), (8,), 4, 32, 8, 1),)),
        peer_codec,
        "",
        {
            "type": "kv_args_register_info",
            "protocol_version": 3,
            "engine_rank": 0,
            "incarnation": 7,
            "endpoint": "h",
            "dst_port": 5,
            "layout": {
                "model_hash": "m",
                "page_size": 1,
                "dtype": "float32",
                "vocab_size": 8,
                "groups": [{"layers": [0], "num_kv_heads": 1, "head_dims": [2, 2]}],
            },
            "ranks": [
                {
                    "tp_rank": 0,
                    "sessions": [],
                    "arena_base": 0,
                    "arena_bytes": 99,
                    "region_bases": [0],
                    "page_bytes": [8],
                    "num_pages": 4,
                    "aux_base": 32,
                    "aux_row_bytes": 8,
                    "num_aux_slots": 1,
                }
            ],
        },
    ),
    (
        RegisterReply(0, 9, 7),
        peer_codec,
        "",
        {"type": "register_reply", "engine_rank": 0, "incarnation": 9, "peer_incarnation": 7},
    ),
    (
        PrefillRequest(
            RequestHead(ROOM, "cmpl-1", pack_i32([1, 2]), weights=2, options=RequestOptions(adapter="sql")),
            *(0, 7, PromptOutput(pooling="last"), LinkStamp(5, 3, 1), SamplingParams(max_tokens=1, seed=9)),
        ),
        scheduler_codec,
        "",
        {
            "type": "prefill_request",
            "head": {
                "room": ROOM,
                "request_id": "cmpl-1",
                "token_ids": b"\x01\0\0\0\x02\0\0\0",
                "weights": 2,
                "options": {"adapter": "sql"},
            },
            "decode_rank": 0,
            "decode_incarnation": 7,
            "output": {"pooling": "last"},
            "stamp": [5, 3, 1],
            "early": {"max_tokens": 1, "seed": 9},
        },
    ),
    (
        PrefillRequest(RequestHead(ROOM, "c", pack_i32([1, 7, 7, 7, 7]), images=(IMAGE,), encoders=(2,)), 1, 7),
        scheduler_codec,
        "84a474797065af70726566696c6c5f72657175657374a46865616485a4726f6f6dc410000102030405060708090a0b0c0d0e0faa726571756573745f6964a163a9746f6b656e5f696473c4140100000007000000070000000700000007000000a6696d616765739195c410000102030405060708090a0b0c0d0e0f91930104009301020200c2a8656e636f646572739102ab6465636f64655f72616e6b01b26465636f64655f696e6361726e6174696f6e07",
        {
            "type": "prefill_request",
            "head": {
                "room": ROOM,
                "request_id": "c",
                "token_ids": pack_i32([1, 7, 7, 7, 7]),
                "images": [[ROOM, [[1, 4, 0]], [1, 2, 2], 0, False]],
                "encoders": [2],
            },
            "decode_rank": 1,
            "decode_incarnation": 7,
        },
    ),
    (
        FetchImage(ROOM),
        coordination_codec,
        "82a474797065ab66657463685f696d616765a36b6579c410000102030405060708090a0b0c0d0e0f",
        {"type": "fetch_image", "key": ROOM},
    ),
    (
        ImageFile(ROOM, b"GIF"),
        coordination_reply_codec,
        "83a474797065aa696d6167655f66696c65a36b6579c410000102030405060708090a0b0c0d0e0fa464617461c403474946",
        {"type": "image_file", "key": ROOM, "data": b"GIF"},
    ),
    (
        ProfileOrder(7, "20261129-164000", 5.0, 50),
        coordination_reply_codec,
        "85a474797065a770726f66696c65ab696e6361726e6174696f6e07a56c6162656caf32303236313132392d313634303030a77365636f6e6473cb4014000000000000a5737465707332",
        {"type": "profile", "incarnation": 7, "label": "20261129-164000", "seconds": 5.0, "steps": 50},
    ),
    (
        DecodeRequest(
            RequestHead(ROOM, "cmpl-1", b"", 2, 1, options=RequestOptions(None, -3, "frames")),
            *(SamplingParams(16, seed=5), (Fork(ROOM, "f", 4),), 16),
            prefill_rank=0,
            prefill_incarnation=9,
        ),
        scheduler_codec,
        "",
        {
            "type": "decode_request",
            "head": {
                "room": ROOM,
                "request_id": "cmpl-1",
                "token_ids": b"",
                "num_emitted": 2,
                "router": 1,
                "options": {"cache_salt": None, "priority": -3, "trace": "frames"},
            },
            "sampling": {"max_tokens": 16, "seed": 5},
            "forks": [[ROOM, "f", 4]],
            "token_group": 16,
            "prefill_rank": 0,
            "prefill_incarnation": 9,
        },
    ),
    (
        UnifiedRequest(RequestHead(ROOM, "cmpl-1", b""), SamplingParams(16, grammar=Grammar("regex", "a+"))),
        scheduler_codec,
        "",
        {
            "type": "unified_request",
            "head": {"room": ROOM, "request_id": "cmpl-1", "token_ids": b""},
            "sampling": {"max_tokens": 16, "grammar": {"kind": "regex", "text": "a+"}},
        },
    ),
    (CancelRequest(ROOM), scheduler_codec, "", {"type": "cancel_request", "room": ROOM}),
    (
        CancelRequest(ROOM, LinkStamp(5, 2)),
        scheduler_codec,
        "",
        {"type": "cancel_request", "room": ROOM, "stamp": [5, 2, 0]},
    ),
    (
        LinkAck(5, 9, has_gap=True),
        scheduler_codec,
        "84a474797065a86c696e6b5f61636ba46c696e6b05a46c61737409a76861735f676170c3",
        {"type": "link_ack", "link": 5, "last": 9, "has_gap": True},
    ),
    (
        TokenBatch(
            7,
            [ROOM],
            [42],
            [
                Finish(
                    ROOM,
                    "stop",
                    kv_bytes=3,
                    stages=StageTimes(PrefillTimes(0.5), total_s=2.0),
                    page_sums=b"1234",
                    transfer_sums=TransferSums(2, 1, b"56", b"78"),
                    drafts=(("text", 9, 3),),
                )
            ],
            8,
            2,
            1,
            [],
            [(ROOM, 16)],
            groups=[(ROOM, [1, 2])],
            early=[(ROOM, 3)],
        ),
        token_codec,
        "",
        [
            "token_batch",
            7,
            [ROOM],
            [42],
            [
                [
                    ROOM,
                    "stop",
                    "",
                    "",
                    3,
                    {
                        "prefill": {"queue_s": 0.5, "compute_s": 0.0, "transfer_s": 0.0},
                        "admission_s": 0.0,
                        "first_token_s": 0.0,
                        "kv_landed_s": 0.0,
                        "total_s": 2.0,
                    },
                    b"1234",
                    [2, 1, b"56", b"78"],
                    [["text", 9, 3]],
                ]
            ],
            8,
            2,
            1,
            [],
            [[ROOM, 16]],
            [],
            "",
            [[ROOM, [1, 2]]],
            [[ROOM, 3]],
        ],
    ),
    (
        TokenBatch(7, [ROOM, ROOM], [42, 5], [], 9, 0, 0, [(1, pack_logprobs(-1.5, [(42, -0.5), (5, -1.5)]))]),
        token_codec,
        "9eab746f6b656e5f62617463680792c410000102030405060708090a0b0c0d0e0fc410000102030405060708090a0b0c0d0e0f922a0590090000919201c4140000c0bf2a000000000000bf050000000000c0bf9090a09090",
        [
            "token_batch",
            7,
            [ROOM, ROOM],
            [42, 5],
            [],
            9,
            0,
            0,
            [[1, struct.pack("<fifif", -1.5, 42, -0.5, 5, -1.5)]],
            [],
            [],
            "",
            [],
            [],
        ],
    ),
    (
        Heartbeat(Role.DECODE, 1, 7, LoadReport(running=2)),
        stats_codec,
        "",
        {
            "type": "heartbeat",
            "role": "decode",
            "engine_rank": 1,
            "incarnation": 7,
            "load": {
                **NO_LOAD,
                "running": 2,
            },
        },
    ),
    (
        Heartbeat(Role.DECODE, 1, 7, LoadReport(), (LinkAck(5, 9),), 3, (8, 6)),
        stats_codec,
        "",
        {
            "type": "heartbeat",
            "role": "decode",
            "engine_rank": 1,
            "incarnation": 7,
            "load": NO_LOAD,
            "acks": [{"type": "link_ack", "link": 5, "last": 9}],
            "reads": 3,
            "silent": [8, 6],
        },
    ),
]
names = [f"{type(message).__name__}-{n}" for n, (message, *_) in enumerate(GOLDEN)]


@pytest.mark.parametrize(("message", "codec", "golden", "plain"), GOLDEN, ids=names)
def test_a_message_has_its_golden_bytes_and_any_msgpack_reader_sees_the_same_fields(
    message: Any, codec: Codec[Any], golden: str, plain: object
) -> None:
    frame = encode(message)
    if golden:
        assert frame.hex() == golden
        assert golden in PROTOCOL_MD.read_text(), "docs/protocol.md prints another frame"
    assert msgpack.unpackb(frame) == plain
    assert codec.decode(frame) == message
    assert codec.decode(msgpack.packb(plain)) == message


def test_a_peer_message_is_two_frames_with_the_raw_room_first() -> None:
    room, payload = peer_frames(ROOM, AuxReady(9))
    assert room == ROOM and peer_codec.decode(payload) == AuxReady(9)


@pytest.mark.parametrize(
    ("plain", "error"),
    [
        ({"type": "from_the_future", "incarnation": 1}, UnknownKind),
        ({"type": "aux_ready", "incarnation": 1, "extra": 1}, BadFrame),
        ({"type": "aux_ready"}, BadFrame),
        ({"type": "aux_ready", "incarnation": "1"}, BadFrame),
        ({"incarnation": 1}, BadFrame),
        (["aux_ready", 1], BadFrame),
        (None, BadFrame),
        ({"type": "token_batch", "incarnation": 1}, UnknownKind),
    ],
)
def test_a_frame_of_an_unknown_kind_or_with_other_fields_is_refused(plain: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        peer_codec.decode(msgpack.packb(plain))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x82\xa4type", b"\xff" * 100, b"\x91" * 100_000])
def test_garbage_is_a_bad_frame_and_nothing_else(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        peer_codec.decode(frame)


def test_a_frame_above_the_size_limit_is_refused_unread() -> None:
    codec: Codec[Any] = Codec(AuxReady, max_bytes=10)
    with pytest.raises(BadFrame, match="at most 10"):
        codec.decode(encode(AuxReady(9)))


def test_int_arrays_are_int32_little_endian_and_refuse_what_does_not_fit() -> None:
    assert pack_i32([1, -1, 2**31 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"
    assert list(unpack_i32(pack_i32([5, 6]))) == [5, 6]
    with pytest.raises(OverflowError):
        pack_i32([2**31])
    with pytest.raises(BadFrame):
        unpack_i32(b"\0\0\0")


def test_layouts_name_every_field_that_differs() -> None:
    mine = KVLayout.uniform("a", 2, 2, 16, 16, "float32", 100)
    assert mine.mismatches(mine) == []
    theirs = msgspec.structs.replace(mine, page_size=8, dtype="bfloat16")
    assert mine.mismatches(theirs) == ["page_size: 16 != 8", "dtype: float32 != bfloat16"]


def test_a_grammar_of_an_unknown_kind_or_above_its_bound_is_refused() -> None:
    def request(grammar: Grammar) -> bytes:
        return encode(UnifiedRequest(RequestHead(ROOM, "r", b""), SamplingParams(16, grammar=grammar)))

    scheduler_codec.decode(request(Grammar("regex", "a" * MAX_GRAMMAR_CHARS)))
    for refused in (Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), Grammar("yaml", "")):  # type: ignore[arg-type]
        with pytest.raises(BadFrame):
            scheduler_codec.decode(request(refused))
