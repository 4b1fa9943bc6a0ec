"""Images through a real cluster: the logits of every row of a prompt, which P computes, and the tokens, which D draws,
are those of `transformers`, which reads the same files with its own processor and its own forward."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import threading
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
from support.router_process import wait_until
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chitu.config.load import load_topology
from chitu.config.topology import on_one_host, router_ports
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.tools.make_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PD = "dp_config.router.pd_disaggregation"
KINDS = [pytest.param("shm", marks=pytest.mark.by_hand), "mooncake", "tp", "unified"]
CLOSE = 2e-4
COUNT = 8
SIZES = [(37, 91), (120, 44), (64, 64), (201, 33)]
"""Widths and heights of images: odd, high, square, wide."""


def picture(number: int, size: tuple[int, int], kind: str = "PNG") -> bytes:
    """Return the file of an image that has no like."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def image_part(file: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text_part(part) if isinstance(part, str) else part for part in parts]}


FILES = [picture(number, size) for number, size in enumerate(SIZES)]
TURNS: list[list[dict[str, Any]]] = [
    [user("Only words here, and some more of them.")],
    [user("What is", image_part(FILES[0]), "in this picture?")],
    [user(image_part(FILES[1]), "and then", image_part(FILES[2]), image_part(FILES[3]), "are three. Compare them.")],
    [user("Again", image_part(FILES[0]), "twice", image_part(FILES[0]))],
]


class Reference:
    """What `transformers` makes of a conversation."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return the token ids, and the arguments of the model for the images."""
        images, plain = [], []
        for message in messages:
            parts: Any = message["content"]
            if not isinstance(parts, str):
                parts = [{"type": "image"} if part["type"] == "image_url" else part for part in parts]
                urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
                files = [base64.b64decode(url.partition(",")[2]) for url in urls]
                images += [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
            plain.append({**message, "content": parts})
        text = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        arguments: dict[str, torch.Tensor] = {}
        if images:
            made = self._processor(images=images, return_tensors="pt")
            arguments = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            pieces = text.split("<|image_pad|>")
            counts = [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
            text = pieces[0] + "".join(
                "<|image_pad|>" * count + piece for count, piece in zip(counts, pieces[1:], strict=True)
            )
        return self._tokenizer.encode(text, add_special_tokens=False), arguments

    def logprobs(self, ids: list[int], arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return float32 `[len(ids), V]`."""
        tokens = torch.tensor([ids])
        more: dict[str, Any] = dict(arguments)
        if arguments:
            more["mm_token_type_ids"] = (tokens == self._model.config.image_token_id).int()
        self._model.model.rope_deltas = None  # their module keeps it from call to call
        with torch.inference_mode():
            logits = self._model(input_ids=tokens, use_cache=False, **more).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "vl"
    make_model(folder, family="qwen3_vl", layers=3, hidden_size=64, heads=4, kv_heads=2, vocab_size=600)
    return folder


def make_experts(dense: Path, folder: Path) -> Path:
    """Make a model with experts beside the tokenizer and the processor of another one: the library cuts only such
    models with images over ranks."""
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    told = json.loads((dense / "config.json").read_text())
    text = {**told["text_config"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    del text["model_type"]
    config = transformers.Qwen3VLMoeConfig(**{**told, "text_config": text})
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, numbers in model.named_parameters():
            if numbers.ndim > 1:
                numbers.normal_(0, 1.0 if "embed" in name else numbers.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_experts(model, tmp_path_factory.mktemp("models") / "moe") if kind == "tp" else model


@pytest.fixture(scope="module")
def reference(served: Path) -> Reference:
    return Reference(served)


@pytest.fixture(scope="module")
def cluster(kind: str, served: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={served}", "model.served_name=m", "cache.num_pages=600", "scheduler.chunk_size=37"]
    name = "unified_local.yaml" if kind == "unified" else "pd_disagg_1p1d_local.yaml"
    if kind == "mooncake":
        pytest.importorskip("mooncake.engine")
        settings.append(f"{PD}.transport=mooncake")
    elif kind == "tp":
        settings += [f"dp_config.router.decode_schedulers.0.{field}" for field in ("tp_size=2", "devices=[cpu,cpu]")]
    with LocalCluster(load_topology(name, settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready(300)
        yield cluster


def ask_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all at once; return the answers."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=url, timeout=200.0, trust_env=False) as client:
            replies = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for body in bodies])
        for reply in replies:
            assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        return [reply.json() for reply in replies]

    return asyncio.run(run())


def asked(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    greedy = {"model": "m", "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**greedy, "messages": messages, **options}


def require_right(reference: Reference, messages: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """Check the tokens of an answer, the logprobs of each, and those of the prompt if the answer has them."""
    ids, arguments = reference.prompt(messages)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    right = reference.logprobs(ids + tokens, arguments)
    assert tokens == right[len(ids) - 1 : -1].argmax(-1).tolist()
    if "prompt_logprobs" not in answer or answer["prompt_logprobs"] is None:
        return
    worst = 0.0
    for place, entry in enumerate(answer["prompt_logprobs"][1:], 1):
        assert str(ids[place]) in entry, f"token {place} is another one"
        for token, value in entry.items():
            worst = max(worst, abs(value["logprob"] - right[place - 1, int(token)].item()))
    print(f"{len(ids)} tokens, largest error of a logprob of the prompt: {worst:.1e}")
    assert worst < CLOSE


def test_every_row_of_the_prompts_and_every_token_is_right(cluster: LocalCluster, reference: Reference) -> None:
    answers = ask_all(cluster.url, [asked(messages, prompt_logprobs=2) for messages in TURNS])
    for messages, answer in zip(TURNS, answers, strict=True):
        require_right(reference, messages, answer)


def test_a_second_turn_computes_the_image_no_more(cluster: LocalCluster, reference: Reference) -> None:
    first = [user("Look at", image_part(picture(50, (90, 71))), "closely, please, and say what it is.")]
    (answer,) = ask_all(cluster.url, [asked(first)])
    require_right(reference, first, answer)
    said = answer["choices"][0]["message"]["content"]
    second = [*first, {"role": "assistant", "content": said}, user("And now without the picture?")]
    (again,) = ask_all(cluster.url, [asked(second)])
    require_right(reference, second, again)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_images_of_equal_size_share_no_page(cluster: LocalCluster, reference: Reference) -> None:
    for number in (60, 61):
        messages = [user(image_part(picture(number, (96, 96))), "is what?")]
        (answer,) = ask_all(cluster.url, [asked(messages)])
        require_right(reference, messages, answer)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 16


def test_several_choices_of_a_prompt_with_an_image(cluster: LocalCluster, reference: Reference) -> None:
    messages = TURNS[1]
    (answer,) = ask_all(cluster.url, [asked(messages, n=3)])
    ids, arguments = reference.prompt(messages)
    for choice in answer["choices"]:
        right = reference.logprobs(ids + choice["token_ids"], arguments)
        assert choice["token_ids"] == right[len(ids) - 1 : -1].argmax(-1).tolist()


# ---------------------------------------------------------------------------------------------------- killed instances


@pytest.fixture(scope="module")
def pairs(model: Path) -> Iterator[LocalCluster]:
    topology = on_one_host(load_topology("pd_disagg_2p2d_multi_node.yaml"))
    ports = [f"{key}=0" for key in router_ports(topology.dp_config.router)]
    router = "dp_config.router"
    ports += [f"{router}.{role}_schedulers.{i}.port=0" for role in ("prefill", "decode") for i in range(2)]
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=600", "scheduler.chunk_size=37"]
    settings += ["model.max_model_len=2048", f"{router}.host=127.0.0.1"]
    settings += [f"{router}.{role}_schedulers.{i}.host=127.0.0.1" for role in ("prefill", "decode") for i in range(2)]
    with LocalCluster(
        load_topology("pd_disagg_2p2d_multi_node.yaml", settings + ports), entries=WITH_TRANSFORMERS
    ) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_request_with_images_goes_on_without_an_instance_that_is_killed(
    pairs: LocalCluster, model: Path, victim: str
) -> None:
    """P is killed while it waits for the patches of the image, D while it decodes behind it."""
    reference, count = Reference(model), 400 if victim == "decode" else 40
    messages = [user("See", image_part(picture(70, (77, 130))), "and", image_part(picture(71, (130, 77))), "now.")]
    answers: list[dict[str, Any]] = []
    body = asked(messages, max_tokens=count)
    asking = threading.Thread(target=lambda: answers.extend(ask_all(pairs.url, [body])))
    asking.start()

    def instance() -> str:
        running = [each for each in RouterClient(pairs.url).cluster().requests if each.ended_at_s is None]
        if victim == "decode":
            return next((each.decode for each in running if each.output_tokens > 20), "")
        return next((each.prefill or "" for each in running if each.state != "decode"), "")

    wait_until(instance, 120.0, lambda: RouterClient(pairs.url).cluster().requests)
    name = instance()
    pairs.kill(name)
    asking.join(200.0)
    require_right(reference, messages, answers[0])
    attempts = [each for each in RouterClient(pairs.url).cluster().requests if each.attempt > 1]
    assert attempts and (victim == "prefill" or attempts[-1].continued_tokens > 20), "nothing was in its hands"
    pairs.restart(name)
    pairs.wait_ready(120)
