"""A store of one's own for cached pages: rows of a SQLite file.

    PYTHONPATH=examples chitu serve cache.host_bytes=1000000000 \
        cache.store.plugin=page_store:SQLitePages 'cache.store.options={file: /tmp/pages.sqlite}'

Such a class needs `store_put` and `store_get`. `forget`, `touch`, `clear` and `close` may be left out. One thread calls
it. It may lose pages: those are computed again. docs/kv-cache.md says more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any


class SQLitePages:
    def __init__(self, options: dict[str, Any]) -> None:
        """`options`: those of the topology; `file` is the path of the database, which several processes may share."""
        self._pages = sqlite3.connect(options["file"], check_same_thread=False, isolation_level=None)
        self._pages.execute("PRAGMA journal_mode = WAL")
        self._pages.execute("CREATE TABLE IF NOT EXISTS page (key BLOB PRIMARY KEY, record BLOB) WITHOUT ROWID")

    def store_put(self, keys: Sequence[bytes], records: Sequence[bytes]) -> None:
        """Store these pages. The same key always has the same page."""
        rows = zip(keys, records, strict=True)
        self._pages.executemany("INSERT OR IGNORE INTO page VALUES (?, ?)", rows)

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Fill `records` with the pages of `keys`, up to the first that is not here. Return how many were filled."""
        for count, (key, record) in enumerate(zip(keys, records, strict=True)):
            row = self._pages.execute("SELECT record FROM page WHERE key = ?", (key,)).fetchone()
            if row is None or len(row[0]) != len(record):
                return count
            record[:] = row[0]
        return len(keys)

    def forget(self, key: bytes) -> None:
        """Remove a page that was not what its key says."""
        self._pages.execute("DELETE FROM page WHERE key = ?", (key,))

    def close(self) -> None:
        self._pages.close()
