"""Which revision of the instances the next request goes to.

A revision is a label of an instance: an image, weights, a configuration (`InstanceInfo.revision`). A request stays
within one that can serve it alone, a pair, a unified instance or a D that computes prompts. So P and D of two revisions
meet only if no revision can serve alone, and never for the sake of load. Instances without a label belong to each.

Of several that can serve alone, each gets requests by the number of its instances; an operator may set the share of one
(`Canary`), and the others get the rest. Owned by the `Selector`, on the loop thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from chitu.protocol.admin import Canary
from chitu.router.candidates import Candidates, InstanceKey, instance_key

NO_CANARY = Canary("", 0.0)
DRAW_BITS = 32


class Revisions:
    def __init__(self, canary: Canary = NO_CANARY) -> None:
        self.canary = canary
        """Revision whose share an operator has set."""
        self._counts: dict[str, int] = {}
        """Instances of each revision that can serve alone, if several can."""
        self._others: dict[str, Set[InstanceKey]] = {}
        """Instances of the other revisions, by that of a request."""

    @property
    def are_several(self) -> bool:
        """Whether several revisions can serve alone, or one that cannot is there beside one that can."""
        return bool(self._others)

    def arrange(self, candidates: Candidates) -> None:
        """Note what follows from new candidates."""
        members = (*candidates.prefill, *candidates.decode, *candidates.unified)
        counts = Counter(info.revision for info in members if info.revision)
        self._counts, self._others = {}, {}
        if len(counts) < 2:
            return
        for revision, count in counts.items():
            if Candidates.among(info for info in members if info.revision in (revision, "")).usable:
                self._counts[revision] = count
                self._others[revision] = {instance_key(i) for i in members if i.revision not in (revision, "")}

    def draw(self, bits: int) -> Set[InstanceKey]:
        """Return the instances that are not of the next request's revision. `bits`: random ones, at least 32."""
        at = (bits & ((1 << DRAW_BITS) - 1)) / (1 << DRAW_BITS)
        return self._others[self._drawn(at)]

    def _drawn(self, at: float) -> str:
        """Return the revision of a number in [0, 1)."""
        canary = self.canary
        weights = {name: float(count) for name, count in self._counts.items()}
        rest = sum(weights.values()) - weights.get(canary.revision, 0.0)
        if canary.revision in weights and rest:
            weights = {name: count / rest * (1 - canary.share) for name, count in weights.items()}
            weights[canary.revision] = canary.share
        left = at * sum(weights.values())
        for name, weight in weights.items():
            left -= weight
            if left < 0:
                return name
        return max(weights, key=weights.__getitem__)
