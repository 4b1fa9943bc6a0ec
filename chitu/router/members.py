"""The instances as the router knows them: one record each, from its joining to its loss.

Owned by `PDRequestRouter`, on the loop thread. Only `Members` adds and removes a record. The parts of a record are
pure: reports, outcomes and the time come in.

Invariants: `InstanceGroup.works` is the work of its instances at any moment; a request changes two numbers in them, so
a choice only reads these lists. What is asked for every request costs nothing per instance: the candidates are arranged
anew only after a view or a loss.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from chitu.config.schema import BreakerConfig, RouterConfig
from chitu.net.aio import LINGER_MS, Outbox, PeerSocket
from chitu.net.link import LinkReceiver, LinkSender
from chitu.protocol import PROTOCOL_VERSION, ClusterView, InstanceInfo, LoadReport, Wire, encode, encode_for
from chitu.router.candidates import NO_GROUPS, Candidates, Groups, InstanceKey, Way, instance_key, whole_groups
from chitu.router.loads import PRIOR, InstanceGroup, InstanceLoad

BreakerState = Literal["closed", "open", "half_open"]
NO_INSTANCES: frozenset[InstanceKey] = frozenset()

MEMORY_S = (2.0, 10.0)
"""Bounds of a rate's time constant: what was measured that many seconds of backlog ago counts by 1/e. Between them it
is the longest wait that may be predicted: a promise of a short wait needs an early sign of a slower instance."""
NAMED_PAIRS = 4
"""Pairs that the reason of `/health` names."""
MARGIN = 2 / 3
"""Largest share of the instances' own `queue_s` that a wait may take: a request must not time out in the queue that it
was admitted to."""


def longest_wait_s(config: RouterConfig) -> float:
    """Return the longest wait that may be predicted for a request that is admitted."""
    deadlines, wanted_s = config.pd_disaggregation.deadlines, config.admission.max_queue_s
    survivable_s = min(MARGIN * deadlines.queue_s, config.request_timeout_s)
    return survivable_s if wanted_s is None else min(wanted_s, survivable_s)


@dataclass(slots=True)
class Breaker:
    """Circuit breaker: an instance that failed several times in a row gets no requests for a while, then one as probe.

    Closed: requests come. Open: none come. Half-open: the time is up, and one request may try. Its failure opens the
    breaker again for twice as long; any success closes it. A probe without an outcome (its client left, or it takes
    long) is followed by another after the same time, so a breaker cannot stay half-open for ever."""

    config: BreakerConfig
    failures: int = 0
    """Failures in a row."""
    open_s: float = 0.0
    """Seconds that it stays open this time; 0 while closed."""
    again_s: float = 0.0
    """Time at which the next request may go there."""
    is_probing: bool = False
    """A request was sent as a probe, and its outcome is not known yet."""

    def on_failure(self, now_s: float) -> bool:
        """Count a failure that is this instance's fault. Return True if this opened the breaker (again)."""
        self.failures += 1
        if self.open_s:
            if not self.is_probing:
                return False  # a request from before it opened
            self.open_s = min(2 * self.open_s, self.config.max_open_s)
        elif self.failures >= self.config.failures:
            self.open_s = self.config.open_s
        else:
            return False
        self.again_s, self.is_probing = now_s + self.open_s, False
        return True

    def on_success(self) -> None:
        """Clear the failures: the instance served a request to its end."""
        self.failures, self.open_s, self.again_s, self.is_probing = 0, 0.0, 0.0, False

    def on_sent(self, now_s: float) -> None:
        """Count a request that goes there. If half-open, this is the probe: no second one for now."""
        if self.open_s and self.again_s <= now_s:
            self.is_probing, self.again_s = True, now_s + self.open_s

    def state(self, now_s: float) -> BreakerState:
        if not self.open_s:
            return "closed"
        return "half_open" if self.is_probing or self.again_s <= now_s else "open"


class Dispatched(msgspec.Struct, frozen=True):
    """What a message in flight is: the half of a request (or the whole), or its cancellation."""

    room: bytes
    is_cancel: bool


@dataclass(slots=True, eq=False)
class ClusterMember:
    """One incarnation of one instance."""

    load: InstanceLoad
    peer: PeerSocket
    """Socket to its request port."""
    sender: LinkSender[Dispatched]
    """Sending end of the link with it."""
    breaker: Breaker
    """One for all members of a group."""
    encode: Callable[[Wire], bytes] = encode
    """Returns a message as a frame of the version of the wire that it reads."""
    receiver: LinkReceiver = field(default_factory=LinkReceiver)
    """Receiving end for its tokens."""
    reads: int = 0
    """`reads` of its last heartbeat."""
    cut_off: frozenset[int] = frozenset()
    """D: incarnations of the P that it receives nothing from. P: ranks of the D that it does not write to until a write
    that failed is fenced."""

    @property
    def key(self) -> InstanceKey:
        return self.load.key

    @property
    def info(self) -> InstanceInfo:
        return self.load.info

    @property
    def name(self) -> str:
        return self.load.key.name


class Members:
    def __init__(self, config: RouterConfig, outbox: Outbox) -> None:
        self._outbox = outbox
        self._breaker = config.breaker
        self._slo = config.slo
        self._deadlines = config.pd_disaggregation.deadlines
        self._memory_s = min(max(MEMORY_S[0], longest_wait_s(config)), MEMORY_S[1])
        self._members: dict[InstanceKey, ClusterMember] = {}
        self.get = self._members.get
        """Return the record of an instance; None if it is gone."""
        self.by_link: dict[int, ClusterMember] = {}
        """The same by the id of their link in messages."""
        self._groups: dict[int, dict[InstanceKey, ClusterMember]] = {}
        """Members of each group, by its id."""
        self._open: dict[InstanceKey, ClusterMember] = {}
        """Those whose breaker is open or half-open."""
        self.num_cut_off = 0
        """Number of D that receive nothing from some P, and of P that do not write to some D."""
        self._view: ClusterView | None = None
        """Newest view until it is first used: views may come faster than requests."""
        self._rates = PRIOR
        """Rates of instances that have not measured their own."""
        self._has_lost = False
        self._candidates = Candidates()
        self.prefill = self.decode = self.unified = InstanceGroup()
        """The loads of the candidates. Read `candidates` first, which renews them."""
        self.encode: tuple[InstanceLoad, ...] = ()
        """The same of E."""

    def __getitem__(self, key: InstanceKey) -> ClusterMember:
        return self._members[key]

    def __contains__(self, key: object) -> bool:
        """Return whether an instance may get new requests."""
        return key in self.prefill.positions or key in self.decode.positions or key in self.unified.positions

    def add(self, info: InstanceInfo) -> None:
        """Add an instance that joined. Idempotent. Raises Capacity if this process has no socket for it."""
        key = instance_key(info)
        if key in self._members:
            return
        link = 1 + secrets.randbelow((1 << 63) - 1)
        others = self._groups.get(info.group.id, {}) if info.group is not None else {}
        self._members[key] = self.by_link[link] = member = ClusterMember(
            InstanceLoad.of(info, self._slo, self._memory_s),
            self._outbox.open(info),
            LinkSender(link, self._deadlines.heartbeat_interval_s, self._deadlines.lease_s),
            next((other.breaker for other in others.values()), Breaker(self._breaker)),
            encode if info.protocol >= PROTOCOL_VERSION else partial(encode_for, info.protocol),
        )
        if info.group is not None:
            self._groups.setdefault(info.group.id, {})[key] = member

    def on_report(self, member: ClusterMember, report: LoadReport, now_s: float) -> None:
        """Apply a report of an instance."""
        self._rates = member.load.on_report(report, now_s, self._rates)

    def remove(self, key: InstanceKey) -> None:
        """Remove an instance that is gone, although the newest view may have it, and drop what is queued for it."""
        member = self._members.pop(key, None)
        if member is not None:
            del self.by_link[member.sender.link]
            member.peer.close()
            self._open.pop(key, None)
            if (group := member.info.group) is not None:
                self._groups[group.id].pop(key)
                if not self._groups[group.id]:
                    del self._groups[group.id]
            self.num_cut_off -= bool(member.cut_off)
            self._has_lost = True

    def groups_of(self, way: Way) -> Groups:
        """Return the groups of the instances of a way."""
        if way.decode.group is None and (way.prefill is None or way.prefill.group is None):
            return NO_GROUPS
        keys = [instance_key(info) for info in way[:2] if info is not None and info.group is not None]
        members = [self._members[key] for key in keys if key in self._members]
        return {member.key: frozenset(each.key for each in self._group_of(member)) for member in members}

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Remove all. Queued messages (cancellations) may still leave within `linger_ms`."""
        for member in self._members.values():
            member.peer.close(linger_ms)
        self._members.clear()
        self._groups.clear()
        self.by_link.clear()
        self._has_lost = True

    def on_view(self, view: ClusterView) -> None:
        """Apply a new cluster view; the next choice uses it."""
        self._view = view

    @property
    def candidates(self) -> Candidates:
        """The members that may get new requests; the same object until they change."""
        if self._view is not None or self._has_lost:
            listed = self._candidates if self._view is None else Candidates.in_view(self._view)
            self._view, self._has_lost = None, False
            groups = [self._group(instances) for instances in (listed.prefill, listed.decode, listed.unified)]
            self.prefill, self.decode, self.unified = groups
            prefill, decode, unified = (tuple(load.info for load in group.loads) for group in groups)
            self.encode = self._group(listed.encode).loads
            encode = tuple(load.info for load in self.encode)
            self._candidates = Candidates(prefill, decode, unified, listed.partial, encode)
        return self._candidates

    def _group(self, instances: Iterable[InstanceInfo]) -> InstanceGroup:
        """Return a group of those that are members, which replaces all earlier ones that they are in. A group of which
        a member is lost is left out at once."""
        loads = []
        for info in whole_groups(info for info in instances if instance_key(info) in self._members):
            load = self._members[instance_key(info)].load
            load.info = info
            loads.append(load)
        return InstanceGroup.of(loads).step_together().watch()

    # ------------------------------------------------------------------------------------------------------- health

    def on_failure(self, member: ClusterMember, now_s: float) -> bool:
        """Count a failure that is this instance's fault. Return True if this opened its breaker (again)."""
        has_opened = member.breaker.on_failure(now_s)
        if has_opened:
            self._open |= {each.key: each for each in self._group_of(member)}
        return has_opened

    def on_success(self, member: ClusterMember) -> None:
        """Clear the failures of an instance that served a request to its end."""
        if member.breaker.failures:
            member.breaker.on_success()
            for each in self._group_of(member):
                self._open.pop(each.key, None)

    def _group_of(self, member: ClusterMember) -> list[ClusterMember]:
        """Return the members of its group, itself included."""
        group = member.info.group
        return [member] if group is None else list(self._groups[group.id].values())

    def blocked(self, now_s: float) -> frozenset[InstanceKey]:
        """Return the instances that get no request now, because their breakers are open."""
        if not self._open:
            return NO_INSTANCES
        return frozenset(key for key, member in self._open.items() if member.breaker.again_s > now_s)

    def on_cut_off(self, member: ClusterMember, peers: frozenset[int]) -> bool:
        """Set the peers that an instance is cut off from now (`ClusterMember.cut_off`). Return True if they changed."""
        if peers == member.cut_off:
            return False
        self.num_cut_off += bool(peers) - bool(member.cut_off)
        member.cut_off = peers
        return True

    def is_cut_off(self, prefill: InstanceKey, decode: InstanceKey) -> bool:
        """Return whether D receives nothing from P, or P does not write to D."""
        d = self._members.get(decode)
        return (d is not None and prefill.incarnation in d.cut_off) or self.is_suspended(prefill, decode)

    def is_suspended(self, prefill: InstanceKey, decode: InstanceKey) -> bool:
        """Return whether P does not write to D: it fails each request of the pair."""
        p = self._members.get(prefill)
        return p is not None and decode.engine_rank in p.cut_off

    @property
    def has_sound_pair(self) -> bool:
        """Whether there is a candidate pair that is not cut off from each other."""
        if not self.candidates.has_pair:
            return False
        return any(not self.is_cut_off(p, d) for p in self.prefill.positions for d in self.decode.positions)

    @property
    def can_try(self) -> bool:
        """Whether a request may be sent somewhere: to a unified instance or a pair, be it a silent one, whose messages
        may get through again at any time. A suspended pair would fail it."""
        candidates = self.candidates
        if not self.num_cut_off or candidates.usable_alone:
            return candidates.usable
        return any(not self.is_suspended(p, d) for p in self.prefill.positions for d in self.decode.positions)

    def why_unusable(self) -> str:
        """Return a clause on why no request can be served now; empty if one can."""
        candidates = self.candidates
        if not self.num_cut_off or candidates.usable_alone or not candidates.has_pair or self.has_sound_pair:
            return candidates.why_unusable()
        pairs = [(p, d) for p in self.prefill.positions for d in self.decode.positions]
        clauses = [
            f"{p.name} does not write to {d.name} until a write that failed can no longer land"
            if self.is_suspended(p, d)
            else f"{d.name} receives nothing from {p.name}"
            for p, d in pairs[:NAMED_PAIRS]
        ]
        more = f", and so for {len(pairs) - NAMED_PAIRS} more pairs" if len(pairs) > NAMED_PAIRS else ""
        return f"no pair can serve: {'; '.join(clauses)}{more}"
