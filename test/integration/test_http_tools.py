"""Tools and reasoning with the official client: a real router whose model output is scripted.

The chat template is calls that are sent back, the last user's message and an eos (`support/scripted_template.py`), and
a fake worker repeats its prompt: so the answer is the message. The output of real templates is covered by
test_call_templates.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest, wait_until
from support.scripted_template import SCRIPT_WITH_CALLS

from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.tokenizer import Tokenizer
from chitu.tools.make_model import make_model

WEATHER = {"city": 'Zürich "ZH"', "days": [1, 2]}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(WEATHER, ensure_ascii=False)}}}\n</tool_call>'
SENT = json.dumps(WEATHER, ensure_ascii=False)
"""Text of that call's arguments in the prompt of the next turn."""
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterUnderTest]:
    folder = tmp_path_factory.mktemp("scripted")
    model = make_model(folder / "model", family="qwen3")
    (model / "chat_template.jinja").write_text(SCRIPT_WITH_CALLS, encoding="utf-8")
    tokenizer = Tokenizer.load(model)
    stop = str(tokenizer.encode(tokenizer.special_tokens["eos_token"], add_special_tokens=False)[0])
    with forked_router(folder, model, ("model.served_name=tiny",)) as router:
        router.start_worker("P0,D0", "--vocab-size", "100000", "--stop-token", stop, "--step-s", "0.001")
        yield router
    shutil.rmtree(model)


@pytest.fixture(scope="module")
def client(router: RouterUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **more}


def streamed(client: openai.OpenAI, body: dict[str, Any]) -> Any:
    """Return the final state of the client's own accumulator."""
    with client.chat.completions.stream(**body) as stream:
        stream.until_done()
        return stream.get_final_completion()


def test_calls_whole_and_streamed_are_what_the_model_wrote(client: openai.OpenAI) -> None:
    body = asking(f"<think>\nTwo calls.\n</think>\n\nLet me look.\n{CALL}\n{TIME}")
    whole = client.chat.completions.create(**body)
    final = streamed(client, body)
    for answer in (whole, final):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.reasoning_content == "Two calls."
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "time"]
        assert [json.loads(call.function.arguments) for call in calls] == [WEATHER, {}]
        assert len({call.id for call in calls}) == 2 and all(call.type == "function" for call in calls)
    assert final.choices[0].message.tool_calls[0].function.arguments == json.dumps(WEATHER, ensure_ascii=False)


async def test_the_async_client_sends_a_call_back_with_what_it_gave(router: RouterUnderTest) -> None:
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        first = await client.chat.completions.create(**asking(CALL))
        message = first.choices[0].message
        call = message.tool_calls[0]
        body = asking("")
        body["messages"] += [
            message,
            {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"},
            {"role": "user", "content": "It is cold."},
        ]
        answer = await client.chat.completions.create(**body)
    assert answer.choices[0].message.content == f"{SENT} It is cold." and answer.choices[0].finish_reason == "stop"


def test_every_token_is_counted_and_given_with_logprobs_and_stop_strings(client: openai.OpenAI) -> None:
    text = f"<think>\nHm.\n</think>\n\nA{CALL}STOP and more"
    body = asking(text, stop="STOP", logprobs=True, extra_body={"return_token_ids": True})
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    ids = [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "token_ids", None) or ()]
    entries = [entry for c in chunks for choice in c.choices if choice.logprobs for entry in choice.logprobs.content]
    assert ids == whole.choices[0].token_ids and len(ids) == len(entries) == whole.usage.completion_tokens
    assert entries == whole.choices[0].logprobs.content and chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "tool_calls"


def test_one_call_at_most_ends_the_answer_and_the_work(client: openai.OpenAI, router: RouterUnderTest) -> None:
    body = asking(CALL + TIME + "x" * 1000, parallel_tool_calls=False)
    whole = client.chat.completions.create(**body)
    final = streamed(client, body)
    for answer in (whole, final):
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
        assert answer.choices[0].finish_reason == "tool_calls"
    assert whole.usage.completion_tokens < 100
    wait_until(lambda: router.health()["in_flight"] == 0, 20, "nothing in flight")


def test_without_tools_or_with_the_choice_none_the_text_is_the_content(client: openai.OpenAI) -> None:
    for more in ({"tools": openai.omit}, {"tool_choice": "none"}):
        body = asking(CALL, **more)
        answer = client.chat.completions.create(**body).choices[0]
        assert answer.message.content == CALL and answer.message.tool_calls is None and answer.finish_reason == "stop"
        chunks = client.chat.completions.create(**body, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CALL


def test_broken_json_is_content_without_marks_and_no_error(client: openai.OpenAI) -> None:
    body = asking('<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>')
    for answer in (client.chat.completions.create(**body), streamed(client, body)):
        [choice] = answer.choices
        assert choice.message.content.strip() == '{"name": "weather", "arguments": {"city": }}'
        assert choice.finish_reason == "stop" and not choice.message.tool_calls


def test_a_raw_line_break_in_arguments_is_one_in_the_call(client: openai.OpenAI) -> None:
    body = asking('<tool_call>\n{"type": "function", "name": "time", "parameters": {"a": "x\ny"}}\n</tool_call>')
    for answer in (client.chat.completions.create(**body), streamed(client, body)):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": "x\ny"}


def test_reasoning_is_shown_left_in_or_left_out(client: openai.OpenAI) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    for extra, content, reasoning in (
        ({}, "Yes.", "Hm."),
        ({"include_reasoning": False}, "Yes.", None),
        ({"separate_reasoning": False}, text, None),
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "extra_body": extra}
        whole = client.chat.completions.create(**body)
        message = whole.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == (content, reasoning)
        chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        usage = whole.usage
        assert chunks[-1].usage == usage
        assert (usage.completion_tokens_details.reasoning_tokens > 0) is ("separate_reasoning" not in extra)
        assert usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == content
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (reasoning or "")
    for effort in ("none", "high"):
        client.chat.completions.create(**asking(text, reasoning_effort=effort))


def test_what_cannot_be_served_is_refused_by_name(client: openai.OpenAI) -> None:
    for more, param in (
        ({"tool_choice": "requird"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**{**asking(CALL), **more})
        assert raised.value.param == param


OWN_TOOLS: list[Any] = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]


def test_responses_whole_and_streamed_have_the_items_that_the_model_wrote(client: openai.OpenAI) -> None:
    text = f"<think>\nTwo calls.\n</think>\n\nLet me look.\n{CALL}\n{TIME}"
    body: dict[str, Any] = {"model": "tiny", "input": text, "tools": OWN_TOOLS, "instructions": "Be brief."}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for answer in (whole, final):
        assert answer.status == "completed" and answer.id.startswith("resp_") and answer.instructions == "Be brief."
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        reasoning, message, *calls = answer.output
        assert reasoning.content[0].text == "Two calls."
        assert answer.output_text == message.content[0].text == "Let me look."
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", WEATHER), ("time", {})]
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert final.usage == whole.usage
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.count(f"response.{kind}.delta") >= 2  # of calls: one each, when it is complete
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    streamed_text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert streamed_text == "Let me look."


def test_a_turn_of_responses_is_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input=f"<think>Hm.</think>{CALL}", tools=OWN_TOOLS)
    call = first.output[-1]
    turns: list[Any] = [
        {"role": "user", "content": "How is it?"},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "It is cold."}]},
    ]
    second = client.responses.create(model="tiny", input=turns, tools=OWN_TOOLS, store=False)
    assert second.output_text == f"{SENT} It is cold."


def test_a_function_of_a_namespace_is_called_by_its_name_and_a_screenshot_may_be_its_output(
    client: openai.OpenAI,
) -> None:
    group: Any = {"type": "namespace", "name": "mcp__sky", "description": "Skies.", "tools": OWN_TOOLS}
    asked: dict[str, Any] = {"model": "tiny", "tools": [group, *OWN_TOOLS]}
    text = CALL.replace('"weather"', '"mcp__sky__weather"')
    with client.responses.stream(**asked, input=text) as stream:
        final = stream.get_final_response()
    for answer in (client.responses.create(**asked, input=text), final):
        [call] = answer.output
        assert (call.type, call.namespace, call.name) == ("function_call", "mcp__sky", "weather")
        assert json.loads(call.arguments) == WEATHER
    image: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    told = {"type": "function_call_output", "call_id": call.call_id, "output": [image]}
    turns = [{"role": "user", "content": text}, *final.output, told, {"role": "user", "content": "So?"}]
    raw = client.responses.with_raw_response.create(**asked, input=turns)
    assert raw.parse().output_text and "input[2].output[0]: this server serves text" in raw.headers["x-chitu-warning"]


def test_a_response_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "one two three four five six", "max_output_tokens": 3}
    whole = client.responses.create(**body)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(**body, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 3


def test_what_responses_cannot_serve_is_refused_by_its_own_name(client: openai.OpenAI) -> None:
    sound = {"role": "user", "content": [{"type": "input_audio", "audio_url": "http://a/b"}]}
    for more, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": []}, "input"),
        ({"input": [sound]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "4"}]}, "input[0]"),
        ({"tools": [*OWN_TOOLS, OWN_TOOLS[0]]}, "tools[2].name"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(**{"model": "tiny", "input": "a", **more})
        assert raised.value.param == param


def test_a_response_that_is_aborted_fails_in_its_stream(client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model="tiny", input="x " * 400, stream=True, extra_headers={"X-Request-Id": "mine-3"}
    )
    first = next(iter(stream))
    abort = str(client.base_url).replace("/v1/", "/abort_request")
    assert httpx.post(abort, json={"rid": first.response.id}, timeout=60.0).json() == {"aborted": 1}
    last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.error.code == "cancelled"


@pytest.mark.parametrize("by_answers_id", [False, True])
def test_an_aborted_request_ends_for_its_client_and_the_cluster(
    client: openai.OpenAI, router: RouterUnderTest, by_answers_id: bool
) -> None:
    body = asking("x " * 400, n=2, extra_body={"ignore_eos": True}, extra_headers={"X-Request-Id": "mine-1"})
    stream = client.chat.completions.create(**body, stream=True)
    first = next(iter(stream))
    rid = first.id if by_answers_id else "mine-1"
    abort = str(client.base_url).replace("/v1/", "/abort_request")
    assert httpx.post(abort, json={"rid": "another"}, timeout=60.0).json() == {"aborted": 0}
    assert httpx.post(abort, json={"rid": rid}, timeout=60.0).json() == {"aborted": 1}
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert raised.value.code == "cancelled"
    assert httpx.post(abort, json={"rid": rid}, timeout=60.0).json() == {"aborted": 0}
    wait_until(lambda: router.health()["in_flight"] == 0, 20, "nothing in flight")


def test_an_aborted_request_that_is_not_streamed_gets_an_error(client: openai.OpenAI, router: RouterUnderTest) -> None:
    body = asking("x " * 400, extra_body={"ignore_eos": True}, extra_headers={"X-Request-Id": "mine-2"})
    abort = str(client.base_url).replace("/v1/", "/abort_request")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.chat.completions.create, **body)
        wait_until(
            lambda: httpx.post(abort, json={"rid": "mine-2"}, timeout=60.0).json()["aborted"] == 1,
            20,
            "the request to run",
        )
        with pytest.raises(openai.APIStatusError) as raised:
            answer.result()
    assert raised.value.status_code == 499 and raised.value.code == "cancelled"
    too_large = httpx.post(abort, content=b'{"rid": "a"}' + b" " * LARGE_BODY_BYTES, timeout=60.0)
    assert too_large.status_code == 413
