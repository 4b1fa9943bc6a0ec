"""No field of a body is silently ignored: the table of fields is whole, and each field has the effect that it lists."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import openai.types.chat as chat_types
import pytest
from openai.types import completion_create_params as completion_params
from openai.types import responses, shared_params
from openai.types.chat import chat_completion_message_function_tool_call_param as tool_call_params
from openai.types.chat import chat_completion_named_tool_choice_param as tool_choice_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from chitu.errors import InvalidRequest
from chitu.http.api_document import openapi_document
from chitu.http.ask.bodies import (
    LARGE_BODY_BYTES,
    NO_EFFECT,
    REFUSED,
    SERVED,
)
from chitu.http.ask.chat import chat_messages, offered_tools
from chitu.http.ask.decoder import warning_header
from chitu.http.ask.fields import Field
from chitu.http.ask.grammar_fields import grammar_of
from chitu.http.ask.other_servers import NEUTRAL_OF_OTHER_NAMES, OTHER_NAMES
from chitu.http.ask.prompts import prompts_of
from chitu.http.dialects.anthropic.bodies import COUNT_TOKENS, MESSAGES
from chitu.http.dialects.openai.bodies import ABORT, CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from chitu.http.dialects.pooled.bodies import EMBEDDINGS, RERANK, SCORE
from chitu.http.dialects.responses.bodies import RESPONSES
from chitu.http.dialects.responses.chat import chat_of_responses
from chitu.http.table import BODIES as TABLE
from chitu.http.table import DIALECTS
from chitu.http.wire.routes import Route

ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "a"}
DECODERS = {route: TABLE.decoder(body) for route, body in TABLE.bodies.items()}
BODIES, fields_of = TABLE.bodies, TABLE.fields.__getitem__
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [USER]},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [1]},
    ABORT: {"rid": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
    COUNT_TOKENS: {"messages": [USER]},
    EMBEDDINGS: {"input": "a"},
    SCORE: {"text_1": "a", "text_2": "b"},
    RERANK: {"query": "a", "documents": ["b"]},
}
ASKING = ["something", 7, [1], {"a": 1}]
"""Values of which at least one is not neutral for each refused field."""


def decode(route: str, body: dict[str, Any], warnings: list[str] | None = None) -> Any:
    return DECODERS[route].decode(json.dumps({**LEAST[route], **body}).encode(), warnings)


def every(effect: str) -> list[Any]:
    return [
        pytest.param(route, field, id=f"{route} {field.name}")
        for route in BODIES
        for field in fields_of(route).values()
        if field.effect == effect and "." not in field.name
    ]


@pytest.mark.parametrize("route", BODIES)
def test_a_field_is_in_the_bodys_struct_or_once_in_the_table(route: str) -> None:
    names = [row[0] for each in DIALECTS for routes, _, rows in each.unserved if route in routes for row in rows]
    served = {field.name for field in fields_of(route).values() if field.effect == SERVED}
    assert len(names) == len(set(names)) and served.isdisjoint(names)
    # A refused or ineffective field is not in a body's own struct: the route would have to look at it.
    assert set(BODIES[route].__struct_fields__) == {name for name in served if "." not in name}


def test_every_field_that_openais_client_knows_is_in_the_table() -> None:
    known = {
        COMPLETIONS: completion_params.CompletionCreateParamsBase,
        CHAT: chat_params.CompletionCreateParamsBase,
        RESPONSES: response_params.ResponseCreateParamsBase,
    }
    for route, params in known.items():
        assert {*params.__annotations__, "stream"} <= set(fields_of(route)), route
    table = fields_of(CHAT)
    nested = [
        ("stream_options.", chat_types.ChatCompletionStreamOptionsParam),
        ("prediction.", chat_types.ChatCompletionPredictionContentParam),
        ("prediction.content[].", chat_types.ChatCompletionContentPartTextParam),
        ("messages[].content[].", chat_types.ChatCompletionContentPartTextParam),
        ("messages[].tool_calls[].", chat_types.ChatCompletionMessageFunctionToolCallParam),
        ("messages[].tool_calls[].function.", tool_call_params.Function),
        ("tools[].", chat_types.ChatCompletionFunctionToolParam),
        ("tools[].function.", shared_params.FunctionDefinition),
        ("tool_choice.", chat_types.ChatCompletionNamedToolChoiceParam),
        ("tool_choice.function.", tool_choice_params.Function),
    ]
    nested += [
        ("messages[].", getattr(chat_types, f"ChatCompletion{role}MessageParam"))
        for role in ("Assistant", "Developer", "Function", "System", "Tool", "User")
    ]
    for prefix, param in nested:
        assert {prefix + name for name in param.__annotations__} <= set(table)
    table = fields_of(RESPONSES)
    for prefix, param in (
        *(("input[].", item) for item in get_args(responses.ResponseInputItemParam)),
        ("tools[].", responses.NamespaceToolParam),
        ("tools[].tools[].", responses.namespace_tool_param.ToolFunction),
        ("tools[].", responses.ToolSearchToolParam),
        ("input[].content[].", responses.ResponseInputFileParam),
        ("input[].content[].", responses.ResponseInputTextParam),
        ("input[].content[].", responses.ResponseInputImageParam),
        ("input[].content[].", responses.ResponseOutputTextParam),
        ("input[].content[].", responses.ResponseOutputRefusalParam),
        ("tools[].", responses.FunctionToolParam),
        ("tool_choice.", responses.ToolChoiceFunctionParam),
        ("reasoning.", shared_params.Reasoning),
        ("text.", responses.ResponseTextConfigParam),
    ):
        assert {prefix + name for name in param.__annotations__} <= set(table), param


def test_the_page_of_all_fields_is_that_of_the_table() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "api_reference.py"))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["reference"](), "call script/api_reference.py"
    for what, _, here, why in tool["COMPARISON"]:
        routes = set(re.findall("`(/[^`]*)`", what))
        assert here != "no" or (why and not routes & set(BODIES)), what


def test_the_openapi_document_has_the_same_fields() -> None:
    schemas = openapi_document("0", [Route("POST", path, None) for path in BODIES], TABLE)["components"]["schemas"]
    json.dumps(schemas)
    for route, body in BODIES.items():
        schema = schemas[body.__name__]
        assert set(schema["properties"]) == {name for name in fields_of(route) if "." not in name}
        assert schema["additionalProperties"] is False
    for name in ("ChatMessage", "TextPart", "StreamOptions", "Tool", "ToolFunction", "MessageToolCall", "ChosenTool"):
        assert schemas[name]["additionalProperties"] is False


@pytest.mark.parametrize(("route", "field"), every(REFUSED))
def test_what_is_refused_is_refused_by_name_unless_it_asks_for_nothing(route: str, field: Field) -> None:
    asking = [value for value in [*ASKING, True, False, 0, 1] if value not in field.neutral]
    for value in asking:
        with pytest.raises(InvalidRequest) as raised:
            decode(route, {field.name: value})
        assert raised.value.param == field.name
        with pytest.raises(InvalidRequest):
            decode(route, {field.name: value}, [])
    for value in (None, *field.neutral):
        decode(route, {field.name: value})


@pytest.mark.parametrize(("route", "field"), every(NO_EFFECT))
def test_what_has_no_effect_is_taken_whatever_it_is(route: str, field: Field) -> None:
    for value in (None, *ASKING):
        assert decode(route, {field.name: value}) is not None


def test_what_is_true_for_python_but_not_in_json_asks_for_something() -> None:
    for name, value in (
        ("top_logprobs", False),
        ("length_penalty", True),
        ("use_beam_search", 0),
    ):
        with pytest.raises(InvalidRequest) as raised:
            decode(COMPLETIONS, {name: value})
        assert raised.value.param == name


UNKNOWN = [
    (CHAT, {"temprature": 0}, "temprature", "did you mean temperature?"),
    (CHAT, {"temprature": None}, "temprature", "did you mean temperature?"),
    (CHAT, {"user": "me", "metadata": {}, "tools": [], "qqqq": 1}, "qqqq", "no such field"),
    (CHAT, {"prompt": "a"}, "prompt", "/v1/completions has it"),
    (COMPLETIONS, {"messages": [USER]}, "messages", "/v1/chat/completions has it"),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usge": 1}}, "stream_options.include_usge", "_usage?"),
    (CHAT, {"messages": [USER, {**USER, "nme": "x"}]}, "messages[1].nme", "did you mean messages[].name?"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
        "messages[0].content[0].txt",
        "did you mean messages[].content[].text?",
    ),
    (TOKENIZE, {"add_special_token": False}, "add_special_token", "did you mean add_special_tokens?"),
    (DETOKENIZE, {"skip_special": True}, "skip_special", "did you mean skip_special_tokens?"),
    (CHAT, {"x\r\ny": 1}, "x\r\ny", "no such field"),
    (CHAT, {"typical_q": 5}, "typical_q", "no such field"),  # not the name of a field that is refused
    (CHAT, {"maxTokenz": 5}, "maxTokenz", "did you mean max_tokens?"),
]


OTHERWISE = [
    (CHAT, "maxTokens", "max_tokens"),
    (CHAT, "n_predict", "max_tokens"),
    (COMPLETIONS, "n_predict", "max_tokens"),
    (CHAT, "think", "enable_thinking"),
    (RESPONSES, "enable_thinking", "chat_template_kwargs.enable_thinking"),
    (RESPONSES, "max_tokens", "max_output_tokens"),
    (RESPONSES, "response_format", "text.format"),
    (MESSAGES, "response_format", "output_config.format"),
    (MESSAGES, "stop", "stop_sequences"),
    (CHAT, "stop_sequences", "stop"),
    (CHAT, "input", "messages"),
    (RERANK, "texts", "documents"),
]


@pytest.mark.parametrize(("route", "name", "here"), OTHERWISE)
def test_a_field_that_is_served_under_another_name_is_refused_with_that_name(route: str, name: str, here: str) -> None:
    for warnings in (None, []):
        with pytest.raises(InvalidRequest) as raised:
            decode(route, {name: 5}, warnings)
        assert raised.value.param == name and f"see `{here}`" in raised.value.message


def test_other_names_lead_to_fields_that_are_served() -> None:
    served = {field.name for route in BODIES for field in fields_of(route).values() if field.effect == SERVED}
    named = {here.split(".enable")[0] for meant in OTHER_NAMES.values() for here in meant}
    assert named <= served and NEUTRAL_OF_OTHER_NAMES.keys() <= OTHER_NAMES.keys()


@pytest.mark.parametrize("value", [None, "x", {"type": "ephemeral"}, []])
def test_what_other_servers_add_to_messages_and_tools_has_no_effect(value: Any) -> None:
    names = ("id", "thinking_blocks", "reasoning_details", "metadata", "cache_control")
    tool = {"type": "function", "function": {"name": "f", "cache_control": value}, "cache_control": value}
    messages = [{**USER, **dict.fromkeys(names, value)}]
    for route in (CHAT, TOKENIZE):
        decoded = decode(route, {"messages": messages, "tools": [tool]})
        assert chat_messages(decoded.messages) == [USER]
        assert offered_tools(decoded.tools) == [{"type": "function", "function": {"name": "f"}}]
    item = {**USER, "metadata": value, "cache_control": value}
    assert decode(RESPONSES, {"input": [item], "tools": [{"type": "function", "name": "f", "cache_control": value}]})


def test_parts_of_a_text_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "Be terse."}, {"type": "text", "text": "Use bullets."}]
    call = {"id": "1" * 4572, "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1" * 4572, "content": parts},
    ]
    shown = chat_messages(decode(CHAT, {"messages": messages}).messages)
    assert [message["content"] for message in shown] == ["Be terse.\nUse bullets.", "", "Be terse.\nUse bullets."]
    of_input = [{"type": "input_text", "text": part["text"]} for part in parts]
    items = [
        {"role": "user", "content": of_input},
        {"type": "function_call", "call_id": "1" * 4572, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1" * 4572, "output": of_input},
    ]
    shown = chat_messages(chat_of_responses(decode(RESPONSES, {"input": items}), (), []).chat.messages)
    assert [message["content"] for message in shown] == ["Be terse.\nUse bullets.", "", "Be terse.\nUse bullets."]


def test_a_part_without_text_and_one_of_another_type_are_told_apart() -> None:
    for part, param, says in (
        ({"type": "text"}, "messages[0].content[1].text", "is required"),
        ({"type": "text", "text": None}, "messages[0].content[1].text", "is required"),
        ({"type": "video"}, "messages[0].content[1]", "only 'text' parts are supported, not 'video'"),
    ):
        body = decode(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
        with pytest.raises(InvalidRequest, match=says) as raised:
            chat_messages(body.messages)
        assert raised.value.param == param


@pytest.mark.parametrize(
    ("raw", "param", "says"),
    [
        (rb'{"messages": [{"role": "user", "content": "a, {} \" \ud83d"}]}', "messages[0].content", "surrogate"),
        (
            rb'{"messages": [{"role": "", "content": [{"type": "", "text": "\ud83d\ude00 \\ud83d \udc00"}]}]}',
            "messages[0].content[0].text",
            "surrogate",
        ),
        (rb'{"stop": ["a", "\ud83d\u0041"], "messages": []}', "stop[1]", "surrogate"),
        (b'{"messages": [], "stop": "a\xf0\x9f"}', "stop", "not UTF-8"),
        (b'{"messages": [], "guided_json": {"title": "\xe4"}}', "guided_json.title", "not UTF-8"),
        (rb'{"messages": [{"role": "user", "content": "\ud83d\ude00"}', None, "is not valid JSON"),
    ],
)
def test_a_character_that_was_cut_in_two_is_named_with_its_field(raw: bytes, param: str | None, says: str) -> None:
    for padding in (b"", b" " * LARGE_BODY_BYTES):
        with pytest.raises(InvalidRequest, match=says) as raised:
            grammar_of(DECODERS[CHAT].decode(raw + padding))
        assert raised.value.param == param and ("was cut in two" in raised.value.message) is (param is not None)


@pytest.mark.parametrize("prompt", [b'"a\xe6\x97"', b'["a", "\xe6\x97"]'])
def test_a_prompt_with_a_part_of_a_character_is_named(prompt: bytes) -> None:
    with pytest.raises(InvalidRequest, match="was cut in two") as raised:
        prompts_of(DECODERS[COMPLETIONS].decode(b'{"prompt": ' + prompt + b"}").prompt, "prompt")
    assert raised.value.param == ("prompt[1]" if prompt.startswith(b"[") else "prompt")


@pytest.mark.parametrize(("route", "body", "param", "hint"), UNKNOWN)
def test_an_unknown_field_is_refused_with_the_nearest_or_warned_of(
    route: str, body: dict[str, Any], param: str, hint: str
) -> None:
    for padding in ("", " " * LARGE_BODY_BYTES):
        raw = json.dumps({**LEAST[route], **body}).encode() + padding.encode()
        with pytest.raises(InvalidRequest) as raised:
            DECODERS[route].decode(raw)
        assert raised.value.param == param and hint in raised.value.message
        warnings: list[str] = []
        assert DECODERS[route].decode(raw, warnings) is not None
        assert len(warnings) == 1 and param in warnings[0]
        value = warning_header(warnings)[1]
        assert value.isascii() and value.decode().isprintable()


def structs_within(kind: msgspec.inspect.Type, seen: set[type]) -> None:
    """Add all structs that a type has to `seen`."""
    if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        for field in kind.fields:
            structs_within(field.type, seen)
    for inner in (*getattr(kind, "types", ()), *(getattr(kind, name, None) for name in ("item_type", "value_type"))):
        if inner is not None:
            structs_within(inner, seen)


def test_no_object_of_any_body_ignores_a_field_that_it_does_not_know() -> None:
    seen: set[type] = set()
    for body in BODIES.values():
        structs_within(msgspec.inspect.type_info(body), seen)
    assert len(seen) > len(BODIES)
    assert [kind for kind in seen if not cast(Any, kind).__struct_config__.forbid_unknown_fields] == []


def test_a_lenient_server_names_unknown_fields_of_the_body_and_of_its_objects_and_takes_the_rest() -> None:
    messages = [USER, {**USER, "a1": 1}, {**USER, "a1": 1, "content": [{"type": "text", "text": "b", "b1": 1}]}]
    warnings: list[str] = []
    body = decode(CHAT, {"messages": messages, "n": 2, "c1": 1, "d1": 1}, warnings)
    assert [text.split(":")[0] for text in warnings] == ["messages[1].a1", "messages[2].content[0].b1", "c1", "d1"]
    assert body.n == 2 and [message["content"] for message in chat_messages(body.messages)] == ["a", "a", "b"]


@pytest.mark.parametrize("name", ["function_call", "audio"])
def test_of_a_message_what_is_not_served_is_refused_unless_empty(name: str) -> None:
    for empty in (None, [], "", {}):
        decoded = decode(CHAT, {"messages": [{**USER, name: empty}]})
        assert chat_messages(decoded.messages) == [USER]
    for asking in ([{"id": "x"}], "x", {"a": 1}, 1, True):
        decoded = decode(CHAT, {"messages": [USER, {**USER, name: asking}]})
        with pytest.raises(InvalidRequest) as raised:
            chat_messages(decoded.messages)
        assert raised.value.param == f"messages[1].{name}"


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_only_an_answer_that_is_sent_back_and_the_result_of_a_tool_may_have_no_content(content: dict[str, Any]) -> None:
    answer = {"role": "assistant", **content, "refusal": None, "reasoning_content": "Hm"}  # cut off while it reasons
    decoded = decode(CHAT, {"messages": [USER, answer, USER]})
    sent_back = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert chat_messages(decoded.messages) == [USER, sent_back, USER]
    nothing = {"role": "tool", "tool_call_id": "c"}
    assert chat_messages(decode(CHAT, {"messages": [{**nothing, **content}]}).messages) == [{**nothing, "content": ""}]
    for role in ("system", "user"):
        decoded = decode(CHAT, {"messages": [USER, {"role": role, **content}]})
        with pytest.raises(InvalidRequest) as raised:
            chat_messages(decoded.messages)
        assert raised.value.param == "messages[1].content"


BY_DEFAULT = {
    # What clients send by default, taken from their sources.
    "openai": (CHAT, {"model": "m", "messages": [USER], "stream": False}),
    "langchain-openai OpenAI": (
        COMPLETIONS,
        {
            **{"model": "m", "prompt": ["a"], "temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "n": 1},
            **{"presence_penalty": 0, "logprobs": None, "max_tokens": 256, "seed": None, "logit_bias": {}},
            **{"best_of": 1, "user": None},
        },
    ),
    "langchain-openai ChatOpenAI with an answer sent back": (
        CHAT,
        {
            "messages": [USER, {"role": "assistant", "content": "b", "refusal": None}, {**USER, "name": "ann"}],
            **{"model": "m", "stream": True, "stream_options": {"include_usage": True}},
        },
    ),
    "openai, an answer sent back whole": (
        CHAT,
        {
            "messages": [
                USER,
                {
                    **{"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None},
                    "provider_specific_fields": {"refusal": None},
                    **{"function_call": None, "tool_calls": None},
                },
            ]
        },
    ),
    "openai, a call sent back with its answer": (
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "4"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
    ),
    "litellm": (CHAT, {"model": "m", "messages": [USER], "user": "u", "metadata": {}, "extra_body": {}}),
    "lm-eval local-chat-completions": (
        CHAT,
        {
            "messages": [{**USER, "type": "text"}],
            **{"model": "m", "max_tokens": 256, "temperature": 0, "stop": ["\n"], "seed": 1234},
        },
    ),
    "guidellm": (
        COMPLETIONS,
        {
            **{"model": "m", "prompt": "a", "stream": True, "stop": None, "ignore_eos": True},
            **{"max_tokens": 8, "max_completion_tokens": 8},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "vllm bench serve": (
        COMPLETIONS,
        {
            **{"model": "m", "prompt": "a", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None},
            **{"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0},
        },
    ),
    "sglang bench_serving": (
        COMPLETIONS,
        {"model": "m", "prompt": "a", "temperature": 0.0, "best_of": 1, "max_tokens": 8, "ignore_eos": True},
    ),
    "aiperf": (
        CHAT,
        {
            "messages": [{"role": "user", "name": "", "content": [{"type": "text", "text": "a"}]}],
            **{"model": "m", "stream": True, "max_completion_tokens": 8},
        },
    ),
}


@pytest.mark.parametrize("client", BY_DEFAULT)
def test_what_clients_send_by_default_is_taken(client: str) -> None:
    route, body = BY_DEFAULT[client]
    decoded = decode(route, body)
    if route == CHAT:
        assert chat_messages(decoded.messages)
