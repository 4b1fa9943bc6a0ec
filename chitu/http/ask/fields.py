"""What becomes of each field that clients send: the table behind the decoder, the OpenAPI document and docs/api.md.
Pure.

Fields that a route reads are those of its struct (`bodies.py`). `UNSERVED` has the others: refused ones with the
neutral values that ask for nothing, and those without effect, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from chitu.http.ask.bodies import (
    ABORT,
    BATCHES,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    NO_EFFECT,
    REFUSED,
    RERANK,
    RESPONSES,
    SCORE,
    SERVED,
    TOKENIZE,
    ChatBody,
    CompletionBody,
    Effect,
)
from chitu.http.batch.bodies import BatchBody
from chitu.http.dialects.anthropic.bodies import COUNT_TOKENS, MESSAGES, CountTokensBody, MessagesBody
from chitu.http.dialects.openai.bodies import AbortBody, DetokenizeBody, TokenizeBody
from chitu.http.dialects.pooled.bodies import EmbeddingsBody, RerankBody, ScoreBody
from chitu.http.dialects.responses.bodies import ResponsesBody
from chitu.http.fleet.bodies import DrainBody, PauseBody, ResumeBody, RoleBody, SnapshotBody, WeightsBody

BODIES: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesBody,
    COUNT_TOKENS: CountTokensBody,
    TOKENIZE: TokenizeBody,
    DETOKENIZE: DetokenizeBody,
    ABORT: AbortBody,
    BATCHES: BatchBody,
    EMBEDDINGS: EmbeddingsBody,
    SCORE: ScoreBody,
    RERANK: RerankBody,
    "/admin/drain": DrainBody,
    "/admin/role": RoleBody,
    "/admin/weights": WeightsBody,
    "/admin/pause": PauseBody,
    "/admin/resume": ResumeBody,
    "/admin/snapshot": SnapshotBody,
}
"""Bodies that clients and operators send, by route."""
GENERATION = (COMPLETIONS, CHAT)
ANTHROPIC = (MESSAGES, COUNT_TOKENS)
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_new_tokens", "max_length", "max_tokens", "max_completion_tokens"),
        ("max_tokens", "max_output_tokens"),
    ),
    **dict.fromkeys(
        ("enable_thinking", "thinking", "think", "preserve_thinking"), ("chat_template_kwargs.enable_thinking",)
    ),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat"), ("repetition_penalty",)),
    **dict.fromkeys(("stop", "stop_sequences", "stop_strings"), ("stop", "stop_sequences")),
    **dict.fromkeys(("grammar", "gbnf"), ("guided_grammar",)),
    **dict.fromkeys(("format", "response_schema"), ("response_format", "text.format", "output_config.format")),
    **dict.fromkeys(("reasoning", "reasoning_effort"), ("reasoning_effort", "reasoning.effort", "thinking")),
    "temp": ("temperature",),
    "num_return_sequences": ("n",),
    "response_format": ("text.format", "output_config.format"),
    "output_format": ("response_format", "text.format", "output_config.format"),
    "top_n_tokens": ("top_logprobs", "logprobs"),
    "messages": ("input",),
    "input": ("messages", "prompt"),
    "system": ("messages", "instructions"),
    "instructions": ("system", "messages"),
}
"""Name of a field in other servers, or at other routes -> what it is called here, of which a route has at most one."""
TEXT_ONLY = "this server serves text; of a model that also takes images or sound, its text part"
UNSERVED: tuple[tuple[tuple[str, ...], Effect, tuple[_Row, ...]], ...] = (
    ((EMBEDDINGS, SCORE, RERANK), NO_EFFECT, (("user", ""),)),
    (
        (CHAT, TOKENIZE),
        REFUSED,
        (
            ("messages[].content[].image_url", TEXT_ONLY),
            ("messages[].content[].video_url", TEXT_ONLY),
            ("messages[].content[].audio_url", TEXT_ONLY),
            ("messages[].content[].input_audio", TEXT_ONLY),
            ("messages[].content[].file", ""),
            ("messages[].content[].refusal", ""),
        ),
    ),
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
        ),
    ),
    (
        (RESPONSES,),
        REFUSED,
        (
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
            ("input[].content[].image_url", TEXT_ONLY),
            ("input[].content[].file_id", ""),
            ("input[].content[].detail", ""),
            ("input[].content[].refusal", ""),
            ("tools[].async", ""),
            ("reasoning.context", ""),
            ("reasoning.mode", ""),
        ),
    ),
    (
        ANTHROPIC,
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
        ),
    ),
    (
        ANTHROPIC,
        REFUSED,
        (
            ("mcp_servers", "", ([],)),
            ("billing_policy", ""),
            ("compaction", ""),
            ("messages[].content[].source", "images and documents are not supported yet"),
            ("messages[].content[].title", "documents are not supported yet"),
            ("messages[].content[].context", "documents are not supported yet"),
            ("messages[].content[].file_id", "files are not supported yet"),
            ("messages[].content[].transformations", "images are not supported yet"),
            ("messages[].content[].content[].source", "images and documents are not supported yet"),
            ("messages[].content[].content[].title", "documents are not supported yet"),
            ("messages[].content[].content[].context", "documents are not supported yet"),
            ("messages[].content[].content[].content", "search results are not supported yet"),
            ("messages[].content[].content[].transformations", "images are not supported yet"),
            ("messages[].content[].content[].tool_name", ""),
            ("messages[].content[].content[].tabs", ""),
            ("messages[].content[].content[].state_changes", ""),
        ),
    ),
    (
        (MESSAGES,),
        REFUSED,
        (
            ("container", ""),
            ("inference_geo", ""),
            ("fallbacks", "", ([],)),
            ("fallback_credit_token", ""),
            ("thread", ""),
        ),
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
        ),
    ),
    (
        GENERATION,
        REFUSED,
        (
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
            ("use_beam_search", "", (False,)),
            ("length_penalty", "", (1,)),
            ("early_stopping", "", (False,)),
            ("spaces_between_special_tokens", "", (True,)),
            ("return_tokens_as_token_ids", "see `return_token_ids`", (False,)),
            ("return_hidden_states", "", (False,)),
            ("return_routed_experts", "", (False,)),
            ("logits_processors", "", ([],)),
            ("custom_logit_processor", ""),
            ("custom_params", ""),
            ("vllm_xargs", ""),
            ("kv_transfer_params", "the router pairs P and D itself"),
            ("bootstrap_host", "the router pairs P and D itself"),
            ("bootstrap_port", "the router pairs P and D itself"),
            ("bootstrap_room", "the router pairs P and D itself"),
            ("data_parallel_rank", "the router chooses"),
            ("lora_path", ""),
            ("session_params", ""),
            ("extra_key", "see `cache_salt`", ("",)),
            ("request_id", "use the header X-Request-Id"),
            ("rid", "use the header X-Request-Id"),
            ("repetition_detection", ""),
            ("moderation", ""),
            ("extra_body", "client libraries merge it into the body themselves", ({},)),
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
            ("prediction", ""),
            ("thinking_token_budget", ""),
            ("stream_reasoning", "", (True,)),
            ("verbosity", "", ("medium",)),
            ("web_search_options", ""),
            ("echo", "completions have it", (False,)),
            ("documents", "", ([],)),
            ("mm_processor_kwargs", ""),
            ("media_io_kwargs", ""),
        ),
    ),
    (
        (CHAT, TOKENIZE),
        REFUSED,
        (
            ("chat_template", "the model's own is used"),
            ("continue_final_message", "", (False,)),
        ),
    ),
    (
        (CHAT,),
        REFUSED,
        (("add_generation_prompt", "", (True,)),),
    ),
    (
        (TOKENIZE,),
        REFUSED,
        (("mm_processor_kwargs", ""),),
    ),
)


class Field(NamedTuple):
    name: str
    """Name in the body. A field of a nested object has its path, with `[]` for every entry of a list."""
    effect: Effect
    note: str = ""
    """One line of Markdown: meaning of a served field, the reason of another, or the alternative to it."""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, with which a refused field asks for nothing and is accepted."""


_Row = tuple[str, str] | tuple[str, str, tuple[Any, ...]]
"""Name, note and, optionally, neutral values."""


def _in_struct(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a body's struct and of the objects in it, with what their metadata says."""
    for field in msgspec.structs.fields(struct):
        name = prefix + field.encode_name
        told: dict[str, Any] = {}
        for meta in getattr(field.type, "__metadata__", ()):
            told |= {"note": meta.description or told.get("note", ""), **(meta.extra or {})}
        yield Field(name, told.get("effect", SERVED), told.get("note", ""))
        for nested, dots in _structs_in(field.type, ""):
            yield from _in_struct(nested, f"{name}{dots}.")


def _structs_in(kind: Any, dots: str) -> Iterator[tuple[type[msgspec.Struct], str]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, dots
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    for each in inner:
        yield from _structs_in(each, dots + "[]" if get_origin(kind) is list else dots)


@cache
def fields_of(route: str) -> dict[str, Field]:
    """Return the fields of the route by name."""
    struct = BODIES.get(route)
    fields = {field.name: field for field in _in_struct(struct)} if struct is not None else {}
    for routes, effect, rows in UNSERVED:
        if route in routes:
            fields |= {row[0]: Field(row[0], effect, *row[1:]) for row in rows}
    return fields


def is_neutral(field: Field, value: Any) -> bool:
    """Return whether a refused field asks for nothing with this value. As in JSON, 0 is not false."""
    return value is None or any(
        isinstance(value, bool) == isinstance(known, bool) and value == known for known in field.neutral
    )
