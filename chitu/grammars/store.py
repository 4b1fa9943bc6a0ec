"""The compiled grammars of a process: threads of their own make them, the newest are kept.

An instance has one for its answers, the router (each of its API processes) one to refuse what cannot be compiled. Any
thread may call. Invariant: whoever holds a compiled grammar can find it here, also when newer ones have pushed it out.
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
"""So that one costly grammar keeps nobody's from being compiled."""
MAX_KEPT = 64
"""Outcomes, which the next request with the same grammar finds."""
MAX_WAITING = 256
"""Grammars that wait to be compiled, or are being compiled."""

Outcome = CompiledGrammar | ChituError


class GrammarStore:
    """`load` makes the compiler, in a thread, with the first grammar: a process without grammars pays nothing."""

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
        """What compiling it gave, or why it cannot be compiled; None where it was not yet."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
            return self._alive.get(grammar)

    def submit(self, grammar: Grammar) -> Future[Outcome]:
        """To be compiled in a thread; what it gives can be found when the future is done. Capacity where too many wait
        already."""
        with self._lock:
            running = self._running.get(grammar)
            if running is not None:
                return running
            if len(self._running) >= MAX_WAITING:
                raise Capacity(f"{len(self._running)} grammars wait to be compiled already")
            future = self._running[grammar] = self._threads.submit(self._outcome, grammar)
            return future

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """At once, for whoever has seen to it that it can be found. Raises why it cannot be compiled."""
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
            # What the library does not take, down to a panic of it, costs this request alone.
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
