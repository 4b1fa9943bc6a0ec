"""Every field of the request bodies of the API's routes, and whether it is served, refused or without effect. Pure.

This is the only such list. `body_decoder.py` accepts, refuses or drops fields by it, the OpenAPI document reads it, and
`script/api_reference.py` generates docs/api.md from it. Types and bounds of served fields are in `bodies.py`.
A test checks that the two files agree, and that they cover the fields of OpenAI's own client.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from chitu.grammars.schema import ENFORCED_FORMATS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
ABORT = "/abort_request"
RESPONSES = "/v1/responses"
GENERATION = (COMPLETIONS, CHAT)

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_new_tokens", "max_length", "max_tokens", "max_completion_tokens"),
        ("max_tokens", "max_output_tokens"),
    ),
    **dict.fromkeys(
        ("enable_thinking", "thinking", "think", "preserve_thinking"), ("chat_template_kwargs.enable_thinking",)
    ),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat"), ("repetition_penalty",)),
    **dict.fromkeys(("stop_sequences", "stop_strings"), ("stop",)),
    **dict.fromkeys(("grammar", "gbnf"), ("guided_grammar",)),
    **dict.fromkeys(("format", "response_schema"), ("response_format", "text.format")),
    **dict.fromkeys(("reasoning", "reasoning_effort"), ("reasoning_effort", "reasoning.effort")),
    "temp": ("temperature",),
    "num_return_sequences": ("n",),
    "response_format": ("text.format",),
    "top_n_tokens": ("top_logprobs", "logprobs"),
    "messages": ("input",),
    "input": ("messages", "prompt"),
    "system": ("messages", "instructions"),
}
"""Name of a field in other servers, or at other routes -> what it is called here, of which a route has at most one."""

SERVED: Literal["served"] = "served"
REFUSED: Literal["refused"] = "refused"
NO_EFFECT: Literal["without effect"] = "without effect"

ONE_CALL = (
    "false: the answer ends after its first call, as always if the chat template accepts only one call of an answer "
    "that is sent back (Llama 3's); default true"
)


class Field(NamedTuple):
    name: str
    """Name in the body. A field of a nested object has its path, with `[]` for every entry of a list."""
    routes: tuple[str, ...]
    effect: Literal["served", "refused", "without effect"]
    note: str = ""
    """One line of Markdown: bounds and default of a served field, or the alternative to a refused one."""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, with which a refused field asks for nothing and is accepted."""


def _of(routes: tuple[str, ...], effect: Literal["served", "refused", "without effect"], *rows: Any) -> list[Field]:
    """Return a `Field` per row. A row is a name, its note and, optionally, its neutral values."""
    return [Field(row[0], routes, effect, *row[1:]) for row in rows]


FIELDS: tuple[Field, ...] = (
    *_of(
        (COMPLETIONS, CHAT, RESPONSES, TOKENIZE, DETOKENIZE),
        SERVED,
        ("model", "the served name or the checkpoint's path; default: the only model"),
    ),
    *_of(
        (COMPLETIONS, TOKENIZE),
        SERVED,
        ("prompt", "text; completions also take lists of texts, token ids, or lists of those"),
    ),
    *_of((CHAT, TOKENIZE), SERVED, ("messages", "1 to 2048")),
    *_of(
        (CHAT, TOKENIZE),
        SERVED,
        ("messages[].role", "up to 64 characters; `developer` is the template's `system`"),
        (
            "messages[].content",
            "text, or up to 1024 parts, which a line break joins, as in vLLM and llama.cpp; of an `assistant` also "
            "null or left out",
        ),
        ("messages[].content[].type", "`text`"),
        ("messages[].content[].text", ""),
        ("messages[].name", "up to 64 characters; passed to the chat template, which may ignore it"),
        (
            "messages[].tool_calls",
            "up to 128, of an answer that is sent back; a chat template without calls leaves them out",
        ),
        ("messages[].tool_calls[].id", "up to 16,384 characters"),
        ("messages[].tool_calls[].type", "`function`"),
        ("messages[].tool_calls[].function", ""),
        ("messages[].tool_calls[].function.name", "1 to 128 characters"),
        ("messages[].tool_calls[].function.arguments", "JSON; if not an object, passed to the template as text"),
        ("messages[].tool_call_id", "up to 16,384 characters: the call that a message of the role `tool` answers"),
        ("messages[].reasoning_content", "of an answer that is sent back; passed to the chat template"),
        ("messages[].reasoning", "the same, if `reasoning_content` is missing"),
        ("tools", "up to 128; in the prompt as the model's chat template writes them"),
        ("tools[].type", "`function`"),
        ("tools[].function", ""),
        ("tools[].function.name", "1 to 128 characters, each once"),
        ("tools[].function.description", ""),
        ("tools[].function.parameters", "a JSON schema"),
        (
            "tools[].function.strict",
            "true: arguments of a call that the model chooses to make follow `parameters`, too; not together with "
            "`response_format` and the like. Arguments of an enforced call always follow them",
        ),
    ),
    *_of(
        (CHAT, TOKENIZE),
        NO_EFFECT,
        ("messages[].refusal", "of an answer that is sent back"),
        ("messages[].annotations", "of an answer that is sent back"),
        ("messages[].provider_specific_fields", "of an answer that litellm sends back"),
        ("messages[].type", "lm-eval sends `text`"),
        ("messages[].id", "of an answer that is sent back"),
        ("messages[].thinking_blocks", "of an answer of another model; see `reasoning_content`"),
        ("messages[].reasoning_details", "of an answer of another model; see `reasoning_content`"),
        ("messages[].metadata", ""),
        ("messages[].cache_control", "prompts are cached by their tokens"),
        ("tools[].cache_control", "prompts are cached by their tokens"),
        ("tools[].function.cache_control", "prompts are cached by their tokens"),
        ("messages[].tool_calls[].index", "of a streamed call that is sent back"),
        ("messages[].content[].cache_control", ""),
        ("messages[].content[].prompt_cache_breakpoint", ""),
    ),
    *_of(
        (CHAT, TOKENIZE),
        REFUSED,
        ("messages[].function_call", "unless empty"),
        ("messages[].audio", "unless empty"),
        ("messages[].content[].image_url", ""),
        ("messages[].content[].video_url", ""),
        ("messages[].content[].audio_url", ""),
        ("messages[].content[].input_audio", ""),
        ("messages[].content[].file", ""),
        ("messages[].content[].refusal", ""),
    ),
    *_of(
        GENERATION,
        SERVED,
        (
            "max_tokens",
            "1 to the rest of the context; default: completions 16, chat the rest of the context, or what the bound on "
            "answers leaves to one choice",
        ),
        ("max_completion_tokens", "the same, and overrides it"),
        ("temperature", "0 (greedy) to 2; default 1"),
        ("top_p", "above 0, to 1; default 1"),
        (
            "n",
            "1 to 128, at most 1024 choices over all prompts; choice i has the seed `seed` + i, and equals the answer "
            "to a request with that seed. The prompt is computed and moved once",
        ),
        (
            "stop",
            "text or up to 16 texts of 1 to 256 characters. Special tokens in them are found, too, although the answer "
            "does not show them; a text that is one special token also counts as its id in `stop_token_ids`",
        ),
        ("seed", "64 bits, without the sign; default random"),
        ("stream", "server-sent events"),
        ("stream_options", "with `stream` only"),
        ("stream_options.include_usage", "a last event with the usage"),
        ("stream_options.continuous_usage_stats", "every event has the usage of its choice so far"),
        ("presence_penalty", "-2 to 2, over emitted tokens"),
        ("frequency_penalty", "-2 to 2, over emitted tokens"),
        ("logit_bias", "up to 1024 token ids, each -100 to 100"),
        ("top_k", "1 or more; 0 and -1 are off"),
        ("min_p", "0 to 1"),
        ("repetition_penalty", "above 0, to 10, over prompt and emitted tokens"),
        ("min_tokens", "0 to `max_tokens`: no eos and no stop id before so many tokens"),
        ("stop_token_ids", "up to 256"),
        ("ignore_eos", "not if the answer follows a grammar"),
        ("response_format", "the format of the answer, like each of the next twelve"),
        ("response_format.type", "`text`, `json_object` or `json_schema`"),
        ("response_format.json_schema", "with `type` `json_schema` or `json_object`"),
        (
            "response_format.json_schema.schema",
            "up to 65,536 characters, as all of these; the answer is JSON that it allows, in the order of "
            f"`properties`. Of `format`, {', '.join(sorted(ENFORCED_FORMATS))} hold; any other is an annotation and "
            "has no effect. `oneOf` holds if a type, a constant or its `discriminator` tells its schemas apart. "
            "`nullable: true` beside a `type` allows null. What cannot be "
            "enforced (`not`, `if`, `uniqueItems`, any other `oneOf`, ...) is refused with its place",
        ),
        ("response_format.schema", "the same schema, as other servers take it"),
        ("structured_outputs", "with one of its fields"),
        ("structured_outputs.json", "a JSON schema, as an object or as JSON text"),
        ("structured_outputs.json_object", "`true`: any JSON object"),
        (
            "structured_outputs.regex",
            "the whole answer matches it; syntax of Rust's `regex`, without look-around. `\\d`, `\\w` and `\\s` are "
            "ASCII (in a schema's `pattern` `\\d` and `\\w` are, too); `\\p{...}` has the rest of Unicode",
        ),
        ("structured_outputs.choice", "1 to 1024 texts of up to 1024 characters; the answer is one of them"),
        (
            "structured_outputs.grammar",
            "context-free: llguidance's Lark, where `\\d`, `\\w` and `\\s` are Unicode's, or GBNF of up to 2048 "
            "characters",
        ),
        ("guided_json", "as `structured_outputs.json`"),
        ("guided_regex", "as `structured_outputs.regex`"),
        ("guided_choice", "as `structured_outputs.choice`"),
        ("guided_grammar", "as `structured_outputs.grammar`"),
        ("allowed_token_ids", "1 to 1024: no other token is drawn, not even eos"),
        (
            "bad_words",
            "texts of up to 64 characters and 16 tokens, or lists of 1 to 16 token ids. The answer has none of their "
            "token sequences, of which there are up to 256: a text is two, also after a space (another sequence may "
            "give the same text)",
        ),
        ("include_stop_str_in_output", ""),
        ("skip_special_tokens", "default true"),
        ("return_token_ids", "`token_ids` in every choice"),
        (
            "return_proof",
            "object `chitu` in the answer, or after the last event of a stream's choices, and headers: which P and D, "
            "bytes moved, tokens cached, attempts, times (verify.md)",
        ),
        (
            "return_page_sums",
            "`return_proof` with checksums of pages: those that it leaves on D, and those that P wrote, on both sides; "
            "only with one choice of one prompt",
        ),
        (
            "return_receipt",
            "`return_proof` with all that the tokens depend on, for `chitu replay`; only with one choice of one prompt",
        ),
        (
            "truncate_prompt_tokens",
            "1 to the context: only the last so many tokens of each prompt (a bos added by the tokenizer stays); "
            "-1: as many as leave room for `max_tokens`",
        ),
        (
            "priority",
            "32 bits, default 0, the lowest is first (as in vLLM): on P and D it moves a request ahead of those that "
            "came up to a quarter of `deadlines.queue_s` before it (half of that at -1), or back, so that none waits "
            "for ever; the last is retracted first. Below `router.min_priority` (default 0): 400",
        ),
        (
            "prompt_logprobs",
            "0 to 20: for each prompt token except the first, its logprob and so many likeliest, in vLLM's format; "
            "not with `stream`; the prompt is not read from the cache",
        ),
        ("cache_salt", "up to 256 characters: prompts share cached pages only if it is equal"),
        ("cache_prompt", "false: uses no cached pages and leaves none; default true"),
    ),
    *_of(
        (COMPLETIONS, CHAT, TOKENIZE),
        SERVED,
        ("add_special_tokens", "default: true for prompts, false for chats (the template has them)"),
    ),
    *_of(
        (COMPLETIONS,),
        SERVED,
        ("echo", "the prompt before the text, and its logprobs before the others"),
        ("logprobs", "0 to 20: with each token its logprob and so many of the likeliest; `false`: none"),
        (
            "best_of",
            "`n` to 128, at most 1024 over all prompts: so many choices are generated, and the `n` with the highest "
            "logprob per token are returned, best first; all count in the usage. Not above `n` with `stream`",
        ),
    ),
    *_of(
        (CHAT, TOKENIZE),
        SERVED,
        (
            "chat_template_kwargs",
            "up to 64 variables of the chat template, such as `enable_thinking`; an unused one gets a warning",
        ),
    ),
    *_of(
        (CHAT,),
        SERVED,
        (
            "tool_choice",
            "`auto` (default; text that the model writes as a call of one of `tools` is a call), `none` (the prompt "
            "has no tools), `required` or a function: the answer is a call that follows its schema, or several with "
            "`required`",
        ),
        ("tool_choice.type", "`function`"),
        ("tool_choice.function", ""),
        ("tool_choice.function.name", "name of one of `tools`"),
        ("parallel_tool_calls", ONE_CALL),
        (
            "reasoning_effort",
            "none, minimal, low, medium, high, xhigh or max, for a chat template that reads it, or `enable_thinking` "
            "(all but `none` are true)",
        ),
        (
            "separate_reasoning",
            "false: reasoning stays in the content, with its marks, and a grammar holds from the first token; "
            "default true",
        ),
        ("include_reasoning", "false: `reasoning_content` is left out; default true"),
        ("logprobs", "`true`: with each token its logprob"),
        ("top_logprobs", "0 to 20 most likely tokens, with `logprobs`"),
    ),
    *_of(
        (TOKENIZE,),
        SERVED,
        ("add_generation_prompt", "for messages; default true: with the tokens that precede the model's answer"),
        ("return_token_strs", "`token_strs`: each token's text"),
    ),
    *_of(
        (RESPONSES,),
        SERVED,
        ("input", "text, or 1 to 2048 items: all turns, since nothing is stored"),
        ("input[].type", "`message` (default), `function_call`, `function_call_output`, `reasoning`"),
        ("input[].role", "of a message"),
        ("input[].content", "of a message or reasoning: text, or up to 1024 parts, which a line break joins"),
        ("input[].content[].type", "`input_text`, `output_text`, `reasoning_text`, `summary_text`, `text`"),
        ("input[].content[].text", ""),
        ("input[].call_id", "of a call and its output"),
        ("input[].name", "of a call"),
        ("input[].arguments", "of a call, JSON"),
        ("input[].output", "of a call's output: text, or parts"),
        ("input[].output[].type", "as of content"),
        ("input[].output[].text", ""),
        ("instructions", "a system message before `input`"),
        ("max_output_tokens", "1 to the rest of the context, which is the default"),
        ("temperature", "0 (greedy) to 2; default 1"),
        ("top_p", "above 0, to 1; default 1"),
        ("stream", "server-sent events, each with a `sequence_number`"),
        ("tools", "up to 128 functions"),
        ("tools[].type", "`function`"),
        ("tools[].name", "1 to 128 characters, each once"),
        ("tools[].description", ""),
        ("tools[].parameters", "a JSON schema"),
        ("tools[].strict", "as of a chat"),
        ("tool_choice", "as of a chat"),
        ("tool_choice.type", "`function`"),
        ("tool_choice.name", "name of one of `tools`"),
        ("parallel_tool_calls", ONE_CALL),
        ("reasoning", ""),
        ("reasoning.effort", "as `reasoning_effort` of a chat"),
        ("text", ""),
        ("text.format", ""),
        ("text.format.type", "`text`, `json_object` or `json_schema`"),
        ("text.format.schema", "of `json_schema` or `json_object`: the answer follows it"),
        ("metadata", "up to 16 texts; repeated in the answer"),
        ("chat_template_kwargs", "as of a chat"),
        ("return_proof", "as of a chat; a stream has it in its last event"),
        ("return_receipt", "as of a chat"),
    ),
    *_of(
        (RESPONSES,),
        NO_EFFECT,
        *(
            (f"input[].{name}", "of an answer that is sent back")
            for name in ("id", "status", "phase", "caller", "namespace", "summary", "encrypted_content")
        ),
        *(
            (f"input[].{parts}[].{name}", "")
            for parts in ("content", "output")
            for name in ("annotations", "logprobs", "prompt_cache_breakpoint", "cache_control")
        ),
        ("input[].metadata", ""),
        ("input[].cache_control", "prompts are cached by their tokens"),
        ("tools[].cache_control", "prompts are cached by their tokens"),
        ("reasoning.summary", "reasoning is returned as it is"),
        ("reasoning.generate_summary", "the same"),
        ("text.verbosity", ""),
        ("text.format.name", ""),
        ("text.format.description", ""),
        ("text.format.strict", "the answer always follows the schema"),
        ("user", ""),
        ("safety_identifier", ""),
        ("service_tier", "there is only one"),
        ("prompt_cache_key", "prompts are cached by their tokens"),
        ("prompt_cache_retention", ""),
        ("prompt_cache_options", ""),
        ("stream_options", "nothing is padded"),
    ),
    *_of(
        (RESPONSES,),
        REFUSED,
        ("store", "nothing is stored", (False,)),
        ("previous_response_id", "nothing is stored: send the turns as `input`"),
        ("conversation", "nothing is stored: send the turns as `input`"),
        ("background", "", (False,)),
        ("background_options", ""),
        ("prompt", ""),
        ("include", "", ([],)),
        ("truncation", "", ("disabled",)),
        ("max_tool_calls", ""),
        ("top_logprobs", "chat has them", (0,)),
        ("moderation", ""),
        ("image", ""),
        ("access_programs", ""),
        ("context_management", "", ([],)),
        ("input[].async", ""),
        ("input[].content[].image_url", ""),
        ("input[].content[].file_id", ""),
        ("input[].content[].detail", ""),
        ("input[].content[].refusal", ""),
        ("tools[].allowed_callers", ""),
        ("tools[].async", ""),
        ("tools[].defer_loading", ""),
        ("tools[].output_schema", ""),
        ("reasoning.context", ""),
        ("reasoning.mode", ""),
    ),
    *_of((ABORT,), SERVED, ("rid", "the X-Request-Id, or the `id` of the answer")),
    *_of((ABORT,), REFUSED, ("abort_all", "", (False,))),
    *_of((DETOKENIZE,), SERVED, ("tokens", "up to 262,144 token ids"), ("skip_special_tokens", "default false")),
    *_of(
        GENERATION,
        NO_EFFECT,
        ("user", ""),
        ("safety_identifier", ""),
        ("metadata", ""),
        ("store", "nothing is stored"),
        ("service_tier", "there is only one"),
        ("prompt_cache_key", "prompts are cached by their tokens; see `cache_salt`"),
        ("prompt_cache_retention", ""),
        ("prompt_cache_options", ""),
        ("guided_decoding_backend", "there is only one"),
        ("structured_outputs.disable_fallback", "there is only one backend"),
        ("response_format.json_schema.name", ""),
        ("response_format.json_schema.description", ""),
        ("response_format.json_schema.strict", "the answer always follows the schema"),
        ("stream_options.include_obfuscation", "nothing is padded"),
    ),
    *_of(
        GENERATION,
        REFUSED,
        (
            "structured_outputs.whitespace_pattern",
            "whitespace is a space, or a line break and indentation",
        ),
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
    *_of(
        (COMPLETIONS,),
        NO_EFFECT,
        ("parallel_tool_calls", "there are no tools"),
    ),
    *_of(
        (COMPLETIONS,),
        REFUSED,
        ("tools", "chat has them", ([],)),
        ("tool_choice", "", ("none", "auto")),
        ("suffix", "", ("",)),
        ("top_logprobs", "see `logprobs`", (0,)),
        ("prompt_embeds", ""),
    ),
    *_of(
        (CHAT,),
        REFUSED,
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
    *_of(
        (CHAT, TOKENIZE),
        REFUSED,
        ("chat_template", "the model's own is used"),
        ("continue_final_message", "", (False,)),
    ),
    *_of((CHAT,), REFUSED, ("add_generation_prompt", "", (True,))),
    *_of((TOKENIZE,), REFUSED, ("mm_processor_kwargs", "")),
)


def fields_of(route: str) -> dict[str, Field]:
    """Return the fields of the route by name."""
    return {field.name: field for field in FIELDS if route in field.routes}


def is_neutral(field: Field, value: Any) -> bool:
    """Return whether a refused field asks for nothing with this value. As in JSON, 0 is not false."""
    return value is None or any(
        isinstance(value, bool) == isinstance(known, bool) and value == known for known in field.neutral
    )
