"""Records of the wire with every field set, made from their types alone.

`python test/support/wire_samples.py` prints what a release keeps of its wire for the next one: for each record its
fields and a frame (`test/unit/wire_20.json` was printed by the last release with version 20).
"""

from __future__ import annotations

import inspect
import json
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

import chitu.protocol
from chitu.protocol import PROTOCOL_VERSION, encode
from chitu.protocol.wire import Wire


def records() -> dict[str, type[Wire]]:
    """Return every record of the wire, by name."""
    found: dict[str, type[Wire]] = {}

    def walk(kind: type[Wire]) -> None:
        for each in kind.__subclasses__():
            if each.__module__.startswith("chitu.protocol"):
                found[each.__name__] = each
            walk(each)

    assert inspect.ismodule(chitu.protocol)
    walk(Wire)
    return dict(sorted(found.items()))


def filled(kind: Any) -> Any:
    """Return a value of a type that is no default: of a record one with every field set."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return filled(next(arg for arg in args if arg is not NoneType))
    if origin in (tuple, list):
        if origin is tuple and args[-1:] != (...,):
            return tuple(filled(arg) for arg in args)
        one = [filled(args[0])]
        return tuple(one) if origin is tuple else one
    if origin is dict:
        return {filled(args[0]): filled(args[1])}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        values = {name: filled(hints[name]) for name in kind.__struct_fields__}
        return kind(**values | ({"protocol_version": PROTOCOL_VERSION} if "protocol_version" in values else {}))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    plain: dict[Any, Any] = {bool: True, int: 11, float: 2.5, str: "s", bytes: bytes(range(16)), Any: 1}
    plain[msgspec.Raw] = msgspec.Raw(b"\x01")
    return plain[origin or kind] if (origin or kind) in plain else get_args(kind)[0]


def kept() -> str:
    """Return the wire of this release as JSON."""
    found = {
        name: {"fields": list(kind.__struct_fields__), "frame": encode(filled(kind)).hex()}
        for name, kind in records().items()
    }
    return json.dumps(found, indent=1)


if __name__ == "__main__":
    print(kept())
