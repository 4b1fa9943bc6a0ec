"""Use instructor in the modes that its manual names for OpenAI. Run by test_clients.py with the clients'
interpreter."""

from __future__ import annotations

import asyncio
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Wall(BaseModel):
    """A wall that was painted."""

    model_config = ConfigDict(extra="forbid")  # otherwise a model with so few words adds properties of its own

    color: Literal["red", "blue"]
    coats: Literal[1, 2, 3]


ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What color has the wall?"}],
    "temperature": 0,
    "max_tokens": 400,
    "max_retries": 1,
    "response_model": Wall,
}


async def ask_async(mode: instructor.Mode) -> Wall:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        return await instructor.from_openai(client, mode=mode).chat.completions.create(**ASK)


def main() -> None:
    with openai.OpenAI(max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            wall, raw = client.chat.completions.create_with_completion(**ASK)
            assert isinstance(wall, Wall) and raw.usage.completion_tokens > 0, (mode, raw)
            assert asyncio.run(ask_async(mode)).model_dump() == wall.model_dump(), mode
            *_, last = client.chat.completions.create_partial(**ASK)
            assert last.model_dump() == wall.model_dump(), (mode, last)
    print("served")


main()
