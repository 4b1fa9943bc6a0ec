"""Videos through a real 1P1D: the logits of every row of a prompt, which P computes, and the tokens, which D draws, are
those of the whole model of `transformers`, which gets each video as one, made by the documented formula."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from nursery import WITH_TRANSFORMERS
from PIL import Image
from support.image_files import image_file
from support.video_files import animation, frames_of, list_url, saved_frame
from test_image_cluster import CLOSE, ask_all, asked, image_part, user
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATCH, MERGE = 16, 2
PAD, IMAGE = "<|video_pad|>", "<|image_pad|>"
BEGIN, END = "<|vision_start|>", "<|vision_end|>"


def pixels_of(frames: Sequence[Image.Image], size: tuple[int, int]) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of a video, and its grid: time, height, width in patches."""
    frames = [*frames, *frames[-1:] * (len(frames) % 2)]
    shown = np.stack([np.asarray(each.resize(size, Image.Resampling.BICUBIC), dtype=np.float32) for each in frames])
    shown = (shown / 255 - 0.5) / 0.5
    times, high, wide = len(frames) // 2, size[1] // PATCH, size[0] // PATCH
    cut = shown.reshape(times, 2, high // MERGE, MERGE, PATCH, wide // MERGE, MERGE, PATCH, 3)
    rows = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * high * wide, -1)
    return torch.from_numpy(np.ascontiguousarray(rows)), [times, high, wide]


class WholeModel:
    """What `transformers` makes of a prompt."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        """Return the prompt of one question of the user."""
        chat = [{"role": "user", "content": "HERE"}]
        whole = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(whole.replace("HERE", text), add_special_tokens=False)

    def image(self, file: bytes) -> dict[str, torch.Tensor]:
        made = self._processor(images=[Image.open(io.BytesIO(file)).convert("RGB")], return_tensors="pt")
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")}

    def logprobs(self, ids: list[int], **given: Any) -> torch.Tensor:
        """Return float32 `[len(ids), V]`."""
        tokens, config = torch.tensor([ids]), self._model.config
        kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
        self._model.model.rope_deltas = None
        with torch.inference_mode():
            logits = self._model(input_ids=tokens, use_cache=False, mm_token_type_ids=kinds, **given).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "vl"
    make_model(made, family="qwen3_vl", layers=3, hidden_size=64, heads=4, kv_heads=2, vocab_size=600)
    return made


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={folder}", "model.served_name=m", "cache.num_pages=600", "scheduler.chunk_size=37"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready(300)
        yield cluster


def video_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def stamped(rows: int, *seconds: str) -> str:
    return "".join(f"<{each} seconds>{BEGIN}{PAD * rows}{END}" for each in seconds)


def require_right(whole: WholeModel, ids: list[int], answer: dict[str, Any], **given: Any) -> float:
    """Check the tokens of an answer and all logprobs of its prompt."""
    assert answer["usage"]["prompt_tokens"] == len(ids)
    tokens = answer["choices"][0]["token_ids"]
    right = whole.logprobs(ids + tokens, **given)
    assert tokens == right[len(ids) - 1 : -1].argmax(-1).tolist()
    worst = 0.0
    for place, entry in enumerate(answer["prompt_logprobs"][1:], 1):
        assert str(ids[place]) in entry, f"token {place} is another one"
        for token, value in entry.items():
            worst = max(worst, abs(value["logprob"] - right[place - 1, int(token)].item()))
    print(f"{len(ids)} tokens, largest error of a logprob of the prompt: {worst:.1e}")
    return worst


def test_videos_of_frames_and_of_a_file_beside_an_image_are_right(cluster: LocalCluster, folder: Path) -> None:
    whole, picture = WholeModel(folder), image_file(70, 44, seed=4)
    listed, moving = frames_of(5, 90, 50, seed=1), frames_of(8, 40, 70, seed=2)
    jpegs = [saved_frame(frame) for frame in listed]
    url = f"data:image/webp;base64,{b64encode(animation(moving, 'WEBP', 250)).decode()}"
    chat = [user("First", video_part(list_url(jpegs)), "then", image_part(picture), "and", video_part(url), "last?")]
    (answer,) = ask_all(cluster.url, [asked(chat, prompt_logprobs=2)])
    shown = [Image.open(io.BytesIO(file)).convert("RGB") for file in jpegs]
    first, grid = pixels_of(shown, (96, 64))
    # two a second of four, evenly to the ends: 0, 2, 5, 7
    second, other = pixels_of([moving[i] for i in (0, 2, 5, 7)], (32, 64))
    image = whole.image(picture)
    count = int(image["image_grid_thw"].prod()) // MERGE**2
    text = f"First{stamped(6, '0.2', '1.2', '2.0')}then{BEGIN}{IMAGE * count}{END}and{stamped(2, '0.2', '1.5')}last?"
    ids = whole.ids(text)
    videos = {"pixel_values_videos": torch.cat((first, second)), "video_grid_thw": torch.tensor([grid, other])}
    assert require_right(whole, ids, answer, **videos, **image) < CLOSE
    swapped = torch.cat((pixels_of([shown[1], shown[0], *shown[2:]], (96, 64))[0], second))
    wrong = {**videos, "pixel_values_videos": swapped}
    right = whole.logprobs(ids, **videos, **image)
    assert (whole.logprobs(ids, **wrong, **image) - right).abs().max() > 100 * CLOSE, "swapped frames would not show"
    reply = httpx.post(f"{cluster.url}/tokenize", json={"model": "m", "messages": chat}, trust_env=False, timeout=60)
    assert reply.json()["count"] == len(ids)


def test_equal_videos_share_pages_and_another_of_equal_shape_none(cluster: LocalCluster, folder: Path) -> None:
    whole = WholeModel(folder)

    def cached(seed: int, **fields: Any) -> int:
        jpegs = [saved_frame(frame) for frame in frames_of(6, 128, 96, seed=seed)]
        chat = [user(video_part(list_url(jpegs), **fields), "is what?")]
        (answer,) = ask_all(cluster.url, [asked(chat)])
        seconds = [f"{(4 * i + 1) / 2 / fields.get('fps', 2):.1f}" for i in range(3)]
        ids = whole.ids(f"{stamped(12, *seconds)}is what?")
        shown = [Image.open(io.BytesIO(file)).convert("RGB") for file in jpegs]
        pixels, grid = pixels_of(shown, (128, 96))
        given = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        right = whole.logprobs(ids + answer["choices"][0]["token_ids"], **given)
        assert answer["choices"][0]["token_ids"] == right[len(ids) - 1 : -1].argmax(-1).tolist()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = 16  # tokens of the page that all prompts begin with
    assert cached(30) <= text
    assert cached(30) >= text + 32
    assert cached(31) <= text
    assert cached(30, fps=1) <= text


def test_what_is_no_video_is_a_400_and_harms_nobody(cluster: LocalCluster) -> None:
    good = asked([user(video_part(list_url([saved_frame(each) for each in frames_of(2, 32, 32)])), "?")])
    for part, says in (
        (video_part("data:video/mp4;base64,AAAA"), "video"),
        (video_part(list_url([b"x"] * 300)), "has 300 frames"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
    ):
        body = asked([user(part, "What?")])
        reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
        assert reply.json()["error"]["param"] == "messages[0].content[0]"
    ask_all(cluster.url, [good])
