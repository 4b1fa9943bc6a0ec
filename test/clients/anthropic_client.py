"""Use the official client of Anthropic's API. Run by test_clients.py with the clients' interpreter."""

from __future__ import annotations

import asyncio
import os
import typing
from typing import Any, Literal

import anthropic
from anthropic import types
from anthropic.types import beta
from anthropic.types import tool_result_block_param as results
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params
from pydantic import BaseModel

from chitu.http.dialects.anthropic.bodies import COUNT_TOKENS, MESSAGES
from chitu.http.table import BODIES

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
ASK = "What number does the red fox have?"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "max_tokens": 40}
# The client's own types no longer have it, and older ones send it.
GREEDY = {"extra_body": {"temperature": 0}}
PAINT: dict[str, Any] = {
    "name": "paint",
    "description": "Paints a wall.",
    "input_schema": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2, 3]}},
        "required": ["color", "coats"],
        "additionalProperties": False,
    },
    "strict": True,
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
KINDS = {
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
}
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""What the client sends as headers."""


class Fact(BaseModel):
    animal: Literal["fox", "bear"]


def names_of(kind: Any) -> set[str]:
    return set(typing.get_type_hints(kind))


def check_fields() -> None:
    """Every field that the client knows is in the table of fields."""
    for route, kind in (
        (MESSAGES, beta_params.MessageCreateParamsBase),
        (COUNT_TOKENS, beta_count_params.MessageCountTokensParams),
    ):
        table = BODIES.fields[route]
        unknown = names_of(kind) - HEADERS - set(table)
        assert not unknown, (route, unknown)
        nested = [
            ("tools[].", types.ToolParam),
            ("tools[].", types.WebSearchTool20250305Param),
            ("tools[].", types.ToolTextEditor20250728Param),
            ("tools[].", types.ToolBash20250124Param),
            ("tools[].", beta.BetaMCPToolsetParam),
            ("thinking.", types.ThinkingConfigEnabledParam),
            ("output_config.", types.OutputConfigParam),
            *(("messages[].content[].", each) for each in typing.get_args(types.ContentBlockParam)),
            *(("messages[].content[].", each) for each in typing.get_args(beta.BetaContentBlockParam)[:-1]),
            *(("messages[].content[].content[].", each) for each in typing.get_args(results.Content)),
            *(("tool_choice.", each) for each in (types.ToolChoiceToolParam, types.ToolChoiceAnyParam)),
        ]
        for prefix, param in nested:
            unknown = {prefix + name for name in names_of(param)} - set(table)
            assert not unknown, (route, unknown)


async def ask_async() -> tuple[types.Message, types.Message]:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**BODY, **GREEDY)
        async with client.messages.stream(**BODY, **GREEDY) as stream:
            return whole, await stream.get_final_message()


def main() -> None:
    check_fields()
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    whole = client.messages.create(**BODY, **GREEDY)
    [block] = whole.content
    assert block.type == "text" and block.text and whole.id.startswith("msg_") and whole.usage.output_tokens > 0, whole
    with client.messages.stream(**BODY, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    raw = list(client.messages.create(**BODY, **GREEDY, stream=True))
    assert {event.type for event in raw} == KINDS and raw[0].type == "message_start", raw
    for other in (final, *asyncio.run(ask_async())):
        assert [b.text for b in other.content] == [block.text] == [text], (other, text)
        assert (other.stop_reason, other.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    count = client.messages.count_tokens(model="tiny", messages=BODY["messages"], tools=[PAINT], system="Be brief.")
    told = client.messages.create(**BODY, tools=[PAINT], system="Be brief.", **GREEDY).usage
    assert count.input_tokens == told.input_tokens + told.cache_read_input_tokens, (count, told)

    again = client.messages.create(**{**BODY, "max_tokens": 2}, **GREEDY)
    assert again.stop_reason == "max_tokens" and again.usage.output_tokens == 2, again
    first = block.text.split()[0]
    stopped = client.messages.create(**BODY, **GREEDY, stop_sequences=["@@", first])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", first), stopped
    long = [{"role": "user", "content": [{"type": "text", "text": ASK * 6, "cache_control": {"type": "ephemeral"}}]}]
    twice = [client.messages.create(**{**BODY, "messages": long}, **GREEDY).usage for _ in range(2)]
    assert twice[1].cache_read_input_tokens > 0, twice
    assert len({u.input_tokens + u.cache_read_input_tokens for u in twice}) == 1, twice

    for streams in (False, True):
        messages: list[Any] = list(BODY["messages"])
        for place in range(3):
            asked = {**BODY, "messages": messages, "max_tokens": 120, "tools": [PAINT], **GREEDY}
            asked["tool_choice"] = {"type": ("tool", "any")[place % 2], "disable_parallel_tool_use": True}
            if place % 2 == 0:
                asked["tool_choice"]["name"] = "paint"
            if streams:
                with client.messages.stream(**asked) as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**asked)
            call = answer.content[-1]
            assert answer.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "paint", answer
            assert set(call.input) == {"color", "coats"}, answer
            seen = [{"type": "text", "text": f"{call.input['coats']} coats"}, IMAGE]
            done = {"type": "tool_result", "tool_use_id": call.id, "content": seen}
            messages += [answer.to_param(), {"role": "user", "content": [{**done, "is_error": place == 1}]}]
        last = client.messages.create(**{**BODY, "messages": messages}, tools=[PAINT], tool_choice={"type": "none"})
        assert last.content and last.stop_reason in ("end_turn", "max_tokens"), last

    parsed = client.messages.parse(**{**BODY, "max_tokens": 99}, output_format=Fact)
    assert parsed.parsed_output.animal in ("fox", "bear"), parsed

    for error, more in (
        (anthropic.NotFoundError, {"model": "another"}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": ASK * 4000}]}),
    ):
        try:
            client.messages.create(**{**BODY, **more})
        except error as raised:
            assert raised.body["type"] == "error" and raised.request_id == raised.body["request_id"], raised.body
            assert more.get("model") or raised.message.find("prompt is too long") > 0, raised.message
        else:
            raise AssertionError(error)
    print("served")


main()
