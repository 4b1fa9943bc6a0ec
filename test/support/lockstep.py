"""Members of a group whose step threads are threads of a test: what they say in a turn, and their bells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from chitu.engine.executor import Shapes
from chitu.engine.lockstep import LockstepExecutor, RecordingExecutor, Turn
from chitu.engine.waves import Wave

PATIENCE_S = 30.0
NO_SHAPES = Shapes(0, 1, False, 0)


class Table:
    """Where the members meet. `note` is called with every turn, once, before any member goes on."""

    def __init__(self, size: int, note: Callable[[list[Turn]], None] = lambda turns: None) -> None:
        self.waves = [Wave() for _ in range(size)]
        self._said: dict[int, Turn] = {}
        self._note = note
        self._barrier = threading.Barrier(size, action=self._tell, timeout=PATIENCE_S)
        self._turns: list[Turn] = []

    def _tell(self) -> None:
        self._turns = [self._said[rank] for rank in range(len(self.waves))]
        self._note(self._turns)

    def say(self, rank: int, mine: Turn) -> list[Turn]:
        self._said[rank] = mine
        self._barrier.wait()  # the next turn needs all members, so `_turns` stays until all have read it
        return self._turns

    def join(self, rank: int, inner: RecordingExecutor, shapes: Shapes = NO_SHAPES) -> LockstepExecutor:
        """Return the executor of a member."""
        return LockstepExecutor(inner, shapes, _Seat(self, rank), _Bells(self.waves, rank), self.waves[rank])

    def abort(self) -> None:
        self._barrier.abort()


class _Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def turns(self, mine: Turn) -> list[Turn]:
        return self._table.say(self._rank, mine)


class _Bells:
    """Ring once, at once."""

    def __init__(self, waves: Sequence[Wave], rank: int) -> None:
        self._others = [wave for at, wave in enumerate(waves) if at != rank]

    def ring(self, wave: int) -> None:
        for other in self._others:
            other.hear(wave)

    def silence(self) -> None: ...

    def close(self) -> None: ...
