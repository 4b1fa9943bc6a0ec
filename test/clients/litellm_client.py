"""Use litellm as its manual does. Run by test_clients.py with the clients' interpreter."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import litellm
from pydantic import BaseModel

ASK: dict[str, Any] = {
    "model": "openai/tiny",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "messages": [{"role": "user", "content": "What number does the red fox have?"}],
    "max_tokens": 400,
    "temperature": 0,
    "num_retries": 0,
}
PARAMETERS = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2, 3]}},
    "required": ["color", "coats"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": PARAMETERS}}]


class Fact(BaseModel):
    animal: Literal["fox", "bear"]


def use_anthropics_route(text: str) -> None:
    """Ask through `/v1/messages`: as litellm's own API, and as the Messages API that litellm offers."""
    ask = {**ASK, "model": "anthropic/tiny", "api_base": ASK["api_base"].removesuffix("/v1"), "api_key": "none"}
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == text and whole.usage.completion_tokens > 0, whole
    chunks = litellm.completion(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    forced = {"type": "function", "function": {"name": "paint"}}
    messages: list[Any] = list(ask["messages"])
    for _ in range(3):
        answer = litellm.completion(**{**ask, "messages": messages}, tools=TOOLS, tool_choice=forced)
        message = answer.choices[0].message
        [call, *_] = message.tool_calls
        assert call.function.name == "paint" and set(json.loads(call.function.arguments)) == {"color", "coats"}, answer
        done = [{"role": "tool", "tool_call_id": each.id, "content": "done"} for each in message.tool_calls]
        messages += [message.model_dump(), *done]
    own = asyncio.run(litellm.anthropic.messages.acreate(**ask))
    assert [block["text"] for block in own["content"]] == [text], own


async def ask_async() -> tuple[str, str]:
    whole = await litellm.acompletion(**ASK)
    parts = [chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**ASK, stream=True)]
    return whole.choices[0].message.content, "".join(parts)


def main() -> None:
    whole = litellm.completion(**ASK)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0, whole
    chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK["messages"])
    assert rebuilt.choices[0].message.content == text, rebuilt
    assert rebuilt.usage.total_tokens == whole.usage.total_tokens, (rebuilt.usage, whole.usage)
    assert asyncio.run(ask_async()) == (text, text)

    use_anthropics_route(text)
    forced = {"type": "function", "function": {"name": "paint"}}
    for choice in (forced, "required"):
        answer = litellm.completion(**ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        args = json.loads(call.function.arguments)
        assert call.function.name == "paint" and set(args) == {"color", "coats"}, answer
        chunks = list(
            litellm.completion(**ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=True)
        )
        [again] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert json.loads(again.function.arguments) == args, (again, call)
    told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [*ASK["messages"], answer.choices[0].message, told]
    assert litellm.completion(**{**ASK, "messages": turns}, tools=TOOLS).choices[0].finish_reason

    Fact.model_validate_json(litellm.completion(**ASK, response_format=Fact).choices[0].message.content)
    response = {name: ASK[name] for name in ("model", "api_base", "temperature")} | {
        "input": ASK["messages"][0]["content"]
    }
    assert litellm.responses(**response).output[0].content[0].text == text
    events = list(litellm.responses(**response, stream=True))
    assert "".join(getattr(e, "delta", "") for e in events if e.type == "response.output_text.delta") == text, events

    prompts = litellm.text_completion(
        model="text-completion-openai/tiny", prompt=["The fox", "A bear"], max_tokens=4, api_base=ASK["api_base"]
    )
    assert len(prompts.choices) == 2, prompts
    print("served")


main()
