"""Prompts with images are those of `transformers`: its tokenizer's own rendering of the chat, and its image processor's
rows."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from support.image_files import image_file
from transformers import AutoImageProcessor, AutoTokenizer

from chitu.config.schema import ImagesConfig, ModelConfig
from chitu.http.ask.image_files import ImageReader
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import BodyWork, ReadBody
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.table import READERS
from chitu.images.sizer import SizerProcess
from chitu.protocol import unpack_i32
from chitu.tools.make_model import make_model

FACTS = ClusterFacts(ModelLimits(8192, 100_000), "", 100_000)
FILES = [image_file(*size, seed=i) for i, size in enumerate([(61, 47), (300, 20), (33, 512), (900, 700)])]
FILES.append(image_file(120, 40, "JPEG", turned=6))


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{b64encode(FILES[number]).decode()}", "n": number}}


def text(told: str) -> dict[str, Any]:
    return {"type": "text", "text": told}


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [image(0)]}],
    [{"role": "user", "content": [text("zwölf "), image(1), text(" 你好"), image(2), image(3)]}],
    [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [text("A"), image(4)]},
        {"role": "assistant", "content": "B"},
        {"role": "tool", "content": [image(2), text("C")]},
        {"role": "user", "content": [image(0), image(0), text("D")]},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
def test_tokens_of_a_chat_with_images_are_those_of_transformers(chat: list[dict[str, Any]], tmp_path: Path) -> None:
    from PIL import Image, ImageOps

    folder = make_model(tmp_path / "model", "qwen3_vl")
    model = ServedModel.load(ModelConfig(path=str(folder), served_name="m"), 0, ImagesConfig())
    sizer = SizerProcess.of(folder, ImagesConfig())
    assert isinstance(sizer, SizerProcess)
    model.set_reader(ImageReader(ImagesConfig(), lambda: sizer))
    raw = json.dumps({"model": "m", "messages": chat}).encode()
    parsed = BodyWork(model, False, READERS).read(ReadBody("chat", FACTS, reads_images=True), raw, lambda: None)
    sizer.close()
    assert isinstance(parsed, ParsedRequest)

    processor, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    numbers: list[int] = []

    def theirs(turn: dict[str, Any]) -> dict[str, Any]:
        if isinstance(turn["content"], str):
            return turn
        numbers.extend(each["image_url"]["n"] for each in turn["content"] if "image_url" in each)
        return {**turn, "content": [{"type": "image"} if "image_url" in each else each for each in turn["content"]]}

    ids = tokenizer.apply_chat_template([theirs(turn) for turn in chat], add_generation_prompt=True)["input_ids"]
    token, expected = tokenizer.convert_tokens_to_ids("<|image_pad|>"), list[int]()
    grids = []
    for number in numbers:
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(FILES[number])).convert("RGB"))
        times, height, width = processor(images=picture, return_tensors="pt")["image_grid_thw"][0].tolist()
        grids.append((times, height // 2, width // 2))
    left = iter(grids)
    for each in ids:
        times, height, width = next(left) if each == token else (1, 1, 1)
        expected += [each] * (times * height * width)
    ours = unpack_i32(parsed.prompts[0].token_ids).tolist()
    assert tokenizer.decode(ours) == tokenizer.decode(expected)
    assert ours == expected
    assert [part.grid for part in parsed.prompts[0].images] == grids
