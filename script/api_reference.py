"""Writes docs/api.md from the table of fields: `python script/api_reference.py`; a test fails where it is old."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from chitu.http.request_fields import (
    ABORT,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    FIELDS,
    NO_EFFECT,
    REFUSED,
    RESPONSES,
    SERVED,
    TOKENIZE,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# HTTP API: every field

Made from `chitu/http/request_fields.py` by `script/api_reference.py`; edit there. `GET /openapi.json` has the same
with types. Every field of a body is served, refused, or in the short list of those without effect. `null` is the same
as leaving a field out.

A field that is none of these is refused (400, `param` names it and the message the nearest known one), in nested
objects, too. With `dp_config.router.unknown_fields: warn` it is left out instead, and the header `X-Chitu-Warning` of
the answer names the first one.

Where a chat's answer must follow a grammar (`response_format` and its like, calls of tools), a model that reasons does
so first and freely: the grammar begins behind the end of the reasoning. It holds from the first token on if the prompt
has the end of a reasoning already, with `enable_thinking: false`, with `separate_reasoning: false`, and in completions.
`usage` counts the tokens up to the end of the reasoning as `reasoning_tokens`.

Logprobs are those of the model itself: of the raw logits, before temperature, penalties, bias and filters. Every output
token has an entry, a hidden eos, too; `text_offset` counts characters of the choice's `text`.

How a model calls tools is told by the text of its chat template: as Hermes and Qwen do, as Llama 3 or as Mistral. With
others `tools` are refused. A call is one of a tool that was offered; whatever else the model writes is `content`, a
call whose JSON is broken, too. In a stream the arguments go out as they come, before it is known whether they are
whole. What stands between `<think>` or `[THINK]` and its end, where the template knows it, is `reasoning_content`.
"""
PARTS = (
    (SERVED, "Served", "meaning"),
    (NO_EFFECT, "Without effect", "why"),
    (REFUSED, "Refused", "taken nevertheless at; what to do instead"),
)
SHORT = {
    COMPLETIONS: "completions",
    CHAT: "chat",
    TOKENIZE: "tokenize",
    DETOKENIZE: "detokenize",
    RESPONSES: "responses",
    ABORT: "abort",
}


def main() -> None:
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_parts())


def _parts() -> Iterator[str]:
    for effect, title, meaning in PARTS:
        yield f"\n## {title}\n\n| field | routes | {meaning} |\n|---|---|---|\n"
        for field in FIELDS:
            if field.effect == effect:
                routes = ", ".join(SHORT[route] for route in field.routes)
                neutral = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)
                notes = "; ".join(text for text in (neutral, field.note) if text)
                yield f"| `{field.name}` | {routes} | {notes} |\n"


if __name__ == "__main__":
    main()
