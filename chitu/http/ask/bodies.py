"""Request bodies of completions and chats, and what those of other routes have in common with them: each field that a
route reads, with its type, bounds and description. Pure.

A struct is the one place of a served field: `decoder.py` decodes bodies into it, which checks the bounds; the OpenAPI
document and docs/api.md (`script/api_reference.py`) are made from it. `null` is the same as leaving a field out. Other
APIs, the operator's routes and batches have files of their own (`bodies.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from chitu.grammars.schema import ENFORCED_FORMATS
from chitu.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
)

MAX_N = 128
MAX_STOPS = 128
MAX_STOP_CHARS = 1024
"""Characters of one stop string."""
MAX_STOP_TOKEN_IDS = 256
"""Stop token ids that a client may give. An instance may get eos ids in addition."""
MAX_WORD_CHARS = 64
MAX_CHOICES = 1024
"""Entries of `guided_choice`."""
MAX_CHOICE_CHARS = 1024
MAX_SALT_CHARS = 256
"""Characters of `cache_salt`."""
MAX_MESSAGES = 16_384
MAX_PARTS = 4096
"""Parts of one message's content."""
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 256
"""Characters of a message's `name`."""
MAX_TOOLS = 4096
"""Tools that one chat offers."""
MAX_TOOL_CALLS = 1024
"""Tool calls of one message."""
MAX_TOOL_NAME_CHARS = 256
MAX_ID_CHARS = 1 << 14
"""Characters of a tool call's id: some providers put a signature of thousands of characters into it."""
MAX_TEMPLATE_KWARGS = 64
"""Variables for the chat template that one request gives."""
MAX_METADATA = 1024
"""Entries of `metadata` that an answer repeats."""
MAX_PROMPTS = 2048
"""Prompts in one body, and choices over all of them; each choice is a request of its own."""
MAX_TOKENS = 1 << 18
"""Token ids that `/detokenize` accepts. `/tokenize` returns at most this many, or `max_model_len` if that is more."""
TOOL_CHOICES = ("auto", "none", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Reasoning efforts of OpenAI and vLLM."""
REPLACED = "replaced by a placeholder in earlier turns and beside results of tools, refused in a last turn that asks"
"""What becomes of a part that is neither text nor an image (`parts.py`)."""
SEEN = "of the user and of results of tools, if the model has vision; else replaced by a placeholder"
"""What becomes of an image."""
VIDEO_URL = (
    f"of a video: a data URL (`data:video/jpeg;base64,` with frames between commas, too), or as of an image; {SEEN}"
)
IMAGE_URL = f"of an image: a data URL, or a URL of the router's `images.hosts` or `images.dir`; {SEEN}"
LARGE_BODY_BYTES = 16 << 10
"""A larger body is checked before it is decoded, and is processed in a separate process (`reader.py`)."""


Effect = Literal["served", "refused", "without effect"]
SERVED: Effect = "served"
REFUSED: Effect = "refused"
NO_EFFECT: Effect = "without effect"
_TEXT = {"type": "string"}
CONTENT = msgspec.Meta(extra={"is_content": True})
"""Mark of a field that may make a body large."""


def note(text: str) -> msgspec.Meta:
    """Return the description of a served field: one line of Markdown about its bounds, default and meaning."""
    return msgspec.Meta(description=text)


def ignored(reason: str = "") -> msgspec.Meta:
    """Mark a field that a struct has only because its object has no other unknown fields: it is without effect."""
    told = f"Without effect: {reason}" if reason else "Without effect"
    return msgspec.Meta(description=told, extra={"effect": NO_EFFECT, "note": reason})


def documented(**schema: Any) -> msgspec.Meta:
    """Return metadata for the OpenAPI document only: the request checks the value."""
    return msgspec.Meta(extra_json_schema=schema)


Unread = msgspec.Raw | msgspec.UnsetType
"""A field that stays undecoded JSON, because its value is not used."""
_UnlessEmpty = Annotated[
    Unread,
    msgspec.Meta(description="Not supported yet, unless empty", extra={"effect": REFUSED, "note": "unless empty"}),
]
Uncached = Annotated[Unread, ignored("prompts are cached by their tokens")]
SentBack = Annotated[Unread, ignored("of an answer that is sent back")]
_OfAnotherModel = Annotated[Unread, ignored("of an answer of another model; see `reasoning_content`")]
Without = Annotated[Unread, ignored()]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str | None,
        note("the served name, the checkpoint's path, or the name of a LoRA adapter; default: the served name"),
    ] = None


# ------------------------------------------------------------------------------------------ completions and chats alike


TokenCount = Annotated[int, documented(minimum=-1)]
"""1 or more; -1 is no limit. Checked with the context (`sampling.py`)."""
Temperature = Annotated[
    Annotated[float, msgspec.Meta(ge=0, le=2)] | None,
    note("0 (greedy) to 2; default: the model's (`model.sampling_defaults`), else 1"),
]
TopP = Annotated[Annotated[float, msgspec.Meta(gt=0, le=1)] | None, note("above 0, to 1; default: the model's, else 1")]
TopK = Annotated[
    Annotated[int, msgspec.Meta(ge=-1)] | None, note("1 or more; 0 and -1 are off; default: the model's, else off")
]
_NumChoices = Annotated[int, msgspec.Meta(ge=1, le=MAX_N)]
_NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[Annotated[float, msgspec.Meta(ge=-2, le=2)] | None, note("-2 to 2, over emitted tokens")]
StopText = Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS, extra_json_schema={"minLength": 1})]
_BadWord = Annotated[str, msgspec.Meta(max_length=MAX_WORD_CHARS, extra_json_schema={"pattern": "\\S"})]
_BadTokens = Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
_TokenIdText = Annotated[str, documented(pattern="^[0-9]+$")]
TokenId = Annotated[int, documented(minimum=0)]
_Bias = Annotated[float, documented(minimum=-100, maximum=100)]
FormatType = Annotated[Literal["text", "json_object", "json_schema"], note("`text`, `json_object` or `json_schema`")]
ObjectText = Annotated[Unread, documented(type="object")]
_Schema = Annotated[Unread, documented(anyOf=[{"type": "object"}, {"type": "string"}])]
_Choices = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=MAX_CHOICE_CHARS)]], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)
]
GrammarText = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]


Speculation = Annotated[
    Literal["auto", "off"] | None,
    note(
        "`off`: no tokens are drafted ahead for this request; `auto` (default): as `scheduler.speculation` says. The "
        "tokens are the same"
    ),
]


class PredictionPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[Literal["text"], note("`text`")]
    text: str
    prompt_cache_breakpoint: Without = msgspec.UNSET


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[Literal["content"], note("`content`")]
    content: Annotated[
        str | Annotated[list[PredictionPart], msgspec.Meta(max_length=MAX_PARTS)],
        note("text, or up to 4096 parts of one text"),
    ]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, note("a last event with the usage")] = None
    continuous_usage_stats: Annotated[bool | None, note("every event has the usage of its choice so far")] = None
    include_obfuscation: Annotated[Unread, ignored("nothing is padded")] = msgspec.UNSET


_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class SLOTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttft_s: Annotated[_Seconds | None, note("seconds to the first token")] = None
    tpot_s: Annotated[_Seconds | None, note("seconds from token to token")] = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Annotated[
        ObjectText,
        note(
            "up to 65,536 characters, as all of these; the answer is JSON that it allows, in the order of "
            f"`properties`. Of `format`, {', '.join(sorted(ENFORCED_FORMATS))} hold; any other is an annotation and "
            "has no effect. `oneOf` holds if a type, a constant or its `discriminator` distinguishes its schemas. "
            "`nullable: true` beside a `type` allows null. Keywords that cannot be "
            "enforced (`not`, `if`, `uniqueItems`, any other `oneOf`, ...) are rejected with their place"
        ),
    ] = msgspec.UNSET
    name: Annotated[str | None, ignored()] = None
    description: Annotated[str | None, ignored()] = None
    strict: Annotated[bool | None, ignored("the answer always follows the schema")] = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: FormatType
    json_schema: Annotated[JsonSchemaFormat | None, note("with `type` `json_schema` or `json_object`")] = None
    schema: Annotated[ObjectText, note("the same schema, as in other servers")] = msgspec.UNSET


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    json: Annotated[_Schema, note("a JSON schema, as an object or as JSON text")] = msgspec.UNSET
    json_object: Annotated[bool | None, note("`true`: any JSON object")] = None
    regex: Annotated[
        GrammarText | None,
        note(
            "the whole answer matches it; syntax of Rust's `regex`, without look-around. `\\d`, `\\w` and `\\s` are "
            "ASCII (in a schema's `pattern` `\\d` and `\\w` are, too); `\\p{...}` has the rest of Unicode"
        ),
    ] = None
    choice: Annotated[_Choices | None, note("1 to 1024 texts of up to 1024 characters; the answer is one of them")] = (
        None
    )
    grammar: Annotated[
        GrammarText | None,
        note(
            "context-free: llguidance's Lark, where `\\d`, `\\w` and `\\s` are Unicode's, or GBNF of up to 2048 "
            "characters"
        ),
    ] = None
    disable_fallback: Annotated[Unread, ignored("there is only one backend")] = msgspec.UNSET


class GenerationBody(Body, kw_only=True):
    """Fields that completions and chats share. Names of extensions are vLLM's and SGLang's; `cache_prompt` is
    llama.cpp's."""

    max_tokens: Annotated[
        TokenCount | None,
        note(
            "1 to the rest of the context, or -1: all of it; default: completions 16, chat the rest of the context, or "
            "what the bound on answers leaves to one choice"
        ),
    ] = None
    """Without effect beside `max_completion_tokens`, also if it is out of range."""
    max_completion_tokens: Annotated[TokenCount | None, note("the same, and overrides it")] = None
    temperature: Temperature = None
    top_p: TopP = None
    n: Annotated[
        _NumChoices | None,
        note(
            "1 to 128, at most 2048 choices over all prompts; choice i has the seed `seed` + i, and equals the answer "
            "to a request with that seed. The prompt is computed and moved once"
        ),
    ] = None
    stop: Annotated[
        StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None,
        note(
            "text or up to 128 texts of 1 to 1024 characters. Special tokens in them are found, too, although the "
            "answer does not show them; a text that is one special token also counts as its id in `stop_token_ids`"
        ),
    ] = None
    seed: Annotated[
        Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None,
        note("64 bits, without the sign; default random"),
    ] = None
    stream: Annotated[bool | None, note("server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, note("with `stream` only")] = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    logit_bias: Annotated[
        Annotated[dict[_TokenIdText, _Bias], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None,
        note("up to 1024 token ids, each -100 to 100"),
    ] = None
    top_k: TopK = None
    min_p: Annotated[Annotated[float, msgspec.Meta(ge=0, le=1)] | None, note("0 to 1")] = None
    repetition_penalty: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=10)] | None,
        note("above 0, to 10, over prompt and emitted tokens; default: the model's, else 1"),
    ] = None
    min_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        note("0 to `max_tokens`: no eos and no stop id before so many tokens"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None, note("up to 256")
    ] = None
    ignore_eos: Annotated[bool | None, note("not if the answer follows a grammar")] = None
    response_format: Annotated[
        ResponseFormat | None,
        note(
            "the format of the answer, like `structured_outputs` and each `guided_` field. Beside `tools`, the answer "
            "is a call or follows it"
        ),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, note("with one of its fields")] = None
    guided_json: Annotated[_Schema, note("as `structured_outputs.json`")] = msgspec.UNSET
    guided_regex: Annotated[GrammarText | None, note("as `structured_outputs.regex`")] = None
    guided_choice: Annotated[_Choices | None, note("as `structured_outputs.choice`")] = None
    guided_grammar: Annotated[GrammarText | None, note("as `structured_outputs.grammar`")] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], msgspec.Meta(max_length=MAX_ALLOWED_TOKEN_IDS, extra_json_schema={"minItems": 1})]
        | None,
        note("1 to 1024: no other token is drawn, not even eos"),
    ] = None
    bad_words: Annotated[
        Annotated[list[_BadWord | _BadTokens], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None,
        note(
            "texts of up to 64 characters and 16 tokens, or lists of 1 to 16 token ids. The answer has none of their "
            "token sequences, of which there are up to 256: a text is two, also after a space (another sequence may "
            "give the same text)"
        ),
    ] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Annotated[bool | None, note("default true")] = None
    add_special_tokens: Annotated[
        bool | None, note("default: true for prompts, false for chats (the template has them)")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=-1)] | None,
        note(
            "1 to the context: only the last so many tokens of each prompt (a bos added by the tokenizer stays); "
            "-1: as many as leave room for `max_tokens`"
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        note("`token_ids` in every choice; with `return_proof` in its choices, too, with `prompt_token_ids`"),
    ] = None
    return_proof: Annotated[
        bool | None,
        note(
            "object `chitu` in the answer, or after the last event of a stream's choices, and headers: which P and D, "
            "bytes moved, tokens cached, attempts, times (verify.md)"
        ),
    ] = None
    return_page_sums: Annotated[
        bool | None,
        note(
            "`return_proof` with checksums of pages: those that it leaves on D, and those that P wrote, on both sides; "
            "only with one choice of one prompt"
        ),
    ] = None
    return_receipt: Annotated[
        bool | None,
        note(
            "`return_proof` with all that the tokens depend on, for `chitu replay`; only with one choice of one prompt"
        ),
    ] = None
    priority: Annotated[
        Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
        note(
            "32 bits, default 0, the lowest is first (as in vLLM): on P and D it moves a request ahead of those that "
            "came up to a quarter of `deadlines.queue_s` before it (half of that at -1), or back, so that none waits "
            "for ever; the last is retracted first. Below `router.min_priority` (default 0): 400"
        ),
    ] = None
    slo: Annotated[
        SLOTargets | None,
        note(
            "what the router serves the request by where it has a choice of ways, in place of `router.slo`; nothing is "
            "refused for it"
        ),
    ] = None
    prompt_logprobs: Annotated[
        _NumLogprobs | bool | None,
        note(
            "0 to 20: for each prompt token except the first, its logprob and so many likeliest, in vLLM's format; "
            "not with `stream`; the prompt is not read from the cache"
        ),
    ] = None
    cache_salt: Annotated[
        Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None,
        note("up to 256 characters: prompts share cached pages only if it is equal"),
    ] = None
    cache_prompt: Annotated[bool | None, note("false: uses no cached pages and leaves none; default true")] = None
    prediction: Annotated[
        Prediction | None,
        note(
            "text that the answer may have, as a file that comes back with few changes: tokens are drafted from it, so "
            "a right one makes the answer faster and none changes it; at most as many tokens as the context. With "
            "every other field"
        ),
        CONTENT,
    ] = None
    speculation: Speculation = None


# ---------------------------------------------------------------------------------------------------------- completions


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0})
PROMPTS = [_TEXT, _list_of(_TEXT), _TOKEN_IDS, _list_of(_TOKEN_IDS)]


class CompletionBody(GenerationBody, kw_only=True):
    prompt: Annotated[
        msgspec.Raw,
        documented(anyOf=PROMPTS),
        note("text, a list of texts, a list of token ids, or a list of such lists"),
        CONTENT,
    ] = msgspec.field(default_factory=msgspec.Raw)
    """Undecoded JSON, because it can be as large as the body, and its first characters decide how it is decoded
    (`prompts_of`)."""
    images: Annotated[
        list[str] | None,
        note("URLs of the images of one prompt of token ids, which has the rows of each: what `chitu replay` sends"),
        CONTENT,
    ] = None
    echo: Annotated[bool | None, note("the prompt before the text, and its logprobs before the others")] = None
    logprobs: Annotated[
        _NumLogprobs | bool | None,
        note("0 to 20: with each token its logprob and so many of the likeliest; `false`: none"),
    ] = None
    best_of: Annotated[
        _NumChoices | None,
        note(
            "`n` to 128, at most 2048 over all prompts: so many choices are generated, and the `n` with the highest "
            "logprob per token are returned, best first; all count in the usage. Not above `n` with `stream`"
        ),
    ] = None


# ---------------------------------------------------------------------------------------------------------------- chats


AllowedMode = Annotated[
    Literal["auto", "required"], note("`auto` (default), or `required`: the answer is a call, or several")
]
_FunctionType = Annotated[Literal["function"], note("`function`")]
ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
_NameOfTool = Annotated[ToolName, note("1 to 256 characters, each once")]
NameOfChosen = Annotated[str, note("name of one of `tools`")]
CallId = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]
Parameters = Annotated[dict[str, Any] | None, note("a JSON schema")]
RoleText = Annotated[str, msgspec.Meta(max_length=MAX_ROLE_CHARS)]


_Replaced = Annotated[Unread, ignored(REPLACED)]


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=["text"]), note("`text`")]
    text: str


class ImageAtURL(msgspec.Struct):
    url: str


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        str,
        note(
            "`text`, `image_url`, `video_url`, `refusal`, or `file` with text in it; in an answer that is sent back "
            "also `thinking`, which is its reasoning, and `redacted_thinking`, which is left out of the prompt; any "
            f"other is {REPLACED}"
        ),
    ]
    text: str | None = None
    refusal: Annotated[str | None, note("of `refusal`: text")] = None
    file: Annotated[dict[str, Any] | None, note("of `file`: `file_data`, base64 or a data URL, and `filename`")] = None
    thinking: Annotated[
        str | list[ReasoningText] | None, note("of `thinking`; passed to the chat template as the model's reasoning")
    ] = None
    signature: Annotated[Unread, ignored("nothing is signed")] = msgspec.UNSET
    data: Annotated[Unread, ignored("nothing is signed")] = msgspec.UNSET
    closed: Annotated[Unread, ignored("Mistral's: reasoning that is sent back has ended")] = msgspec.UNSET
    image_url: Annotated[Unread, note(f"{IMAGE_URL}. Text, or an object with `url`; `detail` has no effect")] = (
        msgspec.UNSET
    )
    video_url: Annotated[Unread, note(f"{VIDEO_URL}. Text, or an object with `url`")] = msgspec.UNSET
    fps: Annotated[
        float | None,
        note("of `video_url`: frames to take a second; of a list of frames: how many it has. Default: the processor's"),
    ] = None
    audio_url: _Replaced = msgspec.UNSET
    input_audio: _Replaced = msgspec.UNSET
    cache_control: Without = msgspec.UNSET
    prompt_cache_breakpoint: Without = msgspec.UNSET


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[ToolName, note("1 to 256 characters")]
    arguments: Annotated[
        str | dict[str, Any] | None, note("JSON, or its object; if not an object, passed to the template as text")
    ] = None


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: CalledFunction
    id: Annotated[CallId | None, note("up to 16,384 characters")] = None
    type: Annotated[Annotated[str, documented(enum=["function"])] | None, note("`function`")] = None
    index: Annotated[Unread, ignored("of a streamed call that is sent back")] = msgspec.UNSET


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: _NameOfTool
    description: str | None = None
    parameters: Parameters = None
    strict: Annotated[
        bool | None,
        note(
            "true: arguments of a call that the model chooses to make follow `parameters`, too. Arguments of an "
            "enforced call always follow them"
        ),
    ] = None
    cache_control: Uncached = msgspec.UNSET


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: _FunctionType
    function: ToolFunction
    cache_control: Uncached = msgspec.UNSET


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: NameOfChosen


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True):
    function: ChosenFunction
    type: _FunctionType = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    tools: Annotated[
        list[AllowedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS), note("those that may be called")
    ]
    mode: AllowedMode = "auto"


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[Literal["function", "allowed_tools"], note("`function` or `allowed_tools`")]
    function: Annotated[ChosenFunction | None, note("of `function`")] = None
    allowed_tools: Annotated[
        AllowedTools | None, note("of `allowed_tools`: the prompt has all of `tools`, and calls are of these alone")
    ] = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Annotated[RoleText, note("up to 64 characters; `developer` is the template's `system`")]
    content: Annotated[
        str | Annotated[list[TextPart], msgspec.Meta(max_length=MAX_PARTS)] | None,
        note(
            "text, or up to 4096 parts, which a line break joins, as in vLLM and llama.cpp; of an `assistant` or a "
            "`tool` also null or left out"
        ),
    ] = None
    name: Annotated[
        Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] | None,
        note("up to 256 characters; passed to the chat template, which may ignore it"),
    ] = None
    tool_calls: Annotated[
        Annotated[list[MessageToolCall], msgspec.Meta(max_length=MAX_TOOL_CALLS)] | None,
        note("up to 1024, of an answer that is sent back; 400 if the chat template has no calls"),
    ] = None
    tool_call_id: Annotated[
        CallId | None, note("up to 16,384 characters: the call that a message of the role `tool` answers")
    ] = None
    reasoning_content: Annotated[str | None, note("of an answer that is sent back; passed to the chat template")] = None
    reasoning: Annotated[str | None, note("the same, if `reasoning_content` is missing")] = None
    function_call: _UnlessEmpty = msgspec.UNSET
    audio: _UnlessEmpty = msgspec.UNSET
    refusal: SentBack = msgspec.UNSET
    provider_specific_fields: Annotated[Unread, ignored("of an answer that litellm sends back")] = msgspec.UNSET
    annotations: SentBack = msgspec.UNSET
    type: Annotated[Unread, ignored("lm-eval sends `text`")] = msgspec.UNSET
    id: SentBack = msgspec.UNSET
    thinking_blocks: _OfAnotherModel = msgspec.UNSET
    reasoning_details: _OfAnotherModel = msgspec.UNSET
    metadata: Without = msgspec.UNSET
    cache_control: Uncached = msgspec.UNSET


Messages = Annotated[
    Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})] | None,
    note("1 to 16,384"),
    CONTENT,
]
ToolList = Annotated[
    Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
    note("up to 4096; in the prompt as the model's chat template writes them"),
]
TemplateKwargs = Annotated[
    Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_TEMPLATE_KWARGS)] | None,
    note("up to 64 variables of the chat template, such as `enable_thinking`; an unused one gets a warning"),
]
OneCall = Annotated[
    bool | None,
    note(
        "false: the answer ends after its first call, as always if the chat template accepts only one call of an "
        "answer that is sent back (Llama 3's); default true"
    ),
]
ChoiceOfTool = Annotated[str, documented(enum=list(TOOL_CHOICES))]
Effort = Annotated[str, documented(enum=list(EFFORTS))]


Continued = Annotated[
    bool | None,
    note(
        "true: the prompt ends with the text of the last message, which is the `assistant`'s, and the answer is what "
        "follows it"
    ),
]
Begun = Annotated[
    bool | None,
    note("default true, unless `continue_final_message`: with the tokens that precede the model's answer"),
]


class ChatBody(GenerationBody, kw_only=True):
    messages: Messages = None
    logprobs: Annotated[bool | None, note("`true`: with each token its logprob")] = None
    top_logprobs: Annotated[_NumLogprobs | None, note("0 to 20 most likely tokens, with `logprobs`")] = None
    chat_template_kwargs: TemplateKwargs = None
    tools: ToolList = None
    tool_choice: Annotated[
        ChosenTool | ChoiceOfTool | None,
        note(
            "`auto` (default; text that the model writes as a call of one of `tools` is a call), `none` (the prompt "
            "has no tools), `required` or a function: the answer is a call that follows its schema, or several with "
            "`required`; or `allowed_tools`"
        ),
    ] = None
    parallel_tool_calls: OneCall = None
    reasoning_effort: Annotated[
        Effort | None,
        note(
            "none, minimal, low, medium, high, xhigh or max, for a chat template that reads it, or `enable_thinking` "
            "(all but `none` are true)"
        ),
    ] = None
    enable_thinking: Annotated[
        bool | None,
        note(
            "as `chat_template_kwargs.enable_thinking`, which overrides it; of a chat template that reads `thinking`, "
            "that. One without such a choice gets a warning"
        ),
    ] = None
    include_reasoning: Annotated[bool | None, note("false: `reasoning_content` is left out; default true")] = None
    continue_final_message: Continued = None
    add_generation_prompt: Begun = None
    separate_reasoning: Annotated[
        bool | None,
        note(
            "false: reasoning stays in the content, with its marks, and a grammar holds from the first token; "
            "default true"
        ),
    ] = None
