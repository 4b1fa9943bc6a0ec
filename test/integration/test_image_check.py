"""The self-check with images, what is loaded of a model with vision, and what an engine does with an image besides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import GREEDY, PAGE_SIZE, Engine, logits_of, write_checkpoint
from image_checkpoints import FIRST_SPECIAL, IMAGE, Picture, PictureRequest, write_patches, write_vision_checkpoint
from safetensors.torch import load_file, save_file
from test_image_engine import BOUND, IMAGE_ROWS, NoSpecials, with_fields
from thread_ranks import Ranks

from chitu.engine.build import load_model
from chitu.engine.executor import EncodeImage, Offload, PrefillChunk, Restore, StepPlan
from chitu.errors import ConfigError, Internal
from chitu.models.generic import model as generic
from chitu.models.tensors import tensors_of, why_unlike
from chitu.ops.image_rows import ImageTable
from chitu.ops.interface import Span
from chitu.protocol import pack_i32

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

QWEN, GEMMA = "qwen3_vl", "gemma3"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("vision")
    return {name: (root / name, write_vision_checkpoint(root / name, name)) for name in (QWEN, GEMMA, "qwen2_5_vl")}


def vision_of(folder: Path, **options: Any) -> Any:
    return load_model(folder, "float32", images=True, **options).vision


Right = Any


def without_grid(right: Right, *_: Any) -> None:
    return None


def ends_of_tokens(right: Right, *_: Any) -> None:
    return None


def deeper_late(right: Right, *given: Any) -> Any:
    rows = right(*given)
    return rows and rows._replace(deeper=(torch.zeros_like(rows.features_MD), *rows.deeper))


def of_the_next_row(right: Right, *given: Any) -> Any:
    rows = right(*given)
    return rows and rows._replace(features_MD=rows.features_MD.roll(1, 0))


@pytest.mark.parametrize(
    ("name", "method", "fault"),
    [
        (QWEN, "rope", without_grid),
        ("qwen2_5_vl", "rope", without_grid),
        (GEMMA, "_ends", ends_of_tokens),
        (QWEN, "rows", deeper_late),
        (GEMMA, "rows", of_the_next_row),
    ],
)
def test_the_self_check_finds_each_fault_and_the_model_serves_text(
    name: str,
    method: str,
    fault: Callable[..., Any],
    folders: dict[str, tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = getattr(ImageTable, method)
    monkeypatch.setattr(ImageTable, method, lambda table, *given: fault(lambda *x: right(table, *x), *given))
    assert vision_of(folders[name][0]) is None
    assert "images are not served: computed in batches over pages, a " in caplog.text, caplog.text


def test_the_self_check_finds_which_models_see_whole_images(folders: dict[str, tuple[Path, Any]]) -> None:
    assert {name: vision_of(folder).is_whole for name, (folder, _) in folders.items()} == {
        QWEN: False,
        GEMMA: True,
        "qwen2_5_vl": False,
    }


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_a_model_of_fewer_bits_passes(name: str, folders: dict[str, tuple[Path, Any]]) -> None:
    model = load_model(folders[name][0], "bfloat16", images=True)
    assert model.vision is not None and model.vision.is_whole == (name == GEMMA)


def test_rings_cannot_keep_what_whole_images_need(
    folders: dict[str, tuple[Path, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    assert vision_of(folders[GEMMA][0], window_state=True) is None
    assert "cache.window_state" in caplog.text


def test_only_what_is_wanted_is_loaded_and_checked(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, theirs = folders[QWEN]
    text = load_model(folder, "float32")
    assert text.vision is None and not any("visual" in name for name, _ in tensors_of(text))
    sees, again = (load_model(folder, "float32", images=True) for _ in range(2))
    numbers = sum(each.numel() for name, each in tensors_of(sees) if name.startswith("model.vision["))
    tower = theirs.model.visual
    assert numbers == sum(each.numel() for each in (*tower.parameters(), *tower.buffers())) > 0
    assert not why_unlike(sees, again) and why_unlike(sees, text)

    weights = load_file(folder / "model.safetensors")
    (tmp_path / "blind").mkdir()
    (tmp_path / "blind" / "config.json").write_text((folder / "config.json").read_text())
    kept = {name: each for name, each in weights.items() if ".visual." not in name}
    save_file(kept, tmp_path / "blind" / "model.safetensors")
    assert vision_of(tmp_path / "blind") is None
    assert "images are not served: the checkpoint has no tensors for them" in caplog.text
    lost = next(name for name in weights if ".visual." in name)
    save_file({name: each for name, each in weights.items() if name != lost}, tmp_path / "blind" / "model.safetensors")
    with pytest.raises(ConfigError, match=f"no tensor for '{lost}'"):
        vision_of(tmp_path / "blind")


def test_a_text_model_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr(generic, "check_images", lambda *_: pytest.fail("it has no images"))
    assert vision_of(tmp_path, code="transformers") is None


class Seeing:
    """An engine that computes prompts and continues them, with recorded rows."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {"sampler": NoSpecials(), "image_rows": IMAGE_ROWS}
        self.engine = Engine(folder, num_pages=60, num_slots=4, max_model_len=512, **options)
        self.rows: dict[int, torch.Tensor] = {}
        """Logits by position, of any slot but those of `others`."""
        self.others: set[int] = set()
        model = self.engine.runner.model
        right = model.forward

        def forward(tokens: torch.Tensor, batch: Any, *others: Any) -> torch.Tensor:
            hidden = right(tokens, batch, *others)
            places = zip(batch.slots_T.tolist(), batch.positions_T.tolist(), model.own_logits(hidden), strict=True)
            self.rows |= {position: row for slot, position, row in places if slot not in self.others}
            return hidden

        model.forward = forward

    def encode(self, folder: Path, pictures: list[Picture]) -> list[bytes]:
        rows, first = [], 0
        for picture in pictures:
            rows.append(pack_i32(list(range(first, first + picture.num_rows))))
            first += picture.num_rows
        files = write_patches(folder, pictures)
        self.engine.runner.execute(StepPlan(encode=[EncodeImage(*each) for each in zip(files, rows, strict=True)]))
        return rows

    def compute(
        self, tokens: list[int], images: tuple[Any, ...], chunk: int, count: int = 1, **fields: Any
    ) -> list[int]:
        """Compute a prompt and emit tokens. `fields`: of its admission."""
        admit = with_fields(self.engine.admit(0, tokens, len(tokens) + count), images=images, **fields)
        plan, output, at = StepPlan(admit=[admit]), list[int](), admit.kv_len
        while at < len(tokens):
            end = min(at + chunk, len(tokens))
            plan.prefill.append(PrefillChunk(0, at, end - at, sample=end == len(tokens)))
            output += self.engine.runner.execute(plan).tokens
            plan, at = StepPlan(), end
        for _ in range(count - 1):
            output += self.engine.runner.execute(StepPlan(decode=[0])).tokens
        self.engine.runner.execute(StepPlan(release=[0]))
        return output

    def error(self, theirs_TV: torch.Tensor, start: int = 0) -> float:
        positions = [position for position in sorted(self.rows) if position >= start]
        apart = torch.stack([self.rows[position] - theirs_TV[position] for position in positions])
        return float(apart.abs().max() / theirs_TV.abs().max())


def placed(request: PictureRequest, rows: list[bytes]) -> tuple[Any, ...]:
    return tuple(with_fields(span, rows=rows[number]) for number, span in request.spans)


def test_a_placeholder_in_a_text_is_a_token(folders: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = folders[QWEN]
    seeing, tokens = Seeing(folder), [*range(20), IMAGE, IMAGE, *range(40)]
    output = seeing.compute(tokens, (), 17, count=4)
    ids = torch.tensor([[*tokens, *output]])
    with torch.inference_mode():
        embeds = theirs.get_input_embeddings()(ids)
        theirs.model.rope_deltas = None
        positions = torch.arange(ids.shape[1]).view(1, 1, -1).expand(3, 1, -1)
        wanted = theirs(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits[0]
    assert seeing.error(wanted) < BOUND


def test_a_turn_behind_cached_images_needs_no_features(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, theirs = folders[QWEN]
    seeing, request = Seeing(folder), PictureRequest.of(QWEN, [(3, 5), (6, 4)], 3, 10)
    rows = seeing.encode(tmp_path, request.pictures)
    pages = seeing.engine.pages(len(request.tokens) + 200)
    output = seeing.compute(request.tokens, placed(request, rows), 37, count=9, pages=pages)
    cached = (len(request.tokens) + 8) // PAGE_SIZE * PAGE_SIZE
    seeing.engine.runner._slots.images.region.fill_(torch.nan)  # none of its features are left
    tokens = [*request.tokens, *output, *range(30)]
    seeing.rows.clear()
    more = seeing.compute(tokens, request.images, 16, count=5, pages=pages, kv_len=cached)
    wanted = replace(request, tokens=tokens).reference(theirs, more)
    assert min(seeing.rows) == cached > request.images[-1].start and seeing.error(wanted) < BOUND


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_an_image_in_half_cached_pages_needs_its_features_again(
    name: str, folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, theirs = folders[name]
    seeing, request = Seeing(folder), PictureRequest.of(name, [(4, 4)], 3, 9)
    rows = seeing.encode(tmp_path, request.pictures)
    (image,) = request.images
    assert image.start < PAGE_SIZE < image.start + image.length
    pages = seeing.engine.pages(len(request.tokens) + 1)
    wanted = request.reference(theirs, [])
    seeing.compute(request.tokens, placed(request, rows), 512, pages=pages)
    seeing.rows.clear()
    with pytest.raises(Internal, match="has no features"):
        seeing.compute(request.tokens, request.images, 512, pages=pages, kv_len=PAGE_SIZE)
    seeing.engine.runner.forget([0])
    seeing.compute(request.tokens, placed(request, rows), 512, pages=pages, kv_len=PAGE_SIZE)
    assert min(seeing.rows) == PAGE_SIZE and seeing.error(wanted) < BOUND


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_images_beside_decoding_rows_and_a_retraction(
    name: str, folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """A text decodes while chunks with images are computed; then the other one is saved and goes on in another slot,
    without features."""
    folder, theirs = folders[name]
    seeing, request, text = Seeing(folder), PictureRequest.of(name, [(4, 4), (2, 3)], 5, 9), list(range(12))
    rows, runner, tokens = seeing.encode(tmp_path, request.pictures), seeing.engine.runner, request.tokens
    outputs: dict[int, list[int]] = {0: [], 1: []}

    def step(**parts: Any) -> None:
        result = runner.execute(StepPlan(**parts))
        for slot, token in zip(result.slots, result.tokens, strict=True):
            outputs[min(slot, 1)].append(token)

    seeing.others = {0}
    step(admit=[seeing.engine.admit(0, text, 60)], prefill=[PrefillChunk(0, 0, 12, sample=True)])
    admit = [with_fields(seeing.engine.admit(1, tokens, len(tokens) + 20), images=placed(request, rows))]
    at = 0
    while at < len(tokens):
        end = min(at + 9, len(tokens))
        if runner.info.whole_images:
            end = next((i.start + i.length for i in request.images if i.start < end < i.start + i.length), end)
        step(admit=admit, prefill=[PrefillChunk(1, at, end - at, sample=end == len(tokens))], decode=[0])
        admit, at = [], end
    for _ in range(3):
        step(decode=[0, 1])
    step(offload=[Offload(1, 77)], decode=[0])
    emitted = [*tokens, *outputs[1]]
    again = seeing.engine.admit(2, emitted, len(emitted) + 20, prompt_len=len(tokens), kv_len=len(emitted) - 1)
    step(admit=[with_fields(again, images=request.images)], restore=[Restore(2, 77)], decode=[0])
    for _ in range(4):
        step(decode=[2])
    assert len(outputs[1]) == 8 and seeing.error(request.reference(theirs, outputs[1])) < BOUND
    alone = replace(request, pictures=[], tokens=text).reference(theirs, outputs[0])
    assert outputs[0] == alone[11:-1, :FIRST_SPECIAL].argmax(-1).tolist()


def test_a_text_is_computed_as_without_vision(folders: dict[str, tuple[Path, Any]]) -> None:
    folder, _ = folders[QWEN]
    assert torch.equal(logits_of(folder), logits_of(folder, image_rows=IMAGE_ROWS))


def test_what_cannot_be_right_is_an_error_that_names_it(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    seeing, request = Seeing(folders[GEMMA][0]), PictureRequest.of(GEMMA, [(4, 4)], 3, 9)
    (file,), runner = write_patches(tmp_path, request.pictures), seeing.engine.runner
    for rows, message in ((range(15), "16 feature rows"), (range(IMAGE_ROWS, IMAGE_ROWS + 16), f"of {IMAGE_ROWS}")):
        with pytest.raises(Internal, match=message):
            runner.execute(StepPlan(encode=[EncodeImage(file, pack_i32(list(rows)))]))
    rows = seeing.encode(tmp_path, request.pictures)
    with pytest.raises(Internal, match="a chunk ends at 18, inside the image at 10"):
        seeing.compute(request.tokens, placed(request, rows), 18)
    runner.forget([0])
    with pytest.raises(Internal, match="is impossible"):
        seeing.compute(request.tokens[:20], request.images, 18)
    table = runner._slots.images
    table.admit(0, request.images, len(request.tokens))
    with pytest.raises(Internal, match="before the end of an image"):
        table.rows([Span(0, 4, 1, 0)], [0], [12])
    blind = Engine(folders[GEMMA][0], num_pages=4, num_slots=1, max_model_len=64)
    assert (blind.runner.info.image_rows, blind.runner.info.whole_images) == (0, False)
    with pytest.raises(Internal, match="sees no images"):
        blind.runner.execute(StepPlan(encode=[EncodeImage(file, rows[0])]))


@pytest.mark.parametrize("name", [QWEN, "qwen2_5_vl"])
def test_two_ranks_compute_the_same(name: str, folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, theirs = folders[name]
    ranks = Ranks(folder, 2, 64, sampler=NoSpecials(), max_model_len=512, image_rows=IMAGE_ROWS)
    request = PictureRequest.of(name, [(3, 5), (6, 4)], 3, 10)
    tokens, places = request.tokens, [pack_i32(list(range(15))), pack_i32(list(range(15, 39)))]
    files = write_patches(tmp_path, request.pictures)
    plan = StepPlan(
        encode=[EncodeImage(*each) for each in zip(files, places, strict=True)],
        admit=[with_fields(ranks.admit(0, tokens, len(tokens) + 6, sampling=GREEDY), images=placed(request, places))],
    )
    output: list[int] = []
    for start in range(0, len(tokens), 37):
        end = min(start + 37, len(tokens))
        plan.prefill.append(PrefillChunk(0, start, end - start, sample=end == len(tokens)))
        output += ranks.runner.launch(plan).result().tokens
        plan = StepPlan()
    for _ in range(5):
        output += ranks.runner.launch(StepPlan(decode=[0])).result().tokens
    ranks.close()
    regions = [runner._slots.images.region for runner in ranks.runners]
    assert torch.equal(*regions) and float(regions[0][:39].abs().min(1).values.max()) > 0
    wanted = request.reference(theirs, output)[len(tokens) - 1 : -1, :FIRST_SPECIAL]
    assert output == wanted.argmax(-1).tolist()
