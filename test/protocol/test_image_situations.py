"""Whole P and D with the real router, where prompts have images: each row of KV is that of the right image, whatever is
lost, killed or retracted, and files stay on the router as long as somebody may ask for them."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from cluster import Op
from cluster_process import DEADLINES, PAGE_SIZE, REGION_SALT, KVExecutor, LateProcess, Memory, Process, Surroundings
from cluster_world import Client, RoutedWorld
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.executors import LateExecutor
from support.images import PumpedSource, feature, image, rotated_less
from test_cluster_faults import ROUTED_SCRIPTS, SHAPES

from chitu.engine.executor import Admit, ImageSpan, LayerCallback, StepPlan, StepResult
from chitu.errors import InvalidRequest
from chitu.instance.sequences import Sequence as Request
from chitu.protocol import ImagePart, unpack_i32
from chitu.router.generation import GenerateRequest
from chitu.types import Role

IMAGE_ROWS = 12
SIZES = (2, 3, 4, 6, 9)
"""Rows of the images of the world, by their names."""


class SeeingKV(KVExecutor):
    """KV of images: what a step writes is of the rows of the region that it was told of, and what it reads is checked
    against the images that the request has, by their keys."""

    def __init__(
        self, memory: Memory, meanwhile: Callable[[], None], owner_of: Callable[[int], Request | None]
    ) -> None:
        super().__init__(memory, meanwhile)
        self.info = msgspec.structs.replace(self.info, image_rows=IMAGE_ROWS)
        self.region = np.zeros(IMAGE_ROWS, np.uint32)
        self.spans: dict[int, list[ImageSpan]] = {}
        self.num_encoded = 0
        self._owner_of = owner_of
        self._images: dict[int, tuple[ImagePart, ...]] = {}
        """Those that the sequence of each slot has."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        for encode in plan.encode:
            rows = unpack_i32(encode.rows)
            self.region[rows] = [feature(bytes.fromhex(encode.patches), row) for row in range(len(rows))]
            self.num_encoded += 1
        self._plan = plan
        return super().execute(plan, on_layer)

    def _admit(self, admit: Admit) -> None:
        super()._admit(admit)
        sequence = self._owner_of(admit.slot)
        assert sequence is not None
        self._images[admit.slot] = sequence.head.images
        self.spans[admit.slot] = list(admit.images)
        for place in self._plan.place:
            if place.slot == admit.slot:
                self._place(place.slot, place.index, place.rows)

    def _place(self, slot: int, index: int, rows: bytes) -> None:
        span = self.spans[slot][index]
        assert len(rows) == 4 * span.length
        self.spans[slot][index] = msgspec.structs.replace(span, rows=rows)

    def _right(self, slot: int, start: int, end: int) -> NDArray[np.uint32]:
        images = self._images[slot]
        spans = [ImageSpan(at, length, part.grid) for part in images for at, length, _ in part.spans]
        return self._chain(slot, start, end, self._features(slot), spans)

    def _features(self, slot: int) -> dict[int, int]:
        """Return the right features by position."""
        return {
            at + row: feature(part.key, first + row)
            for part in self._images[slot]
            for at, length, first in part.spans
            for row in range(length)
        }

    def _chain(
        self, slot: int, start: int, end: int, rows: dict[int, int], spans: Sequence[ImageSpan]
    ) -> NDArray[np.uint32]:
        tokens, values = self._slots[slot].tokens, list[bytes]()
        for at in range(end):
            token = rows.get(at, tokens[at]) + 7919 * rotated_less(spans, at) & 0xFFFFFFFF
            values.append(token.to_bytes(4, "little"))
        sums = itertools.accumulate(values, lambda total, value: zlib.crc32(value, total), initial=0)
        return np.array(list(sums)[start + 1 :], dtype=np.uint32) ^ REGION_SALT

    def _write(self, slot: int, start: int, end: int, regions: slice = slice(None)) -> None:
        for place in self._plan.place:
            self._place(place.slot, place.index, place.rows)
        rows = self._features(slot)  # those before `start` are in the pages already
        for span in self.spans[slot]:
            for at in range(max(span.start, start), min(span.start + span.length, end)):
                assert span.rows, f"slot {slot}: row {at} is of an image that is not placed"
                rows[at] = int(self.region[unpack_i32(span.rows)[at - span.start]])
        found = self._chain(slot, start, end, rows, self.spans[slot])
        pages = self._slots[slot].pages
        for at in range(start, end):
            self._kv[regions, pages[at // PAGE_SIZE], at % PAGE_SIZE] = found[regions, at - start]


class SeeingProcess(Process):
    def _wrap(self, world: Surroundings) -> None:
        self.executor = SeeingKV(self.memory, world.meanwhile, self._owner_of)
        self.device = self.executor

    def _owner_of(self, slot: int) -> Request | None:
        return self.core.sequences.resources.slots.owner[slot]

    def _begin(self, info: Any) -> None:
        super()._begin(info)
        if self.core.sequences.resources.images._source.__class__ is not PumpedSource:
            self.source = self.core.sequences.resources.images._source = PumpedSource()

    def step(self) -> bool:
        world = self.world
        assert isinstance(world, SeeingWorld)
        if world.router is not None and not world.is_slow:
            for key in [key for key in self.source.open if key not in self.source.prepared][:1]:
                if world.router.image_files.find(key) is None:
                    self.source.fail(key, InvalidRequest("no running request has this image"))
                else:
                    self.source.prepare(key)
        return super().step()

    def check_empty(self) -> None:
        super().check_empty()
        gate = self.core.sequences.resources.images
        gate.store.check_idle()
        assert not gate.waiting and not gate.asked and not self.source.open


class LateSeeingProcess(SeeingProcess, LateProcess):
    def _wrap(self, world: Surroundings) -> None:
        SeeingProcess._wrap(self, world)
        self.executor.info = msgspec.structs.replace(self.executor.info, checks_rows=True)
        self.device = self.late = LateExecutor(self.executor)


def images_of(number: int, num_tokens: int) -> tuple[ImagePart, ...]:
    rng, at, images = random.Random(number), 0, list[ImagePart]()
    while rng.random() < 0.8:
        name = rng.randrange(len(SIZES))
        at += rng.randrange(4)
        part = image(name, at, SIZES[name], spans=1 + (name == 2), side=1 + name % 2)
        if part.end > num_tokens:
            break
        images.append(part)
        at = part.end
    return tuple(images)


class SeeingWorld(RoutedWorld):
    process_type = SeeingProcess
    is_slow = False
    """Whether no image is prepared."""
    images_of = staticmethod(images_of)

    def publish(self) -> None:
        is_new = self.router is None
        super().publish()
        if is_new and self.router is not None:
            add_choices = self.router.add_choices
            self.router.add_choices = lambda requests, wake: add_choices([*map(self.with_images, requests)], wake)  # type: ignore[method-assign, misc, assignment]

    def with_images(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with images: some or none, equal for all choices of a prompt."""
        images = self.images_of(int(request.request_id.split("-")[0][1:]), request.num_tokens)
        files = {each.key: each.key * 4 for each in images}
        return msgspec.structs.replace(request, images=images, files=files)

    def settle_down(self, limit_s: float = 30.0) -> None:
        super().settle_down(limit_s)
        assert self.router is not None
        assert not len(self.router.image_files) and not self.router.image_files.num_bytes
        assert "invalid_request" not in {client.end for client in self.clients}

    @property
    def num_encoded(self) -> int:
        return sum(process.executor.num_encoded for process in self.processes if isinstance(process.executor, SeeingKV))


class LateSeeingWorld(SeeingWorld):
    process_type = LateSeeingProcess


def requested(world: SeeingWorld, num_tokens: int, max_tokens: int, num_choices: int = 1) -> Client:
    """Send the next request that has images."""
    while not images_of(world._num_requests + 1, num_tokens):
        world._num_requests += 1
    client = world.request(num_tokens, max_tokens, num_choices)
    assert client is not None
    return client


@pytest.mark.parametrize("make", [SeeingWorld, LateSeeingWorld])
@pytest.mark.parametrize("killed", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_requests_with_images_go_on_behind_a_killed_instance(
    make: type[SeeingWorld], killed: Role, num_tokens: int
) -> None:
    world = make(2, 2)
    world.turns(6)
    clients = [requested(world, 20, 14) for _ in range(3)]
    while min(len(client.tokens) for client in clients) < num_tokens or not world.num_encoded:
        world.turns(1)
    for process in [process for process in world.of(killed) if process.rank == 0]:
        world.kill(process)
    world.settle_down()
    assert {client.end for client in clients} == {"finished"}
    world.check_it_still_serves()


def test_a_prompt_waits_for_its_image_without_any_text_behind_it_and_ends_when_none_comes() -> None:
    world = SeeingWorld(1, 1)
    world.turns(6)
    world.is_slow = True
    waiting = requested(world, 22, 4)
    world.turns(20)
    while images_of(world._num_requests + 1, 22):
        world._num_requests += 1
    text = world.request(22, 4)
    world.turns(60)
    assert text is not None and text.end == "finished" and not waiting.end
    while not waiting.end:
        world.advance(0.2)
        world.turns(4)
    assert waiting.end in ("transfer_stalled", "request_timeout") and world.router is not None
    assert world.router.counters.retries["transfer_stalled"] >= 2, "each attempt has its own deadline"
    world.is_slow = False
    world.settle_down()


def test_images_that_come_slowly_and_out_of_order_are_no_silence_of_p() -> None:
    world = SeeingWorld(1, 1)
    world.turns(6)
    world.is_slow = True
    images = tuple(image(name, 4 + 5 * name, SIZES[name]) for name in range(3))
    world.images_of = lambda number, num_tokens: images
    client = world.request(22, 4)
    assert client is not None
    world.turns(20)
    (p,) = world.of(Role.PREFILL)
    assert isinstance(p, SeeingProcess)
    for part in reversed(images):
        began_s = world.clock.monotonic()
        while world.clock.monotonic() < began_s + 0.8 * DEADLINES.transfer_s:
            world.turns(1)
        p.source.prepare(part.key)
    world.is_slow = False
    world.settle_down()
    assert client.end == "finished" and world.router is not None and not world.router.counters.retries


def test_retracted_requests_resume_behind_their_images() -> None:
    retractions = 0
    for seed in range(6):
        world = SeeingWorld(1, 1)
        world.turns(6)
        world._num_requests = 10 * seed
        clients = [requested(world, 20, 28) for _ in range(4)]
        world.settle_down()
        assert {client.end for client in clients} == {"finished"}
        retractions += sum(process.scheduler.load.retractions for process in world.processes)
    assert retractions


def test_choices_with_images_are_right_and_their_file_stays_until_the_last_one_ends() -> None:
    world = SeeingWorld(1, 1)
    world.turns(6)
    client = requested(world, 21, 6, num_choices=3)
    assert world.router is not None and len(world.router.image_files)
    world.router.cancel(client.generation)  # type: ignore[arg-type]
    assert len(world.router.image_files)
    world.settle_down()


@settings(suppress_health_check=list(HealthCheck))
@given(st.sampled_from([SeeingWorld, LateSeeingWorld]), SHAPES, ROUTED_SCRIPTS)
def test_with_images_each_client_gets_each_token_once_and_one_end(
    make: type[SeeingWorld], shape: tuple[int, int], pieces: list[list[Op]]
) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = make(*shape)
    world.play(script)
    world.settle_down()
    world.check_it_still_serves()
