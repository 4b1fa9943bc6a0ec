"""Use the official client, in another major version than the tests' own. Run by test_clients.py with the clients'
interpreter."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from pydantic import BaseModel

ASK = "What number does the red fox have?"
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": ASK}],
    "max_tokens": 40,
    "temperature": 0,
}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": ASK, "max_output_tokens": 40, "temperature": 0}


class Paint(BaseModel):
    color: Literal["red", "blue"]


async def ask_async() -> str:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        return (await client.chat.completions.create(**CHAT)).choices[0].message.content


PATCH_TOOL: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Paints.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "(red|blue)\\n"},
}
PAINT_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "paint",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}},
        "required": ["color"],
        "additionalProperties": False,
    },
}


def use_tools(client: openai.OpenAI) -> None:
    """Make four calls in a loop as agents do: a function, one of a namespace, a custom tool with a grammar, and any."""
    mixing = {
        "type": "namespace",
        "name": "mcp__wall",
        "description": "Walls.",
        "tools": [{**PAINT_TOOL, "name": "mix"}],
    }
    tools = [PAINT_TOOL, {"type": "web_search"}, PATCH_TOOL, {"type": "local_shell"}, mixing]
    agents = {"store": False, "include": ["reasoning.encrypted_content"], "truncation": "auto", "tools": tools}
    names = [{"type": "function", "name": "paint"}, {"type": "function", "name": "mix"}]
    choices: list[Any] = [*names, {"type": "custom", "name": "patch"}, "required"]
    for streams in (False, True):
        items: list[Any] = [{"role": "user", "content": ASK}]
        for choice in choices:
            asked = {**RESPONSE, **agents, "input": items, "tool_choice": choice, "parallel_tool_calls": False}
            asked["max_output_tokens"] = 120
            if streams:
                *_, last = client.responses.create(**asked, stream=True)
                answer = last.response
            else:
                answer = client.responses.create(**asked)
            call = answer.output[-1]
            if call.type == "custom_tool_call":
                assert call.name == "patch" and call.input in ("red\n", "blue\n"), call
            else:
                assert call.type == "function_call" and "color" in call.arguments, call
                assert (call.name, getattr(call, "namespace", None)) in (("paint", None), ("mix", "mcp__wall")), call
                assert choice == "required" or call.name == choice["name"], call
            output = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "done"}
            items += [*answer.output, output]
        assert client.responses.create(**{**RESPONSE, **agents, "input": items, "tool_choice": "none"}).output_text


def use_prediction(client: openai.OpenAI, text: str) -> None:
    parts = [{"type": "text", "text": text}]
    for content in (text, parts):
        predicted = {**CHAT, "prediction": {"type": "content", "content": content}}
        answer = client.chat.completions.create(**predicted)
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
        assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0
    *_, last = client.chat.completions.create(**predicted, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
    answer = client.chat.completions.create(**predicted, extra_body={"speculation": "off"})
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0


def main() -> None:
    client = openai.OpenAI(max_retries=0)
    text = client.chat.completions.create(**CHAT).choices[0].message.content
    chunks = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    assert text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) != ""
    assert asyncio.run(ask_async()) == text
    use_prediction(client, text)

    tools = [openai.pydantic_function_tool(Paint)]
    asked = {**CHAT, "tools": tools, "max_tokens": 99}
    message = (
        client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0].message
    )
    [call] = message.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    assert client.chat.completions.create(**{**asked, "messages": [*CHAT["messages"], message, told]}).usage
    parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    assert parse(**{**CHAT, "max_tokens": 99}, response_format=Paint).choices[0].message.parsed.color

    assert client.responses.create(**RESPONSE).output_text == text
    events = list(client.responses.create(**RESPONSE, stream=True))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == text
    use_tools(client)
    made = client.completions.create(
        model="tiny", prompt=["The fox", "A bear"], max_tokens=4, n=2, logprobs=1, echo=True
    )
    assert len(made.choices) == 4 and made.choices[0].logprobs.token_logprobs[0] is None
    print("served")


main()
