#!/usr/bin/env python3
"""The official OpenAI client with chitu: a completion, a chat answer, and the same answer streamed."""

import os

from openai import OpenAI

PROMPT = "The velvet jaguar guards room 8090. The green bridge has number 6200. "
QUESTION = "What number does the green bridge have?"

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:21003/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

completion = client.completions.create(
    model=model, prompt=f"{PROMPT}Question: {QUESTION} Answer:", max_tokens=24, temperature=0, stop=["\n"]
)
print("completion:", completion.choices[0].text.strip())

answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": PROMPT + QUESTION}], max_tokens=48, temperature=0
)
print("chat:", answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": PROMPT + QUESTION}],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
print("streamed: ", end="")
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} prompt and {chunk.usage.completion_tokens} output tokens")
