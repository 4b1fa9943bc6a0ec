"""`MooncakePages`: a page store by Mooncake Store, which all instances of a cluster share.

Called by the thread `tier-store` alone, except `connect`. These properties of mooncake-transfer-engine-non-cuda
0.3.13.post1 over TCP shape it:

* A call waits 4 s if the master is dead, and 30 s if the master or a client that holds the record does not answer. No
  setting of ours shortens that. Beside the transport `mooncake`, whose settings apply to the whole process, a frozen
  client blocks it for as long. `SlowTier` waits for none of it.
* `setup` holds the GIL for 90 s if the master is dead, and for longer if it does not answer: the whole process stands
  still. So it is called only if a master has just answered, and before the instance serves.
* Calls return codes, or empty bytes for a record that cannot be read. `health_check` returns 0 for a dead master.
* The first record of a key stays: a second put returns 0 and changes nothing. So a record that changed is removed.
* We use the calls that copy (`put_batch`, `get_batch`): memory given to a call that fails may be written to later.
* It listens on all addresses, without any credential: use a trusted network only. GPU memory is never given to it.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from chitu.config.schema import StoreConfig
from chitu.errors import MissingDependency
from chitu.kv_cache.tiers.pages import StoreError

logger = logging.getLogger(__name__)

P2P = "P2PHANDSHAKE"
CALL_BYTES = 64 << 20
"""Most bytes in one call, except for a single larger record. The library's own buffer is twice as large."""
NOT_THERE = -704
ANSWER_S = 2.0
"""Timeout of the check that a master answers, before a client is set up."""


def require_mooncake_store() -> None:
    """Raise MissingDependency if the package cannot be imported."""
    try:
        importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        raise MissingDependency(f"cache.store needs mooncake-transfer-engine: {error}") from error


class MooncakePages:
    """A client of Mooncake Store. `host` is the address at which other clients reach it. `record_bytes` is the size of
    each record."""

    def __init__(self, config: StoreConfig, host: str, record_bytes: int) -> None:
        require_mooncake_store()
        self._config = config
        self._host = host
        self._call_bytes = max(CALL_BYTES, record_bytes)
        self._at_once = max(1, CALL_BYTES // record_bytes)
        self._store: Any = None

    def connect(self) -> None:
        """Connect to the store. Called by the main thread, before the instance serves. If the store is not available,
        each later call tries again."""
        try:
            self._connected()
        except StoreError as error:
            logger.warning("the prefix cache starts without its store: %s", error)

    def may_have(self, key: bytes) -> bool:
        return True

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        store = self._connected()
        for start in range(0, len(keys), self._at_once):
            end = start + self._at_once
            code = store.put_batch([_name(key) for key in keys[start:end]], list(records[start:end]))
            if code:
                raise StoreError(f"Mooncake Store at {self._config.master} stored no pages (code {code})")

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        store, count = self._connected(), 0
        for start in range(0, len(keys), self._at_once):
            names = [_name(key) for key in keys[start : start + self._at_once]]
            known = store.batch_is_exist(names)
            if known and known[0] < 0:
                raise StoreError(f"Mooncake Store at {self._config.master} does not answer (code {known[0]})")
            num_known = next((place for place, one in enumerate(known) if one != 1), len(known))
            values = store.get_batch(names[:num_known]) if num_known else []
            for value in values:
                if len(value) != len(records[count]):
                    return count
                records[count][:] = value
                count += 1
            if num_known < len(names):
                break
        return count

    def forget(self, key: bytes) -> None:
        code = self._connected().remove(_name(key), True)
        if code not in (0, NOT_THERE):
            raise StoreError(f"Mooncake Store at {self._config.master} removed no page (code {code})")

    def touch(self, chain: Sequence[bytes]) -> None:
        """Do nothing: the store tracks reads itself."""

    def clear(self) -> None:
        """Do nothing: the store is shared with other instances."""

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _connected(self) -> Any:
        if self._store is None:
            _require_master(self._config.master or "")
            os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
            store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
            config = self._config
            code = store.setup(
                *(self._host, P2P, config.segment_bytes, 2 * self._call_bytes),
                *(config.protocol, config.device, config.master),
            )
            if code:
                store.close()
                raise StoreError(f"no Mooncake Store at {config.master} (code {code})")
            logger.info("connected to Mooncake Store at %s", config.master)
            self._store = store
        return self._store


def _require_master(address: str) -> None:
    """Raise StoreError unless a master reads there: it closes a connection that does not follow its protocol. A dying
    master closes it, too, but not twice."""
    host, _, port = address.rpartition(":")
    try:
        for _ in range(2):
            with (
                socket.create_connection((host.strip("[]"), port), ANSWER_S) as connection,
                suppress(ConnectionResetError),
            ):
                connection.sendall(bytes(64))
                connection.recv(1)
    except OSError as error:
        raise StoreError(f"no Mooncake Store at {address}: {error}") from error


def _name(key: bytes) -> str:
    return f"chitu-kv-{key.hex()}"
