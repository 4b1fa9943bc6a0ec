"""What the launcher of a host tells the router of instances whose processes have ended, before their leases expire.

Only a launcher can tell that none of their processes can still write: it knows all of their pids, and sees them gone.
Used by the thread that starts the processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from chitu.config.schema import Topology
from chitu.config.topology import Group, Instance
from chitu.launch.router_calls import send_leaves
from chitu.net.process_deaths import pid_namespace
from chitu.process.progress import Progress
from chitu.process.supervisor import Member
from chitu.protocol import Leave
from chitu.types import place_of

REASON = "its launcher detected the end of its process"


class DeathReports:
    def __init__(self, here: Sequence[Group], members: Mapping[str, Member]) -> None:
        """Report nothing yet. `here`: the torchruns of this host, each in `members` by its name."""
        self._here = [part for part in here if part.name in members]
        self._members = members
        self._pids: dict[str, list[int]] = {}
        """Process ids by name, of all that have become ready and whose end was not reported."""

    def note_pids(self) -> None:
        """Keep the process ids of what is ready, to report later which of them are gone."""
        for part in self._here:
            member = self._members[part.name]
            if part.name not in self._pids and member.child is not None and member.progress.state == "ready":
                self._pids[part.name] = member.child.worker_pids()

    def send(self, topology: Topology) -> None:
        """Report what has ended since the last call, unless it was drained, with the pids that are gone. `topology` has
        the routers."""
        leaves = [leave for part in self._here if part.name in self._pids for leave in self._leaves_of(part)]
        if leaves:
            send_leaves(topology, leaves)

    def _leaves_of(self, part: Group) -> list[Leave]:
        member = self._members[part.name]
        if member.child is not None or member.exit_code is None:
            return []
        gone = tuple(pid for pid in self._pids.pop(part.name) if not os.path.exists(f"/proc/{pid}"))
        if member.has_left:
            return []
        return [
            _leave(instance, last, gone)
            for instance, last in zip(part.members, member.last, strict=True)
            if last.incarnation
        ]


def _leave(instance: Instance, last: Progress, gone: tuple[int, ...]) -> Leave:
    place = place_of(last.place) if last.place else (instance.role, instance.engine_rank)
    return Leave(*place, last.incarnation, REASON, gone, pid_namespace())
