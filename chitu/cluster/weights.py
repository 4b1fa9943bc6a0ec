"""Drives changes of weights and of LoRA adapters, and pauses, in the process that keeps the membership: waits for what
`router/weights.py` waits for, and tells it. Loop thread.

A change goes on if its caller has gone, and ends with this process: an uncommitted one leaves nothing, a committed one
goes on by itself (`router/weights.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from chitu.errors import RequestTimeout, SleepRefused
from chitu.pd_coordination import PDCoordination
from chitu.protocol.admin import AdaptersState, AdapterState, Sleeper, SleepState, WeightsState
from chitu.protocol.weights import PauseMode, SleepLevel, WeightsReport
from chitu.router.weights import WeightsChange

logger = logging.getLogger(__name__)

POLL_S = 0.02


class WeightsDriver:
    def __init__(self, coordination: PDCoordination, in_flight: Callable[[], int]) -> None:
        """`in_flight` returns how many requests of this router are on instances."""
        self._coordination = coordination
        self._in_flight = in_flight
        self._tasks: set[asyncio.Task[None]] = set()

    def state(self) -> WeightsState:
        weights, view = self._coordination.weights, self._coordination.view
        found = next((info for info in view.instances if info.weights == weights.serve), None)
        model_hash = weights.serve.model_hash or (found.model_hash if found is not None else "")
        word = weights.word
        paused: PauseMode | Literal["sleep"] = "sleep" if word.sleep else word.mode
        return WeightsState(model_hash, weights.serve.path, weights.serve.number, weights.missing(), paused)

    def sleep_state(self) -> SleepState:
        weights = self._coordination.weights
        word, found = weights.word, weights.sleeping().items()
        sleepers = [Sleeper(name, level, report.freed_bytes, report.keeps) for name, (level, report) in found]
        return SleepState(word.sleep, not word.stays, sleepers, [] if word.sleep else weights.missing())

    async def change(self, path: str, is_mixed: bool, timeout_s: float) -> WeightsState:
        """Change to the weights in a folder. Return when all instances serve them, or after `timeout_s` if the change
        is committed by then. Raises WeightsRefused, with nothing changed."""
        change = await self._run(self._coordination.weights.begin(path, is_mixed), timeout_s)
        logger.info("the weights in %s serve (model_hash %s)", path, change.wanted.model_hash)
        return self.state()

    def adapters(self, folders: Mapping[str, str]) -> AdaptersState:
        """Return which LoRA adapters serve. `folders`: those of the topology, by name."""
        weights = self._coordination.weights
        found = [AdapterState(each.name, each.path, each.hash) for each in weights.adapters(folders)]
        return AdaptersState(found, weights.serve.number, weights.missing(), weights.leaving)

    async def change_adapters(
        self, load: Mapping[str, str], unload: Collection[str], folders: Mapping[str, str], timeout_s: float
    ) -> AdaptersState:
        """Load LoRA adapters and take others off the list. Return when all instances serve the new list and no request
        runs with one that is on it no more, or after `timeout_s` if the change is committed by then. Raises
        ModelNotFound and WeightsRefused, with nothing changed."""
        weights, loop = self._coordination.weights, asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        change = await self._run(weights.begin_adapters(load, unload, folders), timeout_s)
        logger.info(
            "the LoRA adapters are %s", ", ".join([each.name for each in change.wanted.adapters or ()]) or "none"
        )
        while weights.leaving and loop.time() < end_s:
            await asyncio.sleep(POLL_S)
        return self.adapters(folders)

    async def _run(self, change: WeightsChange, timeout_s: float) -> WeightsChange:
        """Drive a change to its end, or for `timeout_s` if it is committed by then, and raise its error."""
        self._coordination.publish_weights()
        logger.info("a change to %s begins", change.what)
        task = asyncio.ensure_future(self._drive(change, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)
        if change.error is not None:
            logger.warning("the change to %s failed: %s", change.what, change.error)
            raise change.error
        return change

    async def pause(self, mode: PauseMode, timeout_s: float) -> WeightsState:
        """Have new requests wait at all routers, and running ones end or, with `keep`, stop where they are; empty: let
        all go on, whichever router was asked for the pause. Return once that is so, or another router was told
        otherwise. Raises RequestTimeout if it is not after `timeout_s`; the pause stays."""
        weights, loop = self._coordination.weights, asyncio.get_running_loop()
        weights.pause = mode
        self._coordination.publish_weights()
        end_s = loop.time() + timeout_s
        while self._coordination.view.weights != weights.order or not weights.is_pause_known:
            if loop.time() > end_s:
                raise RequestTimeout(f"not all instances know after {timeout_s:g} s; they will")
            await asyncio.sleep(POLL_S)
        while mode == "finish" and weights.pause == mode and not self._is_drained():
            if loop.time() > end_s:
                raise RequestTimeout(f"requests still run after {timeout_s:g} s; new ones wait")
            await asyncio.sleep(POLL_S)
        return self.state()

    async def sleep(self, level: SleepLevel, timeout_s: float, *, stays: bool) -> SleepState:
        """Have all instances sleep at this level once nothing runs, and return when they do. Raises SleepRefused, with
        all of them awake, if one cannot, or if a request or an operator wakes them before; RequestTimeout if they do
        not sleep after `timeout_s`: then they will."""
        weights, loop = self._coordination.weights, asyncio.get_running_loop()
        said = weights.begin_sleep(level, stays=stays)
        self._coordination.publish_weights()
        logger.info("the cluster goes to sleep (level %d)", level)
        end_s = loop.time() + timeout_s
        while True:
            found = weights.sleeping()
            why = [f"{name}: {report.no_sleep}" for name, (_, report) in found.items() if report.no_sleep]
            if why and weights.word == said:
                weights.end_sleep(said)
                self._coordination.publish_weights()
                raise SleepRefused("; ".join(why))
            if weights.word != said and not (weights.word.sleep and weights.word.age > said.age):
                raise SleepRefused("a request, or an operator, woke the cluster before it slept")
            are_asleep = weights.is_pause_known and all(at >= level for at, _ in found.values())
            if are_asleep and not self._in_flight() and not self._coordination.has_change:
                return self.sleep_state()
            if loop.time() > end_s:
                raise RequestTimeout(f"not asleep after {timeout_s:g} s, but will be: {self._why_awake(found)}")
            await asyncio.sleep(POLL_S)

    def _why_awake(self, found: dict[str, tuple[SleepLevel, WeightsReport]]) -> str:
        running = self._in_flight()
        mine = [f"{running} requests of this router run"] if running else []
        busy = [name for name, (at, report) in found.items() if not at and not report.is_drained]
        idle = [name for name, (at, report) in found.items() if not at and report.is_drained]
        theirs = [f"requests run on {', '.join(busy)}"] if busy else []
        last = [f"{', '.join(idle)} wait for a peer, or for the others"] if idle else []
        return "; ".join([*mine, *theirs, *last])

    def wake_for(self, num_waiting: int) -> None:
        """Wake the cluster if it sleeps, or is about to, while so many requests wait, and may be woken by them."""
        if self._coordination.weights.wake_for(num_waiting):
            logger.info("%d waiting requests wake the cluster", num_waiting)
            self._coordination.publish_weights()

    async def wake(self, timeout_s: float) -> SleepState:
        """Have all instances wake, and return when they serve, or say that they cannot read their weights. Raises
        RequestTimeout if they do not after `timeout_s`; they will."""
        weights, loop = self._coordination.weights, asyncio.get_running_loop()
        if weights.word.sleep:
            weights.pause = ""
            self._coordination.publish_weights()
        end_s = loop.time() + timeout_s
        while self._coordination.has_change or not weights.is_pause_known or weights.are_waking:
            if loop.time() > end_s:
                raise RequestTimeout(f"not awake after {timeout_s:g} s: {', '.join(weights.missing())}")
            await asyncio.sleep(POLL_S)
        return self.sleep_state()

    def _is_drained(self) -> bool:
        return not self._in_flight() and self._coordination.weights.is_drained

    async def _drive(self, change: WeightsChange, timeout_s: float) -> None:
        weights, end_s = self._coordination.weights, asyncio.get_running_loop().time() + timeout_s
        while not change.is_over:
            if change.phase == "drain" and self._coordination.view.weights.holds:
                if self._is_drained():
                    weights.on_drained(change)
            elif asyncio.get_running_loop().time() > end_s and change.is_committed:
                return
            if asyncio.get_running_loop().time() > end_s:
                weights.give_up(change, f"not done within {timeout_s:g} s: it was in the phase {change.phase!r}")
            self._coordination.publish_weights()
            await asyncio.sleep(POLL_S)
