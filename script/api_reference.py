"""Write docs/api.md from the bodies and the table of other fields: `python script/api_reference.py`. A test fails if
the page is out of date."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from chitu.http.ask.bodies import NO_EFFECT, REFUSED, SERVED
from chitu.http.ask.fields import Field
from chitu.http.batch.bodies import BATCHES
from chitu.http.dialects.anthropic.bodies import COUNT_TOKENS, MESSAGES
from chitu.http.dialects.openai.bodies import ABORT, CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from chitu.http.dialects.pooled.bodies import EMBEDDINGS, RERANK, SCORE
from chitu.http.dialects.responses.bodies import RESPONSES
from chitu.http.table import BODIES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
TITLE = """# HTTP API: every field

Generated from `chitu/http/ask/bodies.py` and `chitu/http/dialects/` by `script/api_reference.py`; edit there.
`GET /openapi.json` has the same with types. Every field of a body is served, refused, or in the short list of those
without effect. `null` is the same as leaving a field out.

## What others have

vLLM, SGLang and Dynamo as their documentation had it in November 2026; their versions differ.

"""
COMPARISON = (
    ("`/v1/completions`, `/v1/chat/completions`, `/v1/models`", "OpenAI, vLLM, SGLang, Dynamo", "yes", ""),
    (
        "`/v1/responses`",
        "OpenAI, vLLM, SGLang, Dynamo",
        "yes, but nothing is stored",
        "`store`, `previous_response_id`, `conversation` and `background` need a database of conversations; send the "
        "turns as `input`, as the Codex CLI and LangChain do",
    ),
    (
        "`/v1/messages`, `/v1/messages/count_tokens`",
        "Anthropic, vLLM, SGLang, Dynamo (experimental)",
        "yes",
        "text, tools, thinking, and documents that are text; histories may have more (notes)",
    ),
    ("`/tokenize`, `/detokenize`", "vLLM, SGLang, TGI (`/tokenize`)", "yes", ""),
    (
        "`/generate`, Ollama's API, KServe over gRPC",
        "SGLang (`/generate`, Ollama), TGI (`/generate`), Dynamo (KServe)",
        "no",
        "one way is enough: `/v1/completions` takes token ids, and `return_token_ids` returns them",
    ),
    (
        "tools: calls in the model's own format, read and enforced",
        "OpenAI, Anthropic, vLLM, SGLang, Dynamo",
        "yes",
        "the chat template says which format, so there is no option for it; `strict` tools, a named function and "
        "`required` are enforced by a grammar in every format",
    ),
    (
        "tools that the server runs: web search, code, MCP",
        "OpenAI, Anthropic; vLLM and SGLang (for gpt-oss)",
        "no",
        "a router runs nobody's code; agents' tools of that kind are left out of the prompt, with a warning",
    ),
    (
        "JSON schemas, regular expressions, choices, Lark and GBNF grammars",
        "vLLM, SGLang; OpenAI (schemas, and grammars of custom tools)",
        "yes",
        "structural tags are not taken: tool calls have grammars of their own. Of custom tools only regular "
        "expressions are enforced",
    ),
    ("logprobs of the answer and of the prompt", "OpenAI (answer), vLLM, SGLang", "yes", "of the raw logits"),
    (
        "`n`, `best_of`",
        "OpenAI (`n`), vLLM, SGLang (`n`)",
        "yes",
        "beam search (vLLM) is refused: it needs other steps",
    ),
    (
        "`priority`, `cache_salt`",
        "vLLM, SGLang (`priority`, `extra_key`)",
        "yes",
        "",
    ),
    (
        "images in prompts and in results of tools",
        "OpenAI, Anthropic, vLLM, SGLang, Dynamo",
        "yes",
        "of models with vision, as data or a URL that is allowed ([images](images.md)); of others, see the notes",
    ),
    (
        "sound and video in prompts, images and sound in answers; speech, transcriptions",
        "OpenAI, vLLM, SGLang, Dynamo",
        "no",
        "of models that also hear, the other parts are served; for histories, see the notes",
    ),
    (
        "`/v1/embeddings`, `/v1/score`, `/v1/rerank`",
        "OpenAI (embeddings), vLLM, SGLang, Dynamo (embeddings)",
        "yes",
        "of decoders, by what their folder declares ([embeddings](embeddings.md))",
    ),
    ("`/classify`, `/pooling`, reward models", "vLLM, SGLang", "no", "nobody has asked for it with separate P and D"),
    (
        "`/v1/files`, `/v1/batches`",
        "OpenAI; Anthropic (its own); vLLM (`run-batch`, a file)",
        "yes",
        "with `router.batches.dir`; also `DELETE /v1/batches/{id}`; `chitu batch` for a file and any server "
        "([batches](batches.md))",
    ),
    (
        "weights that change while serving; pause, resume",
        "SGLang, vLLM",
        "yes: `/admin/weights`, `/admin/pause`, `/admin/resume`",
        "from a folder, and out of the memory of a trainer on the same host ([weights](weights.md))",
    ),
    (
        "roles that change at run time",
        "SGLang",
        "yes: `/admin/role`",
        "P, D and unified ([routing](routing.md#roles-change)); weights, pool and prefix cache stay",
    ),
    (
        "sleep (weights and KV given back)",
        "SGLang, vLLM",
        "on CPUs: `/admin/sleep`, `/admin/wake`",
        "both levels; a request wakes the cluster ([weights](weights.md#sleep)); on GPUs refused by name",
    ),
    (
        "LoRA adapters",
        "vLLM, SGLang, Dynamo",
        "yes ([how](lora.md))",
        "also while serving: `/admin/adapters`, on all instances together; not vLLM's `/v1/load_lora_adapter`",
    ),
    (
        "speculative decoding; `prediction`",
        "OpenAI (`prediction`), vLLM, SGLang, Dynamo (options of the server)",
        "yes: from a prediction, the text, the grammar, a layer of the model; no token changes ([how](speculation.md))",
        "not yet: a second model or heads (EAGLE); MTP of models that transformers' modules compute",
    ),
    ("empty the prefix cache", "vLLM, SGLang", "yes: `/admin/cache/flush`", ""),
    (
        "end a request by its id",
        "SGLang (`/abort_request`), OpenAI (background responses)",
        "yes: `/abort_request`",
        "",
    ),
    (
        "code in a request: `logits_processors`, `custom_logit_processor`",
        "vLLM, SGLang",
        "no",
        "code from a request would run where everybody's requests are",
    ),
    (
        "`chat_template` in the request",
        "vLLM",
        "no",
        "a template is code, too; the folder's `chat_template.jinja` is read, and `chat_template_kwargs` are passed",
    ),
    (
        "`continue_final_message`",
        "vLLM, SGLang, Anthropic (a last turn of the assistant)",
        "yes",
        "the prompt ends with the last message as it is",
    ),
    (
        "fields that pair P and D: `kv_transfer_params`, `bootstrap_room`",
        "vLLM, SGLang",
        "no",
        "the router pairs them itself",
    ),
    ("unknown fields", "OpenAI refuses them; vLLM and SGLang ignore them", "ignored, with a warning", "see below"),
    (
        "an answer that outlives its connection and the router: `/v1/requests/{id}`",
        "OpenAI (background responses)",
        "yes ([how](failures.md))",
        "",
    ),
    (
        "a receipt that an answer was computed right: `return_proof`; `/trace/{id}`; `/cluster`",
        "none of these",
        "yes ([how](verify.md))",
        "",
    ),
    (
        "fine-tuning, vector stores, assistants, moderation, realtime",
        "OpenAI (realtime: vLLM)",
        "no",
        "what others build on a server",
    ),
)
"""What; who has it; whether this has it; the reason, or what to do instead."""
HEAD = """
## Notes

An unknown field is ignored, also in nested objects, and the header `X-Chitu-Warning` of the answer names the first
ones, each with the nearest known one. A field that would change the tokens of the answer and is not served is refused
(400, `param` names it), also those of other servers: the list is below. With `dp_config.router.unknown_fields: refuse`
unknown fields are errors, too.

A byte order mark ahead of a body is skipped, and a whole number may be written as a float (`100.0`). A list has a bound
only where it protects memory; an enforced call (`required`, `strict`) needs a grammar, of at most 65,536 characters of
JSON over its tools.

If a chat's answer must follow a grammar (`response_format` and the like, tool calls), a model that reasons does so
first and freely: the grammar begins after the end of the reasoning. It holds from the first token if the prompt already
contains the end of a reasoning, with `enable_thinking: false`, with `separate_reasoning: false`, and in completions.
`usage` counts the tokens up to the end of the reasoning as `reasoning_tokens`.

A format of the answer (`response_format`, `text.format`, `output_config.format`, `structured_outputs`, `guided_*`) and
tools go together: the answer is a call, or a text that follows the format. Calls of tools that are not `strict` then
have any object for arguments. Where a call is required the format has no effect (`X-Chitu-Warning`); with `tool_choice`
`none` it is all. A format that may begin as the model's calls do is refused, such as a regular expression of `{` with
Llama 3.

Where a model writes arguments as tagged texts, an enforced call follows the tool's schema within the tags: strings are
raw text that follows `pattern`, `format`, lengths, `enum` and `const`, anything else is JSON; `$ref`, `allOf`, `anyOf`,
`patternProperties` and `additionalProperties` hold, also at the top. Without a `maxLength` a string has no tag of an
argument in it, so that it is read as it was written; with a `pattern` and a length nothing that begins as such a tag
(`</`); with both lengths nothing of that kind in its first `minLength` characters. With a `maxLength` above 600 it may
end up to a tenth earlier. What cannot be enforced is refused with its tool and place.

`prediction` (OpenAI's) is what tokens are drafted from ahead, and no token depends on it. It goes with every other
field, also with those with which OpenAI refuses it: `n`, `logprobs`, `tools`, penalties. If a request has one,
`usage.completion_tokens_details` has `accepted_prediction_tokens` and `rejected_prediction_tokens`: tokens drafted from
it that are in the answer, and those that are not. Rejected tokens are no `completion_tokens` here. `usage.speculation`
has `drafted` and `accepted` tokens by source, also of drafts without a prediction, where there were any. Both are sums
over choices, as far as D has reported their ends: after a stop string it has not, and OpenAI's fields are left out
([speculation](speculation.md)).

Logprobs are those of the model itself: of the raw logits, before temperature, penalties, bias and filters. Every output
token has an entry, also a hidden eos; `text_offset` counts characters of the choice's `text`.

An answer, streamed or not, has at most 64 MiB of JSON. What a body may ask for is estimated before anything is
computed: prompts times choices (`n`, `best_of`) times tokens (of the prompt for `prompt_logprobs` and `echo`, else
`max_tokens`) times candidates (`logprobs`, `top_logprobs`, `prompt_logprobs`), at 72 bytes for each token and candidate
with a logprob, 4 for a token in the text, 8 for one in `token_ids`. A larger one is refused (400, which names the
fields); without `max_tokens`, the choices of a chat have at most what fits. The logprobs of a prompt are in each of its
choices in completions, and once in the answer to a chat.

A stream gets a comment (a line that begins with a colon, which readers of server-sent events skip) after each
`dp_config.router.stream_comment_s` of silence (default 10 s), also before its first event. The head of the answer
leaves with the first event or comment. So a request that is refused, or fails within that time, gets an HTTP status
that clients can act on; what fails later is an error event in the stream, as after the first event. An answer that is
not streamed has no such sign of life: a proxy in front must wait as long as it may take, or the client should stream.

APIs accept turns in any order and form, a chat template only some. What a template takes is found once, by rendering
small chats, and messages get that form: system messages at the start are joined if it takes one; later ones are a
user's turn at their place if it takes none there; turns of one role in a row are joined, and a user's text behind a
tool's result is added to the result, where roles must alternate; calls beside content, and several calls, are turns of
their own if it would leave one out; content is text, or a list of parts; arguments that are no JSON object (of a call
that was cut off) are text, or within an object; ids of calls are numbered for templates that demand a form, and for
Kimi-K2. Then every text of the messages must be in the prompt, or the request is refused with its place. Only the
reasoning of earlier turns may be left out, as most templates do.

The text of the chat template determines how a model calls tools: as Hermes, Qwen and Granite 4, as Qwen3-Coder, as
Seed-OSS, as GLM-4.5 and 4.7, as MiniMax-M1 and M2, as Kimi-K2, as DeepSeek V3 and R1, as DeepSeek V3.1, as DeepSeek
V3.2 and V4 (DSML), as gpt-oss, as Llama 3 and 4 (in JSON or in Python, `[f(a=1)]`), as Mistral, as Gemma 4 and
FunctionGemma, as LFM2, as Granite 3, as Phi-4-mini (`<|tool_call|>` or `functools`), as Command R, R7B and A, as
Apertus, as Nemotron Nano 2 or as Apriel. Templates for Gemma 3 may ask for Python (a list, or the fence `tool_code`) or
for a JSON object. With other templates `tools` are refused, also with those that show no tools (Gemma 3's and
DeepSeek's own): a `chat_template.jinja` in the folder replaces them. Where the format is Hermes', the spellings of
Qwen2.5-Coder are read, too: objects within `<tools>`, and those in a code fence or alone with which an answer begins or
ends. Gemma 4's enforced calls have JSON's strings and keys. gpt-oss answers on channels: `analysis` is
`reasoning_content`, `commentary` to a tool is a call, everything else is `content`. Its answer has at most one call,
behind which the model stops. A grammar (`response_format` too) allows one message of analysis, and then a call or the
final text. The ids of Kimi-K2's calls are its own (`functions.name:index`), since its template writes them again: send
them back as they are. Where a model writes arguments as tagged texts (Qwen3-Coder, Seed-OSS, GLM-4.5, MiniMax-M2) or
without quotes (Gemma 4), the tool's schema says which are strings. Only a call of an offered tool is a call. It may
have `type`, may have name and arguments within `function`, `parameters` for `arguments`, arguments as text, or none; a
code fence or an array may be around it; raw line breaks and tabs in its strings become escapes, and Python's literals
JSON. It may lack brackets at its end, and marks or tags that the rest makes plain; a tagged value also ends at the next
tag of one of the tool's properties. An id of Kimi-K2 that is a little off names the tool that it resembles, or the only
one if the arguments fit. Any mark of gpt-oss ends a message. Anything else that the model writes is `content`, without
marks and tags, also a call whose JSON is broken or cut off, or one whose argument would have swallowed a tag. A stream
sends a call when it is complete, so `arguments` are always a JSON object, and the parts of a stream are always the
answer that is not streamed, in the same order. Text between `<think>`, `[THINK]`, `<seed:think>`, `<|channel>thought`
(Gemma 4), `<|START_THINKING|>` (Command) or `<|inner_prefix|>` (Apertus) and its end is `reasoning_content` if the
template knows these marks. Command's marks around text are no content. Calls in it are drafts, unless the answer ends
with them and the reasoning was never closed.

`/v1/messages` and `/v1/messages/count_tokens` are Anthropic's Messages API, made into a chat: the base URL of its
clients and agents is that of the server, without `/v1`. `model` is the served name, so set it in the agent, also that
of its small model. Headers `anthropic-version` and `anthropic-beta` have no effect. Reasoning is in `thinking` blocks,
whose `signature` signs nothing. In ids of calls, characters that Anthropic does not permit are `_`.
`usage.cache_read_input_tokens` counts what P or D had cached, and `input_tokens` the rest of the prompt. Errors are
Anthropic's error object; where other routes answer 503 because nothing can serve the request now, these answer 529. A
prompt longer than the context is an error that begins with `prompt is too long`, which agents act on. An API key may
come as `X-API-Key`, at every route.

Agents offer tools by default that only the servers of their own API can run (`web_search`, `local_shell`, `mcp`, ...).
Such tools, and items of an earlier turn that came from them, are left out of the prompt, and the header
`X-Chitu-Warning` says so; to choose one of them is an error. So the Codex CLI works at `/v1/responses` as it is, with a
model whose chat template calls tools. Its custom tools take text: the model sees a function with the argument `input`,
and a regular expression of theirs is a pattern of that argument, which calls always follow. A grammar in Lark is in the
prompt alone, and `X-Chitu-Warning` names it. Its MCP servers are namespaces: the model sees a function `f` of the
namespace `mcp__x` as `mcp__x__f` (with a number behind it if there is such a name already), and a call has `namespace`
and `name`, in the answer and in histories. `tool_choice` takes the name alone if only one namespace has it. Tools of
`additional_tools` and `tool_search_output` are in the prompt as those of `tools` are, and a `tool_search` that the
client runs is a function.

A model with vision sees the images of the user and those in results of tools ([images](images.md)). If its chat
template has no place for images in results, they are in the user's turn behind them, and `X-Chitu-Warning` says so.
Images count in `usage`, `/tokenize` and `count_tokens` as the rows that they are in the prompt.

What agents have in their histories does not end a session. In place of sound, files whose bytes are not text, blocks of
unknown types, and images that the model does not see, the prompt has a text such as `[image left out: this model takes
text alone]`, and `X-Chitu-Warning` names the places: in earlier turns, in results of tools, and in the user's text
beside such results. Only if the last turn is the user's, answers no call and has such a part, the request is refused
(400), since the question may be about it; an image is replaced there, too, unless the model has vision and lacks the
image. Files and documents whose bytes are text are in the prompt. Of the Responses API, calls of
tools that the client runs (`local_shell_call`, `shell_call`, `apply_patch_call`, `computer_call`, ...) and `mcp_call`
are calls of functions with their outputs; an output without a call before it is text of the user. `item_reference` is
refused, since nothing is stored.
"""
PARTS = (
    (SERVED, "Served", "meaning"),
    (NO_EFFECT, "Without effect", "why"),
    (REFUSED, "Refused", "taken nevertheless at; what to do instead"),
)
SHORT = {
    COMPLETIONS: "completions",
    CHAT: "chat",
    RESPONSES: "responses",
    MESSAGES: "messages",
    COUNT_TOKENS: "count_tokens",
    TOKENIZE: "tokenize",
    DETOKENIZE: "detokenize",
    ABORT: "abort",
    BATCHES: "batches",
    EMBEDDINGS: "embeddings",
    SCORE: "score",
    RERANK: "rerank",
    "/admin/drain": "drain",
    "/admin/role": "role",
    "/admin/weights": "weights",
    "/admin/adapters": "adapters",
    "/admin/pause": "pause",
    "/admin/resume": "resume",
    "/admin/snapshot": "snapshot",
}


def main() -> None:
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """Return the whole page."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in COMPARISON)
    table = "| what | who has it | here | why not, or what instead |\n|---|---|---|---|\n"
    return "".join([TITLE, table, rows, HEAD, *_parts()])


def _parts() -> Iterator[str]:
    rows: dict[Field, list[str]] = {}
    for route in SHORT:
        for field in BODIES.fields[route].values():
            rows.setdefault(field._replace(neutral=_neutral(field)), []).append(SHORT[route])
    for effect, title, meaning in PARTS:
        yield f"\n## {title}\n\n| field | routes | {meaning} |\n|---|---|---|\n"
        for field, routes in rows.items():
            if field.effect == effect:
                notes = "; ".join(text for text in (", ".join(field.neutral), field.note) if text)
                yield f"| `{field.name}` | {', '.join(routes)} | {notes} |\n"


def _neutral(field: Field) -> tuple[str, ...]:
    return tuple(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)


if __name__ == "__main__":
    main()
