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


def main() -> None:
    client = openai.OpenAI(max_retries=0)
    text = client.chat.completions.create(**CHAT).choices[0].message.content
    chunks = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    assert text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) != ""
    assert asyncio.run(ask_async()) == text

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
    made = client.completions.create(
        model="tiny", prompt=["The fox", "A bear"], max_tokens=4, n=2, logprobs=1, echo=True
    )
    assert len(made.choices) == 4 and made.choices[0].logprobs.token_logprobs[0] is None
    print("served")


main()
