"""Which instances the next request goes to.

Owned by `PDRequestRouter`, on the loop thread. It keeps what policies may not have: the turn, and which instances were
sent which beginnings of prompts. What it knows of an instance is in `Members`.

Both halves of a pair advance with every request. After each common period of the two group sizes D's turn shifts by one
more; so round robin, and the ties of least loaded, reach every pair: with 2P2D also P0-D1 and P1-D0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping, Sequence, Set
from math import lcm

from chitu.clock import Clock, RealClock
from chitu.config.schema import RouterConfig, SLOConfig
from chitu.errors import NoInstance
from chitu.router.costs import ANSWER_TOKENS, NO_SLO, SLO, Asked, Cost, cost_alone, pair_cost, usual_s_per_byte
from chitu.router.members import NO_INSTANCES, Members
from chitu.router.policies import (
    Candidates,
    InstanceGroup,
    InstanceKey,
    Policy,
    RoutingRequest,
    Target,
    instance_key,
    least_loaded,
    make_policy,
    prefix_affinity,
)
from chitu.router.prefix_history import PrefixHistory, prefix_names
from chitu.types import Role

MAX_NEAR = 16
"""D of a host that are looked at for being near."""

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
        slo: SLOConfig = SLOConfig(),
        clock: Clock | None = None,
    ) -> None:
        self._members = members
        self._slo = slo
        self._has_slo = slo.ttft_s is not None or slo.tpot_s is not None
        self._clock = clock or RealClock()
        self._prefill_policy = prefill
        self._decode_policy = decode
        self._random_bits = random_bits
        self._prefixes = PrefixHistory() if prefill is prefix_affinity else None
        self._decoded = PrefixHistory()
        """Which instances decoded which prompts and answers. Kept only where D may compute prompts."""
        self._requests = first_turn
        self._arranged, self._period = Candidates(), 1
        """Common period of the two groups of these candidates."""
        self._has_alone = False
        """Whether one of these candidates is a D that computes prompts."""
        self._near: dict[str, list[InstanceKey]] = {}
        """Some of the D of each host, if there are several hosts."""

    def select(
        self,
        token_ids: bytes,
        avoid: Set[InstanceKey] = NO_INSTANCES,
        blocked: Set[InstanceKey] = NO_INSTANCES,
        salt: str | None = "",
        max_tokens: int = ANSWER_TOKENS,
        slo: SLO = NO_SLO,
    ) -> Target:
        """Return where a request with this prompt (int32 LE) goes. Raises NoInstance if none can serve.

        Where there is a choice of ways, or an SLO, the cheapest way counts that keeps the SLO (`costs.py`); else the
        policies decide alone. Instances in `avoid` (they failed this request already) and `blocked` (their breakers are
        open) are left out if others can serve. If not, those to avoid are tried before those that are blocked. A pair
        that is cut off from each other is chosen only if there is no other, and no instance can serve alone. A
        suspended one is never chosen: its P would fail the request. `salt`: `GenerateRequest.prefix_salt`.
        `max_tokens` bounds the answer, for its cost.
        """
        members = self._members
        candidates = members.candidates
        if candidates is not self._arranged:
            self._arrange(candidates)
        has_whole = bool(candidates.unified) or self._has_alone
        has_pair = candidates.has_pair and not (members.num_cut_off and has_whole and not members.has_sound_pair)
        if not has_pair and not has_whole:
            raise NoInstance(members.why_unusable())
        turn = self._requests
        self._requests += 1
        num_tokens = len(token_ids) // 4
        group, last = (members.prefill, members.decode) if has_pair else (members.unified, None)
        if not group.costs:
            idle = {instance_key(d) for d in candidates.decode if not d.computes}
            group = _without(members.decode, idle, NO_INSTANCES)
        everyone: Container[InstanceKey] = group.positions
        if avoid or blocked:
            group = _without(group, avoid, blocked)
            last = None if last is None else _without(last, avoid, blocked)
        is_out = None
        if members.num_cut_off and last is not None:
            group, last, is_out = self._connected(group, last)
        names: list[int] = []
        matches: Mapping[InstanceKey, int] = {}
        if salt is not None and (self._prefixes is not None or self._has_alone):
            names = prefix_names(token_ids, salt)
        if self._prefixes is not None:
            matches = self._prefixes.match(names)
        request = RoutingRequest(turn, num_tokens, self._random_bits(ENTROPY_BITS), matches)
        first = group.instances[self._prefill_policy(request, group)]
        if last is None:
            target = Target(None, first, self._new_tokens(instance_key(first), num_tokens, names, salt, matches))
        else:
            key = instance_key(first)
            if is_out is not None:
                last = _without(last, {d for d in last.positions if is_out(key, d)}, NO_INSTANCES)
            half = RoutingRequest(turn + turn // self._period, num_tokens, self._random_bits(ENTROPY_BITS))
            second = last.instances[self._decode_policy(half, last)]
            target = Target(first, second, self._new_tokens(key, num_tokens, names, salt, matches))
            if has_whole or slo is not NO_SLO or self._has_slo:
                ways = self._ways(target, request, group, last, names, salt, avoid, blocked, is_out is not None)
                target = self._cheapest(ways, Asked.of(num_tokens, max_tokens, slo, self._slo), avoid | blocked)
                everyone = members
        computes = target.prefill or target.decode
        if self._prefixes is not None and salt is not None and computes.role is not Role.DECODE:
            self._prefixes.add(names, instance_key(computes), everyone)
        if self._has_alone and names:
            self._note_decoded(names, instance_key(target.decode))
        return target

    @property
    def keeps_answers(self) -> bool:
        """Whether `note_answer` is of use."""
        return self._has_alone

    def note_answer(self, token_ids: bytes, salt: str | None, decode: InstanceKey) -> None:
        """Note that an instance has decoded these tokens, prompt and answer (int32 LE)."""
        if salt is not None:
            self._note_decoded(prefix_names(token_ids, salt), decode)

    def _note_decoded(self, names: Sequence[int], decode: InstanceKey) -> None:
        self._decoded.add(names, decode, self._members)

    def _arrange(self, candidates: Candidates) -> None:
        """Note what follows from new candidates."""
        self._arranged = candidates
        self._period = lcm(len(candidates.prefill), len(candidates.decode)) or 1
        self._has_alone = any(d.computes for d in candidates.decode)
        near: dict[str, list[InstanceKey]] = {}
        for info in candidates.decode:
            near.setdefault(info.host, []).append(instance_key(info))
        self._near = {host: keys[:MAX_NEAR] for host, keys in near.items()} if len(near) > 1 else {}

    def _new_tokens(
        self,
        key: InstanceKey,
        num_tokens: int,
        names: Sequence[int],
        salt: str | None,
        matches: Mapping[InstanceKey, int],
    ) -> int:
        """Return how many tokens of a prompt an instance is likely to compute."""
        if self._prefixes is None or salt is None:
            return num_tokens if salt is None else self._members[key].load.new_tokens(num_tokens)
        return num_tokens - (self._prefixes.num_matched(names, key) if key in matches else 0)

    # -------------------------------------------------------------------------------------------------- ways by cost

    def _ways(
        self,
        target: Target,
        request: RoutingRequest,
        group: InstanceGroup,
        last: InstanceGroup,
        names: Sequence[int],
        salt: str | None,
        avoid: Set[InstanceKey],
        blocked: Set[InstanceKey],
        is_cut_off: bool,
    ) -> list[tuple[Target, int]]:
        """Return the ways whose costs are compared, with the tokens that D is likely to have cached: the pair `target`
        of the policies, the P with least to do, the D that has most of the prompt and the least busy one at P's host,
        each such D alone, and the unified instance of the policy. A few, however many instances there are."""
        first, num_tokens = target.prefill, request.num_tokens
        assert first is not None
        cached = self._decoded.lengths(names) if self._has_alone else {}
        decodes, prefills = {instance_key(target.decode): target.decode}, [target]
        known = [key for key in cached if key in last.positions]
        near = [key for key in self._near.get(first.host, ()) if key in last.positions]
        costs, places = last.costs, last.positions
        for key in (*sorted(known, key=cached.__getitem__)[-1:], *sorted(near, key=lambda k: costs[places[k]])[:1]):
            decodes[key] = last.instances[places[key]]
        if not is_cut_off:
            other = group.instances[least_loaded(request, group)]
            if other is not first:
                tokens = self._new_tokens(instance_key(other), num_tokens, names, salt, request.matches)
                prefills.append(Target(other, target.decode, tokens))
        ways = []
        for key, decode in decodes.items():
            num_cached = min(cached.get(key, 0), num_tokens)
            if decode is target.decode or not is_cut_off:
                ways += [(Target(half.prefill, decode, half.new_tokens), num_cached) for half in prefills]
            if decode.computes:
                ways.append((Target(None, decode, max(1, num_tokens - num_cached)), num_cached))
        if self._members.unified.costs:
            unified = _without(self._members.unified, avoid, blocked)
            chosen = unified.instances[self._prefill_policy(request, unified)]
            key = instance_key(chosen)
            tokens = self._new_tokens(key, num_tokens, names, salt, request.matches)
            ways.append((Target(None, chosen, max(1, min(tokens, num_tokens - cached.get(key, 0)))), 0))
        return ways

    def _cheapest(self, ways: Sequence[tuple[Target, int]], asked: Asked, unwanted: Set[InstanceKey]) -> Target:
        """Return the way of the least cost, without an unwanted instance if there is one."""
        members, now_s = self._members, self._clock.monotonic()
        chosen, least = ways[0][0], (True, Cost(True, math.inf))
        for target, num_cached in ways:
            decode = members[instance_key(target.decode)]
            is_unwanted = decode.key in unwanted
            place = decode.place(target.new_tokens, now_s)
            if target.prefill is None:
                cost = cost_alone(asked, decode.costs, place, now_s)
            else:
                prefill = members[instance_key(target.prefill)]
                is_unwanted = is_unwanted or prefill.key in unwanted
                byte_s = prefill.costs.link_s_per_byte(decode.key.engine_rank)
                if byte_s is None:
                    byte_s = usual_s_per_byte(target.prefill, target.decode)
                moved = asked.num_tokens - num_cached
                cost = pair_cost(asked, prefill.costs, decode.costs, place, moved, byte_s, now_s)
            if (is_unwanted, cost) < least:
                chosen, least = target, (is_unwanted, cost)
        return chosen._replace(wait_s=least[1].wait_s)

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


def make_selector(
    config: RouterConfig, members: Members, first_turn: int = 0, clock: Clock | None = None
) -> PairSelector:
    """Return the selector that `policy`, `prefill_policy` and `decode_policy` ask for. Prefix affinity as `policy` is
    for P only: D is then the least loaded.

    `first_turn`: where round robin begins; several routers that begin apart do not all send to the same instance.
    """
    of_both = config.policy
    prefill = config.prefill_policy or of_both
    decode = config.decode_policy or ("least_loaded" if of_both == "prefix_affinity" else of_both)
    return PairSelector(
        members, make_policy(prefill), make_policy(decode), first_turn=first_turn, slo=config.slo, clock=clock
    )
