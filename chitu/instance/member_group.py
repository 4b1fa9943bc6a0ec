"""The group of an instance, as the main rank of a member knows it: instances of one torchrun that end together.

Main thread. The members meet once after their engines are built, and again at the end: none ends before all have
finished their requests, since the end of one process ends the others at once (`ProcessWatch`). In between each is an
instance of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import msgspec

from chitu.engine.process_watch import ProcessWatch
from chitu.engine.rank_groups import RankGroup
from chitu.protocol import GroupPlace
from chitu.types import Incarnation

logger = logging.getLogger(__name__)


class _Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member tells all others at the start."""

    pid: int
    incarnation: int


class MemberGroup:
    def __init__(self, ranks: RankGroup, incarnation: Incarnation) -> None:
        """Meet the other members, and end with them from now on. Collective. `ranks`: the main ranks."""
        mine = msgspec.msgpack.encode(_Hello(os.getpid(), incarnation))
        hellos = [msgspec.msgpack.decode(each, type=_Hello) for each in ranks.collect(mine)]
        self.place = GroupPlace(hellos[0].incarnation, ranks.rank, ranks.size)
        self._ranks = ranks
        self._watch = ProcessWatch([hello.pid for hello in hellos if hello.pid != os.getpid()])
        logger.info("member %d of a group of %d (%d)", self.place.rank, self.place.size, self.place.id)

    def begin_end(self) -> Callable[[], bool]:
        """Say that this member has finished, and let the others end as they will. Return what tells whether all have
        finished, or one has died."""
        self._watch.disarm()
        is_over = self._ranks.begin_barrier()

        def all_finished() -> bool:
            try:
                return is_over()
            except RuntimeError as error:
                logger.error("another member of the group has ended before it had finished: %s", error)
                return True

        return all_finished
