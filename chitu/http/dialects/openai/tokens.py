"""Texts as tokens, and tokens as text: the bodies of `/tokenize` and `/detokenize`. Pure; part of `BodyWork`."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import Body
from chitu.http.ask.chat import chat_messages, offered_tools, template_variables
from chitu.http.ask.decoder import BodyDecoder, detokenize_decoder, tokenize_decoder
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import ParseContext, TokensAnswer
from chitu.http.ask.served_model import ServedModel
from chitu.http.dialects.anthropic.answers import CountTokensReply
from chitu.http.dialects.openai.bodies import DetokenizeReply, TokenizeReply

BodyT = TypeVar("BodyT", bound=Body)


class TokenCounts:
    def __init__(self, model: ServedModel, parser: BodyParser, takes_unknown: bool) -> None:
        self._model = model
        self._parser = parser
        self._takes_unknown = takes_unknown

    def messages(self, raw: bytes | bytearray, context: ParseContext) -> TokensAnswer:
        """Count the tokens of a body of `/v1/messages/count_tokens`."""
        count, warnings = self._parser.count_tokens(raw, context)
        return TokensAnswer(msgspec.json.encode(CountTokensReply(count)), warnings)

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
        ids = model.encode_counted(text, add_special_tokens, param, limits, context.require_client)
        answer = TokenizeReply(len(ids), max_len, ids)
        if body.return_token_strs:
            answer.token_strs = [model.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        return TokensAnswer(msgspec.json.encode(answer), warnings)

    def detokenize(self, raw: bytes | bytearray, context: ParseContext) -> TokensAnswer:
        body, warnings = self._body(detokenize_decoder, raw)
        for token in body.tokens:
            if not 0 <= token < context.facts.vocab_size:
                raise InvalidRequest(f"tokens: {token} is no token id (0 to {context.facts.vocab_size - 1})", "tokens")
        context.require_client()
        text = self._model.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))
        return TokensAnswer(msgspec.json.encode(DetokenizeReply(text)), warnings)

    def _body(self, decoder: BodyDecoder[BodyT], raw: bytes | bytearray) -> tuple[BodyT, list[str]]:
        warnings: list[str] = []
        body = decoder.decode(raw, warnings if self._takes_unknown else None)
        self._model.adapter_of(body.model)
        return body, warnings
