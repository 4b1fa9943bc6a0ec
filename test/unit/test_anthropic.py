"""Anthropic's Messages API: bodies as chats, and answers as events, blocks and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agent_requests import TOOL_NAMES, anthropic_agent

from chitu.errors import (
    Capacity,
    ChituError,
    ContextLengthExceeded,
    DecodeLost,
    Forbidden,
    Internal,
    InvalidRequest,
    ModelNotFound,
    NoInstance,
    Overloaded,
    PayloadTooLarge,
    QueueTimeout,
    RateLimited,
    RequestTimeout,
    Unauthorized,
)
from chitu.http.answer.formats import COMMENT, AnswerHead, Delta, FinishedChoice, UsageCount
from chitu.http.ask.bodies import ChatMessage
from chitu.http.ask.chat import chat_messages, chosen_tools
from chitu.http.ask.translation import Translation
from chitu.http.dialects.anthropic.answers import SIGNATURE, MessagesFormat
from chitu.http.dialects.anthropic.bodies import MessagesBody
from chitu.http.dialects.anthropic.chat import TOO_LONG, chat_of_messages
from chitu.http.dialects.anthropic.errors import ERRORS
from chitu.http.messages.call_objects import CallDelta, MessageDelta, joined
from chitu.http.table import BODIES

USER = {"role": "user", "content": "a"}


def translated(
    variables: tuple[str, ...] = ("enable_thinking",),
    reasons: bool = True,
    warnings: list[str] | None = None,
    **fields: Any,
) -> Translation:
    body = BODIES.decoder(MessagesBody).decode(json.dumps({"messages": [USER], "max_tokens": 9, **fields}).encode())
    return chat_of_messages(body, variables, reasons, [] if warnings is None else warnings)


def turns(given: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return chat_messages(translated(messages=given, **fields).chat.messages)


def called(ident: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


# ------------------------------------------------------------------------------------------------------------ the body


def test_an_agents_request_is_a_chat_in_which_nothing_is_lost() -> None:
    warnings: list[str] = []
    body = anthropic_agent(6)
    chat = translated(warnings=warnings, **body).chat
    messages = chat_messages(chat.messages)
    assert [message["role"] for message in messages[:2]] == ["system", "user"]
    assert messages[0]["content"].startswith("You help with software.\nRules:\n- Be careful.")
    assert messages[1]["content"].splitlines()[-1] == "Rename the function `load` in every file."
    assert messages[2] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Round 0: look at file 0.",
        "tool_calls": [called("toolu_0a", "read", {"path": "src/0.py", "limit": None})],
    }
    assert messages[3] == {"role": "tool", "tool_call_id": "toolu_0a", "content": "def load():\n    return 0\n"}
    assert messages[4]["content"] == "Reading file 1." and len(messages[4]["tool_calls"]) == 2
    [edit] = messages[4]["tool_calls"][1]["function"]["arguments"]["edits"]
    assert edit["new_text"] == "print('ü {}')\n"
    assert messages[6] == {"role": "tool", "tool_call_id": "toolu_1b", "content": "Error: no such file"}
    assert messages[8:10] == [
        {"role": "tool", "tool_call_id": "toolu_2a", "content": ""},
        {"role": "user", "content": "<reminder>Mind the tests.</reminder>"},
    ]
    tools = chosen_tools(chat).offered
    assert tools is not None and [tool["function"]["name"] for tool in tools] == list(TOOL_NAMES)
    assert tools[0]["function"]["parameters"] == body["tools"][0]["input_schema"]
    assert (chat.max_completion_tokens, chat.stream, chat.temperature) == (32000, True, 1)
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert warnings == ["tools[16]: this server cannot run web_search_20250305, so the prompt leaves it out"]


def test_an_error_of_a_turn_names_the_message_that_it_begins_with() -> None:
    called = {"role": "assistant", "content": [{"type": "text", "text": "b"}, call("toolu_1")]}
    read = {"role": "user", "content": [result("c"), {"type": "text", "text": "d"}]}
    names = translated(system="s", messages=[USER, USER, called, read]).names
    places = ["system", "messages[0]", "messages[2]", "messages[3]", "messages[3]"]
    assert [names.of(f"messages[{i}].content") for i in range(5)] == places
    assert names.of("messages") == "messages"


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    begun = translated(messages=[USER, {"role": "assistant", "content": "The answer is ("}]).chat
    assert begun.continue_final_message and begun.messages is not None
    assert begun.messages[-1] == ChatMessage("assistant", "The answer is (")
    assert not translated().chat.continue_final_message


def test_turns_of_one_role_are_one_and_empty_texts_are_none() -> None:
    assert turns(
        [
            {"role": "user", "content": [{"type": "text", "text": ""}]},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "c"}, {"type": "redacted_thinking", "data": ""}],
            },
            {"role": "user", "content": "d"},
            {"role": "system", "content": "e"},
            {"role": "user", "content": []},
        ],
        system="s",
    ) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\nc"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {}, "sctrict": True}]}, "tools[0].sctrict"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "none"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        translated(**fields)
    assert raised.value.param == param and param in raised.value.message


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
NO_IMAGE = "[image left out: this model takes text alone]"
PDF = {"type": "document", "title": "T", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
SERVED = "this server serves text, so the prompt has a placeholder for"


def call(ident: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": ident, "name": "Read", "input": {}}


def result(content: Any, ident: str = "toolu_1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": ident, "content": content}


@pytest.mark.parametrize(
    ("part", "text", "is_named"),
    [
        (IMAGE, NO_IMAGE, True),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}, "transformations": {}}, NO_IMAGE, True),
        (PDF, "[document T left out]", True),
        (
            {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "a\nb"}},
            "T\nC\na\nb",
            False,
        ),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "text", "text": "a"}, IMAGE]},
                "citations": {"enabled": True},
            },
            "a",
            True,
        ),
        (
            {
                "type": "search_result",
                "source": "https://x",
                "title": "T",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "T\nhttps://x\na\nb",
            False,
        ),
        ({"type": "tool_reference", "tool_name": "mcp__x__f"}, "[tool mcp__x__f]", True),
        ({"type": "browser_state", "tabs": [], "state_changes": []}, "[browser_state left out]", True),
        ({"type": "of_tomorrow"}, "[of_tomorrow left out]", True),
    ],
)
def test_what_a_tool_has_read_is_text_or_a_placeholder_with_a_warning(
    part: dict[str, Any], text: str, is_named: bool
) -> None:
    asked = {"role": "user", "content": "Look."}
    for later in ([], [{"role": "assistant", "content": "Well."}, USER]):
        warnings: list[str] = []
        content = [{"type": "text", "text": "a.png"}, part]
        read = [
            asked,
            {"role": "assistant", "content": [call("toolu_1")]},
            {"role": "user", "content": [result(content)]},
        ]
        found = turns([*read, *later], warnings=warnings)
        assert found[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": f"a.png\n{text}"}
        assert warnings == ([f"messages[2].content[0].content[1]: {SERVED} {part['type']}"] if is_named else [])
    # The same in a turn of the user, which is refused only if it asks.
    warnings = []
    found = turns(
        [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Well."}, USER], warnings=warnings
    )
    assert found[0]["content"] == text and len(warnings) == is_named
    if text == NO_IMAGE:
        found = turns([USER, {"role": "assistant", "content": "Well."}, {"role": "user", "content": [part]}])
        assert found[2]["content"] == NO_IMAGE
    elif text.startswith("[") and part["type"] != "tool_reference":
        with pytest.raises(InvalidRequest) as raised:
            turns([USER, {"role": "assistant", "content": "Well."}, {"role": "user", "content": [part]}])
        assert raised.value.param == "messages[2].content[0].type"


def test_an_image_beside_a_result_is_a_placeholder_too() -> None:
    beside = [result("see below"), {"type": "text", "text": "screenshot:"}, IMAGE]
    found = turns([USER, {"role": "assistant", "content": [call("toolu_1")]}, {"role": "user", "content": beside}])
    assert found[2]["content"] == "see below" and found[3]["content"] == f"screenshot:\n{NO_IMAGE}"


def test_what_ran_on_anthropics_servers_stays_in_the_history_as_placeholders() -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}}
    found = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x", "page_age": None}
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "I search.", "citations": []},
        search,
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [found],
            "caller": {"type": "direct"},
        },
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "f", "server_name": "s", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "mcptoolu_1",
            "is_error": False,
            "content": [{"type": "text", "text": "42"}],
        },
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "srvtoolu_2",
            "content": {"type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []},
        },
        {"type": "container_upload", "file_id": "f"},
        {"type": "compaction", "content": "Before: a."},
        {"type": "compaction", "content": None},
        {"type": "fallback", "to": {"model": "m"}, "trigger": None},
        {"type": "text", "text": "Found."},
    ]
    warnings: list[str] = []
    given = turns([USER, {"role": "assistant", "content": blocks}, USER], warnings=warnings)
    assert given[1] == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "I search.\n[server_tool_use web_search left out]\n[web_search_tool_result left out]\n"
        "[mcp_tool_use f left out]\n[mcp_tool_result]\n42\n[code_execution_tool_result left out]\n"
        "[container_upload left out]\nBefore: a.\nFound.",
    }
    assert len(warnings) == 2 and "server_tool_use" in warnings[0]
    assert warnings[1] == "messages[1].content[10]: the prompt leaves out fallback"


def test_a_result_without_its_call_is_text_of_the_user() -> None:
    found = turns([{"role": "user", "content": [result("42", "toolu_0")]}, {"role": "assistant", "content": "a"}, USER])
    assert found[0] == {"role": "user", "content": "[result of a call]\n42"}


def test_a_choice_of_tools_is_that_of_a_chat() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    tools = [search, {"name": "f", "input_schema": {"type": "object"}}, {"type": "custom", "name": "g", "strict": True}]
    for choice, offered, enforced in (
        (None, ["f", "g"], ["f", "g"]),  # g is strict
        ({"type": "auto"}, ["f", "g"], ["f", "g"]),
        ({"type": "any"}, ["f", "g"], ["f", "g"]),
        ({"type": "tool", "name": "f"}, ["f", "g"], ["f"]),
        ({"type": "none"}, [], []),
    ):
        made = chosen_tools(translated(tools=tools, tool_choice=choice).chat)
        assert [tool["function"]["name"] for tool in made.offered or []] == offered
        assert [tool["function"]["name"] for tool in made.enforced] == enforced
        assert made.is_required is (choice is not None and choice["type"] in ("any", "tool"))
    one = translated(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}).chat
    assert one.parallel_tool_calls is False
    with pytest.raises(InvalidRequest) as raised:
        chosen_tools(translated(tools=tools, tool_choice={"type": "tool", "name": "web_search"}).chat)
    assert raised.value.param == "tool_choice"


def test_errors_of_the_chat_have_the_names_and_places_of_this_body() -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, {"name": "f"}, {"name": "g"}]
    names = translated(tools=tools).names
    for name, own in (
        ("messages[7].content", "messages"),
        ("tools[0].function.parameters.properties.parameters", "tools[1].input_schema.properties.parameters"),
        ("tools[1].function.name", "tools[2].name"),
        ("max_completion_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        ("stop_token_ids", "stop_token_ids"),
        ("response_format.json_schema.schema.type", "output_config.format.schema.type"),
        ("reasoning_effort", "output_config.effort"),
        ("tool_choice", "tool_choice"),
        (None, None),
    ):
        error = names.renamed(InvalidRequest(f"{name} is wrong", name))
        assert (error.param, error.message) == (own, f"{own} is wrong")
    too_long = names.renamed(ContextLengthExceeded("many tokens"))
    assert isinstance(too_long, ContextLengthExceeded) and too_long.message == TOO_LONG + "many tokens"


@pytest.mark.parametrize(
    ("kind", "variables", "reasons", "read", "says"),
    [
        ("enabled", ("enable_thinking",), True, {"enable_thinking": True}, ""),
        ("adaptive", ("enable_thinking",), True, {"enable_thinking": True}, ""),
        ("disabled", ("enable_thinking", "thinking"), True, {"enable_thinking": False, "thinking": False}, ""),
        ("enabled", (), True, None, ""),
        ("disabled", (), True, None, "always reasons"),
        ("enabled", (), False, None, "does not reason"),
        ("disabled", (), False, None, ""),
    ],
)
def test_thinking_is_the_templates_choice_or_a_warning(
    kind: str, variables: tuple[str, ...], reasons: bool, read: Any, says: str
) -> None:
    warnings: list[str] = []
    chat = translated(variables, reasons, warnings, thinking={"type": kind, "budget_tokens": 2000}).chat
    assert chat.chat_template_kwargs == read and chat.include_reasoning is True
    assert [says in warning for warning in warnings] == ([True] if says else [])
    hidden = translated(variables, reasons, thinking={"type": kind, "display": "omitted"}).chat
    assert hidden.include_reasoning is False


def test_an_effort_that_the_template_does_not_know_is_a_warning() -> None:
    for variables, effort, num_warnings in ((("reasoning_effort",), "high", 0), ((), None, 1)):
        warnings: list[str] = []
        chat = translated(variables, True, warnings, output_config={"effort": "high"}).chat
        assert (chat.reasoning_effort, len(warnings)) == (effort, num_warnings)


# ---------------------------------------------------------------------------------------------------------- the answer


USAGE = UsageCount(30, 12, 16, 5)
HEAD = AnswerHead("id", 1, "m", "msg_")


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, line = event.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events add up to; asserts their order."""
    whole, partial, is_open = dict(events[0]["message"]), "", False
    assert events[0]["type"] == "message_start" and [e["type"] for e in events[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    for event in events[1:-2]:
        kind = event["type"]
        assert event["index"] == len(whole["content"]) - (0 if kind == "content_block_start" else 1)
        assert is_open is (kind != "content_block_start")
        if kind == "content_block_start":
            whole["content"].append(dict(event["content_block"]))
            partial, is_open = "", True
        elif kind == "content_block_delta":
            block, delta = whole["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        else:
            assert kind == "content_block_stop"
            if whole["content"][-1]["type"] == "tool_use":
                whole["content"][-1]["input"] = json.loads(partial or "{}")
            is_open = False
    assert not is_open
    return {**whole, **events[-2]["delta"], "usage": events[-2]["usage"]}


TEXTS = st.text(max_size=6)
CALLS = st.builds(
    lambda name, value: CallDelta(0, json.dumps(value), "call_1", name),
    st.text(min_size=1, max_size=5),
    st.dictionaries(TEXTS, st.recursive(st.none() | st.integers() | TEXTS, st.lists, max_leaves=4), max_size=3),
)
PARTS = st.lists(
    st.one_of(TEXTS, st.builds(MessageDelta, TEXTS, TEXTS, st.lists(CALLS, max_size=2).map(tuple), st.just(())))
)
ENDS = (("stop", ""), ("stop", "END"), ("length", ""), ("tool_calls", ""))


@given(PARTS, st.sampled_from(ENDS), st.booleans())
def test_the_events_of_any_message_add_up_to_its_answer(
    given: list[str | MessageDelta], end: tuple[str, str], fills: bool
) -> None:
    reason, stop = end
    placed: list[str | MessageDelta] = []
    num_calls = 0
    for part in given:
        if isinstance(part, MessageDelta):
            calls = [call._replace(place=num_calls + i, id=f"c{num_calls + i}") for i, call in enumerate(part.calls)]
            num_calls += len(calls)
            part = part._replace(calls=tuple(calls))
        placed.append(part)
    form = MessagesFormat(HEAD, fills)
    data = form.opening(0, 30, 16) + b"".join(form.delta(0, Delta(part, [])) for part in placed)
    data += form.last(0, Delta("", [], reason=reason, stop_text=stop)) + form.usage(USAGE) + form.done
    events = events_of(data)
    whole = json.loads(
        b"".join(
            MessagesFormat(HEAD, fills).full([FinishedChoice(joined(placed), reason, None, stop_text=stop)], USAGE)
        )
    )
    assert accumulated(events) == whole
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"] == {
        **{"input_tokens": 14, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16, "output_tokens": 0},
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert whole["usage"]["output_tokens"] == 12 and whole["usage"]["output_tokens_details"] == {"thinking_tokens": 5}
    at_length = "model_context_window_exceeded" if fills else "max_tokens"
    reasons = {"stop": "stop_sequence" if stop else "end_turn", "length": at_length, "tool_calls": "tool_use"}
    assert whole["stop_reason"] == reasons[reason] and whole["stop_sequence"] == (stop or None)
    for block in whole["content"]:
        if block["type"] == "thinking":
            assert block["signature"] == SIGNATURE and block["thinking"]


def test_ids_of_calls_have_the_characters_that_anthropic_permits_and_differ() -> None:
    given = ("functions.get_w:0", "functions_get_w:0", "toolu_1-a", "é")
    calls = tuple([CallDelta(i, "{}", name, "get_w") for i, name in enumerate(given)])
    whole = json.loads(
        b"".join(MessagesFormat(HEAD, False).full([FinishedChoice(MessageDelta(calls=calls), "stop", None)], USAGE))
    )
    ids = [block["id"] for block in whole["content"]]
    assert ids == ["functions_get_w_0", "functions_get_w_0_", "toolu_1-a", "_"]


def test_a_stream_has_all_kinds_of_deltas_and_pings_once_it_has_begun() -> None:
    form = MessagesFormat(HEAD, False)
    assert form.sign_of_life is COMMENT
    data = form.opening(0, 1, 0) + form.sign_of_life
    data += form.delta(0, Delta(MessageDelta("b", "a", (CallDelta(0, '{"c": 1}', "i", "f"),)), []))
    data += form.last(0, Delta("", [], reason="tool_calls")) + form.usage(USAGE)
    events = events_of(data)
    kinds = [event.get("delta", event).get("type", event["type"]) for event in events]
    assert kinds == [
        *("message_start", "ping", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop", "message_delta", "message_stop"),
    ]


def test_an_error_in_the_middle_is_an_event_of_its_own() -> None:
    form = MessagesFormat(HEAD, False)
    form.opening(0, 1, 0)
    form.delta(0, Delta("a", []))
    [event] = events_of(form.error(DecodeLost("D0 died")))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "D0 died"}, "request_id": None}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x", "a"), 400, "invalid_request_error"),
        (ContextLengthExceeded("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (ModelNotFound("x"), 404, "not_found_error"),
        (PayloadTooLarge("x"), 413, "request_too_large"),
        (RateLimited("x"), 429, "rate_limit_error"),
        (Internal("x"), 500, "api_error"),
        (DecodeLost("x"), 503, "api_error"),
        (RequestTimeout("x"), 504, "timeout_error"),
        *((kind("x"), 529, "overloaded_error") for kind in (Capacity, Overloaded, QueueTimeout, NoInstance)),
    ],
)
def test_errors_have_anthropics_types_and_statuses(error: ChituError, status: int, kind: str) -> None:
    told = json.loads(ERRORS.body(error, "r1"))
    assert ERRORS.status(error) == status
    assert told == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "r1"}
