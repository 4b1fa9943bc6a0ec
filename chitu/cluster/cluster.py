"""The cluster as this router has it: what the HTTP API reads of it, and what it is told to do with all of it.

Over the membership and the request router, which exist before it; loop thread. What two routers must not decide at
once, the first living one decides: another one asks it (`OtherRouters`), and only that one has its balancer tick.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from chitu.clock import RealClock
from chitu.cluster.balancing import Balancing
from chitu.cluster.membership import GATHER_S, Membership
from chitu.cluster.other_routers import OtherRouters
from chitu.cluster.weights import WeightsDriver
from chitu.config.schema import RouterConfig
from chitu.errors import InUse, InvalidRequest, LastInstance, UnknownInstance
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import ClusterView, InstanceInfo, LoadReport
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.admin import (
    AdaptersState,
    Canary,
    DrainReply,
    ProfileReply,
    RoleReply,
    SleepState,
    WeightsState,
)
from chitu.protocol.profile import PROFILE_VERSION, ProfileOrder
from chitu.protocol.weights import PauseMode, SleepLevel
from chitu.router.metrics import CoordinationMetrics, RouterMetrics
from chitu.types import Role, instance_name, place_of

DecisionT = TypeVar("DecisionT")


@dataclass(slots=True, frozen=True)
class RouterRecord:
    """The router as it is now."""

    in_flight: int
    version: int
    """Version of its journal: grows with every start, first token and end of a request."""
    running: tuple[RequestSnapshot, ...] = ()
    ended: tuple[RequestSnapshot, ...] = ()
    """Requests that ended last, oldest first."""
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    coordination: CoordinationMetrics = field(default_factory=CoordinationMetrics)
    is_ending: bool = False
    """Whether it has got a signal to end."""


class Cluster:
    """Construct it on the running loop. Its holder calls `tick` about every 50 ms, and sets `is_ending`."""

    def __init__(
        self, config: RouterConfig, router: PDRequestRouter, membership: Membership, others: OtherRouters
    ) -> None:
        self._router = router
        self._membership = membership
        self._others = others
        self._weights = WeightsDriver(membership.coordination, lambda: router.num_sent)
        self._balancing: Balancing | None = None
        if config.balance != "off":
            self._balancing = Balancing(config, router, membership.coordination, self.change_role, RealClock())
        self.is_ending = False
        """Whether the process has got a signal to end."""
        self._profile_end_s = 0.0
        """When the last profile that was asked for here is over, on the loop's clock."""

    def tick(self) -> None:
        """Wake a cluster that sleeps if requests wait. Have the balancer decide, if this is the first living router of
        the list: one of them changes the fleet."""
        self._weights.wake_for(self._router.num_awaiting)
        if self._balancing is not None and self._membership.coordination.first_router == self._others.index:
            self._balancing.tick()

    @property
    def view(self) -> ClusterView:
        return self._membership.coordination.view

    def loads(self) -> Mapping[tuple[Role, int], LoadReport]:
        """Return the last report of each member."""
        return self._membership.coordination.loads()

    def record(self) -> RouterRecord:
        router = self._router
        balance = self._balancing.metrics() if self._balancing is not None else None
        return RouterRecord(
            router.in_flight,
            router.journal.version,
            tuple(router.running()),
            tuple(router.journal.ended),
            router.metrics(),
            msgspec.structs.replace(self._membership.metrics(), balance=balance),
            self.is_ending,
        )

    async def drain(self, instance: str, force: bool) -> DrainReply:
        """Send an instance no new requests; it finishes its requests and leaves. Idempotent.

        Raises UnknownInstance; without `force` LastInstance if requests can be served now but not without this
        instance.
        """
        body = {"instance": instance, "force": force}
        if (reply := await self._others.ask(self._routers(), "/admin/drain", body, DrainReply)) is not None:
            return reply
        return await self._decide(lambda: self._drain(instance, force))

    async def change_role(self, instance: str, role: Role, force: bool = False) -> RoleReply:
        """Have an instance finish its requests, or give them back to be continued elsewhere, and join as another role.

        Raises UnknownInstance, RoleRefused; without `force` LastInstance if requests can be served now but not without
        it.
        """
        body = {"instance": instance, "role": role, "force": force}
        if (reply := await self._others.ask(self._routers(), "/admin/role", body, RoleReply)) is not None:
            return reply
        return await self._decide(lambda: self._change_role(instance, role, force))

    def set_canary(self, canary: Canary) -> Canary:
        """Send a share of this router's requests to one revision. Raises UnknownInstance if no instance has it."""
        labels = sorted({info.revision for info in self.view.instances if info.revision})
        if canary.revision and canary.revision not in labels:
            raise UnknownInstance(f"no instance has the revision {canary.revision!r}; there are {', '.join(labels)}")
        self._router.canary = canary
        return canary

    def profile(self, wanted: str, seconds: float, steps: int) -> ProfileReply:
        """Have an instance, or all of a role, record what they compute. Raises UnknownInstance; InUse while a profile
        that this router asked for may run; InvalidRequest for an instance that takes none."""
        members = [info for info in self.view.instances if info.role == wanted] or [self._find(wanted)]
        if old := [info.name for info in members if info.role is Role.ENCODE or info.protocol < PROFILE_VERSION]:
            raise InvalidRequest(f"{', '.join(old)}: an E, or an instance of an older release, takes no profile")
        now_s = asyncio.get_running_loop().time()
        if now_s < self._profile_end_s:
            raise InUse(f"another profile is taken, for at most {self._profile_end_s - now_s:.0f} s more")
        self._profile_end_s = now_s + seconds
        label = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        for info in members:
            self._membership.request_profile(info, ProfileOrder(info.incarnation, label, seconds, steps))
        return ProfileReply([info.name for info in members], label, seconds, steps)

    async def change_weights(self, path: str, is_mixed: bool, timeout_s: float) -> WeightsState:
        """See `WeightsDriver`, as for the next ones."""
        return await self._weights.change(path, is_mixed, timeout_s)

    def adapters(self, folders: Mapping[str, str]) -> AdaptersState:
        return self._weights.adapters(folders)

    async def change_adapters(
        self, load: Mapping[str, str], unload: Collection[str], folders: Mapping[str, str], timeout_s: float
    ) -> AdaptersState:
        return await self._weights.change_adapters(load, unload, folders, timeout_s)

    async def pause(self, mode: PauseMode, timeout_s: float) -> WeightsState:
        return await self._weights.pause(mode, timeout_s)

    async def sleep(self, level: SleepLevel, timeout_s: float, *, stays: bool) -> SleepState:
        return await self._weights.sleep(level, timeout_s, stays=stays)

    async def wake(self, timeout_s: float) -> SleepState:
        return await self._weights.wake(timeout_s)

    async def flush_caches(self) -> None:
        """Make every instance forget its cached prefixes, within about a heartbeat."""
        self._membership.coordination.flush_caches(1 + secrets.randbits(62))

    def _routers(self) -> list[int]:
        return self._membership.coordination.routers

    async def _decide(self, decide: Callable[[], DecisionT]) -> DecisionT:
        """Decide who may go. What has just joined counts once all routers have it, so a refusal waits for that a
        little."""
        loop, coordination = asyncio.get_running_loop(), self._membership.coordination
        end_s = loop.time() + 2 * self._membership.interval_s
        while True:
            try:
                return decide()
            except LastInstance:
                if coordination.are_everywhere or loop.time() > end_s:
                    raise
            await asyncio.sleep(GATHER_S)

    def _drain(self, name: str, force: bool) -> DrainReply:
        info = self._find(name)
        if not force:
            self._membership.coordination.require_others(info.role, info.engine_rank, f"chitu drain {info.name}")
        self._membership.request_drain(info.role, info.engine_rank)
        return DrainReply(info.name, str(info.incarnation), "draining")

    def _change_role(self, name: str, role: Role, force: bool) -> RoleReply:
        info, core = self._find(name), self._membership.coordination
        if not force and role is not info.role:
            core.require_others(info.role, info.engine_rank, f"chitu role {info.name} {role}")
        info = self._membership.change_role(info.role, info.engine_rank, role, force)
        return RoleReply(info.name, str(info.incarnation), instance_name(*place_of(info.becomes)))

    def _find(self, name: str) -> InstanceInfo:
        if (found := self._membership.coordination.find(name.upper())) is not None:
            return found
        members = self._membership.coordination.view.instances
        names = ", ".join(info.name for role in Role for info in members if info.role is role) or "none"
        raise UnknownInstance(f"there is no instance {name!r} in the cluster; it has {names}")
