"""Requests as a router sends them, made from flat arguments: the fields of their head and of its options by name."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from chitu.protocol import (
    DecodeRequest,
    Fork,
    LinkStamp,
    PrefillRequest,
    PromptOutput,
    RequestHead,
    RequestMessage,
    RequestOptions,
    SamplingParams,
    UnifiedRequest,
)
from chitu.router.generation import GenerateRequest

Message = TypeVar("Message", bound=RequestMessage)


def head_of(room: bytes, request_id: str, token_ids: bytes, **fields: Any) -> RequestHead:
    """Return a head. `fields` are the others of it, and those of its options."""
    return RequestHead(room, request_id, token_ids, options=_options_in(fields), **fields)


def with_options(message: Message, **options: Any) -> Message:
    """Return the message with other options."""
    replace = msgspec.structs.replace
    return replace(message, head=replace(message.head, options=replace(message.head.options, **options)))


def generate_request(
    request_id: str, token_ids: bytes, num_tokens: int, sampling: SamplingParams, **fields: Any
) -> GenerateRequest:
    """Return what a router is asked for. `fields` are the others of it, and those of its options."""
    return GenerateRequest(request_id, token_ids, num_tokens, sampling, options=_options_in(fields), **fields)


def _options_in(fields: dict[str, Any]) -> RequestOptions:
    """Take the options out of the fields."""
    return RequestOptions(**{name: fields.pop(name) for name in RequestOptions.__struct_fields__ if name in fields})


def prefill_request(
    room: bytes,
    request_id: str,
    token_ids: bytes,
    decode_rank: int = 0,
    decode_incarnation: int = 1,
    *,
    output: PromptOutput = PromptOutput(),
    **fields: Any,
) -> PrefillRequest:
    return PrefillRequest(head_of(room, request_id, token_ids, **fields), decode_rank, decode_incarnation, output)


def decode_request(
    room: bytes,
    request_id: str,
    token_ids: bytes,
    sampling: SamplingParams,
    prefill_rank: int = 0,
    prefill_incarnation: int = 1,
    num_emitted: int = 0,
    *,
    forks: tuple[Fork, ...] = (),
    token_group: int = 1,
    **fields: Any,
) -> DecodeRequest:
    return DecodeRequest(
        head_of(room, request_id, token_ids, num_emitted=num_emitted, **fields),
        sampling,
        forks,
        token_group,
        prefill_rank=prefill_rank,
        prefill_incarnation=prefill_incarnation,
    )


def unified_request(
    room: bytes,
    request_id: str,
    token_ids: bytes,
    sampling: SamplingParams,
    num_emitted: int = 0,
    *,
    forks: tuple[Fork, ...] = (),
    token_group: int = 1,
    link: int = 0,
    **fields: Any,
) -> UnifiedRequest:
    head = head_of(room, request_id, token_ids, num_emitted=num_emitted, **fields)
    request = UnifiedRequest(head, sampling, forks, token_group)
    return msgspec.structs.replace(request, stamp=LinkStamp(link)) if link else request  # a default is not sent
