"""Executor slots: which sequence holds which, and which ones the executor must release."""

from __future__ import annotations

from chitu.instance.scheduling.sequence import Sequence


class SlotPool:
    """The slots of an executor; `owner[slot]` is the sequence in a slot. Step thread only."""

    def __init__(self, num_slots: int) -> None:
        self.owner: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._to_release: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The slot that `take` gives next. The executor may still have to release it (`take_releases`)."""
        return self._free[-1]

    def take(self, sequence: Sequence) -> None:
        """Reserve a slot for a sequence; the caller checked `num_free`."""
        sequence.slot = self._free.pop()
        self.owner[sequence.slot] = sequence

    def free(self, sequence: Sequence, is_offloaded: bool = False) -> None:
        """Free the sequence's slot, if it has one. The next plan releases it if the executor has admitted the sequence.
        `is_offloaded`: the executor itself does, after it has saved its pages."""
        slot, is_known = sequence.slot, sequence.admitted
        if slot < 0:
            return
        sequence.slot, sequence.admitted = -1, False
        self.owner[slot] = None
        self._free.append(slot)
        if is_known and not is_offloaded:
            self._to_release.append(slot)

    def take_releases(self) -> list[int]:
        """Return and clear the slots that the next plan must release, which it does before it admits any sequence."""
        releases, self._to_release = self._to_release, []
        return releases
