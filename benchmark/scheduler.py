"""CPU cost of scheduling and messaging per step, with an executor that computes nothing.

    python -m benchmark.scheduler

Runs a unified scheduler at 1 to 4096 running requests, which are all admitted in its first turn. Everything but the
model is real: admission, page growth, finish checks, the token message (encoded and sent through a real ZMQ socket to a
reader). Time is CPU time of the thread divided by admissions or steps, so a busy machine does not change it much. With
overlap a step is launched before the previous one is read, as on a GPU: the same work in another order, which must not
cost more.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Collection
from pathlib import Path

import zmq

from chitu.cache_manager import PagedKVCacheManager
from chitu.clock import RealClock
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import DoneStep, ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.errors import ChituError, Internal
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.net.sockets import bind, connect
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import RequestHead, SamplingParams, UnifiedRequest, encode, pack_i32, scheduler_codec, token_codec
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.types import new_room

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 512


class IdleExecutor:
    """Executor that answers every plan at once with the same token. Counts its own CPU time apart."""

    def __init__(self, num_slots: int, max_model_len: int = PROMPT_TOKENS + OUTPUT_TOKENS) -> None:
        self.info = ExecutorInfo(num_slots, max_model_len, 32000, 1, ())
        self.cpu_s = 0.0

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        start_s = time.thread_time()
        slots = [chunk.slot for chunk in plan.prefill if chunk.sample] + plan.decode
        result = StepResult(slots, [7] * len(slots))
        self.cpu_s += time.thread_time() - start_s
        return DoneStep(result)

    def forget(self, slots: Collection[int]) -> None: ...

    @property
    def saved_keys(self) -> frozenset[int]:
        return frozenset()

    def warmup(self) -> None: ...

    def close(self) -> None: ...


def measure(running: int, overlap: bool) -> tuple[float, float, float, int]:
    """Return (CPU us per admission, CPU us per step, the same per request, steps) with `running` requests decoding."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader, port = bind(context, zmq.PULL, "127.0.0.1", 0)
    writer = connect(context, zmq.PUSH, "127.0.0.1", port)
    executor = IdleExecutor(running)

    def send(frame: bytes) -> bool:
        writer.send(frame, zmq.NOBLOCK)
        return True

    def refuse(room: bytes, error: ChituError) -> None:
        raise Internal(f"a unified scheduler reported a failure: {error}")

    config = SchedulerConfig(
        max_running_requests=running, max_batched_tokens=PROMPT_TOKENS * running, max_waiting_requests=running
    )
    cache = PagedKVCacheManager(running * ((PROMPT_TOKENS + OUTPUT_TOKENS) // 16 + 1), 16)
    core = InstanceCore(
        SchedulerSettings(config, DeadlineConfig(), overlap=overlap),
        LoadedEngine(executor, cache),
        TokenManager(1, send),
        refuse,
        RealClock(),
    )
    scheduler = PDScheduler(core, DecodeRole(core))
    prompt = pack_i32(array("i", range(PROMPT_TOKENS)))
    for index in range(running):
        head = RequestHead(new_room(), f"r{index}", prompt)
        request = UnifiedRequest(head, SamplingParams(OUTPUT_TOKENS, ignore_eos=True))
        message = scheduler_codec.decode(encode(request))
        assert isinstance(message, UnifiedRequest)
        scheduler.submit(message)
    start_s = time.thread_time()
    scheduler.step()
    admission_s = time.thread_time() - start_s - executor.cpu_s
    executor.cpu_s = 0.0
    steps = 0
    start_s = time.thread_time()
    while not scheduler.is_idle:
        scheduler.step()
        steps += 1
    cpu_s = time.thread_time() - start_s - executor.cpu_s
    received = 0
    while received < running * OUTPUT_TOKENS:
        received += len(token_codec.decode(reader.recv()).tokens)
    for socket in (reader, writer):
        socket.close()
    context.term()
    return admission_s / running * 1e6, cpu_s / steps * 1e6, cpu_s / steps / running * 1e6, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args()
    rows = [
        (running, "on" if overlap else "off", *measure(running, overlap))
        for running in (1, 64, 256, 1024, 4096)
        for overlap in (False, True)
    ]
    columns = ("running requests", "overlap", "us/admission", "us/step", "us/step/request", "steps")
    publish("scheduler", columns, rows, arguments.json_dir)


if __name__ == "__main__":
    main()
