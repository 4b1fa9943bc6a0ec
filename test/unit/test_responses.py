"""`/v1/responses` as a chat and back: turns from input, whole events, and errors that name its own fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import InvalidRequest, RequestCancelled
from chitu.http.bodies import chat_messages
from chitu.http.body_decoder import responses_decoder
from chitu.http.messages.delta import CallDelta, MessageDelta, joined
from chitu.http.responses import ResponsesFormat, chat_body, echo_of, error_for_responses
from chitu.http.sse import FinishedChoice, UsageCount

USAGE = UsageCount(3, 4, 1)


def messages(given: Any, **more: Any) -> list[dict[str, Any]]:
    body = responses_decoder.decode(json.dumps({"input": given, **more}).encode())
    return chat_messages(chat_body(body).messages)


def test_items_of_one_turn_of_the_model_become_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}'}
    turns = [
        {"role": "user", "content": "2+2?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "5"},
        {"role": "assistant", "content": "4 or 5."},
        {"role": "assistant", "content": "Or 6."},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    of_template = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert messages(turns, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", **of_template}, {"id": "c2", **of_template}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "5", "tool_call_id": "c2"},
        {"role": "assistant", "content": "4 or 5."},
        {"role": "assistant", "content": "Or 6."},
        {"role": "user", "content": "So?"},
    ]


def test_wrong_items_are_errors_of_their_place() -> None:
    for item, param in (
        ({"role": "user"}, "input[0]"),
        ({"content": "a"}, "input[0]"),
        ({"type": "function_call", "name": "f"}, "input[0]"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0]"),
        ({"type": "web_search_call"}, "input[0].type"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0]"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            messages([item])
        assert raised.value.param == param


def test_a_hosted_tool_is_refused_by_its_type() -> None:
    for tool in ({"type": "web_search"}, {"type": "mcp", "server_label": "a"}, {"type": "x" * 500}):
        for fields, param in (({"tools": [tool]}, "tools[0].type"), ({"tool_choice": tool}, "tool_choice.type")):
            with pytest.raises(InvalidRequest) as raised:
                messages("a", **fields)
            assert raised.value.param == param
            assert raised.value.message == f"{param}: " + f"'{tool['type']}'"[:100] + " is not supported"


def test_errors_of_the_chat_have_the_names_of_this_route() -> None:
    for name, own in (
        ("messages", "input"),
        ("messages[3].content", "input"),
        ("tools[1].function.name", "tools[1].name"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("tool_choice", "tool_choice"),
        (None, None),
    ):
        error = error_for_responses(InvalidRequest(f"{name} is wrong", name))
        assert (error.param, error.message) == (own, f"{own} is wrong")


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, line = event.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def form() -> ResponsesFormat:
    return ResponsesFormat("id", 1, "m", echo_of(responses_decoder.decode(b'{"input": "a"}')))


PARTS = st.lists(
    st.one_of(
        st.text("ab", max_size=3),
        st.builds(lambda text: MessageDelta(reasoning=text), st.text("ab", min_size=1, max_size=3)),
        st.builds(lambda text: MessageDelta(calls=(CallDelta(0, text, "c0", "f"),)), st.text("ab", max_size=3)),
    ),
    max_size=8,
)


@given(PARTS, st.sampled_from(["stop", "tool_calls", "length"]))
def test_the_events_of_any_message_add_up_to_its_answer(parts: list[str | MessageDelta], reason: str) -> None:
    placed: list[str | MessageDelta] = []
    for part in parts:
        if isinstance(part, MessageDelta) and part.calls:
            number = sum(isinstance(p, MessageDelta) and bool(p.calls) for p in placed)
            placed.append(MessageDelta(calls=(part.calls[0]._replace(place=number, id=f"c{number}"),)))
        else:
            placed.append(part)
    streamed = form()
    data = streamed.opening(0) + b"".join(streamed.delta(0, part, None) for part in placed)
    data += streamed.last(0, "", reason, None) + streamed.usage(USAGE) + streamed.done
    events = events_of(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for event in events:
        at = event.get("output_index", -1)
        if event["type"] == "response.output_item.added":
            assert at == len(items) and event["item"]["status"] == "in_progress"
            items[at], texts[at] = event["item"], ""
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == items[at]["id"]
            texts[at] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[at] = event["item"]
            whole = items[at].get("arguments", "".join(part["text"] for part in items[at].get("content", ())))
            assert whole == texts[at]
    last = events[-1]["response"]
    status = "incomplete" if reason == "length" else "completed"
    assert events[-1]["type"] == f"response.{status}" and last["status"] == status
    assert last["output"] == list(items.values()) and last["usage"]["total_tokens"] == 7
    if status == "completed":
        assert all(item["status"] == "completed" for item in items.values())
    # Not streamed: the same content, with one item of each kind unless the kinds alternate.
    answer = json.loads(b"".join(form().full([FinishedChoice(joined(placed), reason, None)], USAGE)))
    assert answer["status"] == status and answer["usage"] == last["usage"]
    assert set(answer) == set(last)


def test_an_error_in_the_middle_is_the_last_event() -> None:
    broken = form()
    broken.opening(0)
    broken.delta(0, "ab", None)
    *_, closing, event = events_of(broken.error(RequestCancelled("aborted")))
    assert closing["item"]["content"][0]["text"] == "ab" and closing["item"]["status"] == "incomplete"
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "cancelled", "message": "aborted"}
