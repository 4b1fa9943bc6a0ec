"""Receipts: read from any saved form of an answer, replayed with the same sampling, judged, and named if changed."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.requests import generate_request
from test_jobs import World

from chitu.errors import InvalidRequest
from chitu.http.answer.proof import receipt_of
from chitu.launch.router_client import RouterClient
from chitu.protocol import Finish, Grammar, ImagePart, KVLayout, Reasoning, SamplingParams, image_key, pack_i32
from chitu.protocol.kept_request import KeptRequest, pack
from chitu.protocol.receipt import Receipt, ReceiptSampling, changed_fields, images_told, sealed
from chitu.router.generation import Generation
from chitu.tools.replay import Replayed, Saved, fields_of, judge, read_receipts, replay
from chitu.tools.replay_images import KnownFiles
from chitu.tools.verify.probe import CheckedRequest, Impossible, Prober, Score


def receipt(sampling: SamplingParams | None = None, **fields: Any) -> Receipt:
    served = ReceiptSampling(**msgspec.structs.asdict(sampling or SamplingParams(4, temperature=0.0)))
    made = Receipt(
        receipt=1,
        chitu="0",
        request_id="r",
        model="m",
        model_hash="ab",
        dtype="float32",
        served=["P0-D1"],
        prompt_token_ids=[5, 6],
        sampling=served,
        token_ids=[7, 8, 9],
        finish="length",
    )
    return sealed(msgspec.structs.replace(made, **fields))


def test_a_receipt_is_read_from_an_answer_a_stream_and_lines() -> None:
    one = receipt()
    text = msgspec.json.encode(one).decode()
    answer = json.dumps({"id": "x", "choices": [], "chitu": {"receipt": json.loads(text)}})
    response = json.dumps({"type": "response.completed", "response": {"chitu": {"receipt": json.loads(text)}}})
    stream = f'data: {{"choices": []}}\n\ndata: {answer}\n\ndata: [DONE]\n\n'
    events = f"event: response.completed\ndata: {response}\n\n"
    for saved in (text, answer, stream, events, json.dumps(json.loads(answer), indent=2)):
        assert [each.receipt for each in read_receipts("f", saved)] == [one], saved
    assert [each.receipt for each in read_receipts("f", f"{text}\n{answer}\n")] == [one, one]
    for saved, named in (
        ("", "f has no receipt"),
        ('{"choices": []}', "f has no receipt"),
        (f"{text}\n{{}}\n", "f:2 has no receipt"),
        (f"{text}\n{text[:-9]}", "f:2"),
        ("\x00", "f:1"),
        ("[1]", "f"),
        (text.replace('"receipt":1', '"receipt":2'), "receipt"),
        (text.replace('"temperature":0.0', '"temperature":"hot"'), "sampling.temperature"),
        (text.replace('"top_k"', '"top_l"'), "top_l"),
    ):
        with pytest.raises(Impossible, match=named):
            read_receipts("f", saved)


def test_whatever_is_changed_is_named() -> None:
    """Each field gets another value while the digests stay."""
    one = receipt(SamplingParams(4, logit_bias={3: 1.5}, grammar=Grammar("regex", "a+"), bad_words=((1, 2),)))
    assert changed_fields(msgspec.json.decode(msgspec.json.encode(one), type=Receipt)) == []
    for name in Receipt.__struct_fields__:
        if name in ("digests", "sampling"):
            continue
        value = getattr(one, name)
        other = value[:-1] or [(0, "x")] if isinstance(value, list) else f"{value}x" if isinstance(value, str) else 2
        assert changed_fields(msgspec.structs.replace(one, **{name: other})) == [name]
    for name in ReceiptSampling.__struct_fields__:
        sampling = msgspec.structs.replace(one.sampling, **{name: 77})
        assert changed_fields(msgspec.structs.replace(one, sampling=sampling)) == [f"sampling.{name}"]
    less = {name: digest for name, digest in one.digests.items() if name != "sampling.seed"}
    assert changed_fields(msgspec.structs.replace(one, digests=less)) == ["sampling.seed"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "seed": -3},
        {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"40": 3}},
        {"min_tokens": 2, "stop_token_ids": [9, 11], "allowed_token_ids": [9, 12, 40]},
        {"ignore_eos": True, "bad_words": ["time", "a"]},
        {"bad_words": [f"{number} " for number in range(128)]},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "[ab]+"},
        {"guided_choice": ["yes", 'n"o']},
        {"guided_grammar": 'start: "a"'},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_sampling_that_was_served_is_asked_for_again(fields: dict[str, Any]) -> None:
    """A body becomes sampling, then a receipt, then a body again, and then the same sampling."""
    served = World().completion([5, 6], max_tokens=4, **fields).samplings[0]
    again = World().completion([5, 6], **fields_of(receipt(served))).samplings[0]
    assert again == served


def test_what_the_text_ended_is_asked_for_no_longer_and_some_grammars_cannot_be() -> None:
    fields = fields_of(receipt(SamplingParams(90, min_tokens=50), finish="text"))
    assert (fields["max_tokens"], fields["min_tokens"]) == (3, 3)
    for grammar in (Grammar("tool_calls", "{}"), Grammar("regex", "a", Reasoning("<think>", "</think>"))):
        with pytest.raises(Impossible, match=r"sampling\.grammar"):
            fields_of(receipt(SamplingParams(4, grammar=grammar)))


def test_a_receipt_ends_where_the_answer_does_whatever_d_made_beyond() -> None:
    layout = KVLayout.uniform("ab", 2, 2, 16, 16, "bfloat16", 99)
    request = generate_request("r", pack_i32([5, 6]), 2, SamplingParams(4, seed=8))
    made = Generation(request, lambda: None, 9.0, 0.0, tokens=[7, 8, 9])
    for reason, count, finish in (("length", 3, "length"), ("length", 2, "text"), ("cancelled", 3, "text")):
        made.finish = Finish(b"", reason)
        one = receipt_of("m", layout, made, count)
        assert (one.token_ids, one.finish, one.dtype) == ([7, 8, 9][:count], finish, "bfloat16")
        assert (one.prompt_token_ids, one.sampling.seed, changed_fields(one)) == ([5, 6], 8, [])


def test_a_receipt_names_the_adapter_by_its_hash() -> None:
    """By that of the tokens, whatever has the name by now."""
    layout = KVLayout.uniform("ab", 2, 2, 16, 16, "bfloat16", 99)
    layout = msgspec.structs.replace(layout, adapters=(("tone", "3" * 32),))
    for adapter, digest in (("", ""), ("tone", "2" * 32)):
        request = generate_request("r", pack_i32([5, 6]), 2, SamplingParams(4, seed=8), adapter=adapter)
        made = Generation(request, lambda: None, 9.0, 0.0, tokens=[7], adapter_hash=digest)
        one = receipt_of("m", layout, made, 1)
        assert (one.model, one.adapter_hash, changed_fields(one)) == (adapter or "m", digest, [])
        assert ("adapter_hash" in one.digests) == bool(adapter), "without one it is as receipts always were"
    assert changed_fields(msgspec.structs.replace(one, adapter_hash="")) == ["adapter_hash"]


def test_a_receipt_names_the_images_and_is_not_replayed_without_them() -> None:
    """The prompt's ids alone have only placeholders in their place. Where no router listens, asking would be an error
    of another kind."""
    layout, file, processor = KVLayout.uniform("ab", 2, 2, 16, 16, "bfloat16", 99), b"GIF", b"p" * 16
    request = generate_request("r", pack_i32([5, 6, 6, 6]), 4, SamplingParams(4, seed=8))
    made = Generation(request, lambda: None, 9.0, 0.0, tokens=[7])
    part = ImagePart(image_key(file, processor), ((1, 2, 0), (3, 1, 2)), (1, 1, 3))
    told = images_told((part,), {part.key: file}, processor)
    one = receipt_of("m", layout, made, 1, told)
    again = msgspec.json.decode(msgspec.json.encode(one), type=Receipt)
    (image,) = again.images
    assert image.part == part and image.num_bytes == 3 and changed_fields(again) == []
    assert [image.is_of(each) for each in (file, b"PNG", b"")] == [True, False, False]
    assert changed_fields(msgspec.structs.replace(one, images=[])) == ["images"]
    assert "images" not in receipt_of("m", layout, made, 1).digests, "without one it is as receipts always were"
    result = replay(Saved(again), Prober(RouterClient("http://127.0.0.1:1"), "m", 1, 1.0), layout, KnownFiles())
    assert result.verdict == "unjudged" and f"image 1 (key {image.key}, 3 bytes) is missing" in result.says, result


@pytest.mark.parametrize("told", ["", "key", "fingerprint", "spans", "none"])
@pytest.mark.parametrize("has_body", [True, False])
def test_a_replay_has_the_images_of_the_receipt_or_says_what_is_other(
    tmp_path: Path, has_body: bool, told: str
) -> None:
    """Files are found in a folder, or in the body of a snapshot, by their hashes. The engine's own receipt must name
    the same images: an engine of another version may prepare them otherwise."""
    files = [b"first", b"second"]
    parts = [ImagePart(image_key(file, b"p" * 16), ((n, 1, 0),), (1, 1, 1)) for n, file in enumerate(files)]
    images = images_told(parts, {part.key: file for part, file in zip(parts, files, strict=True)}, b"p" * 16)
    one = receipt(images=images)
    changed = {"key": {"key": "ab"}, "fingerprint": {"fingerprint": "cd"}, "spans": {"spans": [(2, 1, 0)]}}
    seen = [images[0], msgspec.structs.replace(images[1], **changed.get(told, {}))][: 0 if told == "none" else 2]
    asked: list[dict[str, Any]] = []

    def post(path: str, body: dict[str, Any], timeout_s: float, request_id: str = "") -> tuple[str, bytes]:
        asked.append(body)
        attempt = {"prefill": None, "decode": "U0", "continued_tokens": 0, "cached_tokens": 0, "kv_bytes": None}
        proof = {"choices": [{"attempts": [attempt | {"first_token_s": 0.1}]}], "receipt": {"images": seen}}
        choice = {"token_ids": one.token_ids, "text": "", "logprobs": None}
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        return "", msgspec.json.encode({"choices": [choice], "chitu": proof, "usage": usage})

    if not has_body:
        for n, file in enumerate([b"third!", *files]):
            (tmp_path / f"{n}.png").write_bytes(file)
    known = KnownFiles(() if has_body else (str(tmp_path),))
    client = cast(RouterClient, SimpleNamespace(post=post, url="http://a"))
    layout = KVLayout.uniform(one.model_hash, 2, 2, 16, 16, "float32", 99)
    result = replay(Saved(one, files=tuple(files) if has_body else ()), Prober(client, "m", 1, 1.0), layout, known)
    urls = tuple(f"data:;base64,{b64encode(file).decode()}" for file in files)
    assert [(body["images"], body["prompt"], body["return_receipt"]) for body in asked] == [(urls, [5, 6], True)]
    says = {"key": "image 2 is another", "fingerprint": "another image processor", "spans": "rows are others"}
    if told:
        assert result.verdict == "unjudged" and (says | {"none": "are 0 now"})[told] in result.says, result
    else:
        assert result == Replayed("r", "same")


def test_a_snapshot_of_a_request_with_images_has_their_files() -> None:
    file, processor = bytes(range(40)), b"p" * 16
    part = ImagePart(image_key(file, processor), ((0, 1, 0),))
    told = images_told((part,), {part.key: file}, processor)
    body = json.dumps({"url": f"data:image/png;base64,{b64encode(file).decode()}"})
    kept = KeptRequest(
        **{"kept": 1, "chitu": "0", "request_id": "r", "tenant": "", "route": "chat", "body": body, "created_s": 1},
        **{"expires_s": 1.0, "left_s": 1.0, "model_hash": "ab", "dtype": "float32", "prompt_token_ids": [6]},
        **{"images": told, "sampling": receipt().sampling, "token_ids": [7], "logprobs": []},
        fetched={"https://a/b": b"other"},
    )
    (saved,) = read_receipts("f", pack(kept).decode())
    assert saved.receipt.images == told and saved.files == (file, b"other")
    assert KnownFiles().urls(saved.receipt.images, saved.files)
    with pytest.raises(Impossible, match="cannot be read: No such file"):
        KnownFiles(["/nowhere"])


def score(logprob: float, top: int, top_logprob: float) -> Score:
    return Score(logprob, top, top_logprob)


@pytest.mark.parametrize(
    ("sampling", "replayed", "gap", "dtype", "verdict", "place"),
    [
        (SamplingParams(4, temperature=0.0), [7, 8, 9], 9.0, "float32", "same", -1),
        (SamplingParams(4, temperature=0.0), [7, 2, 3], 0.2, "bfloat16", "same", 1),  # a near-tie
        (SamplingParams(4, temperature=0.0), [7, 2, 3], 0.3, "bfloat16", "different", 1),
        (SamplingParams(4, temperature=0.0), [7, 8], 0.0, "bfloat16", "different", 2),
        (SamplingParams(4, temperature=0.0), [7, 8, 9, 1], 0.0, "bfloat16", "different", 3),
        (SamplingParams(4, seed=3), [7, 2, 9], 0.2, "float32", "different", 1),
        (SamplingParams(4, seed=3), [7, 2, 9], 0.2, "bfloat16", "unjudged", 1),
        (SamplingParams(4, temperature=0.0, repetition_penalty=1.1), [7, 2, 9], 0.2, "float32", "different", 1),
        (SamplingParams(4, temperature=0.0, logit_bias={3: 9.0}), [7, 2, 9], 0.2, "bfloat16", "unjudged", 1),
    ],
)
def test_a_difference_is_named_with_its_gap(
    sampling: SamplingParams, replayed: list[int], gap: float, dtype: str, verdict: str, place: int
) -> None:
    """The engine's own answer differs from its scores by 0.03: so much is rounding, and eight times that is allowed."""
    one = receipt(sampling, dtype=dtype)

    def scores(token_ids: Sequence[int], count: int) -> list[Score]:
        """Return scores in which the engine prefers 2 to 8 by the gap."""
        known = {8: score(-1.0 - gap, 2, -1.0)}
        return [known.get(token, score(-0.1, token, -0.1)) for token in token_ids[-count:]]

    logprobs = tuple(each.logprob - 0.03 for each in scores(replayed, len(replayed)))
    result = judge(one, CheckedRequest(0, tokens=tuple(replayed), logprobs=logprobs), scores, dtype)
    assert (result.verdict, result.place) == (verdict, place), result
    assert bool(result.says) == (place >= 0)
    if place == 1:
        assert "token 1 is 8" in result.says, result


def test_the_logprobs_of_a_saved_answer_are_compared_though_its_tokens_are_right() -> None:
    one = receipt(SamplingParams(4, temperature=0.0), dtype="float32")
    own = CheckedRequest(0, tokens=(7, 8, 9), logprobs=(-0.1, -0.1, -0.10001))

    def scores(token_ids: Sequence[int], count: int) -> list[Score]:
        return [score(-0.1, token, -0.1) for token in token_ids[-count:]]

    assert judge(one, own, scores, "float32", (-0.1, -0.10005, -0.1)).verdict == "same"
    off = judge(one, own, scores, "float32", (-0.1, -0.1, -0.1045))  # a zeroed page
    assert (off.verdict, off.place) == ("different", 2) and "logprob -0.1045" in off.says, off


def test_a_saved_answer_whose_pages_were_damaged_is_different_whatever_its_tokens_are() -> None:
    one = receipt(SamplingParams(4, temperature=0.0), dtype="bfloat16")
    sums = {"first_page": 3, "layers": 2, "sent": "0" * 64, "landed": "0" * 16 + "1" * 16 + "0" * 32}
    proof = {"receipt": msgspec.to_builtins(one), "choices": [{"attempts": [{"transfer_sums": sums}]}]}
    answer = {"choices": [{"logprobs": {"token_logprobs": [-0.5, -1.0, -2]}}], "chitu": proof}
    (saved,) = read_receipts("f", msgspec.json.encode(answer).decode())
    assert saved.logprobs == (-0.5, -1.0, -2.0) and saved.damage is not None
    layout = KVLayout.uniform(one.model_hash, 2, 2, 16, 16, "bfloat16", 99)
    result = replay(saved, Prober(RouterClient("http://127.0.0.1:1"), "m", 1, 1.0), layout, KnownFiles())
    assert result.verdict == "different" and "page 4, layer 0, in that layer alone" in result.says, result
    sums["landed"] = sums["sent"]
    (right,) = read_receipts("f", msgspec.json.encode(answer).decode())
    assert right.damage is None


def test_a_receipt_is_asked_for_with_the_proof_of_one_choice() -> None:
    world = World()
    assert world.completion([5], return_proof=True, return_receipt=True).options.return_receipt
    for fields in ({}, {"return_proof": True, "n": 2}, {"return_proof": True, "best_of": 2}):
        with pytest.raises(InvalidRequest) as caught:
            world.completion([5], return_receipt=True, **fields)
        assert caught.value.param == "return_receipt"
