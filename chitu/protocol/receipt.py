"""The receipt of one answer: all that its tokens depend on except the weights, to be replayed elsewhere and later.
Pure.

Made by the router for a request that asks for it (`return_receipt`, `http/answer/proof.py`); read by `chitu replay`. It
has no KV: a draw depends only on the logits, the seed and the number of tokens emitted, so an engine of the same model
gives the same tokens for the same prompt and sampling.

Invariant: each field has its digest in `digests`, so that one that was changed later is named. A digest is no
signature: anyone who changes a field can make a new one, which only a replay finds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from chitu.protocol.images import ImagePart, image_key
from chitu.protocol.requests import SamplingParams

DIGEST_CHARS = 16


class ReceiptSampling(SamplingParams, frozen=True, omit_defaults=False):
    """`SamplingParams` as they were served, with all fields."""


class ReceiptImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image of the prompt, without its bytes: who has the file can tell that it is the one."""

    key: str
    """Hex of `ImagePart.key`."""
    num_bytes: int
    """Size of its file (bytes)."""
    grid: tuple[int, int, int]
    spans: list[tuple[int, int, int]]
    """Both as in `ImagePart`."""
    fingerprint: str
    """Hex of the fingerprint of the image processor, which keys `key`."""

    @property
    def part(self) -> ImagePart:
        return ImagePart(bytes.fromhex(self.key), tuple(self.spans), self.grid)

    def is_of(self, file: bytes) -> bool:
        """Return whether this is its file."""
        return len(file) == self.num_bytes and image_key(file, bytes.fromhex(self.fingerprint)).hex() == self.key


def images_told(images: Iterable[ImagePart], files: Mapping[bytes, bytes], fingerprint: bytes) -> list[ReceiptImage]:
    """Return what is told of a prompt's images. `files`: by key."""
    return [
        ReceiptImage(each.key.hex(), len(files[each.key]), each.grid, [*each.spans], fingerprint.hex())
        for each in images
    ]


def why_other_images(before: Sequence[ReceiptImage], now: Sequence[ReceiptImage]) -> str:
    """Return why images are not those that they were; empty if they are, wherever their rows lie."""
    if len(before) != len(now):
        return f"there were {len(before)} images, and are {len(now)} now"
    for number, (old, new) in enumerate(zip(before, now, strict=True), 1):
        if old.fingerprint != new.fingerprint:
            return f"they were for another image processor (fingerprint {old.fingerprint}, not {new.fingerprint})"
        if old.key != new.key:
            return f"image {number} is another one now"
    return ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    receipt: Literal[1]
    """Version of this format."""
    chitu: str
    """Version of the server."""
    request_id: str
    model: str
    """Served name of the model, or name of the LoRA adapter."""
    model_hash: str
    """Hash of config.json and of the headers of the weight files, not of each weight."""
    weights: list[tuple[int, str]] = []
    """Hashes of the models that its tokens are of, each with the index of its first token, if weights changed under it;
    then nobody can generate it again. Has a digest only then."""
    adapter_hash: str = ""
    """Hash of all bytes of the LoRA adapter; empty without one. Has a digest only with one."""
    dtype: Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
    """Type of K and V."""
    served: list[str]
    """Pairs that it was tried on, as `P0-D1`; the last one finished it."""
    revision: str = ""
    """Revision of the instances that finished it (`revision` in the topology). Has a digest only with one."""
    prompt_token_ids: list[int]
    images: list[ReceiptImage] = []
    """Images of the prompt, in order of position. Has a digest only with some."""
    sampling: ReceiptSampling
    token_ids: list[int]
    """Tokens of the answer, up to the one that ended it."""
    finish: Literal["stop", "length", "text"]
    """`text`: the router ended it by its text, at a stop string or after the one call that is allowed."""
    digests: dict[str, str] = {}
    """Digest of each other field, and of each in `sampling`: the first digits of the SHA-256 of its JSON."""


def sealed(receipt: Receipt) -> Receipt:
    """Return the receipt with the digests of its fields."""
    return msgspec.structs.replace(receipt, digests=dict(_digests(receipt)))


def changed_fields(receipt: Receipt) -> list[str]:
    """Return the names of fields that differ from their digests or have none."""
    found = dict(_digests(receipt))
    return [name for name in {**found, **receipt.digests} if receipt.digests.get(name) != found.get(name)]


def _digests(receipt: Receipt) -> Iterator[tuple[str, str]]:
    for name, value in msgspec.structs.asdict(receipt).items():
        if name == "sampling":
            for key, part in msgspec.structs.asdict(value).items():
                yield f"sampling.{key}", _digest(part)
        elif name != "digests" and (value or name not in ("adapter_hash", "weights", "images", "revision")):
            yield name, _digest(value)


def _digest(value: Any) -> str:
    if isinstance(value, dict):
        value = sorted(value.items())
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:DIGEST_CHARS]
