"""Anthropic's Messages API: a chat whose answer is a list of blocks."""

from __future__ import annotations

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.answer.dialect import STATUSES, Dialect, Endpoint
from chitu.http.answer.formats import AnswerHead
from chitu.http.ask.bodies import NO_EFFECT, REFUSED
from chitu.http.ask.fields import Unserved
from chitu.http.ask.other_servers import OF_CHATS, SAMPLERS, UNUSED
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import ParseContext, ParsedRequest, TokensAnswer
from chitu.http.ask.translation import Translation
from chitu.http.dialects.anthropic.answers import CountTokensReply, MessagesFormat, MessagesReply
from chitu.http.dialects.anthropic.bodies import COUNT_TOKENS, MESSAGES, CountTokensBody, MessagesBody
from chitu.http.dialects.anthropic.chat import chat_of_messages
from chitu.http.dialects.anthropic.errors import ERRORS, OVERLOADED

BOTH = (MESSAGES, COUNT_TOKENS)
UNSERVED: Unserved = (
    (
        BOTH,
        NO_EFFECT,
        (
            ("cache_control", "prompts are cached by their tokens"),
            ("context_management", "the turns stay as they are sent"),
            ("speed", "there is only one"),
        ),
    ),
    (
        (MESSAGES,),
        NO_EFFECT,
        (
            ("metadata", ""),
            ("service_tier", "there is only one"),
            ("diagnostics", ""),
            ("prediction", "chat has it, and the tokens are the same without it"),
            *UNUSED,
        ),
    ),
    (
        BOTH,
        REFUSED,
        (
            ("mcp_servers", "", ([],)),
            ("billing_policy", ""),
            ("compaction", ""),
        ),
    ),
    (
        (MESSAGES,),
        REFUSED,
        (
            *SAMPLERS,
            *OF_CHATS,
            ("container", ""),
            ("inference_geo", ""),
            ("fallbacks", "", ([],)),
            ("fallback_credit_token", ""),
            ("thread", ""),
        ),
    ),
)


def _chat_of(parser: BodyParser, body: CountTokensBody, context: ParseContext, warnings: list[str]) -> Translation:
    reasons = parser.model.message_format.reasoning is not None
    variables, images = parser.model.tokenizer.template_variables, parser.images(context)
    return chat_of_messages(body, variables, reasons, warnings, images)


def _read(parser: BodyParser, body: MessagesBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
    return parser.translated(_chat_of(parser, body, context, warnings), context, warnings, caps=True)


def _answer(head: AnswerHead, parsed: ParsedRequest) -> MessagesFormat:
    return MessagesFormat(head, parsed.fills_context)


def _count(parser: BodyParser, body: CountTokensBody, context: ParseContext, warnings: list[str]) -> TokensAnswer:
    """Return how many tokens the prompt has."""
    translation = _chat_of(parser, body, context, warnings)
    parser.read_images(translation.images, context)
    try:
        chat = parser.rendered(translation.chat, warnings, translation.images)
        ids = parser.counted(chat, False, context)
    except InvalidRequest as error:
        raise translation.names.renamed(error) from None
    return TokensAnswer(msgspec.json.encode(CountTokensReply(len(ids))), warnings)


DIALECT = Dialect(
    endpoints=(
        Endpoint(
            name="messages",
            path=MESSAGES,
            body=MessagesBody,
            read=_read,
            answer=_answer,
            id_prefix="msg_",
            errors=ERRORS,
            reply=MessagesReply,
            operation=("Message", "create_message"),
            statuses=(*STATUSES, OVERLOADED),
        ),
        Endpoint(
            name="count_tokens",
            path=COUNT_TOKENS,
            body=CountTokensBody,
            read=_count,
            errors=ERRORS,
            reply=CountTokensReply,
            operation=("Tokens of a message's prompt", "count_message_tokens"),
            statuses=(404, 429, OVERLOADED),
            is_streamed=False,
        ),
    ),
    unserved=UNSERVED,
)
