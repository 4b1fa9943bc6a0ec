"""Pairs of a writer and a target in the two VMs, over one way each, and what becomes of them in a fault.

`Pair.ride` writes rounds of pages from before a fault until the pair works again, as P does: pages of a write that
failed are quarantined until its fence. Then they get another owner, the target itself, who fills them with a byte of
its own. A late write that lands there is seen at the end (`Ride.reached`). One thread rides a pair.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rdma_peer import NUM_PAGES, PAGE_BYTES
from virtual_machines import Command, Machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES_A_WRITE = 4
WRITE_S = 5.0
"""Timeout of a write (`write_timeout_s` of the product)."""
FENCE_S = 0.02
FENCE_PAUSE_S = 0.5
HEAL_S = 60.0
"""Longest time from the end of a fault until the pair works again and no page is quarantined."""
START_S = 240.0
ANSWER_S = 60.0
PEER = (sys.executable, str(HERE / "rdma_peer.py"))
ENV = {"OMP_NUM_THREADS": "1"}
SOCKET = "/run/nursery"
LAUNCH = """
import socket, sys
with socket.socket(socket.AF_UNIX) as nursery:
    nursery.connect(sys.argv[1])
    socket.send_fds(nursery, ["\\0".join(sys.argv[2:]).encode()], [0, 1, 2])
    sys.exit(int(nursery.recv(16) or 1))
"""
"""Give this process's streams to a new end, and end with it."""
OWN_BYTE = 0xA5
"""What another owner writes into pages that were quarantined."""


@dataclass(frozen=True)
class Way:
    """`name`: as the table of results has it."""

    name: str
    protocol: str
    gives_up: bool = False
    """Whether RDMA gives up after a number of retries, as real adapters do; soft-RoCE retries for ever."""


TCP = Way("TCP", "tcp")
ENDLESS = Way("RDMA, endless retry", "rdma")
ERRORS = Way("RDMA, errors", "rdma", gives_up=True)
WAYS = (TCP, ENDLESS, ERRORS)


class Refused(Exception):
    """A process of a pair did not start; the text is what it said."""


class Nursery:
    """A process in a machine that forks ends, so that each starts at once."""

    def __init__(self, machine: Machine, retry_limit: Path) -> None:
        self.machine = machine
        self._command = machine.start(
            *PEER, "nursery", SOCKET, cwd=str(ROOT), env={**ENV, "LD_PRELOAD": str(retry_limit)}
        )
        self._is_ready = False

    def start(self, *words: str) -> Command:
        if not self._is_ready:
            self._command.line(START_S)
            self._is_ready = True
        return self.machine.start(sys.executable, "-I", "-S", "-c", LAUNCH, SOCKET, *words)


class End:
    """A process of `rdma_peer.py` in a machine. `before`: a command line in front of its own, instead of a fork."""

    def __init__(self, nursery: Nursery, way: Way, before: Sequence[str] = ()) -> None:
        machine = nursery.machine
        words = [way.protocol, machine.tcp_address if way.protocol == "tcp" else machine.address]
        self._command: Command = (
            machine.start(*before, *PEER, *words, cwd=str(ROOT), env=ENV)
            if before
            else nursery.start(*(["GIVES_UP=1"] if way.gives_up else []), *words)
        )
        self._offer = ""

    def offer(self) -> str:
        """Wait until it has started, and return what its peer needs. Raise Refused if it did not start."""
        if not self._offer:
            try:
                self._offer = self._command.line(START_S)
            except EOFError:
                raise Refused(self._command.errors) from None
        return self._offer

    def ask(self, what: str, **words: object) -> dict[str, object]:
        self.tell(what, **words)
        return dict(json.loads(self._command.line(ANSWER_S)))

    def tell(self, what: str, **words: object) -> None:
        """Ask without waiting for the answer."""
        self._command.say(json.dumps({"do": what, **words}, default=list))

    def sums(self, pages: Sequence[int]) -> list[int]:
        return list(self.ask("sums", pages=pages)["sums"])

    def kill(self) -> str:
        """Kill it and return what it has answered and nobody has read."""
        self._command.kill()
        return self._command.wait()

    def story(self) -> str:
        return f"{self._command}: {self._command.tail()}"


@dataclass
class Ride:
    """What a pair went through in one fault."""

    way: str
    num_writes: int = 0
    errors: list[str] = field(default_factory=list)
    """Why writes failed."""
    num_wrong: int = 0
    """Writes that returned well although the target's bytes are others."""
    heal_s: float | None = None
    """Time from the end of the fault until a write was right and no page was quarantined; None: not in time."""
    quarantined: list[int] = field(default_factory=list)
    """Pages that are quarantined at the end."""
    reached: list[int] = field(default_factory=list)
    """Pages that a late write has reached when they belonged to another owner."""

    def cell(self) -> str:
        """Return its cell in the table of results."""
        healed = "not healed" if self.heal_s is None else f"{self.heal_s:.1f} s"
        return f"{healed}, {len(self.quarantined)} quarantined, {len(self.errors)} of {self.num_writes} writes failed"

    @property
    def is_right(self) -> bool:
        return not self.num_wrong and not self.reached

    def __str__(self) -> str:
        said = f"{self.way}: {self.num_writes} writes, {len(self.errors)} failed, {self.num_wrong} wrong"
        healed = "not healed" if self.heal_s is None else f"healed after {self.heal_s:.1f} s"
        errors = "".join(f"\n    {error}" for error in dict.fromkeys(self.errors))
        return f"{said}; {healed}; quarantined {self.quarantined}, reached by late writes {self.reached}{errors}"


RIDES = pytest.StashKey[list[tuple[str, list[Ride]]]]()
"""Faults in the order of their tests, with the rides through them."""


class Pair:
    """A writer on one machine and its target on the other. It starts when it is made; `connect` waits for that."""

    def __init__(self, way: Way, target: Nursery, writer: Nursery) -> None:
        self.way = way
        self._writers = writer
        self.target = End(target, way)
        self.writer = End(writer, way)
        self._seeds = itertools.count(1)
        self._reused: list[int] = []

    def replace_writer(self) -> None:
        """Start another writer, whose predecessor is dead."""
        self.writer = End(self._writers, self.way)

    def connect(self, patience_s: float = 0.0) -> None:
        """Connect the writer; for `patience_s` again and again, as D repeats its registration."""
        memory, end_s = self.target.offer(), time.monotonic() + patience_s
        self.writer.offer()
        while "error" in (answer := self.writer.ask("connect", memory=memory)) and time.monotonic() < end_s:
            time.sleep(FENCE_PAUSE_S)
        assert "error" not in answer, f"{self.way.name}: {answer['error']}\n{self.story()}"

    def write(self, pages: Sequence[int], ride: Ride | None = None, timeout_s: float = WRITE_S) -> bool | None:
        """Write and compare. Return whether the write succeeded; None: it failed and is not fenced."""
        ride = ride or Ride(self.way.name)
        ride.num_writes += 1
        answer = self.writer.ask("write", pages=pages, seed=next(self._seeds), timeout_s=timeout_s)
        if "error" in answer:
            ride.errors.append(str(answer["error"]))
            return False if answer["is_fenced"] else None
        ride.num_wrong += self.target.sums(pages) != answer["sums"]
        return True

    def fence(self) -> bool:
        return bool(self.writer.ask("fence", timeout_s=FENCE_S)["is_fenced"])

    def ride(self, is_over: threading.Event, limit_s: float = HEAL_S, fences: bool = True) -> Ride:
        """Write until the fault is over and the pair works again, at most `limit_s` after it. `fences`: whether pages
        stay quarantined until their fence."""
        ride = Ride(self.way.name)
        free = list(range(NUM_PAGES))
        self._reused.clear()
        over_s = None
        while over_s is None or time.monotonic() < over_s + limit_s:
            if over_s is None and is_over.is_set():
                over_s = time.monotonic()
            if ride.quarantined:
                if fences and not self.fence():
                    time.sleep(FENCE_PAUSE_S)
                    continue
                self.take_over(ride.quarantined)
                ride.quarantined = []
            pages, free = free[:PAGES_A_WRITE], free[PAGES_A_WRITE:]
            is_written = self.write(pages, ride)
            if is_written is None:
                ride.quarantined = pages
                continue
            free += pages
            if is_written and over_s is not None:
                ride.heal_s = time.monotonic() - over_s
                break
            time.sleep(0.2)
        return ride

    def take_over(self, pages: Sequence[int]) -> None:
        """Give pages to another owner, who writes into them."""
        self.target.ask("fill", pages=pages, byte=OWN_BYTE)
        self._reused += pages

    def reached(self) -> list[int]:
        """Return the pages in which their other owner does not find what it wrote, and end its ownership."""
        own = zlib.crc32(bytes([OWN_BYTE]) * PAGE_BYTES)
        pages, self._reused = self._reused, []
        return [page for page, found in zip(pages, self.target.sums(pages), strict=True) if found != own]

    def end(self) -> None:
        self.writer.kill()
        self.target.kill()

    def story(self) -> str:
        return f"writer {self.writer.story()}\ntarget {self.target.story()}"


def compile_retry_limit(folder: Path) -> Path:
    """Compile `retry_limit.c` and return the library."""
    library = folder / "retry_limit.so"
    command = ["cc", "-shared", "-fPIC", "-O1", str(HERE / "retry_limit.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library
