"""The vision tower of real modules in turns: features equal bit for bit with one piece, whatever computes between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import Engine
from image_checkpoints import PictureRequest, write_patches, write_vision_checkpoint
from test_image_engine import IMAGE_ROWS, NoSpecials
from thread_ranks import Ranks

from chitu.engine.executor import EncodeImage, LoadImage, PlaceImage, PrefillChunk, SaveImage, StepPlan, TowerTurn
from chitu.engine.image_features import ImageSteps
from chitu.errors import DamagedFeatures, Internal
from chitu.models.model import vision_of
from chitu.protocol import pack_i32

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3"]
"""Windows in the tower, rows for deeper layers, images seen whole, images that are computed one by one."""
SIZES = [(7, 2), (1, 1), (5, 9)]


class Towers:
    """An engine, and images of two sizes or more, which some families compute in several groups."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        write_vision_checkpoint(folder, name)
        options: dict[str, Any] = {"sampler": NoSpecials(), "sampling": True, "image_rows": IMAGE_ROWS}
        self.engine = Engine(folder, num_pages=100, num_slots=4, max_model_len=512, **options)
        self.runner = self.engine.runner
        self.request = PictureRequest.of(name, SIZES, 3, 5)
        files = write_patches(folder, self.request.pictures)
        rows, places = list(range(IMAGE_ROWS))[::-1], []
        for picture in self.request.pictures:
            places.append([rows.pop() for _ in range(picture.num_rows)])
        self.places = places
        self.encode = [EncodeImage(file, pack_i32(each)) for file, each in zip(files, places, strict=True)]
        cost = self.runner.info.tower
        assert cost is not None
        self.blocks = cost.blocks
        self.runner.execute(StepPlan(encode=self.encode))
        self.whole = self.region.clone()

    @property
    def region(self) -> torch.Tensor:
        table = self.runner._images._table
        assert table is not None
        return table.region

    def clear(self) -> None:
        self.region.fill_(7.0)

    def turn(self, blocks: int, **others: Any) -> list[int]:
        """Run a step with a turn, which begins to encode with block 1, and return its tokens."""
        plan = StepPlan(turn=[TowerTurn(blocks, self.blocks)], **others)
        return self.runner.execute(plan).tokens

    @property
    def is_whole(self) -> bool:
        rows = [row for each in self.places for row in each]
        return torch.equal(self.region[rows], self.whole[rows])

    @property
    def is_untouched(self) -> bool:
        return bool((self.region == 7.0).all())


def num_threads() -> int:
    return sum(thread.name == "tower" for thread in threading.enumerate())


@pytest.fixture(scope="module", params=FAMILIES)
def towers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Towers]:
    torch.set_num_threads(1)
    yield Towers(request.param, tmp_path_factory.mktemp(request.param))
    assert num_threads() == 0


def prompt(towers: Towers) -> tuple[Any, int]:
    text = [(7 * at) % 400 for at in range(40)]
    return towers.engine.admit(0, text, 60), len(text)


def test_features_are_those_of_one_piece_with_steps_of_others_between(towers: Towers) -> None:
    admit, length = prompt(towers)
    alone = towers.runner.execute(StepPlan(admit=[admit], prefill=[PrefillChunk(0, 0, length, sample=True)])).tokens
    alone += [token for _ in range(4) for token in towers.runner.execute(StepPlan(decode=[0])).tokens]
    towers.runner.execute(StepPlan(release=[0]))
    for step in (1, 2, towers.blocks):
        towers.clear()
        begun, counted = list[int](), vision_of(towers.runner.model)
        assert counted is not None
        counted.report_blocks(lambda begun=begun: begun.append(0))
        groups, tokens, ends = 0, list[int](), [*range(step, towers.blocks, step), towers.blocks]
        for number, end in enumerate(ends):
            others: dict[str, Any] = {"encode": towers.encode} if not number else {}
            if not number:
                others |= {"admit": [admit], "prefill": [PrefillChunk(0, 0, length, sample=True)]}
            elif len(tokens) < len(alone):
                others |= {"decode": [0]}
            before = len(begun)
            tokens += towers.turn(end, **others)
            groups = len(begun) // end if not number else groups
            assert len(begun) - before == groups * (end - (ends[number - 1] if number else 0))
            assert towers.is_whole if end == towers.blocks else towers.is_untouched, (step, end)
        assert tokens == alone[: len(tokens)]
        towers.runner.execute(StepPlan(release=[0]))
        assert num_threads() == 0 and begun


def test_logits_behind_images_are_those_of_one_piece(towers: Towers) -> None:
    def logits(plans: list[StepPlan]) -> torch.Tensor:
        towers.clear()
        admit = towers.engine.admit(1, towers.request.tokens, len(towers.request.tokens) + 4, sampling=None)
        images = [
            type(image)(**{n: getattr(image, n) for n in image.__struct_fields__}) for image in towers.request.images
        ]
        place = []
        for index, ((number, span), first) in enumerate(zip(towers.request.spans, towers.request.firsts, strict=True)):
            place.append(PlaceImage(1, index, pack_i32(towers.places[number][first : first + span.length])))
        admit = type(admit)(**{n: getattr(admit, n) for n in admit.__struct_fields__} | {"images": tuple(images)})
        for plan in plans:
            towers.runner.execute(plan)
        chunk = PrefillChunk(1, 0, len(towers.request.tokens), aux_slot=1)
        towers.runner.execute(StepPlan(admit=[admit], place=place, prefill=[chunk]))
        towers.runner.execute(StepPlan(release=[1]))
        return towers.engine.pool.aux_logits[1].clone()

    turns = [[TowerTurn(blocks, towers.blocks)] for blocks in range(1, towers.blocks + 1)]
    in_turns = [StepPlan(encode=towers.encode if not n else [], turn=turn) for n, turn in enumerate(turns)]
    one_piece = logits([StepPlan(encode=towers.encode)])
    assert torch.equal(logits(in_turns), one_piece)
    assert not torch.equal(logits(in_turns[:-1]), one_piece), "planted: the last turn is missing"
    towers.runner._images.drop()


def test_a_batch_that_is_given_up_writes_nothing_and_ends_its_thread(towers: Towers) -> None:
    towers.clear()
    for end in ("turn", "another", "forget", "close"):
        towers.turn(1, encode=towers.encode)
        assert num_threads() == 1
        if end == "turn":
            towers.runner.execute(StepPlan(turn=[TowerTurn(0, 0)]))
        elif end == "another":
            towers.turn(1, encode=towers.encode[:1])
            assert num_threads() == 1
            towers.runner.execute(StepPlan(turn=[TowerTurn(0, 0)]))
        elif end == "forget":
            towers.runner.forget([])
        else:
            towers.runner._images.drop()
        assert num_threads() == 0 and towers.is_untouched, end
        with pytest.raises(Internal, match="has no images"):
            towers.turn(2)
    towers.runner.execute(StepPlan(turn=[TowerTurn(0, 0)]))
    towers.runner.execute(StepPlan(encode=towers.encode))
    assert towers.is_whole


def test_what_raises_in_the_tower_is_raised_by_the_step_and_ends_it(towers: Towers) -> None:
    towers.clear()
    wrong = [*towers.encode[:-1], EncodeImage(towers.encode[-1].patches, pack_i32(towers.places[-1][:-1]))]
    towers.turn(1, encode=wrong)
    with pytest.raises(Internal, match="feature rows"):
        towers.turn(towers.blocks)
    assert num_threads() == 0
    with pytest.raises(FileNotFoundError):
        towers.turn(1, encode=[EncodeImage("/dev/shm/none", towers.encode[0].rows)])
    assert num_threads() == 0 and towers.is_untouched
    towers.turn(towers.blocks, encode=towers.encode)
    assert towers.is_whole


def test_ranks_compute_the_same_blocks_in_the_same_steps(towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    done: dict[Any, list[int]] = {}

    def advance(images: ImageSteps, turn: TowerTurn, right: Any = ImageSteps._advance) -> None:
        right(images, turn)
        done.setdefault(images, []).append(vision_of_steps[images]._num_begun)

    monkeypatch.setattr(ImageSteps, "_advance", advance)
    ranks = Ranks(towers.folder, 2, 64, sampler=NoSpecials(), max_model_len=512, image_rows=IMAGE_ROWS)
    vision_of_steps: dict[Any, Any] = {runner._images: vision_of(runner.model) for runner in ranks.runners}
    for block in range(1, towers.blocks + 1):
        encode = towers.encode if block == 1 else []
        ranks.runner.launch(StepPlan(encode=encode, turn=[TowerTurn(block, towers.blocks)])).result()
    ranks.close()
    first, second = done.values()
    assert first == second and len(first) == towers.blocks and sorted(set(first)) == first
    rows = [row for each in towers.places for row in each]
    for runner in ranks.runners:
        table = runner._images._table
        assert table is not None and torch.equal(table.region[rows], towers.whole[rows])


def swapped(blocks: torch.nn.ModuleList) -> Callable[[], None]:
    first, last = blocks[0], blocks[-1]
    blocks[0], blocks[-1] = last, first

    def back() -> None:
        blocks[0], blocks[-1] = first, last

    return back


def skipped(blocks: torch.nn.ModuleList) -> Callable[[], None]:
    block, right = blocks[0], blocks[0].forward

    def forward(hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        given = right(hidden, *others, **named)
        return hidden if isinstance(given, torch.Tensor) else (hidden, *given[1:])

    block.forward = forward

    def back() -> None:
        del block.forward

    return back


@pytest.mark.parametrize("plant", [skipped, swapped])
def test_a_block_that_is_skipped_or_computed_out_of_order_shows(towers: Towers, plant: Any) -> None:
    tower: Any = vision_of(towers.runner.model)
    [blocks] = [
        part
        for name, part in tower.body.named_modules()
        if name.startswith(tuple(tower.names)) and name.endswith((".blocks", ".layers", ".layer"))
    ]
    back = plant(blocks)
    towers.clear()
    try:
        for block in range(1, towers.blocks + 1):
            towers.turn(block, **({"encode": towers.encode} if block == 1 else {}))
    finally:
        back()
    assert not towers.is_whole and not towers.is_untouched


def test_saved_features_are_loaded_to_other_rows_and_damaged_ones_are_not(towers: Towers) -> None:
    rows, images = [row for each in towers.places for row in each], towers.runner._images
    towers.runner.execute(StepPlan(encode=towers.encode))
    saved = StepPlan(save_images=[SaveImage(5, pack_i32(rows))])
    towers.runner.execute(saved)
    towers.clear()
    there = list(range(len(rows)))[::-1]
    towers.runner.execute(StepPlan(load_images=[LoadImage(5, pack_i32(there))]))
    assert torch.equal(towers.region[there], towers.whole[rows])
    host_MW, _ = images._copies[5]
    flipped = host_MW.view(torch.uint8).numpy()
    for place in ((0, 0), (len(rows) - 1, flipped.shape[1] - 1)):
        flipped[place] ^= 4
        towers.clear()
        with pytest.raises(DamagedFeatures):
            towers.runner.execute(StepPlan(load_images=[LoadImage(5, pack_i32(there))]))
        assert towers.is_untouched
        flipped[place] ^= 4
    flipped[[0, 1]] = flipped[[1, 0]]
    with pytest.raises(DamagedFeatures):
        towers.runner.execute(StepPlan(load_images=[LoadImage(5, pack_i32(there))]))
    towers.runner.execute(StepPlan(drop_images=[5, 6]))
    with pytest.raises(Internal, match="no features are saved under 5"):
        towers.runner.execute(StepPlan(load_images=[LoadImage(5, pack_i32(there))]))
    assert not images._copies
