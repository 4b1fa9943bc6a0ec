"""Request bodies of OpenAI's Responses API (`/v1/responses`), with the rules of `ask/bodies.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from chitu.http.ask.bodies import (
    CONTENT,
    IMAGE_URL,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PARTS,
    MAX_TOOLS,
    REPLACED,
    AllowedMode,
    Body,
    CallId,
    ChoiceOfTool,
    Effort,
    FormatType,
    GrammarText,
    ObjectText,
    OneCall,
    Parameters,
    RoleText,
    SentBack,
    Speculation,
    Temperature,
    TemplateKwargs,
    TokenCount,
    ToolName,
    TopP,
    Uncached,
    Unread,
    Without,
    documented,
    ignored,
    note,
)

RESPONSES = "/v1/responses"
TEXT_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = (
    *(ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""Values of `include`. All but the first are of items that no answer of this server has."""
_Replaced = Annotated[Unread, ignored("of a part that a placeholder replaces")]
_OfCall = Annotated[Unread, note("of the call of a tool that a client runs: its arguments")]
_OfLeftOutItem = Annotated[Unread, ignored("of an item that is left out of the prompt")]
_OfLeftOutTool = Annotated[Unread, ignored("of a tool that is left out of the prompt")]
_AtOnce = Annotated[Unread, ignored("the tool is in the prompt at once")]


ObjectList = Annotated[Unread, documented(type="array", items={"type": "object"})]


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        str,
        note(
            "`input_text`, `output_text`, `reasoning_text`, `summary_text`, `text`, `input_image`, `refusal`, or "
            f"`input_file` with text in it; any other is {REPLACED}"
        ),
    ] = ""
    text: str | None = None
    refusal: Annotated[str | None, note("of `refusal`: text")] = None
    file_data: Annotated[str | None, note("of `input_file`: base64, or a data URL")] = None
    filename: Annotated[str | None, note("of `input_file`")] = None
    stdout: Annotated[str | None, note("of the output of a `shell_call`")] = None
    stderr: Annotated[str | None, note("the same")] = None
    outcome: Annotated[dict[str, Any] | None, note("the same")] = None
    image_url: Annotated[Unread, note(IMAGE_URL)] = msgspec.UNSET
    audio_url: _Replaced = msgspec.UNSET
    input_audio: _Replaced = msgspec.UNSET
    file_url: _Replaced = msgspec.UNSET
    file_id: _Replaced = msgspec.UNSET
    encrypted_content: _Replaced = msgspec.UNSET
    detail: Without = msgspec.UNSET
    annotations: Without = msgspec.UNSET
    logprobs: Without = msgspec.UNSET
    prompt_cache_breakpoint: Without = msgspec.UNSET
    cache_control: Without = msgspec.UNSET
    created_by: Without = msgspec.UNSET


_Parts = str | Annotated[list[InputPart], msgspec.Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """Item of any type. Fields that do not belong to its type are not used."""

    type: Annotated[
        str | None,
        note(
            "`message` (default), `function_call`, `custom_tool_call`, `tool_search_call` and the calls of other tools "
            "that a client runs (`local_shell_call`, `shell_call`, `apply_patch_call`, `computer_call`, ...), their "
            "outputs (`..._output`), `mcp_call`, `reasoning`, `agent_message`, `additional_tools`. Those of tools that "
            "run on other servers (`web_search_call`, ...) and what is not for the model (`ghost_snapshot`, ...) are "
            "left out of the prompt, and the header X-Chitu-Warning says so. `item_reference` is refused: nothing is "
            "stored"
        ),
    ] = None
    role: Annotated[RoleText | None, note("of a message")] = None
    content: Annotated[
        _Parts | None, note("of a message or reasoning: text, or up to 4096 parts, which a line break joins")
    ] = None
    call_id: Annotated[CallId | None, note("of a call and its output")] = None
    name: Annotated[ToolName | None, note("of a call")] = None
    namespace: Annotated[str | None, note("of a call of a function of a `namespace`: its name")] = None
    arguments: Annotated[
        str | dict[str, Any] | None, note("of a call: JSON, or its object, as of a `tool_search_call`")
    ] = None
    input: Annotated[str | None, note("of a `custom_tool_call`: its text")] = None
    output: Annotated[
        _Parts | dict[str, Any] | None,
        note(
            "of a call's output: text, or parts. An output without a call before it is text of the user in the prompt"
        ),
    ] = None
    tools: Annotated[
        ObjectList, note("of `additional_tools` and `tool_search_output`: further tools, as those in `tools`")
    ] = msgspec.UNSET
    author: Annotated[str | None, note("of an `agent_message`: a line ahead of its text")] = None
    server_label: Annotated[str | None, note("of an `mcp_call`")] = None
    execution: Annotated[str | None, note("of `tool_search_call` and its output: `client`, or they are left out")] = (
        None
    )
    action: _OfCall = msgspec.UNSET
    actions: _OfCall = msgspec.UNSET
    operation: _OfCall = msgspec.UNSET
    error: Annotated[Unread, note("of an `mcp_call` without output")] = msgspec.UNSET
    encrypted_content: Annotated[
        str | None, note("of `reasoning` without `content`: its text, if it is of an answer of this server")
    ] = None
    id: Annotated[CallId | None, note("of an answer that is sent back; of a call without `call_id`")] = None
    status: SentBack = msgspec.UNSET
    phase: SentBack = msgspec.UNSET
    caller: SentBack = msgspec.UNSET
    summary: SentBack = msgspec.UNSET
    result: _OfLeftOutItem = msgspec.UNSET
    results: _OfLeftOutItem = msgspec.UNSET
    queries: _OfLeftOutItem = msgspec.UNSET
    code: _OfLeftOutItem = msgspec.UNSET
    container_id: _OfLeftOutItem = msgspec.UNSET
    outputs: _OfLeftOutItem = msgspec.UNSET
    environment: _OfLeftOutItem = msgspec.UNSET
    reason: _OfLeftOutItem = msgspec.UNSET
    approve: _OfLeftOutItem = msgspec.UNSET
    approval_request_id: _OfLeftOutItem = msgspec.UNSET
    ghost_commit: _OfLeftOutItem = msgspec.UNSET
    revised_prompt: _OfLeftOutItem = msgspec.UNSET
    size: _OfLeftOutItem = msgspec.UNSET
    quality: _OfLeftOutItem = msgspec.UNSET
    background: _OfLeftOutItem = msgspec.UNSET
    output_format: _OfLeftOutItem = msgspec.UNSET
    svg_usage: _OfLeftOutItem = msgspec.UNSET
    fingerprint: _OfLeftOutItem = msgspec.UNSET
    reasoning: _OfLeftOutItem = msgspec.UNSET
    text: _OfLeftOutItem = msgspec.UNSET
    recipient: Without = msgspec.UNSET
    max_output_length: Without = msgspec.UNSET
    acknowledged_safety_checks: Without = msgspec.UNSET
    pending_safety_checks: Without = msgspec.UNSET
    created_by: Without = msgspec.UNSET
    internal_chat_message_metadata_passthrough: Without = msgspec.UNSET
    metadata: Without = msgspec.UNSET
    cache_control: Uncached = msgspec.UNSET


class CustomFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=["text", "grammar"]), note("`text` or `grammar`")]
    syntax: Annotated[Annotated[str, documented(enum=["lark", "regex"])] | None, note("`lark` or `regex`")] = None
    definition: Annotated[
        GrammarText | None,
        note(
            "calls follow a regular expression; a grammar in Lark is in the prompt alone, and the header "
            "X-Chitu-Warning says so"
        ),
    ] = None


class NamespacedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, note("`function` or `custom`")]
    name: Annotated[ToolName | None, note("1 to 128 characters, each once in its namespace")] = None
    description: str | None = None
    parameters: Parameters = None
    strict: Annotated[bool | None, note("as of a chat")] = None
    format: Annotated[CustomFormat | None, note("of a custom tool")] = None
    cache_control: Uncached = msgspec.UNSET
    defer_loading: _AtOnce = msgspec.UNSET
    allowed_callers: _AtOnce = msgspec.UNSET
    output_schema: Annotated[Unread, ignored("no chat template shows it")] = msgspec.UNSET


class ResponsesTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        str,
        note(
            "`function`; `custom`: a tool that takes text, which the model sees as a function with the argument "
            "`input`; `namespace`: a group of those, which the model sees as functions whose names begin with that of "
            "the namespace; `tool_search` with the `execution` `client`. Any other (`web_search`, `local_shell`, "
            "`mcp`, ...) is left out of the prompt, and the header X-Chitu-Warning says so"
        ),
    ]
    name: Annotated[
        ToolName | None, note("1 to 256 characters, each once; of a function, custom tool or namespace")
    ] = None
    description: Annotated[str | None, note("that of a namespace is ahead of its first function's")] = None
    tools: Annotated[
        Annotated[list[NamespacedTool], msgspec.Meta(max_length=MAX_TOOLS)] | None, note("of a namespace")
    ] = None
    execution: Annotated[
        str | None, note("of `tool_search`: `client`; otherwise it is left out, and all tools are in the prompt")
    ] = None
    parameters: Parameters = None
    strict: Annotated[bool | None, note("as of a chat")] = None
    format: Annotated[CustomFormat | None, note("of a custom tool; default: any text")] = None
    cache_control: Uncached = msgspec.UNSET
    defer_loading: _AtOnce = msgspec.UNSET
    allowed_callers: _AtOnce = msgspec.UNSET
    output_schema: Annotated[Unread, ignored("no chat template shows it")] = msgspec.UNSET
    filters: _OfLeftOutTool = msgspec.UNSET
    user_location: _OfLeftOutTool = msgspec.UNSET
    search_context_size: _OfLeftOutTool = msgspec.UNSET
    search_content_types: _OfLeftOutTool = msgspec.UNSET
    external_web_access: _OfLeftOutTool = msgspec.UNSET
    environment: _OfLeftOutTool = msgspec.UNSET
    container: _OfLeftOutTool = msgspec.UNSET
    vector_store_ids: _OfLeftOutTool = msgspec.UNSET
    max_num_results: _OfLeftOutTool = msgspec.UNSET
    ranking_options: _OfLeftOutTool = msgspec.UNSET
    display_width: _OfLeftOutTool = msgspec.UNSET
    display_height: _OfLeftOutTool = msgspec.UNSET
    server_label: _OfLeftOutTool = msgspec.UNSET
    server_url: _OfLeftOutTool = msgspec.UNSET
    server_description: _OfLeftOutTool = msgspec.UNSET
    connector_id: _OfLeftOutTool = msgspec.UNSET
    authorization: _OfLeftOutTool = msgspec.UNSET
    headers: _OfLeftOutTool = msgspec.UNSET
    allowed_tools: _OfLeftOutTool = msgspec.UNSET
    require_approval: _OfLeftOutTool = msgspec.UNSET
    model: _OfLeftOutTool = msgspec.UNSET
    size: _OfLeftOutTool = msgspec.UNSET
    quality: _OfLeftOutTool = msgspec.UNSET
    output_format: _OfLeftOutTool = msgspec.UNSET
    output_compression: _OfLeftOutTool = msgspec.UNSET
    background: _OfLeftOutTool = msgspec.UNSET
    moderation: _OfLeftOutTool = msgspec.UNSET
    partial_images: _OfLeftOutTool = msgspec.UNSET
    input_fidelity: _OfLeftOutTool = msgspec.UNSET
    action: _OfLeftOutTool = msgspec.UNSET


class AllowedResponsesTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, note("`function` or `custom`; any other is left out, as it is of `tools`")]
    name: Annotated[str | None, note("of a function or custom tool")] = None
    namespace: Annotated[str | None, note("of a function of a namespace")] = None
    server_label: _OfLeftOutTool = msgspec.UNSET


class ResponsesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[
        Literal["function", "custom", "allowed_tools"], note("`function`, `custom` or `allowed_tools`, as of a chat")
    ]
    name: Annotated[str | None, note("of `function` and `custom`: name of one of `tools`")] = None
    namespace: Annotated[str | None, note("of a function of a namespace, if others have one of the same name")] = None
    mode: AllowedMode | None = None
    tools: Annotated[
        Annotated[list[AllowedResponsesTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)] | None,
        note("of `allowed_tools`: those that may be called"),
    ] = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Annotated[Effort | None, note("as `reasoning_effort` of a chat")] = None
    summary: Annotated[Unread, ignored("reasoning is returned as it is")] = msgspec.UNSET
    generate_summary: Annotated[Unread, ignored("the same")] = msgspec.UNSET


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: FormatType
    schema: Annotated[ObjectText, note("of `json_schema` or `json_object`: the answer follows it")] = msgspec.UNSET
    name: Annotated[str | None, ignored()] = None
    description: Annotated[str | None, ignored()] = None
    strict: Annotated[bool | None, ignored("the answer always follows the schema")] = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Without = msgspec.UNSET


class ResponsesBody(Body, kw_only=True):
    input: Annotated[
        str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)] | None,
        note("text, or 1 to 16,384 items: all turns, since nothing is stored"),
        CONTENT,
    ] = None
    instructions: Annotated[str | None, note("a system message before `input`"), CONTENT] = None
    max_output_tokens: Annotated[
        TokenCount | None, note("1 to the rest of the context, which is the default, as is -1")
    ] = None
    temperature: Temperature = None
    top_p: TopP = None
    stream: Annotated[bool | None, note("server-sent events, each with a `sequence_number`")] = None
    tools: Annotated[Annotated[list[ResponsesTool], msgspec.Meta(max_length=MAX_TOOLS)] | None, note("up to 4096")] = (
        None
    )
    tool_choice: Annotated[ResponsesToolChoice | ChoiceOfTool | None, note("as of a chat")] = None
    parallel_tool_calls: OneCall = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: Annotated[
        list[Annotated[str, documented(enum=list(INCLUDABLE))]] | None,
        note(
            "`reasoning.encrypted_content`: reasoning has its text there, too, encoded but not encrypted, for clients "
            "that send back nothing else of it. What only items of other servers' tools have adds nothing"
        ),
    ] = None
    truncation: Annotated[
        Annotated[str, documented(enum=["auto", "disabled"])] | None,
        note("`disabled` (default) or `auto`; with both, an input longer than the context is refused"),
    ] = None
    metadata: Annotated[
        Annotated[dict[str, str], msgspec.Meta(max_length=MAX_METADATA)] | None,
        note("up to 1024 texts; repeated in the answer"),
    ] = None
    chat_template_kwargs: TemplateKwargs = None
    return_proof: Annotated[bool | None, note("as of a chat; a stream has it in its last event")] = None
    return_receipt: Annotated[bool | None, note("as of a chat")] = None
    return_token_ids: Annotated[
        bool | None, note("`return_proof` with `prompt_token_ids` and `token_ids` in its choice")
    ] = None
    speculation: Speculation = None
