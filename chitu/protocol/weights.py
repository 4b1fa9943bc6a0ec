"""Weights that change while the cluster serves: what the router wants (in the view), what an instance has (in its
heartbeats). Both are repeated as a whole, so nothing depends on a message that might be lost."""

from __future__ import annotations

from chitu.protocol.wire import Wire


class Weights(Wire, frozen=True):
    """The weights that an instance computes with."""

    number: int = 0
    """Number of the change that brought them; 0: those that the instance was started with. Larger is newer."""
    model_hash: str = ""
    """As in KVLayout; empty with number 0, where the layout has it."""
    path: str = ""
    """Folder, on every instance."""
    is_mixed: bool = False
    """Requests that ran when they came went on with them."""

    @property
    def age(self) -> tuple[int, str]:
        """Sort key: the larger one is newer. Two changes of one number, of two routers, are ordered by their hash."""
        return self.number, self.model_hash


class WeightsOrder(Wire, frozen=True):
    """What the router wants of every instance, in the view."""

    serve: Weights = Weights()
    """An instance with older ones reads these, changes to them, and gets no request before."""
    prepare: Weights | None = None
    """To be read and checked beside those that serve; without a hash, which the instances report."""
    holds: bool = False
    """New requests wait on the router."""
    freezes: bool = False
    """Instances start no step: what runs there stays as it is."""


class WeightsReport(Wire, frozen=True):
    """What an instance has."""

    serves: Weights = Weights()
    prepared: Weights | None = None
    """Weights that it has read, or could not read."""
    error: str = ""
    """Why it could not."""
