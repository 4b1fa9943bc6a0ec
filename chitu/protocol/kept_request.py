"""A request that outlives its router: the file from which the next router continues it. Pure.

Written at the end of a router and read by the next one (`http/answer/kept_requests.py`). Like a receipt, it has no KV:
the ids of the prompt, the resolved sampling with the drawn seed, and the tokens so far determine the rest. The body
determines what kind of answer they are made into.

Images and other long base64 texts of a body may lie beside the request, each in a file of its own that several
requests can name (`without_files`).

Invariant: a file is its SHA-256 and then its JSON, so one that is cut short or changed is detected.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from chitu.known_types import known
from chitu.protocol.receipt import ReceiptImage, ReceiptSampling

LEAST_FILE_CHARS = 4096
"""Shorter texts stay in the body."""


class BodyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: int
    """Number of characters of the body, without its files, before it. Means nothing with `url`."""
    sha256: str
    """Hex, of its bytes."""
    num_bytes: int
    url: str = ""
    """Key in `fetched`; empty: it is of the body."""


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kept: Literal[1]
    """Version of this format."""
    chitu: str
    """Version of the server."""
    request_id: str
    tenant: str
    """Tenant that may read it: the prefix of its cache salt."""
    route: str
    """Name of its endpoint (`http/answer/dialect.py`)."""
    body: str
    """Request body as the client sent it, without `files`."""
    fetched: dict[str, bytes] = {}
    """Files that the body names, by URL, as the first router got them."""
    files: list[BodyFile] = []
    """What is in files beside it: of the body, in order, and what was fetched."""
    created_s: int
    """Creation of the answer; Unix time, as the next."""
    expires_s: float
    left_s: float
    """Seconds left until its deadline, from when it continues."""
    model_hash: str
    adapter_hash: str = ""
    """Hash of the LoRA adapter; empty without one."""
    dtype: str
    """Type of K and V."""
    prompt_token_ids: list[int]
    images: list[ReceiptImage] = []
    """Images of the prompt, in order of position."""
    sampling: ReceiptSampling
    token_ids: list[int]
    """Tokens that were emitted."""
    logprobs: list[bytes]
    """Packed logprobs of these tokens; empty if the request asks for none."""
    finish: Literal["", "stop", "length"] = ""
    """Why the last token is the last one, if the client did not read the answer to its end."""


class DamagedFile(ValueError):
    """The file is not what was written, or is of another version."""


def pack(record: KeptRequest) -> bytes:
    data = msgspec.json.encode(record)
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def unpack(data: bytes) -> KeptRequest:
    """Return the record. Raises DamagedFile."""
    digest, _, rest = data.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise DamagedFile("checksum mismatch: the file was modified or truncated")
    try:
        record = msgspec.json.decode(rest, type=known(KeptRequest))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(str(error)) from None
    if record.logprobs and len(record.logprobs) != len(record.token_ids):
        raise DamagedFile(f"logprobs of {len(record.logprobs)} of {len(record.token_ids)} tokens")
    return record


def base64_texts(body: str, least_chars: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the base64 texts of a JSON text that have so many characters, and that their bytes would be written as:
    whole strings, and what follows the comma of data URLs. Yields first place, end, and bytes. Its time is linear."""
    pattern = rf'[",]([A-Za-z0-9+/]{{{least_chars},}}+={{0,2}}+)"'  # possessive
    for match in re.finditer(pattern, body):
        if (data := _decoded(match[1])) is not None:
            yield match.start(1), match.end(1), data


def without_files(record: KeptRequest) -> tuple[KeptRequest, dict[str, bytes]]:
    """Return the record without the long base64 texts of its body and without what was fetched, and the bytes of each
    by its SHA-256 (hex)."""
    found: dict[str, bytes] = {}
    places: list[BodyFile] = []

    def move(at: int, data: bytes, url: str = "") -> None:
        digest = hashlib.sha256(data).hexdigest()
        found[digest] = data
        places.append(BodyFile(at, digest, len(data), url))

    for url, data in record.fetched.items():
        move(0, data, url)
    pieces: list[str] = []
    start = num_chars = 0
    for first, end, data in base64_texts(record.body, LEAST_FILE_CHARS):
        pieces.append(record.body[start:first])
        num_chars += len(pieces[-1])
        move(num_chars, data)
        start = end
    if not places:
        return record, found
    body = "".join([*pieces, record.body[start:]])
    return msgspec.structs.replace(record, body=body, fetched={}, files=places), found


def with_files(record: KeptRequest, found: Mapping[str, bytes]) -> KeptRequest:
    """Return the record with all that it had. `found`: as `without_files` returned it. Raises DamagedFile if a file is
    another one."""
    if not record.files:
        return record
    pieces: list[str] = []
    fetched = dict(record.fetched)
    start = 0
    for each in record.files:
        data = found[each.sha256]
        if hashlib.sha256(data).hexdigest() != each.sha256:
            raise DamagedFile(f"its file {each.sha256} was modified or truncated")
        if each.url:
            fetched[each.url] = data
            continue
        pieces += [record.body[start : each.at], b64encode(data).decode()]
        start = each.at
    body = "".join([*pieces, record.body[start:]])
    return msgspec.structs.replace(record, body=body, fetched=fetched, files=[])


def _decoded(text: str) -> bytes | None:
    """Return the bytes of a base64 text; None if they would be written otherwise."""
    try:
        data = b64decode(text, validate=True)
    except binascii.Error:
        return None
    return data if b64encode(data).decode() == text else None
