"""Instances that see: `scheduler_world` with a feature region and a source of images that tests pump."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, room_of
from support.images import PumpedSource, VisionExecutor, expected_with_images
from support.requests import decode_request, prefill_request, unified_request
from tiered_world import MovingWire

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import ExecutorInfo
from chitu.fake.checksum import ChecksumPool, checksum_layout
from chitu.protocol import ImagePart, SamplingParams, pack_i32

SEEING = msgspec.structs.replace(INFO, image_rows=16)


class Eyes(VisionExecutor):
    def __init__(self, info: ExecutorInfo, num_pages: int, page_size: int, aux_rows: NDArray[np.uint8]) -> None:
        self.pool = ChecksumPool(checksum_layout(page_size, INFO.vocab_size), num_pages, len(aux_rows))
        super().__init__(info, self.pool)


class Seeing(Instance):
    """A unified instance that sees, or P or D. Every step prepares what is asked for, unless `is_slow`."""

    executor: Eyes

    def __init__(self, num_pages: int = 64, info: ExecutorInfo = SEEING, most: int = 16, **kw: Any) -> None:
        chunk, host = kw.pop("chunk", 5), kw.pop("host", 0)
        config = SchedulerConfig(
            max_running_requests=8, max_batched_tokens=most, chunk_size=chunk, reserved_decode_tokens=4
        )
        super().__init__(num_pages, info=info, executor=kw.pop("executor", Eyes), config=config, **kw)
        self.source = PumpedSource()
        self.gate = self.scheduler._images
        self.gate._source = self.source
        self.gate.store.host.num_rows = host
        self.is_slow = False

    def step(self) -> bool:
        if not self.is_slow:
            self.source.prepare()
        return self.scheduler.step()

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            self.step()
            if self.scheduler.is_idle:
                self.step()
                return
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler.load}")

    def submit(
        self, index: int, prompt: Sequence[int], images: Sequence[ImagePart] = (), max_tokens: int = 3, **fields: Any
    ) -> None:
        sampling, fields = SamplingParams(max_tokens, temperature=0.0), {"images": tuple(images), **fields}
        fields.setdefault("weights", self.scheduler.weights.serves.number)
        self.scheduler.submit(unified_request(room_of(index), f"r{index}", pack_i32(prompt), sampling, **fields))

    def ask(self, index: int, prompt: Sequence[int], images: Sequence[ImagePart] = (), max_tokens: int = 3) -> int:
        """Serve a request and return how many tokens of its prompt were not computed."""
        self.submit(index, prompt, images, max_tokens)
        self.run()
        self.check(index, prompt, images, max_tokens)
        return self.cached.get(room_of(index), 0)

    def check(self, index: int, prompt: Sequence[int], images: Sequence[ImagePart], max_tokens: int = 3) -> None:
        weights = self.executor.weights
        found = self.tokens.get(room_of(index))
        assert found == expected_with_images(prompt, images, max_tokens, INFO.vocab_size, weights=weights)

    def check_empty(self) -> None:
        super().check_empty()
        self.gate.store.check_idle()
        assert not self.gate.waiting and not self.gate.asked and not self.source.open


class SeeingSide(PSide):
    """P's side, with signs that images come."""

    advances = 0

    def note_advance(self) -> None:
        self.advances += 1


class SeeingPair:
    """P and D that see, on a wire that moves KV."""

    def __init__(self, num_pages: int = 64, info: ExecutorInfo = SEEING, is_d_seeing: bool = True, **kw: Any) -> None:
        self.wire, self.rng = MovingWire(), random.Random(1)
        blind = info if is_d_seeing else msgspec.structs.replace(info, image_rows=0)
        self.prefill = self.wire.prefill = Seeing(num_pages, info, sender=SeeingSide(self.wire), **kw)
        self.decode = self.wire.decode = Seeing(num_pages, blind, receiver=DSide(self.wire), **kw)

    def submit(
        self,
        index: int,
        prompt: Sequence[int],
        images: Sequence[ImagePart] = (),
        max_tokens: int = 3,
        num_emitted: int = 0,
        of_d: Sequence[ImagePart] | None = None,
        **fields: Any,
    ) -> None:
        """Send both halves; that of D has the images `of_d`, if they are given."""
        place, fields = (room_of(index), f"r{index}", pack_i32(prompt)), {"num_emitted": num_emitted, **fields}
        self.submit_to_d(index, prompt, images if of_d is None else of_d, max_tokens, **fields)
        fields.pop("forks", None)
        self.prefill.scheduler.submit(prefill_request(*place, 0, 1, images=tuple(images), **fields))

    def submit_to_d(
        self, index: int, prompt: Sequence[int], images: Sequence[ImagePart] = (), max_tokens: int = 3, **fields: Any
    ) -> None:
        """Send the half of D."""
        sampling, fields = SamplingParams(max_tokens, temperature=0.0), {"images": tuple(images), **fields}
        self.decode.scheduler.submit(
            decode_request(room_of(index), f"r{index}", pack_i32(prompt), sampling, 0, 1, **fields)
        )

    def turn(self) -> None:
        for instance in (self.prefill, self.decode):
            instance.step()
        self.wire.deliver(self.rng)

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            self.turn()
            if self.prefill.scheduler.is_idle and self.decode.scheduler.is_idle:
                self.turn()
                return
        raise AssertionError(f"still busy after {limit} turns")

    def ask(self, index: int, prompt: Sequence[int], images: Sequence[ImagePart] = (), max_tokens: int = 3) -> int:
        """Serve a request and return how many tokens of its prompt P did not compute."""
        before = self.prefill.scheduler._load.prompt_tokens
        self.submit(index, prompt, images, max_tokens)
        self.run()
        self.decode.check(index, prompt, images, max_tokens)
        return len(prompt) - (self.prefill.scheduler._load.prompt_tokens - before)


def text(index: int, length: int) -> list[int]:
    """Return a prompt of tokens that all prompts share from place to place: only the images tell them apart."""
    return [(7 * at + index) % INFO.vocab_size for at in range(length)]


def full_pages(num_tokens: int) -> int:
    """Return how many tokens of so many are in full pages, without the last one."""
    return (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
