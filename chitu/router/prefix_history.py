"""Which instances were sent which beginnings of prompts: the index of prefix affinity.

A prompt is cut into blocks of `BLOCK_TOKENS`. The name of a block is a hash of itself and of the block before, so one
name stands for the whole prompt up to there. The index maps such names to the instances that were sent them. It is a
guess (an instance may have evicted the KV). A wrong guess costs only time, as does a hash that two prompts share.

Invariant: at most `capacity` blocks, at most `MAX_OWNERS` owners a block. The least recently sent block is evicted
first, and of one prompt the last block before the first one, since a chain without its beginning would never be found
again. Instances that are gone are owners until the block is sent once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from chitu.kv_cache.prefix_index import marks_by_block
from chitu.protocol import ImagePart, page_marks
from chitu.router.candidates import InstanceKey

BLOCK_TOKENS = 256
MAX_PROMPT_BLOCKS = 128
"""Longest beginning that counts, in blocks (32768 tokens): a bound for the time of one decision."""
CAPACITY = 100_000
"""Blocks that are kept: 25 million prompt tokens in about 25 MB."""
MAX_OWNERS = 16
PATIENCE = 8
"""Worth of a matched token that one instance alone has, in queued tokens of other requests: far more than the one token
that is not computed. A conversation that moves to another instance takes room in both caches and evicts what other
requests would have found. Once several have a block (a shared system prompt) that has happened: it is worth 1."""
TOKEN_BYTES = 4


def prefix_names(token_ids: bytes, salt: str = "", images: Sequence[ImagePart] = ()) -> list[int]:
    """Return the names of a prompt's whole blocks (int32 LE), first block first. They are valid only in this process.
    Another salt (`GenerateRequest.prefix_salt`) gives other names, and so do other `images`, as they give the pages
    other keys."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    end = min(len(token_ids) // size, MAX_PROMPT_BLOCKS) * size
    names = []
    name = hash(salt)
    if images:
        marks = marks_by_block(page_marks(images), BLOCK_TOKENS)
        for start in range(0, end, size):
            block, mark = token_ids[start : start + size], marks.get(start // size)
            name = hash((name, block) if mark is None else (name, block, mark))
            names.append(name)
        return names
    for start in range(0, end, size):
        name = hash((name, token_ids[start : start + size]))
        names.append(name)
    return names


class PrefixHistory:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[int, tuple[InstanceKey, ...]] = OrderedDict()
        """Owners by block, the least recently sent block first; owners newest first."""

    def __len__(self) -> int:
        return len(self._owners)

    def match(self, names: Sequence[int]) -> dict[InstanceKey, int]:
        """Return the worth in tokens of the longest known beginning, by instance."""
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

    def lengths(self, names: Sequence[int]) -> dict[InstanceKey, int]:
        """Return how many tokens the longest known beginning has, by instance."""
        found: dict[InstanceKey, int] = {}
        for count, name in enumerate(names, 1):
            owners = self._owners.get(name)
            if owners is None:
                break
            for owner in owners:
                found[owner] = count * BLOCK_TOKENS
        return found

    def num_matched(self, names: Sequence[int], owner: InstanceKey) -> int:
        """Return how many tokens the longest beginning has that was sent to `owner`."""
        for count in range(len(names), 0, -1):
            if owner in self._owners.get(names[count - 1], ()):
                return count * BLOCK_TOKENS
        return 0

    def add(self, names: Sequence[int], owner: InstanceKey, others: Container[InstanceKey]) -> None:
        """Record that the prompt with these blocks was sent to `owner`. `others` are all instances, `owner` among
        them."""
        table = self._owners
        for name in reversed(names):
            owners = table.get(name, ())
            if not owners or owners[0] != owner:
                kept = [other for other in owners if other != owner and other in others]
                table[name] = (owner, *kept[: MAX_OWNERS - 1])
            table.move_to_end(name)
        while len(table) > self._capacity:
            table.popitem(last=False)
