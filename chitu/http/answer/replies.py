"""Answers of the routes as structs, from which the OpenAPI document is made and which encode them. Pure.

Parts of an answer to a generation that grow with it (choices, logprobs) are written between the struct's fields as they
are due (`formats.py`). The error object is `net/http.py`'s.
"""

from __future__ import annotations

import msgspec


class CachedTokensReply(msgspec.Struct):
    cached_tokens: int


class ReasoningTokensReply(msgspec.Struct):
    reasoning_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensReply
    completion_tokens_details: ReasoningTokensReply
