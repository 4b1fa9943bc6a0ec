"""Requests with images beyond their own answer: continued by the next router, replayed from their receipts, and sent by
a batch. In one 1P1D after another with a random model that sees."""

from __future__ import annotations

import concurrent.futures
import json
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from nursery import WITH_TRANSFORMERS
from support.image_files import image_file
from support.router_process import wait_until
from test_kept_requests import Answer, kept, read, settings

from chitu.config.load import load_topology
from chitu.http.answer.kept_folder import FILE_SUFFIX
from chitu.launch.local import LocalCluster
from chitu.protocol import image_key
from chitu.protocol.kept_request import KeptRequest
from chitu.protocol.receipt import sealed
from chitu.tools.make_model import make_model
from chitu.tools.replay import Replayed, ReplayOptions, Saved, read_receipts, replay_receipts

pytestmark = pytest.mark.timeout(400)
TOKENS = 200
IMAGES = [image_file(160, 96), image_file(64, 130, seed=1)]
COMMON = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "top_k": 4}}


def question(*images: bytes, **fields: Any) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is on them?"}]}]
    return {**COMMON, "messages": messages, **fields}


def ask(url: str, name: str, body: dict[str, Any], answer: Answer) -> Answer:
    return read(url, answer, "POST", "/v1/chat/completions", json=body, headers={"x-request-id": name})


@dataclass
class Interrupted:
    before: dict[str, Answer]
    records: dict[str, KeptRequest]
    files: dict[str, bytes]
    """Files of images in the folder, by name."""
    cluster: LocalCluster
    """Cluster of the router's successor."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """End a router when each stream has 40 events, and yield its successor."""
    root = tmp_path_factory.mktemp("images")
    model, folder = make_model(root / "model", "qwen3_vl"), root / "kept"
    batches = f"dp_config.router.batches.dir={root / 'batches'}"
    topology = load_topology("pd_disagg_1p1d_local.yaml", [*settings(model, folder), batches])
    answers = {name: Answer() for name in SAMPLINGS}
    with LocalCluster(topology, entries=WITH_TRANSFORMERS) as first, concurrent.futures.ThreadPoolExecutor(2) as pool:
        first.wait_ready(200)
        bodies = {name: question(*IMAGES, stream=True, **sampling) for name, sampling in SAMPLINGS.items()}
        asked = [pool.submit(ask, first.url, name, body, answers[name]) for name, body in bodies.items()]
        wait_until(lambda: all(len(a.events) >= 40 or a.whole for a in answers.values()), 200, lambda: answers)
        first.stop()
        for each in asked:
            each.result(30)
    records = kept(folder)
    files = {path.name: path.read_bytes() for path in folder.glob(f"*{FILE_SUFFIX}")}
    with LocalCluster(topology, entries=WITH_TRANSFORMERS) as second:
        second.wait_ready(200)
        wait_until(lambda: not [*folder.glob("*.request")], 60, lambda: [*folder.iterdir()])
        yield Interrupted(answers, records, files, second)


@pytest.mark.by_hand
def test_the_next_router_goes_on_with_the_same_images_which_lie_there_once(interrupted: Interrupted) -> None:
    assert interrupted.files == {sha256(image).hexdigest() + FILE_SUFFIX: image for image in IMAGES}
    for name, sampling in SAMPLINGS.items():
        record = interrupted.records[name]
        assert [each.num_bytes for each in record.images] == [len(image) for image in IMAGES]
        assert 0 < len(record.token_ids) < TOKENS and len(record.body) < 1000
        assert interrupted.before[name].error["code"] == "request_kept"
        again = read(interrupted.cluster.url, Answer(), "GET", f"/v1/requests/{name}")
        seed = {"seed": record.sampling.seed}
        body = question(*IMAGES, stream=True, **sampling, **seed)
        whole = ask(interrupted.cluster.url, f"x-{name}", body, Answer())
        assert len(whole.told()["tokens"]) == TOKENS
        assert again.told() == whole.told()


def test_a_receipt_is_replayed_with_its_images_and_a_wrong_one_is_found(
    interrupted: Interrupted, tmp_path: Path
) -> None:
    """What is replayed depends on the images: with another one the same tokens are wrong."""
    url = interrupted.cluster.url
    proven = {"return_proof": True, "return_receipt": True, "logprobs": True, "temperature": 0, "max_tokens": 20}
    answer = ask(url, "proven", question(*IMAGES, **proven), Answer()).whole
    (saved,) = read_receipts("answer", json.dumps(answer))
    for n, image in enumerate(IMAGES):
        (tmp_path / f"{n}.png").write_bytes(image)

    def replayed(one: Saved, *folders: Path) -> Replayed:
        options = ReplayOptions(url, images=tuple(map(str, folders)))
        (result,) = replay_receipts(options, [one], lambda text: None)
        return result

    assert (same := replayed(saved, tmp_path)).verdict == "same", same
    without = replayed(saved)
    assert without.verdict == "unjudged" and "image 1" in without.says, without
    first, second = saved.receipt.images
    other = image_file(160, 96, seed=7)
    (tmp_path / "other.png").write_bytes(other)
    key = image_key(other, bytes.fromhex(first.fingerprint)).hex()
    others = [msgspec.structs.replace(first, key=key, num_bytes=len(other)), second]
    wrong = Saved(sealed(msgspec.structs.replace(saved.receipt, images=others)), logprobs=saved.logprobs)
    assert replayed(wrong, tmp_path).verdict == "different", "an image of the same size"
    tokens = [*saved.receipt.token_ids[:5], saved.receipt.token_ids[5] ^ 1, *saved.receipt.token_ids[6:]]
    forged = Saved(sealed(msgspec.structs.replace(saved.receipt, token_ids=tokens)))
    assert replayed(forged, tmp_path).verdict == "different"


def test_lines_of_a_batch_have_images_and_their_files_are_released(interrupted: Interrupted) -> None:
    url, whole = interrupted.cluster.url, {}
    lines = []
    for n, image in enumerate(IMAGES):
        body = question(image, temperature=0, max_tokens=12)
        whole[f"r{n}"] = ask(url, f"direct-{n}", body, Answer()).told()["tokens"]
        lines.append({"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert whole["r0"] != whole["r1"]
    client = httpx.Client(base_url=url, timeout=60, trust_env=False)
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()

    def now() -> dict[str, Any]:
        found: dict[str, Any] = client.get(f"/v1/batches/{batch['id']}").json()
        return found

    wait_until(lambda: now()["status"] == "completed", 100, now)
    answers = map(json.loads, client.get(f"/v1/files/{now()['output_file_id']}/content").text.splitlines())
    found = {each["custom_id"]: each["response"]["body"]["choices"][0]["token_ids"] for each in answers}
    assert found == whole

    def are_gone() -> bool:
        text = client.get("/metrics").text
        return "chitu_image_files 0.0" in text and "chitu_image_file_bytes 0.0" in text

    wait_until(are_gone, 20.0, "the files of images that are over are still here")
    client.close()
