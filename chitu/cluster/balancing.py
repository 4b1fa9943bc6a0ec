"""Drives the balancer (`router/balance.py`) in the process that keeps the membership: what the router knows goes in,
decisions go to the log, to `GET /cluster` and `/metrics`, and with `balance: act` to the instances. Loop thread.

`balance_command` gets a wish once per change, and never two at a time for one role: a wish that changes meanwhile is
told as it is then."""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
from asyncio.subprocess import DEVNULL
from collections import defaultdict
from collections.abc import Awaitable, Callable

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import ChituError
from chitu.pd_coordination import PDCoordination
from chitu.pd_request_router import PDRequestRouter
from chitu.router.balance import Balancer, Change, Fleet, observe
from chitu.router.members import longest_wait_s
from chitu.router.metrics import BalanceMetrics
from chitu.types import Role

logger = logging.getLogger(__name__)

MEMORY = 0.05
"""Weight of the requests since the last tick in the mean length of prompts."""


class Balancing:
    """Construct it on the running loop unless `balance` is `off`, and call `tick` about every 50 ms while this router
    is the first one that lives."""

    def __init__(
        self,
        config: RouterConfig,
        router: PDRequestRouter,
        coordination: PDCoordination,
        change_role: Callable[[str, Role], Awaitable[object]],
        clock: Clock,
    ) -> None:
        self._acts, self._command = config.balance == "act", shlex.split(config.balance_command)
        self._router, self._coordination, self._change_role, self._clock = router, coordination, change_role, clock
        ttft_s = longest_wait_s(config) if config.slo.ttft_s is None else config.slo.ttft_s
        self._balancer = Balancer(ttft_s, config.slo.tpot_s, self._acts)
        self._interval_s = config.pd_disaggregation.deadlines.heartbeat_interval_s
        self._next_s = -math.inf
        self._last_flow = router.flow()
        self._prompt_tokens = 1.0
        """Mean length of the prompts of late."""
        self._advised: Role | None = None
        """Role of the advice that was logged last, while it holds."""
        self._named = ""
        """Slow instance that was logged last, while it is slow."""
        self._recommends = False
        """Whether something about E is recommended, which was logged when it began."""
        self._changes: defaultdict[str, int] = defaultdict(int)
        self._told: dict[Role, int] = {}
        """Wishes that the command has got."""
        self._changing: asyncio.Future[None] | None = None
        self._telling: dict[Role, asyncio.Future[None]] = {}

    def metrics(self) -> BalanceMetrics:
        """Return the decisions so far, and what they are made from."""
        balancer = self._balancer
        return BalanceMetrics(
            wanted={str(role): number for role, number in balancer.wanted.items()},
            pressure={str(role): number for role, number in balancer.pressure.items()},
            role_changes=dict(self._changes),
            advice=self._advice(),
        )

    def _advice(self) -> str:
        advice, obstacle, slow = self._balancer.advice, self._balancer.obstacle, self._balancer.slow
        said = [str(each) for each in (slow, self._balancer.encoders) if each]
        if advice is not None:
            said.append(f"{advice}; not now: {obstacle}" if obstacle else str(advice))
        return f"Balancer ({'act' if self._acts else 'advise'}): {'. '.join(said)}" if said else ""

    def tick(self) -> None:
        now_s = self._clock.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        change = self._balancer.tick(now_s, self._fleet())
        if self._balancer.encoders and not self._recommends:
            logger.warning("%s", self._balancer.encoders)
        self._recommends = bool(self._balancer.encoders)
        advice = self._balancer.advice
        if advice is not None and advice.role is not self._advised and change is None:
            logger.warning("%s", self._advice())
        self._advised = None if advice is None else advice.role
        slow = self._balancer.slow
        if slow is not None and slow.instance != self._named:
            logger.warning("%s", slow)
        self._named = "" if slow is None else slow.instance
        if change is not None:
            self._changing = asyncio.ensure_future(self._make(change))
        if self._command:
            self._tell_wishes()

    def _fleet(self) -> Fleet:
        coordination, flow = self._coordination, self._router.flow()
        view, loads, ages_s = coordination.view, coordination.loads(), coordination.metrics().ages_s
        last, self._last_flow = self._last_flow, flow
        if num_new := flow.requests - last.requests:
            share = 1 - (1 - MEMORY) ** num_new
            self._prompt_tokens += share * ((flow.prompt_tokens - last.prompt_tokens) / num_new - self._prompt_tokens)
        busy = ""
        if self._changing is not None and not self._changing.done():
            busy = "a change is being ordered"
        elif (
            coordination.routed_view.weights.holds or view.weights.prepare is not None or coordination.weights.missing()
        ):
            busy = "the cluster is paused, or changes its weights"
        elif flow.is_cut_off:
            busy = "a P and a D cannot reach each other"
        observed = [
            observe(info, load, ages_s[info.name], self._prompt_tokens)
            for info in view.instances
            if (load := loads.get((info.role, info.engine_rank))) is not None and info.name in ages_s
        ]
        return Fleet(observed, flow.offered, flow.begun, flow.waits_s, busy)

    async def _make(self, change: Change) -> None:
        logger.warning("%s becomes %s: %s", change.instance, change.role.letter, change.reason)
        try:
            await self._change_role(change.instance, change.role)
        except ChituError as error:
            logger.warning("%s does not become %s: %s", change.instance, change.role.letter, error.message)
            self._balancer.on_failed(self._clock.monotonic())
        else:
            self._changes[str(change.role)] += 1

    def _tell_wishes(self) -> None:
        """Run the command for each role whose wish has changed."""
        present = defaultdict[Role, int](int)
        for info in self._coordination.view.instances:
            present[info.role] += not info.draining
        for role, wanted in self._balancer.wanted.items():
            task = self._telling.get(role)
            if self._told.setdefault(role, present[role]) != wanted and (task is None or task.done()):
                self._told[role] = wanted
                self._telling[role] = asyncio.ensure_future(self._tell(role, wanted, present[role]))

    async def _tell(self, role: Role, wanted: int, present: int) -> None:
        arguments = [*self._command, str(role), str(wanted), str(present)]
        logger.info("balance_command: %s", shlex.join(arguments))
        try:
            process = await asyncio.create_subprocess_exec(*arguments, stdin=DEVNULL)
            code = await process.wait()
        except OSError as error:
            logger.error("balance_command: %s does not start: %s", self._command[0], error)
        else:
            if code:
                logger.error("balance_command: %s ended with code %d", shlex.join(arguments), code)
