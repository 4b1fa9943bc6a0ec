"""Prompts with videos: tokens, rows, positions and frames by the documented formula, through the process that decodes
them. What is hostile gets a 400, and costs what it may."""

from __future__ import annotations

import json
import struct
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.image_files import image_file
from support.video_files import animation, frames_of, list_url, mp4, saved_frame
from transformers import AutoTokenizer

from chitu.config.schema import ImagesConfig, ModelConfig
from chitu.errors import ContextLengthExceeded, InvalidRequest
from chitu.http.ask.image_files import ImageReader
from chitu.http.ask.parsed import ClusterFacts, ParsedRequest
from chitu.http.ask.reader import BodyWork, ReadBody
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.http.table import READERS
from chitu.images.sizer import SizerProcess
from chitu.images.videos import PartFile
from chitu.protocol import ImagePart, unpack_i32
from chitu.tools.make_model import make_model

FACTS = ClusterFacts(ModelLimits(8192, 100_000), "", 100_000)
VISION, END, PAD, IMAGE = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>"
FRAMES = frames_of(5, 90, 50)
JPEGS = [saved_frame(frame) for frame in FRAMES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")


class Chats:
    """The router's reading of bodies, with the model's processor."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        config = ImagesConfig(**limits)
        self.served = ServedModel.load(ModelConfig(path=str(folder), served_name="m"), 0, config)
        sizer = SizerProcess.of(folder, config)
        assert isinstance(sizer, SizerProcess)
        self.sizer = sizer
        self.served.set_reader(ImageReader(config, lambda: sizer))
        self._work = BodyWork(self.served, False, READERS)

    def ask(self, *parts: dict[str, Any] | str, facts: ClusterFacts = FACTS) -> ParsedRequest:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        task = ReadBody("chat", facts, reads_images=True)
        found = self._work.read(task, json.dumps(body).encode(), lambda: None)
        assert isinstance(found, ParsedRequest)
        return found

    def text(self, parsed: ParsedRequest) -> str:
        return self.served.tokenizer.decode(ids_of(parsed), skip_special_tokens=False)


@pytest.fixture(scope="module")
def chats(model: Path) -> Iterator[Chats]:
    made = Chats(model)
    yield made
    made.sizer.close()


def ids_of(parsed: ParsedRequest) -> list[int]:
    return unpack_i32(parsed.prompts[0].token_ids).tolist()


def images_of(parsed: ParsedRequest) -> tuple[ImagePart, ...]:
    return parsed.prompts[0].images


def video(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def data(file: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(file).decode()}"


def test_a_video_an_image_and_text_are_the_tokens_of_the_documented_form(chats: Chats, model: Path) -> None:
    picture = image_file(64, 33, seed=9)
    image = {"type": "image_url", "image_url": {"url": data(picture, "image/png")}}
    parsed = chats.ask("Before ", video(list_url(JPEGS)), " between ", image, "behind")
    stamped = "".join(f"<{time} seconds>{VISION}{PAD * 6}{END}" for time in ("0.2", "1.2", "2.0"))
    expected = f"Before {stamped} between {VISION}{IMAGE * 2}{END}behind"
    text = AutoTokenizer.from_pretrained(model).apply_chat_template(
        [{"role": "user", "content": "HERE"}], add_generation_prompt=True, tokenize=False
    )
    tokens = AutoTokenizer.from_pretrained(model).encode(text.replace("HERE", expected), add_special_tokens=False)
    assert ids_of(parsed) == tokens
    images = images_of(parsed)
    assert [each.grid for each in images] == [(1, 2, 3)] * 3 + [(1, 1, 2)]
    assert not any(each.continues or each.time for each in images)
    pad = chats.served.tokenizer.encode(PAD)[-1]
    assert [ids_of(parsed)[each.start : each.end] for each in images[:3]] == [[pad] * 6] * 3
    frames = [frame for each in images[:3] for frame in PartFile.unpack(parsed.files[each.key]).frames]
    assert frames == [*JPEGS, b""]


def test_animations_and_containers_have_their_frames_by_time(chats: Chats) -> None:
    pytest.importorskip("av")
    frames = frames_of(12, 64, 64, seed=3)
    for url in (
        data(animation(frames, "WEBP", 250), "image/webp"),
        data(animation(frames, "GIF", 250), "image/gif"),
        data(mp4(frames, 4), "video/mp4"),
        data(mp4(frames, 4, "matroska", "mpeg4"), "video/x-matroska"),
    ):
        parsed = chats.ask(video(url))
        assert "<0.2 seconds>" in chats.text(parsed), url[:30]
        parts = [PartFile.unpack(parsed.files[each.key]) for each in images_of(parsed)]
        shown = [np.asarray(opened(frame), dtype=float) for part in parts for frame in part.frames]
        # two a second of four, spread evenly to the ends
        wanted = [frames[i] for i in np.linspace(0, 11, 6).round().astype(int)]
        assert len(shown) == 6
        for ours, theirs in zip(shown, wanted, strict=True):
            distances = [np.abs(ours - np.asarray(each.resize(parts[0][:2]), dtype=float)).mean() for each in frames]
            assert frames[int(np.argmin(distances))] is theirs and min(distances) < 20
    one = chats.ask(video(data(mp4(frames, 4), "video/mp4"), fps=1))
    assert len(images_of(one)) == 2


def opened(file: bytes) -> Image.Image:
    import io

    return Image.open(io.BytesIO(file)).convert("RGB")


def test_equal_frames_have_equal_keys_and_others_none_in_common(chats: Chats) -> None:
    first, again = (chats.ask(video(list_url(JPEGS))) for _ in range(2))
    other = chats.ask(video(list_url([saved_frame(frame) for frame in frames_of(5, 90, 50, seed=7)])))
    swapped = chats.ask(video(list_url([JPEGS[1], JPEGS[0], *JPEGS[2:]])))
    assert images_of(first) == images_of(again) and ids_of(first) == ids_of(other) == ids_of(swapped)
    keys = [[each.key for each in images_of(parsed)] for parsed in (first, other, swapped)]
    assert not set(keys[0]) & set(keys[1])
    assert [a == b for a, b in zip(keys[0], keys[2], strict=True)] == [False, True, True]
    slow = chats.ask(video(list_url(JPEGS), fps=1))
    assert [each.key for each in images_of(slow)] == keys[0] and ids_of(slow) != ids_of(first)


def test_a_run_of_frames_has_its_times_in_its_parts(tmp_path: Path, model: Path) -> None:
    """As Qwen2.5-VL has it: no text between, and times that a page key has, too."""
    from chitu.protocol import page_marks

    folder = tmp_path / "run"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["model_type"], config["vision_config"]["tokens_per_second"] = "qwen2_5_vl", 2
    (folder / "config.json").write_text(json.dumps(config))
    from chitu.images.forms import image_model_of

    read = image_model_of(folder)
    assert not isinstance(read, str) and not isinstance(read.form.video, str)
    assert read.form.video.is_run and read.form.video.placeholder == PAD
    from chitu.http.ask.image_files import ReadFile
    from chitu.http.ask.images import SentImages, ServedVision

    sizer = SizerProcess(read, ImagesConfig())
    reader = ImageReader(ImagesConfig(), lambda: sizer)
    found: list[tuple[ImagePart, ...]] = []
    for fps in (2.0, 0.5):
        images = SentImages(ServedVision(read.form, ImagesConfig(), reader), {}, True)
        images.mark("v", list_url(JPEGS), is_video=True, fps=fps)
        images.read(None)
        images.place([0])
        text = images.written(f"a{PAD}b", [])
        assert text == f"a{PAD * 3}b"
        token = read.form.video.token_id
        ids = images.expanded([1, token, token, token, 2], lambda _: PAD, [])
        assert ids.count(token) == sum(each.num_rows for each in images.parts) and ids[0] == 1 and ids[-1] == 2
        found.append(images.parts)
    sizer.close()
    assert [(each.time, each.continues) for each in found[0]] == [(0, False), (2, True), (4, True)]
    assert [(each.time, each.continues) for each in found[1]] == [(0, False), (8, True), (16, True)]
    assert [a.key == b.key for a, b in zip(*found, strict=True)] == [True] * 3
    marks = [page_marks(each) for each in found]
    assert [a == b for a, b in zip(*marks, strict=True)] == [True, False, False]
    assert ReadFile is not None


def ten_hours() -> bytes:
    """Return a video whose header says that it has as many frames."""
    file = bytearray(mp4(frames_of(3, 64, 64), 24))
    at = file.index(b"stts") + 8
    assert struct.unpack_from(">II", file, at) == (1, 3)
    struct.pack_into(">I", file, at + 4, 24 * 36_000)
    return bytes(file)


def test_hostile_videos_are_refused_by_a_sentence(chats: Chats) -> None:
    pytest.importorskip("av")
    tiny = saved_frame(Image.new("RGB", (1, 1)))
    whole = mp4(frames_of(30, 128, 128), 10)
    for url, says in (
        (list_url([tiny] * 100_000), "has 100000 frames; a list may have 256 at most"),
        (data(ten_hours(), "video/mp4"), "(is damaged|has .* s; at most 600 s)"),
        (data(whole[: len(whole) // 2], "video/mp4"), "is damaged or truncated"),
        (data(b"", "video/mp4"), "the video is empty"),
        (data(b"nothing of a video at all", "video/mp4"), "is damaged or truncated"),
        (data(JPEGS[0], "image/jpeg"), "is no video: its data URL says 'image/jpeg'"),
        (data(whole, "audio/mpeg"), "is no video: its data URL says 'audio/mpeg'"),
        (list_url([JPEGS[0], JPEGS[1][:200]]), "frame 1 of the video: the image is damaged"),
        (list_url([JPEGS[0], tiny]), "frame 1 of the video has 1 x 1 pixels, and the first one 90 x 50"),
        (list_url([JPEGS[0], b""]), "frame 1 of the video: the image is empty"),
        ("data:video/jpeg;base64,!!", "is no valid base64"),
        ("ftp://host/a.mp4", "is no data URL, and none of http, https or file"),
        ("file:///etc/passwd", "is a file of this server"),
    ):
        with pytest.raises(InvalidRequest, match=says) as raised:
            chats.ask("What?", video(url))
        assert raised.value.param == "messages[0].content[1]", raised.value
    with pytest.raises(InvalidRequest, match="fps must be above 0"):
        chats.ask(video(list_url(JPEGS), fps=-1))
    with pytest.raises(ContextLengthExceeded, match="the video alone has 18"):
        chats.ask(video(list_url(JPEGS)), facts=ClusterFacts(ModelLimits(17, 100_000), "", 100_000))
    literal = f"What is {VISION}{PAD}{END}?"
    with pytest.raises(InvalidRequest, match="stands for an image"):
        chats.ask(video(list_url(JPEGS)), literal)
    assert len(images_of(chats.ask(video(list_url(JPEGS))))) == 3  # the process has survived


def test_limits_bound_what_is_taken_of_a_video(model: Path) -> None:
    pytest.importorskip("av")
    some = Chats(model, max_frames=4, max_video_pixels=4 * 32 * 32, max_video_s=5)
    try:
        file = mp4(frames_of(16, 128, 128), 4)
        parsed = some.ask(video(data(file, "video/mp4"), fps=30))
        assert [each.grid for each in images_of(parsed)] == [(1, 1, 1)] * 2
        with pytest.raises(InvalidRequest, match="has 8 s; at most 5 s are allowed"):
            some.ask(video(data(mp4(frames_of(16, 64, 64), 2), "video/mp4")))
    finally:
        some.sizer.close()


def test_a_container_without_av_names_the_package(chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu.images import video_files

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"needs the package `av` on the router \(pip install av"):
        video_files._source(b"\0\0\0\x20ftypisom", None, ImagesConfig(), video_files.Wanted(None, 1))  # type: ignore[arg-type]
    assert len(images_of(chats.ask(video(list_url(JPEGS))))) == 3
