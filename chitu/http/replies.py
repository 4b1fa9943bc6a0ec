"""Answers of the routes as structs, from which the OpenAPI document is made and which encode them. Pure.

Parts of an answer to a generation that grow with it (choices, logprobs) are written between the struct's fields as they
are due (`answers.py`). The error object is `net/http.py`'s.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chitu.http.batch_lines import LineError
from chitu.http.proof import Proof


class CachedTokensReply(msgspec.Struct):
    cached_tokens: int


class ReasoningTokensReply(msgspec.Struct):
    reasoning_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensReply
    completion_tokens_details: ReasoningTokensReply


class CompletionLogprobsReply(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprobReply(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobsReply = list[dict[str, PromptLogprobReply] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_token_ids`."""
    logprobs: CompletionLogprobsReply | None
    prompt_logprobs: PromptLogprobsReply | msgspec.UnsetType = msgspec.UNSET
    """Present with the request field of that name."""


class CompletionReply(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_proof`."""


class CalledFunctionReply(msgspec.Struct):
    name: str
    arguments: str


class ToolCallReply(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class ChatReplyMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """Null if the message has only reasoning or calls."""
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET


class TopLogprobReply(msgspec.Struct):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprobReply(msgspec.Struct):
    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TopLogprobReply]


class ChatLogprobsReply(msgspec.Struct):
    content: list[TokenLogprobReply]
    refusal: None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatReplyMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobsReply | None


class ChatReply(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsReply | msgspec.UnsetType = msgspec.UNSET


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int | None
    """Maximum tokens of a request; null while no instance serves."""
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ResponsesUsageReply(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CachedTokensReply
    output_tokens: int
    output_tokens_details: ReasoningTokensReply
    total_tokens: int


class ResponsesError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponsesReply(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """`in_progress` and `failed` are only in events."""
    error: ResponsesError | None
    incomplete_details: IncompleteDetails | None
    # fields of the request, repeated (`echo_of`)
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    max_output_tokens: int | None
    tool_choice: Any
    tools: list[Any]
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: Literal["disabled"]
    store: bool
    background: bool
    previous_response_id: None
    output: list[dict[str, Any]]
    """Items of the types reasoning, message and function_call."""
    usage: ResponsesUsageReply | None
    """Null only in events before the last one."""
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET


class ThinkingTokensReply(msgspec.Struct):
    thinking_tokens: int


class MessagesUsageReply(msgspec.Struct):
    input_tokens: int
    """Prompt tokens that were not cached."""
    cache_creation_input_tokens: int
    """Always 0: nothing extra is paid for what the cache keeps."""
    cache_read_input_tokens: int
    """Prompt tokens that were cached."""
    output_tokens: int
    output_tokens_details: ThinkingTokensReply


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesReply(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types thinking, text and tool_use."""
    stop_reason: StopReason | None
    """Null only in the first event."""
    stop_sequence: str | None
    usage: MessagesUsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET


class CountTokensReply(msgspec.Struct):
    input_tokens: int


class PooledUsageReply(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Text with `encoding_format: base64`."""


class EmbeddingsReply(msgspec.Struct):
    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: PooledUsageReply


class ScoreReply(msgspec.Struct):
    object: Literal["score"]
    index: int
    score: float


class ScoresReply(msgspec.Struct):
    id: str
    created: int
    model: str
    object: Literal["list"]
    data: list[ScoreReply]
    usage: PooledUsageReply


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankReply(msgspec.Struct):
    id: str
    created: int
    model: str
    results: list[RerankResult]
    """The best first."""
    usage: PooledUsageReply


class FileReply(msgspec.Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    """`batch` of an uploaded file, `batch_output` of an output or error file."""
    status: Literal["processed"]


class FilesReply(msgspec.Struct):
    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedReply(msgspec.Struct):
    id: str
    object: Literal["file", "batch"]
    deleted: bool


class RequestCountsReply(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchErrorsReply(msgspec.Struct):
    object: Literal["list"]
    data: tuple[LineError, ...]


class BatchReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrorsReply | None
    """What is wrong with the input, or why the batch could not go on."""
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    """File of the answers with a status of 200 to 299; null until the batch is over, and if there are none."""
    error_file_id: str | None
    """File of all other lines' answers."""
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCountsReply
    metadata: dict[str, str] | None


class BatchesReply(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AbortReply(msgspec.Struct):
    aborted: int
    """Number of requests that this call ended."""


class ModelReply(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["chitu"]
    root: str
    """Path of the checkpoint or of the adapter."""
    max_model_len: int | None
    """Maximum tokens of a request; null while no instance serves."""
    parent: str | None
    """Of a LoRA adapter: the name of the model that it adapts. Null for that model."""


class ModelsReply(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelReply]


class HealthInstance(msgspec.Struct):
    name: str
    role: Literal["prefill", "decode", "unified"]
    incarnation: int
    draining: bool
    home: str = ""
    """Name with which its process was started, if it has changed its role since."""


class HealthReply(msgspec.Struct):
    status: Literal["ok", "unavailable", "ending"]
    reason: str
    """Empty if the status is ok."""
    in_flight: int
    instances: list[HealthInstance]
    ready: dict[str, bool]
    """Whether an instance of the role can be used, by role."""


class StatusReply(msgspec.Struct):
    status: str


class ExampleReply(msgspec.Struct):
    prompt: str
    answer: str
    value: str
