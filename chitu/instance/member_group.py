"""The group of an instance, as the main rank of a member knows it: instances that end together.

Main thread. The members meet once after their engines are built, and again at the end: none ends before all have
finished their requests, since the end of one process ends the others at once: those of its host (`ProcessWatch`), and
by them those of other hosts (`HostWatch`). In between each is an instance of its own.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

import msgspec

from chitu.engine.process_watch import NOTICE_S, ProcessWatch
from chitu.engine.rank_groups import RankGroup
from chitu.known_types import known
from chitu.protocol import GroupPlace
from chitu.types import Incarnation

logger = logging.getLogger(__name__)


class _Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member tells all others at the start."""

    pid: int
    incarnation: int


class MemberGroup:
    def __init__(self, ranks: RankGroup, incarnation: Incarnation, members_per_host: int, shares_experts: bool) -> None:
        """Meet the other members, and end with them from now on. Collective. `ranks`: the main ranks."""
        mine = msgspec.msgpack.encode(_Hello(os.getpid(), incarnation))
        hellos = [msgspec.msgpack.decode(each, type=known(_Hello)) for each in ranks.collect(mine)]
        self.place = GroupPlace(hellos[0].incarnation, ranks.rank, ranks.size, shares_experts)
        self._ranks = ranks
        self._is_on_several_hosts = members_per_host < ranks.size
        first = ranks.rank - ranks.rank % members_per_host
        here = [hello.pid for hello in hellos[first : first + members_per_host]]
        self._watch = ProcessWatch([pid for pid in here if pid != os.getpid()])
        if ranks.watch is not None:
            ranks.watch.tighten()
        logger.info("member %d of a group of %d (%d)", self.place.rank, self.place.size, self.place.id)

    def begin_end(self, by_signal: bool) -> Callable[[], bool | None]:
        """Say that this member has finished, and let the others end as they will. Return what tells whether it may stay
        away, as an operator wants; None as long as not all have finished. If another host's part was signalled, or has
        ended before, that part comes back and needs this one."""
        self._watch.disarm()
        watch, ends_s = self._ranks.watch, math.inf
        if watch is not None:
            watch.disarm()
        num_signalled = self._ranks.begin_sum(by_signal)

        def may_stay_away() -> bool | None:
            nonlocal ends_s
            try:
                found = num_signalled()
            except RuntimeError as error:
                logger.error("another member of the group has ended before it had finished: %s", error)
                return not self._is_on_several_hosts
            if found is not None:
                return found == 0 or not self._is_on_several_hosts
            if watch is not None and watch.is_broken:  # or it has just ended, and its last word is on its way
                ends_s = min(ends_s, time.monotonic() + NOTICE_S)
            return None if time.monotonic() < ends_s else False

        return may_stay_away
