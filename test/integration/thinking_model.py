"""A small random checkpoint whose chat template supports reasoning and tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from chitu.tools.make_model import make_model

CLOSE = "</think>"
BIAS = 5.0
"""Logit bias: with this much for its end token, a thought ends within some ten tokens; without, never."""
TEMPLATE = """{#- <tool_call> {"name": ..., "arguments": ...} </tool_call> <think> </think> -#}
{%- if tools %}{{ tools }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}
{%- if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}"""
"""Chat template with Hermes tool calls; an answer begins with reasoning unless the request disables it."""


def make_thinking_model(folder: Path, **sizes: Any) -> Path:
    """Write the model. `CLOSE` is an added token, as of Qwen3. `sizes` are those of `make_model`."""
    folder = make_model(folder, family="qwen3", **sizes)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merges, vocab = described["model"]["merges"], described["model"]["vocab"]
    last = len(vocab) + len({token["id"] for token in described["added_tokens"]} - set(vocab.values())) - 1
    assert vocab.pop("".join(merges.pop())) == last  # the added token replaces the last one
    tokenizer = Backend.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(CLOSE, special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
