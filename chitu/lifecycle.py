"""Every state, event and transition. Pure tables; the code that walks them is `kv_transfer/transfer_table.py`."""

from __future__ import annotations

from enum import IntEnum


class KVPoll(IntEnum):
    """State of a room's transfer. Ranks are merged with MIN, so Failed is lowest; terminal states absorb all events."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4
