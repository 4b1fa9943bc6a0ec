#!/usr/bin/env python3
"""The official OpenAI client with a model that sees: `python image.py FILE [QUESTION]`."""

import mimetypes
import os
import sys
from base64 import b64encode
from pathlib import Path

from openai import OpenAI

if len(sys.argv) < 2:
    sys.exit(__doc__)
file, question = Path(sys.argv[1]), " ".join(sys.argv[2:]) or "What is in this image?"
kind = mimetypes.guess_type(file)[0] or "image/png"
url = f"data:{kind};base64,{b64encode(file.read_bytes()).decode()}"

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:21003/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}],
        }
    ],
    max_tokens=256,
    temperature=0,
)
print(answer.choices[0].message.content)
if answer.usage:
    print(f"{answer.usage.prompt_tokens} prompt tokens, those of the image among them", file=sys.stderr)
