"""Images on a P and a D engine against transformers' own forward: every row of the prompt, and decoded ones.

Rows of P are compared, since tokens or rows of D alone could miss a fault in features. Each planted fault is found."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import PAGE_SIZE, Engine, GreedySampler
from image_checkpoints import (
    FAMILIES_WITH_VISION,
    FIRST_SPECIAL,
    PictureRequest,
    write_patches,
    write_vision_checkpoint,
)

from chitu.engine.executor import Admit, EncodeImage, FirstToken, PlaceImage, PrefillChunk, StepPlan
from chitu.models.model import vision_of
from chitu.ops.interface import Batch, ImageRows
from chitu.protocol import pack_i32

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

IMAGE_ROWS = 400
COUNT = 6
"""Tokens that D emits."""
BOUND = 1e-4
TOKEN_BY_TOKEN = ("qwen3_vl", "gemma3", "qwen3_5")
"""Families that compute prompts token by token, too: positions of three axes, images that are seen whole, and state."""
PROMPTS: tuple[tuple[list[tuple[int, int]], int], ...] = (
    ([], 23),
    ([(3, 5)], 20),
    ([(7, 2), (1, 1), (5, 9)], 5),
    ([(8, 6)], 1),
)
"""Height and width of the images of each prompt, in rows, and the tokens before them."""
Planted = Callable[[Batch], Batch]


class NoSpecials(GreedySampler):
    """A placeholder that is generated would stop the library's own forward."""

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        return super().sample(logits[:, :FIRST_SPECIAL], slots)


class Pair:
    """P and D, whose rows are recorded, and the whole model."""

    def __init__(self, name: str, folder: Path, requests: Sequence[PictureRequest] = ()) -> None:
        self.name, self.theirs = name, write_vision_checkpoint(folder, name)
        made = [PictureRequest.of(name, sizes, seed, lead) for seed, (sizes, lead) in enumerate(PROMPTS)]
        self.requests = list(requests) or made
        self.prefill, self.decode = (self._engine(folder, sampling) for sampling in (False, True))
        self.planted: Planted = lambda batch: batch
        self.rows: dict[str, dict[tuple[int, int], torch.Tensor]] = {"P": {}, "D": {}}
        self._record(self.prefill, "P")
        self._record(self.decode, "D")
        pictures = [picture for request in self.requests for picture in request.pictures]
        self.files = write_patches(folder, pictures)
        order = random.Random(5).sample(range(IMAGE_ROWS), sum(picture.num_rows for picture in pictures))
        self.places: list[list[list[int]]] = []
        """Rows of the region of each picture of each request."""
        for request in self.requests:
            self.places.append([[order.pop() for _ in range(each.num_rows)] for each in request.pictures])
        self.prefill.runner.execute(self.encoding())

    @staticmethod
    def _engine(folder: Path, sampling: bool) -> Engine:
        options: dict[str, Any] = {"sampler": NoSpecials(), "sampling": sampling, "image_rows": IMAGE_ROWS}
        return Engine(folder, num_pages=100, num_slots=5, max_model_len=512, **options)

    def _record(self, engine: Engine, name: str) -> None:
        model, rows = engine.runner.model, self.rows[name]
        right = model.forward

        def forward(tokens: torch.Tensor, batch: Batch, *others: Any) -> torch.Tensor:
            hidden = right(tokens, self.planted(batch) if name == "P" else batch, *others)
            places = zip(batch.slots_T.tolist(), batch.positions_T.tolist(), strict=True)
            rows.update(zip(places, model.own_logits(hidden), strict=True))
            return hidden

        model.forward = forward

    def encoding(self) -> StepPlan:
        flat = [rows for places in self.places for rows in places]
        return StepPlan(encode=[EncodeImage(file, pack_i32(rows)) for file, rows in zip(self.files, flat, strict=True)])

    def rows_of(self, slot: int, index: int) -> bytes:
        """Return the rows of the region with the features of a slot's span."""
        request = self.requests[slot]
        (number, span), first = request.spans[index], request.firsts[index]
        return pack_i32(self.places[slot][number][first : first + span.length])

    def fill(self, chunk: int) -> list[Admit]:
        """Compute all prompts on P in ragged chunks of at most so many tokens, wider where images are seen whole."""
        admits, place = [], []
        for slot, request in enumerate(self.requests):
            images = list(request.images)
            for index, image in enumerate(images):  # the first are known at admission, the others later
                if index == 0:
                    images[index] = with_fields(image, rows=self.rows_of(slot, index))
                else:
                    place.append(PlaceImage(slot, index, self.rows_of(slot, index)))
            admit = self.prefill.admit(slot, request.tokens, len(request.tokens) + COUNT, sampling=None)
            admits.append(with_fields(admit, images=tuple(images)))
        plan, done = StepPlan(admit=admits, place=place), [0] * len(self.requests)
        while any(at < len(request.tokens) for at, request in zip(done, self.requests, strict=True)):
            for slot, request in enumerate(self.requests):
                if done[slot] < (length := len(request.tokens)):
                    end = self._end(request, min(done[slot] + chunk, length))
                    last = {"aux_slot": slot} if end == length else {}
                    plan.prefill.append(PrefillChunk(slot, done[slot], end - done[slot], **last))
                    done[slot] = end
            self.prefill.runner.execute(plan)
            plan = StepPlan()
        return admits

    def _end(self, request: PictureRequest, end: int) -> int:
        if self.prefill.runner.info.whole_images:
            return next((i.start + i.length for i in request.images if i.start < end < i.start + i.length), end)
        return end

    def move(self, admits: Sequence[Admit], knows_images: bool = True) -> list[Admit]:
        """Do what a transfer does, and return the admissions of D, which names no feature rows."""
        moved = []
        for slot, (request, admit) in enumerate(zip(self.requests, admits, strict=True)):
            there = self.decode.admit(slot, request.tokens, len(request.tokens) + COUNT, kv_len=len(request.tokens))
            count = -(-len(request.tokens) // PAGE_SIZE)
            for ours, theirs in zip(self.prefill.pool.regions, self.decode.pool.regions, strict=True):
                theirs[list(there.pages[:count])] = ours[list(admit.pages[:count])]
            self.decode.pool.aux_logits[slot] = self.prefill.pool.aux_logits[slot]
            if admit.state_slot >= 0:
                self.decode.pool.state_rows[there.state_slot] = self.prefill.pool.state_rows[admit.state_slot]
            moved.append(with_fields(there, images=request.images if knows_images else ()))
        return moved

    def generate(self, admits: Sequence[Admit]) -> list[list[int]]:
        slots = list(range(len(admits)))
        first = [FirstToken(slot, slot) for slot in slots]
        result = self.decode.runner.execute(StepPlan(admit=list(admits), first_tokens=first))
        outputs = [[token] for token in result.tokens]
        for _ in range(COUNT - 1):
            for output, token in zip(outputs, self.decode.runner.execute(StepPlan(decode=slots)).tokens, strict=True):
                output.append(token)
        return outputs

    def run(self, chunk: int, knows_images: bool = True) -> tuple[list[float], list[float]]:
        """Return the worst error of each request's rows on P, and on D, as a share of its largest logit."""
        for rows in self.rows.values():
            rows.clear()
        admits = self.fill(chunk)
        moved = self.move(admits, knows_images)
        outputs = self.generate(moved)
        errors: tuple[list[float], list[float]] = [], []
        for slot, request in enumerate(self.requests):
            theirs, length = request.reference(self.theirs, outputs[slot]), len(request.tokens)
            errors[0].append(self._worst("P", slot, range(length), theirs))
            errors[1].append(self._worst("D", slot, range(length, length + COUNT - 1), theirs))
        for engine, those in ((self.prefill, admits), (self.decode, moved)):
            engine.runner.execute(StepPlan(release=[admit.slot for admit in those]))
            engine._free += [page for admit in those for page in admit.pages]
        return errors

    def _worst(self, name: str, slot: int, positions: range, theirs: torch.Tensor) -> float:
        own = torch.stack([self.rows[name][slot, position] for position in positions])
        return float((own - theirs[positions.start : positions.stop]).abs().max() / theirs.abs().max())


def with_fields(record: Any, **fields: Any) -> Any:
    """Return a record of a plan with other fields."""
    return type(record)(**{name: fields.get(name, getattr(record, name)) for name in record.__struct_fields__})


@pytest.fixture(scope="module", params=list(FAMILIES_WITH_VISION))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    yield Pair(request.param, tmp_path_factory.mktemp(request.param))


def test_rows_of_p_and_of_d_are_those_of_transformers(pair: Pair, record_property: Callable[..., None]) -> None:
    assert pair.prefill.runner.info.image_rows == IMAGE_ROWS
    assert pair.prefill.runner.info.whole_images == (pair.name == "gemma3")
    for chunk in (1, 37, 512) if pair.name in TOKEN_BY_TOKEN else (13, 512):
        on_p, on_d = pair.run(chunk)
        record_property(f"chunks of {chunk}", f"P {max(on_p):.1e}, D {max(on_d):.1e}")
        assert max(on_p) < BOUND and max(on_d) < BOUND, (chunk, on_p, on_d)


def test_a_step_that_encodes_says_so_at_each_block_of_the_tower(pair: Pair) -> None:
    reports, tower = list[str](), vision_of(pair.prefill.runner.model)
    assert tower is not None
    for name in ("a former one", "the present one"):
        tower.report_blocks(partial(reports.append, name))
    pair.prefill.runner.execute(pair.encoding())
    assert len(reports) >= 2 and set(reports) == {"the present one"}


def changed(batch: Batch, **change: Callable[[ImageRows], Any]) -> Batch:
    if batch.images is None:
        return batch
    fields = {name: make(batch.images) for name, make in change.items()}
    return dataclasses.replace(batch, images=batch.images._replace(**fields))


FAULTS: dict[str, Planted] = {
    "features shifted by a row": lambda batch: changed(batch, features_MD=lambda i: i.features_MD.roll(1, 0)),
    "deep features a layer late": lambda batch: changed(
        batch, deeper=lambda i: (torch.zeros_like(i.features_MD), *i.deeper)
    ),
    "deep features of each other": lambda batch: changed(batch, deeper=lambda i: i.deeper[::-1]),
    "no deep features": lambda batch: changed(batch, deeper=lambda i: ()),
    "positions of a text": lambda batch: dataclasses.replace(batch, rope_3T=None),
    "images as causal as text": lambda batch: changed(batch, ends_T=lambda i: None),
}


def test_each_planted_fault_shows_in_rows_of_p(pair: Pair) -> None:
    shape = pair.prefill.runner._slots.images.shape
    for name, fault in FAULTS.items():
        if ("deep" in name and not shape.num_deep) or ("causal" in name and not shape.whole_images):
            continue
        if "positions" in name and not shape.uses_mrope:
            continue
        pair.planted = fault
        try:
            on_p, _ = pair.run(37)
        finally:
            pair.planted = lambda batch: batch
        assert on_p[0] < BOUND and min(on_p[1:]) > 100 * BOUND, (name, on_p)


def test_features_of_another_request_show_in_its_rows_alone(pair: Pair) -> None:
    right = pair.places[1][0], pair.places[3][0]
    count = len(right[0])
    pair.places[1][0] = [*right[1], *right[1]][:count]
    try:
        on_p, _ = pair.run(37)
    finally:
        pair.places[1][0] = right[0]
    assert on_p[1] > 100 * BOUND and max(on_p[0], on_p[2], on_p[3]) < BOUND, on_p


def test_a_d_that_does_not_know_the_images_rotates_its_rows_wrongly(pair: Pair) -> None:
    on_p, on_d = pair.run(37, knows_images=False)
    assert max(on_p) < BOUND
    is_wrong = [error > BOUND for error in on_d]
    assert is_wrong == [
        bool(request.pictures) and pair.prefill.runner._slots.images.shape.uses_mrope for request in pair.requests
    ]
