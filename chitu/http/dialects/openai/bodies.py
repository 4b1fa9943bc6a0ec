"""Bodies of the cold routes beside completions and chats, and the answers to them: models, tokens, aborts. Pure; see
`ask/bodies.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chitu.http.ask.bodies import (
    CONTENT,
    MAX_TOKENS,
    Begun,
    Body,
    Continued,
    Messages,
    TemplateKwargs,
    TokenId,
    ToolList,
    note,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
ABORT = "/abort_request"
MAX_RID_CHARS = 160
"""Characters of a request id, including the prefix of a response id."""


class TokenizeBody(Body, kw_only=True):
    prompt: Annotated[str | None, note("text"), CONTENT] = None
    messages: Messages = None
    chat_template_kwargs: TemplateKwargs = None
    tools: ToolList = None
    add_generation_prompt: Begun = None
    continue_final_message: Continued = None
    return_token_strs: Annotated[bool | None, note("`token_strs`: each token's text")] = None
    add_special_tokens: Annotated[
        bool | None, note("default: true for prompts, false for chats (the template has them)")
    ] = None


class DetokenizeBody(Body, kw_only=True):
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS), note("up to 262,144 token ids"), CONTENT]
    skip_special_tokens: Annotated[bool | None, note("default false")] = None


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    rid: Annotated[
        str,
        msgspec.Meta(min_length=1, max_length=MAX_RID_CHARS),
        note("the X-Request-Id, or the `id` of the answer"),
    ]


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int | None
    """Maximum tokens of a request; null while no instance serves."""
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeReply(msgspec.Struct):
    prompt: str


class AbortReply(msgspec.Struct):
    aborted: int
    """Number of requests that this call ended."""


class ModelReply(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["chitu"]
    root: str
    """Path of the checkpoint or of the adapter."""
    max_model_len: int | None
    """Maximum tokens of a request; null while no instance serves."""
    sampling_defaults: dict[str, float]
    """What a request has that leaves out temperature, top_p, top_k or repetition_penalty."""
    parent: str | None
    """Of a LoRA adapter: the name of the model that it adapts. Null for that model."""


class ModelsReply(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelReply]
