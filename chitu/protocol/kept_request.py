"""A request that outlives its router: the file from which the next router continues it. Pure.

Written at the end of a router and read by the next one (`http/answer/kept_requests.py`). Like a receipt, it has no KV:
the ids of the prompt, the resolved sampling with the drawn seed, and the tokens so far determine the rest. The body
determines what kind of answer they are made into.

Invariant: a file is its SHA-256 and then its JSON, so one that is cut short or changed is detected.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from chitu.known_types import known
from chitu.protocol.receipt import ReceiptSampling


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
    """Request body as the client sent it."""
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
