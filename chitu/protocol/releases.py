"""What this release sends to a process of an older one: the same records without the fields that came later.

A process reads the frames of each version from `OLDEST_VERSION` on: what came later has a default. An older process
refuses fields that it does not know, so a record leaves for it in the form that it had there. Who has the version of
the other end asks `encode_for`; the versions themselves come with `Join` and `InstanceInfo.protocol`, with a
registration, and with the topic of a view.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec

from chitu.errors import NoInstance
from chitu.protocol.cluster import InstanceInfo, LoadReport
from chitu.protocol.images import FetchImage, ImageFile, ImagePart
from chitu.protocol.requests import RequestHead, RequestOptions
from chitu.protocol.routes import RouteEntry
from chitu.protocol.weights import Pause, Weights, WeightsOrder, WeightsReport
from chitu.protocol.wire import PROTOCOL_VERSION, Wire, encode

_VIDEO = "videos whose frames have times"


class Added(NamedTuple):
    """A field that a record has since a version of the wire."""

    version: int
    needs: str = ""
    """What a process of an older release cannot do if the field is not at its default. Empty: the field only informs,
    and is left out."""


ADDED: dict[type[msgspec.Struct], dict[str, Added]] = {
    InstanceInfo: {"protocol": Added(21), "release": Added(21), "revision": Added(21), "weights_port": Added(21)},
    FetchImage: {"start": Added(21), "most_bytes": Added(21)},
    ImageFile: {"start": Added(21), "num_bytes": Added(21)},
    ImagePart: {"time": Added(21, _VIDEO), "continues": Added(21, _VIDEO)},
    LoadReport: {"image_load": Added(21)},
    RequestHead: {"encoders": Added(21)},
    RequestOptions: {"adapter_hash": Added(21)},
    RouteEntry: {"group": Added(21)},
    # No member of such a release is in a cluster whose adapters have changed (`ClusterWeights.why_unable`).
    Weights: {"sleep": Added(21), "adapters": Added(21), "base": Added(21)},
    Pause: {"sleep": Added(21), "stays": Added(21)},
    WeightsOrder: {"may_sleep": Added(21)},
    WeightsReport: {"freed_bytes": Added(21), "keeps": Added(21), "no_sleep": Added(21), "leaving": Added(21)},
}
"""By record and field. A record that is an array gets new fields only behind the others."""


def encode_for(version: int, message: Wire) -> bytes:
    """Return a message as a frame that a process with this version of the wire reads. Raises NoInstance if it needs
    what that release does not have."""
    if version >= PROTOCOL_VERSION:
        return encode(message)
    return encode(_older(message, version))


def _older(value: Any, version: int) -> Any:
    """Return a record, or what holds records, as a process with this version knows it."""
    if isinstance(value, msgspec.Struct):
        return _older_record(value, version)
    if isinstance(value, (tuple, list)):
        return [_older(each, version) for each in value] if value and isinstance(value[0], msgspec.Struct) else value
    if isinstance(value, dict):
        return {key: _older(each, version) for key, each in value.items()} if value else value
    return value


def _older_record(record: msgspec.Struct, version: int) -> msgspec.Struct:
    kind = type(record)
    added = {name: one for name, one in ADDED.get(kind, {}).items() if one.version > version}
    for name, one in added.items():
        if one.needs and getattr(record, name) != _fields(kind)[name].default:
            raise NoInstance(f"{one.needs}: the other end has version {version} of the wire, which has none of it")
    values = {name: _older(getattr(record, name), version) for name in kind.__struct_fields__ if name not in added}
    if "protocol_version" in values:
        values["protocol_version"] = version
    if not added:
        is_same = all(values[name] is getattr(record, name) for name in values)
        return record if is_same else msgspec.structs.replace(record, **values)
    return _without(kind, tuple(added))(**values)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a record by name: msgspec evaluates all annotations when asked, for milliseconds."""
    return {field.name: field for field in msgspec.structs.fields(kind)}


@cache
def _without(kind: type[msgspec.Struct], names: tuple[str, ...]) -> type[msgspec.Struct]:
    """Return the record as it was without these fields."""
    config = kind.__struct_config__
    fields: list[Any] = []
    for field in _fields(kind).values():
        if field.name in names:
            continue
        if field.default is not msgspec.NODEFAULT:
            fields.append((field.name, Any, field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.name, Any, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, Any))
    return msgspec.defstruct(
        kind.__name__,
        fields,
        tag=config.tag,
        tag_field=config.tag_field,
        array_like=config.array_like,
        omit_defaults=config.omit_defaults,
        frozen=True,
    )
