"""Which instances the next request goes to: `PairSelector`, and the index of prefix affinity.

Owned by `PDRequestRouter`, on the loop thread. It keeps what policies may not have: the turn, and which instances were
sent which beginnings of prompts. What it knows of an instance is in `Members`.

Both halves of a pair advance with every request. After each common period of the two group sizes D's turn shifts by one
more; so round robin, and the ties of least loaded, reach every pair: with 2P2D also P0-D1 and P1-D0.

The index: a prompt is cut into blocks of `BLOCK_TOKENS`. The name of a block is a hash of itself and of the block
before, so one name stands for the whole prompt up to there. The index maps such names to the instances that were sent
them. It is a guess (an instance may have evicted the KV). A wrong guess costs only time, as does a hash that two
prompts share.

Invariant: at most `capacity` blocks, at most `MAX_OWNERS` owners a block. The least recently sent block is evicted
first, and of one prompt the last block before the first one, since a chain without its beginning would never be found
again. Instances that are gone are owners until the block is sent once more.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence, Set
from math import lcm

from chitu.config.schema import RouterConfig
from chitu.errors import NoInstance
from chitu.router.members import NO_INSTANCES, Members
from chitu.router.policies import (
    Candidates,
    InstanceGroup,
    InstanceKey,
    Policy,
    RoutingRequest,
    Target,
    instance_key,
    make_policy,
    prefix_affinity,
)

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


def prefix_names(token_ids: bytes, salt: str = "") -> list[int]:
    """Return the names of a prompt's whole blocks (int32 LE), first block first. They are valid only in this process.
    Another salt (`GenerateRequest.prefix_salt`) gives other names, as it gives the pages other keys."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    end = min(len(token_ids) // size, MAX_PROMPT_BLOCKS) * size
    names = []
    name = hash(salt)
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


ENTROPY_BITS = 64

IsOut = Callable[[InstanceKey, InstanceKey], bool]
"""Whether a pair, P and D, gets no requests."""


class PairSelector:
    """Chooses instances: `prefill` chooses P, and the unified instance if there is no pair; `decode` chooses D."""

    def __init__(
        self,
        members: Members,
        prefill: Policy,
        decode: Policy,
        random_bits: Callable[[int], int] = random.getrandbits,
        first_turn: int = 0,
    ) -> None:
        self._members = members
        self._prefill_policy = prefill
        self._decode_policy = decode
        self._random_bits = random_bits
        self._prefixes = PrefixHistory() if prefill is prefix_affinity else None
        self._requests = first_turn
        self._arranged, self._period = Candidates(), 1
        """Common period of the two groups of these candidates."""

    def select(
        self,
        token_ids: bytes,
        avoid: Set[InstanceKey] = NO_INSTANCES,
        blocked: Set[InstanceKey] = NO_INSTANCES,
        salt: str | None = "",
    ) -> Target:
        """Return where a request with this prompt (int32 LE) goes. Raises NoInstance if none can serve.

        Instances in `avoid` (they failed this request already) and `blocked` (their breakers are open) are left out if
        others can serve. If not, those to avoid are tried before those that are blocked. A pair that is cut off from
        each other is chosen only if there is no other, and no unified instance. A suspended one is never chosen: its P
        would fail the request. `salt`: `GenerateRequest.prefix_salt`.
        """
        members = self._members
        candidates = members.candidates
        has_pair = candidates.has_pair and not (
            members.num_cut_off and candidates.unified and not members.has_sound_pair
        )
        if not has_pair and not candidates.unified:
            raise NoInstance(members.why_unusable())
        if candidates is not self._arranged:
            self._arranged = candidates
            self._period = lcm(len(candidates.prefill), len(candidates.decode)) or 1
        turn = self._requests
        self._requests += 1
        num_tokens = len(token_ids) // 4
        group, last = (members.prefill, members.decode) if has_pair else (members.unified, None)
        everyone = group.positions
        if avoid or blocked:
            group = _without(group, avoid, blocked)
            last = None if last is None else _without(last, avoid, blocked)
        is_out = None
        if members.num_cut_off and last is not None:
            group, last, is_out = self._connected(group, last)
        names: list[int] = []
        matches: Mapping[InstanceKey, int] = {}
        if self._prefixes is not None and salt is not None:
            names = prefix_names(token_ids, salt)
            matches = self._prefixes.match(names)
        request = RoutingRequest(turn, num_tokens, self._random_bits(ENTROPY_BITS), matches)
        first = group.instances[self._prefill_policy(request, group)]
        key = instance_key(first)
        if self._prefixes is None or salt is None:
            new_tokens = num_tokens if salt is None else members[key].load.new_tokens(num_tokens)
        else:
            new_tokens = num_tokens - (self._prefixes.num_matched(names, key) if key in matches else 0)
            self._prefixes.add(names, key, everyone)
        if last is None:
            return Target(None, first, new_tokens)
        if is_out is not None:
            last = _without(last, {d for d in last.positions if is_out(key, d)}, NO_INSTANCES)
        request = RoutingRequest(turn + turn // self._period, num_tokens, self._random_bits(ENTROPY_BITS))
        return Target(first, last.instances[self._decode_policy(request, last)], new_tokens)

    def _connected(self, prefill: InstanceGroup, decode: InstanceGroup) -> tuple[InstanceGroup, InstanceGroup, IsOut]:
        """Return the P that have a D to serve with, these D, and which pairs of both are out. All P and D count if none
        of the given ones do: an instance that failed a request may serve the next one, a pair that is cut off hardly.
        Raises NoInstance if all pairs are suspended."""
        members = self._members
        for is_out in (members.is_cut_off, members.is_suspended):
            for group, last in ((prefill, decode), (members.prefill, members.decode)):
                out = {p for p in group.positions if all(is_out(p, d) for d in last.positions)}
                if len(out) < len(group.positions):
                    return _without(group, out, NO_INSTANCES), last, is_out
        raise NoInstance(members.why_unusable())


def _without(group: InstanceGroup, avoid: Set[InstanceKey], blocked: Set[InstanceKey]) -> InstanceGroup:
    """Return the group without the unwanted instances, or with as few of them as it takes to keep one."""
    for unwanted in (avoid | blocked, blocked, avoid):
        kept = {key: position for key, position in group.positions.items() if key not in unwanted}
        if len(kept) == len(group.costs):
            return group
        if kept:
            instances = tuple(group.instances[position] for position in kept.values())
            costs = [group.costs[position] for position in kept.values()]
            return InstanceGroup(instances, costs, {key: n for n, key in enumerate(kept)}, group.counts_tokens)
    return group


def make_selector(config: RouterConfig, members: Members, first_turn: int = 0) -> PairSelector:
    """Return the selector that `policy`, `prefill_policy` and `decode_policy` ask for. Prefix affinity as `policy` is
    for P only: D is then the least loaded.

    `first_turn`: where round robin begins; several routers that begin apart do not all send to the same instance.
    """
    of_both = config.policy
    prefill = config.prefill_policy or of_both
    decode = config.decode_policy or ("least_loaded" if of_both == "prefix_affinity" else of_both)
    return PairSelector(members, make_policy(prefill), make_policy(decode), first_turn=first_turn)
