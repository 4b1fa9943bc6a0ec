"""`UserPages`: a page store of a user's own (`cache.store.plugin`).

The class has `store_put(keys, records)` and `store_get(keys, records) -> count`, as `PageStore` describes them, and may
have `forget`, `touch`, `clear` and `close`. It is made as `Class(options)`, by the main thread, and then called by one
thread alone. What it does wrong costs a cached page, never a request: an exception turns the store off for a while, as
a slow call does (`SlowTier`), and wrong bytes are found by their checksum. It gets copies: what it does with a buffer
after a call has ended reaches no page.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from chitu.errors import ConfigError
from chitu.kv_cache.tiers.pages import StoreError

ENTRY_POINTS = "chitu.page_stores"
"""Group of entry points whose names `cache.store.plugin` may have."""
KEY = "cache.store.plugin"


def load_store(plugin: str, options: Mapping[str, Any]) -> UserPages:
    """Make the store. `plugin`: `module:Class`, or the name of an entry point. Raise ConfigError if that fails."""
    try:
        kind = _class_of(plugin)
        store = kind(dict(options))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{KEY}: {plugin} cannot be made: {type(error).__name__}: {error}") from error
    missing = [name for name in ("store_put", "store_get") if not callable(getattr(store, name, None))]
    if missing:
        raise ConfigError(f"{KEY}: {plugin} has no {' and no '.join(missing)}")
    return UserPages(plugin, store)


def _class_of(plugin: str) -> Callable[[dict[str, Any]], Any]:
    module, colon, name = plugin.partition(":")
    if colon:
        found: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
        return found
    known = entry_points(group=ENTRY_POINTS)
    if plugin not in known.names:
        names = ", ".join(sorted(known.names)) or "none"
        raise ConfigError(
            f"{KEY}: {plugin!r} is no module:Class and no entry point of {ENTRY_POINTS}, which has {names}"
        )
    loaded: Callable[[dict[str, Any]], Any] = known[plugin].load()
    return loaded


class UserPages:
    """A `PageStore` over the user's `store`."""

    def __init__(self, name: str, store: Any) -> None:
        self._name = name
        self._store = store

    def may_have(self, key: bytes) -> bool:
        return True

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        self._call("store_put", list(keys), [bytes(record) for record in records])

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        buffers = [bytearray(len(record)) for record in records]
        count = self._call("store_get", list(keys), [memoryview(buffer) for buffer in buffers])
        if type(count) is not int or not 0 <= count <= len(records):
            raise StoreError(f"{self._name}.store_get returned {count!r:.40}, for {len(records)} pages")
        for record, buffer in zip(records[:count], buffers, strict=False):
            record[:] = buffer
        return count

    def forget(self, key: bytes) -> None:
        self._call("forget", key)

    def touch(self, chain: Sequence[bytes]) -> None:
        self._call("touch", list(chain))

    def clear(self) -> None:
        self._call("clear")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the user's store, if it has that. Raise StoreError for whatever it raises."""
        method = getattr(self._store, name, None)
        if method is None:
            return None
        try:
            return method(*arguments)
        except (Exception, SystemExit) as error:
            raise StoreError(f"{self._name}.{name}: {type(error).__name__}: {error}") from error
