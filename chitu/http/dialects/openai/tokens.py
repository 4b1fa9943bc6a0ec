"""Texts as tokens, and tokens as text: the bodies of `/tokenize` and `/detokenize`. Pure; part of `BodyWork`."""

from __future__ import annotations

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.chat import chat_messages, end_of_prompt, offered_tools, template_variables
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import ParseContext, TokensAnswer
from chitu.http.dialects.openai.bodies import DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply


def tokenize(parser: BodyParser, body: TokenizeBody, context: ParseContext, warnings: list[str]) -> TokensAnswer:
    model, limits = parser.model, context.facts.limits
    model.adapter_of(body.model)
    max_len = limits.max_model_len if limits is not None else None
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is required", "prompt")
    if body.prompt is not None:
        text, param, add_special_tokens = body.prompt, "prompt", body.add_special_tokens is not False
    else:
        variables = template_variables(body.chat_template_kwargs)
        begins, continues = end_of_prompt(body.add_generation_prompt, body.continue_final_message)
        images = parser.images(context)
        tools, messages = offered_tools(body.tools), chat_messages(body.messages, warnings, images)
        parser.read_images(images, context)
        text = model.render(messages, variables, warnings, tools, begins, continues, images)
        param, add_special_tokens = "messages", bool(body.add_special_tokens)
    ids = model.encode_counted(text, add_special_tokens, param, limits, context.require_client)
    if body.messages is not None:
        ids = parser.with_images(ids, images, messages)
    answer = TokenizeReply(len(ids), max_len, ids)
    if body.return_token_strs:
        answer.token_strs = [model.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return TokensAnswer(msgspec.json.encode(answer), warnings)


def detokenize(parser: BodyParser, body: DetokenizeBody, context: ParseContext, warnings: list[str]) -> TokensAnswer:
    parser.model.adapter_of(body.model)
    for token in body.tokens:
        if not 0 <= token < context.facts.vocab_size:
            raise InvalidRequest(f"tokens: {token} is no token id (0 to {context.facts.vocab_size - 1})", "tokens")
    context.require_client()
    text = parser.model.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))
    return TokensAnswer(msgspec.json.encode(DetokenizeReply(text)), warnings)
