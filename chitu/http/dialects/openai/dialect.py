"""OpenAI's completions and chats, with the extensions of vLLM and SGLang, and tokens and aborts beside them."""

from __future__ import annotations

from chitu.http.answer.dialect import Dialect, Endpoint
from chitu.http.answer.formats import AnswerHead
from chitu.http.ask.bodies import NO_EFFECT, REFUSED, ChatBody, CompletionBody
from chitu.http.ask.fields import Unserved
from chitu.http.ask.other_servers import SAMPLERS, UNUSED
from chitu.http.ask.parse import BodyParser
from chitu.http.ask.parsed import ParsedRequest
from chitu.http.dialects.openai.answers import ChatFormat, ChatReply, CompletionFormat, CompletionReply
from chitu.http.dialects.openai.bodies import (
    ABORT,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    AbortBody,
    DetokenizeBody,
    TokenizeBody,
)
from chitu.http.dialects.openai.tokens import detokenize, tokenize

GENERATION = (COMPLETIONS, CHAT)
UNSERVED: Unserved = (
    (
        (CHAT, TOKENIZE),
        REFUSED,
        (("messages[].images", "give them as parts of the content", ([],)),),
    ),
    (
        (ABORT,),
        REFUSED,
        (("abort_all", "", (False,)),),
    ),
    (
        GENERATION,
        NO_EFFECT,
        (
            ("user", ""),
            ("safety_identifier", ""),
            ("metadata", ""),
            ("store", "nothing is stored"),
            ("service_tier", "there is only one"),
            ("prompt_cache_key", "prompts are cached by their tokens; see `cache_salt`"),
            ("prompt_cache_retention", ""),
            ("prompt_cache_options", ""),
            ("guided_decoding_backend", "there is only one"),
            *UNUSED,
        ),
    ),
    (
        GENERATION,
        REFUSED,
        (
            *SAMPLERS,
            ("structured_outputs.whitespace_pattern", "whitespace is a space, or a line break and indentation"),
            ("structured_outputs.disable_any_whitespace", ""),
            ("structured_outputs.disable_additional_properties", "set it in the schema"),
            ("structured_outputs.structural_tag", ""),
            ("guided_whitespace_pattern", "whitespace is a space, or a line break and indentation"),
            ("structural_tag", ""),
            ("json_schema", "see `guided_json`"),
            ("regex", "see `guided_regex`"),
            ("ebnf", "see `guided_grammar`"),
            ("functions", "", ([],)),
            ("function_call", "", ("none", "auto")),
            ("stop_regex", "", ([], "")),
            ("no_stop_trim", "see `include_stop_str_in_output`", (False,)),
            ("min_new_tokens", "see `min_tokens`", (0,)),
            ("sampling_seed", "see `seed`"),
            ("spaces_between_special_tokens", "", (True,)),
            ("return_tokens_as_token_ids", "see `return_token_ids`", (False,)),
            ("return_hidden_states", "", (False,)),
            ("return_routed_experts", "", (False,)),
            ("custom_params", ""),
            ("vllm_xargs", ""),
            ("kv_transfer_params", "the router pairs P and D itself"),
            ("bootstrap_host", "the router pairs P and D itself"),
            ("bootstrap_port", "the router pairs P and D itself"),
            ("bootstrap_room", "the router pairs P and D itself"),
            ("data_parallel_rank", "the router chooses"),
            ("session_params", ""),
            ("extra_key", "see `cache_salt`", ("",)),
            ("request_id", "use the header X-Request-Id"),
            ("rid", "use the header X-Request-Id"),
            ("moderation", ""),
            ("extra_body", "client libraries merge it into the body themselves", ({},)),
            ("nvext", "give each of its fields at the top", ({},)),
            ("prompt_mode", ""),
        ),
    ),
    (
        (COMPLETIONS,),
        NO_EFFECT,
        (("parallel_tool_calls", "there are no tools"),),
    ),
    (
        (COMPLETIONS,),
        REFUSED,
        (
            ("tools", "chat has them", ([],)),
            ("tool_choice", "", ("none", "auto")),
            ("suffix", "", ("",)),
            ("top_logprobs", "see `logprobs`", (0,)),
            ("prompt_embeds", ""),
        ),
    ),
    (
        (CHAT,),
        REFUSED,
        (
            ("modalities", "", (["text"],)),
            ("audio", ""),
            ("stream_reasoning", "", (True,)),
            ("verbosity", "", ("medium",)),
            ("web_search_options", ""),
            ("search_parameters", ""),
            ("echo", "completions have it", (False,)),
            ("documents", "", ([],)),
            ("mm_processor_kwargs", ""),
            ("media_io_kwargs", ""),
            ("template", "the model's own is used", ("",)),
        ),
    ),
    (
        (CHAT, TOKENIZE),
        REFUSED,
        (("chat_template", "the model's own is used"),),
    ),
    (
        (TOKENIZE,),
        REFUSED,
        (
            ("mm_processor_kwargs", ""),
            ("tool_choice", "", ("auto",)),
            ("reasoning_effort", "see `chat_template_kwargs`"),
        ),
    ),
)


def _completion(head: AnswerHead, parsed: ParsedRequest) -> CompletionFormat:
    return CompletionFormat(head, parsed.options)


def _chat(head: AnswerHead, parsed: ParsedRequest) -> ChatFormat:
    return ChatFormat(head, parsed.options)


DIALECT = Dialect(
    endpoints=(
        Endpoint(
            name="completion",
            path=COMPLETIONS,
            body=CompletionBody,
            read=BodyParser.completion,
            answer=_completion,
            id_prefix="cmpl-",
            reply=CompletionReply,
            operation=("Completion", "create_completion"),
        ),
        Endpoint(
            name="chat",
            path=CHAT,
            body=ChatBody,
            read=BodyParser.chat,
            answer=_chat,
            id_prefix="chatcmpl-",
            reply=ChatReply,
            operation=("Chat completion", "create_chat_completion"),
        ),
        Endpoint("tokenize", TOKENIZE, TokenizeBody, tokenize),
        Endpoint("detokenize", DETOKENIZE, DetokenizeBody, detokenize),
    ),
    unserved=UNSERVED,
    bodies={ABORT: AbortBody},
)
