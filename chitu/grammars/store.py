"""The compiled grammars of an instance: threads of the store compile them, and the newest are kept.

Only an instance has a store; the router compiles in its body process (`BodyWork.judge`). Thread-safe. Invariant: a
compiled grammar that is still in use can be found here, even after newer ones have evicted it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from chitu.errors import Capacity, ChituError, InvalidRequest
from chitu.grammars.compiler import CompiledGrammar, GrammarCompiler
from chitu.protocol import Grammar

NUM_THREADS = 2
"""More than one, so that a costly grammar does not delay all others."""
MAX_KEPT = 64
"""Outcomes that are kept for later requests with the same grammar."""
MAX_WAITING = 256
"""Grammars that are queued or being compiled."""

Outcome = CompiledGrammar | ChituError


class GrammarStore:
    """Store of compiled grammars. `load` creates the compiler, in a thread, for the first grammar: without grammars a
    process pays nothing."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._compiler: GrammarCompiler | None = None
        self._load_lock = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Outcome] = OrderedDict()
        self._alive: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._running: dict[Grammar, Future[Outcome]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")

    def find(self, grammar: Grammar) -> Outcome | None:
        """Return the compiled grammar, or the error of compiling it; None if it has not been compiled yet."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
            return self._alive.get(grammar)

    def submit(self, grammar: Grammar) -> Future[Outcome]:
        """Compile a grammar in a thread. `find` has the outcome when the future is done. Raise Capacity if too many
        are queued already."""
        with self._lock:
            running = self._running.get(grammar)
            if running is not None:
                return running
            if len(self._running) >= MAX_WAITING:
                raise Capacity(f"{len(self._running)} grammars wait to be compiled already")
            future = self._running[grammar] = self._threads.submit(self._outcome, grammar)
            return future

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar, or raise the error of compiling it. Compiles here, blocking, unless `find` has
        it, so submit it before."""
        outcome = self.find(grammar) or self._outcome(grammar)
        if isinstance(outcome, ChituError):
            raise outcome
        return outcome

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _outcome(self, grammar: Grammar) -> Outcome:
        outcome: Outcome
        try:
            outcome = self._ready_compiler().compile(grammar)
        except ChituError as error:
            outcome = error
        except BaseException as error:
            # Whatever the library raises, even a panic, fails only this request.
            outcome = InvalidRequest(f"{grammar.kind}: it cannot be compiled ({type(error).__name__})")
        with self._lock:
            self._running.pop(grammar, None)
            self._kept[grammar] = outcome
            if isinstance(outcome, CompiledGrammar):
                self._alive[grammar] = outcome
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return outcome

    def _ready_compiler(self) -> GrammarCompiler:
        with self._load_lock:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler
