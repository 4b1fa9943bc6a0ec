"""Answers to bodies of `/tokenize` and `/detokenize`. Pure; part of `BodyWork`."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.body_decoder import BodyDecoder, detokenize_decoder, tokenize_decoder
from chitu.http.jobs import ParseContext
from chitu.http.request_bodies import MAX_TOKENS, Body
from chitu.http.request_checks import chat_messages, offered_tools, template_variables
from chitu.http.served_model import ServedModel

BodyT = TypeVar("BodyT", bound=Body)


class TokensAnswer(NamedTuple):
    body: bytes
    """JSON, which can be as large as the body that it answers."""
    warnings: list[str]


class TokenCounts:
    def __init__(self, model: ServedModel, takes_unknown: bool) -> None:
        self._model = model
        self._takes_unknown = takes_unknown

    def tokenize(self, raw: bytes | bytearray, context: ParseContext) -> TokensAnswer:
        body, warnings = self._body(tokenize_decoder, raw)
        model, limits = self._model, context.facts.limits
        max_len = limits.max_model_len if limits is not None else None
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", "prompt")
        if body.prompt is not None:
            text, param, add_special_tokens = body.prompt, "prompt", body.add_special_tokens is not False
        else:
            variables = template_variables(body.chat_template_kwargs)
            tools, with_start = offered_tools(body.tools), body.add_generation_prompt is not False
            text = model.render(chat_messages(body.messages), variables, warnings, tools, with_start)
            param, add_special_tokens = "messages", bool(body.add_special_tokens)
        most = max(max_len or 0, MAX_TOKENS)
        if model.tokenizer.exceeds(text, most, bytes_per_token=1):
            raise InvalidRequest(f"{param}: at most {most} tokens are counted", param)
        context.require_client()
        ids = model.tokenizer.encode(text, add_special_tokens)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [model.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        return TokensAnswer(msgspec.json.encode(answer), warnings)

    def detokenize(self, raw: bytes | bytearray, context: ParseContext) -> TokensAnswer:
        body, warnings = self._body(detokenize_decoder, raw)
        for token in body.tokens:
            if not 0 <= token < context.facts.vocab_size:
                raise InvalidRequest(f"tokens: {token} is no token id (0 to {context.facts.vocab_size - 1})", "tokens")
        context.require_client()
        text = self._model.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))
        return TokensAnswer(msgspec.json.encode({"prompt": text}), warnings)

    def _body(self, decoder: BodyDecoder[BodyT], raw: bytes | bytearray) -> tuple[BodyT, list[str]]:
        warnings: list[str] = []
        body = decoder.decode(raw, warnings if self._takes_unknown else None)
        self._model.require_name(body.model)
        return body, warnings
