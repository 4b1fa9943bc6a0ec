"""What an older release reads of this one, and this one of it: frames that it printed itself, and its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.wire_samples import filled, records

from chitu.errors import NoInstance
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    CancelRequest,
    ClusterView,
    Drain,
    EncodeOrder,
    InstanceInfo,
    Join,
    JoinReply,
    KVArgsRegisterInfo,
    LinkAck,
    RequestHead,
    TokenBatch,
    TraceLines,
    TransportMessage,
    ViewChange,
    encode,
    encode_for,
)
from chitu.protocol.releases import ADDED
from chitu.protocol.wire import Wire

KEPT: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / f"wire_{OLDEST_VERSION}.json").read_text())
OF_ANY_VERSION = (
    CancelRequest,
    Drain,
    EncodeOrder,
    JoinReply,
    LinkAck,
    TokenBatch,
    TraceLines,
    TransportMessage,
)
"""Records that are sent without a look at the version of the other end. Another one is `ImageFile`, whose new fields go
to who asked for a part."""


def read(kind: type[Wire], frame: bytes) -> Wire:
    decoded: Wire = msgspec.msgpack.decode(frame, type=kind)
    return decoded


@pytest.mark.parametrize("name", KEPT)
def test_a_frame_of_the_older_release_is_read_and_leaves_for_it_as_it_came(name: str) -> None:
    frame = bytes.fromhex(KEPT[name]["frame"])
    record = read(records()[name], frame)
    assert encode_for(OLDEST_VERSION, record) == frame


@pytest.mark.parametrize("name", KEPT)
def test_what_the_older_release_lacks_is_known_and_left_out(name: str) -> None:
    kind = records()[name]
    fields = [field for field in kind.__struct_fields__ if field not in ADDED.get(kind, {})]
    assert fields == KEPT[name]["fields"], (
        "a field that version 20 lacks must be in ADDED, and none of its fields may go"
    )
    newest = without_needed(filled(kind))
    if "protocol_version" in fields:
        newest = msgspec.structs.replace(newest, protocol_version=OLDEST_VERSION)
    assert encode_for(OLDEST_VERSION, newest) == bytes.fromhex(KEPT[name]["frame"])


def without_needed(value: Any) -> Any:
    """Return a record without what an older release must have: `Added.needs`."""
    if isinstance(value, (tuple, list)):
        return type(value)(without_needed(each) for each in value)
    if not isinstance(value, msgspec.Struct):
        return value
    kind = type(value)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    needed = {name for name, added in ADDED.get(kind, {}).items() if added.needs}
    names = kind.__struct_fields__
    told = {name: defaults[name] if name in needed else without_needed(getattr(value, name)) for name in names}
    return msgspec.structs.replace(value, **told)


def test_an_older_release_gets_no_video_whose_times_it_would_ignore() -> None:
    head = filled(RequestHead)
    assert head.images[0].time and head.images[0].continues
    with pytest.raises(NoInstance, match="videos whose frames have times: the other end has version 20"):
        encode_for(OLDEST_VERSION, head)


def test_the_newest_version_gets_the_record_as_it_is() -> None:
    info = filled(InstanceInfo)
    assert encode_for(PROTOCOL_VERSION, info) == encode(info) != encode_for(OLDEST_VERSION, info)
    assert read(InstanceInfo, encode(info)) == info


def test_views_for_an_older_reader_have_members_that_it_reads() -> None:
    info = filled(InstanceInfo)
    for message in (ClusterView(1, 2, (info, info)), ViewChange(1, 2, 1, joined=(info,))):
        frame = encode_for(OLDEST_VERSION, message)
        members = msgspec.msgpack.decode(frame)["instances" if isinstance(message, ClusterView) else "joined"]
        assert set(members[0]) == set(KEPT["InstanceInfo"]["fields"])


@pytest.mark.parametrize("kind", [Join, KVArgsRegisterInfo])
def test_a_record_names_the_version_that_its_frame_has(kind: type[Wire]) -> None:
    frame = encode_for(OLDEST_VERSION, msgspec.structs.replace(filled(kind), protocol_version=PROTOCOL_VERSION))
    assert msgspec.msgpack.decode(frame)["protocol_version"] == OLDEST_VERSION


@pytest.mark.parametrize("kind", OF_ANY_VERSION, ids=lambda kind: kind.__name__)
def test_what_is_sent_to_anyone_is_the_same_in_all_versions(kind: type[Wire]) -> None:
    record = filled(kind)
    assert encode_for(OLDEST_VERSION, record) == encode(record)
