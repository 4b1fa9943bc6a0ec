"""Which way the next request goes: a pair, D alone, or a unified instance.

Owned by `PDRequestRouter`, on the loop thread. A few ways are proposed, however many instances there are, and the
cheapest is taken (`costs.py`). The policy of each role proposes one instance. That is all, unless the choice is *open*:
if the request has an SLO, or there are unified instances beside pairs. Then these are proposed, too: the P with least
to do, the D that has most of the prompt, the least busy D on P's host, the least busy member of each of a few groups
that share experts, and each of these D alone if it computes prompts. If it is not open, the least loaded instance is
proposed instead of one where admission would refuse a request.

The selector keeps what policies may not have: the turn, and which instances were sent which beginnings of prompts.

Both halves of a pair advance with every request. After each common period of the two group sizes D's turn shifts by one
more; so round robin, and the ties of least loaded, reach every pair: with 2P2D also P0-D1 and P1-D0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from math import lcm
from typing import NamedTuple

from chitu.clock import Clock, RealClock
from chitu.config.schema import RouterConfig
from chitu.errors import NoInstance
from chitu.protocol import ImagePart
from chitu.protocol.admin import Canary
from chitu.router.candidates import Candidates, InstanceKey, Way, instance_key
from chitu.router.costs import ANSWER_TOKENS, NO_SLO, SLO, Asked, Cost, cost_alone, pair_cost
from chitu.router.image_ways import EncodersSent, ImagePlan, add_images, plan_images, usual_row_s, with_images
from chitu.router.loads import InstanceGroup, InstanceLoad
from chitu.router.members import NO_INSTANCES, Members, longest_wait_s
from chitu.router.policies import Policy, RoutingRequest, least_loaded, make_policy
from chitu.router.prefix_history import PrefixHistory, prefix_names
from chitu.router.revisions import Revisions
from chitu.types import Role

MAX_NEAR = 16
"""D of a host that are looked at for being near."""
MAX_GROUPS = 4
"""Groups whose least busy members are looked at, in turn if there are more."""
ENTROPY_BITS = 64

IsOut = Callable[[InstanceKey, InstanceKey], bool]
"""Whether a pair, P and D, gets no requests."""


class _Prompt(NamedTuple):
    """What is known of a prompt."""

    num_tokens: int
    uses_cache: bool
    """Whether it may find cached pages."""
    names: Sequence[int]
    """Names of its blocks (`prefix_history.py`)."""
    matches: Mapping[InstanceKey, int]
    """Worth of its beginning to P and unified instances that were sent it."""
    decoded: Mapping[InstanceKey, int]
    """How many of its tokens instances have that decoded its beginning."""
    images: Sequence[ImagePart] = ()


class _Way(NamedTuple):
    """A proposal."""

    prefill: InstanceLoad | None
    decode: InstanceLoad
    new_tokens: int
    """Prompt tokens that are to be computed."""
    moved_tokens: int = 0
    """Prompt tokens that P has to move to D."""


class Selector:
    def __init__(
        self,
        config: RouterConfig,
        members: Members,
        clock: Clock | None = None,
        first_turn: int = 0,
        random_bits: Callable[[int], int] = random.getrandbits,
    ) -> None:
        """`first_turn`: where round robin begins; several routers that begin apart do not all send to the same
        instance. Prefix affinity as `policy` is for P only: D is then the least loaded."""
        is_affine = config.policy == "prefix_affinity"
        prefill = config.prefill_policy or config.policy
        self._prefill_policy = make_policy(prefill)
        self._decode_policy = make_policy(config.decode_policy or ("least_loaded" if is_affine else config.policy))
        self._members, self._clock = members, clock or RealClock()
        self._slo, self._has_slo = config.slo, config.slo.ttft_s is not None or config.slo.tpot_s is not None
        self._max_wait_s = longest_wait_s(config)
        self._random_bits = random_bits
        self._prefixes = PrefixHistory() if prefill == "prefix_affinity" else None
        self._decoded = PrefixHistory()
        """Which instances decoded which prompts and answers. Kept only where D may compute prompts."""
        self._encoders_sent = EncodersSent()
        self.revisions = Revisions(Canary(config.canary.revision, config.canary.share))
        self._turn = first_turn
        self._arranged, self._period = Candidates(), 1
        """Common period of the two groups of these candidates."""
        self._has_alone = False
        """Whether one of these candidates is a D that computes prompts."""
        self._near: dict[str, list[InstanceKey]] = {}
        """Some of the D of each host, if there are several hosts."""
        self._groups: dict[Role, list[list[InstanceKey]]] = {}
        """D and unified ones by the group in which they step together, and those that step alone. Empty if all do."""

    def select(
        self,
        token_ids: bytes,
        avoid: Set[InstanceKey] = NO_INSTANCES,
        blocked: Set[InstanceKey] = NO_INSTANCES,
        salt: str | None = "",
        max_tokens: int = ANSWER_TOKENS,
        slo: SLO = NO_SLO,
        admit: Callable[[float], None] | None = None,
        images: Sequence[ImagePart] = (),
    ) -> Way:
        """Return the way that a request with this prompt (int32 LE) goes. Raises NoInstance if none can serve.

        Instances in `avoid` (they failed this request already) and `blocked` (their breakers are open) are left out if
        others can serve. If not, those to avoid are tried before those that are blocked. A pair that is cut off from
        each other is chosen only if there is no other, and no instance can serve alone. A suspended one is never
        chosen: its P would fail the request. `salt`: `GenerateRequest.prefix_salt`. `max_tokens` bounds the answer, for
        its cost. `admit` gets the predicted wait in the chosen way, 0 if there was no choice, and raises if that is too
        long: no instance is then taken to have the prompt. A prompt with `images` is computed by no D alone.
        """
        members = self._members
        candidates = members.candidates
        if candidates is not self._arranged:
            self._arrange(candidates)
        if self.revisions.are_several:
            avoid = avoid | self.revisions.draw(self._random_bits(ENTROPY_BITS))
        has_alone = self._has_alone and not images
        has_unified = bool(candidates.unified)
        has_whole = has_unified or has_alone
        has_pair = candidates.has_pair and not (members.num_cut_off and has_whole and not members.has_sound_pair)
        if not has_pair and not has_whole:
            raise NoInstance(members.why_unusable())
        prompt, entropy = self._prompt(token_ids, salt, images), self._random_bits(ENTROPY_BITS)
        request = RoutingRequest(self._turn, prompt.num_tokens, entropy, prompt.matches)
        self._turn += 1
        is_open = self._has_slo or slo is not NO_SLO or (has_pair and has_unified)
        ways: list[_Way] = []
        if has_pair or has_alone:
            prefill = members.prefill.without(avoid, blocked) if has_pair else None
            ways = self._ways_of_d(request, prompt, prefill, members.decode.without(avoid, blocked), is_open)
        if has_unified:
            unified = members.unified.without(avoid, blocked)
            loads = [self._proposed(self._prefill_policy, request, unified, is_open)]
            for each in self._least_of_groups(request, unified) if is_open else ():
                _add(loads, each)
            for each in loads:
                new_tokens = min(self._new_tokens(each, prompt), prompt.num_tokens - prompt.decoded.get(each.key, 0))
                ways.append(_Way(None, each, max(1, new_tokens)))
        way, wait_s = ways[0], 0.0
        if is_open or len(ways) > 1:
            way, wait_s = self._cheapest(
                ways, Asked.of(prompt.num_tokens, max_tokens, slo, self._slo), avoid | blocked, images
            )
        if admit is not None:
            admit(wait_s)
        computes = (way.prefill or way.decode).key
        if self._prefixes is not None and prompt.uses_cache and computes.role is not Role.DECODE:
            self._prefixes.add(prompt.names, computes, members)
        if self._has_alone:
            self._decoded.add(prompt.names, way.decode.key, members)
        if images:
            return self._with_encoders(way, prompt)
        return Way(None if way.prefill is None else way.prefill.info, way.decode.info, way.new_tokens)

    @property
    def keeps_answers(self) -> bool:
        """Whether `note_answer` is of use."""
        return self._has_alone

    def note_answer(
        self, token_ids: bytes, salt: str | None, decode: InstanceKey, images: Sequence[ImagePart] = ()
    ) -> None:
        """Note that an instance has decoded these tokens, prompt and answer (int32 LE)."""
        if salt is not None:
            self._decoded.add(prefix_names(token_ids, salt, images), decode, self._members)

    def _arrange(self, candidates: Candidates) -> None:
        """Note what follows from new candidates."""
        self._arranged = candidates
        self.revisions.arrange(candidates)
        self._period = lcm(len(candidates.prefill), len(candidates.decode)) or 1
        self._has_alone = any(d.computes for d in candidates.decode)
        near: dict[str, list[InstanceKey]] = {}
        for info in candidates.decode:
            near.setdefault(info.host, []).append(instance_key(info))
        self._near = {host: keys[:MAX_NEAR] for host, keys in near.items()} if len(near) > 1 else {}
        self._groups = {}
        for role, instances in ((Role.DECODE, candidates.decode), (Role.UNIFIED, candidates.unified)):
            groups: dict[int, list[InstanceKey]] = {}
            for info in instances:
                group_id = info.group.id if info.group is not None and info.group.shares_experts else 0
                groups.setdefault(group_id, []).append(instance_key(info))
            if groups.keys() - {0}:
                self._groups[role] = list(groups.values())

    # ----------------------------------------------------------------------------------------------------- the prompt

    def _prompt(self, token_ids: bytes, salt: str | None, images: Sequence[ImagePart]) -> _Prompt:
        names: Sequence[int] = ()
        if salt is not None and (self._prefixes is not None or self._has_alone):
            names = prefix_names(token_ids, salt, images)
        matches = {} if self._prefixes is None else self._prefixes.match(names)
        decoded = self._decoded.lengths(names) if self._has_alone else {}
        return _Prompt(len(token_ids) // 4, salt is not None, names, matches, decoded, images)

    def _new_tokens(self, load: InstanceLoad, prompt: _Prompt) -> int:
        """Return how many tokens of a prompt a P or a unified instance is likely to compute."""
        if not prompt.uses_cache:
            return prompt.num_tokens
        if self._prefixes is None:
            return load.new_tokens(prompt.num_tokens)
        if load.key not in prompt.matches:
            return prompt.num_tokens
        return prompt.num_tokens - self._prefixes.num_matched(prompt.names, load.key)

    # ------------------------------------------------------------------------------------------------------------ ways

    def _ways_of_d(
        self,
        request: RoutingRequest,
        prompt: _Prompt,
        prefill: InstanceGroup | None,
        decode: InstanceGroup,
        is_open: bool,
    ) -> list[_Way]:
        """Return the proposed pairs, that of the policies first, and the proposed D that compute prompts themselves;
        only these if `prefill` is None."""
        prefills: list[InstanceLoad] = []
        is_out: IsOut | None = None
        if prefill is None:
            decode = decode.without({load.key for load in decode.loads if not load.computes})
        else:
            if self._members.num_cut_off:
                prefill, decode, is_out = self._connected(prefill, decode)
            prefills = [self._proposed(self._prefill_policy, request, prefill, is_open)]
            if is_open:
                _add(prefills, prefill.loads[least_loaded(request, prefill)])
            if is_out is not None:
                decode = decode.without({d for d in decode.positions if is_out(prefills[0].key, d)})
            turn, entropy = request.turn + request.turn // self._period, self._random_bits(ENTROPY_BITS)
            request = RoutingRequest(turn, prompt.num_tokens, entropy)
        decodes = [self._proposed(self._decode_policy, request, decode, is_open)]
        if is_open:
            if known := [key for key in prompt.decoded if key in decode.positions]:
                _add(decodes, decode.loads[decode.positions[max(known, key=prompt.decoded.__getitem__)]])
            keys = self._near.get(prefills[0].info.host, ()) if prefills else ()
            if near := [decode.positions[key] for key in keys if key in decode.positions]:
                _add(decodes, decode.loads[min(near, key=decode.works.__getitem__)])
            for load in self._least_of_groups(request, decode):
                _add(decodes, load)
        pairs, alone = [], []
        for load in decodes:
            num_cached = min(prompt.decoded.get(load.key, 0), prompt.num_tokens)
            if load.computes and not prompt.images:
                alone.append(_Way(None, load, max(1, prompt.num_tokens - num_cached)))
            for p in prefills:
                if is_out is None or not is_out(p.key, load.key):
                    pairs.append(_Way(p, load, self._new_tokens(p, prompt), prompt.num_tokens - num_cached))
        return pairs + alone

    def _proposed(self, policy: Policy, request: RoutingRequest, group: InstanceGroup, is_open: bool) -> InstanceLoad:
        """Return the instance that a policy proposes, or, if no cost decides, and admission would refuse a request that
        waits there, the least loaded one."""
        first, now_s = group.loads[policy(request, group)], self._clock.monotonic()
        wait_s = 0.0 if is_open else max(first.prompt_wait_s(now_s), first.pages_wait_s(now_s))
        return first if wait_s <= self._max_wait_s else group.loads[least_loaded(request, group)]

    def _least_of_groups(self, request: RoutingRequest, group: InstanceGroup) -> Iterator[InstanceLoad]:
        """Yield the least busy member of each of a few groups that step together: the busiest one sets the time of a
        step, so another row costs least there. Of those that step alone the least busy one."""
        groups = self._groups.get(group.loads[0].key.role, [])
        first = request.turn % len(groups) if len(groups) > MAX_GROUPS else 0
        for keys in (*groups[first:], *groups[:first])[:MAX_GROUPS]:
            if positions := [group.positions[key] for key in keys if key in group.positions]:
                yield group.loads[min(positions, key=group.works.__getitem__)]

    def _connected(self, prefill: InstanceGroup, decode: InstanceGroup) -> tuple[InstanceGroup, InstanceGroup, IsOut]:
        """Return the P that have a D to serve with, these D, and which pairs of both are out. All P and D count if none
        of the given ones do: an instance that failed a request may serve the next one, a pair that is cut off hardly.
        Raises NoInstance if all pairs are suspended."""
        members = self._members
        for is_out in (members.is_cut_off, members.is_suspended):
            for group, last in ((prefill, decode), (members.prefill, members.decode)):
                out = {p for p in group.positions if all(is_out(p, d) for d in last.positions)}
                if len(out) < len(group.positions):
                    return group.without(out), last, is_out
        raise NoInstance(members.why_unusable())

    def _cheapest(
        self, ways: Sequence[_Way], asked: Asked, unwanted: Set[InstanceKey], images: Sequence[ImagePart]
    ) -> tuple[_Way, float]:
        """Return the way of the least cost, without an unwanted instance if there is one, and the wait there."""
        now_s = self._clock.monotonic()

        def cost(way: _Way, asked: Asked) -> tuple[bool, Cost]:
            prefill, decode, new_tokens, moved_tokens = way
            if prefill is None:
                return decode.key in unwanted, cost_alone(asked, decode, new_tokens, now_s)
            is_unwanted = decode.key in unwanted or prefill.key in unwanted
            return is_unwanted, pair_cost(asked, prefill, decode, new_tokens, moved_tokens, now_s)

        if images:
            costs = []
            for way in ways:
                plan = self._plan_images(way, asked.num_tokens, images, now_s)
                is_unwanted, found = cost(way, with_images(asked, plan))
                num_streams = way.decode.step_rows if way.prefill is None else 0
                costs.append((is_unwanted, add_images(found, plan, num_streams)))
        else:
            costs = [cost(way, asked) for way in ways]
        least = min(costs)
        return ways[costs.index(least)], least[1].wait_s

    def _plan_images(self, way: _Way, num_tokens: int, images: Sequence[ImagePart], now_s: float) -> ImagePlan:
        """Return who encodes the images of a prompt on a way."""
        computes = way.prefill or way.decode
        encode = self._members.encode
        queues = self._encoders_sent.queues(encode, computes, now_s)
        return plan_images(images, num_tokens - way.new_tokens, computes, queues, usual_row_s(encode), now_s)

    def _with_encoders(self, way: _Way, prompt: _Prompt) -> Way:
        """Return a way that was chosen, with the E of its images, which are taken to be sent there."""
        now_s, encode = self._clock.monotonic(), self._members.encode
        plan = self._plan_images(way, prompt.num_tokens, prompt.images, now_s)
        self._encoders_sent.note(prompt.images, plan, encode, way.prefill or way.decode, now_s)
        prefill = None if way.prefill is None else way.prefill.info
        return Way(prefill, way.decode.info, way.new_tokens, plan.encoders)


def _add(loads: list[InstanceLoad], load: InstanceLoad) -> None:
    if load not in loads:
        loads.append(load)
