"""OpenAI's Responses API: a chat whose answer is a list of items. Nothing is stored."""

from __future__ import annotations

from typing import cast

from chitu.http.answer.dialect import Dialect, Endpoint
from chitu.http.answer.formats import AnswerHead
from chitu.http.ask.bodies import NO_EFFECT, REFUSED
from chitu.http.ask.fields import Unserved
from chitu.http.ask.other_servers import OF_CHATS, SAMPLERS, UNUSED
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import ParseContext, ParsedRequest
from chitu.http.dialects.responses.answers import ResponsesFormat, ResponsesReply
from chitu.http.dialects.responses.bodies import RESPONSES, ResponsesBody
from chitu.http.dialects.responses.chat import Repeated, chat_of_responses

UNSERVED: Unserved = (
    (
        (RESPONSES,),
        NO_EFFECT,
        (
            ("user", ""),
            ("safety_identifier", ""),
            ("service_tier", "there is only one"),
            ("prompt_cache_key", "prompts are cached by their tokens"),
            ("prompt_cache_retention", ""),
            ("prompt_cache_options", ""),
            ("stream_options", "nothing is padded"),
            ("client_metadata", ""),
            ("prediction", "chat has it, and the tokens are the same without it"),
            *UNUSED,
        ),
    ),
    (
        (RESPONSES,),
        REFUSED,
        (
            *SAMPLERS,
            *OF_CHATS,
            ("top_k", "chat has it", (-1, 0)),
            ("stop", "chat has it", ([],)),
            ("store", "nothing is stored", (False,)),
            ("previous_response_id", "nothing is stored: send the turns as `input`"),
            ("conversation", "nothing is stored: send the turns as `input`"),
            ("background", "", (False,)),
            ("background_options", ""),
            ("prompt", ""),
            ("max_tool_calls", ""),
            ("top_logprobs", "chat has them", (0,)),
            ("moderation", ""),
            ("image", ""),
            ("access_programs", ""),
            ("context_management", "", ([],)),
            ("input[].async", ""),
            ("tools[].async", ""),
            ("tools[].tools[].async", ""),
            ("reasoning.context", ""),
            ("reasoning.mode", ""),
        ),
    ),
)


def _read(parser: BodyParser, body: ResponsesBody, context: ParseContext, warnings: list[str]) -> ParsedRequest:
    variables = parser.model.tokenizer.template_variables
    translation = chat_of_responses(body, variables, warnings, parser.images(context))
    parsed = parser.translated(translation, context, warnings)
    parsed.for_answer = Repeated.of(body, parsed.samplings[0])
    return parsed


def _answer(head: AnswerHead, parsed: ParsedRequest) -> ResponsesFormat:
    return ResponsesFormat(head, cast(Repeated, parsed.for_answer))


DIALECT = Dialect(
    endpoints=(
        Endpoint(
            name="responses",
            path=RESPONSES,
            body=ResponsesBody,
            read=_read,
            answer=_answer,
            id_prefix="resp_",
            reply=ResponsesReply,
            operation=("Response", "create_response"),
        ),
    ),
    unserved=UNSERVED,
)
