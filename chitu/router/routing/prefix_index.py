"""Which instances were sent which beginnings of prompts: what prefix affinity looks at.

A prompt is cut into blocks of `BLOCK_TOKENS`; each block is named by a hash of itself and of the block before, so one
name stands for the whole prompt up to there. The index maps such names to the instances that were sent them. It is a
guess of the router's (an instance may have thrown its KV away), and a wrong guess costs time only, as does a hash that
two prompts share. Owned by `PairSelector`, on the loop thread.

Invariant: at most `capacity` blocks, at most `MAX_OWNERS` owners a block. The least recently sent block goes first, and
of one prompt the last block before the first one, since a chain without its beginning would never be found again.
Instances that are gone are owners until the block is sent once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from chitu.router.routing.policy import InstanceKey

BLOCK_TOKENS = 256
MAX_PROMPT_BLOCKS = 128
"""Beginnings longer than this (32768 tokens) count as this long: a bound for the time of one decision."""
CAPACITY = 100_000
"""Blocks: 25 million prompt tokens in about 25 MB."""
MAX_OWNERS = 16
PATIENCE = 8
"""What finding a token is worth where one instance alone has it, in tokens of others to stand behind: far more than the
one that is not computed. A conversation that goes to another instance takes room in both caches, and pushes out what
others would have found. Once several have a block (a system prompt that all share) that has happened: it is worth 1."""

TOKEN_BYTES = 4


def prefix_names(token_ids: bytes, cache_salt: str = "") -> list[int]:
    """Names of the whole blocks of a prompt (int32 LE), first block first. Only valid in this process. Another salt
    gives other names, as it gives the pages other keys."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    end = min(len(token_ids) // size, MAX_PROMPT_BLOCKS) * size
    names = []
    name = hash(cache_salt)
    for start in range(0, end, size):
        name = hash((name, token_ids[start : start + size]))
        names.append(name)
    return names


class PrefixHistory:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[int, tuple[InstanceKey, ...]] = OrderedDict()
        """The block that was sent longest ago first; owners newest first."""

    def __len__(self) -> int:
        return len(self._owners)

    def match(self, names: Sequence[int]) -> dict[InstanceKey, int]:
        """What the longest known beginning is worth, in tokens, by instance."""
        found: dict[InstanceKey, int] = {}
        worth = 0
        for name in names:
            owners = self._owners.get(name)
            if owners is None:
                break
            worth += BLOCK_TOKENS * PATIENCE if len(owners) == 1 else BLOCK_TOKENS
            for owner in owners:
                found[owner] = worth
        return found

    def add(self, names: Sequence[int], owner: InstanceKey, others: Container[InstanceKey]) -> None:
        """The prompt with these blocks was sent to `owner`, one of `others`, which are all that are there."""
        table = self._owners
        for name in reversed(names):
            owners = table.get(name, ())
            if not owners or owners[0] != owner:
                kept = [other for other in owners if other != owner and other in others]
                table[name] = (owner, *kept[: MAX_OWNERS - 1])
            table.move_to_end(name)
        while len(table) > self._capacity:
            table.popitem(last=False)
