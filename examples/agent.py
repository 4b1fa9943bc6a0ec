#!/usr/bin/env python3
"""A loop of several turns: the program reads each answer, decides what to ask next, and keeps the conversation.

The task: what opens the room that the jaguar guards? The model looks up facts, the program compares them. Tools are not
served yet, so the program reads numbers out of the answers.
"""

import os
import re

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

FACTS = "The velvet jaguar guards room 6200. The silver lantern opens door 4821. The green bridge opens door 6200. "
THINGS = ("silver lantern", "green bridge")

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:21003/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    timeout=60,
    max_retries=2,
)
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = []


def ask(text: str) -> str:
    """One turn; the whole conversation is sent each time, as the API has no memory."""
    messages.append({"role": "user", "content": text})
    response = client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0)
    content = response.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": content})
    print(f"> {text}\n  {content}")
    return content


def number_in(text: str) -> int | None:
    found = re.search(r"\d+", text)
    return int(found.group()) if found else None


room = number_in(ask(FACTS + "Which room does the velvet jaguar guard?"))
for thing in THINGS:
    if room is not None and number_in(ask(f"Which door does the {thing} open?")) == room:
        print(f"the {thing} opens it, found with {len(messages) // 2} questions")
        break
else:
    raise SystemExit("nothing opens it")
