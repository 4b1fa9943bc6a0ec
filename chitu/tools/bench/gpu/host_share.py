"""A decode step as an instance runs it: `PDScheduler` over `ModelRunner`, tokens encoded for the router, with overlap
and without. Its time beyond the device's own time is the host's share.
"""

from __future__ import annotations

import time

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.model_runner import ModelRunner
from chitu.errors import ChituError, Internal
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import RequestHead, SamplingParams, UnifiedRequest, pack_i32
from chitu.tools.bench.gpu.card import PAGE_SIZE, Card
from chitu.types import new_room

CHUNK_TOKENS = 2048


class _Requests:
    """A scheduler, and the number of token messages that it sent."""

    def __init__(self, runner: ModelRunner, overlap: bool) -> None:
        self.num_messages = 0
        slots = runner.info.num_slots
        limits = SchedulerConfig(
            max_running_requests=slots,
            max_batched_tokens=CHUNK_TOKENS,
            chunk_size=CHUNK_TOKENS,
            max_waiting_requests=slots,
        )
        core = InstanceCore(
            SchedulerSettings(limits, DeadlineConfig(), overlap=overlap),
            LoadedEngine(runner, PagedKVCacheManager(runner.num_pages, PAGE_SIZE)),
            TokenManager(1, self._take),
            self._refuse,
            RealClock(),
        )
        self.scheduler = PDScheduler(core, DecodeRole(core))

    def _take(self, frame: bytes) -> bool:
        self.num_messages += 1
        return True

    @staticmethod
    def _refuse(room: bytes, error: ChituError) -> None:
        raise Internal(f"a unified scheduler reported a failure: {error}")


def step_seconds(card: Card, runner: ModelRunner, prompt_len: int, steps: int, overlap: bool) -> float:
    """Return the seconds of a decode step with every slot of `runner` running, from `prompt_len` tokens on. `runner` is
    idle before and after."""
    info, batch = runner.info, runner.info.num_slots
    requests = _Requests(runner, overlap)
    scheduler = requests.scheduler
    sampling = SamplingParams(max_tokens=info.max_model_len - prompt_len, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = pack_i32([(7 * position + index) % info.vocab_size for position in range(prompt_len)])
        scheduler.submit(UnifiedRequest(RequestHead(new_room(), f"r{index}", prompt), sampling))
    while scheduler.load.running < batch or scheduler.load.waiting_tokens:
        if not scheduler.step():
            raise Internal(f"{scheduler.load.running} of {batch} requests run, the others never will")
    for _ in range(2 if card.is_gpu else 0):  # read the last prompts and run the first full step
        scheduler.step()
    card.synchronize()
    before = requests.num_messages
    start_s = time.perf_counter()
    for _ in range(steps):
        scheduler.step()
    seconds = (time.perf_counter() - start_s) / steps
    if requests.num_messages - before != steps:
        raise Internal(f"{requests.num_messages - before} token messages in {steps} steps")
    scheduler.cancel_all()
    while scheduler.step():
        pass
    return seconds
