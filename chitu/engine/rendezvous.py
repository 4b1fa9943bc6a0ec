"""How the processes of a group on several hosts find each other, each time anew: which of them are the next group.

Each rank says who it is in the store of the first host's torchrun, and rank 0 calls everyone whom it finds there. Once
all ranks have answered and are alike, it writes down the number and the members of the new group; torch's process
groups then use keys that begin with this number. So a process that died after it had said who it is stands in nobody's
way, and one of an earlier group, or one that comes when the group has begun, is refused instead of being met as a
member. The last process to claim a rank has it.

The store has no authentication: see docs/security.md.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import ConfigError
from chitu.known_types import known
from chitu.net.process_deaths import pid_namespace, start_ticks

MEETING_S = 600.0
"""Time for all ranks to come, from the first one. By torchrun's rendezvous all hosts are there by then."""
POLL_S = 0.05
START = "start"


class KeyStore(Protocol):
    """The part of torch's stores that a meeting needs."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Claim(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    name: str
    """`D1 on 10.0.0.2`, for sentences."""
    facts: dict[str, str] = {}
    """What must be equal on all ranks, by what it is called in a sentence."""
    torchrun: str = msgspec.field(default_factory=lambda: _torchrun())
    """The process that started the rank, one for all time: ranks of one host belong to the same one."""
    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class Start(msgspec.Struct, frozen=True):
    """The end of a meeting."""

    number: str
    """Number of the new group."""
    tokens: tuple[str, ...] = ()
    """Those of its ranks."""
    refusal: str = ""
    """Why there is no group, as a sentence."""


def meet(
    store: KeyStore,
    rank: int,
    size: int,
    ranks_per_host: int,
    claim: Claim,
    wait_s: float = MEETING_S,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Return the number of the group that all ranks form now. Raises ConfigError if they do not fit together, if this
    rank has no place in the group, or if others are not there after `wait_s`."""
    store.set(f"claim/{rank}", _text(claim))
    lead = _Lead(store, size, ranks_per_host) if rank == MAIN_RANK else None
    end_s, has_answered = time.monotonic() + wait_s, False
    while not store.check([START]):
        if msgspec.json.decode(store.get(f"claim/{rank}"), type=known(Claim)).token != claim.token:
            raise ConfigError(f"{claim.name}: another process has taken its place in the group; this one ends")
        if not has_answered and store.check([f"call/{claim.token}"]):
            store.set(f"here/{claim.token}", "")
            has_answered = True
        if lead is not None:
            lead.turn()
        if time.monotonic() > end_s:
            raise ConfigError(f"{claim.name}: the other ranks of its group have not come within {wait_s:g} s")
        pause(POLL_S)
    start = msgspec.json.decode(store.get(START), type=known(Start))
    if start.refusal:
        raise ConfigError(start.refusal)
    if claim.token not in start.tokens:
        raise ConfigError(
            f"{claim.name}: its group has begun without this process, which is of an earlier group or late; it ends"
        )
    return start.number


class _Lead:
    """What rank 0 does beside."""

    def __init__(self, store: KeyStore, size: int, ranks_per_host: int) -> None:
        self._store = store
        self._size = size
        self._ranks_per_host = ranks_per_host
        self._called: set[str] = set()

    def turn(self) -> None:
        """Call who is new, and end the meeting once all are there."""
        keys = [f"claim/{rank}" for rank in range(self._size)]
        claims = [
            msgspec.json.decode(self._store.get(key), type=known(Claim)) for key in keys if self._store.check([key])
        ]
        for claim in claims:
            if claim.token not in self._called:
                self._called.add(claim.token)
                self._store.set(f"call/{claim.token}", "")
        have_answered = all(self._store.check([f"here/{claim.token}"]) for claim in claims)
        if len(claims) == self._size and have_answered and self._are_of_one_torchrun_a_host(claims):
            tokens = tuple(claim.token for claim in claims)
            self._store.set(START, _text(Start(secrets.token_hex(8), tokens, why_unlike(claims))))

    def _are_of_one_torchrun_a_host(self, claims: Sequence[Claim]) -> bool:
        size = self._ranks_per_host
        hosts = [claims[first : first + size] for first in range(0, len(claims), size)]
        return all(len({claim.torchrun for claim in host}) == 1 for host in hosts)


def why_unlike(claims: Sequence[Claim]) -> str:
    """Return a sentence that names two ranks that do not fit together, or "" if all do."""
    first = claims[0]
    for claim in claims[1:]:
        for what, value in first.facts.items():
            if (other := claim.facts.get(what, "none")) != value:
                return (
                    f"{claim.name} has {what} {other}, and {first.name} has {value}: all hosts of a group need the same"
                )
    return ""


def _text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def _torchrun() -> str:
    parent = os.getppid()
    return f"{pid_namespace()}/{parent}/{start_ticks(parent)}"
