"""P or D with overlapping steps on a late device: a step reads and writes KV, as real bytes, when it runs, after its
launch. Between any two turns it is checked what a launched, unread step may touch."""

from __future__ import annotations

from cluster_process import Process, Surroundings
from cluster_world import ClusterWorld
from routed_world import RoutedWorld

from chitu.testing.late_executor import LateExecutor
from chitu.types import Role


class LateProcess(Process):
    def __init__(self, world: Surroundings, role: Role, rank: int) -> None:
        super().__init__(world, role, rank)
        self.late = LateExecutor(self.executor)
        self.scheduler = self.make_scheduler(self.late, overlap=True)
        self.num_overlapped = 0
        """Number of turns that left a step unread."""

    def step(self) -> bool:
        if self.scheduler.turns % 3 == 0:
            self.late.run_next()
        worked = super().step()
        self.num_overlapped += bool(self.late.unread)
        return worked

    def write(self) -> bool:
        """Write, unless a step runs now: a transfer thread that waits for it goes on later."""
        return not self.late.is_running and super().write()

    def check(self) -> None:
        super().check()
        held = {page for room in self.cache._rooms.values() for page in room.table}
        resources = self.scheduler._resources
        assert len(self.late.unread) == resources.num_unread
        for step in self.late.unread:
            assert step.pages <= held, "a page is free while a launched, unread step has its slot"
            assert not step.slots & set(resources.slots._free), "a slot is free while a launched step has it"
            aux_slots = {sequence.aux_slot for sequence in self.sequences().values()}
            assert step.aux_slots <= aux_slots, "an aux slot is free while a launched step has it"

    def check_empty(self) -> None:
        super().check_empty()
        assert not self.late.unread and not resources_left(self)


def resources_left(process: LateProcess) -> int:
    """Return the number of resources that wait to be released."""
    return len(process.scheduler._resources._leaving)


class LateWorld(ClusterWorld):
    process_type = LateProcess


class LateRoutedWorld(RoutedWorld):
    process_type = LateProcess
