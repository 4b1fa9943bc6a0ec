"""`MooncakePages`: a page store by Mooncake Store, which all instances of a cluster share.

Called by the thread `tier-store` alone, but for `connect`. What shapes it, of mooncake-transfer-engine-non-cuda
0.3.13.post1 over TCP:

* A call waits 4 s where the master is dead and 30 s where it, or a client that holds the record, does not answer, and
  no setting of ours shortens that; beside the transport `mooncake`, whose settings are the process's, a client that is
  frozen holds it for as long. `SlowTier` waits for none of it.
* `setup` holds the interpreter's lock, for 90 s where the master is dead and for longer where it does not answer: the
  whole process stands still. So it is called of a master that has just answered, and before the instance serves.
* The answers are return codes, or empty bytes for a record that cannot be had. `health_check` says 0 of a dead master.
* The first record of a key stays: to put another returns 0 and changes nothing. So what was changed is removed.
* Calls copy (`put_batch`, `get_batch`): memory that we hand to the library for a call that fails is written to later.
* It listens on all addresses, without any credential: a trusted network only. GPU memory is never given to it.
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
from chitu.kv_cache.tiers.page_store import StoreError

logger = logging.getLogger(__name__)

P2P = "P2PHANDSHAKE"
CALL_BYTES = 64 << 20
"""In one call at most, but for a single record that has more; the library's own buffer is twice as large."""
NOT_THERE = -704
ANSWER_S = 2.0
"""In which a master answers, before a client is set up."""


def require_mooncake_store() -> None:
    """Raises MissingDependency where the package cannot be imported."""
    try:
        importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        raise MissingDependency(f"cache.store needs mooncake-transfer-engine: {error}") from error


class MooncakePages:
    """`host`: address at which other clients reach this one. `record_bytes`: of each record."""

    def __init__(self, config: StoreConfig, host: str, record_bytes: int) -> None:
        require_mooncake_store()
        self._config = config
        self._host = host
        self._call_bytes = max(CALL_BYTES, record_bytes)
        self._at_once = max(1, CALL_BYTES // record_bytes)
        self._store: Any = None

    def connect(self) -> None:
        """By the main thread, before the instance serves. A store that is not there is looked for again when pages are
        put or wanted."""
        try:
            self._connected()
        except StoreError as error:
            logger.warning("the prefix cache begins without its store: %s", error)

    def may_have(self, key: bytes) -> bool:
        return True

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        store = self._connected()
        for start in range(0, len(keys), self._at_once):
            end = start + self._at_once
            code = store.put_batch([_name(key) for key in keys[start:end]], list(records[start:end]))
            if code:
                raise StoreError(f"Mooncake Store at {self._config.master} took no pages (code {code})")

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
        """It counts what is read by itself."""

    def clear(self) -> None:
        """It is not this instance's own."""

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
            logger.info("Mooncake Store at %s is used", config.master)
            self._store = store
        return self._store


def _require_master(address: str) -> None:
    """Raises StoreError unless a master reads there: it hangs up on what is not of its protocol. One that dies hangs
    up, too, but not twice."""
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
