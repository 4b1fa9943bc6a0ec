"""Drives changes of weights, and pauses, in the process that keeps the membership: waits for what `router/weights.py`
waits for, and tells it. Loop thread.

A change goes on if its caller has gone, and ends with this process: an uncommitted one leaves nothing, a committed one
goes on by itself (`router/weights.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from chitu.errors import RequestTimeout
from chitu.http.fleet.snapshot import WeightsState
from chitu.pd_coordination import PDCoordination
from chitu.protocol.weights import PauseMode
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
        return WeightsState(model_hash, weights.serve.path, weights.serve.number, weights.missing(), weights.pause)

    async def change(self, path: str, is_mixed: bool, timeout_s: float) -> WeightsState:
        """Change to the weights in a folder. Return when all instances serve them, or after `timeout_s` if the change
        is committed by then. Raises WeightsRefused, with nothing changed."""
        change = self._coordination.weights.begin(path, is_mixed)
        self._coordination.publish_weights()
        logger.info("a change to the weights in %s begins", path)
        task = asyncio.ensure_future(self._drive(change, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)
        if change.error is not None:
            logger.warning("the change to the weights in %s failed: %s", path, change.error)
            raise change.error
        logger.info("the weights in %s serve (model_hash %s)", path, change.wanted.model_hash)
        return self.state()

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
