"""Images without pixels: an executor whose tokens depend on the features of images, and a source that a test pumps.

The features of an image are numbers made of its key, its row and the weights. The executor keeps them in rows of a
region, as the real one does, and computes with whatever is in the rows that the plans name. So a row of another image,
of other weights or not encoded at all changes every token after it, and so does a rotary position that is off.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from chitu.engine.executor import (
    Admit,
    EncodeImage,
    ExecutorInfo,
    ImageSpan,
    LayerCallback,
    PrefillChunk,
    StepPlan,
    StepResult,
)
from chitu.errors import ChituError, DamagedFeatures
from chitu.fake.checksum import ChecksumExecutor, ChecksumPool, Pace
from chitu.fake.executor import InvariantViolation, check_plan, kv_of, next_token
from chitu.instance.image_source import PreparedImage
from chitu.protocol import ImagePart, SamplingParams, unpack_i32


def image(name: int, start: int, num_rows: int, spans: int = 1, side: int = 1) -> ImagePart:
    """Return an image of so many rows, in `spans` runs with a token between. `side`: height of its grid, by which the
    tokens behind are rotated, if its rows fill one."""
    runs, first = [], 0
    for number in range(spans):
        length = num_rows // spans if number < spans - 1 else num_rows - first
        runs.append((start + first + number, length, first))
        first += length
    grid = (1, side, num_rows // side) if side and num_rows % side == 0 else (0, 0, 0)
    return ImagePart(key_of(name), tuple(runs), grid)


def key_of(name: int) -> bytes:
    return name.to_bytes(16, "big")


def feature(key: bytes, row: int, weights: int = 0) -> int:
    """Return what stands for a feature row."""
    return zlib.crc32(key + row.to_bytes(4, "little")) ^ weights


def _offset(grid: Sequence[int], num_rows: int) -> int:
    """Return how much closer a token behind an image is rotated than its index says."""
    return num_rows - max(grid[1:]) if any(grid) else 0


def rotated_less(spans: Sequence[ImageSpan], position: int) -> int:
    """Return how much less than its index a position is rotated. All spans of an image have its grid."""
    total = rest = 0
    for span in spans:
        if not any(span.grid):
            continue
        rest = (rest or int(np.prod(span.grid))) - span.length
        if not rest and span.start + span.length <= position:
            total += _offset(span.grid, int(np.prod(span.grid)))
    return total


def expected_with_images(
    prompt: Sequence[int],
    images: Sequence[ImagePart],
    n: int,
    vocab_size: int,
    sampling: SamplingParams | None = None,
    weights: int = 0,
) -> list[int]:
    """Return the first `n` tokens that a request with this prompt and these images gets, on any instance."""
    sampling = sampling or SamplingParams(max_tokens=max(1, n), temperature=0.0)
    rows = {
        start + at: feature(image.key, first + at, weights)
        for image in images
        for start, length, first in image.spans
        for at in range(length)
    }
    tokens, state, answer = list(prompt), 0, list[int]()
    at = 0
    while True:
        while at < len(tokens):
            offset = sum(_offset(image.grid, image.num_rows) for image in images if image.end <= at)
            state = zlib.crc32(kv_of(rows.get(at, tokens[at]), at - offset, state ^ weights), state)
            at += 1
        if len(answer) == n:
            return answer
        answer.append(next_token(state, len(answer), sampling, vocab_size))
        tokens.append(answer[-1])


class VisionExecutor(ChecksumExecutor):
    """A `ChecksumExecutor` with a feature region. It checks that no chunk has rows of an image that is not placed."""

    def __init__(self, info: ExecutorInfo, pool: ChecksumPool, pace: Pace = Pace()) -> None:
        super().__init__(info, pool, pace)
        self.region = np.zeros(info.image_rows, np.uint32)
        self.spans: dict[int, list[ImageSpan]] = {}
        self.encoded: list[bytes] = []
        """Keys of the images that were encoded."""
        self.bad_patches: set[bytes] = set()
        """Keys of images whose encoding raises."""
        self.most_encoded = 0
        """Most rows that one step encoded."""
        self.tower: list[EncodeImage] = []
        """Images that are encoded in turns."""
        self.tower_blocks = 0
        self.copies: dict[int, NDArray[np.uint32]] = {}
        """Features in host memory, by number."""
        self.loaded: list[int] = []
        self.damaged: set[int] = set()
        """Numbers whose loading raises."""
        self.most_copied = 0
        """Most rows of all copies."""
        self.turns: list[int] = []
        """Blocks of each turn."""
        self.dropped: list[list[bytes]] = []
        """Keys of the images that were given up together."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if not (plan.encode or plan.turn or plan.place or plan.drop_images or plan.save_images or plan.load_images):
            return super().execute(plan, on_layer)
        self._move_copies(plan)
        self._turn_tower(plan)
        admitted = {admit.slot for admit in plan.admit}
        for admit in plan.admit:
            self.spans[admit.slot] = list(admit.images)
        for place in plan.place:
            check_plan(place.slot in admitted or place.slot in self._slots, f"slot {place.slot} has no sequence")
            span = self.spans[place.slot][place.index]
            check_plan(len(place.rows) == 4 * span.length, f"{len(place.rows)} bytes for {span}")
            self.spans[place.slot][place.index] = ImageSpan(span.start, span.length, span.grid, place.rows)
        self._is_placed = True
        try:
            return super().execute(plan, on_layer)
        finally:
            self._is_placed = False

    def _move_copies(self, plan: StepPlan) -> None:
        for number in plan.drop_images:
            self.copies.pop(number, None)
        for save in plan.save_images:
            check_plan(save.number not in self.copies, f"{save}, which is saved already")
            self.copies[save.number] = self.region[unpack_i32(save.rows)]
        self.most_copied = max(self.most_copied, sum(len(rows) for rows in self.copies.values()))
        for load in plan.load_images:
            check_plan(load.number in self.copies, f"{load}, of which nothing is saved")
            if load.number in self.damaged:
                raise DamagedFeatures("damaged")
            self.region[unpack_i32(load.rows)] = self.copies[load.number]
            self.loaded.append(load.number)

    def _turn_tower(self, plan: StepPlan) -> None:
        """Encode images as the plan says. Nothing of them is in their rows before their last turn."""
        turn = plan.turn[0] if plan.turn else None
        if plan.encode:
            self.tower, self.tower_blocks = list(plan.encode), 0
            for encode in plan.encode:
                self.region[unpack_i32(encode.rows)] = 0
        if turn is not None and not turn.blocks:
            self.dropped.append([bytes.fromhex(encode.patches) for encode in self.tower])
            self.tower = []
            return
        if turn is not None:
            check_plan(bool(self.tower), f"{turn}, but there are no images")
            check_plan(self.tower_blocks < turn.blocks <= turn.of, f"{turn} behind {self.tower_blocks} blocks")
            self.turns.append(turn.blocks - self.tower_blocks)
            self.tower_blocks = turn.blocks
        if self.tower and (turn.is_last if turn is not None else plan.encode):
            images, self.tower = self.tower, []
            self._encode(images)

    def _encode(self, images: Sequence[EncodeImage]) -> None:
        num_rows = 0
        for encode in images:
            key, rows = bytes.fromhex(encode.patches), unpack_i32(encode.rows)
            if key in self.bad_patches:
                raise ValueError("no such patches")
            check_plan(len(set(rows.tolist())) == len(rows), f"rows {rows} of one image")
            self.region[rows] = [feature(key, row, self.weights) for row in range(len(rows))]
            self.encoded.append(key)
            num_rows += len(rows)
        self.most_encoded = max(self.most_encoded, num_rows if len(images) > 1 else 0)

    def forget(self, slots: Collection[int]) -> None:
        self.tower = []
        super().forget(slots)

    _is_placed = False

    def _admit(self, admit: Admit) -> None:
        super()._admit(admit)
        if not self._is_placed:
            self.spans[admit.slot] = list(admit.images)

    def _release(self, slot: int) -> None:
        super()._release(slot)
        if not self._is_placed:
            self.spans.pop(slot, None)

    def _input(self, slot: int, position: int) -> tuple[int, int]:
        token, rotated = super()._input(slot, position)
        for span in self.spans[slot]:
            if span.start <= position < span.start + span.length:
                rows = unpack_i32(span.rows)
                if not len(rows):
                    raise InvariantViolation(f"slot {slot}: row {position} is of {span}, which is not placed")
                token = int(self.region[rows[position - span.start]])
        return token, rotated - rotated_less(self.spans[slot], position)

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        if self.info.whole_images:
            end = chunk.start + chunk.length
            inside = [s for s in self.spans[chunk.slot] if s.start < end < s.start + s.length]
            check_plan(not inside, f"slot {chunk.slot}: a chunk ends at {end}, inside {inside}")
        super()._prefill(chunk, result)


class PumpedSource:
    """A source that prepares an image when the test says so. Implements `ImageSource`."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, int]] = []
        """Every call, with the router."""
        self.open: dict[bytes, int] = {}
        """Images that were asked for and not dropped, with the router."""
        self.prepared: set[bytes] = set()
        """Those of them that are prepared."""
        self._ready: list[PreparedImage] = []
        self.num_signs = 0
        """As of `ImageSource`: a test that has it work counts them."""

    def ask(self, key: bytes, router: int) -> None:
        if key not in self.open:
            self.asked.append((key, router))
            self.open[key] = router

    def take(self) -> list[PreparedImage]:
        ready, self._ready = self._ready, []
        return ready

    def drop(self, key: bytes) -> None:
        self.open.pop(key, None)
        self.prepared.discard(key)
        self._ready = [each for each in self._ready if each.key != key]

    def prepare(self, *keys: bytes) -> None:
        """Prepare these images, or all that are asked for."""
        for key in keys or list(self.open):
            if key in self.open and key not in self.prepared:
                self.prepared.add(key)
                self._ready.append(PreparedImage(key, key.hex()))

    def fail(self, key: bytes, error: ChituError) -> None:
        self._ready.append(PreparedImage(key, error=error))
