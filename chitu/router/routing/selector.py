"""`PairSelector` chooses the instances of the next request, and keeps all that the choice depends on.

Owned by `PDRequestRouter`, on the loop thread. It keeps the state that policies may not have: the newest view, the
loads, which pairs are cut off from each other, the prefix index, the turn.

Both halves of a pair advance with every request. After each common period of the two group sizes D's turn shifts by one
more; so round robin, and the ties of least loaded, reach every pair: with 2P2D also P0-D1 and P1-D0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from math import lcm

from chitu.errors import NoInstance
from chitu.protocol import ClusterView
from chitu.router.routing.breaker import NO_INSTANCES
from chitu.router.routing.loads import LoadTable
from chitu.router.routing.policy import (
    Candidates,
    InstanceGroup,
    InstanceKey,
    Policy,
    RoutingRequest,
    Target,
    instance_key,
)
from chitu.router.routing.prefix_affinity import prefix_affinity
from chitu.router.routing.prefix_index import PrefixHistory, prefix_names

ENTROPY_BITS = 64


class PairSelector:
    """Chooses instances: `prefill` chooses P, and the unified instance if there is no pair; `decode` chooses D."""

    def __init__(
        self,
        prefill: Policy,
        decode: Policy,
        random_bits: Callable[[int], int] = random.getrandbits,
        first_turn: int = 0,
    ) -> None:
        self._prefill_policy = prefill
        self._decode_policy = decode
        self._random_bits = random_bits
        self._prefixes = PrefixHistory() if prefill is prefix_affinity else None
        self._loads = LoadTable()
        self.count, self.on_report = self._loads.count, self._loads.report
        self._silent: dict[InstanceKey, frozenset[int]] = {}
        """Incarnations of the P that a D receives nothing from, by D."""
        self._requests = first_turn
        self._candidates = Candidates()
        self._view: ClusterView | None = ClusterView(0, 0, ())
        """Newest view until it is first used: views may come faster than requests."""
        self._gone: set[InstanceKey] = set()
        """Instances that were lost since that view came, until then too."""
        self._refresh()

    # --------------------------------------------------------------------------------------------------- membership

    @property
    def candidates(self) -> Candidates:
        """The instances that may get new requests; the same object until they change."""
        self._refresh()
        return self._candidates

    def on_view(self, view: ClusterView) -> None:
        """Apply a new cluster view; the next choice uses it."""
        self._view = view
        self._gone.clear()

    def _refresh(self) -> None:
        if self._view is None and not self._gone:
            return
        if self._view is not None:
            self._candidates, self._view = Candidates.of(self._view), None
        if self._gone:
            self._candidates = self._candidates.without(self._gone)
            self._gone.clear()
        candidates = self._candidates
        groups = self._loads.arrange((candidates.prefill, candidates.decode, candidates.unified))
        self._prefill, self._decode, self._unified = groups
        self._period = lcm(len(candidates.prefill), len(candidates.decode)) or 1

    def on_joined(self, key: InstanceKey) -> None:
        self._loads.add(key)

    def on_lost(self, key: InstanceKey) -> None:
        """Choose an instance no more, although the newest view may have it."""
        self._gone.add(key)
        self._loads.remove(key)
        self._silent.pop(key, None)

    # ------------------------------------------------------------------------------------------------- links of P and D

    def on_silent(self, decode: InstanceKey, prefills: frozenset[int]) -> bool:
        """Set the incarnations of the P that a D receives nothing from now. Return True if they changed."""
        if prefills == self._silent.get(decode, frozenset()):
            return False
        self._silent[decode] = prefills
        if not prefills:
            del self._silent[decode]
        return True

    @property
    def has_sound_pair(self) -> bool:
        """Whether there is a pair whose D receives messages from its P."""
        self._refresh()
        decodes = self._decode.positions
        return any(not self.is_silent(prefill, decode) for prefill in self._prefill.positions for decode in decodes)

    def is_silent(self, prefill: InstanceKey, decode: InstanceKey) -> bool:
        """Return whether D receives nothing from P."""
        return prefill.incarnation in self._silent.get(decode, ())

    def is_cut_off(self, target: Target) -> bool:
        prefill, decode = target.prefill, target.decode
        return prefill is not None and self.is_silent(instance_key(prefill), instance_key(decode))

    # ------------------------------------------------------------------------------------------------------- choice

    def select(
        self,
        token_ids: bytes,
        avoid: Set[InstanceKey] = NO_INSTANCES,
        blocked: Set[InstanceKey] = NO_INSTANCES,
        cache_salt: str | None = "",
    ) -> Target:
        """Return where a request with this prompt (int32 LE) goes. Raises NoInstance if none can serve.

        Instances in `avoid` (they failed this request already) and `blocked` (their breakers are open) are left out if
        others can serve. If not, those to avoid are tried before those that are blocked. A pair of the rest that is cut
        off from each other is chosen only if there is no other. `cache_salt` is as the instances get it.
        """
        candidates = self.candidates
        if not candidates.usable:
            raise NoInstance(candidates.why_unusable())
        turn = self._requests
        self._requests += 1
        num_tokens = len(token_ids) // 4
        group, last = (self._prefill, self._decode) if candidates.has_pair else (self._unified, None)
        everyone = group.positions
        if avoid or blocked:
            group = _without(group, avoid, blocked)
            last = None if last is None else _without(last, avoid, blocked)
        if self._silent and last is not None:
            decodes = last.positions
            cut_off = {p for p in group.positions if all(self.is_silent(p, d) for d in decodes)}
            group = _without(group, cut_off, NO_INSTANCES)
        names: list[int] = []
        matches: Mapping[InstanceKey, int] = {}
        if self._prefixes is not None and cache_salt is not None:
            names = prefix_names(token_ids, cache_salt)
            matches = self._prefixes.match(names)
        request = RoutingRequest(turn, num_tokens, self._random_bits(ENTROPY_BITS), matches)
        first = group.instances[self._prefill_policy(request, group)]
        key = instance_key(first)
        if self._prefixes is None or cache_salt is None:
            new_tokens = num_tokens if cache_salt is None else self._loads.new_tokens(key, num_tokens)
        else:
            new_tokens = num_tokens - (self._prefixes.num_matched(names, key) if key in matches else 0)
            self._prefixes.add(names, key, everyone)
        if last is None:
            return Target(None, first, new_tokens)
        if self._silent:
            last = _without(last, {d for d in last.positions if self.is_silent(key, d)}, NO_INSTANCES)
        request = RoutingRequest(turn + turn // self._period, num_tokens, self._random_bits(ENTROPY_BITS))
        return Target(first, last.instances[self._decode_policy(request, last)], new_tokens)


def _without(group: InstanceGroup, avoid: Set[InstanceKey], blocked: Set[InstanceKey]) -> InstanceGroup:
    """Return the group without the unwanted instances, or with as few of them as it takes to keep one."""
    for unwanted in (avoid | blocked, blocked, avoid):
        kept = [position for key, position in group.positions.items() if key not in unwanted]
        if len(kept) == len(group.instances):
            return group
        if kept:
            instances = tuple(group.instances[position] for position in kept)
            return InstanceGroup(
                instances,
                [group.costs[position] for position in kept],
                {instance_key(instance): place for place, instance in enumerate(instances)},
                group.counts_tokens,
            )
    return group
