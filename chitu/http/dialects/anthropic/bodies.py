"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API. Pure; see
`ask/bodies.py`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from chitu.http.ask.bodies import (
    CONTENT,
    EFFORTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SALT_CHARS,
    MAX_STOPS,
    MAX_TOOLS,
    REPLACED,
    SEEN,
    Body,
    CallId,
    ObjectText,
    Speculation,
    StopText,
    Temperature,
    TemplateKwargs,
    TokenCount,
    ToolName,
    TopK,
    TopP,
    Uncached,
    Unread,
    Without,
    documented,
    ignored,
    note,
)

THINKING_TYPES = ("enabled", "adaptive", "between_tools", "disabled")
CHOICE_TYPES = ("auto", "any", "tool", "none")

_OfLeftOut = Annotated[Unread, ignored("of a tool that is left out of the prompt")]
_AtOnce = Annotated[Unread, ignored("the tool is in the prompt at once")]
_Signed = Annotated[Unread, ignored("nothing is signed")]
_OfTheirs = Annotated[Unread, ignored("of a block that is sent back")]
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"


_Replaced = Annotated[Unread, ignored("of a block that a placeholder replaces")]


class _PartFields(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        str,
        note(
            f"`text`, `image`, `document` with text in it, `search_result`, `tool_reference`; any other is {REPLACED}"
        ),
    ]
    text: str | None = None
    source: Annotated[
        dict[str, Any] | str | None,
        note(
            "of `document`: its text (`type` `text`), its blocks (`content`), or a file; of `search_result`: text; of "
            f"`image`: `base64` with `data`, or `url`, which the router fetches from its `images.hosts`; {SEEN}"
        ),
    ] = None
    title: Annotated[str | None, note("of `document` and `search_result`: a line ahead of their text")] = None
    context: Annotated[str | None, note("of `document`: a line ahead of its text")] = None
    tool_name: Annotated[str | None, note("of `tool_reference`: the tool is in the prompt at once")] = None
    cache_control: Uncached = msgspec.UNSET
    citations: Without = msgspec.UNSET
    transformations: _Replaced = msgspec.UNSET
    file_id: _Replaced = msgspec.UNSET
    tabs: _Replaced = msgspec.UNSET
    state_changes: _Replaced = msgspec.UNSET
    url: _Replaced = msgspec.UNSET
    encrypted_content: _Replaced = msgspec.UNSET
    page_age: _Replaced = msgspec.UNSET


class MessagesPart(_PartFields, forbid_unknown_fields=True):
    content: Annotated[
        str | list[dict[str, Any]] | dict[str, Any] | None, note("of `search_result`: parts with text")
    ] = None


_Parts = str | Annotated[list[MessagesPart], msgspec.Meta(max_length=MAX_PARTS)]


class MessagesBlock(_PartFields, forbid_unknown_fields=True):
    """Block of any type. Fields that do not belong to its type are not used."""

    type: Annotated[
        str,
        note(
            "`text`, of the model also `tool_use`, `thinking` and `redacted_thinking` (left out of the prompt), of the "
            "user also `tool_result`; `image`, `document` with text in it, `search_result`, `compaction`. Any other "
            f"(`server_tool_use`, ...) is {REPLACED}, and the header X-Chitu-Warning names it"
        ),
    ]
    text: Annotated[str | None, note("of `text`; an empty one is left out")] = None
    id: Annotated[CallId | None, note("of `tool_use`")] = None
    name: Annotated[ToolName | None, note("of `tool_use`")] = None
    input: Annotated[ObjectText, note("of `tool_use`")] = msgspec.UNSET
    tool_use_id: Annotated[
        CallId | None, note("of `tool_result`: of a call before it, or its text is one of the user")
    ] = None
    content: Annotated[
        _Parts | dict[str, Any] | None, note("of `tool_result`, `search_result` and `compaction`: text, or parts")
    ] = None
    is_error: Annotated[bool | None, note("of `tool_result`; true: the text begins with `Error: ` in the prompt")] = (
        None
    )
    thinking: Annotated[str | None, note("of `thinking`; passed to the chat template as the model's reasoning")] = None
    signature: _Signed = msgspec.UNSET
    data: _Signed = msgspec.UNSET
    caller: _OfTheirs = msgspec.UNSET
    toolset_name: _OfTheirs = msgspec.UNSET
    server_name: _Replaced = msgspec.UNSET
    mcp_server_name: _Replaced = msgspec.UNSET
    tools: _Replaced = msgspec.UNSET
    tool: _Replaced = msgspec.UNSET
    tool_changes: _Replaced = msgspec.UNSET
    to: _Replaced = msgspec.UNSET
    from_: _Replaced = msgspec.field(name="from", default=msgspec.UNSET)
    trigger: _Replaced = msgspec.UNSET


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Annotated[
        str,
        documented(enum=["user", "assistant", "system"]),
        note(
            "`user`, `assistant` or `system`; turns of one role in a row are one turn. The answer continues a last "
            "turn of `assistant`"
        ),
    ]
    content: Annotated[
        str | Annotated[list[MessagesBlock], msgspec.Meta(max_length=MAX_PARTS)],
        note("text, or up to 4096 blocks; a line break joins the texts of a turn"),
    ]


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[ToolName | None, note("1 to 256 characters, each once")] = None
    type: Annotated[
        str | None,
        note(
            "`custom` (default). What only Anthropic can run, such as `web_search_20250305`, is left out of the "
            "prompt, and the header X-Chitu-Warning says so"
        ),
    ] = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, note("a JSON schema")] = None
    strict: Annotated[bool | None, note("as of a chat")] = None
    cache_control: Uncached = msgspec.UNSET
    defer_loading: _AtOnce = msgspec.UNSET
    allowed_callers: _AtOnce = msgspec.UNSET
    eager_input_streaming: Annotated[Unread, ignored("a call is sent when it is complete")] = msgspec.UNSET
    input_examples: Annotated[Unread, ignored("no chat template shows them")] = msgspec.UNSET
    max_uses: _OfLeftOut = msgspec.UNSET
    allowed_domains: _OfLeftOut = msgspec.UNSET
    blocked_domains: _OfLeftOut = msgspec.UNSET
    user_location: _OfLeftOut = msgspec.UNSET
    response_inclusion: _OfLeftOut = msgspec.UNSET
    citations: _OfLeftOut = msgspec.UNSET
    max_content_tokens: _OfLeftOut = msgspec.UNSET
    url_sources: _OfLeftOut = msgspec.UNSET
    use_cache: _OfLeftOut = msgspec.UNSET
    max_characters: _OfLeftOut = msgspec.UNSET
    configs: _OfLeftOut = msgspec.UNSET
    default_config: _OfLeftOut = msgspec.UNSET
    mcp_server_name: _OfLeftOut = msgspec.UNSET
    tools: _OfLeftOut = msgspec.UNSET
    display_width_px: _OfLeftOut = msgspec.UNSET
    display_height_px: _OfLeftOut = msgspec.UNSET
    display_number: _OfLeftOut = msgspec.UNSET
    enable_zoom: _OfLeftOut = msgspec.UNSET


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        str,
        documented(enum=list(CHOICE_TYPES)),
        note(
            "`auto` (default), `any` (the answer is a call that follows its schema, or several), `tool` or `none` (the "
            "prompt has no tools)"
        ),
    ]
    name: Annotated[str | None, note("of `tool`: name of one of `tools`")] = None
    disable_parallel_tool_use: Annotated[bool | None, note("true: the answer ends after its first call")] = None


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        str,
        documented(enum=list(THINKING_TYPES)),
        note(
            "`enabled`, `adaptive`, `between_tools` or `disabled`: `enable_thinking` of the chat template. One that "
            "has no such choice decides, and the header X-Chitu-Warning says so. Default: the template's"
        ),
    ]
    budget_tokens: Annotated[
        Unread, ignored("the model ends its reasoning itself, and `max_tokens` bounds it and the answer")
    ] = msgspec.UNSET
    display: Annotated[
        str | None,
        documented(enum=["summarized", "omitted"]),
        note("`omitted`: the answer has no `thinking` blocks; otherwise they have all of the reasoning"),
    ] = None


class MessagesFormatConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=["json_schema"]), note("`json_schema`")]
    schema: Annotated[ObjectText, note("the answer follows it, as `response_format.json_schema.schema` of a chat")] = (
        msgspec.UNSET
    )


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Annotated[
        Annotated[str, documented(enum=list(EFFORTS))] | None,
        note("as `reasoning_effort` of a chat; a chat template without such a choice gets a warning"),
    ] = None
    format: MessagesFormatConfig | None = None


class CountTokensBody(Body, kw_only=True):
    messages: Annotated[
        Annotated[list[AnthropicMessage], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
        | None,
        note("1 to 16,384"),
        CONTENT,
    ] = None
    system: Annotated[_Parts | None, note("text, or parts, which a line break joins; ahead of `messages`"), CONTENT] = (
        None
    )
    tools: Annotated[Annotated[list[MessagesTool], msgspec.Meta(max_length=MAX_TOOLS)] | None, note("up to 4096")] = (
        None
    )
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateKwargs = None


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: Annotated[
        TokenCount | None,
        note(
            "1 or more, or -1. Default, -1, and the most: the rest of the context. An answer that fills the context, "
            "with fewer tokens than these, has the `stop_reason` `model_context_window_exceeded`"
        ),
    ] = None
    stop_sequences: Annotated[
        Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None, note("as `stop` of a chat")
    ] = None
    stream: Annotated[bool | None, note("server-sent events; an event `ping` after each silence")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    cache_salt: Annotated[Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None, note("as of a chat")] = None
    return_proof: Annotated[bool | None, note("as of a chat; a stream has it in its last but one event")] = None
    return_receipt: Annotated[bool | None, note("as of a chat")] = None
    return_token_ids: Annotated[
        bool | None, note("`return_proof` with `prompt_token_ids` and `token_ids` in its choice")
    ] = None
    speculation: Speculation = None
