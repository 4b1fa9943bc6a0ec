"""Tokens -> text -> events: deltas equal the whole text however the tokens are cut, and events are valid JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agent_requests import PATCH, codex_agent

from chitu.errors import BadFrame, Internal, InvalidRequest, RequestCancelled
from chitu.http.answer.choice import ChoiceDecoder, RunningAnswer, RunningAnswers
from chitu.http.answer.formats import AnswerHead, Delta, FinishedChoice, UsageCount
from chitu.http.answer.token_logprobs import (
    LOWEST,
    ChatLogprobs,
    ChoiceLogprobs,
    CompletionLogprobs,
    chat_texts,
    completion_texts,
)
from chitu.http.ask.chat import chat_messages
from chitu.http.ask.parsed import OutputOptions
from chitu.http.dialects.anthropic.answers import MessagesFormat
from chitu.http.dialects.openai.answers import ChatFormat, CompletionFormat
from chitu.http.dialects.responses.answers import ResponsesFormat
from chitu.http.dialects.responses.bodies import ResponsesBody
from chitu.http.dialects.responses.chat import Repeated, chat_of_responses
from chitu.http.dialects.responses.items import decoded_reasoning, encoded_reasoning
from chitu.http.dialects.responses.tools import CalledTool
from chitu.http.messages.call_formats import HermesParser
from chitu.http.messages.call_objects import CallDelta, MessageDelta, joined
from chitu.http.messages.message_parser import MARKS, MessagePlan
from chitu.http.table import BODIES, ENDPOINTS
from chitu.protocol import SamplingParams, pack_logprobs, prompt_lines, unpack_logprobs
from chitu.tokenizer import StopScanner

EOS = 256


class ByteDetokenizer:
    """A detokenizer in which a token is a byte; text appears with the last byte of a character."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, token_ids: list[int], /) -> str:
        self._pending += bytes(token for token in token_ids if token < 256)
        for end in range(len(self._pending), -1, -1):
            try:
                text = self._pending[:end].decode()
            except UnicodeDecodeError:
                continue
            self._pending = self._pending[end:]
            return text
        return ""

    def finish(self) -> str:
        return self._pending.decode(errors="replace")


def decoder(stops: tuple[str, ...], include_stop: bool) -> ChoiceDecoder:
    options = OutputOptions(1, True, False, stops, include_stop, True, True)
    scanner = StopScanner(stops, include_stop) if stops else None
    return ChoiceDecoder(ByteDetokenizer(), scanner, options, frozenset({EOS}))


@given(
    st.text("abcö😀", max_size=30),
    st.lists(st.text("abcö😀", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.sampled_from(["length", "stop"]),
)
def test_deltas_equal_the_whole_text_however_they_are_cut(
    text: str, stops: list[str], include_stop: bool, cuts: list[int], reason: str
) -> None:
    tokens = [*text.encode(), EOS] if reason == "stop" else list(text.encode())
    at_once = (whole := decoder(tuple(stops), include_stop)).whole(list(tokens), reason)

    def streamed(cuts: list[int]) -> tuple[ChoiceDecoder, list[Delta]]:
        streaming, deltas, at = decoder(tuple(stops), include_stop), [], 0
        for cut in cuts:
            part, at = tokens[at : at + cut], at + cut
            deltas += streaming.feed(part, reason if at >= len(tokens) else None)
            if streaming.finish_reason is not None:
                break
        return streaming, deltas

    streaming, deltas = streamed(cuts * 4)
    assert deltas == streamed([1] * 160)[1], "a client goes on behind event n of a stream that was cut otherwise"
    ids = [token for delta in deltas for token in delta.token_ids]
    assert "".join([str(delta.text) for delta in deltas]) == at_once.text
    assert ids == at_once.token_ids and streaming.num_tokens == whole.num_tokens == len(ids)
    assert streaming.finish_reason == whole.finish_reason
    if not any(stop in text for stop in stops):
        assert at_once.text == text and len(ids) == len(tokens)
    else:
        assert whole.finish_reason == "stop" and len(at_once.text) <= len(text)
        assert include_stop or not any(stop in at_once.text for stop in stops)


@given(st.text(max_size=20))
def test_events_are_json_whatever_the_text(text: str) -> None:
    for make in (CompletionFormat, ChatFormat):
        options = OutputOptions(1, True, True, (), False, True, False)
        form = make(AnswerHead("id", 1, 'm"odel'), options)
        events = [form.delta(1, Delta(text, [])), form.opening(1), form.usage(UsageCount(1, 2, 0))]
        form = make(AnswerHead("id", 1, 'm"odel'), msgspec.structs.replace(options, return_token_ids=True))
        events += [form.delta(1, Delta(text, [1, 2])), form.last(0, Delta(text, [], reason="stop"))]
        for event in filter(None, events):
            assert event.startswith(b"data: ") and event.endswith(b"\n\n")
            body = json.loads(event[6:])
            assert body["model"] == 'm"odel' and "usage" in body
        body = json.loads(b"".join(form.full([FinishedChoice(text, "stop", None)], UsageCount(1, 2, 0))))
        choice = body["choices"][0]
        assert (choice["text"] if make is CompletionFormat else choice["message"]["content"]) == text
        counts: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        counts["prompt_tokens_details"] = {"cached_tokens": 0}
        assert body["usage"] == {**counts, "completion_tokens_details": {"reasoning_tokens": 0}}


# ----------------------------------------------------------------------------------------------------------------------
# Logprobs in OpenAI's formats: they come with the tokens whose text goes out, byte for byte, for any cut.


def bytes_of(token: int) -> bytes | None:
    """Return the bytes of a token: one byte, the text of eos, or None for ids beyond eos, which no tokenizer has."""
    return bytes([token]) if token < EOS else b"<eos>" if token == EOS else None


def packed(tokens: list[int]) -> list[bytes]:
    """Pack a logprob of each token, which encodes its place, with one more candidate."""
    return [pack_logprobs(-1.0 - place, [(65, -0.25), (token, -1.0 - place)]) for place, token in enumerate(tokens)]


def completion() -> CompletionLogprobs:
    return CompletionLogprobs(completion_texts(bytes_of), ByteDetokenizer())


def chat() -> ChatLogprobs:
    return ChatLogprobs(chat_texts(bytes_of))


@given(
    st.text("abcö😀", max_size=20),
    st.lists(st.text("abcö", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.booleans(),
)
def test_a_stream_has_the_logprobs_of_its_text_and_all_of_them(
    text: str, stops: list[str], cuts: list[int], is_chat: bool
) -> None:
    tokens, shown = [*text.encode(), EOS], decoder(tuple(stops), False)
    logprobs: ChoiceLogprobs = chat() if is_chat else completion()
    events: list[dict[str, Any]] = []
    pieces, at = [], 0
    for cut in cuts * 4:
        part = tokens[at : at + cut]
        logprobs.push(part, packed(tokens)[at : at + cut])
        at += cut
        for delta in shown.feed(part, "stop" if at >= len(tokens) else None):
            pieces.append(delta.text)
            events.append(json.loads(logprobs.of(len(delta.token_ids))))
        if shown.finish_reason is not None:
            break
    num_tokens = shown.num_tokens
    expected = [-1.0 - place for place in range(num_tokens)]
    if is_chat:
        entries = [entry for event in events for entry in event["content"]]
        assert [entry["logprob"] for entry in entries] == expected
        whole = b"".join(bytes(entry["bytes"]) for entry in entries[:num_tokens])
        assert whole == (text.encode() + b"<eos>")[: len(whole)]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        return
    assert [number for event in events for number in event["token_logprobs"]] == expected
    offsets = [offset for event in events for offset in event["text_offset"]]
    encoded = text.encode()
    assert offsets == [len(encoded[:place].decode(errors="ignore")) for place in range(num_tokens)]
    if not stops:
        assert "".join(pieces) == text and num_tokens == len(tokens)


def test_a_part_of_a_character_is_shown_as_bytes_and_what_no_tokenizer_has_by_its_id() -> None:
    tokens = [*"é".encode(), EOS, EOS + 1]
    one, other = completion(), chat()
    for form in (one, other):
        form.push(tokens, packed(tokens))
        form.show(len(tokens))
    plain = json.loads(one.take())
    assert plain["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<eos>", "token_id:257"]
    assert plain["top_logprobs"][0] == {"A": -0.25, "bytes:\\xc3": -1.0}
    content = json.loads(other.take())["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [
        *[("\\xc3", [0xC3]), ("\\xa9", [0xA9])],
        *[("<eos>", list(b"<eos>")), ("token_id:257", None)],
    ]
    assert json.loads(other.take()) == {"content": [], "refusal": None}, "it is taken once"


def test_the_token_itself_is_among_the_candidates_of_a_completion_once() -> None:
    form = completion()
    form.push([67, 66], [pack_logprobs(-3.0, [(65, -0.5), (66, -1.0)]), pack_logprobs(-1.0, [(65, -0.5), (66, -1.0)])])
    form.push([68], [pack_logprobs(float("-inf"))])
    form.show(3)
    assert json.loads(form.take())["top_logprobs"] == [
        {"A": -0.5, "B": -1.0, "C": -3.0},
        {"A": -0.5, "B": -1.0},
        {"D": LOWEST},
    ]


def test_tokens_without_their_logprobs_are_an_error_and_no_shifted_answer() -> None:
    form = chat()
    form.push([65, 66], packed([65]))
    with pytest.raises(Internal):
        form.show(2)
    with pytest.raises(BadFrame):
        unpack_logprobs(bytes(8))


def test_the_lines_of_a_prompt_are_as_many_as_its_tokens_but_one() -> None:
    assert prompt_lines(1, b"") == [None]
    lines = packed([5, 6, 7])
    assert prompt_lines(4, b"".join(lines)) == [None, *lines]
    for num_tokens, data in ((4, b"".join(lines)[:-1]), (1, lines[0])):
        with pytest.raises(BadFrame):
            prompt_lines(num_tokens, data)


# ----------------------------------------------------------------------------------------------------------------------
# `/v1/responses` as a chat and back: turns from input, whole events, and errors that name its own fields.


USAGE = UsageCount(3, 4, 1)


decode = BODIES.decoder(ResponsesBody).decode
ECHO = Repeated.of(decode(b'{"input": "a"}'), SamplingParams(max_tokens=1))
CUSTOM = {"apply_patch": CalledTool("custom", "apply_patch", "")}
HEAD = AnswerHead("id", 1, "m", "resp_")


def messages(given: Any, **more: Any) -> list[dict[str, Any]]:
    body = decode(json.dumps({"input": given, **more}).encode())
    return chat_messages(chat_of_responses(body, (), []).chat.messages)


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
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "custom_tool_call", "input": "a"}, "input[0]"),
        ({"type": "custom_tool_call_output", "call_id": "c"}, "input[0]"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0]"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            messages([item])
        assert raised.value.param == param


def test_what_other_servers_run_is_left_out_with_a_warning_and_cannot_be_chosen() -> None:
    for tool in ({"type": "web_search"}, {"type": "mcp", "server_label": "a"}, {"type": "x" * 500}):
        warnings: list[str] = []
        function = {"type": "function", "name": "f"}
        body = decode(json.dumps({"input": "a", "tools": [tool, function]}).encode())
        chat = chat_of_responses(body, (), warnings).chat
        assert [each.function.name for each in chat.tools or ()] == ["f"]
        assert warnings == [f"tools[0]: this server cannot run {tool['type'][:40]}, so the prompt leaves it out"]
        with pytest.raises(InvalidRequest) as raised:
            messages("a", tool_choice={**tool, "name": "f"})
        assert raised.value.param is not None and raised.value.param.startswith("tool_choice")


def test_an_agents_input_is_a_chat_and_its_custom_calls_are_functions() -> None:
    warnings: list[str] = []
    body = decode(json.dumps(codex_agent()).encode())
    translation = chat_of_responses(body, ("enable_thinking",), warnings)
    found = chat_messages(translation.chat.messages)
    assert [message["role"] for message in found] == [
        *("system", "user", "user", "assistant", "tool", "assistant", "tool", "assistant", "user"),
    ]
    assert found[0]["content"].startswith("You write code.") and found[0]["content"].endswith("sandbox: none")
    assert found[3]["reasoning_content"] == "Look first." and found[3]["content"] == "I look."
    assert found[3]["tool_calls"][0]["function"] == {"name": "shell", "arguments": {"command": ["ls", "-a"]}}
    patch = found[5]["tool_calls"][0]
    assert patch["id"] == "call_2" and patch["function"] == {"name": "apply_patch", "arguments": {"input": PATCH}}
    assert "reasoning_content" not in found[5], "of another server"
    assert found[6] == {"role": "tool", "content": "Done!", "tool_call_id": "call_2"}
    tools = {tool.function.name: tool.function for tool in translation.chat.tools or ()}
    assert set(tools) == {"shell", "update_plan", "apply_patch", "note"}
    assert "begin_patch" in str(tools["apply_patch"].description)
    assert tools["apply_patch"].strict is tools["note"].strict is None and not translation.enforced
    assert warnings == [
        "input[9]: this server cannot run web_search_call, so the prompt leaves it out",
        "tools[2].format: calls need not follow the Lark grammar: only a regex is enforced",
        "tools[3], tools[4]: this server cannot run local_shell, web_search, so the prompt leaves it out",
    ]


def test_values_of_include_and_truncation_that_ask_for_more_are_refused() -> None:
    for fields, param in (
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "definition": "a"}}]},
            "tools[0].format.syntax",
        ),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
    ):
        with pytest.raises(InvalidRequest) as raised:
            messages("a", **fields)
        assert raised.value.param == param


def test_reasoning_that_comes_back_encoded_is_what_was_sent() -> None:
    for text in ("", "Hm.\n", "ü \U0001f600"):
        assert decoded_reasoning(encoded_reasoning(text)) == text
    for other in ("gAAAAABo", "chitu1.%%%", "chitu1.gA==", ""):
        assert decoded_reasoning(other) == ""
    parts = [MessageDelta(reasoning="Hm. "), MessageDelta(reasoning="So."), MessageDelta("a")]
    form = ResponsesFormat(HEAD, ECHO._replace(encodes_reasoning=True))
    data = form.opening(0) + b"".join(form.delta(0, Delta(part, [])) for part in parts)
    events = events_of(data + form.last(0, Delta("", [], reason="stop")) + form.usage(USAGE))
    item = events[-1]["response"]["output"][0]
    sent_back = {name: value for name, value in item.items() if name not in ("content", "status")}
    turns = [
        {"role": "user", "content": "?"},
        sent_back,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert messages(turns)[1] == {"role": "assistant", "content": "a", "reasoning_content": "Hm. So."}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n\\"a\\""}', '*** Begin\n"a"'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 1}', '{"input": 1}'),
        ("{}", "{}"),
    ],
)
def test_a_custom_call_has_its_text_whole_and_streamed(arguments: str, text: str) -> None:
    calls = (CallDelta(0, arguments, "call_1", "apply_patch"), CallDelta(1, '{"a": 1}', "call_2", "f"))
    whole = ResponsesFormat(HEAD, ECHO._replace(tools=CUSTOM))
    answer = json.loads(b"".join(whole.full([FinishedChoice(MessageDelta("b", "", calls), "tool_calls", None)], USAGE)))
    streamed = ResponsesFormat(HEAD, ECHO._replace(tools=CUSTOM))
    data = streamed.opening(0) + streamed.delta(0, Delta(MessageDelta("b", "", calls), []))
    events = events_of(data + streamed.last(0, Delta("", [], reason="tool_calls")) + streamed.usage(USAGE))
    assert events[-1]["response"]["output"] == answer["output"]
    custom, function = answer["output"][1:]
    assert (custom["type"], custom["name"], custom["call_id"], custom["input"]) == (
        *("custom_tool_call", "apply_patch", "call_1", text),
    )
    assert (function["type"], function["arguments"]) == ("function_call", '{"a": 1}')
    told = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [event.get("delta", event.get("input")) for event in told] == [text, text]
    assert all(event["item_id"] == custom["id"] and event["output_index"] == 1 for event in told)


@pytest.mark.parametrize("size", [1, 3, 999])
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_a_whole_answer_has_text_and_calls_in_the_order_of_its_stream(api: str, size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"<think>Hm.</think>A.\n{call}\nB.\n{call}\n{call}"
    parser = MessagePlan(MARKS[0], False, True, HermesParser, ("f",), True).parser()
    parts = [*[parser.push(text[at : at + size]) for at in range(0, len(text), size)], parser.finish()]
    made = {"messages": lambda: MessagesFormat(HEAD, False), "responses": form}[api]
    whole = json.loads(b"".join(made().full([FinishedChoice(joined(parts), "tool_calls", None)], USAGE)))
    streamed = made()
    data = streamed.opening(0) + b"".join(streamed.delta(0, Delta(part, [])) for part in parts)
    events = events_of(data + streamed.last(0, Delta("", [], reason="tool_calls")) + streamed.usage(USAGE))
    name, begun, field = {
        "messages": ("content", "content_block_start", "content_block"),
        "responses": ("output", "response.output_item.added", "item"),
    }[api]
    kinds = [item["type"] for item in whole[name]]
    told = {"thinking": "reasoning", "text": "message", "tool_use": "function_call"}
    assert [told.get(kind, kind) for kind in kinds] == [
        *("reasoning", "message", "function_call", "message", "function_call", "function_call")
    ]
    assert [event[field]["type"] for event in events if event["type"] == begun] == kinds


def test_errors_of_the_chat_have_the_names_of_this_route() -> None:
    tools = [{"type": "function", "name": name} for name in "ab"]
    body = decode(json.dumps({"input": "a", "tools": tools}).encode())
    names = chat_of_responses(body, (), []).names
    for name, own in (
        ("messages", "input"),
        ("messages[3].content", "input"),
        ("tools[1].function.name", "tools[1].name"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("tool_choice", "tool_choice"),
        (None, None),
    ):
        error = names.renamed(InvalidRequest(f"{name} is wrong", name))
        assert (error.param, error.message) == (own, f"{own} is wrong")


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, line = event.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def form() -> ResponsesFormat:
    return ResponsesFormat(HEAD, ECHO)


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
    data = streamed.opening(0) + b"".join(streamed.delta(0, Delta(part, [])) for part in placed)
    data += streamed.last(0, Delta("", [], reason=reason)) + streamed.usage(USAGE) + streamed.done
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
    answer = json.loads(b"".join(form().full([FinishedChoice(joined(placed), reason, None)], USAGE)))
    assert answer["status"] == status and answer["usage"] == last["usage"]
    assert set(answer) == set(last) and answer["output"] == last["output"]


def test_an_error_in_the_middle_is_the_last_event() -> None:
    broken = form()
    broken.opening(0)
    broken.delta(0, Delta("ab", []))
    *_, closing, event = events_of(broken.error(RequestCancelled("aborted")))
    assert closing["item"]["content"][0]["text"] == "ab" and closing["item"]["status"] == "incomplete"
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "cancelled", "message": "aborted"}


# ----------------------------------------------------------------------------------------------------------------------
# Who may abort a request: only its tenant, by the id of the request or of the answer.


def test_a_request_is_aborted_once_and_by_its_tenant_alone() -> None:
    running = RunningAnswers(lambda generation: None, [each.id_prefix for each in ENDPOINTS.values()])
    answer = RunningAnswer("own", 0.0)
    running.add("r1", answer)
    answer_id = AnswerHead("r1", 0, "m", ENDPOINTS["chat"].id_prefix).id
    assert [running.abort(name, who) for name, who in (("r1", "other"), ("r2", "own"))] == [0, 0]
    assert not answer.is_aborted
    assert [running.abort(name, "own") for name in (answer_id, "r1")] == [1, 0]
    assert answer.is_aborted
    running.remove("r1", answer)
    assert (running.abort("r1", "own"), len(running)) == (0, 0)
